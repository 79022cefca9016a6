"""Supervised start: next-token training on worked solutions, for a model without a policy yet."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dcmdp_jax.algorithm import masked, stats
from dcmdp_jax.algorithm.dual import dual_init
from dcmdp_jax.config.settings import OptimizerSettings, WarmupSettings
from dcmdp_jax.data import packing, prompts
from dcmdp_jax.data.mixtures import prompt_order
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.row_logprobs import RowLogprobs
from dcmdp_jax.parallel.backend import MAX_IN_FLIGHT_PROGRAMS, compiler_options
from dcmdp_jax.parallel.mesh import row_shards
from dcmdp_jax.parallel.sharding import state_shardings
from dcmdp_jax.training.accumulate import accumulate
from dcmdp_jax.training.optimizer import apply_update, make_optimizer, make_schedule
from dcmdp_jax.training.state import new_state
from dcmdp_jax.types import Array, Params, Rows, TrainState

_LOSS_SCALE = 2.0**10
"""Factor of the loss while its gradient is taken, against underflow in float16; always exact."""


def lay_out(examples: prompts.EncodedPrompts, length_multiple: int) -> Rows:
    """Conversations with their targets, one a row; rows have a multiple of this length."""
    ids = examples.token_ids
    length = -(-max(map(len, ids)) // length_multiple) * length_multiple
    # Each conversation is laid out as a prompt; the mask is set below, for targets may be anywhere.
    rows = packing.one_a_row(ids, [token_ids[:0] for token_ids in ids], length)
    for mask, targets in zip(rows.completion_mask, examples.targets, strict=True):
        mask[: len(targets)] = targets
    return rows


def warm_up(
    params: Params,
    axes: Params,
    rows: Rows,
    row_logprobs: RowLogprobs,
    settings: WarmupSettings,
    *,
    seed: int,
    mesh: Mesh,
    on_step: Callable[[int, float], None],
) -> Params:
    """Minimize the mean negative log-likelihood of the targets.

    AdamW (beta2 0.98, gradient norm 1) with a linear rise over 5% and a cosine decay to 0. Batches
    are drawn without replacement within an epoch, as a function of the seed: the same call gives
    the same parameters. A broken update is skipped.

    Args:
        params: initial parameters; donated.
        axes: their logical axes, see `params.logical_axes`.
        rows: result of `lay_out`.
        row_logprobs: the training stack's forward pass, at temperature 1, for this mesh.
        settings: steps, batch size, peak learning rate.
        seed: random seed of the order of examples.
        mesh: the devices. A batch is a multiple of the number of devices that rows are split over.
        on_step: called with (finished steps, loss in nats per token) every 50 steps and at the end;
            may raise to stop.

    Returns:
        Trained parameters.

    Raises:
        ValueError: if loss or gradient are not finite at such a step, or there are fewer examples
            in a batch than rows are split over.
    """
    shards = row_shards(mesh)
    count = len(rows.input_ids)
    size = min(settings.batch_size, count) // shards * shards
    if not size:
        raise UserError(
            f"config.warmup.batch_size: got {settings.batch_size}, with {count} worked solutions; "
            f"the mesh splits rows over {shards} devices, so both must be at least that"
        )
    adamw = OptimizerSettings(
        learning_rate=settings.learning_rate,
        schedule="cosine",
        schedule_warmup_steps=max(settings.steps // 20, 1),
        beta2=0.98,
        epsilon=1e-8,
    )
    optimizer = make_optimizer(adamw, make_schedule(adamw, updates=settings.steps))
    begin = functools.partial(new_state, optimizer=optimizer, dual=dual_init(0.0, tolerance=0.0))
    shardings = state_shardings(jax.eval_shape(begin, params), params, axes, mesh)
    state = jax.jit(begin, donate_argnums=0, out_shardings=shardings)(params)
    step = jax.jit(
        functools.partial(_step, row_logprobs, optimizer, mesh),
        donate_argnums=0,
        # With the shardings of the input, or the second step would be another program.
        out_shardings=(shardings, None),
        compiler_options=compiler_options(jax.default_backend()),
    )

    for number in range(1, settings.steps + 1):
        epoch, batch_number = divmod(number - 1, count // size)
        first = epoch * count + batch_number * size
        order = prompt_order(count, seed=seed, first=first, count=size)
        batch = jax.tree.map(lambda x: x[order], rows)  # noqa: B023 - used at once
        state, loss = step(state, batch)
        if number % MAX_IN_FLIGHT_PROGRAMS == 0:
            jax.block_until_ready(loss)
        if number % 50 == 0 or number == settings.steps:
            nats = float(loss)
            if not np.isfinite(nats):
                raise UserError(
                    f"warmup: loss is {nats} at step {number}; lower warmup.learning_rate"
                )
            on_step(number, nats)
    return state.params


def _step(
    row_logprobs: RowLogprobs,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    state: TrainState,
    rows: Rows,
) -> tuple[TrainState, Array]:
    """The state after one update, and the loss; NaN if the update was skipped."""

    def gradient(
        shared: tuple[Params, Array], rows: Rows
    ) -> tuple[dict[str, stats.Sum], tuple[()]]:
        params, tokens = shared

        def loss(params: Params) -> Array:
            logprobs, *_ = row_logprobs(params, rows)
            return -masked.masked_sum(logprobs, rows.completion_mask).total / tokens * _LOSS_SCALE

        value, grads = jax.value_and_grad(loss)(params)
        return {"loss": stats.Sum(value), "gradient": stats.Sum(grads)}, ()

    shared = state.params, jnp.sum(rows.completion_mask)
    stacked = (jax.tree.map(lambda x: x[None], rows),)
    sums, _ = accumulate(gradient, shared, stacked, jnp.ones(1, jnp.int32), mesh=mesh)
    loss = sums["loss"].value() / _LOSS_SCALE
    state, _, updated = apply_update(
        optimizer,
        state,
        sums["gradient"].value(),
        divisor=jnp.float32(_LOSS_SCALE),
        finite=jnp.isfinite(loss),
    )
    return state, jnp.where(updated, loss, jnp.nan)
