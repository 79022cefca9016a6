"""The operators of an embedded engine, each on the training stack's own input to it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.engines.local.cache import load, store
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.local.forward import embed, logits
from dcmdp_jax.engines.local.layout import Program
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.lab.mismatch.evidence import OperatorDifference, in_order
from dcmdp_jax.lab.probe.observed import observed_differences
from dcmdp_jax.models.attention import choose_kernel, row_attention
from dcmdp_jax.models.decoder import Attend, Block, block_of, final_norm, output_kernel
from dcmdp_jax.models.layers import MLP, all_rotary_tables, embedding_scale
from dcmdp_jax.models.products import in_compute_dtype
from dcmdp_jax.types import Params

_ROWS, _TOKENS, _HEAD_TOKENS = 8, 256, 256


def operator_differences(
    engine: Any, params: Params, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]
) -> list[OperatorDifference]:
    """Run each operator of the engine on what the training stack, in float32, gives to its own.

    ||f_engine(x) - f(x)|| / ||f(x)|| for the embedding, the norms, the attention, what the cache adds to it, the MLP
    and the output head. An error is seen where it arises; it does not travel to later layers.

    Args:
        engine: any; an embedded one that is not split has operators to look at, vLLM's are `observed_differences`.
        params: the trainer's parameters.
        prompts, completions: token ids; the first 8 rows, 256 tokens each.

    Returns:
        Differences in the order of the forward pass; empty for another engine.
    """
    if isinstance(engine, VllmEngine):
        return observed_differences(engine, params, prompts, completions)
    if not isinstance(engine, LocalEngine) or engine.weights is None or engine.program.mesh.size > 1:
        return []
    rows = [np.concatenate(pair)[:_TOKENS] for pair in zip(prompts[:_ROWS], completions, strict=False)]
    tokens, lengths = np.zeros((len(rows), max(map(len, rows))), np.int32), np.array([len(row) for row in rows])
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    program, config = engine.program, engine.config
    weights = program.own_weights({key: leaf for key, leaf in engine.weights.items() if key != "layers"})
    x, own = _embedded(params, weights, tokens, program=program)
    found = [OperatorDifference("embedding", None, float(_relative(own, x, lengths)))]
    for index, (layer, rope, window) in enumerate(
        zip(engine.weights["layers"], config.layer_ropes, config.layer_windows(tokens.shape[1]), strict=True)
    ):
        trained = jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
        x, sizes = _layer(trained, layer, x, lengths, program=program, rope=rope, window=window)
        found += in_order(sizes, index)
    return found + in_order(_last(params, weights, x, lengths, program=program), None)


def _relative(own: jax.Array, trained: jax.Array, lengths: jax.Array) -> jax.Array:
    """||own - trained|| / ||trained|| over the rows' tokens; 0 of nothing."""
    inside = (jnp.arange(trained.shape[1]) < lengths[:, None])[..., None]
    square = jnp.sum(jnp.where(inside, (own.astype(jnp.float32) - trained) ** 2, 0))
    return jnp.sqrt(square / jnp.maximum(jnp.sum(jnp.where(inside, trained**2, 0)), jnp.finfo(jnp.float32).tiny))


@functools.partial(jax.jit, static_argnames=("program",))
def _embedded(params: Params, weights: Params, tokens: jax.Array, *, program: Program) -> tuple[jax.Array, jax.Array]:
    trained = embedding_scale(program.config, params["embedding"].astype(jnp.float32)[tokens])
    return trained, embed(weights, tokens, program)


@functools.partial(jax.jit, static_argnames=("program", "rope", "window"))
@in_compute_dtype
def _layer(
    trained: Params, own: Params, x: jax.Array, lengths: jax.Array, *, program: Program, rope: str, window: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The residual stream after the layer, and the relative difference of each operator in it."""
    config, dtype, length = program.config, jnp.dtype(program.compute_dtype), x.shape[1]
    segment_ids = (jnp.arange(length) < lengths[:, None]).astype(jnp.int32)
    rotary = all_rotary_tables(config, jnp.arange(length)[None])[rope]
    how = {"one_segment": True, "ops": program.ops, "window": window}

    def attend(cache: str | None) -> Attend:
        def run(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
            if cache:
                key, value = (load(store(each, cache), dtype) for each in (key, value))
            kernel = choose_kernel("auto", query.dtype, program.platform, length)
            return row_attention(query, key, value, segment_ids, kernel=kernel, **how), None

        return run

    def attention(block: Block, read: jax.Array, cache: str | None = None) -> jax.Array:
        return block.attention(read, rotary, attend(cache), program.ops)[0]

    def mlp(block: Block, read: jax.Array) -> jax.Array:
        dense = isinstance(block.mlp, MLP)
        return block.mlp(read, program.ops) if dense else block.mlp(read, program.ops, None, None)[0]

    norms: list[jax.Array] = []

    def normed(place: str, x: jax.Array) -> jax.Array:
        norm = getattr(block, place)
        if norm is None:
            return x
        norms.append(_relative(getattr(engines, place)(x.astype(dtype)), norm(x), lengths))
        return norm(x)

    block = block_of(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained), config)
    engines = block_of(program.own_weights(own), config)
    read = normed("attention_norm", x)
    attended, plain = attention(block, read), attention(engines, read.astype(dtype))
    x = x + normed("attention_out_norm", attended)
    sizes = {
        "attention": _relative(plain, attended, lengths),
        "cache": _relative(
            attention(engines, read.astype(dtype), program.cache_dtype), plain.astype(jnp.float32), lengths
        ),
    }
    read = normed("mlp_norm", x)
    y = mlp(block, read)
    sizes["mlp"] = _relative(mlp(engines, read.astype(dtype)), y, lengths)
    x = x + normed("mlp_out_norm", y)
    return x, {"norm": jnp.max(jnp.stack(norms)), **sizes}


@functools.partial(jax.jit, static_argnames=("program",))
@in_compute_dtype
def _last(
    params: Params, weights: Params, x: jax.Array, lengths: jax.Array, *, program: Program
) -> dict[str, jax.Array]:
    """The last norm, and the head's logits, less their mean, of a few tokens."""
    dtype = jnp.dtype(program.compute_dtype)
    hidden = final_norm(params, program.config, x)
    norm = _relative(final_norm(weights, program.config, x.astype(dtype)), hidden, lengths)
    few = hidden[:, : max(1, _HEAD_TOKENS // len(x))]
    trained = few @ output_kernel(params).astype(jnp.float32)
    own = logits(weights, few.astype(dtype))
    centered = (each - jnp.mean(each, -1, keepdims=True) for each in (own, trained))
    return {"norm": norm, "head": _relative(*centered, jnp.minimum(lengths, few.shape[1]))}
