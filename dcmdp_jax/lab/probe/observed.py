"""The operators of vLLM's network, each beside the training stack's on the engine's own input."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.lab.mismatch.evidence import OperatorDifference, in_order
from dcmdp_jax.models.attention import choose_kernel, row_attention
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import block_of, final_norm, output_kernel
from dcmdp_jax.models.layers import MLP, all_rotary_tables
from dcmdp_jax.models.ops import choose_ops
from dcmdp_jax.models.products import products_in
from dcmdp_jax.models.scheme_products import round_cache
from dcmdp_jax.types import Params

_TOKENS = 256
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens", "model.norm", "logits_processor"


def observed_differences(
    engine: VllmEngine, params: Params, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]
) -> list[OperatorDifference]:
    """Run the training stack's operators, in float32, on what vLLM's own read while it scored in one pass.

    ||y - f(x)|| / ||f(x)||, x and y what the engine's operator read and gave: an error is seen where it arises, not in
    later layers. "norm" is a layer's worst. With an FP8 cache "cache" is the difference of the attention to one that
    keeps keys and values whole, and "attention" that to one that rounds them as the engine does.

    Args:
        engine: a running engine with weights.
        params: the trainer's parameters.
        prompts, completions: token ids; the first rows, of at most 256 tokens together.

    Returns:
        Differences in the order of the forward pass.

    Raises:
        EngineError: see `VllmEngine.observe`.
    """
    config, rows = engine.config, []
    for pair in zip(prompts, completions, strict=False):
        if len(row := np.concatenate(pair)[: _TOKENS - sum(map(len, rows))]):
            rows.append(row)
    parts = dict(config.family.norms) | {"attention": "self_attn", "mlp": "mlp"}
    layers = [{part: f"model.layers.{n}.{name}" for part, name in parts.items()} for n in range(config.num_layers)]
    seen = engine.observe(rows, [_EMBEDDING, *(name for names in layers for name in names.values()), _NORM, _HEAD])
    lengths = [len(row) for row in rows]
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    segment_ids = np.repeat(np.arange(1, 1 + len(rows), dtype=np.int32), lengths)[None]
    looked_up = _relative(seen[_EMBEDDING][1], params["embedding"][np.concatenate(rows)])
    found = [OperatorDifference("embedding", None, float(looked_up))]
    kinds = zip(config.layer_ropes, config.layer_windows(positions.size), strict=True)
    for index, (names, kind) in enumerate(zip(layers, kinds, strict=True)):
        trained = jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
        pairs = {part: seen[name] for part, name in names.items()}
        sizes = _layer(trained, pairs, (positions, segment_ids), config, (*kind, engine.cache_rounding))
        found += in_order(sizes, index)
    outer = {key: leaf for key, leaf in params.items() if key != "layers"}
    return found + in_order(_last(outer, seen[_NORM], seen[_HEAD], config=config), None)


_Pair, _Sizes = tuple[jax.Array, jax.Array], dict[str, jax.Array]
"""What an operator read and gave, [tokens, width] each; operator -> relative difference."""
_Kind = tuple[str, int, str]
"""Rotary embedding, window and rounding of the cache of a layer."""


def _relative(own: jax.Array, trained: jax.Array) -> jax.Array:
    return jnp.linalg.norm(own - trained) / jnp.maximum(jnp.linalg.norm(trained), jnp.finfo(jnp.float32).tiny)


@functools.partial(jax.jit, static_argnames=("config", "kind"))
def _layer(trained: Params, pairs: dict[str, _Pair], rows: _Pair, config: ModelConfig, kind: _Kind) -> _Sizes:
    """The relative difference of each operator of a layer; rows are positions and segment ids, [1, tokens] each."""
    (positions, segment_ids), (rope, window, cache) = rows, kind
    block = block_of(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained), config)
    platform, length = jax.default_backend(), segment_ids.shape[1]
    ops, rotary = choose_ops(platform), all_rotary_tables(config, positions)[rope]
    how = {"kernel": choose_kernel("auto", jnp.dtype("float32"), platform, length), "one_segment": False}

    def attention(x: jax.Array, rounding: str) -> jax.Array:
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
            key, value = (round_cache(each, rounding) for each in (key, value))
            return row_attention(query, key, value, segment_ids, ops=ops, window=window, **how), None

        return block.attention(x, rotary, attend, ops)[0]

    def mlp(x: jax.Array) -> jax.Array:
        return block.mlp(x, ops) if isinstance(block.mlp, MLP) else block.mlp(x, ops, None, None)[0]

    operators = {part: getattr(block, part) for part in config.family.norms} | {"mlp": mlp}
    operators["attention"] = functools.partial(attention, rounding=cache)
    if cache:
        operators["cache"], pairs = functools.partial(attention, rounding=""), pairs | {"cache": pairs["attention"]}
    with products_in("float32"):
        sizes = {part: _relative(gave, operators[part](read[None])[0]) for part, (read, gave) in pairs.items()}
        return {"norm": jnp.max(jnp.stack([sizes.pop(part) for part in config.family.norms])), **sizes}


@functools.partial(jax.jit, static_argnames="config")
def _last(params: Params, norm: _Pair, head: _Pair, *, config: ModelConfig) -> _Sizes:
    """The last norm, and the head's logits less their mean."""
    with products_in("float32"):
        logits = head[0] @ output_kernel(params).astype(jnp.float32)
        centered = (each - jnp.mean(each, -1, keepdims=True) for each in (head[1], logits))
        return {"norm": _relative(norm[1], final_norm(params, config, norm[0])), "head": _relative(*centered)}
