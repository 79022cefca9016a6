"""The operators of an engine, each compared with the training stack's on the engine's input."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.engines.local import forward, layout
from dcmdp_jax.engines.local.cache import load, store
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.lab.mismatch.evidence import OperatorDifference, in_order
from dcmdp_jax.models import attention, gated_delta, products, scheme_products
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import (
    Attend,
    block_of,
    final_norm,
    is_recurrent,
    layer_of,
    output_kernel,
)
from dcmdp_jax.models.gated_delta import rows as recurrent_rows
from dcmdp_jax.models.layers import all_rotary_tables, embedding_scale
from dcmdp_jax.models.ops import choose_ops
from dcmdp_jax.types import Params

_TOKENS = 256
NORMS = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")

Pair = tuple[Any, Any]
Sizes = dict[str, jax.Array]
"""What an operator read and gave, [T, width] each, floating point; operator -> relative
difference.
"""

Cached = Callable[[jax.Array], jax.Array]
"""Keys or values -> the same as a cache gives them back."""


class OnePass(NamedTuple):
    """The first rows, of at most 256 tokens together, one after the other.

    Attributes:
        rows: token ids of each.
        positions, segment_ids: [1, T] int32.
    """

    rows: list[np.ndarray]
    positions: np.ndarray
    segment_ids: np.ndarray


class Observed(NamedTuple):
    """What the operators of an engine read and gave while it computed `OnePass` in one pass.

    Attributes:
        embedding: [T, D], as the first layer reads it.
        layers: "attention", "mlp", the norms of the family, of `NORMS`, and where the cache rounds
            "cache": the attention that reads it.
        norm, head: after the last layer; the head gives logits.
        rounding: rounding in the cache, of `scheme.CACHES`, that "attention" has too; "" for none.
    """

    embedding: Any
    layers: Iterable[Mapping[str, Pair]]
    norm: Pair
    head: Pair
    rounding: str = ""


def operator_differences(
    engine: Any,
    params: Params,
    config: ModelConfig,
    prompts: Sequence[np.ndarray],
    completions: Sequence[np.ndarray],
) -> list[OperatorDifference]:
    """Run the training stack's operators, in float32, on what an engine's own read.

    ||y - f(x)|| / ||f(x)||, x and y what the engine's operator read and gave: an error is seen
    where it arises, not in later layers. "norm" is a layer's worst. "cache" is the difference of
    the attention that reads the cache to one that keeps keys and values whole.

    Args:
        engine: the engine.
        params, config: the training stack's model.
        prompts, completions: token ids; the first 256 are looked at.

    Returns:
        Differences in the order of the forward pass; none of an engine of another model, or without
        weights, or that nobody can look into.

    Raises:
        EngineError: see `VllmEngine.observe`.
    """
    tokens = _tokens_of(prompts, completions)
    if getattr(engine, "config", config) != config or (seen := _observed(engine, tokens)) is None:
        return []
    looked_up = embedding_scale(
        config, params["embedding"].astype(jnp.float32)[np.concatenate(tokens.rows)]
    )
    relative = float(_relative(seen.embedding, looked_up))
    found = [OperatorDifference(operator="embedding", layer=None, relative=relative)]
    kinds = zip(config.layer_ropes, config.layer_windows(tokens.positions.size), strict=True)
    for index, (pairs, kind) in enumerate(zip(seen.layers, kinds, strict=True)):
        trained = layer_of(params["layers"], config, index)
        found += in_order(
            _layer(trained, dict(pairs), tokens[1:], config, (*kind, seen.rounding)), index
        )
    outer = {key: leaf for key, leaf in params.items() if key != "layers"}
    return found + in_order(_last(outer, seen.norm, seen.head, config=config), None)


def _tokens_of(prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]) -> OnePass:
    """The tokens to look at."""
    rows: list[np.ndarray] = []
    for pair in zip(prompts, completions, strict=False):
        if len(row := np.concatenate(pair)[: _TOKENS - sum(map(len, rows))]):
            rows.append(row)
    lengths = [len(row) for row in rows]
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return OnePass(
        rows, positions[None], np.repeat(np.arange(1, 1 + len(rows), dtype=np.int32), lengths)[None]
    )


def _observed(engine: Any, tokens: OnePass) -> Observed | None:
    """Have an engine that has weights compute the tokens; None of one that nobody can look into."""
    if isinstance(engine, VllmEngine):
        return _of_vllm(engine, tokens)
    if (
        isinstance(engine, LocalEngine)
        and engine.weights is not None
        and engine.program.mesh.size == 1
    ):
        return _of_embedded(engine.program, engine.weights, tokens)
    return None


def _mixer(
    layer: Params,
    config: ModelConfig,
    segment_ids: jax.Array,
    window: int,
    platform: str,
    cached: Cached,
) -> Attend | gated_delta.Recur:
    """What mixes the tokens of packed rows in a layer; `cached` makes of keys and values what a
    cache would.
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
        kernel = attention.choose_kernel("auto", query.dtype, platform, query.shape[1])
        how = {
            "kernel": kernel,
            "one_segment": False,
            "ops": choose_ops(platform),
            "window": window,
        }
        return attention.row_attention(query, cached(key), cached(value), segment_ids, **how), None

    return functools.partial(recurrent_rows, config, segment_ids) if is_recurrent(layer) else attend


def _relative(own: jax.Array, trained: jax.Array) -> jax.Array:
    norm = jnp.linalg.norm(trained)
    return jnp.linalg.norm(own.astype(jnp.float32) - trained) / jnp.maximum(
        norm, jnp.finfo(jnp.float32).tiny
    )


