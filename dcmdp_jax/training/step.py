"""The compiled training step, Algorithm 1: (state, batch) -> (state, metrics, tokens)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from dcmdp_jax.algorithm import distribution, losses
from dcmdp_jax.algorithm.advantages import group_advantages
from dcmdp_jax.algorithm.masked import masked_sum
from dcmdp_jax.algorithm.remedies import Statistics, Tokens
from dcmdp_jax.algorithm.stats import Mean, Sum
from dcmdp_jax.config.algorithm import AlgorithmSettings, Remedies
from dcmdp_jax.data.episode import OLD_TOP_LOGPROBS, TOP_IDS, TOP_LOGPROBS
from dcmdp_jax.models import moe, products
from dcmdp_jax.models.decoder import platform_of
from dcmdp_jax.models.lora import Policy, make_policy
from dcmdp_jax.models.row_logprobs import RowLogprobs, RowOutputs, without_replay
from dcmdp_jax.parallel.backend import compiler_options
from dcmdp_jax.parallel.sharding import replicated
from dcmdp_jax.training import objective
from dcmdp_jax.training.accumulate import accumulate
from dcmdp_jax.training.objective import Metrics
from dcmdp_jax.training.optimizer import apply_update
from dcmdp_jax.training.rescore import (
    OLD_LOGPROBS,
    START_LOGPROBS,
    START_TOP_LOGPROBS,
    lags,
    with_logprobs,
)
from dcmdp_jax.training.state import update_dual
from dcmdp_jax.training.step_metrics import (
    RecordedTokens,
    TokenValues,
    Updates,
    recorded_tokens,
    step_metrics,
    token_values,
)
from dcmdp_jax.types import Array, Batch, DualState, Params, Rows, TrainState

RECOMPUTE = "start_logprobs"
"""Name scope of the pass that computes p^Train before the updates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSetup:
    """What a step is made of.

    Attributes:
        row_logprobs: result of `make_row_logprobs` for this mesh.
        compute_dtype: the dtype that it computes in.
        settings: the method and its constants.
        max_completion_tokens: sampling limit, for the fixed-length normalizer.
        optimizer, schedule: see `training/optimizer.py`; the schedule is only for the record.
        mesh: the devices; None for one.
        always_recompute: take p^Train from a pass without gradient for the first mini-batch too, as
            `make_rescore` does: a differentiated pass is fused differently and differs in the last
            bits.
        record_tokens: also return the tokens of `RecordedTokens`.
        policy: (trained, frozen parameters) -> those of the forward pass; see `make_policy`.
        token_rewards: what the advantages of single tokens have beside their completion's.
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
    policy: Policy = make_policy(None)
    token_rewards: tuple[objective.TokenReward, ...] = ()

    def loss_weights(
        self, batch: Batch, dropped_tokens: Array | None = None
    ) -> tuple[Array, Array]:
        """The weight of each completion in the loss, [N], and the divisor of the loss's sum."""
        return losses.aggregation_weights(
            batch.completion_lengths,
            objective.loss_mask(self.settings, batch),
            mode=self.settings.aggregation,
            max_completion_tokens=self.max_completion_tokens,
            dropped_tokens=dropped_tokens,
        )

    @functools.cached_property
    def remedies(self) -> Remedies:
        """The functions that the settings name."""
        return self.settings.remedies()

    @functools.cached_property
    def terms(self) -> tuple[objective.Term, ...]:
        """The terms of the loss."""
        return objective.terms_of(self.settings)


class _Constants(NamedTuple):
    """Constants of an update, the same for every micro-batch; no gradient reaches them.

    Attributes:
        advantages, weights: [N] float32, of each completion.
        unpenalized: [N] float32, advantages without a penalty inside the reward.
        dual: lambda_k and c.
        starts_step: [] bool, the update starts from the weights at the start of the step.
        loss_scale: [] float32 or None, factor of the loss and of its gradient.
        frozen: the reference policy of the KL term, the base of the adapters; None without both.
        terms: constants of the further terms of the loss; None for the surrogate alone.
    """

    advantages: Array
    weights: Array
    unpenalized: Array
    dual: DualState
    starts_step: Array
    loss_scale: Array | None
    frozen: Params | None
    terms: objective.TermConstants | None = None


