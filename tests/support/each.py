"""Inspection of a table in one test: every entry is looked at, and all that are wrong are reported
together.
"""

from collections.abc import Callable, Iterable


def check_each(entries: Iterable, check: Callable[..., object]) -> None:
    """Call `check` with each entry, a tuple as arguments.

    Raises:
        AssertionError: with a paragraph for every entry whose check failed.
    """
    failures = []
    for entry in entries:
        try:
            check(*entry) if isinstance(entry, tuple) else check(entry)
        except Exception as error:
            failures.append(f"{entry}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)
