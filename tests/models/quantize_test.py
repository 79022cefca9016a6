import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dcmdp_jax.engines.local.weights import in_precision
from dcmdp_jax.engines.registry import ENGINES
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.layers import kernel_matmul
from dcmdp_jax.models.params import init_params
from dcmdp_jax.models.quantize import (
    PRECISIONS,
    QuantizedKernel,
    dequantize,
    quantize_kernel,
)

CONFIG = ModelConfig(
    model_type="qwen2",
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    attention_bias=True,
    tie_word_embeddings=True,
)


def test_int8_hand_values():
    # Column 0: absmax 254, scale 2: 254 -> 127, -3 -> -1.5 -> -2 (half to even; half away from zero
    # gives -2 as well), 5 -> 2.5 -> 2 (half away would give 3). Column 1 is zero: scale 1, no 0 /
    # 0.
    kernel = jnp.array([[254.0, 0.0], [-3.0, 0.0], [5.0, 0.0]])
    values, scale = quantize_kernel(kernel, "int8")
    assert values.dtype == jnp.int8
    np.testing.assert_array_equal(values, [[127, 0], [-2, 0], [2, 0]])
    np.testing.assert_array_equal(scale, [2.0, 1.0])


def test_fp8_hand_values():
    # absmax 896, scale 2. 35 / 2 = 17.5 lies between 16 and 18 (3 fraction bits at 16: steps of 2):
    # 18. 34 / 2 = 17 is halfway: to even fraction, 16. 2^-9 is the smallest subnormal: 2^-8 / 2
    # stays.
    kernel = jnp.array([[896.0, 0.0], [35.0, 0.0], [34.0, 0.0], [-(2.0**-8), 0.0]])
    values, scale = quantize_kernel(kernel, "fp8")
    assert values.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(values.astype(jnp.float32)[:, 0], [448.0, 18.0, 16.0, -(2.0**-9)])
    np.testing.assert_array_equal(values.astype(jnp.float32)[:, 1], [0.0] * 4)
    np.testing.assert_array_equal(scale, [2.0, 1.0])


def test_int4_hand_values():
    # absmax 14, scale 2: 14 -> 7, -13 -> -6.5 -> -6 (half to even), 5 -> 2.5 -> 2. -8 is never
    # used.
    values, scale = quantize_kernel(jnp.array([[14.0, -1.75], [-13.0, 0.875], [5.0, 0.2]]), "int4")
    assert values.dtype == jnp.int8
    np.testing.assert_array_equal(values[:, 0], [7, -6, 2])
    np.testing.assert_array_equal(values[:, 1], [-7, 4, 1])  # by 0.25: -7, 3.5 -> 4, 0.8 -> 1
    np.testing.assert_allclose(scale, [2.0, 0.25], rtol=0)


@pytest.fixture
def kernel() -> jax.Array:
    # Columns over nine orders of magnitude: per-tensor scales would miss the bounds.
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=(96, 40)) * 10.0 ** rng.integers(-6, 4, 40), jnp.float32)


@pytest.mark.parametrize(
    ("precision", "limit"), [("int8", 127), ("int4", 7), ("int3", 3), ("int2", 1)]
)
def test_integer_error_is_at_most_half_a_step(kernel, precision, limit):
    values, scale = jax.jit(quantize_kernel, static_argnums=1)(kernel, precision)
    error = np.abs(
        np.asarray(kernel, np.float64)
        - np.asarray(values, np.float64) * np.asarray(scale, np.float64)
    )
    # The quotient W / scale itself rounds: limit * 2^-24 of a step.
    assert (error <= np.asarray(scale) * (0.5 + limit * 2.0**-24)).all()
    assert (np.abs(np.asarray(values)).max(axis=0) == limit).all()


