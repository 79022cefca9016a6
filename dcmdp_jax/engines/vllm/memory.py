"""Memory of vLLM that can be computed here: the weights on their way to it, and all that its CPU build takes."""

from __future__ import annotations

from dcmdp_jax.engines.kind import EngineArguments, Workload
from dcmdp_jax.engines.sidecar.bridge import WeightBridge
from dcmdp_jax.engines.vllm import launch
from dcmdp_jax.machine import Machine, Part, exact


def parts(arguments: EngineArguments, load: Workload, machine: Machine, rows: int) -> list[Part]:
    """Two copies of the weights in shared memory, and the memory of vLLM's CPU build.

    Args:
        arguments: of the engine; `platform` is "cpu" with the CPU build.
        load, rows: not used: the cache is of a fixed size.
        machine: the memory available.
    """
    dtype = arguments.compute_dtype
    weights = WeightBridge(arguments.model, dtype=dtype, int8=arguments.precision == "int8").num_bytes
    lower = "a smaller model" + ", or `compute_dtype`=bfloat16" * (dtype == "float32")
    found = [exact("two copies of the weights for vLLM", host=2 * weights, lower=lower)]
    if arguments.platform != "cpu":
        return found
    count, available = arguments.settings.replicas or 1, max(0, (machine.host_bytes or 0) - 2 * weights)
    cache = launch.planned_arguments(arguments, "cpu", available=available)["kv_cache_memory_bytes"]
    fewer = "`replicas`, " * (count > 1)
    return [
        *found,
        exact("vLLM's weights", host=count * weights, lower=fewer + lower),
        exact("vLLM's key-value cache", host=count * cache, lower=f"{fewer}`kv_cache_gib` or `max_rows`"),
    ]
