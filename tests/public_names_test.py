"""The names of the package: what is tried first leads to them, and help begins with them."""

import pydoc

import numpy as np
import pytest

import dcmdp_jax

_SEVEN = [
    "dc_grpo_loss",
    "token_discrepancy",
    "group_advantages",
    "penalized_advantages",
    "importance_ratio",
    "clipped_surrogate",
    "dual_update",
]


@pytest.mark.parametrize(
    ("tried", "meant"),
    {
        "advantages": "group_advantages",
        "compute_advantages": "group_advantages",
        "grpo_loss": "dc_grpo_loss",
        "DcGrpoLoss": "dc_grpo_loss",
        "surrogate": "clipped_surrogate",
        "importance_weight": "importance_ratio",
        "discrepancy": "token_discrepancy",
        "penalised_advantages": "penalized_advantages",
        "dual_step": "dual_update",
        "load_metrics": "read_metrics",
        "Trainer": "train",
    }.items(),
)
def test_a_name_that_is_tried_first_leads_to_the_public_one(tried, meant):
    assert meant in dcmdp_jax.__all__
    with pytest.raises(AttributeError, match=f"no attribute '{tried}'; did you mean {meant}[?]$"):
        getattr(dcmdp_jax, tried)


def test_a_name_near_none_is_told_all_and_a_private_one_nothing():
    with pytest.raises(AttributeError, match="no attribute 'zzz'; it has Config, DcGrpoAux, .*, write_report$"):
        dcmdp_jax.zzz  # noqa: B018
    for name in ("__path_of_loss__", "_loss"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
            getattr(dcmdp_jax, name)


def test_help_begins_with_the_seven_functions_and_names_the_fields_of_the_result():
    lines = pydoc.plain(pydoc.render_doc(dcmdp_jax)).splitlines()
    first = [line.split()[0] for line in lines[:16] if line.startswith(" " * 8)]
    assert first == _SEVEN
    fields = dcmdp_jax.DcGrpoAux._fields
    for shown in (dcmdp_jax.DcGrpoAux, dcmdp_jax.dc_grpo_loss):
        text = pydoc.plain(pydoc.render_doc(shown))
        assert all(field in text for field in fields)


def test_probabilities_are_refused_by_the_parts_as_by_the_whole():
    probabilities, logprobs = np.array([[0.9, 0.5], [0.2, 0.0]]), np.log([[0.9, 0.5], [0.2, 0.1]])
    refused = "is nowhere below 0 on sampled tokens; must be log-probs, not probabilities"
    for call, name in (
        (lambda: dcmdp_jax.token_discrepancy(probabilities, logprobs), "train_logprobs"),
        (lambda: dcmdp_jax.token_discrepancy(logprobs, probabilities), "rollout_logprobs"),
        (lambda: dcmdp_jax.importance_ratio(probabilities, logprobs), "train_logprobs"),
        (lambda: dcmdp_jax.importance_ratio(logprobs, probabilities), "old_logprobs"),
    ):
        with pytest.raises(ValueError, match=f"^{name} {refused}$"):
            call()
    # Only what was sampled counts: 0.7 is padding here, and a certain token's log-prob is 0.
    given = np.array([[0.0, 0.7]])
    masked = dcmdp_jax.token_discrepancy(given, given, completion_mask=np.array([[1, 0]]))
    assert masked.tolist() == [[0.0, 0.0]]


def test_a_column_of_rewards_is_refused_by_its_own_name():
    with pytest.raises(ValueError, match=r"^rewards has shape \(4, 1\); must have 1 axes, not 2$"):
        dcmdp_jax.group_advantages(np.ones((4, 1)), np.array([0, 0, 1, 1]))
