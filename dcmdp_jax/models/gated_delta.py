"""Recurrent layers of the gated delta rule, as Qwen3.5's in transformers.

Yang et al. 2025, arXiv:2412.06464.

Each value head has a state S [k, v]. With a normed query q and key k, a value v, a decay a in (0,
1) and a rate b:

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T,      y_t = S_t^T q_t

`step` computes a token as written. `in_chunks` computes 64 tokens at a time by matrix products: the
same sums in another order, so that the two agree up to rounding. The state is float32, whatever the
compute dtype.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.declare import Scope, parameter
from dcmdp_jax.models.families import FAMILIES
from dcmdp_jax.models.layers import Linear, RMSNorm
from dcmdp_jax.models.ops import Ops
from dcmdp_jax.models.products import products_in
from dcmdp_jax.types import Array

CHUNK = 64
_LEAST_NORM = 1e-6


class Mixed(NamedTuple):
    """What a recurrent layer reads of its tokens.

    Attributes:
        channels: [B, T, C] queries, keys and values side by side, before the convolution.
        kernel: [C, K] of the convolution; the last entry multiplies the token itself.
        log_decay: [B, T, H] float32, log a, at most 0.
        rate: [B, T, H], b.
    """

    channels: Array
    kernel: Array
    log_decay: Array
    rate: Array


class State(NamedTuple):
    """What a recurrent layer keeps of a row's tokens, however many they are.

    Attributes:
        memory: S [B, H, k, v] float32.
        window: [B, C, K - 1] float32, channels of the last tokens, 0 before the first.
    """

    memory: Array
    window: Array


Recur = Callable[[Mixed], tuple[Array, Any]]
"""(what the layer reads) -> (y [B, T, H, v], the caller's `State` or None)."""


class Heads(NamedTuple):
    """Arguments of the recurrence, float32.

    `query` (times 1 / sqrt(k)) and `key` [B, T, H, k] of length 1, `value` [B, T, H, v],
    `log_decay` and `rate` [B, T, H].
    """

    query: Array
    key: Array
    value: Array
    log_decay: Array
    rate: Array


class GatedDeltaNet(nnx.Module):
    """Projections, gates and norm around a recurrence, in place of `decoder.Attention`."""

    def __init__(self, scope: Scope) -> None:
        config = scope.config
        heads = config.linear_num_value_heads
        embed = config.hidden_size
        width = heads * config.linear_value_head_dim

        self.dt_bias = parameter(
            scope, "dt_bias", (heads,), ("norm",), init=jax.nn.initializers.ones
        )
        self.a_log = parameter(
            scope,
            "A_log",
            (heads,),
            ("norm",),
            init=_log_uniform,
        )
        self.conv = parameter(
            scope,
            "conv1d.weight",
            (config.mixed_width, 1, config.linear_conv_kernel_dim),
            ("heads", "norm", "norm"),
            init=jax.nn.initializers.normal(config.initializer_range),
        )
        self.norm = RMSNorm(
            scope.inner("norm"),
            config.linear_value_head_dim,
            "head_dim",
            family=FAMILIES["llama"],
        )

        inward = ("embed", "heads")
        self.o = Linear(
            scope.inner("out_proj"),
            (width, embed),
            ("heads", "embed"),
        )
        self.mixed = Linear(
            scope.inner("in_proj_qkv"),
            (embed, config.mixed_width),
            inward,
        )
        self.gate = Linear(
            scope.inner("in_proj_z"),
            (embed, width),
            inward,
        )
        # Engines quantize neither: they are small, and a decay acts on all later tokens.
        self.rate = Linear(
            scope.inner("in_proj_b"),
            (embed, heads),
            inward,
            quantized=False,
        )
        self.decay = Linear(
            scope.inner("in_proj_a"),
            (embed, heads),
            inward,
            quantized=False,
        )

    def __call__(
        self,
        x: Array,
        rotary: Any,
        recur: Recur,
        ops: Ops,
    ) -> tuple[Array, Any]:
        speed = jnp.exp(at_least_float32(self.a_log.get_value()))
        wait = at_least_float32(self.decay(x)) + self.dt_bias.get_value()
        mixed = Mixed(
            channels=self.mixed(x),
            kernel=self.conv.get_value()[:, 0],
            log_decay=-speed * jax.nn.softplus(wait),
            rate=jax.nn.sigmoid(self.rate(x)),
        )
        y, state = recur(mixed)

        y = self.norm(y.astype(x.dtype))
        gate = jax.nn.silu(at_least_float32(self.gate(x))).reshape(y.shape)
        gated = (y * gate).astype(x.dtype)
        return self.o(gated.reshape(*x.shape[:2], -1)), state


def _log_uniform(
    key: Array,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
) -> Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))


