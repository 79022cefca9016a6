"""Norm, rotary embedding, linear layer and MLP against hand values and transformers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.declare import Scope
from dcmdp_jax.models.hf_config import from_hf
from dcmdp_jax.models.layers import MLP, Linear, RMSNorm, rotary_frequencies, rotary_tables
from dcmdp_jax.models.ops import CPU, REFERENCE

both = pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])

CONFIG = ModelConfig("qwen3", 97, 48, 80, 3, 6, 2, 16, rope_theta=1e4)


def test_linear_by_hand():
    layer = Linear(Scope(CONFIG, "linear"), (2, 3), ("embed", "mlp"), bias=True)
    layer.kernel.set_value(jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    layer.bias.set_value(jnp.array([10.0, 20.0, 30.0]))
    # [1, -1] W + b = [1-4, 2-5, 3-6] + b
    np.testing.assert_array_equal(layer(jnp.array([1.0, -1.0])), [7.0, 17.0, 27.0])


def test_rms_norm_by_hand():
    config = dataclasses.replace(CONFIG, rms_norm_eps=0.5)
    norm = RMSNorm(Scope(config, "norm"), 2, "norm")
    norm.scale.set_value(jnp.array([2.0, -1.0]))
    # mean square of [3, 4] = 12.5; + 0.5 = 13; no mean is subtracted
    np.testing.assert_allclose(
        norm(jnp.array([3.0, 4.0])), np.array([6.0, -4.0]) / np.sqrt(13.0), rtol=1e-6
    )


def test_rms_norm_takes_the_mean_in_float32():
    norm = RMSNorm(Scope(CONFIG, "norm"), 4096, "norm")
    norm.scale.set_value(jnp.ones(4096))
    x = jnp.full((4096,), 3.0, jnp.bfloat16)
    # The mean square summed in bfloat16 would stop growing at 9 * 256 / 4096; each normed value is
    # 1.
    np.testing.assert_array_equal(norm(x).astype(np.float32), np.ones(4096))
    assert norm(x).dtype == jnp.bfloat16


@both
def test_mlp_is_silu_gated(ops):
    mlp = MLP(Scope(ModelConfig("qwen3", 8, 4, 6, 1, 1, 1, 4), "mlp"))
    for seed, layer in enumerate((mlp.gate, mlp.up, mlp.down)):
        layer.kernel.set_value(
            jax.random.normal(jax.random.key(seed), layer.kernel.get_value().shape)
        )
    x = np.linspace(-1, 1, 4)
    gate, up, down = (
        np.asarray(layer.kernel.get_value(), np.float64) for layer in (mlp.gate, mlp.up, mlp.down)
    )
    hidden = x @ gate
    expected = (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down
    np.testing.assert_allclose(mlp(jnp.asarray(x, jnp.float32), ops), expected, rtol=1e-5)


@both
def test_rotary_by_hand(ops):
    # head_dim 4, theta 1e4: frequencies 1 and 0.01; pairs are (x0, x2) and (x1, x3), not neighbors
    config = ModelConfig("qwen3", 8, 4, 4, 1, 1, 1, 4, rope_theta=1e4)
    np.testing.assert_allclose(rotary_frequencies(config)[0], [1.0, 0.01], rtol=1e-7)
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    turned = ops.rotate(x, rotary_tables(config, jnp.array([[2]])))[0, 0, 0]
    c0 = np.cos(2.0)
    s0 = np.sin(2.0)
    c1 = np.cos(0.02)
    s1 = np.sin(0.02)
    np.testing.assert_allclose(
        turned, [1 * c0 - 3 * s0, 2 * c1 - 4 * s1, 3 * c0 + 1 * s0, 4 * c1 + 2 * s1], rtol=1e-6
    )


@both
def test_swiglu_gradient_by_hand(ops):
    # sigmoid(1) = s; d/dgate = up (s + gate s (1 - s)), d/dup = gate s; the cotangent 3 multiplies
    # both
    s = 1 / (1 + np.exp(-1.0))
    gate_bar, up_bar = jax.vjp(ops.swiglu, jnp.float32(1), jnp.float32(2))[1](jnp.float32(3))
    np.testing.assert_allclose([gate_bar, up_bar], [6 * (s + s * (1 - s)), 3 * s], rtol=1e-6)


@both
def test_norm_and_rotation_as_complex_numbers(ops):
    """Value and gradients of norm and rotation in one function, against autodiff.

    The reference is the norm and a product with e^(i angle).
    """
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 16))
    scale = jax.random.normal(jax.random.key(1), (3, 16))
    weights = jax.random.normal(jax.random.key(2), x.shape)
    positions = jnp.array([[0, 1, 2, 3, 4], [9, 7, 5, 3, 1]])
    angles = positions[..., None] * rotary_frequencies(CONFIG)[0]

    def plain(x, scale):
        normed = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 0.1) * scale
        turned = (
            jax.lax.complex(normed[..., :8], normed[..., 8:]) * jnp.exp(1j * angles)[:, :, None]
        )
        return jnp.sum(weights * jnp.concatenate([turned.real, turned.imag], axis=-1))

    def ours(x, scale):
        return jnp.sum(
            weights * ops.norm_and_rotate(x, scale, rotary_tables(CONFIG, positions), 0.1)
        )

    value, grads = jax.value_and_grad(ours, argnums=(0, 1))(x, scale)
    expected, expected_grads = jax.value_and_grad(plain, argnums=(0, 1))(x, scale)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=5e-6)


@both
def test_rotary_products_depend_on_distance_only(ops):
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 2, 1, 16))

    def product(first, second):
        tables = rotary_tables(CONFIG, jnp.array([[first, second]]))
        return jnp.sum(ops.rotate(query, tables)[:, 0] * ops.rotate(key, tables)[:, 1])

    np.testing.assert_allclose(product(3, 8), product(90, 95), rtol=2e-5)
    assert abs(product(3, 8) - product(3, 9)) > 1e-2


@pytest.mark.parametrize("rope", ["default", "linear", "yarn", "yarn_all_fields", "llama3"])
def test_rotary_tables_are_those_of_transformers(hf_config, rope):
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    source = hf_config("qwen3", rope=rope)
    source.head_dim = 128
    embedding = Qwen3RotaryEmbedding(source)
    config = from_hf(source.to_dict())
    frequencies, factor = rotary_frequencies(config)
    # The same bits but for torch's pow, which is now and then off by one: 1e-3 radians at position
    # 30,000 otherwise.
    np.testing.assert_array_max_ulp(frequencies, embedding.inv_freq.numpy(), maxulp=1)
    assert np.sum(frequencies != embedding.inv_freq.numpy()) <= 2
    assert factor == pytest.approx(embedding.attention_scaling, rel=1e-12)
    positions = np.array([[0, 1, 2, 63, 64, 255, 1000, 32767]])
    cos, sin = embedding(torch.zeros(1), torch.tensor(positions))
    ours = rotary_tables(config, jnp.asarray(positions, jnp.int32))
    # Two halves each: (cos, cos) and (-sin, sin).
    for mine, theirs, sign in zip(ours, (cos, sin), (1, -1), strict=True):
        np.testing.assert_allclose(mine[..., 0, :], sign * theirs.numpy()[..., :64], atol=3e-6)
        np.testing.assert_allclose(mine[..., 1, :], theirs.numpy()[..., 64:], atol=3e-6)


def test_scaled_frequencies_lie_between_plain_and_stretched(hf_config):
    plain = rotary_frequencies(from_hf(hf_config("qwen3").to_dict()))[0]
    for rope in ("yarn_all_fields", "llama3"):
        config = from_hf(hf_config("qwen3", rope=rope).to_dict())
        ratio = plain / rotary_frequencies(config)[0]
        # The fastest is kept, the slowest divided by the factor, and it never falls in between.
        assert ratio[0] == 1.0
        assert ratio[-1] == pytest.approx(config.rope_scaling.factor, rel=1e-6)
        assert np.all(np.diff(ratio) >= 0)
