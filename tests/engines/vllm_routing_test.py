"""Real vLLM says which experts its tokens went to: the trainer's own in float32, after every
weight sync.
"""

import numpy as np
import pytest

from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.protocol import SamplingParams
from research.router_replay import effect
from tests.support.vllm_tools import EXPERTS, STOP, prompts, random_params


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_routed_experts_are_those_of_every_token(start, record_property, precision):
    """A score between two calls records nothing; a cache too small for all rows preempts some,
    which start again.
    """
    engine = start(EXPERTS, precision=precision, routed_experts=True, kv_cache_gib=0.002)
    sampling = SamplingParams(
        group_size=4, max_completion_tokens=40, temperature=0.7, stop_token_ids=(STOP,)
    )
    for version in range(2):
        params = random_params(EXPERTS, version)
        engine.sync_weights(params, version)
        episodes = collect(engine.generate(prompts(12, EXPERTS), sampling, seed=3, step=version))
        assert (
            len(episodes) == 48
            and min(episode.columns["routed_experts"][:-1].min() for episode in episodes) >= 0
        )
        found = effect(EXPERTS, params, episodes, temperature=0.7)
        record_property(f"push {version}", found)
        if precision == "float32":
            assert found.agreement == 1.0 and found.replayed < 1e-4
        else:
            assert found.agreement > 0.9 and found.replayed < 0.9 * found.own
        engine.score([episodes[0].prompt_ids], [episodes[0].completion_ids], temperature=0.7)
        again = collect(engine.generate(prompts(12, EXPERTS), sampling, seed=3, step=version))
        for one, other in zip(episodes, again, strict=True):
            np.testing.assert_array_equal(
                one.columns["routed_experts"], other.columns["routed_experts"]
            )
