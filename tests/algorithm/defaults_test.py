"""A number of the method has one default: in the loss of one call, in the step, in torch, in the
example on one page.
"""

import inspect

import pytest

from dcmdp_jax.algorithm.advantages import group_advantages
from dcmdp_jax.algorithm.dc_grpo import dc_grpo_loss
from dcmdp_jax.algorithm.dual import dual_update
from dcmdp_jax.algorithm.trust_regions import clipped_surrogate
from dcmdp_jax.config.algorithm import AlgorithmSettings, spelled_out
from examples import dc_grpo_minimal


def _defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.default is not x.empty}


def _of_the_step():
    """Option of `dc_grpo_loss` -> its value in a step with no setting changed."""
    settings = spelled_out(AlgorithmSettings())
    [region] = settings.calls("trust_region")
    return {
        "clip_low": region.parameters["low"],
        "clip_high": region.parameters["high"],
        "dual_learning_rate": settings.dual_learning_rate,
        "multiplier_min": 0.0,  # `update_dual`
        "multiplier_max": settings.multiplier_max,
        "aggregation": settings.aggregation,
        "max_completion_tokens": None,  # only "fixed_length" reads it
        "measure": settings.measure,
        "sided": settings.sided,
        "ddof": _defaults(group_advantages)["ddof"],
        "epsilon": settings.std_epsilon,
    }


def test_the_loss_of_one_call_has_the_defaults_of_the_step():
    assert _defaults(dc_grpo_loss) == _of_the_step()


def test_its_parts_have_them_too():
    whole = _of_the_step()
    assert _defaults(clipped_surrogate) == {name: whole[name] for name in ("clip_low", "clip_high")}
    assert _defaults(dual_update) == {
        "dual_learning_rate": whole["dual_learning_rate"],
        "multiplier_min": whole["multiplier_min"],
        "multiplier_max": whole["multiplier_max"],
    }
    scale = _defaults(group_advantages)
    assert (scale["epsilon"], scale["normalize_std"]) == (
        whole["epsilon"],
        AlgorithmSettings().normalize_std,
    )
    assert (
        whole["clip_low"],
        whole["clip_high"],
    ) == (dc_grpo_minimal.CLIP_LOW, dc_grpo_minimal.CLIP_HIGH)


def test_torch_has_them_too():
    pytest.importorskip("torch")
    from dcmdp_jax.integrations import dc_grpo_torch

    whole = _of_the_step()
    for function in (
        dc_grpo_torch.clipped_surrogate,
        dc_grpo_torch.token_discrepancy,
        dc_grpo_torch.dual_update,
        dc_grpo_torch.DcGrpo,
    ):
        here = _defaults(function)
        shared = {name: value for name, value in here.items() if name in whole}
        assert shared, function
        assert shared == {name: whole[name] for name in shared}, function
