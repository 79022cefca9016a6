"""The trainer's parameters into shared memory, under Hugging Face's names and in the engine's dtypes."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.global_arrays import to_host
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import HFTensor, hf_tensors
from dcmdp_jax.models.quantize import quantize_kernel
from dcmdp_jax.rollout.sidecar.manifest import ALIGNMENT, Tensor, checksum
from dcmdp_jax.rollout.sidecar.shared_memory import Segment
from dcmdp_jax.types import Params

_THREADS = min(4, os.cpu_count() or 1)
# A converted block; larger ones are mapped again each time, and clearing their pages takes longer than writing them.
_BLOCK_BYTES = 1 << 24
# Rows transposed together: read in full, written as runs of that many items. One row at a time is six times slower.
_TRANSPOSED_ROWS = 128


class WeightBridge:
    """Knows where each tensor goes and writes them there, several at a time.

    Nothing but the blocks that are being written exists a second time. A parameter in host memory that has the engine's
    dtype already is written from where it lies.
    """

    def __init__(self, config: ModelConfig, *, dtype: str, int8: bool = False) -> None:
        """Lay out the segment; nothing is allocated.

        Args:
            config: the model.
            dtype: "float32", "bfloat16" or "float16" of the tensors.
            int8: linear layers as int8 with one float32 scale per output channel (`name` and `name`_scale), as
                compressed-tensors stores W8A8; embedding, norms and biases stay in `dtype`.
        """
        self._dtype = dtype
        self._jobs: list[tuple[HFTensor, list[Tensor]]] = []
        end = 0
        for name, place in hf_tensors(config).items():
            quantized = int8 and place.quantized
            parts = [(name, "int8" if quantized else dtype, place.shape)]
            if quantized:
                parts.append((f"{name}_scale", "float32", (place.shape[0], 1)))
            tensors = []
            for part in parts:
                tensors.append(Tensor(*part, -(-end // ALIGNMENT) * ALIGNMENT))
                end = tensors[-1].offset + tensors[-1].num_bytes
            self._jobs.append((place, tensors))
        self.manifest: list[Tensor] = [tensor for _, tensors in self._jobs for tensor in tensors]
        """In the order of `hf_tensors`: layer by layer, which is how engines like to load."""
        self.num_bytes: int = end
        """Size of a segment."""

    def publish(self, params: Params, segment: Segment, policy_version: int) -> np.ndarray:
        """Write the tensors.

        Args:
            params: of the model (see `params.check_params`); any sharding; over several processes, all publish alike.
            segment: of at least `num_bytes`.
            policy_version: of the checksums.

        Returns:
            [tensors] uint64 checksums of what was written, in the manifest's order.
        """

        def job(place: HFTensor, tensors: list[Tensor]) -> list[int]:
            leaf: Any = params
            for key in place.path:
                leaf = leaf[key]
            if len(tensors) == 2:
                kernel = _quantized(leaf, place.index)
                _store(segment, tensors[0], [(0, to_host(kernel.values))], transposed=place.transposed)
                _store(segment, tensors[1], [(0, to_host(kernel.scale)[:, None])], transposed=False)
            else:
                _store(segment, tensors[0], _blocks(leaf, place.index, self._dtype), transposed=place.transposed)
            return [
                checksum(segment.bytes[tensor.offset : tensor.offset + tensor.num_bytes], policy_version)
                for tensor in tensors
            ]

        # Parts on other processes' devices are fetched by all processes in one order.
        alone = all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array))
        with ThreadPoolExecutor(_THREADS if alone else 1) as pool:
            sums = list(pool.map(job, *zip(*self._jobs, strict=True)))
        return np.array([value for part in sums for value in part], np.uint64)


def _store(segment: Segment, tensor: Tensor, blocks: Any, *, transposed: bool) -> None:
    """Write [rows, ...] blocks, given with their first row, of the parameter that is `tensor` or its transpose."""
    for first, block in blocks:
        words = block.view(f"u{block.dtype.itemsize}")
        target = segment.bytes[tensor.offset : tensor.offset + tensor.num_bytes].view(words.dtype).reshape(tensor.shape)
        if not transposed:
            target[first : first + len(words)] = words
            continue
        for start in range(0, len(words), _TRANSPOSED_ROWS):
            part = words[start : start + _TRANSPOSED_ROWS]
            target[:, first + start : first + start + len(part)] = part.T


def _blocks(leaf: jax.Array, index: tuple[int, ...], dtype: str) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, rows) of the part of a leaf at `index` of its stacked axes, in the engine's dtype, on the host."""
    rows, *rest = leaf.shape[len(index) :]
    if leaf.dtype == jnp.dtype(dtype) and len(leaf.devices()) == 1 and next(iter(leaf.devices())).platform == "cpu":
        # No copy: a view of XLA's own buffer.
        yield 0, np.asarray(leaf)[index]
        return
    height = max(1, _BLOCK_BYTES // (jnp.dtype(dtype).itemsize * max(1, int(np.prod(rest)))))
    for first in range(0, rows, height):
        count = min(height, rows - first)
        yield first, to_host(_cast(leaf, index, first, rows=count, dtype=dtype))


@functools.partial(jax.jit, static_argnames=("rows", "dtype"))
def _cast(leaf: jax.Array, index: tuple[jax.Array, ...], first: jax.Array, *, rows: int, dtype: str) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(_at(leaf, index), first, rows).astype(dtype)


@jax.jit
def _quantized(leaf: jax.Array, index: tuple[jax.Array, ...]) -> Any:
    return quantize_kernel(_at(leaf, index), "int8")


def _at(leaf: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
    for number in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)
    return leaf
