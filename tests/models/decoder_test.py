"""The decoder against transformers in float32, and what must not change its values."""

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.models import decoder, layer_params
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.hf_config import from_hf, read_model_config
from dcmdp_jax.models.hf_weights import hf_tensors, load_params
from dcmdp_jax.models.layers import rotary_tables
from dcmdp_jax.models.logprobs import LogprobOptions, token_logprobs
from dcmdp_jax.models.ops import CPU
from dcmdp_jax.models.params import init_params, logical_axes, num_params, param_shapes
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.run.placement import compute_on
from tests.support.refusals import refused

TEMPERATURE = 0.7
Directory = Callable[..., tuple[Any, Path]]
Pack = Callable[..., dict[str, jax.Array]]


def _forward(params, config, rows, compute):
    """Hidden states and log-probs."""
    inputs = decoder.DecoderInputs(
        input_ids=rows["input_ids"],
        position_ids=rows["position_ids"],
        segment_ids=rows["segment_ids"],
    )
    hidden = decoder.hidden_states(params, config, inputs, compute)
    kernel = decoder.output_kernel(params)
    options = LogprobOptions(temperature=TEMPERATURE, chunk=compute.logprob_chunk, ops=CPU)
    logprobs, _ = token_logprobs(hidden, kernel, rows["input_ids"], rows["mask"], options=options)
    return hidden, logprobs


def _logprob_sum(params, config, rows, compute, weights):
    """Weighted sum of the log-probs, and the log-probs.

    Weights differ so that no token's error hides.
    """
    logprobs = _forward(params, config, rows, compute)[1]
    return jnp.sum(logprobs * weights), logprobs


_jit_forward = jax.jit(_forward, static_argnames=("config", "compute"))
_value_and_grad = jax.jit(
    jax.value_and_grad(_logprob_sum, has_aux=True), static_argnames=("config", "compute")
)


def _assert_trees_close(have, want, *, relative):
    """Every leaf, against its own largest entry."""
    for (path, mine), theirs in zip(
        jax.tree_util.tree_leaves_with_path(have), jax.tree.leaves(want), strict=True
    ):
        error = float(jnp.abs(mine - theirs).max() / jnp.abs(theirs).max())
        assert error < relative, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize(
    ("family", "tied", "bias", "rope"),
    [
        ("qwen2", True, True, "default"),
        ("qwen2", False, True, "yarn"),
        ("qwen3", True, True, "default"),
        ("qwen3", False, False, "default"),
        ("qwen3", False, False, "linear"),
        ("qwen3", False, False, "yarn"),
        ("qwen3", False, False, "yarn_all_fields"),
        ("qwen3", False, False, "llama3"),
        ("llama", False, False, "llama3"),
        ("llama", True, True, "default"),
    ],
)
def test_forward_equals_transformers(hf_directory, pack, family, tied, bias, rope):
    """Hidden states, logits and log-probs in float32.

    Measured at 4e-6 to 8e-6 on logits of deviation 1.
    """
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    model, directory = hf_directory(family, tied=tied, rope=rope, bias=bias)
    config = read_model_config(directory)
    params = load_params(directory, config, dtype="float32")
    ids = np.random.default_rng(0).integers(0, 97, (2, 100))
    with torch.no_grad():
        theirs = model(torch.tensor(ids), output_hidden_states=True)
        reference = torch.log_softmax(theirs.logits / TEMPERATURE, -1)
        reference = reference[:, :-1].gather(2, torch.tensor(ids)[:, 1:, None])[..., 0].numpy()
    rows = pack([[ids[0]], [ids[1]]], 100)
    hidden, logprobs = _jit_forward(params, config, rows, Compute(logprob_chunk=16))
    np.testing.assert_allclose(hidden, theirs.hidden_states[-1].numpy(), atol=3e-5)
    np.testing.assert_allclose(
        hidden @ decoder.output_kernel(params), theirs.logits.numpy(), atol=3e-5
    )
    assert theirs.logits.std() > 0.5  # far from the uniform distribution, where anything agrees
    np.testing.assert_allclose(logprobs[:, 1:], reference, atol=3e-5)
    assert not np.any(logprobs[:, 0])


