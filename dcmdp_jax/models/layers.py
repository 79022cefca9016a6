"""Linear layer, RMS norm, MLP and rotary frequencies of a decoder."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn import initializers

from dcmdp_jax.models import scheme_products
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.declare import Fused, Scope, parameter
from dcmdp_jax.models.families import Family
from dcmdp_jax.models.ops import Ops
from dcmdp_jax.models.ops.reference import Rotary, rms_norm
from dcmdp_jax.models.quantize import (
    Kernel,
    QuantizedKernel,
    RoundsInputs,
    quantized_product,
    round_inputs,
)
from dcmdp_jax.models.rope import RopeScaling
from dcmdp_jax.types import Array

_ONE = np.float32(1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraKernel:
    """A frozen matrix with its adapter.

    Attributes:
        base: W [in, out], an array or a `QuantizedKernel`; no gradient flows here.
        a, b: [in, r] and [r, out].
        scale: alpha / r.
    """

    base: Kernel
    a: Array
    b: Array
    scale: float = dataclasses.field(metadata={"static": True})


def kernel_matmul(
    x: Array,
    kernel: Kernel | RoundsInputs | scheme_products.SchemeKernel | LoraKernel,
) -> Array:
    """x W, and with an adapter x W + scale (x A) B, in the dtype of `x` [T, in]."""
    if isinstance(kernel, LoraKernel):
        y = kernel_matmul(x, kernel.base)
        return y + (x @ kernel.a.astype(x.dtype)) @ kernel.b.astype(x.dtype) * kernel.scale
    if isinstance(kernel, scheme_products.SchemeKernel):
        return scheme_products.scheme_matmul(x, kernel)
    if isinstance(kernel, RoundsInputs):
        return kernel_matmul(round_inputs(x, kernel.precision, kernel.axis), kernel.kernel)
    if isinstance(kernel, QuantizedKernel):
        return quantized_product(x, kernel).astype(x.dtype)
    return x @ kernel.astype(x.dtype)


class Linear(nnx.Module):
    """y = x W + b.

    W [in, out] may be a `QuantizedKernel` (engine), a `SchemeKernel` or a `LoraKernel` (training).

    Products run in the dtype of `x`, parameters are cast to it.
    """

    def __init__(
        self,
        scope: Scope,
        sizes: tuple[int, int],
        axes: tuple[str, str],
        *,
        bias: bool = False,
        quantized: bool = True,
        fused: Fused | None = None,
    ) -> None:
        """Declare W and b.

        Args:
            scope: the layer's.
            sizes, axes: in and out, and their logical names.
            bias: whether there is a b, initially 0.
            quantized: engines that quantize weights quantize W.
            fused: see `declare.Declaration`, of W.
        """
        self.kernel = parameter(
            scope,
            "weight",
            sizes,
            axes,
            init=initializers.normal(scope.config.initializer_range),
            transposed=True,
            quantized=quantized,
            fused=fused,
        )
        if bias:
            self.bias = parameter(
                scope,
                "bias",
                sizes[1:],
                axes[1:],
                init=initializers.zeros,
            )
        else:
            self.bias = None

    def __call__(self, x: Array) -> Array:
        # Tokens in one axis: XLA's CPU backend takes 2.5 times as long for a weight gradient that
        # contracts two.
        y = kernel_matmul(x.reshape(-1, x.shape[-1]), self.kernel.get_value())
        y = y.reshape(*x.shape[:-1], -1)
        if self.bias is None:
            return y
        return y + self.bias.get_value().astype(x.dtype)


class RMSNorm(nnx.Module):
    """`ops.reference.rms_norm` with learned weights, which multiply by 1 initially."""

    def __init__(
        self,
        scope: Scope,
        size: int,
        axis: str,
        *,
        family: Family | None = None,
    ) -> None:
        """Declare the weights.

        Args:
            scope: the norm's.
            size, axis: of the weights, and its logical name.
            family: whose norm it is; None: the model's.
        """
        if family is None:
            family = scope.config.family
        init = initializers.ones
        if family.unit_offset:
            init = initializers.zeros
        self.scale = parameter(
            scope,
            "weight",
            (size,),
            (axis,),
            init=init,
        )
        self.eps = scope.config.rms_norm_eps
        self.unit_offset = family.unit_offset
        self.float32 = family.float32_norm

    def __call__(self, x: Array) -> Array:
        return rms_norm(self.read(x), self.factors, self.eps).astype(x.dtype)

    @property
    def factors(self) -> Array:
        """Factor of the normed vector, w, or 1 + w in float32."""
        scale = self.scale.get_value()
        if self.unit_offset:
            return scale.astype(jnp.float32) + 1
        return scale

    def read(self, x: Array) -> Array:
        """`x` in the dtype that the norm multiplies in."""
        if self.float32:
            return x.astype(jnp.float32)
        return x


class MLP(nnx.Module):
    """W_down (act(W_gate x) * W_up x), with silu or the tanh form of GELU as `act`.

    Attributes:
        silu: whether it is silu.
        fused: W_gate and W_up are one matrix `gate_up`; see `layer_params.fuse_projections`.
    """

    def __init__(self, scope: Scope, *, fused: bool = False) -> None:
        self.fused = fused
        self.width = scope.config.intermediate_size
        self.silu = scope.config.family.gate == "silu"
        embed = scope.config.hidden_size

        if fused:
            self.gate_up = Linear(
                scope.inner("gate_up"),
                (embed, 2 * self.width),
                ("embed", "mlp"),
            )
        else:
            self.gate = Linear(
                scope.inner("gate_proj"),
                (embed, self.width),
                ("embed", "mlp"),
            )
            self.up = Linear(
                scope.inner("up_proj"),
                (embed, self.width),
                ("embed", "mlp"),
            )
        self.down = Linear(
            scope.inner("down_proj"),
            (self.width, embed),
            ("mlp", "embed"),
        )

    def __call__(self, x: Array, ops: Ops) -> Array:
        if self.fused:
            both = self.gate_up(x)
            gate = both[..., : self.width]
            up = both[..., self.width :]
        else:
            gate = self.gate(x)
            up = self.up(x)
        if self.silu:
            return self.down(ops.swiglu(gate, up))
        return self.down(jax.nn.gelu(gate, approximate=True) * up)


def rotary_frequencies(config: ModelConfig, rope: str = "global") -> tuple[np.ndarray, float]:
    """Inverse frequencies of one of `ModelConfig.layer_ropes`, and the factor on cos and sin.

    The unscaled frequencies are theta^(-2i/h). "linear" divides all by `factor`; "yarn" (Peng et
    al. 2023, arXiv:2309.00071, eq. 20-23) divides the slow ones and ramps between; "llama3"
    likewise by wavelength. The formulas are from transformers' `modeling_rope_utils`, each
    operation rounded to float32 where it rounds: at position 30,000 the last bit of a frequency
    turns a head by 1e-3 radians, so being more exact is being different.

    Returns:
        [rotary_dim / 2] float32, radians per position, and the attention factor.
    """
    if rope == "none":  # angles of zero turn nothing
        return np.zeros(config.rotary_dim // 2, np.float32), 1.0
    if rope == "sliding":
        config = dataclasses.replace(
            config, rope_theta=config.sliding_rope_theta, rope_scaling=RopeScaling()
        )
    scaling = config.rope_scaling
    dim = config.rotary_dim
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    periods = (config.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
    plain = _ONE / periods
    if scaling.kind == "default":
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / np.float32(scaling.factor), 1.0
    if scaling.kind == "llama3":
        return _llama3_frequencies(plain, scaling), 1.0
    unscaled = _yarn_unscaled_share(config)
    slow = _ONE / (np.float32(scaling.factor) * periods)
    return slow * (_ONE - unscaled) + plain * unscaled, yarn_attention_factor(scaling)


def _llama3_frequencies(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    factor = np.float32(scaling.factor)
    length = scaling.original_max_position_embeddings
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    # torch divides a number by a tensor as number * (1 / tensor).
    wavelength = np.float32(2 * math.pi) * (_ONE / plain)
    smooth = np.float32(length) * (_ONE / wavelength) - np.float32(low)
    smooth = smooth / np.float32(high - low)
    middle = (_ONE - smooth) * plain / factor + smooth * plain
    scaled = np.where(wavelength > length / low, plain / factor, middle)
    return np.where(wavelength < length / high, plain, scaled)


def _yarn_unscaled_share(config: ModelConfig) -> np.ndarray:
    """Share of each unscaled frequency: 1 for fast ones, 0 for slow ones, a ramp between."""
    scaling = config.rope_scaling
    dim = config.rotary_dim

    def dimension(rotations: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(config.rope_theta))

    first = dimension(scaling.beta_fast)
    last = dimension(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, dim - 1)
    width = last - first
    if not width:
        width = 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(width)
    return _ONE - np.clip(ramp, 0, 1)


def yarn_attention_factor(scaling: RopeScaling) -> float:
    """Yarn's scale of cos and sin: 0.1 m log(factor) + 1, or the quotient of two.

    Peng et al. 2023, section 3.4.
    """
    if scaling.attention_factor:
        return scaling.attention_factor

    def scale(mscale: float) -> float:
        if scaling.factor <= 1:
            return 1.0
        return 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.mscale) / scale(scaling.mscale_all_dim)
    return scale(1.0)


def rotary_tables(config: ModelConfig, position_ids: Array, rope: str = "global") -> Rotary:
    """Cosines and sines of the angles of one of `ModelConfig.layer_ropes`, for `Ops.rotate`.

    Returns:
        (cos, cos) and (-sin, sin) for the two halves of what turns: float32 `[..., 2, rotary_dim /
        2]` for position_ids `[...]`.
    """
    frequencies, factor = rotary_frequencies(config, rope)
    angles = position_ids[..., None].astype(jnp.float32) * frequencies
    cos = jnp.cos(angles) * factor
    sin = jnp.sin(angles) * factor
    return jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)


def all_rotary_tables(config: ModelConfig, position_ids: Array) -> dict[str, Rotary]:
    """`rotary_tables` of each rotary embedding that the model has.

    The barrier keeps XLA from recomputing cosines in every layer's fusion.
    """
    ropes = dict.fromkeys(config.layer_ropes)
    tables = {rope: rotary_tables(config, position_ids, rope) for rope in ropes}
    return jax.lax.optimization_barrier(tables)


def embedding_scale(config: ModelConfig, x: Array) -> Array:
    """Embeddings as the first layer reads them: in some families times sqrt(D), in their dtype."""
    if config.family.scaled_embedding:
        return x * jnp.asarray(math.sqrt(config.hidden_size), x.dtype)
    return x
