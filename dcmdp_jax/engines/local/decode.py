"""Compiled programs of the embedded engine that sample: prefill, first_tokens and decode."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.local.cache import Cache, Layer, key_axes, load, slots_of, store
from dcmdp_jax.engines.local.forward import (
    embed,
    forward_rows,
    on_devices,
    run_layers,
    sample_tokens,
)
from dcmdp_jax.engines.local.layout import CACHE, ROW_AXES, ROWS, Program
from dcmdp_jax.models import gated_delta, layers, products
from dcmdp_jax.models.gated_delta import State
from dcmdp_jax.models.ops.cpu import HIDDEN
from dcmdp_jax.models.sampler import Draw, token_words
from dcmdp_jax.types import Array, Params

_STEPS_ALONE = 4


class RowState(NamedTuple):
    """State of each row of a batch for `decode`; the leading axis of every array is the row.

    Attributes:
        keys: [R, 2] uint32, see `sampler.row_keys`.
        prompt_lengths: [R] int32.
        last: [R] int32, last sampled token; its key and value are not in the cache yet.
        sampled: [R] int32, tokens of the completion so far, at least 1.
        done: [R] bool, a stop token was sampled, or the slot is empty.
        slot_tokens: [R, prefix_slots - prompt_slots] int32, the token of the completion that each
            slot of the prefix holds: a window that went round begins anywhere. None without sliding
            layers, which alone read it.
    """

    keys: Array
    prompt_lengths: Array
    last: Array
    sampled: Array
    done: Array
    slot_tokens: Array | None = None


@functools.partial(jax.jit, static_argnames=("program", "groups"))
@products.in_compute_dtype
def prefill(
    weights: Params,
    prompts: Array,
    lengths: Array,
    *,
    program: Program,
    groups: int,
) -> tuple[Cache, Array, Array | None]:
    """Run each prompt once.

    Args:
        weights: the engine's tree, see `weights.Conversion.weights`.
        prompts: [P, prompt_slots] int32, right-padded.
        lengths: [P] int32.
        program: static arguments.
        groups: run the prompts in this many chunks, one after another; divides P. Bounds the memory
            of attention.

    Returns:
        The cache of the prompts; [P, D], the normed hidden states that predict the first tokens;
        and if the program asks for them the experts of each token, [P, prompt_slots, layers, k]
        int16, else None.
    """

    def local(weights: Params, prompts: Array, lengths: Array) -> tuple[Any, ...]:
        def run(
            chunk: tuple[Array, Array],
        ) -> tuple[Array, list[Layer], Array | None]:
            tokens, lengths = chunk
            hidden, stored, routed = forward_rows(weights, tokens, lengths, program)
            return hidden[jnp.arange(hidden.shape[0]), lengths - 1], stored, routed

        if groups == 1:
            last, stored, routed = run((prompts, lengths))
        else:
            chunks = (prompts.reshape(groups, -1, prompts.shape[1]), lengths.reshape(groups, -1))
            results = jax.lax.map(run, chunks)
            last, stored, routed = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

        cache = []
        for layer in stored:
            if not isinstance(layer, State):
                keys, values = layer
                layer = (keys.transpose(key_axes(program.platform)), values.transpose(0, 2, 1, 3))
            cache.append(layer)
        return tuple(cache), last, routed

    return on_devices(program, local, (ROWS, ROWS), (CACHE, ROWS, ROWS))(weights, prompts, lengths)


@functools.partial(jax.jit, static_argnames=("program", "mode"))
@products.in_compute_dtype
def first_tokens(
    weights: Params,
    hidden: Array,
    row_prompts: Array,
    keys: Array,
    draw: Draw,
    *,
    program: Program,
    mode: str,
) -> tuple[Array, ...]:
    """Sample the first token of each row from the hidden state of its prompt.

    Args:
        weights: the engine's tree.
        hidden: [P, D], from `prefill`.
        row_prompts: [R] int32, index into `hidden`.
        keys: [R, 2] uint32, see `sampler.row_keys`.
        draw: the distribution.
        program: static arguments.
        mode: see `sampler.choose_tokens`.

    Returns:
        [R] int32 tokens and [R] float32 log-probs; of the top-k tokens, where the program lists
        them, ids and log-probs [R, k].
    """

    def local(weights: Params, rows: Array, keys: Array, draw: Draw) -> tuple[Array, ...]:
        words = token_words(keys, jnp.zeros(rows.shape[:1], jnp.int32))
        return sample_tokens(
            weights,
            rows,
            words,
            draw,
            mode,
            program,
        )

    rows = jax.lax.with_sharding_constraint(hidden[row_prompts], program.rows)
    return on_devices(program, local, (ROWS, ROWS, P()), ROWS)(
        weights,
        rows,
        keys,
        draw,
    )


class Decoded(NamedTuple):
    """Result of `decode`.

    Attributes:
        columns: what `sampler.choose_tokens` returns, [W, R, ...] each: tokens, log-probs and,
            where the program lists them, the top-k tokens. Entry (i, r) is of token
            `sampled[r] + i` of row r, with `sampled` from before the call. Entries after a row's
            stop token or the last step are undefined.
        steps: [] int32, steps taken.
        sampled, done: [R], see `RowState`.
        routed_experts: None, or [W, R, layers, k] int16; entry (i, r) are the experts of the token
            before that of `columns`, which was read to sample it.
    """

    columns: tuple[Array, ...]
    steps: Array
    sampled: Array
    done: Array
    routed_experts: Array | None = None


# State between two steps: the cache, the last sampled tokens, and the result so far.
_State = tuple[Cache, Array, Decoded]


class Limits(NamedTuple):
    """Limits at which a call of `decode` ends.

    Attributes:
        clock: [] int32, steps that earlier calls took in this window.
        steps: [] int32, at most W.
        live_floor: [] int32, unfinished rows.
    """

    clock: Array
    steps: Array
    live_floor: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotLayout:
    """Cache slots of a row before the circular window.

    Attributes:
        prompt_slots: of the prompt.
        prefix_slots: of the prompt and of the tokens that every row sampled before it entered the window.
    """

    prompt_slots: int
    prefix_slots: int


@functools.partial(
    jax.jit,
    static_argnames=("program", "slot_layout", "mode"),
    donate_argnames=("cache",),
)
@products.in_compute_dtype
def decode(
    weights: Params,
    cache: Cache,
    rows: RowState,
    limits: Limits,
    draw: Draw,
    *,
    program: Program,
    slot_layout: SlotLayout,
    mode: str,
) -> tuple[Cache, Decoded]:
    """Sample tokens until `steps` are taken or at most `live_floor` rows are unfinished.

    Devices with rows of their own synchronize the count of unfinished rows only every
    `_STEPS_ALONE` steps, so they may take that many extra steps, unless all rows are done. Devices
    that share experts synchronize in every layer anyway.

    The slots of a row hold its prompt, then the first `prefix_slots - prompt_slots` tokens of its
    completion, then a circular window of W slots. In each step every row writes to slot `clock % W`
    of the window: one slice, no scatter. A row that entered at clock c has its tokens in the slots
    written since then. Their order does not matter: attention is invariant to it, and positions are
    already rotated into the keys. W steps after it entered, a row would overwrite its own tokens;
    `steps` must not reach that.

    Args:
        weights: the engine's tree.
        cache: cache of the rows, `prefix_slots + W` slots; donated.
        rows: their state.
        limits: when to stop.
        draw: the distribution.
        program: static arguments.
        slot_layout: cache slots before the window.
        mode: see `sampler.choose_tokens`.
    """
    rows = jax.lax.with_sharding_constraint(rows, program.rows)
    by_step = P(None, ROW_AXES)
    decoded = Decoded(
        columns=by_step,
        steps=P(),
        sampled=ROWS,
        done=ROWS,
        routed_experts=by_step,
    )
    local = functools.partial(
        _decode_local,
        program=program,
        slot_layout=slot_layout,
        mode=mode,
    )
    return on_devices(program, local, (CACHE, ROWS, P(), P()), (CACHE, decoded))(
        weights,
        cache,
        rows,
        limits,
        draw,
    )


def _decode_local(
    weights: Params,
    cache: Cache,
    rows: RowState,
    limits: Limits,
    draw: Draw,
    *,
    program: Program,
    slot_layout: SlotLayout,
    mode: str,
) -> tuple[Cache, Decoded]:
    """Run `decode` on one device, with its share of the rows."""
    config = program.device_model
    prompt_slots = slot_layout.prompt_slots
    prefix_slots = slot_layout.prefix_slots
    slots = jnp.arange(slots_of(cache))
    window = slots_of(cache) - prefix_slots
    tables = layers.all_rotary_tables(config, slots)
    spans = config.layer_windows(slots_of(cache))
    # A row attends to a slot if it has sampled at least this many tokens in the window, excluding
    # the last.
    ages_before = jnp.where(slots < prompt_slots, slots_of(cache), -1)

    def forward(
        cache: Cache,
        last: Array,
        sampled: Array,
        now: Array,
    ) -> tuple[Cache, Array, Array | None]:
        slot = prefix_slots + now % window
        ages = jnp.where(slots < prefix_slots, ages_before, (slot - slots) % window)
        tokens_in_ring = sampled - 1 - (prefix_slots - prompt_slots)  # without the last
        seen = (slots < rows.prompt_lengths[:, None]) | (ages <= tokens_in_ring[:, None])
        biases = {0: jnp.where(seen, 0.0, HIDDEN)}
        position = (rows.prompt_lengths + sampled - 1)[:, None]
        # A model has one sliding window; 0 is a layer without.
        sliding = max(spans)
        if sliding:
            # How many tokens ago a row's slot was written.
            to_prompt = position - slots[:prompt_slots]
            to_prefix = (sampled - 1)[:, None] - rows.slot_tokens
            to_ring = jnp.broadcast_to(ages[prefix_slots:], (sampled.size, window))
            distances = jnp.concatenate([to_prompt, to_prefix, to_ring], axis=1)
            biases[sliding] = jnp.where(seen & (distances < sliding), 0.0, HIDDEN)
        rotary = jax.tree.map(lambda table: table[position], tables)

        x = embed(weights, last, program)[:, None]
        mixers = []
        for cached, span in zip(cache, spans, strict=True):
            mixer = functools.partial(
                _attend_cached,
                cache=cached,
                slot=slot,
                bias=biases[span],
                program=program,
            )
            if isinstance(cached, State):
                mixer = functools.partial(gated_delta.decode, config, cached)
            mixers.append(mixer)
        hidden, cache, routed = run_layers(weights, x, rotary, mixers, program)
        return tuple(cache), hidden[:, 0], routed

    def take_step(state: _State) -> _State:
        cache, last, decoded = state
        step = decoded.steps
        sampled = decoded.sampled
        cache, hidden, routed = forward(cache, last, sampled, limits.clock + step)
        if routed is not None:
            routed = decoded.routed_experts.at[step].set(routed[:, 0])
        words = token_words(rows.keys, sampled)
        entries = sample_tokens(weights, hidden, words, draw, mode, program)
        tokens = entries[0]
        columns = []
        for column, values in zip(decoded.columns, entries, strict=True):
            columns.append(jax.lax.dynamic_update_index_in_dim(column, values, step, axis=0))
        next_decoded = Decoded(
            columns=tuple(columns),
            steps=step + 1,
            sampled=sampled + ~decoded.done,
            done=decoded.done | jnp.any(tokens[:, None] == draw.stop_ids, axis=-1),
            routed_experts=routed,
        )
        return cache, tokens, next_decoded

    # Without stop tokens no row finishes early: no need to synchronize the count.
    period = _STEPS_ALONE if draw.stop_ids.size else window
    by_head = tuple(
        layer if isinstance(layer, State) else tuple(map(_merge_heads, layer)) for layer in cache
    )
    state = (by_head, rows.last, _no_tokens(rows, window, mode, program))
    by_head, _, decoded = _repeat(take_step, state, limits, period, program)
    return jax.tree.map(lambda x, before: x.reshape(before.shape), by_head, cache), decoded


def _merge_heads(x: Array) -> Array:
    """Keys or values as the products of attention read them, [R, K, ...] -> [R * K, ...].

    Merged inside the loop, XLA:CPU copies all keys and values of a model with one key head four
    times in each step.
    """
    return x.reshape(-1, *x.shape[2:])


def _no_tokens(rows: RowState, window: int, mode: str, program: Program) -> Decoded:
    """The result before the first step."""
    shape = (window, rows.done.shape[0])
    columns = [jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)]
    count = program.listed(mode)
    if count:
        columns += [jnp.zeros((*shape, count), column.dtype) for column in columns]
    routed = None
    if program.routed_experts:
        routed = jnp.zeros((*shape, *program.device_model.routing[:2]), jnp.int16)
    return Decoded(
        columns=tuple(columns),
        steps=jnp.int32(0),
        sampled=rows.sampled,
        done=rows.done,
        routed_experts=routed,
    )


def _repeat(
    take_step: Callable[[_State], _State],
    state: _State,
    limits: Limits,
    period: int,
    program: Program,
) -> _State:
    """Take steps until `limits` end the call.

    Devices with rows of their own count the unfinished rows of all every `period` steps.
    """

    def live(state: _State) -> Array:
        return jnp.sum(~state[2].done, dtype=jnp.int32)

    def until(state: _State, end: Array, floor: Array | int) -> _State:
        return jax.lax.while_loop(
            lambda state: (state[2].steps < end) & (live(state) > floor), take_step, state
        )

    if program.row_shards == 1:
        return until(state, limits.steps, limits.live_floor)

    def everywhere(state: _State) -> Array:
        return jax.lax.psum(live(state), ROW_AXES)

    # Devices that exchange tokens take every step together.
    together = program.expert_mesh is not None

    def alone(carry: tuple[_State, Array, Array]) -> tuple[_State, Array, Array]:
        state, start, _ = carry
        end = jnp.minimum(start + (1 if together else period), limits.steps)
        state = take_step(state) if together else until(state, end, 0)
        return state, end, everywhere(state)

    (cache, last, decoded), _, _ = jax.lax.while_loop(
        lambda carry: (carry[1] < limits.steps) & (carry[2] > limits.live_floor),
        alone,
        (state, jnp.int32(0), everywhere(state)),
    )
    # A device whose rows are all done has taken fewer steps; its cache is no longer used.
    return cache, last, decoded._replace(steps=jax.lax.pmax(decoded.steps, ROW_AXES))


def _attend_cached(
    query: Array,
    key: Array,
    value: Array,
    *,
    cache: tuple[Array, Array],
    slot: Array,
    bias: Array,
    program: Program,
) -> tuple[Array, tuple[Array, Array]]:
    """Write `key` and `value` to `slot`, then attend with one query token per row, [R, 1, H, h]."""
    rows, _, heads, width = query.shape
    group = heads // key.shape[2]
    keys, values = cache
    axes = key_axes(program.platform)
    slot_axis = axes.index(1) - 1
    key = _merge_heads(store(key, program.cache_dtype).transpose(axes))
    keys = jax.lax.dynamic_update_slice_in_dim(keys, key, slot, slot_axis)
    value = _merge_heads(store(value, program.cache_dtype).transpose(0, 2, 1, 3))
    values = jax.lax.dynamic_update_slice_in_dim(values, value, slot, 1)

    scores = jnp.einsum(
        "bgh,bhs->bgs" if slot_axis == 2 else "bgh,bsh->bgs",
        query.reshape(-1, group, width),
        load(keys, query.dtype),
        preferred_element_type=jnp.float32,
    )
    scores = scores.reshape(rows, heads, -1) * (1 / math.sqrt(width)) + bias[:, None]
    shares = jnp.exp(scores - program.ops.softmax_maximum(scores))
    inverse = 1.0 / jnp.sum(shares, axis=-1, keepdims=True)
    # On a GPU a whole softmax is one kernel; a sum to divide by later would read the scores again.
    late = program.platform != "gpu"
    if not late:
        shares = shares * inverse
    shares = shares.astype(query.dtype).reshape(-1, group, bias.shape[1])
    attended = jnp.einsum("bgs,bsh->bgh", shares, load(values, query.dtype))
    attended = attended.reshape(rows, heads, width)
    if late:
        attended = attended * inverse.astype(query.dtype)
    return attended[:, None], (keys, values)
