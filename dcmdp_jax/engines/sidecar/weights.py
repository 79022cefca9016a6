"""The trainer's weights in shared memory, as Hugging Face names them, in the engine's dtypes.

One copy serves all replicas of an engine; a second one is being written.
"""

import collections
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.sidecar.segments import (
    ALIGNMENT,
    ITEM_SIZES,
    Segment,
    Tensor,
    available_bytes,
    checksum,
)
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.lora import Adapted, adapted, adapter_declarations
from dcmdp_jax.models.params import HFTensor, check_params, declared_tensors, model_declarations
from dcmdp_jax.models.quantize import QuantizedKernel, in_float32, is_quantized, quantize_kernel
from dcmdp_jax.types import Array, Params

# Fixed sequences on which the engine's log-probs are compared with the trainer's own after each
# weight sync.
_PROBE_ROWS = 2
_PROBE_TOKENS = 32
_THREADS = min(4, os.cpu_count() or 1)
# A converted block; larger ones are mapped again each time, and clearing their pages takes longer
# than writing them.
_BLOCK_BYTES = 1 << 24
# Rows transposed together: read in full, written as runs of that many items. One row at a time is
# six times slower.
_TRANSPOSED_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Publication:
    """Weights that lie in a segment.

    Attributes:
        serial: number of the publication.
        location: what a weight sync names the copy by: the number of its segment, or its object in
            a store.
        policy_version: the trainer's step; -1 for a base.
        bridge: wrote them.
        checksums: [tensors] uint64, checksums of what was sent.
        probe: the trainer's own log-probs of the probe sequences, or None without a probe.
        base: the base of the adapters, which an engine gets before them, once.
    """

    serial: int
    location: Any
    policy_version: int
    bridge: "WeightBridge"
    checksums: np.ndarray
    probe: Array | None = None
    base: "Publication | None" = None


class SharedWeights:
    """Two segments, written in turn, or one that is copied into a store; the newest weights.

    With `arguments.lora` these hold the adapters, and one more segment holds their base, which is
    written once.

    Attributes:
        config: the model.
        bridge: writes a model, or the base.
        adapters: writes adapters; None without.
        left_bytes: free memory when all copies are allocated.
        probe: the trainer's own log-probs of fixed sequences; None: no probe.
        probe_ids: those sequences, random tokens, the same for the same vocabulary.
        segments: both, or the one.
        published: the newest, or None before the first.
    """

    def __init__(
        self, arguments: EngineArguments, put: Callable[[np.ndarray], Any] | None = None
    ) -> None:
        """Allocate the segments for an engine of these arguments.

        Args:
            arguments: the engine's.
            put: stores a copy of the bytes and returns its handle. Replaces the second segment.

        Raises:
            MemoryError: if shared memory for the copies can't be allocated; it says how much is
                free.
        """
        self.config = arguments.model
        self._put = put
        self._serial = 0
        self.probe = None
        if arguments.probe:
            self.probe = arguments.probe()
        self.bridge, self.adapters = make_bridges(arguments)
        self._base = None
        needed, description = shared_bytes(self.bridge, self.adapters, stored=put is not None)
        available = available_bytes()
        if needed > available:
            raise MemoryError(
                f"{description} in shared memory need {needed / 2**30:.2f} GiB, "
                f"{available / 2**30:.2f} GiB are free; free some, or choose a smaller model or "
                "`compute_dtype`"
            )
        self.left_bytes = available - needed

        shape = (_PROBE_ROWS, min(_PROBE_TOKENS, arguments.max_total_tokens))
        self.probe_ids = np.random.default_rng(0).integers(
            0,
            self.config.vocab_size,
            shape,
            dtype=np.int32,
        )

        self.published: Publication | None = None
        self.segments: tuple[Segment, ...] = ()
        trained_bridge = self.adapters or self.bridge
        # Two segments, written in turn; with a store only one. The base of adapters is written
        # once, to the last.
        bridges = [trained_bridge]
        if put is None:
            bridges.append(trained_bridge)
        if self.adapters is not None:
            bridges.append(self.bridge)
        try:
            for number, bridge in enumerate(bridges):
                self.segments += (Segment(f"dcmdp-weights-{number}", bridge.num_bytes),)
        except BaseException:
            self.close()
            raise

    def publish(self, params: Params | Adapted, policy_version: int) -> Publication:
        """Write the parameters, of `Adapted` the adapters, into the segment that is not in use.

        Raises:
            ValueError: for parameters that do not fit the model.
        """
        bridge = self.bridge
        written = params
        if isinstance(params, Adapted):
            if self._base is None:
                self._base = self._write_base(params.base)
            bridge = self.adapters
            written = params.adapters
            params = adapted(*params)

        number = 0
        if self._put is None:
            number = self._serial % 2
        published = self._write(bridge, written, number, int(policy_version))
        probe = None
        if self.probe is not None:
            probe = self.probe(params, self.probe_ids)
        self.published = dataclasses.replace(published, probe=probe, base=self._base)
        return self.published

    def _write_base(self, base: Params) -> Publication:
        """Write the base of adapters, dequantized, to the last segment."""

        def plain(leaf: Any) -> Any:
            if is_quantized(leaf):
                return in_float32(leaf)
            return leaf

        params = jax.tree.map(plain, base, is_leaf=is_quantized)
        return self._write(self.bridge, params, len(self.segments) - 1, policy_version=-1)

    def _write(
        self,
        bridge: "WeightBridge",
        params: Params,
        number: int,
        policy_version: int,
    ) -> Publication:
        """Write to a segment, and copy that into the store."""
        if bridge is self.bridge:
            check_params(params, self.config)
        self._serial += 1
        segment = self.segments[number]
        checksums = bridge.publish(params, segment, policy_version)
        location = number
        if self._put is not None:
            location = self._put(segment.bytes)
        return Publication(
            serial=self._serial,
            location=location,
            policy_version=policy_version,
            bridge=bridge,
            checksums=checksums,
        )

    def close(self) -> None:
        """Free the shared memory. Safe to call twice."""
        self.published = None
        for segment in self.segments:
            segment.close()


