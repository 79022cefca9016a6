"""Runs of several processes, one on each host, by JAX's multi-controller runtime.

Every process runs the same program. It has an engine of its own, samples its share of a step's
prompts and judges its own completions; then all have the completions of all (`Hosts.gather`) and
run the same compiled step on one global mesh. So nothing after sampling depends on how many
processes there are.

Whether they live is for JAX to see. Each sends signs of life to the coordination service of process
0 from a thread without Python, which a loaded machine does not hold up for long; without one for
`timeout_s` JAX aborts all others.
"""

import collections
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import msgpack
import numpy as np
from jax.experimental import multihost_utils

from dcmdp_jax.errors import ArgumentError, one_line
from dcmdp_jax.parallel.meeting import meet, split_address

_STOPPING = "dcmdp/stopping"
_FAILED = "dcmdp/failed"
_WAIT_MS = 10**11  # years: the end of the connection ends it
# After the failure of another process, the main thread has this long to leave by itself, with its
# own message.
_GRACE_S = 3.0


class HostMonitor:
    """Ends this process when another one has failed and waits for nobody.

    A process can't leave a collective operation that another one never enters, so a thread ends the
    process as a kill would; the run resumes from its newest checkpoint.

    Attributes:
        stopping: set once another process has asked all to meet early, or has failed.
    """

    def __init__(self, connection: Any, names: Sequence[str], timeout_s: float) -> None:
        """Start the thread.

        Args:
            connection: JAX's state of the connection to its coordination service.
            names: names of all processes.
            timeout_s: JAX's limit between two signs of life.
        """
        self._client = connection.client
        self._index = connection.process_id
        self._names = names
        self._timeout_s = timeout_s
        self._leaving = threading.Event()
        self.stopping = threading.Event()
        _explain_abort(connection, names, timeout_s)
        self._thread = threading.Thread(target=self._listen, name="host monitor", daemon=True)
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Ask the others to meet early."""
        self._tell(_STOPPING)

    def leave(self, failure: str | None) -> None:
        """Leave the end of the process to the main thread; tell the others of a failure."""
        self._leaving.set()
        if failure is not None:
            self._tell(_FAILED, failure)
            self._tell(_STOPPING)

    def close(self) -> None:
        """Wait for the thread, which the end of the connection has ended."""
        self._thread.join(self._timeout_s)

    def wait_for_verdict(self) -> None:
        """Wait as long as JAX takes to find that another process is dead; this one ends then."""
        print_line(
            "waiting to learn which process is gone", "an operation with the other processes failed"
        )
        self._leaving.wait(1.5 * self._timeout_s + _GRACE_S)

    def _tell(self, topic: str, message: str = "") -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
            self._client.key_value_set(topic, json.dumps([self._index, message]))

    def _listen(self) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the connection has ended
            self._client.blocking_key_value_get(_STOPPING, _WAIT_MS)
            self.stopping.set()
            index, message = json.loads(self._client.blocking_key_value_get(_FAILED, _WAIT_MS))
            if index == self._index or self._leaving.wait(_GRACE_S):
                return
            print_line("error", f"process {index} on {self._names[index]} failed: {message}")
            # All meet in JAX's shutdown: without it, the process that failed would wait for the
            # others.
            ended = threading.Thread(target=jax.distributed.shutdown, daemon=True)
            ended.start()
            ended.join(self._timeout_s)
            os._exit(1)


def print_line(kind: str, text: str) -> None:
    """Print one line on stderr, past Python's buffers: the process may end at once."""
    sys.stdout.flush()
    os.write(2, f"{kind}: {text}\n".encode())


