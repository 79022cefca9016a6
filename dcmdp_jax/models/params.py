"""Tables derived from the declarations of a model's parameters."""

import dataclasses
import functools
import itertools
import math
import operator
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from dcmdp_jax.models import decoder
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.declare import Declaration, Stack, declarations
from dcmdp_jax.types import Array, Params


@functools.lru_cache(maxsize=32)
def model_declarations(config: ModelConfig) -> tuple[Declaration, ...]:
    """Every parameter of the model, in the order in which transformers writes its tensors."""
    return tuple(declarations(decoder.Decoder(config)))


def declared_tree(declared: Iterable[Declaration], leaf: Callable[[Declaration], Any]) -> Params:
    """The nested dict of declared parameters, with `leaf(declaration)` at its leaves."""
    tree: Params = {}
    for declaration in declared:
        *parents, name = declaration.path
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[name] = leaf(declaration)
    return tree


def param_shapes(config: ModelConfig, dtype: str = "float32") -> Params:
    """`jax.ShapeDtypeStruct`s of `init_params`, without making an array."""
    return declared_shapes(model_declarations(config), dtype)


def declared_shapes(declared: Iterable[Declaration], dtype: str) -> Params:
    """`jax.ShapeDtypeStruct`s of declared parameters."""
    return declared_tree(
        declared,
        lambda declaration: jax.ShapeDtypeStruct(declaration.shape, jnp.dtype(dtype)),
    )


def logical_axes(config: ModelConfig) -> Params:
    """Names of the axes of every parameter, in the tree of `init_params`."""
    return declared_axes(model_declarations(config))


def declared_axes(declared: Iterable[Declaration]) -> Params:
    """Names of the axes of declared parameters."""
    return declared_tree(declared, lambda declaration: declaration.axes)


def quantized_leaves(config: ModelConfig) -> Params:
    """True for each parameter that engines quantize, in the tree of `init_params`."""
    return declared_tree(model_declarations(config), lambda declaration: declaration.quantized)


def num_params(config: ModelConfig) -> int:
    """Parameters of the model, tied embeddings counted once."""
    return sum(math.prod(declared.shape) for declared in model_declarations(config))


def init_params(config: ModelConfig, key: Array, dtype: str = "float32") -> Params:
    """Draw fresh parameters of a model, see `draw_params`."""
    return draw_params(model_declarations(config), key, dtype)


def draw_params(declared: Iterable[Declaration], key: Array, dtype: str) -> Params:
    """Draw declared parameters, each with its initializer.

    The key of a parameter is `key` folded with a checksum of its path, so that a parameter that is
    added to a model changes the initial values of no other.

    Args:
        declared: the parameters.
        key: a `jax.random.key`.
        dtype: "float32" or "bfloat16"; values are drawn in float32 and rounded.

    Returns:
        Nested dict; leaves of layers have a leading axis, of the layers of their kind.
    """

    def draw(declaration: Declaration) -> Array:
        leaf_key = jax.random.fold_in(key, zlib.crc32(".".join(declaration.path).encode()))
        return declaration.init(leaf_key, declaration.shape, jnp.dtype(jnp.float32)).astype(dtype)

    return declared_tree(declared, draw)


def check_params(params: Params, config: ModelConfig) -> None:
    """Refuse parameters that do not fit the model.

    Raises:
        ValueError: naming the first parameter that is missing, superfluous or of another shape.
    """

    def shapes(tree: Params) -> dict[str, tuple[int, ...]]:
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): jnp.shape(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }

    expected = shapes(param_shapes(config))
    actual = shapes(params)
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise ValueError(
                f"params: {name} has shape {actual.get(name, 'missing')}, the model has "
                f"{expected.get(name, 'no such')}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedPart:
    """Where a Hugging Face tensor lies in one that holds several; see `declare.Fused`.

    Attributes:
        name: name of the tensor that holds it.
        shape: shape of that tensor.
        index: position along its first axis.
        rows: slice of its second axis.
    """

    name: str
    shape: tuple[int, ...]
    index: int
    rows: slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class HFTensor:
    """Where a Hugging Face tensor lives in `Params`.

    Attributes:
        path: keys into the nested dict.
        index: position on the stacked axes of the leaf, outermost first; () outside `layers`.
        transposed: the tensor is [out, in], the leaf [in, out].
        shape: shape of the tensor.
        quantized: engines that quantize weights quantize this one.
        fused: where a checkpoint of the second layout holds it, or None.
    """

    path: tuple[str, ...]
    index: tuple[int, ...]
    transposed: bool
    shape: tuple[int, ...]
    quantized: bool
    fused: FusedPart | None

    def leaf(self, params: Params) -> Any:
        """The leaf that holds it, stacked axes and all."""
        return functools.reduce(operator.getitem, self.path, params)


def hf_tensors(config: ModelConfig) -> dict[str, HFTensor]:
    """Every tensor of a checkpoint of `config` by name, in the order transformers writes them.

    Tied models have no `lm_head.weight`.
    """
    return declared_tensors(model_declarations(config))


def declared_tensors(declarations: Iterable[Declaration]) -> dict[str, HFTensor]:
    """The Hugging Face tensors of declared parameters by name."""

    def tensor(declared: Declaration, index: tuple[int, ...], numbers: dict[str, int]) -> HFTensor:
        shape = declared.shape[len(index) :]
        if declared.transposed:
            shape = shape[::-1]
        fused = None
        if declared.fused is not None:
            rows = shape[0]
            start = declared.fused.block * rows
            fused = FusedPart(
                name=declared.fused.hf_name.format(**numbers),
                shape=(len(declared.stacks[-1].numbers), declared.fused.blocks * rows, *shape[1:]),
                index=index[-1],
                rows=slice(start, start + rows),
            )
        return HFTensor(
            path=declared.path,
            index=index,
            transposed=declared.transposed,
            shape=shape,
            quantized=declared.quantized,
            fused=fused,
        )

    tensors: dict[str, HFTensor] = {}

    def add(group: Iterable[Declaration], index: tuple[int, ...], numbers: dict[str, int]) -> None:
        """Add the tensors of declarations whose first `len(index)` stacked axes are at `index`.

        `numbers` has for each of these axes the number in Hugging Face's names.
        """
        depth = len(index)

        def stacked_axis(declared: Declaration) -> str | None:
            if not declared.stacks[depth:]:
                return None
            return declared.axes[depth]

        for axis, same_axis in itertools.groupby(group, key=stacked_axis):
            if axis is None:
                for declared in same_axis:
                    name = declared.hf_name.format(**numbers)
                    tensors[name] = tensor(declared, index, numbers)
                continue

            by_stack: dict[Stack, list[Declaration]] = {}
            for declared in same_axis:
                by_stack.setdefault(declared.stacks[depth], []).append(declared)
            # Layers of two kinds are in two stacks: each layer's tensors follow those of the layer
            # before it.
            layers = []
            for stack, declarations_of_stack in by_stack.items():
                for position, number in enumerate(stack.numbers):
                    layers.append((number, position, declarations_of_stack))
            layers.sort(key=lambda layer: layer[0])
            for number, position, declarations_of_stack in layers:
                add(declarations_of_stack, (*index, position), numbers | {axis: number})

    add(declarations, (), {})
    return tensors