def at_least_float32(x: Array) -> Array:
    """`x` in float32, or in float64 where it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rows(
    config: ModelConfig,
    segment_ids: Int[Array, "R L"],
    mixed: Mixed,
) -> tuple[Array, None]:
    """A `Recur` of packed rows: state and convolution begin anew with each segment."""
    tokens = heads(config, convolved(mixed, segment_ids), mixed)
    y, _ = in_chunks(tokens, segment_ids)
    return y, None


def prefill(
    config: ModelConfig,
    lengths: Int[Array, " R"],
    mixed: Mixed,
) -> tuple[Array, State]:
    """A `Recur` of right-padded rows of one segment, with the state after each row's last token."""
    length = mixed.channels.shape[1]
    real = (jnp.arange(length) < lengths[:, None])[..., None]
    segment_ids = jnp.zeros(real.shape[:2], jnp.int32)
    # Padding neither decays the state nor adds to it.
    masked = mixed._replace(
        log_decay=jnp.where(real, mixed.log_decay, 0), rate=jnp.where(real, mixed.rate, 0)
    )
    tokens = heads(config, convolved(mixed, segment_ids), masked)
    y, memory = in_chunks(tokens, segment_ids)

    last = (lengths[:, None] + jnp.arange(1 - config.linear_conv_kernel_dim, 0))[..., None]
    channels = jnp.take_along_axis(mixed.channels, jnp.maximum(last, 0), axis=1)
    window = at_least_float32(channels)
    window = jnp.where(last >= 0, window, 0)
    return y, State(memory, window.swapaxes(1, 2))


def decode(
    config: ModelConfig,
    state: State,
    mixed: Mixed,
) -> tuple[Array, State]:
    """A `Recur` of one token for each row, from the state before it."""
    window = jnp.concatenate([state.window, mixed.channels.swapaxes(1, 2)], axis=2)
    sums = jnp.sum(window * mixed.kernel, axis=2)[:, None]
    channels = jax.nn.silu(sums).astype(mixed.channels.dtype)
    token = heads(config, channels, mixed)
    memory, y = step(state.memory, jax.tree.map(lambda x: x[:, 0], token))
    return y[:, None], State(memory, window[:, :, 1:])


def convolved(
    mixed: Mixed,
    segment_ids: Int[Array, "R L"],
) -> Float[Array, "R L C"]:
    """silu(sum_i w_i x_(t-i)) over the tokens of t's own segment, for each channel by itself."""
    channels = mixed.channels
    size = mixed.kernel.shape[1]
    total = 0.0
    for back in range(size):
        earlier_ids = jnp.roll(segment_ids, back, axis=1)
        same_segment = (earlier_ids == segment_ids) & (jnp.arange(segment_ids.shape[1]) >= back)
        earlier = at_least_float32(jnp.roll(channels, back, axis=1))
        weight = mixed.kernel[:, size - 1 - back]
        total += jnp.where(same_segment[..., None], earlier, 0) * weight
    return jax.nn.silu(total).astype(channels.dtype)


