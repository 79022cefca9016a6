"""The trainer's parameters into shared memory, under Hugging Face's names and in the engine's dtypes."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_names import hf_names
from dcmdp_jax.models.quantize import quantize_kernel
from dcmdp_jax.rollout.vllm.manifest import ALIGNMENT, Tensor, checksum
from dcmdp_jax.rollout.vllm.segments import Segment
from dcmdp_jax.types import Params


class WeightBridge:
    """Knows where each tensor goes and writes them there.

    A segment holds the leaves of `Params` one after the other, each with its layers in order, so that a leaf is
    converted by one compiled program and written by one copy; the manifest finds the tensors in it. Beside the segment
    only the leaf that is being written and the next one exist a second time.
    """

    def __init__(self, config: ModelConfig, *, dtype: str, int8: bool = False) -> None:
        """Lays out the segment; nothing is allocated.

        Args:
            config: the model.
            dtype: "float32", "bfloat16" or "float16" of the tensors.
            int8: linear layers as int8 with one float32 scale per output channel (`name` and `name`_scale), as
                compressed-tensors stores W8A8; embedding, norms and biases stay in `dtype`.
        """
        self._dtype = dtype
        places = hf_names(config)
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name, place in places.items():
            groups[place.path].append(name)
        self._paths: dict[tuple[str, ...], tuple[bool, bool]] = {}
        self._offsets: dict[tuple[str, ...], tuple[int, ...]] = {}
        found: dict[str, list[Tensor]] = {}
        end = 0
        for path, names in groups.items():
            first = places[names[0]]
            quantized = int8 and path[-1] == "kernel"
            self._paths[path] = first.transposed, quantized
            parts = [("", "int8" if quantized else dtype, first.shape)]
            if quantized:
                parts.append(("_scale", "float32", (first.shape[0], 1)))
            starts = []
            for suffix, kind, shape in parts:
                end = -(-end // ALIGNMENT) * ALIGNMENT
                starts.append(end)
                for name in names:
                    found.setdefault(name, []).append(Tensor(name + suffix, kind, shape, end))
                    end += found[name][-1].num_bytes
            self._offsets[path] = tuple(starts)
        self.manifest: list[Tensor] = [tensor for name in places for tensor in found[name]]
        """In the order of `hf_names`: layer by layer, which is how engines like to load."""
        self.num_bytes: int = end
        """Of a segment."""

    def publish(self, params: Params, segment: Segment, policy_version: int) -> np.ndarray:
        """Writes the tensors; the next leaf is converted while one is copied.

        Args:
            params: of the model (see `local.weights.check_params`); any sharding this process can address.
            segment: of at least `num_bytes`.
            policy_version: of the checksums.

        Returns:
            [tensors] uint64 checksums of what was sent, in the manifest's order, taken before it is written.
        """
        leaves: list[tuple[tuple[str, ...], Any]] = []
        for path in self._paths:
            leaf: Any = params
            for key in path:
                leaf = leaf[key]
            leaves.append((path, leaf))
        checksums: dict[int, int] = {}
        waiting = self._convert(*leaves[0])
        for index, (path, _) in enumerate(leaves):
            converted = waiting
            if index + 1 < len(leaves):
                waiting = self._convert(*leaves[index + 1])
            for start, array in zip(self._offsets[path], converted, strict=True):
                data = np.asarray(array).reshape(-1).view(np.uint8)
                self._write(segment, start, data, policy_version, checksums, layers=array.shape[0])
        return np.array([checksums[tensor.offset] for tensor in self.manifest], np.uint64)

    def _convert(self, path: tuple[str, ...], leaf: jax.Array) -> tuple[jax.Array, ...]:
        transposed, quantized = self._paths[path]
        stacked = path[0] == "layers"
        return _converted(leaf, self._dtype, transposed=transposed, quantized=quantized, stacked=stacked)

    def _write(
        self, segment: Segment, start: int, data: np.ndarray, policy_version: int, sums: dict[int, int], *, layers: int
    ) -> None:
        size = data.size // layers
        for layer in range(layers):
            part = data[layer * size : (layer + 1) * size]
            sums[start + layer * size] = checksum(part, policy_version)
        segment.bytes[start : start + data.size] = data


@functools.partial(jax.jit, static_argnames=("dtype", "transposed", "quantized", "stacked"))
def _converted(
    leaf: jax.Array, dtype: str, *, transposed: bool, quantized: bool, stacked: bool
) -> tuple[jax.Array, ...]:
    """[layers, ...] tensors of one leaf as Hugging Face stores them; with scales when quantised."""
    leaf = leaf if stacked else leaf[None]
    if quantized:
        kernel = quantize_kernel(leaf, "int8")
        return jnp.swapaxes(kernel.values, -1, -2), kernel.scale[..., None]
    leaf = leaf.astype(dtype)
    return (jnp.swapaxes(leaf, -1, -2) if transposed else leaf,)