def _explain_abort(connection: Any, names: Sequence[str], timeout_s: float) -> None:
    """Say which host is gone when JAX aborts this process.

    JAX (0.10) ends a process with abort() when its connection to process 0 breaks, or another
    process gives no sign of life, and no Python code runs then: its callback for the case can't
    take the error that it is called with. So the C library calls this handler. Only the lines that
    JAX has printed have the dead process's number.
    """
    index = connection.process_id
    coordinator = split_address(connection.coordinator_address)
    hosts_of_processes = ", ".join(f"{number} is on {name}" for number, name in enumerate(names))

    def explain(_: int) -> None:
        message = (
            f"a process has given no sign of life for {timeout_s:g} s (the hosts' timeout_s "
            f"raises it); JAX's lines above have its number: {hosts_of_processes}; rerun the same "
            "commands to resume"
        )
        try:
            if index:
                socket.create_connection(coordinator, timeout=2).close()
        except OSError:
            message = (
                f"lost the coordinator, process 0 on {names[0]}; rerun the same commands to resume"
            )
        print_line("error", message)
        if not index:
            time.sleep(2 * _GRACE_S)  # the others would take the end of the service for the cause
        os._exit(1)

    global _ABORT_HANDLER
    _ABORT_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(explain)
    ctypes.CDLL(None).signal(signal.SIGABRT, _ABORT_HANDLER)


_ABORT_HANDLER: Any = None  # what C calls must not be garbage-collected


AUTO = "auto"
_LONGEST_WAIT_MS = 86_400_000
_CHUNK_BYTES = 1 << 26
_SMALLEST_CHUNK_BYTES = 1 << 12


