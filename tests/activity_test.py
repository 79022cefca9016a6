"""What is shown of what a program does: on a terminal, in a log, and where nothing takes long."""

import io
import sys

import pytest

from dcmdp_jax import activity
from dcmdp_jax.activity import Activity
from dcmdp_jax.observe.progress import Progress


class _Stream(io.StringIO):
    def __init__(self, *, terminal):
        super().__init__()
        self._terminal = terminal

    def isatty(self):
        return self._terminal


@pytest.fixture
def shown(monkeypatch):
    """Show an activity that began at 100 s, at given times; the text that was written."""

    def show(*times, terminal, ended=None, **fields):
        monkeypatch.setattr(sys, "stderr", stream := _Stream(terminal=terminal))
        display, doing = activity._Display(), Activity("sampling", began=100.0, **fields)
        display.running.append(doing)
        for now in times:
            display.show(now)
        if ended is not None:
            display.running.remove(doing)
            display.ended(doing, ended)
        return stream.getvalue()

    return show


def test_a_log_has_one_line_when_it_is_done_and_a_sign_of_life_every_ten_seconds(shown):
    assert shown(101.0, 102.9, terminal=False, ended=102.9) == ""
    assert shown(102.0, 103.5, terminal=False, ended=104.2) == "sampling: 4 s so far\nsampling: 4 s\n"
    times = [100.0 + 0.5 * tick for tick in range(60)]  # to 129.5
    lines = shown(*times, terminal=False, ended=130.0).splitlines()
    assert lines == [*(f"sampling: {s} s so far" for s in (3, 13, 23)), "sampling: 30 s"]


def test_a_terminal_has_one_line_that_is_redrawn_and_erased(shown):
    assert shown(101.0, terminal=True, ended=102.0) == ""
    text = shown(103.0, 103.5, 104.0, terminal=True, ended=105.0)
    erase = "\r\x1b[2K"
    assert text == f"{erase}sampling: 3 s{erase}sampling: 4 s{erase}sampling: 4 s{erase}"


def test_what_is_counted_says_how_much_is_left(shown):
    # 16 of 64 in 5 s: 48 more take 15 s. Before the first there is nothing to reckon with.
    counted = {"total": 64, "unit": "completions", "terminal": False}
    assert shown(105.0, done=16, **counted) == "sampling: 16 of 64 completions, 5 s, 15 s left\n"
    assert shown(105.0, **counted) == "sampling: 0 of 64 completions, 5 s so far\n"


def test_the_innermost_is_shown_and_a_live_display_shows_it_itself(monkeypatch):
    monkeypatch.setenv("DCMDP_ACTIVITY", "on")
    monkeypatch.setattr(activity._Display, "start", lambda self: None)
    with activity.activity("evaluating") as outer, activity.activity("sampling") as inner:
        assert activity.current_text() == ""
        outer.began -= 8.0
        inner.began -= 4.0
        assert activity.current_text() == "sampling: 4 s"
        stream = _Stream(terminal=True)
        with Progress(10, stream=stream):
            activity._DISPLAY.show(inner.began + 60.0)
        assert "sampling: 4 s" in stream.getvalue()
    assert activity.current_text() == "" and not activity._DISPLAY.running and not activity._DISPLAY.live
    monkeypatch.setenv("DCMDP_ACTIVITY", "off")
    with activity.activity("evaluating"):
        assert not activity._DISPLAY.running
