"""Shapes of the models that the configs train, as their publishers' config.json has them.

A plan needs no weights: where `model.path` is no directory, its last part names one of these.
"""

from __future__ import annotations

from pathlib import Path

from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig, from_hf, read_model_config
from dcmdp_jax.run.files import fresh_model

_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip

PUBLISHED = {
    "Qwen3-0.6B": _QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "Qwen3-1.7B": _QWEN3 | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "Qwen3-8B": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "Qwen3-30B-A3B": _QWEN3 | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "rope_theta": 10000,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Name of the model's directory -> fields of its config.json."""


def model_of(config: Config) -> ModelConfig:
    """The model of a config: its directory's, a published one of the directory's name, or a fresh one.

    Raises:
        UserError: if there is no such directory and no published model of its name.
    """
    path = config.model.path
    if not path:
        return fresh_model(config, build_tokenizer())
    if Path(path).is_dir():
        return read_model_config(path)
    fields = PUBLISHED.get(Path(path.partition("@")[0]).name)
    if fields is None:
        raise UserError(
            f"config.model.path: no directory {path}, and no published shape of that name; known are "
            f"{', '.join(PUBLISHED)}"
        )
    return from_hf(fields)
