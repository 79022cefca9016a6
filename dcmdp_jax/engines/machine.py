"""Memory of a run, the capacity of a machine and the parts of its use."""

from typing import Any, NamedTuple

import jax.numpy as jnp

MEMORY_PHASES = ("push", "sample", "step")
_ALWAYS = frozenset(MEMORY_PHASES)
# Name of the part with the caches of rows that wait to continue; it is held while any program
# samples.
PREEMPTED = "preempted caches, at most"
LOGITS_HELD = 3
"""Arrays of the size of logits: themselves, their exponentials, and their gradient or a masked
copy.
"""


class Machine(NamedTuple):
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

    def on_each(self, size: int, count: int) -> dict[str, int]:
        """Arguments of `MemoryPart` for an array of `size` bytes on each of `count` devices."""
        return {"host": size * count} if self.platform == "cpu" else {"each": size}

    def product_item(self, dtype: str) -> int:
        """Bytes of a number in a product: XLA's CPU backend multiplies bfloat16 in float32, and
        copies for it.
        """
        return 4 if self.platform == "cpu" else jnp.dtype(dtype).itemsize

    def on_first(self, size: int) -> dict[str, int]:
        """Arguments of `MemoryPart` for an array on the first device only."""
        return {"host": size} if self.platform == "cpu" else {"first": size}


class MemoryPart(NamedTuple):
    """One kind of memory, in bytes.

    Attributes:
        name: shown in the table.
        each: bytes on each device.
        first: further bytes on the first device.
        host: bytes in the host's memory.
        phases: phases of a step in which it is held.
        lower: settings that make it smaller; empty where none does.
        certain: bytes that the run certainly needs, on each device, the first and the host; the
            rest is an estimate or a worst case.
    """

    name: str
    each: int = 0
    first: int = 0
    host: int = 0
    phases: frozenset[str] = _ALWAYS
    lower: str = ""
    certain: tuple[int, int, int] = (0, 0, 0)

    def on(self, place: str, *, certain: bool = False) -> int:
        """Bytes on the "first" device, on each of the "other" devices, or in the "host"'s
        memory.
        """
        each, first, host = self.certain if certain else (self.each, self.first, self.host)
        return {"first": each + first, "other": each, "host": host}[place]


def certain(each: int = 0, first: int = 0, host: int = 0) -> tuple[int, int, int]:
    """`MemoryPart.certain` for arguments of `Machine.on_each` and `Machine.on_first`."""
    return each, first, host


def exact(name: str, *, each: int = 0, first: int = 0, host: int = 0, **options: Any) -> MemoryPart:
    """A part whose bytes are all certain."""
    return MemoryPart(name, each, first, host, certain=certain(each, first, host), **options)
