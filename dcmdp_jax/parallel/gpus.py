"""The NVIDIA GPUs of this machine, without starting JAX."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def present_gpus() -> list[str]:
    """Numbers of the NVIDIA GPUs that this machine, or container, has: CUDA counts them from 0."""
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def has_cuda_plugin() -> bool:
    """Whether JAX's plugin for NVIDIA GPUs is installed."""
    return any(importlib.util.find_spec(plugin) for plugin in _CUDA_PLUGINS)
