"""avg@K and pass@K of a policy as an inference engine samples it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.engines.protocol import Engine, SamplingParams
from dcmdp_jax.environments.episode_sampler import SampleKey, sampled_episodes
from dcmdp_jax.environments.turns import TurnSampler
from dcmdp_jax.errors import shorten
from dcmdp_jax.evaluation.estimators import bootstrap_interval, pass_at_every_k
from dcmdp_jax.rewards.protocol import BEGINNING, MATH, TrainerState
from dcmdp_jax.rewards.scoring import BatchScoring, RewardScorer, add_logged


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Scores of one task, [problems, K] each; completion j of problem p is [p, j].

    Attributes:
        task: its name.
        scores: float32, the weighted sum of the rewards; with `math` alone 1 where the answer is
            right.
        lengths: int32, sampled tokens.
        truncated: bool, cut by the length limit.
        unparsed: bool, without an answer, which `math` scores 0; false where it is no reward.
        texts: objects, each completion's text.
        answers: objects, the answer that `math` found in it; None where there is none, or `math` is
            no reward.
        unjudged: `verifier_timeouts`, `verifier_errors`, `verifier_over_budget` -> answers over the
            time limit, answers that the verifier raised on, answers undecided when the budget of
            the batch ran out; they count as wrong.
        values: with several rewards, short name of each -> float32, NaN where it has no value.
        logged: name -> sum and count of what reward functions logged.
    """

    task: str
    scores: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    unparsed: np.ndarray
    texts: np.ndarray
    answers: np.ndarray
    unjudged: dict[str, int]
    values: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    logged: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> int:
        """K."""
        return self.scores.shape[1]

    @property
    def problem_averages(self) -> np.ndarray:
        """[problems] float64, each problem's own avg@K."""
        return self.scores.mean(axis=1, dtype=np.float64)

    @property
    def average(self) -> float:
        """avg@K, the mean of `scores`."""
        return float(self.scores.mean())

    @property
    def pass_at(self) -> np.ndarray:
        """[K] float64, unbiased pass@k for k = 1 .. K; the last is the share of problems solved.

        Solved: the answer is right, or the reward is above 0 where `math` is no reward.
        """
        solved = self.values.get(MATH, self.scores) > 0
        return pass_at_every_k(solved.sum(axis=1), self.samples).mean(axis=0)

    @property
    def standard_error(self) -> float:
        """Standard error of `average`, from the spread between problems; NaN with one problem."""
        averages = self.problem_averages
        if len(averages) < 2:
            return float("nan")
        return averages.std(ddof=1) / np.sqrt(len(averages))

    @property
    def length_mean(self) -> float:
        """Sampled tokens of a completion."""
        return self.lengths.mean(dtype=np.float64)

    def interval(self, *, seed: int) -> tuple[float, float]:
        """95% bootstrap interval of `average` over problems; NaN with one problem."""
        return bootstrap_interval(self.problem_averages, seed=seed)


COLUMNS = {
    "scores": np.float32,
    "lengths": np.int32,
    "truncated": bool,
    "unparsed": bool,
    "texts": object,
    "answers": object,
}
"""Fields of a result with a value for each completion -> dtype."""
UNJUDGED = ("timeouts", "errors", "over_budget")
_SHOWN = 200
"""Last characters of a prompt or completion that an example shows."""


def describe(
    result: EvaluationResult, prompts: Sequence[str], answers: Sequence[str | None]
) -> list[str]:
    """Describe a task's unread and cut completions, with an example of a wrong and an unread one.

    Args:
        result: the task's result.
        prompts: text of each problem's prompt.
        answers: its reference answer.
    """
    lines = [
        f"{result.task}: {result.unparsed.mean():.1%} without an answer, "
        f"{result.truncated.mean():.1%} cut"
    ]
    wrong = ~result.unparsed & (result.scores <= 0)
    for kind, mask in (("wrong", wrong), ("without an answer", result.unparsed)):
        if not mask.any():
            continue
        problem, sample = np.argwhere(mask)[0].tolist()
        text = result.texts[problem, sample]
        answer = result.answers[problem, sample]
        read_as = "" if answer is None else f"; read as {shorten(answer)}"
        lines.append(
            f"  {kind}: {shorten(prompts[problem][-_SHOWN:])} -> "
            f"{shorten(text[-_SHOWN:])}{read_as}; reference {shorten(answers[problem])}"
        )
    return lines


