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
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.algorithm.signals import Signals, charge_share
from dcmdp_jax.algorithm.stats import Mean, Statistic, Sum
from dcmdp_jax.config.algorithm import AlgorithmSettings, Remedies
from dcmdp_jax.models.moe import Aux, router_metrics
from dcmdp_jax.models.products import products_in
from dcmdp_jax.parallel.backend import compiler_options
from dcmdp_jax.parallel.sharding import replicated
from dcmdp_jax.training import loss_terms
from dcmdp_jax.training.accumulate import accumulate
from dcmdp_jax.training.batch_metrics import Metrics, batch_metrics, gap_metrics
from dcmdp_jax.training.row_logprobs import OLD_LOGPROBS, RowLogprobs, RowOutputs, batch_logprobs, lags, without_replay
from dcmdp_jax.training.state import Learner, apply_update, update_dual, updates_made
from dcmdp_jax.types import Array, Batch, DualState, Params, Rows, TrainState

RECOMPUTE = "old_logprobs"
"""Name scope of the pass that computes p^Train before the updates."""

TRAIN_LOGPROBS, START_LOGPROBS = "tokens/train_logprobs", "tokens/start_logprobs"
ADVANTAGES = "completions/advantages"
"""What a step returns beside its metrics for a recording of its tokens; the second of batches that lag."""


@dataclasses.dataclass(frozen=True)
class _StepParts:
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


class _MiniBatch(NamedTuple):
    """A mini-batch with what is known before the updates.

    Attributes:
        batch: rows and completions.
        rewards: [N] float32, less the punishment of long completions.
        charged: [N] float32, the same less the charge for the discrepancy; None unless `level` is "reward".
        start_logprobs: p^Train at the start of the step, for each bucket; None where the update's own pass gives it.
        first: [] bool, the update starts from the weights at the start of the step.
    """

    batch: Batch
    rewards: Array
    charged: Array | None
    start_logprobs: tuple[Array | None, ...]
    first: Array


class _Micro(NamedTuple):
    """Rows of a micro-batch and their `start_logprobs`."""

    rows: Rows
    start_logprobs: Array | None


class _Constants(NamedTuple):
    """Constants of an update that every micro-batch gets; no gradient reaches them.

    Attributes:
        advantages, weights: [N] float32, of each completion.
        uncharged: [N] float32, advantages without a charge inside the reward.
        dual: lambda_k and c.
        first: see `_MiniBatch`.
        loss_scale: [] float32 or None, factor of the loss and of its gradient.
        ref_params: the frozen reference policy, or None.
    """

    advantages: Array
    weights: Array
    uncharged: Array
    dual: DualState
    first: Array
    loss_scale: Array | None
    ref_params: Params | None


class _Inputs(NamedTuple):
    """Arguments of the pass that takes the gradient; `terms` is None for a loss that is the surrogate alone."""

    params: Params
    constants: _Constants
    terms: loss_terms.Terms | None


class _Objective(NamedTuple):
    """The parts of a micro-batch's loss: the surrogate's and the divergence's sum, and what they are computed from."""

    surrogate: Array
    kl: Array
    router: Aux
    signals: Signals
    statistics: dict[str, Statistic]


