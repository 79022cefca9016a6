"""The arrays that cuDNN's packed attention gets.

A stand-in reads them as cuDNN does.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models.attention import RowKernel, row_attention
from dcmdp_jax.models.ops import GPU, REFERENCE
from dcmdp_jax.models.ops.gpu import packed_attention
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import shard_map_over_data
from tests.support.packed_attention import stand_in_for_cudnn


@pytest.fixture
def stand_ins(monkeypatch):
    return stand_in_for_cudnn(monkeypatch)


def _inputs(rows, length, heads, kv_heads, width):
    keys = jax.random.split(jax.random.key(0), 4)
    counts = heads, kv_heads, kv_heads, heads
    return [
        jax.random.normal(key, (rows, length, n, width))
        for key, n in zip(keys, counts, strict=True)
    ]


# Three segments; padding first, between and last; one segment; none.
_ROWS = [[1, 1, 1, 2, 3, 3, 3, 3, 0, 0], [0, 0, 1, 1, 0, 2, 2, 2, 2, 2], [1] * 10, [0] * 10]


@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(("mesh", "window"), [(None, 0), ((2, 1, 2), 2)], ids=str)
def test_each_segment_is_a_sequence_of_its_own(stand_ins, heads, mesh, window):
    """Values and gradients of the reference, on one device and on a mesh.

    With fewer key heads than query heads, whose offsets JAX scales wrongly before 0.12; each device
    with the offsets of its own rows and heads. NaN reaches nothing.
    """
    mesh = mesh and make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    *inputs, weights = _inputs(4, 10, *heads, 8)
    ids = jnp.asarray(_ROWS, jnp.int32)
    real = (ids > 0)[..., None, None]

    def evaluate(kernel):
        attend = functools.partial(row_attention, kernel=kernel, window=window)
        if kernel.mesh:
            attend = shard_map_over_data(
                attend, kernel.mesh, in_specs=(P("data"),) * 4, out_specs=P("data")
            )

        def loss(*inputs):
            attended = attend(*inputs, ids)
            return jnp.sum(jnp.where(real, attended, 0) * weights), attended

        (_, attended), gradients = jax.jit(
            jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        )(*inputs)
        return [attended, *gradients]

    ours = evaluate(RowKernel(name="cudnn", ops=GPU, segments=3, mesh=mesh))
    theirs = evaluate(RowKernel(name="xla", ops=REFERENCE))
    theirs[0] = jnp.where(real, theirs[0], 0)
    for have, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(have, want, atol=3e-6)
    assert [one.calls for one in stand_ins] == [1, 1]


@pytest.mark.parametrize("slides", [False, True])
def test_a_layer_of_a_scan_has_its_window_or_none(stand_ins, slides):
    """Families whose layers differ: the flag is traced, cuDNN's window is not."""
    *inputs, _ = _inputs(4, 10, 4, 2, 8)
    ids = jnp.asarray(_ROWS, jnp.int32)
    attend = functools.partial(row_attention, *inputs, ids)
    cudnn = RowKernel(name="cudnn", ops=GPU, segments=3)
    ours = jax.jit(lambda flag: attend(cudnn, window=2, slides=flag))(jnp.asarray(slides))
    plain = RowKernel(name="xla", ops=REFERENCE)
    theirs = attend(plain, window=2 if slides else 0)
    np.testing.assert_allclose(ours, jnp.where((ids > 0)[..., None, None], theirs, 0), atol=3e-6)
    assert stand_ins[0].calls == 2


def test_jax_lowers_what_the_packed_layout_binds():
    """JAX lowers the private primitives that the packed layout binds.

    A release may move them, or give them other parameters. Needs no GPU.
    """

    def loss(query, key, value, ids):
        return jnp.sum(packed_attention(query, key, value, ids, segments=16).astype(jnp.float32))

    query, key = (jax.ShapeDtypeStruct((2, 512, heads, 128), jnp.bfloat16) for heads in (4, 2))
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    try:
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(query, key, key, ids)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        pytest.fail(
            f"models/ops/gpu.py, whose docstring has ways out: not with jax {jax.__version__} "
            f"({why})",
            pytrace=False,
        )
    assert re.findall(r"custom_call @__(cudnn\$\w+)", text) == [
        "cudnn$fmhaSoftmax",
        "cudnn$fmhaSoftmaxBackward",
    ]
    for words in ("max_seg_per_batch\\22: 16,", "mask_type\\22: \\22PADDING_CAUSAL"):
        assert text.count(words) == 2


def test_more_segments_than_stated_are_not_left_out_in_silence(stand_ins):
    """Rows share their places: 4 and 0 segments fit 2 a row, 4 and 1 do not."""
    del stand_ins
    *inputs, _ = _inputs(2, 8, 2, 1, 4)
    rows = [[1, 1, 2, 2, 3, 3, 4, 4], [0] * 8], [[1, 1, 2, 2, 3, 3, 4, 4], [1] + [0] * 7]
    fits, not_fits = (packed_attention(*inputs, jnp.asarray(ids), segments=2) for ids in rows)
    assert np.isfinite(fits).all() and np.isnan(not_fits).all()


def test_offsets_beyond_int32_are_refused():
    x = jax.ShapeDtypeStruct((64, 8192, 32, 128), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"micro-batch: got 524288 tokens on a device, cuDNN's packed at"
    ):
        jax.eval_shape(
            functools.partial(packed_attention, segments=2),
            x,
            x,
            x,
            jax.ShapeDtypeStruct((64, 8192), jnp.int32),
        )
