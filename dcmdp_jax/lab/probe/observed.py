"""What the operators of an engine read and give: of the embedded one, and of vLLM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dcmdp_jax.engines.local.cache import load, store
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.local.forward import embed, logits
from dcmdp_jax.engines.local.layout import Program
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.lab.probe.operators import Observed, OnePass, Pair, attention_over
from dcmdp_jax.models.decoder import Attend, block_of, final_norm
from dcmdp_jax.models.layers import all_rotary_tables, embedding_scale
from dcmdp_jax.models.products import in_compute_dtype
from dcmdp_jax.types import Params


def observed(engine: Any, tokens: OnePass) -> Observed | None:
    """Have an engine that has weights compute the tokens; None of one that nobody can look into.

    Raises:
        EngineError: see `VllmEngine.observe`.
    """
    if isinstance(engine, VllmEngine):
        return _of_vllm(engine, tokens)
    if isinstance(engine, LocalEngine) and engine.weights is not None and engine.program.mesh.size == 1:
        return _of_embedded(engine.program, engine.weights, tokens)
    return None


def _of_vllm(engine: VllmEngine, tokens: OnePass) -> Observed:
    """By hooks. Its attention reads the cache in one pass too, so the training stack's has that rounding."""
    config, rounding = engine.config, engine.cache_rounding
    parts = dict(config.family.norms) | {"attention": "self_attn", "mlp": "mlp"}
    layers = [{part: f"model.layers.{n}.{name}" for part, name in parts.items()} for n in range(config.num_layers)]
    outer = "model.embed_tokens", "model.norm", "logits_processor"
    seen = engine.observe(tokens.rows, [*outer, *(name for names in layers for name in names.values())])
    pairs = [{part: seen[name] for part, name in names.items()} for names in layers]
    pairs = [each | ({"cache": each["attention"]} if rounding else {}) for each in pairs]
    (_, looked_up), *last = (seen[name] for name in outer)
    return Observed(embedding_scale(config, looked_up), pairs, *last, rounding)


def _of_embedded(program: Program, weights: Params, tokens: OnePass) -> Observed:
    config, layers = program.config, []
    outer = program.own_weights({key: leaf for key, leaf in weights.items() if key != "layers"})
    x = looked_up = _embedded(outer, np.concatenate(tokens.rows)[None], program=program)
    windows = config.layer_windows(x.shape[1])
    for layer, rope, window in zip(weights["layers"], config.layer_ropes, windows, strict=True):
        x, pairs = _layer(layer, x, tokens[1:], program=program, rope=rope, window=window)
        layers.append(pairs)
    return Observed(looked_up[0], layers, *_last(outer, x[0], program=program))


@functools.partial(jax.jit, static_argnames=("program",))
def _embedded(weights: Params, tokens: jax.Array, *, program: Program) -> jax.Array:
    return embed(weights, tokens, program).astype(program.compute_dtype)


@functools.partial(jax.jit, static_argnames=("program", "rope", "window"))
@in_compute_dtype
def _layer(
    own: Params, x: jax.Array, rows: Pair, *, program: Program, rope: str, window: int
) -> tuple[jax.Array, dict[str, Pair]]:
    """The residual stream after the layer, and what its operators read and gave."""
    positions, segment_ids = rows
    block = block_of(program.own_weights(own), program.config)
    rotary, seen = all_rotary_tables(program.config, positions)[rope], {}

    def attend(cached: Callable[[jax.Array], jax.Array]) -> Attend:
        return attention_over(segment_ids, cached, program.platform, program.ops, window)

    def keep(part: str, operator: Callable[[jax.Array], Any], read: jax.Array) -> Any:
        gave = operator(read)
        seen[part] = read[0], jax.tree.leaves(gave)[0][0]
        return gave

    after, _, _ = block(x, rotary, attend(lambda x: x), program.ops, observe=keep)
    if program.cache_dtype != program.compute_dtype:
        read_cache = attend(lambda x: load(store(x, program.cache_dtype), x.dtype))
        keep("cache", lambda x: block.attention(x, rotary, read_cache, program.ops), seen["attention"][0][None])
    return after, seen


@functools.partial(jax.jit, static_argnames=("program",))
@in_compute_dtype
def _last(weights: Params, x: jax.Array, *, program: Program) -> tuple[Pair, Pair]:
    hidden = final_norm(weights, program.config, x)
    return (x, hidden), (hidden, logits(weights, hidden))
