"""The environment of a sidecar's process."""

from pathlib import Path

import pytest

from dcmdp_jax.engines.sidecar import process
from dcmdp_jax.engines.sidecar.process import Launch


@pytest.mark.parametrize(
    ("directory", "temporary"),
    [
        ("/runs/a/vllm", "/runs/a/vllm/tmp"),
        # 64 characters and, one longer, 65.
        (f"/{'d' * 59}", f"/{'d' * 59}/tmp"),
        (f"/{'d' * 60}", "/proc/self/cwd/tmp"),
        ("/runs/lambda#2", "/proc/self/cwd/tmp"),
    ],
)
def test_the_directory_of_temporary_files(directory, temporary):
    """Absolute where it can be: a compiler that a child starts in another directory writes there
    too.
    """
    launch = Launch(
        "vLLM",
        "python",
        Path("x.py"),
        Path(directory),
        {"A": "1"},
        ("VLLM_RPC_BASE_PATH",),
        1.0,
    )
    environment = process.process_environment(launch)
    assert environment["TMPDIR"] == environment["VLLM_RPC_BASE_PATH"] == temporary
    assert environment["A"] == "1"
