"""Totals, peaks and the table of a memory plan."""

import pytest

from dcmdp_jax.engines.machine import Machine, MemoryPart, exact
from dcmdp_jax.run.memory_use import MemoryUse

_GIB = 2**30


def test_totals_and_peaks_of_a_plan():
    parts = (
        exact("a", per_device=3, first=1, lower="one"),
        MemoryPart(
            "b", per_device=10, phases=frozenset({"sample"}), lower="two", certain=(4, 0, 0)
        ),
        exact("c", host=5, phases=frozenset({"step"}), lower="three"),
    )
    plan = MemoryUse(parts, Machine(platform="gpu", devices=2, device_bytes=12, host_bytes=4))
    assert plan.peak("first") == ("sample", 14) and plan.peak("other") == ("sample", 13)
    assert plan.peak("first", certain=True) == ("sample", 8) and plan.peak("host") == ("step", 5)
    assert len(plan.shortages()) == 2 and len(plan.shortages(certain=True)) == 1
    with pytest.raises(
        ValueError, match="this machine has .* the phase 'step' takes at least .* of which c "
    ):
        plan.check()


def _words(plan):
    return [" ".join(line.split()) for line in plan.table()]


def test_the_table_has_the_parts_of_each_places_largest_phase_and_says_what_does_not_fit():
    parts = (
        exact("parameters", per_device=2 * _GIB),
        exact("gathered", first=_GIB, phases=frozenset({"weight_sync"})),
        MemoryPart(
            "logits", per_device=3 * _GIB, phases=frozenset({"step"}), lower="model.logprob_chunk"
        ),
        exact("copies", host=_GIB // 2),
    )
    plan = MemoryUse(
        parts,
        Machine(platform="gpu", devices=2, device_bytes=4 * _GIB, host_bytes=8 * _GIB),
        "besides: something",
    )
    # Push 2 + 1 on the first device, step 2 + 3; the host holds the same in every phase.
    assert _words(plan) == [
        "the first device: 5.00 of 4.00 GiB, in the phase 'step'",
        "parameters 2.00",
        "~logits 3.00",
        "this machine: 512.00 of 8,192.00 MiB, in the phase 'weight_sync'",
        "copies 512.00",
        "does not fit: the first device has 4.0 GiB and the phase 'step' takes 5.0, of which "
        "logits 3.0; smaller with model.logprob_chunk",
        "besides: something",
    ]
    plan.check()  # 3 GiB for sure


def test_small_plans_are_in_mib():
    plan = MemoryUse(
        (exact("parameters", host=3 * 2**20),),
        Machine(platform="cpu", devices=4, device_bytes=None, host_bytes=None),
    )
    assert _words(plan) == ["this machine: 3.00 MiB, in the phase 'weight_sync'", "parameters 3.00"]
