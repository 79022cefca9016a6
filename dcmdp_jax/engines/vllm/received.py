"""A weight segment on the engine's side: named torch tensors that lie in shared memory.

Runs under the sidecar's interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import torch

from dcmdp_jax.engines.sidecar import manifest
from dcmdp_jax.engines.sidecar.shared_memory import attach


@functools.cache
def attached(path: str, size: int) -> np.ndarray:
    """One mapping for all pushes: mapping each page again costs as much as reading it."""
    return attach(path, size)


def handed_over(
    memory: np.ndarray, tensors: list[manifest.Tensor], policy_version: int, sums: dict[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each tensor of a segment, as a view of it. Its checksum is added to `sums` as it is taken."""
    for tensor in tensors:
        data = memory[tensor.offset : tensor.offset + tensor.num_bytes]
        sums[tensor.name] = manifest.checksum(data, policy_version)
        yield tensor.name, torch.from_numpy(data).view(getattr(torch, tensor.dtype)).view(tensor.shape)
