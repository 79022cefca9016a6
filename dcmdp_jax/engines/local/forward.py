"""A forward pass of whole rows, the vocabulary, and scores of given completions.

All but `score` runs inside a `shard_map`; a tensor group may have split the vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.local.cache import Layer, load, store
from dcmdp_jax.engines.local.layout import ROWS, TENSOR, Program, convert_late, weight_specs
from dcmdp_jax.models import attention, decoder, gated_delta, layers, moe, products, quantize
from dcmdp_jax.models.sampler import Draw, choose_tokens
from dcmdp_jax.types import Params

_SCORE_CHUNK = 1024


def on_devices(
    program: Program, function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any
) -> Callable[..., Any]:
    """`function` of the engine's tree and further arguments, run by each device on its share: no
    product and no sum is partitioned by the compiler.
    """

    def run(weights: Params, *arguments: Any) -> Any:
        specs = weight_specs(weights, program.config, program.mesh)
        return jax.shard_map(
            function,
            mesh=program.mesh,
            in_specs=(specs, *in_specs),
            out_specs=out_specs,
            check_vma=False,
        )(weights, *arguments)

    return run


def forward_rows(
    weights: Params, tokens: jax.Array, lengths: jax.Array, program: Program
) -> tuple[jax.Array, list[Layer], jax.Array | None]:
    """Run the device's padded rows [R, L] without a cache.

    Returns:
        Hidden states [R, L, D], each layer's stored keys and values [R, L, K, h] or its state after
        the last token, and the tokens' experts, see `routed_experts`.
    """
    config = program.part
    dtype = jnp.dtype(program.compute_dtype)
    length = tokens.shape[1]
    kernel = attention.choose_kernel("auto", dtype, program.platform, length)
    segment_ids = (jnp.arange(length) < lengths[:, None]).astype(jnp.int32)
    tables = layers.all_rotary_tables(config, jnp.arange(length)[None])
    how = {"kernel": kernel, "one_segment": True, "ops": program.ops}

    def attend(
        query: jax.Array, key: jax.Array, value: jax.Array, *, window: int
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        stored = store(key, program.cache_dtype), store(value, program.cache_dtype)
        read = (load(x, dtype) for x in stored)
        return attention.row_attention(query, *read, segment_ids, window=window, **how), stored

    x = embed(weights, tokens, program).astype(dtype)
    stored = []
    reports = []
    for layer, rope, window in zip(
        weights["layers"], config.layer_ropes, config.layer_windows(length), strict=True
    ):
        layer, x = convert_late(layer, x, program)
        own = functools.partial(attend, window=window)
        if decoder.is_recurrent(layer):
            own = functools.partial(gated_delta.prefill, config, lengths)
        x, kept, aux = decoder.block_of(layer, config)(
            x, tables[rope], own, program.ops, mesh=program.expert_mesh, reduce=program.reduce
        )
        stored.append(kept)
        reports.append(aux)
    return decoder.final_norm(weights, config, x), stored, routed_experts(reports, program)


def routed_experts(reports: list[moe.Aux], program: Program) -> jax.Array | None:
    """[R, L, layers, k] int16, the experts of each token as the layers report them; None unless the
    program asks.
    """
    if not program.routed_experts:
        return None
    return jnp.stack([aux["routed_experts"].astype(jnp.int16) for aux in reports], axis=2)


def own_tokens(tokens: jax.Array, program: Program) -> tuple[jax.Array, jax.Array | bool]:
    """Token ids counted from the first of the device's part of the vocabulary, and which of them
    are in it.

    Others are clipped to the part. True: each device has all of the vocabulary.
    """
    if not program.splits_vocab:
        return tokens, True
    size = program.config.vocab_size // program.tensor
    own = tokens - size * jax.lax.axis_index(TENSOR)
    return jnp.clip(own, 0, size - 1), (own >= 0) & (own < size)


def embed(weights: Params, tokens: jax.Array, program: Program) -> jax.Array:
    """Look up embeddings as the first layer reads them: [..., D] for `tokens` [...]."""
    tokens, ours = own_tokens(tokens, program)
    tied = "embedding" not in weights
    x = jnp.moveaxis(weights["output"][:, tokens], 0, -1) if tied else weights["embedding"][tokens]
    x = x.astype(program.compute_dtype)
    x = x if ours is True else jax.lax.psum(jnp.where(ours[..., None], x, 0), TENSOR)
    return layers.embedding_scale(program.config, x)


def logits(weights: Params, hidden: jax.Array) -> jax.Array:
    """Compute logits of the device's part of the vocabulary, [..., V] float32."""
    kernel = decoder.output_kernel(weights)
    if isinstance(kernel, quantize.QuantizedKernel):
        return quantize.quantized_product(hidden, kernel)
    return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)


