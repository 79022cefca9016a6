"""Stock vLLM in processes of its own."""

from __future__ import annotations

from dcmdp_jax.engines.kind import EngineArguments, EngineKind, later
from dcmdp_jax.engines.vllm.settings import VllmSettings
from dcmdp_jax.engines.vllm_limits import TEMPERATURES
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.scheme import Scheme

_DTYPES = ("float32", "float16", "bfloat16")
_QUANTIZED = ("int8", "fp8", "fp8_per_block")


def _check_settings(arguments: EngineArguments) -> None:
    """vLLM has one dtype for whatever is not quantized."""
    precision, dtype = arguments.precision, arguments.compute_dtype
    if precision in _DTYPES and precision != dtype:
        raise UserError(
            f"compute_dtype: got {dtype!r} with `precision`={precision!r}; vLLM has one dtype for weights and "
            "activations, set both alike"
        )
    if precision in _QUANTIZED and dtype != "bfloat16":
        raise UserError(
            f"compute_dtype: got {dtype!r} with `precision`={precision!r}; vLLM computes quantized layers in bfloat16, "
            "set that"
        )


def _check_lag(arguments: EngineArguments) -> None:
    if arguments.settings.sleep:
        raise UserError(
            f"sleep: got {arguments.settings.sleep} with `lag`; an engine that sleeps while the trainer trains can't "
            "sample then, set `sleep`=0 or `lag`=0"
        )


def _scheme(arguments: EngineArguments, precision: str, cache: str, platform: str) -> Scheme:
    """vLLM's roundings in the build for the trainer's platform.

    The CPU build leaves activations alone in fp8_per_block (on processors without AMX-FP8), and stores an FP8 cache
    rounded towards zero.
    """
    products = "" if precision == "full" else precision
    model, parts = arguments.model, arguments.settings.tensor_parallel_size
    if products and model is not None and model.num_experts:
        raise UserError(
            f"forward_precision: got {precision!r} with {model.num_experts} experts; the trainer repeats the roundings "
            "of dense layers alone, set 'full'"
        )
    if products and parts > 1:
        raise UserError(
            f"forward_precision: got {precision!r} with `tensor_parallel_size`={parts}; each device of vLLM rounds its "
            "part of a token by a scale of its own, set 'full' or `tensor_parallel_size`=1"
        )
    cpu = platform == "cpu"
    # Of fused q, k and v with biases: see `launch.engine_arguments`.
    biased = bool(products) and model is not None and model.attention_bias and products != "int8"
    if cpu and products == "fp8_per_block":
        products = "fp8_weights_per_block"
    stored = "" if cache == "full" else cache + "_truncated" * cpu
    return Scheme(products=products, skip_qkv=biased, cache=stored)


def _memory_note(arguments: EngineArguments) -> str:
    if arguments.platform == "cpu":
        return ""
    asleep = ", while it samples" * (arguments.settings.sleep > 0)
    return f"besides: vLLM takes {arguments.settings.memory_share:g} of each of its GPUs (`memory_share`){asleep}"


ENGINE = EngineKind(
    name="vllm",
    build=later("dcmdp_jax.engines.vllm.engine:build"),
    settings=VllmSettings,
    precisions=(*_DTYPES, *_QUANTIZED),
    cache_dtypes=("auto", "fp8", "fp8_e5m2"),
    quantized=_QUANTIZED,
    emulated=_QUANTIZED,
    emulated_caches=("fp8", "fp8_e5m2"),
    scheme=_scheme,
    quantized_compute="bfloat16",
    temperatures=TEMPERATURES,
    routes=True,
    check_lag=_check_lag,
    check_settings=_check_settings,
    check_machine=later("dcmdp_jax.engines.vllm.launch:check_machine"),
    check_model=later("dcmdp_jax.engines.vllm.launch:check_planned"),
    share_devices=later("dcmdp_jax.engines.vllm.launch:share_memory"),
    device_share=later("dcmdp_jax.engines.vllm.devices:device_share"),
    memory=later("dcmdp_jax.engines.vllm.memory:parts"),
    memory_note=_memory_note,
)
