"""The forward pass with an engine's 8-bit weights, and its straight-through gradient."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.models import decoder, quantize
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params, quantized_leaves
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.models.scheme import FULL, Scheme, weights_alone
from tests.support.sampling import local_engine
from tests.support.step_runs import LENGTH, PROMPT, make_model, unpacked_rows
from tests.support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("precision", "cache", "tied"),
    [("int8", "auto", True), ("int4", "auto", False), ("fp8", "auto", False), ("fp8", "fp8", True)],
)
def test_the_matched_forward_agrees_with_the_engine_to_rounding(precision, cache, tied):
    model = make_model(tied)
    params = init_params(model, jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, 31, (6, LENGTH)).astype(np.int32)
    engine = local_engine(
        model,
        precision=precision,
        compute_dtype="float32",
        kv_cache_dtype=cache,
        max_total_tokens=LENGTH,
    )
    engine.sync_weights(params, 0)
    scored = engine.score(
        [row[:PROMPT] for row in ids], [row[PROMPT:] for row in ids], temperature=0.8
    )
    engine.close()
    apart = {}
    matched = weights_alone(precision, "full" if cache == "auto" else cache)
    for forward, scheme in (("full", FULL), (precision, matched)):
        row_logprobs = make_row_logprobs(
            model, Compute(one_segment=True), temperature=0.8, mesh=None, scheme=scheme
        )
        found = jax.jit(row_logprobs)(params, unpacked_rows(ids))[0][:, PROMPT:]
        apart[forward] = np.abs(np.exp(found) - np.exp(np.stack(scored))).mean()
    assert apart["full"] > 5e-4
    assert apart[precision] < 1e-6


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_is_that_of_the_full_forward_at_the_engines_weights(tied):
    model = make_model(tied)
    params = init_params(model, jax.random.key(1))
    rows = unpacked_rows(np.random.default_rng(1).integers(0, 31, (3, LENGTH)).astype(np.int32))

    def gradient(model, params, scheme=FULL):
        row_logprobs = make_row_logprobs(
            model, Compute(one_segment=True), temperature=1.0, mesh=None, scheme=scheme
        )
        return jax.jit(jax.grad(lambda params: jnp.sum(row_logprobs(params, rows)[0] ** 2)))(params)

    matched = gradient(model, params, Scheme(weights="int8"))
    # As an untied model, whose output matrix has values, and a gradient, of its own.
    untied = make_model(False)
    output = params["output"] if "output" in params else params["embedding"].T
    leaves = quantized_leaves(untied)["layers"]
    rounded = params | {
        "layers": jax.tree.map(
            lambda x, chosen: quantize.quantize_kernel(x, "int8") if chosen else x,
            params["layers"],
            leaves,
        )
    }
    rounded["layers"] = jax.tree.map(
        lambda x: (
            x.values * x.scale[..., None, :] if isinstance(x, quantize.QuantizedKernel) else x
        ),
        rounded["layers"],
        is_leaf=lambda x: isinstance(x, quantize.QuantizedKernel),
    )
    kernel = quantize.quantize_kernel(output, "int8")
    rounded["output"] = kernel.values * kernel.scale
    expected = gradient(untied, rounded)
    if tied:
        expected["embedding"] = expected["embedding"] + expected.pop("output").T
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), matched, expected
    )


def test_float32_head_multiplies_by_the_full_output_matrix():
    model = make_model(True)
    compute = Compute(dtype="bfloat16", one_segment=True)
    params = init_params(model, jax.random.key(2))
    rows = unpacked_rows(np.random.default_rng(2).integers(0, 31, (3, LENGTH)).astype(np.int32))
    inputs = decoder.unpacked_inputs(rows.input_ids)
    hidden = jax.jit(lambda p: decoder.hidden_states(p, model, inputs, compute))(params)
    logits = np.asarray(hidden, np.float64)[:, :-1] @ np.asarray(params["embedding"], np.float64).T
    exact = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    exact = np.take_along_axis(exact, np.asarray(rows.input_ids)[:, 1:, None], axis=-1)[..., 0][
        :, PROMPT - 1 :
    ]
    apart = {}
    for head in ("compute", "float32"):
        row_logprobs = make_row_logprobs(
            model, compute, temperature=1.0, mesh=None, head_dtype=head
        )
        apart[head] = np.abs(jax.jit(row_logprobs)(params, rows)[0][:, PROMPT:] - exact).max()
    assert apart["compute"] > 1e-3 and apart["float32"] < 1e-5


@pytest.mark.long
def test_a_run_with_matched_weights_and_cache_has_no_discrepancy_and_lambda_falls(
    run_environment, tmp_path
):
    """Two steps of the demo's debug run with and without matched precision.

    FP8 weights and cache of the embedded engine.
    """
    engine = (
        "--config.rollout.precision=fp8",
        "--config.rollout.kv_cache_dtype=fp8",
        "--config.algorithm.tolerance=1e-6",
    )
    matched = ("--config.model.forward_precision=fp8", "--config.model.forward_cache=fp8")
    found = {}
    for name, settings in (("full", ()), ("matched", matched)):
        command = [
            sys.executable,
            "-m",
            "bin.train",
            "--config=configs/demo.py:debug",
            f"--config.run_dir={tmp_path / name}",
        ]
        command += ["--config.algorithm.tolerance_steps=0", *engine, *settings]
        subprocess.run(command, cwd=ROOT, env=run_environment, check=True, timeout=HANGS_S)
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found[name] = [line for line in lines if "discrepancy/mean" in line]
    last = found["matched"][-1]
    control = found["full"][-1]
    assert (
        control["discrepancy/mean"] > 1e-4
        and last["discrepancy/mean"] < control["discrepancy/mean"] / 50
    )
    assert control["dual/multiplier"] > found["matched"][-1]["dual/multiplier"]
