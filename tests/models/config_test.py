"""config.json in and out."""

import json
import math

import numpy as np
import pytest

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_config import from_hf, read_model_config, to_hf
from dcmdp_jax.models.layers import rotary_frequencies, yarn_attention_factor
from dcmdp_jax.models.params import num_params
from dcmdp_jax.models.rope import RopeScaling
from tests.support.messages import QWEN3_8B

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


def test_qwen3_8b_as_published():
    config = from_hf(QWEN3_8B)
    assert config == ModelConfig(
        "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, rope_theta=1e6, max_position_embeddings=40960
    )
    # 36 * (q, o 2*4096*4096 + k, v 2*4096*1024 + MLP 3*4096*12288 + norms 2*4096 + 2*128) +
    # 2*151936*4096 + 4096
    assert (
        num_params(config)
        == 36 * (33554432 + 8388608 + 150994944 + 8448) + 1244659712 + 4096
        == 8_190_735_360
    )


def test_r1_distill_qwen_1p5b_as_published():
    config = from_hf(R1_DISTILL_QWEN_1P5B)
    assert (config.head_dim, config.attention_bias, config.rope_theta) == (128, True, 1e4)
    assert num_params(config) == 1_777_088_000


def test_tied_embeddings_count_once():
    # 151936 * 1536 = 233,373,696 fewer than the untied model of the same shape
    assert num_params(from_hf(QWEN25_1P5B)) == 1_777_088_000 - 233_373_696 == 1_543_714_304


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("rope", ["default", "linear", "yarn", "yarn_all_fields", "llama3"])
def test_export_of_an_import_is_the_identity(hf_config, family, rope):
    config = from_hf(hf_config(family, rope=rope, tied=True).to_dict())
    assert config.rope_scaling.kind == rope.removesuffix("_all_fields")
    assert from_hf(json.loads(json.dumps(to_hf(config, dtype="bfloat16")))) == config


@pytest.mark.parametrize("rope", ["linear", "yarn", "yarn_all_fields", "llama3"])
def test_transformers_reads_the_same_rope_from_an_export(hf_config, rope):
    source = hf_config("qwen3", rope=rope)
    again = type(source)(**to_hf(from_hf(source.to_dict()), dtype="float32"))
    # Written out or left to transformers' default, a field means the same; all given ones must
    # survive.
    assert {
        name: again.rope_parameters.get(name) for name in source.rope_parameters
    } == source.rope_parameters
    # transformers gives the name itself where torch is not installed.
    dtype = str(again.dtype).removeprefix("torch.")
    assert (again.head_dim, again.num_key_value_heads, dtype) == (16, 2, "float32")


def test_older_rope_spelling():
    fields = QWEN3_8B | {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    }
    scaling = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=32768)
    config = from_hf(fields)
    assert (config.rope_theta, config.rope_scaling) == (1e6, scaling)


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_rotary_fields_are_found_wherever_transformers_finds_them(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    yarn = {"rope_type": "yarn", "factor": 4.0}
    outside = {"original_max_position_embeddings": 16}
    places = [
        {"rope_scaling": scaling, "rope_theta": 5e3} | place
        for scaling in (yarn, _LLAMA3, {"type": "linear", "factor": 2.0})
        for place in ({}, outside)
    ]
    places += [
        {"rope_parameters": scaling | {"rope_theta": 5e3}} | outside for scaling in (yarn, _LLAMA3)
    ]
    places += [
        {"rope_scaling": {}, "rope_parameters": yarn | {"rope_theta": 5e3}},
        {
            "rope_scaling": yarn | outside,
            "rope_parameters": yarn | outside | {"rope_theta": 5e3},
            "rope_theta": 5e3,
        },
        {"rope_scaling": {"rope_type": "default"}, "rope_theta": 5e3} | outside,
    ]
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
    }
    for place in places:
        fields = {
            "model_type": "llama",
            "vocab_size": 8,
            "max_position_embeddings": 64,
            **sizes,
            **place,
        }
        (tmp_path / "config.json").write_text(json.dumps(fields))
        embedding = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
        frequencies, factor = rotary_frequencies(read_model_config(tmp_path))
        torch.testing.assert_close(
            torch.from_numpy(np.array(frequencies)), embedding.inv_freq, msg=str(place)
        )
        assert factor == pytest.approx(embedding.attention_scaling, rel=1e-6), place
    plain, stretched = (
        rotary_frequencies(from_hf(QWEN3_8B | {"rope_scaling": yarn} | place))[0]
        for place in ({}, outside)
    )
    assert not np.array_equal(plain, stretched)  # the field outside is no decoration


def test_fields_that_transformers_fills_in():
    absent = {
        name: value for name, value in QWEN3_8B.items() if name not in ("head_dim", "rope_theta")
    }
    config = from_hf(absent | {"num_attention_heads": 16})
    assert config.head_dim == 128  # not 4096 / 16
    assert config.rope_theta == 1e4
    assert from_hf(QWEN3_8B | {"num_key_value_heads": None}).num_kv_heads == 32
    # yarn without the field: the unscaled context is max_position_embeddings
    yarn = from_hf(
        QWEN3_8B | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": None}}
    )
    assert yarn.rope_scaling.original_max_position_embeddings == 40960


def test_read_config_names_the_file(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="no config.json, not a Hugging Face model directory"
    ):
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
    path.write_text(json.dumps(QWEN3_8B | {"head_dim": True}))
    with pytest.raises(ValueError, match=f"^{path}: head_dim is True, must be a whole number"):
        read_model_config(tmp_path)
    path.write_text(json.dumps(to_hf(SMALL, dtype="float32")))
    assert read_model_config(tmp_path) == SMALL


def test_yarn_attention_factor():
    assert yarn_attention_factor(RopeScaling("yarn", factor=4.0)) == pytest.approx(
        0.1 * math.log(4) + 1
    )
    # transformers divides the two scales: (0.07 log 4 + 1) / (0.03 log 4 + 1)
    both = RopeScaling("yarn", factor=4.0, mscale=0.7, mscale_all_dim=0.3)
    assert yarn_attention_factor(both) == pytest.approx(1.0532376815143234, rel=1e-12)
    assert yarn_attention_factor(RopeScaling("yarn", factor=4.0, attention_factor=1.3)) == 1.3
    assert yarn_attention_factor(RopeScaling("yarn", factor=1.0)) == 1.0
