"""Every correction against its formula in float64 NumPy; NaN, empty masks, chains, gradients."""

import functools
import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm import corrections, losses, penalties, signals, stats
from dcmdp_jax.algorithm.corrections import CORRECTIONS, TRUNCATIONS, KlOver, chain, kl_rejection
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.algorithm.stats import KlEstimator
from dcmdp_jax.config.load import from_config_dict
from tests.support.surrogate import policy_surrogate

_EVERY = {name: one for name, one in CORRECTIONS.items() if name != "kl_rejection"} | {
    f"{over}_{estimator}": functools.partial(kl_rejection, estimator=estimator, over=over)
    for over, estimator in itertools.product(get_args(KlOver), get_args(KlEstimator))
}

# Parameters for which the random input below has tokens or completions on both sides of every
# bound.
_GIVEN = {
    "tis": {"low": 0.7, "high": 1.3},
    "sequence_tis": {"low": 0.3, "high": 2.0},
    "icepop": {"low": 0.7, "high": 1.3},
    "sequence_mis": {"low": 0.3, "high": 3.0},
    "sequence_rejection": {"low": 0.3, "high": 3.0},
    "geometric_rejection": {"low": 0.9, "high": 1.1},
    "veto": {"floor": 0.5},
    "off_policy_mask": {"high": 0.02},
    "cis": {"slope": 0.5, "floor": 5e-3},
    "minpro": {"low": 0.3, "high": 1.1},
    "ctpo": {"low": 0.1, "high": 0.2, "power": 0.5},
    "pnpo": {"low": 0.9, "high": 1.1},
    "kpop": {"high": 0.02},
    "sequence_error": {"high": 1.3},
    "probability_band": {"low": 0.02, "high": 0.04},
    "vaco": {"high": 0.2},
    "m2po": {"high": 0.02},
    "token_k1": {"high": 0.3},
    "token_k2": {"high": 0.05},
    "token_k3": {"high": 0.05},
    "mean_k1": {"high": 0.1},
    "mean_k2": {"high": 0.06},
    "mean_k3": {"high": 0.06},
    "sum_k1": {"high": 0.7},
    "sum_k2": {"high": 0.4},
    "sum_k3": {"high": 0.4},
    "max_k1": {"high": 0.6},
    "max_k2": {"high": 0.2},
    "max_k3": {"high": 0.2},
}


def _binary_kl(a, b):
    rest_a = np.maximum(1 - a, 1e-6)
    rest_b = np.maximum(1 - b, 1e-6)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = np.clip(np.nan_to_num(np.log(a) - np.log(b), nan=0.0), -20, 20)
    return a * log_ratio + rest_a * (np.log(rest_a) - np.log(rest_b))


