"""Programs of the embedded engine that are compiled beside the first step."""

import concurrent.futures
import dataclasses
import re
import threading

import jax
import numpy as np
import pytest
from jax._src import compiler
from jax.sharding import Mesh

from dcmdp_jax.activity import COMPILING
from dcmdp_jax.engines.local import engine as engine_module
from dcmdp_jax.engines.local import programs, schedule
from dcmdp_jax.engines.local.programs import Preparation
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params
from tests.support.sampling import local_engine, sample
from tests.support.waiting import HANGS_S

# Widths of no other test, whose programs would be found compiled.
MODEL = ModelConfig(
    "qwen3", 37, 24, 40, 1, 2, 1, 8, tie_word_embeddings=True, initializer_range=0.3
)


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


def test_a_decoding_step_copies_no_cache_of_a_model_with_one_key_head():
    """Where the slot was written to one shape and read from another, each step had four copies."""
    engine = local_engine(MODEL, precision="float32", max_total_tokens=40, max_rows=8)
    shapes = programs.SamplingShapes(
        batches=((8, 32, 16),), group=4, stops=1, bucket=16, mode="sample"
    )
    *_, decode = shapes.compilations(engine.program)
    text = decode.trace().lower().compile().as_text()
    engine.close()
    computations = re.split(r"\n\n", text)
    body_name = re.search(r" while\(.*body=%([\w.-]+)", text)[1]
    [body] = [part for part in computations if part.startswith(f"%{body_name} ")]
    # Keys have [8 rows x 1 head, 8, 32 slots], values [8, 32, 8].
    assert re.search(r"f32\[8,(1,)?(8,32|32,8)\]", body)
    assert re.findall(r"= f32\[8,(?:1,)?(?:8,32|32,8)\]\S* copy\(", body) == []


def test_no_call_after_the_first_compiles_a_decode(compiled):
    """The first call's rows end at once, the others' by chance or at the limit.

    Batches of 8, 4 and 2 rows, caches of 4, 8 and 16 tokens.
    """
    engine = local_engine(
        MODEL,
        precision="float32",
        max_total_tokens=40,
        prepare=True,
        max_rows=8,
        min_rows=2,
        cache_block=4,
    )
    engine.sync_weights(init_params(MODEL, jax.random.key(0)), 0)
    prompts = [np.array([3, 1, 4], np.int32), np.array([1, 5], np.int32)]

    def call(seed, stops):
        sampled = sample(
            engine, prompts, SamplingParams(4, 16, stop_token_ids=stops), seed=seed, step=0
        )
        return {len(ids) for ids in sampled.completion_ids}

    assert call(0, tuple(range(37))) == {1}
    concurrent.futures.wait(engine.preparation.compilations)
    assert compiled.count("jit_decode") == 3 * 3
    # As many stop tokens: their number is a shape.
    lengths = set()
    for seed in range(6):
        lengths |= call(seed, tuple([2, 3, 4] * 12 + [5]))
    assert min(lengths) < 4 and max(lengths) == 16
    assert compiled.count("jit_decode") == 3 * 3
    engine.close()


def test_unexpected_programs_are_compiled_side_by_side(compiled, monkeypatch):
    """A call that nobody announced compiles its programs in threads, and none of them again.

    Each in a thread of its own; the call waits.
    """
    threads = {}
    both = threading.Barrier(3, timeout=HANGS_S)

    def beside(program, name):
        def run():
            both.wait()
            program()

        threads[name] = threading.Thread(target=run)
        threads[name].start()
        return threads[name].join

    monkeypatch.setattr(engine_module, "compile_beside", beside)
    engine = local_engine(
        MODEL, precision="float32", max_total_tokens=24, max_rows=4, prepare=True, cache_block=8
    )
    engine.sync_weights(init_params(MODEL, jax.random.key(0)), 0)
    sample(engine, [np.array([3, 1, 4], np.int32)], SamplingParams(4, 8), seed=0, step=0)
    concurrent.futures.wait(engine.preparation.compilations)
    assert sorted(threads) == ["decode", "first_tokens", "prefill"]
    assert [compiled.count(f"jit_{name}") for name in sorted(threads)] == [1, 1, 1]
    engine.close()


