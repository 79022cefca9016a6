"""The schedule of compilations, by hand."""

import pytest

from benchmarks import compilations as benchmark
from benchmarks.compilations import RECORDED, compilations, seconds_until_compiled

NAMES = ("init", "prefill", "decode", "score", "step")
SECONDS = (1.0, 4.0, 3.0, 2.0, 6.0)


@pytest.mark.parametrize(
    ("cores", "after"),
    [
        (1, 16.0),
        # 0 to 1: init, step. prefill, decode and the step at 2/3 of a core: decode ends at 5.5,
        # prefill has 1 left, the step 2. prefill to 6.5, score beside the step's last second to
        # 7.5, its own last second alone.
        (2, 8.5),
        # Threads from the start: prefill, decode and score beside init and the step, five on four
        # cores, until init ends at 1.25; then each at one, the step's last 5 seconds. 6 if the main
        # thread compiled score, after prefill.
        (4, 6.25),
        (16, 6.0),
    ],
)
def test_seconds_of_a_schedule(cores, after):
    assert seconds_until_compiled(NAMES, SECONDS, cores) == pytest.approx(after)


def test_a_call_s_programs_are_compiled_side_by_side_on_two_cores():
    """3 and 1 at a core each, then 2 more of the first alone; the next call's wait for it."""
    assert seconds_until_compiled(
        ("prefill", "decode", "prefill"), (3.0, 1.0, 2.0), 2
    ) == pytest.approx(5.0)


def test_a_log_is_read_up_to_the_first_step_and_a_run_s_last_wait_is_for_it():
    line = "Finished XLA compilation of jit({}) in {} sec\n"
    log = (
        "WARNING:x:"
        + line.format("_step", "2.5e-01")
        + "a word\n"
        + line.format("step", 9)
        + line.format("late", 1)
    )
    assert compilations(log) == [("_step", 0.25), ("step", 9.0)]
    # Alone it takes longer than all before it.
    assert seconds_until_compiled(("_step", "step"), (0.25, 9.0), 2) == 9.0


def test_the_record_of_the_h200():
    found = compilations(RECORDED.read_text())
    assert len(found) == 36 and found[-1] == ("step", 15.0)
    assert sum(seconds for _, seconds in found) == pytest.approx(60.9, abs=0.05)


def test_a_run_for_the_log_compiles_nothing_beside(monkeypatch):
    ran = []
    compiled = []
    for place, name in (
        (benchmark.step_programs, "compile_beside"),
        (benchmark.engine, "compile_beside"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(benchmark.programs.Preparation, "add", benchmark.programs.Preparation.add)
    monkeypatch.setattr(benchmark.failures, "run_main", ran.append)
    benchmark.train_one_after_another()
    assert ran == [benchmark.train.main]
    for module in (benchmark.step_programs, benchmark.engine):
        module.compile_beside(lambda: compiled.append(1), "a program")()
    benchmark.programs.Preparation().add(lambda: compiled.append(1), "a program")()
    assert not compiled
