"""Memory of the embedded engine, by the scheduler's own arithmetic."""

import functools
import math

from dcmdp_jax.engines.engine_kind import EngineArguments, Workload
from dcmdp_jax.engines.local import sizes
from dcmdp_jax.engines.local.cache import abstract
from dcmdp_jax.engines.local.layout import TENSOR, Program, planned_mesh
from dcmdp_jax.engines.local.programs import abstract_weights
from dcmdp_jax.engines.machine import PREEMPTED, Machine, MemoryPart
from dcmdp_jax.parallel.sharding import bytes_per_device, total_bytes

_SAMPLE = frozenset({"sample"})
_LOGITS_HELD = 3
"""Arrays of the size of logits: themselves, their exponentials, and a masked copy."""
_FEWER = "`max_rows` or `max_completion_tokens`"


def parts(
    arguments: EngineArguments,
    load: Workload,
    machine: Machine,
    rows: int,
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
    mesh = planned_mesh(arguments).abstract_mesh
    tensor = mesh.shape[TENSOR]
    devices = mesh.size
    make = functools.partial(machine.part, devices=devices, phases=_SAMPLE)
    worst_case = functools.partial(make, certain=False)
    program = Program.of(arguments, mesh)

    batch = sizes.batch_rows(rows, load.group_size, load.completions, devices)
    # Rows of a tensor group, which splits their heads.
    group_rows = batch // devices * tensor

    def cache_bytes(slots: int) -> int:
        cache = abstract(
            model,
            group_rows,
            slots,
            dtype=program.cache_dtype,
            platform=machine.platform,
        )
        return total_bytes(cache) // tensor

    limit = load.max_completion_tokens
    first = sizes.cache_capacities(sizes.default_cache_block(machine.platform), limit)[0]
    longest = sizes.length_bucket(max(load.prompt_lengths))
    shortest = sizes.length_bucket(min(load.prompt_lengths))
    full = cache_bytes(longest + limit)
    least = cache_bytes(shortest + first)
    caches = [
        make("key-value cache, first slots", least, lower=_FEWER),
        worst_case("key-value cache, all further slots", full - least, lower=_FEWER),
    ]
    if load.completions > rows and first < limit:
        preempted = sizes.PREEMPTED_CACHES * full
        caches.append(worst_case(PREEMPTED, preempted, lower=_FEWER))

    records = []
    if arguments.routed_experts:
        token_bytes = 2 * math.prod(model.routing[:2])
        records += [
            worst_case(
                "experts of decoded tokens",
                limit * group_rows * token_bytes,
                lower=f"{_FEWER}, or `routed_experts`=False",
            ),
            MemoryPart(
                "engine's record of them",
                host=load.completions * limit * token_bytes,
                phases=_SAMPLE,
                lower="`max_completion_tokens`, or `routed_experts`=False",
                certain=False,
            ),
        ]
    if arguments.top_logprobs:
        token_bytes = 8 * arguments.top_logprobs
        lower = f"{_FEWER}, or `top_logprobs`"
        decoded = limit * group_rows * token_bytes
        record = load.completions * limit * token_bytes
        records += [
            worst_case("top-k tokens of decoded ones", decoded, lower=lower),
            MemoryPart(
                "engine's lists of them", host=record, phases=_SAMPLE, lower=lower, certain=False
            ),
        ]

    scores = min(sizes.ATTENTION_ELEMENTS, group_rows * model.num_heads // tensor * longest**2)
    logits = group_rows * model.vocab_size // tensor * 4 * _LOGITS_HELD
    prompts, chunks = sizes.prefill_shape(
        model.num_heads,
        max(1, rows // load.group_size),
        longest,
        devices,
    )
    # Recurrent layers of prompts: 4,800 floats for each head and token, by the compiler for an
    # H100.
    heads = prompts // chunks // devices * longest * model.linear_num_value_heads
    working = logits + 4 * scores + heads * 4 * 4800
    return [
        *_weight_parts(program, load, machine),
        *caches,
        *records,
        worst_case("sampler's logits and attention", working, lower="`max_rows`"),
    ]


def _weight_parts(program: Program, load: Workload, machine: Machine) -> list[MemoryPart]:
    cpu = machine.platform == "cpu"
    weights, largest_layer = _weight_bytes(program, cpu)
    split = "more devices along `tensor`, " if load.training and not cpu else ""
    lower = f"a smaller model, {split}or `engine`=vllm"
    if program.precision in ("exact", "float32"):
        lower = f"`precision`=bfloat16, {lower}"
    make = functools.partial(machine.part, devices=1, lower=lower)
    return [
        # The trainer frees them before its step.
        make("engine's weights", weights, phases=frozenset({"weight_sync", "sample"})),
        make(
            "layers on their way to the engine",
            2 * largest_layer,
            phases=frozenset({"weight_sync"}),
            certain=False,
        ),
    ]


@functools.lru_cache(maxsize=8)
def _weight_bytes(program: Program, cpu: bool) -> tuple[int, int]:
    """Bytes of the engine's weights and of their largest layer, on each device.

    On a CPU they are of all devices together, which share them.
    """
    weights = abstract_weights(program)
    measure = bytes_per_device
    if cpu:
        measure = total_bytes
    subtrees = [*weights["layers"], {**weights, "layers": []}]
    layer_bytes = [measure(subtree) for subtree in subtrees]
    return sum(layer_bytes), max(layer_bytes)