def test_lengths_that_are_scored_are_compiled_side_by_side(compiled, monkeypatch):
    """Rows of 4, 5 and 20 tokens: two padded to 16, in one pass, and one padded to 32."""
    both = threading.Barrier(2, timeout=HANGS_S)
    beside = engine_module.compile_beside
    monkeypatch.setattr(
        engine_module,
        "compile_beside",
        lambda program, name: beside(lambda: (both.wait(), program()), name),
    )
    engine = local_engine(MODEL, precision="float32", max_total_tokens=24, max_rows=4, prepare=True)
    engine.sync_weights(init_params(MODEL, jax.random.key(0)), 0)
    rows = [np.arange(size, dtype=np.int32) for size in (2, 3, 18)]
    for _ in range(2):
        scored = engine.score([np.array([3, 1], np.int32)] * 3, rows, temperature=1.0)
        assert [values.shape for values in scored] == [(2,), (3,), (18,)] and compiled.count(
            "jit_score"
        ) == 2
    engine.close()


@pytest.mark.parametrize(
    ("precision", "param_dtype", "devices"),
    [
        ("float32", "float32", 1),
        ("fp8", "bfloat16", 1),
        ("exact", "bfloat16", 1),
        ("int8", "float32", 2),
    ],
)
def test_first_calls_find_their_programs_compiled(
    compiled, monkeypatch, precision, param_dtype, devices
):
    """Programs compile in threads before there are weights.

    The main thread compiles none of them again for weights that are synced.
    """
    monkeypatch.setattr(
        engine_module,
        "compile_beside",
        lambda program, name: pytest.fail(f"{name} is compiled again"),
    )
    model = dataclasses.replace(MODEL, intermediate_size=44)
    prompts = [np.array([3, 1, 4], np.int32), np.arange(1, 20, dtype=np.int32)]
    sampling = SamplingParams(2, 6)
    engine = local_engine(
        model,
        precision=precision,
        max_total_tokens=40,
        max_rows=2,
        prepare=True,
        param_dtype=param_dtype,
        first_calls=[(prompts, sampling), (prompts, None)],
        mesh=Mesh(np.asarray(jax.devices()[:devices]), ("data",)),
    )
    concurrent.futures.wait(engine.preparation.compilations)
    expected = [compiled.count(f"jit_{name}") for name in ("decode", "first_tokens", "prefill")]
    # Buckets of 16 and 32 slots: a prefill and a decode each. Two threads may compile the same
    # `first_tokens`.
    assert (
        expected[0] == expected[2] == 2
        and expected[1] in (1, 2)
        and compiled.count("jit_score") == 1
    )
    engine.sync_weights(init_params(model, jax.random.key(0), param_dtype), 0)
    sample(engine, prompts, sampling, seed=0, step=0)
    # As many rows as there, of 34 and 40 tokens: padded to 64, the longest length.
    engine.score(
        prompts, [np.arange(31, dtype=np.int32), np.arange(21, dtype=np.int32)], temperature=1.0
    )
    assert [
        compiled.count(f"jit_{name}") for name in ("decode", "first_tokens", "prefill")
    ] == expected
    assert compiled.count("jit_score") == 1
    engine.close()


def test_what_is_not_begun_is_dropped_and_a_failure_stops_nothing(monkeypatch):
    monkeypatch.setattr(programs, "usable_cores", lambda: 2)
    preparation = Preparation()
    done = []
    may_end = threading.Event()
    began = threading.Event()

    def failing():
        raise RuntimeError("no such program")

    failed = preparation.add(failing, "score")
    compiled = preparation.add(lambda: done.append(1), "decode")
    assert "no such program" in str(failed()) and compiled() is None and done == [1]
    preparation.add(lambda: began.set() or may_end.wait(HANGS_S), "prefill")
    preparation.add(lambda: done.append(2), "decode")
    began.wait(HANGS_S)
    assert [
        thread.name for thread in threading.enumerate() if thread.name.startswith(COMPILING)
    ] == ["compiling prefill (2)"]
    preparation.stop()
    may_end.set()
    concurrent.futures.wait(preparation.compilations[:3])
    assert preparation.compilations[3].cancelled()
    assert done == [1] and not [
        thread for thread in threading.enumerate() if thread.name.startswith(COMPILING)
    ]


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
    engine = local_engine(
        MODEL, precision="float32", max_total_tokens=40, max_rows=8, min_rows=2, prepare=prepare
    )
    engine.sync_weights(init_params(MODEL, jax.random.key(0)), 0)
    with pytest.raises(RuntimeError, match="enough"):
        sample(engine, [np.array([3, 1, 4], np.int32)], SamplingParams(8, 16), seed=0, step=0)
    assert len(returned) == (0 if prepare else 1)
