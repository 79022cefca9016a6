"""avg@K and pass@K of a policy as an inference engine samples it."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.activity import activity
from dcmdp_jax.data.episode import Episode
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.engines.protocol import Engine, SamplingParams
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
        found: objects, the answer that `math` found in it; None where there is none, or `math` is
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
    found: np.ndarray
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
        """[K] float64, unbiased pass@k for k = 1 .. K; the last is the share of problems that one
        of the K solved.

        Solved: the answer is right, or the reward is above 0 where `math` is no reward.
        """
        solved = self.values.get(MATH, self.scores) > 0
        return pass_at_every_k(solved.sum(axis=1), self.samples).mean(axis=0)

    @property
    def standard_error(self) -> float:
        """Standard error of `average`, from the spread between problems; NaN with one problem."""
        averages = self.problem_averages
        return (
            float(averages.std(ddof=1) / np.sqrt(len(averages)))
            if len(averages) > 1
            else float("nan")
        )

    @property
    def length_mean(self) -> float:
        """Sampled tokens of a completion."""
        return float(self.lengths.mean(dtype=np.float64))

    def interval(self, *, seed: int) -> tuple[float, float]:
        """95% bootstrap interval of `average` over problems; NaN with one problem."""
        return bootstrap_interval(self.problem_averages, seed=seed)


COLUMNS = dict(
    scores=np.float32, lengths=np.int32, truncated=bool, unparsed=bool, texts=object, found=object
)
"""Fields of a result with a value for each completion -> dtype."""
UNJUDGED = ("timeouts", "errors", "over_budget")
_SHOWN = 200


def describe(
    result: EvaluationResult, prompts: Sequence[str], answers: Sequence[str | None]
) -> list[str]:
    """The shares of a task's completions without an answer and cut, and an example of a wrong and
    of an unread one.

    Args:
        result: the task's result.
        prompts: text of each problem's prompt.
        answers: its reference answer.
    """
    said = [
        f"{result.task}: {result.unparsed.mean():.1%} without an answer, "
        f"{result.truncated.mean():.1%} cut"
    ]
    for kind, wanted in (
        ("wrong", ~result.unparsed & (result.scores <= 0)),
        ("without an answer", result.unparsed),
    ):
        if wanted.any():
            problem, place = np.argwhere(wanted)[0].tolist()
            text, found = (each[problem, place] for each in (result.texts, result.found))
            read = "" if found is None else f"; read as {shorten(found)}"
            said.append(
                f"  {kind}: {shorten(prompts[problem][-_SHOWN:])} -> "
                f"{shorten(text[-_SHOWN:])}{read}; reference {shorten(answers[problem])}"
            )
    return said


def join(parts: Sequence[EvaluationResult]) -> EvaluationResult:
    """Join the results of a task's parts, in order."""
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    unjudged = {name: sum(part.unjudged[name] for part in parts) for name in parts[0].unjudged}
    values = {
        name: np.concatenate([part.values[name] for part in parts]) for name in parts[0].values
    }
    logged = add_logged([part.logged for part in parts])
    return EvaluationResult(
        parts[0].task, **arrays, unjudged=unjudged, values=values, logged=logged
    )


class Evaluator(Protocol):
    """What samples and scores, such as `run.services.Services`.

    Attributes:
        engine: the engine, with weights pushed.
        scorer: scores completions. Its verifier's budget holds for all samples of a task together.
        tokenizer: turns token ids into text.
        turns: samples in turns with an environment; None for one turn.
    """

    engine: Engine
    scorer: RewardScorer
    tokenizer: PreTrainedTokenizerBase
    turns: TurnSampler | None


def sampled_episodes(
    parts: Evaluator,
    scoring: BatchScoring,
    prompts: EncodedPrompts,
    sampling: SamplingParams,
    numbers: Mapping[str, int],
    *,
    doing: str,
    check_stop: Callable[[], None],
) -> Iterator[Episode]:
    """Sample completions in one turn or several, and start to score each group as it comes.

    Args:
        parts: engine and environment.
        scoring: of these problems; once all episodes are taken, it can finish.
        prompts: the problems and their token ids.
        sampling: K, temperature, length limit.
        numbers: seed, step and first_prompt of `Engine.generate`.
        doing: name of the activity.
        check_stop: called now and then; what it raises ends the sampling.
    """
    asked = prompts.token_ids
    size = sampling.group_size
    if parts.turns is None:
        generated = parts.engine.generate(asked, sampling, **numbers)
    else:
        generated = parts.turns.generate(
            asked, prompts.problems, sampling, **numbers, check_stop=check_stop
        )
    with (
        activity(doing, len(asked) * size, "completions") as progress,
        contextlib.closing(generated) as groups,
    ):
        for group in groups:
            check_stop()
            progress.done += len(group)
            rows = [episode.group * size + episode.member for episode in group]
            scoring.begin(rows, [episode.token_ids[episode.sampled_mask] for episode in group])
            yield from group
    if parts.turns is not None:
        scoring.add_played(parts.turns.played)


def evaluate(
    parts: Evaluator,
    prompts: EncodedPrompts,
    sampling: SamplingParams,
    *,
    task: str,
    seed: int,
    first_prompt: int = 0,
    state: TrainerState = BEGINNING,
    check_stop: Callable[[], None] = lambda: None,
) -> EvaluationResult:
    """Sample K = `sampling.group_size` completions for each prompt with the weights the engine has,
    and score them.

    Random numbers depend on (seed, step 0) alone, so that two policies are compared on the
    same draws.

    Args:
        parts: engine, scorer, tokenizer and environment.
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
    scoring = BatchScoring(
        parts.scorer, parts.tokenizer, [each for each in problems for _ in range(size)], state
    )
    shape = len(problems), size
    lengths = np.zeros(shape, np.int32)
    truncated = np.zeros(shape, bool)
    if problems:  # a process of several may have no share of a short task
        numbers = {"seed": seed, "step": 0, "first_prompt": first_prompt}
        doing = f"evaluating {task.removeprefix('eval/')}"
        for episode in sampled_episodes(
            parts, scoring, prompts, sampling, numbers, doing=doing, check_stop=check_stop
        ):
            lengths[episode.group, episode.member] = episode.num_sampled
            truncated[episode.group, episode.member] = episode.finish_reason == "length"
    texts, scores = scoring.finish(check_stop)
    if not any(reward.weight for reward in parts.scorer.rewards):
        scores = dataclasses.replace(scores, totals=np.nansum([*scores.values.values()], axis=0))
    judged = scores.grades is not None
    found = [parts.scorer.verifier.found_answer(text) if judged else None for text in texts]
    columns = {
        "scores": scores.totals,
        "lengths": lengths,
        "truncated": truncated,
        "texts": texts,
        "found": found,
    }
    columns["unparsed"] = [judged and each is None for each in found]
    return EvaluationResult(
        task=task,
        **{
            name: np.array(values, COLUMNS[name]).reshape(shape) for name, values in columns.items()
        },
        unjudged={
            f"verifier_{name}": getattr(scores.grades, name) if judged else 0 for name in UNJUDGED
        },
        values={name: each.reshape(shape) for name, each in scores.values.items()}
        if len(scores.values) > 1
        else {},
        logged=scores.logged,
    )
