"""The training stack's forward pass with an engine's 8-bit weights, and its straight-through gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.models import decoder, quantize
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params, quantized_leaves
from dcmdp_jax.training.row_logprobs import make_row_logprobs
from dcmdp_jax.types import Rows

PROMPT, LENGTH = 5, 24


def _model(tied):
    return ModelConfig("qwen3", 31, 16, 32, 2, 2, 1, 8, tie_word_embeddings=tied, initializer_range=0.3)


def _rows(ids):
    shape, positions = ids.shape, np.arange(ids.shape[1], dtype=np.int32)
    mask = np.broadcast_to(positions >= PROMPT, shape)
    index = np.broadcast_to(np.arange(shape[0], dtype=np.int32)[:, None], shape)
    rows = Rows(
        ids, np.broadcast_to(positions, shape), np.ones(shape, np.int32), mask, index, np.zeros(shape, np.float32)
    )
    return jax.tree.map(jnp.asarray, rows)


@pytest.mark.parametrize(("precision", "tied"), [("int8", True), ("int4", False), ("fp8", False)])
def test_the_matched_forward_agrees_with_the_engine_to_rounding(precision, tied):
    model = _model(tied)
    params = init_params(model, jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, 31, (6, LENGTH)).astype(np.int32)
    engine = LocalEngine(model, precision=precision, compute_dtype="float32", max_total_tokens=LENGTH)
    engine.push_weights(params, 0)
    scored = engine.score([row[:PROMPT] for row in ids], [row[PROMPT:] for row in ids], temperature=0.8)
    engine.close()
    apart = {}
    for forward in ("full", precision):
        row_logprobs = make_row_logprobs(
            model, Compute(one_segment=True), temperature=0.8, mesh=None, forward_precision=forward
        )
        found = jax.jit(row_logprobs)(params, _rows(ids))[0][:, PROMPT:]
        apart[forward] = np.abs(np.exp(found) - np.exp(np.stack(scored))).mean()
    assert apart["full"] > 5e-4
    assert apart[precision] < 1e-6


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_is_that_of_the_full_forward_at_the_engines_weights(tied):
    model = _model(tied)
    params = init_params(model, jax.random.key(1))
    rows = _rows(np.random.default_rng(1).integers(0, 31, (3, LENGTH)).astype(np.int32))
    options = {"temperature": 1.0, "mesh": None}

    def loss(row_logprobs):
        return jax.jit(jax.grad(lambda params: jnp.sum(row_logprobs(params, rows)[0] ** 2)))

    matched = loss(make_row_logprobs(model, Compute(one_segment=True), **options, forward_precision="int8"))(params)
    # As an untied model, whose output matrix has values, and a gradient, of its own.
    untied = _model(False)
    output = params["output"] if "output" in params else params["embedding"].T
    leaves = quantized_leaves(untied)["layers"]
    rounded = params | {
        "layers": jax.tree.map(
            lambda x, chosen: quantize.quantize_kernel(x, "int8") if chosen else x, params["layers"], leaves
        )
    }
    rounded["layers"] = jax.tree.map(
        lambda x: x.values * x.scale[..., None, :] if isinstance(x, quantize.QuantizedKernel) else x,
        rounded["layers"], is_leaf=lambda x: isinstance(x, quantize.QuantizedKernel),
    )  # fmt: skip
    kernel = quantize.quantize_kernel(output, "int8")
    rounded["output"] = kernel.values * kernel.scale
    expected = loss(make_row_logprobs(untied, Compute(one_segment=True), **options))(rounded)
    if tied:
        expected["embedding"] = expected["embedding"] + expected.pop("output").T
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), matched, expected)


def test_float32_head_multiplies_by_the_full_output_matrix():
    model, compute = _model(True), Compute(dtype="bfloat16", one_segment=True)
    params = init_params(model, jax.random.key(2))
    rows = _rows(np.random.default_rng(2).integers(0, 31, (3, LENGTH)).astype(np.int32))
    hidden = jax.jit(lambda p: decoder.hidden_states(p, model, *rows[:3], compute))(params)
    logits = np.asarray(hidden, np.float64)[:, :-1] @ np.asarray(params["embedding"], np.float64).T
    exact = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    exact = np.take_along_axis(exact, np.asarray(rows.input_ids)[:, 1:, None], axis=-1)[..., 0][:, PROMPT - 1 :]
    apart = {}
    for head in ("compute", "float32"):
        row_logprobs = make_row_logprobs(model, compute, temperature=1.0, mesh=None, head_dtype=head)
        apart[head] = np.abs(jax.jit(row_logprobs)(params, rows)[0][:, PROMPT:] - exact).max()
    assert apart["compute"] > 1e-3 and apart["float32"] < 1e-5
