"""Each family of `families.py` against transformers.

A published config.json, made small, with its own pattern.
"""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.errors import UserError
from dcmdp_jax.models import attention, decoder
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.families import MISSING
from dcmdp_jax.models.hf_config import from_hf, read_model_config, to_hf
from dcmdp_jax.models.hf_weights import load_params, save_params
from dcmdp_jax.models.logprobs import LogprobOptions, token_logprobs
from dcmdp_jax.models.ops import CPU
from dcmdp_jax.models.params import hf_tensors, init_params, logical_axes, num_params, param_shapes
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import param_shardings
from dcmdp_jax.plan.published import PUBLISHED

SMALL = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6}
WINDOW = 7
LENGTH = 40
# Published shape -> what a small one keeps of its pattern; a window is 7 tokens of rows of 40.
SHAPES: dict[str, dict[str, Any]] = {
    "gemma-3-1b-it": {
        "num_hidden_layers": 7,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
    },
    "Olmo-3-7B-Instruct": {"num_hidden_layers": 5, "num_key_value_heads": 6},
    "SmolLM3-3B": {"num_hidden_layers": 5, "num_key_value_heads": 2},
    "Mistral-7B-Instruct-v0.1": {"num_hidden_layers": 2, "num_key_value_heads": 2},
    "Llama-3.1-8B-Instruct": {"num_hidden_layers": 2, "num_key_value_heads": 2},
    "Qwen3.5-0.8B": {
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
}


def small(name: str) -> dict[str, Any]:
    """The published config.json of `name` with small sizes, windows and original contexts."""
    fields = (
        PUBLISHED[name]
        | SMALL
        | SHAPES[name]
        | {"max_position_embeddings": 128, "pad_token_id": None}
    )
    if "sliding_window" in fields:
        fields["sliding_window"] = WINDOW
    if scaling := fields.get("rope_scaling"):
        fields["rope_scaling"] = scaling | {"original_max_position_embeddings": 16}
    return fields


@pytest.fixture
def directory(tmp_path):
    """Builds (transformers' model in float32, its directory, its config as we read it)."""
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is in the development extra"
    )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def build(name: str) -> tuple[Any, Any, ModelConfig]:
        fields = small(name)
        kind = fields["model_type"]
        # A copy: transformers changes the dicts that it is given.
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**json.loads(json.dumps(fields))),
            attn_implementation="eager",
        ).eval()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for where, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                one = (
                    parameter.ndim == 1
                    and kind not in ("gemma3_text", "qwen3_5_text")
                    and "norm" in where
                )
                parameter.copy_((0.3 if parameter.ndim == 1 else 0.15) * noise + one)
        path = tmp_path / name
        model.save_pretrained(path)
        return model, path, read_model_config(path)

    return build


def _rows(pack: Any) -> dict[str, jax.Array]:
    generator = np.random.default_rng(5)
    return pack(
        [[generator.integers(0, 97, size) for size in sizes] for sizes in ((LENGTH,), (23, 14))],
        LENGTH,
    )


