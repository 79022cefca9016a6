"""Weight segments, on both sides: shared memory, layout of the tensors, checksums."""

import dataclasses
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_CGROUP = Path("/sys/fs/cgroup")

ALIGNMENT = 64
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_BLOCK = 1 << 16
_STRIDE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor in a weight segment, under its Hugging Face name.

    Attributes:
        name: "model.layers.0.self_attn.q_proj.weight".
        dtype: one of `ITEM_SIZES`.
        shape: Hugging Face's, [out, in] for a linear layer.
        offset: first byte in the segment, a multiple of its item size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    @property
    def byte_range(self) -> slice:
        """The tensor's bytes in the segment."""
        return slice(self.offset, self.offset + self.num_bytes)


def wire_manifest(tensors: Sequence[Tensor]) -> list[list[object]]:
    """The manifest as it goes over the wire; `parse` reads it."""
    return [[tensor.name, tensor.dtype, list(tensor.shape), tensor.offset] for tensor in tensors]


def parse(manifest: Sequence[Sequence[object]], size: int) -> list[Tensor]:
    """Read and check a manifest that came over the wire.

    Args:
        manifest: [name, dtype, shape, offset] of each tensor.
        size: bytes of a segment.

    Raises:
        ValueError: for a name twice, tensors that overlap or leave the segment.
    """
    tensors = [
        Tensor(name=name, dtype=dtype, shape=tuple(shape), offset=offset)
        for name, dtype, shape, offset in manifest
    ]

    end = 0
    before = "the segment's start"
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end or tensor.offset % ITEM_SIZES[tensor.dtype]:
            raise ValueError(
                f"manifest: {tensor.name} at byte {tensor.offset} overlaps {before} or is not "
                "aligned"
            )
        end = tensor.offset + tensor.num_bytes
        before = tensor.name
    if end > size:
        raise ValueError(f"manifest: {before} ends at byte {end}, the segment has {size}")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ValueError("manifest: a name is listed twice")
    return tensors


def checksum(data: np.ndarray, policy_version: int) -> int:
    """CRC-32 of a tensor's bytes; of a sixteenth of a large one.

    Blocks of 64 KiB are counted off; of a tensor over 64 KiB the first, the last and every 16th
    block go in, beginning with block `policy_version` mod 16. So whatever is misplaced, transposed,
    stale or cut shows at once, and every byte is looked at once in 16 weight syncs; reading all of
    it would cost more than the copy.

    Args:
        data: [bytes] uint8.
        policy_version: selects the blocks that are looked at; -1: all, of what is synced once.
    """
    if data.size <= _BLOCK or policy_version < 0:
        return zlib.crc32(data)
    crc = zlib.crc32(data[:_BLOCK])
    for start in range(policy_version % _STRIDE * _BLOCK, data.size, _STRIDE * _BLOCK):
        crc = zlib.crc32(data[start : start + _BLOCK], crc)
    return zlib.crc32(data[-_BLOCK:], crc)


def differing(tensors: Sequence[Tensor], sent: np.ndarray, consumed: np.ndarray) -> list[str]:
    """Names of the tensors whose checksums differ."""
    return [tensor.name for tensor, a, b in zip(tensors, sent, consumed, strict=True) if a != b]


class Segment:
    """Anonymous shared memory of a fixed size, mapped writable, gone with its last holder.

    The descriptor is inherited by children that are started with it.
    """

    def __init__(self, name: str, size: int) -> None:
        """Allocate every page now, so that no write fails later.

        Raises:
            MemoryError: in one line, if there is no room.
        """
        available = available_bytes()
        if size > available:
            # Asked for more than there is, Linux (6.18) hands out page after page until it kills a
            # process.
            raise MemoryError(
                f"shared memory {name}: {size / 2**30:.2f} GiB cannot be allocated "
                f"({available / 2**30:.2f} GiB free)"
            )
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.descriptor, 0, size)
            self.bytes: np.ndarray | None = attach(f"/proc/self/fd/{self.descriptor}", size)
        except OSError as error:
            os.close(self.descriptor)
            raise MemoryError(
                f"shared memory {name}: {size / 2**30:.2f} GiB cannot be allocated ({error})"
            ) from error

    def close(self) -> None:
        """Free the memory once no array points into it. Safe to call twice."""
        if self.bytes is not None:
            self.bytes = None
            os.close(self.descriptor)


def attach(path: str, size: int) -> np.ndarray:
    """[size] uint8 view of the memory behind a /proc path of a descriptor."""
    return np.memmap(path, np.uint8, mode="r+", shape=(size,)).view(np.ndarray)


def available_bytes() -> int:
    """Memory that can still be allocated, of the machine or, where less, the control group."""
    fields = dict(
        line.split(":", 1)
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    )
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        # Pages of files that were read count as used and are given up when memory is wanted.
        stat = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        used -= sum(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
        if limit != "max":
            free = max(0, min(free, int(limit) - used))
        return free
    except (OSError, ValueError):
        return free
