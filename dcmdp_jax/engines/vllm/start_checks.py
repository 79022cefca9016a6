"""Checks in the sidecar before vLLM starts: torch's companions, the manifest against the model."""

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

    cuda_builds = list(filter(None, map(_cuda_build, _COMPANIONS)))
    if cuda_builds:
        raise RuntimeError(
            f"{', '.join(cuda_builds)}: CUDA builds, which can't be imported beside the CPU build "
            f"of torch {torch.version}; vLLM runs without them: {sys.executable} -m pip uninstall "
            f"-y {' '.join(_COMPANIONS)}"
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
    """Compare the manifest with the model that transformers builds, on no device, from config.json.

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
    listed = {t.name: t.shape for t in tensors if not t.name.endswith("_scale")}
    for name in sorted(expected.keys() | listed.keys()):
        if expected.get(name) != listed.get(name):
            raise ValueError(
                f"manifest: {name} has shape {listed.get(name, 'missing')}, the model of "
                f"{directory}/config.json has {expected.get(name, 'no such')}"
            )


def _separate_experts(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A tensor by name; or, where transformers 5 fuses experts, each expert's as checkpoints do."""
    module, _, fused_kernel = name.rpartition(".experts.")
    if fused_kernel == "gate_up_proj":
        kernels = ["gate_proj", "up_proj"]
    elif fused_kernel == "down_proj":
        kernels = ["down_proj"]
    else:
        return {name: shape}

    num_experts, rows, columns = shape
    shapes = {}
    for expert in range(num_experts):
        for kernel in kernels:
            kernel_shape = rows // len(kernels), columns
            shapes[f"{module}.experts.{expert}.{kernel}.weight"] = kernel_shape
    return shapes
