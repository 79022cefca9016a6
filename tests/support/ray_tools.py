"""Shared by the tests of engines in Ray: a cluster of small nodes in one machine, and an engine in it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dcmdp_jax.engines.vllm.engine import VllmEngine

_STORE = 160 << 20


@dataclasses.dataclass
class RayNodes:
    """A cluster whose head takes no replica; `add` gives it nodes that take one each."""

    cluster: Any

    @property
    def address(self) -> str:
        return self.cluster.address

    def add(self, replicas: int = 1) -> Any:
        return self.cluster.add_node(num_cpus=0, resources={"vllm": replicas}, object_store_memory=_STORE)

    def remove(self, node: Any) -> None:
        """As a machine that loses its power: no process of the node ends in order."""
        self.cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        self.cluster.head_node.all_processes["gcs_server"][0].process.kill()


@contextlib.contextmanager
def ray_nodes(count: int, store: int = _STORE) -> Iterator[RayNodes]:
    """A cluster with so many nodes besides the head; this process is not connected to it afterwards."""
    ray = importlib.import_module("dcmdp_jax.ray_cluster").ray  # first: it sets what Ray reads when it is imported
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": store, "include_dashboard": False}
    nodes = RayNodes(Cluster(initialize_head=True, head_node_args=head))
    try:
        for _ in range(count):
            nodes.add()
        yield nodes
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()


def place_of(engine: VllmEngine, replica: int) -> tuple[str, int]:
    """Node and process of a replica; ("", 0) while it has none."""
    sidecar = engine.replicas[replica].supervisor.sidecar
    return (sidecar.node, sidecar.pid) if sidecar is not None and sidecar.started else ("", 0)


def node_of(nodes: list[Any], engine: VllmEngine, replica: int) -> Any:
    """The node that a replica is on."""
    return next(node for node in nodes if node.node_id[:6] in place_of(engine, replica)[0])


def processes_with(variable: str) -> set[int]:
    """Living processes that were started with a variable "NAME=VALUE" in their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found
