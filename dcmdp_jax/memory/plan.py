"""Memory of a run by kind, device and phase, and the memory available. `parts` computes the parts.

Parts that are arrays with known shapes are exact: parameters, moments, gradients, the engine's weights, its cache. The
compiler's temporary memory is an estimate, marked ~; nothing is compiled, so the plan of a large model is as fast as
that of a small one. Devices of a CPU share the host's memory and count as the host.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax

from dcmdp_jax.engines.sidecar.shared_memory import available_bytes
from dcmdp_jax.errors import UserError

PHASES = ("push", "sample", "step")
_ALWAYS = frozenset(PHASES)
_GIB = 2**30
MORE_DEVICES = "a smaller model, or more devices along mesh.fsdp or mesh.tensor"


class Machine(NamedTuple):
    """Memory of the machine.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        devices: number of devices of this process.
        device_bytes: bytes of each that JAX may use; None if unknown, and on a CPU.
        host_bytes: bytes that can still be allocated, swap included; None if the system does not report it.
    """

    platform: str
    devices: int
    device_bytes: int | None
    host_bytes: int | None

    def on_each(self, size: int, count: int) -> dict[str, int]:
        """Arguments of `Part` for an array of `size` bytes on each of `count` devices."""
        return {"host": size * count} if self.platform == "cpu" else {"each": size}

    def on_first(self, size: int) -> dict[str, int]:
        """Arguments of `Part` for an array on the first device only."""
        return {"host": size} if self.platform == "cpu" else {"first": size}


class Part(NamedTuple):
    """One kind of memory, in bytes.

    Attributes:
        name: shown in the table.
        each: bytes on each device.
        first: further bytes on the first device.
        host: bytes in the host's memory.
        phases: phases of a step in which it is held.
        lower: settings that make it smaller.
        certain: bytes that the run certainly needs, on each device, the first and the host; the rest is an estimate or
            a worst case.
    """

    name: str
    each: int = 0
    first: int = 0
    host: int = 0
    phases: frozenset[str] = _ALWAYS
    lower: str = MORE_DEVICES
    certain: tuple[int, int, int] = (0, 0, 0)

    def on(self, place: str, *, certain: bool = False) -> int:
        """Bytes on the "first" device, on each of the "other" devices, or in the "host"'s memory."""
        each, first, host = self.certain if certain else (self.each, self.first, self.host)
        return {"first": each + first, "other": each, "host": host}[place]


def certain(each: int = 0, first: int = 0, host: int = 0) -> tuple[int, int, int]:
    """`Part.certain` for arguments of `Machine.on_each` and `Machine.on_first`."""
    return each, first, host


def exact(name: str, *, each: int = 0, first: int = 0, host: int = 0, **options: Any) -> Part:
    """A part whose bytes are all certain."""
    return Part(name, each, first, host, certain=certain(each, first, host), **options)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The parts of a run, and its machine.

    Attributes:
        parts: by kind.
        machine: the memory available.
        note: memory that can't be computed here, or empty.
        rows: completions that an embedded engine decodes at a time; 0 with another engine.
    """

    parts: tuple[Part, ...]
    machine: Machine
    note: str = ""
    rows: int = 0

    def total(self, phase: str, place: str, *, certain: bool = False) -> int:
        """Bytes held in a phase: on the "first" device, on each "other" one, or in the "host"'s memory."""
        return sum(part.on(place, certain=certain) for part in self.parts if phase in part.phases)

    def peak(self, place: str, *, certain: bool = False) -> tuple[str, int]:
        """The phase with the largest use of a place, and its bytes."""
        totals = {phase: self.total(phase, place, certain=certain) for phase in PHASES}
        phase = max(totals, key=totals.__getitem__)
        return phase, totals[phase]

    def shortages(self, *, certain: bool = False) -> list[str]:
        """A sentence for each place with too little memory: the shortage, the largest part, the settings to lower."""
        found = []
        for place, limit in (("first", self.machine.device_bytes), ("host", self.machine.host_bytes)):
            phase, needed = self.peak(place, certain=certain)
            if limit is None or needed <= limit:
                continue
            held = [part for part in self.parts if phase in part.phases]
            largest = max(held, key=lambda part: part.on(place, certain=certain))
            where = "the first device" if place == "first" else "this machine"
            size = largest.on(place, certain=certain)
            found.append(
                f"{where} has {limit / _GIB:.1f} GiB and the phase {phase!r} takes {'at least ' * certain}"
                f"{needed / _GIB:.1f}, of which {largest.name} {size / _GIB:.1f}; smaller with {largest.lower}"
            )
        return found

    def check(self) -> None:
        """Refuse a run whose certain parts alone don't fit.

        Raises:
            ValueError: in one line, naming the largest part and the settings that make it smaller.
        """
        if found := self.shortages(certain=True):
            raise UserError(f"memory: {found[0]}")

    def table(self) -> list[str]:
        """Lines of text: GiB of each part in each phase, the totals, and what does not fit."""
        largest = max(self.peak("first")[1], self.peak("host")[1])
        unit, name_of_unit = (_GIB, "GiB") if largest >= _GIB else (2**20, "MiB")

        def amount(size: int) -> str:
            return f"{size / unit:,.2f}"

        rows = [(name_of_unit, *PHASES, "")]
        devices, cpu = self.machine.devices, self.machine.platform == "cpu"
        host = "" if cpu else ", host"
        for part in self.parts:
            for place, where in (("first", ""), ("other", ", other devices"), ("host", host)):
                size = part.on(place)
                if not size or (place == "other" and (devices == 1 or not part.first)):
                    continue
                mark = "" if size == part.on(place, certain=True) else "~"
                held = (amount(size) if phase in part.phases else "" for phase in PHASES)
                rows.append((f"{mark}{part.name}{where}", *held, ""))
        places = ["host"] if cpu else ["first", "other", "host"] if devices > 1 else ["first", "host"]
        for place in places:
            limit = self.machine.host_bytes if place == "host" else self.machine.device_bytes
            name = {"first": "total, first device", "other": "total, other devices", "host": f"total{host}"}[place]
            available = f"of {amount(limit)}" if limit is not None else ""
            rows.append((name, *(amount(self.total(phase, place)) for phase in PHASES), available))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{row[0].ljust(widths[0])}  {'  '.join(map(str.rjust, row[1:4], widths[1:]))}  {row[4]}".rstrip()
            for row in rows
        ]
        lines += [f"does not fit: {found}" for found in self.shortages()]
        return lines + ([self.note] if self.note else [])


def this_machine(platform: str) -> Machine:
    """The machine that this process runs on."""
    devices = jax.local_devices()
    limit = None
    if platform != "cpu":
        stats = devices[0].memory_stats() or {}
        limit = stats.get("bytes_limit")
    return Machine(platform, len(devices), limit, free_host_bytes())


def free_host_bytes() -> int | None:
    """Memory that can still be allocated on this host, swap space included; None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        swap = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapFree:"))
        return available_bytes() + swap
    except (OSError, ValueError, KeyError, StopIteration):
        return None
