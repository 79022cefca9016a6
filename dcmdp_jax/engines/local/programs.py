"""The embedded engine's programs, planned for any mesh or compiled ahead of the calls."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import NamedSharding

from dcmdp_jax.activity import COMPILING
from dcmdp_jax.engines.engine_kind import EngineArguments, EnginePlan, Lowerable, Workload
from dcmdp_jax.engines.local import decode, forward, layout, sizes
from dcmdp_jax.engines.local.cache import Cache, abstract
from dcmdp_jax.engines.local.weights import engine_shapes
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.models import sampler
from dcmdp_jax.parallel.backend import usable_cores
from dcmdp_jax.parallel.sharding import bytes_per_device, replicated, sharded
from dcmdp_jax.types import Params

Wait = Callable[[], object]
"""Waits until a program is compiled."""


def plan_engine(arguments: EngineArguments, load: Workload) -> EnginePlan:
    """Plan the programs that the embedded engine would run, at their largest shapes.

    Args:
        arguments: engine arguments, with the mesh that it would have.
        load: the workload, that is the requests to the engine.

    Raises:
        UserError: if `tensor` or `expert` does not divide the devices or the model.
    """
    mesh = layout.planned_mesh(arguments)
    program = layout.Program.of(arguments, mesh)
    group = load.group_size
    bucket = sizes.length_bucket(max(load.prompt_lengths))
    slots = bucket + load.max_completion_tokens
    rows = sizes.batch_rows(arguments.max_rows, group, load.completions, mesh.size)
    sampling = SamplingShapes(
        batches=((rows, slots, bucket),),
        group=group,
        stops=1,
        bucket=bucket,
        mode="sample",
    )
    prefill, _, decoding = sampling.compilations(program, sharded=True)
    _, prompts, _ = prefill.arguments

    score_length = sizes.length_bucket(arguments.max_total_tokens)
    score_rows = sizes.score_rows(
        arguments.model.num_heads,
        score_length,
        arguments.max_rows,
        program.row_shards,
    )
    shape = ScoringShape(rows=score_rows, length=score_length)
    (scoring,) = shape.compilations(program, sharded=True)

    weights, cache, *_ = decoding.arguments
    weights_bytes = bytes_per_device(weights)
    cache_bytes = bytes_per_device(cache)
    resident = {"engine's weights": weights_bytes}
    programs = (
        Lowerable(
            name=prefill.name,
            trace=prefill.trace,
            resident=resident,
            row_lengths=(bucket,),
            tokens=prompts.size // (prefill.options["groups"] * program.row_shards),
        ),
        Lowerable(
            name=decoding.name,
            trace=decoding.trace,
            resident=resident | {"engine's cache": cache_bytes},
            row_lengths=(),
            # Decoding needs the logits of one token of each row, on all devices together. One more,
            # so that a search for logits of at least this many tokens does not report those.
            tokens=rows + 1,
        ),
        Lowerable(
            name=scoring.name,
            trace=scoring.trace,
            resident=resident,
            row_lengths=(score_length,),
            tokens=score_rows // program.row_shards * score_length,
        ),
    )
    return EnginePlan(
        programs=programs,
        weights_bytes=weights_bytes,
        cache_bytes=cache_bytes,
        rows=rows,
        slots=slots,
        refills=rows < load.completions,
    )


def abstract_weights(program: layout.Program) -> Params:
    """Shapes and shardings of the engine's tree."""
    shapes = engine_shapes(program.config, program.precision, program.param_dtype)
    specs = layout.weight_specs(shapes, program.config, program.mesh)
    return sharded(shapes, jax.tree.map(lambda spec: NamedSharding(program.mesh, spec), specs))