def _completion(
    name, now, old, rollout, advantage, low=None, high=None, floor=None, slope=None, power=None
):
    """Weights and keep of one completion's tokens, from the formulas, float64."""
    d = old - rollout
    one = np.ones(len(old))
    whole = lambda kept: np.full(len(old), kept)  # noqa: E731
    r = np.exp(np.clip(d, -20, 20))
    product = np.exp(np.clip(d.sum(), -20, 20))
    if name == "tis":
        return np.minimum(np.maximum(r, low), high), whole(True)
    if name == "sequence_tis":
        return np.minimum(np.maximum(product, low), high) * one, whole(True)
    if name == "icepop":
        return r, (low <= r) & (r <= high)
    if name == "sequence_mis":
        return product * one, whole(low <= product <= high)
    if name == "sequence_rejection":
        return one, whole(low <= product <= high)
    if name == "geometric_rejection":
        return one, whole(low <= np.exp(np.clip(d.mean(), -20, 20)) <= high)
    if name == "veto":
        return one, whole(r.min() >= floor)
    if name == "off_policy_mask":
        return one, whole(advantage >= 0 or (rollout - now).mean() <= high)
    p = np.exp(np.minimum(old, 0))
    q = np.exp(np.minimum(rollout, 0))
    if name == "cis":
        return np.minimum(r, 1 + slope * np.maximum(1 - np.exp(old), floor)), whole(True)
    if name == "minpro":
        least = np.concatenate(([1.0], np.minimum.accumulate(r)[:-1]))
        return np.clip(np.clip(r * least, np.exp(-20), np.exp(20)), low, high), whole(True)
    t = np.arange(1, len(d) + 1)
    if name == "ctpo":
        return np.exp(np.clip(d.cumsum(), -low * t**power, high * t**power)), whole(True)
    if name == "pnpo":
        return np.clip(np.exp(np.clip(d.cumsum() / t, -20, 20)), low, high), whole(True)
    if name == "kpop":
        return r, np.maximum(
            _binary_kl(np.exp(old), np.exp(rollout)), _binary_kl(np.exp(rollout), np.exp(old))
        ) <= high
    if name == "sequence_error":
        return one, whole(np.maximum(r, 1 / r).mean() <= high)
    if name == "probability_band":
        return one, (-low <= p - q) & (p - q <= high)
    if name == "vaco":
        return one, ~((np.abs(r - 1).mean() > high) & (advantage * d > 0))
    level, estimator = name.split("_")
    c = np.clip(d, -20, 20)
    value = {"k1": -d, "k2": c * c / 2, "k3": np.exp(c) - 1 - c}[estimator]
    if level == "token":
        return one, np.abs(value) <= high
    whole_value = {"mean": value.mean(), "sum": value.sum(), "max": np.abs(value).max()}[level]
    return one, whole(abs(whole_value) <= high)


_LENGTHS = [7, 1, 12, 3, 30, 9, 2, 5, 16, 4, 8, 11]


def make_correction(name, given):
    return functools.partial(_EVERY[name], **given)


def _tokens(now, old, rollout, advantages, mask, index, completions):
    return Tokens(
        advantages=advantages,
        train_logprobs=now,
        old_logprobs=old,
        rollout_logprobs=rollout,
        completion_mask=mask,
        completion_index=index,
        num_completions=completions,
        multiplier=0.0,
        tolerance=0.0,
    )


