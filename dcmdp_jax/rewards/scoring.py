"""The total reward of each completion: `math` and the functions of users, with weights."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
LoggedSums = Mapping[str, tuple[float, int]]
"""Name -> sum and count of the numbers logged under it."""
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
    logged: LoggedSums = dataclasses.field(default_factory=dict)
    extra: dict[str, list[Any]] = dataclasses.field(default_factory=dict)

    def extra_of(self, index: int) -> dict[str, Any]:
        """Values that functions logged about one completion, by name."""
        return {name: values[index] for name, values in self.extra.items()}

    def of_completion(self, index: int) -> dict[str, float | None]:
        """Each reward of one completion, by name."""
        rewards = {}
        for name, values in self.values.items():
            rewards[name] = None
            if not np.isnan(values[index]):
                rewards[name] = float(values[index])
        return rewards


def merge_scores(batches: Sequence[BatchScores]) -> BatchScores:
    """The scores of several batches of one scorer as one batch's, in order."""
    first = batches[0]
    grades = None
    graded_batches = [scores.grades for scores in batches if scores.grades is not None]
    if graded_batches:
        grades = merge_grades(graded_batches)
    sources = None
    if first.sources is not None:
        sources = tuple(itertools.chain.from_iterable(scores.sources for scores in batches))
    extra = {}
    for scores in batches:
        for name in scores.extra:
            extra[name] = []
    for scores in batches:
        for name, column in extra.items():
            column += scores.extra.get(name, [None] * len(scores.totals))

    values = {}
    for name in first.values:
        values[name] = np.concatenate([scores.values[name] for scores in batches])
    failed = {}
    for name in first.failed:
        failed[name] = sum(scores.failed[name] for scores in batches)

    return BatchScores(
        totals=np.concatenate([scores.totals for scores in batches]),
        values=values,
        failed=failed,
        grades=grades,
        sources=sources,
        logged=add_logged([scores.logged for scores in batches]),
        extra=extra,
    )


def add_logged(batches: Sequence[LoggedSums]) -> dict[str, tuple[float, int]]:
    """Sums and counts of logged numbers, added up by name, in the order of the first."""
    totals = {}
    for logged in batches:
        for name, (value, count) in logged.items():
            total, total_count = totals.get(name, (0.0, 0))
            totals[name] = total + value, total_count + count
    return totals


def column_names(problems: Sequence[Problem]) -> list[str]:
    """Names of the columns that reward functions get, in the order of their first row."""
    names = {}
    for problem in problems:
        names |= dict.fromkeys(problem.columns)
    return list(names | dict.fromkeys(OWN_COLUMNS))


def columns_of(problems: Sequence[Problem], names: Sequence[str]) -> dict[str, list[Any]]:
    """The columns of some problems, one value for each; None where a problem has none."""

    def cell(problem: Problem, name: str) -> Any:
        if name in problem.columns or name not in OWN_COLUMNS:
            return problem.columns.get(name)
        return getattr(problem, OWN_COLUMNS[name])

    columns = {}
    for name in names:
        columns[name] = [cell(problem, name) for problem in problems]
    return columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played:
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
    functions = _user_functions(rewards)
    with RewardPool(functions, columns, timeout_s=1.0, memory_gib=memory_gib) as pool:
        pool.wait_until_loaded()