def _theirs(
    model: Any, rows: dict[str, jax.Array], weights: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Log-probs of the rows' tokens, segment by segment; and gradients of their weighted sum."""
    import torch

    logprobs = np.zeros(weights.shape, np.float32)
    total = 0.0
    ids = np.asarray(rows["input_ids"])
    segments = np.asarray(rows["segment_ids"])
    for row, number in ((0, 1), (1, 1), (1, 2)):
        at = np.flatnonzero(segments[row] == number)
        given = torch.tensor(ids[row, at].astype(np.int64))
        scores = torch.log_softmax(model(given[None]).logits[0, :-1], -1)
        found = scores.gather(-1, given[1:, None])[:, 0]
        logprobs[row, at[1:]] = found.detach().numpy()
        total = total + (found * torch.tensor(weights[row, at[1:]])).sum()
    total.backward()
    return logprobs, {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


def _ours(params, config: ModelConfig, rows, weights, compute: Compute, mesh=None):
    return _value_and_grad(config, rows, weights, compute, mesh)(params)


def _value_and_grad(config: ModelConfig, rows, weights, compute: Compute, mesh=None):
    """Build params -> ((weighted sum, log-probs), gradients)."""

    def value(params):
        inputs = decoder.DecoderInputs(
            input_ids=rows["input_ids"],
            position_ids=rows["position_ids"],
            segment_ids=rows["segment_ids"],
        )
        hidden = decoder.hidden_states_and_aux(params, config, inputs, compute, mesh=mesh)[0]
        kernel = decoder.output_kernel(params)
        options = LogprobOptions(temperature=1.0, chunk=compute.logprob_chunk, ops=CPU)
        logprobs, _ = token_logprobs(
            hidden, kernel, rows["input_ids"], rows["mask"], options=options
        )
        return jnp.sum(logprobs * weights), logprobs

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def _close(gradients, theirs: dict[str, np.ndarray], config: ModelConfig) -> None:
    for name, place in hf_tensors(config).items():
        leaf = gradients
        for key in place.path:
            leaf = leaf[key]
        mine = np.asarray(leaf[place.index])
        mine = mine.T if place.transposed else mine
        want = theirs[name]
        assert np.abs(mine - want).max() < 2e-4 * np.abs(want).max(), name


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_gradients_are_those_of_transformers(directory, pack, name):
    """Packed rows longer than the window, every layer kind of the family, scanned.

    In float32, against eager attention of transformers one segment at a time. Log-probs measured at
    3e-6, gradients at 2e-6 of a tensor's largest.
    """
    model, path, config = directory(name)
    rows = _rows(pack)
    weights = np.asarray(np.random.default_rng(1).normal(size=rows["mask"].shape), np.float32)
    logprobs, gradients = _theirs(model, rows, weights)
    (_, mine), ours = _ours(
        load_params(path, config, dtype="float32"), config, rows, weights, Compute()
    )
    np.testing.assert_allclose(mine, np.where(rows["mask"], logprobs, 0), atol=3e-5)
    _close(ours, gradients, config)


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_reads_an_export_as_the_same_model(directory, tmp_path, name):
    """In and out again: equal tensors, equal config, equal logits in transformers.

    The logits are of a row beyond the window.
    """
    import torch
    import transformers

    model, path, config = directory(name)
    params = load_params(path, config, dtype="float32")
    save_params(params, config, tmp_path / "export", dtype="float32")
    assert read_model_config(tmp_path / "export") == config == from_hf(small(name))
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", attn_implementation="eager"
    )
    theirs = model.state_dict()
    ids = torch.arange(LENGTH)[None]
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in again.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gemma-3-1b-it", None),
        *((name, (2, 2, 2)) for name in ("gemma-3-1b-it", "Olmo-3-7B-Instruct", "Qwen3.5-0.8B")),
    ],
    ids=str,
)
def test_how_a_family_runs_changes_nothing(pack, monkeypatch, name, shape):
    """Skipped blocks, rematerialized layers and meshes give what whole rows on one device give.

    Blocks of keys outside a window are skipped, the scan is unrolled by two; on a mesh rows lie
    over data and fsdp, heads and the width of OLMo's norm of q and k over tensor.
    """
    scale = 0.1 if name == "Qwen3.5-0.8B" else 0.2  # a recurrence of 8 layers multiplies roundings
    config = from_hf(
        small(name)
        | {"num_key_value_heads": 2, "num_attention_heads": 6, "initializer_range": scale}
    )
    params = init_params(config, jax.random.key(0))
    rows = pack([[np.arange(30), np.arange(9)]] * 4, LENGTH)
    weights = np.asarray(np.random.default_rng(1).normal(size=(4, LENGTH)), np.float32)
    of_whole_rows = _value_and_grad(config, rows, weights, Compute(attention="xla"))
    want = _named(of_whole_rows(params))
    moved = [_named(of_whole_rows(_next_to(params, seed))) for seed in range(3)]

    monkeypatch.setattr(attention, "_SHORT", 8)
    compute = Compute(attention="blockwise", remat="full", scan_unroll=2)
    mesh = None
    if shape is not None:
        mesh = make_mesh(*shape)
        params = jax.device_put(
            params, param_shardings(logical_axes(config), param_shapes(config), mesh)
        )
    have = _named(_ours(params, config, rows, weights, compute, mesh))

    # Moved parameters round each of the up to 80 terms of a product once. Its additions round sums
    # of them, as large as sqrt(80) terms.
    roundings = math.sqrt(80)
    for leaf, exact in want.items():
        of_a_rounding = max(np.abs(other[leaf] - exact).max() for other in moved)
        assert (
            np.abs(have[leaf] - exact).max()
            <= roundings * of_a_rounding
            < 0.01 * np.abs(exact).max()
        ), leaf


def _next_to(params, seed: int):
    """The parameters, each moved to the float32 above or below it."""
    generator = np.random.default_rng(seed)

    def moved(leaf):
        ends = np.where(generator.random(leaf.shape) < 0.5, -np.inf, np.inf).astype(np.float32)
        return jnp.asarray(np.nextafter(np.asarray(leaf), ends))

    return jax.tree.map(moved, params)


