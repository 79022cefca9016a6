"""The compiled training step: (TrainState, Batch) -> (TrainState, metrics), Algorithm 1 of the paper."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from dcmdp_jax.algorithm import losses, masked, stats
from dcmdp_jax.algorithm.advantages import group_advantages, has_signal, overlong_penalty
from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.algorithm.signals import Signals, charge_share
from dcmdp_jax.algorithm.stats import Mean, Statistic, Sum
from dcmdp_jax.config.algorithm import AlgorithmSettings, Remedies
from dcmdp_jax.models.moe import Aux, router_metrics
from dcmdp_jax.models.products import PRECISE, products_in
from dcmdp_jax.parallel.backend import compiler_options
from dcmdp_jax.parallel.sharding import replicated
from dcmdp_jax.training.accumulate import accumulate, map_rows
from dcmdp_jax.training.batch_metrics import Metrics, batch_metrics, gap_metrics
from dcmdp_jax.training.loss_terms import (
    Terms,
    charged_rewards,
    has_terms,
    loss_of,
    make_terms,
    scaled_terms,
    signals_of,
    term_metrics,
)
from dcmdp_jax.training.row_logprobs import RowLogprobs, RowOutputs, without_replay
from dcmdp_jax.training.state import next_loss_scale, tolerance_of, update_dual
from dcmdp_jax.types import Batch, LossScale, Params, Rows, TrainState


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Parts of a step; see `make_train_step`."""

    row_logprobs: RowLogprobs
    settings: AlgorithmSettings
    max_completion_tokens: int
    optimizer: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule
    mesh: Mesh | None
    remedies: Remedies
    always_recompute: bool
    record_tokens: bool


class _Constants(NamedTuple):
    """Constants of an update that every micro-batch gets; no gradient reaches them.

    Attributes:
        advantages, weights: [N] float32, of each completion.
        uncharged: [N] float32, advantages without a charge inside the reward.
        multiplier: [] float32, lambda_k.
        tolerance: [] float32, c.
        first: [] bool, the update starts from the weights at the start of the step.
        loss_scale: [] float32 or None, factor of the loss and of its gradient.
        ref_params: the frozen reference policy, or None.
        terms: of the loss beside the surrogate; None without any.
    """

    advantages: jax.Array
    weights: jax.Array
    uncharged: jax.Array
    multiplier: jax.Array
    tolerance: jax.Array
    first: jax.Array
    loss_scale: jax.Array | None
    ref_params: Params | None
    terms: Terms | None


class _Sums(NamedTuple):
    """Sums over the micro-batches of an update.

    Attributes:
        gradient, loss: to be divided by the total weight of the tokens in the loss, and by the loss scale.
        surrogate, kl: of the loss, before coefficient and scale, where it has terms beside the surrogate; else 0.
        dropped_tokens: [N] int32, tokens of each completion that a correction leaves out of the loss.
        router: `moe.router_sums`.
        statistics: by metric name.
    """

    gradient: Sum
    loss: Sum
    surrogate: Sum
    kl: Sum
    dropped_tokens: Sum
    router: Sum
    statistics: dict[str, Statistic]


class _Learner(NamedTuple):
    """State that an update changes, as in `TrainState`."""

    params: Params
    opt_state: Any
    skipped_in_row: jax.Array
    loss_scale: LossScale | None


_Micro = tuple[Rows, jax.Array | None]
"""A micro-batch: rows, and p^Train at the start of the step; None where the update's own pass gives it."""

OLD_LOGPROBS = "old_logprobs"
"""Name scope of the pass that computes p^Train before the updates; and the column of rows that lag."""


TRAIN_LOGPROBS, START_LOGPROBS = "tokens/train_logprobs", "tokens/start_logprobs"
ADVANTAGES = "completions/advantages"
"""What a step returns beside its metrics for a recording of its tokens; the second of batches that lag."""


