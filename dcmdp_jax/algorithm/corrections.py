"""Corrections of the loss for engine mismatch: token weights, and tokens to drop.

A correction is a pure function

    (old_logprobs, rollout_logprobs, completion_mask, completion_index, num_completions) -> (weights, keep)

of [R, L] arrays as in `discrepancy.discrepancy`. `weights` [R, L] float32 >= 0 multiply the token losses. `keep` [R, L]
bool is false on tokens to leave out: they have no loss, and the loss is divided by the weight of those that remain
(`losses.aggregation_weights`). Both are constants to the gradient; values outside the mask are ignored. To add one,
write it here and name it in `CORRECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax

Correction = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]

CORRECTIONS: Mapping[str, Correction] = MappingProxyType({})
"""Name -> correction."""
