"""Checks of what a sidecar says of its completions beside tokens and log-probs."""

import numpy as np
import pytest

from dcmdp_jax.engines.sidecar.process import SidecarBroken
from dcmdp_jax.engines.sidecar.replica import split_columns

# Prompts of 1, 0 and 2 tokens before completions of 3, 1 and 1: of 4, 1 and 3 tokens 3, 0 and 2 are
# read.
PROMPTS = [1, 0, 2]
COMPLETIONS = [3, 1, 1]
EXPERTS = {"routed_experts": (3, 2)}


def test_columns_are_split_by_completion():
    """Experts of all tokens but the last, prompts included; a teacher's log-probs of the sampled
    tokens.
    """
    routed = np.arange(5 * 3 * 2).reshape(5, 3, 2).astype(np.int16)
    teacher = -np.arange(5, dtype=np.float32)
    parts = split_columns(
        {"routed_experts": routed, "teacher_logprobs": teacher}, PROMPTS, COMPLETIONS, EXPERTS
    )
    assert [part["routed_experts"].shape for part in parts] == [(3, 3, 2), (0, 3, 2), (2, 3, 2)]
    np.testing.assert_array_equal(
        np.concatenate([part["routed_experts"] for part in parts]), routed
    )
    assert [part["teacher_logprobs"].tolist() for part in parts] == [[0, -1, -2], [-3], [-4]]
    assert (
        split_columns({}, PROMPTS, COMPLETIONS, {}) == [{}, {}, {}]
        and split_columns({}, [], [], {}) == []
    )


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({}, r"routed experts of shape \(0,\), expected \(5, 3, 2\)"),
        (
            {"routed_experts": np.zeros((4, 3, 2), np.int16)},
            r"experts of shape \(4, 3, 2\), expected \(5, 3, 2\)",
        ),
        (
            {"routed_experts": np.zeros((5, 2, 2), np.int16)},
            r"experts of shape \(5, 2, 2\), expected \(5, 3, 2\)",
        ),
        (
            {
                "routed_experts": np.zeros((5, 3, 2), np.int16),
                "old_logprobs": np.zeros(4, np.float32),
            },
            r"old logprobs of shape \(4,\), expected \(5,\)",
        ),
    ],
    ids=["missing", "a token less", "a layer less", "a column that no one asked for"],
)
def test_columns_of_a_wrong_shape_break_the_sidecar(arrays, said):
    with pytest.raises(SidecarBroken, match=said):
        split_columns(arrays, PROMPTS, COMPLETIONS, EXPERTS)
