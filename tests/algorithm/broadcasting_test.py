"""No public function of the method broadcasts: shapes are equal or refused."""

import functools
import importlib
import inspect
import pkgutil

import jax
import numpy as np
import pytest

import dcmdp_jax.algorithm
from dcmdp_jax.algorithm import (
    advantages,
    corrections,
    dc_grpo,
    discrepancy,
    distribution,
    dual,
    losses,
    masked,
    penalties,
    remedies,
    signals,
    stats,
    trust_regions,
)

N = 3
R = 2
L = 4
ROWS = np.full((R, L), -1.0, np.float32)
ONE = np.float32(0.5)
MASK = np.ones((R, L), bool)
INDEX = np.zeros((R, L), np.int32)
REWARDS = np.arange(N, dtype=np.float32)
GROUPS = np.zeros(N, np.int32)
VALID = np.ones(N, bool)
TOKENS = {
    name: ROWS
    for name in """
        train_logprobs old_logprobs rollout_logprobs start_logprobs anchor_logprobs ratio advantages
        discrepancy
    """.split()
} | {"completion_mask": MASK, "completion_index": INDEX, "multiplier": ONE, "tolerance": ONE}
PAIR = {"train_logprobs": ROWS, "rollout_logprobs": ROWS}
WHERE = {"completion_mask": MASK, "completion_index": INDEX}
LISTS = np.full((R, L, 3), -2.0, np.float32)
LISTED = np.ones((R, L, 3), bool)
LOGPROBS = dict.fromkeys(("train_logprobs", "rollout_logprobs"), LISTS)
HEAD = LOGPROBS | {
    "ids": np.zeros((R, L, 3), np.int32),
    "old_logprobs": LISTS,
    "start_logprobs": LISTS,
}
GROUP = {"rewards": REWARDS, "group_ids": GROUPS, "valid": VALID}
MEASURE = {"measure": "diff", "sided": "two"}
ASCENT = {"dual_learning_rate": ONE, "multiplier_min": np.float32(0), "multiplier_max": ONE}


def _of_tokens(function, **more):
    """(call, arrays) of a function of `Tokens` with N completions; `more` are further arrays."""

    def call(**arrays):
        own = {name: arrays.pop(name) for name in more}
        return function(remedies.Tokens(**arrays, num_completions=N), **own)

    return call, TOKENS | more


def _of_completions(function, **more):
    """(call, arrays) of a function of `CompletionIndex`."""

    def call(completion_mask, completion_index, **arrays):
        return function(
            **arrays, where=masked.CompletionIndex(completion_mask, completion_index, N)
        )

    return call, WHERE | more


def _of_head(function):
    """(call, arrays) of a function of `Tokens`, weights and `Head`."""
    head = {f"head_{name}": array for name, array in HEAD.items()}

    def call(tokens, weights, **arrays):
        return function(
            tokens,
            weights,
            distribution.Head(**{name[5:]: array for name, array in arrays.items()}),
        )

    return _of_tokens(call, weights=ROWS, **head)


def _part(function, *static, **options):
    return functools.partial(function, *static, **options)


