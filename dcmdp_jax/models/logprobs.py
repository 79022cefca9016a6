"""Log-probabilities of given tokens from hidden states, without ever holding [T, V] logits.

The one place where the shift by one happens: `logprobs[t]` belongs to token t and comes from hidden
state t - 1.
"""

import dataclasses
import functools
from typing import NamedTuple

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelAxes:
    """Manual mesh axes that split the output matrix [D, V] and the embedding [V, D]; none: whole.

    Attributes:
        embed: the axis that splits D; None if D is whole. The output matrix is gathered over it
            once a pass, a piece of the vocabulary at a time: whole, with its float32 gradient, it
            takes gigabytes.
        vocab: the axis that splits V: each device computes the logits of its own part; None if V is
            whole.
    """

    embed: str | None = None
    vocab: str | None = None


_MOST_PIECES = 8  # of the vocabulary, when the output matrix is gathered


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogprobOptions:
    """Static arguments of `token_logprobs`.

    Attributes:
        temperature: divides the logits; the one the tokens were sampled at.
        chunk: how many tokens' logits exist at one time.
        ops: the platform's operations.
        kernel_axes: how the kernel is split.
        listed_gradient: the gradient of the further ids' log-probs flows too.

    Raises:
        ValueError: if the temperature is not positive.
    """

    temperature: float
    chunk: int
    ops: Ops
    kernel_axes: KernelAxes = KernelAxes()
    listed_gradient: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature: got {self.temperature}, must be above 0")

    @property
    def scale(self) -> float:
        """What the logits are multiplied by."""
        return 1.0 / self.temperature


