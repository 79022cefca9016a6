"""Totals, peaks and the table of a memory plan."""

import pytest

from dcmdp_jax.engines.machine import Machine, MemoryPart
from dcmdp_jax.run.memory_use import MemoryUse

_GIB = 2**30


def test_totals_and_peaks_of_a_plan():
    parts = (
        MemoryPart("a", per_device=4, lower="one"),
        MemoryPart("b", per_device=4, phases=frozenset({"sample"}), lower="two"),
        MemoryPart("b", per_device=6, phases=frozenset({"sample"}), lower="two", certain=False),
        MemoryPart("c", host=5, phases=frozenset({"step"}), lower="three"),
    )
    plan = MemoryUse(parts, Machine(platform="gpu", devices=2, device_bytes=12, host_bytes=4))
    assert plan.peak("device") == ("sample", 14) and plan.peak("host") == ("step", 5)
    assert plan.peak("device", certain=True) == ("sample", 8)
    assert len(plan.shortages()) == 2 and len(plan.shortages(certain=True)) == 1
    with pytest.raises(
        ValueError, match="this machine has .* the phase 'step' takes at least .* of which c "
    ):
        plan.check()


def _words(plan):
    return [" ".join(line.split()) for line in plan.table()]


def test_the_table_has_the_parts_of_each_places_largest_phase_and_says_what_does_not_fit():
    parts = (
        MemoryPart("parameters", per_device=2 * _GIB),
        MemoryPart("gathered", per_device=_GIB, phases=frozenset({"weight_sync"})),
        MemoryPart(
            "workspace",
            per_device=3 * _GIB,
            phases=frozenset({"step"}),
            lower="training.segments_per_row",
            certain=False,
        ),
        MemoryPart("copies", host=_GIB // 2),
    )
    plan = MemoryUse(
        parts,
        Machine(platform="gpu", devices=2, device_bytes=4 * _GIB, host_bytes=8 * _GIB),
        "besides: something",
    )
    # Push 2 + 1 on each device, step 2 + 3; the host holds the same in every phase.
    assert _words(plan) == [
        "each device: 5.00 of 4.00 GiB, in the phase 'step'",
        "parameters 2.00",
        "~workspace 3.00",
        "this machine: 512.00 of 8,192.00 MiB, in the phase 'weight_sync'",
        "copies 512.00",
        "does not fit: each device has 4.0 GiB and the phase 'step' takes 5.0, of which "
        "workspace 3.0; smaller with training.segments_per_row",
        "not counted: programs, temporary memory of the training step (`dcmdp plan`)",
        "besides: something",
    ]
    plan.check()  # 3 GiB for sure


def test_small_plans_are_in_mib():
    plan = MemoryUse(
        (MemoryPart("parameters", host=3 * 2**20),),
        Machine(platform="cpu", devices=4, device_bytes=None, host_bytes=None),
    )
    heading, parameters, _ = _words(plan)
    assert heading == "this machine: 3.00 MiB, in the phase 'weight_sync'"
    assert parameters == "parameters 3.00"
