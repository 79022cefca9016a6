"""The process that holds vLLM. Samples, scores and takes weights, one request after the other.

    python sidecar.py DESCRIPTOR PARENT

DESCRIPTOR is an inherited end of a socket pair, PARENT the process that started it. The first frame
says how to build the engine; `engines/sidecar/__init__.py` lists the requests. Of the
engine's files this one, start_checks.py and worker.py alone import torch or vllm; they run under the sidecar's own
interpreter.
"""

import contextlib
import ctypes
import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
# Seconds between two frames of progress. Ours.
_PROGRESS_S = 0.5


def _find_package() -> None:
    """Make this package importable from where this file lies, and nothing else from there.

    The interpreter may be another one than the trainer's: its own packages must win, ours need not
    be installed in it. Runs again in worker processes that vLLM spawns.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    if "dcmdp_jax" not in sys.modules:
        root = Path(here).parents[1]
        spec = importlib.util.spec_from_file_location(
            "dcmdp_jax", root / "__init__.py", submodule_search_locations=[str(root)]
        )
        package = importlib.util.module_from_spec(spec)
        sys.modules["dcmdp_jax"] = package
        spec.loader.exec_module(package)


_find_package()

import numpy as np  # noqa: E402

from dcmdp_jax.engines.sidecar import segments, wire  # noqa: E402
from dcmdp_jax.engines.sidecar.wire import Arrays, Fields  # noqa: E402
from dcmdp_jax.engines.vllm import start_checks  # noqa: E402

# "progress" and its arrays, any number of times; then the answer and its arrays.
_Frames = Generator[tuple[str, Arrays], None, None]


class Refused(ValueError):
    """A request that was refused before anything was computed."""


class EngineHost:
    """vLLM's engine in this process."""

    def __init__(self, fields: Fields) -> None:
        """Import vLLM and build the engine; weights are random until the first weight sync.

        Args:
            fields: fields of the start frame: engine (arguments of `vllm.LLM`), manifest, segments
                (descriptors; none where a weight sync brings the bytes), segment_bytes.
        """
        start_checks.check_torch_builds()
        import vllm

        # AMX must be granted before the engine is built: `worker` asks for it when it is imported.
        from dcmdp_jax.engines.vllm.worker import Routing

        self._segments = fields["segments"]
        self._size = fields["segment_bytes"]
        self._manifest = fields["manifest"]
        start_checks.check_received_tensors(
            fields["engine"]["model"], segments.parse(self._manifest, self._size)
        )
        engine = dict(fields["engine"])
        self._routing = Routing(engine)
        self.llm = vllm.LLM(
            **engine, worker_extension_cls="dcmdp_jax.engines.vllm.worker.WeightReceiver"
        )
        self.engine = self.llm.llm_engine
        self.version: int | None = None
        self._lora: Any = None
        self.vllm_version = vllm.__version__
        self._requests = 0
        self._asleep: set[str] = set()
        self._empty = False
        self._try_out()

    def _try_out(self) -> None:
        """Sample and score a token with random weights: an engine that can't run fails at once."""
        params = _params(max_tokens=1, seed=0, logprobs=0, prompt_logprobs=0, ignore_eos=True)
        self.engine.add_request("try", {"prompt_token_ids": [0, 0]}, params)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def sync_weights(self, fields: Fields) -> np.ndarray:
        """Load a segment in every worker; return checksums, [workers, tensors] uint64.

        Adapters take the place of those before, of which no request is left, as each is answered
        before the next.
        """
        from vllm.lora.request import LoRARequest

        version = fields["policy_version"]
        self.version = None
        self._wake_up("weights")
        source = fields["segment"]
        if not isinstance(source, np.ndarray):
            source = f"/proc/{os.getpid()}/fd/{self._segments[source]}"
        size, manifest, lora = fields.get("adapters", (self._size, self._manifest, None))
        sums = self.llm.collective_rpc(
            "dcmdp_receive", args=(source, size, manifest, version, lora)
        )
        self._lora = LoRARequest(str(version), version + 1, "synced, no file") if lora else None
        self._reset_prefix_cache()
        self.version = version
        return np.array(sums, np.uint64)

    def _reset_prefix_cache(self) -> None:
        """Forget blocks of other weights and calls: a call must not depend on those before it.

        vLLM goes through all blocks, a microsecond for 20 of them: not again where nothing ran
        since.
        """
        if not self._empty and self.llm.reset_prefix_cache() is not True:
            raise RuntimeError("the prefix cache could not be reset")
        self._empty = True

    def _sleep(self, level: int) -> None:
        """Free weights and cache before a request is answered; the weights of level 2 are gone."""
        if level:
            self.llm.sleep(level)
            self._asleep = {"weights", "kv_cache"}
            if level == 2:
                self.version = None

    def _wake_up(self, *tags: str) -> None:
        """Allocate the memory of these again. Weights are loaded before there is a cache."""
        for tag in tags:
            if tag in self._asleep:
                self.llm.wake_up(tags=[tag])
                self._asleep.remove(tag)

    def generate(self, fields: Fields, arrays: Arrays) -> _Frames:
        """Sample one completion, a row, for each seed; `prompt_of_row` says after which prompt.

        At temperature 0 vLLM ignores `top_p` and `top_k`. Progress brings the rows that have ended
        since; the answer is empty.
        """
        top = fields["top_logprobs"]
        prompts = _split(arrays["prompt_ids"], arrays["prompt_lengths"])
        row_prompts = [prompts[index] for index in arrays["prompt_of_row"].tolist()]
        params = [
            _params(**fields["sampling"], seed=seed, logprobs=top, ignore_eos=True)
            for seed in arrays["seeds"].tolist()
        ]
        with self._routing.recorded(self.llm):
            for ended in self._run(row_prompts, params):
                routed_experts = self._routing.arrays(self.llm, list(ended.values()))
                yield "progress", _completions(ended, top) | routed_experts
        self._sleep(fields["sleep_level"])
        yield "generated", {}

    def score(self, fields: Fields, arrays: Arrays) -> _Frames:
        """Log-probs of each row's tokens after its first `starts`, at a temperature; one array."""
        rows = _split(arrays["row_ids"], arrays["row_lengths"])
        outputs = yield from self._score_rows(rows, fields["temperature"])
        logprobs = []
        for index, start in enumerate(arrays["starts"].tolist()):
            row = rows[index]
            by_token = outputs[index].prompt_logprobs
            logprobs += [by_token[t][row[t]].logprob for t in range(start, len(row))]
        self._sleep(fields["sleep_level"])
        yield "scored", {"logprobs": np.array(logprobs, np.float32)}

    def _score_rows(
        self, rows: list[list[int]], temperature: float
    ) -> Generator[tuple[str, Arrays], None, dict[int, Any]]:
        """Run rows as prompts, with empty progress now and then; return vLLM's outputs by row."""
        params = _params(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs: dict[int, Any] = {}
        self.llm.collective_rpc("dcmdp_scale_logits", args=(temperature,))
        try:
            for ended in self._run(rows, [params] * len(rows)):
                outputs |= ended
                yield "progress", {}
        finally:
            self.llm.collective_rpc("dcmdp_scale_logits", args=(1.0,))
        return outputs

    def observe(self, fields: Fields, arrays: Arrays) -> _Frames:
        """Record what `modules` read and give while each row is scored.

        One row at a time, so that tokens come in the order of the rows. "NAME read" and "NAME
        gave", [tokens, width] float32, of the modules that the forward pass calls: none in a
        compiled one.
        """
        self.llm.collective_rpc("dcmdp_observe", args=(fields["modules"],))
        try:
            for row in _split(arrays["row_ids"], arrays["row_lengths"]):
                yield from self._score_rows([row], temperature=1.0)
        finally:
            # Each worker of several has the whole residual stream; the first has the logits.
            observed = self.llm.collective_rpc("dcmdp_observe", args=([],))[0]
        self._sleep(fields["sleep_level"])
        yield "observed", observed

    def _run(
        self, prompts: list[list[int]], params: list[Any]
    ) -> Generator[dict[int, Any], None, None]:
        """Run all requests; yield, twice a second and at the end, the outputs ended since, by row.

        Closed, it aborts the others. A refused one leaves none of the others behind.
        """
        if self.version is None:
            raise Refused("no weights were synced")
        self._wake_up("weights", "kv_cache")
        self._reset_prefix_cache()
        self._empty = False

        rows: dict[str, int] = {}
        try:
            for row, token_ids in enumerate(prompts):
                self._requests += 1
                request = str(self._requests)
                rows[request] = row
                self.engine.add_request(
                    request,
                    {"prompt_token_ids": token_ids},
                    params[row],
                    lora_request=self._lora,
                )
        # Of any class: nothing was computed yet, so the engine is as it was.
        except Exception as error:
            self.engine.abort_request(list(rows))
            raise Refused(f"request {len(rows) - 1}: {one_line(error)}") from error

        reported = time.monotonic()
        ended: dict[int, Any] = {}
        try:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.finished:
                        ended[rows.pop(output.request_id)] = output
                now = time.monotonic()
                if now - reported > _PROGRESS_S:
                    reported = now
                    yield ended
                    ended = {}
            yield ended
        finally:
            if rows:
                self.engine.abort_request(list(rows))


def _params(**options: Any) -> Any:
    """vLLM's parameters of a request that gives arrays of log-probs, once, when it has ended."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **options,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completions(outputs: dict[int, Any], top: int) -> Arrays:
    """The arrays of completions that have ended, by row; none where there are none.

    Of each token vLLM lists the sampled one first and then its `top` most probable, whichever the
    first is: `top` + 1.
    """
    if not outputs:
        return {}

    completions = [output.outputs[0] for output in outputs.values()]
    # [tokens, top + 1], all completions one after the other; without `top` the ids are not needed.
    logprobs = np.concatenate([np.asarray(c.logprobs.logprobs, np.float32) for c in completions])
    logprobs = logprobs.reshape(-1, top + 1)
    arrays = {
        "rows": np.array(list(outputs), np.int32),
        "token_ids": np.concatenate([np.asarray(c.token_ids, np.int32) for c in completions]),
        "logprobs": logprobs[:, 0].copy(),
        "lengths": np.array([len(c.token_ids) for c in completions], np.int32),
        "stopped": np.array([c.finish_reason == "stop" for c in completions], np.uint8),
    }
    if top:
        top_ids = np.concatenate([np.asarray(c.logprobs.token_ids, np.int32) for c in completions])
        top_ids = top_ids.reshape(-1, top + 1)
        cut = logprobs[:, 1:] == -np.inf
        arrays["top_ids"] = np.where(cut, -1, top_ids[:, 1:])
        arrays["top_logprobs"] = np.where(cut, 0, logprobs[:, 1:])
    return arrays


def _split(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [row.tolist() for row in np.split(ids, np.cumsum(lengths))[:-1]]


def one_line(error: BaseException) -> str:
    """Class and message of an error, its lines joined and cut at 600 characters."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(filter(None, lines))
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text[:600]}"