def _rows(spread, seed=0):
    """Twelve completions of different lengths packed two a row, with padding of NaN between."""
    rng = np.random.default_rng(seed)
    width = 50
    shape = (len(_LENGTHS) // 2, width)
    now, old, rollout = (np.full(shape, np.nan, np.float32) for _ in range(3))
    mask = np.zeros(shape, bool)
    index = np.zeros(shape, np.int32)
    for i, length in enumerate(_LENGTHS):
        row = i // 2
        start = 2 if i % 2 == 0 else 48 - length
        place = (row, slice(start, start + length))
        rollout[place] = -rng.exponential(1.0, length)
        old[place] = rollout[place] + spread * rng.normal(size=length) * rng.exponential(1.0)
        now[place] = old[place] + spread * rng.normal(size=length)
        mask[place], index[place] = True, i
    advantages = rng.choice([-1.0, 1.0], len(_LENGTHS)).astype(np.float32)
    tokens = _tokens(
        now, old, rollout, np.where(mask, advantages[index], np.nan), mask, index, len(_LENGTHS)
    )
    return tokens, advantages


def _reference(name, tokens, advantages, given):
    weights = np.zeros(tokens.completion_mask.shape)
    keep = np.ones(tokens.completion_mask.shape, bool)
    if name == "m2po":  # the one that looks at all tokens together
        mask = tokens.completion_mask
        squares = (
            np.clip(tokens.old_logprobs.astype(float) - tokens.rollout_logprobs, -20, 20)[mask] ** 2
        )
        order = squares.argsort(kind="stable")
        means = squares[order].cumsum() / np.arange(1, mask.sum() + 1)
        kept = np.zeros(mask.sum(), bool)
        kept[order[: max(int((means <= given["high"]).sum()), 1)]] = True
        keep[mask] = kept
        return np.where(mask & keep, 1.0, 0.0), keep
    for i in range(tokens.num_completions):
        where = tokens.completion_mask & (tokens.completion_index == i)
        lp = [np.asarray(x, np.float64)[where] for x in tokens[:3]]
        weights[where], keep[where] = _completion(name, *lp, advantages[i], **given)
    return np.where(keep, weights, 0.0), keep


_OPTIONS = {
    "measure": {"measure": "diff", "sided": "two"},
    "level": "token",
    "penalty": penalties.grpo,
}


def test_sum_k1_is_sequence_rejection_with_a_symmetric_band():
    """The sum of differences is not clamped token by token.

    Differences of -30 and 29.5 nats: the sum is -0.5, and would be 0 if each were clamped at 20
    first.
    """
    old = np.array([[-31.0, -1.0]], np.float32)
    rollout = np.array([[-1.0, -30.5]], np.float32)
    zeros = np.zeros((1, 2), np.float32)
    tokens = _tokens(old, old, rollout, zeros, zeros == 0, zeros.astype(np.int32), 1)
    for high, kept in ((0.4, False), (0.6, True)):
        by_sum = make_correction("sum_k1", {"high": high})(tokens).keep
        band = {"low": float(np.exp(-high)), "high": float(np.exp(high))}
        by_product = make_correction("sequence_rejection", band)(tokens).keep
        assert by_sum.tolist() == by_product.tolist() == [[kept, kept]]


def test_every_correction_is_tested():
    assert set(_GIVEN) == set(_EVERY)


def test_no_gradient_reaches_the_weights():
    tokens, _ = _rows(0.3)
    tokens = tokens._replace(
        **{name: np.nan_to_num(x) for name, x in tokens._asdict().items() if np.ndim(x)}
    )
    for name, given in _GIVEN.items():
        correct = make_correction(name, given)

        def sum_of_weights(old, correct=correct):
            return correct(tokens._replace(old_logprobs=old)).weights.sum()

        assert not jax.grad(sum_of_weights)(jnp.asarray(tokens.old_logprobs)).any(), name


def test_the_corrections_that_look_at_advantages_are_known():
    tokens, _ = _rows(2.0)
    found = set()
    for name in _EVERY:
        correction = make_correction(name, _GIVEN[name])
        parts = [
            correction(
                tokens._replace(advantages=np.full(tokens.advantages.shape, sign, np.float32))
            )
            for sign in (-1.0, 1.0)
        ]
        if not all(np.array_equal(*pair) for pair in zip(*parts, strict=True)):
            found.add(name)
    assert found == {"off_policy_mask", "vaco"}


@pytest.mark.parametrize("name", _EVERY)
def test_correction_equals_its_formula(name):
    given = _GIVEN[name]
    # Moderate, equal to the last bit, and far apart: differences of +-50 nats and more at spread
    # 50.
    for spread, seed in ((0.3, 0), (0.0, 1), (50.0, 2)):
        tokens, advantages = _rows(spread, seed)
        found = make_correction(name, given)(tokens)
        weights, keep = _reference(name, tokens, advantages, given)
        np.testing.assert_array_equal(found.keep, keep)
        np.testing.assert_allclose(found.weights, weights, rtol=3e-5, atol=1e-12)
        assert np.isfinite(found.weights).all()
        if spread == 0.3:  # the input tells the two sides apart
            changed = ~keep if name not in TRUNCATIONS else np.asarray(found.truncated)
            assert 0.05 < changed[tokens.completion_mask].mean() < 0.95
        if spread == 0.0:
            assert keep.all() and not found.truncated.any()
            np.testing.assert_array_equal(found.weights, tokens.completion_mask.astype(np.float32))


@pytest.mark.parametrize("name", _EVERY)
def test_value_and_gradient_of_the_corrected_loss(name):
    """The loss over kept tokens, divided by their weight, against NumPy.

    d/d log pi = -w gamma A / total.
    """
    tokens, advantages = _rows(0.3)
    mask = tokens.completion_mask
    index = tokens.completion_index
    per_completion = (1 / np.array(_LENGTHS)).astype(np.float32)
    correction = make_correction(name, _GIVEN[name])

    @jax.jit
    def loss(now):
        found = signals.row_signals(
            tokens._replace(train_logprobs=now),
            per_completion,
            **_OPTIONS,
            corrections=[correction],
        )
        summed, _ = policy_surrogate(
            now,
            found.tokens.old_logprobs,
            found.tokens.advantages,
            mask,
            found.weights,
            clip_low=0.9,
            clip_high=100.0,
        )
        lengths = np.array(_LENGTHS)
        everyone = np.ones(len(_LENGTHS), bool)
        _, total = losses.aggregation_weights(
            lengths, everyone, mode="seq_mean_token_mean", dropped_tokens=found.dropped_tokens
        )
        return summed.total / total

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(tokens.train_logprobs))
    weights, keep = _reference(name, tokens, advantages, _GIVEN[name])
    gamma = np.exp(
        np.where(mask, tokens.train_logprobs.astype(np.float64) - tokens.old_logprobs, 0.0)
    )
    scale = np.where(mask, weights * per_completion[index].astype(np.float64), 0.0)
    total = np.where(mask & keep, per_completion[index], 0.0).sum(dtype=np.float64)
    expected = -scale * gamma * np.where(mask, tokens.advantages, 0.0) / total
    assert float(value) == pytest.approx(expected.sum(), rel=2e-5, abs=1e-7)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-8)