def batch_logprobs(params: Params, batch: Batch, row_logprobs: RowLogprobs, mesh: Mesh | None) -> tuple[jax.Array, ...]:
    """p^Train of the whole batch, no gradient: [M, A, R, L] float32 for each bucket, 0 outside completions."""

    def logprobs(params: Params, rows: Rows) -> jax.Array:
        return row_logprobs(params, rows).logprobs

    def mini_batch(_: None, xs: tuple[tuple[Rows, ...], jax.Array]) -> tuple[None, tuple[jax.Array, ...]]:
        return None, map_rows(logprobs, params, *xs, mesh=mesh)

    return lax.scan(mini_batch, None, (batch.rows, jnp.asarray(batch.micro_batches)))[1]


def make_rescore(row_logprobs: RowLogprobs, *, mesh: Mesh | None) -> Callable[[Params, Batch], tuple[Batch, jax.Array]]:
    """Jitted (params, batch) -> batch whose rollout log-probs are the training stack's own, on the step's own rows.

    This is precision "exact": the step computes the same numbers again, so the discrepancy is 0 to the last bit. The
    second result is a diagnostic: the mean |p_train - p_sampler| of the log-probs that were replaced.
    """

    @functools.partial(jax.jit, compiler_options=compiler_options(jax.default_backend()))
    def rescore(params: Params, batch: Batch) -> tuple[Batch, jax.Array]:
        logprobs = batch_logprobs(params, batch, row_logprobs, mesh)
        differences = Mean(jnp.float32(0), jnp.float32(0))
        for bucket, train in zip(batch.rows, logprobs, strict=True):
            delta = token_discrepancy(train, bucket.rollout_logprobs, measure="diff", sided="two")
            differences = differences.merge(masked.masked_sum(delta, bucket.completion_mask))
        rows = tuple(b.with_columns(rollout_logprobs=p) for b, p in zip(batch.rows, logprobs, strict=True))
        return batch._replace(rows=rows), differences.value()

    return rescore


def make_old_logprobs(row_logprobs: RowLogprobs, *, mesh: Mesh | None) -> Callable[[Params, Batch], Batch]:
    """Jitted (params, batch) -> batch with the column `old_logprobs`, p^Train of the weights that sampled the batch.

    For batches that lag behind the policy. `params` are those weights: what they give is compared with the engine's
    log-probs, and what the policy moved since is staleness.
    """

    @functools.partial(jax.jit, compiler_options=compiler_options(jax.default_backend()))
    def old_logprobs(params: Params, batch: Batch) -> Batch:
        logprobs = batch_logprobs(params, batch, row_logprobs, mesh)
        rows = zip(batch.rows, logprobs, strict=True)
        return batch._replace(rows=tuple(bucket.with_columns(old_logprobs=old) for bucket, old in rows))

    return old_logprobs


def lags(rows: tuple[Rows, ...]) -> bool:
    """Whether rows say what the training stack gave their tokens under the weights that sampled them."""
    return OLD_LOGPROBS in rows[0].columns


