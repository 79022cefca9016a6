"""Low-rank adapters of a model's linear layers (LoRA, Hu et al. 2021, arXiv:2106.09685).

    y = x W + (alpha / r) (x A) B,      A [in, r],   B [r, out],   W frozen

Adapters are declared, drawn, sharded and saved like any parameters. The base holds W, in float32, bfloat16 or int8.
"""

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dcmdp_jax.errors import ArgumentError
from dcmdp_jax.models import hf_weights
from dcmdp_jax.models.config import ALL_LINEAR, Lora, ModelConfig
from dcmdp_jax.models.declare import Declaration
from dcmdp_jax.models.layers import LoraKernel
from dcmdp_jax.models.params import model_declarations, quantized_leaves
from dcmdp_jax.models.products import PRECISE
from dcmdp_jax.models.quantize import QuantizedKernel, in_float32, is_quantized, quantize_tree, stored
from dcmdp_jax.types import Params


@functools.lru_cache(maxsize=32)
def adapted_layers(model: ModelConfig, lora: Lora) -> tuple[Declaration, ...]:
    """Declarations of the matrices that get an adapter.

    Raises:
        ArgumentError: for a target that matches no linear layer, or that is of an expert, and for a rank above that of
            a matrix.
    """
    linear = [one for one in model_declarations(model) if one.quantized and one.stacks]
    dense = [one for one in linear if len(one.stacks) == 1]
    allowed = tuple(dict.fromkeys(map(_module, dense)))
    names = allowed if lora.targets == (ALL_LINEAR,) else lora.targets
    for name in names:
        if name not in allowed:
            experts = name in {_module(one) for one in linear}
            why = "adapters of experts are not supported" if experts else "no linear layer has that name"
            raise ArgumentError(
                "lora_targets", f"got {name!r}, {why}; allowed are {', '.join(allowed)}, or {ALL_LINEAR}"
            )
    chosen = tuple(one for one in dense if _module(one) in names)
    for one in chosen:
        if lora.rank > (most := min(one.shape[-2:])):
            raise ArgumentError(
                "lora_rank", f"got {lora.rank}, {_module(one)} is {one.shape[-2]} x {one.shape[-1]}: at most {most}"
            )
    return chosen


def adapter_declarations(model: ModelConfig, lora: Lora) -> tuple[Declaration, ...]:
    """Declarations of A and B of every adapted matrix, named as PEFT names them.

    A is drawn uniformly within +-1/sqrt(in), PEFT's default (Kaiming with a = sqrt 5); B is zero, so the policy begins
    as the base.
    """
    found = []
    for one in adapted_layers(model, lora):
        *path, _ = one.path
        *stacked, rows, columns = one.shape
        *leading, inward, outward = one.axes
        name = f"base_model.model.{one.hf_name.removesuffix('.weight')}"
        shared: dict[str, Any] = {"transposed": True, "quantized": False, "stacks": one.stacks, "fused": None}
        a = Declaration(
            (*path, "a"), (*stacked, rows, lora.rank), (*leading, inward, "rank"), _uniform,
            f"{name}.lora_A.weight", **shared,
        )  # fmt: skip
        b = Declaration(
            (*path, "b"), (*stacked, lora.rank, columns), (*leading, "rank", outward), jax.nn.initializers.zeros,
            f"{name}.lora_B.weight", **shared,
        )  # fmt: skip
        found += [a, b]
    return tuple(found)


def trained(model: ModelConfig, lora: Lora | None) -> tuple[Declaration, ...]:
    """Declarations of what is trained: the adapters, or every parameter of the model."""
    return model_declarations(model) if lora is None else adapter_declarations(model, lora)


