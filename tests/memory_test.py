"""Page faults of a process that keeps its memory, and of one that does not."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys
if sys.argv[1] == "kept":
    import bin
import jax, jax.numpy as jnp
add, ones = jax.jit(lambda x: x + 1), jnp.ones(2**24)
for call in range(64):
    if call == 60:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    add(ones).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_stays_in_commands_alone() -> None:
    """64 MiB are 16,384 pages of 4 KiB: each of four calls touches them anew, unless they were kept."""

    def faults(how: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", _FAULTS, how],
            env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return int(done.stdout)

    assert faults("given back") > 4 * 10_000
    assert faults("kept") < 1000
