"""The probe's command on recordings: table, JSON, PNGs, one page; bad input in one line."""

import json
import re

import numpy as np
import pytest

from bin import probe
from bin.cli import run_main
from tests.mismatch.sampled_columns import columns


def _write(path, pairs):
    bounds = np.cumsum(pairs.lengths)[:-1]
    cells = [np.split(x, bounds) for x in (pairs.token_ids, pairs.train_logprobs, pairs.rollout_logprobs)]
    with path.open("w") as file:
        for ids, train, rollout in zip(*cells, strict=True):
            file.write(json.dumps({"token_ids": ids.tolist(), "old": train.tolist(), "<b>": rollout.tolist()}) + "\n")


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        run_main(probe.main, ["probe", *map(str, arguments)])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


def test_a_recording_gives_table_json_and_page(tmp_path, capsys):
    recording, out = tmp_path / "step <1>.jsonl", tmp_path / "out"
    _write(recording, columns(top_p=0.9))
    code, said, error = _run(
        capsys, "--recording", recording, "--train-column", "old", "--rollout-column", "<b>", "--out", out
    )
    assert (code, error) == (0, "") and "truncated support" in said and "Mean p / q" in said
    (pair,) = json.loads((out / "probe.json").read_text())["pairs"]
    assert pair["findings"][0]["cause"] == "support" and pair["statistics"]["tokens"] == 1600
    # A mean over what was recorded, by hand.
    p, q = (np.exp(x.astype(float)) for x in (columns(top_p=0.9).train_logprobs, columns(top_p=0.9).rollout_logprobs))
    assert pair["statistics"]["mean"] == pytest.approx(np.abs(p - q).mean(), rel=1e-9)
    assert pair["recommendation"]["tolerance"] is None  # a defect is repaired, not bounded
    page = (out / "probe.html").read_text()
    assert "step &lt;1&gt;" in page and "<b>" not in page.replace('<b style="', "")
    assert not re.search(r"<script|https?://|src=\"(?!data:)", page)
    assert page.count("<figure>") == len(list((out / "plots").glob("*.png"))) == 3


def test_text_is_coloured_by_which_side_finds_it_likelier(tmp_path, capsys):
    recording, out = tmp_path / "r.jsonl", tmp_path / "out"
    row = {"token_ids": [11, 12], "old": list(np.log([0.5, 0.5])), "<b>": list(np.log([0.4, 0.9]))}
    recording.write_text(json.dumps(row))
    code, _, _ = _run(
        capsys, "--recording", recording, "--train-column", "old", "--rollout-column", "<b>", "--out", out
    )
    page = (out / "probe.html").read_text()
    # 0.1 of 0.2 is half of the full colour; 0.4 is beyond it.
    assert code == 0 and 'background: rgba(213,94,0,0.50)" title="p 0.5, q 0.4">11 <' in page
    assert 'background: rgba(0,114,178,1.00)" title="p 0.5, q 0.9">12 <' in page


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give one of --recording FILE, --model DIR and --config FILE"),
        (("--model", "none", "--recording", "R"), "give one of"),
        (("--model", "none"), "--a is missing"),
        (("--model", "none", "--a", "trainer"), "--a: trainer:float32 only scores"),
        (("--model", "none", "--a", "local:fp4"), "precision 'fp4', allowed are exact"),
        (("--model", "none", "--a", "local"), "model none: no such directory"),
        (("--recording", "R"), "--train-column is missing"),
        (
            ("--recording", "R", "--train-column", "old", "--rollout-column", "new"),
            "no column 'new' (--rollout-column); ",
        ),
        (("--recording", "none.jsonl", "--train-column", "a", "--rollout-column", "b"), "No such file or directory"),
        (
            ("--recording", "R", "--train-column", "old", "--rollout-column", "<b>", "--tolerance", "0"),
            "must be in (0, 1]",
        ),
        (("--recordng", "R"), "did you mean --recording?"),
    ],
)
def test_bad_arguments_are_one_line(arguments, text, tmp_path, capsys):
    _write(tmp_path / "r.jsonl", columns())
    code, said, error = _run(capsys, *(tmp_path / "r.jsonl" if word == "R" else word for word in arguments))
    assert code == 2 and said == "" and text in error and error.count("\n") == 1
