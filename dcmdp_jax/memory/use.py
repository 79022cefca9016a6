"""Memory of a run by kind, device and phase, and the memory available. `parts` computes the parts.

Parts that are arrays with known shapes are exact: parameters, moments, gradients, the engine's weights, its cache. The
compiler's temporary memory is an estimate, marked ~; nothing is compiled, so so a large model takes no longer than
a small one. Devices of a CPU share the host's memory and count as the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from dcmdp_jax.config.arguments import as_settings, in_settings, of_engine
from dcmdp_jax.engines.kind import EngineArguments, EngineKind, Workload
from dcmdp_jax.engines.sidecar.segments import available_bytes
from dcmdp_jax.errors import UserError
from dcmdp_jax.machine import MEMORY_PHASES, Machine, MemoryPart

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """The parts of a run, and its machine.

    Attributes:
        parts: by kind.
        machine: the memory available.
        note: memory that can't be computed here, or empty.
        rows: completions that the engine decodes at a time; fewer than it was asked for where those do not fit.
    """

    parts: tuple[MemoryPart, ...]
    machine: Machine
    note: str = ""
    rows: int = 0

    def total(self, phase: str, place: str, *, certain: bool = False) -> int:
        """Bytes held in a phase: on the "first" device, on each "other" one, or in the "host"'s memory."""
        return sum(part.on(place, certain=certain) for part in self.parts if phase in part.phases)

    def peak(self, place: str, *, certain: bool = False) -> tuple[str, int]:
        """The phase with the largest use of a place, and its bytes."""
        totals = {phase: self.total(phase, place, certain=certain) for phase in MEMORY_PHASES}
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

        rows = [(name_of_unit, *MEMORY_PHASES, "")]
        devices, cpu = self.machine.devices, self.machine.platform == "cpu"
        host = "" if cpu else ", host"
        for part in self.parts:
            for place, where in (("first", ""), ("other", ", other devices"), ("host", host)):
                size = part.on(place)
                if not size or (place == "other" and (devices == 1 or not part.first)):
                    continue
                mark = "" if size == part.on(place, certain=True) else "~"
                held = (amount(size) if phase in part.phases else "" for phase in MEMORY_PHASES)
                rows.append((f"{mark}{part.name}{where}", *held, ""))
        places = ["host"] if cpu else ["first", "other", "host"] if devices > 1 else ["first", "host"]
        for place in places:
            limit = self.machine.host_bytes if place == "host" else self.machine.device_bytes
            name = {"first": "total, first device", "other": "total, other devices", "host": f"total{host}"}[place]
            available = f"of {amount(limit)}" if limit is not None else ""
            rows.append((name, *(amount(self.total(phase, place)) for phase in MEMORY_PHASES), available))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{row[0].ljust(widths[0])}  {'  '.join(map(str.rjust, row[1:4], widths[1:]))}  {row[4]}".rstrip()
            for row in rows
        ]
        lines += [f"does not fit: {found}" for found in self.shortages()]
        return lines + ([self.note] if self.note else [])


def with_engine(
    kind: EngineKind,
    arguments: EngineArguments,
    load: Workload,
    machine: Machine,
    others: Sequence[MemoryPart],
    *,
    names: Mapping[str, str] | None = None,
    fitted_rows: int = 0,
) -> MemoryUse:
    """The use of other parts and an engine's, with the rows that fit where it decodes on JAX's devices.

    Args:
        kind, arguments: the engine.
        load: what it is asked.
        machine: the memory available.
        others: everything else.
        names: of the arguments for people, see `config.arguments`; None for the settings of a run.
        fitted_rows: what was found before, which holds; 0 finds it.
    """
    names = of_engine(kind) if names is None else names
    rows = min(arguments.max_rows, fitted_rows or arguments.max_rows)

    def parts(rows: int) -> list[MemoryPart]:
        with as_settings(names):
            found = kind.memory(arguments, load, machine, rows)
        return [part._replace(lower=in_settings(part.lower, names)) for part in found]

    def fits(rows: int) -> bool:
        use = MemoryUse((*others, *parts(rows)), machine)
        return use.total("sample", "first") <= machine.device_bytes

    # A CPU's free memory is another one in each run.
    known = machine.platform != "cpu" and machine.device_bytes is not None
    if known and not (kind.own_process or fitted_rows or fits(rows)):
        rows = _most_rows(fits, -(-min(rows, load.completions) // machine.devices), machine.devices)
    note = in_settings(kind.memory_note(arguments), names)
    return MemoryUse((*others, *parts(rows)), machine, note, rows)


def _most_rows(fits: Callable[[int], bool], most: int, devices: int) -> int:
    """The most rows that fit, at least one for each device, where `most` for each does not."""
    least = 0
    while most - least > 1:
        middle = (most + least) // 2
        least, most = (middle, most) if fits(middle * devices) else (least, middle)
    return max(least, 1) * devices


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
