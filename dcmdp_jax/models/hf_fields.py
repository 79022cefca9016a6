"""Fields of a config.json: numbers in range, and flags."""

from typing import Any

from dcmdp_jax.errors import UserError, shorten

# Type, lowest and highest value, names. The highest are far above any model: they keep products and
# float32 in range.
_RANGES = (
    (
        int,
        1,
        2**31 - 1,
        "vocab_size hidden_size intermediate_size moe_intermediate_size num_attention_heads "
        "num_key_value_heads sliding_window query_pre_attn_scalar original_max_position_embeddings",
    ),
    (int, 2, 2**31 - 1, "head_dim max_position_embeddings"),
    (int, 2, 64, "linear_conv_kernel_dim"),
    (
        int,
        1,
        10_000,
        "num_hidden_layers sliding_window_pattern no_rope_layer_interval full_attention_interval",
    ),
    (
        int,
        1,
        100_000,
        "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim",
    ),
    (float, 1e-6, 1.0, "partial_rotary_factor"),
    (int, 1, 100_000, "num_experts num_experts_per_tok shared_expert_intermediate_size"),
    (float, 1.001, 1e15, "rope_theta rope_local_base_freq"),
    (float, 1e-30, 1.0, "rms_norm_eps"),
    (float, 0.0, 100.0, "initializer_range"),
    (float, 1.0, 1e6, "factor"),
    (float, 1e-6, 1e6, "attention_factor beta_fast beta_slow low_freq_factor high_freq_factor"),
    (float, 0.0, 1e6, "mscale mscale_all_dim"),
)
RANGES: dict[str, tuple[type, float, float]] = {}
for _kind, _low, _high, _names in _RANGES:
    RANGES |= dict.fromkeys(_names.split(), (_kind, _low, _high))
"""Field -> its type, int or float, its lowest and its highest value."""


def in_range(name: str, value: Any) -> int | float:
    """The value of a field of `RANGES`.

    Raises:
        UserError: naming the field and what it must be, for another type or a value out of range.
    """
    kind, low, high = RANGES[name]
    # 4096.0 is a whole number too. The comparison also refuses NaN and infinity, and integers too
    # large for a float.
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and low <= value <= high
        and value == kind(value)
    ):
        return kind(value)
    words = "a number"
    if kind is int:
        words = "a whole number"
    raise UserError(
        f"config.json: {name} is {shorten(value)}, must be {words} in [{low:g}, {high:.10g}]"
    )


class Fields(dict[str, Any]):
    """Fields of a config.json by name."""

    def number(self, name: str) -> int | float:
        """A number that must be there, see `in_range`."""
        value = self.get(name)
        if value is None:
            description = "missing"
            if name in self:
                description = "null"
            raise UserError(f"config.json: {name} is {description}, must be a number")
        return in_range(name, value)

    def flag(self, name: str) -> bool:
        """A flag, false where it is absent.

        Raises:
            UserError: if it is anything else.
        """
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise UserError(f"config.json: {name} is {shorten(value)}, must be true or false")
        return value
