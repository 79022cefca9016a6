"""The total reward of each completion: `math` and the functions of users, with weights."""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dcmdp_jax.rewards.math.verifier import Grades, Verifier, merge_grades
from dcmdp_jax.rewards.protocol import (
    BEGINNING,
    ENVIRONMENT,
    MATH,
    Message,
    Problem,
    Reward,
    RewardError,
    TrainerState,
    short_names,
    weighted_total,
)
from dcmdp_jax.rewards.reward_pool import Returned, RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LOG = logging.getLogger(__name__)
OWN_COLUMNS = {"answer": "answer", "source": "source", "reference_answer": "answer"}
"""Columns of every problem -> its attribute. A row's own field of the name goes before."""


@dataclasses.dataclass(frozen=True)
class BatchScores:
    """Rewards of N completions.

    Attributes:
        totals: [N] float32, the weighted sum over rewards; 0 for a completion without any value.
        values: short name of each reward -> [N] float32, NaN where it gave no value.
        failed: short name of each function -> completions of its failed calls.
        grades: the verifier's results, None without the reward `math`.
        sources: the data source of each; None if all data have the same.
        logged: name -> sum and count of the numbers that functions logged under it (`log_metric`).
        extra: name -> one value per completion (`log_extra`), JSON values.
    """

    totals: np.ndarray
    values: dict[str, np.ndarray]
    failed: dict[str, int]
    grades: Grades | None
    sources: tuple[str, ...] | None = None
    logged: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)
    extra: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    def extra_of(self, index: int) -> dict[str, Any]:
        """Values that functions logged about one completion, by name."""
        return {name: values[index] for name, values in self.extra.items()}

    def of_completion(self, index: int) -> dict[str, float | None]:
        """Each reward of one completion, by name."""
        return {
            name: None if np.isnan(v[index]) else float(v[index]) for name, v in self.values.items()
        }


def merge_scores(parts: Sequence[BatchScores]) -> BatchScores:
    """The scores of several batches of one scorer as one batch's, in order."""
    first = parts[0]
    grades = [part.grades for part in parts if part.grades is not None]
    return BatchScores(
        totals=np.concatenate([part.totals for part in parts]),
        values={
            name: np.concatenate([part.values[name] for part in parts]) for name in first.values
        },
        failed={name: sum(part.failed[name] for part in parts) for name in first.failed},
        grades=merge_grades(grades) if grades else None,
        sources=None
        if first.sources is None
        else tuple(source for part in parts for source in part.sources),
        logged=add_logged([part.logged for part in parts]),
        extra={
            name: [
                value for part in parts for value in part.extra.get(name, [None] * len(part.totals))
            ]
            for name in dict.fromkeys(name for part in parts for name in part.extra)
        },
    )


def add_logged(parts: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, tuple[float, int]]:
    """Sums and counts of logged numbers, added up by name, in the order of the first."""
    total: dict[str, tuple[float, int]] = {}
    for name, (value, count) in (item for part in parts for item in part.items()):
        before = total.get(name, (0.0, 0))
        total[name] = before[0] + value, before[1] + count
    return total


def column_names(problems: Sequence[Problem]) -> list[str]:
    """Names of the columns that reward functions get for these problems, in the order of their
    first row.
    """
    names = dict.fromkeys(name for problem in problems for name in problem.columns)
    return list(names | dict.fromkeys(OWN_COLUMNS))


def columns_of(problems: Sequence[Problem], names: Sequence[str]) -> dict[str, list[Any]]:
    """The columns of some problems, one value for each; None where a problem has none."""

    def cell(problem: Problem, name: str) -> Any:
        own = getattr(problem, OWN_COLUMNS[name]) if name in OWN_COLUMNS else None
        return problem.columns.get(name, own)

    return {name: [cell(problem, name) for problem in problems] for name in names}


class Played(NamedTuple):
    """A completion in turns, which an environment answered.

    Attributes:
        reward: the sum over its turns; None if the environment failed.
        messages: the turns and the answers.
        text, ids: all after the prompt, answers included.
        turns: number of the policy's turns.
        done: whether the environment ended it.
    """

    reward: float | None
    messages: list[Message]
    text: str
    ids: np.ndarray
    turns: int
    done: bool


def check_rewards(
    rewards: Sequence[Reward], columns: Sequence[str], *, memory_gib: float = 0.0
) -> None:
    """Import every reward function in its own process, then end the processes.

    Args:
        rewards: the functions.
        columns: names of the columns that they get.
        memory_gib: address space of each process in GiB, 0 for no limit.

    Raises:
        RewardError: in one line, for a function that can't be imported or can't be called with
            these columns.
    """
    functions = [
        reward.function for reward in rewards if reward.function not in (MATH, ENVIRONMENT)
    ]
    with RewardPool(functions, columns, timeout_s=1.0, memory_gib=memory_gib) as pool:
        pool.wait_until_loaded()


