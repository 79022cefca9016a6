"""Totals of `math` and of users' functions, and what a failure says."""

import numpy as np
import pytest

from dcmdp_jax.data.rows import problem_from_row
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rewards.protocol import Reward, RewardError
from dcmdp_jax.rewards.scoring import BatchScoring, RewardScorer, column_names, reward_metrics
from tests.rewards import planted_rewards

_LONG_S = 1000.0
_TEXTS = {1: "Answer: 3", 2: "Answer: 4", 3: "none"}


class _Tokenizer:
    """A text for each number of tokens."""

    def batch_decode(self, completion_ids, *, skip_special_tokens):
        assert skip_special_tokens
        return [_TEXTS[len(ids)] for ids in completion_ids]

    def __len__(self):
        return 5


def _problem(index, answer, source, **columns):
    row = {"prompt": f"problem {index}", "answer": answer, "data_source": source, **columns}
    return problem_from_row(row, source="file", index=index, keep_columns=True)


_PROBLEMS = [_problem(7, 3, "algebra"), _problem(9, "4", "code", difficulty="hard")]
_IDS = [np.zeros(length, np.int32) for length in (1, 2, 2, 3)]


def _finish(*rewards, stop_on_error=True, by_source=False):
    """Scores of two completions of each problem, which come out of order."""
    columns = column_names(_PROBLEMS)
    with Verifier(1) as verifier:
        scorer = RewardScorer(
            rewards,
            verifier,
            columns,
            by_source=by_source,
            timeout_s=_LONG_S,
            stop_on_error=stop_on_error,
        )
        try:
            scoring = BatchScoring(scorer, _Tokenizer(), [_PROBLEMS[0]] * 2 + [_PROBLEMS[1]] * 2)
            scoring.begin([2, 0], [_IDS[2], _IDS[0]])
            scoring.begin([], [])
            scoring.begin([1, 3], [_IDS[1], _IDS[3]])
            return scoring.finish()
        finally:
            scorer.close()


def _own(function, weight=1.0):
    return Reward(f"{planted_rewards.__file__}:{function}", weight)


def test_columns_are_those_of_all_rows_and_hold_the_answer_and_the_source():
    assert column_names(_PROBLEMS) == [
        "answer",
        "data_source",
        "difficulty",
        "source",
        "reference_answer",
    ]
    bare = problem_from_row({"prompt": "a", "answer": 1}, source="f", index=0)
    assert column_names([bare]) == ["answer", "source", "reference_answer"]


def test_the_total_is_the_weighted_sum_of_math_and_functions():
    texts, scores = _finish(
        Reward("math", 2.0), _own("length", 0.5), _own("only_for_algebra", -1.0), by_source=True
    )
    assert texts == ["Answer: 3", "Answer: 4", "Answer: 4", "none"]
    np.testing.assert_array_equal(scores.values["math"], [1, 0, 1, 0])
    np.testing.assert_array_equal(scores.values["length"], [1, 2, 2, 3])
    np.testing.assert_array_equal(scores.values["only_for_algebra"], [1, 1, np.nan, np.nan])
    # 2 x 1 + 0.5 x 1 - 1, 2 x 0 + 0.5 x 2 - 1, 2 x 1 + 0.5 x 2, 2 x 0 + 0.5 x 3
    np.testing.assert_array_equal(scores.totals, np.array([1.5, 0.0, 3.0, 1.5], np.float32))
    assert scores.failed == {"length": 0, "only_for_algebra": 0}
    assert scores.sources == ("algebra", "algebra", "code", "code")
    assert scores.grades is not None and scores.grades.unparsed == 1


def test_a_batch_without_any_value_is_said(monkeypatch, caplog):
    _finish(_own("only_for_algebra"))
    assert caplog.text == ""  # two of four have one
    monkeypatch.setitem(globals(), "_PROBLEMS", [_PROBLEMS[1]] * 2)
    assert _finish(_own("only_for_algebra"))[1].totals.tolist() == [0.0] * 4
    assert "no reward has a value for any of the 4 completions, so all get reward 0" in caplog.text


def test_ids_beyond_the_tokenizer_are_counted_and_said_once(monkeypatch, caplog):
    assert "completion/beyond_vocabulary_fraction" not in reward_metrics(_finish(Reward("math"))[1])
    ids = [np.array(each, np.int32) for each in ([5], [4, 0], [9, 1], [0, 1, 2])]
    monkeypatch.setitem(globals(), "_IDS", ids)
    # 5 and 9 of the 8 tokens are beyond the last of 5 tokens, 4.
    assert (
        reward_metrics(_finish(Reward("math"))[1])["completion/beyond_vocabulary_fraction"] == 2 / 8
    )
    assert (
        caplog.text.count("2 of 8 sampled tokens are ids beyond the tokenizer's: they have no text")
        == 1
    )


def test_without_math_nothing_is_judged():
    _, scores = _finish(_own("only_for_algebra"))
    np.testing.assert_array_equal(scores.totals, [1, 1, 0, 0])
    assert scores.grades is None and scores.sources is None


def test_a_failure_names_the_function_and_the_row_of_the_data():
    bad = _own("not_a_number")
    with pytest.raises(RewardError) as raised:
        _finish(Reward("math"), bad)
    assert str(raised.value) == (
        f"reward {bad.function}: returned nan, needs a finite number or None "
        "(completion 3 of the batch, of row 9 of code)"
    )


def test_a_failure_can_be_counted_instead(caplog):
    _, scores = _finish(Reward("math"), _own("not_a_number", 5.0), stop_on_error=False)
    np.testing.assert_array_equal(scores.totals, [1, 0, 1, 0])
    assert np.isnan(scores.values["not_a_number"]).all() and scores.failed == {"not_a_number": 4}
    assert "its completions get no value of this reward" in caplog.text
