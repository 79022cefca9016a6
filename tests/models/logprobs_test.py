"""Chunked log-probs and entropy against a float64 reference with hand-written gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models.logprobs import KernelAxes, LogprobOptions, token_blocks, token_logprobs
from dcmdp_jax.models.ops import CPU, REFERENCE
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import MODEL_AXES, shard_map_over

ROWS = 3
LENGTH = 10
WIDTH = 8
VOCAB = 31
# Logits up to 20 carry 1e-6 each in float32, and gradients up to 10 are sums of 31 of them.
ROUNDING = 3e-5


def _inputs(seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random((ROWS, LENGTH)) < 0.6
    mask[:, 0] = False
    return {
        "hidden": rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32),
        "kernel": rng.normal(size=(WIDTH, VOCAB)).astype(np.float32),
        "input_ids": rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32),
        "mask": mask,
        "logprob_bar": rng.normal(size=(ROWS, LENGTH)).astype(np.float32),
        "entropy_bar": rng.normal(size=(ROWS, LENGTH)).astype(np.float32),
    }


def _reference(x, temperature):
    """The log-probs, the entropy and both gradients in float64, token by token.

    d hidden, d kernel of sum(logprob_bar * logprobs + entropy_bar * entropy).
    """
    hidden = x["hidden"].astype(np.float64)
    kernel = x["kernel"].astype(np.float64)
    logprobs = np.zeros((ROWS, LENGTH))
    entropy = np.zeros((ROWS, LENGTH))
    hidden_bar = np.zeros_like(hidden)
    kernel_bar = np.zeros_like(kernel)
    for row, t in zip(*np.nonzero(x["mask"]), strict=True):
        state = hidden[row, t - 1]
        z = state @ kernel / temperature
        log_p = z - np.log(np.sum(np.exp(z)))
        p = np.exp(log_p)
        token = x["input_ids"][row, t]
        logprobs[row, t], entropy[row, t] = log_p[token], -np.sum(p * log_p)
        z_bar = x["logprob_bar"][row, t] * (np.eye(VOCAB)[token] - p)
        # d H / d z_v = -p_v (log p_v + H)
        z_bar -= x["entropy_bar"][row, t] * p * (log_p + entropy[row, t])
        hidden_bar[row, t - 1] += kernel @ z_bar / temperature
        kernel_bar += np.outer(state, z_bar) / temperature
    return logprobs, entropy, hidden_bar, kernel_bar


@functools.partial(jax.jit, static_argnames=("temperature", "chunk", "ops"))
def _ours(x, temperature, chunk, ops=CPU):
    def objective(hidden, kernel):
        options = LogprobOptions(temperature=temperature, chunk=chunk, ops=ops)
        logprobs, entropy = token_logprobs(
            hidden, kernel, x["input_ids"], x["mask"], options=options
        )
        return jnp.sum(x["logprob_bar"] * logprobs + x["entropy_bar"] * entropy), (
            logprobs,
            entropy,
        )

    (_, values), grads = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(
        x["hidden"], x["kernel"]
    )
    return *values, *grads


@pytest.mark.parametrize(
    ("temperature", "chunk"),
    [
        (1.0, 1000),
        (0.7, 7),  # 30 positions, chunks of 7: the last is padded
        (1.3, 1),
    ],
)
@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_against_float64(temperature, chunk, ops):
    x = _inputs()
    for mine, want in zip(
        _ours(x, temperature, chunk, ops), _reference(x, temperature), strict=True
    ):
        np.testing.assert_allclose(mine, want, atol=ROUNDING)


def test_no_token_wanted():
    x = _inputs() | {"mask": np.zeros((ROWS, LENGTH), bool)}
    for value in _ours(x, 1.0, 7):
        assert not np.any(value)


def test_every_token_wanted_but_the_first():
    x = _inputs(1)
    x["mask"][:, 1:] = True
    for mine, want in zip(_ours(x, 0.7, 9), _reference(x, 0.7), strict=True):
        np.testing.assert_allclose(mine, want, atol=ROUNDING)


def test_uniform_and_certain_distributions():
    """Equal logits have entropy log V; one far above the others 0, without NaN gradients.

    Log-probs are -log V and 0.
    """
    x = _inputs()
    x["mask"][:, 1:] = True
    logprobs, entropy, *_ = _ours(x | {"kernel": np.zeros((WIDTH, VOCAB), np.float32)}, 1.0, 7)
    np.testing.assert_allclose(logprobs[:, 1:], -np.log(VOCAB), rtol=1e-6)
    np.testing.assert_allclose(entropy[:, 1:], np.log(VOCAB), rtol=1e-6)
    kernel = np.zeros((WIDTH, VOCAB), np.float32)
    kernel[0, 5] = 1e4
    certain = x | {
        "kernel": kernel,
        "hidden": np.abs(x["hidden"]) + 1,
        "input_ids": np.full((ROWS, LENGTH), 5),
    }
    logprobs, entropy, *grads = _ours(certain, 1.0, 7)
    np.testing.assert_array_equal(logprobs, 0)
    np.testing.assert_array_equal(entropy, 0)
    assert all(np.all(np.isfinite(grad)) for grad in grads)


def test_the_shift_is_by_one():
    """Token t is scored by the state before it: a state that votes for token v, then v."""
    hidden = jnp.zeros((1, 4, 5)).at[0, 1, 3].set(1.0)
    ids = jnp.array([[0, 0, 3, 0]])
    mask = jnp.array([[False, True, True, True]])
    options = LogprobOptions(temperature=1.0, chunk=8, ops=CPU)
    logprobs, _ = token_logprobs(hidden, 2 * jnp.eye(5), ids, mask, options=options)
    # e^2 against four times e^0; elsewhere uniform over 5. Scored by its own state token 2 would be
    # uniform too.
    np.testing.assert_allclose(
        logprobs[0], [0.0, -np.log(5), 2 - np.log(np.exp(2) + 4), -np.log(5)], rtol=1e-6
    )


def test_masked_tokens_take_no_part():
    x = _inputs()
    _, _, hidden_bar, kernel_bar = _ours(x, 1.0, 7)
    other = x | {"input_ids": np.where(x["mask"], x["input_ids"], 0)}
    hidden = x["hidden"].copy()
    unused = ~np.roll(x["mask"], -1, axis=1)
    unused[:, -1] = True
    hidden[unused] = 100.0
    for mine, want in zip(
        _ours(other | {"hidden": hidden}, 1.0, 7)[2:], (hidden_bar, kernel_bar), strict=True
    ):
        np.testing.assert_allclose(mine, want, atol=1e-6)
    assert not np.any(np.asarray(hidden_bar)[unused])


def test_bfloat16_adds_the_kernel_gradient_in_float32():
    """The kernel's gradient is summed in float32 over chunks.

    With 64 chunks, a sum kept in bfloat16 is off by more than 1e-2 of the largest entry.
    """
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 1025, 16)), jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(16, 32)), jnp.bfloat16)
    ids = jnp.asarray(rng.integers(0, 32, (1, 1025)), jnp.int32)
    mask = jnp.arange(1025)[None] > 0

    def total(kernel, hidden, chunk):
        options = LogprobOptions(temperature=1.0, chunk=chunk, ops=CPU)
        return token_logprobs(hidden, kernel, ids, mask, options=options)[0].sum()

    exact = jax.grad(total)(kernel.astype(jnp.float32), hidden.astype(jnp.float32), 2048)
    rounded = jax.grad(total)(kernel, hidden, 16)
    assert rounded.dtype == jnp.bfloat16
    error = jnp.abs(rounded.astype(jnp.float32) - exact).max() / jnp.abs(exact).max()
    assert error < 4e-3  # half a unit in the last place of the result, and of the logits' gradient


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
def test_memory_at_the_full_vocabulary(ops):
    """The compiler's memory is a chunk of logits, not all of them.

    1024 tokens at V = 151,936: [T, V] float32 alone is 594 MiB. Nothing is run.
    """
    rows = 2
    length = 512
    width = 64
    vocab = 151_936
    naive = rows * length * vocab * 4
    shapes = (
        jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
        jax.ShapeDtypeStruct((width, vocab), jnp.float32),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
        jax.ShapeDtypeStruct((rows, length), jnp.bool_),
    )

    def forward(hidden, kernel, ids, mask):
        options = LogprobOptions(temperature=1.0, chunk=64, ops=ops)
        logprobs, entropy = token_logprobs(hidden, kernel, ids, mask, options=options)
        return jnp.sum(logprobs + 0.1 * entropy)

    def temporary(function):
        return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    # One chunk of logits, 64 of 1024 tokens: 0.0625. Backward adds the kernel's gradient, [D, V],
    # as large again here.
    assert temporary(forward) < 0.08 * naive
    assert temporary(jax.grad(forward, argnums=(0, 1))) < 0.15 * naive


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_is_positive(temperature):
    with pytest.raises(ValueError, match=f"temperature: got {temperature}, must be above 0"):
        LogprobOptions(temperature=temperature, chunk=8, ops=CPU)


def test_shapes_must_agree():
    x = _inputs()
    options = LogprobOptions(temperature=1.0, chunk=8, ops=CPU)
    with pytest.raises(ValueError, match="rows must agree"):
        token_logprobs(x["hidden"], x["kernel"], x["input_ids"][:, 1:], x["mask"], options=options)


@pytest.mark.parametrize("vocab", [48, 31 * 2])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (4, 2, 1), (2, 2, 2)])
def test_a_kernel_split_over_devices_gives_the_same(sizes, vocab):
    """A kernel over fsdp, tensor and expert gives the result of one device.

    The vocabulary comes in pieces, 62 / 2 = 31 in one, and padding tokens in none.
    """
    fsdp, tensor, expert = sizes
    mesh = make_mesh(1, fsdp, tensor, expert, devices=jax.devices()[:8])
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(8, LENGTH, WIDTH)).astype(np.float32)
    kernel = rng.normal(size=(WIDTH, vocab)).astype(np.float32)
    ids = rng.integers(0, vocab, (8, LENGTH)).astype(np.int32)
    mask = rng.random((8, LENGTH)) < 0.6
    mask[:, 0], mask[3] = False, False
    bars = (
        *rng.normal(size=(2, 8, LENGTH)).astype(np.float32),
        rng.normal(size=(8, LENGTH, 3)).astype(np.float32),
    )
    listed = rng.integers(-1, vocab, (8, LENGTH, 3)).astype(np.int32)
    axes = KernelAxes(embed="fsdp", vocab="tensor" if tensor > 1 else None)
    rows = P(("fsdp", "expert"))
    options = LogprobOptions(
        temperature=0.7, chunk=1, ops=CPU, kernel_axes=axes, listed_gradient=True
    )
    split = shard_map_over(
        MODEL_AXES,
        functools.partial(token_logprobs, options=options),
        mesh,
        in_specs=(rows, P(axes.embed, axes.vocab), rows, rows, rows),
        out_specs=(rows, rows, rows),
    )
    options = LogprobOptions(temperature=0.7, chunk=5, ops=CPU, listed_gradient=True)
    whole = functools.partial(token_logprobs, options=options)

    def run(function):
        def objective(hidden, kernel):
            results = function(
                hidden, kernel, jnp.asarray(ids), jnp.asarray(mask), jnp.asarray(listed)
            )
            return sum(jnp.sum(bar * x) for bar, x in zip(bars, results, strict=True)), results

        (_, results), grads = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(
            hidden, kernel
        )
        return jax.tree.leaves((results, grads))

    for ours, expected in zip(run(split), run(whole), strict=True):
        np.testing.assert_allclose(ours, expected, atol=ROUNDING)


def test_blocks_of_tokens():
    # The whole kernel: as many as the chunk, the last one padded. In 8 pieces of 48: 10 x 8 tokens
    # at a time hold as many logits; 100 tokens are two blocks of 50.
    whole = KernelAxes()
    assert token_blocks(100, 30, 48, whole) == (4, 30)
    assert token_blocks(7, 30, 48, whole) == (1, 7)
    assert token_blocks(100, 10, 48, KernelAxes(embed="fsdp")) == (2, 50)
    # 31 is prime: one piece.
    assert token_blocks(100, 10, 31, KernelAxes(embed="fsdp")) == (10, 10)


@pytest.mark.parametrize("chunk", [1000, 7])
def test_listed_ids_have_values_and_gradients_of_float64(chunk):
    """Log-probs of listed ids, and their gradients beside those of the token's own.

    Five ids a token, one of them absent, one twice.
    """
    x = _inputs()
    temperature = 0.7
    rng = np.random.default_rng(5)
    listed = rng.integers(0, VOCAB, (ROWS, LENGTH, 5)).astype(np.int32)
    listed[..., 3], listed[..., 4] = -1, listed[..., 0]
    bars = rng.normal(size=listed.shape).astype(np.float32)

    def objective(hidden, kernel):
        logprobs, entropy, of_listed = token_logprobs(
            hidden,
            kernel,
            jnp.asarray(x["input_ids"]),
            jnp.asarray(x["mask"]),
            jnp.asarray(listed),
            options=LogprobOptions(
                temperature=temperature, chunk=chunk, ops=CPU, listed_gradient=True
            ),
        )
        total = jnp.sum(x["logprob_bar"] * logprobs + x["entropy_bar"] * entropy) + jnp.sum(
            bars * of_listed
        )
        return total, of_listed

    (_, found), grads = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(
        x["hidden"], x["kernel"]
    )
    _, _, hidden_bar, kernel_bar = _reference(x, temperature)
    hidden = x["hidden"].astype(np.float64)
    kernel = x["kernel"].astype(np.float64)
    expected = np.zeros(listed.shape)
    for row, t in zip(*np.nonzero(x["mask"]), strict=True):
        z = hidden[row, t - 1] @ kernel / temperature
        log_p = z - np.log(np.sum(np.exp(z)))
        z_bar = np.zeros(VOCAB)
        for place in (0, 1, 2, 4):
            token = listed[row, t, place]
            expected[row, t, place] = log_p[token]
            z_bar += bars[row, t, place] * (np.eye(VOCAB)[token] - np.exp(log_p))
        hidden_bar[row, t - 1] += kernel @ z_bar / temperature
        kernel_bar += np.outer(hidden[row, t - 1], z_bar) / temperature
    np.testing.assert_allclose(found, expected, atol=ROUNDING)
    for mine, want in zip(grads, (hidden_bar, kernel_bar), strict=True):
        np.testing.assert_allclose(mine, want, atol=ROUNDING)
