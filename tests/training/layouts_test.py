"""The gradient is the same to float32 rounding in any layout and on any mesh.

For any order, number and length of completions.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm.stats import Sum
from dcmdp_jax.data.episode import single_turn
from dcmdp_jax.data.packing import pack
from dcmdp_jax.data.row_layout import ANY_NUMBER, RowShapes, make_row_shapes
from dcmdp_jax.models.attention import SKIP_SEGMENTS
from dcmdp_jax.models.config import Lora
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.lora import adapted, adapter_declarations
from dcmdp_jax.models.params import declared_tree
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.models.scheme import FULL, Scheme
from dcmdp_jax.parallel.mesh import make_mesh, row_shards
from dcmdp_jax.parallel.sharding import batch_shardings
from dcmdp_jax.training.accumulate import accumulate
from dcmdp_jax.training.rescore import OLD_LOGPROBS, make_old_logprobs
from tests.support.packed_attention import stand_in_for_cudnn
from tests.support.step_runs import MODEL, make_params

CAP = 24
COUNT = 12


def _row_logprobs(plan, mesh, scheme=FULL, **compute):
    compute = Compute(one_segment=plan.segments_per_row == 1, logprob_chunk=16, **compute)
    return make_row_logprobs(MODEL, compute, temperature=1.0, mesh=mesh, scheme=scheme)


def _gradient(plan, mesh, scheme=FULL, policy=lambda params: params, **compute):
    """Compile the gradient of sum_i w_i log pi(o_i) over completions.

    (params, batch, weight of each completion) -> gradient.
    """
    row_logprobs = _row_logprobs(plan, mesh, scheme, **compute)

    def of_rows(shared, rows):
        params, weights = shared

        def loss(params):
            logprobs = row_logprobs(policy(params), rows).logprobs
            return jnp.sum(weights[rows.completion_index] * rows.completion_mask * logprobs)

        return Sum(jax.grad(loss)(params)), ()

    @jax.jit
    def gradient(params, batch, weights):
        mini = jax.tree.map(lambda x: x[0], batch)
        return accumulate(of_rows, (params, weights), mini.rows, mini.micro_batches, mesh=mesh)[
            0
        ].value()

    return gradient


def _lengths(seed):
    """Completions of a batch: any number and lengths, and the extremes.

    One; all at the cap; all of one token; only long ones.
    """
    rng = np.random.default_rng(seed)
    kinds = [
        rng.integers(1, CAP, rng.integers(1, COUNT + 1)),
        np.array([5]),
        np.full(COUNT, CAP - 4),
        np.ones(COUNT, int),
        rng.integers(CAP - 8, CAP - 3, 7),
    ]
    return kinds[seed % len(kinds)].clip(1, CAP - 4)


def _inputs(seed, plan, mesh):
    """The batch and the weights of a permutation of the completions.

    Completion i has the same tokens and weight wherever it lies.
    """
    rng = np.random.default_rng(100 + seed)
    lengths = _lengths(seed)
    weights = np.linspace(0.5, 2.0, COUNT).astype(np.float32)
    prompts = [rng.integers(0, 31, rng.integers(1, 5)).astype(np.int32) for _ in range(COUNT)]
    filled = np.pad(lengths, (0, COUNT - len(lengths)), constant_values=1)
    completions = [rng.integers(0, 31, n).astype(np.int32) for n in filled]
    order = np.random.default_rng(seed + len(plan.row_lengths)).permutation(COUNT)
    place = dict(policy_version=0, group=0, finish_reason="stop")
    episodes = [
        single_turn(
            prompts[i], completions[i], np.zeros(len(completions[i]), np.float32), member=i, **place
        )
        for i in order
    ]
    batch, _ = pack(
        episodes,
        np.zeros(COUNT, np.float32),
        plan,
        mask_truncated=False,
        dropped=order >= len(lengths),
    )
    if mesh is not None:
        batch = jax.device_put(batch, batch_shardings(mesh))
    return batch, weights[order]


@functools.cache
def _reference():
    """One completion in each row of one length, on one device."""
    plan = RowShapes(
        row_lengths=(CAP,),
        rows_per_micro_batch=(COUNT,),
        micro_batches=(1,),
        mini_batches=1,
        completions=COUNT,
        segments_per_row=1,
        row_shards=1,
        longest=CAP,
    )
    gradient = _gradient(plan, None)
    return {
        seed: jax.device_get(gradient(make_params(), *_inputs(seed, plan, None)))
        for seed in range(10)
    }


_PLANS = {
    "one": {"segments_per_row": 1, "micro_batch_tokens": 48, "row_lengths": (8, 16, 24)},
    "packed": {"segments_per_row": ANY_NUMBER, "micro_batch_tokens": 48, "row_lengths": (12, 24)},
    "cudnn": {
        "segments_per_row": SKIP_SEGMENTS["cudnn"],
        "micro_batch_tokens": 48,
        "row_lengths": (12, 24),
    },
    "user's lengths": {"segments_per_row": 2, "micro_batch_tokens": 40, "row_lengths": (8, 13, 32)},
}


_MESHES = ((2, 1, 1), (8, 1, 1), (2, 2, 2), (1, 4, 2), (1, 8, 1), (1, 1, 8))


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        (None, "one"),
        (None, "packed"),
        (None, "cudnn"),
        (None, "user's lengths"),
        ((2, 1, 2), "cudnn"),
        ((4, 1, 1), "packed"),
        *(
            pytest.param(shape, name, marks=pytest.mark.long)
            for shape in _MESHES
            for name in ("one", "packed")
        ),
    ],
)
def test_any_layout_gives_the_same_gradient(shape, name, monkeypatch):
    """The layout of GPUs with cuDNN's packed attention.

    A stand-in reads memory as cuDNN does.
    """
    mesh = make_mesh(*shape, devices=jax.devices()[: math.prod(shape)]) if shape else None
    plan = make_row_shapes(
        longest=CAP,
        mini_batches=1,
        completions=COUNT,
        row_shards=row_shards(mesh) if mesh else 1,
        **_PLANS[name],
    )
    packed = {"attention": "cudnn", "segments": plan.segments_per_row} if name == "cudnn" else {}
    stand_ins = stand_in_for_cudnn(monkeypatch) if packed else []
    gradient = _gradient(plan, mesh, **packed)
    used = set()
    for seed, expected in _reference().items():
        batch, weights = _inputs(seed, plan, mesh)
        used.add(tuple(np.asarray(batch.micro_batches)[0].tolist()))
        found = jax.device_get(gradient(make_params(), batch, weights))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * np.abs(b).max())
    # Several layouts, of which some leave a shape empty, and one program for all of them.
    assert len(used) > 1 and gradient._cache_size() == 1
    assert all(one.calls for one in stand_ins)


def _cudnn_plan():
    plan = make_row_shapes(
        longest=CAP, mini_batches=1, completions=COUNT, row_shards=1, **_PLANS["cudnn"]
    )
    return plan, {"attention": "cudnn", "segments": plan.segments_per_row}


def test_adapters_in_cudnns_rows_get_the_gradient_of_one_a_row(monkeypatch):
    stand_in_for_cudnn(monkeypatch)
    lora = Lora(3, 6.0)
    plan, packed = _cudnn_plan()
    leaves = adapter_declarations(MODEL, lora)
    drawn = np.random.default_rng(0)
    tree = declared_tree(
        leaves, lambda leaf: jnp.asarray(drawn.normal(0, 0.3, leaf.shape), jnp.float32)
    )
    one_a_row = RowShapes(
        row_lengths=(CAP,),
        rows_per_micro_batch=(COUNT,),
        micro_batches=(1,),
        mini_batches=1,
        completions=COUNT,
        segments_per_row=1,
        row_shards=1,
        longest=CAP,
    )

    def policy(adapters):
        return adapted(make_params(), adapters, lora)

    gradient = _gradient(plan, None, policy=policy, **packed)
    gradients = jax.device_get(gradient(tree, *_inputs(0, plan, None)))
    gradient = _gradient(one_a_row, None, policy=policy)
    expected = jax.device_get(gradient(tree, *_inputs(0, one_a_row, None)))
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * np.abs(b).max())


def test_older_weights_log_probs_in_cudnns_rows_are_those_of_one_a_row(monkeypatch):
    """Each token has the column that a lag compares the engine with, wherever its completion lies."""
    stand_in_for_cudnn(monkeypatch)
    cudnn = _cudnn_plan()
    found = []
    for plan, how in (
        cudnn,
        (
            RowShapes(
                row_lengths=(CAP,),
                rows_per_micro_batch=(COUNT,),
                micro_batches=(1,),
                mini_batches=1,
                completions=COUNT,
                segments_per_row=1,
                row_shards=1,
                longest=CAP,
            ),
            {},
        ),
    ):
        lagged = make_old_logprobs(_row_logprobs(plan, None, **how), mesh=None)
        batch = jax.device_get(lagged(make_params(), _inputs(0, plan, None)[0]))
        order = np.random.default_rng(len(plan.row_lengths)).permutation(COUNT)
        values = {}
        for rows in batch.rows:
            for number in np.unique(rows.completion_index[rows.completion_mask]):
                own = rows.completion_mask & (rows.completion_index == number)
                values[order[number]] = rows.columns[OLD_LOGPROBS][own][
                    np.argsort(rows.position_ids[own])
                ]
        found.append(np.concatenate([values[number] for number in sorted(values)]))
    packed, one_a_row = found
    assert packed.std() > 0.5
    np.testing.assert_allclose(packed, one_a_row, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "products",
    ["int8", *(pytest.param(one, marks=pytest.mark.long) for one in ("fp8", "fp8_per_block"))],
)
def test_a_mesh_rounds_by_the_largest_entry_of_all_devices(products):
    """A scale is the maximum over all devices; a part's would be another.

    Tokens before the o and down projections, and all matrices, are split.
    """
    scheme = Scheme(products=products, cache="fp8")
    mesh = make_mesh(1, 2, 2, devices=jax.devices()[:4])
    plan = make_row_shapes(
        longest=CAP, mini_batches=1, completions=COUNT, row_shards=row_shards(mesh), **_PLANS["one"]
    )
    found, expected = (
        jax.device_get(_gradient(plan, where, scheme)(make_params(), *_inputs(0, plan, where)))
        for where in (mesh, None)
    )
    plain = jax.device_get(_gradient(plan, None)(make_params(), *_inputs(0, plan, None)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * np.abs(b).max())
    apart = [
        np.abs(a - b).max() / np.abs(b).max()
        for a, b in zip(*map(jax.tree.leaves, (plain, expected)), strict=True)
    ]
    assert min(apart) > 1e-3
