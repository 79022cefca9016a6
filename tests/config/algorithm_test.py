"""Settings of corrections: the syntax, the checks, and what they become."""

import numpy as np
import pytest

from configs import base, remedies
from dcmdp_jax.algorithm.corrections import chain
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.config.algorithm import canonical, spelled_out
from dcmdp_jax.config.load import from_config_dict, from_saved
from dcmdp_jax.errors import UserError


def _config(**algorithm):
    values = base.get_config().to_dict()
    values["task"]["train"] = "train.jsonl"
    values["algorithm"] |= algorithm
    return from_config_dict(values)


def _tokens(ratio):
    """One completion whose tokens the training stack finds `ratio` times as likely as the
    engine.
    """
    rollout = np.full((1, len(ratio)), -1.0, np.float32)
    old = rollout + np.log(np.array([ratio], np.float32))
    mask = np.ones(old.shape, bool)
    return Tokens(
        train_logprobs=old,
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=np.ones(old.shape),
        completion_mask=mask,
        completion_index=np.zeros(old.shape, np.int32),
        num_completions=1,
    )


@pytest.mark.parametrize(
    ("text", "weights", "keep"),
    [
        ("tis", [0.5, 2.0, 2.0], [1, 1, 1]),
        ("tis(high=3)", [0.5, 3.0, 3.0], [1, 1, 1]),
        (
            " tis ( low = 0.75 , high=3 ) , kl_rejection(estimator=k1,over=token,high=0.8),",
            [0.75, 0, 0],
            [1, 0, 0],
        ),
        ("icepop(high=5.5),sequence_rejection(high=8)", [0.5, 3.0, 5.0], [1, 1, 1]),
        ("veto(floor=0.6)", [0, 0, 0], [0, 0, 0]),
    ],
)
def test_the_text_becomes_a_correction(text, weights, keep):
    found, _ = chain(
        _tokens([0.5, 3.0, 5.0]), _config(corrections=text).algorithm.remedies().corrections
    )
    np.testing.assert_allclose(found.weights, [weights], rtol=1e-6)
    np.testing.assert_array_equal(found.keep, np.array([keep], bool))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"level": "reward", "ratio_denominator": "bypass"},
            "algorithm.level: got 'reward', needs a method of ours",
        ),
        (
            {"level": "reward", "ratio_denominator": "bypass"},
            "set ratio_denominator=rollout or level=token",
        ),
    ],
)
def test_levels_that_lack_what_they_need_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        _config(**changes)


def test_no_correction_is_the_default():
    assert _config().algorithm.remedies().corrections == ()


def test_filters_go_with_the_engines_denominator():
    assert _config(
        corrections="veto,kl_rejection(high=0.1)", ratio_denominator="bypass"
    ).algorithm.corrections


def test_every_remedy_has_a_config():
    plain = from_config_dict(remedies.get_config("grpo"))
    for remedy in remedies.REMEDIES:
        config = from_config_dict(remedies.get_config(f"grpo,{remedy}"))
        assert config.algorithm != plain.algorithm and config.algorithm.method == "grpo", remedy
        assert config.run_dir == f"runs/remedies_{remedy}_grpo"


def test_remedies_join():
    config = from_config_dict(remedies.get_config("tis,veto"))
    assert spelled_out(config.algorithm).corrections == "tis(low=0.0,high=2.0),veto(floor=0.0001)"
    filtered = from_config_dict(remedies.get_config("k2")).algorithm
    assert spelled_out(filtered).corrections == "kl_rejection(estimator=k2,over=mean,high=0.01)"
    assert canonical(filtered).corrections == "kl_rejection(estimator=k2,high=0.01)"
    with pytest.raises(ValueError, match="config argument 'tsi': allowed are grpo, debug, tis"):
        remedies.get_config("tsi")


def test_an_explicit_clip_of_the_default_sizes_is_the_default():
    assert _config(trust_region="clip(low=0.2,high=0.24,dual=0)").algorithm == _config().algorithm
    with pytest.raises(ValueError, match="config.algorithm.clip_low: no such setting"):
        _config(clip_low=0.1)


def test_a_saved_run_with_a_users_function_opens_without_it():
    found = from_saved(
        {"algorithm": {"method": "gone.py:f(k=1)", "corrections": "tis,gone.py:g"}}
    ).algorithm
    assert found.fixed_multiplier is None and found.drops_tokens
