"""Formats with a scale for each group of inputs, by hand and in engines.

The arithmetic is qwix's.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.weights import engine_shapes
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.engines.registry import ENGINES
from dcmdp_jax.errors import ArgumentError
from dcmdp_jax.models import scheme
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params
from dcmdp_jax.models.quantize import PRECISIONS, in_float32, quantize_kernel, round_inputs
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.models.scheme import FULL, GROUPED, Scheme, check_grouped
from dcmdp_jax.parallel.mesh import AXES
from tests.support.sampling import local_engine, sample
from tests.support.step_runs import LENGTH, PROMPT, make_model, unpacked_rows

pytest.importorskip("qwix", reason="the extra qwix is not installed")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MODEL = dataclasses.replace(
    make_model(True),
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=256,
    initializer_range=0.08,
)


def _nearest(x, grid):
    """The nearest value of `grid`, of both signs.

    Between two the one at an even place, as e2m1 has an even mantissa there.
    """
    magnitude = np.abs(x)[..., None]
    ends = (grid[1:] + grid[:-1]) / 2
    place = np.sum(magnitude > ends, axis=-1)
    tie = np.any(magnitude == ends, axis=-1)
    return np.copysign(grid[np.where(tie & (place % 2 == 1), place + 1, place)], x)


def _in_groups(w, size):
    return w.reshape(-1, size, w.shape[1])


def _integer(x, _):
    return np.clip(np.rint(x), -8, 7)


def _by_hand(w, precision):
    """W over its scale and the scale, [groups, size, out] and [groups, 1, out] in float32."""
    form = GROUPED[precision]
    if precision == "nvfp4":
        largest = np.abs(w).max()
        groups = _in_groups(w * (np.float32(6 * 448) / largest), form.size)
        # e4m3: 448 for the group that holds the largest weight.
        scale = (np.abs(groups).max(axis=1, keepdims=True) / np.float32(6)).astype(
            ml_dtypes.float8_e4m3fn
        )
        scale = scale.astype(np.float32)
        return groups / scale, scale * (largest / np.float32(6 * 448))
    groups = _in_groups(w, form.size)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    if precision == "mxfp4":
        # The least power of two 2^k with max |w| <= 6 2^k: max = f 2^e, f in [1 / 2, 1), so k = e -
        # 3 if f <= 3 / 4.
        fraction, exponent = np.frexp(largest)
        scale = np.ldexp(np.float32(1), exponent - 3 + (fraction > 0.75))
    else:
        scale = largest / np.float32(7.5)
    return groups / scale, scale


@pytest.mark.parametrize("precision", ["mxfp4", "nvfp4", "int4_g32", "int4_g128"])
@pytest.mark.parametrize("std", [1.0, 0.02])
def test_values_and_scales_are_those_derived_in_numpy(precision, std):
    """Equal to qwix to the bit but for ties.

    -7.5, one in 64 in groups of 32, becomes -7 or -8 by a last digit of its scale (XLA may multiply
    by 1 / 7.5), and XLA without optimization, as tests run it, goes to e2m1 through float16.
    """
    w = np.random.default_rng(0).normal(scale=std, size=(256, 48)).astype(np.float32)
    found = jax.jit(quantize_kernel, static_argnums=1)(w, precision)
    size = GROUPED[precision].size
    quotient, scale = _by_hand(w, precision)
    rounded = _integer if "int" in precision else _nearest
    values = _in_groups(np.asarray(found.values, np.float32), size)
    below, exact, above = (
        rounded(quotient * np.float32(1 + off), E2M1) for off in (-(2.0**-11), 0, 2.0**-11)
    )
    assert ((values == exact) | (values == below) | (values == above)).all() and (
        values == exact
    ).mean() > 0.98
    np.testing.assert_allclose(
        np.asarray(found.scale)[:, None], scale, rtol=0 if "mx" in precision else 2.0**-22
    )
    np.testing.assert_allclose(
        _in_groups(np.asarray(in_float32(found)), size), values * scale, rtol=2.0**-21
    )


def test_a_power_of_two_is_the_scale_where_the_largest_weight_is_six_of_them():
    """The scale's logarithm is exact at max |w| = 6 2^k.

    One that is off by a rounding doubles the scale, as qwix's does at 2^-13.
    """
    powers = np.arange(-8, 9)
    w = np.zeros((32, powers.size), np.float32)
    w[0], w[1] = 6.0 * 2.0**powers, 0.5 * 2.0**powers
    found = jax.jit(quantize_kernel, static_argnums=1)(w, "mxfp4")
    np.testing.assert_array_equal(found.scale[0], 2.0**powers)
    np.testing.assert_array_equal(in_float32(found), w)


@pytest.mark.parametrize(
    ("precision", "error"),
    [
        ("mxfp8", 2.65),
        ("mxfp4", 11.7),
        ("nvfp4", 9.5),
        ("nf4", 9.2),
        ("int4_g32", 9.5),
        ("int4_g128", 11.1),
    ],
)
def test_errors_of_gaussian_weights(precision, error):
    w = jax.random.normal(jax.random.key(0), (2, 1280, 256)) * 0.03
    off = in_float32(jax.jit(quantize_kernel, static_argnums=1)(w, precision)) - w
    assert 100 * math.sqrt(jnp.sum(off**2) / jnp.sum(w**2)) == pytest.approx(error, rel=0.02)


def test_a_group_of_zeros_and_a_layer_of_zeros_stay_zero_and_one_layer_does_not_change_another():
    w = (
        jax.random.normal(jax.random.key(0), (3, 128, 8))
        * jnp.array([1e-3, 1.0, 0.0])[:, None, None]
    )
    w = w.at[0, :64].set(0)
    for precision in GROUPED:
        whole = in_float32(quantize_kernel(w, precision))
        assert not np.any(whole[0, :64]) and not np.any(whole[2])
        np.testing.assert_array_equal(whole[0], in_float32(quantize_kernel(w[0], precision)))
        assert jnp.max(jnp.abs(whole[0] - w[0])) < 2e-3


def test_inputs_are_rounded_token_by_token_with_a_straight_gradient():
    x = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32) * np.array(
        [[1], [100], [1e-3], [1], [1]]
    )
    x = x.astype(np.float32)
    for precision, column in (("nvfp4_w4a4", "nvfp4"), ("mxfp8_w8a8", "mxfp8")):
        rounded = round_inputs(jnp.asarray(x), precision)
        alone = [in_float32(quantize_kernel(jnp.asarray(row)[:, None], column))[:, 0] for row in x]
        np.testing.assert_array_equal(rounded, np.stack(alone))
        gradient = jax.grad(lambda x, p=precision: jnp.sum(round_inputs(x, p) * jnp.arange(64.0)))(
            jnp.asarray(x)
        )
        np.testing.assert_array_equal(gradient, np.broadcast_to(np.arange(64.0), x.shape))


def test_a_weight_takes_a_byte_and_its_share_of_a_scale():
    for precision, bytes_each in (
        ("nvfp4", 1 + 4 / 16),
        ("mxfp4", 1 + 4 / 32),
        ("nf4", 1 + 4 / 64),
    ):
        mlp = engine_shapes(MODEL, precision)["layers"][0]["mlp"]
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(mlp))
        assert held == 3 * 128 * 256 * bytes_each


@pytest.mark.parametrize("precision", list(GROUPED))
def test_decoding_agrees_with_the_matched_forward_to_rounding(precision):
    params = init_params(MODEL, jax.random.key(0))
    engine = local_engine(
        MODEL, precision=precision, compute_dtype="float32", max_total_tokens=LENGTH
    )
    engine.sync_weights(params, 0)
    prompts = list(np.random.default_rng(0).integers(0, 31, (2, PROMPT)).astype(np.int32))
    sampling = SamplingParams(
        group_size=2, max_completion_tokens=LENGTH - PROMPT, stop_token_ids=()
    )
    found = sample(engine, prompts, sampling, seed=0, step=0)
    engine.close()
    ids = np.stack(
        [np.concatenate(each) for each in zip(found.prompt_ids, found.completion_ids, strict=True)]
    )
    apart = {}
    for matched in (FULL, Scheme(weights=precision)):
        row_logprobs = make_row_logprobs(
            MODEL, Compute(one_segment=True), temperature=1.0, mesh=None, scheme=matched
        )
        logprobs = jax.jit(row_logprobs)(params, unpacked_rows(ids))[0][:, PROMPT:]
        apart[matched.weights] = np.abs(
            np.exp(logprobs) - np.exp(np.stack(found.rollout_logprobs))
        ).mean()
    # Where inputs are rounded too, a last digit decides some ties, and a step of e2m1 is large.
    assert (
        apart[precision] < (0.1 * apart[""] if GROUPED[precision].rounds_inputs else 1e-6)
        and apart[""] > 1e-4
    )


def test_two_devices_of_a_tensor_group_hold_the_values_of_one():
    params = init_params(MODEL, jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, 31, (2, LENGTH)).astype(np.int32)
    scored = []
    prints = []
    for mesh in (None, Mesh(np.asarray(jax.devices()[:2]).reshape(1, 1, 2, 1), AXES)):
        engine = local_engine(
            MODEL, precision="nvfp4", compute_dtype="float32", max_total_tokens=LENGTH, mesh=mesh
        )
        engine.sync_weights(params, 0)
        prints.append(engine.weights_fingerprint)
        scored.append(
            engine.score([row[:2] for row in ids], [row[2:] for row in ids], temperature=1.0)
        )
        engine.close()
    assert prints[0] == prints[1]
    np.testing.assert_allclose(scored[0], scored[1], atol=1e-5)


@pytest.mark.parametrize("precision", [*PRECISIONS, "float32", "cache"])
def test_every_format_gives_on_two_and_four_devices_what_it_gives_on_one(precision):
    """Compared with one matched pass, on a mesh.

    With scales of activations by device, nvfp4_w4a4 was 6e-3 from it on two.
    """
    model = dataclasses.replace(
        MODEL, num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=512
    )
    params = init_params(model, jax.random.key(0))
    cache = "fp8" if precision == "cache" else ""
    settings = (
        {"precision": "float32", "kv_cache_dtype": "fp8"} if cache else {"precision": precision}
    )
    matched = Scheme(weights=precision if precision in PRECISIONS else "", cache=cache)
    row_logprobs = make_row_logprobs(
        model, Compute(one_segment=True), temperature=1.0, mesh=None, scheme=matched
    )
    prompts = list(np.random.default_rng(0).integers(0, 31, (2, PROMPT)).astype(np.int32))
    sampling = SamplingParams(
        group_size=2, max_completion_tokens=LENGTH - PROMPT, stop_token_ids=()
    )
    # Where inputs or the cache are rounded, a last digit of a sum decides some ties.
    ties = cache or (precision in GROUPED and GROUPED[precision].rounds_inputs)
    for devices in (1, 2, 4):
        mesh = Mesh(np.asarray(jax.devices()[:devices]).reshape(1, 1, devices, 1), AXES)
        engine = local_engine(
            model, compute_dtype="float32", max_total_tokens=LENGTH, mesh=mesh, **settings
        )
        engine.sync_weights(params, 0)
        found = sample(engine, prompts, sampling, seed=0, step=0)
        engine.close()
        ids = np.stack(
            [
                np.concatenate(each)
                for each in zip(found.prompt_ids, found.completion_ids, strict=True)
            ]
        )
        expected = np.exp(jax.jit(row_logprobs)(params, unpacked_rows(ids))[0][:, PROMPT:])
        apart = np.abs(expected - np.exp(np.stack(found.rollout_logprobs))).mean()
        assert apart < (1e-3 if ties else 1e-6), f"{devices} devices: {apart:.2g}"


def test_a_recurrent_width_that_groups_do_not_divide_is_refused_by_name():
    recurrent = dataclasses.replace(
        MODEL,
        model_type="qwen3_5_text",
        recurrent_layers=(0,),
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=24,
        linear_value_head_dim=24,
    )
    name = "linear_num_value_heads x linear_value_head_dim=48"
    with pytest.raises(ArgumentError, match=f"whose groups of 32 do not divide {name}"):
        check_grouped("mxfp4", recurrent, 1)
    check_grouped("nvfp4", recurrent, 1)


def test_groups_that_do_not_divide_and_experts_are_refused_by_name():
    odd = dataclasses.replace(
        MODEL, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536
    )
    check_grouped("nf4", odd, 3)
    with pytest.raises(
        ArgumentError, match="got 'int4_g128', whose groups of 128 do not divide hidden_size=576"
    ):
        check_grouped("int4_g128", odd, 1)
    with pytest.raises(
        ArgumentError, match="groups of 32 do not divide num_heads x head_dim=16 of each device"
    ):
        check_grouped("mxfp4", MODEL, 8)
    experts = dataclasses.replace(
        MODEL,
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    with pytest.raises(
        ArgumentError, match="'nvfp4_w4a4', which rounds inputs of dense layers alone; choose nvfp4"
    ):
        check_grouped("nvfp4_w4a4", experts, 1)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    kind = ENGINES["local"]
    arguments = EngineArguments(
        model=MODEL, precision="mxfp4", max_total_tokens=LENGTH, settings=kind.settings()
    )
    kind.check(arguments)
    monkeypatch.setattr(scheme, "find_spec", lambda name: None)
    with pytest.raises(
        ArgumentError,
        match=r"got 'mxfp4', which needs qwix: pip install 'PATH_OF_A_CHECKOUT\[qwix\]'",
    ):
        kind.check(arguments)
    kind.check(dataclasses.replace(arguments, precision="int4"))
