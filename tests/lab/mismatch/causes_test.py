"""Evidence by hand, and causes named from it: decisions on stated evidence, and on columns with planted faults."""

import dataclasses

import numpy as np
import pytest

from dcmdp_jax.lab.mismatch.causes import CAUSES, diagnose
from dcmdp_jax.lab.mismatch.evidence import Evidence, Explanation, TokenMean, break_at, collect
from dcmdp_jax.lab.mismatch.pairs import make_pairs
from tests.lab.mismatch.sampled_columns import columns


def _named(pairs, **measured):
    return [finding.cause for finding in diagnose(collect(pairs, **measured))]


def test_evidence_by_hand():
    p, q = np.array([0.5, 0.5, 0.2, 0.4]), np.array([0.25, 0.5, 0.4, 0.5])
    pairs = make_pairs([[1, 2, 3, 4]], [np.log(p)], [np.log(q)], entropies=[[1.0, 1.0, 1.0, 1.0]])
    found = collect(pairs, floor=0.1)
    # p / q: 2, 1, .5, .8; q / p: .5, 1, 2, 1.25.
    assert found.ratio.mean == pytest.approx(4.3 / 4, rel=1e-6)
    assert found.ratio.error == pytest.approx(np.std([2, 1, 0.5, 0.8]) / 2, rel=1e-6)
    assert found.inverse_ratio.mean == pytest.approx(4.75 / 4, rel=1e-6)
    assert found.surprise.mean == pytest.approx(-np.log(p).mean() - 1, rel=1e-6)
    # Three tokens differ; p is above q on one of them.
    assert found.positive == pytest.approx(1 / 3)
    assert found.mean == pytest.approx((0.25 + 0.2 + 0.1) / 4, rel=1e-6)
    assert (found.broken, found.floor) == (0.0, 0.1) and np.isnan(found.settled)
    assert found.start == pytest.approx(np.abs(np.log(p / q)).mean(), rel=1e-6)


def test_certain_tokens_do_not_make_a_mismatch_look_small():
    # 80 tokens near 1 and 20 at one half that are 0.2 nats apart: the median of all would be 0.
    p = np.array([0.999] * 80 + [0.5] * 20)
    q = np.where(p > 0.9, p, p * np.exp(0.2))
    found = collect(make_pairs([np.arange(100)], [np.log(p)], [np.log(q)]))
    assert found.median_log_ratio == pytest.approx(0.2, rel=1e-5)


def test_a_break_is_where_the_levels_change():
    wild = np.array([0.01] * 10 + [2.0] * 6)
    assert break_at(wild) == 10
    assert break_at(np.full(16, 2.0)) is None  # wild from the start: no break
    assert break_at(np.full(16, 0.01)) is None
    assert break_at(np.array([0.01] * 10 + [0.1] * 6)) is None  # ten times more, but still small
    assert break_at(wild[:7]) is None and break_at(np.array([0.01] * 3 + [2.0] * 4)) is None


_PLANTED = {
    "clean": (columns(), ["clean"]),
    "bfloat16 noise": (columns(noise=0.01), ["rounding"]),
    "large noise": (columns(noise=0.3), ["undetermined"]),
    "temperature 0.7": (columns(temperature=0.7), ["temperature"]),
    "temperature 0.7 and noise": (columns(temperature=0.7, noise=0.03), ["temperature"]),
    "temperature 0.3": (columns(temperature=0.3), ["temperature"]),
    "temperature 1.3": (columns(temperature=1.3), ["temperature"]),
    "raw at 0.7": (columns(temperature=0.7, raw=True), ["raw_logprobs"]),
    "raw at 1.3": (columns(temperature=1.3, raw=True), ["raw_logprobs"]),
    "top-p 0.9": (columns(top_p=0.9), ["support"]),
    "top-p 0.7 and noise": (columns(top_p=0.7, noise=0.02), ["support"]),
    "half of the completions broken": (columns(broken=20, noise=0.01), ["retokenization"]),
    "one completion broken": (columns(broken=1), ["retokenization"]),
    "versions 0 and 4": (columns(lags={0: 0.01, 4: 0.4}), ["stale_weights"]),
    "versions that do not matter": (columns(lags={0: 0.01, 1: 0.01}), ["rounding"]),
    "other logits at the start": (columns(start=True, noise=0.01), ["chat_template"]),
}  # fmt: skip


