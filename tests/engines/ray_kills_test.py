"""Twenty kills of actors and nodes, at random moments of pushes and calls."""

import importlib.util
import os
import random
import signal
import threading

import pytest

from dcmdp_jax.engines.protocol import SamplingParams
from tests.support.ray_tools import node_of, place_of, ray_nodes
from tests.support.sampling import assert_same_samples, sample
from tests.support.vllm_tools import STOP, prompts, random_params, small_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="Ray is not installed (extra ray)"),
]
KILLS = 20
SAMPLED = SamplingParams(group_size=2, max_completion_tokens=40, stop_token_ids=(STOP,))
CONFIG = small_model()


def test_twenty_kills_change_no_bit(start):
    """Every fourth takes the whole node, and a new one comes."""
    asked, rng = prompts(200, CONFIG), random.Random(0)
    with ray_nodes(2) as nodes:
        engine = start(CONFIG, replicas=2, placement="ray", address=nodes.address)

        def step(version):
            engine.push_weights(random_params(CONFIG, version), version)
            return sample(engine, asked, SAMPLED, seed=1, step=version)

        undisturbed = {version: step(version) for version in (1, 2)}
        killed = []

        def kill():
            there = [replica for replica in (0, 1) if place_of(engine, replica) not in {("", 0), *killed}]
            if not there:
                return
            replica = rng.choice(there)
            killed.append(place_of(engine, replica))
            if len(killed) % 4:
                os.kill(killed[-1][1], signal.SIGKILL)
            else:
                nodes.remove(node_of(nodes.cluster.list_all_nodes(), engine, replica))
                nodes.add()

        version = 0
        while len(killed) < KILLS:
            version = version % 2 + 1
            timer = threading.Timer(rng.uniform(0.0, 1.5), kill)
            timer.start()
            assert_same_samples(undisturbed[version], step(version))
            timer.join()
        assert len(set(killed)) == KILLS
        for version, expected in undisturbed.items():
            assert_same_samples(expected, step(version))
        engine.close()