_Inputs = tuple[Params, _Constants]


class _MiniBatch(NamedTuple):
    """What an update is made from.

    Attributes:
        batch: with p^Train at the start of the step unless this update's own pass gives it.
        rewards: [N] float32, less the punishment of long completions.
        penalized_rewards: the same less the penalty for the discrepancy; None unless `level` is
            "reward".
        starts_step: [] bool, the update starts from the weights at the start of the step.
    """

    batch: Batch
    rewards: Array
    penalized_rewards: Array | None
    starts_step: Array


class _Sums(NamedTuple):
    """Sums over the tokens of a mini-batch.

    Attributes:
        totals: the terms of the loss by metric, before coefficient and scale.
        dropped_tokens: [N] int32, tokens of each completion that a correction leaves out of the
            loss.
        router: `moe.router_sums`.
        gradient, loss: with every term, times the loss scale; to be divided by `_divisor`. None
            until the gradient is taken.
    """

    totals: dict[str, Array]
    dropped_tokens: Array
    router: moe.Aux
    gradient: Params | None = None
    loss: Array | None = None


StepResult = tuple[TrainState, Metrics, RecordedTokens]


def jit_step(
    step: Callable[..., StepResult], setup: StepSetup, shardings: TrainState | None = None
) -> Callable[[TrainState, Batch, Params | None], StepResult]:
    """Jit `train_step` for a setup; the state is donated.

    Args:
        step: `train_step`, or a function like it.
        setup: its first argument.
        shardings: the state's, in and out, for one cache entry; None on one device.
    """
    out_shardings = None
    if shardings is not None:
        # All but the state is replicated, so that each process of several can read it.
        everywhere = replicated(setup.mesh)
        out_shardings = (shardings, everywhere, everywhere)
    return jax.jit(
        functools.partial(step, setup),
        donate_argnums=0,
        compiler_options=compiler_options(platform_of(setup.mesh)),
        out_shardings=out_shardings,
    )


def train_step(
    setup: StepSetup,
    state: TrainState,
    batch: Batch,
    frozen: Params | None,
) -> StepResult:
    """Do the optimizer updates of one step and update the multiplier (Algorithm 1).

    An update whose gradient norm, loss or advantages are not finite leaves parameters and optimizer
    as they were and is counted in `optimizer/skipped_updates` and `TrainState.skipped_in_row`. In
    the norm a NaN advantage would not show where the ratio is at its clamp: the gradient there is
    0. The dual update of that step still happens, unless the discrepancy that c bounds is itself
    not finite.

    Args:
        setup: the method, the model and the optimizer.
        state: parameters, optimizer, multiplier.
        batch: the mini-batches of the step.
        frozen: base of the adapters or reference policy; None without both.

    Returns:
        The state after it; metrics, [] float32, named as in observe/metric_names.py; and the tokens
        that are recorded.
    """
    with products.products_in(setup.compute_dtype):
        settings = setup.settings
        with jax.named_scope(RECOMPUTE):
            batch = _recompute(setup, setup.policy(state.params, frozen), batch)

        rewards = objective.punished_rewards(settings, batch, setup.max_completion_tokens)
        penalized_rewards = objective.penalized_rewards(
            settings, setup.remedies, state.dual, rewards, batch.rows
        )
        mini_batches = _MiniBatch(
            batch=batch,
            rewards=rewards,
            penalized_rewards=penalized_rewards,
            starts_step=jnp.arange(len(rewards)) == 0,
        )
        next_state, updates = lax.scan(
            functools.partial(_update, setup, frozen), state, mini_batches
        )

        metrics = step_metrics(settings, setup.schedule, state, next_state, batch, updates)
        bounded = metrics[settings.bounded_metric]
        metrics["dual/violation"] = bounded - state.dual.tolerance
        next_dual = update_dual(settings, state.dual, state.step, bounded)
        next_state = next_state._replace(step=state.step + 1, dual=next_dual)
        return next_state, metrics, recorded_tokens(batch, updates, every_token=setup.record_tokens)