def clear_names() -> None:
    """Unlink what vLLM shares between processes, once the engine is built and all have it open.

    The rendezvous file, and with worker processes sockets, shared memory and semaphores: whatever
    ends this process, they end with the last one that has them open. And empty directories, which
    torch's compiler makes when it is imported, and again when it needs them.
    """
    for path in Path(os.environ["TMPDIR"]).iterdir():
        if not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()

    group = os.getpgrp()
    for entry in Path("/proc").iterdir():
        # Only this group's: another sidecar may be starting.
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(entry.name)) == group:
                for line in (entry / "maps").read_text(encoding="utf-8").splitlines():
                    _, shared, name = line.partition("/dev/shm/")
                    if shared and not name.endswith("(deleted)"):
                        Path(shared + name).unlink(missing_ok=True)


# Operation, header and arrays.
Answer = tuple[str, Fields, Arrays]


def answers(host: EngineHost, header: Fields, arrays: Arrays) -> Generator[Answer, None, None]:
    """Do what a request asks: yield progress, then the answer. Closing gives the request up."""
    op = header["op"]
    try:
        if op == "sync":
            sums = host.sync_weights(header)
            yield "synced", {"policy_version": host.version}, {"checksums": sums}
        elif op in ("generate", "score", "observe"):
            # Before the weights of an engine that falls asleep are gone.
            sampled_by = {"policy_version": host.version}
            with contextlib.closing(getattr(host, op)(header, arrays)) as frames:
                for answer, answer_arrays in frames:
                    yield answer, sampled_by, answer_arrays
        elif op == "cancel":
            # Its request was answered in the meantime.
            yield "cancelled", {}, {}
        elif op == "health":
            running = host.engine.get_num_unfinished_requests()
            yield "healthy", {"policy_version": host.version, "running": running}, {}
        elif op == "close":
            yield "closed", {}, {}
        else:
            raise Refused(f"{op!r} is no request")
    except Refused as error:
        yield "refused", {"message": str(error)}, {}


