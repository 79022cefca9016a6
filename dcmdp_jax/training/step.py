"""The compiled training step: (TrainState, Batch) -> (TrainState, metrics), Algorithm 1 of the paper.

Recompute p^Train -> discrepancy -> advantages -> penalised advantages with the old multiplier -> one optimizer update
for each mini-batch -> one projected dual-ascent step -> metrics. The first mini-batch's recompute pass is the forward
pass of its update, so with a single one the method costs no more than GRPO.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcmdp_jax.algorithm import losses, masked
from dcmdp_jax.algorithm.advantages import group_advantages, penalized_advantages
from dcmdp_jax.algorithm.discrepancy import discrepancy, token_discrepancy
from dcmdp_jax.algorithm.dual import dual_update, violation
from dcmdp_jax.config import AlgorithmSettings
from dcmdp_jax.models import decoder, logprobs
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.parallel.host import compiler_options
from dcmdp_jax.parallel.sharding import constrain, on_own_rows, splits_rows_alone, sum_over_devices
from dcmdp_jax.training.batch_metrics import Metrics, batch_metrics
from dcmdp_jax.types import Batch, Params, Rows, TrainState, WeightedSum

RowLogprobs = Callable[[Params, Rows], tuple[jax.Array, jax.Array]]
"""(params, rows [R, L]) -> log-probs and entropy of the completion tokens, [R, L]."""


class _Totals(NamedTuple):
    """What a step adds up over its updates."""

    loss: WeightedSum
    entropy: WeightedSum
    clip: losses.ClipStatistics
    grad_norm: WeightedSum
    skipped: jax.Array


def make_row_logprobs(model: ModelConfig, compute: Compute, *, temperature: float, mesh: Mesh | None) -> RowLogprobs:
    """The training stack's forward pass on rows. Every log-prob of training comes from here.

    Args:
        model: the model.
        compute: dtype, rematerialisation, kernel and chunk.
        temperature: the one that completions are sampled at.
        mesh: the run's, or None for one device. Where it splits rows alone the result is for `on_own_rows`: what each
            device computes by itself, padding and prompts left out of the output layer.
    """
    several = mesh is not None and mesh.size > 1 and not splits_rows_alone(mesh)
    pin = {"constrain": constrain(mesh), "mesh": mesh} if several else {}
    token_logprobs = functools.partial(
        logprobs.token_logprobs, temperature=temperature, chunk=compute.logprob_chunk, compact=not several
    )

    def row_logprobs(params: Params, rows: Rows) -> tuple[jax.Array, jax.Array]:
        hidden = decoder.hidden_states(
            params, model, rows.input_ids, rows.position_ids, rows.segment_ids, compute, prompts=rows.prompts, **pin
        )
        return token_logprobs(
            hidden,
            decoder.output_kernel(params),
            rows.input_ids,
            rows.completion_mask,
        )

    return row_logprobs


def _over_micro_batches(
    rows: tuple[Rows, ...], counts: jax.Array, body: Callable[..., Any], carry: Any, *, skip_empty: bool
) -> Any:
    """carry = body(carry, bucket, index, rows [R, L]) for every micro-batch of one mini-batch that holds a row.

    Without `skip_empty` a micro-batch that is the only one there is runs in any case: what is added to a carry of
    zeros then needs neither the zeros nor the addition.
    """
    if not skip_empty and len(rows) == 1 and rows[0].input_ids.shape[0] == 1:
        return body(carry, 0, jnp.int32(0), jax.tree.map(lambda x: x[0], rows[0]))
    for bucket, stacked in enumerate(rows):

        def one(index: jax.Array, carry: Any, bucket: int = bucket, stacked: Rows = stacked) -> Any:
            micro = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stacked)
            return body(carry, bucket, index, micro)

        carry = lax.fori_loop(0, counts[bucket], one, carry)
    return carry


def _empty_logprobs(rows: tuple[Rows, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros(bucket.input_ids.shape, jnp.float32) for bucket in rows)


def _put(buffers: tuple[jax.Array, ...], bucket: int, index: jax.Array, value: jax.Array) -> tuple[jax.Array, ...]:
    return (*buffers[:bucket], buffers[bucket].at[index].set(value), *buffers[bucket + 1 :])


def batch_logprobs(params: Params, batch: Batch, row_logprobs: RowLogprobs, mesh: Mesh | None) -> tuple[jax.Array, ...]:
    """p^Train of the whole batch, no gradient: [M, A, R, L] float32 for each bucket, 0 outside completions."""

    def own_rows(params: Params, rows: tuple[Rows, ...], counts: jax.Array) -> tuple[jax.Array, ...]:
        def mini_batch(_: None, xs: tuple[tuple[Rows, ...], jax.Array]) -> tuple[None, tuple[jax.Array, ...]]:
            rows, counts = xs

            def body(buffers: tuple[jax.Array, ...], bucket: int, index: jax.Array, micro: Rows) -> Any:
                return _put(buffers, bucket, index, row_logprobs(params, micro)[0])

            return None, _over_micro_batches(rows, counts, body, _empty_logprobs(rows), skip_empty=True)

        return lax.scan(mini_batch, None, (rows, counts))[1]

    split = P(None, None, "data")
    computed = on_own_rows(own_rows, mesh, in_specs=(P(), split, P()), out_specs=split)
    return computed(params, batch.rows, batch.micro_batches)


def make_rescore(row_logprobs: RowLogprobs, *, mesh: Mesh | None) -> Callable[[Params, Batch], tuple[Batch, jax.Array]]:
    """Jitted (params, batch) -> batch whose rollout log-probs are the training stack's own, on the step's own rows.

    This is precision "exact": the step computes the same numbers again, so the discrepancy is 0 to the last bit. The
    second result is a diagnostic: the mean |p_train - p_sampler| of the log-probs that were replaced.
    """

    @functools.partial(jax.jit, compiler_options=compiler_options(jax.default_backend()))
    def rescore(params: Params, batch: Batch) -> tuple[Batch, jax.Array]:
        logprobs = batch_logprobs(params, batch, row_logprobs, mesh)
        differences = WeightedSum(jnp.float32(0), jnp.float32(0))
        for bucket, train in zip(batch.rows, logprobs, strict=True):
            delta = token_discrepancy(train, bucket.rollout_logprobs, measure="diff", sided="two")
            differences = masked.add(differences, masked.masked_sum(delta, bucket.completion_mask))
        rows = tuple(b._replace(rollout_logprobs=p) for b, p in zip(batch.rows, logprobs, strict=True))
        return batch._replace(rows=rows), masked.mean(differences)

    return rescore


def make_train_step(
    *,
    row_logprobs: RowLogprobs,
    settings: AlgorithmSettings,
    max_completion_tokens: int,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    mesh: Mesh | None,
    always_recompute: bool = False,
    shardings: TrainState | None = None,
) -> Callable[[TrainState, Batch, Params | None], tuple[TrainState, Metrics]]:
    """Compiles one training step; the state is donated.

    An update whose gradient norm is not finite leaves parameters and optimizer as they were and is counted in
    `optimizer/skipped_updates` and `TrainState.skipped_in_row`. The dual update of that step still happens, unless the
    mean discrepancy is itself not finite.

    Args:
        row_logprobs: from `make_row_logprobs`, for this mesh.
        settings: the method and its constants.
        max_completion_tokens: sampling limit, for the fixed-length normaliser.
        optimizer, schedule: from `optimizer.py`; the schedule only for the record.
        mesh: the devices; None for one.
        always_recompute: take p^Train from a pass of its own for the first mini-batch too, as for all others. A
            differentiated forward pass is fused differently and differs in the last bits; `make_rescore` needs none.
        shardings: the state's, input and output alike, so that the step has one cache entry; None on one device.

    Returns:
        step(state, batch, ref_params) with `ref_params` None unless `kl_coefficient` is above 0. The metrics are []
        float32, named as in observe/names.py, and `completions/discrepancy` [M * N], each completion's own mean.
    """
    step = functools.partial(
        _train_step,
        row_logprobs=row_logprobs,
        settings=settings,
        max_completion_tokens=max_completion_tokens,
        optimizer=optimizer,
        schedule=schedule,
        mesh=mesh,
        always_recompute=always_recompute,
    )
    out = {} if shardings is None else {"out_shardings": (shardings, None)}
    platform = jax.default_backend() if shardings is None else shardings.step.mesh.devices.flat[0].platform
    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options(platform), **out)


def _train_step(
    state: TrainState,
    batch: Batch,
    ref_params: Params | None,
    *,
    row_logprobs: RowLogprobs,
    settings: AlgorithmSettings,
    max_completion_tokens: int,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    mesh: Mesh | None,
    always_recompute: bool,
) -> tuple[TrainState, Metrics]:
    mini_batches, completions = batch.rewards.shape
    multiplier = state.dual.multiplier
    # The first mini-batch is trained at the parameters that p^Train is taken at: its own forward pass gives it.
    first_is_own = not always_recompute
    others = batch._replace(micro_batches=jnp.asarray(batch.micro_batches).at[0].set(0)) if first_is_own else batch
    alone = first_is_own and mini_batches == 1
    recomputed = None if alone else batch_logprobs(state.params, others, row_logprobs, mesh)

    def micro_loss(
        params: Params,
        micro: Rows,
        old: jax.Array | None,
        own: jax.Array,
        advantages: jax.Array,
        weights: jax.Array,
        multiplier: jax.Array,
        ref_params: Params | None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        train, entropy = row_logprobs(params, micro)
        old = lax.stop_gradient(train if old is None else jnp.where(own, train, old))
        mask, index = micro.completion_mask, micro.completion_index
        measured = {"measure": settings.measure, "sided": settings.sided, "level": settings.level}
        delta = discrepancy(old, micro.rollout_logprobs, mask, index, completions, **measured)
        token_advantages = masked.gather_to_tokens(advantages, index)
        penalized = penalized_advantages(
            token_advantages, delta, multiplier, settings.tolerance, method=settings.method
        )
        token_weights = masked.gather_to_tokens(weights, index)
        loss, clip = losses.clipped_surrogate(
            train, old, penalized, mask, token_weights, clip_low=settings.clip_low, clip_high=settings.clip_high
        )
        total = loss.total
        if settings.kl_coefficient:
            reference = lax.stop_gradient(row_logprobs(ref_params, micro)[0])
            kl = losses.reference_kl(train, reference, estimator=settings.kl_estimator, completion_mask=mask)
            total += settings.kl_coefficient * masked.weighted_sum(kl, jnp.where(mask, token_weights, 0.0)).total
        return total, (old, clip, masked.masked_sum(lax.stop_gradient(entropy), mask))

    def gradients(
        params: Params, rows: tuple[Rows, ...], old_logprobs: tuple[jax.Array, ...], counts: jax.Array, *rest: Any
    ) -> tuple[tuple[Any, ...], tuple[jax.Array, ...]]:
        """The gradient, loss, entropy and clipping of a mini-batch, and its p^Train."""

        def body(carry: tuple[Any, ...], bucket: int, index: jax.Array, micro: Rows) -> tuple[Any, ...]:
            (grads, loss, entropy, clip), buffers = carry
            old = None if alone else old_logprobs[bucket][index]
            gradient = jax.value_and_grad(micro_loss, has_aux=True)
            (value, (old, clipped, entropies)), new = gradient(params, micro, old, *rest)
            sums = (
                jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads, new),
                loss + value,
                masked.add(entropy, entropies),
                losses.add_clip_statistics(clip, clipped),
            )
            return sums, _put(buffers, bucket, index, old)

        zero = jnp.zeros((), jnp.float32)
        start = (
            jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params),
            zero,
            WeightedSum(zero, zero),
            losses.empty_clip_statistics(),
        )
        carry = start, _empty_logprobs(rows)
        sums, buffers = _over_micro_batches(rows, counts, body, carry, skip_empty=False)
        return sum_over_devices(sums, mesh), buffers

    split = P(None, "data")
    alike = (P(),) * 6
    gradients = on_own_rows(gradients, mesh, in_specs=(P(), split, split, *alike), out_specs=(P(), split))

    def update(carry: tuple[Any, ...], xs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[jax.Array, ...]]:
        params, opt_state, skipped_in_row, totals = carry
        part, old_logprobs, own = xs
        advantages = group_advantages(
            part.rewards,
            part.group_ids,
            part.valid,
            ddof=settings.std_ddof,
            epsilon=settings.std_epsilon,
            normalize_std=settings.normalize_std,
        )
        weights, total_weight = losses.aggregation_weights(
            part.completion_lengths,
            part.loss_mask,
            mode=settings.aggregation,
            max_completion_tokens=max_completion_tokens,
        )
        # Divided here once: the total is known before the pass, and micro-batches only add.
        weights = weights / jnp.maximum(total_weight, 1.0)

        (grads, loss, entropy, clip), buffers = gradients(
            params, part.rows, old_logprobs, part.micro_batches, own, advantages, weights, multiplier, ref_params
        )
        grad_norm = _norm(grads)
        finite = jnp.isfinite(grad_norm)

        def apply(params: Params, opt_state: Any) -> tuple[Params, Any]:
            cast = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
            updates, new_state = optimizer.update(cast, opt_state, params, grad_norm=grad_norm)
            return optax.apply_updates(params, updates), new_state

        params, opt_state = lax.cond(finite, apply, lambda params, opt_state: (params, opt_state), params, opt_state)
        totals = _Totals(
            loss=masked.add(totals.loss, WeightedSum(loss, jnp.float32(1))),
            entropy=masked.add(totals.entropy, entropy),
            clip=losses.add_clip_statistics(totals.clip, clip),
            grad_norm=masked.add(totals.grad_norm, masked.masked_sum(grad_norm, finite)),
            skipped=totals.skipped + ~finite,
        )
        return (params, opt_state, jnp.where(finite, 0, skipped_in_row + 1), totals), buffers

    zero = jnp.zeros((), jnp.float32)
    nothing = WeightedSum(zero, zero)
    totals = _Totals(nothing, nothing, losses.empty_clip_statistics(), nothing, jnp.zeros((), jnp.int32))
    start = (state.params, state.opt_state, state.skipped_in_row, totals)
    own = first_is_own & (jnp.arange(mini_batches) == 0)
    (params, opt_state, skipped_in_row, totals), old_logprobs = lax.scan(update, start, (batch, recomputed, own))

    metrics, mean_discrepancy = batch_metrics(batch, old_logprobs, settings)
    dual, gap = state.dual, mean_discrepancy - settings.tolerance
    if settings.method == "dc_grpo":
        dual = dual_update(
            dual,
            mean_discrepancy,
            tolerance=settings.tolerance,
            learning_rate=settings.dual_learning_rate,
            minimum=settings.multiplier_min,
            maximum=settings.multiplier_max,
        )
        gap = jnp.where(jnp.isfinite(gap), violation(dual, settings.tolerance), gap)
    metrics |= {f"policy/{name}": value for name, value in losses.clip_metrics(totals.clip).items()}
    metrics |= {
        "policy/loss": masked.mean(totals.loss),
        "policy/entropy": masked.mean(totals.entropy),
        "optimizer/grad_norm": masked.mean(totals.grad_norm),
        "optimizer/learning_rate": jnp.asarray(schedule(jnp.maximum(_applied(opt_state) - 1, 0)), jnp.float32),
        "optimizer/skipped_updates": totals.skipped,
        "optimizer/skipped_in_row": skipped_in_row,
        "dual/multiplier": multiplier,
        "dual/tolerance": jnp.float32(settings.tolerance),
        "dual/violation": gap,
    }
    return TrainState(state.step + 1, params, opt_state, dual, skipped_in_row), metrics


def _norm(grads: Params) -> jax.Array:
    """The Euclidean norm of all leaves together. Dot products: a sum of squares would write the squares first."""

    def squared(leaf: jax.Array) -> jax.Array:
        axes = tuple(range(leaf.ndim))
        return lax.dot_general(leaf, leaf, ((axes, axes), ((), ())))

    return jnp.sqrt(sum(squared(leaf) for leaf in jax.tree.leaves(grads)))


def _applied(opt_state: optax.OptState) -> jax.Array:
    """How many updates the optimizer has made; skipped ones don't count, for its schedule either."""
    return optax.tree.get_all_with_path(opt_state, "count")[0][1]
