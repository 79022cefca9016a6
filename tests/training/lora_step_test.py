"""The step that trains adapters: with A the identity it is the step that trains the matrices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.models.config import Lora
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.lora import adapter_declarations, merged
from dcmdp_jax.models.params import declared_tree
from dcmdp_jax.run.row_logprobs import make_row_logprobs
from dcmdp_jax.training.state import initial_dual, make_optimizer, make_schedule, new_state
from dcmdp_jax.training.step import StepParts, make_train_step
from tests.support.step_runs import (
    ALGORITHM,
    LIMIT,
    MODEL,
    OPTIMIZER,
    TEMPERATURE,
    UPDATES,
    make_params,
    make_rollout,
    packed_batch,
)

# Every query, key and value matrix of MODEL has 16 rows: at rank 16 and A = I, y = x (W + B).
LORA = Lora(8, 8.0, ("k_proj", "v_proj"))


def _run(lora: Lora | None, params: Any, frozen: Any, *, mini_batches: int, settings: Any = ALGORITHM) -> Any:
    compute = Compute(one_segment=True, logprob_chunk=16)
    schedule = make_schedule(OPTIMIZER, updates=UPDATES)
    optimizer = make_optimizer(OPTIMIZER, schedule)
    parts = StepParts(
        row_logprobs=make_row_logprobs(MODEL, compute, temperature=TEMPERATURE, mesh=None),
        compute_dtype="float32",
        settings=settings,
        max_completion_tokens=LIMIT,
        optimizer=optimizer,
        schedule=schedule,
        mesh=None,
        lora=lora,
    )
    state = new_state(jax.tree.map(jnp.copy, params), optimizer, initial_dual(settings))
    batch = packed_batch(make_rollout(), mini_batches, None, tokens=64)
    return make_train_step(parts)(state, batch, frozen)


def _adapters(b: float) -> Any:
    """A that passes the first 8 inputs on, B constant."""

    def leaf(one: Any) -> jax.Array:
        if one.path[-1] == "b":
            return jnp.full(one.shape, b)
        return jnp.broadcast_to(jnp.eye(*one.shape[-2:]), one.shape)

    return declared_tree(adapter_declarations(MODEL, LORA), leaf)


@pytest.mark.parametrize("b", [0.0, 0.05])
def test_metrics_are_those_of_the_merged_model_and_the_gradient_of_b_that_of_the_matrix(b: float) -> None:
    base, adapters = make_params(), _adapters(b)
    state, metrics = _run(LORA, adapters, base, mini_batches=1)
    full, want = _run(None, merged(base, adapters, LORA), None, mini_batches=1)
    # The norm of the gradient, and nothing else, is over other parameters.
    differing = {"optimizer/grad_norm"}
    for name in want.keys() - differing:
        np.testing.assert_allclose(metrics[name], want[name], rtol=2e-5, atol=2e-6, err_msg=name)
    first = {True: state.opt_state[0].mu, False: full.opt_state[0].mu}
    for name in ("k", "v"):
        mine = first[True]["layers"]["attention"][name]["b"]
        theirs = first[False]["layers"]["attention"][name]["kernel"][:, :8]  # the rows that A passes on
        assert float(jnp.abs(theirs).max()) > 1e-3
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    assert len(jax.tree.leaves(state.params)) == 4


def test_several_updates_move_the_adapters_and_not_the_base() -> None:
    base = make_params()
    before = jax.tree.map(np.asarray, base)
    state, metrics = _run(LORA, _adapters(0.0), base, mini_batches=2)
    for leaf, was in zip(jax.tree.leaves(base), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(leaf, was)
    assert float(jnp.abs(state.params["layers"]["attention"]["v"]["b"]).max()) > 1e-3
    assert float(metrics["optimizer/skipped_updates"]) == 0