@pytest.mark.parametrize("case", _PLANTED)
def test_the_columns_alone_name_what_was_planted(case):
    pairs, expected = _PLANTED[case]
    assert _named(pairs)[:1] == expected


@pytest.mark.parametrize("case", [case for case in _PLANTED if "0.3" not in case])
def test_the_cause_is_named_without_entropies_too(case):
    pairs, expected = _PLANTED[case]
    assert _named(dataclasses.replace(pairs, entropies=None))[:1] == expected


def test_equal_columns_of_a_cut_distribution_are_not_called_clean():
    pairs = columns(top_p=0.7)
    agreeing = dataclasses.replace(pairs, rollout_logprobs=pairs.train_logprobs)
    assert _named(agreeing) == ["raw_logprobs"]
    assert _named(dataclasses.replace(agreeing, entropies=None)) == ["clean"]


_NOISE = collect(columns(noise=0.1))


def _decide(**changes):
    return diagnose(dataclasses.replace(_NOISE, **changes))


def test_the_noise_floor_decides_what_is_clean():
    mean = _NOISE.mean
    assert _decide(floor=mean * 1.01)[0].cause == "clean"
    assert _decide(floor=mean / 2.9)[0].cause == "rounding"
    assert _decide(floor=mean / 3.1)[0].cause == "undetermined"


def test_the_measured_rounding_decides_what_is_rounding():
    mean = _NOISE.mean
    assert _decide(rounding=mean / 2.9)[0].cause == "rounding"
    # Without it the size of the log-ratio would decide; with it, it must not.
    assert _decide(rounding=mean / 3.1, median_log_ratio=0.001)[0].cause == "undetermined"


def test_the_best_rescoring_names_the_cause():
    weights = Explanation("int8 weights", "quantized_weights", 0.97)
    cache = Explanation("fp8 cache", "quantized_cache", 0.4)
    found = _decide(explanations=[cache, weights])
    assert found[0].cause == "quantized_weights"
    assert (
        found[0].evidence[0] == "Scoring with int8 weights explains 97% of the mismatch."
        and "fp8 cache: 40%" in found[0].evidence[1]
    )
    assert _decide(explanations=[cache])[0].cause == "undetermined"


def test_a_strong_rescoring_beats_the_columns_and_a_weak_one_does_not():
    evidence = collect(columns(top_p=0.9))

    def verdict(share):
        explanation = Explanation("temperature 0.8", "temperature", share)
        return diagnose(dataclasses.replace(evidence, explanations=[explanation]))[0].cause

    assert verdict(0.95) == "temperature" and verdict(0.6) == "support"


def test_the_tokens_say_whose_temperature_is_wrong():
    fitted = Explanation("temperature 0.7", "temperature", 0.99)
    off, fits = TokenMean(-0.5, 0.01), TokenMean(0.01, 0.01)
    assert _decide(explanations=[fitted], surprise=off)[0].cause == "temperature"
    assert _decide(explanations=[fitted], surprise=fits)[0].cause == "raw_logprobs"
    unknown = TokenMean(np.nan, np.nan)
    assert (
        _decide(explanations=[fitted], surprise=unknown, inverse_ratio=TokenMean(1.2, 0.01))[0].cause == "temperature"
    )


def test_settings_speak_only_where_nothing_was_measured():
    price = {"quantized_cache": "the engine's key-value cache is fp8"}
    (found,) = _decide(settings=price)
    assert found.cause == "quantized_cache" and found.evidence[0].startswith("By its settings, not by measurement")
    assert [finding.cause for finding in _decide(settings=price, rounding=1.0)] == ["rounding"]
    assert [f.cause for f in diagnose(collect(columns(top_p=0.9), settings=price))] == ["support"]


def test_every_cause_has_a_title_and_a_remedy_and_can_be_named():
    reached = {cause for _, expected in _PLANTED.values() for cause in expected}
    for name in CAUSES.keys() - reached:
        found = _decide(explanations=[Explanation("x", name, 0.95)])[0]
        assert found.cause == name
    assert all(cause.title and cause.remedy.endswith(".") for cause in CAUSES.values())
    assert isinstance(_NOISE, Evidence)
