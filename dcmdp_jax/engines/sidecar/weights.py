"""The trainer's weights in shared memory, under Hugging Face's names and in the engine's dtypes;
the probe of a push.

One copy serves all replicas of an engine; a second one is being written.
"""

import collections
import dataclasses
import functools
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
from dcmdp_jax.engines.sidecar.segments import ALIGNMENT, Segment, Tensor, available_bytes, checksum
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.lora import Adapted, adapted, adapter_declarations
from dcmdp_jax.models.params import HFTensor, check_params, declared_tensors, model_declarations
from dcmdp_jax.models.quantize import QuantizedKernel, in_float32, is_quantized, quantize_kernel
from dcmdp_jax.types import Array, Params

# Fixed sequences on which the engine's log-probs are compared with the trainer's own after each
# push.
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
        place: what a push names the copy by: the number of its segment, or its object in a store.
        policy_version: the trainer's step; -1 for a base.
        bridge: wrote them.
        checksums: [tensors] uint64, checksums of what was sent.
        probe: the trainer's own log-probs of the probe sequences, or None without a probe.
        lora: shape of the adapters that these are; None for a model.
        base: the base of the adapters, which an engine gets before them, once.
    """

    serial: int
    place: Any
    policy_version: int
    bridge: "WeightBridge"
    checksums: np.ndarray
    probe: Array | None = None
    lora: Lora | None = None
    base: "Publication | None" = None


class SharedWeights:
    """Two segments, written in turn, or one that is copied into a store, and what was published
    last.

    With `arguments.lora` these are of the adapters, and one more has their base, which is written
    once.

    Attributes:
        config: the model.
        bridge: writes a model, or the base.
        adapters: writes adapters; None without.
        num_bytes: size of a model's segment.
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
            put: copies the bytes into a store, which takes the place of the second segment, and
                returns their object.

        Raises:
            MemoryError: if shared memory for the copies can't be allocated; it says how much is
                free.
        """
        self.config: ModelConfig = arguments.model
        self._put = put
        self._serial = 0
        self.probe = arguments.probe and arguments.probe()
        int8 = arguments.precision == "int8"
        self.bridge = WeightBridge(self.config, dtype=arguments.compute_dtype, int8=int8)
        self.num_bytes: int = self.bridge.num_bytes
        self._base = None
        lora = arguments.lora
        self.adapters = lora and WeightBridge(self.config, dtype=arguments.compute_dtype, lora=lora)
        needed, said = shared_bytes(self.bridge, self.adapters, stored=put is not None)
        if needed > (available := available_bytes()):
            raise MemoryError(
                f"{said} in shared memory need {needed / 2**30:.2f} GiB, {available / 2**30:.2f} "
                "GiB are free; free some, or choose a smaller model or `compute_dtype`"
            )
        self.left_bytes: int = available - needed
        shape = (_PROBE_ROWS, min(_PROBE_TOKENS, arguments.max_total_tokens))
        self.probe_ids = np.random.default_rng(0).integers(
            0, self.config.vocab_size, shape, dtype=np.int32
        )
        self.published: Publication | None = None
        self.segments: tuple[Segment, ...] = ()
        try:
            bridges = [self.adapters or self.bridge] * (1 if put else 2) + [self.bridge] * (
                lora is not None
            )
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
        of_adapters = {}
        if isinstance(params, Adapted):
            self._base = self._base or self._write_base(params.base)
            bridge = self.adapters
            written = params.adapters
            of_adapters = {"lora": params.lora, "base": self._base}
            params = adapted(*params)
        published = self._write(
            bridge, written, self._serial % (1 if self._put else 2), int(policy_version)
        )
        probe = None if self.probe is None else self.probe(params, self.probe_ids)
        self.published = dataclasses.replace(published, probe=probe, **of_adapters)
        return self.published

    def _write_base(self, base: Params) -> Publication:
        plain = jax.tree.map(
            lambda leaf: in_float32(leaf) if is_quantized(leaf) else leaf,
            base,
            is_leaf=is_quantized,
        )
        return self._write(self.bridge, plain, len(self.segments) - 1, -1)

    def _write(
        self, bridge: "WeightBridge", params: Params, number: int, policy_version: int
    ) -> Publication:
        """Write to a segment, and copy that into the store."""
        if bridge is self.bridge:
            check_params(params, self.config)
        self._serial += 1
        checksums = bridge.publish(params, segment := self.segments[number], policy_version)
        place = self._put(segment.bytes) if self._put else number
        return Publication(self._serial, place, policy_version, bridge, checksums)

    def close(self) -> None:
        """Free the shared memory. Safe to call twice."""
        self.published = None
        for segment in self.segments:
            segment.close()


def shared_bytes(
    model: "WeightBridge", adapters: "WeightBridge | None", *, stored: bool
) -> tuple[int, str]:
    """Shared memory for a model or its base and adapters, and what that is, for people.

    Args:
        model, adapters: write them.
        stored: a store holds them too: the newest bytes and those before them.
    """
    copies, said = (3, "three copies") if stored else (2, "two copies")
    if adapters is None:
        return copies * model.num_bytes, f"{said} of the weights"
    return (
        copies - 1
    ) * model.num_bytes + copies * adapters.num_bytes, f"the base and {said} of the adapters"


class WeightBridge:
    """Knows where each tensor goes and writes them there, several at a time.

    Nothing but the blocks that are being written exists a second time. A parameter in host memory
    that has the engine's dtype already is written from where it lies.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: str, int8: bool = False, lora: Lora | None = None
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
        self._dtype = dtype
        self._jobs: list[tuple[HFTensor, list[Tensor]]] = []
        end = 0
        declared = (
            model_declarations(config) if lora is None else adapter_declarations(config, lora)
        )
        for name, place in declared_tensors(declared).items():
            quantized = int8 and place.quantized
            parts = [(name, "int8" if quantized else dtype, place.shape)]
            if quantized:
                parts.append((f"{name}_scale", "float32", (place.shape[0], 1)))
            tensors = []
            for part in parts:
                tensors.append(Tensor(*part, -(-end // ALIGNMENT) * ALIGNMENT))
                end = tensors[-1].offset + tensors[-1].num_bytes
            self._jobs.append((place, tensors))
        # Arrays of one stack that are converted together, as each alone costs a program's start:
        # where they begin.
        self._groups: list[tuple[int, list[int]]] = []
        of_leaf: dict[tuple[str, ...], list[int]] = collections.defaultdict(list)
        for number, (place, _) in enumerate(self._jobs):
            of_leaf[place.path].append(number)
        for numbers in of_leaf.values():
            first, *scale = self._jobs[numbers[0]][1]
            size = 1 if scale else max(1, _BLOCK_BYTES // first.num_bytes)
            self._groups += [(at, numbers[at : at + size]) for at in range(0, len(numbers), size)]
        # In the order of `declared_tensors`: layer by layer, which is how engines like to load.
        self.manifest: list[Tensor] = [tensor for _, tensors in self._jobs for tensor in tensors]
        # Size of a segment.
        self.num_bytes: int = end

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

        sums: dict[int, list[int]] = {}

        def job(first: int, numbers: list[int]) -> None:
            place, _ = self._jobs[numbers[0]]
            leaf = place.leaf(params)
            several = len(numbers) > 1 and len(leaf.devices()) == 1
            turned = _turned_there(leaf, place)
            together = (
                _converted(leaf, place.index, first, len(numbers), self._dtype, turned)
                if several
                else None
            )
            for order, number in enumerate(numbers):
                place, tensors = self._jobs[number]
                if len(tensors) == 2:
                    kernel = _quantized(leaf, place.index)
                    _store(
                        segment,
                        tensors[0],
                        [((), np.asarray(kernel.values))],
                        transposed=place.transposed,
                    )
                    _store(
                        segment,
                        tensors[1],
                        [((), np.asarray(kernel.scale)[:, None])],
                        transposed=False,
                    )
                else:
                    blocks = (
                        [((), together[order])]
                        if several
                        else _blocks(leaf, place.index, self._dtype, turned)
                    )
                    _store(segment, tensors[0], blocks, transposed=place.transposed and not turned)
                parts = (
                    segment.bytes[each.offset : each.offset + each.num_bytes] for each in tensors
                )
                sums[number] = [checksum(part, policy_version) for part in parts]

        # Parts on other processes' devices are fetched by all processes in one order.
        alone = all(
            leaf.is_fully_addressable
            for leaf in jax.tree.leaves(params)
            if isinstance(leaf, jax.Array)
        )
        with ThreadPoolExecutor(_THREADS) as pool:
            list(
                (pool.map if alone and self.num_bytes > _BLOCK_BYTES else map)(
                    job, *zip(*self._groups, strict=True)
                )
            )
        return np.array([value for number in sorted(sums) for value in sums[number]], np.uint64)


# Where a part lies in an array, with the first index and the one after the last on each axis; ():
# it is all.
_Place = tuple[slice, ...]


def _turned_there(leaf: jax.Array, place: HFTensor) -> bool:
    """Whether the device transposes. A host takes three times as long as for a plain copy."""
    return place.transposed and next(iter(leaf.devices())).platform != "cpu"


def _converted(
    leaf: jax.Array, index: tuple[int, ...], first: int, count: int, dtype: str, turned: bool
) -> np.ndarray:
    """`count` arrays of a leaf of one device, from the `first` of its stack, in the engine's dtype
    on the host.

    With `turned` each is transposed.
    """
    if leaf.dtype == jnp.dtype(dtype) and next(iter(leaf.devices())).platform == "cpu":
        return np.asarray(leaf).reshape(-1, *leaf.shape[len(index) :])[first : first + count]
    return np.asarray(
        _cast_stack(leaf, first, stacked=len(index), count=count, dtype=dtype, turned=turned)
    )


@functools.partial(jax.jit, static_argnames=("stacked", "count", "dtype", "turned"))
def _cast_stack(
    leaf: jax.Array, first: jax.Array, *, stacked: int, count: int, dtype: str, turned: bool
) -> jax.Array:
    arrays = jax.lax.dynamic_slice_in_dim(
        leaf.reshape(-1, *leaf.shape[stacked:]), first, count
    ).astype(dtype)
    return arrays.swapaxes(-1, -2) if turned else arrays


def _store(
    segment: Segment,
    tensor: Tensor,
    blocks: Iterable[tuple[_Place, np.ndarray]],
    *,
    transposed: bool,
) -> None:
    """Write parts of the parameter that is `tensor` or its transpose."""
    for place, block in blocks:
        words = block.view(f"u{block.dtype.itemsize}")
        target = (
            segment.bytes[tensor.offset : tensor.offset + tensor.num_bytes]
            .view(words.dtype)
            .reshape(tensor.shape)
        )
        if not transposed:
            target[place] = words
            continue
        target = target.T[place]
        for start in range(0, len(words), _TRANSPOSED_ROWS):
            target[start : start + _TRANSPOSED_ROWS] = words[start : start + _TRANSPOSED_ROWS]


def _blocks(
    leaf: jax.Array, index: tuple[int, ...], dtype: str, turned: bool
) -> Iterator[tuple[_Place, np.ndarray]]:
    """Parts of a leaf at `index` of its stacked axes, transposed with `turned`, in the engine's
    dtype, on the host.
    """
    for place, part, own in _parts(leaf, index):
        if part.dtype == jnp.dtype(dtype) and next(iter(part.devices())).platform == "cpu":
            # No copy: a view of XLA's own buffer.
            yield place, np.asarray(part)[own]
            continue
        rows, *rest = part.shape[len(own) :]
        height = max(1, _BLOCK_BYTES // (jnp.dtype(dtype).itemsize * max(1, int(np.prod(rest)))))
        for first in range(0, rows, height):
            count = min(height, rows - first)
            here = (slice(place[0].start + first, place[0].start + first + count), *place[1:])
            block = np.asarray(_cast(part, own, first, rows=count, dtype=dtype, turned=turned))
            yield here[::-1] if turned else here, block


def _parts(
    leaf: jax.Array, index: tuple[int, ...]
) -> Iterator[tuple[_Place, jax.Array, tuple[int, ...]]]:
    """The array at `index` of a leaf's stacked axes, as what single devices have of it.

    A program over all devices would be given the rows of a block by a gather of all layers' rows:
    the compiler takes the slice of rows before that of the layer. Programs of one device gather
    nothing, and threads may start them in any order.

    Yields:
        The place of a part in the array, an array on one device, and the index of the part in that
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
        bounds = [
            span.indices(size)[:2] for span, size in zip(shard.index, leaf.shape, strict=True)
        ]
        held = all(
            first <= i < end for i, (first, end) in zip(index, bounds[:stacked], strict=True)
        )
        if held and tuple(bounds) not in seen:
            seen.add(tuple(bounds))
            own = tuple(i - first for i, (first, _) in zip(index, bounds[:stacked], strict=True))
            yield tuple(slice(*span) for span in bounds[stacked:]), shard.data, own


@functools.partial(jax.jit, static_argnames=("rows", "dtype", "turned"))
def _cast(
    leaf: jax.Array,
    index: tuple[jax.Array, ...],
    first: jax.Array,
    *,
    rows: int,
    dtype: str,
    turned: bool,
) -> jax.Array:
    block = jax.lax.dynamic_slice_in_dim(_at(leaf, index), first, rows).astype(dtype)
    return block.T if turned else block


def _quantized(leaf: jax.Array, index: tuple[int, ...]) -> QuantizedKernel:
    """The matrix at `index` of a leaf's stacked axes, in 8 bits. A scale is that of a whole
    column.
    """
    parts = list(_parts(leaf, index))
    if len(parts) == 1:
        return _quantize_at(*parts[0][1:])
    whole = np.empty(leaf.shape[len(index) :], leaf.dtype)
    for place, part, own in parts:
        whole[place] = np.asarray(_at(part, own))
    return _quantize_at(whole, ())


@jax.jit
def _quantize_at(leaf: jax.Array, index: tuple[jax.Array, ...]) -> QuantizedKernel:
    return quantize_kernel(_at(leaf, index), "int8")


@jax.jit
def _at(leaf: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
    for number in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False)
    return leaf
