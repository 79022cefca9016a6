"""An evaluation: its tasks, and an engine that has all devices to itself."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcmdp_jax.config.checks import as_settings, engine_arguments, of_engine
from dcmdp_jax.config.settings import Config
from dcmdp_jax.engines.engine_kind import Workload
from dcmdp_jax.engines.registry import find_engine
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.held_out import HeldOut
from dcmdp_jax.fields import INT32_MAX
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import num_params
from dcmdp_jax.models.row_logprobs import make_probe
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.parallel.mesh import make_mesh, one_device_mesh, sampling_mesh
from dcmdp_jax.run.memory_use import (
    EngineSetup,
    fit_engine,
    free_host_bytes,
    loaded_parameters,
    this_machine,
)
from dcmdp_jax.run.saved_model import Policy, SavedModel
from dcmdp_jax.run.task import Task, checked_rewards

PAPERS_EVALUATION = {
    "rollout.max_completion_tokens": 32768,
    "rollout.max_rows": 256,
    "evaluation.temperature": 0.7,
    "evaluation.samples": (),
    "evaluation.max_problems": 0,
    "task.max_prompt_tokens": 2**20,
    "task.on_bad_row": "error",
    "task.verifier_workers": min(os.cpu_count() or 1, 8),
    # A score depends on the answers, not on how fast this machine is.
    "task.verifier_budget": 0.0,
    "rewards.on_error": "error",
    "training.seed": 0,
}
"""Settings of an evaluation of a model: the paper's, all problems, every answer judged."""
_OF_A_RUN = ("rollout.max_completion_tokens", "evaluation.temperature")
_OF_ITS_TASKS = (
    "evaluation.samples",
    "evaluation.max_problems",
    "task.max_prompt_tokens",
    "task.on_bad_row",
)
_COMPLETION_BYTES = 1000
_TOKEN_BYTES = 8
"""A few Python objects; an int32 id and a float32 log-prob."""


def asked_settings(overrides: Mapping[str, Any], *, of_a_run: bool) -> dict[str, Any]:
    """The settings that an evaluation changes: dotted name -> value.

    A run is asked as by its own held-out evaluations: with its limit and temperature, and about its
    own tasks with their sizes. All else is `PAPERS_EVALUATION`.

    Args:
        overrides: values that are given.
        of_a_run: the model is a run's checkpoint.
    """
    settings = {**PAPERS_EVALUATION, **overrides}
    runs_own = ()
    if of_a_run:
        runs_own = _OF_A_RUN if "evaluation.task" in overrides else _OF_A_RUN + _OF_ITS_TASKS
    for name in runs_own:
        if name not in overrides:
            del settings[name]
    return settings


def evaluation_task(policy: Policy, held_out: HeldOut) -> Task:
    """Check an evaluation's tasks; reward functions and the environment are called.

    Args:
        policy: with the settings that it is asked with.
        held_out: the tasks with their encoded problems, see `task.held_out`.

    Raises:
        UserError: in one line, for completions that the model or the host's memory has no room for,
            or a reward function or environment that does not start.
    """
    config = policy.config
    rollout = config.rollout
    limit = rollout.max_completion_tokens
    room = policy.model.max_position_embeddings
    for task, prompts in held_out:
        check_size(task.name, len(prompts.problems), task.samples, limit, free=free_host_bytes())
    longest, name = max((max(map(len, prompts.token_ids)), task.name) for task, prompts in held_out)
    if limit > room - longest:
        raise UserError(
            f"config.rollout.max_completion_tokens: got {limit}, with the longest prompt "
            f"({longest} tokens, {name}) more than the model's max_position_embeddings={room}; at "
            f"most {max(0, room - longest)} fit, and a smaller task.max_prompt_tokens leaves long "
            "prompts out"
        )
    rows = rollout.max_rows
    tokens = longest + limit
    if rows * tokens > INT32_MAX:
        raise UserError(
            f"config.rollout.max_rows: got {rows}, with {tokens} tokens of prompt and completion "
            f"{rows * tokens:,} tokens, must be at most {INT32_MAX:,} (tokens are counted in "
            "int32)"
        )

    problems = []
    for _, prompts in held_out:
        problems += prompts.problems
    rewards, columns = checked_rewards(config, problems, policy.tokenizer)
    return Task(
        config=config,
        model=policy.model,
        tokenizer=policy.tokenizer,
        stop_token_ids=policy.stop_token_ids,
        held_out=held_out,
        rewards=rewards,
        columns=columns,
        longest_prompt=longest,
    )


def synced_dtype(saved: SavedModel, config: Config) -> str:
    """The dtype that the engine gets the weights in: narrow where that loses nothing."""
    if saved.step is not None:
        return config.model.param_dtype
    return "bfloat16" if saved.narrow or config.rollout.precision == "bfloat16" else "float32"


def place_evaluation(task: Task, saved: SavedModel, files: Path) -> EngineSetup:
    """Start JAX's devices, and fit the engine of `rollout.engine` into their memory.

    Args:
        task: what is evaluated.
        saved: the policy.
        files: files of an engine in its own process: this path, its suffix the engine's name.

    Raises:
        UserError: in one line, naming the setting.
    """
    config = task.config
    rollout = config.rollout
    model = task.model
    dtype = synced_dtype(saved, config)
    kind = find_engine(rollout.engine)
    with as_settings(of_engine(kind)):
        arguments = engine_arguments(
            config,
            kind,
            model=model,
            platform=kind.check_machine(engine_arguments(config, kind)),
            directory=files.with_suffix(f".{kind.name or 'engine'}"),
            max_total_tokens=task.longest_prompt + rollout.max_completion_tokens,
            mesh=lambda **split: sampling_mesh(
                make_mesh(data=-1, **split), num_params=num_params(model), **split
            ),
            probe=lambda: make_probe(model, Compute(), one_device_mesh()),
            param_dtype=dtype,
        )
        kind.check(arguments)

    prepare_jax(config.mesh.cpu_devices)
    machine = this_machine(make_mesh(data=-1).devices.flat[0].platform)
    lengths, completions = task.requests
    workload = Workload(
        completions=completions,
        group_size=1,
        prompt_lengths=lengths,
        max_completion_tokens=rollout.max_completion_tokens,
        training=False,
    )
    others = loaded_parameters(model, dtype, machine) if kind.takes_weights else []
    return fit_engine(kind, arguments, workload, machine, others)


def check_size(
    task: str,
    problems: int,
    samples: int,
    max_completion_tokens: int,
    *,
    free: int | None,
) -> None:
    """Refuse a task whose completions, all of full length, this machine's memory has no room for.

    Args:
        task: the task's name.
        problems: number of problems that are asked.
        samples: K, completions of each.
        max_completion_tokens: limit of each.
        free: bytes of memory that can still be allocated; None where that is unknown.

    Raises:
        UserError: with the product, what it takes and which settings to lower.
    """
    completions = problems * samples
    needed = completions * (_COMPLETION_BYTES + max_completion_tokens * _TOKEN_BYTES)
    if free is not None and needed > free:
        raise UserError(
            f"config.evaluation.samples: got {samples}; {task} has {problems:,} problems x "
            f"{samples:,} samples = {completions:,} completions of up to "
            f"{max_completion_tokens:,} tokens, which take {needed / 2**30:,.1f} GiB, "
            f"{free / 2**30:,.1f} GiB are free; lower evaluation.samples, evaluation.max_problems "
            "or rollout.max_completion_tokens"
        )
