"""This package's side of the comparison."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks.peers.rounds import Ended, Job, Rounds, work
from benchmarks.workload import LORA, batch_of, rollout, stepper
from configs.base import get_config
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.data.episode import Episode, collect, in_prompt_order
from dcmdp_jax.data.tokenizer import end_token_ids, load_tokenizer
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.engines.protocol import Engine, SamplingParams
from dcmdp_jax.models import hf_weights
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_config import read_model_config
from dcmdp_jax.models.params import num_params
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.parallel.mesh import one_device_mesh, sampling_mesh, training_mesh
from dcmdp_jax.run.placement import compute_on, packing_on
from dcmdp_jax.run.run import Run
from dcmdp_jax.run.services import Services
from dcmdp_jax.training import loop
from dcmdp_jax.types import Params

_PACKAGES = ("dcmdp-jax", "jax", "jaxlib", "flax", "optax", "numpy")


def train(job: Job, rounds: Rounds) -> None:
    """The compiled step with one mini-batch or four, in the layout that a run chooses; of adapters
    where asked.
    """
    model = _model(job)
    mesh = training_mesh(num_params=num_params(model))
    config = from_config_dict(_run_config(job, 4 if job.part == "train4" else 1))
    compute = compute_on(config, mesh)
    plan = packing_on(config, mesh, compute)
    batch, _ = batch_of(
        rollout(model, job.prompt_lengths, np.asarray(job.lengths), job.group), plan, model
    )
    lora = LORA if job.lora else None
    step = stepper(
        model, "dc_grpo", compute, batch, max_completion_tokens=job.new_tokens, lora=lora
    )
    release_freed_memory()  # as a run does before its first step
    rounds.hello(_PACKAGES)
    rounds.repeat(lambda: jax.block_until_ready(step()))


def sampler(
    job: Job,
    rounds: Rounds,
    make: Callable[[EngineArguments], Engine] | None = None,
    packages: Sequence[str] = _PACKAGES,
) -> None:
    """The embedded engine as an evaluation builds it: token ids in, token ids and their log-probs
    out. Or another.
    """
    config = _model(job)
    tokenizer = load_tokenizer(job.checkpoint)
    prompts = [
        np.asarray(ids, np.int32) for ids in tokenizer(job.texts()[: job.prompts])["input_ids"]
    ]
    total = job.prompt_tokens + job.new_tokens
    min_rows = get_config().rollout.min_rows
    dtypes = {"precision": job.dtype, "compute_dtype": job.dtype}
    arguments = EngineArguments(**dtypes, model=config, max_total_tokens=total, min_rows=min_rows)
    mesh = sampling_mesh(one_device_mesh(), num_params=num_params(config))
    engine = make(arguments) if make else LocalEngine(arguments, mesh=mesh)
    engine.sync_weights(hf_weights.load_params(job.checkpoint, config, dtype="float32"), 0)
    release_freed_memory()  # as bin.evaluate does
    stops = (
        tuple(sorted(end_token_ids(tokenizer, job.checkpoint, vocab_size=config.vocab_size)))
        if job.ends
        else ()
    )
    sampling = SamplingParams(job.group, job.new_tokens, stop_token_ids=stops)
    rounds.hello(packages)
    step = 0
    while rounds.boundary():
        _check(job, collect(engine.generate(prompts, sampling, seed=0, step=step)))
        step += 1


def reinforce(job: Job, rounds: Rounds) -> None:
    """The training loop of bin/train.py, from one weight sync of weights to the next."""
    config = _run_config(job, mini_batches=1)
    # More than are asked for, so that neither the last checkpoint nor one on the way is part of a
    # round.
    config.training.steps = config.checkpoint.every_steps = 10**6
    if job.lora:
        config.model.lora_rank, config.model.lora_alpha, config.model.lora_base = (
            LORA.rank,
            LORA.alpha,
            "float32",
        )
    run = Run.check(from_config_dict(config))

    def begin(params: Params) -> None:
        jax.block_until_ready(params)
        if not rounds.boundary():
            raise Ended

    def start() -> Services:
        services = run.start()
        return dataclasses.replace(
            services, engine=SteppedEngine(services.engine, begin, functools.partial(_check, job))
        )

    rounds.hello(_PACKAGES)
    try:
        loop.train(run, start_services=start, show=print)
    except Ended:
        return


def _check(job: Job, episodes: list[Episode]) -> None:
    job.check_completions([episode.completion_ids for episode in episodes])


class SteppedEngine:
    """An engine that calls `begin` before a step, whose first act is to sync the weights, and
    `check` on samples.
    """

    def __init__(
        self,
        engine: Engine,
        begin: Callable[[Params], None],
        check: Callable[[list[Episode]], None],
    ) -> None:
        self._engine = engine
        self._begin = begin
        self._check = check

    def sync_weights(self, params: Params, policy_version: int) -> dict[str, float]:
        self._begin(params)
        return self._engine.sync_weights(params, policy_version)

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: SamplingParams, **settings: Any
    ) -> Iterator[list[Episode]]:
        episodes: list[Episode] = []
        for complete in self._engine.generate(prompts, sampling, **settings):
            episodes += complete
            yield complete
        if sampling.group_size > 1:  # else it is the noise floor's, of one row alone
            self._check(in_prompt_order(episodes))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _run_config(job: Job, mini_batches: int) -> ConfigDict:
    """The job as a run. The layout is left to the defaults; as in the peers' settings no
    activations are recomputed.
    """
    config = get_config()
    config.run_dir = str(Path(job.scratch) / "run")
    config.model.path = job.checkpoint
    config.model.compute_dtype = config.rollout.precision = config.rollout.compute_dtype = job.dtype
    config.model.remat = "none"
    config.task.train = job.problems
    config.task.prompt_suffix = ""
    config.task.max_prompt_tokens = job.prompt_tokens
    config.rollout.group_size = job.group
    config.rollout.max_completion_tokens = job.new_tokens
    config.algorithm.trust_region = "clip(high=0.2)"
    config.training.prompts_per_step = job.prompts
    config.training.prompts_per_mini_batch = job.prompts // mini_batches
    return config


def _model(job: Job) -> ModelConfig:
    config = read_model_config(job.checkpoint)
    job.check_parameters(num_params(config))
    return config


if __name__ == "__main__":
    prepare_jax()
    trains = dict.fromkeys(("train1", "train4", "train_lora"), train)
    work({**trains, "rl": reinforce, "rl_lora": reinforce, "sampler": sampler})
