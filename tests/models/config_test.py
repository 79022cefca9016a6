"""config.json in and out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcmdp_jax.models.config import ModelConfig, RopeScaling, from_hf, read_model_config, to_hf
from dcmdp_jax.models.layers import rotary_frequencies, yarn_attention_factor
from dcmdp_jax.models.params import num_params

# The fields that the public config.json files hold.
QWEN3_8B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
R1_DISTILL_QWEN_1P5B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN25_1P5B = R1_DISTILL_QWEN_1P5B | {"tie_word_embeddings": True, "rope_theta": 1000000.0}
SMALL = ModelConfig("qwen3", 97, 48, 80, 3, 6, 2, 16)


def test_qwen3_8b_as_published() -> None:
    config = from_hf(QWEN3_8B)
    assert config == ModelConfig(
        "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, rope_theta=1e6, max_position_embeddings=40960
    )
    # 36 * (q, o 2*4096*4096 + k, v 2*4096*1024 + MLP 3*4096*12288 + norms 2*4096 + 2*128) + 2*151936*4096 + 4096
    assert num_params(config) == 36 * (33554432 + 8388608 + 150994944 + 8448) + 1244659712 + 4096 == 8_190_735_360


def test_r1_distill_qwen_1p5b_as_published() -> None:
    config = from_hf(R1_DISTILL_QWEN_1P5B)
    assert (config.head_dim, config.attention_bias, config.rope_theta) == (128, True, 1e4)
    assert num_params(config) == 1_777_088_000


def test_tied_embeddings_count_once() -> None:
    # 151936 * 1536 = 233,373,696 fewer than the untied model of the same shape
    assert num_params(from_hf(QWEN25_1P5B)) == 1_777_088_000 - 233_373_696 == 1_543_714_304


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ["default", "linear", "yarn", "yarn_all_fields", "llama3"])
def test_export_of_an_import_is_the_identity(hf_config: Callable[..., Any], family: str, rope: str) -> None:
    config = from_hf(hf_config(family, rope=rope, tied=True).to_dict())
    assert config.rope_scaling.kind == rope.removesuffix("_all_fields")
    assert from_hf(json.loads(json.dumps(to_hf(config, dtype="bfloat16")))) == config


@pytest.mark.parametrize("rope", ["linear", "yarn", "yarn_all_fields", "llama3"])
def test_transformers_reads_the_same_rope_from_an_export(hf_config: Callable[..., Any], rope: str) -> None:
    source = hf_config("qwen3", rope=rope)
    again = type(source)(**to_hf(from_hf(source.to_dict()), dtype="float32"))
    # Written out or left to transformers' default, a field means the same; all given ones must survive.
    assert {name: again.rope_parameters.get(name) for name in source.rope_parameters} == source.rope_parameters
    # transformers gives the name itself where torch is not installed.
    dtype = str(again.dtype).removeprefix("torch.")
    assert (again.head_dim, again.num_key_value_heads, dtype) == (16, 2, "float32")


def test_older_rope_spelling() -> None:
    fields = QWEN3_8B | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32768)
    config = from_hf(fields)
    assert (config.rope_theta, config.rope_scaling) == (1e6, scaling)


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_rotary_fields_are_found_wherever_transformers_finds_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    yarn, outside = {"rope_type": "yarn", "factor": 4.0}, {"original_max_position_embeddings": 16}
    places = [
        {"rope_scaling": scaling, "rope_theta": 5e3} | place
        for scaling in (yarn, _LLAMA3, {"type": "linear", "factor": 2.0})
        for place in ({}, outside)
    ]
    places += [{"rope_parameters": scaling | {"rope_theta": 5e3}} | outside for scaling in (yarn, _LLAMA3)]
    places += [
        {"rope_scaling": {}, "rope_parameters": yarn | {"rope_theta": 5e3}},
        {"rope_scaling": yarn | outside, "rope_parameters": yarn | outside | {"rope_theta": 5e3}, "rope_theta": 5e3},
        {"rope_scaling": {"rope_type": "default"}, "rope_theta": 5e3} | outside,
    ]
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    for place in places:
        fields = {"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 64, **sizes, **place}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        embedding = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
        frequencies, factor = rotary_frequencies(read_model_config(tmp_path))
        torch.testing.assert_close(torch.from_numpy(np.array(frequencies)), embedding.inv_freq, msg=str(place))
        assert factor == pytest.approx(embedding.attention_scaling, rel=1e-6), place
    plain, stretched = (
        rotary_frequencies(from_hf(QWEN3_8B | {"rope_scaling": yarn} | place))[0] for place in ({}, outside)
    )
    assert not np.array_equal(plain, stretched)  # the field outside is no decoration


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            r"rope_scaling {.*linear.*} \(base 1e\+06\) and rope_parameters {.*} \(base 1e\+06\) disagree; keep",
        ),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 1000000, in rope_parameters it is 10000.0; keep"),
        (
            {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 8}, "original_max_position_embeddings": 9},
            "original_max_position_embeddings is 9, in rope_scaling it is 8; keep the one",
        ),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}, "rope_type 'linear' and type 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not used"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters has the unknown field 'full_attention' for 'default'",
        ),
    ],
)
def test_rotary_fields_that_disagree_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        from_hf(QWEN3_8B | change)


def test_fields_that_transformers_fills_in() -> None:
    absent = {name: value for name, value in QWEN3_8B.items() if name not in ("head_dim", "rope_theta")}
    config = from_hf(absent | {"num_attention_heads": 16})
    assert config.head_dim == 128  # not 4096 / 16
    assert config.rope_theta == 1e4
    assert from_hf(QWEN3_8B | {"num_key_value_heads": None}).num_kv_heads == 32
    # yarn without the field: the unscaled context is max_position_embeddings
    yarn = from_hf(QWEN3_8B | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": None}})
    assert yarn.rope_scaling.original_max_position_embeddings == 40960


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "config.json: model_type is 'gemma', supported are llama, qwen2, qwen3, qwen3_moe"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act is 'gelu', only 'silu' is supported"),
        ({"use_sliding_window": True}, "config.json: use_sliding_window is true, only full attention is supported"),
        ({"vocab_size": None}, "config.json: vocab_size is null, must be a number"),
        ({"hidden_size": "4096"}, "config.json: hidden_size is '4096', must be a whole number in [1, 2147483647]"),
        ({"num_hidden_layers": 2.5}, "config.json: num_hidden_layers is 2.5, must be a whole number in [1, 10000]"),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers is 0, must be a whole number in [1, 10000]"),
        (
            {"num_key_value_heads": 5},
            "config.json: num_attention_heads is 32, must be a multiple of num_key_value_heads=5",
        ),
        ({"head_dim": 7}, "config.json: head_dim is 7, must be even (rotary embedding pairs dimensions)"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "config.json: rope_type is 'longrope', supported are default, linear, yarn, llama3",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": None}},
            "config.json: rope_scaling of type 'yarn' needs the field 'factor'",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "config.json: rope_scaling of type 'llama3' needs the field 'high_freq_factor'",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "stretch": 3}},
            "config.json: rope_scaling has the unknown field 'stretch' for 'linear'",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "4"}},
            "config.json: factor is '4', must be a number in [1, 1000000]",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
            "config.json: factor is 0.5, must be a number in [1, 1000000]",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "config.json: partial_rotary_factor other than 1 is not used by these families",
        ),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_hf(QWEN3_8B | change)
    assert str(caught.value) == message


def test_read_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no config.json, not a Hugging Face model directory"):
        read_model_config(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=f"^{path}: not valid JSON"):
        read_model_config(tmp_path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=f"^{path}: holds a list, must hold a JSON object"):
        read_model_config(tmp_path)
    path.write_bytes(b"\xff{}")
    with pytest.raises(ValueError, match=f"^{path}: not valid JSON"):
        read_model_config(tmp_path)
    path.write_text(json.dumps(to_hf(SMALL, dtype="float32")))
    assert read_model_config(tmp_path) == SMALL


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": "abc"},
        {"rope_scaling": [1]},
        {"model_type": ["qwen3"]},
        {"max_position_embeddings": math.inf},
        {"num_attention_heads": 0, "head_dim": None},
        {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": None, "hidden_size": 4097},
        {"rope_theta": 0},
        {"rope_theta": -1e4},
        {"rope_theta": math.nan},
        {"rms_norm_eps": 0},
        {"rms_norm_eps": -1e-6},
        {"hidden_size": 10**9},
        {"hidden_size": 10**400},
        {"num_hidden_layers": 10**9},
        {"tie_word_embeddings": None},
        {"use_sliding_window": "no"},
        {"hidden_act": ["silu"]},
        {"head_dim": True},
        {"rope_scaling": {"rope_type": ["yarn"]}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "truncate": 0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_slow": 0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
    ],
    ids=str,
)
def test_a_malformed_field_is_named_with_its_file_and_value(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B | change))
    with pytest.raises(ValueError, match=f"^{path}: ") as caught:
        read_model_config(tmp_path)
    names = [name for field, value in change.items() for name in (field, *(value if isinstance(value, dict) else ()))]
    assert any(name in str(caught.value) for name in names) and len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["tie_word_embeddings", "attention_bias"])
def test_a_word_is_no_truth_value(name: str) -> None:
    with pytest.raises(ValueError, match=f"^config.json: {name} is 'false', must be true or false"):
        from_hf(QWEN3_8B | {name: "false"})


def test_yarn_attention_factor() -> None:
    assert yarn_attention_factor(RopeScaling("yarn", factor=4.0)) == pytest.approx(0.1 * math.log(4) + 1)
    # transformers divides the two scales: (0.07 log 4 + 1) / (0.03 log 4 + 1)
    both = RopeScaling("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.3)
    assert yarn_attention_factor(both) == pytest.approx(1.0532376815143234, rel=1e-12)
    assert yarn_attention_factor(RopeScaling("yarn", factor=4.0, attention_factor=1.3)) == 1.3
    assert yarn_attention_factor(RopeScaling("yarn", factor=1.0)) == 1.0
