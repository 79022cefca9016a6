"""Memory of the sidecars: shared weights, and what vLLM's CPU build allocates."""

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.machine import Machine, MemoryPart, exact
from dcmdp_jax.engines.sidecar.weights import WeightBridge
from dcmdp_jax.engines.vllm.launch import engine_arguments


def memory_parts(arguments: EngineArguments, machine: Machine) -> list[MemoryPart]:
    """Two copies of the weights in shared memory, three with Ray; what vLLM takes on a CPU, its cache of fixed size."""
    dtype = arguments.compute_dtype
    weights = WeightBridge(arguments.model, dtype=dtype, int8=arguments.precision == "int8").num_bytes
    lower = "a smaller model" + ", or `compute_dtype`=bfloat16" * (dtype == "float32")
    copies, said = (3, "three") if arguments.settings.placement == "ray" else (2, "two")
    found = [exact(f"{said} copies of the weights for vLLM", host=copies * weights, lower=lower)]
    if arguments.platform != "cpu" or arguments.settings.address:
        return found
    count, available = arguments.settings.replicas or 1, max(0, (machine.host_bytes or 0) - copies * weights)
    cache = engine_arguments(arguments, available=available)["kv_cache_memory_bytes"]
    fewer = "`replicas`, " * (count > 1)
    return [
        *found,
        exact("vLLM's weights", host=count * weights, lower=fewer + lower),
        exact("vLLM's key-value cache", host=count * cache, lower=f"{fewer}`kv_cache_gib` or `max_rows`"),
    ]
