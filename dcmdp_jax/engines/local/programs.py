"""The embedded engine's programs with abstract arguments: for any mesh, and compiled ahead of the
calls.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.activity import COMPILING
from dcmdp_jax.engines.engine_kind import EngineArguments, EnginePlan, Lowerable, Workload
from dcmdp_jax.engines.local import decode, forward, layout, sizes
from dcmdp_jax.engines.local.cache import abstract
from dcmdp_jax.engines.local.weights import engine_shapes
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.models import sampler
from dcmdp_jax.parallel.backend import usable_cores
from dcmdp_jax.parallel.sharding import bytes_per_device, sharded
from dcmdp_jax.types import Params


def plan_engine(arguments: EngineArguments, load: Workload) -> EnginePlan:
    """The programs that the embedded engine would run.

    Args:
        arguments: engine arguments, with the mesh that it would have.
        load: the requests to the engine.

    Raises:
        UserError: if `tensor` or `expert` does not divide the devices or the model.
    """
    model = arguments.model
    split = dataclasses.asdict(arguments.settings)
    engine = arguments.mesh(**split)
    program = layout.Program.of(arguments, engine)
    weights = abstract_weights(program, load.param_dtype)
    group = load.group_size
    bucket = sizes.length_bucket(max(load.prompt_lengths))
    rows = sizes.batch_rows(arguments.max_rows, group, load.completions, engine.size)
    slots = bucket + load.max_completion_tokens
    cache, *decoded = _decode_arguments(program, rows, slots, 0, 1, sharded=True)
    cache_bytes = bytes_per_device(cache)

    def by_row(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=program.rows)

    prompts, groups = sizes.prefill_shape(
        model.num_heads, max(1, rows // group), bucket, engine.size
    )
    length = sizes.length_bucket(arguments.max_total_tokens)
    scored = sizes.score_rows(model.num_heads, length, arguments.max_rows, program.row_shards)
    held = {"engine's weights": bytes_per_device(weights)}
    programs = (
        Lowerable(
            "prefill",
            functools.partial(
                decode.prefill.trace,
                weights,
                by_row(jnp.int32, prompts, bucket),
                by_row(jnp.int32, prompts),
                program=program,
                groups=groups,
            ),
            held,
            (bucket,),
            prompts // groups // program.row_shards * bucket,
        ),
        Lowerable(
            "decode",
            functools.partial(
                decode.decode.trace,
                weights,
                cache,
                *decoded,
                program=program,
                prompt_slots=bucket,
                prefix_slots=bucket,
                mode="sample",
            ),
            held | {"engine's cache": cache_bytes},
            (),
            # One token of each row, whose logits are wanted.
            rows + 1,
        ),
        Lowerable(
            "score",
            functools.partial(
                forward.score.trace,
                weights,
                by_row(jnp.int32, scored, length),
                by_row(jnp.int32, scored),
                jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(engine, P())),
                program=program,
            ),
            held,
            (length,),
            scored // program.row_shards * length,
        ),
    )
    return EnginePlan(
        programs, held["engine's weights"], cache_bytes, rows, slots, rows < load.completions
    )


def abstract_weights(program: layout.Program, param_dtype: str) -> Params:
    """Shapes and shardings of the engine's tree, pushed by a trainer with parameters of a dtype."""
    model = program.config
    mesh = program.mesh
    shapes = engine_shapes(model, program.precision, param_dtype)
    return sharded(
        shapes,
        jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), layout.weight_specs(shapes, model, mesh)
        ),
    )