def make_train_step(
    *,
    row_logprobs: RowLogprobs,
    compute_dtype: str,
    settings: AlgorithmSettings,
    max_completion_tokens: int,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    mesh: Mesh | None,
    always_recompute: bool = False,
    shardings: TrainState | None = None,
    record_tokens: bool = False,
) -> Callable[[TrainState, Batch, Params | None], tuple[TrainState, Metrics]]:
    """Compile one training step; the state is donated.

    An update whose gradient norm, loss or advantages are not finite leaves parameters and optimizer as they were and is
    counted in `optimizer/skipped_updates` and `TrainState.skipped_in_row`. The norm alone would let a NaN advantage
    pass whose ratio is held at its clamp: the gradient there is 0. The dual update of that step still happens, unless
    the mean discrepancy is itself not finite.

    Args:
        row_logprobs: from `make_row_logprobs`, for this mesh.
        compute_dtype: the dtype that it computes in.
        settings: the method and its constants.
        max_completion_tokens: sampling limit, for the fixed-length normalizer.
        optimizer, schedule: from `optimizer.py`; the schedule only for the record.
        mesh: the devices; None for one.
        always_recompute: take p^Train from a pass of its own for the first mini-batch too, as for all others. A
            differentiated forward pass is fused differently and differs in the last bits; `make_rescore` needs none.
        shardings: the state's, input and output alike, so that the step has one cache entry; None on one device.
        record_tokens: also return `tokens/train_logprobs`, [M, A, R, L] float32 for each bucket, of batches that lag
            `tokens/start_logprobs`, and `completions/advantages` [M * N].

    Returns:
        step(state, batch, ref_params) with `ref_params` None unless `kl_coefficient` is above 0. The metrics are []
        float32, named as in observe/metric_names.py, and `completions/discrepancy` [M * N], each completion's own mean.
    """
    parts = _Parts(
        row_logprobs,
        settings,
        max_completion_tokens,
        optimizer,
        schedule,
        mesh,
        settings.remedies(),
        always_recompute,
        record_tokens,
    )

    def step(state: TrainState, batch: Batch, ref_params: Params | None) -> tuple[TrainState, Metrics]:
        with products_in(compute_dtype):
            return _train_step(parts, state, batch, ref_params)

    # Metrics are replicated, so that each process of several can read them.
    out = {} if shardings is None else {"out_shardings": (shardings, replicated(shardings.step.mesh))}
    platform = jax.default_backend() if shardings is None else shardings.step.mesh.devices.flat[0].platform
    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options(platform), **out)


def _train_step(
    parts: _Parts, state: TrainState, batch: Batch, ref_params: Params | None
) -> tuple[TrainState, Metrics]:
    """Algorithm 1, after sampling and rewards."""
    settings, multiplier, tolerance = parts.settings, state.dual.multiplier, tolerance_of(parts.settings, state.dual)
    noise_floor, batch = batch.noise_floor, batch._replace(noise_floor=None)
    with jax.named_scope(OLD_LOGPROBS):
        old = _recompute(parts, state.params, batch)

    def update(learner: _Learner, xs: tuple[Any, ...]) -> tuple[_Learner, tuple[Any, ...]]:
        mini, old_logprobs, first = xs
        rewards = _rewards(parts, mini)
        relative = functools.partial(
            group_advantages, group_ids=mini.group_ids, valid=mini.valid,
            ddof=settings.std_ddof, epsilon=settings.std_epsilon, normalize_std=settings.normalize_std,
        )  # fmt: skip
        advantages = uncharged = relative(rewards)
        if settings.level == "reward":
            penalty = parts.remedies.penalty
            buckets = zip(mini.rows, old_logprobs, strict=True)
            sampled = tuple(rows.columns.get(OLD_LOGPROBS, old) for rows, old in buckets)
            rewards = charged_rewards(rewards, mini.rows, sampled, multiplier, tolerance, settings, penalty)
            advantages = relative(rewards)
        normalize = functools.partial(
            losses.aggregation_weights, mini.completion_lengths, _loss_mask(parts, mini),
            mode=settings.aggregation, max_completion_tokens=parts.max_completion_tokens,
        )  # fmt: skip
        weights, _ = normalize()
        scale = None if learner.loss_scale is None else learner.loss_scale.scale
        constants = _Constants(
            advantages, weights, uncharged, multiplier, jnp.float32(tolerance), first, scale, ref_params, None
        )
        rows = tuple(zip(mini.rows, old_logprobs, strict=True))
        if has_terms(settings):
            terms = _terms(parts, (learner.params, constants), rows, mini.micro_batches, normalize)
            constants = constants._replace(terms=terms)
        sums, signals = accumulate(
            functools.partial(_gradient, parts), (learner.params, constants), rows, mini.micro_batches, mesh=parts.mesh
        )
        if constants.terms is None:
            _, total_weight = normalize(dropped_tokens=sums.dropped_tokens.value())
        else:
            total_weight = constants.terms.divisor
        total_weight = total_weight if scale is None else total_weight * scale
        values = {"policy/loss": Mean(sums.loss.value(), total_weight).value()}
        if constants.terms is not None:
            values |= term_metrics(settings, constants.terms, sums.surrogate.value(), sums.kl.value())
        finite = jnp.isfinite(sums.loss.value()) & jnp.all(jnp.isfinite(jnp.where(weights > 0, advantages, 0.0)))
        learner, applied = _apply(parts, learner, sums.gradient.value(), total_weight, values, finite)
        return learner, (sums.statistics | applied, sums.router.value(), signals, advantages)

    first = jnp.arange(len(batch.rewards)) == 0
    learner = _Learner(state.params, state.opt_state, state.skipped_in_row, state.loss_scale)
    learner, (sums, router, signals, advantages) = lax.scan(update, learner, (batch, old, first))
    totals = stats.merge_stacked(sums)

    mean_discrepancy = totals["discrepancy/mean"].value()
    dual = update_dual(settings, state.dual, mean_discrepancy, noise_floor)
    metrics = stats.values(totals) | batch_metrics(batch, signals, settings, tolerance)
    if parts.remedies.corrections:
        mean, square = metrics["correction/weight_mean"], metrics.pop("correction/weight_square_mean")
        metrics["correction/effective_sample_size"] = jnp.where(square > 0, mean**2 / square, 0.0)
    metrics |= router_metrics(jax.tree.map(lambda x: jnp.sum(x, axis=0), router))
    if lags(batch.rows):
        metrics |= gap_metrics(batch.rows, signals)
    metrics |= _state_metrics(parts, state, learner, mean_discrepancy)
    if parts.record_tokens:
        metrics |= {TRAIN_LOGPROBS: tuple(train for train, *_ in signals), ADVANTAGES: advantages.reshape(-1)}
        if lags(batch.rows):
            metrics[START_LOGPROBS] = tuple(start for *_, start in signals)
    return TrainState(state.step + 1, dual=dual, **learner._asdict()), metrics


