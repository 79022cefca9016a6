"""The embedded engine's programs with abstract arguments: for any mesh, and compiled ahead of the calls."""

import dataclasses
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.activity import COMPILING
from dcmdp_jax.engines.engine_kind import EngineArguments, EnginePlan, Lowerable, Workload
from dcmdp_jax.engines.local import decode, sizes
from dcmdp_jax.engines.local.cache import abstract
from dcmdp_jax.engines.local.forward import score
from dcmdp_jax.engines.local.layout import Program, weight_specs
from dcmdp_jax.engines.local.sampler import Draw
from dcmdp_jax.engines.local.weights import engine_shapes
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.parallel.sharding import bytes_per_device, sharded
from dcmdp_jax.types import Params

logger = logging.getLogger(__name__)


def plan_engine(arguments: EngineArguments, load: Workload) -> EnginePlan:
    """The programs that the embedded engine would run.

    Args:
        arguments: engine arguments, with the mesh that it would have.
        load: the requests to the engine.

    Raises:
        UserError: if `tensor` or `expert` does not divide the devices or the model.
    """
    model, split = arguments.model, dataclasses.asdict(arguments.settings)
    engine = arguments.mesh(**split)
    program = Program.of(arguments, engine)
    shapes = engine_shapes(model, arguments.precision, load.param_dtype)
    tree = sharded(shapes, jax.tree.map(lambda spec: NamedSharding(engine, spec), weight_specs(shapes, model, engine)))
    weights = {**tree, "layers": [tree["layers"][kind] for kind, _ in model.layer_kinds]}
    group, bucket = load.group_size, sizes.length_bucket(max(load.prompt_lengths))
    rows = sizes.batch_rows(arguments.max_rows, group, load.completions, engine.size)
    slots = bucket + load.max_completion_tokens
    cache, *decoded = _decode_arguments(program, rows, slots, 0, 1, sharded=True)
    cache_bytes = bytes_per_device(cache)

    def by_row(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=program.rows)

    prompts, groups = sizes.prefill_shape(model.num_heads, max(1, rows // group), bucket, engine.size)
    length = sizes.length_bucket(arguments.max_total_tokens)
    scored = sizes.score_rows(model.num_heads, length, arguments.max_rows, program.row_shards)
    held = {"engine's weights": bytes_per_device(weights)}
    programs = (
        Lowerable(
            "prefill",
            functools.partial(
                decode.prefill.trace, weights, by_row(jnp.int32, prompts, bucket), by_row(jnp.int32, prompts),
                program=program, groups=groups,
            ),
            held,
            (bucket,),
            prompts // groups // program.row_shards * bucket,
        ),
        Lowerable(
            "decode",
            functools.partial(
                decode.decode.trace, weights, cache, *decoded, program=program, prompt_slots=bucket,
                prefix_slots=bucket, mode="sample",
            ),
            held | {"engine's cache": cache_bytes},
            (),
            # One token of each row, whose logits are wanted.
            rows + 1,
        ),
        Lowerable(
            "score",
            functools.partial(
                score.trace, weights, by_row(jnp.int32, scored, length), by_row(jnp.int32, scored),
                jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(engine, P())), program=program,
            ),
            held,
            (length,),
            scored // program.row_shards * length,
        ),
    )  # fmt: skip
    return EnginePlan(programs, held["engine's weights"], cache_bytes, rows, slots, rows < load.completions)


def _decode_arguments(
    program: Program, rows: int, slots: int, sampled: int, stops: int, *, sharded: bool
) -> tuple[Any, ...]:
    """Shapes of the arguments of `decode` after the weights: cache, rows, limits, draw.

    Args:
        program: static arguments.
        rows, slots, sampled, stops: rows, cache slots of each, slots of the prefix after the prompt, stop tokens.
        sharded: with shardings, for a mesh that is not here. A call has NumPy arrays but for the cache.
    """
    of_rows, whole = (program.rows, NamedSharding(program.mesh, P())) if sharded else (None, None)

    def given(kind: str, *dims: int, sharding: NamedSharding | None = whole) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, kind, sharding=sharding)

    by_row = functools.partial(given, sharding=of_rows)
    number, real, integers = given("int32"), given("float32"), by_row("int32", rows)
    dtypes = program.cache_dtype, program.compute_dtype
    held = by_row("int32", rows, sampled) if program.config.sliding_window else None
    return (
        abstract(program.config, rows, slots, dtypes=dtypes, sharding=program.cache),
        decode.RowState(by_row("uint32", rows, 2), integers, integers, integers, by_row("bool", rows), held),
        decode.Limits(number, number, number),
        Draw(real, real, given("int32", stops)),
    )


class Preparation:
    """Programs to compile, one after another. JAX keeps them, so that a call which needs one finds it.

    Nothing is executed and no array is made. The thread ends when all are done, at `stop`, and with the main thread.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None

    def add(self, programs: Iterable[Callable[[], object]]) -> None:
        """Compile these too."""
        self._waiting.extend(programs)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=COMPILING)
            self._thread.start()

    def wait(self) -> None:
        """Return when all are compiled."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Drop what is not begun."""
        self._waiting.clear()
        self.wait()

    def _run(self) -> None:
        while threading.main_thread().is_alive():
            try:
                program = self._waiting.popleft()
                threading.current_thread().name = f"{COMPILING}decode ({1 + len(self._waiting)})"
                program()
            except IndexError:
                # What compiling and loading leave unused: 50 to 80 MiB each time at 0.6M parameters.
                release_freed_memory()
                return
            except Exception:  # raised again by the call that needs this program
                logger.debug("a program was not compiled ahead", exc_info=True)


def decoding_program(
    weights: Params, shape: tuple[int, int, int], stops: int, *, program: Program, prompt_slots: int, mode: str
) -> Callable[[], object]:
    """A call that compiles `decode`.

    Args:
        weights: the engine's tree; only its shapes are kept.
        shape: rows, cache slots, slots of the prefix, of `Scheduler.shapes`.
        stops: number of stop tokens.
        program, prompt_slots, mode: see `decode`.
    """
    rows, slots, prefix_slots = shape
    tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), weights)
    given = _decode_arguments(program, rows, slots, prefix_slots - prompt_slots, stops, sharded=False)
    fixed = {"program": program, "prompt_slots": prompt_slots, "prefix_slots": prefix_slots, "mode": mode}
    lower = functools.partial(decode.decode.lower, tree, *given, **fixed)
    return lambda: lower().compile()