def token_blocks(
    tokens: int,
    chunk: int,
    vocab: int,
    axes: KernelAxes,
) -> tuple[int, int]:
    """Number and size of the blocks of tokens in `token_logprobs`.

    `chunk` x `vocab` logits exist at a time.

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
    for count in range(_MOST_PIECES, 1, -1):
        if vocab % count == 0:
            return count
    return 1


def token_logprobs(
    hidden: Float[Array, "R L D"],
    kernel: Float[Array, "part V"],
    input_ids: Int[Array, "R L"],
    mask: Bool[Array, "R L"],
    listed: Int[Array, "R L k"] | None = None,
    *,
    options: LogprobOptions,
) -> tuple[Float[Array, "R L ..."], ...]:
    """log pi(token t | tokens before t), and the entropy of the distribution it was drawn from.

    With z = h_{t-1} W / temperature:

        logprobs[t] = z[token_t] - logsumexp(z)
        entropy[t]  = logsumexp(z) - sum_v softmax(z)_v z_v

    Wanted tokens are gathered first, so that padding and prompts cost nothing. Logits exist for
    `chunk` tokens at a time; with more than one chunk the backward pass recomputes them. The
    gradient of W is summed in float32 over chunks (a bfloat16 sum loses 1e-2 of it), then once over
    devices. Gradients flow to `hidden` and `kernel`.

    Under a `shard_map` rows are the device's own. With `options.kernel_axes` it must have
    check_vma=False and split the kernel over these axes and the rows over the first; the results
    are the same on all devices of the second.

    Args:
        hidden: final normed hidden states.
        kernel: [D, V] output matrix, cast to the dtype of `hidden`; the device's part of it under
            `options.kernel_axes`.
        input_ids: the tokens.
        mask: the tokens whose log-prob is wanted. The first token of a row or of a segment has no
            predecessor to come from and must be false.
        listed: further ids at each token whose log-prob is wanted, from the same logits; -1 for
            none.
        options: temperature, chunk and how the kernel is split.

    Returns:
        logprobs and entropy, [R, L] float32 in nats, 0 where `mask` is false; with `listed` also
        the log-probs of those ids, [R, L, k], 0 for none.

    Raises:
        ValueError: if shapes disagree.
    """
    rows, length = input_ids.shape
    if hidden.shape[:2] != input_ids.shape or input_ids.shape != mask.shape:
        raise ValueError(
            f"hidden {hidden.shape}, input_ids {input_ids.shape}, mask {mask.shape}: rows must "
            "agree"
        )
    total = rows * (length - 1)
    blocks, size = token_blocks(
        tokens=total,
        chunk=options.chunk,
        vocab=kernel.shape[-1],
        axes=options.kernel_axes,
    )

    def in_blocks(x: Array) -> Array:
        """[R (L - 1), ...] -> [blocks, size, ...]."""
        padding = ((0, blocks * size - total), (0, 0))
        return jnp.pad(x, padding[: x.ndim]).reshape(blocks, size, *x.shape[1:])

    def in_rows(x: Array) -> Array:
        """[blocks, size, ...] -> [R, L, ...], 0 for the first token of a row."""
        x = x.reshape(blocks * size, *x.shape[2:])[:total][inverse_order]
        x = x.reshape(rows, length - 1, *x.shape[1:])
        return jnp.pad(x, ((0, 0), (1, 0), (0, 0))[: x.ndim])

    is_wanted = mask[:, 1:].reshape(-1)
    order, inverse_order = _true_first(is_wanted)
    previous = hidden[:, : length - 1].reshape(total, hidden.shape[-1])
    inputs = _Inputs(
        hidden=in_blocks(permute(previous, order, inverse_order)),
        targets=in_blocks(input_ids[:, 1:].reshape(-1)[order]),
        kernel=kernel,
        count=(jnp.sum(is_wanted, dtype=jnp.int32) + size - 1) // size,
        listed=None,
    )
    if listed is not None:
        following_ids = listed[:, 1:].reshape(total, -1)
        inputs = inputs._replace(listed=in_blocks(following_ids[order]))
    compute = _blocked_logprobs
    if options.kernel_axes.embed is not None:
        compute = _pieced_logprobs
    logprobs, entropy, *listed_logprobs = map(in_rows, compute(inputs, options))

    logprobs = jnp.where(mask, logprobs, 0.0)
    entropy = jnp.where(mask, entropy, 0.0)
    if listed is None:
        return logprobs, entropy
    is_listed = mask[..., None] & (listed >= 0)
    return logprobs, entropy, jnp.where(is_listed, listed_logprobs[0], 0.0)


def predicting(mask: Bool[Array, "R L"]) -> Bool[Array, "R L"]:
    """Return the positions whose hidden state predicts a token of `mask`."""
    return jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))


def _true_first(flags: Array) -> tuple[Array, Array]:
    """The permutation that puts true entries first, and its inverse; XLA's CPU sort is slow."""
    before = jnp.cumsum(flags) - flags
    index = jnp.arange(flags.size)
    inverse = jnp.where(flags, before, jnp.sum(flags) + index - before)
    inverse = inverse.astype(jnp.int32)
    order = jnp.zeros_like(inverse).at[inverse].set(index.astype(jnp.int32), unique_indices=True)
    return order, inverse


class _Inputs(NamedTuple):
    """Wanted tokens in C blocks of T.

    Attributes:
        hidden: [C, T, D], of the token before.
        targets: [C, T] int32.
        kernel: the output matrix, or the device's part of it.
        count: [] int32; blocks from here on are not computed and give 0.
        listed: [C, T, k], further ids, or None.
    """

    hidden: Array
    targets: Array
    kernel: Array
    count: Array
    listed: Array | None


_Outputs = tuple[Array, ...]
"""Arrays in blocks: log-probs, entropy, and log-probs of further ids if there are any."""


class _Residuals(NamedTuple):
    """What a forward pass keeps for the backward pass.

    Attributes:
        inputs: its arguments.
        normalizer, entropy: [C, T] float32.
        logits: [1, T, V] of a single block; None where the backward pass computes them again.
    """

    inputs: _Inputs
    normalizer: Array
    entropy: Array
    logits: Array | None = None


