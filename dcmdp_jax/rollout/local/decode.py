"""The compiled programs of the embedded engine: prefill, decode, shrink, grow and score.

A cache has `prompt_slots` slots for the prompt, filled from the left, then the slots of the completion: token t of
every row is written to slot prompt_slots + t, so that a decode step writes one slice and no scatter. Keys are stored
transposed, [R, K, h, S], values [R, K, S, h]: the one pair of layouts in which both products of the attention stream
through memory on XLA's CPU backend (keys stored like values cost 2 to 7 times as much). The layers are unrolled.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models.attention import choose_kernel, row_attention
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import apply_block, final_norm, output_kernel
from dcmdp_jax.models.layers import rotary_tables
from dcmdp_jax.models.quantize import FP8_MAX, QuantizedKernel, widen
from dcmdp_jax.rollout.local.sampler import choose_tokens, row_keys, token_words
from dcmdp_jax.types import Params

_SCORE_CHUNK = 1024
_HIDDEN = -1e30
_FLOAT8 = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiled programs are specialised to.

    Attributes:
        config: the model.
        compute_dtype: "float32" or "bfloat16", of activations and products.
        cache_dtype: the dtype in which keys and values are kept and from which they are read, also within a prompt.
        mesh: one axis, "rows": rows are split over its devices, weights are whole on each.
    """

    config: ModelConfig
    compute_dtype: str
    cache_dtype: str
    mesh: Mesh

    def place_rows(self, tree: DecodeState) -> DecodeState:
        sharding = NamedSharding(self.mesh, P("rows"))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), tree)


class DecodeState(NamedTuple):
    """Rows between two calls of `decode`; the leading axis of every array is the row.

    Attributes:
        cache: for each layer keys [R, K, h, S] and values [R, K, S, h], float8 as uint8 bits.
        hidden: [R, D], the normed hidden state that the next token is drawn from.
        prompt_lengths: [R] int32.
        keys: [R, 2] uint32, see `sampler.row_keys`.
        done: [R] bool, a stop token was sampled or the row is padding.
        sampled: [R] int32, tokens of the completion so far.
    """

    cache: tuple[tuple[jax.Array, jax.Array], ...]
    hidden: jax.Array
    prompt_lengths: jax.Array
    keys: jax.Array
    done: jax.Array
    sampled: jax.Array

    @property
    def slots(self) -> int:
        """Length of the cache in tokens."""
        return self.cache[0][1].shape[2]


def _store(x: jax.Array, cache_dtype: str) -> jax.Array:
    """Casts to the cache's dtype; float8 saturates where a cast would give NaN (scale 1, as vLLM's default).

    float8 is kept as its bits: XLA's CPU backend has no float8 copy and would convert the whole cache to write one
    slot, at ten times the time of a decode step.
    """
    if cache_dtype != _FLOAT8:
        return x.astype(cache_dtype)
    return jax.lax.bitcast_convert_type(jnp.clip(x, -FP8_MAX, FP8_MAX).astype(cache_dtype), jnp.uint8)


