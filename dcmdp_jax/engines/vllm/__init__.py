"""Stock vLLM in processes of its own."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from dcmdp_jax.engines.kind import DeviceShare, EngineArguments, EngineKind, Workload
from dcmdp_jax.engines.vllm_common import VLLM_TEMPERATURES
from dcmdp_jax.errors import ArgumentError
from dcmdp_jax.fields import setting
from dcmdp_jax.models.scheme import Scheme

if TYPE_CHECKING:
    from dcmdp_jax.engines.protocol import Engine
    from dcmdp_jax.machine import Machine, MemoryPart

_DTYPES = ("float32", "float16", "bfloat16")
_QUANTIZED = ("int8", "fp8", "fp8_per_block")


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """The vLLM sidecar, used with `rollout.engine=vllm`.

    Attributes:
        python: Python interpreter that has vLLM. Empty: the trainer's.
        tensor_parallel_size: Devices that each layer is split over.
        replicas: Data-parallel sidecars, each with tensor_parallel_size devices of its own. Prompt p goes to
            replica p mod replicas; all load one copy of the weights. 0: as many as the GPUs hold, 1 on a CPU.
        visible_devices: GPUs of the sidecars, as CUDA_VISIBLE_DEVICES. Empty: the trainer's GPUs, shared.
        memory_share: Share of each of its GPUs. On a shared GPU the trainer gets the rest less a tenth. Source:
            ours.
        sleep: vLLM's sleep mode, which leaves shared GPUs to the trainer while nothing is sampled. 0: off. 1:
            weights move to host memory. 2: weights are dropped, and loaded again. Frees nothing in the CPU build.
            Source: ours.
        kv_cache_gib: Size of each replica's key-value cache. 0: on a GPU twice what max_rows need where they need
            1 GiB at most, else what memory_share leaves; on a CPU what they need, at most a third of the free memory.
        cpu_threads: Threads of the CPU build. More than one is slow on a machine that does anything else.
        engine_args: Further arguments of vllm.LLM as a JSON object, such as {"block_size": 64}.
        start_timeout_s: Longest start of an engine; the first one that takes longer ends the run, a later one is
            tried again.
        probe_tolerance: Largest mean |difference| of log-probs between trainer and engine on fixed sequences after
            each push; above it the push failed. 0: 0.01 for float32, 0.2 for float16, 1 for bfloat16, 4 for 8-bit
            weights or cache. Source: ours.
    """

    python: str = setting("", free=True)
    tensor_parallel_size: int = setting(1, unit="devices", minimum=1)
    replicas: int = setting(1, unit="sidecars", minimum=0, free=True)
    visible_devices: str = setting("", free=True)
    memory_share: float = setting(0.4, minimum=0.01, maximum=1, free=True)
    sleep: int = setting(0, minimum=0, maximum=2, free=True)
    kv_cache_gib: float = setting(0.0, unit="GiB", minimum=0, free=True)
    cpu_threads: int = setting(1, unit="threads", minimum=1, free=True)
    engine_args: str = setting("")
    start_timeout_s: float = setting(600.0, unit="seconds", minimum=1, free=True)
    probe_tolerance: float = setting(
        0.0, unit="nats", minimum=0, limit=(20, "log-ratios are clamped to 20 nats"), free=True
    )


class VllmKind(EngineKind):
    """Stock vLLM in sidecars. One dtype holds whatever is not quantized."""

    name, settings = "vllm", VllmSettings
    precisions = (*_DTYPES, *_QUANTIZED)
    cache_dtypes = ("auto", "fp8", "fp8_e5m2")
    quantized = emulated = _QUANTIZED
    emulated_caches = ("fp8", "fp8_e5m2")
    quantized_compute = "bfloat16"
    temperatures = VLLM_TEMPERATURES
    routes, most_top_logprobs = True, math.inf

    def check(self, arguments: EngineArguments) -> None:
        precision, dtype, settings = arguments.precision, arguments.compute_dtype, arguments.settings
        if precision in _DTYPES and precision != dtype:
            raise ArgumentError(
                "compute_dtype",
                f"got {dtype!r} with `precision`={precision!r}; vLLM has one dtype for weights and "
                "activations, set both alike",
            )
        if precision in _QUANTIZED and dtype != "bfloat16":
            raise ArgumentError(
                "compute_dtype",
                f"got {dtype!r} with `precision`={precision!r}; vLLM computes quantized layers in bfloat16, set that",
            )
        if arguments.lag and settings.sleep:
            raise ArgumentError(
                "sleep",
                f"got {settings.sleep} with `lag`; an engine that sleeps while the trainer trains can't sample "
                "then, set `sleep`=0 or `lag`=0",
            )
        if arguments.model is not None and arguments.platform:
            from dcmdp_jax.engines.vllm.launch import check_planned

            check_planned(arguments)

    def check_machine(self, arguments: EngineArguments) -> str:
        from dcmdp_jax.engines.vllm.launch import check_machine

        return check_machine(arguments)

    def build(self, arguments: EngineArguments) -> Engine:
        from dcmdp_jax.engines.vllm.engine import VllmEngine

        return VllmEngine(arguments)

    def scheme(self, arguments: EngineArguments, precision: str, cache: str, platform: str) -> Scheme:
        """vLLM's roundings in the build for the trainer's platform.

        The CPU build leaves activations alone in fp8_per_block (on processors without AMX-FP8), and stores an FP8 cache
        rounded towards zero.
        """
        products = "" if precision == "full" else precision
        model, parts = arguments.model, arguments.settings.tensor_parallel_size
        if products and model is not None and model.num_experts:
            raise ArgumentError(
                "forward_precision",
                f"got {precision!r} with {model.num_experts} experts; the trainer repeats the "
                "roundings of dense layers alone, set 'full'",
            )
        if products and parts > 1:
            raise ArgumentError(
                "forward_precision",
                f"got {precision!r} with `tensor_parallel_size`={parts}; each device of vLLM rounds "
                "its part of a token by a scale of its own, set 'full' or `tensor_parallel_size`=1",
            )
        cpu = platform == "cpu"
        # Of fused q, k and v with biases: see `launch.engine_arguments`.
        biased = bool(products) and model is not None and model.attention_bias and products != "int8"
        if cpu and products == "fp8_per_block":
            products = "fp8_weights_per_block"
        stored = "" if cache == "full" else cache + "_truncated" * cpu
        return Scheme(products=products, skip_qkv=biased, cache=stored)

    def share_devices(self, settings: VllmSettings, count: int) -> None:
        from dcmdp_jax.engines.vllm.launch import share_memory

        share_memory(settings, count)

    def device_share(self, arguments: EngineArguments) -> DeviceShare | None:
        from dcmdp_jax.engines.vllm.devices import device_share

        return device_share(arguments.settings)

    def memory(self, arguments: EngineArguments, load: Workload, machine: Machine, rows: int) -> list[MemoryPart]:
        from dcmdp_jax.engines.vllm.devices import memory_parts

        return memory_parts(arguments, machine)

    def memory_note(self, arguments: EngineArguments) -> str:
        if arguments.platform == "cpu":
            return ""
        asleep = ", while it samples" * (arguments.settings.sleep > 0)
        return f"besides: vLLM takes {arguments.settings.memory_share:g} of each of its GPUs (`memory_share`){asleep}"


ENGINE = VllmKind()
