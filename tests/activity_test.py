"""What is shown of what a program does: on a terminal, in a log, and where nothing takes long."""

import signal
import threading
import time

import pytest

from dcmdp_jax import activity
from dcmdp_jax.activity import Activity
from tests.support.terminal import Screen, run_in_terminal


@pytest.fixture
def shown(capsys):
    """Show an activity that began at 100 s in a log, at given times; the lines without their date
    and time.
    """

    def show(*times, ended=None, **fields):
        painter = activity._Painter()
        doing = Activity("sampling", began=100.0, **fields)
        painter.running.append(doing)
        for now in times:
            painter.show(now)
        if ended is not None:
            painter.running.remove(doing)
            painter.ended(doing, ended)
        return [line[21:] for line in capsys.readouterr().err.splitlines()]

    return show


def test_a_log_has_one_line_when_it_is_done_and_signs_of_life_ever_more_rarely(shown):
    assert shown(101.0, 102.9, ended=102.9) == []
    assert shown(102.0, 103.5, ended=104.2) == ["sampling: 4 s so far", "sampling: 4 s"]
    times = [100.0 + 0.5 * tick for tick in range(200)]  # to 199.5
    # At least ten seconds, then as long again as it has run: not ten lines.
    assert shown(*times, ended=200.0) == [
        *(f"sampling: {s} s so far" for s in (3, 13, 26, 52)),
        "sampling: 100 s",
    ]


def test_what_is_counted_says_how_much_is_left(shown):
    # 16 of 64 in 5 s: 48 more take 15 s. Before the first there is nothing to reckon with.
    counted = {"total": 64, "unit": "completions"}
    assert shown(105.0, done=16, **counted) == ["sampling: 16 of 64 completions, 5 s, 15 s left"]
    assert shown(105.0, **counted) == ["sampling: 0 of 64 completions, 5 s so far"]


def test_what_threads_compile_is_named_while_they_do(shown):
    done = threading.Event()
    names = ("the step", "decode (2)")
    threads = [threading.Thread(target=done.wait, name=activity.COMPILING + name) for name in names]
    for thread in threads:
        thread.start()
    try:
        assert shown(104.0) == ["sampling: 4 s so far; also compiling: the step, decode (2)"]
        [line] = Activity("sampling", began=100.0).lines(200, 104.0)
        assert "sampling: 4 s; also compiling: the step, decode (2)" in line
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert shown(104.0) == ["sampling: 4 s so far"]


_BESIDE_THE_DISPLAY = """
import logging, os, subprocess, sys, time
from contextlib import closing
logging.basicConfig()  # its handler has the stream of before
from dcmdp_jax import activity
from dcmdp_jax.observe.progress import Progress
with (
    closing(Progress(10)) as progress,
    activity.activity("evaluating") as outer,
    activity.activity("sampling") as inner,
):
    outer.began -= 8; inner.began -= 4
    progress.update(3, {"reward/mean": 0.5})
    for line in range(LINES):
        print("filled", line)
    print("by print", file=sys.stderr)
    logging.warning("by a logger")
    os.write(2, b"by the system\\nby the system again\\n")
    subprocess.run(["sh", "-c", "echo by a child >&2"])
    input("during")
"""


@pytest.mark.parametrize("lines", [0, 40], ids=["an empty screen", "a full screen"])
def test_lines_of_all_writers_stay_above_the_display(lines):
    during = []

    def look(process, screen):
        during.extend(screen.text()[-3:])
        return "\n"

    screen, code = run_in_terminal(
        _BESIDE_THE_DISPLAY.replace("LINES", str(lines)), at={"during&sampling: ": look}
    )
    assert code == 0
    assert [line[:9] for line in during] == ["step 3/10", "reward 0.", "sampling:"]
    written = [line for line in screen.text() if line]
    ways = [
        "by print",
        "WARNING:root:by a logger",
        "by the system",
        "by the system again",
        "by a child",
        "during",
    ]
    assert written[:-2] == [*(f"filled {line}" for line in range(lines)), *ways]
    assert written[-2].startswith("step 3/10") and written[-1].startswith("reward 0.500")


_IN_A_CELL = """
from dcmdp_jax.activity import activity, refresh
with activity("starting") as doing:
    doing.began -= 4
    refresh()
"""


@pytest.mark.parametrize(("kernel", "sequences"), [({}, True), ({"JPY_PARENT_PID": "1"}, False)])
def test_a_command_in_a_notebook_s_cell_writes_lines_and_no_escapes(kernel, sequences, monkeypatch):
    """IPython gives `!command` a pseudo-terminal and keeps each byte in the notebook."""
    received = []
    monkeypatch.setattr(Screen, "feed", lambda screen, text: received.append(text))
    _, code = run_in_terminal(_IN_A_CELL, environment=kernel.items())
    assert code == 0 and ("\x1b[" in "".join(received)) == sequences
    assert "starting: " in "".join(received)


_INTERRUPTED = """
import time
from contextlib import closing
from dcmdp_jax import activity
from dcmdp_jax.observe.progress import Progress
from dcmdp_jax.training import exit
say = exit._say
def say_late(line):
    time.sleep(2 * activity._REDRAW_S)  # the painter's thread would paint again
    say(line)
exit._say = say_late
with (
    exit.StopSignal().listening(),
    closing(Progress(10)) as progress,
    activity.activity("training") as doing,
):
    doing.began -= 3
    progress.update(3, {"reward/mean": 0.5})
    print("ready", flush=True)
    time.sleep(60)
"""


def test_the_answer_to_ctrl_c_stays_and_a_second_one_leaves_a_clean_terminal():
    answer = "SIGINT: ends what it is doing, saves and leaves; a second SIGINT leaves at once"

    def again(process, screen):
        time.sleep(1.1)  # within a second both would be one signal
        process.send_signal(signal.SIGINT)

    screen, code = run_in_terminal(
        _INTERRUPTED,
        at={"ready": lambda process, _: process.send_signal(signal.SIGINT), answer: again},
    )
    assert code == 130
    assert [line for line in screen.text() if line] == [
        "ready",
        answer,
        "SIGINT again: leaves at once; the same command resumes from the newest checkpoint",
    ]
    assert screen.region == (0, 23)


def test_the_innermost_is_shown(monkeypatch):
    monkeypatch.setenv("DCMDP_ACTIVITY", "on")
    monkeypatch.setattr(activity._Painter, "start", lambda self: None)
    with activity.activity("evaluating"), activity.activity("sampling"):
        assert activity._PAINTER.running[-1].gerund == "sampling"
    assert not activity._PAINTER.running
    monkeypatch.setenv("DCMDP_ACTIVITY", "off")
    with activity.activity("evaluating"):
        assert not activity._PAINTER.running