def _across_vocab(x: Array, axes: KernelAxes) -> Array:
    if axes.vocab is None:
        return x
    return lax.psum(x, axes.vocab)


def _own_ids(ids: Array, size: int, axes: KernelAxes) -> Array:
    """Ids counted from this device's first column, outside [0, size) on another device."""
    if axes.vocab is None:
        return ids
    return ids - size * lax.axis_index(axes.vocab)


def _logits(hidden: Array, kernel: Array, scale: float) -> Array:
    precision = precision_of(hidden.dtype)
    logits = jnp.matmul(hidden, kernel, precision=precision, preferred_element_type=jnp.float32)
    return logits * scale


def _logits_at(logits: Array, ids: Array) -> Array:
    """Logits at ids [..., k], 0 for an id outside the columns."""
    size = logits.shape[-1]
    clipped = jnp.take_along_axis(logits, jnp.clip(ids, 0, size - 1), axis=-1)
    return jnp.where((ids >= 0) & (ids < size), clipped, 0.0)


def _block(
    logits: Array,
    targets: Array,
    listed: Array | None,
    options: LogprobOptions,
) -> _Outputs:
    """Normalizer, log-probs, entropy, and log-probs of `listed` where it is there."""
    axes = options.kernel_axes
    size = logits.shape[-1]

    def logits_at(ids: Array) -> Array:
        own_ids = _own_ids(ids, size, axes)
        if axes.vocab is None:
            return jnp.take_along_axis(logits, jnp.clip(own_ids, 0, size - 1), axis=-1)
        return lax.psum(_logits_at(logits, own_ids), axes.vocab)

    largest = options.ops.softmax_maximum(logits)
    if axes.vocab is not None:
        largest = lax.pmax(largest, axes.vocab)
    own_mass = jnp.sum(jnp.exp(logits - largest), axis=-1)
    mass = _across_vocab(own_mass, axes)
    normalizer = jnp.log(mass) + largest[..., 0]
    target_logits = logits_at(targets[..., None])[..., 0]
    probabilities = jnp.exp(logits - normalizer[..., None])
    own_mean = jnp.sum(probabilities * logits, axis=-1)
    mean_logit = _across_vocab(own_mean, axes)

    logprobs = target_logits - normalizer
    entropy = normalizer - mean_logit
    if listed is None:
        return normalizer, logprobs, entropy
    listed_logprobs = logits_at(listed) - normalizer[..., None]
    return normalizer, logprobs, entropy, listed_logprobs


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _blocked_logprobs(inputs: _Inputs, options: LogprobOptions) -> _Outputs:
    """Log-probs and entropy [C, T], and log-probs [C, T, k] of `listed` where it is there."""
    return _blocked_forward(inputs, options)[0]


def _blocked_forward(
    inputs: _Inputs,
    options: LogprobOptions,
) -> tuple[_Outputs, _Residuals]:
    hidden, targets, kernel, count, listed = inputs
    kernel = kernel.astype(hidden.dtype)
    if len(hidden) == 1:
        # A single block may keep the logits that each of several would have to compute again.
        logits = _logits(hidden, kernel, options.scale)
        normalizer, *outputs = _block(logits, targets, listed, options)
        residuals = _Residuals(
            inputs=inputs,
            normalizer=normalizer,
            entropy=outputs[1],
            logits=logits,
        )
        return tuple(outputs), residuals

    def body(i: Array, outputs: _Outputs) -> _Outputs:
        block_listed = None
        if listed is not None:
            block_listed = listed[i]
        logits = _logits(hidden[i], kernel, options.scale)
        block = _block(logits, targets[i], block_listed, options)
        return jax.tree.map(lambda output, value: output.at[i].set(value), outputs, block)

    zeros = jnp.zeros(targets.shape, jnp.float32)
    start = (zeros, zeros, zeros)
    if listed is not None:
        start = (*start, jnp.zeros(listed.shape, jnp.float32))
    with jax.named_scope(CHUNKS):
        normalizer, *outputs = lax.fori_loop(0, count, body, start)
    return tuple(outputs), _Residuals(inputs, normalizer, outputs[1])


