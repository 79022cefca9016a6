"""Checks under the sidecar's interpreter before vLLM starts: torch's companions, the manifest
against the model.
"""

import importlib.metadata
import sys
from pathlib import Path

from dcmdp_jax.engines.sidecar import segments

_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_CUDA_LIBRARY = "libtorch_cuda.so"


def check_torch_builds() -> None:
    """Refuse CUDA builds of torch's companions with a torch without CUDA.

    vLLM's CPU build depends on torchvision, torchaudio and torchcodec, and the package index has
    CUDA builds of them, which fail on import with the CPU build of torch, in every process that
    vLLM starts. Imports none of them.

    Version numbers don't tell: the index's wheels have no `+cuNNN`, and on other platforms the same
    number is a CPU build. What tells is the library their extension modules are linked to.

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
            f"{', '.join(broken)}: CUDA builds, which can't be imported beside the CPU build of "
            f"torch {torch.version}; vLLM runs without them: {sys.executable} -m pip uninstall -y "
            f"{' '.join(_COMPANIONS)}"
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


def check_received_tensors(directory: str, tensors: list[segments.Tensor]) -> None:
    """Compare the manifest with the model that transformers builds from the same config.json, on no
    device.

    A tensor that is missing, or a part of a fused one, is silently wrong in vLLM.

    Args:
        directory: holds config.json.
        tensors: the manifest.

    Raises:
        ValueError: naming the first tensor that differs.
    """
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected: dict[str, tuple[int, ...]] = {}
    for name, value in model.state_dict().items():
        expected |= _separate_experts(name, tuple(value.shape))
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight", None)
    given = {t.name: t.shape for t in tensors if not t.name.endswith("_scale")}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise ValueError(
                f"manifest: {name} has shape {given.get(name, 'missing')}, the model of "
                f"{directory}/config.json has {expected.get(name, 'no such')}"
            )


def _separate_experts(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A tensor by name, or the tensors of checkpoints for one that transformers 5 keeps fused,
    experts first.
    """
    module, _, part = name.rpartition(".experts.")
    kernels = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part)
    if kernels is None:
        return {name: shape}
    count, rows, columns = shape
    own = (rows // len(kernels), columns)
    return {
        f"{module}.experts.{expert}.{kernel}.weight": own
        for expert in range(count)
        for kernel in kernels
    }
