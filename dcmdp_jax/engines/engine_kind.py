"""The base class of an engine's kind, and the records it is checked, measured and built with.

Imports nothing heavy: the config asks the kinds. Their methods import what they need when they are
called.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcmdp_jax.errors import ArgumentError, shorten
from dcmdp_jax.models.scheme import Scheme, weights_alone

if TYPE_CHECKING:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from dcmdp_jax.engines.machine import Machine, MemoryPart
    from dcmdp_jax.engines.protocol import Engine, SamplingParams
    from dcmdp_jax.models.config import Lora, ModelConfig
    from dcmdp_jax.models.row_logprobs import Probe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The calls that an engine's memory and programs are planned for.

    Attributes:
        completions: largest number sampled in one call.
        group_size: completions of a prompt.
        prompt_lengths: tokens of each prompt.
        max_completion_tokens: limit of each completion.
        training: whether a trainer has the same devices and takes turns with the engine.
    """

    completions: int
    group_size: int
    prompt_lengths: Sequence[int]
    max_completion_tokens: int
    training: bool = True


@dataclasses.dataclass(frozen=True)
class NoSettings:
    """An engine without settings of its own."""


@dataclasses.dataclass(frozen=True)
class EngineArguments:
    """All that an engine may want to know; each takes what it needs. Errors about these name them.

    Attributes:
        precision, compute_dtype, kv_cache_dtype: number formats of weights, activations and cache,
            of the kind's `choices`, checked before.
        max_total_tokens: longest prompt with its completion.
        max_rows: completions decoded at the same time.
        min_rows: batches of an engine that shrinks them do not get smaller; 0: its own choice.
        settings: the engine's own, an instance of the kind's `settings`.
        routed_experts: return the experts of each token with the episodes (column
            `routed_experts`).
        top_logprobs: k, return the top-k tokens and their log-probs too (columns `top_ids`,
            `top_logprobs`).
        directory: the engine's files, such as a log. Made by the engine.
        model: shape of the model; None while only settings are checked.
        mesh: `mesh(tensor=1, expert=1)` makes the mesh of an engine in this process. It starts
            JAX's devices.
        probe: makes the trainer's log-probs of fixed sequences, to prove a weight sync; it
            compiles.
        prepare: compile programs and start processes beside what the trainer does: for a run of
            many calls.
        first_calls: prompts and distribution of the calls that such a run begins with. None: as
            many completions are scored, of the longest length.
        param_dtype: dtype of the synced parameters.
        platform: where the engine computes, as `EngineKind.check_machine` found it: "cpu", "cuda",
            "tpu"; "" unknown.
        host_devices: devices of each host that is planned for and not here; 0: as many as this
            machine has.
        lag: steps that sampling runs ahead of training (`rollout.lag`).
        lora: shape of the adapters that are synced apart from their base, see
            `EngineKind.takes_adapters`; None: a weight sync is of one model.
    """

    precision: str = "exact"
    compute_dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    max_total_tokens: int = 0
    max_rows: int = 256
    min_rows: int = 0
    settings: Any = NoSettings()
    routed_experts: bool = False
    top_logprobs: int = 0
    directory: Path = Path()
    model: ModelConfig | None = None
    mesh: Callable[..., Mesh] | None = None
    probe: Callable[[], Probe] | None = None
    prepare: bool = False
    first_calls: Sequence[tuple[Sequence[np.ndarray], SamplingParams | None]] = ()
    param_dtype: str = "float32"
    platform: str = ""
    host_devices: int = 0
    lag: int = 0
    lora: Lora | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowerable:
    """A program of the run, not compiled yet.

    Attributes:
        name: "step", "prefill", ...
        trace: gives the traced program.
        resident: bytes on each device of its arguments that live longer than it, by kind.
        row_lengths: lengths of the rows that attention runs over; empty where each row has one
            query.
        tokens: fewest tokens of a device in a forward pass.
    """

    name: str
    trace: Callable[[], jax.stages.Traced]
    resident: dict[str, int]
    row_lengths: tuple[int, ...]
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """An engine's programs at their largest shapes, for `dcmdp plan`.

    Attributes:
        programs: programs to compile.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceShare:
    """How an engine in another process and the trainer share the memory of devices.

    Attributes:
        trainer: the trainer's part of each device, in (0, 1].
        reason: why the rest is not sampled from, for people.
        sampling: the engine's part while it samples; 0 where the trainer's part is its own at all
            times.
    """

    trainer: float
    reason: str
    sampling: float = 0.0


class EngineKind:
    """Record of one kind of inference engine, with its abilities, checks, memory and builder.

    An engine derives a class from this one and makes one instance of it, `ENGINE` in a built-in
    engine's folder.

    Attributes:
        name: name in messages; of a built-in engine the value of `engine`.
        settings: frozen dataclass whose fields are declared with `fields.setting`.
        precisions: allowed precisions of its weights, the first by default; empty: not for the
            caller to choose.
        compute_dtypes, cache_dtypes: allowed dtypes of activations and of the key-value cache.
        quantized: the precisions with quantized weights.
        quantized_compute: the activations' dtype that adds least to their error.
        emulated, emulated_caches: the precisions and caches whose roundings the training stack can
            repeat.
        temperatures: smallest and largest temperature above 0 that it applies unchanged.
        takes_weights: takes the trainer's weights. One that does not holds its own, and can't be
            trained with.
        scores: has `score`.
        routes: can return the experts of each token.
        most_top_logprobs: largest `top_logprobs` that it returns; 0: none.
        own_process: computes in another process. One that does not uses JAX's devices: its rows are
            cut to what fits.
    """

    name: str = ""
    settings: type = NoSettings
    precisions: tuple[str, ...] = ("bfloat16", "float32", "float16")
    compute_dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    cache_dtypes: tuple[str, ...] = ("auto",)
    quantized: tuple[str, ...] = ()
    quantized_compute: str = "float32"
    emulated: tuple[str, ...] = ()
    emulated_caches: tuple[str, ...] = ()
    temperatures: tuple[float, float] = (0.0, math.inf)
    takes_weights: bool = True
    scores: bool = True
    routes: bool = False
    most_top_logprobs: float = 0
    own_process: bool = True

    def build(self, arguments: EngineArguments) -> Engine:
        """Make the engine, without weights.

        Raises:
            UserError: for what can't be.
            EngineError, MemoryError: if it does not start.
        """
        raise NotImplementedError

    def check(self, arguments: EngineArguments) -> None:
        """Refuse settings that do not fit each other, or the model.

        Nothing is loaded or started. Called twice, for the settings alone (`model` None, `platform`
        ""), and when model and platform are known.
        """

    def check_machine(self, arguments: EngineArguments) -> str:
        """Return the platform; refuse what this machine can't do, before JAX starts its devices."""
        return ""

    def takes_adapters(self, settings: Any) -> bool:
        """Whether base, A and B are synced unmerged (`models.lora.Adapted`)."""
        return False

    def scheme(
        self,
        arguments: EngineArguments,
        precision: str,
        cache: str,
        platform: str,
    ) -> Scheme:
        """The roundings of a precision and a cache, each may be "full".

        By default those of the weights, and of a cache to nearest. Refuses what the trainer can't
        repeat.

        Args:
            arguments: the engine's.
            precision, cache: `forward_precision` and `forward_cache` of the trainer.
            platform: platform of the trainer's devices, "" unknown.
        """
        return weights_alone(precision or "full", cache or "full")

    def device_share(self, arguments: EngineArguments) -> DeviceShare | None:
        """Share of the trainer's devices; None where the engine does not compute on them."""
        return None

    def reserve_device_share(self, settings: Any, engines: int) -> None:
        """Leave the share of so many such engines free on the devices, before JAX starts."""

    def memory(
        self,
        arguments: EngineArguments,
        load: Workload,
        machine: Machine,
        rows: int,
    ) -> list[MemoryPart]:
        """Parts of memory with `rows` completions decoded at a time."""
        return []

    def memory_note(self, arguments: EngineArguments) -> str:
        """Memory that is not JAX's and can't be computed here; "" for none."""
        return ""

    def programs(self, arguments: EngineArguments, load: Workload) -> EnginePlan | None:
        """Plan of the programs, for `dcmdp plan`; None: they are not ours."""
        return None

    def describe(self, settings: Any) -> str:
        """Split of the engine, for the plan's line; "" for nothing to say."""
        return ""

    def start(self, arguments: EngineArguments) -> Engine:
        """`build` the engine, and check that it has the methods of `protocol.Engine`.

        Raises:
            UserError, EngineError, MemoryError: see `build`; UserError naming a method that is
                missing.
        """
        engine = self.build(arguments)
        names = ["sync_weights", "generate", "release_weights", "close"]
        if self.scores:
            names.append("score")
        for name in names:
            if not callable(getattr(engine, name, None)):
                raise ArgumentError(
                    "engine",
                    f"{self.name}: build returned {shorten(engine)}, which has no method {name}",
                )
        return engine

    def check_start(self, engine: Engine) -> None:
        """Raise the EngineError of a start that goes on after `build`, if it has failed by now."""

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """Allowed values of the arguments that depend on the engine, by name."""
        choices = {
            "precision": self.precisions,
            "compute_dtype": self.compute_dtypes,
            "kv_cache_dtype": self.cache_dtypes,
        }
        return {name: allowed for name, allowed in choices.items() if allowed}

    def check_top_logprobs(self, count: int) -> None:
        """Refuse more top-k tokens than the engine returns.

        Raises:
            UserError: naming `top_logprobs` and what is allowed.
        """
        if count > self.most_top_logprobs:
            allowed = "none"
            if self.most_top_logprobs:
                allowed = f"at most {self.most_top_logprobs:g} top-k tokens"
            raise ArgumentError(
                "top_logprobs",
                f"got {count}, {self.name} returns {allowed}",
            )

    def check_temperature(self, temperature: float) -> None:
        """See the function `check_temperature`."""
        check_temperature(self.name, temperature, self.temperatures)


def check_temperature(engine: str, temperature: float, allowed: tuple[float, float]) -> None:
    """Refuse a temperature that the engine would change or refuse.

    Raises:
        UserError: naming `temperature` and what is allowed.
    """
    low, high = allowed
    if temperature and not low <= temperature <= high:
        raise ArgumentError(
            "temperature", f"got {temperature}, {engine} takes 0 (greedy) or {low} .. {high}"
        )
