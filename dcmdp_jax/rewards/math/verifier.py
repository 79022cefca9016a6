"""Rewards: completions graded against reference answers.

Most of a batch is decided in the trainer's process by `answers`: completions without an answer, and
pairs of literals (integers, decimals, fractions, words). The rest goes to worker processes that run
math-verify (`isolated`).

A reward is a function of the completion and its reference answer, with two exceptions that are
counted:
- The time limit of a comparison counts its own processor time. An answer that needs almost exactly
  the limit can get either reward; so can a slow answer on a machine so busy that the limit of its
  wall-clock time passes first.
- The budget of a batch is wall-clock time. When it is used up, undecided answers get reward 0, so
  rewards depend on the machine and a resumed run need not repeat them. The default is far above the
  need of ordinary batches. Only slow answers wait long: each gets its whole limit after all others
  had a first try.
"""

import concurrent.futures
import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from dcmdp_jax.rewards.isolated import CallError, Closing, IsolatedPool
from dcmdp_jax.rewards.math.answers import compare_literals, extract_answer

_LOG = logging.getLogger(__name__)
COMPARISON = "dcmdp_jax.rewards.math.equivalence"
"""Module whose `load` gives the function that compares two answers."""
_MEMORY_GIB = 2.0
# Limit of a comparison in wall-clock time: processor time times the factor, plus the seconds. On a
# loaded machine it gets done, and one that sleeps ends.
WALL_FACTOR = 3
WALL_SECONDS = 15.0
_OVER_BUDGET = "over budget"
_Pair = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Grades:
    """Rewards of a batch of completions, and counts of failures.

    Attributes:
        rewards: [N] float32, 1 where the completion's answer equals the reference, else 0.
        errors: completions whose comparison raised or killed its worker twice; reward 0.
        timeouts: completions whose comparison was over the time limit; reward 0.
        over_budget: completions that were undecided when the batch's budget ran out; reward 0.
        unparsed: completions without an answer (no box, no "Answer:" line); reward 0.
    """

    rewards: np.ndarray
    errors: int
    timeouts: int
    over_budget: int
    unparsed: int


def merge_grades(batches: Sequence[Grades]) -> Grades:
    """The grades of several batches as one batch's, in order."""
    return Grades(
        rewards=np.concatenate([grades.rewards for grades in batches]),
        errors=sum(grades.errors for grades in batches),
        timeouts=sum(grades.timeouts for grades in batches),
        over_budget=sum(grades.over_budget for grades in batches),
        unparsed=sum(grades.unparsed for grades in batches),
    )


