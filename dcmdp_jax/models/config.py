"""What a Qwen2 or Qwen3 dense checkpoint says of itself, read from its Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies, in the fields of Hugging Face's `rope_parameters`.

    Attributes:
        kind: "default", "linear", "yarn" or "llama3".
        factor: how many times the context is stretched.
        original_max_position_embeddings: context length, in tokens, of the unscaled model.
        attention_factor: multiplies cos and sin (yarn); 0 means derive it from the other fields.
        beta_fast, beta_slow: rotations that bound yarn's ramp.
        mscale, mscale_all_dim: yarn's optional attention scale; 0 means absent.
        truncate: round yarn's ramp bounds to whole dimensions.
        low_freq_factor, high_freq_factor: llama3's wavelength bounds.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a dense decoder. Field names follow config.json where it has one.

    Attributes:
        model_type: "qwen2" (biases on q, k, v) or "qwen3" (RMS norm on the heads of q and k).
        vocab_size: rows of the embedding, padding rows included.
        hidden_size, intermediate_size: residual and MLP width.
        num_layers, num_heads, num_kv_heads, head_dim: decoder depth and attention shape.
        rope_theta, rope_scaling: rotary base and its scaling.
        rms_norm_eps: added to the mean square.
        tie_word_embeddings: the output layer is the embedding.
        attention_bias: q, k and v (qwen3: o too) carry a bias.
        max_position_embeddings: longest context in tokens.
        initializer_range: standard deviation of a fresh matrix.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rope_scaling: RopeScaling = RopeScaling()
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.model_type not in _ARCHITECTURES:
            raise ValueError(f"model_type: got {self.model_type!r}, supported are {', '.join(sorted(_ARCHITECTURES))}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads: got {self.num_heads}, must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim: got {self.head_dim}, must be even (rotary embedding pairs dimensions)")

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each head of q and k."""
        return self.model_type == "qwen3"

    @property
    def output_bias(self) -> bool:
        """Qwen3's `attention_bias` reaches the output projection; Qwen2's does not."""
        return self.attention_bias and self.model_type == "qwen3"

    @property
    def num_params(self) -> int:
        """Parameters of the model, tied embeddings counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        bias = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if self.attention_bias else 0
        bias += self.hidden_size if self.output_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + bias + norms + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size


def _rope(fields: Mapping[str, Any], max_position_embeddings: int) -> tuple[float, RopeScaling]:
    """Base and scaling from either spelling: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    raw = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    theta = float(raw.pop("rope_theta", fields.get("rope_theta", 10000.0)))
    kind = raw.pop("rope_type", raw.pop("type", "default")) or "default"
    raw.pop("type", None)
    if kind == "default":
        return theta, RopeScaling()
    if kind not in ("linear", "yarn", "llama3"):
        raise ValueError(f"rope_type: got {kind!r}, supported are default, linear, yarn, llama3")
    if "factor" not in raw:
        raise ValueError(f"rope_parameters: {kind!r} needs the field 'factor'")
    known = {field.name for field in dataclasses.fields(RopeScaling)} - {"kind"}
    if unknown := sorted(set(raw) - known - {"partial_rotary_factor"}):
        raise ValueError(f"rope_parameters: unknown field {unknown[0]!r} for {kind!r}")
    if raw.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rope_parameters: partial_rotary_factor other than 1 is not used by these families")
    values = {name: value for name, value in raw.items() if value is not None}
    original = values.pop("original_max_position_embeddings", max_position_embeddings)
    return theta, RopeScaling(kind=kind, original_max_position_embeddings=int(original), **values)


def from_hf(fields: Mapping[str, Any]) -> ModelConfig:
    """Reads the fields of a config.json of a Qwen2 or Qwen3 dense model.

    Raises:
        ValueError: naming the field, when the family, an activation, a sliding window or a rotary scaling is
            one that this code would compute wrongly, or a needed field is missing.
    """
    model_type = fields.get("model_type")
    if model_type not in _ARCHITECTURES:
        raise ValueError(f"config.json: model_type is {model_type!r}, supported are {', '.join(sorted(_ARCHITECTURES))}")
    if (act := fields.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"config.json: hidden_act is {act!r}, only 'silu' is supported")
    if fields.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window is true, only full attention is supported")
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [name for name in needed if name not in fields]:
        raise ValueError(f"config.json: field {missing[0]!r} is missing")
    heads = int(fields["num_attention_heads"])
    max_positions = int(fields.get("max_position_embeddings", 32768))
    theta, scaling = _rope(fields, max_positions)
    return ModelConfig(
        model_type=model_type,
        vocab_size=int(fields["vocab_size"]),
        hidden_size=int(fields["hidden_size"]),
        intermediate_size=int(fields["intermediate_size"]),
        num_layers=int(fields["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or int(fields["hidden_size"]) // heads),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        # Qwen2 always has the biases and no field for them.
        attention_bias=model_type == "qwen2" or bool(fields.get("attention_bias", False)),
        max_position_embeddings=max_positions,
        initializer_range=float(fields.get("initializer_range", 0.02)),
    )


def to_hf(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json that transformers and vLLM load; `from_hf` of it is `config` again.

    Args:
        config: the model.
        dtype: "float32" or "bfloat16", the dtype of the saved tensors.
    """
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "use_sliding_window": False,
        "use_cache": True,
    }
    if config.model_type == "qwen3":
        fields["attention_bias"] = config.attention_bias
    scaling = config.rope_scaling
    if scaling.kind != "default":
        default = RopeScaling(original_max_position_embeddings=-1)
        changed = {k: v for k, v in dataclasses.asdict(scaling).items() if k != "kind" and v != getattr(default, k)}
        fields["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor, **changed}
    return fields


def read_config(directory: str | Path) -> ModelConfig:
    """Reads `directory`/config.json.

    Raises:
        FileNotFoundError: if there is no config.json.
        ValueError: if it is not JSON, or as `from_hf`.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: no config.json, not a Hugging Face model directory")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    return from_hf(fields)


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """Yarn's scale of cos and sin: 0.1 m log(factor) + 1 (Peng et al. 2023, section 3.4), or the quotient of two."""
    if scaling.attention_factor:
        return scaling.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)
