import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from scipy import stats

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local import ENGINE
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.local.layout import check_mesh
from dcmdp_jax.engines.local.weights import Conversion
from dcmdp_jax.engines.protocol import EngineError, SamplingParams, unusable_completions
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute, DecoderInputs, hidden_states, output_kernel
from dcmdp_jax.models.families import FAMILIES
from dcmdp_jax.models.hf_config import layer_pattern
from dcmdp_jax.models.params import init_params
from dcmdp_jax.models.quantize import QuantizedKernel
from dcmdp_jax.types import Params
from tests.support.sampling import Rollout, assert_same_samples, local_engine, sample

QWEN3 = ModelConfig(
    model_type="qwen3",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
    initializer_range=0.3,
)
QWEN2 = dataclasses.replace(
    QWEN3, model_type="qwen2", attention_bias=True, tie_word_embeddings=False
)
LLAMA = dataclasses.replace(QWEN3, model_type="llama", tie_word_embeddings=False)
QWEN35 = dataclasses.replace(
    QWEN3,
    model_type="qwen3_5_text",
    num_layers=4,
    recurrent_layers=(0, 1, 2),
    partial_rotary_factor=0.5,
    linear_conv_kernel_dim=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    initializer_range=0.2,
)
SAMPLING = SamplingParams(group_size=3, max_completion_tokens=9, temperature=0.8)


@functools.lru_cache
def params(config: ModelConfig = QWEN3, seed: int = 0) -> Params:
    fresh = init_params(config, jax.random.key(seed))

    def perturb(path: tuple, x: jax.Array) -> jax.Array:
        # Norms of 1 and biases of 0 would hide a norm or a bias that is left out.
        if path[-1].key not in ("scale", "bias"):
            return x
        name = jax.tree_util.keystr(path)
        return x + 0.2 * jax.random.normal(jax.random.key(sum(map(ord, name)) + seed), x.shape)

    return jax.tree_util.tree_map_with_path(perturb, fresh)


def engine(
    config: ModelConfig = QWEN3, *, seed: int = 0, precision: str = "float32", **settings
) -> LocalEngine:
    local = local_engine(config, precision=precision, max_total_tokens=64, **settings)
    local.sync_weights(params(config, seed), 0)
    return local


@functools.lru_cache
def prompts(vocab: int = 40) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.integers(0, vocab, length).astype(np.int32) for length in (1, 5, 16, 12, 7))


@functools.partial(jax.jit, static_argnames=("config",))
def _whole_forward(
    config: ModelConfig, weights: Params, ids: jax.Array, lengths: jax.Array
) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    inputs = DecoderInputs(input_ids=ids, position_ids=positions, segment_ids=segments)
    hidden = hidden_states(weights, config, inputs, Compute())
    return hidden @ output_kernel(weights)


