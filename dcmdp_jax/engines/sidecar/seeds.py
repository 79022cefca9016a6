"""One seed for each request to a vLLM engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def request_seeds(seed: int, step: int, rows: Sequence[int] | np.ndarray, taken: Sequence[int] = ()) -> np.ndarray:
    """Seeds that are functions of (seed, step, row) alone, whatever other rows are asked for.

    The first 64-bit word of numpy's SeedSequence([seed, step, row]), whose values numpy keeps from version to version,
    shifted right by one: vLLM takes a signed 64-bit seed and reads -1 as "none". Its CPU build looks at the low 32 bits
    only; they are hashed as well as the others.

    Args:
        seed, step: 0 .. 2^32 - 1.
        rows: [n] row numbers, `prompt * group_size + member`, 0 .. 2^32 - 1 each.
        taken: [n] tokens that a row has already, a fourth number; what is sampled after them must not repeat the draws
            that gave them. None or all 0: rows begin. (numpy reads a fourth number of 0 as no number.)

    Returns:
        [n] int64 in 0 .. 2^63 - 1.

    Raises:
        ValueError: for a number out of range, where SeedSequence would take two words and others could collide.
    """
    taken = taken if len(taken) else [0] * len(rows)
    numbers = [(int(seed), int(step), int(row), int(count)) for row, count in zip(rows, taken, strict=True)]
    for four in numbers:
        for name, value in zip(("seed", "step", "row", "taken"), four, strict=True):
            if not 0 <= value < 2**32:
                raise ValueError(f"{name}: got {value}, must be in 0 .. 2^32 - 1")
    words = [np.random.SeedSequence(four).generate_state(1, np.uint64)[0] for four in numbers]
    return (np.asarray(words, np.uint64) >> np.uint64(1)).astype(np.int64)
