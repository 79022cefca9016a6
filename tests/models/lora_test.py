"""Adapters against PEFT in torch: values, gradients, files both ways.

Also what LoRA says by hand.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dcmdp_jax.errors import ArgumentError, UserError
from dcmdp_jax.models import decoder
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.hf_config import read_model_config, wrapping_class
from dcmdp_jax.models.hf_weights import load_params
from dcmdp_jax.models.layers import LoraKernel, kernel_matmul
from dcmdp_jax.models.lora import (
    CONFIG,
    Adapter,
    adapted,
    adapter_declarations,
    base_checksum,
    merge_rounding,
    merged,
    read_adapter,
    save_adapter,
)
from dcmdp_jax.models.params import draw_params, init_params
from dcmdp_jax.models.quantize import quantize_kernel

MODEL = ModelConfig("llama", 64, 32, 48, 2, 4, 2, 8)
EXPERTS = ModelConfig(
    "qwen3_moe",
    64,
    32,
    48,
    2,
    4,
    2,
    8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
)
LORA = Lora(4, 8.0)
IDS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 9)))


def _logits(params: Any, model: ModelConfig, ids: jax.Array = IDS) -> jax.Array:
    hidden = decoder.hidden_states(params, model, decoder.unpacked_inputs(ids), Compute())
    return hidden @ decoder.output_kernel(params)


def _adapters(model: ModelConfig, lora: Lora, seed: int = 1) -> Any:
    """Adapters whose B is not zero."""
    drawn = draw_params(adapter_declarations(model, lora), jax.random.key(seed), "float32")
    leaves, tree = jax.tree.flatten(drawn)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    moved = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, moved)


def _adapter(model: ModelConfig, lora: Lora) -> Adapter:
    """Adapters whose B is not zero, of a base that is nowhere."""
    return Adapter(lora=lora, params=_adapters(model, lora), base_checksum=7, base_digest=5)


@pytest.fixture(scope="module")
def base() -> Any:
    return init_params(MODEL, jax.random.key(0))


def test_a_fresh_adapter_leaves_the_policy_as_it_is_bit_for_bit(base: Any) -> None:
    fresh = draw_params(adapter_declarations(MODEL, LORA), jax.random.key(3), "float32")
    for leaf, want in zip(
        jax.tree.leaves(merged(base, fresh, LORA)), jax.tree.leaves(base), strict=True
    ):
        np.testing.assert_array_equal(leaf, want)
    bound = 1 / np.sqrt(32)
    a = fresh["layers"]["attention"]["q"]["a"]
    assert a.shape == (2, 32, 4)
    assert float(jnp.abs(a).max()) <= bound
    assert float(jnp.abs(a).mean()) == pytest.approx(bound / 2, rel=0.2)


def test_the_product_beside_equals_the_product_merged(base: Any) -> None:
    adapters = _adapters(MODEL, LORA)
    beside = _logits(adapted(base, adapters, LORA), MODEL)
    inside = _logits(merged(base, adapters, LORA), MODEL)
    np.testing.assert_allclose(beside, inside, atol=2e-5)
    assert float(jnp.abs(inside - _logits(base, MODEL)).max()) > 0.1


def test_with_a_full_rank_and_a_the_identity_the_gradient_of_b_is_that_of_the_matrix() -> None:
    """r = in, A = I, alpha = r: y = x (W + B), so training B is training W."""
    x = jax.random.normal(jax.random.key(0), (5, 8))
    w = jax.random.normal(jax.random.key(1), (8, 6))
    loss = lambda y: jnp.sum(jnp.sin(y) * jnp.arange(30.0).reshape(5, 6))  # noqa: E731
    by_b = jax.grad(lambda b: loss(kernel_matmul(x, LoraKernel(w, jnp.eye(8), b, 1.0))))(
        jnp.zeros((8, 6))
    )
    by_w = jax.grad(lambda w: loss(x @ w))(w)
    np.testing.assert_allclose(by_b, by_w, rtol=1e-6, atol=1e-6)


def test_an_int8_base_is_merged_from_what_it_stands_for() -> None:
    w = jax.random.normal(jax.random.key(1), (8, 6))
    kernel = quantize_kernel(w, "int8")
    a = jnp.ones((8, 2))
    b = jnp.full((2, 6), 0.25)
    want = np.asarray(kernel.values, np.float32) * np.asarray(kernel.scale) + 2 * 0.25 * 3.0
    got = merged({"kernel": kernel}, {"a": a, "b": b}, Lora(2, 6.0))["kernel"]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    x = jax.random.normal(jax.random.key(2), (3, 8))
    np.testing.assert_allclose(kernel_matmul(x, LoraKernel(kernel, a, b, 3.0)), x @ want, atol=1e-5)


@pytest.mark.parametrize(
    ("precision", "column", "change", "want"),
    [
        # bfloat16 holds 1 and 1 + 2^-7, nothing between: a third of the way is lost, two thirds
        # become the whole.
        ("bfloat16", [1.0, 1.0], 2**-7 / 3, 1.0),
        ("bfloat16", [1.0, 1.0], 2**-7 * 2 / 3, 0.5),
        ("bfloat16", [1.0, 1.0], 2**-7, 0.0),
        ("exact", [1.0, 1.0], 2**-7 / 3, 0.0),
        # The largest of the column makes the scale 1: 10.3 is 10 and 10.75 is 11.
        ("int8", [127.0, 10.0], 0.3, 1.0),
        ("int8", [127.0, 10.0], 0.75, 1 / 3),
        # What rounding W alone does is not the merge's: 9.6 + 0.25 and 9.6 are both 10.
        ("int8", [127.0, 9.6], 0.25, 1.0),
        ("fp8_per_block", [448.0, 64.0], 2.0, 1.0),
        ("exact", [1.0, 1.0], 0.0, 0.0),
    ],
)
def test_the_merges_rounding_is_what_the_engine_misses_of_the_change(
    precision, column, change, want
) -> None:
    """D changes the second row alone: A = [0, 1], B = change / 2, alpha / r = 2."""
    base = {"x": {"kernel": jnp.array(column)[:, None]}, "other": jnp.ones(3)}
    adapters = {"x": {"a": jnp.array([[0.0], [1.0]]), "b": jnp.array([[change / 2]])}}
    found = jax.jit(merge_rounding, static_argnums=(2, 3))(base, adapters, Lora(1, 2.0), precision)
    assert float(found) == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "lora", "said"),
    [
        (
            MODEL,
            Lora(4, 8.0, ("q_proj", "c_attn")),
            "lora_targets: got 'c_attn', no linear layer has that name",
        ),
        (MODEL, Lora(33, 8.0), "lora_rank: got 33, q_proj is 32 x 32: at most 32"),
        (MODEL, Lora(17, 8.0, ("v_proj",)), "lora_rank: got 17, v_proj is 32 x 16: at most 16"),
        (
            EXPERTS,
            Lora(2, 8.0, ("up_proj",)),
            "lora_targets: got 'up_proj', adapters of experts are not supported",
        ),
    ],
    ids=["name", "rank", "narrow", "experts"],
)
def test_bad_shapes_are_refused_in_one_line(model: ModelConfig, lora: Lora, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        adapter_declarations(model, lora)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A Qwen2 of transformers with a LoRA of PEFT whose B is not zero, and the base's directory."""
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    peft = pytest.importorskip("peft", reason="peft is in the development extra")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    hf = transformers.Qwen2ForCausalLM(config)
    directory = tmp_path_factory.mktemp("base")
    hf.save_pretrained(directory)
    targets = ["q_proj", "v_proj", "down_proj"]
    model = peft.get_peft_model(
        hf, peft.LoraConfig(r=3, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(torch.randn_like(value) * 0.1)
    return model, directory


def test_values_and_gradients_are_pefts(theirs: tuple[Any, Path], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft_model, directory = theirs
    peft_model.save_pretrained(tmp_path / "adapter")
    model = read_model_config(directory)
    base = load_params(directory, model, dtype="float32")
    adapter = read_adapter(tmp_path / "adapter", model)
    lora = adapter.lora
    adapters = adapter.params
    assert adapter.base_checksum is None
    assert adapter.base_digest is None
    assert lora == Lora(3, 12.0, ("down_proj", "q_proj", "v_proj"))
    ids = np.asarray(IDS)
    peft_model.eval()
    want = peft_model(input_ids=torch.tensor(ids)).logits
    np.testing.assert_allclose(
        _logits(adapted(base, adapters, lora), model), want.detach(), atol=2e-5
    )

    def loss(adapters: Any) -> jax.Array:
        return jnp.sum(jax.nn.log_softmax(_logits(adapted(base, adapters, lora), model))[:, :-1, 7])

    peft_model.zero_grad()
    torch.log_softmax(want, -1)[:, :-1, 7].sum().backward()
    grads = jax.grad(loss)(jax.tree.map(jnp.asarray, adapters))
    gradients = {
        name: value.grad for name, value in peft_model.named_parameters() if value.grad is not None
    }
    assert len(gradients) == 2 * 3 * 2  # A and B of three matrices in two layers; the base has none
    for layer in range(2):
        for path, name in (
            (("attention", "q"), "self_attn.q_proj"),
            (("mlp", "down"), "mlp.down_proj"),
        ):
            for part, letter in (("a", "A"), ("b", "B")):
                key = f"base_model.model.model.layers.{layer}.{name}.lora_{letter}.default.weight"
                mine = grads["layers"][path[0]][path[1]][part][layer].T
                np.testing.assert_allclose(mine, gradients[key], rtol=2e-4, atol=2e-5)


def test_what_is_saved_peft_reads(theirs: tuple[Any, Path], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    _, directory = theirs
    model = read_model_config(directory)
    base = load_params(directory, model, dtype="float32")
    lora = Lora(2, 5.0)
    adapters = _adapters(model, lora)
    adapter = Adapter(lora=lora, params=adapters, base_checksum=base_checksum(base), base_digest=5)
    save_adapter(adapter, model, tmp_path / "mine", base_model=str(directory))
    with pytest.raises(FileExistsError, match="is not empty"):
        save_adapter(adapter, model, tmp_path / "mine", base_model=str(directory))
    hf = transformers.AutoModelForCausalLM.from_pretrained(directory)
    loaded = peft.PeftModel.from_pretrained(hf, tmp_path / "mine")
    with torch.no_grad():
        want = loaded(input_ids=torch.tensor(np.asarray(IDS))).logits
        whole = loaded.merge_and_unload()(input_ids=torch.tensor(np.asarray(IDS))).logits
    np.testing.assert_allclose(_logits(adapted(base, adapters, lora), model), want, atol=2e-5)
    np.testing.assert_allclose(_logits(merged(base, adapters, lora), model), whole, atol=2e-5)
    again = read_adapter(tmp_path / "mine", model)
    assert again.base_checksum == base_checksum(base)
    assert again.base_digest == 5
    assert (again.lora.rank, again.lora.alpha) == (2, 5.0)
    for have, want in zip(jax.tree.leaves(again.params), jax.tree.leaves(adapters), strict=True):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora is True; plain LoRA alone"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        # PEFT takes the first of these from the base as it reads them.
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        (
            {"target_modules": ["q_proj", "v_proj"]},
            r"\['q_proj', 'v_proj'\], and .* has .*layers.0.mlp.down_proj; PEFT would",
        ),
        (
            {"target_modules": r".*\.(q|v)_proj"},
            "has base_model.model.model.layers.0.mlp.down_proj; PEFT would",
        ),
        ({"target_modules": "("}, "must be a list of names or a regular expression"),
        (
            {"target_modules": None},
            "target_modules is None, must be a list of names or a regular expression",
        ),
        ({"r": 99}, "adapter_config.json: r is 99: got 99, q_proj is 32 x 32: at most 32"),
        ({"r": "8"}, "r is '8', must be a whole number above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, must be a number above 0"),
        (
            {"r": 2},
            r"lora_A.weight has shape \(4, 48\), this base and adapter_config.json ask for \(2, 48\)",
        ),
    ],
    ids=lambda change: next(iter(change)) if isinstance(change, dict) else "",
)
def test_other_kinds_of_adapters_are_refused(
    base: Any, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    save_adapter(_adapter(MODEL, LORA), MODEL, tmp_path / "a", base_model="x")
    fields = json.loads((tmp_path / "a" / CONFIG).read_text())
    (tmp_path / "a" / CONFIG).write_text(json.dumps(fields | change))
    with pytest.raises(UserError, match=said):
        read_adapter(tmp_path / "a", MODEL)


@pytest.mark.parametrize(
    "targets", ["all-linear", r".*\.self_attn\.(q|v)_proj", ["self_attn.q_proj", "v_proj", "query"]]
)
def test_targets_are_read_as_peft_reads_them(
    base: Any, tmp_path: Path, targets: str | list[str]
) -> None:
    lora = LORA if targets == "all-linear" else Lora(4, 8.0, ("q_proj", "v_proj"))
    save_adapter(_adapter(MODEL, lora), MODEL, tmp_path / "a", base_model="x")
    fields = json.loads((tmp_path / "a" / CONFIG).read_text())
    (tmp_path / "a" / CONFIG).write_text(json.dumps(fields | {"target_modules": targets}))
    assert len(read_adapter(tmp_path / "a", MODEL).lora.targets) == (
        7 if targets == "all-linear" else 2
    )


@pytest.mark.parametrize(
    "beside", ["embed_tokens.weight", "embed_tokens.lora_embedding_A", "norm.lora_A.weight"]
)
def test_tensors_that_are_no_lora_of_a_linear_layer_are_named_with_their_file(
    tmp_path: Path, beside: str
) -> None:
    save_adapter(_adapter(MODEL, LORA), MODEL, tmp_path / "a", base_model="x")
    file = tmp_path / "a" / "adapter_model.safetensors"
    save_file(
        load_file(file) | {f"base_model.model.model.{beside}": np.ones((4, 32), np.float32)}, file
    )
    with pytest.raises(
        UserError,
        match=rf"adapter_model.safetensors: base_model.model.model.{beside} is no LoRA matrix",
    ):
        read_adapter(tmp_path / "a", MODEL)


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (np.float32(1), r"q_proj.lora_A.weight has shape \(\), this .* ask for \(4, 32\);"),
        (None, r"q_proj.lora_A.weight has shape missing, this .* ask for \(4, 32\);"),
    ],
)
def test_a_scalar_in_place_of_a_matrix_is_not_called_missing(
    tmp_path: Path, stored: Any, said: str
) -> None:
    save_adapter(_adapter(MODEL, LORA), MODEL, tmp_path / "a", base_model="x")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    tensors.pop(name)
    if stored is not None:
        tensors[name] = np.asarray(stored)
    save_file(tensors, file)
    with pytest.raises(UserError, match=said):
        read_adapter(tmp_path / "a", MODEL)


def test_an_adapter_of_another_base_is_refused(base: Any, tmp_path: Path) -> None:
    save_adapter(_adapter(MODEL, LORA), MODEL, tmp_path / "a", base_model="x")
    deeper = ModelConfig("llama", 64, 32, 48, 3, 4, 2, 8)
    with pytest.raises(
        UserError,
        match="adapter_model.safetensors lacks .*layers.2.mlp.down_proj; PEFT would load another "
        "model",
    ):
        read_adapter(tmp_path / "a", deeper)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="can't be read"):
        read_adapter(tmp_path / "a", MODEL)


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3.5 as published: its decoder beside an image tower."""
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    qwen = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    transformers = pytest.importorskip("transformers")
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "head_dim": 16,
    }
    text |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "eos_token_id": 1,
    }
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    text |= {"linear_value_head_dim": 8, "tie_word_embeddings": False}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    config = qwen.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config).float()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, 0, 0.08)
    directory = tmp_path_factory.mktemp("wrapped")
    model.save_pretrained(directory)
    return directory


def test_adapters_of_a_wrapped_model_act_on_its_published_class(
    wrapped: Path, tmp_path: Path
) -> None:
    """By the names of the decoder's own class PEFT warns of missing keys, and no logit changes."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    model = read_model_config(wrapped)
    base = load_params(wrapped, model, dtype="float32")
    adapter = _adapter(model, LORA)
    save_adapter(
        adapter,
        model,
        tmp_path / "mine",
        base_model=str(wrapped),
        base_class=wrapping_class(wrapped),
    )
    loaded = peft.AutoPeftModel.from_pretrained(tmp_path / "mine")
    assert type(loaded.get_base_model()).__name__ == "Qwen3_5ForConditionalGeneration"
    ids = torch.tensor(np.asarray(IDS))
    with torch.no_grad():
        logits = loaded(input_ids=ids).logits
        with loaded.disable_adapter():
            before = loaded(input_ids=ids).logits
    assert float((logits - before).abs().max()) > 0.5
    np.testing.assert_allclose(_logits(base, model), before, atol=5e-5)
    np.testing.assert_allclose(
        _logits(adapted(base, adapter.params, LORA), model), logits, atol=2e-4
    )
    again = read_adapter(tmp_path / "mine", model)
    for have, want in zip(
        jax.tree.leaves(again.params), jax.tree.leaves(adapter.params), strict=True
    ):
        np.testing.assert_array_equal(have, want)