def _rewards(parts: _Parts, mini: Batch) -> jax.Array:
    """The rewards of a mini-batch, less the soft punishment of long completions."""
    settings = parts.settings
    if not settings.overlong_buffer:
        return mini.rewards
    return mini.rewards - overlong_penalty(
        mini.completion_lengths, max_completion_tokens=parts.max_completion_tokens,
        buffer=settings.overlong_buffer, penalty=settings.overlong_penalty,
    )  # fmt: skip


def _loss_mask(parts: _Parts, mini: Batch) -> jax.Array:
    """The completions of a mini-batch that are in the loss."""
    if not parts.settings.drop_equal_groups:
        return mini.loss_mask
    return mini.loss_mask & has_signal(mini.rewards, mini.group_ids, mini.valid)


def _recompute(parts: _Parts, params: Params, batch: Batch) -> tuple[jax.Array | None, ...]:
    """p^Train of every mini-batch whose own update can't give it: all but the first, whose update starts at `params`.

    None for each bucket if that leaves none: with a single mini-batch the method costs one pass, as much as GRPO.
    A charge inside the reward needs all, unless the rows have p^Train of the weights that sampled them.
    "bypass" leaves them out where they would be the old log-probs; of rows that lag they are the policy's staleness.
    """
    if not parts.always_recompute and (parts.settings.level != "reward" or lags(batch.rows)):
        bypass = parts.settings.ratio_denominator == "bypass" and not lags(batch.rows)
        if len(batch.rewards) == 1 or bypass:
            return (None,) * len(batch.rows)
        batch = batch._replace(micro_batches=jnp.asarray(batch.micro_batches).at[0].set(0))
    return batch_logprobs(params, batch, parts.row_logprobs, parts.mesh)


