"""Shape of a dense Qwen2 or Qwen3 model, read from its Hugging Face config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import read_json_object, shorten

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
# Field -> lowest and highest value. The highest are far above any model: they keep products and float32 in range.
_WHOLE = {
    "vocab_size": (1, 2**31 - 1),
    "hidden_size": (1, 2**31 - 1),
    "intermediate_size": (1, 2**31 - 1),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (1, 2**31 - 1),
    "num_key_value_heads": (1, 2**31 - 1),
    "head_dim": (2, 2**31 - 1),
    "max_position_embeddings": (2, 2**31 - 1),
    "original_max_position_embeddings": (1, 2**31 - 1),
}
_REAL = {
    "rope_theta": (1.001, 1e15),
    "rms_norm_eps": (1e-30, 1.0),
    "initializer_range": (0.0, 100.0),
    "factor": (1.0, 1e6),
    "attention_factor": (1e-6, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
}
_MOST_PARAMS = 10**13


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
            raise UserError(f"model_type: got {self.model_type!r}, supported are {', '.join(sorted(_ARCHITECTURES))}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: got {getattr(self, name)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads: got {self.num_heads}, must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(f"head_dim: got {self.head_dim}, must be even (rotary embedding pairs dimensions)")
        for name in ("rope_theta", "rms_norm_eps"):
            low, high = _REAL[name]
            if not low <= getattr(self, name) <= high:
                raise UserError(f"{name}: got {getattr(self, name)}, must be in [{low:g}, {high:g}]")

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each head of q and k."""
        return self.model_type == "qwen3"

    @property
    def output_bias(self) -> bool:
        """Qwen3's `attention_bias` reaches the output projection; Qwen2's does not."""
        return self.attention_bias and self.model_type == "qwen3"


def _number(name: str, value: Any) -> int | float:
    """`value` of a field in `_WHOLE` or `_REAL`, in range."""
    whole = name in _WHOLE
    low, high = (_WHOLE if whole else _REAL)[name]
    # 4096.0 is a whole number too. The comparison also refuses NaN and infinity, and integers too large for a float.
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        if not whole:
            return float(value)
        if value == int(value):
            return int(value)
    kind = "a whole number" if whole else "a number"
    raise UserError(f"config.json: {name} is {shorten(value)}, must be {kind} in [{low:g}, {high:.10g}]")