def test_pefts_adapters_of_a_wrapped_class_are_read(wrapped: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(wrapped)
    targets = r"model\.language_model\.layers\.\d+\.mlp\.(up|down)_proj"
    peft_model = peft.get_peft_model(
        theirs, peft.LoraConfig(r=3, lora_alpha=12, target_modules=targets)
    ).eval()
    with torch.no_grad():
        for name, value in peft_model.named_parameters():
            if "lora_B" in name:
                value.copy_(torch.randn_like(value) * 0.1)
        want = peft_model(input_ids=torch.tensor(np.asarray(IDS))).logits
    peft_model.save_pretrained(tmp_path / "theirs")
    model = read_model_config(wrapped)
    adapter = read_adapter(tmp_path / "theirs", model)
    assert adapter.lora == Lora(3, 12.0, ("down_proj", "up_proj"))
    base = load_params(wrapped, model, dtype="float32")
    np.testing.assert_allclose(
        _logits(adapted(base, adapter.params, adapter.lora), model), want, atol=2e-4
    )


def _renamed(tmp_path: Path, prefixes: list[str]) -> Path:
    """Adapters whose layers, in turn, have names that begin so."""
    save_adapter(_adapter(MODEL, LORA), MODEL, tmp_path / "a", base_model="x")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = {}
    for name, value in load_file(file).items():
        layer = name.removeprefix("base_model.model.model.layers.")
        tensors[f"base_model.model.{prefixes[int(layer[0]) % len(prefixes)]}layers.{layer}"] = value
    save_file(tensors, file)
    return tmp_path / "a"


@pytest.mark.parametrize(
    # Of today's and of older classes with an image tower, and of a decoder without its head.
    "prefix",
    ["model.", "model.language_model.", "language_model.model.", "language_model.", ""],
)
def test_a_decoders_layers_are_read_whatever_class_held_it(tmp_path: Path, prefix: str) -> None:
    adapter = read_adapter(_renamed(tmp_path, [prefix]), MODEL)
    for have, want in zip(
        jax.tree.leaves(adapter.params), jax.tree.leaves(_adapters(MODEL, LORA)), strict=True
    ):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize(
    "prefixes", [["model.", "model.language_model."], ["vision_tower."], ["model.visual."]]
)
def test_layers_of_two_classes_or_of_an_image_tower_are_refused(
    tmp_path: Path, prefixes: list[str]
) -> None:
    with pytest.raises(
        UserError,
        match=r"adapter_model\.safetensors: base_model\.\S+ is no LoRA matrix of a linear",
    ):
        read_adapter(_renamed(tmp_path, prefixes), MODEL)
