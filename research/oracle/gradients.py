"""The gradient that each remedy gives on one batch, at the weights that made it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.algorithm.advantages import group_advantages
from dcmdp_jax.algorithm.distribution import Head
from dcmdp_jax.algorithm.losses import aggregation_weights
from dcmdp_jax.algorithm.masked import gather_to_tokens
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.config.algorithm import AlgorithmSettings, Remedies
from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS
from dcmdp_jax.evaluation.estimators import t_half_width
from dcmdp_jax.training.objective import (
    LossInputs,
    loss_weights,
    penalized_rewards,
    signals_of,
    sum_of_terms,
    terms_of,
)
from dcmdp_jax.types import Array, DualState, Params, Rows


class Moments(NamedTuple):
    """Second moments of gradients g under a remedy and c under the control, G = E c.

    Attributes:
        own: |E g|^2.
        cross: <E g, G>.
        control: |G|^2.
        variance: E |g - E g|^2.
    """

    own: float
    cross: float
    control: float
    variance: float


class Quality(NamedTuple):
    """How a remedy's gradient compares with the control's. NaN where noise hides |G|, or for the
    last two |E g|.

    Attributes:
        error: the least over scalings s of E |s g - G|^2 / |G|^2, of one batch.
        squared_bias: |E g - G|^2 / |G|^2; noise can make it negative.
        variance: E |g - E g|^2 / |G|^2, of one batch.
        length: |E g| / |G|.
        angle: between the mean gradients, degrees; 0 where noise makes the cosine larger than 1.
    """

    error: float
    squared_bias: float
    variance: float
    length: float
    angle: float


ZERO = Quality(error=1.0, squared_bias=1.0, variance=0.0, length=0.0, angle=math.nan)
"""Figures of a gradient of zero, which a remedy has to beat."""


def moments(remedy: np.ndarray, control: np.ndarray, *, whole: bool = False) -> Moments:
    """Estimate the moments from batches that are independent of each other.

    Args:
        remedy: [B, K], the gradient of each batch.
        control: [C, K].
        whole: the batches are all that there are, equally likely; else a sample of at least two.

    Raises:
        ValueError: for fewer than two batches of a sample.
    """
    if not whole and min(len(remedy), len(control)) < 2:
        raise ValueError(
            f"got {min(len(remedy), len(control))} batches, needs at least 2 to tell noise from "
            "bias"
        )
    return _moments(*_grams(remedy, control), whole=whole)


def _grams(remedy: np.ndarray, control: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Products of each batch with each: the remedy's, the remedy's with the control's, the
    control's.
    """
    mine = remedy.astype(np.float64)
    other = control.astype(np.float64)
    return mine @ mine.T, mine @ other.T, other @ other.T


def _moments(
    own: np.ndarray, cross: np.ndarray, control: np.ndarray, *, whole: bool = False
) -> Moments:
    mean = np.mean if whole else _off_diagonal_mean
    squared = float(mean(own))
    return Moments(
        squared,
        float(np.mean(cross)),
        float(mean(control)),
        float(np.trace(own)) / len(own) - squared,
    )


def quality(found: Moments) -> Quality:
    """The figures of a remedy."""
    own, cross, control, variance = found
    if control <= 0:
        return Quality(*(math.nan,) * 5)
    second = (
        own + variance
    )  # E |g|^2, of each batch with itself: above 0 but for a gradient of zero
    error = 1 - max(cross, 0.0) ** 2 / (control * second) if second > 0 else 1.0
    squared_bias = (own - 2 * cross + control) / control
    if own <= 0:
        return Quality(error, squared_bias, variance / control, math.nan, math.nan)
    # The sine from lengths: the cosine has no digits left near 1.
    across = max(own - cross**2 / control, 0.0)
    angle = math.degrees(math.atan2(math.sqrt(across), cross / math.sqrt(control)))
    return Quality(error, squared_bias, variance / control, math.sqrt(own / control), angle)