def _decode_arguments(
    program: layout.Program,
    rows: int,
    slots: int,
    prefix: int,
    stops: int,
    *,
    sharded: bool,
) -> tuple[Cache, decode.RowState, decode.Limits, sampler.Draw]:
    """Shapes of the arguments of `decode` after the weights.

    Args:
        program: static arguments.
        rows, slots: rows, and cache slots of each.
        prefix: slots of the prefix after the prompt.
        stops: stop tokens.
        sharded: give every array a sharding, to compile for a mesh of other devices. Calls pass
            NumPy arrays, except the cache.
    """
    whole_sharding = None
    row_sharding = None
    if sharded:
        whole_sharding = replicated(program.mesh)
        row_sharding = program.rows

    def by_row(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *dims), dtype, sharding=row_sharding)

    def whole_array(dtype: str, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=whole_sharding)

    cache = abstract(
        program.config,
        rows,
        slots,
        dtype=program.cache_dtype,
        platform=program.platform,
        sharding=program.cache,
    )
    integers = by_row("int32")
    slot_tokens = None
    if program.config.sliding_window:
        slot_tokens = by_row("int32", prefix)
    state = decode.RowState(
        keys=by_row("uint32", 2),
        prompt_lengths=integers,
        last=integers,
        sampled=integers,
        done=by_row("bool"),
        slot_tokens=slot_tokens,
    )
    number = whole_array("int32")
    limits = decode.Limits(clock=number, steps=number, live_floor=number)
    real = whole_array("float32")
    draw = sampler.Draw(
        inverse_temperature=real,
        top_p=real,
        stop_ids=whole_array("int32", stops),
    )
    return cache, state, limits, draw


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """A program to compile before the call that needs it; JAX keeps it.

    Attributes:
        function: the jitted function.
        arguments: shapes of its arguments.
        options: its static arguments.
    """

    function: jax.stages.Wrapped
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.__name__

    def trace(self) -> jax.stages.Traced:
        """Trace the program."""
        return self.function.trace(*self.arguments, **self.options)

    def run(self) -> None:
        """Compile the program."""
        self.trace().lower().compile()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingShapes:
    """Sizes that fix the shapes of the programs that sample a bucket of a call's prompts.

    Attributes:
        batches: rows, cache slots and prefix slots of each `decode`, see `BatchSizes.batches`.
        group: rows of a prompt.
        stops: number of stop tokens.
        bucket: cache slots of a prompt.
        mode: see `sampler.choose_tokens`.
    """

    batches: tuple[tuple[int, int, int], ...]
    group: int
    stops: int
    bucket: int
    mode: str

    @property
    def first(self) -> "SamplingShapes":
        """The shapes that a call begins with: its first batch alone."""
        return dataclasses.replace(self, batches=self.batches[:1])

    def compilations(
        self,
        program: layout.Program,
        *,
        sharded: bool = False,
    ) -> list[Compilation]:
        """`prefill`, `first_tokens` and each `decode`; for arguments see `ScoringShape`."""
        weights = abstract_weights(program)
        sharding = None
        if sharded:
            sharding = program.rows
        # A call begins with the first batch.
        rows, _, _ = self.batches[0]
        prompts, chunks = sizes.prefill_shape(
            program.config.num_heads,
            max(1, rows // self.group),
            self.bucket,
            program.mesh.size,
        )
        padded = jax.ShapeDtypeStruct((prompts, self.bucket), "int32", sharding=sharding)
        lengths = jax.ShapeDtypeStruct((prompts,), "int32", sharding=sharding)
        prefill = Compilation(
            function=decode.prefill,
            arguments=(weights, padded, lengths),
            options={"program": program, "groups": chunks},
        )

        decodings = []
        for rows, slots, prefix in self.batches:
            arguments = _decode_arguments(
                program,
                rows,
                slots,
                prefix=prefix - self.bucket,
                stops=self.stops,
                sharded=sharded,
            )
            slot_layout = decode.SlotLayout(prompt_slots=self.bucket, prefix_slots=prefix)
            decoding = Compilation(
                function=decode.decode,
                arguments=(weights, *arguments),
                options={"program": program, "mode": self.mode, "slot_layout": slot_layout},
            )
            decodings.append(decoding)

        # An output of `prefill`, so it has a sharding in calls too.
        hidden = jax.ShapeDtypeStruct(
            (prompts, program.config.hidden_size), program.compute_dtype, sharding=program.rows
        )
        _, _, state, _, draw = decodings[0].arguments
        first_tokens = Compilation(
            function=decode.first_tokens,
            arguments=(weights, hidden, state.last, state.keys, draw),
            options={"program": program, "mode": self.mode},
        )
        return [prefill, first_tokens, *decodings]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringShape:
    """The shape of a pass that scores `rows` rows, each padded to `length` tokens."""

    rows: int
    length: int

    def compilations(
        self,
        program: layout.Program,
        *,
        sharded: bool = False,
    ) -> list[Compilation]:
        """The one compilation of `score`.

        Args:
            program: static arguments.
            sharded: see `_decode_arguments`.
        """
        # Calls, too, pass rows that are on the devices.
        padded = jax.ShapeDtypeStruct((self.rows, self.length), "int32", sharding=program.rows)
        lengths = jax.ShapeDtypeStruct((self.rows,), "int32", sharding=program.rows)
        whole_sharding = None
        if sharded:
            whole_sharding = replicated(program.mesh)
        inverse_temperature = jax.ShapeDtypeStruct((), "float32", sharding=whole_sharding)
        weights = abstract_weights(program)
        compilation = Compilation(
            function=forward.score,
            arguments=(weights, padded, lengths, inverse_temperature),
            options={"program": program},
        )
        return [compilation]


class Preparation:
    """Threads that compile programs in order, one for each core but the main thread's.

    JAX keeps the programs. Nothing is executed and no array is made. A program that fails to
    compile fails again in the call that needs it.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max(1, usable_cores() - 1))
        self.compilations = list[Future[None]]()

    def add(self, program: Callable[[], object], name: str) -> Wait:
        """Compile a program in the background; returns a function that waits for it."""
        compilation = self._threads.submit(self._compile, program, name)
        self.compilations.append(compilation)
        return compilation.exception

    def stop(self) -> None:
        """Drop the compilations that have not begun, and do not wait for the others."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, program: Callable[[], object], name: str) -> None:
        thread = threading.current_thread()
        remaining = sum(not compilation.done() for compilation in self.compilations)
        thread.name = f"{COMPILING}{name} ({remaining})"
        try:
            program()
        finally:
            thread.name = "idle"
            if remaining == 1:
                # What compiling and loading leave unused: 50 to 80 MiB each time at 0.6M
                # parameters.
                release_freed_memory()
