"""The names of the package: what is tried first leads to them, and help begins with them."""

import inspect
import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dcmdp_jax
from docs import api_reference
from tests.support.waiting import HANGS_S

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
        "advantage": "group_advantages",
        "group_advantage": "group_advantages",
        "compute_advantages": "group_advantages",
        "compute_group_advantages": "group_advantages",
        "grpo_advantages": "group_advantages",
        "group_normalize": "group_advantages",
        "normalize_rewards": "group_advantages",
        "penalized_advantage": "penalized_advantages",
        "penalised_advantages": "penalized_advantages",
        "penalty": "penalized_advantages",
        "penalize": "penalized_advantages",
        "grpo": "dc_grpo_loss",
        "grpo_loss": "dc_grpo_loss",
        "dcgrpo": "dc_grpo_loss",
        "dc_grpo": "dc_grpo_loss",
        "DcGrpoLoss": "dc_grpo_loss",
        "policy_loss": "dc_grpo_loss",
        "loss": "dc_grpo_loss",
        "ppo_loss": "clipped_surrogate",
        "clip": "clipped_surrogate",
        "clipped_loss": "clipped_surrogate",
        "clip_loss": "clipped_surrogate",
        "surrogate": "clipped_surrogate",
        "ratio": "importance_ratio",
        "importance_weight": "importance_ratio",
        "importance_sampling": "importance_ratio",
        "tis": "importance_ratio",
        "truncated_importance_sampling": "importance_ratio",
        "icepop": "importance_ratio",
        "discrepancy": "token_discrepancy",
        "delta": "token_discrepancy",
        "token_delta": "token_discrepancy",
        "compute_delta": "token_discrepancy",
        "mismatch": "token_discrepancy",
        "kl": "token_discrepancy",
        "dual_ascent": "dual_update",
        "dual_step": "dual_update",
        "lambda_update": "dual_update",
        "update_lambda": "dual_update",
        "multiplier": "dual_update",
        "update_multiplier": "dual_update",
        "lagrangian": "dual_update",
        "tolerance": "dual_update",
        "budget": "dual_update",
        "Aux": "DcGrpoAux",
        "GrpoAux": "DcGrpoAux",
        "DCGRPOLoss": "dc_grpo_loss",
        "group_statistics": "group_advantages",
        "load_metrics": "read_metrics",
        "Trainer": "train",
        "Episodes": "Episode",
    }.items(),
)
def test_a_name_that_is_tried_first_leads_to_the_public_one(tried, meant):
    assert meant in dcmdp_jax.__all__
    with pytest.raises(AttributeError, match=f"no attribute '{tried}'; did you mean {meant}[?]$"):
        getattr(dcmdp_jax, tried)


def test_a_name_near_none_is_told_all_and_a_private_one_nothing():
    with pytest.raises(
        AttributeError, match="no attribute 'zzz'; it has Config, DcGrpoAux, .*, write_report$"
    ):
        dcmdp_jax.zzz  # noqa: B018
    for name in ("__path_of_loss__", "_loss"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
            getattr(dcmdp_jax, name)


def test_without_jax_the_loss_names_the_module_in_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "dcmdp_jax.algorithm.dc_grpo", raising=False)
    needs = "jax.*: dc_grpo_loss needs it; in torch use dcmdp_jax.integrations.dc_grpo_torch"
    with pytest.raises(ModuleNotFoundError, match=needs):
        _ = dcmdp_jax.dc_grpo_loss


def test_help_begins_with_the_seven_functions_and_names_the_fields_of_the_result():
    lines = pydoc.plain(pydoc.render_doc(dcmdp_jax)).splitlines()
    first = [line.split()[0] for line in lines[:16] if line.startswith(" " * 8)]
    assert first == _SEVEN
    fields = dcmdp_jax.DcGrpoAux._fields
    for shown in (dcmdp_jax.DcGrpoAux, dcmdp_jax.dc_grpo_loss):
        text = pydoc.plain(pydoc.render_doc(shown))
        assert all(field in text for field in fields)


def test_probabilities_are_refused_by_the_parts_as_by_the_whole():
    probabilities = np.array([[0.9, 0.5], [0.2, 0.0]])
    logprobs = np.log([[0.9, 0.5], [0.2, 0.1]])
    refused = (
        "is nowhere below 0 on sampled tokens; must be log-probs, not probabilities or negated "
        "log-probs"
    )
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


def test_a_user_s_lists_are_taken_as_arrays():
    """In a process of its own: the check of shapes, which the tests alone have, wants arrays."""
    given = "[[0.0, -1.0]]"
    program = (
        f"import dcmdp_jax; print(dcmdp_jax.token_discrepancy({given}, {given}, "
        "completion_mask=[[1, 0]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        cwd=Path(__file__).resolve().parents[1],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout == "[[0. 0.]]\n", done.stderr


def test_a_column_of_rewards_is_refused_by_its_own_name():
    with pytest.raises(ValueError, match=r"^rewards has shape \(4, 1\); must have 1 axes, not 2$"):
        dcmdp_jax.group_advantages(np.ones((4, 1)), np.array([0, 0, 1, 1]))


def test_the_page_of_names_has_each_with_the_first_sentence_of_its_help():
    page = (Path(__file__).resolve().parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\([^)]+\) \| (.+) \|$", page, re.MULTILINE))
    names = set(dcmdp_jax.__all__) - {"__version__"}
    assert set(rows) == names
    for name in names:
        first, *_ = inspect.getdoc(getattr(dcmdp_jax, name)).split("\n\n")
        assert rows[name] == " ".join(first.split()), name


def test_the_api_reference_is_that_of_the_docstrings():
    page = api_reference.page()
    assert api_reference.PAGE.read_text(encoding="utf-8") == page, "python -m docs.api_reference"
    entries = set(re.findall(r"^### dcmdp_jax\.(\w+)$", page, re.MULTILINE))
    assert entries == set(dcmdp_jax.__all__) - {"__version__"}
    # A function's arguments are a list under its signature; a class's methods follow it.
    assert "### dcmdp_jax.dual_update\n\n```python\ndual_update(\n    multiplier,\n" in page
    assert "- `dual_learning_rate`: eta, multiplier units per unit of discrepancy." in page
    assert "#### sync_weights\n" in page and "#### _" not in page