def make_bridges(arguments: EngineArguments) -> "tuple[WeightBridge, WeightBridge | None]":
    """The bridge of an engine's model, or of its base; and of its adapters, None without."""
    config = arguments.model
    dtype = arguments.compute_dtype
    model = WeightBridge(config, dtype=dtype, int8=arguments.precision == "int8")
    adapters = None
    if arguments.lora is not None:
        adapters = WeightBridge(config, dtype=dtype, lora=arguments.lora)
    return model, adapters


def shared_bytes(
    model: "WeightBridge", adapters: "WeightBridge | None", *, stored: bool
) -> tuple[int, str]:
    """Bytes of shared memory for a model, or its base and adapters; and a description of them.

    Args:
        model, adapters: the bridges that write them.
        stored: whether a store holds copies too: of the newest weights and of those before them.
    """
    copies = 2
    counted = "two copies"
    if stored:
        copies = 3
        counted = "three copies"
    if adapters is None:
        return copies * model.num_bytes, f"{counted} of the weights"

    base_bytes = (copies - 1) * model.num_bytes
    return base_bytes + copies * adapters.num_bytes, f"the base and {counted} of the adapters"


# A parameter's array, and what is written of it: a tensor; or int8 and its scale.
_Job = tuple[HFTensor, list[Tensor]]