_Grads = tuple[Array, Array]
"""Of the hidden states and of the kernel."""


class _TokenBars(NamedTuple):
    """What the gradient of a token's logits depends on.

    Attributes:
        targets: [C, T], counted from this device's first column.
        normalizer, entropy, logprob_bar, entropy_bar: [C, T] float32.
        listed: [C, T, k], further ids counted like `targets`; None where they have no gradient.
        listed_bar: [C, T, k] float32, or None.
    """

    targets: Array
    normalizer: Array
    entropy: Array
    logprob_bar: Array
    entropy_bar: Array
    listed: Array | None = None
    listed_bar: Array | None = None


def _token_bars(
    saved: _Residuals, cotangents: tuple[Array, ...], options: LogprobOptions
) -> _TokenBars:
    axes = options.kernel_axes
    inputs = saved.inputs
    size = inputs.kernel.shape[-1]
    # A shard_map without vma divides the cotangents of replicated results by the devices that hold
    # them.
    logprob_bar, entropy_bar, *listed_bar = (_across_vocab(x, axes) for x in cotangents)
    bars = _TokenBars(
        targets=_own_ids(inputs.targets, size, axes),
        normalizer=saved.normalizer,
        entropy=saved.entropy,
        logprob_bar=logprob_bar,
        entropy_bar=entropy_bar,
    )
    if not listed_bar or not options.listed_gradient:
        return bars
    return bars._replace(listed=_own_ids(inputs.listed, size, axes), listed_bar=listed_bar[0])


def _blocked_backward(
    options: LogprobOptions, saved: _Residuals, cotangents: tuple[Array, ...]
) -> tuple[_Inputs]:
    hidden = saved.inputs.hidden
    kernel = saved.inputs.kernel.astype(hidden.dtype)
    bars = _token_bars(saved, cotangents, options)
    precision = precision_of(hidden.dtype)

    def pulled(i: Array | int, logits: Array) -> _Grads:
        """The gradients of block i's hidden states and, from it, of the kernel."""
        block = hidden[i]
        logits_bar = _logits_bar(logits, jax.tree.map(lambda x: x[i], bars))
        logits_bar = (logits_bar * options.scale).astype(block.dtype)
        kernel_bar = _kernel_bar(block, logits_bar)
        block_bar = jnp.matmul(logits_bar, kernel.T, precision=precision)
        return block_bar.astype(block.dtype), kernel_bar

    def body(i: Array, grads: _Grads) -> _Grads:
        hidden_bar, kernel_bar = grads
        logits = _logits(hidden[i], kernel, options.scale)
        block_bar, block_kernel_bar = pulled(i, logits)
        return hidden_bar.at[i].set(block_bar), kernel_bar + block_kernel_bar

    if saved.logits is not None:
        block_bar, kernel_bar = pulled(0, saved.logits[0])
        hidden_bar = block_bar[None]
    else:
        zeros = jnp.zeros_like(hidden), jnp.zeros(kernel.shape, jnp.float32)
        with jax.named_scope(CHUNKS):
            hidden_bar, kernel_bar = lax.fori_loop(0, saved.inputs.count, body, zeros)
    return (_gradients(saved.inputs, hidden_bar, kernel_bar),)


_blocked_logprobs.defvjp(_blocked_forward, _blocked_backward)


def _gradients(inputs: _Inputs, hidden_bar: Array, kernel_bar: Array) -> _Inputs:
    return _Inputs(
        hidden=hidden_bar.astype(inputs.hidden.dtype),
        targets=None,
        kernel=kernel_bar.astype(inputs.kernel.dtype),
        count=None,
        listed=None,
    )


