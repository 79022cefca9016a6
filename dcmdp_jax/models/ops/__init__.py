"""The operations of a decoder that have a version for each platform, chosen here and nowhere else.

Every version computes what `reference` computes, up to rounding. Other attention kernels
(blockwise, cuDNN, splash) are a setting of their own: `attention.choose_kernel`.
"""

import dataclasses
from collections.abc import Callable
from types import ModuleType

from dcmdp_jax.models.ops import blocks, cpu, reference, tpu
from dcmdp_jax.models.ops.reference import Rotary
from dcmdp_jax.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ops:
    """One version of each operation; `reference` has the docstrings.

    Attributes:
        attention: (query, key, value, visible) -> attended heads.
        swiglu: (gate, up) -> silu(gate) * up.
        rotate: (x, rotary) -> rotated heads.
        norm_and_rotate: (x, scale, rotary, eps) -> normed and rotated heads.
        split: (x, at) -> the first `at` entries along the third axis, and the rest.
        grouped_matmul: (x, kernels, group_sizes) -> each row by the matrix of its group.
        softmax_maximum: (x) -> what a softmax over the last axis subtracts. No gradient.
        fuse_qkv: compute q, k and v of the training forward pass as one product with the three
            matrices concatenated.
    """

    attention: Callable[[Array, Array, Array, Array], Array]
    swiglu: Callable[[Array, Array], Array]
    rotate: Callable[[Array, Rotary], Array]
    norm_and_rotate: Callable[[Array, Array, Rotary, float], Array]
    split: Callable[[Array, int], tuple[Array, Array]]
    grouped_matmul: Callable[[Array, Array, Array], Array]
    softmax_maximum: Callable[[Array], Array]
    fuse_qkv: bool


def _ops(module: ModuleType, *, fuse_qkv: bool) -> Ops:
    return Ops(
        attention=module.attention,
        swiglu=module.swiglu,
        rotate=module.rotate,
        norm_and_rotate=module.norm_and_rotate,
        split=module.split,
        grouped_matmul=module.grouped_matmul,
        softmax_maximum=module.softmax_maximum,
        fuse_qkv=fuse_qkv,
    )


REFERENCE = _ops(reference, fuse_qkv=False)
CPU = _ops(cpu, fuse_qkv=True)
GPU = dataclasses.replace(REFERENCE, grouped_matmul=blocks.grouped_matmul)
TPU = dataclasses.replace(REFERENCE, grouped_matmul=tpu.grouped_matmul)


def choose_ops(platform: str) -> Ops:
    """The operations for "cpu", "gpu" or "tpu".

    GPU and TPU run the reference, as nothing else was measured there; but XLA computes `ragged_dot`
    on GPU, and its weight gradient on TPU, with all experts for each row (seen on an H200, compiled
    for TPUs: benchmarks/README.md). So experts are computed block by block on GPU, by a kernel on
    TPU.
    """
    return {"cpu": CPU, "gpu": GPU, "tpu": TPU}.get(platform, REFERENCE)
