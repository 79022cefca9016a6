"""The GPUs of the sidecars, and the memory of GPUs that the trainer has too."""

import os

from dcmdp_jax.engines.engine_kind import DeviceShare
from dcmdp_jax.engines.vllm.settings import VllmSettings
from dcmdp_jax.errors import ArgumentError, UserError
from dcmdp_jax.parallel.backend import has_cuda_plugin, present_gpus

# Shares of a GPU's memory, ours: what the CUDA contexts of trainer and sidecar take beside both
# their shares, and the least that a trainer works with.
_MARGIN = 0.1
_LEAST_TRAINER_SHARE = 0.1
# Of a GPU with a sidecar that sleeps in the step, the share that neither context's memory may take.
_UNUSED = 0.1
# JAX's name for what allocates a GPU's memory; empty: a pool, from which nothing goes back.
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
# JAX's name for the share of a GPU's memory that it takes, and its former one. It starts with
# neither if both are set.
_FRACTION_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def devices_of_replicas(settings: VllmSettings, platform: str, planned_gpus: int = 0) -> list[str]:
    """The GPUs of each replica: `tensor_parallel_size`, the next ones for the next replica.

    Empty where a replica takes what is there: in the CPU build, and the only replica on GPUs
    without `visible_devices`.

    Args:
        settings: the sidecars'.
        platform: "cpu" or "cuda", of the vLLM build.
        planned_gpus: GPUs of a host that is planned for; 0: this machine's.

    Raises:
        UserError: if the replicas take more than there are, or it can't be said which there are.
    """
    if platform == "cpu":
        return [""] * settings.known_replicas

    size = settings.tensor_parallel_size
    names = settings.visible_devices
    if not names and not planned_gpus:
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = [name.strip() for name in names.split(",") if name.strip()]
    visible = visible or [str(number) for number in range(planned_gpus)] or present_gpus()
    count = settings.replicas or max(1, len(visible) // size)

    if count == 1 and not visible:
        return [""]
    if not visible:
        raise ArgumentError(
            "replicas", f"got {count}, and no GPU is seen here; name theirs in `visible_devices`"
        )
    if count * size > len(visible):
        raise ArgumentError(
            "replicas",
            f"got {count} of `tensor_parallel_size`={size} devices each, and there are "
            f"{len(visible)} ({','.join(visible)}), not {count * size}; lower one of the two, or "
            "name more in `visible_devices`",
        )
    if count == 1:
        return [settings.visible_devices]
    return [",".join(visible[first : first + size]) for first in range(0, count * size, size)]


def memory_fraction() -> tuple[str, str]:
    """The variable of the share of a GPU's memory that JAX takes, and its value, "" if not set.

    Raises:
        UserError: if both of the names that JAX knows are set. JAX would go on without its GPUs.
    """
    fractions = {name: os.environ[name] for name in _FRACTION_NAMES if os.environ.get(name)}
    if len(fractions) > 1:
        raise UserError(
            f"{' and '.join(fractions)}: both are set; they mean the same, unset the second"
        )
    return next(iter(fractions.items()), (_FRACTION_NAMES[0], ""))


def reserve_device_share(settings: VllmSettings) -> None:
    """Divide the memory of GPUs that trainer and sidecar share; must run before JAX's backend.

    JAX takes its share when it starts. Where the user says nothing (`memory_fraction`) it gets what
    the sidecar leaves, less a tenth for both their contexts. Where the sidecar sleeps, JAX has its
    memory meanwhile: it then takes from the GPU what it needs and gives it back
    (XLA_PYTHON_CLIENT_ALLOCATOR=platform).

    Raises:
        ValueError: if the two shares don't fit, or the user's is not a number.
    """
    jax_on_cpu = os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
    if settings.address or jax_on_cpu or not has_cuda_plugin():
        return
    trainer_gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    if settings.visible_devices and trainer_gpus:
        sidecar_gpus = settings.visible_devices.split(",")
        if set(trainer_gpus.split(",")).isdisjoint(sidecar_gpus):
            return

    if settings.sleep:
        os.environ.setdefault(_ALLOCATOR, "platform")
        return
    name, value = memory_fraction()
    fraction = trainer_share(settings)
    if value:
        try:
            fraction = float(value)
        except ValueError:
            raise ArgumentError(name, f"got {value!r}, must be a number") from None
    check_shares(settings, fraction)
    os.environ[name] = f"{fraction:g}"


def may_start_beside_trainer(platform: str) -> bool:
    """Whether vLLM may start while the trainer computes.

    On a GPU it measures free memory, and fails where more gets free: a trainer with JAX's own pool
    frees none.
    """
    return platform == "cpu" or not os.environ.get(_ALLOCATOR)


def device_share(settings: VllmSettings) -> DeviceShare | None:
    """How sidecars share the trainer's GPUs; None where they have others.

    Raises:
        UserError: see `check_shares`.
    """
    if settings.visible_devices or settings.address:
        return None
    if settings.sleep:
        return DeviceShare(
            trainer=1 - _UNUSED,
            reason="less a tenth, while vLLM sleeps",
            sampling=settings.memory_share,
        )
    share = trainer_share(settings)
    check_shares(settings, share)
    return DeviceShare(
        trainer=share, reason=f"less vLLM's share of {settings.memory_share:g} and a tenth"
    )


def trainer_share(settings: VllmSettings) -> float:
    """Share of the memory of a GPU that the trainer gets with a sidecar that does not sleep."""
    return round(1 - _MARGIN - settings.memory_share, 2)


def check_shares(settings: VllmSettings, fraction: float) -> None:
    """Refuse shares of one GPU that leave too little for the trainer or for both contexts.

    Args:
        settings: settings of the sidecars.
        fraction: the trainer's share.

    Raises:
        UserError: naming both.
    """
    if not _LEAST_TRAINER_SHARE <= fraction <= 1 - _MARGIN / 2 - settings.memory_share:
        raise ArgumentError(
            "memory_share",
            f"got {settings.memory_share:g}, and the trainer has {fraction:g} of the "
            f"same GPU ({_FRACTION_NAMES[0]}); lower one, or give vLLM GPUs of its own with "
            "`visible_devices` and the trainer others with CUDA_VISIBLE_DEVICES",
        )
