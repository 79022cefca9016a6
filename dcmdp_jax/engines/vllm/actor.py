"""The Ray actor that holds vLLM, as the sidecar's process does: requests are calls, not frames.

Runs under the actor's own interpreter, which needs Ray, vLLM and msgpack, and imports neither JAX
nor the trainer.
"""

import os
import subprocess
import tempfile
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import ray

from dcmdp_jax.engines.sidecar import wire


class VllmActor:
    """One engine, for one call at a time: `ask`, then `more` while the answer is "progress"."""

    def __init__(self) -> None:
        """Take a place; the request "start" builds the engine."""
        self._host: Any = None
        self._answer: Generator[Any, None, None] | None = None

    def ask(self, header: wire.Fields, arrays: wire.Arrays) -> Any:
        """Give up what was asked before; return the first frame of the answer, or a failure."""
        if self._answer is not None:
            self._answer.close()
        self._answer = self._answers(header, arrays)
        return self.more()

    def more(self) -> Any:
        """The next frame of the answer."""
        try:
            return next(self._answer)
        except Exception as error:  # reported to the trainer, which ends this process
            traceback.print_exc()
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
            return "failed", {"message": message}, {}

    def _answers(self, header: wire.Fields, arrays: wire.Arrays) -> Generator[Any, None, None]:
        # Here: it takes this file's directory off the path, and `start` sets what vLLM reads when
        # it is imported.
        from dcmdp_jax.engines.vllm import sidecar

        if header["op"] == "start":
            yield self._start(header, sidecar)
            return
        if header["op"] == "sync":
            # The node's own shared memory, read only.
            header["segment"] = ray.get(header["segment"])
        yield from sidecar.answers(self._host, header, arrays)

    def _start(self, header: wire.Fields, sidecar: Any) -> Any:
        if header["protocol"] != wire.PROTOCOL:
            raise ValueError(
                f"protocol {header['protocol']!r}, the package here speaks {wire.PROTOCOL}"
            )

        directory = tempfile.mkdtemp(prefix="dcmdp-")
        # Nothing is left of it, whatever ends this process: not a child that Ray ends too.
        script = 'exec 3<&0; { read _ <&3; rm -r "$0"; } &'
        removal = subprocess.Popen(
            ["sh", "-c", script, directory],
            stdin=subprocess.PIPE,
            env={},
            start_new_session=True,
        )
        tempfile.tempdir = directory
        os.environ["TMPDIR"] = directory
        os.environ["VLLM_RPC_BASE_PATH"] = directory
        Path(directory, "config.json").write_text(header["config"], encoding="utf-8")

        header["engine"]["model"] = directory
        self._host = sidecar.EngineHost(header)
        sidecar.clear_names()
        removal.communicate()
        tempfile.tempdir = None
        del os.environ["TMPDIR"]
        node = f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:6]})"
        return "ready", {"version": self._host.vllm_version, "node": node, "pid": os.getpid()}, {}