class RewardScorer:
    """Scores the batches of a run. Not thread-safe; close it.

    Args:
        rewards: at least one, each function once.
        verifier: for the reward `math`. The caller closes it.
        columns: names of the columns that functions get, from `column_names`.
        by_source: whether scores name each completion's data source.
        timeout_s: wall-clock limit of one call of a function, in seconds.
        memory_gib: address space of a function's process in GiB, 0 for no limit.
        stop_on_error: whether a failed call raises. Otherwise it is counted, and its completions
            get no value of this reward.
        output: file that gets what functions print, at its end; None discards it.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        verifier: Verifier,
        columns: Sequence[str],
        *,
        by_source: bool,
        timeout_s: float,
        memory_gib: float = 0.0,
        stop_on_error: bool,
        output: Path | None = None,
    ) -> None:
        self.rewards = tuple(rewards)
        self.verifier = verifier
        self.columns = tuple(columns)
        self.by_source = by_source
        self.stop_on_error = stop_on_error
        functions = [reward.function for reward in rewards]
        self.names = dict(zip(functions, short_names(functions), strict=True))
        own = [name for name in functions if name not in (MATH, ENVIRONMENT)]
        self.pool = RewardPool(
            own, columns, timeout_s=timeout_s, memory_gib=memory_gib, output=output
        )
        self._warned: set[str] = set()

    def close(self) -> None:
        """Kill the processes of the functions. Harmless when called again."""
        self.pool.close()

    def warn_once(self, what: str, problem: str) -> None:
        """Log the first failure of a function, or of another kind."""
        if what not in self._warned:
            self._warned.add(what)
            _LOG.warning("%s. Later failures are only counted", problem)


class BatchScoring:
    """Texts and rewards of the completions that one call of an engine's `generate` samples.

    `math` grades a completion as soon as its group is sampled. A function is called once, on the
    whole batch, when all are, because it may compare completions or send all its requests at once.

    Args:
        scorer: calls the functions.
        tokenizer: turns token ids into text.
        problems: the problem of each row, `prompt * group_size + member`. `math` has no value for
            one without answer.
        state: the run's progress, for functions.
    """

    def __init__(
        self,
        scorer: RewardScorer,
        tokenizer: "PreTrainedTokenizerBase",
        problems: Sequence[Problem],
        state: TrainerState = BEGINNING,
    ) -> None:
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._problems = problems
        self._state = state
        self._texts: dict[int, str] = {}
        self._ids: dict[int, np.ndarray] = {}
        self._played: Mapping[int, Played] = {}
        self._tokens = self._beyond = (
            0  # tokens decoded, and how many ids are beyond the tokenizer's
        )

    def begin(self, rows: Sequence[int], completion_ids: Sequence[np.ndarray]) -> None:
        """Start to score completions, each row once, while others are still sampled."""
        # transformers decodes an empty batch to one empty text.
        texts = (
            self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True) if rows else []
        )
        self._texts |= zip(rows, texts, strict=True)
        self._ids |= zip(rows, completion_ids, strict=True)
        self._tokens += sum(map(len, completion_ids))
        self._beyond += sum(
            int(np.sum(np.asarray(ids) >= len(self._tokenizer))) for ids in completion_ids
        )
        if MATH in self._scorer.names:
            _, *texts_and_answers = self._with_answers(rows)
            self._scorer.verifier.begin(*texts_and_answers)

    def _with_answers(self, rows: Sequence[int]) -> tuple[list[int], list[str], list[str]]:
        """The rows that have an answer, their texts and their answers."""
        answers = {
            row: answer for row in rows if (answer := self._problems[row].answer) is not None
        }
        return list(answers), [self._texts[row] for row in answers], list(answers.values())

    def add_played(self, played: Mapping[int, Played]) -> None:
        """Take what an environment made of the rows, before `finish`: functions get the answers
        too.
        """
        self._played = played
        self._ids |= {row: one.ids for row, one in played.items()}

    def finish(self, on_wait: Callable[[], None] = lambda: None) -> tuple[list[str], BatchScores]:
        """Texts and scores of all rows, in their order, once `begin` got each.

        Args:
            on_wait: called while functions run; what it raises ends the wait.

        Raises:
            RewardError: in one line, if a function failed and the scorer stops then.
        """
        scorer = self._scorer
        rows = range(len(self._problems))
        texts = [
            self._played[row].text if row in self._played else self._texts[row] for row in rows
        ]
        if rows:  # no function is called on an empty batch
            scorer.pool.begin(
                [problem.given for problem in self._problems],
                [self._completion(row) for row in rows],
                [self._ids[row] for row in rows],
                columns_of(self._problems, scorer.columns),
                self._state,
            )
        answered, *asked = self._with_answers(rows)
        grades = scorer.verifier.grade(*asked) if MATH in scorer.names else None
        results = (
            scorer.pool.collect(on_wait) if rows else dict.fromkeys(scorer.names, Returned([]))
        )
        if grades is not None:
            given = dict(zip(answered, grades.rewards.tolist(), strict=True))
            results[MATH] = Returned([given.get(row) for row in rows])
        if self._played:
            results[ENVIRONMENT] = Returned([self._played[row].reward for row in rows])
        returned: dict[str, Returned] = {}
        failed: dict[str, int] = {}
        extra: dict[str, list[Any]] = {}
        for function, name in scorer.names.items():
            returned[name] = self._returned(function, results[function])
            # Two functions may log under one name.
            extra |= {
                f"{name}/{key}" if key in extra else key: column
                for key, column in returned[name].extra.items()
            }
            if function != MATH:
                uncounted = function != ENVIRONMENT and not isinstance(
                    results[function], RewardError
                )
                failed[name] = 0 if uncounted else returned[name].rewards.count(None)
        values = {name: one.rewards for name, one in returned.items()}
        none = all(value is None for column in values.values() for value in column)
        if rows and values and none and not any(failed.values()):
            problem = (
                f"no reward has a value for any of the {len(rows)} completions, so all get reward 0"
            )
            scorer.warn_once("no value", problem)
        logged = [
            {key: (math.fsum(each), len(each)) for key, each in one.metrics.items()}
            for one in returned.values()
        ]
        totals = weighted_total(list(values.values()), [reward.weight for reward in scorer.rewards])
        totals = totals or [0.0] * len(rows)
        return texts, BatchScores(
            totals=np.array(totals, np.float32),
            values={name: np.array(column, np.float32) for name, column in values.items()},
            failed=failed,
            grades=grades,
            sources=tuple(problem.source for problem in self._problems)
            if scorer.by_source
            else None,
            logged=self._own_numbers() | add_logged(logged),
            extra=extra,
        )

    def _completion(self, row: int) -> str | list[Message]:
        """A completion as functions get it."""
        problem = self._problems[row]
        played = self._played.get(row)
        if played is None:
            return problem.as_completion(self._texts[row])
        return played.messages if problem.messages else played.text

    def _own_numbers(self) -> dict[str, tuple[float, int]]:
        """Sums and counts of what the scoring itself logs."""
        own: dict[str, tuple[float, int]] = {}
        if self._beyond:
            own[_BEYOND] = float(self._beyond), self._tokens
            self._scorer.warn_once(
                _BEYOND,
                f"{self._beyond:,} of {self._tokens:,} sampled tokens are ids beyond the "
                "tokenizer's: they have no text",
            )
        if played := list(self._played.values()):
            own["environment/turns_mean"] = float(sum(one.turns for one in played)), len(played)
            own["environment/done_fraction"] = float(sum(one.done for one in played)), len(played)
        return own

    def _returned(self, function: str, result: Returned | RewardError) -> Returned:
        """The result of a function; no values where it failed, if failures are counted."""
        if isinstance(result, Returned):
            return result
        problem = str(result)
        if result.row is not None:
            row = self._problems[result.row]
            problem += (
                f" (completion {result.row} of the batch, of row {row.index} of {row.source})"
            )
        if self._scorer.stop_on_error:
            raise RewardError(problem)
        self._scorer.warn_once(function, f"{problem}; its completions get no value of this reward")
        return Returned([None] * len(self._problems))


_BEYOND = "completion/beyond_vocabulary_fraction"
_OWN = ("environment/turns_mean", "environment/done_fraction", _BEYOND)


def reward_metrics(scores: BatchScores) -> dict[str, float]:
    """Metrics of a batch, named as in observe/metric_names.py.

    `reward/NAME/mean` and `/std` of each reward, over the completions that have a value of it;
    absent if none has. `reward/NAME/failed` of each function. `reward/source/SOURCE/mean` and
    `/std` of the totals, if the scores name sources. `environment/turns_mean` and `/done_fraction`
    with an environment. `completion/beyond_vocabulary_fraction` if there are such tokens.
    `logged/NAME`: mean of the numbers that functions logged under NAME.
    """
    metrics: dict[str, float] = {
        f"reward/{name}/failed": count for name, count in scores.failed.items()
    }
    for name, values in scores.values.items():
        if len(exact := values[np.isfinite(values)].astype(np.float64)):
            metrics |= {
                f"reward/{name}/mean": float(exact.mean()),
                f"reward/{name}/std": float(exact.std()),
            }
    for source in sorted(set(scores.sources or ())):
        exact = scores.totals[np.array(scores.sources) == source].astype(np.float64)
        metrics |= {
            f"reward/source/{source}/mean": float(exact.mean()),
            f"reward/source/{source}/std": float(exact.std()),
        }
    missing = np.all([np.isnan(values) for values in scores.values.values()], axis=0)
    metrics["reward/without_value"] = int(missing.sum()) if scores.values else 0
    for name, (value, count) in scores.logged.items():
        metrics[name if name in _OWN else f"logged/{name}"] = value / count
    return metrics
