"""A forward pass of whole rows, the vocabulary, and scores of given completions.

All but `score` runs inside a `shard_map`; a tensor group may have split the vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.local.cache import Layer, load, store
from dcmdp_jax.engines.local.layout import ROWS, TENSOR, Program, convert_late, weight_specs
from dcmdp_jax.models import (
    attention,
    decoder,
    gated_delta,
    layer_params,
    layers,
    products,
    quantize,
)
from dcmdp_jax.models.sampler import Draw, choose_tokens
from dcmdp_jax.types import Array, Params

_SCORE_CHUNK = 1024


def on_devices(
    program: Program,
    function: Callable[..., Any],
    in_specs: tuple[Any, ...],
    out_specs: Any,
) -> Callable[..., Any]:
    """`function` of the engine's tree and further arguments, run by each device on its share.

    It gets the device's own weights (`Program.own_weights`). No product and no sum is partitioned
    by the compiler.
    """

    def local(weights: Params, *arguments: Any) -> Any:
        own_weights = program.own_weights(weights)
        return function(own_weights, *arguments)

    def run(weights: Params, *arguments: Any) -> Any:
        specs = weight_specs(weights, program.config, program.mesh)
        return jax.shard_map(
            local,
            mesh=program.mesh,
            in_specs=(specs, *in_specs),
            out_specs=out_specs,
            check_vma=False,
        )(weights, *arguments)

    return run


def forward_rows(
    weights: Params,
    tokens: Array,
    lengths: Array,
    program: Program,
) -> tuple[Array, list[Layer], Array | None]:
    """Run the device's padded rows [R, L] without a cache.

    Returns:
        Hidden states [R, L, D], each layer's stored keys and values [R, L, K, h] or its state after
        the last token, and the tokens' experts, see `run_layers`.
    """
    config = program.device_model
    dtype = jnp.dtype(program.compute_dtype)
    length = tokens.shape[1]
    kernel = attention.RowKernel(
        name=attention.choose_kernel("auto", dtype, program.platform, length),
        ops=program.ops,
        one_segment=True,
    )
    segment_ids = (jnp.arange(length) < lengths[:, None]).astype(jnp.int32)
    tables = layers.all_rotary_tables(config, jnp.arange(length)[None])

    def attend(
        query: Array,
        key: Array,
        value: Array,
        *,
        window: int,
    ) -> tuple[Array, tuple[Array, Array]]:
        stored = store(key, program.cache_dtype), store(value, program.cache_dtype)
        attended = attention.row_attention(
            query,
            load(stored[0], dtype),
            load(stored[1], dtype),
            segment_ids,
            kernel,
            window=window,
        )
        return attended, stored

    x = embed(weights, tokens, program).astype(dtype)
    mixers = []
    for layer, window in zip(weights["layers"], config.layer_windows(length), strict=True):
        mixer = functools.partial(attend, window=window)
        if layer_params.is_recurrent(layer):
            mixer = functools.partial(gated_delta.prefill, config, lengths)
        mixers.append(mixer)
    return run_layers(weights, x, tables, mixers, program)


def run_layers(
    weights: Params,
    x: Array,
    rotary: Any,
    mixers: Sequence[Callable[..., tuple[Array, Layer]]],
    program: Program,
) -> tuple[Array, list[Layer], Array | None]:
    """Run all layers and the final norm.

    Args:
        weights: the engine's tree.
        x: [R, L, D], what the first layer reads.
        rotary: rotary tables of the tokens, see `layers.all_rotary_tables`.
        mixers: how each layer attends, or runs its recurrence, see `decoder.Block`.
        program: static arguments.

    Returns:
        Hidden states [R, L, D], what each mixer stored, and the experts of each token, [R, L,
        layers, k] int16; None unless the program asks.
    """
    config = program.device_model
    cache = []
    reports = []
    for layer, rope, mixer in zip(weights["layers"], config.layer_ropes, mixers, strict=True):
        layer, x = convert_late(layer, x, program)
        x, stored, aux = decoder.block_of(layer, config)(
            x,
            rotary[rope],
            mixer,
            program.ops,
            mesh=program.expert_mesh,
            reduce=program.reduce,
        )
        cache.append(stored)
        reports.append(aux)
    routed = None
    if program.routed_experts:
        experts = [aux["routed_experts"].astype(jnp.int16) for aux in reports]
        routed = jnp.stack(experts, axis=2)
    return decoder.final_norm(weights, config, x), cache, routed


def own_tokens(tokens: Array, program: Program) -> tuple[Array, Array | bool]:
    """Token ids in the device's part of the vocabulary, and which tokens are in it.

    Others are clipped to the part. True: each device has all of the vocabulary.
    """
    if not program.splits_vocab:
        return tokens, True
    size = program.config.vocab_size // program.tensor
    ids = tokens - size * jax.lax.axis_index(TENSOR)
    return jnp.clip(ids, 0, size - 1), (ids >= 0) & (ids < size)


def embed(weights: Params, tokens: Array, program: Program) -> Array:
    """Look up embeddings as the first layer reads them: [..., D] for `tokens` [...]."""
    tokens, ours = own_tokens(tokens, program)
    if "embedding" in weights:
        x = weights["embedding"][tokens]
    else:
        x = jnp.moveaxis(weights["output"][:, tokens], 0, -1)
    x = x.astype(program.compute_dtype)
    if ours is not True:
        x = jax.lax.psum(jnp.where(ours[..., None], x, 0), TENSOR)
    return layers.embedding_scale(program.config, x)


def logits(weights: Params, hidden: Array) -> Array:
    """Compute logits of the device's part of the vocabulary, [..., V] float32."""
    kernel = decoder.output_kernel(weights)
    if isinstance(kernel, quantize.QuantizedKernel):
        return quantize.quantized_product(hidden, kernel)
    return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)


