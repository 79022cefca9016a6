"""cuDNN's packed attention: the arrays that it gets, by a stand-in that reads them as cuDNN does.

cuDNN itself ran nowhere here. The stand-in takes flat memory, offsets in elements and lengths, and nothing else.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models.attention import row_attention
from dcmdp_jax.models.ops import GPU, REFERENCE
from dcmdp_jax.models.ops.gpu import packed_attention
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import shard_map_over_data


class _StandIn:
    """A primitive's `bind`. What cuDNN does not write is NaN."""

    def __init__(self, *, backward: bool) -> None:
        self._backward, self.calls = backward, 0

    def bind(self, query: jax.Array, key: jax.Array, value: jax.Array, *rest: Any, **options: Any) -> list[jax.Array]:
        bias, lengths, key_lengths, offsets, key_offsets, _, _, *saved = rest
        assert bias.size == 0 and lengths is key_lengths
        assert options["mask_type"] == cudnn.MaskType.PADDING_CAUSAL
        assert lengths.shape == (query.shape[0], offsets.shape[1] - 1) and lengths.dtype == offsets.dtype == jnp.int32
        self.calls += 1
        # cuDNN's log-sum-exp, of which there is one for each segment that a row may have.
        statistics = jax.ShapeDtypeStruct((lengths.size, query.shape[2], query.shape[1]), jnp.float32)
        if self._backward:
            assert saved[0].shape == statistics.shape
            shapes, arguments = (query, key, value), (saved[1], saved[2])
        else:
            assert options["is_training"]
            shapes, arguments = (query, statistics), ()
        run = functools.partial(_run, self._backward, options["scale"], options["sliding_window_length"])
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes]
        return jax.pure_callback(run, shapes, query, key, value, lengths, offsets, key_offsets, *arguments)


def _run(backward, scale, window, *arrays):
    query, key, value, lengths, offsets, key_offsets, *rest = (np.asarray(x) for x in arrays)
    heads, kv_heads, width = query.shape[2], key.shape[2], query.shape[3]
    results = [np.full(x.size, np.nan) for x in ((query, key, value) if backward else (query,))]

    def read(x, offset, tokens):
        return x.reshape(-1)[offset : offset + tokens * x.shape[2] * width].reshape(tokens, x.shape[2], width)

    def write(result, offset, part):
        result[offset : offset + part.size] = part.reshape(-1)

    for tokens, offset, key_offset in zip(lengths.flat, offsets.flat, key_offsets.flat, strict=False):
        if not tokens:
            continue
        q, k, v = read(query, offset, tokens), read(key, key_offset, tokens), read(value, key_offset, tokens)
        k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
        # cuDNN's window holds the query itself.
        seen = np.tri(tokens, dtype=bool) & ~np.tri(tokens, k=-(window or tokens), dtype=bool)
        scores = scale * np.einsum("qhd,khd->hqk", q, k) + np.where(seen, 0, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e30))
        weights /= weights.sum(axis=-1, keepdims=True)
        if not backward:
            write(results[0], offset, np.einsum("hqk,khd->qhd", weights, v))
            continue
        bar = read(rest[1], offset, tokens)
        pulled = np.einsum("qhd,khd->hqk", bar, v)
        scores_bar = scale * weights * (pulled - np.sum(weights * pulled, axis=-1, keepdims=True))
        gradients = (
            np.einsum("hqk,khd->qhd", scores_bar, k),
            np.einsum("hqk,qhd->khd", scores_bar, q),
            np.einsum("hqk,qhd->khd", weights, bar),
        )
        shared = [x.reshape(tokens, kv_heads, -1, width).sum(axis=2) for x in gradients[1:]]
        for result, at, part in zip(results, (offset, key_offset, key_offset), (gradients[0], *shared), strict=True):
            write(result, at, part)
    shaped = [r.reshape(x.shape).astype(x.dtype) for r, x in zip(results, (query, key, value), strict=False)]
    statistics = [] if backward else [np.zeros((lengths.size, heads, query.shape[1]), np.float32)]
    return [*shaped, *statistics]


@pytest.fixture
def stand_ins(monkeypatch):
    made = [_StandIn(backward=False), _StandIn(backward=True)]
    for name, one in zip(("fwd", "bwd"), made, strict=True):
        monkeypatch.setattr(cudnn, f"_dot_product_attention_{name}_p", one)
    return made


def _inputs(rows, length, heads, kv_heads, width):
    keys = jax.random.split(jax.random.key(0), 4)
    counts = heads, kv_heads, kv_heads, heads
    return [jax.random.normal(key, (rows, length, n, width)) for key, n in zip(keys, counts, strict=True)]


# Three segments; padding first, between and last; one segment; none.
_ROWS = [[1, 1, 1, 2, 3, 3, 3, 3, 0, 0], [0, 0, 1, 1, 0, 2, 2, 2, 2, 2], [1] * 10, [0] * 10]


@pytest.mark.parametrize("heads", [(4, 2), (6, 1), (2, 2)], ids=str)
@pytest.mark.parametrize(("mesh", "window"), [(None, 0), ((2, 1, 2), 2)], ids=str)
def test_each_segment_is_a_sequence_of_its_own(stand_ins, heads, mesh, window):
    """Values and gradients of the reference; with fewer key heads than query heads, whose offsets JAX scales wrongly
    before 0.12; each device with the offsets of its own rows and heads. NaN reaches nothing."""
    mesh = mesh and make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
    *inputs, weights = _inputs(4, 10, *heads, 8)
    ids = jnp.asarray(_ROWS, jnp.int32)
    real = (ids > 0)[..., None, None]

    def evaluate(**options):
        attend = functools.partial(row_attention, one_segment=False, window=window, **options)
        if options.get("mesh"):
            attend = shard_map_over_data(attend, options["mesh"], in_specs=(P("data"),) * 4, out_specs=P("data"))

        def loss(*inputs):
            attended = attend(*inputs, ids)
            return jnp.sum(jnp.where(real, attended, 0) * weights), attended

        (_, attended), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
        return [attended, *gradients]

    ours = evaluate(kernel="cudnn", ops=GPU, segments=3, mesh=mesh)
    theirs = evaluate(kernel="xla", ops=REFERENCE)
    theirs[0] = jnp.where(real, theirs[0], 0)
    for have, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(have, want, atol=3e-6)
    assert [one.calls for one in stand_ins] == [1, 1]


def test_more_segments_than_stated_are_not_left_out_in_silence(stand_ins):
    """Rows share their places: 4 and 0 segments fit 2 a row, 4 and 1 do not."""
    del stand_ins
    *inputs, _ = _inputs(2, 8, 2, 1, 4)
    rows = [[1, 1, 2, 2, 3, 3, 4, 4], [0] * 8], [[1, 1, 2, 2, 3, 3, 4, 4], [1] + [0] * 7]
    fits, not_fits = (packed_attention(*inputs, jnp.asarray(ids), segments=2) for ids in rows)
    assert np.isfinite(fits).all() and np.isnan(not_fits).all()


def test_offsets_beyond_int32_are_refused():
    x = jax.ShapeDtypeStruct((64, 8192, 32, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"micro-batch: got 524288 tokens on a device, cuDNN's packed at"):
        jax.eval_shape(
            functools.partial(packed_attention, segments=2), x, x, x, jax.ShapeDtypeStruct((64, 8192), jnp.int32)
        )
