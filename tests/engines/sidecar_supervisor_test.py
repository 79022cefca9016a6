"""Calls at the same time: by hand, without processes."""

import threading
import time
import types

import pytest

from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.engines.sidecar.process import SidecarBroken, Stopped
from dcmdp_jax.engines.sidecar.supervisor import Calls, Fleet, Member
from tests.support.waiting import HANGS_S, wait_until


def test_calls_run_at_the_same_time_and_results_keep_their_order():
    """Each waits for the other: one after the other they would never end."""
    meeting = threading.Barrier(2, timeout=HANGS_S)

    def call(name):
        return lambda calls: (meeting.wait(), calls.put(name), name)[-1]

    assert Calls([call("a"), call("b")]).results() == ["a", "b"]
    assert sorted(Calls([call("a"), call("b")]).values()) == ["a", "b"]


def test_calls_begin_before_they_are_waited_for_and_tell_of_a_failure():
    going = threading.Event()
    met = threading.Event()

    def fails(calls):
        met.set()
        going.wait(HANGS_S)
        raise ZeroDivisionError

    calls = Calls([fails])
    assert met.wait(HANGS_S) and not calls.failed
    going.set()
    wait_until(lambda: calls.failed, "the failure")
    with pytest.raises(ZeroDivisionError):
        calls.results()


def _until_stopped(ended):
    def call(calls):
        calls.put("begun")
        calls.stopped.wait()
        ended.append(True)
        raise Stopped

    return call


def test_what_is_left_is_stopped_with_the_iterator():
    """So every sidecar is told to cancel; silence gives None, which lets the caller look for a
    signal.
    """
    ended = []
    running = Calls([_until_stopped(ended), _until_stopped(ended)]).values()
    assert [next(running), next(running), next(running)] == ["begun", "begun", None]
    running.close()
    assert len(ended) == 2


def test_an_error_of_one_stops_the_others():
    ended = []
    with pytest.raises(ZeroDivisionError):
        Calls([_until_stopped(ended), lambda calls: 1 / 0]).results()
    assert ended == [True]


def _fleet(least, limit_s=10.0):
    """Two members that have started."""
    fleet = Fleet(least, limit_s, check=lambda: None)
    for number in (0, 1):
        sidecar = types.SimpleNamespace(
            number=number, started=True, ready=lambda: True, kill=lambda: None, last_lines=()
        )
        Member(f"replica {number}", lambda stopped: None, fleet).sidecar = sidecar
    fleet.wait(Calls([]), 0)
    return fleet


def test_the_time_between_calls_is_no_wait_for_replicas(monkeypatch):
    """One was lost during a call; by the next one, after a long step, it may be there again. Waits
    of two calls add.
    """
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    fleet = _fleet(least=2)
    fleet.members[1].sidecar.started = False
    fleet.wait(calls := Calls([]), 0)
    now[0] += 6
    fleet.wait(calls, 0)
    now[0] += 1000  # the trainer's step
    fleet.wait(calls := Calls([]), 0)
    now[0] += 3
    fleet.wait(calls, 0)
    now[0] += 2
    with pytest.raises(EngineError, match="1 of at least 2 replicas for 10 s"):
        fleet.wait(calls, 0)


@pytest.mark.parametrize("least", [1, 2])
def test_one_that_never_starts_again_ends_the_run_only_below_the_least(least):
    """A node with a broken device: the other one has its work."""
    fleet = _fleet(least)
    lost = fleet.members[1]

    def start(stopped):
        raise SidecarBroken("no device")

    lost.sidecar = None
    lost._start = start

    def works():
        lost._not_before = 0.0
        return lost.run(Calls([]), lambda sidecar: sidecar.number)

    if least == 1:
        assert [works() for _ in range(9)] == [0] * 9 and lost.work["restarts"] == 9
    else:
        with pytest.raises(
            EngineError, match="replica 1 process failed 6 times in a row, at last: no device"
        ):
            for _ in range(9):
                works()
