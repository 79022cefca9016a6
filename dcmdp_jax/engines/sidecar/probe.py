"""The fixed sequences on which an engine's log-probs are compared with the trainer's own after each push."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dcmdp_jax.types import Array, Params

Probe = Callable[[Params, np.ndarray], Array]
"""(params, [rows, tokens] int32) -> [rows, tokens - 1] log-probs of each token after the first, temperature 1.

A jax array that is still being computed will do: it is waited for when the engine has loaded the weights."""

_PROBE_ROWS, _PROBE_TOKENS = 2, 32


def probe_ids(vocab_size: int, max_total_tokens: int) -> np.ndarray:
    """[rows, tokens] int32 random tokens, the same for the same vocabulary."""
    shape = (_PROBE_ROWS, min(_PROBE_TOKENS, max_total_tokens))
    return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)
