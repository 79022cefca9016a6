"""Log-probabilities of given tokens from hidden states, without ever holding [T, V] logits.

The one place where the shift by one happens: `logprobs[t]` belongs to token t and comes from hidden
state t - 1.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from dcmdp_jax.models.ops import Ops
from dcmdp_jax.models.ops.reference import permute
from dcmdp_jax.models.products import precision_of
from dcmdp_jax.types import Array

CHUNKS = "logprob_chunks"
"""Name scope of the loops over chunks of tokens."""


class KernelAxes(NamedTuple):
    """Manual mesh axes, of an enclosing `shard_map`, that split the output matrix [D, V] and the
    embedding [V, D].

    Attributes:
        embed: the axis that splits D; None if D is whole. The output matrix is gathered over it
            once a pass, a piece of the vocabulary at a time: whole, with its float32 gradient, it
            takes gigabytes.
        vocab: the axis that splits V: each device computes the logits of its own part; None if V is
            whole.
    """

    embed: str | None = None
    vocab: str | None = None


_MOST_PIECES = 8
WHOLE_KERNEL = KernelAxes()
"""Each device has the whole output matrix."""


def token_blocks(
    tokens: int, chunk: int, vocab: int, axes: KernelAxes = WHOLE_KERNEL
) -> tuple[int, int]:
    """Number and size of the blocks of tokens in `token_logprobs`; `chunk` x `vocab` logits exist
    at a time.

    With the vocabulary in pieces a block has as many tokens more, and blocks have equal sizes, so
    that few are padding.

    Args:
        tokens, vocab: predicted tokens, and columns of the kernel, of one device.
        chunk: tokens whose logits exist at one time.
        axes: how the kernel is split.
    """
    if axes.embed is None:
        size = max(1, min(chunk, tokens))
        return -(-tokens // size), size
    blocks = max(1, -(-tokens // (chunk * _pieces(vocab))))
    return blocks, max(1, -(-tokens // blocks))


def _pieces(vocab: int) -> int:
    """Pieces that the vocabulary is computed in: a divisor of it."""
    return next(count for count in range(_MOST_PIECES, 0, -1) if vocab % count == 0)


def token_logprobs(
    hidden: Float[Array, "R L D"],
    kernel: Float[Array, "part V"],
    input_ids: Int[Array, "R L"],
    mask: Bool[Array, "R L"],
    listed: Int[Array, "R L k"] | None = None,
    *,
    temperature: float,
    chunk: int,
    ops: Ops,
    kernel_axes: KernelAxes = WHOLE_KERNEL,
    listed_gradient: bool = False,
) -> tuple[Float[jax.Array, "R L ..."], ...]:
    """log pi(token t | tokens before t) and the entropy of the distribution that token t was drawn
    from.

    With z = h_{t-1} W / temperature:

        logprobs[t] = z[token_t] - logsumexp(z)
        entropy[t]  = logsumexp(z) - sum_v softmax(z)_v z_v

    Wanted tokens are gathered first, so that padding and prompts cost nothing. Logits exist for
    `chunk` tokens at a time; with more than one chunk the backward pass recomputes them. The
    gradient of W is summed in float32 over chunks (a bfloat16 sum loses 1e-2 of it), then once over
    devices. Gradients flow to `hidden` and `kernel`.

    Under a `shard_map` rows are the device's own. With `kernel_axes` it must have check_vma=False
    and split the kernel over these axes and the rows over the first; the results are the same on
    all devices of the second.

    Args:
        hidden: final normed hidden states.
        kernel: [D, V] output matrix, cast to the dtype of `hidden`; the device's part of it under
            `kernel_axes`.
        input_ids: the tokens.
        mask: the tokens whose log-prob is wanted. The first token of a row or of a segment has no
            predecessor to come from and must be false.
        listed: further ids at each token whose log-prob is wanted, from the same logits; -1 for
            none.
        temperature: divides the logits; the one the tokens were sampled at.
        chunk: how many tokens' logits exist at one time.
        ops: the platform's operations.
        kernel_axes: how the kernel is split.
        listed_gradient: their gradient flows too.

    Returns:
        logprobs and entropy, [R, L] float32 in nats, 0 where `mask` is false; with `listed` also
        the log-probs of those ids, [R, L, k], 0 for none.

    Raises:
        ValueError: if the temperature is not positive or shapes disagree.
    """
    if not temperature > 0:
        raise ValueError(f"temperature: got {temperature}, must be above 0")
    rows, length = input_ids.shape
    if hidden.shape[:2] != input_ids.shape or input_ids.shape != mask.shape:
        raise ValueError(
            f"hidden {hidden.shape}, input_ids {input_ids.shape}, mask {mask.shape}: rows must "
            "agree"
        )
    width = hidden.shape[-1]
    previous = hidden[:, : length - 1]
    wanted = mask[:, 1:].reshape(-1)
    total = rows * (length - 1)
    blocks, size = token_blocks(total, chunk, kernel.shape[-1], kernel_axes)
    order, place = _wanted_first(wanted)
    padding = blocks * size - total
    gathered = jnp.pad(
        permute(previous.reshape(total, width), order, place), ((0, padding), (0, 0))
    )
    targets = jnp.pad(input_ids[:, 1:].reshape(-1)[order], (0, padding))
    count = (jnp.sum(wanted, dtype=jnp.int32) + size - 1) // size
    options = _Options(1.0 / temperature, ops.softmax_maximum, kernel_axes, listed_gradient)
    compute = _blocked_logprobs if kernel_axes.embed is None else _pieced_logprobs
    more = listed
    if listed is not None:
        more = jnp.pad(listed[:, 1:].reshape(total, -1)[order], ((0, padding), (0, 0))).reshape(
            blocks, size, -1
        )
    results = compute(
        gathered.reshape(blocks, size, width),
        targets.reshape(blocks, size),
        kernel,
        count,
        more,
        options,
    )
    results = [x.reshape(blocks * size, *x.shape[2:])[:total][place] for x in results]
    results = [x.reshape(rows, length - 1, *x.shape[1:]) for x in results]
    logprobs, entropy, *of_listed = (
        jnp.pad(x, ((0, 0), (1, 0), (0, 0))[: x.ndim]) for x in results
    )
    found = jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0)
    return (*found, *(jnp.where(mask[..., None] & (listed >= 0), x, 0.0) for x in of_listed))


def predicting(mask: Bool[Array, "R L"]) -> Bool[jax.Array, "R L"]:
    """Return the positions whose hidden state predicts a token of `mask`."""
    return jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))


def _wanted_first(wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The permutation that puts wanted tokens first, in order, and its inverse; a sort is slow on
    XLA's CPU backend.
    """
    before = jnp.cumsum(wanted) - wanted
    index = jnp.arange(wanted.size)
    place = jnp.where(wanted, before, jnp.sum(wanted) + index - before).astype(jnp.int32)
    return jnp.zeros_like(place).at[place].set(index.astype(jnp.int32), unique_indices=True), place


