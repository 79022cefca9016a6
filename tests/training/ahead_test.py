"""The order of batches that are sampled ahead, and the parameters that are kept for them."""

import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from dcmdp_jax.data.episode import single_turn
from dcmdp_jax.errors import EngineError
from dcmdp_jax.training.ahead import KeptParams, SamplingAhead, check_versions, version_of, versions_in_flight


@pytest.mark.parametrize(
    ("lag", "expected"),
    [
        (1, {0: [0, 1], 1: [2], 2: [3], 3: [4], 4: []}),
        (2, {0: [0, 1, 2], 1: [3], 2: [4], 3: [], 4: []}),
        (7, {0: [0, 1, 2, 3, 4], 1: [], 2: [], 3: [], 4: []}),
    ],
)
@pytest.mark.parametrize("beside", [False, True])
def test_each_version_samples_its_batches_and_each_begins_where_the_one_before_ends(lag, expected, beside):
    """Five steps; batch n takes n + 1 prompts. Whatever takes how long, step n trains on version max(0, n - lag)."""
    made = []

    def make(step, first):
        made.append((step, first))
        return types.SimpleNamespace(problems=[0] * (step + 1))

    ahead = SamplingAhead(lag, 5, make, taken=100, beside=beside)
    for step in range(5):
        ahead.settle()
        before = len(made)
        ahead.start_all(step, step)
        ahead.settle()
        assert [each for each, _ in made[before:]] == expected[step]
        ahead.take(step)
    ahead.close()
    assert made == [(0, 100), (1, 101), (2, 103), (3, 106), (4, 110)]
    assert [version_of(step, lag) for step in range(5)] == [max(0, step - lag) for step in range(5)]


def test_what_a_resumed_run_samples_again_is_what_was_in_flight():
    """Lag 2, saved after 3 steps: batches 3 and 4 of versions 1 and 2; after 1 step batches 1 and 2, both of 0."""
    for step, versions, batches in ((0, [], {}), (1, [0], {0: [1, 2]}), (3, [1, 2], {1: [3], 2: [4]})):
        assert list(versions_in_flight(step, 2)) == versions
        made = []
        ahead = SamplingAhead(
            2,
            9,
            lambda step, _, made=made: made.append(step) or types.SimpleNamespace(problems=[]),
            taken=0,
            beside=False,
        )
        for version, expected in batches.items():
            ahead.start_all(version, step)
            assert made == expected
            made.clear()


def test_a_failure_ends_the_later_batches_and_is_the_one_that_is_raised():
    begun, go_on = [], threading.Event()

    def make(step, first):
        go_on.wait()
        begun.append((step, ahead.closing.is_set()))
        raise EngineError(f"batch {step}")

    ahead = SamplingAhead(2, 9, make, taken=0, beside=True)
    ahead.start_all(0, 0)
    go_on.set()
    with pytest.raises(EngineError, match="batch 0"):
        ahead.settle()
    ahead.close()
    assert begun[0] == (0, False) and all(closing for _, closing in begun[1:])


def test_a_token_of_another_version_than_the_one_announced_names_both():
    def episode(version):
        ids, logprobs = np.array([7, 8], np.int32), np.zeros(2, np.float32)
        given = {"policy_version": version, "group": 0, "member": 0, "finish_reason": "stop"}
        return single_turn(np.array([1], np.int32), ids, logprobs, **given)

    check_versions([episode(3), episode(3)], 3)
    with pytest.raises(EngineError, match=r"^completion 1 has tokens of version 2, version 3 was pushed for them"):
        check_versions([episode(3), episode(2)], 3)
    mixed = episode(3).with_columns(policy_versions=np.array([-1, 3, 4], np.int32))
    with pytest.raises(EngineError, match=r"^completion 0 has tokens of version 4, version 3 was pushed for them"):
        check_versions([mixed], 3)


def test_kept_parameters_outlive_the_step_that_takes_their_memory():
    sharding = SingleDeviceSharding(jax.devices()[0])
    kept = KeptParams({"a": sharding}, {4: {"a": jnp.full(3, 4.0)}})
    step = jax.jit(lambda params: {"a": params["a"] + 1}, donate_argnums=0)
    params = {"a": jnp.full(3, 5.0)}
    kept.keep(5, params)
    params = step(params)
    assert [kept.get(version)["a"].tolist() for version in (4, 5)] == [[4.0] * 3, [5.0] * 3]
    assert kept.of(range(5, 6))[5]["a"].tolist() == [5.0] * 3
    kept.drop_before(5)
    with pytest.raises(KeyError):
        kept.of(range(4, 6))