def _recompute(setup: StepSetup, params: Params, batch: Batch) -> Batch:
    """p^Train of the mini-batches whose own update can't give it, by a pass before the updates.

    The first mini-batch: its update starts at `params`, so its own forward pass gives p^Train. It
    needs a pass only with `always_recompute`, or for a penalty inside the reward of rows that do
    not lag.

    The others: always, but with ratio_denominator="bypass" only for lagged rows, whose staleness is
    measured, and for rewards of tokens, which compare with the policy that sampled.

    So with a single mini-batch the method costs no further pass, as GRPO.
    """
    settings = setup.settings
    lagging = lags(batch.rows[0])
    penalty_needs_pass = settings.level == "reward" and not lagging
    first_needs_pass = setup.always_recompute or penalty_needs_pass
    others_need_pass = (
        settings.ratio_denominator != "bypass" or lagging or bool(setup.token_rewards)
    )
    micro_batches = batch.micro_batches
    if not first_needs_pass:
        if len(batch.rewards) == 1 or not others_need_pass:
            return batch
        # Of the first mini-batch, run none of its micro-batches.
        micro_batches = jnp.asarray(micro_batches).at[0].set(0)

    rescored_batch = with_logprobs(
        params,
        batch._replace(micro_batches=micro_batches),
        setup.row_logprobs,
        mesh=setup.mesh,
        names=(START_LOGPROBS, START_TOP_LOGPROBS),
    )
    return rescored_batch._replace(micro_batches=batch.micro_batches)


def _update(
    setup: StepSetup,
    frozen: Params | None,
    state: TrainState,
    mini_batch: _MiniBatch,
) -> tuple[TrainState, Updates]:
    """One optimizer update, by the gradient of a mini-batch (Eq. 9, 10)."""
    batch = mini_batch.batch
    constants = _constants(setup, frozen, state, mini_batch)
    (total, statistics), tokens = accumulate(
        functools.partial(_gradient, setup),
        (state.params, constants),
        batch.rows,
        batch.micro_batches,
        mesh=setup.mesh,
    )
    sums = total.value()

    divisor = _divisor(setup, constants, batch, sums.dropped_tokens)
    advantages_in_loss = jnp.where(constants.weights > 0, constants.advantages, 0.0)
    finite = jnp.isfinite(sums.loss) & jnp.all(jnp.isfinite(advantages_in_loss))
    state, grad_norm, updated = apply_update(
        setup.optimizer,
        state,
        sums.gradient,
        divisor=divisor,
        finite=finite,
    )

    values = {"policy/loss": Mean(sums.loss, divisor).value(), "optimizer/grad_norm": grad_norm}
    if constants.terms is not None:
        values |= objective.term_metrics(setup.terms, sums.totals, constants.terms)
    # Over a step these are means of the updates that were made.
    statistics |= {name: masked_sum(value, updated) for name, value in values.items()}
    statistics["optimizer/skipped_updates"] = Sum((~updated).astype(jnp.int32))
    updates = Updates(statistics, sums.router, tokens=tokens, advantages=constants.advantages)
    return state, updates


def _constants(
    setup: StepSetup,
    frozen: Params | None,
    state: TrainState,
    mini_batch: _MiniBatch,
) -> _Constants:
    """The constants of an update: advantages and weights of the completions, and of the terms."""
    batch = mini_batch.batch
    unpenalized_advantages = _advantages(setup.settings, batch, mini_batch.rewards)
    advantages = unpenalized_advantages
    if mini_batch.penalized_rewards is not None:
        advantages = _advantages(setup.settings, batch, mini_batch.penalized_rewards)
    weights, _ = setup.loss_weights(batch)
    loss_scale = None
    if state.loss_scale is not None:
        loss_scale = state.loss_scale.scale
    without_terms = _Constants(
        advantages=advantages,
        weights=weights,
        unpenalized=unpenalized_advantages,
        dual=state.dual,
        starts_step=mini_batch.starts_step,
        loss_scale=loss_scale,
        frozen=frozen,
    )
    terms = _term_constants(setup, (state.params, without_terms), batch)
    return without_terms._replace(terms=terms)