def _terms(
    parts: _Parts, shared: tuple[Params, _Constants], rows: tuple[Any, ...], micro_batches: jax.Array,
    normalize: Callable[..., tuple[jax.Array, jax.Array]],
) -> Terms:  # fmt: skip
    """Constants of the loss's other terms, from a forward pass of its own where they need one.

    The load-balancing loss is a product of two means over the mini-batch (Qiu et al. 2025, arXiv:2501.11873: over a
    micro-batch it would balance single texts), of which one is a constant. With that and the weight of the kept tokens
    known before, micro-batches and devices add.
    """
    settings = parts.settings
    balances, counts = bool(settings.router_aux_loss), settings.drops_tokens

    def count(shared: tuple[Params, _Constants], micro: _Micro) -> tuple[Any, tuple[()]]:
        outputs, signals = _forward(parts, *shared, *micro)
        return (Sum(outputs.router) if balances else None, Sum(signals.dropped_tokens) if counts else None), ()

    router = dropped = None
    if balances or counts:
        (router, dropped), _ = accumulate(count, shared, rows, micro_batches, mesh=parts.mesh)
    planned = normalize()[1]
    kept = normalize(dropped_tokens=dropped.value())[1] if counts else planned
    return make_terms(planned, kept, router.value() if balances else None)


def _gradient(parts: _Parts, shared: tuple[Params, _Constants], micro: _Micro) -> tuple[_Sums, tuple[jax.Array, ...]]:
    """The gradient, loss and statistics of a micro-batch, and p^Train and delta of its tokens.

    Of rows that lag also p^Train at the start of the step.
    """
    params, constants = shared
    gradient = jax.value_and_grad(functools.partial(_objective, parts), has_aux=True)
    (loss, (signals, router, (surrogate, kl), statistics)), grads = gradient(params, constants, *micro)
    sums = _Sums(Sum(grads), Sum(loss), Sum(surrogate), Sum(kl), Sum(signals.dropped_tokens), Sum(router), statistics)
    started = (signals.tokens.start_logprobs,) if lags(micro[:1]) else ()
    return sums, (signals.tokens.old_logprobs, signals.discrepancy, *started)


def _forward(
    parts: _Parts, params: Params, constants: _Constants, rows: Rows, start_logprobs: jax.Array | None
) -> tuple[RowOutputs, Signals]:
    """The forward pass of a micro-batch, and what is constant to its gradient."""
    settings, outputs = parts.settings, parts.row_logprobs(params, rows)
    train_logprobs = outputs.logprobs
    if start_logprobs is None:
        start_logprobs = train_logprobs
    elif not parts.always_recompute:
        start_logprobs = jnp.where(constants.first, train_logprobs, start_logprobs)
    tokens = Tokens(
        train_logprobs=train_logprobs, old_logprobs=rows.columns.get(OLD_LOGPROBS, start_logprobs),
        start_logprobs=start_logprobs, rollout_logprobs=rows.rollout_logprobs,
        advantages=masked.gather_to_tokens(constants.advantages, rows.completion_index),
        completion_mask=rows.completion_mask, completion_index=rows.completion_index,
        num_completions=len(constants.advantages), multiplier=constants.multiplier, tolerance=constants.tolerance,
    )  # fmt: skip
    return outputs, signals_of(settings, parts.remedies, tokens, constants.weights)


