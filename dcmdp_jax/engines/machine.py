"""Memory of a run, the capacity of a machine and the parts of its use."""

import dataclasses
from typing import Any

import jax.numpy as jnp

MEMORY_PHASES = ("weight_sync", "sample", "step")
_ALWAYS = frozenset(MEMORY_PHASES)
PREEMPTED = "preempted caches, at most"
"""Name of the part with the caches of preempted rows, held while any program samples."""
LOGITS_HELD = 3
"""Arrays of the size of logits: themselves, their exponentials, and their gradient or a masked
copy.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory of the machine.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        devices: number of devices of this process.
        device_bytes: bytes of each that JAX may use; None if unknown, and on a CPU.
        host_bytes: bytes that can still be allocated, swap included; None if the system does not
            report it.
        process_bytes: bytes that this process has already, which `host_bytes` counts too; 0 if
            unknown.
    """

    platform: str
    devices: int
    device_bytes: int | None
    host_bytes: int | None
    process_bytes: int = 0

    def part(
        self,
        devices: int,
        name: str,
        size: int,
        lower: str,
        phases: frozenset[str] = _ALWAYS,
        sure: int = 0,
    ) -> "MemoryPart":
        """A part of `size` bytes on each of `devices` devices, of which `sure` are certain."""
        if self.platform == "cpu":
            return MemoryPart(
                name,
                host=size * devices,
                phases=phases,
                lower=lower,
                certain=(0, 0, sure * devices),
            )
        return MemoryPart(name, per_device=size, phases=phases, lower=lower, certain=(sure, 0, 0))

    def product_item(self, dtype: str) -> int:
        """Bytes of a number in a product.

        XLA's CPU backend multiplies bfloat16 in float32, and copies for it.
        """
        return 4 if self.platform == "cpu" else jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class MemoryPart:
    """One kind of memory, in bytes.

    Attributes:
        name: shown in the table.
        per_device: bytes on each device.
        first: further bytes on the first device.
        host: bytes in the host's memory.
        phases: phases of a step in which it is held.
        lower: settings that make it smaller; empty where none does.
        certain: bytes that the run certainly needs, on each device, the first and the host; the
            rest is an estimate or a worst case.
    """

    name: str
    _: dataclasses.KW_ONLY
    per_device: int = 0
    first: int = 0
    host: int = 0
    phases: frozenset[str] = _ALWAYS
    lower: str = ""
    certain: tuple[int, int, int] = (0, 0, 0)

    def on(self, device: str, *, certain: bool = False) -> int:
        """Bytes on the "first" device, on each "other" one, or in the "host"'s memory."""
        amounts = self.certain if certain else (self.per_device, self.first, self.host)
        per_device, first, host = amounts
        return {"first": per_device + first, "other": per_device, "host": host}[device]


def exact(name: str, **options: Any) -> MemoryPart:
    """A part whose bytes are all certain; `options` are fields of `MemoryPart`."""
    estimate = MemoryPart(name, **options)
    certain = (estimate.per_device, estimate.first, estimate.host)
    return dataclasses.replace(estimate, certain=certain)
