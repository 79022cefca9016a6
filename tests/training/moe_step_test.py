"""A training step of a mixture of experts: on meshes with an expert axis it is the step of one device."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.parallel.mesh import make_mesh
from tests.training import step_test

EXPERTS = dataclasses.replace(
    step_test.MODEL, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(2, 2, 1, 2), (1, 2, 1, 4)])
def test_experts_on_several_devices_equal_one(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Parameters and every metric after two steps; the router's gradient shows in both."""
    monkeypatch.setattr(step_test, "MODEL", EXPERTS)
    # A chunk of its own: programs are cached by their settings, which the model is not among.
    options = {"mini_batches": 1, "steps": 2, "compute": Compute(one_segment=True, logprob_chunk=13)}
    expected, one, _ = step_test._run(**options)
    state, several, step = step_test._run(**options, mesh=make_mesh(*shape, devices=jax.devices()[:8]))
    step_test._close(state.params, expected.params, 1e-5)
    for metrics, wanted in zip(several, one, strict=True):
        step_test._same_metrics(metrics, wanted)
    assert step._cache_size() == 1
    router = expected.params["layers"]["mlp"]["router"]["kernel"]
    assert np.abs(router - step_test._params()["layers"]["mlp"]["router"]["kernel"]).max() > 1e-4
