"""Page faults of a process that keeps its memory, and of one that does not; what a command loads."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.engines import process_memory
from tests.support.processes import CAPTURED

_ROOT = Path(__file__).parents[2]
_PREPARE = "from dcmdp_jax.engines.process_memory import keep_freed_memory, share_heap\nkeep_freed_memory()\n"
_SHARE = _PREPARE + "share_heap()\n"
_ADD = """
import json, os, resource, statistics, sys
import jax, jax.numpy as jnp
add, ones = jax.jit(lambda x: x + 1), jnp.ones(80 * 2**18)
seen = [0]
for call in range(64):
    add(ones).block_until_ready()
    seen.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
# A call on a thread that had none before faults its memory in once: the median of the last calls does not hear of it.
faults = statistics.median(after - before for before, after in zip(seen[-33:], seen[-32:]))
print(json.dumps({"faults": faults, "arguments": sys.argv[1:], "tunables": os.environ.get("GLIBC_TUNABLES")}))
"""
_FREE = """
import json
from pathlib import Path
import jax
from dcmdp_jax.engines.process_memory import release_freed_memory
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256
add = jax.jit(lambda x: x + 1)
held = [add(jax.numpy.ones(2**24)).block_until_ready() for _ in range(8)]
full = resident()
# Something small after it, so that the end of the heap is in use.
last = add(jax.numpy.ones(2**10)).block_until_ready()
del held
freed = resident()
release_freed_memory(above=2**31)
kept = resident()
release_freed_memory(above=2**28)
print(json.dumps({"full": full, "freed": freed, "kept": kept, "after_release": resident()}))
"""
_TAKE_TURNS = """
import ctypes, json, threading
from pathlib import Path
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256
def use(size=2**26):
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.free(block)
before, threads = resident(), [threading.Thread(target=use) for _ in range(4)]
for thread in threads:
    thread.start()
    thread.join()
print(json.dumps({"grown": resident() - before}))
"""
_STAY = """
import ctypes, json, threading
from pathlib import Path
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
freed, measured = threading.Semaphore(0), threading.Event()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256
def use(size=3 * 2**24):
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.free(block)
    freed.release()
    measured.wait()
before = resident()
for _ in range(4):
    threading.Thread(target=use).start()
    freed.acquire()
print(json.dumps({"grown": resident() - before}))
measured.set()
"""
_TOKENIZE = """
import json, sys
from dcmdp_jax.data.tokenizer import load_tokenizer
ids = load_tokenizer(sys.argv[1])("1+2=3")["input_ids"]
print(json.dumps({"ids": ids, "torch": any(name.startswith("torch.") for name in sys.modules)}))
"""


def _report(directory, first_lines, *, run=_ADD, argument="an argument", **environment):
    """Run a command and return its output: by default the page faults of one of its additions to 80 MiB."""
    package = directory / "probe"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(first_lines)
    (package / "run.py").write_text(run)
    kept = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-m", "probe.run", argument],
        env={**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{directory}:{_ROOT}", **environment},
        check=True,
        **CAPTURED,
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_commands_keep_freed_memory(tmp_path):
    # 80 MiB, more than a thread's heap may hold by default, are 20,480 pages of 4 KiB: each call faults them
    # in again, unless they were kept (or 40 of 2 MiB).
    left = _report(tmp_path / "a", "")
    shared = _report(tmp_path / "b", _SHARE)
    assert left["faults"] > 16_000 and shared["faults"] < 250
    # The process started twice, with the same arguments, and others that it starts hear nothing of it.
    assert shared["arguments"] == ["an argument"] and shared["tunables"] is None


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_process_that_imports_the_commands_is_unchanged():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import bin.train, os; print(os.environ.get('GLIBC_TUNABLES'), end='')",
        ],
        cwd=_ROOT,
        env={**os.environ, "GLIBC_TUNABLES": process_memory.LARGE_PAGES},
        **CAPTURED,
    )
    assert (done.stdout, done.stderr) == (process_memory.LARGE_PAGES, "")


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_command_with_an_accelerator_is_unchanged(tmp_path):
    # An empty plugin package: JAX finds no device behind it and computes on the CPU, but it might have.
    (tmp_path / "jax_plugins").mkdir()
    report = _report(tmp_path, _PREPARE, JAX_PLATFORMS="")
    assert report["faults"] > 16_000 and report["tunables"] is None


@pytest.mark.parametrize(
    ("platforms", "installed", "takes_cpu"),
    [
        ("cpu", "libtpu", True),
        ("cpu,cuda", "jax_plugins", True),
        ("cuda,cpu", "nothing", False),
        ("tpu", "nothing", False),
        ("", "nothing", True),
        (None, "nothing", True),
        (None, "libtpu", False),
        ("", "jax_plugins", False),
    ],
)
def test_whether_jax_takes_the_cpu(monkeypatch, platforms, installed, takes_cpu):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(
        process_memory.importlib.util,
        "find_spec",
        lambda name: object() if name == installed else None,
    )
    assert process_memory.jax_takes_cpu() is takes_cpu


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_tunables_of_the_user_are_kept(tmp_path):
    # 16 MiB fit into a thread's heap by default too: what needs no tunables is set all the same.
    run = _ADD.replace("80 * 2**18", "16 * 2**18")
    report = _report(tmp_path, _PREPARE, run=run, GLIBC_TUNABLES="glibc.malloc.perturb=0")
    assert report["tunables"] == "glibc.malloc.perturb=0" and report["faults"] < 250


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_freed_memory_can_be_released(tmp_path):
    # Eight arrays of 64 MiB, and what they were made of; in MiB.
    report = _report(tmp_path, _SHARE, run=_FREE)
    assert report["full"] - report["freed"] < 64 and report["freed"] - report["kept"] < 64
    assert report["full"] - report["after_release"] > 7 * 64


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_threads_use_what_others_freed(tmp_path: Path) -> None:
    # Four threads one after another, 64 MiB each.
    assert 60 < _report(tmp_path / "a", _SHARE, run=_TAKE_TURNS)["grown"] < 90


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_threads_have_heaps_of_their_own_until_they_are_told_to_share_one(tmp_path: Path) -> None:
    # Four threads use and free 48 MiB each, one after another, and none ends: four heaps, or one.
    four_heaps = _report(tmp_path / "own", _PREPARE, run=_STAY)["grown"]
    one_heap = _report(tmp_path / "shared", _SHARE, run=_STAY)["grown"]
    assert four_heaps > 150
    assert one_heap < 90


def test_commands_tokenize_without_torch(tmp_path):
    pytest.importorskip("torch", reason="nothing to leave out")
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    leave_out = "from dcmdp_jax.engines.process_memory import hide_torch\nhide_torch()\n"
    without, other = (
        _report(
            tmp_path / str(len(first)), first, run=_TOKENIZE, argument=str(tmp_path / "tokenizer")
        )
        for first in (leave_out, "")
    )
    assert (without["torch"], other["torch"]) == (False, True)
    assert without["ids"] == other["ids"] == build_tokenizer()("1+2=3")["input_ids"]
