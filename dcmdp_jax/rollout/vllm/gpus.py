"""The GPUs of the sidecars, and their memory where the trainer has the same ones."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from dcmdp_jax.config import VllmSettings
from dcmdp_jax.errors import UserError

_MARGIN, _LEAST_TRAINER_SHARE = 0.1, 0.1


def devices_of_replicas(settings: VllmSettings, *, cpu: bool) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each replica: `tensor_parallel_size` GPUs, the next ones for the next replica.

    Empty where a replica takes what is there: in the CPU build, and the only replica without
    `rollout.vllm.visible_devices`.

    Raises:
        UserError: if the replicas take more GPUs than there are, or it can't be said which there are.
    """
    count, each = settings.replicas, settings.tensor_parallel_size
    named = settings.visible_devices or os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = [name.strip() for name in named.split(",") if name.strip()] or _present_gpus()
    if cpu or (count == 1 and not visible):
        return [""] * count
    if not visible:
        raise UserError(
            f"config.rollout.vllm.replicas: got {count}, and no GPU is seen here; name theirs in "
            "rollout.vllm.visible_devices"
        )
    if count * each > len(visible):
        raise UserError(
            f"config.rollout.vllm.replicas: got {count} of rollout.vllm.tensor_parallel_size={each} GPUs each, there "
            f"are {len(visible)} ({','.join(visible)}), not {count * each}; lower one of the two, or name more in "
            "rollout.vllm.visible_devices"
        )
    if count == 1:
        return [settings.visible_devices]
    return [",".join(visible[first : first + each]) for first in range(0, count * each, each)]


def _present_gpus() -> list[str]:
    """Numbers of the NVIDIA GPUs that this machine, or container, has: CUDA counts them from 0."""
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def share_devices(settings: VllmSettings) -> None:
    """Divides the memory of GPUs that trainer and sidecar share; must run before JAX starts its backend.

    JAX takes its share when it starts. Where the user says nothing (XLA_PYTHON_CLIENT_MEM_FRACTION) it gets what the
    sidecar leaves, less a tenth for both their contexts. Where the sidecar sleeps, JAX has its memory meanwhile: it
    then takes from the GPU what it needs and gives it back (XLA_PYTHON_CLIENT_ALLOCATOR=platform).

    Raises:
        ValueError: if the two shares don't fit, or the user's is no number.
    """
    if importlib.util.find_spec("jax_cuda12_plugin") is None or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    if settings.visible_devices and ours and not set(ours.split(",")) & set(settings.visible_devices.split(",")):
        return
    if settings.sleep:
        os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
        return
    said = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    try:
        fraction = float(said) if said else round(1 - _MARGIN - settings.memory_share, 2)
    except ValueError:
        raise UserError(f"XLA_PYTHON_CLIENT_MEM_FRACTION: got {said!r}, must be a number") from None
    if not _LEAST_TRAINER_SHARE <= fraction <= 1 - _MARGIN / 2 - settings.memory_share:
        raise UserError(
            f"config.rollout.vllm.memory_share: got {settings.memory_share:g}, and the trainer has {fraction:g} of the "
            "same GPU (XLA_PYTHON_CLIENT_MEM_FRACTION); lower one, or give the sidecar GPUs of its own with "
            "rollout.vllm.visible_devices and the trainer others with CUDA_VISIBLE_DEVICES"
        )
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{fraction:g}"
