"""avg@K and pass@K of a policy as an inference engine samples it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rollout.engine import Engine, SamplingParams
from dcmdp_jax.tasks.grading import Grading


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Scores of one task.

    Attributes:
        task: its name.
        samples: K.
        scores: [problems, K] float32, 1 where the answer is right.
        average: avg@K, the mean of `scores`.
        pass_at_k: share of problems with at least one right answer among the K.
        standard_error: of `average`, from the spread between problems; NaN with one problem.
        length_mean: sampled tokens of a completion.
        truncated_fraction: completions cut by the length limit.
        verifier_timeouts, verifier_errors, verifier_over_budget: answers over the time limit, answers that the verifier
            raised on, answers undecided when the budget of the batch ran out; they count as wrong.
    """

    task: str
    samples: int
    scores: np.ndarray
    average: float
    pass_at_k: float
    standard_error: float
    length_mean: float
    truncated_fraction: float
    verifier_timeouts: int
    verifier_errors: int
    verifier_over_budget: int


def evaluate(
    engine: Engine,
    verifier: Verifier,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[np.ndarray],
    answers: Sequence[str],
    sampling: SamplingParams,
    *,
    task: str,
    seed: int,
    check_stop: Callable[[], None] = lambda: None,
) -> EvaluationResult:
    """Samples K = `sampling.group_size` completions for each prompt with the weights the engine has, and judges them.

    The random numbers are those of (seed, step 0) whenever it is called, so that two policies are compared on the
    same draws.

    Args:
        engine: with weights pushed.
        verifier: judges completions. Its budget holds for all samples of the task together.
        tokenizer: turns token ids into text.
        prompts: token ids of each problem.
        answers: the right answer of each.
        sampling: K, temperature, length limit.
        task: name for the record.
        seed: of the samples.
        check_stop: called now and then while sampling; what it raises ends the evaluation.
    """
    grading = Grading(verifier, tokenizer, [answer for answer in answers for _ in range(sampling.group_size)])
    lengths: dict[int, int] = {}
    truncated = 0
    with contextlib.closing(engine.generate(prompts, sampling, seed=seed, step=0)) as groups:
        for episodes in groups:
            check_stop()
            rows = [episode.group * sampling.group_size + episode.member for episode in episodes]
            grading.begin(rows, [episode.completion_ids for episode in episodes])
            lengths |= zip(rows, (episode.num_sampled for episode in episodes), strict=True)
            truncated += sum(episode.finish_reason == "length" for episode in episodes)
    grades = grading.grade()
    scores = np.asarray(grades.rewards, np.float32).reshape(len(prompts), sampling.group_size)
    per_problem = scores.mean(axis=1)
    spread = per_problem.std(ddof=1) / np.sqrt(len(prompts)) if len(prompts) > 1 else np.nan
    return EvaluationResult(
        task=task,
        samples=sampling.group_size,
        scores=scores,
        average=float(scores.mean()),
        pass_at_k=float((scores > 0).any(axis=1).mean()),
        standard_error=float(spread),
        length_mean=float(np.mean(list(lengths.values()))),
        truncated_fraction=truncated / len(lengths),
        verifier_timeouts=grades.timeouts,
        verifier_errors=grades.errors,
        verifier_over_budget=grades.over_budget,
    )
