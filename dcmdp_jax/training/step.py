"""The compiled training step: (TrainState, Batch) -> (TrainState, metrics), Algorithm 1 of the
paper.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from dcmdp_jax.algorithm import distribution, losses, masked, penalties, stats
from dcmdp_jax.algorithm.advantages import group_advantages
from dcmdp_jax.algorithm.remedies import Statistics, Tokens
from dcmdp_jax.algorithm.signals import Signals, charge_share
from dcmdp_jax.algorithm.stats import Mean, Sum
from dcmdp_jax.config.algorithm import AlgorithmSettings, Remedies
from dcmdp_jax.data.episode import OLD_TOP_LOGPROBS, TEACHER_LOGPROBS, TOP_IDS, TOP_LOGPROBS
from dcmdp_jax.models import config, moe, products
from dcmdp_jax.models.lora import adapted
from dcmdp_jax.models.row_logprobs import RowLogprobs, RowOutputs, without_replay
from dcmdp_jax.parallel.backend import compiler_options
from dcmdp_jax.parallel.sharding import replicated
from dcmdp_jax.training import loss_terms
from dcmdp_jax.training.accumulate import accumulate
from dcmdp_jax.training.loss_terms import (
    Metrics,
    TokenValues,
    Updates,
    recorded_tokens,
    step_metrics,
)
from dcmdp_jax.training.rescore import (
    OLD_LOGPROBS,
    START_LOGPROBS,
    START_TOP_LOGPROBS,
    lags,
    with_logprobs,
)
from dcmdp_jax.training.state import apply_update, update_dual
from dcmdp_jax.types import Array, Batch, DualState, Params, Rows, TrainState

RECOMPUTE = "old_logprobs"
"""Name scope of the pass that computes p^Train before the updates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts that a step is made of.

    Attributes:
        row_logprobs: result of `make_row_logprobs` for this mesh.
        compute_dtype: the dtype that it computes in.
        settings: the method and its constants.
        max_completion_tokens: sampling limit, for the fixed-length normalizer.
        optimizer, schedule: see `training/state.py`; the schedule is only for the record.
        mesh: the devices; None for one.
        always_recompute: take p^Train from a pass of its own for the first mini-batch too, as for
            all others. A differentiated forward pass is fused differently and differs in the last
            bits; `make_rescore` needs none.
        record_tokens: also return `tokens/train_logprobs`, [M, A, R, L] float32 for each bucket, of
            batches that lag `tokens/start_logprobs`, and `completions/advantages` [M * N].
        lora: shape of the adapters, which then are what is trained; None trains all parameters.
        teacher_weight: weight of the reward `teacher:MODEL` in the advantages.
    """

    row_logprobs: RowLogprobs
    compute_dtype: str
    settings: AlgorithmSettings
    max_completion_tokens: int
    optimizer: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule
    mesh: Mesh | None
    always_recompute: bool = False
    record_tokens: bool = False
    lora: config.Lora | None = None
    teacher_weight: float = 0.0

    def policy(self, params: Params, frozen: Params | None) -> Params:
        """The parameters of a forward pass: the trained ones, or the frozen ones with the trained
        adapters.
        """
        return params if self.lora is None else adapted(frozen, params, self.lora)

    @functools.cached_property
    def remedies(self) -> Remedies:
        """The functions that the settings name."""
        return self.settings.remedies()


class _Constants(NamedTuple):
    """Constants of an update, the same for every micro-batch; no gradient reaches them.

    Attributes:
        advantages, weights: [N] float32, of each completion.
        uncharged: [N] float32, advantages without a charge inside the reward.
        dual: lambda_k and c.
        first: [] bool, the update starts from the weights at the start of the step.
        loss_scale: [] float32 or None, factor of the loss and of its gradient.
        frozen: the reference policy of the KL term, the base of the adapters; None without both.
        terms: constants of the further terms of the loss; None for the surrogate alone.
    """

    advantages: Array
    weights: Array
    uncharged: Array
    dual: DualState
    first: Array
    loss_scale: Array | None
    frozen: Params | None
    terms: loss_terms.Terms | None = None


_Inputs = tuple[Params, _Constants]
_MiniBatch = tuple[Batch, Array, Array | None, Array]


class _Sums(NamedTuple):
    """Sums over the tokens of a mini-batch.

    Attributes:
        gradient, loss: with every term, times the loss scale; divide by the weight of the tokens in
            the loss and by it.
        surrogate, kl: parts of the loss, before coefficient and scale.
        dropped_tokens: [N] int32, tokens of each completion that a correction leaves out of the
            loss.
        router: `moe.router_sums`.
    """

    gradient: Params
    loss: Array
    surrogate: Array
    kl: Array
    dropped_tokens: Array
    router: moe.Aux


def make_train_step(
    parts: StepParts, shardings: TrainState | None = None
) -> Callable[[TrainState, Batch, Params | None], tuple[TrainState, Metrics]]:
    """Compile one training step; the state is donated.

    An update whose gradient norm, loss or advantages are not finite leaves parameters and optimizer
    as they were and is counted in `optimizer/skipped_updates` and `TrainState.skipped_in_row`. The
    norm alone would let a NaN advantage pass whose ratio is held at its clamp: the gradient there
    is 0. The dual update of that step still happens, unless the discrepancy that c bounds is itself
    not finite.

    Args:
        parts: the method, the model and the optimizer.
        shardings: the state's, as input and output, so that the step has one cache entry; None on
            one device.

    Returns:
        step(state, batch, frozen) with `frozen` None unless `kl_coefficient` is above 0 or there
        are adapters. The metrics are [] float32, named as in observe/metric_names.py, and
        `completions/discrepancy` [M * N], each completion's own mean.

    Raises:
        UserError: in one line, for a function of a user that can't be loaded.
    """
    _ = parts.remedies

    def step(state: TrainState, batch: Batch, frozen: Params | None) -> tuple[TrainState, Metrics]:
        with products.products_in(parts.compute_dtype):
            return _train_step(parts, state, batch, frozen)

    # Metrics are replicated, so that each process of several can read them.
    out = (
        {} if shardings is None else {"out_shardings": (shardings, replicated(shardings.step.mesh))}
    )
    platform = (
        jax.default_backend() if shardings is None else shardings.step.mesh.devices.flat[0].platform
    )
    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options(platform), **out)


def _train_step(
    parts: StepParts, state: TrainState, batch: Batch, frozen: Params | None
) -> tuple[TrainState, Metrics]:
    """Algorithm 1, after sampling and rewards."""
    settings = parts.settings
    dual = state.dual
    with jax.named_scope(RECOMPUTE):
        batch = _recompute(parts, parts.policy(state.params, frozen), batch)
    rewards = loss_terms.punished_rewards(settings, batch, parts.max_completion_tokens)
    charged = loss_terms.charged_rewards(settings, parts.remedies, dual, rewards, batch.rows)
    mini_batches = batch, rewards, charged, jnp.arange(len(rewards)) == 0
    after, updates = lax.scan(functools.partial(_update, parts, frozen), state, mini_batches)
    totals = stats.merge_stacked(updates.statistics)
    metrics = stats.values(totals) | step_metrics(
        settings, parts.schedule, state, after, batch, updates
    )
    bounded = metrics[settings.bounded_metric]
    next_dual = update_dual(settings, dual, state.step, bounded)
    metrics["dual/violation"] = bounded - dual.tolerance
    if parts.remedies.corrections:
        mean = metrics["correction/weight_mean"]
        square = metrics.pop("correction/weight_square_mean")
        metrics["correction/effective_sample_size"] = jnp.where(square > 0, mean**2 / square, 0.0)
    if variance := totals.get("distribution/discrepancy_variance"):
        noise = jnp.sqrt(
            metrics.pop("distribution/discrepancy_variance") / jnp.maximum(variance.weight, 1.0)
        )
        metrics["distribution/sampling_noise"] = noise
    if parts.record_tokens:
        metrics |= recorded_tokens(updates)
    return after._replace(step=state.step + 1, dual=next_dual), metrics


def _recompute(parts: StepParts, params: Params, batch: Batch) -> Batch:
    """p^Train of every mini-batch whose own update can't give it: all but the first, whose update
    starts at `params`.

    No column if that leaves none: with a single mini-batch the method costs one pass, as much as
    GRPO. A charge inside the reward needs all, unless the rows have p^Train of the weights that
    sampled them. With ratio_denominator="bypass" they are not needed, except for lagged rows, where
    they measure staleness, and with a teacher, who is compared with the policy that sampled.
    """
    lagging = lags(batch.rows[0])
    computed = batch.micro_batches
    if not parts.always_recompute and (parts.settings.level != "reward" or lagging):
        bypass = parts.settings.ratio_denominator == "bypass" and not (
            lagging or parts.teacher_weight
        )
        if len(batch.rewards) == 1 or bypass:
            return batch
        computed = jnp.asarray(computed).at[0].set(0)
    rows = batch._replace(micro_batches=computed)
    scored = with_logprobs(
        params, rows, parts.row_logprobs, parts.mesh, START_LOGPROBS, START_TOP_LOGPROBS
    )
    return scored._replace(micro_batches=batch.micro_batches)


def _update(
    parts: StepParts, frozen: Params | None, state: TrainState, mini: _MiniBatch
) -> tuple[TrainState, Updates]:
    """One optimizer update, by the gradient of a mini-batch (Eq. 9, 10).

    Args:
        parts, frozen: of the step.
        state: before the update.
        mini: the batch, with p^Train at the start of the step unless this update's own pass gives
            it; [N] rewards, less the punishment of long completions; the same less the charge for
            the discrepancy, None unless `level` is "reward"; and whether the update starts from the
            weights at the start of the step.
    """
    settings, (batch, rewards, charged, first) = parts.settings, mini
    scaling = {"epsilon": settings.std_epsilon, "normalize_std": settings.normalize_std}
    relative = functools.partial(
        group_advantages, group_ids=batch.group_ids, valid=batch.valid, **scaling
    )
    of_loss = batch.completion_lengths, loss_terms.loss_mask(settings, batch)
    mean = {"mode": settings.aggregation, "max_completion_tokens": parts.max_completion_tokens}
    normalize = functools.partial(losses.aggregation_weights, *of_loss, **mean)
    uncharged, (weights, _) = relative(rewards), normalize()
    advantages = uncharged if charged is None else relative(charged)
    scale = None if state.loss_scale is None else state.loss_scale.scale
    constants = _Constants(advantages, weights, uncharged, state.dual, first, scale, frozen)
    terms = _terms(parts, (state.params, constants), batch, normalize)
    inputs = state.params, constants._replace(terms=terms)
    gradient_of = functools.partial(_gradient, parts)
    (summed, statistics), tokens = accumulate(
        gradient_of, inputs, batch.rows, batch.micro_batches, mesh=parts.mesh
    )
    sums = summed.value()
    divisor = normalize(dropped_tokens=sums.dropped_tokens)[1] if terms is None else terms.divisor
    divisor = divisor if scale is None else divisor * scale
    finite = jnp.isfinite(sums.loss) & jnp.all(
        jnp.isfinite(jnp.where(weights > 0, advantages, 0.0))
    )
    state, grad_norm, made = apply_update(parts.optimizer, state, sums.gradient, divisor, finite)
    values = {"policy/loss": Mean(sums.loss, divisor).value(), "optimizer/grad_norm": grad_norm}
    if terms is not None:
        values |= loss_terms.term_metrics(settings, terms, sums.surrogate, sums.kl)
    statistics |= {name: masked.masked_sum(value, made) for name, value in values.items()}
    statistics["optimizer/skipped_updates"] = Sum((~made).astype(jnp.int32))
    return state, Updates(statistics, sums.router, tokens, advantages)


def _terms(
    parts: StepParts, inputs: _Inputs, batch: Batch, normalize: Callable[..., Any]
) -> loss_terms.Terms | None:
    """Compute the constants of the further terms, in a forward pass of its own where they need one.

    The load-balancing loss is a product of two means over the mini-batch (Qiu et al. 2025,
    arXiv:2501.11873: over a micro-batch it would balance single texts), of which one is a constant.
    With that and the weight of the kept tokens known before, micro-batches and devices add.
    """
    settings = parts.settings
    balances = bool(settings.router_aux_loss)
    counts = settings.drops_tokens
    if not (settings.kl_coefficient or balances):
        return None

    def count(inputs: _Inputs, rows: Rows) -> tuple[Any, tuple[()]]:
        outputs, signals, _ = _forward(parts, *inputs, rows)
        return (
            Sum(outputs.router) if balances else None,
            Sum(signals.dropped_tokens) if counts else None,
        ), ()

    router = dropped = None
    if balances or counts:
        (router, dropped), _ = accumulate(
            count, inputs, batch.rows, batch.micro_batches, mesh=parts.mesh
        )
    planned = normalize()[1]
    kept = normalize(dropped_tokens=dropped.value())[1] if counts else planned
    return loss_terms.Terms(
        jnp.where(kept > 0, kept, 1.0), planned, router.value() if balances else None
    )


def _gradient(
    parts: StepParts, inputs: _Inputs, rows: Rows
) -> tuple[tuple[Sum, Statistics], TokenValues]:
    """The sums and statistics of a micro-batch, and the values of its tokens."""
    objective = jax.value_and_grad(functools.partial(_objective, parts), has_aux=True)
    (loss, (rest, statistics, tokens)), gradient = objective(*inputs, rows)
    return (Sum(_Sums(gradient, loss, *rest)), statistics), tokens


def _objective(
    parts: StepParts, params: Params, constants: _Constants, rows: Rows
) -> tuple[Array, tuple[tuple[Any, ...], Statistics, TokenValues]]:
    """The summed loss of a micro-batch, to be divided by the total weight of its mini-batch (Eq.
    9-10).

    Times the loss scale, if there is one. Also returns the other fields of `_Sums`, the statistics
    and token values.
    """
    settings = parts.settings
    remedies = parts.remedies
    (train_logprobs, entropy, router, _, kept_mass), signals, head = _forward(
        parts, params, constants, rows
    )
    tokens = signals.tokens._replace(train_logprobs=train_logprobs)
    weights = loss_terms.loss_weights(settings, signals)
    loss, of_loss = losses.policy_loss(
        tokens, weights, loss=remedies.loss, ratio_level=settings.ratio_level
    )
    surrogate = loss.total
    kl = jnp.zeros(())
    if settings.differentiates_head:
        surrogate += loss_terms.head_loss(
            settings, remedies, tokens, weights, signals.centered_weights, head
        )
    total = surrogate
    if settings.kl_coefficient:
        reference = lax.stop_gradient(
            parts.row_logprobs(constants.frozen, without_replay(rows)).logprobs
        )
        estimate = functools.partial(losses.reference_kl, estimator=settings.kl_estimator)
        of_tokens = estimate(train_logprobs, reference, completion_mask=rows.completion_mask)
        kl = masked.weighted_sum(of_tokens, signals.planned_weights).total
    if constants.terms is not None:
        total += loss_terms.scaled_terms(settings, constants.terms, kl, router)
    if constants.loss_scale is not None:
        total = total * constants.loss_scale
    old_logprobs = signals.tokens.old_logprobs
    uncharged = loss_terms.token_advantages(
        constants.uncharged, rows, old_logprobs, parts.teacher_weight
    )
    statistics = {
        **signals.statistics,
        **of_loss,
        **loss_terms.head_statistics(settings, head, kept_mass, rows.completion_mask),
        "policy/entropy": masked.masked_sum(lax.stop_gradient(entropy), rows.completion_mask),
        "discrepancy/mean": signals.mean_discrepancy,
    }
    if TEACHER_LOGPROBS in rows.columns:
        gap = old_logprobs - rows.columns[TEACHER_LOGPROBS]
        statistics["policy/teacher_kl"] = masked.masked_sum(gap, rows.completion_mask)
    charge = settings.state_charge
    in_loss = (
        None if charge is None else penalties.charge_length(head, rows.completion_mask, charge)
    )
    statistics["dual/charge_share"] = charge_share(
        signals.tokens, uncharged, signals.weights, in_loss
    )
    start_logprobs = signals.tokens.start_logprobs if lags(rows) else None
    top_logprobs = head.old_logprobs if head is not None and parts.record_tokens else None
    values = TokenValues(old_logprobs, signals.discrepancy, start_logprobs, top_logprobs)
    return total, ((surrogate, kl, signals.dropped_tokens, router), statistics, values)


def _forward(
    parts: StepParts, params: Params, constants: _Constants, rows: Rows
) -> tuple[RowOutputs, Signals, distribution.Head | None]:
    """The forward pass of a micro-batch, what is constant to its gradient, and the engine's
    likeliest tokens.
    """
    outputs = parts.row_logprobs(parts.policy(params, constants.frozen), rows)

    def at_start(now: Array, name: str) -> Array:
        if name in rows.columns and not parts.always_recompute:
            return jnp.where(constants.first, now, rows.columns[name])
        return rows.columns.get(name, now)

    start_logprobs = at_start(outputs.logprobs, START_LOGPROBS)
    head = None
    if outputs.top_logprobs is not None:
        start = lax.stop_gradient(at_start(outputs.top_logprobs, START_TOP_LOGPROBS))
        old = rows.columns.get(OLD_TOP_LOGPROBS, start)
        head = distribution.Head(
            rows.columns[TOP_IDS], rows.columns[TOP_LOGPROBS], outputs.top_logprobs, old, start
        )
    old_logprobs = rows.columns.get(OLD_LOGPROBS, start_logprobs)
    tokens = Tokens(
        train_logprobs=outputs.logprobs,
        old_logprobs=old_logprobs,
        start_logprobs=start_logprobs,
        rollout_logprobs=rows.rollout_logprobs,
        advantages=loss_terms.token_advantages(
            constants.advantages, rows, old_logprobs, parts.teacher_weight
        ),
        completion_mask=rows.completion_mask,
        completion_index=rows.completion_index,
        num_completions=len(constants.advantages),
        **constants.dual._asdict(),
    )
    return (
        outputs,
        loss_terms.signals_of(parts.settings, parts.remedies, tokens, constants.weights),
        head,
    )