def _objective(
    parts: _Parts, params: Params, constants: _Constants, *micro: Any
) -> tuple[jax.Array, tuple[Signals, Aux, tuple[jax.Array, jax.Array], dict[str, Statistic]]]:
    """The summed loss of a micro-batch, to be divided by the total weight of its mini-batch (Eq. 9-10).

    Times the loss scale, if there is one. The pair is the surrogate's and the divergence's part of the sum.
    """
    settings, rows = parts.settings, micro[0]
    mask = rows.completion_mask
    (train_logprobs, entropy, router), signals = _forward(parts, params, constants, *micro)
    loss, of_loss = loss_of(settings, parts.remedies, signals, train_logprobs)
    total, kl = loss.total, jnp.zeros(())
    if settings.kl_coefficient:
        reference = lax.stop_gradient(parts.row_logprobs(constants.ref_params, without_replay(rows)).logprobs)
        tokens = losses.reference_kl(train_logprobs, reference, estimator=settings.kl_estimator, completion_mask=mask)
        kl = masked.weighted_sum(tokens, signals.planned_weights).total
    if constants.terms is not None:
        total += scaled_terms(settings, constants.terms, kl, router)
    statistics = {
        **signals.statistics,
        **of_loss,
        "policy/entropy": masked.masked_sum(lax.stop_gradient(entropy), mask),
        "discrepancy/mean": signals.mean_discrepancy,
        "dual/charge_share": charge_share(
            signals.tokens, masked.gather_to_tokens(constants.uncharged, rows.completion_index), signals.weights
        ),
    }
    if constants.loss_scale is not None:
        total = total * constants.loss_scale
    apart = (loss.total, kl) if constants.terms is not None else (jnp.zeros(()), jnp.zeros(()))
    return total, (signals, router, apart, statistics)


def _apply(
    parts: _Parts, learner: _Learner, gradient: Params, total_weight: jax.Array, values: Metrics, finite: jax.Array
) -> tuple[_Learner, dict[str, Statistic]]:
    """One optimizer update by gradient / total_weight; none if that is not finite, or `finite` is false.

    `values` are of updates made.
    """
    scale = jnp.where(total_weight > 0, total_weight, 1.0)
    grad_norm = _norm(gradient) / scale
    finite &= jnp.isfinite(grad_norm)

    def update(params: Params, opt_state: Any) -> tuple[Params, Any]:
        grads = jax.tree.map(lambda g, p: (g / scale).astype(p.dtype), gradient, params)
        updates, opt_state = parts.optimizer.update(grads, opt_state, params, grad_norm=grad_norm)
        return optax.apply_updates(params, updates), opt_state

    unchanged = learner.params, learner.opt_state
    params, opt_state = lax.cond(finite, update, lambda *unchanged: unchanged, *unchanged)
    values = values | {"optimizer/grad_norm": grad_norm}
    statistics = {name: masked.masked_sum(value, finite) for name, value in values.items()} | {
        "optimizer/skipped_updates": Sum((~finite).astype(jnp.int32)),
    }
    scale = None if learner.loss_scale is None else next_loss_scale(learner.loss_scale, finite)
    return _Learner(params, opt_state, jnp.where(finite, 0, learner.skipped_in_row + 1), scale), statistics


def _state_metrics(parts: _Parts, state: TrainState, learner: _Learner, mean_discrepancy: jax.Array) -> Metrics:
    """The multiplier as this step used it, what moves it, and the optimizer's counters."""
    settings = parts.settings
    rate = parts.schedule(jnp.maximum(_applied(learner.opt_state) - 1, 0))
    scale = {} if state.loss_scale is None else {"optimizer/loss_scale": state.loss_scale.scale}
    return scale | {
        "optimizer/learning_rate": jnp.asarray(rate, jnp.float32),
        "optimizer/skipped_in_row": learner.skipped_in_row,
        "dual/multiplier": state.dual.multiplier,
        "dual/tolerance": jnp.float32(tolerance_of(settings, state.dual)),
        "dual/violation": mean_discrepancy - tolerance_of(settings, state.dual),
    }


def _norm(grads: Params) -> jax.Array:
    """The Euclidean norm of all leaves together. Dot products: a sum of squares would write the squares first."""

    def squared(leaf: jax.Array) -> jax.Array:
        axes = tuple(range(leaf.ndim))
        return lax.dot_general(leaf, leaf, ((axes, axes), ((), ())), precision=PRECISE)

    return jnp.sqrt(sum(squared(leaf) for leaf in jax.tree.leaves(grads)))


def _applied(opt_state: optax.OptState) -> jax.Array:
    """Number of updates the optimizer has made. Skipped ones don't count, for its schedule either."""
    return optax.tree.get_all_with_path(opt_state, "count")[0][1]
