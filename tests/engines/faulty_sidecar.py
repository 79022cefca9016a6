"""A sidecar that misbehaves on purpose, for fault tests only: it speaks the wire's frames and knows
no vLLM.

The fault is named in the start frame's engine arguments.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np  # noqa: E402

from dcmdp_jax.engines.sidecar import segments, wire  # noqa: E402
from dcmdp_jax.engines.sidecar.segments import attach  # noqa: E402


def main() -> None:
    raw = socket.socket(fileno=int(sys.argv[1]))
    connection = wire.Connection(raw)
    start = connection.receive().header
    fault = start["engine"]["fault"]
    print(f"faulty sidecar: {fault}", flush=True)
    # Where the other side hangs up while this one writes: one line, not a traceback that fills the
    # log's last lines.
    sys.excepthook = lambda kind, error, _: print(f"{kind.__name__}: {error}", flush=True)
    while fault == "slow_start" and not Path("go").exists():
        time.sleep(0.05)
    connection.send("ready", {"version": "none"})
    while True:
        frame = connection.receive()
        header = frame.header
        arrays = frame.arrays
        if header["op"] == "sync":
            sums = _sums(start, header)
            if fault == "few_checksums":
                sums = sums[:, 1:]
            named = {} if fault == "no_checksums" else {"checksums": sums}
            connection.send("synced", {"policy_version": header["policy_version"]}, named)
            version = header["policy_version"]
        elif header["op"] == "generate":
            _generate(raw, connection, fault, version, arrays, header["sampling"]["max_tokens"])
        elif header["op"] == "cancel":
            connection.send("cancelled")
        else:
            connection.send("closed")
            return


def _sums(start: dict, header: dict) -> np.ndarray:
    size, manifest, _ = header.get("adapters", (start["segment_bytes"], start["manifest"], None))
    memory = attach(f"/proc/self/fd/{start['segments'][header['segment']]}", size)
    sums = [
        segments.checksum(memory[t.offset : t.offset + t.num_bytes], header["policy_version"])
        for t in segments.parse(manifest, size)
    ]
    if start["engine"]["fault"] == "bad_checksum":
        sums[0] ^= 1
    return np.array([sums], np.uint64)


def _generate(raw, connection, fault, version, arrays, limit) -> None:
    count = arrays["seeds"].size
    tokens = np.ones(count * limit, np.int32)
    logprobs = np.full(count * limit, -0.5, np.float32)
    once = Path("faulted")
    if fault == "garbage":
        raw.sendall(b"HTTP/1.1 500 Internal Server Error\r\n\r\n")
    elif fault == "huge":
        raw.sendall(wire._PREFIX.pack(b"DCM2", 1 << 40))
    elif fault == "wrong_answer":
        connection.send("pong")
        return
    elif fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "hangs":
        time.sleep(600)
    elif fault == "short":
        logprobs = logprobs[1:]
    elif fault == "outside":
        tokens[3] = 1 << 20
    elif fault == "stale_version":
        version = 6
    elif fault == "nan" or (fault == "nan_once" and not once.exists()):
        once.touch()
        logprobs[:] = np.nan
    if fault in ("garbage", "huge"):
        time.sleep(600)
    rows = np.arange(count, dtype=np.int32)
    fields = {"policy_version": version}
    if fault == "missing_row":
        rows = rows[1:]
    elif fault.startswith("progress"):
        # Rows 2 and 3 are the second prompt's.
        early = np.array([count if fault == "progress_of_no_row" else 2], np.int32)
        connection.send("progress", fields)
        connection.send("progress", fields, _completions(early, tokens, logprobs, limit))
        connection.send(
            "progress", fields, _completions(np.array([3], np.int32), tokens, logprobs, limit)
        )
        rows = rows if fault == "progress_twice" else rows[:2]
    if fault == "dies_once_midway" and not once.exists():
        once.touch()
        connection.send("progress", fields, _completions(rows[:2], tokens, logprobs, limit))
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    connection.send("generated", fields, _completions(rows, tokens, logprobs, limit))


def _completions(rows, tokens, logprobs, limit) -> dict[str, np.ndarray]:
    return {
        "rows": rows,
        "token_ids": tokens[: rows.size * limit],
        "logprobs": logprobs[: rows.size * limit],
        "lengths": np.full(rows.size, limit, np.int32),
        "stopped": np.zeros(rows.size, np.uint8),
    }


if __name__ == "__main__":
    main()
