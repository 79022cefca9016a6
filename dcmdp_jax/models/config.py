"""The shape of a model of one of `families.FAMILIES`, read from its Hugging Face config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import read_json_object, shorten
from dcmdp_jax.models.families import FAMILIES, MISSING, Family

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
    "sliding_window": (1, 2**31 - 1),
    "query_pre_attn_scalar": (1, 2**31 - 1),
    "sliding_window_pattern": (1, 10_000),
    "no_rope_layer_interval": (1, 10_000),
    "num_experts": (1, 100_000),
    "num_experts_per_tok": (1, 100_000),
    "moe_intermediate_size": (1, 2**31 - 1),
}
_REAL = {
    "rope_theta": (1.001, 1e15),
    "rope_local_base_freq": (1.001, 1e15),
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
# What a flag that is not supported would change: the message says what is.
_REFUSED_FLAGS = {
    "use_sliding_window": "full attention is",
    "mlp_bias": "MLPs without biases are",
    "use_bidirectional_attention": "causal attention is",
}
_GATES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_SLIDING, _FULL = "sliding_attention", "full_attention"


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


ALL_LINEAR = "all-linear"
"""PEFT's name for every linear layer of the decoder layers."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """Shape of the adapters.

    Attributes:
        rank: r, at least 1.
        alpha: the product x A B is scaled by alpha / r.
        targets: names of linear layers as in Hugging Face ("q_proj"), or "all-linear" alone.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder. Field names follow config.json where it has one.

    Attributes:
        model_type: the family, of `families.FAMILIES`; `qwen2` has biases on q, k and v, `qwen3_moe` a mixture of
            experts in place of each MLP.
        vocab_size: rows of the embedding, padding rows included.
        hidden_size, intermediate_size: residual and MLP width; a mixture of experts does not use the latter.
        num_layers, num_heads, num_kv_heads, head_dim: decoder depth and attention shape.
        rope_theta, rope_scaling: rotary base and its scaling.
        rms_norm_eps: added to the mean square.
        tie_word_embeddings: the output layer is the embedding.
        attention_bias: q, k and v (all but qwen2: o too) carry a bias.
        max_position_embeddings: longest context in tokens.
        initializer_range: standard deviation of a fresh matrix.
        num_experts: experts of each layer; 0 in a dense model.
        num_experts_per_tok: experts that compute each token.
        moe_intermediate_size: width of an expert.
        norm_topk_prob: divide the probabilities of a token's experts by their sum.
        sliding_window: tokens that a token of a sliding layer sees, itself included; 0 without such layers.
        sliding_layers: their indices.
        sliding_rope_theta: base of their rotary embedding, which is not scaled; 0: theirs is that of other layers.
        rope_free_layers: indices of layers without rotary embedding.
        query_pre_attn_scalar: scores are divided by its square root; 0: by that of head_dim.
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
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    sliding_window: int = 0
    sliding_layers: tuple[int, ...] = ()
    sliding_rope_theta: float = 0.0
    rope_free_layers: tuple[int, ...] = ()
    query_pre_attn_scalar: int = 0

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise UserError(f"model_type: got {self.model_type!r}, supported are {', '.join(sorted(FAMILIES))}")
        for name in ("sliding_layers", "rope_free_layers"):  # lists in a saved record
            object.__setattr__(self, name, tuple(getattr(self, name)))
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
        if self.model_type != "qwen3_moe":
            if self.num_experts:
                raise UserError(f"num_experts: got {self.num_experts}, must be 0 for model_type={self.model_type}")
            return
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: got {getattr(self, name)}, must be at least 1 for model_type=qwen3_moe")
        if self.num_experts_per_tok > self.num_experts:
            raise UserError(
                f"num_experts_per_tok: got {self.num_experts_per_tok}, must be at most num_experts={self.num_experts}"
            )

    @property
    def family(self) -> Family:
        """Row of its family."""
        return FAMILIES[self.model_type]

    @property
    def layer_ropes(self) -> tuple[str, ...]:
        """Rotary embedding of each layer: "global" (`rope_theta` with its scaling), "sliding" (its own) or "none"."""
        sliding = "sliding" if self.sliding_rope_theta else "global"
        special = dict.fromkeys(self.sliding_layers, sliding) | dict.fromkeys(self.rope_free_layers, "none")
        return tuple(special.get(index, "global") for index in range(self.num_layers))

    def layer_windows(self, length: int) -> tuple[int, ...]:
        """Window of each layer in rows of `length` tokens; 0 where it hides nothing of them."""
        window = self.sliding_window if self.sliding_window < length else 0
        return tuple(window * (index in self.sliding_layers) for index in range(self.num_layers))

    @property
    def output_bias(self) -> bool:
        """`attention_bias` reaches the output projection, except in Qwen2."""
        return self.attention_bias and self.model_type != "qwen2"

    @property
    def active_mlp_width(self) -> int:
        """Width of the MLP that a token passes through, summed over its experts."""
        return self.num_experts_per_tok * self.moe_intermediate_size if self.num_experts else self.intermediate_size

    @property
    def stored_mlp_width(self) -> int:
        """Width of all MLPs of a layer together."""
        return self.num_experts * self.moe_intermediate_size if self.num_experts else self.intermediate_size

    @property
    def routing(self) -> tuple[int, int, int]:
        """Number of layers, experts of a token in each, and experts to choose from."""
        return self.num_layers, self.num_experts_per_tok, self.num_experts


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


