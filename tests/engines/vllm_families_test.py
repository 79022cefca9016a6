"""Real vLLM with the other model families: its weights are the last ones synced, its log-probs the
training stack's.
"""

import dataclasses

import jax
import numpy as np
import pytest

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.vllm import launch
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute, hidden_states, output_kernel, unpacked_inputs
from dcmdp_jax.models.families import FAMILIES
from dcmdp_jax.models.hf_config import from_hf, layer_pattern
from dcmdp_jax.plan.published import PUBLISHED
from dcmdp_jax.probe.live.operators import operator_differences
from tests.support.refusals import refused
from tests.support.vllm_tools import EXPERTS, prompts, random_params, small_model, vllm_settings

LLAMA = dataclasses.replace(small_model("qwen3", tied=False), model_type="llama")


def _family(model_type: str, **fields: object) -> ModelConfig:
    """Four layers with the family's pattern, or one of three layers, and a window of 5 tokens."""
    pattern = layer_pattern(
        {"sliding_window": 5, "sliding_window_pattern": 3}, FAMILIES[model_type], 4
    )
    return dataclasses.replace(
        LLAMA, model_type=model_type, num_layers=4, rope_theta=1e4, **pattern, **fields
    )


GEMMA = _family(
    "gemma3_text", tie_word_embeddings=True, sliding_rope_theta=100.0, query_pre_attn_scalar=24
)
_LONG = {
    "llama": LLAMA,
    "qwen3_moe": EXPERTS,
    **{name: _family(name) for name in ("mistral", "smollm3", "olmo3")},
}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GEMMA, id="gemma3", marks=pytest.mark.engines),
        *(pytest.param(config, id=name, marks=pytest.mark.long) for name, config in _LONG.items()),
    ],
)
def test_logprobs_are_the_training_stacks_after_each_sync(start, config):
    """Three policies, and the first again: an engine that keeps packed weights is wrong from the
    second on.

    The first weight sync goes through vLLM's own reload, the later ones repeat what that did, from
    either segment.
    """
    live = start(config, precision="float32")
    asked = prompts(6, config)
    answers = prompts(6, config, seed=1)
    for version, seed in enumerate((0, 1, 2, 0)):
        params = random_params(config, seed)
        live.sync_weights(params, version)
        scored = live.score(asked, answers, temperature=0.7)
        for prompt, answer, have in zip(asked, answers, scored, strict=True):
            ids = np.pad(np.concatenate([prompt, answer]), (0, 32 - prompt.size - answer.size))[
                None
            ]
            hidden = jax.jit(hidden_states, static_argnums=(1, 3))(
                params, config, unpacked_inputs(ids), Compute()
            )
            logprobs = np.asarray(jax.nn.log_softmax(hidden[0] @ output_kernel(params) / 0.7))
            want = [logprobs[prompt.size - 1 + step, token] for step, token in enumerate(answer)]
            np.testing.assert_allclose(have, want, atol=1e-4, rtol=0)
    log = (live.replicas[0].supervisor.sidecar._launch.directory / "sidecar.log").read_text(
        encoding="utf-8"
    )
    assert log.count("Reloading and processing weights took") == 1
    # Each operator of its network too, as hooks see it.
    found = operator_differences(live, params, config, asked, answers)
    found = {str(each): each.relative for each in found}
    assert len(found) == 3 + 3 * config.num_layers and max(found.values()) < 1e-4, found


def test_recurrent_layers_are_refused_in_the_cpu_build_alone():
    config = from_hf(PUBLISHED["Qwen3.5-0.8B"])
    planned = EngineArguments(
        "bfloat16", "bfloat16", max_total_tokens=64, model=config, settings=vllm_settings()
    )
    line = refused(launch.check_planned, dataclasses.replace(planned, platform="cpu"))
    assert line == (
        "engine: got 'vllm', whose CPU build can't load qwen3_5_text without torchvision; set "
        "`engine`=local"
    )
    launch.check_planned(dataclasses.replace(planned, platform="cuda"))
