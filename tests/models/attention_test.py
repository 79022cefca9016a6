"""Attention over packed rows against a float64 loop, and the kernels against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models.attention import (
    RowKernel,
    choose_kernel,
    row_attention,
    shard_map_over_rows_and_heads,
)
from dcmdp_jax.models.ops import CPU, REFERENCE
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import shard_map_over_data

both = pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])


def _inputs(rows, length, heads, kv_heads, size):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(rows, length, count, size) for count in (heads, kv_heads, kv_heads)]
    return tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))


def _reference(query, key, value, segment_ids):
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    rows, length, heads, size = query.shape
    out = np.zeros_like(query)
    for r in range(rows):
        for t in range(length):
            seen = [s for s in range(t + 1) if segment_ids[r, s] == segment_ids[r, t]]
            for h in range(heads):
                k = h // (heads // key.shape[2])
                scores = key[r, seen, k] @ query[r, t, h] / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                out[r, t, h] = weights / weights.sum() @ value[r, seen, k]
    return out


SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0, 0, 0]], np.int32)


@both
def test_packed_rows_against_a_loop(ops):
    query, key, value = _inputs(2, 10, 6, 2, 8)
    ours = row_attention(
        query, key, value, jnp.asarray(SEGMENTS), kernel=RowKernel(name="xla", ops=ops)
    )
    np.testing.assert_allclose(ours, _reference(query, key, value, SEGMENTS), atol=2e-6)


@both
def test_one_segment_is_causal_and_right_on_real_tokens(ops):
    query, key, value = _inputs(2, 10, 6, 2, 8)
    segments = np.array([[1] * 7 + [0] * 3, [1] * 10], np.int32)
    ours = row_attention(
        query,
        key,
        value,
        jnp.asarray(segments),
        kernel=RowKernel(name="xla", ops=ops, one_segment=True),
    )
    real = segments > 0
    np.testing.assert_allclose(
        np.asarray(ours)[real], _reference(query, key, value, segments)[real], atol=2e-6
    )


@both
def test_nan_stays_nan(ops):
    query, key, value = _inputs(1, 4, 2, 1, 8)
    out = row_attention(
        query.at[0, 2, 1, 0].set(jnp.nan),
        key,
        value,
        jnp.ones((1, 4), int),
        kernel=RowKernel(name="xla", ops=ops, one_segment=True),
    )
    bad = np.isnan(np.asarray(out)).all(axis=-1)[0]
    np.testing.assert_array_equal(
        bad, [[False, False], [False, False], [False, True], [False, False]]
    )


@both
def test_gradients_of_packed_rows(ops):
    """Against autodiff of the library's attention.

    It divides the weights by their sum before the product.
    """
    inputs = _inputs(2, 10, 6, 2, 8)
    weights = jax.random.normal(jax.random.key(1), inputs[0].shape)
    segments = jnp.asarray(SEGMENTS)
    visible = jnp.tril(jnp.ones((10, 10), bool)) & (segments[:, :, None] == segments[:, None, :])

    def ours(inputs):
        return jnp.sum(
            weights * row_attention(*inputs, segments, kernel=RowKernel(name="xla", ops=ops))
        )

    def library(inputs):
        return jnp.sum(
            weights
            * jax.nn.dot_product_attention(*inputs, mask=visible[:, None], implementation="xla")
        )

    for mine, theirs in zip(jax.grad(ours)(inputs), jax.grad(library)(inputs), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=3e-6)


@both
def test_a_window_hides_what_is_before_it(ops):
    """With scores of zero each token gets the mean of what it sees.

    Window 3 with segments 1 1 1 1 2, values 1 2 3 4 5.
    """
    zero = jnp.zeros((1, 5, 1, 2))
    value = jnp.broadcast_to(jnp.arange(1.0, 6)[None, :, None, None], (1, 5, 1, 2))
    segments = jnp.asarray([[1, 1, 1, 1, 2]])
    for slides, fourth in (
        (None, 3),
        (True, 3),
        (False, 2.5),
    ):  # (2 + 3 + 4) / 3; (1 + 2 + 3 + 4) / 4
        out = row_attention(
            zero,
            zero,
            value,
            segments,
            RowKernel(name="xla", ops=ops),
            window=3,
            slides=None if slides is None else jnp.asarray(slides),
        )
        np.testing.assert_allclose(out[0, :, 0, 0], [1, 1.5, 2, fourth, 5], rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "window", "slides"),
    [((1, 1, 1), 0, None), ((1, 2, 4), 9, True), ((2, 1, 4), 9, False)],
    ids=str,
)
def test_splash_equals_xla(monkeypatch, shape, window, slides):
    """The TPU kernel, interpreted: values and gradients of grouped queries and segments.

    Two key heads over four devices; rows split by a shard_map around it; a window that a traced
    flag turns on and off.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    interpreted = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", interpreted)
    query, key, value = _inputs(2, 128, 4, 2, 128)
    segment_ids = jnp.asarray(
        np.repeat([[1, 2, 3, 0], [1, 1, 2, 0]], [40, 1, 60, 27], axis=1), jnp.int32
    )
    weights = jnp.where(segment_ids > 0, 1.0, 0.0)[..., None, None] * jnp.arange(128)
    mesh = make_mesh(*shape, devices=jax.devices()[: int(np.prod(shape))])

    def loss(kernel, query, key, value):
        attend = functools.partial(
            row_attention,
            kernel=RowKernel(name=kernel, ops=CPU, mesh=mesh),
            window=window,
            slides=None if slides is None else jnp.asarray(slides),
        )
        attend = shard_map_over_data(attend, mesh, in_specs=(P("data"),) * 4, out_specs=P("data"))
        attended = attend(query, key, value, segment_ids)
        return jnp.sum(attended**2 * weights) / 1e4

    want, want_grads = jax.jit(
        jax.value_and_grad(functools.partial(loss, "xla"), argnums=(0, 1, 2))
    )(query, key, value)
    step = jax.jit(jax.value_and_grad(functools.partial(loss, "splash"), argnums=(0, 1, 2)))
    have, have_grads = step(query, key, value)
    assert have == pytest.approx(float(want), rel=1e-6)
    for mine, theirs in zip(have_grads, want_grads, strict=True):
        # Sums over 128 keys in another order: rounding relative to the largest entry.
        np.testing.assert_allclose(mine, theirs, atol=5e-6 * float(jnp.abs(theirs).max()))