class Hosts:
    """The processes of a run, and which of them this is. This class: a run of one process.

    A method that is collective returns when every process has called it, in the same order.

    Attributes:
        index: index of this process.
        names: names of the hosts, by process.
    """

    index: int = 0
    names: tuple[str, ...] = ("this host",)

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self.names)

    @property
    def is_writer(self) -> bool:
        """Whether this process writes what a run has once: config, metrics, samples, report."""
        return self.index == 0

    def share(self, count: int) -> slice:
        """This process's part of `count` items: contiguous; sizes differ by one at most."""
        return slice(self.index * count // self.count, (self.index + 1) * count // self.count)

    def gather(self, value: Any, *types: type) -> list[Any]:
        """Collective: the values of all processes, by process.

        Args:
            value: a value of msgpack's types, NumPy arrays and dataclasses. A tuple arrives as a
                list.
            types: the dataclasses in it.
        """
        return [value]

    def largest(self, *values: float) -> list[float]:
        """Collective: each value's largest over the processes."""
        return list(values)

    def wait_for_all(self) -> None:
        """Collective, and nothing else."""
        self.largest(0)

    def interrupt_all(self) -> None:
        """Make the other processes leave their own work for the next collective method."""

    @property
    def interrupted(self) -> bool:
        """Whether another process asks for that."""
        return False

    def check_same(self, facts: Callable[[], Mapping[str, str]], remedy: str) -> None:
        """Collective: refuse facts that are not the same in every process.

        Args:
            facts: computes name -> value; called if there are several processes.
            remedy: end of the error.

        Raises:
            UserError: in one line, with the first name whose value differs, both values and both
                hosts.
        """


ONE_PROCESS = Hosts()


class SeveralHosts(Hosts):
    """A run of several processes. Made by `join_hosts`."""

    def __init__(self, timeout_s: float) -> None:
        # What Orbax builds on too; jax (0.10) has no public name for it.
        from jax._src.distributed import global_state

        self._client = global_state.client
        self._compared = 0
        self.index = global_state.process_id
        count = global_state.num_processes
        self._set("name", socket.gethostname())
        self.names = tuple(self._get("name", index) for index in range(count))
        self._monitor = HostMonitor(global_state, self.names, timeout_s)

    def gather(self, value: Any, *types: type) -> list[Any]:
        payload = _encode(value)
        sizes = self._exchange(np.array([payload.size], np.int64)).view(np.int64)[:, 0]
        longest = int(sizes.max())
        # Few sizes, so that few programs are compiled.
        chunk = min(max(_SMALLEST_CHUNK_BYTES, 1 << (longest - 1).bit_length()), _CHUNK_BYTES)
        padded = np.zeros(-(-longest // chunk) * chunk, np.uint8)
        padded[: payload.size] = payload
        received = np.concatenate(
            [self._exchange(row) for row in padded.reshape(-1, chunk)], axis=1
        )
        return [_decode(row[:size], types) for row, size in zip(received, sizes, strict=True)]

    def largest(self, *values: float) -> list[float]:
        return np.max(self.gather(list(map(float, values))), axis=0).tolist()

    def interrupt_all(self) -> None:
        self._monitor.ask_to_stop()

    @property
    def interrupted(self) -> bool:
        return self._monitor.stopping.is_set()

    def check_same(self, facts: Callable[[], Mapping[str, str]], remedy: str) -> None:
        self._compared += 1
        topic = f"facts{self._compared}"
        self._set(topic, json.dumps(dict(facts())))
        first = json.loads(self._get(topic, 0))
        for index in range(1, self.count):
            other = json.loads(self._get(topic, index))
            for name in sorted(first.keys() | other.keys()):
                if first.get(name) != other.get(name):
                    raise ArgumentError(
                        name,
                        f"process {index} on {self.names[index]} has {other.get(name)}, process 0 "
                        f"on {self.names[0]} has {first.get(name)}; {remedy}",
                    )

    @contextlib.contextmanager
    def starting_programs_together(self) -> Iterator[None]:
        """Wait for the other processes between a program's compilation and its first call.

        One compiles for minutes what another reads from its cache. On CPUs gloo (jaxlib 0.10)
        connects the devices of a group at the first operation among them, and gives up when the
        others do not come within half a minute. Main threads wait, which compile in one order; for
        what another thread compiles see `StepPrograms.compile_ahead`.
        """
        from jax._src import compiler  # what pxla calls; jax (0.10 to 0.12) has no public hook

        compile_program = compiler.compile_or_get_cached
        compiled = collections.Counter[tuple[int, ...]]()

        def compile_together(
            backend: Any,
            computation: Any,
            devices: np.ndarray,
            *arguments: Any,
            **options: Any,
        ) -> Any:
            program = compile_program(backend, computation, devices, *arguments, **options)
            processes = tuple(sorted({device.process_index for device in devices.flat}))
            if len(processes) > 1 and threading.current_thread() is threading.main_thread():
                compiled[processes] += 1
                name = f"dcmdp/compiled/{'-'.join(map(str, processes))}/{compiled[processes]}"
                self._client.wait_at_barrier(name, _LONGEST_WAIT_MS, list(processes))
            return program

        compiler.compile_or_get_cached = compile_together
        try:
            yield
        finally:
            compiler.compile_or_get_cached = compile_program

    def leave(self, error: BaseException | None) -> None:
        """Collective: end the connection, or tell the others why this process ends.

        Args:
            error: why this process ends; None at the end of a run.
        """
        if _is_of_a_collective(error):
            # If a process died, a collective with it fails before JAX finds out which one.
            self._monitor.wait_for_verdict()
        reason = None
        if error is not None:
            reason = one_line(error) or type(error).__name__
        self._monitor.leave(reason)
        try:
            jax.distributed.shutdown()
        finally:
            # After all processes have met in the shutdown. Python must not end while the monitor's
            # thread is in C++: that aborts the process.
            self._monitor.close()

    def _exchange(self, values: np.ndarray) -> np.ndarray:
        """Gather an array's bytes from every process: [processes, bytes] uint8.

        The array has one shape in all of them.
        """
        return multihost_utils.process_allgather(values.view(np.uint8))

    def _set(self, topic: str, value: str) -> None:
        self._client.key_value_set(f"dcmdp/{topic}/{self.index}", value)

    def _get(self, topic: str, index: int) -> str:
        return self._client.blocking_key_value_get(f"dcmdp/{topic}/{index}", _LONGEST_WAIT_MS)


# No key of a user's own begins like this.
_ARRAY = "\0array"
_TYPE = "\0type"
_TEXT = "surrogatepass"


def _encode(value: Any) -> np.ndarray:
    """[bytes] uint8, msgpack."""

    def encode(item: Any) -> Any:
        """Turn what msgpack has no type for into what it has."""
        if dataclasses.is_dataclass(item):
            return {_TYPE: type(item).__name__} | vars(item)
        if isinstance(item, np.ndarray):
            if item.dtype == object:
                content = item.reshape(-1).tolist()  # its bytes are addresses
            else:
                content = item.tobytes()
            return {_ARRAY: content, "dtype": item.dtype.name, "shape": item.shape}
        if isinstance(item, Mapping):
            return dict(item)
        return item.item()

    return np.frombuffer(msgpack.packb(value, default=encode, unicode_errors=_TEXT), np.uint8)


def _decode(data: np.ndarray, types: Sequence[type]) -> Any:
    """The value of `_encode`; `types` are the dataclasses in it."""
    types_by_name = {dataclass.__name__: dataclass for dataclass in types}

    def decode(item: dict[Any, Any]) -> Any:
        if _ARRAY in item:
            content = item[_ARRAY]
            dtype = np.dtype(item["dtype"])
            array = np.empty(math.prod(item["shape"]), dtype)
            if isinstance(content, bytes):
                content = np.frombuffer(content, dtype)
            array[:] = content
            return array.reshape(item["shape"])
        if _TYPE in item:
            return types_by_name[item.pop(_TYPE)](**item)
        return item

    return msgpack.unpackb(
        data.tobytes(),
        object_hook=decode,
        strict_map_key=False,
        unicode_errors=_TEXT,
    )


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Whether an error may come from a collective; JAX raises some as ValueError."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" not in str(error)
    return isinstance(error, ValueError) and "Gloo" in str(error)


def _slurm_devices(environment: Mapping[str, str]) -> Sequence[int] | None:
    """GPUs of a task that is alone on its node: all, where JAX (0.10) gives one.

    None leaves the choice to JAX.
    """
    tasks = environment.get("SLURM_NTASKS")
    nodes = environment.get("SLURM_STEP_NUM_NODES")
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    device_ids = environment.get("JAX_LOCAL_DEVICE_IDS")
    if device_ids:
        return [int(number) for number in device_ids.split(",")]
    if tasks is not None and tasks == nodes and gpus.isdecimal():
        return range(int(gpus))
    return None


def _find_out(timeout_s: int) -> tuple[str, int, int, Sequence[int] | None]:
    """Coordinator, processes, process and devices that SLURM, a TPU pod or Open MPI tells JAX.

    Raises:
        UserError: in one line, if there is nothing of the kind.
    """
    # jax (0.10 to 0.12) has no public name for what `initialize` calls.
    from jax._src.clusters import ClusterEnv

    # Coordinator, processes, process, local devices, method, timeout: None is to be detected.
    coordinator, processes, process, local_devices = (
        ClusterEnv.auto_detect_unset_distributed_params(
            None,
            None,
            None,
            _slurm_devices(os.environ),
            None,
            timeout_s,
        )
    )
    if coordinator is None or processes is None or process is None:
        raise ArgumentError(
            "coordinator",
            "got 'auto', and JAX finds no SLURM, TPU pod or Open MPI here; give host:port of "
            "process 0, `processes` and `process`",
        )
    return coordinator, processes, process, local_devices


@contextlib.contextmanager
def join_hosts(coordinator: str, processes: int, process: int, timeout_s: float) -> Iterator[Hosts]:
    """Join the processes of a run; call it before the first use of JAX's devices.

    Args:
        coordinator: "" for a run of one process, of which nothing of this is used; "address:port"
            of process 0; or "auto": all is what JAX finds out from SLURM, a TPU pod or Open MPI.
        processes, process: how many there are, and the number of this one; not used with "auto".
        timeout_s: a process that does not come for this long, or gives no sign of life, is dead,
            and all others end.

    Raises:
        UserError: in one line, if the processes don't find each other.
    """
    if not coordinator:
        yield ONE_PROCESS
        return

    local_devices = None
    if coordinator == AUTO:
        coordinator, processes, process, local_devices = _find_out(int(timeout_s))
    listen_at = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or coordinator
    meet(coordinator, processes, process, timeout_s, listen_at=listen_at)
    # JAX would catch SIGTERM itself, and only tell who asks it at every step.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            local_devices,
            # JAX asks no cluster by itself.
            cluster_detection_method="deactivate",
            initialization_timeout=max(60, int(timeout_s)),
            coordinator_bind_address=listen_at,
            heartbeat_timeout_seconds=math.ceil(timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise ArgumentError("coordinator", f"got {coordinator!r}: {one_line(error)}") from error

    hosts = SeveralHosts(timeout_s)
    try:
        with hosts.starting_programs_together():
            yield hosts
    except BaseException as error:
        hosts.leave(error)
        raise
    hosts.leave(None)
