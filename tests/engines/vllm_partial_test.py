"""New weights in the middle of completions: which version sampled each token, and with what cache."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.protocol import SamplingParams
from tests.engines.vllm_tools import STOP, TOTAL, pid_of, prompts, random_params, small_model
from tests.waiting import wait_until

LONG = SamplingParams(group_size=8, max_completion_tokens=48, stop_token_ids=(STOP,))
MOST = 200


@pytest.fixture(scope="module")
def engine(start):
    return start(small_model(), partial=True)


def _sampled_while_weights_come(engine, seed, between=lambda version, call: None):
    """Episodes of one call, and the parameters of each version that was published during it."""
    asked = prompts(8, engine.config)
    published = {0: random_params(engine.config, 0)}
    engine.push_weights(published[0], 0)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: collect(engine.generate(asked, LONG, seed=seed, step=0)))
        while not call.done() and len(published) < MOST:
            version = len(published)
            published[version] = random_params(engine.config, version)
            measured = engine.publish_weights(published[version], version)
            assert measured.get("mismatch/probe", 0.0) < 1e-4
            between(version, call)
        return call.result(), published


def _check(episodes, published, config):
    """float32 vLLM gives each token what the embedded engine gives it under the version that it names.

    The prefix is the completion's own, sampled by several versions: a cache of older weights would show, since two
    random policies differ by nats.
    """
    several = 0
    assert [(e.group, e.member) for e in episodes] == [(g, m) for g in range(8) for m in range(8)]
    exact = LocalEngine(config, precision="exact", max_total_tokens=TOTAL)
    used = sorted({int(v) for e in episodes for v in e.policy_versions[e.sampled_mask]})
    scores = {}
    for version in used:
        exact.push_weights(published[version], version)
        scores[version] = exact.score(
            [e.prompt_ids for e in episodes], [e.completion_ids for e in episodes], temperature=1.0
        )
    for row, episode in enumerate(episodes):
        sampled = episode.sampled_mask
        versions, logprobs = episode.policy_versions[sampled], episode.rollout_logprobs[sampled]
        assert (np.diff(versions) >= 0).all()
        expected = np.array([scores[version][row][t] for t, version in enumerate(versions.tolist())])
        np.testing.assert_allclose(logprobs, expected, atol=1e-4, rtol=0)
        several += len(set(versions.tolist())) > 1
        ended = episode.completion_ids[-1] == STOP
        assert episode.finish_reason == ("stop" if ended else "length")
        assert ended or len(episode.completion_ids) == LONG.max_completion_tokens
        assert STOP not in episode.completion_ids[:-1]
    return several, used


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.long)])
def test_each_token_has_the_logprob_of_the_version_that_it_names(engine, start, replicas):
    several, used = 0, set()
    engine = engine if replicas == 1 else start(engine.config, partial=True, replicas=replicas)
    for seed in range(5):
        episodes, published = _sampled_while_weights_come(engine, seed)
        found, versions = _check(episodes, published, engine.config)
        several, used = several + found, used | set(versions)
        if several > 10 and len(used) > 2:
            return
    pytest.fail(f"{several} completions of several versions, of {sorted(used)}")


def test_a_sidecar_that_is_killed_goes_on_with_the_newest_weights(engine):
    killed = []

    def kill_once(version, call):
        if version == 2 and not killed and (pid := pid_of(engine)):
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: pid_of(engine) not in (None, pid) or call.done(), "another sidecar")

    for seed in range(5, 15):
        episodes, published = _sampled_while_weights_come(engine, seed, kill_once)
        _check(episodes, published, engine.config)
        if killed:
            return
    pytest.fail("no call was long enough to be killed in")


def test_without_new_weights_it_samples_as_the_others_do(engine, start):
    """A request with limits of each row and outputs in pieces gives the bits of one without."""
    plain = start(engine.config)
    params = random_params(engine.config, 3)
    asked = prompts(8, engine.config)
    answers = []
    for each in (engine, plain):
        each.push_weights(params, 3)
        answers.append(collect(each.generate(asked[:4], LONG, seed=1, step=2)))
    for mine, theirs in zip(*answers, strict=True):
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(mine.rollout_logprobs, theirs.rollout_logprobs)
        assert (mine.finish_reason, mine.policy_versions.tolist()) == (
            theirs.finish_reason, theirs.policy_versions.tolist()
        )  # fmt: skip
