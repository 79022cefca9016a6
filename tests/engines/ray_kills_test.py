"""Whole runs whose actors and nodes are killed at random moments, or too few for too long, or
headless: the same state.

The trainer is a process of its own; the cluster is the test's.
"""

import importlib.util
import random
import time

import pytest

from tests.support.ray_tools import actors, ray_nodes
from tests.support.runs import finish, read_digests, read_records, start
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("vllm_is_installed"),
    pytest.mark.skipif(
        not importlib.util.find_spec("ray"), reason="Ray is not installed (extra ray)"
    ),
]
STEPS = 40
KILLS = 20
SETTINGS = (
    f"--config.training.steps={STEPS}",
    "--config.evaluation.every_steps=5",
    "--config.warmup.steps=200",  # some answers are right, so that there is a gradient
    "--config.rollout.max_completion_tokens=36",
    "--config.training.row_lengths=(100,)",
    "--config.rollout.vllm.replicas=2",
)


def _start(environment, run_dir, nodes, settings=()):
    settings = [
        *SETTINGS,
        "--config.rollout.vllm.placement=ray",
        f"--config.rollout.vllm.address={nodes.address}",
        *settings,
    ]
    return start(environment, run_dir, settings, config="configs/demo_vllm.py:debug")


def _another_step(run, run_dir):
    """Wait until one more is recorded."""
    seen = len(read_records(run_dir))
    wait_until(lambda: len(read_records(run_dir)) > seen or run.poll() is not None, "another step")
    assert run.poll() is None, run.communicate()[0]


def _state(run_dir):
    """Metrics of each step but the replicas' own, and the digests of the last checkpoint."""
    steps = read_records(run_dir)
    assert set(steps) == set(range(STEPS + 1))
    own = ("replica/",)
    return {
        step: {name: value for name, value in record.items() if not name.startswith(own)}
        for step, record in steps.items()
    }, read_digests(run_dir, STEPS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, vllm_is_installed, run_environment):
    """An undisturbed run, with two sidecars of this machine."""
    run_dir = tmp_path_factory.mktemp("whole")
    finish(start(run_environment, run_dir, SETTINGS, config="configs/demo_vllm.py:debug"))
    assert {record.get("reward/mean", 0) > 0 for record in read_records(run_dir).values()} >= {True}
    return _state(run_dir)


def test_twenty_kills_change_no_bit(whole, run_environment, tmp_path, record_property):
    """While actors sample, load, score, start or idle. Every fifth kill takes a node, and a new one
    comes.
    """
    rng = random.Random(0)
    lost = 0
    with ray_nodes(2) as nodes:
        run = _start(run_environment, tmp_path, nodes)
        for kill in range(1, KILLS + 1):
            _another_step(run, tmp_path)
            time.sleep(rng.random())
            wait_until(lambda: actors(nodes) or run.poll() is not None, "an actor")
            if kill % 5:
                rng.choice(actors(nodes)).kill()
            else:
                nodes.remove(rng.choice(nodes.with_replicas()))
                nodes.add()
                lost += 1
            print("killed", kill, len(read_records(tmp_path)), flush=True)
        finish(run)
    record_property("kills", f"{KILLS}, of them {lost} nodes")
    assert _state(tmp_path) == whole


def test_a_run_below_its_least_replicas_ends_and_resumes_to_the_same_state(
    whole, run_environment, tmp_path
):
    """No node is left; two new ones come after the run has ended."""
    least = ("--config.rollout.vllm.min_replicas=2", "--config.rollout.vllm.start_timeout_s=80")
    with ray_nodes(2) as nodes:
        run = _start(run_environment, tmp_path, nodes, least)
        _another_step(run, tmp_path)
        for node in nodes.with_replicas():
            nodes.remove(node)
        said = finish(run, 2).splitlines()
        assert (
            "0 of at least 2 replicas for 80 s (" in said[-1]
            and "the same command resumes" in said[-1]
        ), said
        assert max(read_records(tmp_path)) < STEPS
        for _ in range(2):
            nodes.add()
        finish(_start(run_environment, tmp_path, nodes, least))
    assert _state(tmp_path) == whole


def test_a_run_whose_head_is_lost_ends_and_resumes_to_the_same_state(
    whole, run_environment, tmp_path
):
    with ray_nodes(2) as nodes:
        run = _start(run_environment, tmp_path, nodes)
        _another_step(run, tmp_path)
        nodes.kill_head()
        for actor in actors(nodes):
            actor.kill()  # else the rest of the run takes less time than a lost head is looked for
        said = finish(run, 2).splitlines()
        assert f"the head of the Ray cluster, {nodes.address}, is gone" in said[-1], said
        assert "the same command resumes" in said[-1] and max(read_records(tmp_path)) < STEPS, said
    with ray_nodes(2) as nodes:
        finish(_start(run_environment, tmp_path, nodes))
    assert _state(tmp_path) == whole
