"""Memory of a run, the capacity of a machine and the parts of its use."""

import dataclasses

MEMORY_PHASES = ("weight_sync", "sample", "step")
_ALWAYS = frozenset(MEMORY_PHASES)
PREEMPTED = "preempted caches, at most"
"""Name of the part with the caches of preempted rows, held while any program samples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Memory of the machine.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        devices: number of devices of this process.
        device_bytes: bytes of each that JAX may use; None if unknown, and on a CPU.
        host_bytes: bytes that can still be allocated, swap included; None if the system does not
            report it.
    """

    platform: str
    devices: int
    device_bytes: int | None
    host_bytes: int | None

    def part(
        self,
        name: str,
        size: int,
        *,
        devices: int,
        lower: str,
        phases: frozenset[str] = _ALWAYS,
        certain: bool = True,
    ) -> "MemoryPart":
        """A part of `size` bytes on each of `devices` devices."""
        memory = MemoryPart(name, per_device=size, phases=phases, lower=lower, certain=certain)
        if self.platform == "cpu":
            return dataclasses.replace(memory, per_device=0, host=size * devices)
        return memory


@dataclasses.dataclass(frozen=True)
class MemoryPart:
    """One kind of memory, in bytes.

    Attributes:
        name: shown in the table.
        per_device: bytes on each device.
        host: bytes in the host's memory.
        phases: phases of a step in which it is held.
        lower: settings that make it smaller; empty where none does.
        certain: whether the run needs them in any case; False for a worst case.
    """

    name: str
    _: dataclasses.KW_ONLY
    per_device: int = 0
    host: int = 0
    phases: frozenset[str] = _ALWAYS
    lower: str = ""
    certain: bool = True

    def on(self, location: str) -> int:
        """Bytes on each "device", or in the "host"'s memory."""
        return {"device": self.per_device, "host": self.host}[location]