def _load(stored: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """What `_store` kept, in `dtype`."""
    if stored.dtype == jnp.uint8:
        stored = jax.lax.bitcast_convert_type(stored, _FLOAT8)
    return stored.astype(dtype)


def _logits(weights: Params, hidden: jax.Array) -> jax.Array:
    """[..., V] float32."""
    kernel = output_kernel(weights)
    values = kernel.values if isinstance(kernel, QuantizedKernel) else kernel
    logits = jnp.matmul(hidden, values.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return logits * kernel.scale if isinstance(kernel, QuantizedKernel) else logits


def _forward_rows(
    weights: Params, tokens: jax.Array, lengths: jax.Array, program: Program
) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Right-padded rows [R, L] without a cache: hidden states [R, L, D], and each layer's keys and values as stored."""
    config, dtype = program.config, jnp.dtype(program.compute_dtype)
    length = tokens.shape[1]
    kernel = choose_kernel("auto", dtype, program.mesh.devices.flat[0].platform)
    # Splash wants blocks of 128, and can't be split over devices by the compiler.
    if kernel == "splash" and (length % 128 or program.mesh.size > 1):
        kernel = "xla"
    segment_ids = (jnp.arange(length) < lengths[:, None]).astype(jnp.int32)
    # The barrier keeps XLA from recomputing cosines in every layer's fusion.
    rotary = jax.lax.optimization_barrier(rotary_tables(config, jnp.arange(length)[None]))

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        stored = _store(key, program.cache_dtype), _store(value, program.cache_dtype)
        read = (_load(x, dtype) for x in stored)
        return row_attention(query, *read, segment_ids, kernel=kernel, one_segment=True), stored

    x = weights["embedding"][tokens].astype(dtype)
    stored = []
    for layer in weights["layers"]:
        x, kept = apply_block(layer, config, x, rotary, attend)
        stored.append(kept)
    return final_norm(weights, config, x), stored


@functools.partial(jax.jit, static_argnames=("program", "capacity", "groups"))
def prefill(
    weights: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    row_prompts: jax.Array,
    row_ids: jax.Array,
    seed: jax.Array,
    step: jax.Array,
    *,
    program: Program,
    capacity: int,
    groups: int,
) -> DecodeState:
    """Runs each prompt once and gives its cache to all rows that answer it.

    Args:
        weights: the engine's tree, see `weights.convert`.
        prompts: [P, prompt_slots] int32, right-padded.
        lengths: [P] int32.
        row_prompts: [R] int32, index into `prompts`.
        row_ids: [R] int32, the row's number in the whole call; -1 is padding.
        seed, step: [] uint32.
        program: the specialisation.
        capacity: completion slots to make room for.
        groups: the prompts are run in this many parts, one after another; divides P. Bounds the memory of attention.
    """
    dtype = jnp.dtype(program.compute_dtype)
    weights = widen(weights, dtype)

    def run(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
        hidden, stored = _forward_rows(weights, *part, program)
        return hidden[jnp.arange(hidden.shape[0]), part[1] - 1], stored

    if groups == 1:
        last, stored = run((prompts, lengths))
    else:
        parts = prompts.reshape(groups, -1, prompts.shape[1]), lengths.reshape(groups, -1)
        mapped = jax.lax.map(run, parts)
        last, stored = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), mapped)

    def expand(key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, value = key.transpose(0, 2, 3, 1)[row_prompts], value.transpose(0, 2, 1, 3)[row_prompts]
        return _pad_slots(key, value, capacity)

    return program.place_rows(
        DecodeState(
            cache=tuple(expand(key, value) for key, value in stored),
            hidden=last[row_prompts],
            prompt_lengths=lengths[row_prompts],
            keys=row_keys(seed, step, jnp.maximum(row_ids, 0).astype(jnp.uint32)),
            done=row_ids < 0,
            sampled=jnp.zeros(row_ids.shape, jnp.int32),
        )
    )


def _pad_slots(key: jax.Array, value: jax.Array, extra: int) -> tuple[jax.Array, jax.Array]:
    return jnp.pad(key, ((0, 0), (0, 0), (0, 0), (0, extra))), jnp.pad(value, ((0, 0), (0, 0), (0, extra), (0, 0)))


class Decoded(NamedTuple):
    """What a call of `decode` sampled.

    Attributes:
        tokens: [slots - prompt_slots, R] int32; row i holds token first + i, rows after the last step are 0.
        logprobs: as `tokens`, float32 nats. Entries after a row's stop token mean nothing.
        end: [] int32, the token that comes next.
    """

    tokens: jax.Array
    logprobs: jax.Array
    end: jax.Array


@functools.partial(jax.jit, static_argnames=("program", "prompt_slots", "mode"), donate_argnames=("state",))
def decode(
    weights: Params,
    state: DecodeState,
    first: jax.Array,
    last: jax.Array,
    live_floor: jax.Array,
    inverse_temperature: jax.Array,
    top_p: jax.Array,
    stop_ids: jax.Array,
    *,
    program: Program,
    prompt_slots: int,
    mode: str,
) -> tuple[DecodeState, Decoded]:
    """Samples tokens first, first + 1, ... of every row until token `last` or until few rows are alive.

    Args:
        weights: the engine's tree.
        state: donated.
        first, last: [] int32, the tokens to sample are first .. last - 1; last is at most the completion slots.
        live_floor: [] int32, returns as soon as no more rows than this are alive.
        inverse_temperature, top_p, mode: see `sampler.choose_tokens`.
        stop_ids: [any] int32.
        program: the specialisation.
        prompt_slots: cache slots of the prompt.
    """
    config, dtype = program.config, jnp.dtype(program.compute_dtype)
    weights = widen(weights, dtype)
    slots, rows = jnp.arange(state.slots), state.done.shape[0]
    words = token_words(state.keys, first, state.slots - prompt_slots)
    tables = jax.lax.optimization_barrier(rotary_tables(config, slots))

    def forward(state: DecodeState, tokens: jax.Array, t: jax.Array) -> DecodeState:
        slot = prompt_slots + t
        seen = (slots < state.prompt_lengths[:, None]) | ((slots >= prompt_slots) & (slots <= slot))
        bias = jnp.where(seen, 0.0, _HIDDEN)
        rotary = tuple(table[state.prompt_lengths + t][:, None] for table in tables)
        x = weights["embedding"][tokens][:, None]
        cache = []
        for layer, kept in zip(weights["layers"], state.cache, strict=True):
            attend = functools.partial(_attend_cached, cache=kept, slot=slot, bias=bias, dtype=program.cache_dtype)
            x, kept = apply_block(layer, config, x, rotary, attend)
            cache.append(kept)
        return state._replace(cache=tuple(cache), hidden=final_norm(weights, config, x)[:, 0])

    def alive(carry: tuple[DecodeState, Decoded]) -> jax.Array:
        state, decoded = carry
        return (decoded.end < last) & (jnp.sum(~state.done, dtype=jnp.int32) > live_floor)

    def body(carry: tuple[DecodeState, Decoded]) -> tuple[DecodeState, Decoded]:
        state, decoded = carry
        t = decoded.end
        tokens, logprobs = choose_tokens(
            _logits(weights, state.hidden), words[t - first], inverse_temperature, top_p, mode
        )
        sampled = state.sampled + ~state.done
        done = state.done | jnp.any(tokens[:, None] == stop_ids, axis=-1)
        state = forward(state, tokens, t)._replace(done=done, sampled=sampled)
        decoded = Decoded(
            jax.lax.dynamic_update_slice(decoded.tokens, tokens[None], (t - first, 0)),
            jax.lax.dynamic_update_slice(decoded.logprobs, logprobs[None], (t - first, 0)),
            t + 1,
        )
        return state, decoded

    shape = (state.slots - prompt_slots, rows)
    empty = Decoded(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), first)
    return jax.lax.while_loop(alive, body, (state, empty))


def _attend_cached(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    cache: tuple[jax.Array, jax.Array],
    slot: jax.Array,
    bias: jax.Array,
    dtype: str,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One query token per row, [R, 1, H, h], against the cache after `key` and `value` are written to `slot`."""
    rows, _, heads, width = query.shape
    kv_heads = key.shape[2]
    keys, values = cache
    keys = jax.lax.dynamic_update_slice(keys, _store(key, dtype).transpose(0, 2, 3, 1), (0, 0, 0, slot))
    values = jax.lax.dynamic_update_slice(values, _store(value, dtype).transpose(0, 2, 1, 3), (0, 0, slot, 0))
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("rkgh,rkhs->rkgs", grouped, _load(keys, query.dtype), preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores / math.sqrt(width) + bias[:, None, None], axis=-1).astype(query.dtype)
    attended = jnp.einsum("rkgs,rksh->rkgh", weights, _load(values, query.dtype))
    return attended.reshape(rows, 1, heads, width), (keys, values)


@functools.partial(jax.jit, static_argnames=("program",))
def shrink(state: DecodeState, keep: jax.Array, padding: jax.Array, *, program: Program) -> DecodeState:
    """The rows `keep` [R'] int32 of the state; a row where `padding` [R'] is true is a stand-in and counts as done."""
    kept = jax.tree.map(lambda x: x[keep], state)
    return program.place_rows(kept._replace(done=kept.done | padding))


@functools.partial(jax.jit, static_argnames=("extra", "program"))
def grow(state: DecodeState, *, extra: int, program: Program) -> DecodeState:
    """The state with `extra` more completion slots."""
    cache = tuple(_pad_slots(key, value, extra) for key, value in state.cache)
    return program.place_rows(state._replace(cache=cache))


@functools.partial(jax.jit, static_argnames=("program",))
def score(
    weights: Params, tokens: jax.Array, lengths: jax.Array, inverse_temperature: jax.Array, *, program: Program
) -> jax.Array:
    """Teacher-forced log-probs of rows under the engine's weights, cache rounding included.

    Args:
        weights: the engine's tree.
        tokens: [R, L] int32, right-padded.
        lengths: [R] int32.
        inverse_temperature: [] float32.
        program: the specialisation.

    Returns:
        [R, L - 1] float32 nats, entry t of token t + 1; logits exist for about 1,024 tokens at a time.
    """
    weights = widen(weights, jnp.dtype(program.compute_dtype))
    hidden, _ = _forward_rows(weights, tokens, lengths, program)
    targets = tokens[:, 1:].reshape(-1)
    previous = hidden[:, :-1].reshape(targets.size, -1)
    chunks = -(-targets.size // _SCORE_CHUNK)
    padding = chunks * -(-targets.size // chunks) - targets.size

    def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        scaled = _logits(weights, part[0]) * inverse_temperature
        chosen = jnp.take_along_axis(scaled, part[1][:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(scaled, axis=-1)

    parts = jnp.pad(previous, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
    logprobs = jax.lax.map(chunk, jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), parts))
    return logprobs.reshape(-1)[: targets.size].reshape(tokens.shape[0], -1)
