"""Small random models of transformers' own classes, and packed rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn_all_fields": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.fixture
def hf_config() -> Callable[..., Any]:
    """A small transformers config: hf_config("qwen3", tied=True, rope="yarn", bias=False)."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is in the development extra"
    )

    def build(
        family: str,
        *,
        tied: bool = False,
        rope: str = "default",
        bias: bool = False,
        **options: Any,
    ) -> Any:
        fields = {
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
            "rope_parameters": dict(ROPES[rope]),
        }
        if family == "qwen2":
            return transformers.Qwen2Config(**fields)
        if family == "llama":
            return transformers.LlamaConfig(**fields, attention_bias=bias)
        if family == "qwen3_moe":
            experts = {
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "norm_topk_prob": True,
            }
            return transformers.Qwen3MoeConfig(
                **fields, head_dim=16, attention_bias=bias, **(experts | options)
            )
        # Wider than hidden_size / num_attention_heads = 8, which a wrong default would give.
        return transformers.Qwen3Config(**fields, head_dim=16, attention_bias=bias)

    return build


@pytest.fixture
def hf_model(hf_config: Callable[..., Any]) -> Callable[..., Any]:
    """The model of `hf_config`, float32, with norms away from 1 and biases away from 0."""
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is in the development extra"
    )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def build(family: str, **settings: Any) -> Any:
        classes = {
            "llama": transformers.LlamaForCausalLM,
            "qwen2": transformers.Qwen2ForCausalLM,
            "qwen3": transformers.Qwen3ForCausalLM,
            "qwen3_moe": transformers.Qwen3MoeForCausalLM,
        }
        model = classes[family](hf_config(family, **settings)).eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.ndim == 1:
                    parameter.copy_(0.3 * noise + ("norm" in name))
                else:
                    parameter.copy_(0.15 * noise)
        return model

    return build


@pytest.fixture
def hf_directory(hf_model: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """(model, directory that transformers saved it to)."""

    def build(
        family: str, *, name: str = "source", max_shard_size: str = "5GB", **settings: Any
    ) -> tuple[Any, Path]:
        model = hf_model(family, **settings)
        model.save_pretrained(tmp_path / name, max_shard_size=max_shard_size)
        return model, tmp_path / name

    return build


@pytest.fixture
def tiny_model() -> tuple[ModelConfig, dict[str, Any]]:
    """A Qwen3 without transformers, large enough that every part shows in the output."""
    config = ModelConfig("qwen3", 97, 32, 64, 3, 4, 2, 16, rope_theta=1e4, initializer_range=0.2)
    params = init_params(config, jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return config, jax.tree.unflatten(tree, noisy)


@pytest.fixture
def pack() -> Callable[..., dict[str, jax.Array]]:
    """Pack segments into rows: pack([[a, b], [c]], length) -> ids, positions, segments, mask.

    The mask is false on the first tokens.
    """

    def build(rows: list[list[np.ndarray]], length: int) -> dict[str, jax.Array]:
        arrays = {
            name: np.zeros((len(rows), length), np.int32)
            for name in ("input_ids", "position_ids", "segment_ids")
        }
        mask = np.zeros((len(rows), length), bool)
        for row, segments in enumerate(rows):
            start = 0
            for number, segment in enumerate(segments, 1):
                stop = start + len(segment)
                arrays["input_ids"][row, start:stop] = segment
                arrays["position_ids"][row, start:stop] = np.arange(len(segment))
                arrays["segment_ids"][row, start:stop] = number
                mask[row, start + 1 : stop] = True
                start = stop
        return {name: jnp.asarray(value) for name, value in (arrays | {"mask": mask}).items()}

    return build
