"""What the program knows of an engine before there is one: `EngineKind`, one record in each engine's folder.

Imports nothing heavy: the config asks the records. Their functions import what they need when they are called.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dcmdp_jax.errors import UserError
from dcmdp_jax.models.scheme import Scheme, weights_alone

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dcmdp_jax.engines.protocol import Engine
    from dcmdp_jax.engines.sidecar.probe import Probe
    from dcmdp_jax.machine import Machine, Part
    from dcmdp_jax.models.config import ModelConfig
    from dcmdp_jax.parallel.sharding import Lowerable


class Workload(NamedTuple):
    """What an engine will be asked, for its memory and its programs.

    Attributes:
        completions: largest number sampled in one call.
        group_size: completions of a prompt.
        prompt_lengths: tokens of each prompt.
        max_completion_tokens: limit of each completion.
        param_dtype: of the parameters that are pushed.
        training: whether a trainer has the same devices and takes turns with the engine.
    """

    completions: int
    group_size: int
    prompt_lengths: Sequence[int]
    max_completion_tokens: int
    param_dtype: str
    training: bool = True


@dataclasses.dataclass(frozen=True)
class EngineArguments:
    """All that an engine may want to know; each takes what it needs. Errors about these name them.

    Attributes:
        precision, compute_dtype, kv_cache_dtype: of the weights, the activations, the cache.
        max_total_tokens: longest prompt with its completion.
        max_rows: completions decoded at the same time.
        min_rows: batches of an engine that shrinks them do not get smaller; 0: its own choice.
        settings: its own, of the kind's `settings`.
        routed_experts: return the experts of each token with the episodes.
        directory: for its files, such as a log. Made by the engine.
        model: shape of the model; None while only settings are checked.
        mesh: `mesh(tensor=1, expert=1)` makes the mesh of an engine in this process. It starts JAX's devices.
        probe: makes the trainer's log-probs of fixed sequences, to prove a push; it compiles.
        prepare: compile programs of later calls beside the trainer's first step: for a run of many calls.
        platform: where the engine computes, as `EngineKind.check_machine` found it: "cpu", "cuda", "tpu"; "" unknown.
        host_devices: devices of each host that is planned for and not here; 0: those of this machine.
    """

    precision: str
    compute_dtype: str
    kv_cache_dtype: str
    max_total_tokens: int
    max_rows: int
    min_rows: int
    settings: Any
    routed_experts: bool = False
    directory: Path = Path()
    model: ModelConfig | None = None
    mesh: Callable[..., Mesh] | None = None
    probe: Callable[[], Probe] | None = None
    prepare: bool = False
    platform: str = ""
    host_devices: int = 0

    @property
    def common(self) -> dict[str, Any]:
        """The arguments that every engine with weights of the trainer's takes."""
        names = ("precision", "compute_dtype", "kv_cache_dtype", "max_total_tokens", "max_rows", "routed_experts")
        return {name: getattr(self, name) for name in names}


class EnginePlan(NamedTuple):
    """An engine's programs at their largest shapes, for `dcmdp plan`.

    Attributes:
        programs: to be compiled.
        weights_bytes, cache_bytes: on each device; the cache of a full batch of the longest rows.
        rows: completions decoded at a time.
        slots: cache slots of a row.
        refills: whether a step has more completions than rows, so that some wait.
    """

    programs: tuple[Lowerable, ...]
    weights_bytes: int
    cache_bytes: int
    rows: int
    slots: int
    refills: bool


class DeviceShare(NamedTuple):
    """How an engine in another process and the trainer share the memory of devices.

    Attributes:
        trainer: the trainer's part of each device, in (0, 1].
        reason: what the rest is, for people.
        sampling: the engine's part while it samples; 0 where the trainer's part is its own at all times.
    """

    trainer: float
    reason: str
    sampling: float = 0.0


@dataclasses.dataclass(frozen=True)
class NoSettings:
    """An engine without settings of its own."""


