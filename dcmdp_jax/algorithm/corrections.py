"""Corrections of the loss for engine mismatch: token weights, and tokens to leave out.

A correction is a pure function

    (tokens: SampledTokens, *, parameters) -> Corrected(weights, keep, truncated)

`weights` multiply the token losses. Tokens with `keep` false are left out: they have no loss, and the loss is divided
by the weight of those that remain, unless dropped tokens are to be counted (`signals.row_signals`). All outputs are
constants to the gradient. Corrections are joined by `chain`: weights multiply, keep-masks intersect. Each of them sees
all tokens, whatever the others drop, so their order has no effect.

One direction everywhere: with p = exp(old), the training stack under the weights that made the batch, and
q = exp(rollout), the inference engine,

    d_t = log p_t - log q_t,    r_t = p_t / q_t = exp(d_t).

Sums over a completion add unclamped differences (each log-prob is clamped at 1e4 nats, so that -inf is finite); what
is exponentiated or squared is clamped at 20 nats first (`numerics`). A value equal to a bound is kept. A NaN under the
mask stays NaN: no comparison drops it, and the weight becomes NaN. Values outside the mask are ignored.

To add one, write it here and name it in `WEIGHTS` (it weighs by p / q) or `FILTERS`. Its keyword arguments are the
parameters of setting `algorithm.corrections`; all are positive numbers, `low` may be 0 and is below `high`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm.checks import require_same_shape
from dcmdp_jax.algorithm.masked import completion_counts, completion_maxima, completion_sums, gather_to_tokens
from dcmdp_jax.algorithm.numerics import MAX_LOG_RATIO, clamp, clamped_log_ratio, exp_minus_linear, log_difference
from dcmdp_jax.algorithm.stats import Mean
from dcmdp_jax.types import Array


class SampledTokens(NamedTuple):
    """Input of a correction, rows [R, L]. All tokens of a completion are in the same call.

    Attributes:
        train_logprobs: [R, L] nats, training stack, weights now. Equal to `old_logprobs` in the first update of a step.
        old_logprobs: [R, L] nats, training stack, weights that made the batch.
        rollout_logprobs: [R, L] nats, the inference engine's.
        advantages: [R, L] float, of each token's completion, without penalty.
        completion_mask: [R, L] bool, true on sampled tokens.
        completion_index: [R, L] int, the completion of a token.
        num_completions: N, static.
    """

    train_logprobs: Array
    old_logprobs: Array
    rollout_logprobs: Array
    advantages: Array
    completion_mask: Array
    completion_index: Array
    num_completions: int


class Corrected(NamedTuple):
    """Result of a correction of rows [R, L].

    Attributes:
        weights: [R, L] float32 >= 0, factor of a token's loss; 0 outside the mask.
        keep: [R, L] bool, false on tokens to leave out.
        truncated: [R, L] bool, tokens whose weight a bound has changed.
    """

    weights: jax.Array
    keep: jax.Array
    truncated: jax.Array


Correction = Callable[[SampledTokens], Corrected]


# Importance weights: the loss becomes one under the training stack's distribution.


def tis(tokens: SampledTokens, *, low: float = 0.0, high: float = 2.0) -> Corrected:
    """Truncated importance sampling of tokens (Yao et al. 2025): w_t = clip(r_t, low, high). Nothing is dropped.

    Ratio: training over rollout. Denominator: all tokens. verl (`rollout_is=token`, 2), slime (`use_tis`, [0, 2]),
    NeMo-RL (`tis`), Tunix (`sampler_is=token`, 2) and TRL (`token_truncate`, 3) weigh alike; NeMo-RL weighs a token
    with a non-finite ratio by 0, here -inf is clamped and NaN stays.
    """
    ratio = jnp.exp(_token_log_ratio(tokens))
    return _truncated(tokens, ratio, low, high)


def sequence_tis(tokens: SampledTokens, *, low: float = 0.0, high: float = 2.0) -> Corrected:
    """Truncated importance sampling of completions: w = clip(prod_t r_t, low, high) on each token. Nothing is dropped.

    Unbiased but for the bounds, of large variance: the product's logarithm grows with the length. Ratio: training over
    rollout. Denominator: all tokens. verl (`rollout_is=sequence`, 2) and TRL (`sequence_truncate`, 3) weigh alike.
    AReaL's sequence level takes the geometric mean, not the product.
    """
    return _truncated(tokens, jnp.exp(_sequence_log_ratio(tokens)), low, high)


def icepop(tokens: SampledTokens, *, low: float = 0.5, high: float = 5.0) -> Corrected:
    """Masked importance sampling of tokens, IcePop (Ring-1T, 2025): w_t = r_t inside [low, high], else dropped.

    Ratio: training over rollout. Denominator: kept tokens, as in AReaL (`action=mask`) and slime's `mask` mode. In
    slime's `icepop_function`, NeMo-RL (`icepop`, 0.5 to 5) and TRL (`token_mask`, up to 3) dropped tokens have weight 0
    and count: `correction_denominator=all` does that.
    """
    ratio = jnp.exp(_token_log_ratio(tokens))
    return _kept(tokens, ratio, _inside(ratio, low, high), weights=ratio)


def sequence_mis(tokens: SampledTokens, *, low: float = 0.0, high: float = 3.0) -> Corrected:
    """Masked importance sampling of completions: w = prod_t r_t on each token if inside [low, high], else dropped.

    Ratio: training over rollout. Denominator: kept tokens. TRL's default (`sequence_mask`, up to 3), where dropped
    completions count. verl has it as `rollout_is=sequence` with `rollout_rs=seq_sum_k1`, the weight truncated too.
    """
    ratio = jnp.exp(_sequence_log_ratio(tokens))
    return _kept(tokens, ratio, _inside(ratio, low, high), weights=ratio)


# Filters: tokens are kept with weight 1 or left out.


def sequence_rejection(tokens: SampledTokens, *, low: float = 0.5, high: float = 2.0) -> Corrected:
    """Keep completions whose prod_t r_t is inside [low, high].

    Ratio: training over rollout. Denominator: kept tokens. verl's `seq_sum_k1` with `0.5_2.0` bounds -sum d, hence
    1 / prod r: its bounds are ours inverted, the same for a symmetric band. slime: `rs_level=sequence`.
    """
    ratio = jnp.exp(_sequence_log_ratio(tokens))
    return _kept(tokens, ratio, _inside(ratio, low, high))


def geometric_rejection(tokens: SampledTokens, *, low: float = 0.999, high: float = 1.001) -> Corrected:
    """Keep completions whose geometric mean (prod_t r_t)^(1 / |o|) is inside [low, high]: no effect of the length.

    Ratio: training over rollout. Denominator: kept tokens. verl's `seq_mean_k1` (0.999 to 1.001) bounds the inverse;
    slime: `rs_level=geometric`; NeMo-RL's `seq-mask-tis` (0.999 to 1.002) weighs kept tokens by r_t too, without bound:
    that is `tis(high=...)` beside this.
    """
    mean = _gathered_mean(tokens, log_difference(tokens.old_logprobs, tokens.rollout_logprobs))
    ratio = jnp.exp(clamp(mean, MAX_LOG_RATIO))
    return _kept(tokens, ratio, _inside(ratio, low, high))


def veto(tokens: SampledTokens, *, floor: float = 1e-4) -> Corrected:
    """Drop a whole completion if one of its tokens has r_t below `floor`.

    Ratio: training over rollout. Denominator: kept tokens. slime (`rs_veto_threshold`) and former verl
    (`rollout_token_veto_threshold`), 1e-4 in both, do the same.
    """
    lowest = -_gathered(tokens, completion_maxima, -_token_log_ratio(tokens))
    return _kept(tokens, lowest, ~(lowest < math.log(floor)))


def off_policy_mask(tokens: SampledTokens, *, high: float = 0.5) -> Corrected:
    """Drop completions with A < 0 and mean_t (log q_t - log pi_t) above `high` nats (DeepSeek-V3.2, Eq. 9).

    pi is the policy now, so that policy drift counts and engine mismatch too. Denominator: kept tokens; in TRL
    (`off_policy_mask_threshold`, 0.5) and slime (`use_opsm`, 1e-4) dropped tokens count. slime compares with p^Train in
    place of the engine's q: policy drift alone.
    """
    mean = _gathered_mean(tokens, log_difference(tokens.rollout_logprobs, tokens.train_logprobs))
    return _kept(tokens, mean, ~((jnp.asarray(tokens.advantages) < 0) & (mean > high)))


def _divergence(tokens: SampledTokens, *, high: float, estimator: str, level: str) -> Corrected:
    """Keep tokens whose estimate of KL(q || p) is at most `high` nats, in absolute value.

        k1 = -d        k2 = d^2 / 2        k3 = e^d - 1 - d

    of the token, or the mean, the sum or the largest |estimate| over its completion, which is kept or dropped as a
    whole. In k2 and k3 d is clamped at 20 nats; k1 is not, so that sum_k1(high=log 2) drops what
    sequence_rejection(low=0.5, high=2) does. Ratio: training over rollout. Denominator: kept tokens. verl (`token_k1`,
    `seq_mean_k3`, ...) has the same, with bounds on e^k1, so that its band need not be symmetric. AReaL's
    (`metric=kl_k3`, `agg`) are of -d: its k1 is d, and its k3 = e^-d - 1 + d is of the inverse ratio.
    """
    clamped = _token_log_ratio(tokens)
    values = {
        "k1": _inside_mask(tokens, log_difference(tokens.rollout_logprobs, tokens.old_logprobs)),
        "k2": clamped**2 / 2,
        "k3": exp_minus_linear(clamped),
    }[estimator]
    if level == "mean":
        values = _gathered_mean(tokens, values)
    elif level == "sum":
        values = _gathered(tokens, completion_sums, values)
    elif level == "max":
        values = _gathered(tokens, completion_maxima, jnp.abs(values))
    return _kept(tokens, values, ~(jnp.abs(values) > high))


WEIGHTS: Mapping[str, Callable[..., Corrected]] = MappingProxyType(
    {"tis": tis, "sequence_tis": sequence_tis, "icepop": icepop, "sequence_mis": sequence_mis}
)
"""Name -> correction that weighs by p / q. Not for a loss whose ratio is over q already: that would weigh twice."""

FILTERS: Mapping[str, Callable[..., Corrected]] = MappingProxyType(
    {
        "sequence_rejection": sequence_rejection,
        "geometric_rejection": geometric_rejection,
        "veto": veto,
        "off_policy_mask": off_policy_mask,
        **{
            f"{level}_{estimator}": functools.partial(_divergence, estimator=estimator, level=level)
            for level in ("token", "mean", "sum", "max")
            for estimator in ("k1", "k2", "k3")
        },
    }
)
"""Name -> correction that keeps or drops."""

CORRECTIONS: Mapping[str, Callable[..., Corrected]] = MappingProxyType({**WEIGHTS, **FILTERS})
"""Name -> correction."""

DROPS_NOTHING = frozenset({"tis", "sequence_tis"})
"""Names of the corrections that keep every token."""

USES_ADVANTAGES = frozenset({"off_policy_mask"})
"""Names of the corrections that look at the sign of the advantage."""


def parameters(name: str) -> dict[str, float | None]:
    """The parameters of a correction with their defaults; None for one that has to be given."""
    correction = CORRECTIONS[name]
    fixed = correction.keywords if isinstance(correction, functools.partial) else {}
    keywords = [
        parameter
        for parameter in inspect.signature(correction).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in fixed
    ]
    return {p.name: None if p.default is p.empty else p.default for p in keywords}


def make_correction(name: str, given: Mapping[str, float]) -> Correction:
    """A correction with its parameters, checked.

    Args:
        name: of `CORRECTIONS`.
        given: parameters that differ from the defaults.

    Raises:
        ValueError: in one line, for a parameter that is missing, unknown or not a positive number, or an empty band.
    """
    known = parameters(name)
    if unknown := [parameter for parameter in given if parameter not in known]:
        raise ValueError(f"{name} has no parameter {unknown[0]!r}; it has {', '.join(known)}")
    values = {**known, **given}
    for parameter, value in values.items():
        if value is None:
            raise ValueError(f"{name} needs {parameter}, such as {name}({parameter}=0.1)")
        if not math.isfinite(value) or value < 0 or (value == 0 and parameter != "low"):
            raise ValueError(f"{name}({parameter}={value:g}): must be a finite number above 0")
    if "low" in values and values["low"] >= values.get("high", math.inf):
        raise ValueError(f"{name}: the band from low={values['low']:g} to high={values['high']:g} is empty")
    return functools.partial(CORRECTIONS[name], **values)


def chain(corrections: Sequence[Correction]) -> Correction | None:
    """Join corrections: weights multiply, keep-masks intersect. None for an empty sequence."""
    if not corrections:
        return None

    def joined(tokens: SampledTokens) -> Corrected:
        parts = [correction(tokens) for correction in corrections]
        return functools.reduce(
            lambda a, b: Corrected(a.weights * b.weights, a.keep & b.keep, a.truncated | b.truncated), parts
        )

    return joined


def statistics(corrected: Corrected, completion_mask: Array) -> dict[str, Mean]:
    """Statistics of corrected tokens under the mask, left unreduced.

    Returns:
        Means over all tokens, the dropped ones with weight 0: `dropped_fraction`, `truncated_fraction`, `weight_mean`
        and `weight_square_mean`. The effective share of the tokens is weight_mean^2 / weight_square_mean.
    """
    mask = jnp.asarray(completion_mask, bool)
    weights = jnp.where(mask & corrected.keep, corrected.weights, 0.0)
    values = {
        "dropped_fraction": ~corrected.keep,
        "truncated_fraction": corrected.truncated & corrected.keep,
        "weight_mean": weights,
        "weight_square_mean": weights**2,
    }
    count = jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)
    return {name: Mean(jnp.sum(jnp.where(mask, value, 0.0)), count) for name, value in values.items()}


def _token_log_ratio(tokens: SampledTokens) -> jax.Array:
    """d_t, clamped; [R, L] float32."""
    return clamped_log_ratio(_inside_mask(tokens, tokens.old_logprobs), _inside_mask(tokens, tokens.rollout_logprobs))


def _sequence_log_ratio(tokens: SampledTokens) -> jax.Array:
    """sum_t d_t of each token's completion, clamped at the end."""
    difference = log_difference(tokens.old_logprobs, tokens.rollout_logprobs)
    return clamp(_gathered(tokens, completion_sums, difference), MAX_LOG_RATIO)


