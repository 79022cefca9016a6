"""Engines as actors of a Ray cluster: room for them, their calls, their starts."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node as _free
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dcmdp_jax.engines.ray_cluster import reach
from dcmdp_jax.engines.sidecar import process, wire
from dcmdp_jax.errors import ArgumentError, EngineError

logger = logging.getLogger(__name__)

_LOOK_S = 120.0
_FREE_S = 15.0
# The head is looked for so often, and lost when nobody answered for so long.
_HEAD_S = 5.0
_LOST_S = 20.0


@dataclasses.dataclass
class _Head:
    """When the cluster's head was last looked for, and since when it is silent; 0: it answers.

    In seconds of the monotonic clock.
    """

    checked_at: float = 0.0
    silent_since: float = 0.0


_head = _Head()


def check_head() -> None:
    """Look every few seconds whether the head of the cluster is there.

    Raises:
        EngineError: in one line, if it is gone.
    """
    now = time.monotonic()
    if now - _head.checked_at <= _HEAD_S:
        return

    _head.checked_at = now
    address = ray.get_runtime_context().gcs_address
    try:
        reach(address)
        _head.silent_since = 0.0
    except OSError as error:
        _head.silent_since = _head.silent_since or now
        if now - _head.silent_since > _LOST_S:
            raise EngineError(
                f"the head of the Ray cluster, {address}, is gone ({error})"
            ) from None


def _nodes() -> dict[str, dict[str, Any]]:
    """The living nodes, as Ray describes them, by address and start of the identifier."""
    return {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": node
        for node in ray.nodes()
        if node["Alive"]
    }


def check_room(replicas: int, name: str, amount: float, store_bytes: int = 0) -> None:
    """Refuse more replicas than the cluster has room for, and object stores that are too small.

    Room that another run is about to free is waited for.

    Args:
        replicas: their number.
        name, amount: resource of each replica, on one node.
        store_bytes: size that the object store of each node needs.

    Raises:
        UserError: in one line, saying which resource, or which size is needed.
    """
    amounts = {}
    for label, node in _nodes().items():
        amounts[label] = node["Resources"].get(name, 0)
        node_store = node["Resources"].get("object_store_memory", 0)
        if node_store < store_bytes:
            raise ArgumentError(
                "address",
                f"the object store of {label} has {node_store / 2**30:.2f} GiB, the weights need "
                f"{store_bytes / 2**30:.2f}: ray start --object-store-memory={store_bytes}",
            )

    request = f"got {replicas} with {amount:g} {name} each on one node, the Ray cluster"
    capacity = sum(int(count // amount) for count in amounts.values())
    if replicas > capacity:
        raise ArgumentError(
            "replicas", f"{request} has room for {capacity} ({name} by node: {amounts})"
        )

    def free_replicas() -> int:
        return sum(int(node.get(name, 0) // amount) for node in _free().values())

    deadline = time.monotonic() + _FREE_S
    while free_replicas() < replicas:
        if time.monotonic() > deadline:
            raise ArgumentError(
                "replicas",
                f"{request} has room for {free_replicas()}: another run holds the rest; wait for "
                "its end",
            )
        time.sleep(0.5)


def ask_nodes(call: Callable[[], Any], python: str, resources: set[str]) -> dict[str, Any]:
    """Run a function under an interpreter on each node that has one of these resources.

    Returns:
        What it returns, by node.

    Raises:
        UserError: if it does not answer on each.
    """
    answers = {}
    for name, node in _nodes().items():
        if node["Resources"].keys() & resources:
            task = ray.remote(call).options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                max_retries=0,
                **interpreter(python),
            )
            answers[name] = task.remote()
    try:
        values = ray.get(list(answers.values()), timeout=_LOOK_S)
    except ray.exceptions.RayError as error:
        raise ArgumentError(
            "python",
            f"{python or 'the Python of Ray'} does not answer on each of {', '.join(answers)} "
            f"({type(error).__name__}); it needs Ray {ray.__version__} and this Python's version",
        ) from None
    return dict(zip(answers, values, strict=True))


def interpreter(python: str, **variables: str) -> dict[str, Any]:
    """Ray's option for a Python of its own, if it is not empty, and for environment variables."""
    environment: dict[str, Any] = {"env_vars": variables}
    if python:
        environment["py_executable"] = python
    return {"runtime_env": environment}