def join(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """Join the results of a task's parts, in order."""
    first = results[0]

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(result, name) for result in results])

    values = {}
    for name in first.values:
        values[name] = np.concatenate([result.values[name] for result in results])
    unjudged = {}
    for name in first.unjudged:
        unjudged[name] = sum(result.unjudged[name] for result in results)
    return dataclasses.replace(
        first,
        **{name: column(name) for name in COLUMNS},
        unjudged=unjudged,
        values=values,
        logged=add_logged([result.logged for result in results]),
    )


class Evaluator(Protocol):
    """What samples and scores, such as `run.services.Services`.

    Attributes:
        engine: the engine, with weights synced.
        scorer: scores completions. Its verifier's budget holds for all samples of a task together.
        tokenizer: turns token ids into text.
        turns: samples in turns with an environment; None for one turn.
    """

    engine: Engine
    scorer: RewardScorer
    tokenizer: PreTrainedTokenizerBase
    turns: TurnSampler | None


def evaluate(
    evaluator: Evaluator,
    prompts: EncodedPrompts,
    sampling: SamplingParams,
    *,
    task: str,
    seed: int,
    first_prompt: int = 0,
    state: TrainerState = BEGINNING,
    check_stop: Callable[[], None] = lambda: None,
) -> EvaluationResult:
    """Sample K = `sampling.group_size` completions for each prompt, and score them.

    Random numbers depend on (seed, step 0) alone, so that two policies are compared on the
    same draws.

    Args:
        evaluator: engine with the weights to evaluate, scorer, tokenizer and environment.
        prompts: the problems and their token ids.
        sampling: K, temperature, length limit.
        task: name for the record.
        seed: seed of the samples.
        first_prompt: number of the first prompt, where these are a share of the task.
        state: state of the run that reward functions get.
        check_stop: called now and then while sampling and scoring; what it raises ends the
            evaluation.

    Raises:
        RewardError: in one line, if a reward function failed and the scorer stops then.
    """
    problems = prompts.problems
    size = sampling.group_size
    shape = (len(problems), size)
    repeated_problems = []
    for problem in problems:
        repeated_problems += [problem] * size
    scoring = BatchScoring(evaluator.scorer, evaluator.tokenizer, repeated_problems, state)

    # On several hosts, one may have no prompts of a short task: its arrays have no rows.
    lengths = np.zeros(shape, np.int32)
    truncated = np.zeros(shape, bool)
    if problems:
        for episode in sampled_episodes(
            evaluator.engine,
            evaluator.turns,
            scoring,
            prompts,
            sampling,
            SampleKey(seed=seed, step=0, first_prompt=first_prompt),
            doing=f"evaluating {task.removeprefix('eval/')}",
            check_stop=check_stop,
        ):
            lengths[episode.group, episode.member] = episode.num_sampled
            truncated[episode.group, episode.member] = episode.finish_reason == "length"
    texts, scores = scoring.finish(check_stop)

    totals = scores.totals
    # Rewards without weight still measure: sum them instead.
    if not any(reward.weight for reward in evaluator.scorer.rewards):
        reward_columns = list(scores.values.values())
        totals = np.nansum(reward_columns, axis=0)

    # Only `math` finds answers and grades them.
    answers = np.full(shape, None)
    unparsed = np.zeros(shape, bool)
    unjudged = {f"verifier_{name}": 0 for name in UNJUDGED}
    if scores.grades is not None:
        read_answers = [evaluator.scorer.verifier.found_answer(text) for text in texts]
        answers = np.array(read_answers, object).reshape(shape)
        unparsed = np.equal(answers, None)
        unjudged = {f"verifier_{name}": getattr(scores.grades, name) for name in UNJUDGED}

    # The values of a single reward are the scores.
    values = {}
    if len(scores.values) > 1:
        values = {name: column.reshape(shape) for name, column in scores.values.items()}
    return EvaluationResult(
        task=task,
        scores=np.array(totals, np.float32).reshape(shape),
        lengths=lengths,
        truncated=truncated,
        unparsed=unparsed,
        texts=np.array(texts, object).reshape(shape),
        answers=answers,
        unjudged=unjudged,
        values=values,
        logged=scores.logged,
    )