@dataclasses.dataclass(frozen=True)
class EngineKind:
    """One kind of inference engine: what it can do, and functions that check, measure and build it.

    Attributes:
        name: in messages; of a built-in one the value of `engine`.
        build: arguments -> an engine without weights (`protocol.Engine`). Raises UserError for what can't be,
            EngineError or MemoryError if it does not start.
        settings: frozen dataclass whose fields are declared with `fields.setting`.
        precisions: of its weights, the first by default; empty: not for the caller to choose.
        compute_dtypes, cache_dtypes: of activations; of the key-value cache.
        quantized: the precisions with quantized weights.
        quantized_compute: the activations beside them that add least to their error.
        emulated, emulated_caches: the precisions and caches whose roundings the training stack can repeat.
        temperatures: smallest and largest that it samples at as they are, besides 0.
        pushes: takes the trainer's weights. One that does not holds its own, and can't be trained with.
        scores: has `score`.
        routes: can return the experts of each token.
        own_process: computes in another process. One that does not uses JAX's devices: its rows are cut to what fits.
        scheme: (arguments, forward_precision, forward_cache, platform) -> the roundings of this precision and cache,
            each may be "full"; platform of the trainer's devices, "" unknown. Refuses what the trainer can't repeat.
            By default the weights alone, and a cache to nearest.
        check_settings: refuses settings that do not fit each other; `model` is None, nothing is touched.
        check_lag: refuses settings with which the engine can't sample while the trainer trains (`rollout.lag`).
        check_machine: (arguments) -> platform. Refuses what this machine can't do, before JAX starts its devices.
        check_model: (arguments, platform), refuses a model, before anything is loaded.
        share_devices: (settings, count), leaves devices' memory to `count` such engines, before JAX starts.
        device_share: (arguments) -> DeviceShare where it computes on the trainer's devices, else None.
        memory: (arguments, workload, machine, rows) -> parts, with `rows` completions decoded at a time.
        memory_note: (arguments) -> memory that is not JAX's and can't be computed here; "" for none.
        programs: (arguments, workload) -> EnginePlan for `dcmdp plan`, or None: its programs are not ours.
        describe: (settings) -> how it is split, for the plan's line; "" for nothing to say.
    """

    name: str
    build: Callable[[EngineArguments], Engine]
    settings: type = NoSettings
    precisions: tuple[str, ...] = ("bfloat16", "float32", "float16")
    compute_dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    cache_dtypes: tuple[str, ...] = ("auto",)
    quantized: tuple[str, ...] = ()
    quantized_compute: str = "float32"
    emulated: tuple[str, ...] = ()
    emulated_caches: tuple[str, ...] = ()
    temperatures: tuple[float, float] = (0.0, math.inf)
    pushes: bool = True
    scores: bool = True
    routes: bool = False
    own_process: bool = True
    scheme: Callable[[EngineArguments, str, str, str], Scheme] = lambda arguments, precision, cache, platform: (
        weights_alone(precision or "full", cache or "full")
    )
    check_settings: Callable[[EngineArguments], None] = lambda arguments: None
    check_lag: Callable[[EngineArguments], None] = lambda arguments: None
    check_machine: Callable[[EngineArguments], str] = lambda arguments: ""
    check_model: Callable[[EngineArguments, str], None] = lambda arguments, platform: None
    share_devices: Callable[[Any, int], None] = lambda settings, count: None
    device_share: Callable[[EngineArguments], DeviceShare | None] = lambda arguments: None
    memory: Callable[[EngineArguments, Workload, Machine, int], list[Part]] = lambda arguments, load, machine, rows: []
    memory_note: Callable[[EngineArguments], str] = lambda arguments: ""
    programs: Callable[[EngineArguments, Workload], EnginePlan | None] = lambda arguments, load: None
    describe: Callable[[Any], str] = lambda settings: ""

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """Allowed values of the arguments that depend on the engine, by name."""
        found = {
            "precision": self.precisions, "compute_dtype": self.compute_dtypes, "kv_cache_dtype": self.cache_dtypes,
        }  # fmt: skip
        return {name: allowed for name, allowed in found.items() if allowed}

    def check_temperature(self, temperature: float) -> None:
        """Refuse a temperature that the engine would change or refuse.

        Raises:
            UserError: naming `temperature` and what is allowed.
        """
        low, high = self.temperatures
        if temperature and not low <= temperature <= high:
            raise UserError(f"temperature: got {temperature}, {self.name} takes 0 (greedy) or {low} .. {high}")


def later(place: str) -> Callable[..., Any]:
    """The function at `module:NAME`, which is imported when it is called."""
    module, _, name = place.partition(":")
    return lambda *given: getattr(importlib.import_module(module), name)(*given)
