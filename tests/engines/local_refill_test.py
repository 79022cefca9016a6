"""Rows that enter a batch when others leave it have the same tokens as alone.

Their cache is put together again.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.local import cache as cache_module
from dcmdp_jax.engines.local import decode, layout, schedule
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params
from dcmdp_jax.types import Params
from tests.support.sampling import Rollout, assert_same_samples, local_engine, sample

MODEL = ModelConfig(
    model_type="qwen3",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    initializer_range=0.3,
)
GROUP = 3
# Four of 40 tokens end a completion: most end by chance somewhere in 16 tokens, some with their
# first, some never.
SAMPLING = SamplingParams(GROUP, 16, temperature=0.8, stop_token_ids=(3, 4, 5, 6))
ENDLESS = dataclasses.replace(SAMPLING, stop_token_ids=())
STAGGERED = {"max_rows": 6, "min_rows": 2, "cache_block": 4}
"""Levels of 4, 8 and 16 tokens; a window of 4 goes round while 27 rows pass through six places."""


RECURRENT = dataclasses.replace(
    MODEL,
    model_type="qwen3_5_text",
    num_layers=4,
    recurrent_layers=(0, 1, 2),
    linear_conv_kernel_dim=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    initializer_range=0.2,
)


@functools.lru_cache
def params(config: ModelConfig = MODEL) -> Params:
    return init_params(config, jax.random.key(0))


@functools.lru_cache
def prompts() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        rng.integers(0, 40, length).astype(np.int32) for length in (1, 5, 16, 12, 7, 3, 9, 14, 2)
    )


def generate(
    sampling: SamplingParams = SAMPLING, *, config: ModelConfig = MODEL, **settings
) -> Rollout:
    engine = local_engine(config, precision="float32", max_total_tokens=64, **settings)
    engine.sync_weights(params(config), 0)
    return sample(engine, prompts(), sampling, seed=1, step=2)


@functools.lru_cache
def alone(
    sampling: SamplingParams = SAMPLING, cache: str = "auto", config: ModelConfig = MODEL
) -> Rollout:
    """Every row in a batch of its own, in a cache that is long enough from the beginning."""
    return generate(sampling, max_rows=1, cache_block=16, kv_cache_dtype=cache, config=config)


assert_same = functools.partial(assert_same_samples, atol=1e-5)


@pytest.fixture
def calls(monkeypatch) -> dict[str, list]:
    """Calls of the scheduler.

    (rows, slots, steps taken before, prefix) of decode, (to, from) slots of insert.
    """
    seen = {"decode": [], "insert": []}
    originals = decode.decode, schedule.insert

    def decoded(weights, cache, rows, limits, *args, **kwargs):
        size = cache[0][1].shape[0], cache[0][1].shape[2]
        seen["decode"].append((*size, int(limits.clock), kwargs["slot_layout"].prefix_slots))
        return originals[0](weights, cache, rows, limits, *args, **kwargs)

    def inserted(cache, source, *args, **kwargs):
        seen["insert"].append((cache[0][1].shape[2], source[0][1].shape[2]))
        return originals[1](cache, source, *args, **kwargs)

    monkeypatch.setattr(decode, "decode", decoded)
    monkeypatch.setattr(schedule, "insert", inserted)
    return seen


def test_rows_that_enter_later_equal_rows_by_themselves(calls):
    refilled = generate(**STAGGERED)
    lengths = [ids.size for ids in refilled.completion_ids]
    assert min(lengths) == 1 and max(lengths) == 16 and len(set(lengths)) > 8
    assert_same(refilled, alone())
    # From prompts of 16 slots into rows of 4 tokens, and aside.
    assert {(20, 16), (20, 20)} <= set(calls["insert"])
    # The window was overwritten: its clock went beyond its 4 slots, and rows entered after.
    assert max(clock for _, slots, clock, prefix in calls["decode"] if slots - prefix == 4) > 4


def test_states_of_recurrent_layers_move_with_their_rows(monkeypatch):
    """Rows that are refilled, preempted and moved have the samples of rows by themselves.

    Moved to smaller batches and to longer caches. A state that stayed behind, or that a finished
    row left, would change them by nats.
    """
    taken = []
    preempt = schedule.Scheduler._preempt
    monkeypatch.setattr(
        schedule.Scheduler, "_preempt", lambda *args: taken.append(args) or preempt(*args)
    )
    refilled = generate(**STAGGERED, config=RECURRENT)
    assert taken and len({ids.size for ids in refilled.completion_ids}) > 5
    assert_same_samples(refilled, alone(config=RECURRENT), atol=1e-4)


def test_no_batch_is_larger_than_asked_for_and_only_as_long_as_its_rows(calls):
    generate(**STAGGERED)
    assert {rows for rows, *_ in calls["decode"]} <= {6, 3, 2}
    # Prefix and window of each level, doubling from 4 tokens.
    assert {(prefix, slots) for _, slots, _, prefix in calls["decode"]} <= {
        (16, 20),
        (20, 24),
        (24, 32),
    }


def test_one_doubling_is_not_waited_for(calls):
    # 8 tokens are twice the 4 that a cache begins with: 16 slots of the prompt and 8 from the
    # beginning.
    short = dataclasses.replace(SAMPLING, max_completion_tokens=8)
    rollout = generate(short, **STAGGERED)
    assert {(prefix, slots) for _, slots, _, prefix in calls["decode"]} == {(16, 24)}
    for ids, longer in zip(rollout.completion_ids, alone().completion_ids, strict=True):
        np.testing.assert_array_equal(ids, longer[:8])


def test_a_group_is_prefilled_once(monkeypatch):
    ran = []
    original = decode.prefill

    def prefill(weights, padded, lengths, **kwargs):
        ran.extend(tuple(row[:length]) for row, length in zip(padded, lengths, strict=True))
        return original(weights, padded, lengths, **kwargs)

    monkeypatch.setattr(decode, "prefill", prefill)
    generate(**STAGGERED)
    for prompt in prompts():
        assert ran.count(tuple(prompt)) == 1


def test_rows_of_one_length_stay_together(calls):
    expected = alone(ENDLESS)
    for seen in calls.values():
        seen.clear()
    assert_same(generate(ENDLESS, **STAGGERED), expected)
    # Neither preempted nor refilled; 27 rows in five batches, each of them through the three
    # levels.
    assert not calls["insert"]
    assert [(rows, slots) for rows, slots, *_ in calls["decode"]] == (
        [(6, 20), (6, 24), (6, 32)] * 4 + [(3, 20), (3, 24), (3, 32)]
    )


def test_first_tokens_that_end_a_completion_take_no_place(calls):
    every = dataclasses.replace(SAMPLING, stop_token_ids=tuple(range(40)))
    single = dataclasses.replace(SAMPLING, max_completion_tokens=1)
    rollouts = [generate(sampling, **STAGGERED) for sampling in (every, single)]
    assert not calls["decode"]
    for rollout, reason in zip(rollouts, ({"stop"}, {"stop", "length"}), strict=True):
        assert {ids.size for ids in rollout.completion_ids} == {1}
        assert set(rollout.finish_reasons) == reason
        for ids, longer in zip(rollout.completion_ids, alone().completion_ids, strict=True):
            assert ids[0] == longer[0]


def test_groups_that_do_not_fit_a_batch():
    # 7 rows of a prompt in 6 places: a group is cut, its prompt's cache is kept for the rest.
    sampling = dataclasses.replace(SAMPLING, group_size=7)
    assert_same(generate(sampling, **STAGGERED), alone(sampling))


def test_preempted_rows_are_bounded(monkeypatch):
    aside = []
    refused = []
    original = schedule.Scheduler._blocked

    def blocked(self, level):
        sources = {row.source for queue in self._queues[1:] for row in queue}
        values = [source.cache[0][1] for source in sources]
        aside.append(sum(array.shape[0] * array.shape[2] for array in values))
        refused.append(original(self, level))
        return refused[-1]

    monkeypatch.setattr(schedule.Scheduler, "_blocked", blocked)
    # All rows outlive each level, and none may stay where it is.
    monkeypatch.setattr(schedule.Scheduler, "_keeps_together", lambda *args: False)
    assert_same(generate(ENDLESS, **STAGGERED), alone(ENDLESS))
    assert any(refused) and not all(refused)
    # A batch of the longest rows, 6 x (16 + 16) slots, and one of rows that went on from the level
    # below.
    assert max(aside) <= 6 * (32 + 24)


def test_batches_of_preempted_rows_are_refilled_too(monkeypatch, calls):
    monkeypatch.setattr(schedule.Scheduler, "_keeps_together", lambda *args: False)
    monkeypatch.setattr(schedule.Scheduler, "_blocked", lambda *args: False)
    assert_same(generate(ENDLESS, **STAGGERED), alone(ENDLESS))
    assert {(20, 16), (24, 20), (32, 24)} <= set(calls["insert"])


def test_the_cache_of_a_gpu_gives_the_samples_of_a_cpus(monkeypatch, calls):
    """The cache layout of a GPU, on this CPU: it is cut, extended and moved too.

    Keys are stored like values, and shares divided before their product.
    """
    expected = alone()
    monkeypatch.setattr(layout.Program, "platform", property(lambda program: "gpu"))
    for module in (cache_module, decode):
        monkeypatch.setattr(module, "key_axes", lambda platform: (0, 2, 1, 3))
    # Programs of the same shapes as a CPU's.
    jax.clear_caches()
    assert_same(generate(**STAGGERED), expected)
    assert {(20, 16), (20, 20)} <= set(calls["insert"])
    jax.clear_caches()


def test_float8_cache_moves_as_bits():
    assert_same(generate(kv_cache_dtype="fp8", **STAGGERED), alone(cache="fp8"))


@pytest.mark.skipif(
    jax.device_count() < 2, reason="needs several devices, see XLA_FLAGS in BUILD.md"
)
def test_rows_stay_split_over_devices(monkeypatch, calls):
    expected = alone()
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    split = []
    original = decode.decode

    def decoded(*args, **kwargs):
        result = original(*args, **kwargs)
        split.extend(
            leaf.sharding.spec for cache in (args[1], result[0]) for leaf in jax.tree.leaves(cache)
        )
        return result

    monkeypatch.setattr(decode, "decode", decoded)
    assert_same(generate(mesh=mesh, **STAGGERED), expected)
    # JAX leaves axes of one device out of a result's spec.
    assert split and {spec[0] for spec in split} <= {"data", ("data", "fsdp", "expert")}
    assert {(20, 16), (20, 20)} <= set(calls["insert"])


def test_groups_come_as_they_end():
    rollout = generate(**STAGGERED)
    # 9 groups of 3 rows through six places end in many calls, short ones first.
    assert sum(map(bool, rollout.pulled)) > 4
    order = [group for groups in rollout.pulled for group in groups]
    assert order != sorted(order)
    assert_same(rollout, alone())


def test_a_call_that_is_given_up_leaves_the_engine_as_it_was():
    engine = local_engine(MODEL, precision="float32", max_total_tokens=64, **STAGGERED)
    engine.sync_weights(params(), 0)
    expected = sample(engine, prompts(), SAMPLING, seed=1, step=2)
    closed_call, open_call = (
        engine.generate(prompts(), SAMPLING, seed=1, step=2) for _ in range(2)
    )
    for groups in (closed_call, open_call):
        next(groups)
    closed_call.close()
    with pytest.raises(ZeroDivisionError):
        for _ in engine.generate(prompts(), SAMPLING, seed=1, step=2):
            1 / 0  # noqa: B018
    assert_same(sample(engine, prompts(), SAMPLING, seed=1, step=2), expected, atol=0)
    # A call in progress keeps its weights and their version, whatever is synced.
    engine.sync_weights(jax.tree.map(lambda leaf: 2 * leaf, params()), 1)
    episodes = [episode for groups in open_call for episode in groups]
    assert {int(episode.policy_versions[-1]) for episode in episodes} == {0}
    for episode in episodes:
        np.testing.assert_array_equal(
            episode.completion_ids, expected.completion_ids[GROUP * episode.group + episode.member]
        )


def test_take_and_insert_by_hand():
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()[:1]), ("rows",)), P("rows"))

    def made(first: int, rows: int, slots: int) -> cache_module.Cache:
        def layer(start: int) -> tuple[jax.Array, jax.Array]:
            values = jnp.arange(start, start + rows * slots, dtype=jnp.float32).reshape(
                rows, 1, slots, 1
            )
            return values.transpose(0, 1, 3, 2), values

        return layer(first), layer(first + 100)

    longer = cache_module.take(
        made(10, 3, 2), np.array([2, 0, 2], np.int32), extra=1, sharding=sharding
    )
    for layer, add in zip(longer, (0, 100), strict=True):
        rows = np.array([[14, 15, -add], [10, 11, -add], [14, 15, -add]]) + add
        for array in layer:
            np.testing.assert_array_equal(array.reshape(3, 3), rows)
    used_up = made(10, 3, 2)
    extended = cache_module.take(used_up, None, extra=1, sharding=sharding, release=True)
    assert all(array.is_deleted() for array in jax.tree.leaves(used_up))
    for array in extended[1]:
        np.testing.assert_array_equal(
            array.reshape(3, 3), [[110, 111, 0], [112, 113, 0], [114, 115, 0]]
        )
    # Row 1 of the source goes to place 2; place 7 does not exist and takes nothing.
    places = np.array([2, 7], np.int32)
    filled = cache_module.insert(
        longer, made(50, 2, 2), np.array([1, 0], np.int32), places, sharding=sharding
    )
    for layer, add in zip(filled, (0, 100), strict=True):
        rows = np.array([[14, 15, -add], [10, 11, -add], [52, 53, -add]]) + add
        for array in layer:
            np.testing.assert_array_equal(array.reshape(3, 3), rows)


@pytest.mark.skipif(
    jax.device_count() < 2, reason="needs several devices, see XLA_FLAGS in BUILD.md"
)
def test_rows_are_taken_where_they_are():
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()[:2]), ("rows",)), P("rows"))
    values = jnp.arange(12, dtype=jnp.float32).reshape(6, 1, 2, 1)
    cache = jax.device_put(((values.transpose(0, 1, 3, 2), values),), sharding)
    # Rows 0 to 2 are the first device's, 3 to 5 the second's; taken are rows 2, 0 and 4, 4.
    local = cache_module.take(
        cache, np.array([2, 0, 1, 1], np.int32), extra=1, sharding=sharding, local=True
    )
    named = cache_module.take(cache, np.array([2, 0, 4, 4], np.int32), extra=1, sharding=sharding)
    for array, other in zip(jax.tree.leaves(local), jax.tree.leaves(named), strict=True):
        assert array.sharding.is_equivalent_to(sharding, 4)
        np.testing.assert_array_equal(
            array.reshape(4, 3), [[4, 5, 0], [0, 1, 0], [8, 9, 0], [8, 9, 0]]
        )
        np.testing.assert_array_equal(array, other)


@pytest.mark.skipif(
    jax.device_count() < 2, reason="needs several devices, see XLA_FLAGS in BUILD.md"
)
def test_devices_that_count_together_now_and_then_stop_at_the_last_token(monkeypatch):
    sampling = dataclasses.replace(SAMPLING, stop_token_ids=tuple(range(13)))
    expected = alone(sampling)
    steps = []
    original = decode.decode

    def decoded(*args, **kwargs):
        result = original(*args, **kwargs)
        steps.append(int(result[1].steps))
        return result

    monkeypatch.setattr(decode, "decode", decoded)
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    rollout = generate(sampling, mesh=mesh)
    assert_same(rollout, expected)
    # The first token comes from the prompt; the longest row is no multiple of the steps between two
    # counts.
    longest = max(ids.size for ids in rollout.completion_ids)
    assert steps == [longest - 1] and (longest - 1) % decode._STEPS_ALONE
