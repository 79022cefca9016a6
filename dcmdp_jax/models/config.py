"""What a Qwen2 or Qwen3 dense checkpoint says of itself, read from its Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Rotary scaling -> the fields it must have, and those it may have.
_ROPE_FIELDS = {
    "linear": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
}


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
    if kind not in _ROPE_FIELDS:
        raise ValueError(f"rope_type: got {kind!r}, supported are default, {', '.join(_ROPE_FIELDS)}")
    if raw.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("rope_parameters: partial_rotary_factor other than 1 is not used by these families")
    needed, optional = _ROPE_FIELDS[kind]
    known = {field.name for field in dataclasses.fields(RopeScaling)} - {"kind"}
    if unknown := sorted(set(raw) - known):
        raise ValueError(f"rope_parameters: unknown field {unknown[0]!r} for {kind!r}")
    # Fields of another kind, which transformers warns of and ignores, are ignored here too.
    values = {name: raw[name] for name in (*needed, *optional) if raw.get(name) is not None}
    if "original_max_position_embeddings" in needed:
        values.setdefault("original_max_position_embeddings", max_position_embeddings)
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"rope_parameters: {kind!r} needs the field {missing[0]!r}")
    if wrong := [name for name, value in values.items() if not isinstance(value, int | float)]:
        raise ValueError(f"rope_parameters: {wrong[0]} is {values[wrong[0]]!r}, expected a number")
    if values["factor"] < 1:
        raise ValueError(f"rope_parameters: factor is {values['factor']}, must be at least 1")
    return theta, RopeScaling(kind=kind, **values)


def from_hf(fields: Mapping[str, Any]) -> ModelConfig:
    """Reads the fields of a config.json of a Qwen2 or Qwen3 dense model.

    Raises:
        ValueError: naming the field, when the family, an activation, a sliding window or a rotary scaling is
            one that this code would compute wrongly, or a needed field is missing.
    """
    model_type = fields.get("model_type")
    if model_type not in _ARCHITECTURES:
        supported = ", ".join(sorted(_ARCHITECTURES))
        raise ValueError(f"config.json: model_type is {model_type!r}, supported are {supported}")
    if (act := fields.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"config.json: hidden_act is {act!r}, only 'silu' is supported")
    if fields.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window is true, only full attention is supported")

    def number(name: str, kind: Callable[[Any], Any], default: Any = None) -> Any:
        value = fields.get(name, default)
        if value is None:
            raise ValueError(f"config.json: field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
            raise ValueError(f"config.json: {name} is {value!r}, expected {kind.__name__}")
        return kind(value)

    def flag(name: str) -> bool:
        value = fields.get(name, False)
        if not isinstance(value, bool):
            raise ValueError(f"config.json: {name} is {value!r}, expected true or false")
        return value

    heads, hidden_size = number("num_attention_heads", int), number("hidden_size", int)
    max_positions = number("max_position_embeddings", int, 32768)
    theta, scaling = _rope(fields, max_positions)
    # Absent: what transformers' Qwen3Config and Qwen2Config take. Null: derived.
    head_dim = fields.get("head_dim", 128 if model_type == "qwen3" else None)
    return ModelConfig(
        model_type=model_type,
        vocab_size=number("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=number("intermediate_size", int),
        num_layers=number("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=heads if fields.get("num_key_value_heads", 0) is None else number("num_key_value_heads", int),
        head_dim=hidden_size // heads if head_dim is None else number("head_dim", int, head_dim),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=number("rms_norm_eps", float, 1e-6),
        tie_word_embeddings=flag("tie_word_embeddings"),
        # Qwen2 always has the biases and no field for them.
        attention_bias=model_type == "qwen2" or flag("attention_bias"),
        max_position_embeddings=max_positions,
        initializer_range=number("initializer_range", float, 0.02),
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
        needed, optional = _ROPE_FIELDS[scaling.kind]
        changed = [name for name in optional if getattr(scaling, name) != getattr(RopeScaling(), name)]
        values = {name: getattr(scaling, name) for name in (*needed, *changed)}
        fields["rope_scaling"] = {"rope_type": scaling.kind, **values}
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
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(fields).__name__}")
    try:
        return from_hf(fields)
    except (TypeError, ValueError, ArithmeticError) as error:
        if str(error).startswith("config.json: "):
            raise
        raise ValueError(f"{path}: a field is malformed ({error})") from error


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """Yarn's scale of cos and sin: 0.1 m log(factor) + 1 (Peng et al. 2023, section 3.4), or the quotient of two."""
    if scaling.attention_factor:
        return scaling.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)