def _divisor(
    setup: StepSetup,
    constants: _Constants,
    batch: Batch,
    dropped_tokens: Array,
) -> Array:
    """What the summed gradient is divided by: W, times the loss scale."""
    if constants.terms is None:
        _, divisor = setup.loss_weights(batch, dropped_tokens)
    else:
        divisor = constants.terms.divisor
    if constants.loss_scale is not None:
        divisor *= constants.loss_scale
    return divisor


def _advantages(settings: AlgorithmSettings, batch: Batch, rewards: Array) -> Array:
    """The advantages of a mini-batch, [N], by its groups."""
    return group_advantages(
        rewards,
        batch.group_ids,
        batch.valid,
        epsilon=settings.std_epsilon,
        normalize_std=settings.normalize_std,
    )


def _term_constants(
    setup: StepSetup, inputs: _Inputs, batch: Batch
) -> objective.TermConstants | None:
    """The constants of the further terms of the loss; None where the loss is the surrogate alone.

    A pass of its own sums what the terms need of the whole mini-batch, and counts what corrections
    drop. With both fixed before the gradient, the loss is linear in the sums of micro-batches and
    devices. The constants in `inputs` are without terms.
    """
    if all(term.metric == objective.SURROGATE for term in setup.terms):
        return None
    summed_terms = [term for term in setup.terms if term.mini_batch_sum is not None]

    def sum_rows(inputs: _Inputs, rows: Rows) -> tuple[tuple[dict[str, Sum], Sum], tuple[()]]:
        loss_inputs = _forward(setup, *inputs, rows)
        sums = {term.metric: Sum(term.mini_batch_sum(loss_inputs)) for term in summed_terms}
        return (sums, Sum(loss_inputs.signals.dropped_tokens)), ()

    mini_batch_sums = {}
    _, planned = setup.loss_weights(batch)
    remaining = planned
    if summed_terms or setup.settings.drops_tokens:
        (sums, dropped_tokens), _ = accumulate(
            sum_rows, inputs, batch.rows, batch.micro_batches, mesh=setup.mesh
        )
        mini_batch_sums = {metric: total.value() for metric, total in sums.items()}
        _, remaining = setup.loss_weights(batch, dropped_tokens.value())
    return objective.TermConstants(
        divisor=jnp.where(remaining > 0, remaining, 1.0),
        planned_weight=planned,
        mini_batch_sums=mini_batch_sums,
    )


def _gradient(
    setup: StepSetup, inputs: _Inputs, rows: Rows
) -> tuple[tuple[Sum, Statistics], TokenValues]:
    """The sums and statistics of a micro-batch, and the values of its tokens."""
    differentiated = jax.value_and_grad(functools.partial(_objective, setup), has_aux=True)
    (loss, (sums, statistics, tokens)), gradient = differentiated(*inputs, rows)
    return (Sum(sums._replace(gradient=gradient, loss=loss)), statistics), tokens


def _objective(
    setup: StepSetup,
    params: Params,
    constants: _Constants,
    rows: Rows,
) -> tuple[Array, tuple[_Sums, Statistics, TokenValues]]:
    """The summed loss of a micro-batch, to be divided by the weight of its mini-batch (Eq. 9-10).

    Times the loss scale, if there is one. The other fields of `_Sums`, the statistics and the token
    values are returned beside it.
    """
    inputs = _forward(setup, params, constants, rows)
    loss, totals, statistics = objective.sum_of_terms(setup.terms, inputs, constants.terms)
    if constants.loss_scale is not None:
        loss *= constants.loss_scale
    sums = _Sums(
        totals=totals,
        dropped_tokens=inputs.signals.dropped_tokens,
        router=inputs.outputs.router,
    )
    statistics |= _statistics(setup, constants, inputs)
    return loss, (sums, statistics, token_values(inputs, every_token=setup.record_tokens))


