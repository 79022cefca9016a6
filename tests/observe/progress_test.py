"""The console: what each line says, when, and how long is left."""

import io
import math

import pytest

from dcmdp_jax.observe.progress import Progress


class _Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class _Terminal(io.StringIO):
    def isatty(self):
        return True


_FULL = {
    "reward/mean": 0.4125,
    "discrepancy/mean": 0.00421,
    "dual/tolerance": 0.0037,
    "dual/multiplier": 0.1234,
    "throughput/tokens_per_second": 1234.5,
}


def test_plain_line_shows_all_quantities():
    stream, clock = io.StringIO(), _Clock()
    progress = Progress(100, stream=stream, clock=clock)
    clock.now += 30
    progress.update(1, _FULL)
    clock.now += 4
    progress.update(2, _FULL)
    values = "reward 0.412  discrepancy 0.00421 (c 0.00370)  lambda 0.1234  1,234 tokens/s"
    # The first step compiles: its 30 s are no measure. 98 steps of 4 s are 392 s.
    assert stream.getvalue() == f"step 1/100  {values}  left -\nstep 2/100  {values}  left 6:32\n"


def test_missing_none_and_nan_show_as_dashes():
    stream = io.StringIO()
    progress = Progress(2, stream=stream)
    progress.update(1, {"reward/mean": None, "discrepancy/mean": math.nan})
    assert stream.getvalue() == "step 1/2  reward -  discrepancy -  lambda -  - tokens/s  left -\n"


def test_values_of_a_step_are_cleared_at_the_next():
    stream, clock = io.StringIO(), _Clock()
    progress = Progress(2, stream=stream, clock=clock)
    progress.update(1, _FULL)
    clock.now += 5
    progress.update(2, {"reward/mean": 0.5})
    assert stream.getvalue().splitlines()[1] == "step 2/2  reward 0.500  discrepancy -  lambda -  - tokens/s  left 0:00"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(2.5, list(range(1, 13))), (0.5, [1, 5, 9, 12]), (0.0, [1, 12])],
)
def test_plain_lines_are_at_most_one_every_two_seconds(seconds, shown):
    stream, clock = io.StringIO(), _Clock()
    progress = Progress(12, stream=stream, clock=clock)
    for step in range(1, 13):
        clock.now += seconds
        progress.update(step, {"reward/mean": 0.5})
    assert [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()] == shown


def test_evaluations_get_a_line_of_their_own():
    stream = io.StringIO()
    progress = Progress(10, stream=stream)
    progress.update(0, {"eval/arithmetic/avg@8": 0.3125, "eval/arithmetic/pass@8": 0.5})
    assert stream.getvalue() == "step 0/10  arithmetic avg@8 31.2%\n"


def test_time_left_is_the_mean_of_the_last_twenty_steps():
    clock = _Clock()
    progress = Progress(1000, start_step=500, stream=io.StringIO(), clock=clock)
    assert math.isnan(progress.seconds_left())
    clock.now += 600
    progress.update(501, {})
    assert math.isnan(progress.seconds_left())
    for step in range(502, 512):
        clock.now += 10
        progress.update(step, {})
    assert progress.seconds_left() == 489 * 10.0
    for step in range(512, 532):
        clock.now += 2
        progress.update(step, {})
    # All 20 remembered steps took 2 s; a mean over the whole run would say more than 400 * 10 s.
    assert progress.seconds_left() == 469 * 2.0
    clock.now += 8
    progress.update(533, {})
    # Two steps in 8 s push out two of 2 s: (18 * 2 + 2 * 4) / 20 = 2.2.
    assert progress.seconds_left() == pytest.approx(467 * 2.2, rel=1e-12)


def test_a_terminal_gets_a_live_display(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    stream, clock = _Terminal(), _Clock()
    with Progress(4, stream=stream, clock=clock) as progress:
        progress.update(1, {**_FULL, "eval/arithmetic/avg@8": 0.5})
        clock.now += 3600
        progress.update(2, {"reward/mean": 0.75})
    shown = stream.getvalue()
    assert "step 1/4" in shown
    last = shown[shown.rindex("step 2/4") :]
    assert "elapsed 1:00:00" in last and "reward 0.750" in last and "left 2:00:00" in last
    assert "arithmetic avg@8 50.0%" in last
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
    # Over tolerance is red, ANSI color 31.
    assert "\x1b[31mdiscrepancy 0.00421 (c 0.00370)" in shown


def test_no_c_while_it_is_measured():
    stream, clock = io.StringIO(), _Clock()
    progress = Progress(2, stream=stream, measured_steps=1, clock=clock)
    for step in (1, 2):
        clock.now += 5
        progress.update(step, _FULL)
    first, second = stream.getvalue().splitlines()
    assert "(c 0.00370)" not in first and "(c 0.00370)" in second


def test_close_twice_and_bad_totals():
    progress = Progress(3, stream=io.StringIO())
    progress.close()
    progress.close()
    with pytest.raises(ValueError, match="start_step is 4; allowed: 0 to total_steps = 3"):
        Progress(3, start_step=4)