def test_fp8_relative_error_is_at_most_one_sixteenth(kernel):
    values, scale = jax.jit(quantize_kernel, static_argnums=1)(kernel, "fp8")
    wide = np.asarray(kernel, np.float64)
    error = np.abs(wide - np.asarray(values).astype(np.float64) * np.asarray(scale, np.float64))
    bound = np.maximum(np.abs(wide) * 2.0**-4, 2.0**-10 * np.asarray(scale, np.float64))
    assert (error <= bound * (1 + 1e-6)).all()
    # The very values of an independent cast: no double rounding on the way.
    scaled = np.asarray(kernel) / np.asarray(scale)
    expected = scaled.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_extreme_columns_stay_finite(precision):
    # 1e-40 is subnormal: its scale would flush to 0 and the quotient to infinity. 3e38 is near the
    # top.
    kernel = jnp.array([[1e-40, 3e38, 1e-30], [0.0, -3e38, -1e-30]], jnp.float32)
    values, scale = quantize_kernel(kernel, precision)
    product = np.asarray(values.astype(jnp.float32) * scale, np.float64)
    assert np.isfinite(product).all()
    np.testing.assert_array_equal(product[:, 0], [0, 0])
    np.testing.assert_allclose(product[:, 1:], np.asarray(kernel)[:, 1:], rtol=1e-6)


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matmul_equals_that_of_dequantized_weights(kernel, precision, dtype):
    quantized = quantize_kernel(kernel, precision)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 96)), dtype)
    wide = np.asarray(quantized.values).astype(np.float64) * np.asarray(quantized.scale, np.float64)
    expected = np.asarray(x).astype(np.float64) @ wide
    size = np.abs(np.asarray(x).astype(np.float64)) @ np.abs(wide)
    for weights in (quantized, dequantize({"kernel": quantized}, dtype)["kernel"]):
        product = kernel_matmul(x, weights)
        assert product.dtype == dtype
        bound = 1e-5 * size + (2.0**-8 * np.abs(expected) if dtype == jnp.bfloat16 else 0)
        assert (np.abs(np.asarray(product, np.float64) - expected) <= bound).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dequantization_is_exact(dtype):
    every_fp8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    every_fp8 = every_fp8[np.isfinite(every_fp8.astype(np.float32))]
    for values in (every_fp8, np.arange(-127, 128, dtype=np.int8)):
        kernel = QuantizedKernel(jnp.asarray(values)[:, None], jnp.ones(1))
        wide = jax.jit(dequantize, static_argnums=1)({"kernel": kernel}, dtype)["kernel"].values
        assert wide.dtype == dtype
        np.testing.assert_array_equal(
            np.asarray(wide)[:, 0].astype(np.float64), values.astype(np.float64)
        )


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("tied", [True, False])
def test_tree_has_every_matrix_quantized_per_layer_and_nothing_else(precision, tied):
    config = CONFIG if tied else ModelConfig(**{**vars(CONFIG), "tie_word_embeddings": False})
    params = init_params(config, jax.random.key(0))
    # Layer 1 is ten times layer 0: a scale shared by the layers would be ten times too coarse for
    # layer 0.
    params["layers"] = jax.tree.map(
        lambda x: x * jnp.array([1.0, 10.0]).reshape(2, *[1] * (x.ndim - 1)), params["layers"]
    )
    tree = in_precision(params, config, precision)
    np.testing.assert_array_equal(tree["embedding"], params["embedding"])
    np.testing.assert_array_equal(tree["norm"]["scale"], params["norm"]["scale"])
    layers = tree["layers"]
    original = params["layers"]
    np.testing.assert_array_equal(
        layers["attention"]["q"]["bias"], original["attention"]["q"]["bias"]
    )
    matrices = [
        (layers["attention"][n]["kernel"], original["attention"][n]["kernel"]) for n in "qkvo"
    ]
    matrices += [
        (layers["mlp"][n]["kernel"], original["mlp"][n]["kernel"]) for n in ("gate", "up", "down")
    ]
    matrices.append((tree["output"], params["embedding"].T if tied else params["output"]))
    limit = {"int8": 127, "int4": 7, "fp8": 448}[precision]
    for quantized, plain in matrices:
        assert quantized.values.dtype == (jnp.float8_e4m3fn if precision == "fp8" else jnp.int8)
        assert quantized.values.shape == plain.shape
        expected = np.abs(np.asarray(plain, np.float64)).max(axis=-2) / limit
        np.testing.assert_allclose(quantized.scale, expected, rtol=1e-6)
        wide = (
            np.asarray(quantized.values).astype(np.float64)
            * np.asarray(quantized.scale)[..., None, :]
        )
        # W / scale is up to 127 and rounded to float32: an error of 2^-18 before it is rounded to a
        # whole number.
        step = 2.0**-4 if precision == "fp8" else (0.5 + 2.0**-18) / limit
        assert (
            np.abs(wide - np.asarray(plain))
            <= step * np.abs(np.asarray(plain)).max(-2, keepdims=True)
        ).all()


def test_settings_name_the_same_precisions():
    assert ENGINES["local"].quantized == PRECISIONS
    assert ENGINES["local"].precisions == ("exact", "float32", "bfloat16", "float16", *PRECISIONS)


def test_unknown_precision_is_refused():
    with pytest.raises(
        ValueError, match="precision: got 'int1', quantized ones are int8, int4, int3, int2, fp8"
    ):
        quantize_kernel(jnp.ones((2, 2)), "int1")
