"""`python -m bin.toy`: its table, figures, checks and errors."""

import functools

import pytest

from research.theory import command as toy
from research.theory.command import main
from tests.support.commands import failed_command

_fails = functools.partial(failed_command, main, "toy")


def test_table_figures_and_check(tmp_path, capsys):
    main(["toy", "--budgets", "0.02,0.1", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 1 + 12 + 2
    )  # header, 2 sides x 3 measures x 2 budgets, the check, what was written
    # The row of the two-sided log at C = 0.02, from SLSQP.
    row = ["two", "0.02", "log", "0.2834", "0.3004", "0.1283", "0.1730", "0.0386", "0.0763"]
    assert row in [line.split()[:9] for line in lines]
    assert lines[-2].endswith("two-sided C = 0.02, two-sided C = 0.1, one-sided C = 0.02")
    for name in ("two_sided.png", "one_sided.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    ends = [
        line.partition("lambda")[0].split()[10:]
        for line in lines
        if line.split()[:2] == ["one", "0.1"]
    ]
    assert [" ".join(words)[:15] for words in ends] == ["not reached: th", "met at", "met by no"]


@pytest.mark.parametrize(
    ("budgets", "message"),
    [
        (
            "0.2",
            "--budgets: budget = 0.2: no policy has that mismatch; with the two-sided probability "
            "difference",
        ),
        ("0.1,-0.1", "argument --budgets: got -0.1, must be in (0, 1e+06]"),
        ("0", "argument --budgets: got 0, must be in (0, 1e+06]"),
        ("0.1,0.10", "argument --budgets: got '0.1,0.10', every budget must be there once"),
        ("x", "argument --budgets: got 'x', must be a number"),
    ],
)
def test_a_bad_budget_is_one_line(budgets, message, tmp_path, capsys):
    assert _fails(capsys, f"--budgets={budgets}", "--out", tmp_path / "none").startswith(message)
    assert not (tmp_path / "none").exists()


def test_another_order_on_a6_fails_the_check(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        toy, "concentration", lambda rows, budget: {"diff": 0.1, "log": 0.2, "ratio": 0.05}
    )
    assert "a6 is not ordered diff > log > ratio" in _fails(
        capsys, "--budgets", "0.02", "--out", tmp_path
    )
