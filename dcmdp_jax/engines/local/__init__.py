"""The embedded engine: it samples in JAX, in this process."""

from __future__ import annotations

import dataclasses

from dcmdp_jax.engines.kind import EngineArguments, EngineKind, later
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import setting

_QUANTIZED = ("int8", "int4", "int3", "int2", "fp8")
"""Those of `models.quantize`, which imports JAX."""


@dataclasses.dataclass(frozen=True)
class LocalSettings:
    """The embedded engine's mesh, used with `rollout.engine=local`. Devices that are left over split rows.

    Attributes:
        tensor: Devices that heads, MLP, vocabulary and cache are split over; divides the key-value heads.
        expert: Devices that the experts of each layer are split over.
    """

    tensor: int = setting(1, unit="devices", minimum=1, free=True)
    expert: int = setting(1, unit="devices", minimum=1, free=True)


def _check_settings(arguments: EngineArguments) -> None:
    if arguments.compute_dtype == "float16" and arguments.precision in _QUANTIZED:
        raise UserError(
            f"compute_dtype: got 'float16' with `precision`={arguments.precision!r}, whose products before scaling "
            "leave float16's range; choose bfloat16 or float32"
        )


ENGINE = EngineKind(
    name="local",
    build=later("dcmdp_jax.engines.local.engine:build"),
    settings=LocalSettings,
    precisions=("exact", "float32", "bfloat16", "float16", *_QUANTIZED),
    cache_dtypes=("auto", "fp8"),
    quantized=_QUANTIZED,
    emulated=_QUANTIZED,
    emulated_caches=("fp8",),
    routes=True,
    own_process=False,
    check_settings=_check_settings,
    check_model=later("dcmdp_jax.engines.local.layout:check_model"),
    memory=later("dcmdp_jax.engines.local.memory:parts"),
    programs=later("dcmdp_jax.engines.local.programs:plan_engine"),
    describe=lambda settings: "".join(
        f", {name} {ways}" for name, ways in dataclasses.asdict(settings).items() if ways > 1
    ),
)