CASES = {
    "stats.clamped_log_ratio": (
        stats.clamped_log_ratio,
        {"numerator_logprobs": ROWS, "denominator_logprobs": ROWS},
    ),
    "stats.binary_kl": (stats.binary_kl, {"x": ROWS, "y": ROWS}),
    "stats.log_difference": (
        stats.log_difference,
        {"numerator_logprobs": ROWS, "denominator_logprobs": ROWS},
    ),
    "discrepancy.token_discrepancy": (_part(discrepancy.token_discrepancy, **MEASURE), PAIR),
    "discrepancy.sequence_discrepancy": _of_completions(
        discrepancy.sequence_discrepancy, discrepancy_tokens=ROWS
    ),
    "discrepancy.completions_over_tolerance": _of_completions(
        discrepancy.completions_over_tolerance, discrepancy_tokens=ROWS, tolerance=ONE
    ),
    "discrepancy.mismatch_statistics": (discrepancy.mismatch_statistics, PAIR | {"mask": MASK}),
    "discrepancy.displacement": (discrepancy.displacement, PAIR),
    "discrepancy.displacement_statistics": (
        discrepancy.displacement_statistics,
        PAIR | {"mask": MASK},
    ),
    "signals.penalty_share": _of_tokens(
        signals.penalty_share, unpenalized=ROWS, token_weights=ROWS, in_loss=ROWS
    ),
    "advantages.group_advantages": (advantages.group_advantages, GROUP | {"epsilon": ONE}),
    "advantages.has_signal": (advantages.has_signal, GROUP),
    "masked.group_statistics": (_part(masked.group_statistics, ddof=1), GROUP),
    "masked.masked_values": (masked.masked_values, {"values": ROWS, "mask": MASK}),
    "masked.masked_sum": (masked.masked_sum, {"values": ROWS, "mask": MASK}),
    "masked.masked_mean": (masked.masked_mean, {"values": ROWS, "mask": MASK}),
    "masked.masked_max": (masked.masked_max, {"values": ROWS, "mask": MASK}),
    "masked.masked_quantile": (
        _part(masked.masked_quantile, q=0.5),
        {"values": ROWS, "mask": MASK},
    ),
    "masked.weighted_sum": (masked.weighted_sum, {"values": ROWS, "weights": ROWS}),
    **{
        f"masked.{name}": _of_completions(getattr(masked, name), token_values=ROWS)
        for name in ("completion_sums", "completion_means", "completion_maxima")
    },
    "masked.completion_counts": _of_completions(masked.completion_counts),
    "losses.aggregation_weights": (
        _part(losses.aggregation_weights, mode="token_mean"),
        {"completion_lengths": GROUPS, "loss_mask": VALID, "dropped_tokens": GROUPS},
    ),
    "losses.reference_kl": (
        _part(losses.reference_kl, estimator="k3"),
        {"train_logprobs": ROWS, "ref_logprobs": ROWS, "completion_mask": MASK},
    ),
    "losses.sequence_log_ratio": _of_tokens(losses.sequence_log_ratio),
    "losses.importance_ratio": (
        losses.importance_ratio,
        {"train_logprobs": ROWS, "old_logprobs": ROWS},
    ),
    "trust_regions.clipped_surrogate": (
        trust_regions.clipped_surrogate,
        {"ratio": ROWS, "advantages": ROWS},
    ),
    "penalties.penalized_advantages": (
        penalties.penalized_advantages,
        {"advantages": ROWS, "discrepancy": ROWS, "multiplier": ONE},
    ),
    "dc_grpo.dc_grpo_loss": (
        dc_grpo.dc_grpo_loss,
        PAIR
        | {
            "old_logprobs": ROWS,
            "completion_mask": MASK,
            "rewards": REWARDS[:R],
            "group_ids": GROUPS[:R],
            "multiplier": ONE,
            "tolerance": ONE,
        },
    ),
    "losses.policy_loss": _of_tokens(losses.policy_loss, token_weights=ROWS),
    **{f"losses.{name}": _of_tokens(one) for name, one in losses.LOSSES.items()},
    **{
        f"trust_regions.{name}": _of_tokens(one)
        for name, one in trust_regions.TRUST_REGIONS.items()
    },
    **{
        f"penalties.{name}": _of_tokens(one)
        for name, one in penalties.PENALTIES.items()
        if name != "grpo"
    },
    **{
        f"corrections.{name}": _of_tokens(
            _part(
                one,
                **(
                    {}
                    if inspect.signature(one).parameters["high"].default
                    is not inspect.Parameter.empty
                    else {"high": 1.0}
                ),
            )
            if "high" in inspect.signature(one).parameters
            else one
        )
        for name, one in corrections.CORRECTIONS.items()
    },
    "distribution.tail_logprobs": (
        distribution.tail_logprobs,
        {"logprobs": LISTS, "present": LISTED},
    ),
    "distribution.with_tail": (distribution.with_tail, {"logprobs": LISTS, "present": LISTED}),
    "distribution.state_measures": (distribution.state_measures, LOGPROBS | {"present": LISTED}),
    "distribution.distribution_statistics": (
        lambda mask, **head: distribution.distribution_statistics(
            distribution.Head(**head), mask, MEASURE
        ),
        HEAD | {"mask": MASK},
    ),
    "distribution.score_centering": _of_tokens(distribution.score_centering),
    "distribution.centering_loss": _of_head(
        _part(distribution.centering_loss, loss=losses.surrogate)
    ),
    "penalties.penalty_length": (
        lambda mask, **head: penalties.penalty_length(distribution.Head(**head), mask, "state_tv"),
        HEAD | {"mask": MASK},
    ),
    "penalties.penalty_loss": _of_head(_part(penalties.penalty_loss, penalty="state_tv")),
    **{
        f"penalties.{one.__name__}": (one, {"log_p": LISTS, "log_q": LISTS})
        for one in penalties.STATE_PENALTIES.values()
    },
    "corrections.chain": _of_tokens(_part(corrections.chain, corrections=[corrections.tis])),
    "corrections.statistics": (
        lambda weights, keep, mask: corrections.statistics(remedies.Corrected(weights, keep), mask),
        {"weights": ROWS, "keep": MASK, "mask": MASK},
    ),
    "signals.row_signals": _of_tokens(
        _part(signals.row_signals, measure=MEASURE, level="token", penalty=penalties.dc_grpo),
        weights=REWARDS,
    ),
    "dual.dual_update": (
        dual.dual_update,
        {"multiplier": ONE, "mean_discrepancy": ONE, "tolerance": ONE} | ASCENT,
    ),
    "dual.measured_tolerance": (
        dual.measured_tolerance,
        {"mean_discrepancies": REWARDS, "noise_floors": REWARDS},
    ),
    **{
        f"stats.{kind.__name__}": (
            lambda one, other, kind=kind: stats.merge(
                *(kind(*[x] * len(kind._fields)) for x in (one, other))
            ),
            {"one": ROWS, "other": ROWS},
        )
        for kind in (stats.Sum, stats.Mean, stats.Max, stats.Min)
    },
}

