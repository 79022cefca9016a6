"""Programs of the embedded engine that are compiled beside the first step."""

import threading

import jax
import numpy as np
import pytest
from jax._src import compiler

from dcmdp_jax.engines.local import engine as engine_module
from dcmdp_jax.engines.local import schedule
from dcmdp_jax.engines.local.programs import Preparation
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params
from tests.support.sampling import local_engine, sample

# Widths of no other test, whose programs would be found compiled.
MODEL = ModelConfig("qwen3", 37, 24, 40, 1, 2, 1, 8, tie_word_embeddings=True, initializer_range=0.3)


@pytest.fixture
def compiled(monkeypatch):
    """Names of the modules that XLA compiles, or that the cache on disk gives."""
    names: list[str] = []
    library = compiler.compile_or_get_cached

    def counted(backend, computation, *arguments, **options):
        names.append(str(computation.operation.attributes["sym_name"]).strip('"'))
        return library(backend, computation, *arguments, **options)

    monkeypatch.setattr(compiler, "compile_or_get_cached", counted)
    return names


def test_no_call_after_the_first_compiles_a_decode(compiled):
    """The first call's rows end at once, the others' by chance or at the limit: batches of 8, 4 and 2 rows, caches of
    4, 8 and 16 tokens."""
    settings = {"max_rows": 8, "min_rows": 2, "cache_block": 4}
    engine = local_engine(MODEL, precision="float32", max_total_tokens=40, prepare=True, **settings)
    engine.push_weights(init_params(MODEL, jax.random.key(0)), 0)
    prompts = [np.array([3, 1, 4], np.int32), np.array([1, 5], np.int32)]

    def call(seed, stops):
        sampled = sample(engine, prompts, SamplingParams(4, 16, stop_token_ids=stops), seed=seed, step=0)
        return {len(ids) for ids in sampled.completion_ids}

    assert call(0, tuple(range(37))) == {1}
    engine.preparation.wait()
    assert compiled.count("jit_decode") == 3 * 3
    # As many stop tokens: their number is a shape.
    lengths = set()
    for seed in range(6):
        lengths |= call(seed, tuple([2, 3, 4] * 12 + [5]))
    assert min(lengths) < 4 and max(lengths) == 16
    assert compiled.count("jit_decode") == 3 * 3
    engine.close()


def test_the_first_decode_is_compiled_beside_the_prefill(compiled, monkeypatch):
    """In a thread of its own, begun before the prefill; the call that needs it waits, and compiles nothing again."""
    began, threads = [], []

    def beside(program, name):
        began.append(list(compiled))
        threads.append(thread := threading.Thread(target=program))
        thread.start()
        return thread.join

    monkeypatch.setattr(engine_module, "compile_beside", beside)
    engine = local_engine(MODEL, precision="float32", max_total_tokens=24, max_rows=4, prepare=True, cache_block=8)
    engine.push_weights(init_params(MODEL, jax.random.key(0)), 0)
    sample(engine, [np.array([3, 1, 4], np.int32)], SamplingParams(4, 8), seed=0, step=0)
    engine.preparation.wait()
    assert began and "jit_prefill" not in began[0] and not threads[0].is_alive()
    assert compiled.count("jit_decode") == len(set(engine._prepared)) == 1
    engine.close()


def test_what_is_not_begun_is_dropped_and_a_failure_stops_nothing():
    done: list[int] = []
    preparation = Preparation()

    def failing():
        raise RuntimeError("no such program")

    preparation.add([failing, lambda: done.append(1)])
    preparation.wait()
    assert done == [1]
    preparation.add([lambda: preparation._waiting.clear(), lambda: done.append(2)])
    preparation.stop()
    assert done == [1]


@pytest.mark.parametrize("prepare", [False, True])
def test_memory_of_caches_goes_back_to_the_system_only_where_no_run_keeps_it(monkeypatch, prepare):
    """A run's next step would have to map it again."""
    returned: list[int] = []

    class Moving(schedule.Scheduler):
        def sample(self) -> None:
            self._trimmed(())
            raise RuntimeError("enough")

    monkeypatch.setattr(engine_module, "Scheduler", Moving)
    monkeypatch.setattr(schedule, "release_freed_memory", lambda: returned.append(1))
    engine = local_engine(MODEL, precision="float32", max_total_tokens=40, max_rows=8, min_rows=2, prepare=prepare)
    engine.push_weights(init_params(MODEL, jax.random.key(0)), 0)
    with pytest.raises(RuntimeError, match="enough"):
        sample(engine, [np.array([3, 1, 4], np.int32)], SamplingParams(8, 16), seed=0, step=0)
    assert len(returned) == (0 if prepare else 1)
