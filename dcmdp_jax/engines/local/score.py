"""The compiled program of the embedded engine that scores given completions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.local.decode import forward_rows
from dcmdp_jax.engines.local.layout import ROWS, TENSOR, Program, weight_specs
from dcmdp_jax.engines.local.vocabulary import logits, own_tokens
from dcmdp_jax.models.products import in_compute_dtype
from dcmdp_jax.types import Params

_SCORE_CHUNK = 1024


@functools.partial(jax.jit, static_argnames=("program",))
@in_compute_dtype
def score(
    weights: Params, tokens: jax.Array, lengths: jax.Array, inverse_temperature: jax.Array, *, program: Program
) -> jax.Array:
    """Compute teacher-forced log-probs of rows under the engine's weights, including cache rounding.

    Args:
        weights: the engine's tree.
        tokens: [R, L] int32, right-padded.
        lengths: [R] int32.
        inverse_temperature: [] float32.
        program: static arguments.

    Returns:
        [R, L - 1] float32 nats, entry t for token t + 1. Logits are in memory for about 1,024 tokens of a
        device at a time.
    """
    local = functools.partial(_score_local, program=program)
    specs = weight_specs(weights, program.config, program.mesh)
    return jax.shard_map(local, mesh=program.mesh, in_specs=(specs, ROWS, ROWS, P()), out_specs=ROWS, check_vma=False)(
        weights, tokens, lengths, inverse_temperature
    )


def _score_local(
    weights: Params, tokens: jax.Array, lengths: jax.Array, inverse_temperature: jax.Array, *, program: Program
) -> jax.Array:
    """Run `score` on one device, with its share of the rows."""
    weights = program.own_weights(weights)
    hidden, _, _ = forward_rows(weights, tokens, lengths, program)
    # The last position is computed too, against the first token, and dropped: rows without it have an odd length, and
    # the compiler for TPUs takes minutes over their reshape.
    targets, ours = own_tokens(jnp.roll(tokens, -1, axis=1).reshape(-1), program)
    previous = hidden.reshape(targets.size, -1)
    chunks = -(-targets.size // _SCORE_CHUNK)
    padding = chunks * -(-targets.size // chunks) - targets.size

    def chunk(part: tuple[jax.Array, ...]) -> jax.Array:
        scaled = logits(weights, part[0]) * inverse_temperature
        chosen = jnp.take_along_axis(scaled, part[1][:, None], axis=-1)[:, 0]
        if not program.splits_vocab:
            return chosen - jax.nn.logsumexp(scaled, axis=-1)
        largest = jax.lax.pmax(jnp.max(scaled, axis=-1), TENSOR)
        mass = jnp.sum(jnp.exp(scaled - largest[:, None]), axis=-1)
        chosen, mass = jax.lax.psum((jnp.where(part[2], chosen, 0.0), mass), TENSOR)
        return chosen - largest - jnp.log(mass)

    parts = jnp.pad(previous, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
    if program.splits_vocab:
        parts = (*parts, jnp.pad(ours, (0, padding)))
    logprobs = jax.lax.map(chunk, jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), parts))
    return logprobs.reshape(-1)[: targets.size].reshape(tokens.shape)[:, :-1]
