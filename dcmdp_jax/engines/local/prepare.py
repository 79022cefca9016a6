"""Compile, or load from the cache, the programs that later calls need, in a thread while the first step trains."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

import jax

from dcmdp_jax.engines.local.cache import abstract
from dcmdp_jax.engines.local.decode import RowState, decode
from dcmdp_jax.engines.local.layout import Program
from dcmdp_jax.process_memory import release_freed_memory
from dcmdp_jax.types import Params

logger = logging.getLogger(__name__)


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
            self._thread = threading.Thread(target=self._run, name="compile decoding programs")
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
                self._waiting.popleft()()
            except IndexError:
                # What compiling and loading leave unused: 50 to 80 MiB each time at 0.6M parameters.
                release_freed_memory()
                return
            except Exception:  # the call that needs this program says what is wrong with it
                logger.debug("a program was not compiled ahead", exc_info=True)


def decoding_program(
    weights: Params,
    shape: tuple[int, int, int],
    stops: int,
    *,
    program: Program,
    prompt_slots: int,
    mode: str,
) -> Callable[[], object]:
    """A call that compiles `decode`.

    Args:
        weights: the engine's tree; only its shapes are kept.
        shape: rows, cache slots, slots of the prefix, of `Scheduler.shapes`.
        stops: number of stop tokens.
        program, prompt_slots, mode: see `decode`.
    """
    rows, slots, prefix_slots = shape

    def given(kind: str, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, kind)

    tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), weights)
    cache = abstract(program.config, rows, slots, dtype=program.cache_dtype, sharding=program.cache)
    state = RowState(
        given("uint32", rows, 2), given("int32", rows), given("int32", rows), given("int32", rows), given("bool", rows)
    )
    number, real = given("int32"), given("float32")
    lower = functools.partial(
        decode.lower, tree, cache, state, number, number, number, real, real, given("int32", stops),
        program=program, prompt_slots=prompt_slots, prefix_slots=prefix_slots, mode=mode,
    )  # fmt: skip
    return lambda: lower().compile()