def _user_functions(rewards: Sequence[Reward]) -> list[str]:
    """The functions that are called in processes of their own."""
    functions = [reward.function for reward in rewards]
    return [function for function in functions if function not in (MATH, ENVIRONMENT)]


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
        self.pool = RewardPool(
            _user_functions(rewards),
            columns,
            timeout_s=timeout_s,
            memory_gib=memory_gib,
            output=output,
        )
        self._warned: set[str] = set()

    def close(self) -> None:
        """Kill the processes of the functions. Harmless when called again."""
        self.pool.close()

    def warn_once(self, kind: str, problem: str) -> None:
        """Log the first failure of a kind, such as those of one function."""
        if kind not in self._warned:
            self._warned.add(kind)
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
        # Tokens decoded, and how many ids are beyond the tokenizer's.
        self._tokens = 0
        self._beyond = 0

    def begin(self, rows: Sequence[int], completion_ids: Sequence[np.ndarray]) -> None:
        """Start to score completions, each row once, while others are still sampled."""
        if not rows:  # transformers decodes an empty batch to one empty text
            return
        texts = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        self._texts |= zip(rows, texts, strict=True)
        self._ids |= zip(rows, completion_ids, strict=True)
        self._tokens += sum(map(len, completion_ids))
        for ids in completion_ids:
            self._beyond += int(np.sum(np.asarray(ids) >= len(self._tokenizer)))
        if MATH in self._scorer.names:
            answers = self._answers(rows)
            self._scorer.verifier.begin(
                [self._texts[row] for row in answers], list(answers.values())
            )

    def _answers(self, rows: Sequence[int]) -> dict[int, str]:
        """Row -> reference answer, where it has one."""
        answers = {}
        for row in rows:
            answer = self._problems[row].answer
            if answer is not None:
                answers[row] = answer
        return answers

    def add_played(self, played: Mapping[int, Played]) -> None:
        """Take what an environment made of the rows, before `finish`; functions get it too."""
        self._played = played
        for row, episode in played.items():
            self._ids[row] = episode.ids

    def finish(self, on_wait: Callable[[], None] = lambda: None) -> tuple[list[str], BatchScores]:
        """Texts and scores of all rows, in their order, once `begin` got each.

        Args:
            on_wait: called while functions run; what it raises ends the wait.

        Raises:
            RewardError: in one line, if a function failed and the scorer stops then.
        """
        scorer = self._scorer
        rows = range(len(self._problems))
        if rows:  # no function is called on an empty batch
            scorer.pool.begin(
                prompts=[problem.as_prompt for problem in self._problems],
                completions=[self._completion(row) for row in rows],
                completion_ids=[self._ids[row] for row in rows],
                columns=columns_of(self._problems, scorer.columns),
                state=self._state,
            )
        grades = None
        answers = self._answers(rows)
        if MATH in scorer.names:
            grades = scorer.verifier.grade(
                [self._texts[row] for row in answers], list(answers.values())
            )
        results = dict.fromkeys(scorer.names, Returned([]))
        if rows:
            results = scorer.pool.collect(on_wait)
        if grades is not None:
            rewards = dict(zip(answers, grades.rewards.tolist(), strict=True))
            results[MATH] = Returned([rewards.get(row) for row in rows])
        if self._played:
            results[ENVIRONMENT] = Returned([self._played[row].reward for row in rows])

        texts = dict(self._texts)
        for row, episode in self._played.items():
            texts[row] = episode.text
        return [texts[row] for row in rows], self._scores(results, grades)

    def _scores(
        self, results: Mapping[str, Returned | RewardError], grades: Grades | None
    ) -> BatchScores:
        """The scores of all rows from the results of each function."""
        scorer = self._scorer
        count = len(self._problems)
        values = {}
        failed = {}
        logged = []
        extra = {}
        for function, name in scorer.names.items():
            result = results[function]
            returned = self._returned(function, result)
            values[name] = returned.rewards
            sums = {}
            for key, numbers in returned.metrics.items():
                sums[key] = math.fsum(numbers), len(numbers)
            logged.append(sums)
            for key, column in returned.extra.items():
                if key in extra:  # two functions may log under one name
                    key = f"{name}/{key}"
                extra[key] = column
            if function == MATH:
                continue  # its failures are in `grades`
            failed[name] = 0
            if function == ENVIRONMENT or isinstance(result, RewardError):
                failed[name] = returned.rewards.count(None)

        without_value = all(column.count(None) == count for column in values.values())
        if count and values and without_value and not any(failed.values()):
            scorer.warn_once(
                "no value",
                f"no reward has a value for any of the {count} completions, so all get reward 0",
            )
        totals = [0.0] * count
        if values:
            weights = [reward.weight for reward in scorer.rewards]
            totals = weighted_total(list(values.values()), weights)
        sources = None
        if scorer.by_source:
            sources = tuple(problem.source for problem in self._problems)
        return BatchScores(
            totals=np.array(totals, np.float32),
            values={name: np.array(column, np.float32) for name, column in values.items()},
            failed=failed,
            grades=grades,
            sources=sources,
            logged=self._own_numbers() | add_logged(logged),
            extra=extra,
        )

    def _completion(self, row: int) -> str | list[Message]:
        """A completion as functions get it."""
        problem = self._problems[row]
        played = self._played.get(row)
        if played is None:
            return problem.as_completion(self._texts[row])
        if problem.messages:
            return played.messages
        return played.text

    def _own_numbers(self) -> dict[str, tuple[float, int]]:
        """Sums and counts of what the scoring itself logs."""
        logged = {}
        if self._beyond:
            logged[_BEYOND] = float(self._beyond), self._tokens
            self._scorer.warn_once(
                _BEYOND,
                f"{self._beyond:,} of {self._tokens:,} sampled tokens are ids beyond the "
                "tokenizer's: they have no text",
            )
        if self._played:
            count = len(self._played)
            turns = sum(episode.turns for episode in self._played.values())
            done = sum(episode.done for episode in self._played.values())
            logged["environment/turns_mean"] = float(turns), count
            logged["environment/done_fraction"] = float(done), count
        return logged

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
    metrics = {f"reward/{name}/failed": count for name, count in scores.failed.items()}
    without_value = np.full(len(scores.totals), bool(scores.values))
    for name, values in scores.values.items():
        has_value = np.isfinite(values)
        without_value &= np.isnan(values)
        if has_value.any():
            rewards = values[has_value].astype(np.float64)
            metrics[f"reward/{name}/mean"] = float(rewards.mean())
            metrics[f"reward/{name}/std"] = float(rewards.std())
    for source in sorted(set(scores.sources or ())):
        totals = scores.totals[np.array(scores.sources) == source].astype(np.float64)
        metrics[f"reward/source/{source}/mean"] = float(totals.mean())
        metrics[f"reward/source/{source}/std"] = float(totals.std())
    metrics["reward/without_value"] = int(without_value.sum())
    for name, (value, count) in scores.logged.items():
        if name not in _OWN:
            name = f"logged/{name}"
        metrics[name] = value / count
    return metrics
