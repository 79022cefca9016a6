"""Stock vLLM in processes of its own."""

import dataclasses
import math
from typing import TYPE_CHECKING

from dcmdp_jax.engines.engine_kind import DeviceShare, EngineArguments, EngineKind, Workload
from dcmdp_jax.engines.vllm.settings import VllmSettings
from dcmdp_jax.engines.vllm_common import FP8_CACHES, VLLM_TEMPERATURES, cache_rounding
from dcmdp_jax.errors import ArgumentError, UserError
from dcmdp_jax.inputs import is_address
from dcmdp_jax.models.scheme import Scheme

if TYPE_CHECKING:
    from dcmdp_jax.engines.machine import Machine, MemoryPart
    from dcmdp_jax.engines.protocol import Engine

_DTYPES = ("float32", "float16", "bfloat16")
_QUANTIZED = ("int8", "fp8", "fp8_per_block")


class VllmKind(EngineKind):
    """Stock vLLM in processes of its own. One dtype holds whatever is not quantized."""

    name = "vllm"
    settings = VllmSettings
    precisions = (*_DTYPES, *_QUANTIZED)
    cache_dtypes = ("auto", *FP8_CACHES)
    quantized = emulated = _QUANTIZED
    emulated_caches = FP8_CACHES
    quantized_compute = "bfloat16"
    temperatures = VLLM_TEMPERATURES
    routes = True
    most_top_logprobs = math.inf

    def check(self, arguments: EngineArguments) -> None:
        precision = arguments.precision
        settings = arguments.settings
        dtype = precision if precision in _DTYPES else "bfloat16"
        if arguments.compute_dtype != dtype:
            raise ArgumentError(
                "compute_dtype",
                f"got {arguments.compute_dtype!r} with `precision`={precision!r}; vLLM computes it "
                f"in {dtype}, set that",
            )
        if arguments.lag and settings.sleep:
            raise ArgumentError(
                "sleep",
                f"got {settings.sleep} with `lag`; an engine that sleeps while the trainer trains "
                "can't sample then, set `sleep`=0 or `lag`=0",
            )

        unused = "address"
        if settings.placement == "ray":
            unused = "visible_devices"
        value = getattr(settings, unused)
        if value:
            raise ArgumentError(
                unused, f"got {value!r} with `placement`={settings.placement}; leave it empty"
            )
        host = settings.address.removeprefix("ray://")
        if settings.address not in ("", "auto") and not is_address(host):
            raise ArgumentError(
                "address",
                f"got {settings.address!r}, must be auto, HOST:PORT or ray://HOST:PORT (1 to "
                "65535; an IPv6 host in brackets)",
            )
        if settings.min_replicas > settings.known_replicas:
            raise ArgumentError(
                "min_replicas", f"got {settings.min_replicas} of {settings.replicas} `replicas`"
            )
        if arguments.model is not None and arguments.platform:
            from dcmdp_jax.engines.vllm.launch import check_planned

            check_planned(arguments)

    def check_machine(self, arguments: EngineArguments) -> str:
        from dcmdp_jax.engines.vllm.launch import check_machine

        return check_machine(arguments)

    def takes_adapters(self, settings: VllmSettings) -> bool:
        return settings.adapters

    def build(self, arguments: EngineArguments) -> "Engine":
        from dcmdp_jax.engines.vllm.engine import VllmEngine

        return VllmEngine(arguments)

    def check_start(self, engine: "Engine") -> None:
        engine.check_start()

    def scheme(
        self,
        arguments: EngineArguments,
        precision: str,
        cache: str,
        platform: str,
    ) -> Scheme:
        """vLLM's roundings in the build for the trainer's platform.

        The CPU build leaves activations alone in fp8_per_block (on processors without AMX-FP8), and
        stores an FP8 cache rounded towards zero.
        """
        rounding = cache_rounding(cache, platform)
        if precision == "full":
            return Scheme(cache=rounding)

        model = arguments.model
        experts = model is not None and model.num_experts
        if experts or arguments.settings.tensor_parallel_size > 1:
            raise ArgumentError(
                "forward_precision",
                f"got {precision!r}; the trainer repeats vLLM's roundings of dense layers alone, "
                "with `tensor_parallel_size`=1; set 'full'",
            )
        # Of fused q, k and v with biases: see `launch.engine_arguments`.
        skip_qkv = model is not None and model.attention_bias and precision != "int8"
        if platform == "cpu" and precision == "fp8_per_block":
            precision = "fp8_weights_per_block"
        return Scheme(products=precision, skip_qkv=skip_qkv, cache=rounding)

    def reserve_device_share(self, settings: VllmSettings, engines: int) -> None:
        """Divide the memory of GPUs between this process and sidecars; must run before JAX does.

        Does nothing without vLLM's CUDA build: an engine that can't start says so itself.

        Raises:
            UserError: if they don't fit together with this process.
        """
        from dcmdp_jax.engines.vllm import devices, launch

        try:
            _, platform = launch.installed_vllm(settings.python)
        except UserError:
            return
        if platform == "cuda" and engines:
            devices.reserve_device_share(
                dataclasses.replace(settings, memory_share=engines * settings.memory_share)
            )

    def device_share(self, arguments: EngineArguments) -> DeviceShare | None:
        from dcmdp_jax.engines.vllm.devices import device_share

        return device_share(arguments.settings)

    def memory(
        self,
        arguments: EngineArguments,
        load: Workload,
        machine: "Machine",
        rows: int,
    ) -> "list[MemoryPart]":
        from dcmdp_jax.engines.vllm.memory import memory_parts

        return memory_parts(arguments, machine)

    def memory_note(self, arguments: EngineArguments) -> str:
        if arguments.platform == "cpu":
            return ""
        settings = arguments.settings
        asleep = ", while it samples" if settings.sleep else ""
        return (
            f"besides: vLLM takes {settings.memory_share:g} of each of its GPUs "
            f"(`memory_share`){asleep}"
        )


ENGINE = VllmKind()
