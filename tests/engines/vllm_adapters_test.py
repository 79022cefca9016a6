"""Adapters beside their base in real vLLM: the base is loaded once, and each weight sync is of A
and B alone.
"""

import dataclasses
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import demo_vllm
from dcmdp_jax.config.checks import validate
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from dcmdp_jax.engines.vllm import ENGINE
from dcmdp_jax.errors import ArgumentError, UserError
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.lora import Adapted, adapter_declarations, merged
from dcmdp_jax.models.params import draw_params, quantized_leaves
from dcmdp_jax.models.quantize import quantize_tree
from tests.support.sampling import assert_same_samples, local_engine, sample
from tests.support.vllm_tools import (
    EXPERTS,
    STOP,
    TOTAL,
    pid_of,
    prompts,
    random_params,
    small_model,
    vllm_settings,
)

FAULTY = Path(__file__).with_name("faulty_sidecar.py")
SAMPLED = SamplingParams(group_size=2, max_completion_tokens=24, stop_token_ids=(STOP,))
MODEL = small_model()
LORA = Lora(4, 10.0)


def _policy(version: int, model: ModelConfig = MODEL, lora: Lora = LORA) -> Adapted:
    """One base for all versions; A and B so large that they change the policy."""
    drawn = draw_params(adapter_declarations(model, lora), jax.random.key(version), "float32")
    leaves, tree = jax.tree.flatten(drawn)
    keys = jax.random.split(jax.random.key(version + 100), len(leaves))
    moved = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return Adapted(random_params(model, 0), jax.tree.unflatten(tree, moved), lora)


def _assert_merged_logprobs(
    live, policy: Adapted, model: ModelConfig = MODEL, atol: float = 1e-5
) -> None:
    """The engine's log-probs of fixed completions are those of the merged model in the embedded
    engine.
    """
    embedded = local_engine(model, precision="exact", max_total_tokens=TOTAL)
    embedded.sync_weights(merged(*policy), 0)
    asked = prompts(6, model)
    answers = prompts(6, model, seed=1)
    found, want = (engine.score(asked, answers, temperature=0.7) for engine in (live, embedded))
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(want), atol=atol, rtol=0)


def _loads(live) -> int:
    """How often an engine has loaded a whole model."""
    [log] = {
        replica.supervisor.sidecar._launch.directory / "sidecar.log" for replica in live.replicas
    }
    return log.read_text(encoding="utf-8").count("Reloading and processing weights took")


@pytest.fixture(scope="module")
def live(start):
    """Rank 4, which vLLM holds as 8."""
    return start(MODEL, lora=LORA, adapters=True)


def test_each_sync_changes_the_policy_and_the_base_is_loaded_once(live):
    """The merged model's log-probs in float32, of three versions, and of the first one again the
    same bits.
    """
    sampled = {}
    for number, version in enumerate((0, 1, 2, 0)):
        policy = _policy(version)
        probe = live.sync_weights(policy, number)["mismatch/probe"]
        assert probe < 1e-5
        _assert_merged_logprobs(live, policy)
        rollout = sample(live, prompts(6, MODEL), SAMPLED, seed=1, step=2)
        assert rollout.policy_version == number
        if version in sampled:
            assert_same_samples(sampled[version], rollout)
        for other, before in sampled.items():
            assert other == version or not all(
                map(np.array_equal, before.completion_ids, rollout.completion_ids)
            )
        sampled[version] = rollout
    assert _loads(live) == 1
    # A and B of 7 matrices in 2 layers, (64 + 128 + 2 (64 + 64) + (128 + 64) + 2 (64 + 96) + (96 +
    # 64)) r each, and room to align them.
    numbers = 2 * 4 * (64 + 128 + 2 * (64 + 64) + 128 + 64 + 3 * (64 + 96))
    assert 4 * numbers <= live.weights.adapters.num_bytes < 4 * numbers + 28 * 64
    assert [segment.bytes.size for segment in live.weights.segments] == [
        *[live.weights.adapters.num_bytes] * 2,
        live.weights.bridge.num_bytes,
    ]