_OF_TOKENS = "tis", "icepop", "cis", "kpop", "probability_band", "m2po"


@pytest.mark.parametrize("name", _EVERY)
def test_nan_infinity_and_empty_masks(name):
    correction = make_correction(name, _GIVEN[name])
    nothing = correction(_rows(0.3)[0]._replace(completion_mask=np.zeros((6, 50), bool)))
    assert (
        not np.asarray(nothing.weights).any() and nothing.keep.all() and not nothing.truncated.any()
    )

    tokens, _ = _rows(0.0)
    mask = tokens.completion_mask
    first = tuple(np.argwhere(mask & (tokens.completion_index == 2))[0])
    for broken in (
        tokens.rollout_logprobs,
        tokens.train_logprobs if name == "off_policy_mask" else tokens.old_logprobs,
    ):
        kept = broken[first]
        broken[first] = np.nan
        found = correction(tokens)
        # Seen, not dropped: on the token, or on its whole completion; nowhere else.
        per_token = name in _OF_TOKENS or name.startswith("token")
        hit = np.zeros(mask.shape, bool)
        hit[first] = True
        hit = hit if per_token else mask & (tokens.completion_index == 2)
        np.testing.assert_array_equal(np.isnan(found.weights), hit)
        assert found.keep.all()
        broken[first] = -np.inf
        assert np.isfinite(correction(tokens).weights).all()
        broken[first] = kept
    # -inf from both engines is agreement.
    tokens.train_logprobs[first] = tokens.old_logprobs[first] = tokens.rollout_logprobs[
        first
    ] = -np.inf
    np.testing.assert_array_equal(correction(tokens).weights, mask.astype(np.float32))


def test_bounds_are_inclusive():
    # r = 2 exactly: log 2 - 0 in float32 and back.
    ratio = np.float32(np.exp(np.float32(np.log(2))))
    old = np.log([[2.0, 1.0]]).astype(np.float32)
    rollout = np.zeros((1, 2), np.float32)
    mask = np.ones((1, 2), bool)
    tokens = _tokens(old, old, rollout, np.ones((1, 2)), mask, np.zeros((1, 2), np.int32), 1)
    high = float(ratio)
    assert np.asarray(
        make_correction("icepop", {"low": 1.0, "high": high})(tokens).keep
    ).tolist() == [[True, True]]
    below = float(np.nextafter(ratio, np.float32(0)))
    assert np.asarray(
        make_correction("icepop", {"low": 1.0, "high": below})(tokens).keep
    ).tolist() == [[False, True]]