@functools.partial(jax.jit, static_argnames=("config", "kind"))
def _layer(
    trained: Params,
    pairs: dict[str, Pair],
    rows: Pair,
    config: ModelConfig,
    kind: tuple[str, int, str],
) -> Sizes:
    """The relative difference of each operator of a layer of a kind: rotary embedding, window,
    rounding.
    """
    (positions, segment_ids), (rope, window, rounding) = rows, kind
    block = block_of(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trained), config)
    platform = jax.default_backend()
    rotary = all_rotary_tables(config, positions)[rope]
    sizes = {}
    mixer = functools.partial(_mixer, trained, config, segment_ids, window, platform)
    ops = choose_ops(platform)

    def compare(part: str, operator: Callable[[jax.Array], Any], _: jax.Array) -> Any:
        read, gave = pairs[part]
        trained = operator(read.astype(jnp.float32)[None])
        sizes[part] = _relative(gave, jax.tree.leaves(trained)[0][0])
        return trained

    with products.products_in("float32"):
        mix = mixer(lambda x: scheme_products.round_cache(x, rounding))
        block(jnp.zeros_like(pairs["mlp"][0], jnp.float32)[None], rotary, mix, ops, observe=compare)
        if "cache" in pairs:
            compare("cache", lambda x: block.attention(x, rotary, mixer(lambda x: x), ops), None)
    return {
        "norm": jnp.max(jnp.stack([sizes.pop(part) for part in NORMS if part in sizes])),
        **sizes,
    }


@functools.partial(jax.jit, static_argnames="config")
def _last(params: Params, norm: Pair, head: Pair, *, config: ModelConfig) -> Sizes:
    """The last norm, and the head's logits less their mean."""
    with products.products_in("float32"):
        own_logits = head[0].astype(jnp.float32) @ output_kernel(params).astype(jnp.float32)
        centered = (each - jnp.mean(each, -1, keepdims=True) for each in (head[1], own_logits))
        hidden = final_norm(params, config, norm[0].astype(jnp.float32))
        return {"norm": _relative(norm[1], hidden), "head": _relative(*centered)}


def _of_vllm(engine: VllmEngine, tokens: OnePass) -> Observed:
    """By hooks. Its attention reads the cache in one pass too, so the training stack's has that
    rounding.
    """
    config = engine.config
    rounding = engine.cache_rounding
    parts = dict(config.family.norms)
    mixers = {"recurrent": "linear_attn"}
    every = [
        parts | {"attention": mixers.get(kind, "self_attn"), "mlp": "mlp"}
        for kind, _ in config.layer_kinds
    ]
    layers = [
        {part: f"model.layers.{n}.{name}" for part, name in own.items()}
        for n, own in enumerate(every)
    ]
    outer = "model.embed_tokens", "model.norm", "logits_processor"
    seen = engine.observe(
        tokens.rows, [*outer, *(name for names in layers for name in names.values())]
    )
    pairs = [{part: seen[name] for part, name in names.items()} for names in layers]
    pairs = [each | ({"cache": each["attention"]} if rounding else {}) for each in pairs]
    (_, looked_up), *last = (seen[name] for name in outer)
    return Observed(embedding_scale(config, looked_up), pairs, *last, rounding)


def _of_embedded(program: layout.Program, weights: Params, tokens: OnePass) -> Observed:
    config = program.config
    layers = []
    outer = program.own_weights({key: leaf for key, leaf in weights.items() if key != "layers"})
    x = looked_up = forward.embed(outer, np.concatenate(tokens.rows)[None], program).astype(
        program.compute_dtype
    )
    kinds = zip(config.layer_ropes, config.layer_windows(x.shape[1]), strict=True)
    for layer, kind in zip(weights["layers"], kinds, strict=True):
        x, pairs = _engine_layer(layer, x, tokens[1:], program=program, kind=kind)
        layers.append(pairs)
    return Observed(looked_up[0], layers, *_engine_last(outer, x[0], program=program))


@functools.partial(jax.jit, static_argnames=("program", "kind"))
@products.in_compute_dtype
def _engine_layer(
    own: Params, x: jax.Array, rows: Pair, *, program: layout.Program, kind: tuple[str, int]
) -> tuple[jax.Array, dict[str, Pair]]:
    """The residual stream after the layer, and what its operators read and gave."""
    (positions, segment_ids), (rope, window), config = rows, kind, program.config
    block = block_of(program.own_weights(own), config)
    rotary = all_rotary_tables(config, positions)[rope]
    seen = {}
    mixer = functools.partial(_mixer, own, config, segment_ids, window, program.platform)

    def keep(part: str, operator: Callable[[jax.Array], Any], read: jax.Array) -> Any:
        gave = operator(read)
        seen[part] = read[0], jax.tree.leaves(gave)[0][0]
        return gave

    after, _, _ = block(x, rotary, mixer(lambda x: x), program.ops, observe=keep)
    if program.cache_dtype != program.compute_dtype and not is_recurrent(own):
        mix = mixer(lambda x: load(store(x, program.cache_dtype), x.dtype))
        keep(
            "cache",
            lambda x: block.attention(x, rotary, mix, program.ops),
            seen["attention"][0][None],
        )
    return after, seen


@functools.partial(jax.jit, static_argnames=("program",))
@products.in_compute_dtype
def _engine_last(weights: Params, x: jax.Array, *, program: layout.Program) -> tuple[Pair, Pair]:
    hidden = final_norm(weights, program.config, x)
    return (x, hidden), (hidden, forward.logits(weights, hidden))
