"""The tables, what they do to real trees, and the model on eight devices against one."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compiled_parts.collectives import KINDS, collectives
from benchmarks.compiled_parts.hlo import in_scope, names_of_this_code, parse
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.logprobs import CHUNKS
from dcmdp_jax.models.params import init_params, logical_axes, param_shapes
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import (
    ACTIVATION_AXES,
    PARAM_AXES,
    constrain,
    data_axis,
    param_shardings,
    partition_spec,
    replicated,
    shard_map_over_data,
    shard_rows,
    state_shardings,
)
from dcmdp_jax.types import Rows
from tests.support.our_log import our_log

# 2 key-value heads: fewer than the 8 devices of (1, 1, 8).
CONFIG = ModelConfig(
    "qwen3", 96, 32, 64, 2, 8, 2, 16, rope_theta=1e4, attention_bias=True, initializer_range=0.2
)


def _mesh(data, fsdp, tensor):
    return make_mesh(data, fsdp, tensor, devices=jax.devices()[:8])


def _specs(tree):
    return jax.tree.map(lambda sharding: sharding.spec, tree)


def test_partition_spec():
    assert partition_spec(("layers", "embed", "mlp"), PARAM_AXES) == P(None, "fsdp", "tensor")
    assert partition_spec(("layers", "heads", "embed"), PARAM_AXES) == P(None, "tensor", "fsdp")
    assert partition_spec(("vocab", "embed"), PARAM_AXES) == P("tensor", "fsdp")
    assert partition_spec(("experts", "embed", "expert_mlp"), PARAM_AXES) == P(
        "expert", "fsdp", "tensor"
    )
    assert partition_spec(("layers", None), PARAM_AXES) == P(None, None)
    assert partition_spec(("rows", "length", "hidden"), ACTIVATION_AXES) == P(
        ("data", "fsdp", "expert"), None, None
    )


def test_two_dimensions_on_one_mesh_axis_are_an_error():
    with pytest.raises(ValueError, match="'heads' and 'mlp' both land on 'tensor'"):
        partition_spec(("heads", "mlp"), PARAM_AXES)
    with pytest.raises(ValueError, match="'a' and 'b' both land on 'fsdp'"):
        partition_spec(("a", "b"), {"a": ("data", "fsdp"), "b": "fsdp"})


def test_an_unknown_name_is_an_error():
    with pytest.raises(
        ValueError, match="logical axis 'rows' is unknown, the table has layers, embed, vocab"
    ):
        partition_spec(("rows",), PARAM_AXES)


def test_param_shardings():
    shapes = param_shapes(CONFIG)
    specs = _specs(param_shardings(logical_axes(CONFIG), shapes, _mesh(2, 2, 2)))
    assert specs["embedding"] == P("tensor", "fsdp")
    assert specs["output"] == P("fsdp", "tensor")
    assert specs["norm"]["scale"] == P(None)
    attention = specs["layers"]["attention"]
    mlp = specs["layers"]["mlp"]
    assert attention["q"] == {"kernel": P(None, "fsdp", "tensor"), "bias": P(None, "tensor")}
    assert attention["k"] == attention["v"] == attention["q"]
    assert attention["o"] == {"kernel": P(None, "tensor", "fsdp"), "bias": P(None, "fsdp")}
    assert attention["q_norm"]["scale"] == P(None, None)
    assert mlp["gate"]["kernel"] == mlp["up"]["kernel"] == P(None, "fsdp", "tensor")
    assert mlp["down"]["kernel"] == P(None, "tensor", "fsdp")


def test_a_size_that_does_not_divide_is_replicated(caplog):
    axes = {"embedding": ("vocab", "embed"), "up": ("embed", "mlp")}
    shapes = {
        "embedding": jax.ShapeDtypeStruct((97, 32), jnp.float32),
        "up": jax.ShapeDtypeStruct((32, 64), jnp.float32),
    }
    with caplog.at_level(logging.WARNING):
        specs = _specs(param_shardings(axes, shapes, _mesh(1, 4, 2)))
    assert specs == {"embedding": P(None, "fsdp"), "up": P("fsdp", "tensor")}
    assert [record.getMessage() for record in caplog.records] == [
        "embedding: dimension 0 (vocab) is 97, not a multiple of the 2 devices along tensor; each "
        "holds all of it"
    ]


def test_axes_must_name_every_dimension():
    with pytest.raises(ValueError, match="argument 2 is longer"):
        param_shardings({"a": {"b": ("embed",)}}, {"a": {"b": jnp.zeros((4, 4))}}, _mesh(1, 4, 2))


def test_qwen3_8b_fits_the_meshes_without_a_warning(caplog):
    config = ModelConfig("qwen3", 151936, 4096, 12288, 36, 32, 8, 128)
    with caplog.at_level(logging.WARNING):
        for sizes in ((1, 8, 1), (2, 2, 2), (1, 1, 8)):
            shardings = param_shardings(logical_axes(config), param_shapes(config), _mesh(*sizes))
            held = jax.tree.map(
                lambda leaf, sharding: int(np.prod(sharding.shard_shape(leaf.shape))),
                param_shapes(config),
                shardings,
            )
            # All but the norms, 308,224 parameters, are split over fsdp * tensor.
            ways = sizes[1] * sizes[2]
            assert sum(jax.tree.leaves(held)) == (8_190_735_360 - 308_224) // ways + 308_224
    assert our_log(caplog) == []


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3))),
        optax.masked(
            optax.adam(1e-3), lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params)
        ),
        optax.multi_transform(
            {"yes": optax.adam(1e-3), "no": optax.set_to_zero()},
            lambda params: jax.tree.map(lambda leaf: "yes" if leaf.ndim > 2 else "no", params),
        ),
    ],
    ids=["adamw", "chain", "masked", "multi_transform"],
)
def test_moments_are_sharded_like_their_parameters(optimizer):
    mesh = _mesh(2, 2, 2)
    shapes = param_shapes(CONFIG)
    axes = logical_axes(CONFIG)
    state = jax.eval_shape(optimizer.init, shapes)
    shardings = state_shardings(
        {"params": shapes, "optimizer": state, "step": jnp.zeros(())}, shapes, axes, mesh
    )
    assert shardings["params"] == param_shardings(axes, shapes, mesh)
    assert shardings["step"] == replicated(mesh)
    moments = {
        jax.tree_util.keystr(path): sharding
        for path, sharding in jax.tree_util.tree_leaves_with_path(shardings["optimizer"])
    }
    up = [
        sharding.spec
        for path, sharding in moments.items()
        if path.endswith("['mlp']['up']['kernel']")
    ]
    assert up == [P(None, "fsdp", "tensor")] * 2  # mu and nu
    counters = [sharding.spec for path, sharding in moments.items() if "count" in path]
    assert counters
    assert set(counters) == {P()}


def test_every_moment_of_adamw():
    mesh = _mesh(2, 2, 2)
    shapes = param_shapes(CONFIG)
    axes = logical_axes(CONFIG)
    shardings = state_shardings(jax.eval_shape(optax.adamw(1e-3).init, shapes), shapes, axes, mesh)
    assert shardings[0].mu == shardings[0].nu == param_shardings(axes, shapes, mesh)


def test_a_leaf_of_another_shape_is_replicated():
    """Factored moments keep a parameter's path and not its shape."""
    mesh = _mesh(1, 8, 1)
    shapes = param_shapes(CONFIG)
    axes = logical_axes(CONFIG)
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[:-1], leaf.dtype), shapes)
    shardings = state_shardings(rows, shapes, axes, mesh)
    assert set(jax.tree.leaves(_specs(shardings), is_leaf=lambda x: isinstance(x, P))) == {P()}


