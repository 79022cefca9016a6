"""Decoder families as rows of data; modules and engines read each difference here.

A family that needs what no switch says is named in `MISSING`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

_PRE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_POST = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_SANDWICH = _POST | {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Switches of a decoder family; the defaults are Llama's.

    Attributes:
        architecture: class of transformers and vLLM.
        norms: norm of a layer -> its name in Hugging Face's files. `attention_norm` and `mlp_norm`
            are before a sub-layer, `attention_out_norm` and `mlp_out_norm` after it, before it is
            added to the residual stream.
        qk_norm: RMS norm of queries and keys: "" for none, "head" for each head, "width" for all
            heads together.
        float32_norm: norms multiply by their weights in float32, and round once.
        unit_offset: norms multiply by 1 + w; w begins at 0.
        gate: activation of the MLP's gate, "silu" or "gelu_tanh".
        scaled_embedding: embeddings are multiplied by sqrt(hidden_size).
        full_every: every n-th layer sees all tokens before it, the others a sliding window. 0: all
            layers slide where config.json has a window; None: none does.
        rope_free_every: every n-th layer has no rotary embedding; 0: all have it.
        experts: each layer has a mixture of experts in place of the MLP.
        shared_expert: beside them an MLP that every token passes through, times the sigmoid of a
            gate; its width is `intermediate_size`, in config.json
            `shared_expert_intermediate_size`. `norm_topk_prob` is always true.
        qkv_bias: q, k and v always have biases, and o none; else config.json's `attention_bias`
            says it of all four.
        own_head_dim: config.json's `head_dim` counts everywhere; vLLM's class of another family
            takes the model's width divided by its heads.
        full_attention_every: every n-th layer is attention, the others are recurrent
            (`gated_delta`); 0: none is.
        output_gate: attention is multiplied by the sigmoid of a gate, which `q_proj` has beside
            each head's query.
        partial_rotary: share of a head's dimensions that turn, where config.json has none; 0: it
            may have none.
        left_out: how the names of tensors begin that a checkpoint may hold and the decoder has not.
        sliding_rope: sliding layers have an unscaled rotary embedding of their own.
        rope_theta: rotary base where config.json has none.
        defaults: other fields of config.json -> the value of one that is absent, as in
            transformers.
        written: fields written to config.json where no layer slides.
        gguf: its name in GGUF files; "": not read from them.
    """

    architecture: str
    norms: Mapping[str, str] = dataclasses.field(default_factory=lambda: _PRE)
    qk_norm: str = ""
    float32_norm: bool = False
    unit_offset: bool = False
    gate: str = "silu"
    scaled_embedding: bool = False
    full_every: int | None = None
    rope_free_every: int = 0
    experts: bool = False
    shared_expert: bool = False
    qkv_bias: bool = False
    own_head_dim: bool = True
    full_attention_every: int = 0
    output_gate: bool = False
    partial_rotary: float = 0.0
    left_out: tuple[str, ...] = ()
    sliding_rope: bool = False
    rope_theta: float = 10000.0
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    written: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"use_sliding_window": False}
    )
    gguf: str = ""


FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        defaults={"num_key_value_heads": None, "max_position_embeddings": 2048},
        written={"mlp_bias": False},
        gguf="llama",
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        own_head_dim=False,
        gguf="qwen2",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qk_norm="head",
        defaults={"head_dim": 128},
        gguf="qwen3",
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        qk_norm="head",
        experts=True,
        gguf="qwen3moe",
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        full_every=0,
        defaults={
            "sliding_window": 4096,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        rope_free_every=4,
        rope_theta=2e6,
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "pad_token_id": 128004},
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        norms=_POST,
        qk_norm="width",
        float32_norm=True,
        full_every=4,
        sliding_rope=True,
        rope_theta=500000.0,
        defaults={
            "sliding_window": 4096,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
        },
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        norms=_SANDWICH,
        qk_norm="head",
        float32_norm=True,
        unit_offset=True,
        gate="gelu_tanh",
        scaled_embedding=True,
        full_every=6,
        sliding_rope=True,
        rope_theta=1e6,
        defaults={
            "sliding_window": 4096,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10000.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        gguf="gemma3",
    ),
    "qwen3_5_text": Family(
        architecture="Qwen3_5ForCausalLM",
        qk_norm="head",
        float32_norm=True,
        unit_offset=True,
        full_attention_every=4,
        output_gate=True,
        partial_rotary=0.25,
        left_out=("model.visual.", "mtp."),
        defaults={
            "head_dim": 256,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
        written={},
    ),
}
FAMILIES["qwen3_5_moe_text"] = dataclasses.replace(
    FAMILIES["qwen3_5_text"],
    architecture="Qwen3_5MoeForCausalLM",
    experts=True,
    shared_expert=True,
)
"""`model_type` of config.json -> the family."""

WRAPPERS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""`model_type` of a model of images and text -> that of its `text_config`, whose tensors lie in
`model.language_model`."""

MISSING = {
    "qwen3_next": "recurrent layers with fused projections",
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"),
        "multi-head latent attention (MLA)",
    ),
    "gpt_oss": "attention sinks and biased, clamped experts",
    "gemma2": "soft caps of logits and scores",
    "gemma3": "images; a text-only Gemma 3 has model_type gemma3_text",
    "mixtral": "Mixtral's experts",
    "phi3": "fused projections and longrope",
    "glm4_moe": "sigmoid routing with shared experts",
    "nemotron_h": "state-space layers",
}
"""`model_type` of a family that is not there -> what its decoder has and this one has not."""