def heads(config: ModelConfig, channels: Array, mixed: Mixed) -> Heads:
    """Split the convolved channels into heads; a key head serves several value heads."""
    key_heads = config.linear_num_key_heads
    value_heads = config.linear_num_value_heads
    size = config.linear_key_head_dim
    width = key_heads * size
    query, key, value = jnp.split(at_least_float32(channels), (width, 2 * width), axis=-1)

    def unit(x: Array) -> Array:
        x = x.reshape(*x.shape[:2], key_heads, size)
        x = x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _LEAST_NORM)
        return jnp.repeat(x, value_heads // key_heads, axis=2)

    value = value.reshape(*value.shape[:2], value_heads, config.linear_value_head_dim)
    return Heads(
        query=unit(query) / math.sqrt(size),
        key=unit(key),
        value=value,
        log_decay=mixed.log_decay,
        rate=at_least_float32(mixed.rate),
    )


def step(
    memory: Float[Array, "B H k v"],
    token: Heads,
) -> tuple[Array, Array]:
    """The recurrence for one token of each row; `token` without the axis of tokens.

    Returns:
        The new state and y [B, H, v].
    """
    memory = memory * jnp.exp(token.log_decay)[..., None, None]
    recalled = jnp.sum(memory * token.key[..., None], axis=-2)
    change = (token.value - recalled) * token.rate[..., None]
    memory = memory + token.key[..., None] * change[..., None, :]
    return memory, jnp.sum(memory * token.query[..., None], axis=-2)


def in_chunks(
    tokens: Heads,
    segment_ids: Int[Array, "B L"],
) -> tuple[Float[Array, "B L H v"], Float[Array, "B H k v"]]:
    """The recurrence over rows, `CHUNK` tokens at a time or fewer.

    As `torch_chunk_gated_delta_rule` of transformers.

    Within a chunk, with G_i the sum of log a up to token i, the changes u_i = b_i (v_i - a_i
    S_(i-1)^T k_i) solve

        u_i + sum_(j < i) b_i exp(G_i - G_j) (k_i . k_j) u_j = b_i (v_i - exp(G_i) S^T k_i),

    a triangular system, S being the state before the chunk. A token sees nothing of another
    segment. Each G_i - G_j is a sum of its own: as a difference of two sums it has lost the digits
    of a slow decay after fast ones, and the result is 25 times as far from the exact one.

    Args:
        tokens: arguments of the recurrence.
        segment_ids: equal ids adjacent.

    Returns:
        y, and the state after the last token.
    """
    batch, length = segment_ids.shape
    chunk = min(CHUNK, 1 << (length - 1).bit_length())

    def chunks(x: Array, mode: str = "constant") -> Array:
        """[B, L, H, ...] -> [L / chunk, B, H, chunk, ...], with zeros after the last token.

        Zeros leave the state as it is.
        """
        other_axes = ((0, 0),) * (x.ndim - 2)
        padded = jnp.pad(x, ((0, 0), (0, -length % chunk), *other_axes), mode=mode)
        in_parts = padded.reshape(batch, -1, chunk, *x.shape[2:])
        return jnp.moveaxis(in_parts, (1, 2), (0, 3))

    def advance(
        memory: Array,
        xs: tuple[Array, ...],
    ) -> tuple[Array, Array]:
        fresh, recalled, within, query, key, decay = xs
        change = fresh - recalled @ memory
        next_memory = memory * decay + jnp.swapaxes(key, -1, -2) @ change
        y = query @ memory + within @ change
        return next_memory, y

    query, key, value, log_decay, rate = map(chunks, tokens)

    # exp(G_i - G_j) of two tokens of a chunk; exp(G_i) where the chunk begins in their segment.
    segments = chunks(segment_ids[..., None], "edge")
    by_pair = jnp.broadcast_to(log_decay[..., None], (*log_decay.shape, chunk))
    later = jnp.tril(by_pair, -1)
    seen = jnp.tril(segments[..., :, None] == segments[..., None, :])
    log_between = jnp.cumsum(later, axis=-2)
    between = jnp.exp(jnp.where(seen, log_between, -jnp.inf))

    before = jnp.concatenate([segments[:1, ..., -1:], segments[:-1, ..., -1:]])
    continues = segments == before
    decays = jnp.exp(jnp.cumsum(log_decay, axis=-1))
    since = jnp.where(continues, decays, 0)[..., None]

    rated = key * rate[..., None]
    memory = jnp.zeros((batch, query.shape[2], key.shape[-1], value.shape[-1]), query.dtype)
    with products_in(query.dtype):
        system = jnp.einsum("...ik,...jk->...ij", rated, key) * between
        inverse = _unit_inverse(system)
        within = jnp.einsum("...ik,...jk->...ij", query, key) * between
        xs = (
            inverse @ (value * rate[..., None]),
            inverse @ (rated * since),
            within,
            query * since,
            key * between[..., -1, :, None],
            since[..., -1:, :],
        )
        memory, y = jax.lax.scan(advance, memory, xs)
    y = jnp.moveaxis(y, (0, 3), (1, 2)).reshape(batch, -1, *y.shape[2:3], y.shape[-1])
    return y[:, :length], memory


def _unit_inverse(system: Float[Array, "... c c"]) -> Float[Array, "... c c"]:
    """The inverse of 1 + the strict lower triangle of `system`, by products that a mesh can split.

    Of a matrix of two blocks with inverses A and B on the diagonal and C below, the block below is
    -B C A.
    """
    size = 1
    index = jnp.arange(system.shape[-1])
    inverse = jnp.broadcast_to(jnp.eye(index.size, dtype=system.dtype), system.shape)
    while size < index.size:
        block = index // size
        below = (block[:, None] == block + 1) & (block % 2 == 0)
        inverse -= inverse @ jnp.where(below, system, 0) @ inverse
        size *= 2
    return inverse
