"""Shapes of published models, as their publishers' config.json has them.

A plan needs no weights: where `model.path` is not a directory, its last part names one of these.
"""

from pathlib import Path
from typing import Any

from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.errors import UserError, suggestion
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.gguf_convert import MODELS, PACKAGE
from dcmdp_jax.models.hf_config import from_hf, read_model_config
from dcmdp_jax.run.task import fresh_model

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_QWEN = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN3 = _QWEN | {
    "model_type": "qwen3",
    "head_dim": 128,
    "rope_theta": 1000000,
    "attention_bias": False,
    "max_position_embeddings": 40960,
}
_MOE = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_QWEN2 = _QWEN | {"model_type": "qwen2", "rope_theta": 10000, "max_position_embeddings": 131072}
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "rope_theta": 500000,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 8192,
    },
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
_SMOLLM3 = {
    "model_type": "smollm3",
    "vocab_size": 128256,
    "rope_theta": 5000000,
    "no_rope_layer_interval": 4,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536,
}
_OLMO3 = {
    "model_type": "olmo3",
    "vocab_size": 100278,
    "rope_theta": 500000,
    "sliding_window": 4096,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8,
        "original_max_position_embeddings": 8192,
        "beta_fast": 32,
        "beta_slow": 1,
        "attention_factor": 1.2079441541679836,
    },
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000,
    "rope_local_base_freq": 10000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}
_QWEN35 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_num_value_heads": 16,
    "rope_theta": 10000000,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}


def _config(base: dict[str, Any], *sizes: int, **others: Any) -> dict[str, Any]:
    return base | dict(zip(_SIZES, sizes, strict=True)) | others


PUBLISHED = {
    "Qwen3-0.6B": _config(_QWEN3, 1024, 3072, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-1.7B": _config(_QWEN3, 2048, 6144, 28, 16, 8, tie_word_embeddings=True),
    "Qwen3-8B": _config(_QWEN3, 4096, 12288, 36, 32, 8),
    "Qwen3-30B-A3B": _config(_QWEN3 | _MOE, 2048, 6144, 48, 32, 4, model_type="qwen3_moe"),
    "Qwen3.5-0.8B": _config(_QWEN35, 1024, 3584, 24, 8, 2),
    "DeepSeek-R1-Distill-Qwen-1.5B": _config(_QWEN2, 1536, 8960, 28, 12, 2),
    "Llama-3.1-8B-Instruct": _config(_LLAMA, 4096, 14336, 32, 32, 8),
    "Mistral-7B-Instruct-v0.1": _config(_MISTRAL, 4096, 14336, 32, 32, 8),
    "SmolLM3-3B": _config(_SMOLLM3, 2048, 11008, 36, 16, 4),
    "Olmo-3-7B-Instruct": _config(_OLMO3, 4096, 11008, 32, 32, 32),
    "gemma-3-270m-it": _config(_GEMMA3, 640, 2048, 18, 4, 1),
    "gemma-3-1b-it": _config(_GEMMA3, 1152, 6912, 26, 4, 1),
}
"""Name of the model's directory -> fields of its config.json."""

# Size -> its `_SIZES`, and the context of the base model.
_QWEN25 = {
    "0.5B": (896, 4864, 24, 14, 2, 32768),
    "1.5B": (1536, 8960, 28, 12, 2, 131072),
    "3B": (2048, 11008, 36, 16, 2, 32768),
    "7B": (3584, 18944, 28, 28, 4, 131072),
    "14B": (5120, 13824, 48, 40, 8, 131072),
    "32B": (5120, 27648, 64, 40, 8, 131072),
    "72B": (8192, 29568, 80, 64, 8, 131072),
}
for _size, (*_numbers, _context) in _QWEN25.items():
    _base = _config(_QWEN2, *_numbers, rope_theta=1000000, max_position_embeddings=_context)
    if _size in ("0.5B", "1.5B", "3B"):
        _base["tie_word_embeddings"] = True
    else:
        _base["vocab_size"] = 152064
    _instruct = _base | {"max_position_embeddings": 32768}
    PUBLISHED[f"Qwen2.5-{_size}"] = _base
    PUBLISHED[f"Qwen2.5-{_size}-Instruct"] = _instruct
    if _size != "72B":
        PUBLISHED[f"Qwen2.5-Coder-{_size}"] = _instruct
    if _size in ("1.5B", "7B", "72B"):
        _math = {"max_position_embeddings": 4096, "rope_theta": 10000}
        PUBLISHED[f"Qwen2.5-Math-{_size}"] = _base | _math


def model_of(config: Config) -> ModelConfig:
    """The model of a config: its directory's, a published one of that name, or a fresh one.

    Raises:
        UserError: if neither a directory nor a published model has this name.
    """
    path = config.model.path
    if not path:
        return fresh_model(
            config.model.architecture, build_tokenizer(), longest=config.max_total_tokens
        )
    directory = Path(path)
    if path.startswith(PACKAGE):
        directory = MODELS / path.removeprefix(PACKAGE)
        if not directory.is_dir():
            raise UserError(
                f"config.model.path: got {path}, and no directory {directory}; plan needs its "
                "directory; `dcmdp train --dry-run` converts it"
            )
    if directory.is_dir():
        return read_model_config(directory)
    name = Path(path.partition("@")[0]).name
    # An instruction-tuned model has the shape of its base, where it is not listed.
    fields = PUBLISHED.get(name, PUBLISHED.get(name.removesuffix("-Instruct")))
    if fields is None:
        raise UserError(
            f"config.model.path: no directory {path}, and no published shape of that name; known "
            f"are {', '.join(PUBLISHED)}{suggestion(name, PUBLISHED)}"
        )
    return from_hf(fields)