class WeightBridge:
    """Layout of a segment, and the writer of its tensors, several at a time.

    Only the blocks that are being written exist a second time. A parameter in host memory that has
    the engine's dtype already is written without a copy.

    Attributes:
        lora: shape of the adapters that it writes; None for a model.
        manifest: the tensors, layer by layer, which is how engines like to load.
        num_bytes: size of a segment.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: str,
        int8: bool = False,
        lora: Lora | None = None,
    ) -> None:
        """Lay out the segment; nothing is allocated.

        Args:
            config: the model.
            dtype: "float32", "bfloat16" or "float16" of the tensors.
            int8: linear layers as int8 with one float32 scale per output channel (`name` and
                `name`_scale), as compressed-tensors stores W8A8; embedding, norms and biases stay
                in `dtype`.
            lora: shape of adapters, which are written in place of the model.
        """
        self.lora = lora
        self._dtype = dtype
        self.manifest: list[Tensor] = []
        if lora is None:
            declarations = model_declarations(config)
        else:
            declarations = adapter_declarations(config, lora)

        end = 0
        jobs_of_leaf = collections.defaultdict(list)
        for name, hf_tensor in declared_tensors(declarations).items():
            shapes = [(name, dtype, hf_tensor.shape)]
            if int8 and hf_tensor.quantized:
                scale_shape = (hf_tensor.shape[0], 1)
                shapes = [
                    (name, "int8", hf_tensor.shape),
                    (f"{name}_scale", "float32", scale_shape),
                ]
            tensors = []
            for tensor_name, tensor_dtype, shape in shapes:
                offset = -(-end // ALIGNMENT) * ALIGNMENT
                tensor = Tensor(name=tensor_name, dtype=tensor_dtype, shape=shape, offset=offset)
                tensors.append(tensor)
                end = offset + tensor.num_bytes
            self.manifest += tensors
            jobs_of_leaf[hf_tensor.path].append((hf_tensor, tensors))
        self.num_bytes = end

        # A conversion costs a program start, so arrays of one stack are converted in groups:
        # (first array of the stack, jobs).
        self._groups: list[tuple[int, list[_Job]]] = []
        for jobs in jobs_of_leaf.values():
            _, tensors = jobs[0]
            size = max(1, _BLOCK_BYTES // tensors[0].num_bytes)
            if len(tensors) == 2:  # int8 and its scale
                size = 1
            for start in range(0, len(jobs), size):
                self._groups.append((start, jobs[start : start + size]))

    def publish(self, params: Params, segment: Segment, policy_version: int) -> np.ndarray:
        """Write the tensors.

        Args:
            params: parameters of the model (see `params.check_params`) in any sharding; all
                processes publish.
            segment: shared memory of at least `num_bytes`.
            policy_version: version that the checksums depend on.

        Returns:
            [tensors] uint64 checksums of what was written, in the manifest's order.
        """
        sums: dict[str, int] = {}

        def write_group(group: tuple[int, list[_Job]]) -> None:
            first_array, jobs = group
            hf_tensor, _ = jobs[0]
            leaf = hf_tensor.leaf(params)
            device_transposes = _transposed_on_device(leaf, hf_tensor)
            stack = None
            if len(jobs) > 1 and len(leaf.devices()) == 1:
                stack = _converted(
                    leaf,
                    first_array,
                    stacked=len(hf_tensor.index),
                    count=len(jobs),
                    dtype=self._dtype,
                    transpose=device_transposes,
                )

            for order, (hf_tensor, tensors) in enumerate(jobs):
                if len(tensors) == 2:  # int8 and its scale
                    kernel = _quantized(leaf, hf_tensor.index)
                    values = [(_WHOLE, np.asarray(kernel.values))]
                    scale = [(_WHOLE, np.asarray(kernel.scale)[:, None])]
                    _store(segment, tensors[0], values, transposed=hf_tensor.transposed)
                    _store(segment, tensors[1], scale, transposed=False)
                else:
                    if stack is None:
                        blocks = _blocks(leaf, hf_tensor.index, self._dtype, device_transposes)
                    else:
                        blocks = [(_WHOLE, stack[order])]
                    transposed = hf_tensor.transposed and not device_transposes
                    _store(segment, tensors[0], blocks, transposed=transposed)
                for tensor in tensors:
                    sums[tensor.name] = checksum(segment.bytes[tensor.byte_range], policy_version)

        # Parts on other processes' devices are fetched by all processes in one order.
        any_order = all(leaf.is_fully_addressable for leaf in jax.tree.leaves(params))
        if any_order and self.num_bytes > _BLOCK_BYTES:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(write_group, self._groups))  # list: raises what a thread raised
        else:
            for group in self._groups:
                write_group(group)

        return np.array([sums[tensor.name] for tensor in self.manifest], np.uint64)


# Where a block is in an array: a slice of each axis.
_Slices = tuple[slice, ...]
_WHOLE: _Slices = ()


def _transposed_on_device(leaf: Array, hf_tensor: HFTensor) -> bool:
    """Whether the device transposes. A host takes three times as long as for a plain copy."""
    return hf_tensor.transposed and next(iter(leaf.devices())).platform != "cpu"


def _converted(
    leaf: Array,
    first: int,
    *,
    stacked: int,
    count: int,
    dtype: str,
    transpose: bool,
) -> np.ndarray:
    """Convert arrays, or rows, of a leaf that is on one device to the engine's dtype; fetch them.

    Args:
        leaf: [..., rows, columns].
        stacked: number of its first axes that are of entries.
        first, count: which entries, counted over these axes as one.
        dtype: the engine's.
        transpose: whether to transpose each array, or the rows.
    """
    if leaf.dtype == jnp.dtype(dtype) and next(iter(leaf.devices())).platform == "cpu":
        # No copy: a view of XLA's own buffer.
        return np.asarray(leaf).reshape(-1, *leaf.shape[stacked:])[first : first + count]
    stack = _cast(leaf, first, stacked=stacked, count=count, dtype=dtype, transpose=transpose)
    return np.asarray(stack)


@functools.partial(jax.jit, static_argnames=("stacked", "count", "dtype", "transpose"))
def _cast(
    leaf: Array,
    first: Array,
    *,
    stacked: int,
    count: int,
    dtype: str,
    transpose: bool,
) -> Array:
    stack = leaf.reshape(-1, *leaf.shape[stacked:])
    entries = jax.lax.dynamic_slice_in_dim(stack, first, count).astype(dtype)
    if transpose:
        entries = entries.swapaxes(-1, -2)
    return entries


def _store(
    segment: Segment,
    tensor: Tensor,
    blocks: Iterable[tuple[_Slices, np.ndarray]],
    *,
    transposed: bool,
) -> None:
    """Write blocks of the parameter that is `tensor` or its transpose."""
    for slices, block in blocks:
        words = block.view(f"u{block.dtype.itemsize}")
        target = segment.bytes[tensor.byte_range].view(words.dtype).reshape(tensor.shape)
        if not transposed:
            target[slices] = words
            continue

        target = target.T[slices]
        for start in range(0, len(words), _TRANSPOSED_ROWS):
            target[start : start + _TRANSPOSED_ROWS] = words[start : start + _TRANSPOSED_ROWS]


def _blocks(
    leaf: Array,
    index: tuple[int, ...],
    dtype: str,
    transpose: bool,
) -> Iterator[tuple[_Slices, np.ndarray]]:
    """Convert a leaf at `index` of its stacked axes to the engine's dtype, and fetch it in blocks.

    With `transpose` each block is transposed.
    """
    for slices, shard, shard_index in _shards(leaf, index):
        stacked = len(shard_index)
        num_rows, *row_shape = shard.shape[stacked:]
        first_row = num_rows * np.ravel_multi_index(shard_index, shard.shape[:stacked])
        block_rows = max(1, _BLOCK_BYTES // (ITEM_SIZES[dtype] * math.prod(row_shape)))
        for first in range(0, num_rows, block_rows):
            count = min(block_rows, num_rows - first)
            start = slices[0].start + first
            block_slices = (slice(start, start + count), *slices[1:])
            if transpose:
                block_slices = block_slices[::-1]
            block = _converted(
                shard,
                first_row + first,
                stacked=stacked + 1,
                count=count,
                dtype=dtype,
                transpose=transpose,
            )
            yield block_slices, block


def _shards(
    leaf: Array, index: tuple[int, ...]
) -> Iterator[tuple[_Slices, Array, tuple[int, ...]]]:
    """The array at `index` of a leaf's stacked axes, as what single devices have of it.

    A program over all devices would be given the rows of a block by a gather of all layers' rows:
    the compiler takes the slice of rows before that of the layer. Programs of one device gather
    nothing, and threads may start them in any order.

    Yields:
        Which slice of the array it is, an array on one device, and the index of the slice in that
        array.
    """
    stacked = len(index)
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        # Other processes have the rest: each is given all of this array, and nothing of the others
        # in the stack.
        leaf = jax.device_put(_at(leaf, index), NamedSharding(leaf.sharding.mesh, P()))
        index = ()
        stacked = 0

    seen = set()
    for shard in leaf.addressable_shards:
        bounds = []
        for span, size in zip(shard.index, leaf.shape, strict=True):
            bounds.append(span.indices(size)[:2])

        has_array = True
        shard_index = []
        for i, (first, end) in zip(index, bounds[:stacked], strict=True):
            has_array = has_array and first <= i < end
            shard_index.append(i - first)
        if has_array and tuple(bounds) not in seen:
            seen.add(tuple(bounds))
            slices = tuple(slice(first, end) for first, end in bounds[stacked:])
            yield slices, shard.data, tuple(shard_index)


def _quantized(leaf: Array, index: tuple[int, ...]) -> QuantizedKernel:
    """Quantize the matrix at `index` of a leaf's stacked axes to 8 bits, with a scale a column."""
    shards = list(_shards(leaf, index))
    if len(shards) == 1:
        _, shard, shard_index = shards[0]
        return _quantize_at(shard, shard_index)

    # A scale is that of a column of the whole matrix.
    matrix = np.empty(leaf.shape[len(index) :], leaf.dtype)
    for slices, shard, shard_index in shards:
        matrix[slices] = np.asarray(_at(shard, shard_index))
    return _quantize_at(matrix, ())


@jax.jit
def _quantize_at(leaf: Array, index: tuple[Array, ...]) -> QuantizedKernel:
    return quantize_kernel(_at(leaf, index), "int8")


@jax.jit
def _at(leaf: Array, index: tuple[Array, ...]) -> Array:
    for number in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)
    return leaf
