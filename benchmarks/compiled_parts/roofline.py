"""Lower bounds of a program's time from a chip's data sheet."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from benchmarks.compiled_parts.account import Account

ASSUMPTIONS = (
    "every product runs at the chip's dense bfloat16 peak; real kernels reach about half to two "
    "thirds of it",
    "memory traffic is counted by fusion, without caches",
    "a device receives at the full rate of its links; groups of more devices than one host has "
    "use the slower network",
    "between `overlapped` (the slowest of the three hides the others) and `in turn` (nothing "
    "overlaps)",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSheet:
    """Figures of a device, from the vendor.

    Attributes:
        name: in words.
        flops: bfloat16 operations a second, dense.
        memory_bandwidth: bytes a second.
        link_bandwidth: bytes a second that a device receives from others in one slice or host. Of a
            TPU all its links in one direction: a collective along one mesh axis may use fewer.
        far_bandwidth: the same from other hosts, where that is another network.
        devices_near: devices that share the fast network.
    """

    name: str
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    far_bandwidth: float
    devices_near: int


def _tpu(name: str, flops: float, memory_bandwidth: float, link_bandwidth: float) -> DataSheet:
    """Slices of a TPU are of any size."""
    return DataSheet(
        name=name,
        flops=flops,
        memory_bandwidth=memory_bandwidth,
        link_bandwidth=link_bandwidth,
        far_bandwidth=link_bandwidth,
        devices_near=1 << 20,
    )


_H100 = DataSheet(
    name="H100 80GB SXM",
    flops=989e12,
    memory_bandwidth=3352e9,
    link_bandwidth=4.5e11,
    far_bandwidth=5e10,
    devices_near=8,
)
DATA_SHEETS = {
    "v5e": _tpu("TPU v5e", 197e12, 819e9, 2e11),
    "v5p": _tpu("TPU v5p", 459e12, 2765e9, 6e11),
    "v6e": _tpu("TPU v6e", 918e12, 1640e9, 4.48e11),
    "h100": _H100,
    "h200": dataclasses.replace(_H100, name="H200 141GB SXM", memory_bandwidth=4800e9),
}
"""By the kind of a topology, what is before the colon of its name."""


class Roofline(NamedTuple):
    """Seconds of one run of a program on one device, each alone.

    Attributes:
        compute: of the matrix products.
        memory: of reading and writing device memory.
        communication: of receiving what collectives move.
    """

    compute: float
    memory: float
    communication: float

    @property
    def overlapped(self) -> float:
        """If the longest hides the others."""
        return max(self)

    @property
    def in_turn(self) -> float:
        """If nothing overlaps."""
        return sum(self)

    @property
    def limit(self) -> str:
        """Name of the longest one."""
        return max(self._fields, key=lambda name: getattr(self, name))


def roofline(account: Account, chip: DataSheet) -> Roofline:
    """The time that the data sheet allows, see `ASSUMPTIONS`."""
    communication = sum(
        one.received_bytes
        / (chip.far_bandwidth if one.devices > chip.devices_near else chip.link_bandwidth)
        for one in account.collectives
    )
    return Roofline(
        account.flops.total / chip.flops, account.traffic / chip.memory_bandwidth, communication
    )
