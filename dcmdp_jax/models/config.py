"""The shape of a model of one of `families.FAMILIES`, and of its adapters."""

import dataclasses
from typing import Any

from dcmdp_jax.errors import UserError
from dcmdp_jax.models import hf_fields, rope
from dcmdp_jax.models.families import FAMILIES, Family

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
        model_type: the family, of `families.FAMILIES`.
        vocab_size: rows of the embedding, padding rows included.
        hidden_size, intermediate_size: residual and MLP width; of a mixture of experts the latter
            is the shared expert's, if it has one.
        num_layers, num_heads, num_kv_heads, head_dim: decoder depth and attention shape.
        rope_theta, rope_scaling: rotary base and its scaling.
        rms_norm_eps: added to the mean square.
        tie_word_embeddings: the output layer is the embedding.
        attention_bias: q, k and v carry a bias, and where the family has no `qkv_bias` o too.
        max_position_embeddings: longest context in tokens.
        initializer_range: standard deviation of a fresh matrix.
        num_experts: experts of each layer; 0 in a dense model.
        num_experts_per_tok: experts that compute each token.
        moe_intermediate_size: width of an expert.
        norm_topk_prob: divide the probabilities of a token's experts by their sum.
        sliding_window: tokens that a token of a sliding layer sees, itself included; 0 without such
            layers.
        sliding_layers: their indices.
        sliding_rope_theta: base of their rotary embedding, which is not scaled; 0: theirs is that
            of other layers.
        rope_free_layers: indices of layers without rotary embedding.
        recurrent_layers: indices of the layers that are `gated_delta.GatedDeltaNet` in place of
            attention.
        linear_conv_kernel_dim: tokens that their convolution sees, itself included; 0 without such
            layers.
        linear_num_key_heads, linear_num_value_heads: their heads; each key head serves as many
            value heads.
        linear_key_head_dim, linear_value_head_dim: sizes of these heads.
        partial_rotary_factor: share of a head's dimensions, from the first on, that the rotary
            embedding turns.
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
    rope_scaling: rope.RopeScaling = rope.RopeScaling()
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
    recurrent_layers: tuple[int, ...] = ()
    linear_conv_kernel_dim: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise UserError(
                f"model_type: got {self.model_type!r}, supported are {', '.join(sorted(FAMILIES))}"
            )
        # Lists in a saved record.
        for name in ("sliding_layers", "rope_free_layers", "recurrent_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_sizes()
        if self.family.full_attention_every:
            self._check_recurrent()
        if self.num_experts and not self.family.experts:
            raise UserError(
                f"num_experts: got {self.num_experts}, must be 0 for model_type={self.model_type}"
            )
        if 0 < self.num_experts < self.num_experts_per_tok:
            raise UserError(
                f"num_experts_per_tok: got {self.num_experts_per_tok}, must be at most "
                f"num_experts={self.num_experts}"
            )

    def _check_sizes(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: got {getattr(self, name)}, must be at least 1")
        if self.family.experts:
            for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
                if getattr(self, name) < 1:
                    raise UserError(
                        f"{name}: got {getattr(self, name)}, must be at least 1 for "
                        f"model_type={self.model_type}"
                    )

        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads: got {self.num_heads}, must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(
                f"head_dim: got {self.head_dim}, must be even (rotary embedding pairs dimensions)"
            )
        for name in ("rope_theta", "rms_norm_eps"):
            _, low, high = hf_fields.RANGES[name]
            if not low <= getattr(self, name) <= high:
                raise UserError(
                    f"{name}: got {getattr(self, name)}, must be in [{low:g}, {high:g}]"
                )
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise UserError(
                f"partial_rotary_factor: got {self.partial_rotary_factor:g}, must be an even "
                f"number of head_dim={self.head_dim}"
            )

    def _check_recurrent(self) -> None:
        recurrent = len(self.recurrent_layers)
        if not 0 < recurrent < self.num_layers:
            raise UserError(
                f"layer_types: {recurrent} of {self.num_layers} layers are linear_attention, must "
                "be some and not all"
            )
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise UserError(
                f"linear_num_value_heads: got {self.linear_num_value_heads}, must be a multiple "
                f"of linear_num_key_heads={self.linear_num_key_heads}"
            )

    @property
    def kinds(self) -> dict[str, tuple[int, ...]]:
        """Kind of layers, stacked by itself -> their indices; "" where all have the same leaves."""
        recurrent = self.recurrent_layers
        full = tuple(index for index in range(self.num_layers) if index not in recurrent)
        if not recurrent:
            return {"": full}
        return {"recurrent": recurrent, "full": full}

    @property
    def layer_kinds(self) -> tuple[tuple[str, int], ...]:
        """Kind of each layer, and its position among the layers of that kind."""
        positions = {}
        for kind, layers in self.kinds.items():
            for position, layer in enumerate(layers):
                positions[layer] = kind, position
        return tuple(positions[layer] for layer in range(self.num_layers))

    def by_kind(self, layers: Any) -> dict[str, Any]:
        """Kind of layers -> its part of "layers", of a tree as `params.init_params` makes it."""
        if not self.recurrent_layers:
            return {"": layers}
        return layers

    @property
    def period(self) -> int:
        """Fewest layers after which the kinds of layers repeat; it divides `num_layers`."""
        kinds = [kind for kind, _ in self.layer_kinds]
        size = 1
        while kinds[:size] * (self.num_layers // size) != kinds:
            size += 1
        return size

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that the rotary embedding turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def mixed_width(self) -> int:
        """Channels of a recurrent layer's convolution: queries, keys and values together."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def state_sizes(self) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Shapes of a row's `gated_delta.State` of a recurrent layer."""
        memory = self.linear_num_value_heads, self.linear_key_head_dim, self.linear_value_head_dim
        return memory, (self.mixed_width, max(self.linear_conv_kernel_dim - 1, 0))

    @property
    def family(self) -> Family:
        """Row of its family."""
        return FAMILIES[self.model_type]

    @property
    def layer_ropes(self) -> tuple[str, ...]:
        """Rotary embedding of each layer: "global" (scaled), "sliding" (its own base) or "none"."""
        ropes = {}
        if self.sliding_rope_theta:
            ropes = dict.fromkeys(self.sliding_layers, "sliding")
        ropes |= dict.fromkeys(self.rope_free_layers, "none")
        return tuple(ropes.get(layer, "global") for layer in range(self.num_layers))

    def layer_windows(self, length: int) -> tuple[int, ...]:
        """Window of each layer in rows of `length` tokens; 0 where it hides nothing of them."""
        windows = {}
        if self.sliding_window < length:
            windows = dict.fromkeys(self.sliding_layers, self.sliding_window)
        return tuple(windows.get(layer, 0) for layer in range(self.num_layers))

    @property
    def stored_mlp_width(self) -> int:
        """Width of all MLPs of a layer together."""
        if not self.num_experts:
            return self.intermediate_size
        width = self.num_experts * self.moe_intermediate_size
        if self.family.shared_expert:
            width += self.intermediate_size
        return width

    @property
    def mlp_fields(self) -> tuple[str, ...]:
        """Fields of the widths of a layer's MLPs: one MLP's, or the experts' and a shared one's."""
        if not self.num_experts:
            return ("intermediate_size",)
        if self.family.shared_expert:
            return ("moe_intermediate_size", "intermediate_size")
        return ("moe_intermediate_size",)

    @property
    def routing(self) -> tuple[int, int, int]:
        """Number of layers, experts of a token in each, and experts to choose from."""
        return self.num_layers, self.num_experts_per_tok, self.num_experts


RECURRENT_SIZES = tuple(
    field.name for field in dataclasses.fields(ModelConfig) if field.name.startswith("linear_")
)
"""Fields of recurrent layers, in config.json too."""