class _Options(NamedTuple):
    """Static arguments of `_blocked_logprobs`; `scale` multiplies the logits."""

    scale: float
    maximum: Callable[[jax.Array], jax.Array]
    axes: KernelAxes
    listed_gradient: bool


# What a forward pass keeps for the backward pass: hidden, targets, kernel and count, its arguments;
# normalizer and entropy, [C, T] float32; listed, an argument too. In blocks also the scaled logits
# of a single block, None where the backward pass computes them again.
_Residuals = tuple[Array | None, ...]


def _across_vocab(x: jax.Array, axes: KernelAxes) -> jax.Array:
    return x if axes.vocab is None else lax.psum(x, axes.vocab)


def _own_targets(targets: jax.Array, size: int, axes: KernelAxes) -> jax.Array:
    """Target ids counted from the first column of this device's part of the vocabulary, outside [0,
    size) elsewhere.
    """
    return targets if axes.vocab is None else targets - size * lax.axis_index(axes.vocab)


def _logits(hidden: jax.Array, kernel: jax.Array, scale: float) -> jax.Array:
    precision = precision_of(hidden.dtype)
    return (
        jnp.matmul(hidden, kernel, precision=precision, preferred_element_type=jnp.float32) * scale
    )


def _at(logits: jax.Array, own: jax.Array, axes: KernelAxes) -> jax.Array:
    """Logits at ids counted from this device's part, [..., k]; summed over the devices where
    `vocab` is split.
    """
    inside = (own >= 0) & (own < logits.shape[-1])
    found = jnp.take_along_axis(logits, jnp.clip(own, 0, logits.shape[-1] - 1), axis=-1)
    return found if axes.vocab is None else lax.psum(jnp.where(inside, found, 0.0), axes.vocab)