def _kernel_bar(hidden: Array, logits_bar: Array) -> Array:
    """h^T (d loss / d z) of a block, [D, V] float32."""
    return lax.dot_general(
        hidden,
        logits_bar,
        (((0,), (0,)), ((), ())),
        precision=precision_of(hidden.dtype),
        preferred_element_type=jnp.float32,
    )


def _logits_bar(logits: Array, bars: _TokenBars, first: Array | int = 0) -> Array:
    """Gradient of scaled logits [T, V], whose columns begin at `first` of this device's.

    d logprob / d z = onehot - p, d entropy / d z = -p (log p + entropy).
    """
    centered = logits - bars.normalizer[..., None]
    logprob_bar = bars.logprob_bar[..., None]
    entropy_bar = bars.entropy_bar[..., None]
    entropy = bars.entropy[..., None]
    pull = logprob_bar + entropy_bar * (centered + entropy)
    if bars.listed is not None:
        pull = pull + jnp.sum(bars.listed_bar, axis=-1, keepdims=True)
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    onehot = columns == (bars.targets - first)[..., None]
    target_bar = jnp.where(onehot, logprob_bar, 0.0)
    logits_bar = target_bar - jnp.exp(centered) * pull
    if bars.listed is None:
        return logits_bar

    size = logits.shape[-1]
    listed = bars.listed - first
    listed_columns = jnp.where((listed >= 0) & (listed < size), listed, size)
    tokens = jnp.broadcast_to(jnp.arange(len(listed))[:, None], listed.shape)
    return logits_bar.at[tokens, listed_columns].add(bars.listed_bar, mode="drop")


class _Running(NamedTuple):
    """Sums over the pieces of the vocabulary so far, [C, T] float32 each.

    Attributes:
        largest: m, the largest logit.
        mass: sum of exp(z - m).
        weighted: sum of exp(z - m) z.
        target: the logit of the target, 0 before its piece.
        listed: logits of further ids, [C, T, k], or None.
    """

    largest: Array
    mass: Array
    weighted: Array
    target: Array
    listed: Array | None = None


