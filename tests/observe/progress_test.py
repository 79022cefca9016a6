"""The console: what each line says, when, and how long is left."""

import math
import re

import pytest

from dcmdp_jax.activity import Activity
from dcmdp_jax.observe.progress import Progress
from tests.support.terminal import run_in_terminal


class _Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def said(capsys):
    """The lines of the log so far, without the date and time that each begins with."""

    def read():
        lines = capsys.readouterr().err.splitlines()
        assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in lines)
        return [line[21:] for line in lines]

    return read


_FULL = {
    "reward/mean": 0.4125,
    "discrepancy/mean": 0.00421,
    "dual/tolerance": 0.0037,
    "dual/multiplier": 0.1234,
    "throughput/tokens_per_second": 1234.5,
}


def test_plain_line_shows_all_quantities(said):
    clock = _Clock()
    progress = Progress(100, clock=clock)
    clock.now += 30
    progress.update(1, _FULL)
    clock.now += 4
    progress.update(2, _FULL)
    values = "reward 0.412  discrepancy 0.00421 (c 0.0037)  lambda 0.1234  1,234 tokens/s"
    # The first step compiles: its 30 s are no measure. 98 steps of 4 s are 392 s.
    assert said() == [f"step 1/100  {values}  left -", f"step 2/100  {values}  left 6:32"]


def test_a_line_has_the_numbers_of_the_update_that_were_recorded(said):
    progress = Progress(1)
    update = {
        "policy/loss": -0.01234,
        "policy/entropy": 0.5,
        "completion/length_mean": 31.25,
        "optimizer/grad_norm": 1,
    }
    progress.update(1, {"reward/mean": 0.5, "mismatch/k3": 0.00025, **update})
    assert (
        "  lambda -  loss -0.0123  engine KL 0.00025  entropy 0.5  length 31.2  gradient 1  - "
        "tokens/s" in said()[0]
    )


def test_missing_none_and_nan_show_as_dashes(said):
    progress = Progress(2)
    progress.update(1, {"reward/mean": None, "discrepancy/mean": math.nan})
    assert said() == ["step 1/2  reward -  discrepancy -  lambda -  - tokens/s  left -"]


def test_values_of_a_step_are_cleared_at_the_next(said):
    clock = _Clock()
    progress = Progress(2, clock=clock)
    progress.update(1, _FULL)
    clock.now += 5
    progress.update(2, {"reward/mean": 0.5})
    assert said()[1] == "step 2/2  reward 0.500  discrepancy -  lambda -  - tokens/s  left 0:00"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(2.5, list(range(1, 13))), (0.5, [1, 5, 9, 12]), (0.0, [1, 12])],
)
def test_plain_lines_are_at_most_one_every_two_seconds(seconds, shown, said):
    clock = _Clock()
    progress = Progress(12, clock=clock)
    for step in range(1, 13):
        clock.now += seconds
        progress.update(step, {"reward/mean": 0.5})
    assert [int(line.split()[1].split("/")[0]) for line in said()] == shown


def test_evaluations_get_a_line_of_their_own(said):
    progress = Progress(10)
    progress.update(0, {"eval/arithmetic/avg@8": 0.3125, "eval/arithmetic/pass@8": 0.5})
    assert said() == ["step 0/10  arithmetic avg@8 31.2%"]


def test_a_sum_of_rewards_is_a_number_on_the_line_of_an_evaluation(said):
    progress = Progress(10)
    several = {"eval_reward/chats/math": 0.3, "eval_reward/chats/short": 0.1}
    progress.update(0, {"eval/chats/avg@1": 0.4, "eval/chats/pass@1": 0.25} | several)
    progress.update(1, {"reward/mean": 0.5})
    progress.update(1, {"eval/chats/avg@1": -0.5})
    lines = [line for line in said() if "avg@1" in line]
    assert lines == ["step 0/10  chats avg@1 0.4", "step 1/10  chats avg@1 -0.5"]


def test_time_left_is_the_mean_of_the_last_twenty_steps():
    clock = _Clock()
    progress = Progress(1000, start_step=500, clock=clock)
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


_IN_A_TERMINAL = """
from contextlib import closing
from dcmdp_jax.observe.progress import Progress
now = 100.0
with closing(Progress(4, clock=lambda: now)) as progress:
    progress.update(1, {"reward/mean": 0.4, "discrepancy/mean": 0.00421, "dual/tolerance": 0.0037})
    now += 3600
    progress.update(2, {"reward/mean": 0.75, "eval/arithmetic/avg@8": 0.5})
    input('looked?')
"""


def test_a_terminal_shows_the_run_in_its_last_lines_and_keeps_its_last_state():
    during = []

    def look(process, screen):
        during.append(screen.text()[-3:])
        return "\n"

    screen, code = run_in_terminal(_IN_A_TERMINAL, at={"looked?": look})
    assert code == 0
    [(bar, line, evaluation)] = during
    assert bar.startswith("step 2/4 ") and bar.endswith("elapsed 1:00:00")
    assert line == "reward 0.750  discrepancy -  lambda -  - tokens/s  left 2:00:00"
    assert evaluation == "arithmetic avg@8 50.0%"
    assert screen.text()[-3:] == ["", "", ""]
    assert [row for row in screen.text() if row][-2:] == [line, evaluation]


def test_no_c_while_it_is_measured(said):
    clock = _Clock()
    progress = Progress(2, measured_steps=1, clock=clock)
    for step in (1, 2):
        clock.now += 5
        progress.update(step, _FULL)
    first, second = said()
    assert "(c 0.0037)" not in first and "(c 0.0037)" in second


def test_close_twice():
    progress = Progress(3)
    progress.close()
    progress.close()


def test_a_supervised_run_shows_its_loss_and_no_rewards(said):
    progress = Progress(1)
    progress.update(0, {"eval/rows/loss": 1.511})
    progress.update(
        1, {"policy/loss": 1.25, "optimizer/grad_norm": 2, "throughput/tokens_per_second": 40.0}
    )
    # A loss below 1 is no share: never 51%.
    progress.update(1, {"eval/rows/loss": 0.511})
    assert said() == [
        "step 0/1  rows loss 1.511",
        "step 1/1  loss 1.25  gradient 2  40 tokens/s  left 0:00",
        "step 1/1  rows loss 0.511",
    ]


def test_the_discrepancy_above_c_is_red_unless_no_color_is_asked_for(monkeypatch):
    progress = Progress(10, clock=_Clock())
    progress.update(1, _FULL)
    [colored] = [line for line in progress.lines(300, 0.0) if "discrepancy" in line]
    # 0.00421 is above c = 0.0037: red, 31.
    assert "\x1b[31mdiscrepancy 0.00421 (c 0.0037)\x1b[0m" in colored
    monkeypatch.setenv("NO_COLOR", "1")
    [plain] = [line for line in progress.lines(300, 0.0) if "discrepancy" in line]
    assert plain == colored.replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert "\x1b" not in Activity("sampling", began=100.0).lines(200, 104.0)[0]