def _block(
    logits: jax.Array, targets: jax.Array, listed: jax.Array | None, options: _Options
) -> tuple[jax.Array, ...]:
    """Normalizer, log-probs, entropy, and log-probs of `listed` where it is there."""
    axes = options.axes
    size = logits.shape[-1]
    largest = options.maximum(logits)
    if axes.vocab is not None:
        largest = lax.pmax(largest, axes.vocab)
    normalizer = (
        jnp.log(_across_vocab(jnp.sum(jnp.exp(logits - largest), axis=-1), axes)) + largest[..., 0]
    )
    chosen = _at(logits, _own_targets(targets, size, axes)[..., None], axes)[..., 0]
    expected = _across_vocab(
        jnp.sum(jnp.exp(logits - normalizer[..., None]) * logits, axis=-1), axes
    )
    found = normalizer, chosen - normalizer, normalizer - expected
    if listed is None:
        return found
    return *found, _at(logits, _own_targets(listed, size, axes), axes) - normalizer[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _blocked_logprobs(
    hidden: Array,
    targets: Array,
    kernel: Array,
    count: Array,
    listed: Array | None,
    options: _Options,
) -> tuple[jax.Array, ...]:
    """`hidden` [C, T, D], `targets` [C, T], `listed` [C, T, k]; blocks from `count` on are not
    computed and give 0.
    """
    return _blocked_forward(hidden, targets, kernel, count, listed, options)[0]


def _blocked_forward(
    hidden: Array,
    targets: Array,
    kernel: Array,
    count: Array,
    listed: Array | None,
    options: _Options,
) -> tuple[tuple[jax.Array, ...], _Residuals]:
    whole = kernel.astype(hidden.dtype)
    if len(hidden) == 1:
        # A single block may keep the logits that each of several would have to compute again.
        logits = _logits(hidden, whole, options.scale)
        normalizer, *results = _block(logits, targets, listed, options)
        return tuple(results), (
            hidden,
            targets,
            kernel,
            count,
            normalizer,
            results[1],
            listed,
            logits,
        )

    def body(i: jax.Array, results: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        more = None if listed is None else listed[i]
        block = _block(_logits(hidden[i], whole, options.scale), targets[i], more, options)
        return tuple(result.at[i].set(value) for result, value in zip(results, block, strict=True))

    zeros = jnp.zeros(targets.shape, jnp.float32)
    start = (
        (zeros, zeros, zeros)
        if listed is None
        else (zeros, zeros, zeros, jnp.zeros(listed.shape, jnp.float32))
    )
    with jax.named_scope(CHUNKS):
        normalizer, *results = lax.fori_loop(0, count, body, start)
    return tuple(results), (hidden, targets, kernel, count, normalizer, results[1], listed, None)


def _blocked_backward(
    options: _Options, saved: _Residuals, cotangents: tuple[Array, ...]
) -> tuple[Any, ...]:
    hidden, targets, kernel, count, normalizer, entropy, listed, kept = saved
    axes = options.axes
    whole = kernel.astype(hidden.dtype)
    # A shard_map without vma divides the cotangents of replicated results by the devices that hold
    # them.
    logprob_bar, entropy_bar, *listed_bar = (_across_vocab(x, axes) for x in cotangents)
    own = _own_targets(targets, kernel.shape[-1], axes)
    further = _further(listed, listed_bar, kernel.shape[-1], options)
    precision = precision_of(hidden.dtype)

    def pulled(i: jax.Array | int, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The gradients of block i's hidden states and, from it, of the kernel."""
        block = hidden[i]
        more = [x[i] for x in further]
        logits_bar = _logits_bar(
            logits, own[i], normalizer[i], entropy[i], logprob_bar[i], entropy_bar[i], *more
        )
        logits_bar = (logits_bar * options.scale).astype(block.dtype)
        tokens = tuple(range(block.ndim - 1))
        product = lax.dot_general(
            block,
            logits_bar,
            ((tokens, tokens), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return jnp.matmul(logits_bar, whole.T, precision=precision).astype(block.dtype), product

    def body(i: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block_bar, product = pulled(i, _logits(hidden[i], whole, options.scale))
        return grads[0].at[i].set(block_bar), grads[1] + product

    if kept is not None:
        block_bar, kernel_bar = pulled(0, kept[0])
        hidden_bar = block_bar[None]
    else:
        zeros = jnp.zeros_like(hidden), jnp.zeros(whole.shape, jnp.float32)
        with jax.named_scope(CHUNKS):
            hidden_bar, kernel_bar = lax.fori_loop(0, count, body, zeros)
    return hidden_bar, None, kernel_bar.astype(kernel.dtype), None, None


_blocked_logprobs.defvjp(_blocked_forward, _blocked_backward)


def _further(
    listed: Array | None, bar: list[Array], size: int, options: _Options
) -> tuple[Array, ...]:
    """Ids of `listed` counted from this device's first column, and their cotangents; () where no
    gradient flows.
    """
    if listed is None or not options.listed_gradient:
        return ()
    return _own_targets(listed, size, options.axes), bar[0]


def _logits_bar(
    logits: Array,
    own: Array,
    normalizer: Array,
    entropy: Array,
    logprob_bar: Array,
    entropy_bar: Array,
    listed: Array | None = None,
    listed_bar: Array | None = None,
) -> jax.Array:
    """Gradient of scaled logits [T, V]: d logprob / d z = onehot - p, d entropy / d z = -p (log p +
    entropy).
    """
    centered = logits - normalizer[..., None]
    pull = logprob_bar[..., None] + entropy_bar[..., None] * (centered + entropy[..., None])
    if listed is not None:
        pull = pull + jnp.sum(listed_bar, axis=-1, keepdims=True)
    onehot = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == own[..., None]
    found = jnp.where(onehot, logprob_bar[..., None], 0.0) - jnp.exp(centered) * pull
    if listed is None:
        return found
    size = logits.shape[-1]
    places = jnp.where((listed >= 0) & (listed < size), listed, size)
    tokens = jnp.broadcast_to(jnp.arange(len(listed))[:, None], listed.shape)
    return found.at[tokens, places].add(listed_bar, mode="drop")


class _Running(NamedTuple):
    """Sums over the pieces of the vocabulary so far, [C, T] float32 each.

    Attributes:
        largest: m, the largest logit.
        mass: sum of exp(z - m).
        weighted: sum of exp(z - m) z.
        chosen: the logit of the target, 0 before its piece.
        listed: log-probs of further ids, [C, T, k], or None.
    """

    largest: jax.Array
    mass: jax.Array
    weighted: jax.Array
    chosen: jax.Array
    listed: jax.Array | None = None


def _gathered_piece(kernel: jax.Array, piece: jax.Array, dtype: jnp.dtype, embed: str) -> jax.Array:
    """[D, V / pieces] in the compute dtype. Cast before it travels."""
    width = kernel.shape[-1] // _pieces(kernel.shape[-1])
    own = lax.dynamic_slice_in_dim(kernel, piece * width, width, axis=1)
    return lax.all_gather(own.astype(dtype), embed, axis=0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _pieced_logprobs(
    hidden: Array,
    targets: Array,
    kernel: Array,
    count: Array,
    listed: Array | None,
    options: _Options,
) -> tuple[jax.Array, ...]:
    """`_blocked_logprobs` of a kernel whose width is split over devices, by a softmax that runs
    over the pieces.
    """
    return _pieced_forward(hidden, targets, kernel, count, listed, options)[0]


def _pieced_forward(
    hidden: Array,
    targets: Array,
    kernel: Array,
    count: Array,
    listed: Array | None,
    options: _Options,
) -> tuple[tuple[jax.Array, ...], _Residuals]:
    axes = options.axes
    vocab = kernel.shape[-1]
    pieces = _pieces(vocab)
    own = _own_targets(targets, vocab, axes)
    further = None if listed is None else _own_targets(listed, vocab, axes)

    def piece(p: jax.Array, running: _Running) -> _Running:
        part = _gathered_piece(kernel, p, hidden.dtype, axes.embed)
        width = part.shape[-1]

        def block(i: jax.Array, running: _Running) -> _Running:
            before = jax.tree.map(lambda x: x[i], running)
            logits = _logits(hidden[i], part, options.scale)
            place = own[i] - p * width
            largest = jnp.maximum(before.largest, options.maximum(logits)[..., 0])
            shrink = jnp.exp(before.largest - largest)
            exponentials = jnp.exp(logits - largest[..., None])

            def found(places: jax.Array) -> jax.Array:
                logit = jnp.take_along_axis(logits, jnp.clip(places, 0, width - 1), axis=-1)
                return jnp.where((places >= 0) & (places < width), logit, 0.0)

            after = _Running(
                largest,
                before.mass * shrink + jnp.sum(exponentials, axis=-1),
                before.weighted * shrink + jnp.sum(exponentials * logits, axis=-1),
                before.chosen + found(place[..., None])[..., 0],
                None if further is None else before.listed + found(further[i] - p * width),
            )
            return jax.tree.map(lambda x, value: x.at[i].set(value), running, after)

        with jax.named_scope(CHUNKS):
            return lax.fori_loop(0, count, block, running)

    zeros = jnp.zeros(targets.shape, jnp.float32)
    start = _Running(jnp.full_like(zeros, -jnp.inf), zeros, zeros, zeros)
    if listed is not None:
        start = start._replace(listed=jnp.zeros(listed.shape, jnp.float32))
    running = lax.fori_loop(0, pieces, piece, start)
    if axes.vocab is not None:  # once, after the last piece
        largest = lax.pmax(running.largest, axes.vocab)
        shrink = jnp.exp(running.largest - largest)
        sums = running.mass * shrink, running.weighted * shrink, running.chosen, running.listed
        running = _Running(largest, *lax.psum(sums, axes.vocab))
    normalizer = running.largest + jnp.log(running.mass)
    logprobs = running.chosen - normalizer
    entropy = normalizer - running.weighted / running.mass
    computed = (jnp.arange(len(targets)) < count)[:, None]
    of_listed = (
        ()
        if listed is None
        else (jnp.where(computed[..., None], running.listed - normalizer[..., None], 0.0),)
    )
    logprobs, entropy, normalizer = (
        jnp.where(computed, x, 0.0) for x in (logprobs, entropy, normalizer)
    )
    return (logprobs, entropy, *of_listed), (
        hidden,
        targets,
        kernel,
        count,
        normalizer,
        entropy,
        listed,
    )


def _pieced_backward(
    options: _Options, saved: _Residuals, cotangents: tuple[Array, ...]
) -> tuple[Any, ...]:
    hidden, targets, kernel, count, normalizer, entropy, listed = saved
    axes = options.axes
    vocab = kernel.shape[-1]
    logprob_bar, entropy_bar, *listed_bar = (_across_vocab(x, axes) for x in cotangents)
    own = _own_targets(targets, vocab, axes)
    further = _further(listed, listed_bar, vocab, options)

    def piece(p: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        part = _gathered_piece(kernel, p, hidden.dtype, axes.embed)
        width = part.shape[-1]

        def block(i: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            hidden_bar, part_bar = grads
            logits = _logits(hidden[i], part, options.scale)
            bars = normalizer[i], entropy[i], logprob_bar[i], entropy_bar[i]
            if further:
                bars = (*bars, further[0][i] - p * width, further[1][i])
            logits_bar = (_logits_bar(logits, own[i] - p * width, *bars) * options.scale).astype(
                hidden.dtype
            )
            precision = precision_of(hidden.dtype)
            pulled = jnp.matmul(
                logits_bar, part.T, precision=precision, preferred_element_type=jnp.float32
            )
            product = lax.dot_general(
                hidden[i],
                logits_bar,
                (((0,), (0,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            return hidden_bar.at[i].add(pulled), part_bar + product

        hidden_bar, kernel_bar = grads
        with jax.named_scope(CHUNKS):
            hidden_bar, part_bar = lax.fori_loop(
                0, count, block, (hidden_bar, jnp.zeros(part.shape, jnp.float32))
            )
        part_bar = lax.psum_scatter(part_bar, axes.embed, scatter_dimension=0, tiled=True)
        return hidden_bar, lax.dynamic_update_slice_in_dim(kernel_bar, part_bar, p * width, axis=1)

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(kernel.shape, jnp.float32)
    hidden_bar, kernel_bar = lax.fori_loop(0, _pieces(vocab), piece, zeros)
    hidden_bar = hidden_bar.astype(hidden.dtype)
    kernel_bar = kernel_bar.astype(kernel.dtype)
    return hidden_bar, None, kernel_bar, None, None


_pieced_logprobs.defvjp(_pieced_forward, _pieced_backward)