def _gathered_piece(kernel: Array, piece: Array, dtype: jnp.dtype, embed: str) -> Array:
    """[D, V / pieces] in the compute dtype. Cast before it travels."""
    width = kernel.shape[-1] // _pieces(kernel.shape[-1])
    columns = lax.dynamic_slice_in_dim(kernel, piece * width, width, axis=1)
    return lax.all_gather(columns.astype(dtype), embed, axis=0, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pieced_logprobs(inputs: _Inputs, options: LogprobOptions) -> _Outputs:
    """`_blocked_logprobs` of a kernel whose width is split over devices, a piece at a time."""
    return _pieced_forward(inputs, options)[0]


def _pieced_forward(inputs: _Inputs, options: LogprobOptions) -> tuple[_Outputs, _Residuals]:
    hidden, targets, kernel, count, listed = inputs
    axes = options.kernel_axes
    vocab = kernel.shape[-1]
    own_targets = _own_ids(targets, vocab, axes)
    own_listed = None
    if listed is not None:
        own_listed = _own_ids(listed, vocab, axes)

    def add_piece(piece: Array, running: _Running) -> _Running:
        piece_kernel = _gathered_piece(kernel, piece, hidden.dtype, axes.embed)
        first = piece * piece_kernel.shape[-1]

        def add_block(i: Array, running: _Running) -> _Running:
            before = jax.tree.map(lambda x: x[i], running)
            logits = _logits(hidden[i], piece_kernel, options.scale)
            largest = jnp.maximum(before.largest, options.ops.softmax_maximum(logits)[..., 0])
            shrink = jnp.exp(before.largest - largest)
            exponentials = jnp.exp(logits - largest[..., None])
            mass = before.mass * shrink + jnp.sum(exponentials, axis=-1)
            weighted = before.weighted * shrink + jnp.sum(exponentials * logits, axis=-1)
            piece_targets = (own_targets[i] - first)[..., None]
            target_logits = _logits_at(logits, piece_targets)[..., 0]
            after = _Running(
                largest=largest,
                mass=mass,
                weighted=weighted,
                target=before.target + target_logits,
            )
            if own_listed is not None:
                piece_listed = _logits_at(logits, own_listed[i] - first)
                after = after._replace(listed=before.listed + piece_listed)
            return jax.tree.map(lambda x, value: x.at[i].set(value), running, after)

        with jax.named_scope(CHUNKS):
            return lax.fori_loop(0, count, add_block, running)

    zeros = jnp.zeros(targets.shape, jnp.float32)
    start = _Running(
        largest=jnp.full_like(zeros, -jnp.inf),
        mass=zeros,
        weighted=zeros,
        target=zeros,
    )
    if listed is not None:
        start = start._replace(listed=jnp.zeros(listed.shape, jnp.float32))
    running = lax.fori_loop(0, _pieces(vocab), add_piece, start)
    if axes.vocab is not None:  # once, after the last piece
        largest = lax.pmax(running.largest, axes.vocab)
        shrink = jnp.exp(running.largest - largest)
        own_sums = running._replace(
            largest=None, mass=running.mass * shrink, weighted=running.weighted * shrink
        )
        # Targets and listed ids have logits on one device each, and 0 on the others.
        running = lax.psum(own_sums, axes.vocab)._replace(largest=largest)

    computed = (jnp.arange(len(targets)) < count)[:, None]
    log_mass = running.largest + jnp.log(running.mass)
    normalizer = jnp.where(computed, log_mass, 0.0)
    entropy = jnp.where(computed, log_mass - running.weighted / running.mass, 0.0)
    logprobs = jnp.where(computed, running.target - log_mass, 0.0)
    outputs = (logprobs, entropy)
    if listed is not None:
        listed_logprobs = running.listed - log_mass[..., None]
        listed_logprobs = jnp.where(computed[..., None], listed_logprobs, 0.0)
        outputs = (logprobs, entropy, listed_logprobs)
    return outputs, _Residuals(inputs, normalizer, entropy)


def _pieced_backward(
    options: LogprobOptions, saved: _Residuals, cotangents: tuple[Array, ...]
) -> tuple[_Inputs]:
    hidden, _, kernel, count, _ = saved.inputs
    embed = options.kernel_axes.embed
    bars = _token_bars(saved, cotangents, options)
    precision = precision_of(hidden.dtype)

    def add_piece(piece: Array, grads: _Grads) -> _Grads:
        piece_kernel = _gathered_piece(kernel, piece, hidden.dtype, embed)
        first = piece * piece_kernel.shape[-1]

        def add_block(i: Array, grads: _Grads) -> _Grads:
            hidden_bar, piece_bar = grads
            logits = _logits(hidden[i], piece_kernel, options.scale)
            logits_bar = _logits_bar(logits, jax.tree.map(lambda x: x[i], bars), first)
            logits_bar = (logits_bar * options.scale).astype(hidden.dtype)
            pulled = jnp.matmul(
                logits_bar,
                piece_kernel.T,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            return hidden_bar.at[i].add(pulled), piece_bar + _kernel_bar(hidden[i], logits_bar)

        hidden_bar, kernel_bar = grads
        with jax.named_scope(CHUNKS):
            hidden_bar, piece_bar = lax.fori_loop(
                0,
                count,
                add_block,
                (hidden_bar, jnp.zeros(piece_kernel.shape, jnp.float32)),
            )
        piece_bar = lax.psum_scatter(piece_bar, embed, scatter_dimension=0, tiled=True)
        return hidden_bar, lax.dynamic_update_slice_in_dim(kernel_bar, piece_bar, first, axis=1)

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(kernel.shape, jnp.float32)
    hidden_bar, kernel_bar = lax.fori_loop(0, _pieces(kernel.shape[-1]), add_piece, zeros)
    return (_gradients(saved.inputs, hidden_bar, kernel_bar),)


_pieced_logprobs.defvjp(_pieced_forward, _pieced_backward)
