"""Lower bounds of a program's time from a chip's data sheet."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.compiled_parts.account import Account
from dcmdp_jax.plan.topologies import Chip

ASSUMPTIONS = (
    "every product runs at the chip's dense bfloat16 peak; real kernels reach about half to two "
    "thirds of it",
    "memory traffic is counted by fusion, without caches",
    "a device receives at the full rate of its links; groups of more devices than one host has "
    "use the slower network",
    "between `overlapped` (the slowest of the three hides the others) and `in turn` (nothing "
    "overlaps)",
)


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


def roofline(account: Account, chip: Chip) -> Roofline:
    """The time that the data sheet allows, see `ASSUMPTIONS`."""
    communication = sum(
        one.received_bytes
        / (chip.far_bandwidth if one.devices > chip.devices_near else chip.link_bandwidth)
        for one in account.collectives
    )
    return Roofline(
        account.flops.total / chip.flops, account.traffic / chip.memory_bandwidth, communication
    )