class _Sums(NamedTuple):
    """Sums over the micro-batches of an update.

    Attributes:
        gradient, loss: unnormalized; divide by the total weight of the tokens in the loss, and by the loss scale.
        surrogate, kl: parts of the loss, before coefficient and scale.
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


class _TokenValues(NamedTuple):
    """Values of the tokens of rows, float32.

    Attributes:
        old_logprobs: nats, training stack, weights that sampled.
        discrepancy: delta.
        start_logprobs: nats, training stack, weights at the start of the step; None unless the rows lag.
    """

    old_logprobs: Array
    discrepancy: Array
    start_logprobs: Array | None


class _Updated(NamedTuple):
    """What the metrics of a step are made from; [M, ...] of all updates."""

    statistics: dict[str, Statistic]
    router: Aux
    tokens: tuple[_TokenValues, ...]
    advantages: Array


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
    remedies = settings.remedies()
    parts = _StepParts(
        row_logprobs, settings, max_completion_tokens, optimizer, schedule, mesh, remedies, always_recompute,
        record_tokens,
    )  # fmt: skip

    def step(state: TrainState, batch: Batch, ref_params: Params | None) -> tuple[TrainState, Metrics]:
        with products_in(compute_dtype):
            return _train_step(parts, state, batch, ref_params)

    # Metrics are replicated, so that each process of several can read them.
    out = {} if shardings is None else {"out_shardings": (shardings, replicated(shardings.step.mesh))}
    platform = jax.default_backend() if shardings is None else shardings.step.mesh.devices.flat[0].platform
    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options(platform), **out)


def _train_step(
    parts: _StepParts, state: TrainState, batch: Batch, ref_params: Params | None
) -> tuple[TrainState, Metrics]:
    """Algorithm 1, after sampling and rewards."""
    settings, dual = parts.settings, state.dual
    with jax.named_scope(RECOMPUTE):
        start_logprobs = _recompute(parts, state.params, batch)
    rewards = _rewards(parts, batch)
    charged = _charged(parts, dual, batch, rewards, start_logprobs)
    mini_batches = _MiniBatch(batch, rewards, charged, start_logprobs, jnp.arange(len(rewards)) == 0)
    learner = Learner(state.params, state.opt_state, state.skipped_in_row, state.loss_scale)
    learner, updates = lax.scan(functools.partial(_update, parts, dual, ref_params), learner, mini_batches)
    totals = stats.merge_stacked(updates.statistics)
    mean_discrepancy = totals["discrepancy/mean"].value()
    next_dual = update_dual(settings, dual, state.step, mean_discrepancy)
    metrics = stats.values(totals) | _metrics(parts, state, batch, learner, updates)
    metrics["dual/violation"] = mean_discrepancy - dual.tolerance
    if parts.remedies.corrections:
        mean, square = metrics["correction/weight_mean"], metrics.pop("correction/weight_square_mean")
        metrics["correction/effective_sample_size"] = jnp.where(square > 0, mean**2 / square, 0.0)
    return TrainState(state.step + 1, dual=next_dual, **learner._asdict()), metrics


def _recompute(parts: _StepParts, params: Params, batch: Batch) -> tuple[Array | None, ...]:
    """p^Train of every mini-batch whose own update can't give it: all but the first, whose update starts at `params`.

    None for each bucket if that leaves none: with a single mini-batch the method costs one pass, as much as GRPO.
    A charge inside the reward needs all, unless the rows have p^Train of the weights that sampled them.
    "bypass" leaves them out where they would be the old log-probs; of rows that lag they are the policy's staleness.
    """
    lagging = lags(batch.rows[0])
    if not parts.always_recompute and (parts.settings.level != "reward" or lagging):
        bypass = parts.settings.ratio_denominator == "bypass" and not lagging
        if len(batch.rewards) == 1 or bypass:
            return (None,) * len(batch.rows)
        batch = batch._replace(micro_batches=jnp.asarray(batch.micro_batches).at[0].set(0))
    return batch_logprobs(params, batch, parts.row_logprobs, parts.mesh)


def _rewards(parts: _StepParts, batch: Batch) -> Array:
    """The rewards, less the soft punishment of long completions."""
    settings = parts.settings
    if not settings.overlong_buffer:
        return batch.rewards
    return batch.rewards - overlong_penalty(
        batch.completion_lengths, max_completion_tokens=parts.max_completion_tokens,
        buffer=settings.overlong_buffer, penalty=settings.overlong_penalty,
    )  # fmt: skip


def _charged(
    parts: _StepParts, dual: DualState, batch: Batch, rewards: Array, start_logprobs: tuple[Array | None, ...]
) -> Array | None:
    """The rewards with the charge inside, of each mini-batch; None where tokens are charged."""
    if parts.settings.level != "reward":
        return None
    charge = functools.partial(loss_terms.charged_rewards, parts.settings, parts.remedies.penalty, dual)
    buckets = zip(batch.rows, start_logprobs, strict=True)
    old_logprobs = tuple(rows.columns.get(OLD_LOGPROBS, start) for rows, start in buckets)
    return lax.map(lambda mini_batch: charge(*mini_batch), (rewards, batch.rows, old_logprobs))


def _update(
    parts: _StepParts, dual: DualState, ref_params: Params | None, learner: Learner, mini: _MiniBatch
) -> tuple[Learner, _Updated]:
    """One optimizer update, by the gradient of a mini-batch (Eq. 9, 10)."""
    settings, batch = parts.settings, mini.batch
    relative = functools.partial(
        group_advantages, group_ids=batch.group_ids, valid=batch.valid,
        ddof=settings.std_ddof, epsilon=settings.std_epsilon, normalize_std=settings.normalize_std,
    )  # fmt: skip
    normalize = functools.partial(
        losses.aggregation_weights, batch.completion_lengths, _loss_mask(parts, batch),
        mode=settings.aggregation, max_completion_tokens=parts.max_completion_tokens,
    )  # fmt: skip
    uncharged, (weights, _) = relative(mini.rewards), normalize()
    advantages = uncharged if mini.charged is None else relative(mini.charged)
    scale = None if learner.loss_scale is None else learner.loss_scale.scale
    constants = _Constants(advantages, weights, uncharged, dual, mini.first, scale, ref_params)
    rows = tuple(map(_Micro, batch.rows, mini.start_logprobs))
    terms = _terms(parts, _Inputs(learner.params, constants, None), rows, batch.micro_batches, normalize)
    shared = _Inputs(learner.params, constants, terms)
    sums, tokens = accumulate(functools.partial(_gradient, parts), shared, rows, batch.micro_batches, mesh=parts.mesh)
    gradient, loss, surrogate, kl, dropped, router = stats.values(sums[:-1])
    divisor = normalize(dropped_tokens=dropped)[1] if terms is None else terms.divisor
    divisor = divisor if scale is None else divisor * scale
    finite = jnp.isfinite(loss) & jnp.all(jnp.isfinite(jnp.where(weights > 0, advantages, 0.0)))
    learner, grad_norm, made = apply_update(parts.optimizer, learner, gradient, divisor, finite)
    values = {"policy/loss": Mean(loss, divisor).value(), "optimizer/grad_norm": grad_norm}
    if terms is not None:
        values |= loss_terms.term_metrics(settings, terms, surrogate, kl)
    statistics = sums.statistics | {name: masked.masked_sum(value, made) for name, value in values.items()}
    statistics["optimizer/skipped_updates"] = Sum((~made).astype(jnp.int32))
    return learner, _Updated(statistics, router, tokens, advantages)


def _loss_mask(parts: _StepParts, batch: Batch) -> Array:
    """The completions of a mini-batch that are in the loss."""
    if not parts.settings.drop_equal_groups:
        return batch.loss_mask
    return batch.loss_mask & has_signal(batch.rewards, batch.group_ids, batch.valid)


def _terms(
    parts: _StepParts, shared: _Inputs, rows: tuple[_Micro, ...], micro_batches: Array, normalize: Callable[..., Any]
) -> loss_terms.Terms | None:
    """Constants of the terms beside the surrogate, from a forward pass of its own where they need one.

    The load-balancing loss is a product of two means over the mini-batch (Qiu et al. 2025, arXiv:2501.11873: over a
    micro-batch it would balance single texts), of which one is a constant. With that and the weight of the kept tokens
    known before, micro-batches and devices add.
    """
    settings = parts.settings
    if not loss_terms.has_terms(settings):
        return None
    balances, counts = bool(settings.router_aux_loss), settings.drops_tokens

    def count(shared: _Inputs, micro: _Micro) -> tuple[Any, tuple[()]]:
        outputs, signals = _forward(parts, shared.params, shared.constants, micro)
        return (Sum(outputs.router) if balances else None, Sum(signals.dropped_tokens) if counts else None), ()

    router = dropped = None
    if balances or counts:
        (router, dropped), _ = accumulate(count, shared, rows, micro_batches, mesh=parts.mesh)
    planned = normalize()[1]
    kept = normalize(dropped_tokens=dropped.value())[1] if counts else planned
    return loss_terms.Terms(jnp.where(kept > 0, kept, 1.0), planned, router.value() if balances else None)


def _gradient(parts: _StepParts, shared: _Inputs, micro: _Micro) -> tuple[_Sums, _TokenValues]:
    """The gradient, loss and statistics of a micro-batch, and the values of its tokens."""
    objective = jax.value_and_grad(functools.partial(_objective, parts), has_aux=True)
    (loss, of), gradient = objective(shared.params, shared, micro)
    sums = (gradient, loss, of.surrogate, of.kl, of.signals.dropped_tokens, of.router)
    tokens = of.signals.tokens
    start_logprobs = tokens.start_logprobs if lags(micro.rows) else None
    values = _TokenValues(tokens.old_logprobs, of.signals.discrepancy, start_logprobs)
    return _Sums(*map(Sum, sums), of.statistics), values


def _objective(parts: _StepParts, params: Params, shared: _Inputs, micro: _Micro) -> tuple[Array, _Objective]:
    """The summed loss of a micro-batch, to be divided by the total weight of its mini-batch (Eq. 9-10).

    Times the loss scale, if there is one.
    """
    settings, constants, rows = parts.settings, shared.constants, micro.rows
    (train_logprobs, entropy, router), signals = _forward(parts, params, constants, micro)
    loss, of_loss = loss_terms.loss_of(settings, parts.remedies, signals, train_logprobs)
    total, kl = loss.total, jnp.zeros(())
    if settings.kl_coefficient:
        reference = lax.stop_gradient(parts.row_logprobs(constants.ref_params, without_replay(rows)).logprobs)
        estimate = functools.partial(losses.reference_kl, estimator=settings.kl_estimator)
        tokens = estimate(train_logprobs, reference, completion_mask=rows.completion_mask)
        kl = masked.weighted_sum(tokens, signals.planned_weights).total
    if shared.terms is not None:
        total += loss_terms.scaled_terms(settings, shared.terms, kl, router)
    if constants.loss_scale is not None:
        total = total * constants.loss_scale
    uncharged = masked.gather_to_tokens(constants.uncharged, rows.completion_index)
    statistics = {
        **signals.statistics,
        **of_loss,
        "policy/entropy": masked.masked_sum(lax.stop_gradient(entropy), rows.completion_mask),
        "discrepancy/mean": signals.mean_discrepancy,
        "dual/charge_share": charge_share(signals.tokens, uncharged, signals.weights),
    }
    return total, _Objective(loss.total, kl, router, signals, statistics)


def _forward(parts: _StepParts, params: Params, constants: _Constants, micro: _Micro) -> tuple[RowOutputs, Signals]:
    """The forward pass of a micro-batch, and what is constant to its gradient."""
    rows, start_logprobs = micro
    outputs = parts.row_logprobs(params, rows)
    if start_logprobs is None:
        start_logprobs = outputs.logprobs
    elif not parts.always_recompute:
        start_logprobs = jnp.where(constants.first, outputs.logprobs, start_logprobs)
    tokens = Tokens(
        train_logprobs=outputs.logprobs, old_logprobs=rows.columns.get(OLD_LOGPROBS, start_logprobs),
        start_logprobs=start_logprobs, rollout_logprobs=rows.rollout_logprobs,
        advantages=masked.gather_to_tokens(constants.advantages, rows.completion_index),
        completion_mask=rows.completion_mask, completion_index=rows.completion_index,
        num_completions=len(constants.advantages), **constants.dual._asdict(),
    )  # fmt: skip
    return outputs, loss_terms.signals_of(parts.settings, parts.remedies, tokens, constants.weights)


def _metrics(parts: _StepParts, state: TrainState, batch: Batch, learner: Learner, updates: _Updated) -> Metrics:
    """Metrics of the batch, of the optimizer's counters, and of the multiplier as this step used it."""
    metrics = batch_metrics(batch, updates.tokens, parts.settings, state.dual.tolerance)
    metrics |= router_metrics(jax.tree.map(lambda x: jnp.sum(x, axis=0), updates.router))
    rate = parts.schedule(jnp.maximum(updates_made(learner.opt_state) - 1, 0))
    metrics["optimizer/learning_rate"] = jnp.asarray(rate, jnp.float32)
    metrics["optimizer/skipped_in_row"] = learner.skipped_in_row
    metrics |= {f"dual/{name}": value for name, value in state.dual._asdict().items()}
    if state.loss_scale is not None:
        metrics["optimizer/loss_scale"] = state.loss_scale.scale
    if parts.record_tokens:
        metrics[TRAIN_LOGPROBS] = tuple(bucket.old_logprobs for bucket in updates.tokens)
        metrics[ADVANTAGES] = updates.advantages.reshape(-1)
    if lags(batch.rows[0]):
        metrics |= gap_metrics(batch.rows, updates.tokens)
        if parts.record_tokens:
            metrics[START_LOGPROBS] = tuple(bucket.start_logprobs for bucket in updates.tokens)
    return metrics
