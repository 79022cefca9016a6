"""`dcmdp view`: what is on the page of a run and of a recording, and the one line for what it can't show."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.view import main
from dcmdp_jax.observe.metrics_io import MetricsWriter

_RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "frameworks"


def _view(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        run_main(main, ["view", *map(str, words)])
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def _rows(page):
    found = re.search(r'<script type="application/json" id="completions">(.*?)</script>', page.read_text(), re.S)
    return json.loads(found[1])


def test_a_run_without_recorded_tokens_shows_its_samples_and_curves(tmp_path, capsys):
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(1, {"reward/mean": 0.5, "discrepancy/mean": 0.25})
        sample = {"prompt": "1+1?", "completion": "so 2", "answer": "2", "reward": 1.0, "discrepancy_mean": 0.125}
        writer.write_samples(1, [sample, {**sample, "completion": "so 3", "reward": 0.0}])
    code, said, _ = _view(capsys, tmp_path / "run", "--out", tmp_path / "page.html")
    assert code == 0 and said == f"wrote {tmp_path / 'page.html'}: 2 completions\n"
    rows = _rows(tmp_path / "page.html")["rows"]
    assert [(row["text"], row["reward"], row["discrepancy"], row["step"]) for row in rows] == [
        ("so 2", 1.0, 0.125, 1), ("so 3", 0.0, 0.125, 1),
    ]  # fmt: skip
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_a_recording_of_another_framework_shows_each_token_with_both_probabilities(tmp_path, capsys):
    directory = next(path for path in sorted(_RECORDED.iterdir()) if path.is_dir() and any(path.rglob("*.jsonl")))
    code, _, error = _view(capsys, directory, "--out", tmp_path / "page.html", "--completions", "3")
    assert code == 0, error
    data = _rows(tmp_path / "page.html")
    assert 1 <= len(data["rows"]) <= 3
    for row in data["rows"]:
        p, q = np.array(row["p"], float) / 1000, np.array(row["q"], float) / 1000
        assert len(p) == len(row["tokens"]) and ((p >= 0) & (p <= 1)).all()
        assert row["discrepancy"] == pytest.approx(np.abs(p - q).mean(), abs=1e-3)


def test_what_it_cannot_show_is_one_line(tmp_path, capsys):
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "probe.html").write_text("")
    code, _, error = _view(capsys, tmp_path / "probe")
    assert code == 2 and "a probe, whose own page is" in error
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(1, {"reward/mean": 0.5})
    shutil.copy(tmp_path / "run" / "metrics.jsonl", tmp_path / "other.jsonl")
    code, _, error = _view(capsys, tmp_path / "run", tmp_path / "other.jsonl")
    assert code == 2 and "run directories and recordings in one call" in error
    code, _, error = _view(capsys, tmp_path / "absent.jsonl")
    assert code == 2 and error.count("\n") == 1
