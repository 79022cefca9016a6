"""Real vLLM with tensor parallel size 2: two workers compute what one does, take weights together
and end together.
"""

import os
import signal

import numpy as np
import pytest

from dcmdp_jax.engines.protocol import SamplingParams
from tests.support.sampling import local_engine, sample
from tests.support.vllm_tools import STOP, TOTAL, pid_of, prompts, random_params, small_model

SAMPLED = SamplingParams(group_size=2, max_completion_tokens=24, stop_token_ids=(STOP,))


@pytest.mark.long
@pytest.mark.parametrize(("family", "syncs"), [("qwen3", 20), ("qwen2", 20)])
def test_two_workers_give_the_embedded_engines_logprobs_after_each_sync(
    start, record_property, family, syncs
):
    """In float32, where rounding is all that may differ; and at full count, after a kill, the same
    bits again.
    """
    config = small_model(family)
    live = start(config, tensor_parallel_size=2)
    embedded = local_engine(config, precision="exact", max_total_tokens=TOTAL)
    asked = prompts(8, config)
    largest = 0.0
    for version in range(syncs):
        params = random_params(config, version)
        live.sync_weights(params, version)
        embedded.sync_weights(params, version)
        rollout = sample(live, asked, SAMPLED, seed=1, step=version)
        exact = embedded.score(rollout.prompt_ids, rollout.completion_ids, temperature=1.0)
        for sampled, reference in zip(rollout.rollout_logprobs, exact, strict=True):
            largest = max(largest, float(np.abs(sampled - reference).max()))
    assert largest < 1e-4
    record_property("weight syncs", syncs)
    record_property("largest log-prob difference, nats", f"{largest:.1g}")
    os.kill(pid_of(live), signal.SIGKILL)
    again = sample(live, asked, SAMPLED, seed=1, step=syncs - 1)
    for first, second in zip(rollout.completion_ids, again.completion_ids, strict=True):
        np.testing.assert_array_equal(first, second)
    for first, second in zip(rollout.rollout_logprobs, again.rollout_logprobs, strict=True):
        np.testing.assert_array_equal(first, second)
