"""Loss scaling for float16, whose numbers reach from 6e-8 to 65504: gradients leave that range, values rarely."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dcmdp_jax.types import LossScale

INITIAL_SCALE = 2.0**10
GROWTH_INTERVAL = 2000
_LARGEST = 2.0**24
_SMALLEST = 1.0
WARMUP_SCALE = 2.0**10
"""Fixed, for the supervised warm-up, whose loss is a mean over tokens."""


def initial_loss_scale(compute_dtype: str) -> LossScale | None:
    """The scale before the first update; None for a dtype that needs none."""
    if compute_dtype != "float16":
        return None
    return LossScale(jnp.float32(INITIAL_SCALE), jnp.zeros((), jnp.int32))


def next_loss_scale(state: LossScale, finite: jax.Array) -> LossScale:
    """The scale after an update (Micikevicius et al. 2018, section 3.2), with the constants of PyTorch's GradScaler.

        S / 2      after an update with a gradient that is not finite, which was skipped; at least 1
        2 S        after 2000 finite ones in a row; at most 2^24
        S          else

    Powers of two, so scaling and dividing again is exact. PyTorch starts at 2^16, for a loss that is a mean;
    ours is a sum over completions, divided after the pass, and starts at 2^10.

    Args:
        state: S of the update and the finite ones before it.
        finite: [] bool, whether the gradient of the update is finite.
    """
    count = jnp.where(finite, state.finite_updates + 1, 0)
    grown = count >= GROWTH_INTERVAL
    scale = jnp.where(finite, jnp.where(grown, 2 * state.scale, state.scale), state.scale / 2)
    return LossScale(jnp.clip(scale, _SMALLEST, _LARGEST), jnp.where(grown, 0, count))
