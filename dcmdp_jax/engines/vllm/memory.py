"""Memory of the sidecars: shared weights, and what vLLM's CPU build allocates."""

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.machine import Machine, MemoryPart, exact
from dcmdp_jax.engines.sidecar.weights import WeightBridge, shared_bytes
from dcmdp_jax.engines.vllm.launch import engine_arguments


def memory_parts(arguments: EngineArguments, machine: Machine) -> list[MemoryPart]:
    """The weights in shared memory; what vLLM takes on a CPU, its cache of fixed size."""
    model = arguments.model
    dtype = arguments.compute_dtype
    lora = arguments.lora
    bridge = WeightBridge(model, dtype=dtype, int8=arguments.precision == "int8")
    adapters = lora and WeightBridge(model, dtype=dtype, lora=lora)
    lower = "a smaller model" + ", or `compute_dtype`=bfloat16" * (dtype == "float32")
    shared, said = shared_bytes(bridge, adapters, stored=arguments.settings.placement == "ray")
    found = [exact(f"{said} for vLLM", host=shared, lower=lower)]
    if arguments.platform != "cpu" or arguments.settings.address:
        return found
    count = arguments.settings.replicas or 1
    available = max(0, (machine.host_bytes or 0) - shared)
    cache = engine_arguments(arguments, available=available)["kv_cache_memory_bytes"]
    fewer = "`replicas`, " * (count > 1)
    return [
        *found,
        exact("vLLM's weights", host=count * bridge.num_bytes, lower=fewer + lower),
        exact(
            "vLLM's key-value cache",
            host=count * cache,
            lower=f"{fewer}`kv_cache_gib` or `max_rows`",
        ),
    ]
