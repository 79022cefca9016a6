import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dcmdp_jax.models.sampler import choose_tokens, nucleus, row_keys, token_words

ONE = np.float32(1)


def words(*uniforms: tuple[float, float]) -> jax.Array:
    return jnp.asarray(np.asarray(uniforms) * 2.0**32, jnp.uint32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def test_inverse_of_the_cumulative_distribution_by_hand():
    # Probabilities 1/2, 0, 1/4, 1/4; the sums are 0.5, 0.5, 0.75, 1. The second word decides (one
    # block).
    logits = jnp.tile(jnp.log(jnp.array([0.5, 0.0, 0.25, 0.25])), (6, 1))
    uniforms = [(0.9, u) for u in (0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2.0**-32)]
    tokens, logprobs = choose_tokens(logits, words(*uniforms), ONE, ONE, "sample")
    np.testing.assert_array_equal(tokens, [0, 0, 2, 2, 3, 3])
    np.testing.assert_allclose(logprobs, np.log([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]), atol=1e-6)


def test_first_word_picks_the_block_and_the_last_partial_block_is_not_padding():
    # 300 tokens in blocks of 128, 128, 44; only 5, 130 and 299 have mass: 1/4, 1/4, 1/2.
    probabilities = np.zeros(300)
    probabilities[[5, 130, 299]] = 0.25, 0.25, 0.5
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.tile(np.log(probabilities), (5, 1)), jnp.float32)
    uniforms = [(u, 1 - 2.0**-32) for u in (0.2499, 0.25, 0.4999, 0.5, 1 - 2.0**-32)]
    tokens, logprobs = choose_tokens(logits, words(*uniforms), ONE, ONE, "sample")
    np.testing.assert_array_equal(tokens, [5, 130, 130, 299, 299])
    np.testing.assert_allclose(logprobs, np.log([0.25, 0.25, 0.25, 0.5, 0.5]), atol=1e-6)


@pytest.mark.parametrize("vocab", [7, 64, 200, 2048])
def test_logprobs_are_those_of_the_softmax_at_the_temperature(vocab):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(50, vocab)).astype(np.float32) * 4
    bits = jnp.asarray(rng.integers(0, 2**32, (50, 2), dtype=np.uint32))
    tokens, logprobs = choose_tokens(jnp.asarray(logits), bits, np.float32(1 / 0.7), ONE, "sample")
    expected = log_softmax(logits / 0.7)[np.arange(50), tokens]
    np.testing.assert_allclose(logprobs, expected, atol=2e-5)


def test_frequencies_follow_the_softmax():
    # 200,000 draws over 300 tokens in 3 blocks; chi-square with 299 degrees of freedom, fixed keys.
    logits = np.random.default_rng(3).normal(size=300).astype(np.float32)
    keys = row_keys(np.uint32(0), np.uint32(0), jnp.arange(2000, dtype=jnp.uint32))
    bits = jax.vmap(token_words, (None, 0))(keys, jnp.tile(jnp.arange(100)[:, None], 2000)).reshape(
        -1, 2
    )
    tiled = jnp.broadcast_to(jnp.asarray(logits), (bits.shape[0], 300))
    tokens, _ = jax.jit(choose_tokens, static_argnums=4)(tiled, bits, ONE, ONE, "sample")
    counts = np.bincount(np.asarray(tokens), minlength=300)
    expected = np.exp(log_softmax(logits)) * counts.sum()
    assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > 0.01
    # The test has teeth: the same counts against another temperature.
    other = np.exp(log_softmax(logits / 1.05)) * counts.sum()
    assert stats.chisquare(counts, other * counts.sum() / other.sum()).pvalue < 1e-6


def test_bias_over_a_large_vocabulary_is_as_documented():
    # The distribution really drawn from, by the float32 sums that the draw compares with: a block's
    # share is the number of 24-bit uniforms that lead to it. Total variation against the float64
    # softmax, block by block.
    vocab = 151_936
    logits = np.random.default_rng(0).normal(size=vocab).astype(np.float32) * 2
    padded = np.full(1187 * 128, -np.inf, np.float32)
    padded[:vocab] = logits - logits.max()
    sums = jnp.sum(jnp.exp(jnp.asarray(padded).reshape(1187, 128)), axis=-1)
    cumulative = np.asarray(jax.lax.associative_scan(jnp.add, sums))
    reached = np.ceil(cumulative.astype(np.float64) / cumulative[-1] * 2**24) / 2**24
    drawn = np.diff(np.clip(reached, 0, 1), prepend=0)
    exact = np.exp(
        log_softmax(np.pad(logits, (0, padded.size - vocab), constant_values=-1e9))
    ).reshape(1187, 128)
    assert abs(drawn.sum() - 1) < 1e-12
    assert 0.5 * np.abs(drawn - exact.sum(-1)).sum() < 3e-5