class Verifier(Closing):
    """Grades completions with a pool of worker processes, started when first needed.

    Not thread-safe. Close it, or use it as a context manager.

    Args:
        num_workers: worker processes, at least 1.
        timeout_s: seconds of processor time one comparison may take in a worker, above 0. In
            wall-clock time it may take three times as long, and 15 seconds more; its short first
            try a third of that.
        budget_s: longest time `grade` waits for the comparisons of one batch, in seconds; 0 for no
            budget.
        extraction: where a completion's answer is, the setting `rewards.answer_extraction`.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        num_workers: int = 2,
        timeout_s: float = 5.0,
        budget_s: float = 120.0,
        extraction: str = "strict",
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers = {num_workers}: at least 1 verifier process is needed")
        if not timeout_s > 0:
            raise ValueError(
                f"timeout_s = {timeout_s}: the time limit of an answer must be above 0 seconds"
            )
        if not budget_s >= 0:
            raise ValueError(
                f"budget_s = {budget_s}: the time for a batch must be at least 0 seconds (0: none)"
            )
        self._pool = IsolatedPool(COMPARISON, workers=num_workers, memory_gib=_MEMORY_GIB)
        self._timeout_s = timeout_s
        self._budget_s = budget_s
        self._extraction = extraction
        self._warned = False
        self._graded = False
        self._closed = False
        # Every started pair that is not yet graded is in one of the two.
        self._decided: dict[_Pair, bool | str] = {}
        self._calls: dict[_Pair, Future[bool]] = {}

    def begin(self, completions: Sequence[str], answers: Sequence[str]) -> list[_Pair | None]:
        """Start to compare completions that `grade` will get. Does not wait.

        Args:
            completions, answers: see `grade`.

        Returns:
            The pair to compare for each completion, None without an answer.

        Raises:
            ValueError, RuntimeError: see `grade`.
        """
        if len(completions) != len(answers):
            raise ValueError(
                f"{len(completions)} completions and {len(answers)} answers: one answer per "
                "completion"
            )
        if self._closed:
            raise RuntimeError("the verifier is closed: make a new one")

        wall_s = WALL_FACTOR * self._timeout_s + WALL_SECONDS
        pairs = []
        for completion, answer in zip(completions, answers, strict=True):
            prediction = self.found_answer(completion)
            if prediction is None:
                pairs.append(None)
                continue

            pair = prediction, answer
            pairs.append(pair)
            if pair in self._decided or pair in self._calls:
                continue
            equal = compare_literals(prediction, answer)
            if equal is None:
                self._calls[pair] = self._pool.submit(
                    prediction,
                    answer,
                    wall_s=wall_s,
                    cpu_s=self._timeout_s,
                )
            else:
                self._decided[pair] = equal
        return pairs

    def grade(self, completions: Sequence[str], answers: Sequence[str]) -> Grades:
        r"""Rewards of completions, in their order.

        A comparison that raises or runs over its time limit is reward 0 and counted, never an
        exception here. A worker that dies under a comparison (killed for memory, say) is replaced
        and the comparison tried once more.

        Args:
            completions: decoded text of N completions.
            answers: the N reference answers, in the notation of `answers` (`\tolerance{...}`
                understood).

        Raises:
            ValueError: if the lengths differ or a reference answer states an ill-written tolerance.
            RuntimeError: if the verifier is closed, or its workers can't start.
        """
        pairs = self.begin(completions, answers)
        self._wait_for({pair for pair in pairs if pair in self._calls})
        results = list(map(self._decided.get, pairs))  # None without an answer
        self._decided.clear()

        if pairs and not self._graded:
            self._graded = True
            if not any(pairs):
                self._say_where_answers_are(completions)
        over_budget = results.count(_OVER_BUDGET)
        if over_budget and not self._warned:
            self._warned = True
            _LOG.warning(
                "%d of %d answers were undecided after %g s, the verifier's budget for a batch, "
                "and get reward 0. Later batches are counted by the metric "
                "reward/verifier_over_budget alone",
                over_budget,
                len(results),
                self._budget_s,
            )
        return Grades(
            rewards=np.array([result is True for result in results], dtype=np.float32),
            errors=results.count("error"),
            timeouts=results.count("timeout"),
            over_budget=over_budget,
            unparsed=pairs.count(None),
        )

    def found_answer(self, completion: str) -> str | None:
        """The answer that a completion is judged by; None without one."""
        return extract_answer(completion, self._extraction)

    def _say_where_answers_are(self, completions: Sequence[str]) -> None:
        """Log that no completion of the first batch has an answer: they all get reward 0."""
        stated = sum(
            extract_answer(completion, "flexible") is not None for completion in completions
        )
        _LOG.warning(
            'none of the first %d completions has an answer in \\boxed{} or after "Answer:", so '
            'all get reward 0; %d have one as "#### 72" or "The answer is 72", which '
            "answer_extraction=flexible reads (it is %s)",
            len(completions),
            stated,
            self._extraction,
        )

    def close(self) -> None:
        """Kill the workers. Harmless when called again."""
        self._closed = True
        self._pool.close()

    def _wait_for(self, undecided: set[_Pair]) -> None:
        """Wait until every pair is decided or the budget is used up."""
        calls = {pair: self._calls.pop(pair) for pair in undecided}
        done, _ = concurrent.futures.wait(calls.values(), self._budget_s or None)
        for pair, call in calls.items():
            if call not in done:
                call.cancel()
                self._decided[pair] = _OVER_BUDGET
                continue
            try:
                self._decided[pair] = call.result()
            except CallError as error:
                if error.kind == "load":
                    self.close()
                    raise RuntimeError(f"no verifier process could be started: {error}") from error
                prediction, answer = pair
                _LOG.debug(
                    "verifier %s %s: prediction %r, answer %r",
                    error.kind,
                    error,
                    prediction,
                    answer,
                )
                self._decided[pair] = error.kind