def test_chain_multiplies_weights_joins_masks_and_has_no_order():
    tokens, _ = _rows(0.3)
    names = ("tis", "token_k1", "veto")
    parts = {name: make_correction(name, _GIVEN[name])(tokens) for name in names}
    for order in itertools.permutations(names):
        joined, _ = chain(tokens, [make_correction(name, _GIVEN[name]) for name in order])
        np.testing.assert_array_equal(joined.keep, parts["veto"].keep & parts["token_k1"].keep)
        expected = np.where(parts["token_k1"].keep & parts["veto"].keep, parts["tis"].weights, 0.0)
        np.testing.assert_array_equal(joined.weights, expected)
        np.testing.assert_array_equal(joined.truncated, parts["tis"].truncated)


def test_statistics_merge_over_rows():
    tokens, advantages = _rows(0.3)
    mask = tokens.completion_mask
    correction = make_correction("tis", _GIVEN["tis"])
    weights, _ = _reference("tis", tokens, advantages, _GIVEN["tis"])
    found = correction(tokens)
    whole = corrections.statistics(found, mask)
    parts = [
        corrections.statistics(jax.tree.map(lambda x, rows=rows: x[rows], found), mask[rows])
        for rows in (slice(0, 1), slice(1, 6))
    ]
    merged = stats.values(stats.merge(*parts))
    for name, value in stats.values(whole).items():
        assert float(merged[name]) == pytest.approx(float(value), rel=1e-6)
    inside = weights[mask]
    assert float(merged["correction/weight_mean"]) == pytest.approx(inside.mean(), rel=1e-5)
    assert float(merged["correction/weight_square_mean"]) == pytest.approx(
        (inside**2).mean(), rel=1e-5
    )
    assert float(merged["correction/truncated_fraction"]) == pytest.approx(
        np.isin(inside, [0.7, 1.3]).mean(), rel=1e-6
    )
    assert float(merged["correction/dropped_fraction"]) == 0.0


def test_dropped_tokens_count_in_the_denominator_if_asked():
    tokens, _ = _rows(0.3)
    correction = make_correction("icepop", _GIVEN["icepop"])
    ones = np.ones(12, np.float32)
    left_out = signals.row_signals(tokens, ones, **_OPTIONS, corrections=[correction])
    counted = signals.row_signals(
        tokens, ones, **_OPTIONS, corrections=[correction], count_dropped=True
    )
    np.testing.assert_array_equal(left_out.weights, counted.weights)
    dropped = int((~np.asarray(correction(tokens).keep)).sum())
    assert (
        dropped > 0
        and int(left_out.dropped_tokens.sum()) == dropped
        and int(counted.dropped_tokens.sum()) == 0
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tis(cap=2)", "tis has no parameter 'cap'; it has low, high"),
        ("tis(high=-1)", r"tis\(high=-1.0\): high=-1.0; must be a finite number in \(0, inf\)"),
        ("tis(high=nan)", r"tis\(high=nan\): high=nan; must be a finite number"),
        ("tis(high=true)", r"tis\(high=true\): high must be a number"),
        ("icepop(low=2,high=2)", "the band from low=2 to high=2 is empty"),
        ("icepop(low=6)", "the band from low=6 to high=5 is empty"),
        ("veto(floor=0)", r"floor=0.0; must be a finite number in \(0, inf\)"),
        ("tis(high=much)", r"tis\(high=much\): high must be a number"),
        ("kl_rejection", r"kl_rejection needs high, such as kl_rejection\(high=0.1,estimator=k3"),
        ("kl_rejection(high=1,estimator=k4)", "estimator='k4'; must be one of 'k1', 'k2', 'k3'"),
        ("kl_rejection(high=1,estimator=2)", "estimator=2.0; must be one of 'k1', 'k2', 'k3'"),
        (
            "kl_rejection(high=1,over=row)",
            "over='row'; must be one of 'token', 'mean', 'sum', 'max'",
        ),
    ],
)
def test_bad_parameters_are_refused(text, message):
    with pytest.raises(ValueError, match=f"config.algorithm.corrections: .*{message}"):
        from_config_dict({"task": {"train": "x"}, "algorithm": {"corrections": text}})
