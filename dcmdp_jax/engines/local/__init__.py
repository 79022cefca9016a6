"""The embedded engine, which samples in JAX in this process."""

import dataclasses
import math
from typing import TYPE_CHECKING

from dcmdp_jax.engines.engine_kind import EngineArguments, EngineKind, EnginePlan, Workload
from dcmdp_jax.errors import ArgumentError
from dcmdp_jax.fields import setting
from dcmdp_jax.models.scheme import GROUPED, check_grouped

if TYPE_CHECKING:
    from dcmdp_jax.engines.machine import Machine, MemoryPart
    from dcmdp_jax.engines.protocol import Engine

# Precisions of `models.quantize`, which imports JAX.
_BY_CHANNEL = ("int8", "int4", "int3", "int2", "fp8")
_QUANTIZED = (*_BY_CHANNEL, *GROUPED)


@dataclasses.dataclass(frozen=True)
class LocalSettings:
    """The embedded engine's mesh (`rollout.engine=local`). Devices left over split rows.

    Attributes:
        tensor: Devices that heads, MLP, vocabulary and cache are split over; divides the key-value
            heads.
        expert: Devices that the experts of each layer are split over.
    """

    tensor: int = setting(1, unit="devices", minimum=1, free=True)
    expert: int = setting(1, unit="devices", minimum=1, free=True)


class LocalKind(EngineKind):
    """The embedded engine."""

    name = "local"
    settings = LocalSettings
    precisions = ("exact", "float32", "bfloat16", "float16", *_QUANTIZED)
    cache_dtypes = ("auto", "fp8")
    quantized = emulated = _QUANTIZED
    emulated_caches = ("fp8",)
    routes = True
    own_process = False
    most_top_logprobs = math.inf

    def check(self, arguments: EngineArguments) -> None:
        model = arguments.model
        settings = arguments.settings
        if arguments.compute_dtype == "float16" and arguments.precision in _BY_CHANNEL:
            raise ArgumentError(
                "compute_dtype",
                f"got 'float16' with `precision`={arguments.precision!r}, whose products before "
                "scaling leave float16's range; choose bfloat16 or float32",
            )
        check_grouped(arguments.precision, model, settings.tensor)
        if model is not None:
            from dcmdp_jax.engines.local.layout import check_mesh

            check_mesh(model, settings.tensor, settings.expert)
            limit = model.max_position_embeddings
            if not 2 <= arguments.max_total_tokens <= limit:
                raise ArgumentError(
                    "max_total_tokens",
                    f"got {arguments.max_total_tokens}, must be between 2 and the model's "
                    f"max_position_embeddings={limit}",
                )

    def build(self, arguments: EngineArguments) -> "Engine":
        from dcmdp_jax.engines.local.engine import LocalEngine

        return LocalEngine(arguments)

    def memory(
        self,
        arguments: EngineArguments,
        load: Workload,
        machine: "Machine",
        rows: int,
    ) -> "list[MemoryPart]":
        from dcmdp_jax.engines.local.memory import parts

        return parts(arguments, load, machine, rows)

    def programs(self, arguments: EngineArguments, load: Workload) -> EnginePlan:
        from dcmdp_jax.engines.local.programs import plan_engine

        return plan_engine(arguments, load)

    def describe(self, settings: LocalSettings) -> str:
        return "".join(
            f", {name} {ways}" for name, ways in dataclasses.asdict(settings).items() if ways > 1
        )


ENGINE = LocalKind()
