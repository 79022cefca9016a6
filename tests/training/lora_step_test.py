"""At full rank the step that trains adapters is the step that trains the matrices.

On every mesh it is one step.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcmdp_jax.models.config import Lora
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.lora import adapter_declarations, make_policy, merged
from dcmdp_jax.models.params import declared_tree, logical_axes, quantized_leaves
from dcmdp_jax.models.quantize import quantize_tree
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import param_shardings
from dcmdp_jax.training.optimizer import make_optimizer, make_schedule
from dcmdp_jax.training.state import initial_dual, new_state, train_state_shardings
from dcmdp_jax.training.step import StepSetup, jit_step, train_step
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
    same_metrics,
)
from tests.training.top_logprobs_step_test import cut_rollout

# The key and value matrices of MODEL are 16 x 8: rank 8 is their own.
C = 1024.0
FULL_RANK = Lora(8, 8 / C, ("k_proj", "v_proj"))
ALL = Lora(4, 8.0)


def _run(
    lora: Lora | None,
    params: Any,
    frozen: Any,
    *,
    mini_batches=2,
    steps=1,
    mesh=None,
    only=(),
    cut=None,
) -> Any:
    """The state after `steps` on one batch, and each step's metrics.

    `only` trains the attention matrices named.

    `cut` is a rollout of an engine that samples from its top-k tokens alone.
    """
    compute = Compute(one_segment=True, logprob_chunk=16)
    schedule = make_schedule(OPTIMIZER, updates=UPDATES)
    optimizer = make_optimizer(OPTIMIZER, schedule)
    if only:
        other = jax.tree_util.tree_map_with_path(
            lambda path, _: path[2:3] not in [(key,) for key in only], params
        )
        optimizer = optax.chain(optimizer, optax.masked(optax.set_to_zero(), other))
    dual = initial_dual(ALGORITHM)

    def fresh(params):
        return new_state(params, optimizer, dual)

    shardings = (
        train_state_shardings(jax.eval_shape(fresh, params), MODEL, mesh, lora) if mesh else None
    )
    parts = StepSetup(
        row_logprobs=make_row_logprobs(
            MODEL, compute, temperature=TEMPERATURE, mesh=mesh, cut=cut is not None
        ),
        compute_dtype="float32",
        settings=ALGORITHM,
        max_completion_tokens=LIMIT,
        optimizer=optimizer,
        schedule=schedule,
        mesh=mesh,
        policy=make_policy(lora),
    )
    state = jax.jit(fresh, out_shardings=shardings)(jax.tree.map(jnp.copy, params))
    batch = packed_batch(cut or make_rollout(), mini_batches, mesh, tokens=64)
    step = jit_step(train_step, parts, shardings)
    history = []
    for _ in range(steps):
        state, metrics, _ = step(state, batch, frozen)
        history.append({name: np.asarray(value) for name, value in metrics.items()})
    assert step._cache_size() == 1
    return state, history


def _adapters(lora: Lora, a: float, b: Any) -> Any:
    """A drawn within +-a; B too, or a multiple of the identity."""

    def leaf(one: Any) -> jax.Array:
        if one.path[-1] == "b" and b is not None:
            return jnp.broadcast_to(b * jnp.eye(*one.shape[-2:]), one.shape)
        return a * jax.random.uniform(jax.random.key(len(str(one.path))), one.shape, minval=-1)

    return declared_tree(adapter_declarations(MODEL, lora), leaf)


def test_at_full_rank_training_adapters_is_training_the_matrices() -> None:
    """The gradient of A is that of W; that of B is smaller by c, its weight by c again.

    y = x W + (1/c) (x A) (c I).
    """
    base = make_params()
    adapters = _adapters(FULL_RANK, 0.0, C)
    state, metrics = _run(FULL_RANK, adapters, base, steps=3)
    full, want = _run(
        None, base, None, steps=3, only=[jax.tree_util.DictKey("k"), jax.tree_util.DictKey("v")]
    )
    mine = merged(base, state.params, FULL_RANK)["layers"]["attention"]
    for name in ("k", "v"):
        theirs, before = (
            tree["layers"]["attention"][name]["kernel"] for tree in (full.params, base)
        )
        assert float(jnp.abs(theirs - before).max()) > 1e-2
        np.testing.assert_allclose(mine[name]["kernel"], theirs, atol=2e-6)
    for got, wanted in zip(metrics, want, strict=True):
        # The norm of the gradient, and nothing else, is over other parameters.
        for name in wanted.keys() - {"optimizer/grad_norm"}:
            np.testing.assert_allclose(got[name], wanted[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("quantized", [False, True], ids=["float32", "int8"])
def test_metrics_are_those_of_the_merged_model_and_the_base_stays(quantized: bool) -> None:
    base = make_params()
    adapters = _adapters(ALL, 0.3, None)
    if quantized:
        base = quantize_tree(base, quantized_leaves(MODEL), "int8")
    before = jax.tree.map(np.asarray, base)
    state, [metrics] = _run(ALL, adapters, base, mini_batches=1)
    _, [want] = _run(None, merged(base, adapters, ALL), None, mini_batches=1)
    for name in want.keys() - {"optimizer/grad_norm"}:
        np.testing.assert_allclose(metrics[name], want[name], rtol=5e-5, atol=5e-6, err_msg=name)
    for leaf, was in zip(jax.tree.leaves(base), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(leaf, was)
    assert len(jax.tree.leaves(state.opt_state[0].mu)) == len(jax.tree.leaves(adapters)) == 2 * 7


@pytest.mark.parametrize(
    ("shape", "quantized"), [((2, 2, 2), False), ((1, 4, 2), True), ((8, 1, 1), False)]
)
def test_several_devices_equal_one(shape: tuple[int, ...], quantized: bool) -> None:
    mesh = make_mesh(*shape, devices=jax.devices()[: math.prod(shape)])
    base = make_params()
    adapters = _adapters(ALL, 0.3, None)
    there = jax.device_put(base, param_shardings(logical_axes(MODEL), base, mesh))
    if quantized:
        base, there = (
            quantize_tree(tree, quantized_leaves(MODEL), "int8") for tree in (base, there)
        )
    expected, one = _run(ALL, adapters, base, mini_batches=1, steps=2)
    state, many = _run(ALL, adapters, there, mini_batches=1, steps=2, mesh=mesh)
    for got, want in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=2e-5)
    for metrics, wanted in zip(many, one, strict=True):
        same_metrics(metrics, wanted)
    whole = jax.jit(merged, static_argnums=2)(there, state.params, ALL)
    wanted = merged(base, expected.params, ALL)
    for got, want in zip(jax.tree.leaves(whole), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_cut_distribution_is_that_of_the_merged_weights() -> None:
    """Base and product give the mass of the kept set, the discrepancy and the loss.

    The kept set is the engine's in both.
    """
    base = make_params()
    adapters = _adapters(ALL, 0.1, 0.5)
    rollout = cut_rollout()
    _, [found] = _run(ALL, adapters, base, mini_batches=1, cut=rollout)
    _, [want] = _run(None, merged(base, adapters, ALL), None, mini_batches=1, cut=rollout)
    _, [without] = _run(None, base, None, mini_batches=1, cut=rollout)
    for name in (
        "distribution/kept_mass",
        "distribution/total_variation",
        "discrepancy/mean",
        "policy/loss",
    ):
        assert found[name] == pytest.approx(float(want[name]), rel=1e-4, abs=1e-6), name
    assert found["discrepancy/mean"] != pytest.approx(float(without["discrepancy/mean"]), rel=0.01)
