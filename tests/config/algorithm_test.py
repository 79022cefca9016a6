"""Settings of corrections: the syntax, the checks, and what they become."""

import numpy as np
import pytest

from configs import base, remedies
from dcmdp_jax.algorithm import corrections
from dcmdp_jax.config.settings import from_config_dict


def _config(**algorithm):
    values = base.get_config().to_dict()
    values["task"]["train"] = "train.jsonl"
    values["algorithm"] |= algorithm
    return from_config_dict(values)


def _tokens(ratio):
    """One completion whose tokens the training stack finds `ratio` times as likely as the engine."""
    rollout = np.full((1, len(ratio)), -1.0, np.float32)
    old = rollout + np.log(np.array([ratio], np.float32))
    mask = np.ones(old.shape, bool)
    return corrections.SampledTokens(old, old, rollout, np.ones(old.shape), mask, np.zeros(old.shape, np.int32), 1)


@pytest.mark.parametrize(
    ("text", "weights", "keep"),
    [
        ("tis", [0.5, 2.0, 2.0], [1, 1, 1]),
        ("tis(high=3)", [0.5, 3.0, 3.0], [1, 1, 1]),
        (" tis ( low = 0.75 , high=3 ) , token_k1(high=0.8),", [0.75, 0, 0], [1, 0, 0]),
        ("icepop(high=5.5),sequence_rejection(high=8)", [0.5, 3.0, 5.0], [1, 1, 1]),
        ("veto(floor=0.6)", [0, 0, 0], [0, 0, 0]),
    ],
)
def test_the_text_becomes_a_correction(text, weights, keep):
    found = _config(corrections=text).algorithm.correction(_tokens([0.5, 3.0, 5.0]))
    np.testing.assert_allclose(found.weights, [weights], rtol=1e-6)
    np.testing.assert_array_equal(found.keep, np.array([keep], bool))


def test_no_correction_is_the_default():
    assert _config().algorithm.correction is None


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        ({"corrections": "tiss"}, "corrections: got 'tiss'; did you mean tis?"),
        ({"corrections": "seq_tis"}, "corrections: got 'seq_tis'; did you mean sequence_tis"),
        ({"corrections": "qqq"}, "corrections: got 'qqq'; there are tis, sequence_tis, icepop"),
        ({"corrections": "tis(cap=2)"}, "corrections: tis has no parameter 'cap'; it has low, high"),
        ({"corrections": "tis(2)"}, "corrections: got tis('2'); parameters are name=number, each once"),
        (
            {"corrections": "tis(high=2,high=5)"},
            "corrections: got tis('high=2,high=5'); parameters are name=number, each",
        ),
        ({"corrections": "tis(high=two)"}, "corrections: got tis('high=two'); parameters are name=number"),
        ({"corrections": "icepop(low=2,high=1)"}, "corrections: icepop: the band from low=2 to high=1 is empty"),
        ({"corrections": "tis(high=inf)"}, "corrections: tis(high=inf): must be a finite number above 0"),
        ({"corrections": "mean_k3"}, "corrections: mean_k3 needs high, such as mean_k3(high=0.1)"),
        ({"corrections": "tis veto"}, "corrections: got 'tis veto'; write name or name(parameter=number)"),
        ({"corrections": "veto,veto"}, "corrections: got veto twice; name it once"),
        (
            {"corrections": "veto,tis", "ratio_denominator": "bypass"},
            "corrections: got tis with ratio_denominator=bypass, whose ratio weighs by p_train / p_rollout already",
        ),
        ({"dual_clip": 0.5}, "dual_clip: got 0.5, must be above 1, or 0 for none"),
        ({"trust_region": "drpo", "clip_low": 0.0}, "clip_low, clip_high: got 0.0, 0.24 with trust_region=drpo"),
        ({"trust_region": "dppo"}, "trust_region: got 'dppo', allowed are clip, dppo_tv, dppo_kl, drpo; did you mean"),
        ({"overlong_buffer": 9000}, "overlong_buffer: got 9000, must be at most rollout.max_completion_tokens=8192"),
    ],
)
def test_what_is_refused(algorithm, line):
    with pytest.raises(ValueError) as raised:
        _config(**algorithm)
    assert str(raised.value).startswith(f"config.algorithm.{line}") and "\n" not in str(raised.value)


def test_filters_go_with_the_engines_denominator():
    assert _config(corrections="veto,mean_k3(high=0.1)", ratio_denominator="bypass").algorithm.correction is not None


@pytest.mark.parametrize("remedy", remedies.REMEDIES)
def test_every_remedy_has_a_config(remedy):
    config, plain = (from_config_dict(remedies.get_config(arg)) for arg in (f"grpo,{remedy}", "grpo"))
    assert config.algorithm != plain.algorithm and config.algorithm.method == "grpo"
    assert config.run_dir == f"runs/remedies_{remedy}_grpo"


def test_remedies_join():
    config = from_config_dict(remedies.get_config("tis,veto"))
    assert config.algorithm.corrections == "tis(high=2),veto(floor=1e-4)"
    with pytest.raises(ValueError, match="config argument 'tsi': allowed are grpo, debug, tis"):
        remedies.get_config("tsi")
