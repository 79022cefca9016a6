"""Real vLLM with the other model families: its weights are the last ones pushed, its log-probs the training stack's."""

import dataclasses

import jax
import numpy as np
import pytest

from dcmdp_jax.models.decoder import Compute, hidden_states, output_kernel
from tests.support.vllm_tools import EXPERTS, prompts, random_params, small_model

LLAMA = dataclasses.replace(small_model("qwen3", tied=False), model_type="llama")


@pytest.mark.long
@pytest.mark.parametrize("config", [pytest.param(LLAMA, id="llama"), pytest.param(EXPERTS, id="qwen3_moe")])
def test_logprobs_are_the_training_stacks_after_each_push(start, config):
    """Three policies, and the first again: an engine that keeps packed weights is wrong from the second on."""
    live = start(config, precision="float32")
    asked, answers = prompts(6, config), prompts(6, config, seed=1)
    for version, seed in enumerate((0, 1, 2, 0)):
        params = random_params(config, seed)
        live.push_weights(params, version)
        scored = live.score(asked, answers, temperature=0.7)
        for prompt, answer, have in zip(asked, answers, scored, strict=True):
            ids = np.pad(np.concatenate([prompt, answer]), (0, 32 - prompt.size - answer.size))[None]
            hidden = jax.jit(hidden_states, static_argnums=(1, 5))(
                params, config, ids, np.arange(32)[None], np.ones_like(ids), Compute()
            )
            logprobs = np.asarray(jax.nn.log_softmax(hidden[0] @ output_kernel(params) / 0.7))
            want = [logprobs[prompt.size - 1 + step, token] for step, token in enumerate(answer)]
            np.testing.assert_allclose(have, want, atol=1e-4, rtol=0)
