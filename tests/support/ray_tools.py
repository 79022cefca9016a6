"""Shared by the tests of engines in Ray: a cluster of small nodes in one machine, and an engine in
it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from dcmdp_jax.engines.vllm.engine import VllmEngine
from tests.support.waiting import wait_until

_SMALL = {"object_store_memory": 84 << 20}
# A loaded machine starts a node, a worker, an agent in minutes, and answers late; a process that is
# gone is known at once. Ray must not end a worker for the memory of what runs beside the tests.
_PATIENCE = {
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_worker_register_timeout_seconds": "900",
    "RAY_runtime_env_agent_timeout_ms": "600000",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_health_check_initial_delay_ms": "60000",
    "RAY_health_check_timeout_ms": "120000",
    "RAY_health_check_period_ms": "1000",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclasses.dataclass
class RayNodes:
    """A cluster whose head takes no replica; `add` gives it nodes that take one each."""

    cluster: Any

    @property
    def address(self) -> str:
        return self.cluster.address

    def add(self, replicas: int = 1) -> Any:
        return self.wait(
            self.cluster.add_node(False, num_cpus=0, resources={"vllm": replicas}, **_SMALL)
        )

    def wait(self, node: Any) -> Any:
        """Return the node once the head counts it among the living."""
        wait_until(
            lambda: node.node_id in self.cluster.global_state._live_node_ids(), "a node of Ray"
        )
        return node

    def remove(self, node: Any) -> None:
        """As a machine that loses its power: no process of the node ends in order."""
        self.cluster.remove_node(node, allow_graceful=False)

    def with_replicas(self) -> list[Any]:
        """The nodes besides the head."""
        return sorted(self.cluster.worker_nodes, key=lambda node: node.node_id)

    def kill_head(self) -> None:
        self.cluster.head_node.all_processes["gcs_server"][0].process.kill()


@contextlib.contextmanager
def ray_nodes(count: int) -> Iterator[RayNodes]:
    """A cluster with so many nodes besides the head; this process is not connected to it
    afterwards.
    """
    ray = importlib.import_module(
        "dcmdp_jax.engines.ray_cluster"
    ).ray  # first: it sets what Ray reads when it is imported
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in _PATIENCE}
    os.environ |= _PATIENCE
    nodes = RayNodes(cluster := Cluster())
    try:
        nodes.wait(cluster.add_node(False, num_cpus=0, include_dashboard=False, **_SMALL))
        for _ in range(count):
            nodes.add()
        yield nodes
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def place_of(engine: VllmEngine, replica: int) -> tuple[str, int]:
    """Node and process of a replica; ("", 0) while it has none."""
    sidecar = engine.replicas[replica].supervisor.sidecar
    return (sidecar.node, sidecar.pid) if sidecar is not None and sidecar.started else ("", 0)


def node_of(nodes: list[Any], engine: VllmEngine, replica: int) -> Any:
    """The node that a replica is on."""
    return next(node for node in nodes if node.node_id[:6] in place_of(engine, replica)[0])


def actors(nodes: RayNodes) -> list[psutil.Process]:
    """Processes of this machine that a node started for an engine, ready or not."""
    found = []
    for node in nodes.with_replicas():
        for raylet in node.all_processes["raylet"]:
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(raylet.process.pid).children(recursive=True)
                found += [
                    child for child in children if "ray::VllmActor" in " ".join(child.cmdline())
                ]
    return found


def processes_with(variable: str) -> set[int]:
    """Living processes that were started with a variable "NAME=VALUE" in their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found