def leave_one_out(remedy: np.ndarray, control: np.ndarray) -> np.ndarray:
    """The figures without batch i of both, [B, 5] of B >= 3 batches of each."""
    grams = _grams(remedy, control)
    return np.array(
        [
            quality(_moments(*(np.delete(np.delete(gram, i, axis=0), i, axis=1) for gram in grams)))
            for i in range(len(remedy))
        ]
    )


def half_width(left: np.ndarray) -> float:
    """Half of the 95% t interval of a figure by the jackknife, from its values [B] with each batch
    left out.

    The standard error is sqrt((B - 1) / B sum (x_i - mean x)^2), that of a mean of x times B - 1.
    """
    return (len(left) - 1) * t_half_width(left)


def _off_diagonal_mean(gram: np.ndarray) -> float:
    count = len(gram)
    return float((gram.sum() - np.trace(gram)) / (count * (count - 1)))


SKETCH = 1 << 16
"""Numbers that are kept of a gradient. Of a longer one each is a sum of its entries with random
signs: lengths and products come out right on average, and to 1 / sqrt(SKETCH) = 0.4%; equal
gradients stay equal.
"""


class JudgedBatch(NamedTuple):
    """A batch of N completions, one a row [N, L], with what a remedy looks at.

    Attributes:
        rows: tokens; `rollout_logprobs` are the engine's, `completion_index` the row.
        rewards: [N] float32.
        group_ids: [N] int32 in 0 .. N-1, the prompt of each.
    """

    rows: Rows
    rewards: Array
    group_ids: Array


def token_slopes(
    settings: AlgorithmSettings,
    remedies: Remedies,
    sampled: JudgedBatch,
    train_logprobs: Array,
    limit: int,
) -> jax.Array:
    """The derivative of the batch's loss in each token's log-prob, as the first update of a
    training step has it.

    The same functions as the step's: p^Train is the policy now, the loss is divided by the weight
    of what is kept.

    Args:
        settings, remedies: the algorithm.
        sampled: the batch.
        train_logprobs: [N, L] nats, or [N, L, 1 + k] with those of the column `top_ids` behind.
        limit: T_max, for the fixed-length normalizer.

    Returns:
        float32 of its shape, 0 outside the mask.
    """
    rows = sampled.rows
    count = len(sampled.rewards)
    head = None
    every = jnp.asarray(train_logprobs)
    if every.ndim == 3:
        train_logprobs = every[..., 0]
        top = every[..., 1:]
        head = Head(rows.columns[TOP_IDS], rows.columns[TOP_LOGPROBS], top, top, top)
    everyone = jnp.ones(count, bool)
    lengths = jnp.sum(rows.completion_mask, axis=1, dtype=jnp.int32)
    rewards = jnp.asarray(sampled.rewards)
    dual = DualState(jnp.float32(settings.multiplier), jnp.float32(settings.tolerance))
    if settings.level == "reward":
        known = rows.with_columns(old_logprobs=jnp.asarray(train_logprobs))
        one_batch = jax.tree.map(lambda array: jnp.asarray(array)[None], known)
        rewards = penalized_rewards(settings, remedies, dual, rewards[None], (one_batch,))[0]
    advantages = group_advantages(
        rewards,
        sampled.group_ids,
        everyone,
        epsilon=settings.std_epsilon,
        normalize_std=settings.normalize_std,
    )
    normalize = functools.partial(
        aggregation_weights,
        lengths,
        everyone,
        mode=settings.aggregation,
        max_completion_tokens=limit,
    )
    tokens = Tokens(
        train_logprobs=train_logprobs,
        old_logprobs=train_logprobs,
        rollout_logprobs=rows.rollout_logprobs,
        advantages=gather_to_tokens(advantages, rows.completion_index),
        completion_mask=rows.completion_mask,
        completion_index=rows.completion_index,
        num_completions=count,
        **dual._asdict(),
    )

    def loss(every: jax.Array) -> jax.Array:
        signals = signals_of(settings, remedies, tokens, normalize()[0])
        now = head and head._replace(train_logprobs=every[..., 1:])
        moving = signals.tokens._replace(train_logprobs=every[..., 0] if now else every)
        weights = loss_weights(settings, signals)
        inputs = LossInputs(
            settings=settings,
            remedies=remedies,
            tokens=moving,
            weights=weights,
            signals=signals,
            head=now,
            rows=rows,
        )
        summed, _, _ = sum_of_terms(terms_of(settings), inputs, None)
        _, total = normalize(dropped_tokens=signals.dropped_tokens)
        return summed / jnp.where(total > 0, total, 1.0)

    return jax.grad(loss)(every)


