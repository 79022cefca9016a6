"""The operators of an engine, each compared with the training stack's on the engine's input."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.engines.local import forward, layout
from dcmdp_jax.engines.local.cache import load, store
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.models import attention, gated_delta, products, scheme_products
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import (
    Attend,
    block_of,
    final_norm,
    output_kernel,
)
from dcmdp_jax.models.gated_delta import rows as recurrent_rows
from dcmdp_jax.models.layer_params import is_recurrent, layer_of
from dcmdp_jax.models.layers import all_rotary_tables, embedding_scale
from dcmdp_jax.models.ops import choose_ops
from dcmdp_jax.probe.columns.evidence import OperatorDifference, in_order
from dcmdp_jax.probe.columns.pairs import Ragged
from dcmdp_jax.types import Array, Params

_TOKENS = 256
"""Tokens that operators are compared on: their outputs are held for all layers."""
NORMS = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")

Pair = tuple[Any, Any]
"""What an operator read and gave, [T, width] each, floating point."""
Sizes = dict[str, Array]
"""Operator -> relative difference."""

Cached = Callable[[Array], Array]
"""Keys or values -> the same as a cache gives them back."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnePass:
    """The first rows, of at most 256 tokens together, one after the other.

    Attributes:
        rows: token ids of each.
        positions, segment_ids: [1, T] int32.
    """

    rows: list[np.ndarray]
    positions: np.ndarray
    segment_ids: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
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
    prompts: Ragged,
    completions: Ragged,
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
    one_pass = _tokens_of(prompts, completions)
    # An engine without a config has the trainer's model.
    engine_config = getattr(engine, "config", config)
    if engine_config != config:
        return []
    observed = _observed(engine, one_pass)
    if observed is None:
        return []

    embedded = params["embedding"].astype(jnp.float32)[np.concatenate(one_pass.rows)]
    relative = float(_relative(observed.embedding, embedding_scale(config, embedded)))
    differences = [OperatorDifference(operator="embedding", layer=None, relative=relative)]
    windows = config.layer_windows(one_pass.positions.size)
    layers = zip(observed.layers, config.layer_ropes, windows, strict=True)
    for index, (pairs, rope, window) in enumerate(layers):
        sizes = _layer(
            layer_of(params["layers"], config, index),
            dict(pairs),
            one_pass.positions,
            one_pass.segment_ids,
            config=config,
            rope=rope,
            window=window,
            rounding=observed.rounding,
        )
        differences += in_order(sizes, index)
    return differences + in_order(_last(params, observed.norm, observed.head, config=config), None)


def _tokens_of(prompts: Ragged, completions: Ragged) -> OnePass:
    """The tokens to look at."""
    rows: list[np.ndarray] = []
    room = _TOKENS
    for prompt, completion in zip(prompts, completions, strict=False):
        row = np.concatenate([prompt, completion])[:room]
        if len(row):
            rows.append(row)
            room -= len(row)
    lengths = [len(row) for row in rows]
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    segment_ids = np.repeat(np.arange(1, 1 + len(rows), dtype=np.int32), lengths)
    return OnePass(rows=rows, positions=positions[None], segment_ids=segment_ids[None])


def _observed(engine: Any, tokens: OnePass) -> Observed | None:
    """The operators' inputs and outputs for these tokens; None if the engine shows none."""
    if isinstance(engine, VllmEngine):
        return _of_vllm(engine, tokens)
    if not isinstance(engine, LocalEngine) or engine.weights is None:
        return None
    if engine.program.mesh.size > 1:
        return None
    return _of_embedded(engine, tokens)


def _mixer(
    layer: Params,
    config: ModelConfig,
    segment_ids: Array,
    window: int,
    platform: str,
    cached: Cached,
) -> Attend | gated_delta.Recur:
    """The function that mixes the tokens of packed rows in a layer: attention or recurrence.

    Args:
        layer, config: the layer's parameters, and the model.
        segment_ids: [1, T] int32.
        window: see `attention.row_attention`.
        platform: where it is computed.
        cached: makes of keys and values what a cache would.
    """
    if is_recurrent(layer):
        return functools.partial(recurrent_rows, config, segment_ids)

    def attend(query: Array, key: Array, value: Array) -> tuple[Array, None]:
        kernel = attention.RowKernel(
            name=attention.choose_kernel("auto", query.dtype, platform, query.shape[1]),
            ops=choose_ops(platform),
        )
        attended = attention.row_attention(
            query,
            cached(key),
            cached(value),
            segment_ids,
            kernel,
            window=window,
        )
        return attended, None

    return attend


def _relative(output: Array, trained: Array) -> Array:
    size = jnp.maximum(jnp.linalg.norm(trained), jnp.finfo(jnp.float32).tiny)
    return jnp.linalg.norm(output.astype(jnp.float32) - trained) / size