def test_a_killed_engine_gets_base_and_adapters_again(live):
    policy = _policy(3)
    asked = prompts(6, MODEL)
    live.sync_weights(policy, 3)
    before = sample(live, asked, SAMPLED, seed=1, step=2)
    loads = _loads(live)
    os.kill(pid_of(live), signal.SIGKILL)
    assert_same_samples(before, sample(live, asked, SAMPLED, seed=1, step=2))
    assert _loads(live) == loads + 1


@pytest.mark.parametrize(
    ("model", "lora", "base"),
    [
        pytest.param(MODEL, LORA, "int8", marks=pytest.mark.long, id="int8_base"),
        pytest.param(
            MODEL,
            Lora(16, 16.0, ("q_proj", "down_proj")),
            "float32",
            marks=pytest.mark.long,
            id="targets",
        ),
        pytest.param(
            small_model("qwen2", tied=False), LORA, "float32", marks=pytest.mark.long, id="qwen2"
        ),
    ],
)
def test_other_bases_ranks_and_targets(start, model, lora, base):
    policy = _policy(0, model, lora)
    if base == "int8":
        policy = policy._replace(base=quantize_tree(policy.base, quantized_leaves(model), "int8"))
    made = start(model, lora=lora, adapters=True)
    made.sync_weights(policy, 0)
    _assert_merged_logprobs(made, policy, model, atol=1e-4)


@pytest.mark.parametrize("changed", ["adapters", "bridge"])
def test_adapters_that_arrive_changed_are_not_used(start, changed):
    """One byte of a matrix B, or of the base, altered behind the trainer's back."""
    engine = start(
        MODEL, lora=LORA, adapters=True, probe=False, script=FAULTY, engine_args='{"fault": "none"}'
    )
    bridge, engine.replicas[0].supervisor.max_restarts = getattr(engine.weights, changed), 0
    publish = bridge.publish

    def tampering(params, segment, version):
        sums = publish(params, segment, version)
        segment.bytes[bridge.manifest[1].offset] ^= 1
        return sums

    bridge.publish = tampering
    number = 9 if changed == "adapters" else -1
    with pytest.raises(
        EngineError, match=rf"weights of version {number}: .* and 0 more arrived changed"
    ):
        engine.sync_weights(_policy(0), 9)
    engine.close()


WIDE = ModelConfig("llama", 64, 1024, 2048, 2, 16, 16, 64)


@pytest.mark.parametrize(
    ("model", "lora", "platform", "said"),
    [
        (WIDE, Lora(513, 1.0), "cpu", "a rank of 513; vLLM takes at most 512"),
        (WIDE, Lora(8, 1.0), "cuda", "float32; vLLM's CUDA build takes 16 bits"),
        (EXPERTS, Lora(8, 1.0), "cpu", "experts; vLLM's CPU build takes dense models"),
    ],
)
def test_what_vllm_does_not_hold_is_refused_before_it_starts(model, lora, platform, said):
    arguments = EngineArguments(
        "float32",
        "float32",
        model=model,
        platform=platform,
        lora=lora,
        settings=vllm_settings(adapters=True),
        host_devices=1,
    )
    with pytest.raises(ArgumentError) as error:
        ENGINE.check(arguments)
    assert str(error.value) == f"adapters: got True with {said}: set False"
    ENGINE.check(dataclasses.replace(arguments, lora=None))


def test_the_setting_without_adapters_is_refused():
    config = demo_vllm.get_config("debug")
    config.rollout.vllm.adapters = True
    with pytest.raises(UserError) as error:
        validate(from_config_dict(config))
    assert str(error.value) == (
        "config.rollout.vllm.adapters: got True, there are none: set model.lora_rank or "
        "model.adapter"
    )
