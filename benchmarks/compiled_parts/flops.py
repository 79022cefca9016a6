"""Floating-point operations of the matrix products in a compiled program, and those that the model
needs.

A product of [m, k] and [k, n] has 2 m k n. Everything else is counted as nothing, as is usual.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import NamedTuple

from benchmarks.compiled_parts.hlo import (
    Array,
    Instruction,
    Module,
    TripCounts,
    Visit,
    in_scope,
    walk,
)
from benchmarks.compiled_parts.lengths import forward_flops
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.logprobs import CHUNKS

# Products of an attention kernel by a part of its name: q k and p v forward; the backward kernels
# compute q k again. Splash has one kernel for the gradients of keys and values and one for those of
# queries, cuDNN one for all.
_KERNELS = {"dkv": 4, "dq": 3, "splash": 2}
_KERNELS |= {f"fmha{kind}SoftmaxBackward": 5 for kind in ("", "ScaleBias")}
_KERNELS |= {f"fmha{kind}Softmax": 2 for kind in ("", "ScaleBias")}

PARTS = (
    "layers forward",
    "layers again",
    "layers backward",
    "head forward",
    "head backward",
    "unnamed",
)


class CompiledFlops(NamedTuple):
    """Operations of one run of a program on one device.

    Attributes:
        products: of the matrix products that the HLO shows.
        attention: of attention kernels, which are custom calls, by the shapes of their operands:
            causal, so half of the square of a row that holds one sequence.
        uncounted: names of other custom calls that may hold products.
        parts: all of them by what they are for, see `part_of`.
    """

    products: float
    attention: float
    uncounted: tuple[str, ...]
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """All of them."""
        return self.products + self.attention


def compiled_flops(module: Module, trip_counts: TripCounts) -> CompiledFlops:
    """Count the products of a program."""
    products: dict[str, float] = defaultdict(float)
    attention: dict[str, float] = defaultdict(float)
    uncounted = set()
    for visit in walk(module, trip_counts):
        instruction = visit.instruction
        part = part_of(visit.instruction.op_name)
        if instruction.opcode == "dot":
            products[part] += visit.count * _dot(visit)
        elif instruction.opcode == "convolution":
            products[part] += visit.count * _convolution(visit)
        elif instruction.opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
            name = target.group(1) if target else ""
            if "gemm" in name or "matmul" in name:
                products[part] += visit.count * _library_product(visit)
            elif (kernel := _attention_kernel(name, instruction)) is not None:
                attention[part] += visit.count * kernel * _one_attention_product(visit)
            elif (
                re.search(r"\bt?gmm\b", instruction.op_name)
                and (product := _grouped_product(visit)) is not None
            ):
                products[part] += visit.count * product
            elif name in ("tpu_custom_call", "__triton", "xla.gpu.triton"):
                uncounted.add(instruction.op_name.rsplit("/", 1)[-1] or instruction.name)
    parts = {part: products[part] + attention[part] for part in PARTS}
    return CompiledFlops(
        sum(products.values()), sum(attention.values()), tuple(sorted(uncounted)), parts
    )


def part_of(op_name: str) -> str:
    """The one of `PARTS` that a product is for, by its name scopes.

    "layers again" are the products that a checkpoint computes a second time. The head's backward
    pass computes its logits again under the names of its gradient: a third of its products.
    "unnamed" lost their name in the compiler.
    """
    if not op_name:
        return "unnamed"
    back = "transpose(" in op_name
    if in_scope(op_name, CHUNKS):
        return "head backward" if back else "head forward"
    return (
        "layers again"
        if "rematted_computation" in op_name
        else "layers backward"
        if back
        else "layers forward"
    )


def step_flops(
    model: ModelConfig, *, length: int, tokens: float, recomputed_tokens: float
) -> float:
    """Products of a training step: a gradient costs three forward passes; p^Train of later
    mini-batches one.

    Args:
        model: the model.
        length: of a row.
        tokens: of the step, padding included.
        recomputed_tokens: tokens whose p^Train needs a pass of its own.
    """
    return forward_flops(model, length) * (3 * tokens + recomputed_tokens)


def _dot(visit: Visit) -> float:
    left = visit.computation.operands(visit.instruction)[0]
    contracted = _numbers(r"lhs_contracting_dims=\{([\d,]*)\}", visit.instruction.attributes)
    return 2.0 * visit.instruction.results[0].size * math.prod(left.dims[i] for i in contracted)


def _library_product(visit: Visit) -> float:
    left = visit.computation.operands(visit.instruction)[0]
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', visit.instruction.attributes)
    contracted = (
        [int(n) for n in re.findall(r"\d+", found.group(1))] if found else [len(left.dims) - 1]
    )
    return 2.0 * visit.instruction.results[0].size * math.prod(left.dims[i] for i in contracted)


def _grouped_product(visit: Visit) -> float | None:
    """Megablox's product of [m, k] with one of the experts [E, k, n], or a gradient of it: the same
    three shapes.

    None if they are not there: the compiler has calls of its own with the kernel's name.
    """
    arrays = [*visit.instruction.results, *visit.computation.operands(visit.instruction)]
    experts = [array.dims for array in arrays if len(array.dims) >= 3]
    rows = [array.dims[0] for array in arrays if len(array.dims) == 2]
    return 2.0 * rows[0] * experts[0][-2] * experts[0][-1] if experts and rows else None


def _convolution(visit: Visit) -> float:
    """TPU writes products as convolutions; a batch axis becomes a dilated spatial one, of which
    most taps are holes.
    """
    instruction, (left, right) = (
        visit.instruction,
        visit.computation.operands(visit.instruction)[:2],
    )
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    of_left, of_right, of_out = labels.groups()
    out = instruction.results[0]
    window = _window(instruction.attributes)
    total = 2.0 * right.dims[of_right.index("i")]
    total *= out.dims[of_out.index("b")] * out.dims[of_out.index("f")]
    for axis in range(len(of_left) - 2):
        digit = str(axis)
        total *= _taps(
            left.dims[of_left.index(digit)],
            right.dims[of_right.index(digit)],
            out.dims[of_out.index(digit)],
            {name: values[axis] for name, values in window.items() if axis < len(values)},
        )
    return total


def _window(attributes: str) -> dict[str, list[tuple[int, ...]]]:
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(part.split("=") for part in found.group(1).split()) if found else {}
    return {
        name: [tuple(map(int, one.split("_"))) for one in value.split("x")]
        for name, value in fields.items()
        if name in ("stride", "pad", "lhs_dilate", "rhs_dilate")
    }


def _taps(left: int, right: int, out: int, window: dict[str, tuple[int, ...]]) -> int:
    """Pairs of an output and a kernel position that meet an element of the input, not padding or a
    hole.
    """
    (stride,), (low, *_) = window.get("stride", (1,)), window.get("pad", (0, 0))
    (spread,), (apart,) = window.get("lhs_dilate", (1,)), window.get("rhs_dilate", (1,))
    places = (o * stride + k * apart - low for o in range(out) for k in range(right))
    return sum(
        1 for place in places if place >= 0 and place % spread == 0 and place // spread < left
    )


def _attention_kernel(target: str, instruction: Instruction) -> int | None:
    """Products that an attention kernel computes; None if it is none."""
    tpu = f"{instruction.name} {instruction.op_name}" if target == "tpu_custom_call" else ""
    name = target if "fmha" in target else tpu
    if not any(part in name for part in ("fmha", "splash")):
        return None
    return next(count for part, count in _KERNELS.items() if part in name)


def _one_attention_product(visit: Visit) -> float:
    """Operations of one product of q and k: causal, over half of the square."""
    operands = [
        array for array in visit.computation.operands(visit.instruction) if len(array.dims) >= 3
    ]
    # [.., heads, length, head_dim] in splash, [rows, length, heads, head_dim] in cuDNN: the longest
    # axis is the row's.
    length = max((size for array in operands for size in array.dims), default=0)
    # A mask [.., length, length] may be larger than the queries.
    heads = (array for array in operands if array.dims[-2:] != (length, length))
    query = max(heads, key=lambda array: array.size, default=Array("f32", ()))
    return 2.0 * query.size * length / 2


def _numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    return [int(n) for n in found.group(1).split(",") if n] if found else []