def sample_tokens(
    weights: Params, hidden: jax.Array, words: jax.Array, draw: Draw, mode: str, program: Program
) -> tuple[jax.Array, ...]:
    """`choose_tokens` for the device's rows [R, D]. Where the vocabulary is split, devices of a
    tensor group take an equal share of their rows each, with all of the vocabulary.
    """
    output, hidden = convert_late({"output": decoder.output_kernel(weights)}, hidden, program)
    values = logits(output, hidden)
    how = draw.inverse_temperature, draw.top_p, mode, program.listed(mode)
    if not program.splits_vocab:
        return choose_tokens(values, words, *how)
    # [R, V / ways] -> [R / ways, V]
    values = jax.lax.all_to_all(values, TENSOR, split_axis=0, concat_axis=1, tiled=True)
    share = values.shape[0]
    words = jax.lax.dynamic_slice_in_dim(words, share * jax.lax.axis_index(TENSOR), share)
    chosen = choose_tokens(values, words, *how)
    return tuple(jax.lax.all_gather(x, TENSOR, axis=0, tiled=True) for x in chosen)


@functools.partial(jax.jit, static_argnames=("program",))
@products.in_compute_dtype
def score(
    weights: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    inverse_temperature: jax.Array,
    *,
    program: Program,
) -> jax.Array:
    """Compute teacher-forced log-probs of rows under the engine's weights, including cache
    rounding.

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
    local = functools.partial(_score_local, program=program)
    return on_devices(program, local, (ROWS, ROWS, P()), ROWS)(
        weights, tokens, lengths, inverse_temperature
    )


def _score_local(
    weights: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    inverse_temperature: jax.Array,
    *,
    program: Program,
) -> jax.Array:
    """Run `score` on one device, with its share of the rows."""
    weights = program.own_weights(weights)
    hidden, _, _ = forward_rows(weights, tokens, lengths, program)
    # The last position is computed too, against the first token, and dropped: rows without it have
    # an odd length, and the compiler for TPUs takes minutes over their reshape.
    targets, ours = own_tokens(jnp.roll(tokens, -1, axis=1).reshape(-1), program)
    previous = hidden.reshape(targets.size, -1)
    chunks = -(-targets.size // _SCORE_CHUNK)
    padding = chunks * -(-targets.size // chunks) - targets.size

    def chunk(part: tuple[jax.Array, ...]) -> jax.Array:
        scaled = logits(weights, part[0]) * inverse_temperature
        chosen = jnp.take_along_axis(scaled, part[1][:, None], axis=-1)[:, 0]
        if not program.splits_vocab:
            return chosen - jax.nn.logsumexp(scaled, axis=-1)
        largest = jax.lax.pmax(jnp.max(scaled, axis=-1), TENSOR)
        mass = jnp.sum(jnp.exp(scaled - largest[:, None]), axis=-1)
        chosen, mass = jax.lax.psum((jnp.where(part[2], chosen, 0.0), mass), TENSOR)
        return chosen - largest - jnp.log(mass)

    parts = jnp.pad(previous, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
    if program.splits_vocab:
        parts = (*parts, jnp.pad(ours, (0, padding)))
    logprobs = jax.lax.map(
        chunk, jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), parts)
    )
    return logprobs.reshape(-1)[: targets.size].reshape(tokens.shape)[:, :-1]