class SavedAdapters(NamedTuple):
    """Record of a checkpoint's adapters and their base.

    Attributes:
        rank, alpha, targets: see `Lora`.
        base_dtype: "float32", "bfloat16" or "int8".
        base_path: the base's Hugging Face directory.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_dtype: str
    base_path: str

    @property
    def lora(self) -> Lora:
        """Shape of the adapters."""
        return Lora(self.rank, self.alpha, tuple(self.targets))


def load_base(directory: Path, model: ModelConfig, dtype: str, shardings: Params | None = None) -> Params:
    """The frozen parameters of a Hugging Face directory.

    Args:
        directory, model, shardings: see `hf_weights.load_params`.
        dtype: "float32", "bfloat16", or "int8": the linear layers' matrices are quantized, the rest is bfloat16.
    """
    stored = "float32" if dtype == "float32" else "bfloat16"
    base = hf_weights.load_params(directory, model, dtype=stored, shardings=shardings)
    if dtype != "int8":
        return base
    chosen = quantized_leaves(model)
    return jax.jit(lambda params: quantize_tree(params, chosen, dtype), donate_argnums=0)(base)


def adapted(base: Params, adapters: Params, lora: Lora) -> Params:
    """The base with a `LoraKernel` for every matrix that has an adapter, for the training stack's forward pass."""
    return _joined(base, adapters, lambda kernel, a, b: LoraKernel(kernel, a, b, lora.scale))


def merged(base: Params, adapters: Params, lora: Lora, rounded_to: str | None = None) -> Params:
    """W + D, D = (alpha / r) A B, computed and returned in float32, for engines and exports; the rest as in the base.

    An engine then rounds the sum once, to its own precision. With `rounded_to`, an engine's precision (see
    `quantize.stored`), W + Q(W + D) - Q(W): the change as that rounding lets it arrive.
    """

    def merge(kernel: jax.Array | QuantizedKernel, a: jax.Array, b: jax.Array) -> jax.Array:
        change = _product(a, b) * lora.scale
        return in_float32(kernel) + (change if rounded_to is None else _arriving(kernel, change, rounded_to))

    whole = _joined(base, adapters, merge)
    return jax.tree.map(in_float32, whole, is_leaf=is_quantized)


def merge_rounding(base: Params, adapters: Params, lora: Lora, precision: str) -> jax.Array:
    """How far an engine's rounding Q of the merged matrices bends what the adapters change, [] float32.

        ||Q(W + D) - Q(W) - D|| / ||D||,     D = (alpha / r) A B,

    over all adapted matrices: 0 if the engine gets D as it is, about 1 if the change is lost between two numbers that
    the engine can hold; 0 where D is 0.

    Args:
        base, adapters, lora: see `merged`.
        precision: see `quantize.stored`.
    """
    squares = []

    def measure(kernel: jax.Array | QuantizedKernel, a: jax.Array, b: jax.Array) -> None:
        change = _product(a, b) * lora.scale
        squares.append((jnp.sum((_arriving(kernel, change, precision) - change) ** 2), jnp.sum(change**2)))

    _joined(base, adapters, measure)
    bent, whole = (sum(each) for each in zip(*squares, strict=True))
    return jnp.where(whole > 0, jnp.sqrt(bent / jnp.where(whole > 0, whole, 1.0)), 0.0)


def merged_and_measured(
    base: Params, adapters: Params, lora: Lora, precision: str
) -> tuple[Params, dict[str, jax.Array]]:
    """`merged`, and `merge_rounding` as a metric. Arguments as of `merge_rounding`."""
    return merged(base, adapters, lora), {"mismatch/merge_rounding": merge_rounding(base, adapters, lora, precision)}


def _arriving(kernel: jax.Array | QuantizedKernel, change: jax.Array, precision: str) -> jax.Array:
    """Q(W + D) - Q(W)."""
    w = in_float32(kernel)
    return in_float32(stored(w + change, precision)) - in_float32(stored(w, precision))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=PRECISE)


def _joined(base: Params, adapters: Params, join: Any) -> Params:
    """The base with `join(kernel, a, b)` in place of each adapted kernel."""
    if "a" in adapters:
        return {**base, "kernel": join(base["kernel"], adapters["a"], adapters["b"])}
    return {**base, **{name: _joined(base[name], part, join) for name, part in adapters.items()}}


def _uniform(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    bound = 1 / math.sqrt(shape[-2])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _module(declared: Declaration) -> str:
    """The last part of a linear layer's Hugging Face name, such as "q_proj"."""
    return declared.hf_name.removesuffix(".weight").rpartition(".")[2]