def _rope(fields: Mapping[str, Any], max_position_embeddings: int) -> tuple[float, RopeScaling]:
    """Base and scaling from either spelling: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    section = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    raw = fields.get(section)
    if raw is not None and not isinstance(raw, dict):
        raise UserError(f"config.json: {section} is {shorten(raw)}, must be an object or null")
    raw = dict(raw or {})
    theta = _number("rope_theta", raw.pop("rope_theta", fields.get("rope_theta", 10000.0)))
    kind = raw.pop("rope_type", raw.pop("type", "default"))
    raw.pop("type", None)
    if kind is None or kind == "default":
        return theta, RopeScaling()
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        supported = ", ".join(_ROPE_FIELDS)
        raise UserError(f"config.json: rope_type is {shorten(kind)}, supported are default, {supported}")
    if raw.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("config.json: partial_rotary_factor other than 1 is not used by these families")
    needed, optional = _ROPE_FIELDS[kind]
    known = {field.name for field in dataclasses.fields(RopeScaling)} - {"kind"}
    if unknown := sorted(set(raw) - known):
        raise UserError(f"config.json: {section} has the unknown field {shorten(unknown[0])} for {kind!r}")
    # Fields of another kind, which transformers warns of and ignores, are ignored here too.
    values = {name: raw[name] for name in (*needed, *optional) if raw.get(name) is not None}
    if "original_max_position_embeddings" in needed:
        values.setdefault("original_max_position_embeddings", max_position_embeddings)
    if missing := [name for name in needed if name not in values]:
        raise UserError(f"config.json: {section} of type {kind!r} needs the field {missing[0]!r}")
    if not isinstance(truncate := values.pop("truncate", True), bool):
        raise UserError(f"config.json: truncate is {shorten(truncate)}, must be true or false")
    scaling = RopeScaling(kind, truncate=truncate, **{name: _number(name, value) for name, value in values.items()})
    if kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise UserError(
            f"config.json: low_freq_factor is {scaling.low_freq_factor:g}, must be below high_freq_factor="
            f"{scaling.high_freq_factor:g}"
        )
    return theta, scaling


def from_hf(fields: Mapping[str, Any]) -> ModelConfig:
    """Reads the fields of a config.json of a Qwen2 or Qwen3 dense model; nothing is allocated, whatever the sizes.

    Raises:
        UserError: "config.json: " and the field, its value and what it must be, when the family, an activation, a
            sliding window or a rotary scaling is one that this code would compute wrongly, a needed field is missing,
            malformed or out of range, or sizes do not fit each other.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        supported = ", ".join(sorted(_ARCHITECTURES))
        raise UserError(f"config.json: model_type is {shorten(model_type)}, supported are {supported}")
    if (act := fields.get("hidden_act", "silu")) != "silu":
        raise UserError(f"config.json: hidden_act is {shorten(act)}, only 'silu' is supported")

    def flag(name: str) -> bool:
        value = fields.get(name, False)
        if not isinstance(value, bool):
            raise UserError(f"config.json: {name} is {shorten(value)}, must be true or false")
        return value

    def number(name: str, default: Any = None) -> int | float:
        value = fields.get(name, default)
        if value is None:
            raise UserError(f"config.json: {name} is {'null' if name in fields else 'missing'}, must be a number")
        return _number(name, value)

    if flag("use_sliding_window"):
        raise UserError("config.json: use_sliding_window is true, only full attention is supported")
    heads, hidden_size = number("num_attention_heads"), number("hidden_size")
    kv_heads = heads if fields.get("num_key_value_heads", 0) is None else number("num_key_value_heads")
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_attention_heads is {heads}, must be a multiple of num_key_value_heads={kv_heads}"
        )
    # Absent: what transformers' Qwen3Config and Qwen2Config take. Null: derived.
    head_dim = fields.get("head_dim", 128 if model_type == "qwen3" else None)
    if head_dim is None:
        if hidden_size % heads:
            raise UserError(
                f"config.json: hidden_size is {hidden_size}, must be a multiple of num_attention_heads={heads} where "
                "head_dim is not given"
            )
        head_dim = hidden_size // heads
    head_dim = _number("head_dim", head_dim)
    if head_dim % 2:
        raise UserError(f"config.json: head_dim is {head_dim}, must be even (rotary embedding pairs dimensions)")
    max_positions = number("max_position_embeddings", 32768)
    theta, scaling = _rope(fields, max_positions)
    config = ModelConfig(
        model_type=model_type,
        vocab_size=number("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=number("rms_norm_eps", 1e-6),
        tie_word_embeddings=flag("tie_word_embeddings"),
        # Qwen2 always has the biases and no field for them.
        attention_bias=model_type == "qwen2" or flag("attention_bias"),
        max_position_embeddings=max_positions,
        initializer_range=number("initializer_range", 0.02),
    )
    # The matrices alone, by multiplication: a count of declared parameters would walk a billion layers.
    layer = config.head_dim * 2 * (heads + kv_heads) + 3 * config.intermediate_size
    matrices = hidden_size * (config.num_layers * layer + config.vocab_size)
    if matrices > _MOST_PARAMS:
        raise UserError(
            f"config.json: vocab_size {config.vocab_size}, hidden_size {hidden_size}, intermediate_size "
            f"{config.intermediate_size} and {config.num_layers} layers make {matrices:.2g} parameters, more "
            f"than {_MOST_PARAMS:.0e}; one of the sizes is wrong"
        )
    return config


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
        UserError: naming the file, if it is not a JSON object, or as `from_hf`.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: no config.json, not a Hugging Face model directory")
    fields = read_json_object(path)
    try:
        return from_hf(fields)
    except ValueError as error:
        # The message begins with the file's name.
        raise UserError(f"{path.parent}/{error}") from None


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """Yarn's scale of cos and sin: 0.1 m log(factor) + 1 (Peng et al. 2023, section 3.4), or the quotient of two."""
    if scaling.attention_factor:
        return scaling.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)
