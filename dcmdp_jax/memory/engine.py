"""Memory of the embedded engine, and how many rows of it fit: parts of a `plan.MemoryPlan`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.local.layout import TENSOR, weight_specs
from dcmdp_jax.engines.local.schedule import ATTENTION_ELEMENTS, round_up
from dcmdp_jax.engines.local.weights import engine_shapes
from dcmdp_jax.memory.plan import Machine, MemoryPlan, Part, certain, exact
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.quantize import QuantizedKernel

LOGITS_HELD = 3
"""Arrays of the size of logits: themselves, their exponentials, and their gradient or a masked copy."""
PREEMPTED_CACHES = "preempted caches, at most"
"""Name of the part with the caches of preempted rows."""
_PREEMPTED = 2
"""Max caches of preempted rows, in caches of a full batch (see `schedule.Scheduler`)."""


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """The embedded engine on a mesh. A CPU's devices share one copy of the weights.

    Attributes:
        model: the model's shape.
        machine: the memory available.
        mesh: the engine's, from `sampling_mesh`.
        precision, compute_dtype, kv_cache_dtype: the engine's settings.
        param_dtype: dtype of the trainer's parameters.
        completions: maximum number sampled in one call.
        prompt_lengths: tokens of each prompt.
        max_completion_tokens: limit of each completion.
        router_replay: whether it returns the experts of each token.
        options: prefix of its settings' names.
    """

    model: ModelConfig
    machine: Machine
    mesh: AbstractMesh
    precision: str
    compute_dtype: str
    kv_cache_dtype: str
    param_dtype: str
    completions: int
    prompt_lengths: Sequence[int]
    max_completion_tokens: int
    router_replay: bool
    options: str

    def fitting_rows(self, max_rows: int, others: Sequence[Part]) -> int:
        """The most completions, up to `max_rows`, whose caches fit at their longest beside the other parts of a run.

        `max_rows` itself on a CPU, whose free memory is another one in each run, and where the memory is unknown. At
        least one row for each device.
        """
        known = self.machine.platform != "cpu" and self.machine.device_bytes is not None
        if not known or self._fits(max_rows, others):
            return max_rows
        # Bisection over multiples of the devices: `least` fits, or is 0; `most` does not fit.
        least, most = 0, -(-min(max_rows, self.completions) // self.mesh.size)
        while most - least > 1:
            middle = (most + least) // 2
            least, most = (middle, most) if self._fits(middle * self.mesh.size, others) else (least, middle)
        return max(least, 1) * self.mesh.size

    def _fits(self, rows: int, others: Sequence[Part]) -> bool:
        plan = MemoryPlan((*others, *self.parts(rows)), self.machine)
        return plan.total("sample", "first") <= self.machine.device_bytes

    def parts(self, rows: int) -> list[Part]:
        """The engine's parts when it decodes at most `rows` completions at a time."""
        model, machine, options = self.model, self.machine, self.options
        cpu, sample, tensor = machine.platform == "cpu", frozenset({"sample"}), self.mesh.shape[TENSOR]
        devices, waiting, rows = self.mesh.size, self.completions > rows, min(rows, self.completions)
        split = f"more devices along {options}local.tensor, " if options == "rollout." and not cpu else ""
        lower = f"a smaller model, {split}or {options}engine=vllm"
        weights_lower = f"{options}precision=bfloat16, {lower}" if self.precision in ("exact", "float32") else lower
        weights, dequantized, copied = self._weights
        held = frozenset({"push", "sample"})  # the trainer frees them before its step
        parts = [exact("engine's weights", **machine.on_each(weights, 1), phases=held, lower=weights_lower)]
        push = frozenset({"push"})
        parts.append(Part("layers on their way to the engine", **machine.on_each(2 * copied, 1), phases=push,
                          lower=weights_lower))  # fmt: skip
        if dequantized:
            # One copy in each device's program, for as long as it runs.
            copies = machine.on_each(dequantized, devices)
            parts.append(Part("engine's weights, cast or dequantized", **copies, phases=sample, lower=weights_lower))
        own = round_up(rows, devices) // devices * tensor
        stored = 1 if self.kv_cache_dtype == "fp8" else jnp.dtype(self.compute_dtype).itemsize
        slot = 2 * model.num_layers * model.num_kv_heads * model.head_dim * stored // tensor
        block = 32 if cpu else 128
        limit = self.max_completion_tokens
        begin = limit if limit <= 2 * block else block
        full = own * (_bucket(max(self.prompt_lengths)) + limit) * slot
        least = own * (_bucket(min(self.prompt_lengths)) + begin) * slot
        fewer = f"{options}max_rows or {options}max_completion_tokens"
        parts.append(
            Part("key-value cache, rows at their longest", **machine.on_each(full, devices), phases=sample, lower=fewer,
                 certain=certain(**machine.on_each(least, devices)))
        )  # fmt: skip
        if waiting and begin < limit:
            held = machine.on_each(_PREEMPTED * full, devices)
            parts.append(Part(PREEMPTED_CACHES, **held, phases=sample, lower=fewer))
        if self.router_replay:
            of_token = own * 2 * math.prod(model.routing[:2])
            parts.append(
                Part("experts of decoded tokens", **machine.on_each(limit * of_token, devices), phases=sample,
                     lower=f"{fewer}, or {options}router_replay=False",
                     certain=certain(**machine.on_each(begin * of_token, devices)))
            )  # fmt: skip
        scores = min(ATTENTION_ELEMENTS, own * model.num_heads // tensor * _bucket(max(self.prompt_lengths)) ** 2)
        logits = own * model.vocab_size // tensor * 4 * LOGITS_HELD
        working = machine.on_each(logits + 4 * scores, devices)
        parts.append(Part("sampler's logits and attention", **working, phases=sample, lower=f"{options}max_rows"))
        return parts

    @functools.cached_property
    def _weights(self) -> tuple[int, int, int]:
        """Bytes of the engine's weights; of what a program first makes of them; of the largest piece of a push.

        On each device, but for the first and the last on a CPU, where all devices share them.
        """
        tree = engine_shapes(self.model, self.precision, self.param_dtype)
        specs = weight_specs(tree, self.model, self.mesh)
        cpu = self.machine.platform == "cpu"
        item = product_item(self.compute_dtype, self.machine)
        held = {"layers": 0, "outside": 0}
        cast = largest = 0
        kernels = jax.tree.leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel))
        of = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel | P))
        for (path, leaf), spec in zip(kernels, of, strict=True):
            where, quantized = path[0].key, isinstance(leaf, QuantizedKernel)
            layers = self.model.num_layers if where == "layers" else 1
            arrays, parts = (tuple(leaf), tuple(spec)) if quantized else ((leaf,), (spec,))
            own = [self._own_size(array, part) for array, part in zip(arrays, parts, strict=True)]
            sizes = [array.size for array in arrays] if cpu else own
            size = sum(count * array.dtype.itemsize for count, array in zip(sizes, arrays, strict=True))
            held["layers" if where == "layers" else "outside"] += size
            largest = max(largest, own[0] * item)
            if arrays[0].dtype.itemsize != item and (cpu or not quantized):
                cast += layers * own[0] * item
        quantized = any(isinstance(leaf, QuantizedKernel) for _, leaf in kernels)
        # A matrix that a product converts while it reads it is at most one.
        cast = cast or (largest if quantized else 0)
        return held["layers"] * self.model.num_layers + held["outside"], cast, max(held.values())

    def _own_size(self, array: jax.ShapeDtypeStruct, spec: P) -> int:
        """Numbers of an array on one device."""
        return math.prod(NamedSharding(self.mesh, spec).shard_shape(array.shape))


def product_item(dtype: str, machine: Machine) -> int:
    """Bytes of a number in a product: XLA's CPU backend multiplies bfloat16 in float32, and copies matrices for it."""
    return 4 if machine.platform == "cpu" else jnp.dtype(dtype).itemsize


def _bucket(tokens: int) -> int:
    """The length that the embedded engine pads a prompt to."""
    return max(16, 1 << (tokens - 1).bit_length())
