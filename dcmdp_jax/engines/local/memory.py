"""Memory of the embedded engine, by the scheduler's own arithmetic."""

import dataclasses
import functools
import math
from collections import Counter

import jax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.engine_kind import EngineArguments, Workload
from dcmdp_jax.engines.local import sizes
from dcmdp_jax.engines.local.cache import abstract
from dcmdp_jax.engines.local.layout import TENSOR, Program, weight_specs
from dcmdp_jax.engines.local.weights import engine_shapes
from dcmdp_jax.engines.machine import LOGITS_HELD, PREEMPTED, Machine, MemoryPart, certain, exact
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.quantize import QuantizedKernel


def parts(
    arguments: EngineArguments, load: Workload, machine: Machine, rows: int
) -> list[MemoryPart]:
    """The engine's parts when it decodes at most `rows` completions at a time.

    A CPU's devices share one copy of the weights.

    Args:
        arguments: engine arguments, with the mesh that it will have.
        load: the requests to the engine.
        machine: the memory available.
        rows: at most.
    """
    model = arguments.model
    limit = load.max_completion_tokens
    mesh = arguments.mesh(**dataclasses.asdict(arguments.settings)).abstract_mesh
    cpu = machine.platform == "cpu"
    sample = frozenset({"sample"})
    tensor = mesh.shape[TENSOR]
    devices = mesh.size
    split = "more devices along `tensor`, " if load.training and not cpu else ""
    lower = f"a smaller model, {split}or `engine`=vllm"
    exact_weights = arguments.precision in ("exact", "float32")
    weights_lower = f"`precision`=bfloat16, {lower}" if exact_weights else lower
    weights, dequantized, copied = _weights(
        model,
        arguments.precision,
        load.param_dtype,
        machine.product_item(arguments.compute_dtype),
        cpu,
        mesh,
    )
    # The trainer frees them before its step.
    held = frozenset({"push", "sample"})
    found = [
        exact("engine's weights", **machine.on_each(weights, 1), phases=held, lower=weights_lower),
        MemoryPart(
            "layers on their way to the engine",
            **machine.on_each(2 * copied, 1),
            phases=frozenset({"push"}),
            lower=weights_lower,
        ),
    ]
    if dequantized:
        # One copy in each device's program, for as long as it runs.
        copies = machine.on_each(dequantized, devices)
        found.append(
            MemoryPart(
                "engine's weights, cast or dequantized",
                **copies,
                phases=sample,
                lower=weights_lower,
            )
        )
    own = sizes.batch_rows(rows, load.group_size, load.completions, devices) // devices * tensor

    def cache_of(slots: int) -> int:
        shapes = abstract(
            model,
            own,
            slots,
            dtype=Program.of(arguments, mesh).cache_dtype,
            platform=machine.platform,
        )
        return sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(shapes)) // tensor

    first = sizes.cache_capacities(sizes.default_cache_block(machine.platform), limit)[0]
    longest = sizes.length_bucket(max(load.prompt_lengths))
    full = cache_of(longest + limit)
    least = cache_of(sizes.length_bucket(min(load.prompt_lengths)) + first)
    fewer = "`max_rows` or `max_completion_tokens`"
    cache = machine.on_each(full, devices)
    certainly = certain(**machine.on_each(least, devices))
    name = "key-value cache, rows at their longest"
    found.append(MemoryPart(name, **cache, phases=sample, lower=fewer, certain=certainly))
    if load.completions > rows and first < limit:
        preempted = machine.on_each(sizes.PREEMPTED_CACHES * full, devices)
        found.append(MemoryPart(PREEMPTED, **preempted, phases=sample, lower=fewer))
    if arguments.routed_experts:
        of_token = 2 * math.prod(model.routing[:2])
        found += [
            MemoryPart(
                "experts of decoded tokens",
                **machine.on_each(limit * own * of_token, devices),
                phases=sample,
                lower=f"{fewer}, or `routed_experts`=False",
                certain=certain(**machine.on_each(first * own * of_token, devices)),
            ),
            MemoryPart(
                "engine's record of them",
                host=load.completions * limit * of_token,
                phases=sample,
                lower="`max_completion_tokens`, or `routed_experts`=False",
            ),
        ]
    if count := arguments.top_logprobs:
        of_token = 8 * count
        decoded = machine.on_each(limit * own * of_token, devices)
        lists = {"phases": sample, "lower": f"{fewer}, or `top_logprobs`"}
        found.append(MemoryPart("likeliest tokens of decoded ones", **decoded, **lists))
        found.append(
            MemoryPart("engine's lists of them", host=load.completions * limit * of_token, **lists)
        )
    scores = min(sizes.ATTENTION_ELEMENTS, own * model.num_heads // tensor * longest**2)
    logits = own * model.vocab_size // tensor * 4 * LOGITS_HELD
    prompts, groups = sizes.prefill_shape(
        model.num_heads, max(1, rows // load.group_size), longest, devices
    )
    # Recurrent layers of prompts: 4,800 floats for each head and token, by the compiler for an
    # H100.
    chunks = prompts // groups // devices * longest * model.linear_num_value_heads * 4 * 4800
    working = machine.on_each(logits + 4 * scores + chunks, devices)
    found.append(
        MemoryPart("sampler's logits and attention", **working, phases=sample, lower="`max_rows`")
    )
    return found


@functools.lru_cache(maxsize=8)
def _weights(
    model: ModelConfig, precision: str, param_dtype: str, item: int, cpu: bool, mesh: AbstractMesh
) -> tuple[int, int, int]:
    """Bytes of the engine's weights; of what a program first makes of them; of the largest piece of
    a push.

    On each device, but for the first and the last on a CPU, where all devices share them.
    """
    tree = engine_shapes(model, precision, param_dtype)
    specs = weight_specs(tree, model, mesh)
    # Of each layer, and outside of layers.
    held: Counter[str] = Counter()
    cast = largest = 0
    kernels = jax.tree.leaves_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel)
    )
    of = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel | P))
    for (path, leaf), spec in zip(kernels, of, strict=True):
        quantized = isinstance(leaf, QuantizedKernel)
        arrays, of_arrays = (tuple(leaf), tuple(spec)) if quantized else ((leaf,), (spec,))
        own = [
            math.prod(NamedSharding(mesh, part).shard_shape(array.shape))
            for array, part in zip(arrays, of_arrays, strict=True)
        ]
        stored = [array.size for array in arrays] if cpu else own
        size = sum(
            count * array.dtype.itemsize for count, array in zip(stored, arrays, strict=True)
        )
        held[str(path[1]) if path[0].key == "layers" else ""] += size
        largest = max(largest, own[0] * item)
        if arrays[0].dtype.itemsize != item and (cpu or not quantized):
            cast += own[0] * item
    quantized = any(isinstance(leaf, QuantizedKernel) for _, leaf in kernels)
    # A matrix that a product converts while it reads it is at most one.
    cast = cast or (largest if quantized else 0)
    return held.total(), cast, max(held.values())
