"""Blockwise attention against the reference: values, gradients, what is skipped.

The reference computes whole rows.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from benchmarks.compiled_parts.flops import compiled_flops
from benchmarks.compiled_parts.hlo import names_of_this_code, parse
from benchmarks.compiled_parts.trips import blocks_at_most
from dcmdp_jax.models.attention import RowKernel, has_scores, row_attention
from dcmdp_jax.models.ops import CPU, REFERENCE, blockwise
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import shard_map_over_data

Attend = Callable[..., jax.Array]


def _row(*lengths, total):
    """Segments 1, 2, ... of those lengths, and padding to the end.

    A negative length is padding between segments.
    """
    ids = [
        0 if n < 0 else segment for segment, n in enumerate(lengths, start=1) for _ in range(abs(n))
    ]
    return ids + [0] * (total - len(ids))


def _inputs(shape, heads, kv_heads, width, dtype="float32"):
    keys = jax.random.split(jax.random.key(0), 4)
    counts = heads, kv_heads, kv_heads, heads
    return [
        jax.random.normal(key, (*shape, n, width), dtype)
        for key, n in zip(keys, counts, strict=True)
    ]


def _evaluate(attend, segment_ids, inputs):
    """Outputs and gradients of the real tokens; padding's outputs don't reach the loss."""
    *qkv, weights = inputs
    real = (segment_ids > 0)[..., None, None]

    def loss(*qkv):
        attended = jnp.where(real, attend(*qkv, segment_ids), 0)
        return jnp.sum((attended * weights).astype(jnp.float32)), attended

    (_, attended), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(
        *qkv
    )
    return [np.asarray(x, np.float32) for x in (attended, *gradients)]


_reference = functools.partial(row_attention, kernel=RowKernel(name="xla", ops=REFERENCE))


def _compare(attend, segment_ids, inputs, rounding=2e-6, window=0):
    ids = jnp.asarray(segment_ids, jnp.int32)
    reference = functools.partial(_reference, window=window)
    for have, want in zip(
        _evaluate(attend, ids, inputs), _evaluate(reference, ids, inputs), strict=True
    ):
        np.testing.assert_allclose(have, want, atol=rounding * max(1.0, float(np.abs(want).max())))


# Blocks of 8. Segments that begin and end in the middle of a block, fill one, cross three; rows of
# one token, of padding alone, with padding first, and whose last block would reach beyond all rows.
_ROWS = {
    "packed": [_row(3, 9, 20, 1, total=37), _row(8, 8, 16, 5, total=37), _row(37, total=37)],
    "padding first, between and alone": [
        _row(-5, 7, -2, 11, total=37),
        _row(total=37),
        _row(1, total=37),
    ],
    "one token in each segment": [_row(*[1] * 37, total=37), _row(*[1] * 12, total=37)],
    "no real token": [_row(total=37)] * 2,
    "one row shorter than a block": [_row(2, 3, total=6)],
    "one token": [_row(1, total=1)],
}


@pytest.mark.parametrize("heads", [(4, 2, 8), (3, 1, 5), (2, 2, 16)], ids=str)
@pytest.mark.parametrize("rows", _ROWS.values(), ids=_ROWS)
def test_blocks_give_what_whole_rows_give(rows, heads):
    attend = functools.partial(blockwise.attention, block=8)
    _compare(attend, rows, _inputs((len(rows), len(rows[0])), *heads))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(-9, 23).filter(bool), max_size=8), min_size=3, max_size=3),
    st.sampled_from([4, 7, 16, 256]),
    st.sampled_from([0, 1, 5, 16, 100]),
)
def test_any_segments_any_block_and_any_window(rows, block, window):
    ids = [_row(*lengths, total=200)[:40] for lengths in rows]
    attend = functools.partial(blockwise.attention, block=block, window=window)
    _compare(attend, ids, _inputs((3, 40), 2, 1, 4), window=window)


@pytest.mark.parametrize("length", [192, 304, 1100])
def test_the_kernel_of_a_cpu_on_long_rows(length):
    """By its name, with the block of that length; at 1,100 tokens the larger one."""
    assert blockwise.block_size(length) == (128 if length > 1024 else 64)
    rows = [_row(100, 3, length - 120, total=length), _row(length, total=length)]
    attend = functools.partial(row_attention, kernel=RowKernel(name="blockwise", ops=CPU))
    _compare(attend, rows, _inputs((2, length), 2, 1, 8), rounding=4e-6)


def test_rows_of_one_segment_and_padding():
    rows = [_row(150, total=200), _row(200, total=200), _row(1, total=200)]
    attend = functools.partial(
        row_attention, kernel=RowKernel(name="blockwise", ops=CPU, one_segment=True)
    )
    _compare(attend, rows, _inputs((3, 200), 4, 2, 8))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_accumulates_in_float32(dtype):
    """As near to the reference in float32 as whole rows in this dtype are."""
    rows = jnp.asarray([_row(70, 30, total=100)], jnp.int32)
    inputs = _inputs((1, 100), 4, 2, 16, dtype)
    exact = _evaluate(_reference, rows, [x.astype(jnp.float32) for x in inputs])
    plain = _evaluate(
        functools.partial(_reference, kernel=RowKernel(name="xla", ops=CPU)), rows, inputs
    )
    ours = _evaluate(functools.partial(blockwise.attention, block=16), rows, inputs)
    for have, want, theirs in zip(ours, exact, plain, strict=True):
        assert np.abs(have - want).max() <= 2 * np.abs(theirs - want).max()


def test_padding_gets_zeros_and_large_scores_do_not_overflow():
    """exp(q k) of these is infinite in float32.

    Also at padding, whose log-sum-exp is never computed.
    """
    ids = jnp.asarray([_row(5, -3, 4, total=16)], jnp.int32)
    query, key, value, _ = (30 * x for x in _inputs((1, 16), 2, 1, 8))

    def attend(*qkv):
        return blockwise.attention(*qkv, ids, block=8)

    attended, pull = jax.vjp(attend, query, key, value)
    gradients = pull(jnp.ones_like(attended))
    assert all(np.isfinite(x).all() for x in (attended, *gradients))
    padding = np.asarray(ids == 0)
    for x in (attended, *gradients):
        assert (np.asarray(x)[padding] == 0).all()


def test_nan_stays_nan():
    query, key, value, _ = _inputs((1, 24), 2, 1, 8)
    out = blockwise.attention(
        query.at[0, 12, 1, 0].set(jnp.nan), key, value, jnp.ones((1, 24), int), block=8
    )
    bad = np.isnan(np.asarray(out)).all(axis=-1)[0]
    assert np.argwhere(bad).tolist() == [[12, 1]]
    assert np.isnan(np.asarray(out)).sum() == 8


@pytest.mark.parametrize("remat", [False, True])
def test_inside_a_scan_over_layers(remat):
    """Three layers, each with the output of the last as its query, as in the decoder."""
    ids = jnp.asarray([_row(9, 14, total=30), _row(30, total=30)], jnp.int32)
    inputs = _inputs((2, 30), 2, 1, 4)

    def layers(attend, query, key, value, ids):
        def layer(x, scale):
            return x + attend(x, scale * key, value, ids), None

        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, query, jnp.arange(1.0, 4.0))[
            0
        ]

    ours = functools.partial(layers, functools.partial(blockwise.attention, block=8))
    theirs = functools.partial(layers, _reference)
    for have, want in zip(
        _evaluate(ours, ids, inputs), _evaluate(theirs, ids, inputs), strict=True
    ):
        np.testing.assert_allclose(have, want, atol=5e-6 * max(1.0, float(np.abs(want).max())))


# data, fsdp, tensor, expert
@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (2, 2, 1, 1), (1, 1, 2, 1), (1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside a shard_map over data"])
def test_a_mesh_gives_what_one_device_gives(sizes, inside):
    rows = [_row(9 + i, 60, 100 - i, total=192) for i in range(8)]
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    attend: Attend = functools.partial(
        row_attention, kernel=RowKernel(name="blockwise", ops=CPU, mesh=mesh)
    )
    if inside:
        attend = shard_map_over_data(attend, mesh, in_specs=(P("data"),) * 4, out_specs=P("data"))
    _compare(attend, rows, _inputs((8, 192), 4, 2, 8))


def test_rows_and_heads_that_a_mesh_does_not_split_are_left_to_the_compiler():
    mesh = make_mesh(1, 2, 4, devices=jax.devices()[:8])
    attend = functools.partial(
        row_attention, kernel=RowKernel(name="blockwise", ops=CPU, mesh=mesh)
    )
    assert has_scores("blockwise", 3, 192, 4, mesh) and has_scores("blockwise", 4, 192, 6, mesh)
    assert not has_scores("blockwise", 4, 192, 8, mesh)
    assert [has_scores("blockwise", 1, length, 1, None) for length in (191, 192)] == [True, False]
    assert [has_scores(kernel, 1, 4096, 1, None) for kernel in ("xla", "cudnn", "splash")] == [
        True,
        False,
        False,
    ]
    _compare(attend, [_row(80, 100, total=192)] * 3, _inputs((3, 192), 6, 2, 8))


def _blocks(segment_ids, size):
    """Pairs of blocks that are computed, counted by a NumPy walk over the tokens."""
    count = 0
    for row in segment_ids:
        ends = [t for t in range(1, len(row) + 1) if t == len(row) or row[t] != row[t - 1]]
        token = 0
        while token < len(row):
            begin = max([0, *(end for end in ends if end <= token)])
            whole = [end for end in ends if token < end <= token + size]
            if row[token]:
                count += (token - begin) // size + 1
                token = max(whole, default=token + size)
            else:
                token = min(end for end in ends if end > token)
    return count


def test_time_goes_to_blocks_of_a_rows_own_segments_alone(monkeypatch):
    """Count the blocks of keys that run, on the host.

    Those of whole rows of two segments, and of a packed one.
    """
    ran = []
    product = blockwise._product

    def counted(left, right):
        jax.debug.callback(lambda: ran.append(1))
        return product(left, right)

    monkeypatch.setattr(blockwise, "_product", counted)
    for lengths in ((64,), (32, 32), (10, 20, 30), (3, 3, 3, 3), ()):
        ids = np.array([_row(*lengths, total=64)], np.int32)
        query, key, value, _ = _inputs((1, 64), 2, 1, 4)
        jax.block_until_ready(blockwise.attention(query, key, value, jnp.asarray(ids), block=8))
        jax.effects_barrier()
        # Two products a block: q k and w v.
        assert len(ran) == 2 * _blocks(ids, 8)
        ran.clear()
    # By hand: one segment of 64 has 1 + 2 + ... + 8 = 36 blocks of 8, two of 32 have 2 (1 + 2 + 3 +
    # 4) = 20.
    assert [_blocks(np.array([_row(*n, total=64)]), 8) for n in ((64,), (32, 32))] == [36, 20]


def test_no_array_has_two_axes_along_the_row():
    *qkv, _ = _inputs((2, 1024), 2, 1, 8)
    ids = jnp.ones((2, 1024), jnp.int32)
    attend = functools.partial(row_attention, kernel=RowKernel(name="blockwise", ops=CPU))
    compiled = (
        jax.jit(jax.grad(lambda *qkv: jnp.sum(attend(*qkv, ids)), argnums=(0, 1, 2)))
        .lower(*qkv)
        .compile()
    )
    arrays = {
        array.dims
        for c in parse(compiled.as_text()).computations.values()
        for i in c.instructions.values()
        for array in i.results
    }
    assert not [dims for dims in arrays if sum(dim >= 1024 for dim in dims) > 1]
    # Blocks of 64: [1 key head, 64, 2 x 64] scores are 32 KiB each, the inputs 64. Whole rows take
    # 16 MiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


def test_operations_are_those_of_causal_rows():
    """The compiler's operations are those of the blocks that causal rows need.

    2 rows of 256 tokens are 4 blocks of 64 each, which see 1 + 2 + 3 + 4 = 10 blocks of keys. A
    product of a block has 2 x 64 x 64 x 8 operations for each of 4 heads; there are 2 forward and 5
    backward.
    """
    *qkv, _ = _inputs((2, 256), 4, 2, 8)
    ids = jnp.ones((2, 256), jnp.int32)
    step = jax.jit(
        jax.grad(lambda *qkv: jnp.sum(blockwise.attention(*qkv, ids) ** 2), argnums=(0, 1, 2))
    )
    with names_of_this_code():
        text = step.lower(*qkv).compile().as_text()
    flops = compiled_flops(parse(text), blocks_at_most)
    assert flops.products == 2 * 10 * (2 + 5) * 4 * 2 * 64 * 64 * 8