# One array, numbers of Python alone, or by design another shape than the index (its own checks are
# in masked_test).
OTHERS = set(
    """
    distribution.require_head stats.as_float stats.clamp stats.exp_minus_linear discrepancy.log_odds
    stats.kl_estimate corrections.of_single_tokens
    advantages.overlong_penalty masked.gather_to_tokens dual.dual_init penalties.grpo
""".split()
)


def _broadcastable(array):
    """Other shapes that would broadcast with the array's own."""
    if not array.shape:
        return [np.full((L,), array)]
    wide = [array[:1], array[None]]
    return wide if array.ndim == 1 else [*wide, array[0], array[:, :1], array[0, 0]]


# An advantage of each completion, [R, 1], is what it takes beside one of each token.
_TAKEN = {("penalties.penalized_advantages", "advantages", (R, 1))}


@pytest.mark.parametrize("name", CASES)
def test_an_array_of_another_shape_is_refused(name):
    call, arrays = CASES[name]
    jax.eval_shape(lambda arrays: _leaves(call(**arrays)), arrays)
    for argument, array in arrays.items():
        for other in _broadcastable(array):
            if (name, argument, other.shape) in _TAKEN:
                continue
            with pytest.raises(ValueError, match=r"shape|axes") as error:
                jax.eval_shape(lambda arrays: _leaves(call(**arrays)), arrays | {argument: other})
            assert "\n" not in str(error.value), (argument, other.shape)


def _leaves(result):
    return [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]


def test_every_public_function_of_arrays_is_among_them():
    covered = {name.split(".")[1] for name in CASES} | {name.split(".")[1] for name in OTHERS}
    for module in pkgutil.iter_modules(dcmdp_jax.algorithm.__path__):
        if module.name in ("require", "remedies", "stats"):
            continue
        found = importlib.import_module(f"dcmdp_jax.algorithm.{module.name}")
        for name, one in vars(found).items():
            if (
                inspect.isfunction(one)
                and one.__module__ == found.__name__
                and not name.startswith("_")
            ):
                assert name in covered, f"{module.name}.{name}"


@pytest.mark.parametrize("name", corrections.CORRECTIONS)
def test_a_correction_takes_a_mask_of_zeros_and_ones(name):
    call, arrays = CASES[f"corrections.{name}"]
    generator = np.random.default_rng(3)
    changed = {
        argument: (array * generator.uniform(0.5, 1.5, array.shape)).astype(np.float32)
        for argument, array in arrays.items()
        if array.dtype == np.float32
    }
    mask = generator.random((R, L)) < 0.7
    expected = _leaves(call(**arrays | changed | {"completion_mask": mask}))
    actual = _leaves(call(**arrays | changed | {"completion_mask": mask.astype(np.int32)}))
    for have, want in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(have, want)