@pytest.mark.parametrize(("family", "tied"), [("qwen2", False), ("qwen3", True)])
def test_gradients_equal_torch(hf_directory, pack, family, tied):
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    model, directory = hf_directory(family, tied=tied, bias=True)
    config = read_model_config(directory)
    params = load_params(directory, config, dtype="float32")
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 97, (2, 32))
    weights = rng.normal(size=(2, 32)).astype(np.float32)
    logprobs = torch.log_softmax(model(torch.tensor(ids)).logits / TEMPERATURE, -1)
    chosen = logprobs[:, :-1].gather(2, torch.tensor(ids)[:, 1:, None])[..., 0]
    (chosen * torch.tensor(weights[:, 1:])).sum().backward()
    rows = pack([[ids[0]], [ids[1]]], 32)
    (_, _), grads = _value_and_grad(
        params, config, rows, Compute(logprob_chunk=16), jnp.asarray(weights)
    )
    theirs = dict(model.named_parameters())
    for name, place in hf_tensors(config).items():
        mine: Any = grads
        for key in place.path:
            mine = mine[key]
        mine = mine[place.index]
        want = theirs[name].grad.numpy()
        # softmax does not see a shift of all scores: the gradient of the key bias is 0 up to
        # rounding without rotary embedding, and small with it, so the scale is that of the whole
        # gradient where the leaf's own is smaller.
        scale = max(np.abs(want).max(), 1e-2)
        np.testing.assert_allclose(
            mine.T if place.transposed else mine, want, atol=2e-5 * scale, err_msg=name
        )


def test_positions_far_out_equal_transformers(hf_directory, pack):
    """Frequencies off by a unit in the last place give 1e-3 at position 30,000, not 1e-5."""
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    model, directory = hf_directory("qwen3")
    config = read_model_config(directory)
    params = load_params(directory, config, dtype="float32")
    ids = np.random.default_rng(0).integers(0, 97, (1, 40))
    # Gaps make distances large too: what counts is the difference of positions.
    positions = np.cumsum(np.random.default_rng(1).integers(1, 1500, (1, 40)), axis=1)
    with torch.no_grad():
        want = model(torch.tensor(ids), position_ids=torch.tensor(positions)).logits.numpy()
    rows = pack([[ids[0]]], 40) | {"position_ids": jnp.asarray(positions, jnp.int32)}
    hidden, _ = _jit_forward(params, config, rows, Compute())
    assert positions.max() > 25_000
    np.testing.assert_allclose(hidden @ decoder.output_kernel(params), want, atol=1e-4)


def _segments():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 97, length) for length in (7, 12, 5)]


BOUNDS = [(0, 7), (7, 19), (19, 24)]


def test_packed_equals_one_to_a_row(tiny_model, pack):
    """Three segments in one row against three rows: same log-probs, same gradients."""
    config, params = tiny_model
    segments = _segments()
    packed = pack([segments, [], []], 24)
    apart = pack([[segment] for segment in segments], 24)
    weights = np.zeros((3, 24), np.float32)
    weights[0] = np.random.default_rng(5).normal(size=24)
    spread = np.zeros((3, 24), np.float32)
    for row, (start, stop) in enumerate(BOUNDS):
        spread[row, : stop - start] = weights[0, start:stop]
    (value, logprobs), grads = _value_and_grad(params, config, packed, Compute(), weights)
    (other, expected), expected_grads = _value_and_grad(params, config, apart, Compute(), spread)
    assert float(value) == pytest.approx(float(other), rel=2e-6)
    for row, (start, stop) in enumerate(BOUNDS):
        np.testing.assert_allclose(
            logprobs[0, start:stop], expected[row, : stop - start], atol=5e-6
        )
    _assert_trees_close(grads, expected_grads, relative=2e-5)


def test_packed_segments_do_not_see_each_other(tiny_model, pack):
    config, params = tiny_model
    segments = _segments()
    changed = [segments[0], (segments[1] + 1) % 97, segments[2]]
    first, second = (
        _jit_forward(params, config, pack([rows], 24), Compute())[1][0]
        for rows in (segments, changed)
    )
    np.testing.assert_array_equal(first[:7], second[:7])
    np.testing.assert_array_equal(first[19:], second[19:])
    assert np.all(first[8:19] != second[8:19])


def test_padding_changes_nothing(tiny_model, pack):
    """Longer rows, more rows, and any token ids under the padding."""
    config, params = tiny_model
    segments = _segments()
    plain = pack([segments[:2]], 19)
    padded = pack([segments[:2], [], []], 24)
    padded["input_ids"] = jnp.where(padded["segment_ids"] == 0, 96, padded["input_ids"])
    weights = np.random.default_rng(5).normal(size=(1, 19)).astype(np.float32)
    wide = np.pad(weights, ((0, 2), (0, 5)), constant_values=7.0)
    (value, logprobs), grads = _value_and_grad(params, config, plain, Compute(), weights)
    (other, more), other_grads = _value_and_grad(params, config, padded, Compute(), wide)
    # Terms of up to 10 that cancel: their rounding does not shrink with the sum.
    assert float(value) == pytest.approx(float(other), abs=2e-5)
    np.testing.assert_allclose(more[:1, :19], logprobs, atol=5e-6)
    assert not np.any(more[1:])
    assert not np.any(more[0, 19:])
    _assert_trees_close(other_grads, grads, relative=2e-5)


