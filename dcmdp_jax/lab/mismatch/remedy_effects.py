"""Tokens that each remedy would keep, weigh or drop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from dcmdp_jax.lab.mismatch.pairs import TokenPairs
from dcmdp_jax.named_functions import needed_parameters

if TYPE_CHECKING:
    from dcmdp_jax.algorithm.corrections import Correction
    from dcmdp_jax.algorithm.remedies import Corrected, Region, Tokens

_BLOCK_TOKENS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Effect:
    """Effect of a remedy on these tokens.

    Attributes:
        name: key of `CORRECTIONS` or `TRUST_REGIONS`.
        dropped: share of the tokens without a gradient.
        weighted: share of the kept tokens whose weight is not 1.
        mean_weight: over the kept tokens; NaN if none is kept.
        smallest, largest: weight of a kept token; NaN if none is kept.
        discrepancy_dropped: share of sum |p - q| that is on dropped tokens.
    """

    name: str
    dropped: float
    weighted: float
    mean_weight: float
    smallest: float
    largest: float
    discrepancy_dropped: float


def _trust_region(tokens: Tokens, *, region: Callable[..., Region]) -> Corrected:
    """A trust region around the engine's probabilities at the first update, where the policy is p: weight p / q."""
    import jax.numpy as jnp

    from dcmdp_jax.algorithm.numerics import clamped_log_ratio
    from dcmdp_jax.algorithm.remedies import Corrected

    anchor = tokens.rollout_logprobs
    ratio = jnp.exp(clamped_log_ratio(tokens.old_logprobs, anchor))
    found = region(tokens._replace(anchor_logprobs=anchor, ratio=ratio))
    return Corrected(ratio, ~(found.low | found.high))


@functools.cache
def _remedies() -> Mapping[str, Correction]:
    """Every correction whose parameters have defaults, and the trust regions that stop tokens by probability."""
    from dcmdp_jax.algorithm.corrections import CORRECTIONS
    from dcmdp_jax.algorithm.trust_regions import TRUST_REGIONS

    found = {name: correction for name, correction in CORRECTIONS.items() if not needed_parameters(correction)}
    regions = {name: functools.partial(_trust_region, region=TRUST_REGIONS[name]) for name in ("dppo_tv", "dppo_kl")}
    return found | regions


def not_computed(pairs: TokenPairs) -> list[str]:
    """Name the remedies that `effects` leaves out: they look at advantages, which these tokens have none of."""
    from dcmdp_jax.algorithm.remedies import uses

    return [name for name, one in _remedies().items() if pairs.advantages is None and uses(one, "advantages")]


def effects(pairs: TokenPairs, remedies: Mapping[str, Correction] | None = None) -> list[Effect]:
    """The effect of every correction that has default constants, with these, and of DPPO; see `not_computed`."""
    from dcmdp_jax.algorithm.remedies import uses

    remedies = _remedies() if remedies is None else remedies
    known = [name for name, one in remedies.items() if pairs.advantages is not None or not uses(one, "advantages")]
    return [_effect(name, remedies[name], pairs) for name in known]


def _effect(name: str, correction: Correction, pairs: TokenPairs) -> Effect:
    parts = [apply(correction, block) for block in _blocks(pairs)]
    weights, keep = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    delta, kept = pairs.discrepancy, weights[keep]
    total = delta.sum()
    mean, low, high = (kept.mean(), kept.min(), kept.max()) if len(kept) else (np.nan,) * 3
    return Effect(
        name,
        dropped=float(np.mean(~keep)),
        weighted=float(np.mean(kept != 1)) if len(kept) else 0.0,
        mean_weight=float(mean),
        smallest=float(low),
        largest=float(high),
        discrepancy_dropped=float(delta[~keep].sum() / total) if total else 0.0,
    )


def apply(correction: Correction, pairs: TokenPairs) -> tuple[np.ndarray, np.ndarray]:
    """Weights [n] float32 and keep [n] bool of a correction; the one place that calls it as the training step does."""
    from dcmdp_jax.algorithm.remedies import Tokens

    tokens, completions = len(pairs.token_ids), len(pairs.lengths)
    # Padded to powers of two: each shape is compiled.
    width = 1 << max(tokens - 1, 1).bit_length()
    advantages = np.zeros(completions, np.float32) if pairs.advantages is None else pairs.advantages
    rows = {
        "train_logprobs": pairs.train_logprobs,
        "old_logprobs": pairs.train_logprobs,
        "rollout_logprobs": pairs.rollout_logprobs,
        "advantages": advantages[pairs.completion],
        "completion_mask": np.ones(tokens, bool),
        "completion_index": pairs.completion.astype(np.int32),
    }
    padded = {name: np.pad(row, (0, width - tokens))[None] for name, row in rows.items()}
    corrected = correction(Tokens(**padded, num_completions=1 << max(completions - 1, 1).bit_length()))
    weights, keep = np.asarray(corrected.weights, np.float32), np.asarray(corrected.keep, bool)
    return weights[0, :tokens], keep[0, :tokens]


def _blocks(pairs: TokenPairs) -> Iterator[TokenPairs]:
    """Whole completions, about 65,536 tokens at a time."""
    ends = np.cumsum(pairs.lengths)
    first = 0
    while first < len(ends):
        begin = int(ends[first] - pairs.lengths[first])
        last = max(first + 1, int(np.searchsorted(ends, begin + _BLOCK_TOKENS, side="right")))
        span = slice(begin, int(ends[last - 1]))
        yield TokenPairs(
            pairs.token_ids[span], pairs.train_logprobs[span], pairs.rollout_logprobs[span], pairs.lengths[first:last],
            advantages=None if pairs.advantages is None else pairs.advantages[first:last],
        )  # fmt: skip
        first = last