class ActorConnection:
    """The calls of an actor as `wire.Connection`: a call for each request and further answer."""

    def __init__(self, actor: Any) -> None:
        """Take over an actor with the methods `ask` and `more`."""
        self._actor = actor
        self.call = None

    def send(
        self,
        op: str,
        header: Any = None,
        arrays: Any = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Ask; an answer that is still awaited is dropped."""
        self.call = self._actor.ask.remote({**(header or {}), "op": op}, dict(arrays or {}))

    def wait(self, seconds: float) -> bool:
        """Whether there is an answer within so long, or none will come."""
        check_head()
        return bool(ray.wait([self.call], timeout=seconds)[0])

    def receive(self, *, timeout_s: float | None = None) -> wire.Message:
        """Wait for one part of the answer, and ask for the next one if it is progress.

        Raises:
            TimeoutError, WireError: see `wire.Connection.receive`.
        """
        try:
            op, header, arrays = ray.get(self.call, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"waiting for an answer: nothing for {timeout_s:g} s") from None
        except ray.exceptions.RayError as error:
            raise wire.WireError(f"the actor is gone ({type(error).__name__})") from error
        if op == "progress":
            self.call = self._actor.more.remote()
        return wire.Message(
            header={**header, "op": op},
            arrays={name: array.copy() for name, array in arrays.items()},
        )


class ActorProcess(process.EngineProcess):
    """An engine in an actor, which Ray places on a node with room and which then builds the engine.

    Attributes:
        pid: its process on its node; 0 before it has a place.
    """

    def __init__(
        self,
        name: str,
        actor: type,
        options: Mapping[str, Any],
        start: Any,
        places: Path,
    ) -> None:
        """Ask Ray for a place, and the actor to build its engine; waits for neither.

        Args:
            name: engine name in errors and logs.
            actor: its class.
            options: Ray's, such as resources.
            start: fields of the request "start".
            places: a line is added with the node, once it is ready.

        Raises:
            EngineError: see `check_head`.
        """
        # Without the head the next call would block, and Ray end this process after a minute of it.
        _head.checked_at = 0.0
        check_head()
        while _head.silent_since:
            time.sleep(1.0)
            check_head()
        self._actor = (
            ray.remote(actor).options(**options, num_cpus=0, scheduling_strategy="SPREAD").remote()
        )
        super().__init__(name, "in Ray's directory on its node", ActorConnection(self._actor))
        self.pid = 0
        self._places = places
        self.connection.send("start", start)

    def ready(self) -> bool:
        """Whether its engine is there.

        Raises:
            SidecarBroken: if it will not be.
        """
        try:
            if not self.started and ray.wait([self.connection.call], timeout=0)[0]:
                ready = self._checked(self.connection.receive(), "start", "ready").header
                self.started = True
                self.pid = ready["pid"]
                self.node = ready["node"]
                with open(self._places, "a", encoding="utf-8") as places:
                    places.write(f"{self.node}\n")
                logger.info(
                    "%s %s ready on %s, process %d",
                    self.name,
                    ready["version"],
                    self.node,
                    self.pid,
                )
        except (EngineError, wire.WireError) as error:
            raise self._broken(f"start: {error}") from error
        return self.started

    def kill(self) -> None:
        """End the actor and what it started. Safe to call twice."""
        with contextlib.suppress(Exception):  # of a cluster that is gone
            ray.kill(self._actor)

    close = kill
