"""Two data-parallel sidecars: together they are one engine, and one that is killed changes
nothing.
"""

import os
import signal

import numpy as np
import pytest

from dcmdp_jax.engines.protocol import SamplingParams
from tests.support.sampling import assert_same_samples, sample
from tests.support.vllm_tools import STOP, memory_files, pid_of, prompts, random_params, small_model

pytestmark = pytest.mark.long
SAMPLED = SamplingParams(group_size=2, max_completion_tokens=40, stop_token_ids=(STOP,))


@pytest.fixture(scope="module")
def two(start):
    config = small_model()
    engine = start(config, replicas=2)
    engine.sync_weights(random_params(config, 7), 7)
    return engine


def test_two_replicas_are_one_engine_to_rounding(two, monkeypatch):
    """Same tokens in float32, log-probs and scores to rounding, for a number of prompts that two
    does not divide.
    """
    for count in (1, 7):
        asked = prompts(count, two.config)
        found = []
        for replicas in (two.replicas, two.replicas[:1]):
            monkeypatch.setattr(two, "replicas", replicas)
            rollout = sample(two, asked, SAMPLED, seed=3, step=4)
            scored = two.score(rollout.prompt_ids, rollout.completion_ids, temperature=1.0)
            monkeypatch.undo()
            assert rollout.policy_version == 7
            found.append((rollout, scored))
        (both, scored_by_both), (alone, scored_alone) = found
        assert both.finish_reasons == alone.finish_reasons
        for a, b in zip(both.completion_ids, alone.completion_ids, strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(
            both.rollout_logprobs + scored_by_both,
            alone.rollout_logprobs + scored_alone,
            strict=True,
        ):
            np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)


def test_each_replica_takes_the_weights_from_one_copy(two):
    """Two segments in the trainer, however many replicas; and each replica says the version it has
    loaded.
    """
    descriptors = [entry.split()[0] for entry in memory_files()]
    assert len({os.stat(f"/proc/self/fd/{descriptor}").st_ino for descriptor in descriptors}) == 2
    probe = two.sync_weights(random_params(two.config, 8), 8)["mismatch/probe"]
    assert 0 < probe < 1e-3
    health = [
        replica.supervisor.sidecar.request("health", answer="healthy").header["policy_version"]
        for replica in two.replicas
    ]
    assert health == [8, 8]
    two.sync_weights(random_params(two.config, 7), 7)


@pytest.mark.parametrize("when", ["sampling", "loading"])
def test_a_killed_replica_is_restarted_alone_and_repeats_itself(two, when):
    """The other one goes on meanwhile; both end with the bits of an undisturbed call."""
    asked = prompts(400, two.config)
    before = sample(two, asked, SAMPLED, seed=1, step=1)
    pids = [pid_of(two, replica) for replica in (0, 1)]
    fresh: list[int] = []

    def kill(complete):
        """At the first list, with both replicas in the middle of their parts; then count what comes
        meanwhile.
        """
        if pid_of(two, 1) == pids[1]:
            os.kill(pids[1], signal.SIGKILL)
        elif pid_of(two, 1) is None:
            fresh.extend(episode.group for episode in complete)

    if when == "loading":
        os.kill(pids[1], signal.SIGKILL)
        two.sync_weights(random_params(two.config, 7), 7)
    after = sample(
        two,
        asked,
        SAMPLED,
        seed=1,
        step=1,
        on_pull=kill if when == "sampling" else lambda complete: None,
    )
    assert_same_samples(before, after)
    assert pid_of(two, 0) == pids[0]
    assert pid_of(two, 1) not in (None, pids[1])
    if when == "sampling":
        # Even prompts are replica 0's: they came while replica 1 was started again.
        assert fresh and not any(group % 2 for group in fresh)


def test_a_call_that_is_given_up_ends_in_both(two):
    asked = prompts(300, two.config)
    before = sample(two, asked, SAMPLED, seed=1, step=1)
    groups = two.generate(asked, SAMPLED, seed=1, step=1)
    next(groups)
    groups.close()
    for replica in two.replicas:
        assert replica.supervisor.sidecar.request("health", answer="healthy").header["running"] == 0
    assert_same_samples(before, sample(two, asked, SAMPLED, seed=1, step=1))
