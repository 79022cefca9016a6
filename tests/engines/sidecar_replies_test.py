"""Checks of what a sidecar says of its completions' experts."""

from __future__ import annotations

import numpy as np
import pytest

from dcmdp_jax.engines.sidecar.process import SidecarBroken
from dcmdp_jax.engines.sidecar.replies import split_routed_experts
from dcmdp_jax.models.config import ModelConfig

CONFIG = ModelConfig(
    "qwen3_moe", 40, 32, 48, 3, 4, 2, 8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
)


def test_experts_are_split_by_completion() -> None:
    """All but the last token is read, prompts included: 3, 0 and 2 of 4, 1 and 3."""
    routed = np.arange(5 * 3 * 2).reshape(5, 3, 2).astype(np.int16)
    parts = split_routed_experts({"routed_experts": routed}, [4, 1, 3], CONFIG)
    assert [part.shape for part in parts] == [(3, 3, 2), (0, 3, 2), (2, 3, 2)]
    np.testing.assert_array_equal(np.concatenate(parts), routed)


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        ({}, r"\(0,\)"),
        ({"routed_experts": np.zeros((4, 3, 2), np.int16)}, r"\(4, 3, 2\)"),
        ({"routed_experts": np.zeros((5, 2, 2), np.int16)}, r"\(5, 2, 2\)"),
    ],
    ids=["missing", "a token less", "a layer less"],
)
def test_experts_of_a_wrong_shape_break_the_sidecar(arrays: dict[str, np.ndarray], found: str) -> None:
    with pytest.raises(SidecarBroken, match=rf"routed experts of shape {found}, expected \(5, 3, 2\)"):
        split_routed_experts(arrays, [4, 1, 3], CONFIG)
