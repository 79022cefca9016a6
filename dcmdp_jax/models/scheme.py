"""Roundings of an engine's weights, activations and cache, repeated by a matched forward pass."""

import dataclasses
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dcmdp_jax.errors import ArgumentError, install_extra

if TYPE_CHECKING:
    from dcmdp_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped:
    """A format of weights with a scale for each group of inputs of an output.

    Attributes:
        qtype: its name in the library qwix.
        size: inputs of a group.
        rounds_inputs: the layers' linears round their inputs too, each token by itself; the output
            layer does not.
    """

    qtype: str
    size: int
    rounds_inputs: bool = False


GROUPED = {
    "mxfp8": Grouped(qtype="mxfp8", size=32),
    "mxfp4": Grouped(qtype="mxfp4", size=32),
    "nvfp4": Grouped(qtype="nvfp4", size=16),
    "nf4": Grouped(qtype="nf4", size=64),
    "int4_g32": Grouped(qtype="int4", size=32),
    "int4_g128": Grouped(qtype="int4", size=128),
    "mxfp8_w8a8": Grouped(qtype="mxfp8", size=32, rounds_inputs=True),
    "nvfp4_w4a4": Grouped(qtype="nvfp4", size=16, rounds_inputs=True),
}
PRODUCTS = ("int8", "fp8", "fp8_per_block", "fp8_weights_per_block")
CACHES = ("fp8", "fp8_e5m2", "fp8_truncated", "fp8_e5m2_truncated")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The roundings of one engine. Imports no JAX, so that engines' records can name them.

    Attributes:
        weights: precision that matrices are rounded to, the output matrix too, one of
            `quantize.PRECISIONS`, some of which round inputs too, see `Grouped`; "" for none.
        products: rounding of the linear layers' products, one of `PRODUCTS`, see `scheme_products`;
            the output layer, embedding, norms and attention stay in the compute dtype. "" for none.
            Not together with `weights`.
        skip_qkv: products of the q, k and v projections are not rounded.
        cache: rounding of keys, after their rotation, and of values, one of `CACHES`; "" for none.
    """

    weights: str = ""
    products: str = ""
    skip_qkv: bool = False
    cache: str = ""

    def __post_init__(self) -> None:
        for name, allowed in (("products", PRODUCTS), ("cache", CACHES)):
            if getattr(self, name) not in ("", *allowed):
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r}, allowed are '', {', '.join(allowed)}"
                )
        if self.weights and self.products:
            raise ValueError(
                f"weights: got {self.weights!r} with products={self.products!r}, one of them is ''"
            )


FULL = Scheme()
"""Nothing is rounded but to the compute dtype."""


def weights_alone(precision: str, cache: str) -> Scheme:
    """The scheme of an engine that dequantizes its weights and computes as the trainer does.

    Args:
        precision: "full", or of `quantize.PRECISIONS`.
        cache: "full" or "fp8".
    """
    names = {"full": ""}
    return Scheme(weights=names.get(precision, precision), cache=names.get(cache, cache))


def check_grouped(precision: str, model: "ModelConfig | None", tensor: int) -> None:
    """Refuse one of `GROUPED` without its library, or whose groups do not divide the inputs.

    Args:
        precision: of any kind; others than these are fine.
        model: None: unknown yet.
        tensor: devices that heads and MLP are split over.

    Raises:
        UserError: naming the precision, and the extra or the size.
    """
    form = GROUPED.get(precision)
    if form is None:
        return
    refused = f"got {precision!r}, which"
    if find_spec("qwix") is None:
        raise ArgumentError("precision", f"{refused} needs qwix: {install_extra('qwix')}")
    if model is None:
        return

    sizes = {
        "hidden_size": model.hidden_size,
        "num_heads x head_dim": model.num_heads * model.head_dim // tensor,
    }
    for name in model.mlp_fields:
        sizes[name] = getattr(model, name) // tensor
    if model.recurrent_layers:
        sizes["linear_num_value_heads x linear_value_head_dim"] = (
            model.linear_num_value_heads * model.linear_value_head_dim // tensor
        )
    for name, size in sizes.items():
        if size % form.size:
            share = ""
            if tensor > 1:
                share = " of each device"
            raise ArgumentError(
                "precision",
                f"got {precision!r}, whose groups of {form.size} do not divide "
                f"{name}={size}{share}",
            )
    if form.rounds_inputs and model.num_experts:
        raise ArgumentError(
            "precision", f"{refused} rounds inputs of dense layers alone; choose {form.qtype}"
        )
