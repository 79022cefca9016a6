"""The total reward of each completion: `math` and the functions of users, with weights."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dcmdp_jax.rewards.grading import Grading
from dcmdp_jax.rewards.math.verifier import Grades, Verifier, merge_grades
from dcmdp_jax.rewards.protocol import MATH, Problem, Reward, RewardError, short_names, weighted_total
from dcmdp_jax.rewards.reward_pool import Failure, RewardPool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)
# Columns of every problem; a field of the row with this name is ignored.
_OWN_COLUMNS = ("answer", "source")


@dataclasses.dataclass(frozen=True)
class BatchScores:
    """Rewards of N completions.

    Attributes:
        totals: [N] float32, the weighted sum over rewards; 0 for a completion without any value.
        values: short name of each reward -> [N] float32, NaN where it gave no value.
        failed: short name of each function -> completions of its failed calls.
        grades: the verifier's results, None without the reward `math`.
        sources: the data source of each; None if all data have the same.
    """

    totals: np.ndarray
    values: dict[str, np.ndarray]
    failed: dict[str, int]
    grades: Grades | None
    sources: tuple[str, ...] | None = None

    def of_completion(self, index: int) -> dict[str, float | None]:
        """Each reward of one completion, by name."""
        return {name: None if np.isnan(v[index]) else float(v[index]) for name, v in self.values.items()}


def merge_scores(parts: Sequence[BatchScores]) -> BatchScores:
    """The scores of several batches of one scorer as those of one batch, in order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    grades = [part.grades for part in parts if part.grades is not None]
    return BatchScores(
        totals=np.concatenate([part.totals for part in parts]),
        values={name: np.concatenate([part.values[name] for part in parts]) for name in first.values},
        failed={name: sum(part.failed[name] for part in parts) for name in first.failed},
        grades=merge_grades(grades) if grades else None,
        sources=None if first.sources is None else tuple(source for part in parts for source in part.sources),
    )


def column_names(problems: Sequence[Problem]) -> list[str]:
    """Names of the columns that reward functions get for these problems, in the order of their first row."""
    names = dict.fromkeys(name for problem in problems for name in problem.columns)
    return list(names | dict.fromkeys(_OWN_COLUMNS))


def check_rewards(rewards: Sequence[Reward], columns: Sequence[str], *, memory_gib: float = 0.0) -> None:
    """Import every reward function in its own process, then end the processes.

    Args:
        rewards: the functions.
        columns: names of the columns that they get.
        memory_gib: address space of each process in GiB, 0 for no limit.

    Raises:
        RewardError: in one line, for a function that can't be imported or can't be called with these columns.
    """
    functions = [reward.function for reward in rewards if reward.function != MATH]
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
        stop_on_error: whether a failed call raises. Otherwise it is counted, and its completions get no value of this
            reward.
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
    ) -> None:
        self.rewards, self.verifier, self.columns = tuple(rewards), verifier, tuple(columns)
        self.by_source, self.stop_on_error = by_source, stop_on_error
        functions = [reward.function for reward in rewards]
        self.names = dict(zip(functions, short_names(functions), strict=True))
        own = [name for name in functions if name != MATH]
        self.pool = RewardPool(own, columns, timeout_s=timeout_s, memory_gib=memory_gib)
        self._warned: set[str] = set()

    def close(self) -> None:
        """Kill the processes of the functions. Harmless when called again."""
        self.pool.close()

    def no_scores(self) -> BatchScores:
        """Scores of no completions."""
        none = np.zeros(0, np.float32)
        functions = [name for function, name in self.names.items() if function != MATH]
        return BatchScores(
            totals=none,
            values=dict.fromkeys(self.names.values(), none),
            failed=dict.fromkeys(functions, 0),
            grades=Grades(none, 0, 0, 0, 0) if MATH in self.names else None,
            sources=() if self.by_source else None,
        )

    def warn_once(self, function: str, problem: str) -> None:
        """Log the first failure of a function."""
        if function not in self._warned:
            self._warned.add(function)
            _LOG.warning("%s; its completions get no value of this reward. Later failures are only counted", problem)


class BatchScoring:
    """Texts and rewards of the completions that one call of an engine's `generate` samples.

    `math` grades a completion as soon as its group is sampled. A function is called once, on the whole batch, when all
    are: it may compare completions, or send all its requests at once.

    Args:
        scorer: calls the functions.
        tokenizer: turns token ids into text.
        problems: the problem of each row, `prompt * group_size + member`.
    """

    def __init__(self, scorer: RewardScorer, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> None:
        self._scorer, self._problems = scorer, problems
        self.answers = [problem.answer for problem in problems]
        self._grading = Grading(scorer.verifier, tokenizer, self.answers)
        self._completion_ids: dict[int, np.ndarray] = {}

    def begin(self, rows: Sequence[int], completion_ids: Sequence[np.ndarray]) -> None:
        """Start to score completions, each row once, while others are still sampled."""
        if MATH in self._scorer.names:
            self._grading.begin(rows, completion_ids)
        else:
            self._grading.decode(rows, completion_ids)
        self._completion_ids |= zip(rows, completion_ids, strict=True)

    def finish(self, on_wait: Callable[[], None] = lambda: None) -> tuple[list[str], BatchScores]:
        """Texts and scores of all rows, in their order, once `begin` got each.

        Args:
            on_wait: called while functions run; what it raises ends the wait.

        Raises:
            RewardError: in one line, if a function failed and the scorer stops then.
        """
        scorer = self._scorer
        if not self._problems:
            return [], scorer.no_scores()
        texts = self._grading.texts()
        scorer.pool.begin(
            [problem.prompt for problem in self._problems], texts,
            [self._completion_ids[row] for row in range(len(texts))],
            {name: [self._cell(problem, name) for problem in self._problems] for name in scorer.columns},
        )  # fmt: skip
        grades = self._grading.grade() if MATH in scorer.names else None
        results = scorer.pool.collect(on_wait)
        if grades is not None:
            results[MATH] = grades.rewards.tolist()
        values: list[list[float | None]] = []
        failed = {}
        for reward in scorer.rewards:
            result, name = results[reward.function], scorer.names[reward.function]
            if isinstance(result, Failure):
                self._failed(reward.function, result)
                failed[name] = len(texts)
                result = [None] * len(texts)
            elif reward.function != MATH:
                failed[name] = 0
            values.append(result)
        totals = weighted_total(values, [reward.weight for reward in scorer.rewards])
        by_name = zip(scorer.names.values(), values, strict=True)
        return texts, BatchScores(
            totals=np.array(totals, np.float32),
            values={name: np.array(column, np.float32) for name, column in by_name},
            failed=failed,
            grades=grades,
            sources=tuple(problem.source for problem in self._problems) if scorer.by_source else None,
        )

    def _cell(self, problem: Problem, name: str) -> object:
        return getattr(problem, name) if name in _OWN_COLUMNS else problem.columns.get(name)

    def _failed(self, function: str, failure: Failure) -> None:
        problem = failure.problem
        if failure.row is not None:
            row = self._problems[failure.row]
            problem += f" (completion {failure.row} of the batch, of row {row.index} of {row.source})"
        if self._scorer.stop_on_error:
            raise RewardError(problem)
        self._scorer.warn_once(function, problem)