def sample_tokens(
    weights: Params,
    hidden: Array,
    words: Array,
    draw: Draw,
    mode: str,
    program: Program,
) -> tuple[Array, ...]:
    """`choose_tokens` for the device's rows [R, D].

    Where the vocabulary is split, devices of a tensor group take an equal share of their rows each,
    with all of the vocabulary.

    Args:
        weights: the engine's tree.
        hidden: [R, D], the last layer's.
        words: [R, 2] uint32, random bits to draw with.
        draw: temperature and top-p.
        mode: see `choose_tokens`.
        program: static arguments.
    """
    # XLA would convert a quantized output matrix before the layers run, and hold it until here.
    output, hidden = convert_late({"output": decoder.output_kernel(weights)}, hidden, program)
    token_logits = logits(output, hidden)
    choose = functools.partial(
        choose_tokens,
        inverse_temperature=draw.inverse_temperature,
        top_p=draw.top_p,
        mode=mode,
        top=program.listed(mode),
    )
    if not program.splits_vocab:
        return choose(token_logits, words)
    # [R, V / ways] -> [R / ways, V]
    token_logits = jax.lax.all_to_all(
        token_logits,
        TENSOR,
        split_axis=0,
        concat_axis=1,
        tiled=True,
    )
    share = token_logits.shape[0]
    words = jax.lax.dynamic_slice_in_dim(words, share * jax.lax.axis_index(TENSOR), share)
    columns = choose(token_logits, words)
    return tuple(jax.lax.all_gather(x, TENSOR, axis=0, tiled=True) for x in columns)


@functools.partial(jax.jit, static_argnames=("program",))
@products.in_compute_dtype
def score(
    weights: Params,
    tokens: Array,
    lengths: Array,
    inverse_temperature: Array,
    *,
    program: Program,
) -> Array:
    """Compute teacher-forced log-probs of rows, with the rounding of weights and cache.

    Args:
        weights: the engine's tree.
        tokens: [R, L] int32, right-padded.
        lengths: [R] int32.
        inverse_temperature: [] float32.
        program: static arguments.

    Returns:
        [R, L - 1] float32 nats, entry t for token t + 1. Logits are in memory for about 1,024
        tokens of a device at a time.
    """

    def local(
        weights: Params,
        tokens: Array,
        lengths: Array,
        inverse_temperature: Array,
    ) -> Array:
        hidden, _, _ = forward_rows(weights, tokens, lengths, program)
        # The last position is computed too, against the first token, and dropped: rows without it
        # have an odd length, and the compiler for TPUs takes minutes over their reshape.
        targets, in_own_part = own_tokens(jnp.roll(tokens, -1, axis=1).reshape(-1), program)
        in_own_part = jnp.broadcast_to(in_own_part, targets.shape)
        previous = hidden.reshape(targets.size, -1)
        chunks = -(-targets.size // _SCORE_CHUNK)
        chunk_size = -(-targets.size // chunks)
        padding = chunks * chunk_size - targets.size

        def chunk_logprobs(chunk: tuple[Array, ...]) -> Array:
            hidden, targets, in_own_part = chunk
            scaled = logits(weights, hidden) * inverse_temperature
            target_logits = jnp.take_along_axis(scaled, targets[:, None], axis=-1)[:, 0]
            if not program.splits_vocab:
                return target_logits - jax.nn.logsumexp(scaled, axis=-1)
            largest = jax.lax.pmax(jnp.max(scaled, axis=-1), TENSOR)
            mass = jnp.sum(jnp.exp(scaled - largest[:, None]), axis=-1)
            target_logits = jnp.where(in_own_part, target_logits, 0.0)
            target_logits, mass = jax.lax.psum((target_logits, mass), TENSOR)
            return target_logits - largest - jnp.log(mass)

        columns = (
            jnp.pad(previous, ((0, padding), (0, 0))),
            jnp.pad(targets, (0, padding)),
            jnp.pad(in_own_part, (0, padding)),
        )
        chunked = tuple(x.reshape(chunks, -1, *x.shape[1:]) for x in columns)
        logprobs = jax.lax.map(chunk_logprobs, chunked)
        return logprobs.reshape(-1)[: targets.size].reshape(tokens.shape)[:, :-1]

    return on_devices(program, local, (ROWS, ROWS, P()), ROWS)(
        weights,
        tokens,
        lengths,
        inverse_temperature,
    )
