"""vLLM replicas as actors on two Ray nodes in one machine: the bits of sidecars, and what is lost
and replaced.

The tests of this file share one engine and run in their order: the last ones end it. Those that
lose nodes are long.
"""

import importlib.util
import logging
import os
import signal

import numpy as np
import pytest

from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from tests.support.ray_tools import node_of, place_of, ray_nodes
from tests.support.sampling import assert_same_samples, sample
from tests.support.vllm_tools import STOP, prompts, random_params, small_model
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("ray"), reason="Ray is not installed (extra ray)"
)
SAMPLED = SamplingParams(group_size=2, max_completion_tokens=40, stop_token_ids=(STOP,))
CONFIG = small_model()
FEW = prompts(30, CONFIG)
MANY = prompts(400, CONFIG)


def _pushed_and_sampled(engine, sampled=SAMPLED):
    """Two weight syncs, into memory that differs, each with its probe, samples, their top-k tokens
    and scores.
    """
    found = []
    for version in (7, 8):
        probe = engine.sync_weights(random_params(CONFIG, version), version)["mismatch/probe"]
        rollout = sample(engine, FEW, sampled, seed=5, step=version)
        found.append(
            (
                probe,
                rollout,
                engine.score(rollout.prompt_ids, rollout.completion_ids, temperature=1.0),
            )
        )
    return found


def _assert_same(first, second):
    for (probe, rollout, scores), (other_probe, other, other_scores) in zip(
        first, second, strict=True
    ):
        assert probe == other_probe
        assert_same_samples(rollout, other)
        for one, another in zip(scores, other_scores, strict=True):
            np.testing.assert_array_equal(one, another)


@pytest.fixture(scope="module")
def nodes():
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.long)]
)
def engine(request, start, nodes):
    """Two replicas on two nodes; what it gives is compared with two sidecars of this machine before
    it is used.
    """
    options = {"precision": request.param, "replicas": 2}
    local = start(CONFIG, **options)
    expected = _pushed_and_sampled(local)
    local.close()
    made = start(CONFIG, **options, placement="ray", address=nodes.address)
    made.expected = expected
    made.precision = request.param
    yield made
    made.close()


def test_replicas_on_two_nodes_repeat_the_sidecars_bits(engine):
    assert len({place_of(engine, replica)[0] for replica in (0, 1)}) == 2
    _assert_same(engine.expected, _pushed_and_sampled(engine))


def test_each_replicas_work_is_measured(engine):
    """Tokens by replica since the weight sync before: together those that were sampled, prompts
    dealt in turn.
    """
    engine.sync_weights(random_params(CONFIG, 7), 7)
    rollout = sample(engine, FEW, SAMPLED, seed=1, step=1)
    found = engine.sync_weights(random_params(CONFIG, 7), 7)
    for replica in (0, 1):
        rows = [row for row in range(len(rollout.completion_ids)) if row // 2 % 2 == replica]
        assert found[f"replica/{replica}/tokens"] == sum(
            rollout.completion_ids[row].size for row in rows
        )
        assert found[f"replica/{replica}/seconds"] > 0 and found[f"replica/{replica}/restarts"] == 0


def test_a_call_that_is_given_up_leaves_the_actors_as_they_were(engine):
    engine.sync_weights(random_params(CONFIG, 7), 7)
    before = sample(engine, FEW, SAMPLED, seed=1, step=1)
    places = [place_of(engine, replica) for replica in (0, 1)]
    groups = engine.generate(MANY, SAMPLED, seed=1, step=1)
    next(groups)
    groups.close()
    assert_same_samples(before, sample(engine, FEW, SAMPLED, seed=1, step=1))
    assert places == [place_of(engine, replica) for replica in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(engine):
    """Only the float32 engine is disturbed: its starts take most of the time here."""
    if engine.precision != "float32":
        pytest.skip("in float32")
    engine.sync_weights(random_params(CONFIG, 7), 7)
    return sample(engine, MANY, SAMPLED, seed=1, step=1)


def _once(act):
    """Act at the first list that is pulled, with both replicas in the middle of their parts."""
    acts = [act]
    return lambda complete: acts and acts.pop()()


def _warnings(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_killed_actors_part_is_sampled_by_the_other_one(engine, undisturbed, caplog):
    """At once, while a new one starts; said in one line, and by Ray in none."""
    first = place_of(engine, 1)
    kill = _once(lambda: os.kill(first[1], signal.SIGKILL))
    assert_same_samples(undisturbed, sample(engine, MANY, SAMPLED, seed=1, step=1, on_pull=kill))
    assert [message for message in _warnings(caplog) if "restart" in message] == [
        f"vLLM replica 1 process: generate: the actor is gone (ActorDiedError) ({first[0]}); "
        "restart 1 in 0.5 s"
    ]


@pytest.mark.long
def test_a_lost_nodes_part_is_sampled_by_the_other_one_and_a_new_node_takes_its_place(
    engine, undisturbed, nodes
):
    lost = node_of(nodes.cluster.list_all_nodes(), engine, 0)
    remove = _once(lambda: nodes.remove(lost))
    assert_same_samples(undisturbed, sample(engine, MANY, SAMPLED, seed=1, step=1, on_pull=remove))
    engine.sync_weights(random_params(CONFIG, 7), 8)
    new = nodes.add()

    def back():
        engine.sync_weights(random_params(CONFIG, 7), 9)
        return place_of(engine, 0)[1] and place_of(engine, 1)[1]

    wait_until(back, "the replica to come back")
    assert new.node_id[:6] in place_of(engine, 0)[0] + place_of(engine, 1)[0]
    assert_same_samples(undisturbed, sample(engine, MANY, SAMPLED, seed=1, step=1))


@pytest.mark.long
def test_too_few_replicas_for_too_long_end_the_run(engine, undisturbed, nodes, monkeypatch):
    fleet = engine.replicas[0].supervisor._fleet
    monkeypatch.setattr(fleet, "least", 2)
    monkeypatch.setattr(fleet, "limit_s", 3.0)
    nodes.remove(node_of(nodes.cluster.list_all_nodes(), engine, 1))
    with pytest.raises(
        EngineError, match=r"1 of at least 2 replicas for 3 s .*: Ray has no room for more"
    ):
        for _ in range(100):
            sample(engine, MANY, SAMPLED, seed=1, step=1)


@pytest.mark.long
def test_a_lost_head_is_said_in_one_line(engine, undisturbed, nodes):
    nodes.kill_head()
    with pytest.raises(
        EngineError, match=rf"the head of the Ray cluster, {nodes.address}, is gone"
    ):
        for _ in range(1000):
            sample(engine, MANY, SAMPLED, seed=1, step=1)
    engine.close()