def test_state_made_under_jit_has_its_shardings():
    """jit(optimizer.init) alone puts the moments on one device; with these out_shardings they are
    split.
    """
    mesh = _mesh(1, 4, 2)
    shapes = param_shapes(CONFIG)
    axes = logical_axes(CONFIG)
    optimizer = optax.adam(1e-3)
    shardings = state_shardings(jax.eval_shape(optimizer.init, shapes), shapes, axes, mesh)
    params = jax.device_put(
        init_params(CONFIG, jax.random.key(0)), param_shardings(axes, shapes, mesh)
    )
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    moment = state[0].mu["layers"]["mlp"]["up"]["kernel"]
    assert moment.addressable_shards[0].data.shape == (2, 32 // 4, 64 // 2)
    assert state[0].count.sharding == replicated(mesh)


def test_rows_and_replicas():
    mesh = _mesh(2, 2, 2)
    assert shard_rows(mesh) == NamedSharding(mesh, P(None, None, ("data", "fsdp", "expert")))
    placed = jax.device_put(np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5), shard_rows(mesh))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3, 1, 5)}
    assert jax.device_put(np.arange(5), replicated(mesh)).addressable_shards[7].data.shape == (5,)


def test_constrain():
    mesh = _mesh(2, 2, 2)
    pinned = jax.jit(lambda x: constrain(mesh)(x, ("rows", "length", "hidden")))(
        jnp.zeros((8, 3, 5))
    )
    assert pinned.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"))), 3)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 1, 1), (1, 4, 2)])
