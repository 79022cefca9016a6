"""Embedding, logits and sampling, where a tensor group may have split the vocabulary; all inside a `shard_map`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dcmdp_jax.engines.local.layout import TENSOR, Program, convert_late
from dcmdp_jax.engines.local.sampler import choose_tokens
from dcmdp_jax.models.decoder import output_kernel
from dcmdp_jax.models.quantize import QuantizedKernel
from dcmdp_jax.types import Params


def own_tokens(tokens: jax.Array, program: Program) -> tuple[jax.Array, jax.Array | bool]:
    """Token ids counted from the first of the device's part of the vocabulary, and which of them are in it.

    Others are clipped to the part. True: each device has all of the vocabulary.
    """
    if not program.splits_vocab:
        return tokens, True
    size = program.config.vocab_size // program.tensor
    own = tokens - size * jax.lax.axis_index(TENSOR)
    return jnp.clip(own, 0, size - 1), (own >= 0) & (own < size)


def embed(weights: Params, tokens: jax.Array, program: Program) -> jax.Array:
    """Look up embeddings: [..., D] for `tokens` [...]."""
    tokens, ours = own_tokens(tokens, program)
    tied = "embedding" not in weights
    x = jnp.moveaxis(weights["output"][:, tokens], 0, -1) if tied else weights["embedding"][tokens]
    return x if ours is True else jax.lax.psum(jnp.where(ours[..., None], x, 0), TENSOR)


def logits(weights: Params, hidden: jax.Array) -> jax.Array:
    """Compute logits of the device's part of the vocabulary, [..., V] float32."""
    kernel = output_kernel(weights)
    values = kernel.values if isinstance(kernel, QuantizedKernel) else kernel
    logits = jnp.matmul(hidden, values.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return logits * kernel.scale if isinstance(kernel, QuantizedKernel) else logits


def sample_tokens(
    weights: Params,
    hidden: jax.Array,
    words: jax.Array,
    inverse_temperature: jax.Array,
    top_p: jax.Array,
    mode: str,
    program: Program,
) -> tuple[jax.Array, jax.Array]:
    """`choose_tokens` for the device's rows [R, D]. Where the vocabulary is split, devices of a tensor group take an
    equal share of their rows each, with all of the vocabulary."""
    output, hidden = convert_late({"output": output_kernel(weights)}, hidden, program)
    values = logits(output, hidden)
    if not program.splits_vocab:
        return choose_tokens(values, words, inverse_temperature, top_p, mode)
    # [R, V / ways] -> [R / ways, V]
    values = jax.lax.all_to_all(values, TENSOR, split_axis=0, concat_axis=1, tiled=True)
    share = values.shape[0]
    words = jax.lax.dynamic_slice_in_dim(words, share * jax.lax.axis_index(TENSOR), share)
    chosen = choose_tokens(values, words, inverse_temperature, top_p, mode)
    return tuple(jax.lax.all_gather(x, TENSOR, axis=0, tiled=True) for x in chosen)