def _decode_arguments(
    program: layout.Program, rows: int, slots: int, sampled: int, stops: int, *, sharded: bool
) -> tuple[Any, ...]:
    """Shapes of the arguments of `decode` after the weights: cache, rows, limits, draw.

    Args:
        program: static arguments.
        rows, slots, sampled, stops: rows, cache slots of each, slots of the prefix after the
            prompt, stop tokens.
        sharded: with shardings, for a mesh that is not here. A call has NumPy arrays but for the
            cache.
    """
    of_rows, whole = (program.rows, NamedSharding(program.mesh, P())) if sharded else (None, None)

    def given(
        kind: str, *dims: int, sharding: NamedSharding | None = whole
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, kind, sharding=sharding)

    by_row = functools.partial(given, sharding=of_rows)
    number = given("int32")
    real = given("float32")
    integers = by_row("int32", rows)
    held = by_row("int32", rows, sampled) if program.config.sliding_window else None
    return (
        abstract(
            program.config,
            rows,
            slots,
            dtype=program.cache_dtype,
            platform=program.platform,
            sharding=program.cache,
        ),
        decode.RowState(
            by_row("uint32", rows, 2), integers, integers, integers, by_row("bool", rows), held
        ),
        decode.Limits(number, number, number),
        sampler.Draw(real, real, given("int32", stops)),
    )


class Preparation:
    """Threads that compile programs in their order, one for each core but the main thread's. JAX
    keeps the programs.

    Nothing is executed and no array is made. A program that fails to compile fails again in the
    call that needs it.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max(1, usable_cores() - 1))
        self.asked = list[Future[None]]()

    def add(self, program: Callable[[], object], name: str) -> Callable[[], object]:
        """Compile this one too; returns a function that waits for it."""
        self.asked.append(self._threads.submit(self._compile, program, name))
        return self.asked[-1].exception

    def stop(self) -> None:
        """Drop what is not begun; nobody waits for what is."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, program: Callable[[], object], name: str) -> None:
        thread = threading.current_thread()
        left = sum(not asked.done() for asked in self.asked)
        thread.name = f"{COMPILING}{name} ({left})"
        try:
            program()
        finally:
            thread.name = "idle"
            if left == 1:
                # What compiling and loading leave unused: 50 to 80 MiB each time at 0.6M
                # parameters.
                release_freed_memory()


def sampling_programs(
    shapes: Sequence[tuple[int, int, int]],
    group: int,
    stops: int,
    bucket: int,
    mode: str,
    *,
    program: layout.Program,
    dtype: str,
) -> list[tuple[Callable[[], object], str]]:
    """Calls that compile `prefill`, `first_tokens` and each `decode`, with these names.

    Args:
        shapes: rows, cache slots, slots of the prefix of each `decode`, see `Scheduler.shapes`.
        group: rows of a prompt.
        stops: number of stop tokens.
        bucket, mode, program: see `decode`; `bucket` is its `prompt_slots`.
        dtype: of the pushed parameters.
    """
    config = program.config
    array = jax.ShapeDtypeStruct
    how = {"program": program, "mode": mode}
    prompts, groups = sizes.prefill_shape(
        config.num_heads, max(1, shapes[0][0] // group), bucket, program.mesh.size
    )
    padded = array((prompts, bucket), "int32"), array((prompts,), "int32")
    hidden = array((prompts, config.hidden_size), program.compute_dtype, sharding=program.rows)
    _, state, _, draw = _decode_arguments(program, shapes[0][0], bucket, 0, stops, sharded=False)
    weights = abstract_weights(program, dtype)
    made = [(decode.prefill, padded, {"program": program, "groups": groups})]
    made += [(decode.first_tokens, (hidden, state.last, state.keys, draw), how)]
    for rows, slots, prefix in shapes:
        given = _decode_arguments(program, rows, slots, prefix - bucket, stops, sharded=False)
        made += [(decode.decode, given, how | {"prompt_slots": bucket, "prefix_slots": prefix})]
    return [
        (lambda of=of: of[0].lower(weights, *of[1], **of[2]).compile(), of[0].__name__)
        for of in made
    ]


def scoring_programs(
    rows: int, length: int, *, program: layout.Program, dtype: str
) -> list[tuple[Callable, str]]:
    """The call that compiles `score` for rows of a length, with its name. Arguments as of
    `sampling_programs`.
    """
    array = jax.ShapeDtypeStruct
    how = {"sharding": program.rows}
    given = (
        array((rows, length), "int32", **how),
        array((rows,), "int32", **how),
        array((), "float32"),
    )
    weights = abstract_weights(program, dtype)
    return [
        (
            lambda: forward.score.lower(weights, *given, program=program).compile(),
            forward.score.__name__,
        )
    ]