def _statistics(
    setup: StepSetup, constants: _Constants, inputs: objective.LossInputs
) -> Statistics:
    """The statistics of a micro-batch besides those of the terms."""
    rows = inputs.rows
    signals = inputs.signals
    unpenalized = objective.token_advantages(
        constants.unpenalized, rows, signals.tokens.old_logprobs, setup.token_rewards
    )
    entropy = lax.stop_gradient(inputs.outputs.entropy)
    statistics = dict(signals.statistics)
    statistics |= objective.head_statistics(inputs)
    statistics |= objective.token_reward_statistics(inputs, setup.token_rewards)
    statistics["policy/entropy"] = masked_sum(entropy, rows.completion_mask)
    statistics["discrepancy/mean"] = signals.mean_discrepancy
    statistics["dual/penalty_share"] = objective.penalty_share_of(inputs, unpenalized)
    return statistics


def _forward(
    setup: StepSetup,
    params: Params,
    constants: _Constants,
    rows: Rows,
) -> objective.LossInputs:
    """The forward pass of a micro-batch, and what the terms of the loss are computed from."""
    columns = rows.columns
    outputs = setup.row_logprobs(setup.policy(params, constants.frozen), rows)
    start_logprobs = _at_start(setup, constants, outputs.logprobs, rows, START_LOGPROBS)
    old_logprobs = columns.get(OLD_LOGPROBS, start_logprobs)

    tokens = Tokens(
        train_logprobs=outputs.logprobs,
        old_logprobs=old_logprobs,
        start_logprobs=start_logprobs,
        rollout_logprobs=rows.rollout_logprobs,
        advantages=objective.token_advantages(
            constants.advantages, rows, old_logprobs, setup.token_rewards
        ),
        completion_mask=rows.completion_mask,
        completion_index=rows.completion_index,
        num_completions=len(constants.advantages),
        multiplier=constants.dual.multiplier,
        tolerance=constants.dual.tolerance,
    )
    signals = objective.signals_of(setup.settings, setup.remedies, tokens, constants.weights)

    return objective.LossInputs(
        settings=setup.settings,
        remedies=setup.remedies,
        # The signals are constants: the gradient flows through these.
        tokens=signals.tokens._replace(train_logprobs=outputs.logprobs),
        weights=objective.loss_weights(setup.settings, signals),
        signals=signals,
        head=_head(setup, constants, outputs, rows),
        rows=rows,
        outputs=outputs,
        reference=lambda: setup.row_logprobs(constants.frozen, without_replay(rows)),
    )


def _head(
    setup: StepSetup,
    constants: _Constants,
    outputs: RowOutputs,
    rows: Rows,
) -> distribution.Head | None:
    """The engine's top-k tokens; None where the rows have none."""
    now = outputs.top_logprobs
    if now is None:
        return None
    start = lax.stop_gradient(_at_start(setup, constants, now, rows, START_TOP_LOGPROBS))
    return distribution.Head(
        rows.columns[TOP_IDS],
        rollout_logprobs=rows.columns[TOP_LOGPROBS],
        train_logprobs=now,
        old_logprobs=rows.columns.get(OLD_TOP_LOGPROBS, start),
        start_logprobs=start,
    )


def _at_start(
    setup: StepSetup,
    constants: _Constants,
    now: Array,
    rows: Rows,
    name: str,
) -> Array:
    """Log-probs at the start of the step; no column `name` means that they are those of now."""
    columns = rows.columns
    if name not in columns:
        return now
    if setup.always_recompute:
        return columns[name]
    return jnp.where(constants.starts_step, now, columns[name])
