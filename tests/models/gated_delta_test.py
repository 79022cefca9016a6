"""Recurrent layers against single tokens and transformers in float64.

Chunks, packed rows, adapters, checkpoints.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.compiled_parts.lengths import forward_flops
from benchmarks.recurrence import token_by_token
from dcmdp_jax.errors import ArgumentError, UserError
from dcmdp_jax.models import decoder, gated_delta
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.gated_delta import Heads, Mixed, State
from dcmdp_jax.models.hf_config import from_hf, read_model_config, to_hf
from dcmdp_jax.models.hf_manifest import check_manifest
from dcmdp_jax.models.hf_weights import load_params
from dcmdp_jax.models.logprobs import LogprobOptions, token_logprobs
from dcmdp_jax.models.lora import adapted, adapted_layers, adapter_declarations
from dcmdp_jax.models.ops import CPU
from dcmdp_jax.models.params import (
    draw_params,
    hf_tensors,
    init_params,
    logical_axes,
    num_params,
    param_shapes,
)
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import param_shardings

LENGTH = 150
SEGMENTS = ((150,), (70, 61, 15))
FIELDS: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
CONFIG = from_hf(FIELDS)
EXPERTS: dict[str, Any] = {
    name: value for name, value in FIELDS.items() if name != "intermediate_size"
} | {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def heads(length: int, dtype: Any = np.float64, *, same_keys: bool = False) -> Heads:
    """Random arguments of the recurrence for 2 rows and 3 heads: k = 8, v = 12."""
    draw = np.random.default_rng(2)
    query, key = (draw.normal(size=(2, length, 3, 8)) for _ in range(2))
    if same_keys:
        key = np.broadcast_to(key[:, :1], key.shape)
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    decay = -draw.exponential(0.2, (2, length, 3))
    rate = draw.uniform(0.1, 1, (2, length, 3))
    parts = query, key, draw.normal(size=(2, length, 3, 12)), decay, rate
    return Heads(*(jnp.asarray(x, dtype) for x in parts))


def ids(*rows: tuple[int, ...]) -> jax.Array:
    """Segment ids of rows of segments of these sizes."""
    return jnp.asarray([np.repeat(np.arange(1, len(row) + 1), row) for row in rows])


@pytest.mark.parametrize("same_keys", [False, True], ids=["random keys", "one key"])
def test_chunks_are_the_recurrence_in_float64(same_keys):
    """Values, state and gradients of 150 tokens with borders inside chunks and on one (64): 1e-12.

    One key for all tokens makes the system as far from the identity as it comes. Without the reset
    at a border they differ by 0.5.
    """
    segments = ids((64, 86), (10, 30, 110))

    def of(form):
        def total(tokens: Heads):
            y, memory = form(tokens, segments)
            weights = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
            return jnp.sum(y * weights) + jnp.sum(memory), (y, memory)

        return jax.jit(jax.value_and_grad(total, has_aux=True))

    with jax.enable_x64(True):
        tokens = heads(150, same_keys=same_keys)
        (_, want), gradients = of(token_by_token)(tokens)
        (_, have), others = of(gated_delta.in_chunks)(tokens)
        whole = gated_delta.in_chunks(tokens, jnp.ones_like(segments))[0]
        for mine, theirs in zip(
            jax.tree.leaves((have, others)), jax.tree.leaves((want, gradients)), strict=True
        ):
            np.testing.assert_allclose(mine, theirs, atol=1e-12)
        assert np.abs(whole - want[0]).max() > 0.5


def test_convolution_begins_anew_with_a_segment():
    """The convolution begins again with a segment.

    Kernel (1, 10, 100, 1000) over ones: 1000, 1100, 1110, 1111, again from 1000 in the second
    segment.
    """
    ones = jnp.ones((1, 7, 1))
    mixed = Mixed(
        ones, jnp.asarray([[1.0, 10, 100, 1000]]), jnp.zeros((1, 7, 1)), jnp.zeros((1, 7, 1))
    )
    found = gated_delta.convolved(mixed, ids((5, 2)))[0, :, 0]
    np.testing.assert_allclose(found, [1000, 1100, 1110, 1111, 1111, 1000, 1100])


def _mixed(length: int) -> Mixed:
    draw = np.random.default_rng(4)
    channels = draw.normal(size=(3, length, CONFIG.mixed_width))
    gates = -draw.exponential(0.3, (3, length, 4)), draw.uniform(size=(3, length, 4))
    return Mixed(
        *(
            jnp.asarray(x, jnp.float32)
            for x in (channels, draw.normal(size=(CONFIG.mixed_width, 4)), *gates)
        )
    )


def test_prefill_and_single_tokens_are_the_whole_row():
    """Prefill and single steps give outputs and states of the whole rows, to 1e-5.

    Prompts of 1, 3 and 70 of 80 padded tokens (shorter than the window, as long, beyond a chunk),
    then 10 tokens one by one.
    """
    lengths = jnp.asarray([1, 3, 70])
    mixed = _mixed(80)
    y, state = gated_delta.prefill(CONFIG, lengths, mixed)
    for row, length in enumerate(lengths.tolist()):
        own = jax.tree.map(
            lambda x, row=row: x[row : row + 1], (mixed.channels, mixed.log_decay, mixed.rate)
        )
        whole = Mixed(own[0], mixed.kernel, *own[1:])
        want = gated_delta.rows(CONFIG, jnp.ones((1, 80), int), whole)[0][0]
        np.testing.assert_allclose(y[row, :length], want[:length], atol=1e-5)
        mine = jax.tree.map(lambda x, row=row: x[row : row + 1], state)
        for at in range(length, length + 10):
            token = Mixed(
                own[0][:, at : at + 1], mixed.kernel, *(x[:, at : at + 1] for x in own[1:])
            )
            found, mine = gated_delta.decode(CONFIG, mine, token)
            np.testing.assert_allclose(found[0, 0], want[at], atol=1e-5)
        assert isinstance(mine, State) and mine.memory.dtype == jnp.float32


@pytest.fixture
def theirs(request, tmp_path, monkeypatch):
    """transformers' model, with float64 in every place of float32, and its directory.

    Dense, or of the fields that a test gives.
    """
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is in the development extra"
    )
    own = getattr(request, "param", FIELDS)
    module, name = ("qwen3_5_moe", "Qwen3_5Moe") if own is EXPERTS else ("qwen3_5", "Qwen3_5")
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    transformers.logging.set_verbosity_error()
    text = (
        inspect.getsource(modeling)
        .replace("torch.float32", "torch.float64")
        .replace(".float()", ".double()")
    )
    (file := tmp_path / "exact.py").write_text(
        re.sub(r"dtype=torch\.float\b", "dtype=torch.float64", text)
    )
    spec = importlib.util.spec_from_file_location(f"{modeling.__name__}_exact", file)
    monkeypatch.setitem(sys.modules, spec.name, exact := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(exact)
    fields = transformers.AutoConfig.for_model(
        **json.loads(json.dumps(own)), attn_implementation="eager"
    )
    fields._experts_implementation = "eager"
    model = getattr(exact, f"{name}ForCausalLM")(fields).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("A_log"):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.06 * noise + name.endswith("linear_attn.norm.weight"))
    model.save_pretrained(tmp_path / "model")
    return model.double(), tmp_path / "model"


def _rows(pack: Any) -> dict[str, jax.Array]:
    draw = np.random.default_rng(5)
    return pack([[draw.integers(0, 97, size) for size in sizes] for sizes in SEGMENTS], LENGTH)


def _logprobs(
    params: Any,
    rows: dict[str, jax.Array],
    *,
    config: ModelConfig = CONFIG,
    mesh: Any = None,
    **compute: Any,
) -> jax.Array:
    inputs = decoder.DecoderInputs(
        input_ids=rows["input_ids"],
        position_ids=rows["position_ids"],
        segment_ids=rows["segment_ids"],
    )
    hidden = decoder.hidden_states_and_aux(params, config, inputs, Compute(**compute), mesh=mesh)[0]
    return token_logprobs(
        hidden,
        decoder.output_kernel(params),
        rows["input_ids"],
        rows["mask"],
        options=LogprobOptions(temperature=1.0, chunk=1024, ops=CPU),
    )[0]


@pytest.mark.parametrize("theirs", [FIELDS, EXPERTS], indirect=True, ids=["dense", "experts"])
def test_float32_is_transformers_in_float64(theirs, pack):
    """Log-probs of packed rows within 1e-5 of each segment alone in transformers.

    Measured 3e-6; gradients of their weighted sum within 3e-5 of each tensor's largest (4e-6 in
    most runs; 1.4e-5 seen once, of a bias that sums over all tokens: a busy CPU splits products
    otherwise). A second pass over layers (remat) gives the same numbers, and so does a mesh with
    rows over fsdp and heads over tensor, or rows and experts over expert and their width over
    tensor.
    """
    import torch

    model, path = theirs
    config = read_model_config(path)
    assert (
        config
        == from_hf(EXPERTS if config.num_experts else FIELDS)
        == from_hf(to_hf(config, dtype="float32"))
    )
    assert set(load_file(path / "model.safetensors")) == set(hf_tensors(config))
    rows = _rows(pack)
    params = load_params(path, config, dtype="float32")
    weights = np.random.default_rng(1).normal(size=(2, LENGTH))
    want = np.zeros((2, LENGTH))
    total = 0.0
    for row, number in ((0, 1), (1, 1), (1, 2), (1, 3)):
        at = np.flatnonzero(np.asarray(rows["segment_ids"])[row] == number)
        given = torch.tensor(np.asarray(rows["input_ids"])[row, at].astype(np.int64))
        found = torch.log_softmax(model(given[None]).logits[0, :-1], -1).gather(
            -1, given[1:, None]
        )[:, 0]
        want[row, at[1:]] = found.detach().numpy()
        total = total + (found * torch.tensor(weights[row, at[1:]])).sum()
    total.backward()
    pulls = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    split = make_mesh(
        1, *((1, 2, 2) if config.num_experts else (2, 2, 1)), devices=jax.devices()[:4]
    )
    for remat, mesh in (("none", None), ("full", None), ("none", split)):
        if mesh is not None:
            params = jax.device_put(
                params, param_shardings(logical_axes(config), param_shapes(config), mesh)
            )

        def value(params, remat=remat, mesh=mesh):
            have = _logprobs(params, rows, config=config, remat=remat, mesh=mesh)
            return jnp.sum(have * weights), have

        (_, have), gradients = jax.jit(jax.value_and_grad(value, has_aux=True))(params)
        np.testing.assert_allclose(have, want, atol=1e-5)
        for name, place in hf_tensors(config).items():
            leaf = place.leaf(gradients)
            mine = np.asarray(leaf[place.index] if place.index else leaf)
            mine = mine.T if place.transposed else mine
            # The model fuses the experts' matrices, their files do not.
            pull = (
                pulls[place.fused.name][place.fused.index, place.fused.rows]
                if place.fused
                else pulls[name]
            )
            assert np.abs(mine - pull).max() < 3e-5 * np.abs(pull).max(), name


def test_packed_rows_are_the_rows_alone(pack):
    """Segments of 70, 61 and 15 tokens in one row and each in its own; bfloat16 too."""
    params = init_params(CONFIG, jax.random.key(0))
    packed = _rows(pack)
    segments = np.split(np.asarray(packed["input_ids"])[1, :146], (70, 131))
    alone = pack([[segment] for segment in segments], LENGTH)
    for dtype, atol in (("float32", 1e-5), ("bfloat16", 0.02)):
        together, each = (_logprobs(params, rows, dtype=dtype) for rows in (packed, alone))
        want = np.concatenate(
            [row[: len(segment)] for row, segment in zip(each, segments, strict=True)]
        )
        np.testing.assert_allclose(together[1, :146], want, atol=atol)


def test_adapters_of_recurrent_layers(pack):
    """Adapters reach every projection of both kinds of layers but the two small gates.

    With B = 0 the base to the bit; a gradient reaches the adapter of each.
    """
    lora = Lora(2, 4.0)
    rows = _rows(pack)
    named = {declared.hf_name.split(".")[-2] for declared in adapted_layers(CONFIG, lora)}
    recurrent = {"in_proj_qkv", "in_proj_z", "out_proj"}
    full = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert named == recurrent | full | {"gate_proj", "up_proj", "down_proj"}
    declared = adapter_declarations(CONFIG, lora)
    base = init_params(CONFIG, jax.random.key(0))
    adapters = draw_params(declared, jax.random.key(1), "float32")

    def total(adapters):
        return jnp.sum(_logprobs(adapted(base, adapters, lora), rows))

    assert float(total(adapters)) == float(jnp.sum(_logprobs(base, rows)))
    gradients = jax.tree_util.tree_leaves_with_path(jax.grad(total)(adapters))
    assert all(jnp.abs(leaf).max() > 0 for path, leaf in gradients if path[-1].key == "b")
    with pytest.raises(
        ArgumentError, match="got 'in_proj_a', no linear layer has that name; allowed are out_proj"
    ):
        adapted_layers(CONFIG, Lora(2, 4.0, ("in_proj_a",)))


@pytest.mark.parametrize("theirs", [FIELDS, EXPERTS], indirect=True, ids=["dense", "experts"])
def test_a_checkpoint_with_images_is_read_as_its_text(theirs, tmp_path):
    """A wrapped checkpoint: other names, stacked experts, and counted tensors of other parts.

    Names below model.language_model, all experts of a layer in two tensors, a head stored again, 2
    tensors of images and 1 of token prediction.
    """
    model, path = theirs
    shape = read_model_config(path)
    config = json.loads((path / "config.json").read_text())
    own = load_params(path, shape, dtype="float32")
    tensors = {
        name: tensor.float().numpy()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    assert len(tensors) == len(load_file(path / "model.safetensors")) - (
        4 * 16 if shape.num_experts else 0
    )
    wrapped = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    others = (
        "model.visual.patch_embed.proj.bias",
        "model.visual.merger.norm.bias",
        "mtp.norm.weight",
    )
    wrapped |= {"lm_head.weight": tensors["model.embed_tokens.weight"]} | dict.fromkeys(
        others, np.ones(3, np.float32)
    )
    (tmp_path / "wrapped").mkdir()
    save_file(wrapped, tmp_path / "wrapped" / "model.safetensors")
    outer = {
        "model_type": config["model_type"].removesuffix("_text"),
        "tie_word_embeddings": True,
        "vision_config": {"depth": 2},
    }
    inner = {"text_config": {**config, "tie_word_embeddings": False, "attn_output_gate": True}}
    (tmp_path / "wrapped" / "config.json").write_text(json.dumps(outer | inner))
    assert read_model_config(tmp_path / "wrapped") == shape
    assert check_manifest(tmp_path / "wrapped", shape).left_out == {"model.visual.": 2, "mtp.": 1}
    read = load_params(tmp_path / "wrapped", shape, dtype="float32")
    assert jax.tree.all(jax.tree.map(np.array_equal, read, own))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"layer_types": ["linear_attention"] * 4},
            "layer_types: 4 of 4 layers are linear_attention, must be some",
        ),
        (
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types has 'sliding_attention', must have 'linear_att",
        ),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries, must have"),
        (
            {"linear_conv_kernel_dim": 1},
            r"linear_conv_kernel_dim is 1, must be a whole number in \[2, 64\]",
        ),
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads: got 3, must be a multiple of linear_num_key_heads=2",
        ),
        ({"attn_output_gate": False}, "attn_output_gate is false, only attention with its gate"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.2}},
            "partial_rotary_factor: got 0.2, must be an even number",
        ),
        ({"rope_parameters": [0.25]}, r"rope_parameters is \[0.25\], must be an object or null"),
        (
            {"model_type": "qwen3_5"},
            "text_config is None, must be an object of model_type 'qwen3_5_text'",
        ),
        (
            {
                "model_type": "qwen3_5_moe_text",
                **dict.fromkeys(("num_experts", "num_experts_per_tok"), 4),
            },
            "shared_expert_intermediate_size is missing, must be a number",
        ),
    ],
)
def test_what_recurrent_layers_can_not_be_is_refused_in_one_line(fields, message):
    with pytest.raises(UserError, match=message) as error:
        from_hf(FIELDS | fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("layers", [4, 6])
def test_layers_that_do_not_repeat_are_one_period(layers):
    """Patterns of layers go to config.json and back; kinds that never repeat are unrolled.

    4 layers of a period of 4, 6 layers with attention in the second and last of a period of 6.
    """
    kinds = ["linear_attention"] * layers
    for full in (1, layers - 1) if layers == 6 else (3,):
        kinds[full] = "full_attention"
    config = from_hf(FIELDS | {"num_hidden_layers": layers, "layer_types": kinds})
    assert config.period == layers and from_hf(to_hf(config, dtype="float32")) == config


def test_qwen35_35b_a3b_by_shape():
    """Qwen3.5-35B-A3B has 34.66 billion parameters, of which 2.95 compute a token.

    By the defaults of `Qwen3_5MoeTextConfig`.
    """
    sizes = {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
    }
    heads = {
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
    }
    experts = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    more = {
        "linear_num_value_heads": 32,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
    }
    config = from_hf(EXPERTS | sizes | heads | experts | more)
    # A layer's MLP: router 2048 x 256 = 524,288; gate 2,048; 257 experts of 3 x 2048 x 512 =
    # 3,145,728; in all
    #   808,978,432 = 524,288 + 2,048 + 808,452,096; norms 2 x 2048 = 4,096.
    # Attention (10): q and its gate 2048 x 8192 = 16,777,216; k and v 2 x 2048 x 512 = 2,097,152; o
    # 8,388,608; head
    #   norms 512; together 27,263,488.
    # Recurrent (30): q, k, v 2048 x 8192 = 16,777,216; z and out 2 x 2048 x 4096 = 16,777,216; a
    # and b 2 x 2048 x 32 =
    #   131,072; convolution 8192 x 4 = 32,768; A and dt 64; norm 128; together 33,718,464.
    # Embedding and output 2 x 248320 x 2048 = 1,017,118,720; last norm 2,048.
    layers = 40 * (808_978_432 + 4_096) + 10 * 27_263_488 + 30 * 33_718_464
    assert num_params(config) == layers + 1_017_118_720 + 2_048
    # Of a token: 9 experts, router, gate and projections, the output alone; the state's 30 x 3 x 32
    # x 128 x 128.
    token = (
        40 * (9 * 3_145_728 + 524_288 + 2_048) + 10 * 27_262_976 + 30 * (33_718_464 - 32_768 - 192)
    )
    assert forward_flops(config, 0) == 2 * (token + 248320 * 2048 + 30 * 3 * 32 * 128 * 128)
