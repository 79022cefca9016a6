"""What a command asks of its machine, each time in a process that has not started JAX."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_REPORT = """
import json, sys
import jax
from dcmdp_jax.parallel.host import prepare_host, sampling_mesh, training_devices
from dcmdp_jax.parallel.mesh import make_mesh
if sys.argv[1] == "late":
    jax.devices()
prepare_host(int(sys.argv[2]))
mesh = make_mesh(fsdp=-1, devices=training_devices())
print(json.dumps({
    "devices": jax.device_count(), "training": mesh.size, "sampling": sampling_mesh(mesh).size,
    "cache": jax.config.jax_compilation_cache_dir,
}))
"""


def _report(tmp_path: Path, when: str, count: int = 0, **environment: str) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", _REPORT, when, str(count)],
        env={**kept, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_cpu_devices_are_for_sampling(tmp_path: Path) -> None:
    report = _report(tmp_path, "first", 3)
    assert (report["devices"], report["training"], report["sampling"]) == (3, 1, 3)


def test_one_device_for_each_core_up_to_four(tmp_path: Path) -> None:
    report = _report(tmp_path, "first")
    assert report["sampling"] == min(len(os.sched_getaffinity(0)), 4)


def test_devices_the_user_made_are_left(tmp_path: Path) -> None:
    report = _report(tmp_path, "first", 3, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert (report["devices"], report["training"], report["sampling"]) == (2, 2, 2)


def test_too_late_changes_nothing(tmp_path: Path) -> None:
    report = _report(tmp_path, "late", 3)
    assert (report["devices"], report["training"], report["sampling"]) == (1, 1, 1)


def test_compiled_programs_are_kept_apart_for_each_processor(tmp_path: Path) -> None:
    report = _report(tmp_path, "first", 1)
    cache = Path(report["cache"])
    assert cache.parent == tmp_path / "dcmdp_jax" / "programs"
    assert cache.name.startswith(platform.machine() + "-")
    assert _report(tmp_path, "first", 1, JAX_COMPILATION_CACHE_DIR="/elsewhere")["cache"] == "/elsewhere"