def _named(result) -> dict[str, np.ndarray]:
    """Log-probs and gradients by the names of their leaves."""
    (_, logprobs), gradients = result
    leaves = jax.tree_util.tree_leaves_with_path({"logprobs": logprobs} | gradients)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def test_a_window_of_the_whole_row_is_none(pack):
    """A window hides exactly what lies before it.

    40 tokens, of which 39 predict the last: a window of 40 or more hides nothing, one of 38 the
    first.
    """
    rows = pack([[np.arange(LENGTH)]], LENGTH)
    fields = small("Mistral-7B-Instruct-v0.1") | {"initializer_range": 0.2}
    params = init_params(from_hf(fields), jax.random.key(0))

    def last(window: int | None) -> jax.Array:
        return _ours(params, from_hf(fields | {"sliding_window": window}), rows, 1.0, Compute())[0][
            1
        ][0, -1]

    assert last(40) == last(100_000) == last(None) != last(38)


# Parameters as the publishers count them.
COUNTS = {
    "gemma-3-270m-it": 268_098_176,
    "gemma-3-1b-it": 999_885_952,
    "SmolLM3-3B": 3_075_098_624,
    "Olmo-3-7B-Instruct": 7_298_011_136,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Mistral-7B-Instruct-v0.1": 7_241_732_096,
    "Qwen3.5-0.8B": 752_393_024,
}


@pytest.mark.parametrize("name", COUNTS)
def test_published_families_by_shape(name):
    config = from_hf(PUBLISHED[name])
    assert num_params(config) == COUNTS[name]
    assert from_hf(to_hf(config, dtype="bfloat16")) == config


def test_patterns_of_published_families():
    """Published patterns of layers: which are full, and which have no rotary embedding.

    Every sixth layer of Gemma 3, every fourth of OLMo 3 is full; every fourth of SmolLM3 has no
    rotary embedding.
    """
    gemma, smollm, olmo = (
        from_hf(PUBLISHED[name]) for name in ("gemma-3-1b-it", "SmolLM3-3B", "Olmo-3-7B-Instruct")
    )
    assert [index for index in range(26) if index not in gemma.sliding_layers] == [5, 11, 17, 23]
    assert (
        gemma.layer_ropes[4:7] == ("sliding", "global", "sliding")
        and gemma.sliding_rope_theta == 1e4
    )
    assert gemma.layer_windows(1024)[4:7] == (512, 0, 512) and set(gemma.layer_windows(512)) == {0}
    assert smollm.rope_free_layers == tuple(range(3, 36, 4)) and smollm.sliding_window == 0
    assert olmo.layer_ropes[2:4] == ("sliding", "global") and olmo.rope_scaling.kind == "yarn"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "gemma-3-1b-it",
            {"model_type": "gpt_oss"},
            "model_type is 'gpt_oss', which needs attention sinks",
        ),
        (
            "gemma-3-1b-it",
            {"model_type": "deepseek_v3"},
            "'deepseek_v3', which needs multi-head latent attention",
        ),
        (
            "gemma-3-1b-it",
            {"model_type": "qwen3_next"},
            "'qwen3_next', which needs recurrent layers",
        ),
        (
            "gemma-3-1b-it",
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping is 30.0, only null",
        ),
        (
            "gemma-3-1b-it",
            {"hidden_activation": "silu"},
            "hidden_activation is 'silu', only 'gelu_pytorch_tanh'",
        ),
        (
            "gemma-3-1b-it",
            {"layer_types": ["linear_attention"] * 26},
            "layer_types has 'linear_attention', must have",
        ),
        (
            "gemma-3-1b-it",
            {"layer_types": ["full_attention"] * 25},
            "layer_types has 25 entries, must have",
        ),
        ("gemma-3-1b-it", {"sliding_window": 0}, "sliding_window is 0, must be a whole number in"),
        (
            "gemma-3-1b-it",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is true",
        ),
        (
            "SmolLM3-3B",
            {"no_rope_layers": [2] * 36},
            "no_rope_layers has 2, must have 1 or 0 for each of 36 layers",
        ),
        (
            "SmolLM3-3B",
            {"use_sliding_window": True},
            "use_sliding_window is true, only full attention",
        ),
        (
            "Llama-3.1-8B-Instruct",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic'",
        ),
    ],
)
def test_what_a_family_has_not_is_refused_in_one_line(name, fields, message):
    with pytest.raises(UserError, match=message) as error:
        from_hf(PUBLISHED[name] | fields)
    assert "\n" not in str(error.value) and len(MISSING) > 8
