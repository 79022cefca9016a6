"""The inference engines by name, for training and evaluation alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from dcmdp_jax.config.settings import VllmSettings
from dcmdp_jax.engines.http.engine import RemoteEngine
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.protocol import Engine
from dcmdp_jax.engines.sidecar.probe import Probe
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.models.config import ModelConfig

# For one completion on a server: 32768 tokens at a few a second, and the wait in its queue.
_REMOTE_TIMEOUT_S = 7200.0


@dataclasses.dataclass(frozen=True)
class EngineArguments:
    """All that an engine may want to know; each takes what it needs.

    Attributes:
        model: shape of the model.
        precision, compute_dtype, kv_cache_dtype: see the settings of `rollout`.
        max_total_tokens: longest prompt with its completion.
        max_rows: completions decoded at the same time.
        min_rows: an embedded engine's batches do not shrink below this.
        mesh: makes the mesh that an embedded engine samples on. Called for such an engine only: it starts JAX's
            devices.
        probe: makes the trainer's log-probs of fixed sequences, for a sidecar. Called only for one.
        vllm: settings of a vLLM sidecar.
        directory: of a sidecar: its log, its config.json.
        server: address of a server that somebody else runs.
        routed_experts: return the experts of each token with the episodes; "remote" can't.
    """

    model: ModelConfig
    precision: str
    compute_dtype: str
    kv_cache_dtype: str
    max_total_tokens: int
    max_rows: int
    min_rows: int
    mesh: Callable[[], Mesh]
    probe: Callable[[], Probe]
    vllm: VllmSettings
    directory: Path
    server: str = ""
    routed_experts: bool = False


def _local(arguments: EngineArguments) -> Engine:
    return LocalEngine(
        arguments.model,
        precision=arguments.precision,
        compute_dtype=arguments.compute_dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        max_total_tokens=arguments.max_total_tokens,
        max_rows=arguments.max_rows,
        min_rows=arguments.min_rows,
        mesh=arguments.mesh(),
        routed_experts=arguments.routed_experts,
    )


def _vllm(arguments: EngineArguments) -> Engine:
    return VllmEngine(
        arguments.model,
        arguments.vllm,
        directory=arguments.directory,
        precision=arguments.precision,
        compute_dtype=arguments.compute_dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        max_total_tokens=arguments.max_total_tokens,
        max_rows=arguments.max_rows,
        probe=arguments.probe(),
        routed_experts=arguments.routed_experts,
    )


def _remote(arguments: EngineArguments) -> Engine:
    return RemoteEngine(
        arguments.model,
        server=arguments.server,
        max_total_tokens=arguments.max_total_tokens,
        timeout_s=_REMOTE_TIMEOUT_S,
        max_concurrent=arguments.max_rows,
    )


ENGINES: dict[str, Callable[[EngineArguments], Engine]] = {"local": _local, "vllm": _vllm, "remote": _remote}
"""Name -> builder. It raises UserError for what can't be, EngineError or MemoryError if the engine does not start.

"remote" holds weights of its own, so training can't use it.
"""