@pytest.mark.parametrize(
    "setting", [{"one_segment": True}, {"scan_unroll": 2}, {"scan_unroll": 3}], ids=str
)
def test_how_it_runs_changes_nothing(tiny_model, pack, setting):
    """One segment to a row, and unrolled scans over three layers.

    Unrolled by two, which leaves one over, and by all.
    """
    config, params = tiny_model
    rows = pack([[segment] for segment in _segments()], 24)
    weights = np.random.default_rng(5).normal(size=(3, 24)).astype(np.float32)
    (_, logprobs), grads = _value_and_grad(params, config, rows, Compute(), weights)
    (_, other), other_grads = _value_and_grad(params, config, rows, Compute(**setting), weights)
    np.testing.assert_allclose(other, logprobs, atol=5e-6)
    _assert_trees_close(other_grads, grads, relative=2e-5)


def test_a_cpu_scans_more_than_eight_layers_with_the_values_and_gradients_of_unrolled_ones(
    tiny_model, pack
):
    config, params = tiny_model
    config = dataclasses.replace(config, num_layers=9)
    layers = jax.tree.map(lambda x: jnp.tile(x, (3,) + (1,) * (x.ndim - 1)), params["layers"])
    settings = from_config_dict(base.get_config("debug"))
    mesh = make_mesh(devices=jax.devices()[:1])
    chosen = [compute_on(settings, mesh, layers=count).scan_unroll for count in (3, 8, 9, 30)]
    assert chosen == [8, 8, 1, 1]
    arguments = (
        params | {"layers": layers},
        config,
        pack([[segment] for segment in _segments()], 24),
    )
    weights = np.random.default_rng(5).normal(size=(3, 24)).astype(np.float32)
    (_, logprobs), grads = _value_and_grad(*arguments, Compute(scan_unroll=chosen[2]), weights)
    (_, other), other_grads = _value_and_grad(*arguments, Compute(scan_unroll=9), weights)
    np.testing.assert_allclose(other, logprobs, atol=5e-6)
    _assert_trees_close(other_grads, grads, relative=2e-5)


def test_a_gpu_without_remat_has_no_loop_over_layers():
    def chosen(remat, **shape):
        devices = np.full((*shape.values(), 1), types.SimpleNamespace(platform="gpu"))
        mesh = types.SimpleNamespace(
            devices=devices, size=devices.size, shape={"data": 1, "fsdp": 1} | shape
        )
        settings = base.get_config("debug")
        settings.model.remat = remat
        return compute_on(from_config_dict(settings), mesh, layers=28).scan_unroll

    assert [chosen(remat, data=1) for remat in ("none", "dots", "full")] == [28, 1, 1]
    # Parameters that are split are gathered layer by layer.
    assert [chosen("none", data=8), chosen("none", fsdp=8)] == [28, 1]


def test_layers_of_a_gpu_have_the_values_and_gradients_of_a_loop_without_one(
    tiny_model, pack, monkeypatch
):
    config, params = tiny_model
    rows = pack([[segment] for segment in _segments()], 24)
    weights = np.random.default_rng(5).normal(size=(3, 24)).astype(np.float32)
    (_, logprobs), grads = _value_and_grad(params, config, rows, Compute(), weights)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for layers in (1, config.num_layers):
        (_, other), other_grads = _value_and_grad(
            params, config, rows, Compute(scan_unroll=layers), weights
        )
        np.testing.assert_allclose(other, logprobs, atol=5e-6)
        _assert_trees_close(other_grads, grads, relative=2e-5)


def test_rematerialization_changes_memory_only(tiny_model, pack):
    config, params = tiny_model
    config = dataclasses.replace(config, num_layers=12)
    layers = jax.tree.map(
        lambda leaf: jnp.tile(leaf, (4,) + (1,) * (leaf.ndim - 1)), params["layers"]
    )
    rows = pack([[np.arange(64)]] * 8, 64)
    weights = jnp.ones((8, 64))
    memory = {}
    results = {}
    for remat in ("none", "dots", "full"):
        arguments = (params | {"layers": layers}, config, rows, Compute(remat=remat), weights)
        compiled = _value_and_grad.lower(*arguments).compile()
        memory[remat] = compiled.memory_analysis().temp_size_in_bytes
        results[remat] = compiled(arguments[0], rows, weights)
    (_, logprobs), grads = results["none"]
    for remat in ("dots", "full"):
        (_, other), other_grads = results[remat]
        np.testing.assert_allclose(other, logprobs, atol=5e-6)
        _assert_trees_close(other_grads, grads, relative=2e-5)
    assert memory["full"] < memory["dots"] < memory["none"]
    assert memory["full"] < 0.5 * memory["none"]