def _serve(connection: wire.Connection, host: EngineHost) -> None:
    """Answer frames until `close` or until the trainer is gone."""
    op = ""
    while op != "close":
        request = connection.receive()
        op = request.header["op"]
        with contextlib.closing(answers(host, request.header, request.arrays)) as frames:
            for answer, header, arrays in frames:
                connection.send(answer, header, arrays)
                if answer == "progress" and connection.wait(0):
                    # Else it is the end of the file, or a trainer that lost count.
                    if connection.receive(timeout_s=0.1).header["op"] != "cancel":
                        raise wire.WireError("a frame before the last one was answered")
                    frames.close()
                    connection.send("cancelled")


def main() -> None:
    """Build the engine that the first frame asks for, and serve."""
    descriptor = int(sys.argv[1])
    parent = int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # Ctrl-C is the trainer's to handle; it closes us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = wire.Connection(socket.socket(fileno=descriptor))
    status = 1
    try:
        header = connection.receive(timeout_s=60).header
        if header["op"] != "start" or header.get("protocol") != wire.PROTOCOL:
            raise ValueError(
                f"protocol {header.get('protocol')!r}, this process speaks {wire.PROTOCOL}"
            )
        host = EngineHost(header)
        clear_names()
        connection.send(
            "ready", {"protocol": wire.PROTOCOL, "version": host.vllm_version, "pid": os.getpid()}
        )
        _serve(connection, host)
        status = 0
    except wire.WireError as error:
        sys.stderr.write(f"vLLM process: {error}\n")
    except BaseException as error:  # reported to the trainer, then the process ends
        traceback.print_exc()
        with contextlib.suppress(OSError, ValueError):
            connection.send("failed", {"message": one_line(error)}, timeout_s=10)
    finally:
        sys.stderr.flush()
        # No tidying up by libraries: a broken engine may hang in it, and there is nothing to save.
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(status)


if __name__ == "__main__":
    main()