def _inside_mask(tokens: SampledTokens, values: Array) -> jax.Array:
    return jnp.where(jnp.asarray(tokens.completion_mask, bool), jnp.asarray(values, jnp.float32), 0.0)


def _gathered(tokens: SampledTokens, reduce: Callable[..., jax.Array], values: jax.Array) -> jax.Array:
    """A reduction over each completion's sampled tokens, given to its tokens; 0 outside the mask."""
    where = tokens.completion_mask, tokens.completion_index, tokens.num_completions
    return _inside_mask(tokens, gather_to_tokens(reduce(values, *where), tokens.completion_index))


def _gathered_mean(tokens: SampledTokens, values: jax.Array) -> jax.Array:
    counts = completion_counts(tokens.completion_mask, tokens.completion_index, tokens.num_completions)
    lengths = gather_to_tokens(jnp.maximum(counts, 1), tokens.completion_index)
    return _inside_mask(tokens, _gathered(tokens, completion_sums, values) / lengths)


def _inside(values: jax.Array, low: float, high: float) -> jax.Array:
    """Whether low <= value <= high; true for NaN, which must not be dropped unseen."""
    return ~((values < low) | (values > high))


def _truncated(tokens: SampledTokens, ratio: jax.Array, low: float, high: float) -> Corrected:
    return _corrected(tokens, jnp.clip(ratio, low, high), jnp.ones_like(ratio, bool), (ratio < low) | (ratio > high))


def _kept(tokens: SampledTokens, value: jax.Array, keep: jax.Array, weights: Any = 1.0) -> Corrected:
    """Weights where `keep` is true; NaN where the value that decided is NaN."""
    return _corrected(tokens, jnp.where(jnp.isnan(value), value, weights), keep, jnp.zeros_like(keep))


def _corrected(tokens: SampledTokens, weights: jax.Array, keep: jax.Array, truncated: jax.Array) -> Corrected:
    mask = jnp.asarray(tokens.completion_mask, bool)
    require_same_shape(rollout_logprobs=tokens.rollout_logprobs, weights=weights, completion_mask=mask)
    weights = jax.lax.stop_gradient(jnp.where(mask & keep, weights, 0.0))
    return Corrected(weights, keep | ~mask, truncated & mask)
