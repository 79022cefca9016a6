"""Training and sampling in float16: mismatch, loss scaling and overflow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.training.optimizer import (
    INITIAL_SCALE,
    initial_loss_scale,
    make_optimizer,
    make_schedule,
)
from dcmdp_jax.training.state import initial_dual, new_state
from dcmdp_jax.training.step import StepSetup, jit_step, train_step
from dcmdp_jax.types import LossScale
from tests.support.sampling import local_engine
from tests.support.step_runs import (
    ALGORITHM,
    LENGTH,
    LIMIT,
    MODEL,
    OPTIMIZER,
    PROMPT,
    TEMPERATURE,
    UPDATES,
    make_model,
    make_params,
    make_rollout,
    packed_batch,
    unpacked_rows,
)


@pytest.mark.parametrize("tied", [True, False])
def test_float16_on_both_sides_is_closer_than_bfloat16_on_both_sides(tied):
    """11 significant bits against 8: an eighth of the rounding."""
    model = make_model(tied)
    params = init_params(model, jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, 31, (12, LENGTH)).astype(np.int32)
    apart = {}
    for dtype in ("bfloat16", "float16"):
        engine = local_engine(model, precision=dtype, compute_dtype=dtype, max_total_tokens=LENGTH)
        engine.sync_weights(params, 0)
        scored = engine.score(
            [row[:PROMPT] for row in ids], [row[PROMPT:] for row in ids], temperature=1.0
        )
        engine.close()
        row_logprobs = make_row_logprobs(
            model, Compute(dtype=dtype, one_segment=True), temperature=1.0, mesh=None
        )
        train = jax.jit(row_logprobs)(params, unpacked_rows(ids))[0][:, PROMPT:]
        apart[dtype] = np.abs(np.exp(train) - np.exp(np.stack(scored))).mean()
    assert 0 < apart["float16"] < apart["bfloat16"] / 5


@functools.cache
def _step(dtype):
    compute = Compute(dtype=dtype, one_segment=True, logprob_chunk=16)
    schedule = make_schedule(OPTIMIZER, updates=UPDATES)
    parts = StepSetup(
        row_logprobs=make_row_logprobs(MODEL, compute, temperature=TEMPERATURE, mesh=None),
        compute_dtype=dtype,
        settings=ALGORITHM,
        max_completion_tokens=LIMIT,
        optimizer=make_optimizer(OPTIMIZER, schedule),
        schedule=schedule,
        mesh=None,
    )
    return jit_step(train_step, parts)


def _run(dtype, loss_scale=None, rollout=None, steps=1):
    scale = loss_scale or initial_loss_scale(dtype)
    transform = make_optimizer(OPTIMIZER, make_schedule(OPTIMIZER, updates=UPDATES))
    state = new_state(
        jax.tree.map(jnp.copy, make_params()), transform, initial_dual(ALGORITHM), scale
    )
    batch = packed_batch(rollout or make_rollout(), 2, None, tokens=64)
    history = []
    for _ in range(steps):
        state, metrics, _ = _step(dtype)(state, batch, None)
        history.append({name: np.asarray(value) for name, value in metrics.items()})
    return state, history


def _moved(state):
    return np.concatenate(
        [
            np.ravel(np.asarray(after) - np.asarray(before))
            for after, before in zip(
                jax.tree.leaves(state.params), jax.tree.leaves(make_params()), strict=True
            )
        ]
    )


def test_the_update_is_float32s_to_float16s_rounding():
    exact, of_float32 = _run("float32")
    half, of_float16 = _run("float16")
    assert exact.loss_scale is None and float(half.loss_scale.scale) == INITIAL_SCALE
    assert (
        half.loss_scale.finite_updates == 2
        and of_float16[0]["optimizer/loss_scale"] == INITIAL_SCALE
    )
    assert "optimizer/loss_scale" not in of_float32[0]
    assert of_float16[0]["optimizer/skipped_updates"] == 0
    wanted = _moved(exact)
    found = _moved(half)
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)
    for name in ("policy/loss", "optimizer/grad_norm", "discrepancy/mean"):
        np.testing.assert_allclose(of_float16[0][name], of_float32[0][name], rtol=5e-3)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(half.params))


def test_without_a_scale_small_gradients_are_lost():
    """At 2^-17 of the loss products are below float16's smallest number.

    A long completion has such a share.
    """
    wanted = _moved(_run("float32")[0])
    small, _ = _run("float16", LossScale(jnp.float32(2.0**-17), jnp.int32(0)))
    assert np.linalg.norm(_moved(small) - wanted) > 0.1 * np.linalg.norm(wanted)


def test_an_overflow_is_skipped_and_halves_the_scale():
    state, history = _run("float16", LossScale(jnp.float32(2.0**16), jnp.int32(0)), steps=4)
    skipped = sum(metrics["optimizer/skipped_updates"] for metrics in history)
    scales = [float(metrics["optimizer/loss_scale"]) for metrics in history]
    assert 1 <= skipped < 8 and scales[0] == 2.0**16
    assert float(state.loss_scale.scale) == 2.0 ** (16 - skipped)
    assert state.skipped_in_row == 0 and history[-1]["optimizer/skipped_updates"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
