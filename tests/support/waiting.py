"""Waiting for conditions, with one limit against hanging. No test says how long anything takes."""

import time
from collections.abc import Callable

HANGS_S = 1800.0
"""After so long something hangs, however loaded the machine is. Passing tests never come near
it.
"""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return once `condition()` is true.

    Raises:
        AssertionError: with `what` was waited for, after `HANGS_S`.
    """
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {HANGS_S:g} s for {what}"
        time.sleep(0.02)
