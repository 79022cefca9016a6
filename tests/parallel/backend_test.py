"""CPU devices, meshes and the compile cache, each in a process that has not started JAX."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

from dcmdp_jax.parallel import backend
from tests.support.processors import PROCESSORS, pretend
from tests.support.waiting import HANGS_S

_REPORT = """
import json, sys
import jax
from dcmdp_jax.parallel import backend, mesh
if sys.argv[1] == "late":
    jax.devices()
backend.prepare_jax(int(sys.argv[2]))
backend.usable_cores = lambda: int(sys.argv[3])
meshes = [mesh.training_mesh(sizes, num_params=count) for *sizes, count in json.loads(sys.argv[4])]
print(json.dumps({
    "devices": jax.device_count(), "training": [list(each.shape.values())[:3] for each in meshes],
    "sampling": mesh.sampling_mesh(meshes[0]).size,
    "split": [mesh.sampling_mesh(meshes[0], num_params=asked[-1], tensor=n).size
              for asked in json.loads(sys.argv[4]) for n in (1, mesh.sampling_mesh(meshes[0]).size)],
    "cache": jax.config.jax_compilation_cache_dir,
}))
"""

_CACHED = """
import json, warnings
import jax
from dcmdp_jax.parallel import backend
backend.prepare_jax(1)
backend.prepare_jax(1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    value = float(jax.jit(lambda x: (x @ x).sum())(jax.numpy.full((3, 3), 1 / 3)))
print(json.dumps([value, events.count("cache_hits"), events.count("cache_misses"), len(told)]))
"""


def _report(tmp_path, when, count=0, *, cores=3, asked=((1, -1, 1, 1, 1000),), **environment):
    """Run a process on `cores` cores that makes meshes of (data, fsdp, tensor, expert, parameters
    of the model).
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    }
    done = subprocess.run(
        [sys.executable, "-c", _REPORT, when, str(count), str(cores), json.dumps(asked)],
        env={**kept, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_cpu_devices_are_data_parallel(tmp_path):
    # The default, axes left open by name, and sizes that are said: as many of the devices as they
    # need.
    asked = ((1, -1, 1), (-1, 1, 1), (1, 1, 1), (1, 3, 1), (2, 1, 1), (1, 1, -1), (1, -1, 3))
    report = _report(tmp_path, "first", 3, asked=tuple((*sizes, 1, 1000) for sizes in asked))
    assert (report["devices"], report["sampling"]) == (3, 3)
    rows = [3, 1, 1]
    assert report["training"] == [rows, rows, [1, 1, 1], [1, 3, 1], [2, 1, 1], rows, [1, 1, 3]]


def test_a_large_model_is_not_replicated(tmp_path):
    limit = 2**25
    report = _report(tmp_path, "first", 3, asked=((1, -1, 1, 1, limit), (1, -1, 1, 1, limit + 1)))
    assert report["training"] == [[3, 1, 1], [1, 1, 1]]
    # Nor sampled on several devices, unless its weights are split over them.
    assert report["split"] == [3, 3, 1, 3]


def test_fewer_devices_than_cores_are_for_sampling(tmp_path):
    report = _report(tmp_path, "first", 3, cores=4)
    assert (report["training"], report["sampling"]) == ([[1, 1, 1]], 3)


def test_one_device_for_each_core_up_to_four(tmp_path):
    report = _report(tmp_path, "first")
    assert report["sampling"] == min(len(os.sched_getaffinity(0)), 4)


def test_devices_the_user_made_are_left(tmp_path):
    report = _report(tmp_path, "first", 3, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert (report["devices"], report["training"], report["sampling"]) == (2, [[1, 2, 1]], 2)


def test_too_late_changes_nothing(tmp_path):
    report = _report(tmp_path, "late", 3)
    assert (report["devices"], report["training"], report["sampling"]) == (1, [[1, 1, 1]], 1)


def test_compiled_programs_are_kept_in_the_users_cache_or_where_jax_is_told(tmp_path):
    cache = Path(_report(tmp_path, "first", 1)["cache"])
    assert cache.parent == tmp_path / "dcmdp_jax" / "programs"
    assert cache.name.startswith(platform.machine() + "-") and cache.name.endswith(
        f"-jaxlib-{jaxlib.__version__}"
    )
    assert (
        _report(tmp_path, "first", 1, JAX_COMPILATION_CACHE_DIR="/elsewhere")["cache"]
        == "/elsewhere"
    )


def test_compiled_programs_are_kept_apart_for_each_processor_and_jaxlib(tmp_path, monkeypatch):
    found = {backend.program_directory()}
    for features in PROCESSORS.values():
        pretend(features, tmp_path, monkeypatch)
        found.add(backend.program_directory())
    # The same instructions in another order, as another kernel lists them, are the same processor.
    pretend(" ".join(sorted(PROCESSORS["amx"].split())), tmp_path, monkeypatch)
    assert backend.program_directory() in found and len(found) == 4
    monkeypatch.setattr(jaxlib, "__version__", "0.0.1")
    assert backend.program_directory() not in found


def test_a_link_to_the_users_cache_is_the_same_directory(tmp_path, monkeypatch):
    """JAX's key of a program has the path: a link that was kept would find nothing."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    found = set()
    for name in ("there", "link"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        found.add(backend.program_directory())
    assert len(found) == 1


def test_an_entry_cut_short_is_compiled_once_more_and_replaced(tmp_path):
    """JAX alone compiles it in every later run, with a warning. By two processes too."""
    kept = {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    given = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu", **kept}

    def run(processes=1):
        how = {"env": os.environ | given, "stdout": subprocess.PIPE, "text": True}
        started = [
            subprocess.Popen([sys.executable, "-c", _CACHED], **how) for _ in range(processes)
        ]
        return [json.loads(process.communicate(timeout=HANGS_S)[0]) for process in started]

    [(value, hits, programs, _)] = run()
    # 27 products of a third with a third.
    assert hits == 0 and value == pytest.approx(3.0) and run() == [[value, programs, 0, 0]]
    for processes, share in ((1, 2), (2, 3)):
        for entry in tmp_path.glob("*-cache"):
            os.truncate(entry, entry.stat().st_size // share)
        cut = run(processes)
        assert {found for found, *_ in cut} == {value} and (
            processes > 1 or cut == [[value, 0, programs, programs]]
        )
        assert run() == [[value, programs, 0, 0]]
