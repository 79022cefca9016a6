"""Log-probabilities of given tokens from hidden states, without ever holding [T, V] logits.

The one place where the shift by one happens: `logprobs[t]` belongs to token t and comes from hidden state t - 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dcmdp_jax.models.ops import Ops
from dcmdp_jax.models.ops.reference import permute
from dcmdp_jax.types import Array

Maximum = Callable[[jax.Array], jax.Array]


class KernelAxes(NamedTuple):
    """Manual mesh axes, of an enclosing `shard_map`, that the output matrix [D, V] is split over.

    Attributes:
        embed: the axis that splits D, gathered once in a forward and once in a backward pass; None if D is whole.
        vocab: the axis that splits V: each device computes the logits of its own part; None if V is whole.
    """

    embed: str | None = None
    vocab: str | None = None


WHOLE_KERNEL = KernelAxes()
"""Each device has the whole output matrix."""


def token_logprobs(
    hidden: jax.Array,
    kernel: jax.Array,
    input_ids: jax.Array,
    mask: jax.Array,
    *,
    temperature: float,
    chunk: int,
    ops: Ops,
    kernel_axes: KernelAxes = WHOLE_KERNEL,
) -> tuple[jax.Array, jax.Array]:
    """log pi(token t | tokens before t) and the entropy of the distribution that token t was drawn from.

    With z = h_{t-1} W / temperature:

        logprobs[t] = z[token_t] - logsumexp(z),    entropy[t] = logsumexp(z) - sum_v softmax(z)_v z_v.

    Wanted tokens are gathered first, so that padding and prompts cost nothing. Logits exist for `chunk` tokens at a
    time, forward and backward: where one chunk doesn't hold all tokens the backward pass recomputes them. The gradient
    of W is summed in float32 over chunks and devices (a bfloat16 sum over chunks loses 1e-2 of it), and over devices
    once, after the last chunk. Gradients flow to `hidden` and `kernel` from both results.

    Under a `shard_map` rows are the device's own. With `kernel_axes` it must be a `shard_map` with check_vma=False,
    whose specs split the kernel over these axes and the rows over the first; the results are the same on all devices
    of the second.

    Args:
        hidden: [R, L, D] final normed hidden states, or [R, L - 1, D] as those of the last tokens predict nothing.
        kernel: [D, V] output matrix, cast to the dtype of `hidden`; the device's part of it under `kernel_axes`.
        input_ids: [R, L] int32.
        mask: [R, L] bool, the tokens whose log-prob is wanted. The first token of a row or of a segment has no
            predecessor to come from and must be false.
        temperature: divides the logits; the one the tokens were sampled at.
        chunk: how many tokens' logits exist at one time.
        ops: of the platform.
        kernel_axes: how the kernel is split.

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
    previous = hidden[:, : length - 1]
    wanted, total = mask[:, 1:].reshape(-1), rows * (length - 1)
    size = max(1, min(chunk, total))
    blocks = -(-total // size)
    order, place = _wanted_first(wanted)
    padding = blocks * size - total
    gathered = jnp.pad(permute(previous.reshape(total, width), order, place), ((0, padding), (0, 0)))
    targets = jnp.pad(input_ids[:, 1:].reshape(-1)[order], (0, padding))
    count = (jnp.sum(wanted, dtype=jnp.int32) + size - 1) // size
    options = _Options(1.0 / temperature, ops.softmax_maximum, kernel_axes)
    results = _blocked_logprobs(
        gathered.reshape(blocks, size, width), targets.reshape(blocks, size), kernel, count, options
    )
    results = [x.reshape(-1)[:total][place].reshape(rows, length - 1) for x in results]
    logprobs, entropy = (jnp.pad(x, ((0, 0), (1, 0))) for x in results)
    return jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0)


def predicting(mask: jax.Array) -> jax.Array:
    """[R, L] bool, the positions whose hidden state predicts a token of `mask`, [R, L] bool."""
    return jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))


def _wanted_first(wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The permutation that puts wanted tokens first, in order, so that the loop over blocks stops after the last of
    them; and its inverse. Two running counts: a sort takes XLA's CPU backend long to compile and to run."""
    before = jnp.cumsum(wanted) - wanted
    index = jnp.arange(wanted.size)
    place = jnp.where(wanted, before, jnp.sum(wanted) + index - before).astype(jnp.int32)
    return jnp.zeros_like(place).at[place].set(index.astype(jnp.int32), unique_indices=True), place


class _Options(NamedTuple):
    """Static arguments of `_blocked_logprobs`; `scale` multiplies the logits."""

    scale: float
    maximum: Maximum
    axes: KernelAxes


def _whole_width(kernel: jax.Array, dtype: jnp.dtype, axes: KernelAxes) -> jax.Array:
    """[D, V of this device] in the compute dtype. Cast before it travels."""
    kernel = kernel.astype(dtype)
    return kernel if axes.embed is None else lax.all_gather(kernel, axes.embed, axis=0, tiled=True)


def _across_vocab(x: jax.Array, axes: KernelAxes) -> jax.Array:
    return x if axes.vocab is None else lax.psum(x, axes.vocab)


def _own_targets(targets: jax.Array, size: int, axes: KernelAxes) -> jax.Array:
    """Target ids counted from the first column of this device's part of the vocabulary, outside [0, size) elsewhere."""
    return targets if axes.vocab is None else targets - size * lax.axis_index(axes.vocab)


def _logits(hidden: jax.Array, kernel: jax.Array, scale: float) -> jax.Array:
    return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32) * scale


