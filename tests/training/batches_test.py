"""The order in which batches are sampled, and how a sampling thread's failure ends the run.

Also what is kept for batches in flight.
"""

import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from dcmdp_jax.data.episode import single_turn
from dcmdp_jax.data.mixtures import prompt_order
from dcmdp_jax.engines.protocol import check_versions
from dcmdp_jax.errors import EngineError
from dcmdp_jax.parallel.hosts import ONE_PROCESS, Hosts
from dcmdp_jax.training import batches as module
from dcmdp_jax.training import rollout_sampler
from dcmdp_jax.training.batches import Batches
from dcmdp_jax.training.exit import CollectiveExit, StopSignal
from dcmdp_jax.training.phase_timer import PhaseTimer
from tests.support.small_task import (
    EchoEngine,
    ParityScoring,
    small_placement,
    small_services,
    small_session,
    small_task,
)

_FLOOR = "mismatch/noise_floor"


class _Engine:
    """Remembers the weights that it holds."""

    version = -1

    def sync_weights(self, params, version):
        self.version = version
        return {}

    def release_weights(self):
        pass


class _Sampler:
    """Takes `step + 1` prompts for the batch of a step, and notes (step, weights, position)."""

    def __init__(self, services, task, hosts, leave, *, collective=True):
        self.engine = services.engine
        self.exit = leave
        self.collective = collective
        self.made = []

    def sample(self, step, first, timer):
        for name in ("generate", "verify"):
            with timer.phase(name):
                self.exit.check()
        self.made.append((step, self.engine.version, first))
        return SimpleNamespace(prompts_taken=step + 1, episodes=[], batch_groups=4)

    def exchange(self, share):
        return share


def _batches(monkeypatch, *, lag, beside, steps=5, taken=100, hosts=ONE_PROCESS, sampler=_Sampler):
    """Each batch has a noise floor of 0.25.

    The number of its first completion is added to `batches.first`.
    """

    def noise_floor(*_, **numbers):
        first.append(numbers["first"])
        return 0.25, {}

    first = []
    monkeypatch.setattr(module, "StepRollouts", sampler)
    monkeypatch.setattr(module, "noise_floor", noise_floor)
    packed = SimpleNamespace(on_devices="batch", on_host=SimpleNamespace(rows=()))
    monkeypatch.setattr(Batches, "_pack", lambda self, rollout, step: (packed, {}))
    task = small_task(group=8, rollout={"lag": lag}, training={"steps": steps})
    placement = small_placement(hosts=hosts, samples_while_training=beside)
    programs = SimpleNamespace(
        setup=SimpleNamespace(policy=lambda params, _: params),
        sync=SimpleNamespace(merged=lambda params, _: (params, {})),
        shardings=SimpleNamespace(params={"a": SingleDeviceSharding(jax.devices()[0])}),
        rescore=None,
        old_logprobs=lambda params, batch: float(params["a"][0]),
    )
    leave = CollectiveExit(hosts, StopSignal(), lambda: 0)
    session = small_session(task, placement, programs, leave)
    batches = Batches(session, small_services(_Engine()))
    batches.resume(0, prompts_taken=taken)
    batches.first = first
    return batches


def _params(version):
    return {"a": jnp.full(3, float(version))}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 2, 7])
def test_each_version_samples_its_batches_and_each_begins_where_the_one_before_ends(
    monkeypatch, lag, beside
):
    """However long each part takes, step n trains on version max(0, n - lag).

    Batch n takes n + 1 prompts.
    """
    batches = _batches(monkeypatch, lag=lag, beside=beside)
    scored = []
    for step in range(5):
        batches.sync_weights(_params(step), step, timer := PhaseTimer())
        made = batches.make(SimpleNamespace(params=_params(step)), step, timer)
        scored.append(made.batch)
        assert made.metrics.get(_FLOOR) == (None if step else 0.25)
    batches.close()
    versions = [max(0, step - lag) for step in range(5)]
    assert batches._rollouts.made == list(
        zip(range(5), versions, (100, 101, 103, 106, 110), strict=True)
    )
    assert scored == ([float(version) for version in versions] if lag else ["batch"] * 5)


@pytest.mark.parametrize(("step", "versions"), [(0, []), (1, [0]), (3, [1, 2]), (9, [7, 8])])
def test_what_a_resumed_run_samples_again_is_what_was_in_flight(monkeypatch, step, versions):
    """What is in flight with lag 2, of 9 steps.

    After 3 of them batches 3 and 4, of versions 1 and 2; after 1 batches 1 and 2, both of 0.
    """
    batches = _batches(monkeypatch, lag=2, beside=False, steps=9)
    batches.resume(step, versions={version: _params(version) for version in versions})
    assert list(batches.behind(step)) == versions
    expected = {0: [], 1: [(1, 0), (2, 0)], 3: [(3, 1), (4, 2)], 9: []}[step]
    assert [(each, version) for each, version, _ in batches._rollouts.made] == expected


def test_parameters_that_batches_in_flight_need_outlive_the_step_that_takes_their_memory(
    monkeypatch,
):
    batches = _batches(monkeypatch, lag=1, beside=False)
    for step in range(3):
        batches.sync_weights(params := _params(step), step, timer := PhaseTimer())
        batches.make(SimpleNamespace(params=params), step, timer)
        params["a"].delete()
    assert {version: kept["a"].tolist() for version, kept in batches.behind(3).items()} == {
        2: [2.0] * 3
    }
    with pytest.raises(KeyError):
        batches.behind(2)


