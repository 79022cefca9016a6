"""Builds of torch's companions that don't load beside the torch that is installed.

vLLM's CPU build depends on torchvision, torchaudio and torchcodec, and the package index has CUDA builds of them. In
every process that vLLM starts they fail on import beside the CPU build of torch. Runs under the sidecar's interpreter;
standard library only, imports none of them.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_CUDA_LIBRARY = "libtorch_cuda.so"


def check_torch_builds() -> None:
    """Refuse CUDA builds of torch's companions beside a torch without CUDA.

    Version numbers don't tell: the index's wheels have no `+cuNNN`, and on other platforms the same number is a CPU
    build. What tells is the library their extension modules are linked to.

    Raises:
        RuntimeError: naming the packages, and the command that removes them.
    """
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    if Path(torch.locate_file(f"torch/lib/{_CUDA_LIBRARY}")).exists():
        return
    if broken := [said for name in _COMPANIONS if (said := _cuda_build(name))]:
        raise RuntimeError(
            f"{', '.join(broken)}: CUDA builds, which can't be imported beside the CPU build of torch "
            f"{torch.version}; vLLM runs without them: {sys.executable} -m pip uninstall -y {' '.join(_COMPANIONS)}"
        )


def _cuda_build(name: str) -> str:
    """Name and version of a distribution that is linked to CUDA's part of torch, else empty."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    for file in distribution.files or ():
        path = Path(file.locate())
        if path.suffix == ".so" and path.is_file() and _CUDA_LIBRARY.encode() in path.read_bytes():
            return f"{name} {distribution.version}"
    return ""