class Gradients:
    """Gradients of batches at fixed weights.

    Args:
        logprobs: (params, rows) -> log-probs [R, L] of the training stack, or [R, L, 1 + k] with
            those of `top_ids`.
        params: the weights.
        rows: number computed at a time.
    """

    def __init__(
        self, logprobs: Callable[[Params, Rows], jax.Array], params: Params, *, rows: int = 32
    ) -> None:
        self._params = params
        self._rows = rows
        self._logprobs = jax.jit(logprobs)

        def pull_back(params: Params, rows: Rows, slopes: jax.Array) -> jax.Array:
            pull = jax.vjp(lambda p: logprobs(p, rows), params)[1]
            return jax.lax.map(lambda one: sketch(pull(one)[0]), slopes)

        self._pull_back = jax.jit(pull_back)

    def score(self, rows: Rows) -> np.ndarray:
        """p^Train, [N, L] or [N, L, 1 + k] nats, 0 outside completions."""
        parts = [np.asarray(self._logprobs(self._params, part)) for part, _ in self._parts(rows)]
        return np.concatenate(parts)[: len(rows.input_ids)]

    def of(self, rows: Rows, slopes: Mapping[str, Array]) -> dict[str, np.ndarray]:
        """The gradient of each loss, named by its derivatives in these log-probs; [K] float32."""
        stacked = np.stack([np.asarray(one, np.float32) for one in slopes.values()])
        total = 0.0
        for part, span in self._parts(rows):
            padded = np.zeros((len(stacked), *part.input_ids.shape, *stacked.shape[3:]), np.float32)
            own = stacked[:, span]
            padded[:, : own.shape[1]] = own
            total = total + np.asarray(self._pull_back(self._params, part, padded), np.float64)
        return dict(zip(slopes, total.astype(np.float32), strict=True))

    def _parts(self, rows: Rows) -> Any:
        """Rows a few at a time, the last padded with empty ones, and which they are."""
        for start in range(0, len(rows.input_ids), self._rows):
            span = slice(start, start + self._rows)
            part = jax.tree.map(lambda x, span=span: np.asarray(x)[span], rows)
            missing = self._rows - len(part.input_ids)
            yield (
                jax.tree.map(
                    lambda x, n=missing: np.pad(x, ((0, n), *((0, 0),) * (x.ndim - 1))), part
                ),
                span,
            )


def sketch(gradient: Params) -> jax.Array:
    """A gradient as a vector: the whole one if it is short, else `SKETCH` signed sums of its
    entries.
    """
    leaves = [leaf.astype(jnp.float32).ravel() for leaf in jax.tree.leaves(gradient)]
    if sum(leaf.size for leaf in leaves) <= SKETCH:
        return jnp.concatenate(leaves)
    total = jnp.zeros(SKETCH)
    for number, leaf in enumerate(leaves):
        signs = jax.random.rademacher(
            jax.random.fold_in(jax.random.key(0), number), (leaf.size,), jnp.float32
        )
        padded = jnp.pad(leaf * signs, (0, -leaf.size % SKETCH))
        # A short leaf does not always add to the same sums.
        total += jnp.roll(jnp.sum(padded.reshape(-1, SKETCH), axis=0), number * 7919)
    return total
