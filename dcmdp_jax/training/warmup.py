"""Supervised start: next-token training on worked solutions, for a model without a policy yet."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dcmdp_jax.algorithm import masked, stats
from dcmdp_jax.config.settings import WarmupSettings
from dcmdp_jax.data import packing, prompts
from dcmdp_jax.data.mixtures import prompt_order
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.row_logprobs import RowLogprobs
from dcmdp_jax.parallel.backend import MAX_IN_FLIGHT_PROGRAMS, compiler_options
from dcmdp_jax.parallel.mesh import row_shards
from dcmdp_jax.parallel.sharding import replicated
from dcmdp_jax.training.accumulate import accumulate
from dcmdp_jax.types import Array, Params, Rows

_LOSS_SCALE = 2.0**10
"""Factor of the loss while its gradient is taken, against underflow in float16; always exact."""


def warm_up(
    params: Params,
    examples: prompts.EncodedPrompts,
    row_logprobs: RowLogprobs,
    settings: WarmupSettings,
    *,
    seed: int,
    mesh: Mesh | None,
    length_multiple: int,
    on_step: Callable[[int, float], None],
) -> Params:
    """Minimize the mean negative log-likelihood of the targets.

    AdamW (b2 0.98, gradient norm 1) with a linear rise over 5% and a cosine decay to 0. Batches are
    drawn without replacement within an epoch, as a function of the seed: the same call gives the
    same parameters.

    Args:
        params: initial parameters; donated.
        examples: conversations with their targets.
        row_logprobs: the training stack's forward pass, at temperature 1, for this mesh.
        settings: steps, batch size, peak learning rate.
        seed: random seed of the order of examples.
        mesh: the devices; None for one. A batch is a multiple of the number of devices that rows
            are split over.
        length_multiple: rows have a multiple of this length, for the kernel.
        on_step: called with (finished steps, loss in nats per token) every 50 steps and at the end;
            may raise to stop.

    Returns:
        Trained parameters.

    Raises:
        ValueError: if a loss is not finite, or there are fewer examples in a batch than rows are
            split over.
    """
    shards = 1 if mesh is None else row_shards(mesh)
    count = len(examples.token_ids)
    size = min(settings.batch_size, count) // shards * shards
    if not size:
        raise UserError(
            f"config.warmup.batch_size: got {settings.batch_size}, with {count} worked solutions; "
            f"the mesh splits rows over {shards} devices, so both must be at least that"
        )
    ids = examples.token_ids
    length = -(-max(map(len, ids)) // length_multiple) * length_multiple
    # Each conversation is laid out as a prompt; the mask is set below, for targets may be anywhere.
    no_completions = [token_ids[:0] for token_ids in ids]
    rows = packing.one_a_row(ids, no_completions, length)
    for mask, targets in zip(rows.completion_mask, examples.targets, strict=True):
        mask[: len(targets)] = targets

    rise = max(settings.steps // 20, 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        settings.learning_rate,
        rise,
        max(settings.steps, rise + 1),
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.0)
    )
    param_shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    if mesh is None:
        counter_sharding = jax.tree.leaves(param_shardings)[0]
    else:
        counter_sharding = replicated(mesh)
    # Moments are sharded like their parameters.
    opt_shardings = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        param_shardings,
        transform_non_params=lambda _: counter_sharding,
    )
    opt_state = jax.jit(optimizer.init, out_shardings=opt_shardings)(params)
    step = jax.jit(
        functools.partial(_step, row_logprobs, optimizer, mesh),
        donate_argnums=(0, 1),
        # With the shardings of the input, or the second step would be another program.
        out_shardings=(param_shardings, opt_shardings, None),
        compiler_options=compiler_options(jax.default_backend()),
    )

    for number in range(1, settings.steps + 1):
        epoch, batch_number = divmod(number - 1, count // size)
        first = epoch * count + batch_number * size
        order = prompt_order(count, seed=seed, first=first, count=size)
        batch = jax.tree.map(lambda x: x[order], rows)  # noqa: B023 - used at once
        params, opt_state, loss = step(params, opt_state, batch)
        if number % MAX_IN_FLIGHT_PROGRAMS == 0:
            jax.block_until_ready(loss)
        if number % 50 == 0 or number == settings.steps:
            nats = float(loss)
            if not np.isfinite(nats):
                raise UserError(
                    f"warmup: loss is {nats} at step {number}; lower warmup.learning_rate"
                )
            on_step(number, nats)
    return params


def _step(
    row_logprobs: RowLogprobs,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    params: Params,
    opt_state: tuple,
    rows: Rows,
) -> tuple[Params, optax.OptState, Array]:
    def gradient(
        shared: tuple[Params, Array], rows: Rows
    ) -> tuple[dict[str, stats.Sum], tuple[()]]:
        params, tokens = shared

        def loss(params: Params) -> Array:
            logprobs, *_ = row_logprobs(params, rows)
            return -masked.masked_sum(logprobs, rows.completion_mask).total / tokens * _LOSS_SCALE

        value, grads = jax.value_and_grad(loss)(params)
        return {"loss": stats.Sum(value), "gradient": stats.Sum(grads)}, ()

    shared = params, jnp.sum(rows.completion_mask)
    stacked = (jax.tree.map(lambda x: x[None], rows),)
    sums, _ = accumulate(gradient, shared, stacked, jnp.ones(1, jnp.int32), mesh=mesh)
    value = sums["loss"].value() / _LOSS_SCALE
    grads = jax.tree.map(
        lambda g, p: (g / _LOSS_SCALE).astype(p.dtype), sums["gradient"].value(), params
    )
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value