def test_on_a_gpu_only_what_is_elementwise_is_computed_twice(tiny_model, pack, monkeypatch):
    """Rematerialization has the same products and gradients, and keeps less for them."""
    config, params = tiny_model
    rows = pack([[np.arange(64)]] * 8, 64)
    weights = jnp.ones((8, 64))

    def compiled(platform, remat):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        arguments = params, config, rows, Compute(remat=remat, attention="xla"), weights
        gradient = jax.jit(jax.value_and_grad(_logprob_sum, has_aux=True), static_argnums=(1, 3))
        lowered = gradient.lower(*arguments)
        monkeypatch.undo()
        program = lowered.compile()
        return (
            lowered.as_text().count("dot_general"),
            program.memory_analysis().temp_size_in_bytes,
            program,
        )

    # "tpu" has the same operations in plain JAX, and no checkpoint.
    (products, memory, program), (all_products, all_memory, whole) = (
        compiled("gpu", "none"),
        compiled("tpu", "none"),
    )
    assert products == all_products < compiled("gpu", "full")[0]
    assert memory < 0.75 * all_memory
    (_, logprobs), grads = program(params, rows, weights)
    (_, other), other_grads = whole(params, rows, weights)
    np.testing.assert_allclose(other, logprobs, atol=5e-6)
    _assert_trees_close(other_grads, grads, relative=2e-5)


