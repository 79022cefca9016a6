"""The order of sleeping and waking, in vLLM's own words: its log. In the CPU build the calls free
nothing.
"""

import re

import numpy as np
import pytest

from dcmdp_jax.engines.protocol import SamplingParams
from tests.support.sampling import sample
from tests.support.vllm_tools import STOP, prompts, random_params, small_model
from tests.support.waiting import wait_until

SAMPLED = SamplingParams(group_size=2, max_completion_tokens=24, stop_token_ids=(STOP,))


def _order(directory, count):
    """The log: "asleep", or the tag that woke up. It arrives by a pipe: `count` of them are waited
    for.
    """

    def lines():
        log = (directory / "sidecar.log").read_text(encoding="utf-8")
        return re.findall(r"seconds to (?:fall (asleep)|wake up tags \['(\w+)'\])", log)

    wait_until(lambda: len(lines()) >= count, f"{count} lines of the log")
    return [asleep or tag for asleep, tag in lines()]


@pytest.mark.long
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_after_each_call_and_wakes_for_the_next(start, tmp_path, caplog, level):
    """Weights first, and the cache when they are loaded; at level 2 a call without a weight sync
    loads the weights again.
    """
    config = small_model()
    engine = start(config, directory=tmp_path, sleep=level)
    assert f"sleep={level}: vLLM's CPU build frees nothing by it" in caplog.text
    asked = prompts(4, config)
    params = random_params(config, 7)
    engine.sync_weights(params, 7)
    first = sample(engine, asked, SAMPLED, seed=1, step=1)
    order = ["asleep"]
    assert _order(tmp_path, len(order)) == order
    engine.score(first.prompt_ids, first.completion_ids, temperature=1.0)
    order += ["weights", "kv_cache", "asleep"]
    assert _order(tmp_path, len(order)) == order
    engine.sync_weights(params, 8)
    # The probe of the weight sync has the cache awake.
    order += ["weights", "kv_cache"]
    assert _order(tmp_path, len(order)) == order
    again = sample(engine, asked, SAMPLED, seed=1, step=1)
    order += ["asleep"]
    assert _order(tmp_path, len(order)) == order
    for a, b in zip(first.rollout_logprobs, again.rollout_logprobs, strict=True):
        np.testing.assert_array_equal(a, b)
    engine.close()
