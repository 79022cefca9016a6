"""Log-probabilities of given tokens from hidden states, without ever holding [T, V] logits.

The one place where the shift by one happens: `logprobs[t]` belongs to token t and comes from hidden state t - 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dcmdp_jax.models.ops import Ops
from dcmdp_jax.models.ops.reference import permute
from dcmdp_jax.types import Array

Maximum = Callable[[jax.Array], jax.Array]


def token_logprobs(
    hidden: jax.Array,
    kernel: jax.Array,
    input_ids: jax.Array,
    mask: jax.Array,
    *,
    temperature: float,
    chunk: int,
    compact: bool,
    ops: Ops,
) -> tuple[jax.Array, jax.Array]:
    """log pi(token t | tokens before t) and the entropy of the distribution that token t was drawn from.

    With z = h_{t-1} W / temperature:

        logprobs[t] = z[token_t] - logsumexp(z),    entropy[t] = logsumexp(z) - sum_v softmax(z)_v z_v.

    Logits exist for `chunk` tokens at a time, forward and backward: where one chunk doesn't hold all tokens the
    backward pass recomputes them, and adds the gradient of W in float32 (a bfloat16 sum over chunks loses 1e-2 of it).
    Gradients flow to `hidden` and `kernel` from both results.

    Args:
        hidden: [R, L, D] final normed hidden states, or [R, L - 1, D] as those of the last tokens predict nothing.
        kernel: [D, V] output matrix, cast to the dtype of `hidden`.
        input_ids: [R, L] int32.
        mask: [R, L] bool, the tokens whose log-prob is wanted. The first token of a row or of a segment has no
            predecessor to come from and must be false.
        temperature: divides the logits; the one the tokens were sampled at.
        chunk: how many tokens' logits exist at one time.
        compact: gather the wanted tokens first, so that padding and prompts cost nothing. Right on one device; on a
            mesh the gather would move rows between devices, so every position is computed there.
        ops: of the platform.

    Returns:
        logprobs and entropy, [R, L] float32 in nats, 0 where `mask` is false.

    Raises:
        ValueError: if the temperature is not positive or shapes disagree.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: got {temperature}, must be above 0")
    rows, length = input_ids.shape
    if hidden.shape[:2] not in ((rows, length), (rows, length - 1)) or input_ids.shape != mask.shape:
        raise ValueError(f"hidden {hidden.shape}, input_ids {input_ids.shape}, mask {mask.shape}: rows must agree")
    width = hidden.shape[-1]
    kernel = kernel.astype(hidden.dtype)
    previous = hidden[:, : length - 1]
    if compact:
        wanted, total = mask[:, 1:].reshape(-1), rows * (length - 1)
        size = max(1, min(chunk, total))
        blocks = -(-total // size)
        order, place = _wanted_first(wanted)
        padding = blocks * size - total
        gathered = jnp.pad(permute(previous.reshape(total, width), order, place), ((0, padding), (0, 0)))
        targets = jnp.pad(input_ids[:, 1:].reshape(-1)[order], (0, padding))
        count = (jnp.sum(wanted, dtype=jnp.int32) + size - 1) // size
        blocked = gathered.reshape(blocks, size, width), targets.reshape(blocks, size)
        results = _blocked_logprobs(*blocked, kernel, count, 1.0 / temperature, ops.softmax_maximum)
        results = [x.reshape(-1)[:total][place].reshape(rows, length - 1) for x in results]
        logprobs, entropy = (jnp.pad(x, ((0, 0), (1, 0))) for x in results)
    else:
        size = max(d for d in range(1, length + 1) if length % d == 0 and d <= max(1, chunk // rows))
        previous = jnp.pad(previous, ((0, 0), (1, 0), (0, 0)))
        blocked = (_split(previous, size), _split(input_ids, size))
        count = jnp.int32(length // size)
        logprobs, entropy = _blocked_logprobs(*blocked, kernel, count, 1.0 / temperature, None)
        logprobs, entropy = (jnp.moveaxis(x, 0, 1).reshape(rows, length) for x in (logprobs, entropy))
    return jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0)


def _split(x: jax.Array, size: int) -> jax.Array:
    """[R, L, ...] -> [L / size, R, size, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _wanted_first(wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The permutation that puts wanted tokens first, in order, so that the loop over blocks stops after the last of
    them; and its inverse. Two running counts: a sort takes XLA's CPU backend long to compile and to run."""
    before = jnp.cumsum(wanted) - wanted
    index = jnp.arange(wanted.size)
    place = jnp.where(wanted, before, jnp.sum(wanted) + index - before).astype(jnp.int32)
    return jnp.zeros_like(place).at[place].set(index.astype(jnp.int32), unique_indices=True), place


def _logits(hidden: jax.Array, kernel: jax.Array, scale: float) -> jax.Array:
    return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32) * scale


def _block(logits: jax.Array, targets: jax.Array, maximum: Maximum | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probs, entropy and normalizer; `maximum` is None where the vocabulary may be split over devices."""
    if maximum is not None:
        largest = maximum(logits)
        normalizer = jnp.log(jnp.sum(jnp.exp(logits - largest), axis=-1)) + largest[..., 0]
    else:
        normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    entropy = normalizer - jnp.sum(jnp.exp(logits - normalizer[..., None]) * logits, axis=-1)
    return chosen - normalizer, entropy, normalizer


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _blocked_logprobs(
    hidden: jax.Array, targets: jax.Array, kernel: jax.Array, count: jax.Array, scale: float, maximum: Maximum | None
) -> tuple[jax.Array, jax.Array]:
    """`hidden` [C, ..., D], `targets` [C, ...]; blocks from `count` on are not computed and give 0."""
    return _blocked_forward(hidden, targets, kernel, count, scale, maximum)[0]


def _blocked_forward(
    hidden: jax.Array, targets: jax.Array, kernel: jax.Array, count: jax.Array, scale: float, maximum: Maximum | None
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array | None, ...]]:
    if len(hidden) == 1:
        # A single block may keep the logits that each of several would have to compute again.
        logits = _logits(hidden, kernel, scale)
        logprobs, entropy, normalizer = _block(logits, targets, maximum)
        return (logprobs, entropy), (hidden, targets, kernel, count, normalizer, entropy, logits)

    def body(i: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        block = _block(_logits(hidden[i], kernel, scale), targets[i], maximum)
        return tuple(result.at[i].set(value) for result, value in zip(results, block, strict=True))

    zeros = jnp.zeros(targets.shape, jnp.float32)
    logprobs, entropy, normalizer = lax.fori_loop(0, count, body, (zeros, zeros, zeros))
    return (logprobs, entropy), (hidden, targets, kernel, count, normalizer, entropy, None)


def _blocked_backward(
    scale: float, maximum: Maximum | None, saved: tuple[jax.Array | None, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Array | None, ...]:
    del maximum
    hidden, targets, kernel, count, normalizer, entropy, kept = saved
    logprob_bar, entropy_bar = cotangents

    def pulled(i: jax.Array | int, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The gradients of block i's hidden states and, from it, of the kernel."""
        block = hidden[i]
        centered = logits - normalizer[i][..., None]
        # d logprob / d z = onehot - p;  d entropy / d z = -p (log p + entropy)
        pull = logprob_bar[i][..., None] + entropy_bar[i][..., None] * (centered + entropy[i][..., None])
        onehot = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[i][..., None]
        logits_bar = (jnp.where(onehot, logprob_bar[i][..., None], 0.0) - jnp.exp(centered) * pull) * scale
        logits_bar = logits_bar.astype(block.dtype)
        axes = tuple(range(block.ndim - 1))
        product = lax.dot_general(block, logits_bar, ((axes, axes), ((), ())), preferred_element_type=jnp.float32)
        return jnp.matmul(logits_bar, kernel.T).astype(block.dtype), product

    def body(i: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block_bar, product = pulled(i, _logits(hidden[i], kernel, scale))
        return grads[0].at[i].set(block_bar), grads[1] + product

    if kept is not None:
        block_bar, kernel_bar = pulled(0, kept[0])
        hidden_bar = block_bar[None]
    else:
        zeros = jnp.zeros_like(hidden), jnp.zeros(kernel.shape, jnp.float32)
        hidden_bar, kernel_bar = lax.fori_loop(0, count, body, zeros)
    none = np.zeros(targets.shape, jax.dtypes.float0)
    return hidden_bar, none, kernel_bar.astype(kernel.dtype), np.zeros((), jax.dtypes.float0)


_blocked_logprobs.defvjp(_blocked_forward, _blocked_backward)