def test_greedy_takes_the_first_of_equals_and_reports_temperature_one():
    logits = jnp.array([[0.0, 2.0, 2.0], [3.0, -1.0, 0.0]])
    tokens, logprobs = choose_tokens(
        logits, words((0.9, 0.9), (0.9, 0.9)), np.float32(5), ONE, "greedy"
    )
    np.testing.assert_array_equal(tokens, [1, 0])
    np.testing.assert_allclose(logprobs, log_softmax(np.asarray(logits))[[0, 1], [1, 0]], atol=1e-6)


def test_nucleus_by_hand():
    # 0.4 + 0.3 reaches 0.7; for 0.71 the third is needed, and with it its equal. Order plays no
    # part.
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.1, 0.3, 0.1]]))
    np.testing.assert_array_equal(
        nucleus(logits, np.float32(0.3))[0], [False, True, False, False, False]
    )
    np.testing.assert_array_equal(
        nucleus(logits, np.float32(0.69))[0], [False, True, False, True, False]
    )
    np.testing.assert_array_equal(nucleus(logits, np.float32(0.71))[0], [True] * 5)
    np.testing.assert_array_equal(nucleus(logits, np.float32(1))[0], [True] * 5)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_nucleus_equals_a_sorted_reference(top_p):
    logits = np.random.default_rng(5).normal(size=(20, 333)).astype(np.float32) * 3
    probabilities = np.exp(log_softmax(logits))
    order = np.argsort(-probabilities, axis=-1)
    before = np.cumsum(np.take_along_axis(probabilities, order, -1), -1) - np.take_along_axis(
        probabilities, order, -1
    )
    expected = np.zeros(logits.shape, bool)
    np.put_along_axis(expected, order, before < top_p, -1)
    got = np.asarray(jax.jit(nucleus)(jnp.asarray(logits), np.float32(top_p)))
    # A token whose predecessors' mass equals top_p to float32 rounding may go either way.
    mass_before = np.zeros(logits.shape)
    np.put_along_axis(mass_before, order, before, -1)
    clear = np.abs(mass_before - top_p) > 1e-6
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(got[clear], expected[clear])


def test_nucleus_sampling_stays_inside_and_renormalizes():
    # Nucleus of 0.75 is {1/2, 1/4}: log-probs are log 2/3 and log 1/3, not log 1/2 and log 1/4.
    logits = jnp.tile(jnp.log(jnp.array([0.125, 0.5, 0.125, 0.25])), (1000, 1))
    bits = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (1000, 2), dtype=np.uint32))
    tokens, logprobs = choose_tokens(logits, bits, ONE, np.float32(0.74), "nucleus")
    assert set(np.asarray(tokens).tolist()) == {1, 3}
    np.testing.assert_allclose(
        logprobs, np.where(np.asarray(tokens) == 1, np.log(2 / 3), np.log(1 / 3)), atol=1e-6
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_visible_in_the_logprob(bad):
    logits = jnp.array([[0.0, bad, 1.0], [0.0, 0.0, 0.0]])
    _, logprobs = choose_tokens(logits, words((0.1, 0.1), (0.1, 0.1)), ONE, ONE, "sample")
    assert np.isnan(logprobs[0])
    np.testing.assert_allclose(logprobs[1], np.log(1 / 3), atol=1e-6)


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode: got 'beam', allowed are sample, nucleus, greedy"):
        choose_tokens(jnp.zeros((1, 2)), words((0, 0)), ONE, ONE, "beam")


def test_words_are_the_documented_chain_of_keys():
    keys = row_keys(np.uint32(7), np.uint32(3), jnp.array([0, 5, 2**20], jnp.uint32))
    for tokens in ((40, 41, 42), (0, 2**20, 7)):
        got = token_words(keys, jnp.asarray(tokens, jnp.int32))
        for place, (row, token) in enumerate(zip((0, 5, 2**20), tokens, strict=True)):
            key = jax.random.key(7)
            for number in (3, row, token):
                key = jax.random.fold_in(key, number)
            np.testing.assert_array_equal(got[place], jax.random.bits(key, (2,), jnp.uint32))