def _rope(fields: Mapping[str, Any], max_position_embeddings: int, base: float = 10000.0) -> tuple[float, RopeScaling]:
    """Base and scaling from either spelling: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    As transformers: an empty section counts as absent, `rope_theta` and `original_max_position_embeddings` may stand
    outside. Where it would take one of two values that disagree, both are refused: engines and releases differ.
    """
    sections = [name for name in ("rope_scaling", "rope_parameters") if fields.get(name) is not None]
    for name in sections:
        if not isinstance(fields[name], dict):
            raise UserError(f"config.json: {name} is {shorten(fields[name])}, must be an object or null")
    found = {name: _rope_section(name, fields, max_position_embeddings, base) for name in sections if fields[name]}
    if len(set(found.values())) > 1:
        said = " and ".join(f"{name} {shorten(fields[name])} (base {found[name][0]:g})" for name in found)
        raise UserError(f"config.json: {said} disagree; keep the one that the model was trained with")
    return next(iter(found.values()), None) or _rope_section("rope_scaling", fields, max_position_embeddings, base)


def _rope_section(
    section: str, fields: Mapping[str, Any], max_position_embeddings: int, base: float
) -> tuple[float, RopeScaling]:
    raw = dict(fields.get(section) or {})
    for name in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        outside, inside = fields.get(name), raw.get(name)
        for value in (outside, inside):
            if name == "rope_theta" and value is not None:
                _number(name, value)  # NaN would disagree with itself
        if None not in (outside, inside) and outside != inside:
            raise UserError(
                f"config.json: {name} is {shorten(outside)}, in {section} it is {shorten(inside)}; keep the one that "
                "the model was trained with"
            )
        if outside is not None:
            raw[name] = outside
    theta = _number("rope_theta", raw.pop("rope_theta", fields.get("rope_theta", base)))
    kind, older = raw.pop("rope_type", None), raw.pop("type", None)
    if None not in (kind, older) and kind != older:
        raise UserError(f"config.json: {section} has rope_type {shorten(kind)} and type {shorten(older)}; keep one")
    kind = older if kind is None else kind
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in ("default", *_ROPE_FIELDS):
        supported = ", ".join(_ROPE_FIELDS)
        raise UserError(f"config.json: rope_type is {shorten(kind)}, supported are default, {supported}")
    if raw.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise UserError("config.json: partial_rotary_factor other than 1 is not used by these families")
    known = {field.name for field in dataclasses.fields(RopeScaling)} - {"kind"}
    if unknown := sorted(set(raw) - known):
        raise UserError(f"config.json: {section} has the unknown field {shorten(unknown[0])} for {kind!r}")
    if kind == "default":
        return theta, RopeScaling()
    needed, optional = _ROPE_FIELDS[kind]
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
    """Read the fields of a config.json of a supported family; nothing is allocated, whatever the sizes.

    Raises:
        UserError: "config.json: " and the field, its value and what it must be, when the family, an activation, a
            sliding window or a rotary scaling is one that this code would compute wrongly, a needed field is missing,
            malformed or out of range, or sizes do not fit each other.
    """
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        needs = f" which needs {MISSING[model_type]};" if str(model_type) in MISSING else ""
        supported = ", ".join(sorted(FAMILIES))
        raise UserError(f"config.json: model_type is {shorten(model_type)},{needs} supported are {supported}")
    family = FAMILIES[model_type]
    fields = {**family.defaults, **fields}
    gate, spelled = _GATES[family.gate], "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    if (act := fields.get(spelled, gate)) != gate:
        raise UserError(f"config.json: {spelled} is {shorten(act)}, only {gate!r} is supported")
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(name) is not None:
            raise UserError(f"config.json: {name} is {shorten(fields[name])}, only null is supported")

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

    for name, reason in _REFUSED_FLAGS.items():
        if flag(name):
            raise UserError(f"config.json: {name} is true, only {reason} supported")
    heads, hidden_size = number("num_attention_heads"), number("hidden_size")
    kv_heads = heads if fields.get("num_key_value_heads", 0) is None else number("num_key_value_heads")
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_attention_heads is {heads}, must be a multiple of num_key_value_heads={kv_heads}"
        )
    head_dim = fields.get("head_dim")
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
    layers = number("num_hidden_layers")
    config = ModelConfig(
        model_type=model_type,
        vocab_size=number("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=number("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **layer_pattern(fields, family, layers),
        **_ropes(fields, family, max_positions),
        rms_norm_eps=number("rms_norm_eps", 1e-6),
        tie_word_embeddings=flag("tie_word_embeddings"),
        # Qwen2 always has the biases and no field for them.
        attention_bias=model_type == "qwen2" or flag("attention_bias"),
        max_position_embeddings=max_positions,
        initializer_range=number("initializer_range", 0.02),
        query_pre_attn_scalar=number("query_pre_attn_scalar") if "query_pre_attn_scalar" in family.defaults else 0,
        **(_experts(fields, number, flag) if model_type == "qwen3_moe" else {}),
    )
    # The matrices alone, by multiplication: a count of declared parameters would walk a billion layers.
    layer = config.head_dim * 2 * (heads + kv_heads) + 3 * config.stored_mlp_width
    matrices = hidden_size * (config.num_layers * layer + config.vocab_size)
    if matrices > _MOST_PARAMS:
        width = f"intermediate_size {config.intermediate_size}"
        if config.num_experts:
            width = f"moe_intermediate_size {config.moe_intermediate_size}, num_experts {config.num_experts}"
        raise UserError(
            f"config.json: vocab_size {config.vocab_size}, hidden_size {hidden_size}, {width} and {config.num_layers} "
            f"layers make {matrices:.2g} parameters, more than {_MOST_PARAMS:.0e}; one of the sizes is wrong"
        )
    return config


def _ropes(fields: Mapping[str, Any], family: Family, max_position_embeddings: int) -> dict[str, Any]:
    """Rotary embedding of all layers, and of sliding ones where the family's have their own.

    transformers 5 writes `rope_parameters` of such a family by kind of layer.
    """
    kinds = fields.get("rope_parameters")
    by_kind = family.sliding_rope and isinstance(kinds, dict) and bool({_SLIDING, _FULL} & set(kinds))
    full = {**fields, "rope_parameters": kinds.get(_FULL)} if by_kind else fields
    theta, scaling = _rope(full, max_position_embeddings, family.rope_theta)
    found = {"rope_theta": theta, "rope_scaling": scaling}
    if not family.sliding_rope:
        return found
    local = fields.get("rope_local_base_freq")
    own = {"rope_parameters": kinds.get(_SLIDING)} if by_kind else {}
    base = theta if local is None else _number("rope_local_base_freq", local)
    sliding, unscaled = _rope(own, max_position_embeddings, base)
    if unscaled != RopeScaling():
        raise UserError(f"config.json: rope_parameters of {_SLIDING} is scaled ({unscaled.kind}), must be default")
    return found if (sliding, unscaled) == (theta, scaling) else found | {"sliding_rope_theta": sliding}


def layer_pattern(fields: Mapping[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """Which layers slide and over how many tokens, and which have no rotary embedding, as `ModelConfig` has them.

    Args:
        fields: fields of config.json.
        family: the model's; its period holds where config.json names no layers.
        layers: how many layers there are.

    Raises:
        UserError: for a kind of layer that is not there, or a list that does not name every layer.
    """

    def chosen(name: str, values: tuple[Any, ...], period: int) -> list[Any]:
        """`name` of each layer: values[1] every `period` layers and values[0] between, where config.json has none."""
        found = fields.get(name)
        if found is None:
            return [values[bool(period) and (index + 1) % period == 0] for index in range(layers)]
        if not isinstance(found, list) or len(found) < layers or any(value not in values for value in found):
            wrong = [value for value in found if value not in values] if isinstance(found, list) else [found]
            said = shorten(wrong[0]) if wrong else f"{len(found)} entries"
            allowed = " or ".join(map(repr, values))
            raise UserError(f"config.json: {name} has {said}, must have {allowed} for each of {layers} layers")
        return found[:layers]

    pattern: dict[str, Any] = {}
    window = fields.get("sliding_window")
    if family.full_every is not None and window is not None:
        period = _number("sliding_window_pattern", fields.get("sliding_window_pattern") or family.full_every or 1)
        kinds = chosen("layer_types", (_SLIDING, _FULL), period if family.full_every else 0)
        sliding = tuple(index for index, kind in enumerate(kinds) if kind == _SLIDING)
        pattern |= {"sliding_window": _number("sliding_window", window) if sliding else 0, "sliding_layers": sliding}
    if family.rope_free_every:
        period = _number("no_rope_layer_interval", fields.get("no_rope_layer_interval") or family.rope_free_every)
        has_rope = chosen("no_rope_layers", (1, 0), period)
        pattern["rope_free_layers"] = tuple(index for index, has in enumerate(has_rope) if not has)
    return pattern


def _experts(fields: Mapping[str, Any], number: Callable[..., Any], flag: Callable[[str], bool]) -> dict[str, Any]:
    """The fields of a mixture of experts; every layer must have one."""
    if (step := fields.get("decoder_sparse_step", 1)) != 1:
        raise UserError(
            f"config.json: decoder_sparse_step is {shorten(step)}, only 1 is supported (experts everywhere)"
        )
    if dense := fields.get("mlp_only_layers"):
        raise UserError(f"config.json: mlp_only_layers is {shorten(dense)}, only [] is supported (experts everywhere)")
    # transformers 5 calls the field num_local_experts inside, and writes either.
    spelled = "num_local_experts" if fields.get("num_experts") is None else "num_experts"
    value = fields.get(spelled)
    if value is None:
        raise UserError("config.json: num_experts is missing, must be a number")
    experts, chosen = _number("num_experts", value), number("num_experts_per_tok")
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok is {chosen}, must be at most num_experts={experts}")
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": number("moe_intermediate_size"),
        "norm_topk_prob": flag("norm_topk_prob"),
    }


def to_hf(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json that transformers and vLLM load; `from_hf` of it is `config` again.

    Args:
        config: the model.
        dtype: "float32" or "bfloat16", the dtype of the saved tensors.
    """
    fields: dict[str, Any] = {
        "architectures": [config.family.architecture],
        "model_type": config.model_type,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": _GATES[config.family.gate],
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "use_cache": True,
    }
    if config.model_type == "llama":
        fields["mlp_bias"] = False
    elif config.family.full_every is None:
        fields["use_sliding_window"] = False
    else:
        fields["sliding_window"] = config.sliding_window or None
    if config.model_type != "qwen2":
        fields["attention_bias"] = config.attention_bias
    if config.num_experts:
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        fields |= {name: getattr(config, name) for name in names}
        fields |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    scaling = config.rope_scaling
    if scaling.kind != "default":
        needed, optional = _ROPE_FIELDS[scaling.kind]
        changed = [name for name in optional if getattr(scaling, name) != getattr(RopeScaling(), name)]
        values = {name: getattr(scaling, name) for name in (*needed, *changed)}
        fields["rope_scaling"] = {"rope_type": scaling.kind, **values}
    return fields | _layer_fields(config, fields.get("rope_scaling"))


def _layer_fields(config: ModelConfig, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of `to_hf` that differ by layer or belong to a family."""
    fields: dict[str, Any] = {}
    family = config.family
    if family.full_every:
        sliding = set(config.sliding_layers)
        fields["layer_types"] = [_SLIDING if index in sliding else _FULL for index in range(config.num_layers)]
    if family.sliding_rope:
        local = {"rope_type": "default", "rope_theta": config.sliding_rope_theta or config.rope_theta}
        full = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
        fields["rope_parameters"] = {_SLIDING: local, _FULL: full}
    if family.rope_free_every:
        fields["no_rope_layers"] = [int(rope != "none") for rope in config.layer_ropes]
    if family.defaults.get("pad_token_id", 0) >= config.vocab_size:
        fields["pad_token_id"] = None  # transformers' default, which is no token of a small vocabulary
    if config.query_pre_attn_scalar:
        fields |= {"query_pre_attn_scalar": config.query_pre_attn_scalar, "hidden_activation": _GATES[family.gate]}
    return fields


def read_model_config(directory: str | Path) -> ModelConfig:
    """Read `directory`/config.json.

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