@functools.partial(jax.jit, static_argnames=("config", "rope", "window", "rounding"))
def _layer(
    layer: Params,
    pairs: dict[str, Pair],
    positions: Array,
    segment_ids: Array,
    *,
    config: ModelConfig,
    rope: str,
    window: int,
    rounding: str,
) -> Sizes:
    """The relative difference of each operator of a layer.

    Args:
        layer: the training stack's parameters.
        pairs: what the engine's operators read and gave.
        positions, segment_ids: of `OnePass`.
        config: the model.
        rope, window: rotary embedding and attention window of the layer.
        rounding: of `Observed`.
    """
    block = block_of(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), layer), config)
    platform = jax.default_backend()
    ops = choose_ops(platform)
    rotary = all_rotary_tables(config, positions)[rope]
    mixer = functools.partial(_mixer, layer, config, segment_ids, window, platform)
    sizes = {}

    def compare(name: str, operator: Callable[[Array], Any], _: Array) -> Any:
        read, output = pairs[name]
        trained = operator(read.astype(jnp.float32)[None])
        sizes[name] = _relative(output, jax.tree.leaves(trained)[0][0])
        return trained

    with products.products_in("float32"):
        mix = mixer(lambda x: scheme_products.round_cache(x, rounding))
        zeros = jnp.zeros_like(pairs["mlp"][0], jnp.float32)[None]
        block(zeros, rotary, mix, ops, observe=compare)
        if "cache" in pairs:
            compare("cache", lambda x: block.attention(x, rotary, mixer(lambda x: x), ops), None)
    norms = [sizes.pop(name) for name in NORMS if name in sizes]
    return {"norm": jnp.max(jnp.stack(norms)), **sizes}


@functools.partial(jax.jit, static_argnames="config")
def _last(params: Params, norm: Pair, head: Pair, *, config: ModelConfig) -> Sizes:
    """The last norm, and the head's logits less their mean."""

    def centered(logits: Array) -> Array:
        return logits - jnp.mean(logits, -1, keepdims=True)

    with products.products_in("float32"):
        logits = head[0].astype(jnp.float32) @ output_kernel(params).astype(jnp.float32)
        hidden = final_norm(params, config, norm[0].astype(jnp.float32))
        return {
            "norm": _relative(norm[1], hidden),
            "head": _relative(centered(head[1]), centered(logits)),
        }


def _of_vllm(engine: VllmEngine, tokens: OnePass) -> Observed:
    """Observe vLLM by hooks.

    Its attention reads the cache in one pass too, so the training stack's has that rounding.
    """
    config = engine.config
    modules = ["model.embed_tokens", "model.norm", "logits_processor"]
    layers = []
    for index, (kind, _) in enumerate(config.layer_kinds):
        mixer = "linear_attn" if kind == "recurrent" else "self_attn"
        names = dict(config.family.norms) | {"attention": mixer, "mlp": "mlp"}
        layers.append({key: f"model.layers.{index}.{name}" for key, name in names.items()})
        modules += layers[-1].values()
    pairs = engine.observe(tokens.rows, modules)

    layer_pairs = []
    for names in layers:
        observed = {operator: pairs[name] for operator, name in names.items()}
        if engine.cache_rounding:
            observed["cache"] = observed["attention"]
        layer_pairs.append(observed)
    _, looked_up = pairs["model.embed_tokens"]
    return Observed(
        embedding=embedding_scale(config, looked_up),
        layers=layer_pairs,
        norm=pairs["model.norm"],
        head=pairs["logits_processor"],
        rounding=engine.cache_rounding,
    )


def _of_embedded(engine: LocalEngine, tokens: OnePass) -> Observed:
    program = engine.program
    config = program.config
    outer = {key: leaf for key, leaf in engine.weights.items() if key != "layers"}
    outer = program.own_weights(outer)
    embedded = forward.embed(outer, np.concatenate(tokens.rows)[None], program)
    x = looked_up = embedded.astype(program.compute_dtype)
    layers = []
    kinds = zip(config.layer_ropes, config.layer_windows(x.shape[1]), strict=True)
    for layer, (rope, window) in zip(engine.weights["layers"], kinds, strict=True):
        x, pairs = _engine_layer(
            layer,
            x,
            tokens.positions,
            tokens.segment_ids,
            program=program,
            rope=rope,
            window=window,
        )
        layers.append(pairs)
    norm, head = _engine_last(outer, x[0], program=program)
    return Observed(embedding=looked_up[0], layers=layers, norm=norm, head=head)


@functools.partial(jax.jit, static_argnames=("program", "rope", "window"))
@products.in_compute_dtype
def _engine_layer(
    layer: Params,
    x: Array,
    positions: Array,
    segment_ids: Array,
    *,
    program: layout.Program,
    rope: str,
    window: int,
) -> tuple[Array, dict[str, Pair]]:
    """The residual stream after the layer, and what its operators read and gave."""
    config = program.config
    block = block_of(program.own_weights(layer), config)
    rotary = all_rotary_tables(config, positions)[rope]
    mixer = functools.partial(_mixer, layer, config, segment_ids, window, program.platform)
    pairs = {}

    def record(name: str, operator: Callable[[Array], Any], read: Array) -> Any:
        output = operator(read)
        pairs[name] = read[0], jax.tree.leaves(output)[0][0]
        return output

    after, _, _ = block(x, rotary, mixer(lambda x: x), program.ops, observe=record)
    if program.cache_dtype != program.compute_dtype and not is_recurrent(layer):
        mix = mixer(lambda x: load(store(x, program.cache_dtype), x.dtype))
        read = pairs["attention"][0][None]
        record("cache", lambda x: block.attention(x, rotary, mix, program.ops), read)
    return after, pairs


@functools.partial(jax.jit, static_argnames=("program",))
@products.in_compute_dtype
def _engine_last(weights: Params, x: Array, *, program: layout.Program) -> tuple[Pair, Pair]:
    hidden = final_norm(weights, program.config, x)
    return (x, hidden), (hidden, forward.logits(weights, hidden))