def test_splash_says_what_it_cannot_split():
    with pytest.raises(
        ValueError, match="row length: got 100, splash attention needs a multiple of 128"
    ):
        row_attention(
            *_inputs(1, 100, 2, 2, 8),
            jnp.ones((1, 100), int),
            kernel=RowKernel(name="splash", ops=CPU),
        )


@pytest.mark.parametrize("kernel", ["cudnn", "splash"])
def test_tensor_that_does_not_divide_the_query_heads_is_refused(kernel):
    mesh = make_mesh(1, 1, 8, devices=jax.devices()[:8])
    with pytest.raises(
        ValueError, match="mesh tensor: got 8, attention needs a divisor of the 6 query heads"
    ):
        row_attention(
            *_inputs(1, 128, 6, 2, 8),
            jnp.ones((1, 128), int),
            kernel=RowKernel(name=kernel, ops=CPU, mesh=mesh),
        )


# data, fsdp, tensor, expert; query heads, key-value heads; rows, query and key-value heads of a
# device, of 8 rows. 4 devices along tensor share 2 key-value heads, one each: 2 copies. 6 heads
# become 12 = lcm(4, 6), three each.
_MESHES = {
    "data 2": ((2, 1, 1, 1), (4, 2), (4, 4, 2)),
    "data 2, fsdp 2": ((2, 2, 1, 1), (4, 2), (2, 4, 2)),
    "tensor 4, 2 key-value heads": ((1, 1, 4, 1), (8, 2), (8, 2, 1)),
    "tensor 4, 6 key-value heads": ((1, 1, 4, 1), (12, 6), (8, 3, 3)),
    "data 2, tensor 4": ((2, 1, 4, 1), (8, 2), (4, 2, 1)),
    "data 2, fsdp 2, expert 2": ((2, 2, 1, 2), (4, 2), (1, 4, 2)),
}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside a shard_map over data"])
@pytest.mark.parametrize("case", _MESHES.values(), ids=_MESHES)
def test_split_rows_and_heads_give_the_result_of_one_device(case, inside):
    """Values and gradients of the plain kernel on split rows and heads.

    It gets one device's part and leaves no axis to the compiler.
    """
    sizes, heads, own = case
    query, key, value = _inputs(8, 10, *heads, 4)
    segment_ids = jnp.asarray(np.tile(SEGMENTS, (4, 1)))
    weights = jax.random.normal(jax.random.key(1), query.shape)
    plain = functools.partial(row_attention, kernel=RowKernel(name="xla", ops=REFERENCE))
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    parts = []

    def kernel(*arguments):
        parts.append((arguments[0].shape[0], arguments[0].shape[2], arguments[1].shape[2]))
        assert set(jax.sharding.get_abstract_mesh().manual_axes) == set(mesh.axis_names)
        return plain(*arguments)

    split = shard_map_over_rows_and_heads(kernel, mesh)
    if inside:
        split = shard_map_over_data(split, mesh, in_specs=(P("data"),) * 4, out_specs=P("data"))

    def loss(attend, *inputs):
        attended = attend(*inputs, segment_ids)
        return jnp.sum(attended * weights), attended

    def evaluate(attend):
        step = jax.jit(
            jax.value_and_grad(functools.partial(loss, attend), argnums=(0, 1, 2), has_aux=True)
        )
        (_, attended), gradients = step(query, key, value)
        return [attended, *gradients]

    for have, want in zip(evaluate(split), evaluate(plain), strict=True):
        np.testing.assert_allclose(have, want, atol=3e-6)
    assert set(parts) == {own}


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside a shard_map over data"])
@pytest.mark.parametrize("one_segment", [False, True])
def test_cudnn_gets_the_rows_and_heads_of_one_device(monkeypatch, inside, one_segment):
    """cuDNN's arguments, with the library's own attention in its place.

    Causal, within segments, scaled.
    """
    library = jax.nn.dot_product_attention
    mesh = make_mesh(2, 1, 4, devices=jax.devices()[:8])

    def dot_product_attention(*arguments, implementation, **options):
        assert implementation == "cudnn"
        assert [x.shape for x in arguments] == [(1, 10, 2, 8), (1, 10, 1, 8), (1, 10, 1, 8)]
        return library(*arguments, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    query, key, value = _inputs(2, 10, 8, 2, 8)
    attend = functools.partial(
        row_attention, kernel=RowKernel(name="cudnn", ops=CPU, one_segment=one_segment, mesh=mesh)
    )
    if inside:
        attend = shard_map_over_data(attend, mesh, in_specs=(P("data"),) * 4, out_specs=P("data"))
    segment_ids = np.array([[1] * 7 + [0] * 3, [1] * 10], np.int32) if one_segment else SEGMENTS
    ours = jax.jit(attend)(query, key, value, jnp.asarray(segment_ids))
    real = segment_ids > 0
    np.testing.assert_allclose(
        np.asarray(ours)[real], _reference(query, key, value, segment_ids)[real], atol=2e-6
    )


def test_choose_kernel():
    assert choose_kernel("auto", jnp.dtype("bfloat16"), "tpu") == "splash"
    assert choose_kernel("auto", jnp.dtype("bfloat16"), "gpu") == "cudnn"
    assert choose_kernel("auto", jnp.dtype("float32"), "gpu") == "xla"  # cudnn has no float32
    assert choose_kernel("auto", jnp.dtype("bfloat16"), "cpu") == "xla"
    assert [
        choose_kernel("auto", jnp.dtype("float32"), "cpu", length) for length in (191, 192)
    ] == ["xla", "blockwise"]
    assert choose_kernel("xla", jnp.dtype("bfloat16"), "tpu") == "xla"
    # Splash takes blocks of 128 alone. The rows of a weight sync's proof, or of a probe, are
    # shorter.
    assert choose_kernel("auto", jnp.dtype("bfloat16"), "tpu", 384) == "splash"
    assert [
        choose_kernel("auto", jnp.dtype("bfloat16"), "tpu", length) for length in (32, 200)
    ] == ["xla", "xla"]
    assert choose_kernel("splash", jnp.dtype("bfloat16"), "tpu", 32) == "splash"
    with pytest.raises(
        ValueError, match="attention: got 'flash', allowed are auto, xla, blockwise, cudnn, splash"
    ):
        choose_kernel("flash", jnp.dtype("bfloat16"), "tpu")
