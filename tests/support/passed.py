"""Tests that passed in one job are left out of the next: a pytest plugin, for `.ci/run`.

DCMDP_PASSED names a file of test ids. Without the file the tests that pass are written to it; with
it, those in it are left out.
"""

import os
from pathlib import Path

import pytest

_FILE = Path(os.environ["DCMDP_PASSED"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the file has."""
    if not _FILE.exists():
        return
    passed = set(_FILE.read_text(encoding="utf-8").splitlines())
    left_out = [item for item in items if item.nodeid in passed]
    items[:] = [item for item in items if item.nodeid not in passed]
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write what passed, after the whole job; a worker knows its own tests alone."""
    if not hasattr(terminalreporter.config, "workerinput") and not _FILE.exists():
        reports = terminalreporter.stats.get("passed", ())
        passed = sorted(report.nodeid for report in reports)
        _FILE.write_text("\n".join(passed), encoding="utf-8")
