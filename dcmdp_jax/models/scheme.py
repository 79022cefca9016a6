"""Roundings of an engine's weights, activations and cache, repeated by a matched forward pass."""

from __future__ import annotations

import dataclasses

PRODUCTS = ("int8", "fp8", "fp8_per_block", "fp8_weights_per_block")
CACHES = ("fp8", "fp8_e5m2", "fp8_truncated", "fp8_e5m2_truncated")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The roundings of one engine. Imports no JAX, so that engines' records can name them.

    Attributes:
        weights: precision that matrices are rounded to, the output matrix too, one of `quantize.PRECISIONS`; "" for
            none.
        products: rounding of the linear layers' products, one of `PRODUCTS`, see `scheme_products`; the output layer,
            embedding, norms and attention stay in the compute dtype. "" for none. Not together with `weights`.
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
                raise ValueError(f"{name}: got {getattr(self, name)!r}, allowed are '', {', '.join(allowed)}")
        if self.weights and self.products:
            raise ValueError(f"weights: got {self.weights!r} with products={self.products!r}, one of them is ''")


FULL = Scheme()
"""Nothing is rounded but to the compute dtype."""


def weights_alone(precision: str, cache: str) -> Scheme:
    """The scheme of an engine that dequantizes its weights and computes as the trainer does, as the embedded one does.

    Args:
        precision: "full", or of `quantize.PRECISIONS`.
        cache: "full" or "fp8".
    """
    return Scheme(weights="" if precision == "full" else precision, cache="" if cache == "full" else cache)
