"""The client over real vLLM: whose weights it has, whose log-probs it reports, and what it
refuses.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.protocol import EngineError, SamplingParams, check_top_logprobs
from dcmdp_jax.models.hf_weights import save_params
from tests.support.sampling import assert_same_samples, local_engine, sample
from tests.support.vllm_tools import (
    STOP,
    TOTAL,
    assert_same_bits,
    fresh_answers,
    prompts,
    random_params,
    small_model,
)

FAULTY = Path(__file__).with_name("faulty_sidecar.py")
PUSHES = 20
LISTED = 30
SAMPLED = SamplingParams(group_size=2, max_completion_tokens=24, stop_token_ids=(STOP,))
SEEDED = SamplingParams(1, 24, stop_token_ids=(STOP,))
GREEDY = SamplingParams(
    group_size=1, max_completion_tokens=24, temperature=0.0, stop_token_ids=(STOP,)
)


@pytest.fixture(scope="module")
def engine(start):
    """Qwen3, tied, float32, with weights of version 7; it lists more top-k tokens than vLLM
    does by itself.
    """
    config = small_model()
    made = start(config, top_logprobs=LISTED)
    made.sync_weights(random_params(config, 7), 7)
    return made


@pytest.fixture(scope="module")
def embedded():
    """The embedded engine, exact, with the same weights."""
    config = small_model()
    made = local_engine(config, precision="exact", max_total_tokens=TOTAL)
    made.sync_weights(random_params(config, 7), 7)
    return made


_EACH = tuple(range(PUSHES))


@pytest.mark.parametrize(
    ("family", "tied", "precision", "compared"),
    [
        ("qwen3", True, "float32", (19,)),
        pytest.param("qwen3", True, "bfloat16", (19,), marks=pytest.mark.long),
        pytest.param("qwen3", False, "bfloat16", (0, 19), marks=pytest.mark.long),
        pytest.param("qwen2", True, "float32", (19,), marks=pytest.mark.long),
        pytest.param("qwen3", True, "bfloat16", _EACH, marks=pytest.mark.long),
        pytest.param("qwen2", True, "bfloat16", _EACH, marks=pytest.mark.long),
    ],
    ids=lambda value: f"{len(value)}_fresh_engines" if isinstance(value, tuple) else None,
)
def test_a_live_engine_is_a_fresh_one_after_each_sync(
    start, engine, tmp_path, record_property, family, tied, precision, compared
):
    """Tokens and log-probs, greedy and seeded, bit for bit: stale, swapped or half-loaded weights
    would show.

    Twenty weight syncs of twenty policies, and all of them again in another order with the same
    results; some of them, or each, compared with stock vLLM that loaded an exported checkpoint
    itself (each of those takes seconds).
    """
    config = small_model(family, tied=tied)
    live = (
        engine
        if (config, precision) == (engine.config, "float32")
        else start(config, precision=precision)
    )
    asked = prompts(6, config)
    policies = [random_params(config, version) for version in range(PUSHES)]

    def answers(version):
        live.sync_weights(policies[version], version)
        return [sample(live, asked, sampling, seed=5, step=0) for sampling in (GREEDY, SEEDED)]

    ours = [answers(version) for version in range(PUSHES)]
    for version in np.random.default_rng(0).permutation(PUSHES):
        for first, again in zip(ours[version], answers(version), strict=True):
            assert_same_samples(first, again)
    # The weights matter: no two neighbors agree on the greedy completions.
    for (first, _), (second, _) in zip(ours[:-1], ours[1:], strict=True):
        assert not all(map(np.array_equal, first.completion_ids, second.completion_ids))
    directories = []
    for version in compared:
        directories.append(tmp_path / str(version))
        # The sidecar leaves room for the token that scoring samples; so must the checkpoint's
        # config.json.
        wide = dataclasses.replace(config, max_position_embeddings=TOTAL + 1)
        save_params(policies[version], wide, directories[-1], dtype=precision)
    fresh = fresh_answers(
        tmp_path, directories, asked, (GREEDY, SEEDED), seed=5, llm={"dtype": precision}
    )
    assert_same_bits([ours[version] for version in compared], fresh)
    engine.sync_weights(random_params(engine.config, 7), 7)
    record_property("weight syncs", PUSHES)
    record_property("fresh_engines", len(fresh))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_float32_logprobs_are_those_of_the_embedded_engine(engine, embedded, temperature):
    """At the sampling temperature, over the full vocabulary; raw ones would be off by up to a nat
    at 0.7.
    """
    sampling = SamplingParams(4, 32, temperature, stop_token_ids=(STOP,))
    rollout = sample(engine, prompts(8, engine.config), sampling, seed=1, step=2)
    exact = embedded.score(rollout.prompt_ids, rollout.completion_ids, temperature=temperature)
    scored = engine.score(rollout.prompt_ids, rollout.completion_ids, temperature=temperature)
    for mine, theirs, again in zip(rollout.rollout_logprobs, exact, scored, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-4, rtol=0)
        np.testing.assert_allclose(again, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.5, 0), (0.8, 6)])
def test_the_top_k_tokens_are_those_of_the_embedded_engine(engine, top_p, top_k):
    """The lists are processed as the draw is: at its temperature, and of a nucleus those tokens
    alone.
    """
    embedded = local_engine(
        small_model(), precision="exact", max_total_tokens=TOTAL, top_logprobs=LISTED
    )
    embedded.sync_weights(random_params(small_model(), 7), 7)
    sampling = SamplingParams(4, 16, 0.7, top_p, top_k, stop_token_ids=(STOP,))
    asked = prompts(4, engine.config)
    mine, theirs = (
        collect(one.generate(asked, sampling, seed=1, step=2)) for one in (engine, embedded)
    )
    check_top_logprobs(mine, LISTED, engine.config.vocab_size, complete=sampling.cuts)
    outside = 0
    for a, b in zip(mine, theirs, strict=True):
        first = a.prompt_length  # the same state in both, whatever was sampled there
        lists = [
            (one.columns["top_ids"][first], one.columns["top_logprobs"][first]) for one in (a, b)
        ]
        np.testing.assert_allclose(*(values for _, values in lists), atol=1e-4, rtol=0)
        np.testing.assert_array_equal(*(np.sort(ids) for ids, _ in lists))
        ids = a.columns["top_ids"][a.sampled_mask]
        outside += int((ids != a.completion_ids[:, None]).all(axis=1).sum())
        assert (ids == -1).any() == (top_p < 1)
    assert outside > 0 or top_p < 1  # a sampled token that the list does not hold


def test_greedy_takes_the_top_k_token_and_reports_temperature_one(engine, embedded):
    rollout = sample(engine, prompts(6, engine.config), GREEDY, seed=0, step=0)
    theirs = sample(embedded, prompts(6, engine.config), GREEDY, seed=0, step=0)
    for a, b in zip(rollout.completion_ids, theirs.completion_ids, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(rollout.rollout_logprobs, theirs.rollout_logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=0)


def test_a_rollout_says_what_it_is(engine):
    asked = prompts(5, engine.config)
    rollout = sample(engine, asked, SAMPLED, seed=3, step=4)
    assert rollout.policy_version == 7
    assert rollout.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for index, tokens in enumerate(rollout.completion_ids):
        np.testing.assert_array_equal(rollout.prompt_ids[index], asked[index // 2])
        stopped = tokens[-1] == STOP
        assert rollout.finish_reasons[index] == ("stop" if stopped else "length")
        assert stopped or len(tokens) == 24
        assert STOP not in tokens[:-1]
        assert len(rollout.rollout_logprobs[index]) == len(tokens)
    assert {"stop", "length"} == set(rollout.finish_reasons)


def test_sampling_is_a_function_of_seed_step_and_row(engine):
    """Earlier calls, and more prompts behind, change nothing; another seed or step changes it."""
    asked = prompts(6, engine.config)
    first = sample(engine, asked, SAMPLED, seed=3, step=4)
    sample(engine, asked[:2], GREEDY, seed=9, step=9)
    assert_same_samples(first, sample(engine, asked, SAMPLED, seed=3, step=4))
    fewer = sample(engine, asked[:4], SAMPLED, seed=3, step=4)
    for a, b in zip(fewer.completion_ids, first.completion_ids, strict=False):
        np.testing.assert_array_equal(a, b)
    for seed, step in ((4, 4), (3, 5)):
        other = sample(engine, asked, SAMPLED, seed=seed, step=step)
        assert any(
            not np.array_equal(a, b)
            for a, b in zip(first.completion_ids, other.completion_ids, strict=True)
        )


def test_more_rows_than_fit_wait_their_turn(engine):
    """1,000 requests through 64 places: none is lost or changed, and groups come before the others
    end.
    """
    asked = prompts(500, engine.config)
    rollout = sample(engine, asked, SAMPLED, seed=1, step=1)
    assert sum(map(bool, rollout.pulled)) > 1
    assert len(rollout.completion_ids) == 1000
    few = sample(engine, asked[:3], SAMPLED, seed=1, step=1)
    for a, b in zip(few.completion_ids, rollout.completion_ids, strict=False):
        np.testing.assert_array_equal(a, b)


def test_bad_input_is_refused_and_harms_nobody(engine):
    """A prompt too long in the middle of a batch: the error names it, and the next call is what it
    was before.
    """
    asked = prompts(4, engine.config)
    before = sample(engine, asked, SAMPLED, seed=1, step=1)
    long = np.ones(TOTAL - 10, np.int32)
    with pytest.raises(
        ValueError, match=r"prompt 2: 54 tokens and max_completion_tokens=24 exceed .*=64"
    ):
        sample(engine, [*asked[:2], long, *asked[2:]], SAMPLED, seed=1, step=1)
    with pytest.raises(ValueError, match="prompt 0: token id 64 is outside 0 .. 63"):
        sample(engine, [np.array([64], np.int32)], SAMPLED, seed=1, step=1)
    with pytest.raises(ValueError, match="prompt 1: shape"):
        sample(engine, [asked[0], np.empty(0, np.int32)], SAMPLED, seed=1, step=1)
    with pytest.raises(ValueError, match="temperature: got 0.001"):
        sample(engine, asked, SamplingParams(1, 4, temperature=0.001), seed=1, step=1)
    with pytest.raises(ValueError, match="seed: got -1"):
        sample(engine, asked, SAMPLED, seed=-1, step=1)
    with pytest.raises(ValueError, match="3 prompts and 1 completions"):
        engine.score(asked[:3], asked[:1], temperature=1.0)
    assert_same_samples(before, sample(engine, asked, SAMPLED, seed=1, step=1))


def test_what_vllm_itself_refuses_leaves_no_request_behind(engine):
    """Past the client's own checks: the sidecar drops what it had queued, and goes on."""
    asked = prompts(4, engine.config)
    before = sample(engine, asked, SAMPLED, seed=1, step=1)
    sidecar = engine.replicas[0].supervisor.sidecar
    bad = {
        "prompt_ids": np.ones(TOTAL + 9, np.int32),
        "prompt_lengths": np.array([4, TOTAL + 5], np.int32),
    }
    sampling = {"temperature": 1.0, "max_tokens": 4, "top_p": 1.0, "stop_token_ids": []}
    header = {"sampling": sampling, "sleep_level": 0, "top_logprobs": 0}
    arrays = {
        **bad,
        "prompt_of_row": np.array([0, 1, 0], np.int32),
        "seeds": np.arange(3, dtype=np.int64),
    }
    with pytest.raises(ValueError, match="request 1: .*"):
        sidecar.request("generate", header, arrays, answer="generated")
    health = sidecar.request("health", answer="healthy").header
    assert (health["running"], health["policy_version"]) == (0, 7)
    assert_same_samples(before, sample(engine, asked, SAMPLED, seed=1, step=1))


def test_no_weights_no_completions(start):
    fresh = start(small_model(), probe=False, script=FAULTY, engine_args='{"fault": "none"}')
    with pytest.raises(EngineError, match="no weights"):
        sample(fresh, prompts(1, fresh.config), SAMPLED, seed=0, step=0)
    with pytest.raises(ValueError, match="params: embedding has shape"):
        fresh.sync_weights(random_params(small_model(vocab_size=48), 0), 0)
