"""The lines of an evaluation: continued after a cut at any byte, refused for another evaluation."""

import json
import re

import numpy as np
import pytest

from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import EvaluationResult
from dcmdp_jax.evaluation.log import EvaluationLog, open_output

_HEADER = {"model": "m", "step": None, "settings": {"seed": 0, "tasks": {"t": "t.jsonl"}}}


def _part(seed, problems=2, task="t"):
    random = np.random.default_rng(seed)
    return EvaluationResult(
        task=task,
        scores=random.integers(0, 2, (problems, 3)).astype(np.float32),
        lengths=random.integers(1, 9, (problems, 3)).astype(np.int32),
        truncated=random.random((problems, 3)) < 0.5,
        unparsed=random.random((problems, 3)) < 0.5,
        texts=np.array(
            [[f"text {seed} {row} {place}" for place in range(3)] for row in range(problems)],
            object,
        ),
        answers=np.array([["7", None, "x"]] * problems, object),
        unjudged={"verifier_timeouts": seed, "verifier_errors": 0, "verifier_over_budget": 1},
    )


def _write(path):
    with EvaluationLog(path, _HEADER) as log:
        for part in range(3):
            if log.finished("t", part) is None:
                log.append(part, [{"row": 2 * part}, {"row": 2 * part + 1}], _part(part))
    return path.read_bytes()


def test_lines_hold_every_problem(tmp_path):
    lines = [json.loads(line) for line in _write(tmp_path / "e.problems.jsonl").splitlines()]
    assert lines[0] == _HEADER
    first = _part(0)
    assert lines[1] == {
        "task": "t",
        "row": 0,
        "average": float(np.mean(first.scores[0], dtype=float)),
        "scores": first.scores[0].tolist(),
        "lengths": first.lengths[0].tolist(),
        "truncated": first.truncated[0].tolist(),
        "unparsed": first.unparsed[0].tolist(),
        "completions": ["text 0 0 0", "text 0 0 1", "text 0 0 2"],
        "found": ["7", None, "x"],
    }
    assert lines[6] == {
        "task": "t",
        "part": 1,
        "problems": 2,
        "verifier_timeouts": 1,
        "verifier_errors": 0,
        "verifier_over_budget": 1,
    }


def test_a_file_cut_anywhere_ends_with_the_same_bytes(tmp_path):
    whole = _write(tmp_path / "whole")
    for cut in [*range(0, len(whole), 37), len(whole) - 1]:
        path = tmp_path / f"cut{cut}"
        path.write_bytes(whole[:cut])
        assert _write(path) == whole


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b'"scores"', b'"scorfs"'),
        (b'"lengths": [', b'"lengths": [[], '),
        (b'"truncated": [', b'"truncated": 7, "x": ['),
        (b'"task": "t", "part": 1', b'"tasl": "t", "part": 1'),
        (b'"verifier_errors"', b'"verifier_errorr"'),
    ],
)
def test_a_damaged_part_that_is_still_json_is_evaluated_again(tmp_path, good, bad):
    whole = _write(tmp_path / "whole")
    first = whole[: (cut := whole.index(b'"row": 2'))]
    rest = whole[cut:]
    (tmp_path / "damaged").write_bytes(first + rest.replace(good, bad, 1))
    assert _write(tmp_path / "damaged") == whole


def test_finished_parts_come_back_as_they_were(tmp_path):
    _write(tmp_path / "e")
    with EvaluationLog(tmp_path / "e", _HEADER) as log:
        for part in range(3):
            found = log.finished("t", part)
            made = _part(part)
            for name in ("scores", "lengths", "truncated", "unparsed"):
                np.testing.assert_array_equal(getattr(found, name), getattr(made, name))
                assert getattr(found, name).dtype == getattr(made, name).dtype
            assert found.unjudged == made.unjudged
        assert log.finished("t", 3) is None and log.finished("u", 0) is None


def test_another_evaluation_is_refused_by_what_differs(tmp_path):
    _write(tmp_path / "e")
    other = {**_HEADER, "settings": {**_HEADER["settings"], "seed": 1}}
    with pytest.raises(
        UserError, match=r"holds an unfinished evaluation with seed=0, this one has 1; delete it"
    ):
        EvaluationLog(tmp_path / "e", other)
    before = tmp_path / "foreign"
    for content in (b'{"problem": "p", "answer": "4"}\n', b"no json\n", b"no json"):
        before.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(str(before))):
            EvaluationLog(before, _HEADER)
        assert before.read_bytes() == content


def test_two_processes_cannot_write_one_file(tmp_path):
    with (
        EvaluationLog(tmp_path / "e", _HEADER),
        pytest.raises(UserError, match="another process is writing"),
    ):
        EvaluationLog(tmp_path / "e", _HEADER)


def test_an_evaluation_without_a_part_leaves_no_file(tmp_path):
    with EvaluationLog(tmp_path / "e", _HEADER):
        assert (tmp_path / "e").exists()
    assert not any(tmp_path.iterdir())


def test_names_are_free_or_unfinished(tmp_path):
    def opened(header=_HEADER, out=None, finish=False):
        path, log = open_output(out, tmp_path, "evaluation-m", header)
        log.append(0, [{"row": 0}, {"row": 1}], _part(0))
        if finish:
            path.write_text("{}")
            log.close_finished()
        log.__exit__(None, None, None)
        return path.name

    other = {**_HEADER, "step": 7}
    assert opened() == "evaluation-m.json"
    assert opened() == "evaluation-m.json"  # continues
    assert opened(other) == "evaluation-m-2.json"
    assert opened(finish=True) == "evaluation-m.json"
    assert opened() == "evaluation-m-3.json"  # 2 is the other's
    (tmp_path / "evaluation-m-3.problems.jsonl").unlink()
    # A finished one that is named is replaced: its lines start over, its JSON stays until the new
    # one is done.
    out = tmp_path / "evaluation-m.json"
    assert opened(other, out) == "evaluation-m.json" and out.exists()
    assert (
        json.loads((tmp_path / "evaluation-m.problems.jsonl").read_text().splitlines()[0]) == other
    )
