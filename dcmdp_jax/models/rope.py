"""Scaling of rotary frequencies, as Hugging Face checkpoints declare it."""

from __future__ import annotations

import dataclasses
import math


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


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """Yarn's scale of cos and sin: 0.1 m log(factor) + 1 (Peng et al. 2023, section 3.4), or the quotient of two."""
    if scaling.attention_factor:
        return scaling.attention_factor

    def scale(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)
