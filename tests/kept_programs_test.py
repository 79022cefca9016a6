"""The programs that the tests keep: taken again by the next process, of the same processor alone,
and bounded.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.support.programs import drop_old_programs
from tests.support.runs import ROOT
from tests.support.waiting import HANGS_S

# What JAX's cache says of each program: taken, or compiled and kept.
_PROGRAM = """
import collections, json
from tests.support.programs import keep_programs
keep_programs()
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
jax.jit(lambda x: x @ x + 1)(jax.numpy.ones((8, 8)))
print(json.dumps([events["cache_hits"], events["cache_misses"]]))
"""


@pytest.fixture
def run(tmp_path):
    """Hits and misses of a process whose user has an empty cache directory."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("JAX_COMPILATION_CACHE")
    }

    def count(**environment):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            cwd=ROOT,
            env={
                **kept,
                "JAX_PLATFORMS": "cpu",
                "XDG_CACHE_HOME": str(tmp_path),
                "XLA_FLAGS": "",
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=HANGS_S,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return count


def test_the_next_process_takes_them_all_and_a_processor_with_less_takes_none(run):
    hits, compiled = run()
    assert hits == 0 and compiled >= 2
    assert run() == [compiled, 0]
    # The directory is the same here, so that it is JAX's own key which tells them apart.
    assert run(XLA_FLAGS="--xla_cpu_max_isa=SSE4_2") == [0, compiled]
    assert run() == [compiled, 0]


def test_a_variable_turns_it_off_or_moves_it(run, tmp_path):
    assert run(JAX_ENABLE_COMPILATION_CACHE="false") == [0, 0]
    assert not list(tmp_path.rglob("*-cache"))
    _, compiled = run(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "moved"))
    assert (
        len(list((tmp_path / "moved").glob("*-cache")))
        == compiled
        == len(list(tmp_path.rglob("*-cache")))
    )


def test_those_that_were_not_used_for_longest_go_first_and_torn_ones_at_once(tmp_path):
    def write(name, size, age):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, (1e9 - age, 1e9 - age))

    write("avx2/old-cache", 300, age=30)
    write("amx/older-cache", 100, age=40)
    write("amx/new-cache", 400, age=10)
    write("amx/newer-cache", 401, age=5)
    write("amx/other.txt", 5000, age=99)

    def left():
        return sorted(path.name for path in tmp_path.rglob("*-*"))

    drop_old_programs(tmp_path, 1101)
    assert left() == ["new-cache", "newer-cache", "old-cache"]
    write("amx/empty-cache", 0, age=0)
    write("amx/torn-cache", 8192, age=1)
    drop_old_programs(tmp_path, 10_000)
    assert left() == ["new-cache", "newer-cache", "old-cache"]
    drop_old_programs(tmp_path, 500)
    assert left() == ["newer-cache"] and (tmp_path / "amx" / "other.txt").exists()