def _block(logits: jax.Array, targets: jax.Array, options: _Options) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probs, entropy and normalizer."""
    axes, size = options.axes, logits.shape[-1]
    largest, own = options.maximum(logits), _own_targets(targets, size, axes)
    if axes.vocab is not None:
        largest = lax.pmax(largest, axes.vocab)
    normalizer = jnp.log(_across_vocab(jnp.sum(jnp.exp(logits - largest), axis=-1), axes)) + largest[..., 0]
    chosen = jnp.take_along_axis(logits, jnp.clip(own, 0, size - 1)[..., None], axis=-1)[..., 0]
    if axes.vocab is not None:
        chosen = lax.psum(jnp.where((own >= 0) & (own < size), chosen, 0.0), axes.vocab)
    expected = _across_vocab(jnp.sum(jnp.exp(logits - normalizer[..., None]) * logits, axis=-1), axes)
    return chosen - normalizer, normalizer - expected, normalizer


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blocked_logprobs(
    hidden: jax.Array, targets: jax.Array, kernel: jax.Array, count: jax.Array, options: _Options
) -> tuple[jax.Array, jax.Array]:
    """`hidden` [C, T, D], `targets` [C, T]; blocks from `count` on are not computed and give 0."""
    return _blocked_forward(hidden, targets, kernel, count, options)[0]


def _blocked_forward(
    hidden: jax.Array, targets: jax.Array, kernel: jax.Array, count: jax.Array, options: _Options
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array | None, ...]]:
    whole = _whole_width(kernel, hidden.dtype, options.axes)
    if len(hidden) == 1:
        # A single block may keep the logits that each of several would have to compute again.
        logits = _logits(hidden, whole, options.scale)
        logprobs, entropy, normalizer = _block(logits, targets, options)
        return (logprobs, entropy), (hidden, targets, kernel, count, normalizer, entropy, logits)

    def body(i: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        block = _block(_logits(hidden[i], whole, options.scale), targets[i], options)
        return tuple(result.at[i].set(value) for result, value in zip(results, block, strict=True))

    zeros = jnp.zeros(targets.shape, jnp.float32)
    logprobs, entropy, normalizer = lax.fori_loop(0, count, body, (zeros, zeros, zeros))
    return (logprobs, entropy), (hidden, targets, kernel, count, normalizer, entropy, None)


def _blocked_backward(
    options: _Options, saved: tuple[jax.Array | None, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[Array | None, ...]:
    hidden, targets, kernel, count, normalizer, entropy, kept = saved
    axes = options.axes
    whole = _whole_width(kernel, hidden.dtype, axes)
    # A shard_map without vma divides the cotangents of replicated results by the devices that hold them.
    logprob_bar, entropy_bar = (_across_vocab(x, axes) for x in cotangents)
    own = _own_targets(targets, kernel.shape[-1], axes)

    def pulled(i: jax.Array | int, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The gradients of block i's hidden states and, from it, of the kernel."""
        block = hidden[i]
        centered = logits - normalizer[i][..., None]
        # d logprob / d z = onehot - p;  d entropy / d z = -p (log p + entropy)
        pull = logprob_bar[i][..., None] + entropy_bar[i][..., None] * (centered + entropy[i][..., None])
        onehot = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == own[i][..., None]
        logits_bar = (jnp.where(onehot, logprob_bar[i][..., None], 0.0) - jnp.exp(centered) * pull) * options.scale
        logits_bar = logits_bar.astype(block.dtype)
        tokens = tuple(range(block.ndim - 1))
        product = lax.dot_general(block, logits_bar, ((tokens, tokens), ((), ())), preferred_element_type=jnp.float32)
        return jnp.matmul(logits_bar, whole.T).astype(block.dtype), product

    def body(i: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block_bar, product = pulled(i, _logits(hidden[i], whole, options.scale))
        return grads[0].at[i].set(block_bar), grads[1] + product

    if kept is not None:
        block_bar, kernel_bar = pulled(0, kept[0])
        hidden_bar = block_bar[None]
    else:
        zeros = jnp.zeros_like(hidden), jnp.zeros(whole.shape, jnp.float32)
        hidden_bar, kernel_bar = lax.fori_loop(0, count, body, zeros)
    if axes.embed is not None:
        kernel_bar = lax.psum_scatter(kernel_bar, axes.embed, scatter_dimension=0, tiled=True)
    none = np.zeros(targets.shape, jax.dtypes.float0)
    return hidden_bar, none, kernel_bar.astype(kernel.dtype), np.zeros((), jax.dtypes.float0)


_blocked_logprobs.defvjp(_blocked_forward, _blocked_backward)
