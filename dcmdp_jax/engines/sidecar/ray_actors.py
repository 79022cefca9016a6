"""Engines as actors of a Ray cluster: room for them, their calls, their starts."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node as _free
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dcmdp_jax.engines.sidecar import process, wire
from dcmdp_jax.errors import ArgumentError, EngineError
from dcmdp_jax.ray_cluster import reach

logger = logging.getLogger(__name__)

_LOOK_S = 120.0
_FREE_S = 15.0
# The head is looked for so often, and lost when nobody answered for so long.
_HEAD_S = 5.0
_LOST_S = 20.0
# When it was looked for, and since when nobody answers; 0: it answered.
_seen = [0.0, 0.0]


def check_head() -> None:
    """Look every few seconds whether the head of the cluster is there.

    Raises:
        EngineError: in one line, if it is gone.
    """
    if (now := time.monotonic()) - _seen[0] > _HEAD_S:
        _seen[0] = now
        try:
            reach(address := ray.get_runtime_context().gcs_address)
            _seen[1] = 0.0
        except OSError as error:
            _seen[1] = _seen[1] or now
            if now - _seen[1] > _LOST_S:
                raise EngineError(
                    f"the head of the Ray cluster, {address}, is gone ({error})"
                ) from None


def _nodes() -> dict[str, dict[str, Any]]:
    """The living nodes, as Ray describes them, by address and the first digits of the
    identifier.
    """
    return {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": node
        for node in ray.nodes()
        if node["Alive"]
    }


def check_room(replicas: int, name: str, amount: float, store_bytes: int = 0) -> None:
    """Refuse more replicas than the cluster has room for, or has free after a moment; and a small
    object store.

    Args:
        replicas: their number.
        name, amount: resource of each replica, on one node.
        store_bytes: size that the object store of each node needs.

    Raises:
        UserError: in one line, saying which resource, or which size is needed.
    """
    there = {}
    for label, node in _nodes().items():
        there[label], room = (
            node["Resources"].get(name, 0),
            node["Resources"].get("object_store_memory", 0),
        )
        if room < store_bytes:
            what = (
                f"the object store of {label} has {room / 2**30:.2f} GiB, the weights need "
                f"{store_bytes / 2**30:.2f}"
            )
            raise ArgumentError("address", f"{what}: ray start --object-store-memory={store_bytes}")
    what = f"got {replicas} with {amount:g} {name} each on one node, the Ray cluster"
    if replicas > (most := sum(int(count // amount) for count in there.values())):
        raise ArgumentError("replicas", f"{what} has room for {most} ({name} by node: {there})")
    deadline = time.monotonic() + _FREE_S
    while (free := sum(int(node.get(name, 0) // amount) for node in _free().values())) < replicas:
        if time.monotonic() > deadline:
            raise ArgumentError(
                "replicas",
                f"{what} has room for {free}: another run holds the rest; wait for its end",
            )
        time.sleep(0.5)


def ask_nodes(call: Callable[[], Any], python: str, resources: set[str]) -> dict[str, Any]:
    """What a function returns under an interpreter on each node that has one of these resources.

    Raises:
        UserError: if it does not answer on each.
    """
    asked = {}
    for name, node in _nodes().items():
        if node["Resources"].keys() & resources:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            task = ray.remote(call).options(
                num_cpus=0, scheduling_strategy=there, max_retries=0, **interpreter(python)
            )
            asked[name] = task.remote()
    try:
        return dict(zip(asked, ray.get(list(asked.values()), timeout=_LOOK_S), strict=True))
    except ray.exceptions.RayError as error:
        what = (
            f"{python or 'the Python of Ray'} does not answer on each of {', '.join(asked)} "
            f"({type(error).__name__})"
        )
        raise ArgumentError(
            "python", f"{what}; it needs Ray {ray.__version__} and this Python's version"
        ) from None


def interpreter(python: str, **variables: str) -> dict[str, Any]:
    """Ray's option for a Python of its own, if it is not empty, and for environment variables."""
    return {"runtime_env": {"env_vars": variables, **({"py_executable": python} if python else {})}}


class ActorConnection:
    """The calls of an actor as `wire.Connection`: a request is a call, and each further part of its
    answer is one.
    """

    def __init__(self, actor: Any) -> None:
        """Take over an actor with the methods `ask` and `more`."""
        self._actor = actor
        self.call = None

    def send(
        self, op: str, header: Any = None, arrays: Any = None, *, timeout_s: float | None = None
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
            {**header, "op": op}, {name: array.copy() for name, array in arrays.items()}
        )


class ActorProcess(process.EngineProcess):
    """An engine in an actor, which Ray places on a node with room and which then builds the engine.

    Attributes:
        pid: its process on its node; 0 before it has a place.
    """

    def __init__(
        self, name: str, actor: type, options: Mapping[str, Any], start: Any, places: Path
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
        _seen[0] = 0.0
        check_head()
        while _seen[1]:
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
                found = self._checked(self.connection.receive(), "start", "ready").header
                self.started = True
                self.pid = found["pid"]
                self.node = found["node"]
                with open(self._places, "a", encoding="utf-8") as places:
                    places.write(f"{self.node}\n")
                logger.info(
                    "%s %s ready on %s, process %d",
                    self.name,
                    found["version"],
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
