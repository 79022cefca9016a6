"""Several calls in turn: by hand, without processes."""

import pytest

from dcmdp_jax.engines.sidecar.supervisor import gathered, in_turn


def _counting(name, count, closed, result=None):
    try:
        for number in range(count):
            yield f"{name}{number}"
        return result
    except GeneratorExit:
        closed.append(name)
        raise


def test_each_stream_has_its_turn_until_all_have_ended():
    closed = []
    streams = [_counting("a", 1, closed), _counting("b", 3, closed), _counting("c", 0, closed)]
    assert list(in_turn(streams)) == ["a0", "b0", "b1", "b2"]
    assert closed == []


def test_what_is_left_is_closed_with_the_whole():
    """So every sidecar is told to cancel, whichever list the caller stopped at."""
    closed = []
    running = in_turn([_counting(name, 9, closed) for name in "ab"])
    assert [next(running), next(running), next(running)] == ["a0", "b0", "a1"]
    running.close()
    assert closed == ["a", "b"]


def test_an_error_of_one_ends_the_others():
    def failing():
        yield "c0"
        raise ZeroDivisionError

    closed = []
    running = in_turn([_counting("a", 9, closed), failing()])
    with pytest.raises(ZeroDivisionError):
        list(running)
    assert closed == ["a"]


def test_results_come_in_the_order_of_the_calls():
    """Not in that of their ends, which is c, b, a."""
    calls = [_counting(name, count, [], result=count) for name, count in (("a", 3), ("b", 2), ("c", 1))]
    assert gathered(calls) == [3, 2, 1]
