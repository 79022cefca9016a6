"""Tasks of dcmdp evaluate: their prompts, problems that training had too, and room for the completions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from dcmdp_jax.commands.arguments import UNLIMITED
from dcmdp_jax.config.settings import RewardSettings
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.prompts import EncodedPrompts, encode_prompts, template_variables
from dcmdp_jax.engines.protocol import Engine
from dcmdp_jax.environments.pool import EnvironmentPool
from dcmdp_jax.environments.turns import TurnLimits, TurnSampler
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.overlap import Overlap, find_overlap, leave_out
from dcmdp_jax.evaluation.size import check_size
from dcmdp_jax.evaluation.table import paper_samples
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.rewards.protocol import MATH, NEED_ANSWERS, RewardError
from dcmdp_jax.rewards.scoring import column_names
from dcmdp_jax.run.memory_use import free_host_bytes


def load_tasks(
    tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> tuple[dict[str, EncodedPrompts], dict[str, list[Overlap]]]:
    """Read every task.

    Args:
        tokenizer: of the model.
        settings: as `evaluate_flags.settings_of` gives them.

    Returns:
        Name -> prompts, without those that --drop_overlap leaves out; and name -> problems that --train_data has,
        empty without it.

    Raises:
        UserError: in one line, for a task that can't be read or asked.
    """
    tasks = {name: _prompts(location, tokenizer, settings) for name, location in settings["tasks"].items()}
    overlaps = _overlaps(tasks, settings)
    if settings["drop_overlap"]:
        tasks = {name: leave_out(prompts, overlaps[name], task=name) for name, prompts in tasks.items()}
    return tasks, overlaps


def check_room(model: ModelConfig, tasks: dict[str, EncodedPrompts], settings: dict[str, Any]) -> int:
    """Refuse completions that the model or the host's memory has no room for.

    Returns:
        Tokens of the longest prompt.

    Raises:
        UserError: in one line, naming the argument.
    """
    for name, prompts in tasks.items():
        limit, count = settings["max_completion_tokens"], len(prompts.problems)
        check_size(name, count, samples_of(name, settings), limit, free=free_host_bytes())
    longest, name = max((max(map(len, prompts.token_ids)), name) for name, prompts in tasks.items())
    room = model.max_position_embeddings - longest
    if room < 1:
        raise UserError(
            f"--tasks: the longest prompt of {name} has {longest} tokens and leaves no room in the model's "
            f"max_position_embeddings={model.max_position_embeddings}; --max_prompt_tokens leaves it out"
        )
    if settings["max_completion_tokens"] > room:
        raise UserError(
            f"--max_completion_tokens: got {settings['max_completion_tokens']}, with the longest prompt ({longest} "
            f"tokens, {name}) more than the model's max_position_embeddings={model.max_position_embeddings}; "
            f"--max_completion_tokens={room} fits"
        )
    return longest


@contextlib.contextmanager
def turn_sampler(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, tasks: dict[str, EncodedPrompts], settings: dict[str, Any],
    longest: int,
) -> Iterator[TurnSampler | None]:  # fmt: skip
    """What plays the environment of --environment; None without one.

    Args:
        engine: with weights.
        tokenizer: of the model.
        tasks: what `load_tasks` gave.
        settings: as `evaluate_flags.settings_of` gives them.
        longest: most tokens of a prompt with the first observation.

    Raises:
        UserError: in one line, for an environment that can't be imported.
    """
    given = settings.get("environment")
    if given is None:
        yield None
        return
    columns = column_names([problem for prompts in tasks.values() for problem in prompts.problems])
    with EnvironmentPool(given["name"], columns, timeout_s=RewardSettings().timeout) as pool:
        try:
            pool.check()
        except RewardError as error:
            raise UserError(f"--environment: {error}") from error
        yield TurnSampler(
            engine, pool, tokenizer, columns, TurnLimits(given["max_turns"], given["max_turn_tokens"], longest),
            prompt_suffix=settings["prompt_suffix"],
            variables=template_variables(settings["chat_template_kwargs"], tokenizer), stop_on_error=True,
        )  # fmt: skip


def samples_of(task: str, settings: dict[str, Any]) -> int:
    """Completions of each problem of a task."""
    return settings["samples"] or paper_samples(task)


def _prompts(location: str, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> EncodedPrompts:
    rewards = [name.strip() for name in settings.get("rewards", "math").split(",")]
    needed = [reward in NEED_ANSWERS for reward in rewards]
    problems = load_problems(
        location, split="test", limit=settings["max_problems"], on_bad_row=settings["on_bad_row"],
        keep_columns=rewards != [MATH] or "environment" in settings,
        answers="required" if all(needed) else "optional" if any(needed) else "unused",
    )  # fmt: skip
    limit = settings["max_prompt_tokens"] or UNLIMITED
    return encode_prompts(
        problems,
        tokenizer,
        prompt_suffix=settings["prompt_suffix"],
        max_prompt_tokens=limit,
        chat_template_kwargs=settings["chat_template_kwargs"],
    )


def _overlaps(tasks: dict[str, EncodedPrompts], settings: dict[str, Any]) -> dict[str, list[Overlap]]:
    """The problems of each task that --train_data has; nothing without it."""
    if settings["train_data"] is None:
        return {}
    train = load_problems(settings["train_data"], on_bad_row="skip", answers="unused")
    texts = [problem.prompt for problem in train]
    return {
        name: [
            overlap._replace(train_problem=train[overlap.train_problem].index)
            for overlap in find_overlap([problem.prompt for problem in prompts.problems], texts)
        ]
        for name, prompts in tasks.items()
    }
