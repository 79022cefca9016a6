"""A task evaluated in parts, so that a killed evaluation loses one part at most."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.engines.protocol import Engine, SamplingParams
from dcmdp_jax.environments.turns import TurnSampler
from dcmdp_jax.evaluation.average import EvaluationResult, evaluate, join
from dcmdp_jax.evaluation.log import EvaluationLog
from dcmdp_jax.rewards.protocol import Problem
from dcmdp_jax.rewards.scoring import RewardScorer

_ROUNDS = 4
"""Completions of a part, in rows of the engine: more would lose more, fewer leave more rows idle at a part's end."""


def default_part(samples: int, max_rows: int) -> int:
    """Number of problems in a part, for K samples each and an engine that decodes `max_rows` at a time."""
    return max(1, _ROUNDS * max_rows // samples)


def evaluate_in_parts(
    engine: Engine,
    scorer: RewardScorer,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[np.ndarray],
    problems: Sequence[Problem],
    sampling: SamplingParams,
    *,
    task: str,
    seed: int,
    problems_per_part: int,
    log: EvaluationLog,
    turns: TurnSampler | None = None,
    report: Callable[[int, int], None] = lambda done, all_parts: None,
) -> EvaluationResult:
    """`evaluate`, part by part; parts that the log has are not sampled again.

    Part 0 samples with `seed`, part i with one derived from (seed, i). Parts depend on nothing else, so what is
    continued equals what was not interrupted, bit for bit, and a task of one part equals `evaluate`.

    Args:
        engine, scorer, tokenizer, sampling: as of `evaluate`.
        prompts, problems: token ids and the problems they come from.
        task: its name.
        seed: in [0, 2^32).
        problems_per_part: at least 1.
        log: takes each part as it is done.
        turns: samples in turns with an environment; None for one turn.
        report: called with (parts done, parts) after each part.
    """
    starts = range(0, len(problems), problems_per_part)
    results = []
    for part, start in enumerate(starts):
        chosen = problems[start : start + problems_per_part]
        result = log.finished(task, part)
        if result is None:
            result = evaluate(
                engine,
                scorer,
                tokenizer,
                prompts[start : start + problems_per_part],
                chosen,
                sampling,
                task=task,
                seed=part_seed(seed, part),
                turns=turns,
            )
            asked = [
                {"row": problem.index, "prompt": tokenizer.decode(ids), "answer": problem.answer}
                for problem, ids in zip(chosen, prompts[start : start + problems_per_part], strict=True)
            ]
            log.append(part, asked, result)
        results.append(result)
        report(part + 1, len(starts))
    return join(results)


def part_seed(seed: int, part: int) -> int:
    """Seed of a part's samples: rows of different parts have the same number, and must not have the same draws."""
    return seed if part == 0 else int(np.random.SeedSequence((seed, part)).generate_state(1)[0])