def test_shard_map_over_data_leaves_the_other_axes_to_the_compiler(sizes):
    mesh = _mesh(*sizes)
    shapes = []

    def local(x):
        shapes.append(x.shape)
        pinned = constrain(mesh)(x, ("rows", "length", "hidden"))
        total = jnp.sum(pinned)
        return pinned * (jax.lax.psum(total, axis) if (axis := data_axis(mesh)) else total)

    x = np.arange(8 * 3 * 5, dtype=np.float32).reshape(8, 3, 5)
    mapped = jax.jit(shard_map_over_data(local, mesh, in_specs=(P("data"),), out_specs=P("data")))
    np.testing.assert_allclose(mapped(x), x * x.sum(), rtol=1e-6)
    # A row of its own for each index of data; how they lie on fsdp and tensor does not show in
    # shapes.
    assert set(shapes) == {(8 // sizes[0], 3, 5)}


def test_shard_map_over_data_without_several_devices_is_the_function():
    function = jnp.sum
    for mesh in (None, make_mesh(1, 1, 1, devices=jax.devices()[:1]), _mesh(1, 8, 1)):
        assert shard_map_over_data(function, mesh, in_specs=(P(),), out_specs=P()) is function
        assert data_axis(mesh) is None


def _rows():
    """8 rows of two segments and padding."""
    rng = np.random.default_rng(0)
    segments = np.repeat([[1, 2, 0]], [7, 6, 3], axis=1).repeat(8, axis=0)
    positions = np.concatenate([np.arange(7), np.arange(6), np.zeros(3, int)])[None].repeat(
        8, axis=0
    )
    return {
        "input_ids": rng.integers(0, 96, (8, 16)).astype(np.int32),
        "position_ids": positions.astype(np.int32),
        "segment_ids": segments.astype(np.int32),
        "mask": (segments > 0) & (positions > 0),
        "weights": rng.normal(size=(8, 16)).astype(np.float32),
    }


def _objective(params, rows, mesh):
    row_logprobs = make_row_logprobs(
        CONFIG, Compute(remat="full", logprob_chunk=32), temperature=0.7, mesh=mesh
    )
    packed = Rows(
        rows["input_ids"],
        rows["position_ids"],
        rows["segment_ids"],
        rows["mask"],
        completion_index=jnp.zeros_like(rows["input_ids"]),
        columns={},
    )
    mapped = shard_map_over_data(row_logprobs, mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    found = mapped(params, packed)
    return jnp.sum(rows["weights"] * found.logprobs) + jnp.sum(found.entropy), found.logprobs


@pytest.fixture(scope="module")
def one_device():
    params = init_params(CONFIG, jax.random.key(0))
    value = jax.jit(jax.value_and_grad(lambda p, r: _objective(p, r, None), has_aux=True))(
        params, _rows()
    )
    return params, *jax.device_get(value)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8)])
def test_eight_devices_equal_one(one_device, sizes):
    """Forward and gradients. Devices add partial sums in another order: a few units in the last
    place.
    """
    params, (value, logprobs), grads = one_device
    mesh = _mesh(*sizes)
    shardings = param_shardings(logical_axes(CONFIG), param_shapes(CONFIG), mesh)
    placed = jax.device_put(params, shardings)
    rows = jax.device_put(_rows(), NamedSharding(mesh, P(("data", "fsdp"))))
    step = jax.jit(
        jax.value_and_grad(lambda p, r: _objective(p, r, mesh), has_aux=True),
        out_shardings=(None, shardings),
    )
    (sharded_value, sharded_logprobs), sharded_grads = step(placed, rows)
    assert float(sharded_value) == pytest.approx(float(value), rel=1e-5)
    np.testing.assert_allclose(sharded_logprobs, logprobs, atol=2e-5)
    for (path, want), have in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(sharded_grads), strict=True
    ):
        error = np.abs(np.asarray(have) - want).max() / np.abs(want).max()
        assert error < 2e-5, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8)])
def test_the_output_matrix_travels_once_a_pass(sizes):
    """Left to the compiler it was gathered, and its gradient reduced, in every chunk: 17,280
    gathers at full size.
    """
    mesh = _mesh(*sizes)
    shardings = param_shardings(logical_axes(CONFIG), param_shapes(CONFIG), mesh)
    params = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0)))
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings
    )
    split = NamedSharding(mesh, P(("data", "fsdp")))
    rows = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for name, x in _rows().items()
    }
    grads = jax.jit(jax.grad(lambda p, r: _objective(p, r, mesh)[0]), out_shardings=shardings)
    with names_of_this_code():
        module = parse(grads.lower(placed, rows).compile().as_text())
    # Were one of them in a loop over chunks of tokens, it would count seven times.
    found = collectives(
        module,
        lambda op_name: 7 if in_scope(op_name, CHUNKS) else None,
        micro_batch_scope="micro_batches",
    )
    # [32, 96] over tensor, in eight pieces: each gathered forward and backward, its gradient
    # reduced once.
    piece = (32, 96 // sizes[2] // 8)
    counts = {
        kind: sum(one.count for one in found if (one.kind, one.array.dims) == (kind, piece))
        for kind in KINDS
    }
    if sizes[1] > 1:
        assert counts["all-gather"] == 16 and counts["reduce-scatter"] + counts["all-reduce"] == 8
    assert [one for one in found if one.count > 1 and 96 in one.array.dims] == []
    if sizes[1] > 1:
        # The embedding's rows of tokens travel, not the embedding: [2 rows x 16, 32] there and, as
        # gradients, back.
        assert not [one for one in found if one.array.dims[-2:] == (96 // sizes[2], 32)]
        # A CPU has an array for each device.
        assert sum(one.count for one in found if one.kind == "all-to-all") == 2 * sizes[1]
