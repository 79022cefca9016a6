"""Declare a parameter of a model once, with everything that is known of it.

A declaration is metadata of its `nnx.Param`.

A module built from declarations holds shapes and no arrays: a model of any size is built in
milliseconds. `params.py` walks it and derives shapes, initial values, shardings, Hugging Face
tensors and what an engine quantizes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from dcmdp_jax.models.config import ModelConfig

Initializer = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]
"""(key, shape, dtype) -> values, as in `jax.nn.initializers`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """A leading axis along which many modules of one kind are stored, such as layers.

    Attributes:
        axis: the logical name of the axis, "layers" or "experts".
        numbers: the number of each in Hugging Face's names.
    """

    axis: str
    numbers: Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fused:
    """A second Hugging Face layout of a stacked leaf: several matrices in one tensor.

    The tensor also has the leaf's innermost stacked axis.

    Attributes:
        hf_name: the tensor, of shape [size of the innermost stack, blocks x out, in].
        block: index of this leaf's block of rows.
        blocks: blocks in the tensor.
    """

    hf_name: str
    block: int
    blocks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """Declaration of a parameter.

    Attributes:
        path: keys into the nested dict of parameters.
        shape: shape of the whole leaf, stacked axes first.
        axes: logical name of each dimension of `shape`.
        init: makes the initial values.
        hf_name: the Hugging Face tensor; of a stacked leaf, which holds one tensor for each layer,
            with "{layers}" where the number of the layer belongs, and so for each stacked axis.
            Not used of a fused matrix, which only engines have.
        transposed: Hugging Face stores the matrix as [out, in], we as [in, out].
        quantized: engines that quantize weights quantize this one.
        stacks: the stacked axes, outermost first.
        fused: a second layout that checkpoints may have, or None.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Initializer
    hf_name: str
    transposed: bool
    quantized: bool
    stacks: tuple[Stack, ...]
    fused: Fused | None


@dataclasses.dataclass(frozen=True)
class Scope:
    """Where the parameters of a module belong.

    Attributes:
        config: the model.
        hf_name: the module's name in Hugging Face's files, see `Declaration`.
        stacks: see `Declaration`.
    """

    config: ModelConfig
    hf_name: str
    stacks: tuple[Stack, ...] = ()

    def inner(self, name: str) -> "Scope":
        """The scope of a module within this one."""
        return dataclasses.replace(self, hf_name=f"{self.hf_name}.{name}")


def parameter(
    scope: Scope,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    *,
    init: Initializer,
    transposed: bool = False,
    quantized: bool = False,
    fused: Fused | None = None,
) -> nnx.Param:
    """Declare a parameter of a module.

    Args:
        scope: the module's.
        name: how the tensor's name goes on after the module's in Hugging Face's files.
        shape, axes: shape and axes of one module; the scope's stacks go before them.
        init, transposed, quantized, fused: see `Declaration`.
    """
    for stack in reversed(scope.stacks):
        shape = (len(stack.numbers), *shape)
        axes = (stack.axis, *axes)
    declaration = Declaration(
        path=(),
        shape=shape,
        axes=axes,
        init=init,
        hf_name=f"{scope.hf_name}.{name}",
        transposed=transposed,
        quantized=quantized,
        stacks=scope.stacks,
        fused=fused,
    )
    shape_dtype = jax.ShapeDtypeStruct(declaration.shape, jnp.float32)
    return nnx.Param(shape_dtype, declaration=declaration)


def declarations(module: nnx.Module, prefix: tuple[str, ...] = ()) -> Iterator[Declaration]:
    """Yield every parameter of a module, in the order in which constructors declare them."""
    for name, value in vars(module).items():
        path = (*prefix, name)
        if isinstance(value, nnx.Param):
            yield dataclasses.replace(value.get_metadata("declaration"), path=path)
        elif isinstance(value, nnx.Module):
            yield from declarations(value, path)
