"""What the operators of an engine read and give: of the embedded one, and of vLLM."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from dcmdp_jax.engines.local.cache import load, store
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.local.forward import embed, logits
from dcmdp_jax.engines.local.layout import Program
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.lab.probe.operators import Observed, OnePass, Operator, Pair, parts_of
from dcmdp_jax.models.decoder import block_of, final_norm
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

    def parts(cached: Operator) -> dict[str, Operator]:
        how = {"ops": program.ops, "window": window}
        return parts_of(block, rotary, segment_ids, cached, program.platform, **how)

    def through(part: str, read: jax.Array) -> jax.Array:
        if part not in operators:
            return read
        gave = operators[part](read)
        seen[part] = read[0], gave[0]
        return gave

    operators = parts(lambda x: x)
    operators["cache"] = parts(lambda x: load(store(x, program.cache_dtype), x.dtype))["attention"]
    read = through("attention_norm", x)
    if program.cache_dtype != program.compute_dtype:
        through("cache", read)
    x = x + through("attention_out_norm", through("attention", read))
    return x + through("mlp_out_norm", through("mlp", through("mlp_norm", x))), seen


@functools.partial(jax.jit, static_argnames=("program",))
@in_compute_dtype
def _last(weights: Params, x: jax.Array, *, program: Program) -> tuple[Pair, Pair]:
    hidden = final_norm(weights, program.config, x)
    return (x, hidden), (hidden, logits(weights, hidden))
