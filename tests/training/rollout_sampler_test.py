"""The order of a step's prompts, and dynamic sampling with known rewards."""

import numpy as np
import pytest

from dcmdp_jax.data import mixtures
from dcmdp_jax.data.mixtures import prompt_order
from dcmdp_jax.engines.noise_floor import noise_floor
from dcmdp_jax.parallel.hosts import ONE_PROCESS
from dcmdp_jax.rewards.scoring import BatchScores
from dcmdp_jax.training import rollout_sampler
from dcmdp_jax.training.exit import CollectiveExit, StopSignal
from dcmdp_jax.training.phase_timer import PhaseTimer
from dcmdp_jax.training.rollout_record import rollout_metrics
from dcmdp_jax.training.rollout_sampler import StepRollout, StepRollouts
from tests.support.small_task import EchoEngine, ParityScoring, small_services, small_task


def test_prompt_order_covers_each_epoch_once_and_depends_on_position_alone():
    whole = prompt_order(10, seed=3, first=0, count=40)
    for epoch in range(4):
        assert sorted(whole[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert not np.array_equal(whole[:10], whole[10:20])
    np.testing.assert_array_equal(prompt_order(10, seed=3, first=7, count=9), whole[7:16])
    assert not np.array_equal(prompt_order(10, seed=4, first=0, count=40), whole)


def _sample(monkeypatch, *, problems, wanted, rounds, first=0):
    monkeypatch.setattr(rollout_sampler, "BatchScoring", ParityScoring)
    task = small_task(
        problems,
        training={"prompts_per_step": wanted, "seed": 5},
        algorithm={"refill_rounds": rounds},
    )
    leave = CollectiveExit(ONE_PROCESS, StopSignal(), lambda: 0)
    rollouts = StepRollouts(small_services(engine := EchoEngine()), task, ONE_PROCESS, leave)
    return rollouts.sample(7, first, PhaseTimer()), engine.calls


def _refill_metrics(rollout):
    return rollout_metrics(rollout, np.zeros(len(rollout.rows)), refills=True)


def test_without_rounds_the_batch_is_the_next_problems(monkeypatch):
    rollout, calls = _sample(monkeypatch, problems=20, wanted=6, rounds=0, first=12)
    order = prompt_order(20, seed=5, first=12, count=6)
    np.testing.assert_array_equal(rollout.problems, order)
    np.testing.assert_array_equal(rollout.rows, np.arange(12))
    assert calls == [(6, 5, 7)]
    assert [int(episode.token_ids[0]) for episode in rollout.episodes] == np.repeat(
        order, 2
    ).tolist()
    np.testing.assert_array_equal(rollout.differing, order % 2 == 0)


def test_rounds_replace_equal_groups_by_the_next_problems_of_the_stream(monkeypatch):
    rollout, calls = _sample(monkeypatch, problems=40, wanted=6, rounds=9, first=3)
    stream = prompt_order(40, seed=5, first=3, count=40)
    np.testing.assert_array_equal(rollout.problems, stream[: len(rollout.problems)])
    # The first six even problems of the stream, in its order.
    np.testing.assert_array_equal(rollout.problems[rollout.groups], stream[stream % 2 == 0][:6])
    assert [int(rollout.episodes[row].token_ids[0]) for row in rollout.rows[::2]] == stream[
        stream % 2 == 0
    ][:6].tolist()
    assert [episode.group for episode in rollout.episodes[::2]] == list(
        range(len(rollout.problems))
    )
    np.testing.assert_array_equal(rollout.scores.totals[rollout.rows], [0, 1] * 6)
    # Powers of two, or the whole batch; a round draws from a seed of its own.
    assert all(count in (1, 2, 4, 6) for count, _, _ in calls) and calls[0] == (6, 5, 7)
    assert len({seed for _, seed, _ in calls}) == len(calls) == rollout.rounds > 1
    assert sum(count for count, _, _ in calls) == len(rollout.problems)
    metrics = _refill_metrics(rollout)
    odd = np.mean(rollout.problems % 2)
    assert metrics["reward/all_equal_groups"] == pytest.approx(odd)
    # Half of an even problem's completions are right, all of an odd one's.
    assert metrics["reward/mean"] == pytest.approx(0.5 + 0.5 * odd)
    assert (
        metrics["rollout/sampled_prompts"] == len(rollout.problems)
        and metrics["rollout/unfilled_groups"] == 0
    )
    assert metrics["rollout/refill_rounds"] == len(calls) - 1


def test_what_no_round_could_fill_stays_in_the_batch_and_is_counted(monkeypatch):
    # One problem, an odd one after `1 +`: no group ever differs.
    monkeypatch.setattr(mixtures, "prompt_order", lambda *_, count, **__: np.ones(count, int))
    rollout, calls = _sample(monkeypatch, problems=2, wanted=4, rounds=3)
    assert [count for count, _, _ in calls] == [4, 4, 4, 4]
    np.testing.assert_array_equal(rollout.groups, range(4))
    assert _refill_metrics(rollout)["rollout/unfilled_groups"] == 4


def test_a_group_differs_by_its_usable_completions_alone():
    rewards = np.array([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    usable = np.array([[True, True], [True, False], [True, True], [False, False]])
    scores = BatchScores(totals=rewards.reshape(-1), values={}, failed={}, grades=None)
    rollout = StepRollout(
        np.arange(4), [], [""] * 8, scores, ~usable.reshape(-1), batch_groups=2, prompts_taken=4
    )
    assert rollout.differing.tolist() == [
        True,
        False,
        False,
        False,
    ] and rollout.groups.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("scored", "alone", "log_ratio"), [(0.2, 0.0, 0.2), (0.0, 0.3, 0.3), (0.2, 0.3, 0.3)]
)
def test_the_noise_floor_is_the_larger_mean_of_one_pass_and_of_sampling_alone(
    scored, alone, log_ratio
):
    """|p - q| of log-probs 0 and -0.1 that come again lower by `log_ratio`.

    (1 + e^-0.1) / 2 (1 - e^-log_ratio).
    """
    task = small_task(training={"seed": 5})
    engine = EchoEngine(scored=scored, alone=alone)
    episodes = [
        episode
        for group in engine.generate(task.train.token_ids[:3], task.sampling, seed=5, step=0)
        for episode in group
    ]

    def distance(log_p, log_q):
        return np.abs(np.exp(log_p) - np.exp(log_q)).mean()

    measured, again = noise_floor(
        engine, episodes, task.sampling, distance, seed=5, step=0, first=4
    )
    assert measured == pytest.approx((1 + np.exp(-0.1)) / 2 * (1 - np.exp(-log_ratio)), rel=1e-5)
    # Numbered among the completions of all hosts; four of them were sampled alone, one prompt each.
    assert list(again) == list(range(4, 10)) and engine.calls[1:] == [(1, 5, 0)] * 4
    assert noise_floor(engine, episodes, task.sampling, distance, seed=5, step=1) == (None, {})