def test_a_failure_ends_the_later_batches_and_is_the_one_that_is_raised(monkeypatch):
    go_on = threading.Event()

    class Failing(_Sampler):
        def sample(self, step, first, timer):
            go_on.wait()
            self.exit.check()
            self.made.append(step)
            raise EngineError(f"batch {step}")

    batches = _batches(monkeypatch, lag=2, beside=True, sampler=Failing)
    batches.sync_weights(_params(0), 0, timer := PhaseTimer())
    threading.Timer(0.05, go_on.set).start()
    with pytest.raises(EngineError, match="batch 0"):
        batches.make(SimpleNamespace(params=_params(0)), 0, timer)
    batches.close()
    assert batches._rollouts.made == [0]


class _SecondOfTwo(Hosts):
    """This host is the second of two; the other one's engine has a noise floor of 0.5."""

    index = 1
    names = ("first", "second")

    def __init__(self):
        self.floors = []

    def largest(self, *values):
        assert threading.current_thread() is threading.main_thread(), (
            "a meeting in the sampler's thread"
        )
        self.floors += [values] if len(values) == 1 else []
        return [0.5] if values == (0.25,) else list(values)


@pytest.mark.parametrize(("beside", "first"), [(False, 0), (True, 16)])
def test_hosts_take_the_largest_noise_floor_of_all_and_a_thread_counts_its_share_over_all(
    monkeypatch, beside, first
):
    """All hosts must move c by the same number.

    The share of 4 prompts begins with the third: completion 2 x 8.
    """
    batches = _batches(monkeypatch, lag=1, beside=beside, hosts=(hosts := _SecondOfTwo()))
    floors = []
    for step in range(3):
        batches.sync_weights(_params(step), step, timer := PhaseTimer())
        floors.append(
            batches.make(SimpleNamespace(params=_params(step)), step, timer).metrics.get(_FLOOR)
        )
    batches.close()
    # They meet for it in the step that measures it alone.
    assert floors == [0.5, None, None] and hosts.floors == [(0.25,)] and batches.first[0] == first
    assert batches._rollouts.collective is not beside


def test_a_batch_has_the_tokens_log_probs_and_rewards_of_what_its_version_sampled(monkeypatch):
    """Two prompts of two completions; problem i is the token i, asked and answered.

    Odd ones get 1 twice.
    """
    monkeypatch.setattr(rollout_sampler, "BatchScoring", ParityScoring)
    task = small_task(training={"prompts_per_step": 2, "prompts_per_mini_batch": 2, "seed": 5})
    programs = SimpleNamespace(
        setup=SimpleNamespace(policy=lambda params, _: params),
        sync=SimpleNamespace(merged=lambda params, _: (params, {})),
        shardings=SimpleNamespace(params={"a": SingleDeviceSharding(jax.devices()[0])}),
        rescore=None,
    )
    leave = CollectiveExit(ONE_PROCESS, StopSignal(), lambda: 0)
    session = small_session(task, small_placement(), programs, leave)
    batches = Batches(session, small_services(EchoEngine()))
    batches.resume(3, prompts_taken=2)
    batches.sync_weights(_params(0), 3, timer := PhaseTimer())
    made = batches.make(SimpleNamespace(params=_params(0)), 3, timer)
    numbers = prompt_order(8, seed=5, first=2, count=2)
    [rows] = made.batch.rows
    tokens = np.asarray(rows.input_ids).reshape(4, 4)
    # One completion a row, the longest first; all have one token of prompt and one of completion,
    # and two of padding.
    assert sorted(tokens.tolist()) == sorted(
        [[number, number, 0, 0] for number in np.repeat(numbers, 2).tolist()]
    )
    mask = np.asarray(rows.completion_mask).reshape(4, 4)
    np.testing.assert_array_equal(mask, [[False, True, False, False]] * 4)
    found = np.asarray(rows.columns["rollout_logprobs"]).reshape(4, 4)[mask]
    np.testing.assert_allclose(sorted(found), [-0.1, -0.1, 0.0, 0.0], rtol=1e-6)
    rewards = [
        reward for number in numbers for reward in ((1.0, 1.0) if number % 2 else (0.0, 1.0))
    ]
    np.testing.assert_array_equal(np.asarray(made.batch.rewards)[0], rewards)
    assert made.metrics["rollout/padding_fraction"] == 0.5 and made.rollout.prompts_taken == 2
    assert made.metrics["rollout/staleness_max"] == 0.0


def test_a_token_of_another_version_than_the_one_announced_names_both():
    def episode(version):
        ids = np.array([7, 8], np.int32)
        logprobs = np.zeros(2, np.float32)
        return single_turn(
            np.array([1], np.int32),
            ids,
            logprobs,
            policy_version=version,
            group=0,
            member=0,
            finish_reason="stop",
        )

    check_versions([episode(3), episode(3)], 3)
    with pytest.raises(
        EngineError, match=r"^completion 1 has tokens of version 2, version 3 was synced for them"
    ):
        check_versions([episode(3), episode(2)], 3)
    mixed = episode(3).with_columns(policy_versions=np.array([-1, 3, 4], np.int32))
    with pytest.raises(
        EngineError, match=r"^completion 0 has tokens of version 4, version 3 was synced for them"
    ):
        check_versions([mixed], 3)
