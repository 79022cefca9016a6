"""Corrections of the loss for engine mismatch: token weights, and tokens to leave out.

A correction is a remedy (`remedies`): from the tokens to `Corrected(weights, keep, truncated)`.
`weights` multiply the token losses. Tokens with `keep` false are left out: they have no loss, and
the loss is divided by the weight of the kept tokens, unless dropped tokens are to be counted
(`signals.row_signals`). All outputs are constants to the gradient. Corrections are joined by
`chain`: weights multiply, keep-masks intersect. Each of them sees all tokens, whatever the others
drop, so their order has no effect.

One direction everywhere: with p = exp(old), the training stack under the weights that made the
batch, and q = exp(rollout), the inference engine,

    d_t = log p_t - log q_t,    r_t = p_t / q_t = exp(d_t).

Sums over a completion add unclamped differences (each log-prob is clamped at 1e4 nats, so that -inf
is finite); what is exponentiated or squared is clamped at 20 nats first
(`stats.clamp`). A value equal to a bound is kept. A NaN under the mask stays NaN: no
comparison drops it, and the weight becomes NaN. Values outside the mask are ignored.

To add one, write it in a file of yours, or here and name it in `TRUNCATIONS` or `MASKS` (it weighs
by p / q) or `FILTERS`. Its keyword arguments are its parameters in the setting
`algorithm.corrections`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dcmdp_jax.algorithm.masked import (
    completion_maxima,
    completion_means,
    completion_sums,
    gather_to_tokens,
    masked_sum,
    masked_values,
)
from dcmdp_jax.algorithm.remedies import Corrected, Statistics, Tokens, require_tokens, split
from dcmdp_jax.algorithm.require import (
    require_number,
    require_option,
    require_same_shape,
    require_sizes,
)
from dcmdp_jax.algorithm.stats import (
    MAX_LOG_RATIO,
    KlEstimator,
    Mean,
    binary_kl,
    clamp,
    kl_estimate,
    log_difference,
)
from dcmdp_jax.types import Array

Correction = Callable[[Tokens], Corrected | tuple[Corrected, Statistics]]
KlOver = Literal["token", "mean", "sum", "max"]
_Values = Float[Array, "R L"]
_Flags = Bool[Array, "R L"]


# Importance weights: the loss becomes one under the training stack's distribution.


def tis(tokens: Tokens, *, low: float = 0.0, high: float = 2.0) -> Corrected:
    """Truncated importance sampling of tokens (Yao et al. 2025): w_t = clip(r_t, low, high).

    Nothing is dropped. Ratio: training over rollout. Denominator: all tokens. verl
    (`rollout_is=token`, 2), slime (`use_tis`, [0, 2]), NeMo-RL (`tis`), Tunix (`sampler_is=token`,
    2) and TRL (`token_truncate`, 3) weigh alike; NeMo-RL weighs a token with a non-finite ratio by
    0, here -inf is clamped and NaN stays.
    """
    return _truncated(tokens, jnp.exp(_token_log_ratio(tokens)), low, high)


def cis(
    tokens: Tokens,
    *,
    slope: float = 2.3,
    floor: float = 5e-3,
) -> Corrected:
    """Confidence-aware truncation (CIS, arXiv:2609.32444).

        w_t = min(r_t, 1 + slope max(1 - p_t, floor))

    With eps = logit p - logit q, r = p + (1 - p) e^eps: where the engine's error is a displacement
    in log-odds of one scale, r of a sure token is near 1, and a bound for all tokens lets its
    outliers pass. Nothing is dropped. Ratio: training over rollout. The paper's constants;
    kzhao5/CIS-RL on AReaL.
    """
    require_sizes(slope=slope, floor=floor)
    ratio = jnp.exp(_token_log_ratio(tokens))
    cap = 1.0 + slope * jnp.maximum(-jnp.expm1(_inside_mask(tokens, tokens.old_logprobs)), floor)
    return _corrected(tokens, jnp.minimum(ratio, cap), truncated=ratio > cap)


def sequence_tis(
    tokens: Tokens,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> Corrected:
    """Truncated importance sampling of completions: w = clip(prod_t r_t, low, high) on each token.

    Nothing is dropped. Unbiased but for the bounds, of large variance: the product's logarithm
    grows with the length. Ratio: training over rollout. Denominator: all tokens. verl
    (`rollout_is=sequence`, 2) and TRL (`sequence_truncate`, 3) weigh alike. AReaL's sequence level
    takes the geometric mean, not the product.
    """
    return _truncated(tokens, _completion_ratio(tokens, completion_sums), low, high)


def icepop(tokens: Tokens, *, low: float = 0.5, high: float = 5.0) -> Corrected:
    """Masked importance sampling of tokens, IcePop (Ring-1T, 2025): w_t = r_t inside [low, high].

    Other tokens are dropped. Ratio: training over rollout. Denominator: kept tokens, as in AReaL
    (`action=mask`). In slime (`icepop_function`, and the masks of mis.py), miles, NeMo-RL
    (`icepop`, 0.5 to 5) and TRL (`token_mask`, up to 3) dropped tokens have weight 0 and count:
    `correction_denominator=all` does that.
    """
    ratio = jnp.exp(_token_log_ratio(tokens))
    return _kept(tokens, ratio, _inside(ratio, low, high), weights=ratio)


def kpop(tokens: Tokens, *, high: float = 2.0) -> Corrected:
    """KPop (Ling team, 2026): w_t = r_t where both binary KLs are at most `high`, else dropped.

        max(KL(p || q), KL(q || p)) with KL of (p, 1 - p) and (q, 1 - q), nats

    Unlike a band of r it sees a sure token whose rest 1 - p differs, and lets a rare one pass.
    Ratio: training over rollout. Denominator: kept tokens. AReaL (PR #1405, `kpop`) and verl (PR
    #6800, `rollout_rs=binary_kl`).
    """
    require_number("high", high, minimum=0, open_minimum=True)
    old = _inside_mask(tokens, tokens.old_logprobs)
    rollout = _inside_mask(tokens, tokens.rollout_logprobs)
    divergence = jnp.maximum(binary_kl(old, rollout), binary_kl(rollout, old))
    ratio = jnp.exp(_token_log_ratio(tokens))
    return _kept(tokens, divergence, ~(divergence > high), weights=ratio)


def sequence_mis(
    tokens: Tokens,
    *,
    low: float = 0.0,
    high: float = 3.0,
) -> Corrected:
    """Masked importance sampling of completions: w = prod_t r_t on each token if in [low, high].

    Other completions are dropped. Ratio: training over rollout. Denominator: kept tokens. TRL's
    default (`sequence_mask`, up to 3), where dropped completions count. verl has it as
    `rollout_is=sequence` with `rollout_rs=seq_sum_k1`, the weight truncated too.
    """
    ratio = _completion_ratio(tokens, completion_sums)
    return _kept(tokens, ratio, _inside(ratio, low, high), weights=ratio)


# Weights by what came before the token: products, minima and means along a completion.


def minpro(tokens: Tokens, *, low: float = 0.0, high: float = 2.0) -> Corrected:
    """Minimum prefix ratio (MinPRO, arXiv:2601.22718): w_t = clip(r_t min_{j<t} r_j, low, high).

    w_1 = clip(r_1). The least ratio before the token stands for their product, which reweighs the
    state that it was sampled in. Nothing is dropped. The paper's r is pi now over the policy that
    sampled, ours training over rollout; bounds are ours.
    """
    log_ratio = _token_log_ratio(tokens)
    _, prefix = _scanned(tokens, log_ratio, jnp.minimum, jnp.inf)
    return _truncated(tokens, jnp.exp(clamp(log_ratio + prefix, MAX_LOG_RATIO)), low, high)


def ctpo(
    tokens: Tokens,
    *,
    low: float = 0.025,
    high: float = 0.05,
    power: float = 0.5,
) -> Corrected:
    """Cumulative token ratio (CTPO, arXiv:2605.07331).

        w_t = clip(prod_{j<=t} r_j, e^(-low t^power), e^(high t^power))

    The exact weight of a token's term of the policy gradient, of less variance than `sequence_tis`;
    its logarithm spreads as sqrt(t), and the bounds with it. Nothing is dropped. horizon-llm/CTPO
    (acc4021 of 2026-06-24, `la_clip_low`, `la_clip_high`, `clip_ratio_la_power`) clips an objective
    with it, where r is drift.
    """
    require_sizes(low=low, high=high)
    total, count = _prefix_sums(tokens)
    scale = count**power
    log_ratio = jnp.clip(clamp(total, MAX_LOG_RATIO), -low * scale, high * scale)
    return _corrected(tokens, jnp.exp(log_ratio), truncated=total != log_ratio)


def pnpo(tokens: Tokens, *, low: float = 0.0, high: float = 2.0) -> Corrected:
    """Geometric mean of the prefix (PNPO, arXiv:2608.01418).

        w_t = clip((prod_{j<=t} r_j)^(1 / t), low, high)

    Nothing is dropped. Ratio: training over rollout; bounds are ours. horizon-llm/CTPO has it as
    `ratio_mode=geomean`.
    """
    total, count = _prefix_sums(tokens)
    return _truncated(tokens, jnp.exp(clamp(total / count, MAX_LOG_RATIO)), low, high)


# Filters: tokens are kept with weight 1 or left out.


def sequence_rejection(
    tokens: Tokens,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> Corrected:
    """Keep completions whose prod_t r_t is inside [low, high].

    Ratio: training over rollout. Denominator: kept tokens. verl's `seq_sum_k1` with `0.5_2.0`
    bounds -sum d, hence 1 / prod r: its bounds are ours inverted, the same for a symmetric band.
    slime: `rs_level=sequence`.
    """
    ratio = _completion_ratio(tokens, completion_sums)
    return _kept(tokens, ratio, _inside(ratio, low, high))


def geometric_rejection(
    tokens: Tokens,
    *,
    low: float = 0.999,
    high: float = 1.001,
) -> Corrected:
    """Keep completions whose geometric mean (prod_t r_t)^(1 / |o|) is inside [low, high].

    The length has no effect. Ratio: training over rollout. Denominator: kept tokens. verl's
    `seq_mean_k1` (0.999 to 1.001) bounds the inverse; slime: `rs_level=geometric`; NeMo-RL's
    `seq-mask-tis` (0.999 to 1.002) weighs kept tokens by r_t too, without bound: add
    `tis(high=...)`.
    """
    ratio = _completion_ratio(tokens, completion_means)
    return _kept(tokens, ratio, _inside(ratio, low, high))


def sequence_error(tokens: Tokens, *, high: float = 1.5) -> Corrected:
    """Keep completions whose mean_t e^|d_t| is at most `high`.

    Differences of either sign add, unlike in the mean of k1. Denominator: kept tokens. NeMo-RL
    (`seq_logprob_error_threshold`; off by default, 1.5 in its recipes) and Tunix (PR #2270) do the
    same.
    """
    require_number("high", high, minimum=1)
    mean = _gathered(tokens, completion_means, jnp.exp(jnp.abs(_token_log_ratio(tokens))))
    return _kept(tokens, mean, ~(mean > high))


def probability_band(
    tokens: Tokens,
    *,
    low: float = 0.2,
    high: float = 0.2,
) -> Corrected:
    """Keep tokens with -low <= p_t - q_t <= high: the paper's delta as a filter.

    Denominator: kept tokens. ROLL (`train_infer_correction`, a filter with `diff_low` and
    `diff_high`, level token).
    """
    require_sizes(low=low, high=high)
    old = _inside_mask(tokens, tokens.old_logprobs)
    rollout = _inside_mask(tokens, tokens.rollout_logprobs)
    shift = jnp.exp(jnp.minimum(old, 0.0)) - jnp.exp(jnp.minimum(rollout, 0.0))
    return _kept(tokens, shift, ~((shift < -low) | (shift > high)))


def vaco(tokens: Tokens, *, high: float = 0.05) -> Corrected:
    """VACO (arXiv:2603.01365): drop tokens with A d_t > 0 where mean_t |r_t - 1| is above `high`.

    The mean is over the token's completion. |r - 1| of sampled tokens estimates twice the total
    variation; what is dropped would add to it. Denominator: kept tokens. open-instruct
    (`rho_mask_tv_divergence`, `rho_mask_upper_bound`) weighs kept tokens by r too: add `tis`.
    `high` is ours.
    """
    require_number("high", high, minimum=0, open_minimum=True)
    log_ratio = _token_log_ratio(tokens)
    mean = _gathered(tokens, completion_means, jnp.abs(jnp.expm1(log_ratio)))
    adds_to_it = jnp.asarray(tokens.advantages) * log_ratio > 0
    return _kept(tokens, mean, ~(adds_to_it & (mean > high)))


def m2po(tokens: Tokens, *, high: float = 0.04) -> Corrected:
    """M2PO (arXiv:2510.01161): drop the largest d^2 until the mean of the others is at most `high`.

    One token is kept in any case. The mean is over the tokens of one call, a micro-batch on one
    device, as in AReaL (`m2_threshold`), so that what is dropped depends on how rows are split.
    Denominator: kept tokens.
    """
    require_number("high", high, minimum=0)
    squares = _token_log_ratio(tokens) ** 2
    mask = jnp.asarray(tokens.completion_mask, bool)
    # NaN counts as 0, so that it is kept; what is outside the mask is sorted to the end.
    sortable = jnp.where(mask, jnp.where(jnp.isnan(squares), 0.0, squares), jnp.inf).ravel()
    order = jnp.argsort(sortable)
    rank = jnp.argsort(order).reshape(squares.shape)

    # means[n - 1] is the mean of the n smallest.
    means = jnp.cumsum(sortable[order]) / jnp.arange(1, sortable.size + 1)
    num_kept = jnp.maximum(jnp.sum(means <= high), 1)
    return _kept(tokens, squares, ~mask | (rank < num_kept))


def veto(tokens: Tokens, *, floor: float = 1e-4) -> Corrected:
    """Drop a whole completion if one of its tokens has r_t below `floor`.

    Ratio: training over rollout. Denominator: kept tokens; in slime (`rs_veto_threshold`) dropped
    ones count. 1e-4 there and in former verl (`rollout_token_veto_threshold`).
    """
    require_number("floor", floor, minimum=0, open_minimum=True)
    lowest = -_gathered(tokens, completion_maxima, -_token_log_ratio(tokens))
    return _kept(tokens, lowest, ~(lowest < math.log(floor)))


def off_policy_mask(tokens: Tokens, *, high: float = 0.5) -> Corrected:
    """Drop completions with A < 0 and mean_t (log q_t - log pi_t) above `high` nats.

    DeepSeek-V3.2, Eq. 9. pi is the policy now, so that policy drift counts and engine mismatch too.
    Denominator: kept tokens; in TRL (`off_policy_mask_threshold`, 0.5) and slime (`use_opsm`, 1e-4)
    dropped tokens count. slime compares with p^Train in place of the engine's q: policy drift
    alone.
    """
    require_number("high", high, minimum=0, open_minimum=True)
    difference = log_difference(tokens.rollout_logprobs, tokens.train_logprobs)
    mean = _gathered(tokens, completion_means, difference)
    return _kept(tokens, mean, ~((jnp.asarray(tokens.advantages) < 0) & (mean > high)))


def kl_rejection(
    tokens: Tokens,
    *,
    high: float,
    estimator: KlEstimator = "k3",
    over: KlOver = "mean",
) -> Corrected:
    """Keep tokens whose estimate of KL(q || p) is at most `high` nats, in absolute value.

        k1 = -d        k2 = d^2 / 2        k3 = e^d - 1 - d

    over="token" compares each token. "mean", "sum" and "max" compare that of the estimates (the
    largest |estimate|) over its completion, which is kept or dropped as a whole. In k2 and k3 d is
    clamped at 20 nats; k1 is not, so that its sum with high = log 2 drops what
    sequence_rejection(low=0.5, high=2) does. Ratio: training over rollout. Denominator: kept
    tokens. verl (`token_k1`, `seq_mean_k3`, ...) has the same, with bounds on e^k1, so that its
    band need not be symmetric. AReaL's (`metric=kl_k3`, `agg`) are of -d: its k1 is d, and its k3 =
    e^-d - 1 + d is of the inverse ratio.
    """
    require_number("high", high, minimum=0, open_minimum=True)
    require_option("over", over, get_args(KlOver))
    difference = _token_difference(tokens)
    if estimator != "k1":
        difference = clamp(difference, MAX_LOG_RATIO)
    values = kl_estimate(difference, estimator)
    if over == "max":
        values = jnp.abs(values)
    if over != "token":
        reduce = {"mean": completion_means, "sum": completion_sums, "max": completion_maxima}[over]
        values = _gathered(tokens, reduce, values)
    return _kept(tokens, values, ~(jnp.abs(values) > high))


def _by_name(*corrections: Callable[..., Corrected]) -> dict[str, Callable[..., Corrected]]:
    return {correction.__name__: correction for correction in corrections}


TRUNCATIONS = _by_name(tis, sequence_tis, cis, minpro, ctpo, pnpo)
"""Name -> correction that weighs by p / q within bounds and keeps every token."""

MASKS = _by_name(icepop, sequence_mis, kpop)
"""Name -> correction that weighs by p / q and drops what is out of bounds."""

FILTERS = _by_name(
    sequence_rejection,
    geometric_rejection,
    veto,
    off_policy_mask,
    sequence_error,
    probability_band,
    vaco,
    m2po,
    kl_rejection,
)
"""Name -> correction that keeps or drops."""

CORRECTIONS = TRUNCATIONS | MASKS | FILTERS
"""Name -> correction."""


def of_single_tokens(name: str, parameters: Mapping[str, Any]) -> bool:
    """Whether a correction with these parameters looks at each token alone."""
    if parameters.get("over") == "token":
        return True
    return name in ("tis", "cis", "icepop", "kpop", "probability_band")


OF_PREFIXES = frozenset({"minpro", "ctpo", "pnpo", "vaco", "m2po"})
"""Corrections that look at a token and at others. All others give the tokens of a completion one
weight, or look at single tokens.
"""


def chain(
    tokens: Tokens,
    corrections: Sequence[Correction],
) -> tuple[Corrected, Statistics]:
    """Join corrections, at least one: weights multiply, keep-masks intersect."""
    results = []
    all_statistics = {}
    for correction in corrections:
        corrected, correction_statistics = split(correction(tokens))
        results.append(corrected)
        all_statistics |= correction_statistics
    joined = functools.reduce(
        lambda a, b: Corrected(a.weights * b.weights, a.keep & b.keep, a.truncated | b.truncated),
        results,
    )
    return joined, all_statistics | statistics(joined, tokens.completion_mask)


def statistics(
    corrected: Corrected,
    completion_mask: Bool[Array, "R L"],
) -> dict[str, Mean]:
    """Statistics of corrected tokens under the mask, left unreduced.

    Returns:
        Means over all tokens, the dropped ones with weight 0: `dropped_fraction`,
        `truncated_fraction`, `weight_mean` and `weight_square_mean`, after `correction/`. The
        effective share of the tokens is weight_mean^2 / weight_square_mean.
    """
    require_same_shape(
        weights=corrected.weights,
        keep=corrected.keep,
        completion_mask=completion_mask,
    )
    kept_weights = masked_values(corrected.weights, corrected.keep)
    truncated = jnp.asarray(corrected.truncated) & corrected.keep
    return {
        "correction/dropped_fraction": masked_sum(~corrected.keep, completion_mask),
        "correction/truncated_fraction": masked_sum(truncated, completion_mask),
        "correction/weight_mean": masked_sum(kept_weights, completion_mask),
        "correction/weight_square_mean": masked_sum(kept_weights**2, completion_mask),
    }


def _token_difference(tokens: Tokens) -> _Values:
    """d_t, each log-prob clamped at 1e4 nats, their difference not."""
    return _inside_mask(tokens, log_difference(tokens.old_logprobs, tokens.rollout_logprobs))


def _token_log_ratio(tokens: Tokens) -> _Values:
    """d_t, clamped."""
    return clamp(_token_difference(tokens), MAX_LOG_RATIO)


def _completion_ratio(tokens: Tokens, reduce: Callable[..., Any]) -> _Values:
    """e^x of each token's completion, x a reduction of its d_t, which is clamped at the end."""
    log_ratio = _gathered(tokens, reduce, _token_difference(tokens))
    return jnp.exp(clamp(log_ratio, MAX_LOG_RATIO))


def _inside_mask(tokens: Tokens, values: _Values) -> _Values:
    require_tokens(tokens)
    return masked_values(values, tokens.completion_mask)


def _gathered(
    tokens: Tokens,
    reduce: Callable[..., Any],
    values: _Values,
) -> _Values:
    """A reduction over each completion's sampled tokens, given to them; 0 outside the mask."""
    reduced = reduce(values, tokens.where)
    return _inside_mask(tokens, gather_to_tokens(reduced, tokens.completion_index))


def _prefix_sums(tokens: Tokens) -> tuple[_Values, _Values]:
    """sum_{j<=t} d_j, and t, at least 1."""
    difference = _token_difference(tokens)
    total, _ = _scanned(tokens, difference)
    count, _ = _scanned(tokens, jnp.ones_like(difference))
    return total, jnp.maximum(count, 1.0)


def _scanned(
    tokens: Tokens,
    values: _Values,
    combine: Any = jnp.add,
    empty: float = 0.0,
) -> tuple[_Values, _Values]:
    """Scan of each completion's sampled tokens in their order, a completion being within one row.

    Args:
        tokens: where they lie; what is not sampled between them is skipped.
        values: of each token.
        combine: an associative function of two arrays.
        empty: its neutral element.

    Returns:
        Values combined up to each token, itself included, and before it, which is 0 for the first.
    """
    mask = jnp.asarray(tokens.completion_mask, bool)

    last_axis = values.ndim - 1
    # A completion begins where the completion of the latest sampled token changes.
    latest = jax.lax.cummax(jnp.where(mask, jnp.arange(values.shape[-1]), 0), axis=last_axis)
    completion_index = jnp.asarray(tokens.completion_index)
    index = jnp.take_along_axis(completion_index, latest, axis=-1)
    num_before = jnp.roll(jnp.cumsum(mask, axis=-1), 1, axis=-1).at[..., 0].set(0)
    begins = mask & ((num_before == 0) | (index != jnp.roll(index, 1, axis=-1)))

    def join(a: Any, b: Any) -> Any:
        """Join pairs of (whether a completion begins, value): what begins in b forgets a."""
        return a[0] | b[0], jnp.where(b[0], b[1], combine(a[1], b[1]))

    _, scanned = jax.lax.associative_scan(
        join, (begins, jnp.where(mask, values, empty)), axis=last_axis
    )
    return scanned, jnp.where(begins, 0.0, jnp.roll(scanned, 1, axis=-1))


def _inside(values: _Values, low: float, high: float) -> _Flags:
    """Whether low <= value <= high; true for NaN, which must not be dropped unseen."""
    require_number("low", low, minimum=0)
    require_number("high", high, minimum=0, open_minimum=True)
    if low >= high:
        raise ValueError(f"the band from low={low:g} to high={high:g} is empty")
    return ~((values < low) | (values > high))


def _truncated(
    tokens: Tokens,
    ratio: _Values,
    low: float,
    high: float,
) -> Corrected:
    outside = ~_inside(ratio, low, high)
    return _corrected(tokens, jnp.clip(ratio, low, high), truncated=outside)


def _kept(
    tokens: Tokens,
    value: _Values,
    keep: _Flags,
    weights: Any = 1.0,
) -> Corrected:
    """Weights where `keep` is true; NaN where the value that decided is NaN."""
    return _corrected(tokens, jnp.where(jnp.isnan(value), value, weights), keep=keep)


def _corrected(
    tokens: Tokens,
    weights: _Values,
    *,
    keep: _Flags | bool = True,
    truncated: _Flags | bool = False,
) -> Corrected:
    mask = jnp.asarray(tokens.completion_mask, bool)
    weights = jax.lax.stop_gradient(jnp.where(mask & keep, weights, 0.0))
    return Corrected(weights, keep | ~mask, truncated & mask)
