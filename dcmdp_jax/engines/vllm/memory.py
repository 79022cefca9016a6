"""Memory of the sidecars: shared weights, and what vLLM's CPU build allocates."""

from __future__ import annotations

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.machine import Machine, MemoryPart, exact
from dcmdp_jax.engines.sidecar.weights import WeightBridge
from dcmdp_jax.engines.vllm.launch import engine_arguments


def memory_parts(arguments: EngineArguments, machine: Machine) -> list[MemoryPart]:
    """Two copies of the weights in shared memory, and the memory of vLLM's CPU build, whose cache has a fixed size."""
    dtype = arguments.compute_dtype
    weights = WeightBridge(arguments.model, dtype=dtype, int8=arguments.precision == "int8").num_bytes
    lower = "a smaller model" + ", or `compute_dtype`=bfloat16" * (dtype == "float32")
    found = [exact("two copies of the weights for vLLM", host=2 * weights, lower=lower)]
    if arguments.platform != "cpu" or arguments.settings.address:
        return found
    count, available = arguments.settings.replicas or 1, max(0, (machine.host_bytes or 0) - 2 * weights)
    cache = engine_arguments(arguments, available=available)["kv_cache_memory_bytes"]
    fewer = "`replicas`, " * (count > 1)
    return [
        *found,
        exact("vLLM's weights", host=count * weights, lower=fewer + lower),
        exact("vLLM's key-value cache", host=count * cache, lower=f"{fewer}`kv_cache_gib` or `max_rows`"),
    ]