def logits_of(config: ModelConfig, weights: Params, rows: list[np.ndarray]) -> np.ndarray:
    """[rows, 48, V] logits by the training stack; entry t is of token t + 1."""
    ids = np.zeros((-(-len(rows) // 15) * 15, 48), np.int32)
    for index, row in enumerate(rows):
        ids[index, : row.size] = row
    lengths = np.asarray([row.size for row in rows] + [1] * (ids.shape[0] - len(rows)))
    return np.asarray(_whole_forward(config, weights, ids, lengths), np.float64)[: len(rows)]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def teacher_forced(
    config: ModelConfig, weights: Params, rollout: Rollout, temperature: float
) -> list[np.ndarray]:
    """Log-probs of the completions by the training stack."""
    pairs = list(zip(rollout.prompt_ids, rollout.completion_ids, strict=True))
    logits = logits_of(config, weights, [np.concatenate(pair) for pair in pairs])
    return [
        log_softmax(row[prompt.size - 1 : prompt.size + ids.size - 1] / temperature)[
            np.arange(ids.size), ids
        ]
        for row, (prompt, ids) in zip(logits, pairs, strict=True)
    ]


@pytest.mark.parametrize(
    "config",
    [QWEN3, QWEN2, LLAMA, QWEN35],
    ids=["qwen3-tied", "qwen2-untied", "llama-untied", "recurrent"],
)
@pytest.mark.parametrize("precision", ["float32", "exact"])
def test_sampled_logprobs_are_the_training_stacks(config, precision):
    # cache_block 4 grows the cache twice on the way.
    rollout = sample(
        engine(config, precision=precision, cache_block=4), prompts(), SAMPLING, seed=1, step=2
    )
    for ours, theirs in zip(
        rollout.rollout_logprobs, teacher_forced(config, params(config), rollout, 0.8), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    # Nine tokens at a spread of several nats: wrong by a position they would differ by more than
    # 1e-4.
    assert np.std(np.concatenate(rollout.rollout_logprobs)) > 0.5


def _family(model_type: str, **fields) -> ModelConfig:
    """Four layers with the family's pattern, or one of three layers, and a window of 5 tokens."""
    pattern = layer_pattern(
        {"sliding_window": 5, "sliding_window_pattern": 3}, FAMILIES[model_type], 4
    )
    return dataclasses.replace(
        QWEN3, model_type=model_type, num_layers=4, rope_theta=1e4, **pattern, **fields
    )


@pytest.mark.parametrize(
    "config",
    [
        _family("gemma3_text", sliding_rope_theta=100.0, query_pre_attn_scalar=12),
        _family("olmo3", tie_word_embeddings=False),
        _family("smollm3"),
        _family("mistral"),
    ],
    ids=lambda config: config.model_type,
)
def test_rows_longer_than_a_window_have_the_training_stacks_logprobs(config):
    """Refilled rows in a cache that grows and goes round.

    Prompts of 1 to 16 tokens and 16 more, while 15 rows pass six places.
    """
    sampling = SamplingParams(
        group_size=3, max_completion_tokens=16, temperature=0.8, stop_token_ids=(3, 4)
    )
    rollout = sample(
        engine(config, max_rows=6, min_rows=2, cache_block=4), prompts(), sampling, seed=1, step=2
    )
    theirs = teacher_forced(config, params(config), rollout, 0.8)
    for mine, other in zip(rollout.rollout_logprobs, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-4)
    assert max(ids.size for ids in rollout.completion_ids) == 16
    # Without windows the last tokens differ.
    unwindowed = dataclasses.replace(
        config, sliding_window=0, sliding_layers=(), sliding_rope_theta=0.0
    )
    blind = teacher_forced(unwindowed, params(config), rollout, 0.8)
    differ = max(np.abs(a - b).max() for a, b in zip(theirs, blind, strict=True))
    assert differ > 1e-2 or not config.sliding_layers


def test_a_tensor_group_can_not_norm_all_heads_together():
    with pytest.raises(
        ValueError, match="got 2, must be 1: olmo3 norms all heads of q and k together"
    ):
        check_mesh(_family("olmo3"), 2, 1)


def test_rollout_is_ordered_by_prompt_then_member():
    rollout = sample(engine(), prompts(), SAMPLING, seed=1, step=2)
    np.testing.assert_array_equal(rollout.group_ids, np.repeat(np.arange(5), 3))
    for row, prompt in enumerate(rollout.prompt_ids):
        np.testing.assert_array_equal(prompt, prompts()[row // 3])
    assert rollout.policy_version == 0
    assert rollout.finish_reasons == ["length"] * 15
    assert {ids.size for ids in rollout.completion_ids} == {9}
    # Members of a group have their own keys.
    assert len({ids.tobytes() for ids in rollout.completion_ids}) == 15


def test_first_token_follows_the_softmax():
    # 3,000 rows of one prompt, 40 tokens; the expected distribution is the training stack's.
    prompt = prompts()[1]
    sampling = SamplingParams(group_size=3000, max_completion_tokens=1, temperature=1.3)
    rollout = sample(engine(max_rows=3000), [prompt], sampling, seed=5, step=0)
    probabilities = np.exp(log_softmax(logits_of(QWEN3, params(), [prompt])[0, 4] / 1.3))
    counts = np.bincount(np.concatenate(rollout.completion_ids), minlength=40)
    likely = probabilities > 5 / 3000
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(probabilities[likely], probabilities[~likely].sum()) * 3000
    assert stats.chisquare(observed, expected * 3000 / expected.sum()).pvalue > 0.01


def test_greedy_is_the_argmax_of_the_whole_forward_at_each_token():
    sampling = SamplingParams(group_size=1, max_completion_tokens=6, temperature=0)
    rollout = sample(engine(), prompts(), sampling, seed=0, step=0)
    rows = list(prompts())
    for t in range(6):
        logits = logits_of(QWEN3, params(), rows)
        best = [int(logits[index, row.size - 1].argmax()) for index, row in enumerate(rows)]
        assert best == [int(ids[t]) for ids in rollout.completion_ids]
        rows = [np.append(row, token) for row, token in zip(rows, best, strict=True)]
    for ours, theirs in zip(
        rollout.rollout_logprobs, teacher_forced(QWEN3, params(), rollout, 1.0), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_samples_are_a_function_of_seed_step_and_row():
    local = engine()
    first = sample(local, prompts(), SAMPLING, seed=1, step=2)
    sample(local, prompts(), SAMPLING, seed=9, step=9)
    assert_same_samples(first, sample(local, prompts(), SAMPLING, seed=1, step=2), atol=0)
    for seed, step in ((2, 2), (1, 3), (2, 1), (2**32 - 1, 2)):
        other = sample(local, prompts(), SAMPLING, seed=seed, step=step)
        same = [
            np.array_equal(a, b)
            for a, b in zip(first.completion_ids, other.completion_ids, strict=True)
        ]
        assert not any(same)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_rows": 4},  # groups of 3: batches of one group
        {"max_rows": 2},  # a group does not fit: cut in the middle
        {"cache_block": 2},
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_batch_or_bucket(settings):
    expected = sample(engine(), prompts(), SAMPLING, seed=1, step=2)
    assert_same_samples(
        expected, sample(engine(**settings), prompts(), SAMPLING, seed=1, step=2), atol=2e-5
    )


def test_a_row_does_not_depend_on_the_bucket_of_its_prompt():
    # Beside a prompt of 20 tokens those of up to 16 are padded to 32 too.
    longer = (*prompts(), np.arange(20, dtype=np.int32))
    alone, beside = (
        sample(engine(), each, SAMPLING, seed=1, step=2) for each in (prompts(), longer)
    )
    for index, (ids, logprobs) in enumerate(
        zip(alone.completion_ids, alone.rollout_logprobs, strict=True)
    ):
        np.testing.assert_array_equal(ids, beside.completion_ids[index])
        np.testing.assert_allclose(logprobs, beside.rollout_logprobs[index], atol=2e-5)


def test_a_row_does_not_depend_on_later_prompts():
    expected = sample(engine(), prompts(), SAMPLING, seed=1, step=2)
    fewer = sample(engine(), prompts()[:2], SAMPLING, seed=1, step=2)
    for row in range(6):
        np.testing.assert_array_equal(expected.completion_ids[row], fewer.completion_ids[row])


STOPS = tuple(range(8))


def test_completion_ends_with_the_first_stop_token():
    sampling = dataclasses.replace(SAMPLING, max_completion_tokens=30)
    free = sample(engine(), prompts(), sampling, seed=1, step=2)
    stopped = sample(
        engine(), prompts(), dataclasses.replace(sampling, stop_token_ids=STOPS), seed=1, step=2
    )
    reasons = set()
    for row in range(15):
        hits = np.flatnonzero(np.isin(free.completion_ids[row], STOPS))
        size = hits[0] + 1 if hits.size else 30
        np.testing.assert_array_equal(stopped.completion_ids[row], free.completion_ids[row][:size])
        np.testing.assert_allclose(
            stopped.rollout_logprobs[row], free.rollout_logprobs[row][:size], rtol=0, atol=2e-5
        )
        assert stopped.finish_reasons[row] == ("stop" if hits.size else "length")
        reasons.add(int(size))
    assert len(reasons) > 3


@pytest.mark.parametrize(("max_rows", "min_rows"), [(256, 4), (7, 3)])
def test_moving_live_rows_to_smaller_batches_changes_nothing(max_rows, min_rows):
    sampling = dataclasses.replace(SAMPLING, max_completion_tokens=30, stop_token_ids=STOPS)
    expected = sample(engine(), prompts(), sampling, seed=1, step=2)
    moved = sample(
        engine(min_rows=min_rows, cache_block=16, max_rows=max_rows),
        prompts(),
        sampling,
        seed=1,
        step=2,
    )
    assert_same_samples(expected, moved, atol=2e-5)
    assert expected.finish_reasons == moved.finish_reasons


def test_decoding_stops_when_every_row_is_done(monkeypatch):
    from dcmdp_jax.engines.local import decode

    steps = []
    compiled = decode.decode

    def recorded(*args, **kwargs):
        result = compiled(*args, **kwargs)
        steps.append(int(result[1].steps))
        return result

    monkeypatch.setattr(decode, "decode", recorded)
    sampling = dataclasses.replace(
        SAMPLING, max_completion_tokens=40, stop_token_ids=tuple(range(20))
    )
    rollout = sample(engine(), prompts(), sampling, seed=1, step=2)
    longest = max(ids.size for ids in rollout.completion_ids)
    assert set(rollout.finish_reasons) == {"stop"}
    # The first token comes from the prompt.
    assert steps == [longest - 1] and longest < 40


def test_top_p_renormalizes_inside_the_nucleus():
    sampling = SamplingParams(group_size=50, max_completion_tokens=1, temperature=1.0, top_p=0.6)
    rollout = sample(engine(), [prompts()[2]], sampling, seed=0, step=0)
    probabilities = np.exp(log_softmax(logits_of(QWEN3, params(), [prompts()[2]])[0, 15]))
    order = np.argsort(-probabilities)
    inside = order[: int(np.searchsorted(np.cumsum(probabilities[order]), 0.6)) + 1]
    assert 1 < inside.size < 20
    for ids, logprobs in zip(rollout.completion_ids, rollout.rollout_logprobs, strict=True):
        assert ids[0] in inside
        np.testing.assert_allclose(
            logprobs[0], np.log(probabilities[ids[0]] / probabilities[inside].sum()), atol=1e-4
        )


@pytest.mark.parametrize("precision", ["exact", "bfloat16", "int8", "int4", "fp8"])
def test_every_sync_replaces_and_requantizes_the_weights(precision):
    local = engine(precision=precision)
    before = sample(local, prompts(), SAMPLING, seed=1, step=2)
    prints = local.weights_fingerprint
    local.sync_weights(params(QWEN3, 1), 7)
    after = sample(local, prompts(), SAMPLING, seed=1, step=2)
    fresh = engine(precision=precision, seed=1)
    assert_same_samples(after, sample(fresh, prompts(), SAMPLING, seed=1, step=2), atol=0)
    assert after.policy_version == 7 and before.policy_version == 0
    assert local.weights_fingerprint == fresh.weights_fingerprint != prints
    assert not np.array_equal(before.rollout_logprobs[0], after.rollout_logprobs[0])


@pytest.mark.parametrize("precision", ["exact", "float32", "bfloat16", "int8", "fp8"])
def test_trainer_may_delete_its_buffers_after_a_sync(precision):
    local = engine(precision=precision)
    expected = sample(local, prompts(), SAMPLING, seed=1, step=2)
    donated = jax.tree.map(jnp.copy, params())
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(donated)}
    local.sync_weights(donated, 1)
    assert not pointers & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(local.weights)}
    # Donation writes other numbers into the buffers; then they are freed.
    jax.block_until_ready(
        jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 5, tree), donate_argnums=0)(donated)
    )
    assert_same_samples(expected, sample(local, prompts(), SAMPLING, seed=1, step=2), atol=0)


@pytest.mark.parametrize("precision", ["int8", "int4", "fp8"])
def test_quantized_weights_are_kept_in_a_byte_each(precision):
    local = engine(precision=precision)
    kernels = [
        x
        for x in jax.tree.leaves(local.weights, is_leaf=lambda x: isinstance(x, QuantizedKernel))
        if isinstance(x, QuantizedKernel)
    ]
    assert len(kernels) == 2 * 4 + 1
    assert {kernel.values.dtype.itemsize for kernel in kernels} == {1}


def test_a_copy_that_differs_is_refused(monkeypatch):
    def swapped(self: Conversion, params: Params) -> Params:
        copied = original(self, params)
        # Two rows of W_gate and W_up change places: the plain sum of their values stays.
        kernel = copied["layers"][1]["mlp"]["gate_up"]["kernel"]
        copied["layers"][1]["mlp"]["gate_up"]["kernel"] = kernel[jnp.array([1, 0, *range(2, 32)])]
        return copied

    original = Conversion.weights
    local = engine()
    monkeypatch.setattr(Conversion, "weights", swapped)
    with pytest.raises(EngineError, match="weights of version 3: 2 of 24 checksums differ"):
        local.sync_weights(params(), 3)
    with pytest.raises(EngineError, match="no weights"):
        sample(local, prompts(), SAMPLING, seed=0, step=0)


# Mean |p - p_float32| over the sampled tokens of this model; measured .0013, .0021, .0035, .054,
# .013 and .0061.
MISMATCH = {
    ("bfloat16", "float32", "auto"): (4e-4, 0.004),
    ("exact", "bfloat16", "auto"): (7e-4, 0.006),
    ("int8", "float32", "auto"): (1e-3, 0.010),
    ("int4", "float32", "auto"): (1e-2, 0.100),
    ("fp8", "float32", "auto"): (4e-3, 0.040),
    ("float32", "float32", "fp8"): (2e-3, 0.020),
}


@pytest.mark.parametrize(("precision", "compute", "cache"), list(MISMATCH))
def test_mismatch_of_lower_precisions_is_real_and_bounded(precision, compute, cache):
    local = engine(precision=precision, compute_dtype=compute, kv_cache_dtype=cache)
    rollout = sample(local, prompts(), SamplingParams(8, 30), seed=1, step=2)
    ours = np.concatenate(rollout.rollout_logprobs)
    theirs = np.concatenate(teacher_forced(QWEN3, params(), rollout, 1.0))
    mismatch = np.abs(np.exp(ours) - np.exp(theirs)).mean()
    low, high = MISMATCH[precision, compute, cache]
    assert low < mismatch < high
    # Teacher-forced by the engine itself they agree far better: what it reports is what its weights
    # say.
    floor = np.concatenate(local.score(rollout.prompt_ids, rollout.completion_ids, temperature=1.0))
    noise = np.abs(np.exp(ours) - np.exp(floor)).mean()
    if (compute, cache) == ("float32", "auto"):
        assert noise < 1e-6
    else:
        # bfloat16 products round differently in another batch shape: a floor as high as the
        # mismatch itself.
        assert noise < mismatch * (1 if compute == "bfloat16" else 0.5)


def test_score_is_the_softmax_of_given_tokens():
    local = engine(QWEN2, max_rows=2)
    rollout = sample(local, prompts(), SAMPLING, seed=1, step=2)
    scored = local.score(rollout.prompt_ids, rollout.completion_ids, temperature=0.8)
    for ours, theirs in zip(
        scored, teacher_forced(QWEN2, params(QWEN2), rollout, 0.8), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    # Temperature 0 is scored at 1.
    at_zero, at_one = (
        local.score(rollout.prompt_ids, rollout.completion_ids, temperature=t) for t in (0, 1)
    )
    np.testing.assert_array_equal(at_zero[0], at_one[0])


def test_long_prompts_run_in_parts(monkeypatch):
    from dcmdp_jax.engines.local import sizes

    expected = sample(engine(), prompts(), SAMPLING, seed=1, step=2)
    # Room for the attention of two prompts in the bucket of 16: parts of 2, 2, 1.
    monkeypatch.setattr(sizes, "ATTENTION_ELEMENTS", 2 * 4 * 16 * 16)
    assert_same_samples(expected, sample(engine(), prompts(), SAMPLING, seed=1, step=2), atol=2e-5)


@pytest.mark.skipif(
    jax.device_count() < 2, reason="needs several devices, see XLA_FLAGS in BUILD.md"
)
def test_rows_over_several_devices_sample_the_same():
    mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2), ("data", "fsdp"))
    sampling = dataclasses.replace(SAMPLING, max_completion_tokens=30, stop_token_ids=STOPS)
    expected = sample(engine(), prompts(), sampling, seed=1, step=2)
    two = engine(mesh=mesh, min_rows=2, cache_block=8)
    assert_same_samples(expected, sample(two, prompts(), sampling, seed=1, step=2), atol=2e-5)
    scored = two.score(expected.prompt_ids, expected.completion_ids, temperature=0.8)
    np.testing.assert_allclose(
        np.concatenate(scored), np.concatenate(expected.rollout_logprobs), rtol=0, atol=2e-5
    )


@pytest.mark.skipif(
    jax.device_count() < 2, reason="needs several devices, see XLA_FLAGS in BUILD.md"
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="devices that the CPU was made into")
@pytest.mark.parametrize("precision", ["exact", "bfloat16", "int8", "fp8"])
def test_cpu_devices_share_the_weights(precision):
    local = engine(precision=precision, mesh=Mesh(np.asarray(jax.devices()[:2]), ("rows",)))
    for leaf in jax.tree.leaves(local.weights):
        shards = [shard.data for shard in leaf.addressable_shards]
        assert [shard.shape for shard in shards] == [leaf.shape] * 2
        assert len({shard.unsafe_buffer_pointer() for shard in shards}) == 1


def test_logprobs_that_are_not_finite_name_completion_and_token():
    broken = dict(params())
    # Token 3 poisons everything that has seen it; the third prompt starts with it.
    broken["embedding"] = broken["embedding"].at[3].set(jnp.nan)
    broken["output"] = params()["embedding"].T
    local = local_engine(
        dataclasses.replace(QWEN3, tie_word_embeddings=False),
        precision="float32",
        max_total_tokens=64,
    )
    local.sync_weights(broken, 0)
    clean = np.array([1, 2], np.int32)
    sampling = SamplingParams(group_size=2, max_completion_tokens=1)
    sample(local, [clean], sampling, seed=0, step=0)
    rollout = sample(local, [clean, clean, np.array([3, 1], np.int32)], sampling, seed=0, step=0)
    assert unusable_completions(rollout.episodes, drop=True).tolist() == [False] * 4 + [True] * 2
    with pytest.raises(
        EngineError, match=r"log-prob of token 0 \(id \d+\) of completion 4 is nan; .*`drop`"
    ):
        unusable_completions(rollout.episodes, drop=False)
    poisoned = sample(local, [np.array([3, 1], np.int32)], sampling, seed=0, step=0)
    with pytest.raises(EngineError, match="no completion has usable log-probs"):
        unusable_completions(poisoned.episodes, drop=True)
    with pytest.raises(EngineError, match=r"completion 1: the log-prob of token \d is nan"):
        local.score([clean, clean], [np.array([1, 1, 1]), np.array([1, 3, 1])], temperature=1.0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "prompts: got none"),
        ([np.array([], np.int32)], r"prompt 0: shape \(0,\), must be a non-empty vector"),
        ([np.array([1]), np.array([[1, 2]])], r"prompt 1: shape \(1, 2\)"),
        ([np.array([1, 40])], "prompt 0: token id 40 is outside 0 .. 39"),
        ([np.array([-1])], "prompt 0: token id -1 is outside 0 .. 39"),
        ([np.array([1.0])], "prompt 0: dtype float64, token ids must be integers"),
        (
            [np.zeros(56, int)],
            "prompt 0: 56 tokens and max_completion_tokens=9 exceed max_total_tokens=64",
        ),
    ],
)
def test_bad_prompts_are_named(bad, message):
    with pytest.raises(ValueError, match=message):
        engine().generate(bad, SAMPLING, seed=0, step=0)


