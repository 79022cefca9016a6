"""Calls at the same time: by hand, without processes."""

import threading

import pytest

from dcmdp_jax.engines.sidecar.process import Stopped
from dcmdp_jax.engines.sidecar.supervisor import Calls
from tests.support.waiting import wait_until


def test_calls_run_at_the_same_time_and_results_keep_their_order():
    """Each waits for the other: one after the other they would never end."""
    meeting = threading.Barrier(2, timeout=30)

    def call(name):
        return lambda calls: (meeting.wait(), calls.put(name), name)[-1]

    assert Calls([call("a"), call("b")]).results() == ["a", "b"]
    assert sorted(Calls([call("a"), call("b")]).values()) == ["a", "b"]


def test_calls_begin_before_they_are_waited_for_and_tell_of_a_failure():
    going, met = threading.Event(), threading.Event()

    def fails(calls):
        met.set()
        going.wait(30)
        raise ZeroDivisionError

    calls = Calls([fails]).begin()
    assert met.wait(30) and not calls.failed
    going.set()
    wait_until(lambda: calls.failed, "the failure")
    with pytest.raises(ZeroDivisionError):
        calls.begin().results()


def _until_stopped(ended):
    def call(calls):
        calls.put("begun")
        calls.stopped.wait()
        ended.append(True)
        raise Stopped

    return call


def test_what_is_left_is_stopped_with_the_iterator():
    """So every sidecar is told to cancel; silence gives None, which lets the caller look for a signal."""
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
