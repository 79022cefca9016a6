"""config.json in and out: a `ModelConfig` from the fields that transformers writes, and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import UserError, shorten
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.models.config import RECURRENT_SIZES, ModelConfig
from dcmdp_jax.models.families import FAMILIES, MISSING, WRAPPERS, Family
from dcmdp_jax.models.hf_fields import Fields, in_range
from dcmdp_jax.models.rope import FULL, LINEAR, SLIDING, read_ropes, rope_fields

TEXT_PREFIX = "model."
WRAPPED_PREFIX = "model.language_model."
"""How the names of a decoder begin: in a class of its own, in one that holds it beside an image
tower.
"""
_MOST_PARAMS = 10**13
# transformers' values of fields that are absent, in families whose `defaults` have no others.
_DEFAULTS = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "initializer_range": 0.02}
# Flag that is not supported -> what is supported in its place.
_REFUSED_FLAGS = {
    "use_sliding_window": "full attention is",
    "mlp_bias": "MLPs without biases are",
    "use_bidirectional_attention": "causal attention is",
}
_REFUSED_NUMBERS = ("attn_logit_softcapping", "final_logit_softcapping")
_GATES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
# Field of config.json -> that of `ModelConfig`, as they are written before and after the
# activation.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
}
_OTHERS = (
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "max_position_embeddings",
    "initializer_range",
)
_SHARED = "shared_expert_intermediate_size"
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


def from_hf(fields: Mapping[str, Any]) -> ModelConfig:
    """Read the fields of a config.json of a supported family; nothing is allocated.

    Raises:
        UserError: "config.json: " and the field, its value and what it must be, when the family, an
            activation, a sliding window or a rotary scaling is one that this code would compute
            wrongly, a needed field is missing, malformed or out of range, or sizes do not fit each
            other.
    """
    model_type = fields.get("model_type")
    inner = WRAPPERS.get(str(model_type))
    if inner is not None:
        text = fields.get("text_config")
        if not isinstance(text, dict) or text.get("model_type", inner) != inner:
            raise UserError(
                f"config.json: text_config is {shorten(text)}, must be an object of model_type "
                f"{inner!r}"
            )
        # Images are not read; the model ties its output layer where the outer field says so.
        tie = "tie_word_embeddings"
        if tie in fields:
            text = text | {tie: fields[tie]}
        fields = text
        model_type = inner
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        needs = ""
        if str(model_type) in MISSING:
            needs = f" which needs {MISSING[model_type]};"
        supported = ", ".join(sorted(FAMILIES))
        raise UserError(
            f"config.json: model_type is {shorten(model_type)},{needs} supported are {supported}"
        )

    family = FAMILIES[model_type]
    fields = Fields({**_DEFAULTS, **family.defaults, **fields})
    _check_supported(fields, family)
    number = fields.number
    sizes = _attention_sizes(fields)
    intermediate_name = "intermediate_size"
    if family.shared_expert:
        intermediate_name = _SHARED
    max_positions = number("max_position_embeddings")
    layers = number("num_hidden_layers")
    config = ModelConfig(
        model_type=model_type,
        vocab_size=number("vocab_size"),
        intermediate_size=number(intermediate_name),
        num_layers=layers,
        **sizes,
        **layer_pattern(fields, family, layers),
        **read_ropes(fields, family, max_positions),
        rms_norm_eps=number("rms_norm_eps"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=family.qkv_bias or fields.flag("attention_bias"),
        max_position_embeddings=max_positions,
        initializer_range=number("initializer_range"),
        **_family_sizes(fields, family),
    )

    # The matrices alone, by multiplication: a count of declared parameters would walk a billion
    # layers.
    attention_width = 2 * config.head_dim * (config.num_heads + config.num_kv_heads)
    width = layers * (attention_width + 3 * config.stored_mlp_width) + config.vocab_size
    matrices = config.hidden_size * width
    if matrices > _MOST_PARAMS:
        names = config.mlp_fields
        if config.num_experts:
            names = (*names, "num_experts")
        width = ", ".join(f"{name} {getattr(config, name)}" for name in names)
        raise UserError(
            f"config.json: vocab_size {config.vocab_size}, hidden_size {config.hidden_size}, "
            f"{width} and {layers} layers make {matrices:.2g} parameters, more than "
            f"{_MOST_PARAMS:.0e}; one of the sizes is wrong"
        )
    return config


def _check_supported(fields: Fields, family: Family) -> None:
    """Refuse an activation, soft caps and flags that the decoder does not have."""
    gate = _GATES[family.gate]
    name = "hidden_act"
    if "hidden_activation" in fields:
        name = "hidden_activation"
    activation = fields.get(name, gate)
    if activation != gate:
        raise UserError(f"config.json: {name} is {shorten(activation)}, only {gate!r} is supported")
    for name in _REFUSED_NUMBERS:
        if fields.get(name) is not None:
            raise UserError(
                f"config.json: {name} is {shorten(fields[name])}, only null is supported"
            )
    if family.output_gate and not fields.get("attn_output_gate", True):
        raise UserError(
            "config.json: attn_output_gate is false, only attention with its gate is supported"
        )
    for name, reason in _REFUSED_FLAGS.items():
        if fields.flag(name):
            raise UserError(f"config.json: {name} is true, only {reason} supported")


def _attention_sizes(fields: Fields) -> dict[str, int]:
    """Width, heads, key-value heads and head size that fit each other."""
    heads = fields.number("num_attention_heads")
    hidden_size = fields.number("hidden_size")
    kv_heads = heads
    if fields.get("num_key_value_heads", 0) is not None:
        kv_heads = fields.number("num_key_value_heads")
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_attention_heads is {heads}, must be a multiple of "
            f"num_key_value_heads={kv_heads}"
        )

    head_dim = fields.get("head_dim")
    if head_dim is None:
        if hidden_size % heads:
            raise UserError(
                f"config.json: hidden_size is {hidden_size}, must be a multiple of "
                f"num_attention_heads={heads} where head_dim is not given"
            )
        head_dim = hidden_size // heads
    head_dim = in_range("head_dim", head_dim)
    if head_dim % 2:
        raise UserError(
            f"config.json: head_dim is {head_dim}, must be even (rotary embedding pairs dimensions)"
        )
    return {
        "hidden_size": hidden_size,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
    }


def _family_sizes(fields: Fields, family: Family) -> dict[str, Any]:
    """Fields of `ModelConfig` that not every family has."""
    sizes: dict[str, Any] = {}
    if "query_pre_attn_scalar" in family.defaults:
        sizes["query_pre_attn_scalar"] = fields.number("query_pre_attn_scalar")
    if family.experts:
        sizes |= _read_experts(fields, family)
    if family.full_attention_every:
        for name in RECURRENT_SIZES:
            sizes[name] = fields.number(name)
    return sizes


def layer_pattern(fields: Mapping[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """Fields of `ModelConfig`: which layers slide, how far, and which have no rotary embedding.

    Args:
        fields: fields of config.json.
        family: the model's; its period holds where config.json names no layers.
        layers: how many layers there are.

    Raises:
        UserError: for a kind of layer that is not there, or a list that does not name every layer.
    """

    def by_layer(name: str, usual: Any, periodic: Any, period: int) -> list[Any]:
        """`name` of each layer: `periodic` every `period` layers where config.json has none."""
        entries = fields.get(name)
        if entries is None:
            entries = [usual] * layers
            if period:
                entries[period - 1 :: period] = [periodic] * (layers // period)
            return entries
        wrong = None
        if not isinstance(entries, list):
            wrong = shorten(entries)
        else:
            unknown = [value for value in entries if value not in (usual, periodic)]
            if unknown:
                wrong = shorten(unknown[0])
            elif len(entries) < layers:
                wrong = f"{len(entries)} entries"
        if wrong is not None:
            raise UserError(
                f"config.json: {name} has {wrong}, must have {usual!r} or {periodic!r} for each of "
                f"{layers} layers"
            )
        return entries[:layers]

    pattern: dict[str, Any] = {}
    window = fields.get("sliding_window")
    if family.full_every is not None and window is not None:
        period = in_range(
            "sliding_window_pattern", fields.get("sliding_window_pattern") or family.full_every or 1
        )
        if not family.full_every:
            period = 0
        kinds = by_layer("layer_types", SLIDING, FULL, period)
        sliding_layers = _layers_of_kind(kinds, SLIDING)
        pattern["sliding_layers"] = sliding_layers
        pattern["sliding_window"] = 0
        if sliding_layers:
            pattern["sliding_window"] = in_range("sliding_window", window)
    if family.full_attention_every:
        every = fields.get("full_attention_interval") or family.full_attention_every
        kinds = by_layer("layer_types", LINEAR, FULL, in_range("full_attention_interval", every))
        pattern["recurrent_layers"] = _layers_of_kind(kinds, LINEAR)
    if family.rope_free_every:
        period = in_range(
            "no_rope_layer_interval", fields.get("no_rope_layer_interval") or family.rope_free_every
        )
        has_rope = by_layer("no_rope_layers", 1, 0, period)
        pattern["rope_free_layers"] = _layers_of_kind(has_rope, 0)
    return pattern


def _layers_of_kind(kinds: list[Any], kind: Any) -> tuple[int, ...]:
    return tuple(index for index, layer_kind in enumerate(kinds) if layer_kind == kind)


def _read_experts(fields: Fields, family: Family) -> dict[str, Any]:
    """The fields of a mixture of experts; every layer must have one."""
    for name, value, supported in (
        ("decoder_sparse_step", fields.get("decoder_sparse_step", 1), 1),
        ("mlp_only_layers", fields.get("mlp_only_layers") or [], []),
    ):
        if value != supported:
            raise UserError(
                f"config.json: {name} is {shorten(value)}, only {supported} is supported (experts "
                "everywhere)"
            )
    experts = fields.get("num_experts")
    if experts is None:
        # transformers 5 calls the field num_local_experts inside, and writes either.
        experts = fields.get("num_local_experts")
    if experts is None:
        raise UserError("config.json: num_experts is missing, must be a number")
    experts = in_range("num_experts", experts)
    per_token = fields.number("num_experts_per_tok")
    if per_token > experts:
        raise UserError(
            f"config.json: num_experts_per_tok is {per_token}, must be at most "
            f"num_experts={experts}"
        )
    return {
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": fields.number("moe_intermediate_size"),
        "norm_topk_prob": family.shared_expert or fields.flag("norm_topk_prob"),
    }


def to_hf(config: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """The config.json that transformers and vLLM load; `from_hf` of it is `config` again.

    Args:
        config: the model.
        dtype: "float32" or "bfloat16", the dtype of the saved tensors.
    """
    family = config.family
    gate = _GATES[family.gate]
    fields: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "torch_dtype": dtype,
        **{name: getattr(config, attribute) for name, attribute in _SIZES.items()},
        "hidden_act": gate,
        **{name: getattr(config, name) for name in _OTHERS},
        "use_cache": True,
    }
    if family.full_every is None:
        fields |= family.written
    else:
        fields["sliding_window"] = config.sliding_window or None
    if not family.qkv_bias:
        fields["attention_bias"] = config.attention_bias
    if family.experts:
        fields |= {name: getattr(config, name) for name in _EXPERTS}
        fields |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if family.shared_expert:
        fields[_SHARED] = fields.pop("intermediate_size")

    sliding_theta = None
    if family.sliding_rope:
        sliding_theta = config.sliding_rope_theta or config.rope_theta
    fields |= rope_fields(config.rope_theta, config.rope_scaling, sliding_theta)
    if config.recurrent_layers:
        for name in (*RECURRENT_SIZES, "partial_rotary_factor"):
            fields[name] = getattr(config, name)
    if family.full_every or config.recurrent_layers:
        kinds = dict.fromkeys(config.sliding_layers, SLIDING)
        kinds |= dict.fromkeys(config.recurrent_layers, LINEAR)
        fields["layer_types"] = [kinds.get(index, FULL) for index in range(config.num_layers)]
    if family.rope_free_every:
        fields["no_rope_layers"] = [int(rope != "none") for rope in config.layer_ropes]
    if family.defaults.get("pad_token_id", 0) >= config.vocab_size:
        # transformers' default, which is no token of a small vocabulary
        fields["pad_token_id"] = None
    if config.query_pre_attn_scalar:
        fields |= {"query_pre_attn_scalar": config.query_pre_attn_scalar, "hidden_activation": gate}
    return fields


def wrapping_class(directory: Path) -> str:
    """The class of transformers for a decoder beside an image tower; "" for a decoder alone."""
    model_type = read_json_object(directory / "config.json").get("model_type")
    inner = WRAPPERS.get(str(model_type))
    if inner is None:
        return ""
    return FAMILIES[inner].architecture.replace("CausalLM", "ConditionalGeneration")


def read_model_config(directory: str | Path) -> ModelConfig:
    """Read `directory`/config.json.

    Raises:
        FileNotFoundError: without a config.json.
        UserError: naming the file, if it is not a JSON object, or as `from_hf`; for a run's
            directory.
    """
    path = Path(directory) / "config.json"
    fields = {}
    if path.is_file():
        fields = read_json_object(path)
    # A run's config.json has its settings; a checkpoint has none.
    if "run_dir" in fields or not path.is_file() and _is_of_a_run(path.parent.resolve()):
        raise UserError(
            f"{directory}: belongs to a run; export it first: dcmdp convert export {directory} "
            "OUT_DIR"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{directory}: no config.json, not a Hugging Face model directory")
    try:
        return from_hf(fields)
    except ValueError as error:
        # The message begins with the file's name.
        raise UserError(f"{path.parent}/{error}") from None


def _is_of_a_run(directory: Path) -> bool:
    """Whether a directory without config.json is a run's, or a checkpoint in one."""
    names = directory.name, directory.parent.name
    return (directory / "checkpoints").is_dir() or "checkpoints" in names