def test_a_context_longer_than_the_models_is_named():
    with pytest.raises(
        ValueError, match="max_total_tokens: got 40000, must be between 2 and .*32768"
    ):
        ENGINE.check(
            EngineArguments(model=QWEN3, max_total_tokens=40_000, settings=ENGINE.settings())
        )


def test_engine_without_weights_refuses():
    local = local_engine(QWEN3, max_total_tokens=64)
    for call in (
        lambda: sample(local, prompts(), SAMPLING, seed=0, step=0),
        lambda: local.score([np.array([1])], [np.array([2])], temperature=1.0),
    ):
        with pytest.raises(EngineError, match="no weights: sync_weights must come before"):
            call()
        local.sync_weights(params(), 0)
        local.close()
        local.close()


def test_wrong_parameters_are_named():
    local = local_engine(QWEN3, max_total_tokens=64)
    with pytest.raises(
        ValueError,
        match=r"params: layers.attention.k.bias has shape \(2, 16\), the model has no such",
    ):
        local.sync_weights(params(QWEN2), 0)
    missing = {name: leaf for name, leaf in params().items() if name != "norm"}
    with pytest.raises(
        ValueError, match=r"params: norm.scale has shape missing, the model has \(32,\)"
    ):
        local.sync_weights(missing, 0)


def test_bad_arguments_are_named():
    local = engine()
    rows = [np.array([1])]
    with pytest.raises(ValueError, match="seed: got -1, must be in 0 .. 2"):
        sample(local, rows, SAMPLING, seed=-1, step=0)
    with pytest.raises(ValueError, match="step: got 4294967296, must be in 0 .. 2"):
        sample(local, rows, SAMPLING, seed=0, step=2**32)
    with pytest.raises(ValueError, match="score: got 1 prompts and 2 completions"):
        local.score(rows, rows * 2, temperature=1.0)
    with pytest.raises(ValueError, match="temperature: got -1"):
        local.score(rows, rows, temperature=-1)
    with pytest.raises(
        ValueError, match="prompt and completion 0: 65 tokens exceed max_total_tokens=64"
    ):
        local.score([np.zeros(60, int)], [np.zeros(5, int)], temperature=1.0)
