"""`python -m bin.report`: where it writes, and what bad input gets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcmdp_jax.commands.failures import run_main
from dcmdp_jax.commands.report import main
from tests.support.commands import failed_command

_ROOT = Path(__file__).resolve().parents[2]


def _make(run_dir):
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text(
        '{"step": 1, "dual/multiplier": 0.1}\n{"step": 2, "dual/multiplier": 0.2}\n'
    )
    return str(run_dir)


def test_one_run_is_reported_in_its_own_directory(tmp_path, capsys):
    run_dir = _make(tmp_path / "run")
    main(["report", run_dir])
    assert (tmp_path / "run" / "plots" / "multiplier.png").exists()
    assert capsys.readouterr().out == f"wrote {run_dir}/report.html and {run_dir}/plots/*.png\n"


def test_several_go_to_report_or_where_out_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [_make(tmp_path / "a"), _make(tmp_path / "b")]
    main(["report", *runs])
    main(["report", *runs, "--out", "there"])
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("report.html"))
    assert written == ["report/report.html", "there/report.html"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "error: {run} is not a run directory: it does not exist\n"),
        ({}, "error: {run} is not a run directory: it holds no metrics.jsonl\n"),
        (
            {"metrics.jsonl": ""},
            "error: {run}/metrics.jsonl holds no metrics yet; wait for the run's first step\n",
        ),
        (
            {"metrics.jsonl": "x\n{}\n"},
            "error: {run}/metrics.jsonl line 1 is not a JSON object; delete that line\n",
        ),
    ],
)
def test_a_bad_run_directory_is_one_line(tmp_path, content, line, capsys):
    run_dir = tmp_path / "run"
    if content is not None:
        run_dir.mkdir()
        for name, text in content.items():
            (run_dir / name).write_text(text)
    with pytest.raises(SystemExit) as left:
        run_main(main, ["report", str(run_dir)])
    assert left.value.code == 2
    assert capsys.readouterr().err == line.format(run=run_dir)


def test_an_output_directory_that_cannot_be_is_one_line(tmp_path, capsys):
    run_dir = _make(tmp_path / "run")
    (tmp_path / "file").write_text("")
    said = failed_command(main, "report", capsys, run_dir, "--out", tmp_path / "file")
    assert said == f"Not a directory: {tmp_path}/file/plots"


def test_as_a_process(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, "-m", "bin.report", str(tmp_path / "absent")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path}/absent is not a run directory: it does not exist\n"
