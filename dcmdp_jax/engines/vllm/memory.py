"""Memory of the sidecars: shared weights, and what vLLM's CPU build allocates."""

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.machine import Machine, MemoryPart
from dcmdp_jax.engines.sidecar.weights import make_bridges, shared_bytes
from dcmdp_jax.engines.vllm.launch import engine_arguments


def memory_parts(arguments: EngineArguments, machine: Machine) -> list[MemoryPart]:
    """The weights in shared memory; what vLLM takes on a CPU, its cache of fixed size."""
    settings = arguments.settings
    bridge, adapters = make_bridges(arguments)
    smaller = "a smaller model"
    if arguments.compute_dtype == "float32":
        smaller += ", or `compute_dtype`=bfloat16"
    shared, copies = shared_bytes(bridge, adapters, stored=settings.placement == "ray")
    shared_weights = MemoryPart(f"{copies} for vLLM", host=shared, lower=smaller)
    if arguments.platform != "cpu" or settings.address:
        return [shared_weights]

    replicas = settings.known_replicas
    fewer = "`replicas`, " if replicas > 1 else ""
    available = max(0, (machine.host_bytes or 0) - shared)
    cache_bytes = engine_arguments(arguments, available=available)["kv_cache_memory_bytes"]
    return [
        shared_weights,
        MemoryPart("vLLM's weights", host=replicas * bridge.num_bytes, lower=fewer + smaller),
        MemoryPart(
            "vLLM's key-value cache",
            host=replicas * cache_bytes,
            lower=f"{fewer}`kv_cache_gib` or `max_rows`",
        ),
    ]
