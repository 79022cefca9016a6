"""What a matched forward pass is refused for once the model and the machine are known."""

import pytest

from configs import base
from dcmdp_jax.config.checks import engine_arguments, find_trainable, forward_scheme
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.scheme import Scheme
from dcmdp_jax.run.placement import forward_scheme_on
from tests.support.memory_plans import QWEN3_8B

QWEN2 = ModelConfig("qwen2", 31, 64, 96, 2, 2, 1, 32, attention_bias=True)
EXPERTS = ModelConfig(
    "qwen3_moe",
    31,
    64,
    96,
    2,
    2,
    1,
    32,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)


def _config(precision, cache="auto"):
    config = base.get_config()
    config.task.train, config.rollout.engine = "x", "vllm"
    config.rollout.precision, config.rollout.kv_cache_dtype = precision, cache
    config.model.forward_precision = precision if precision != "bfloat16" else "full"
    config.model.forward_cache = cache if cache != "auto" else "full"
    return from_config_dict(config)


@pytest.mark.parametrize(
    ("precision", "cache", "platform", "model", "expected"),
    [
        ("int8", "auto", "cpu", QWEN2, Scheme(products="int8")),
        ("fp8", "auto", "gpu", QWEN2, Scheme(products="fp8", skip_qkv=True)),
        ("fp8_per_block", "fp8", "gpu", QWEN3_8B, Scheme(products="fp8_per_block", cache="fp8")),
        (
            "fp8_per_block",
            "fp8",
            "cpu",
            QWEN3_8B,
            Scheme(products="fp8_weights_per_block", cache="fp8_truncated"),
        ),
        ("bfloat16", "fp8_e5m2", "cpu", EXPERTS, Scheme(cache="fp8_e5m2_truncated")),
    ],
)
def test_the_scheme_is_that_of_vllms_build_for_the_platform(
    precision, cache, platform, model, expected
):
    assert forward_scheme(_config(precision, cache), platform, model=model) == expected


def test_experts_are_refused():
    with pytest.raises(
        UserError, match="^config.model.forward_precision: got 'fp8_per_block'; the trai"
    ):
        forward_scheme(_config("fp8_per_block"), "gpu", model=EXPERTS)


@pytest.mark.parametrize(
    ("precision", "cache", "said"),
    [("int8", "auto", "precision: got 'int8'"), ("bfloat16", "fp8", "cache: got 'fp8'")],
)
def test_another_platform_than_the_engines_is_refused(precision, cache, said):
    config = _config(precision, cache)
    kind = find_trainable(config.rollout.engine)
    engine = engine_arguments(config, kind, model=QWEN3_8B, platform="cuda")
    forward_scheme_on(config, engine, "gpu")
    with pytest.raises(
        UserError,
        match=f"^config.model.forward_{said}; the engine computes on cuda, the trainer on cpu",
    ):
        forward_scheme_on(config, engine, "cpu")
    forward_scheme_on(_config("bfloat16"), engine, "cpu")