def _layers(params):
    """The parameters of each layer."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(3)]


def test_scan_equals_blocks_one_by_one(tiny_model, pack):
    """`block_of` over the layers and `final_norm` against the scanned forward pass.

    Engines use them.
    """
    config, params = tiny_model
    rows = pack([[np.arange(20)]], 20)
    x = params["embedding"][rows["input_ids"]]
    rotary = rotary_tables(config, rows["position_ids"])

    def attend(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True), key

    layers = _layers(params)
    assert len(layers) == 3
    for layer in layers:
        x, key, aux = decoder.block_of(layer, config)(x, rotary, attend, CPU)
        assert aux == {}
        assert key.shape == (1, 20, 2, 16)
    hidden, _ = _jit_forward(params, config, rows, Compute())
    np.testing.assert_allclose(decoder.final_norm(params, config, x), hidden, atol=5e-6)


@pytest.mark.parametrize("mlp", [False, True])
def test_merged_projections_are_the_same_layer(tiny_model, mlp):
    """Values and the gradients of every parameter.

    Biases and head norms among them where the model has them.
    """
    config, params = tiny_model
    layer = jax.tree.map(
        lambda x: x + 0.01 * jnp.arange(x.size).reshape(x.shape) / x.size, _layers(params)[1]
    )
    x = jax.random.normal(jax.random.key(3), (2, 7, config.hidden_size))
    rotary = rotary_tables(config, jnp.arange(14).reshape(2, 7))

    def attend(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True), None

    def loss(layer, x, merged):
        used = layer_params.fuse_projections(layer, mlp=mlp) if merged else layer
        assert ("qkv" in used["attention"], "gate_up" in used["mlp"]) == (merged, merged and mlp)
        return jnp.sum(jnp.sin(decoder.block_of(used, config)(x, rotary, attend, CPU)[0]))

    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(layer, x, False)
    merged, merged_grads = jax.value_and_grad(loss, argnums=(0, 1))(layer, x, True)
    np.testing.assert_allclose(merged, value, rtol=1e-5)
    _assert_trees_close(merged_grads, grads, relative=2e-5)


def test_bfloat16_compute_stays_near_float32(tiny_model, pack):
    config, params = tiny_model
    rows = pack([_segments()], 24)
    _, exact = _jit_forward(params, config, rows, Compute())
    _, rounded = _jit_forward(params, config, rows, Compute(dtype="bfloat16"))
    assert rounded.dtype == jnp.float32
    error = np.abs(np.asarray(exact - rounded))[np.asarray(rows["mask"])]
    # 8 bits of mantissa over three layers: a few hundredths of a nat, not zero (it did run) and not
    # more.
    assert 1e-3 < error.mean() < 0.1


def test_init_params_is_seeded_and_scaled():
    config = ModelConfig(
        "qwen2", 500, 64, 128, 2, 4, 2, 16, attention_bias=True, initializer_range=0.05
    )
    params = init_params(config, jax.random.key(0))
    assert float(params["embedding"].std()) == pytest.approx(
        0.05, rel=0.02
    )  # 32,000 draws: 0.4% expected
    for name in ("gate", "up", "down"):
        assert float(params["layers"]["mlp"][name]["kernel"].std()) == pytest.approx(0.05, rel=0.03)
    assert not np.any(params["layers"]["attention"]["q"]["bias"])
    assert np.all(params["norm"]["scale"] == 1) and np.all(
        params["layers"]["mlp_norm"]["scale"] == 1
    )
    first, second = params["layers"]["mlp"]["up"]["kernel"]
    assert np.any(first != second)
    again, other = (init_params(config, jax.random.key(seed)) for seed in (0, 1))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), params, again)))
    assert np.any(other["embedding"] != params["embedding"])
    half = init_params(config, jax.random.key(0), "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}


def test_a_parameter_that_is_added_moves_no_others_initial_value():
    """Biases and an untied output matrix are added; everything else keeps its bits."""
    shape = (50, 24, 32, 2, 2, 1, 12)
    small = init_params(ModelConfig("qwen3", *shape, tie_word_embeddings=True), jax.random.key(7))
    large = init_params(ModelConfig("qwen3", *shape, attention_bias=True), jax.random.key(7))
    before = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(small)
    }
    after = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(large)
    }
    assert len(after) == len(before) + 5  # q, k, v, o biases and the output matrix
    for name, leaf in before.items():
        np.testing.assert_array_equal(after[name], leaf, err_msg=name)


# Fields of the public config.json files, and the parameter counts of the published checkpoints.
_SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
_SAME = {"vocab_size": 151936, "tie_word_embeddings": False}
PUBLISHED = {
    "Qwen3-8B": ((4096, 12288, 36, 32, 8), dict(model_type="qwen3", head_dim=128), 8_190_735_360),
    "DeepSeek-R1-Distill-Qwen-1.5B": (
        (1536, 8960, 28, 12, 2),
        dict(model_type="qwen2"),
        1_777_088_000,
    ),
    "Qwen2.5-1.5B": (
        (1536, 8960, 28, 12, 2),
        dict(model_type="qwen2", tie_word_embeddings=True),
        1_543_714_304,
    ),
    "Qwen3-0.6B": (
        (1024, 3072, 28, 16, 8),
        dict(model_type="qwen3", head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    # 128256 x 2048 + 16 (2048 (2048 + 2 x 512) + 2048 x 2048 + 3 x 2048 x 8192 + 2 x 2048) + 2048
    "Llama-3.2-1B": (
        (2048, 8192, 16, 32, 8),
        dict(model_type="llama", vocab_size=128256, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
}
PUBLISHED = {
    name: (_SAME | dict(zip(_SIZES, sizes, strict=True)) | others, count)
    for name, (sizes, others, count) in PUBLISHED.items()
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_by_shape(name):
    fields, count = PUBLISHED[name]
    config = from_hf(fields)
    shapes = param_shapes(config, "bfloat16")
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == num_params(config) == count
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("bfloat16")}


def test_logical_axes_name_every_dimension():
    for config in (
        ModelConfig("qwen2", 97, 48, 80, 3, 6, 2, 16, attention_bias=True),
        ModelConfig(
            "qwen3", 97, 48, 80, 3, 6, 2, 16, attention_bias=True, tie_word_embeddings=True
        ),
    ):
        sizes = {
            "vocab": 97,
            "embed": 48,
            "mlp": 80,
            "layers": 3,
            "heads": 96,
            "kv_heads": 32,
            "norm": 48,
            "head_dim": 16,
        }

        def check(leaf, axes, sizes=sizes):
            assert len(axes) == leaf.ndim
            for size, name in zip(leaf.shape, axes, strict=True):
                assert sizes[name] == size

        jax.tree.map(check, param_shapes(config), logical_axes(config))
    axes = logical_axes(config)["layers"]["attention"]
    assert axes["o"] == {"kernel": ("layers", "heads", "embed"), "bias": ("layers", "embed")}
    assert axes["k"] == {"kernel": ("layers", "embed", "kv_heads"), "bias": ("layers", "kv_heads")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float64"}, "dtype: got 'float64', allowed are float32, bfloat16, float16"),
        ({"remat": "some"}, "remat: got 'some', allowed are none, dots, full"),
        ({"logprob_chunk": 0}, "logprob_chunk: got 0, must be at least 1"),
        ({"scan_unroll": 0}, "scan_unroll: got 0, must be at least 1"),
    ],
)
def test_compute_settings(settings, message):
    assert refused(Compute, **settings) == message
