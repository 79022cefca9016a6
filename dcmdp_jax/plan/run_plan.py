"""A run at full size: programs compiled for a topology, memory by kind."""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from dcmdp_jax.config.algorithm import check_own_remedies
from dcmdp_jax.config.checks import (
    MESH,
    as_settings,
    engine_arguments,
    engine_of_run,
    forward_scheme,
    of_engine,
)
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.row_layout import RowShapes
from dcmdp_jax.engines.engine_kind import (
    DeviceShare,
    EngineArguments,
    EngineKind,
    EnginePlan,
    Lowerable,
)
from dcmdp_jax.engines.machine import PREEMPTED, Machine
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.parallel.mesh import axis_sizes, check_training_mesh, make_mesh, row_shards
from dcmdp_jax.parallel.sharding import bytes_per_device
from dcmdp_jax.plan.published import model_of
from dcmdp_jax.plan.topologies import CHIPS, Topology
from dcmdp_jax.run import memory_use, task
from dcmdp_jax.run.placement import Placement, fit, platform_kernel
from dcmdp_jax.training.step_programs import make_step_programs

GIB = 2**30
_ENGINE_PLATFORM = {"gpu": "cuda"}
"""JAX's name of a platform -> an engine's, where that is another one."""
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
PROGRAMS = ("step", "prefill", "decode", "score")
"""Names of the programs of a run; the last three are the embedded engine's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run whose shapes alone are known.

    Attributes:
        config: the settings.
        model: the model's shape.
        placement: devices, shapes and memory; its memory is by arithmetic, as `dcmdp train
            --dry-run` has it.
    """

    config: Config
    model: ModelConfig
    placement: Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled program, on one device.

    Attributes:
        seconds: compilation time.
        peak: largest number of bytes in use, arguments included, as the compiler reports it; what
            it would need, if it says so, of a program that does not fit.
        temporary: bytes of temporary memory; 0 if it does not fit.
        arguments: bytes of the arguments.
        account: result of the reader given to `compile_program`; None without one.
        refused: why the compiler refused it; None for a compiled program.
    """

    seconds: float
    peak: int
    temporary: int = 0
    arguments: int = 0
    account: Any = None
    refused: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Memory of one device in a phase of the run.

    Attributes:
        name: a program's, or "weight_sync" or "sample", whose memory is arithmetic.
        peak: peak bytes of the compiled program; 0 without one.
        beside: bytes held through the phase outside its program's arguments, by kind.
    """

    name: str
    peak: int = 0
    beside: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.peak + sum(self.beside.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledRun:
    """Memory of a run on a topology.

    Attributes:
        topology: the devices.
        run: what was planned.
        step: the training step.
        engine: plan of an engine in the trainer's process; None with another, whose programs are
            not ours.
        programs: compiled, by name.
        usable: bytes of a device that the run may use.
        usable_reason: explanation of that number.
    """

    topology: Topology
    run: PlannedRun
    step: Lowerable
    engine: EnginePlan | None
    programs: dict[str, Compiled]
    usable: int
    usable_reason: str

    @property
    def phases(self) -> list[Phase]:
        """The compiled programs as phases, then one by arithmetic: the weight sync or sampling."""
        phases = []
        for name, compiled in self.programs.items():
            phases.append(Phase(name=name, peak=compiled.peak, beside=self._beside(name)))
        # An engine in this process: what it holds during a weight sync, by arithmetic.
        if self.engine is not None:
            synced = {}
            for component in self.run.placement.engine.memory.parts:
                if "weight_sync" in component.phases and component.per_device:
                    synced[component.name] = component.per_device
            phases.append(Phase(name="weight_sync", beside=synced))
            return phases

        # An engine in another process on the same devices: its share while it samples.
        share = _share(self.run.config)
        if share is not None and share.sampling:
            size = int(share.sampling * self.topology.chip.memory_gib * GIB)
            phases.append(
                Phase(name="sample", beside=self.step.resident | {"the engine's share": size})
            )
        return phases

    def _beside(self, name: str) -> dict[str, int]:
        """Memory that is held while a program runs and is none of its arguments."""
        beside = {}
        counted = ""
        if name == "step":
            counted = memory_use.CUDNN_WORKSPACE
        else:
            beside |= self.step.resident
            # New rows enter a batch while it decodes.
            if name in ("prefill", "decode") and self.engine.refills:
                counted = PREEMPTED
        for component in self.run.placement.engine.memory.parts:
            if component.name == counted and component.per_device:
                beside[counted] = component.per_device
        if name == "prefill" and counted:
            beside["engine's cache"] = self.engine.cache_bytes
        return beside

    @property
    def fits(self) -> bool:
        """Whether every phase is within what a device has."""
        if any(compiled.refused is not None for compiled in self.programs.values()):
            return False
        return all(phase.total <= self.usable for phase in self.phases)


def check_run(config: Config, platform: str, devices: int) -> None:
    """Refuse what dcmdp train refuses on such devices, and adapters whose shape is not given.

    Needs no compiler of the devices.

    Args:
        config: the settings.
        platform: "tpu" or "gpu".
        devices: how many.

    Raises:
        UserError: naming the setting, if the mesh does not fit the devices or the model, or a
            setting does not fit the model or the platform.
    """
    model = model_of(config)
    task.check_model(config, model)
    if config.model.adapter and config.model.lora is None:
        raise UserError(
            "config.model.adapter: a plan does not read it; give the shape as model.lora_rank, "
            "lora_alpha"
        )
    # Raises if the kernel does not run there.
    platform_kernel(config.model, platform)
    check_own_remedies(config.algorithm)
    # A host of any GPUs is taken to have at most as many as one of H100s.
    host_devices = devices
    if platform == "gpu":
        host_devices = min(devices, CHIPS["h100"].devices_near)
    kind, arguments = _engine(
        config,
        platform,
        model=model,
        host_devices=host_devices,
    )
    with as_settings(of_engine(kind)):
        kind.check(arguments)

    with as_settings(MESH):
        sizes = axis_sizes(devices, config.mesh.sizes)
        check_training_mesh(
            AbstractMesh(tuple(sizes.values()), tuple(sizes)),
            num_heads=model.num_heads,
            num_experts=model.num_experts,
            completions=config.completions_per_mini_batch,
        )


def _engine(config: Config, platform: str, **arguments: Any) -> tuple[EngineKind, EngineArguments]:
    """The engine of a run with what it gets of adapters."""
    kind = engine_of_run(config)
    platform = _ENGINE_PLATFORM.get(platform, platform)
    engine = engine_arguments(config, kind, platform=platform, **arguments)
    lora = config.model.lora if kind.takes_adapters(engine.settings) else None
    return kind, dataclasses.replace(engine, lora=lora)


def planned_run(
    config: Config,
    mesh: Mesh,
    *,
    model: ModelConfig | None = None,
    machine: Machine | None = None,
) -> PlannedRun:
    """Plan a run by shapes alone: no data, no run directory, prompts of the longest length.

    Args:
        config: the settings.
        mesh: the training devices.
        model: None reads it from the settings.
        machine: memory that there is; None looks at this machine.
    """
    model = model or model_of(config)
    platform = mesh.devices.flat[0].platform
    kind, engine = _engine(config, platform, model=model)
    teacher = None
    if config.loads_teacher:
        teacher_model = dataclasses.replace(config.model, path=config.teacher[0])
        teacher = model_of(dataclasses.replace(config, model=teacher_model))
    completions = config.training.prompts_per_step * config.rollout.group_size
    shapes = memory_use.TrainingShapes(
        config=config,
        model=model,
        prompt_lengths=[config.task.max_prompt_tokens],
        completions=completions,
        lora=config.model.lora,
        teacher=teacher,
    )
    placement = fit(
        shapes,
        kind,
        engine,
        mesh=mesh,
        scheme=forward_scheme(config, platform, model=model),
        machine=machine,
    )
    return PlannedRun(config=config, model=model, placement=placement)


def plan_step(run: PlannedRun) -> Lowerable:
    """The step that `dcmdp train` would run. Nothing is allocated."""
    config = run.config
    settings = config.model
    mesh = run.placement.mesh
    packing = run.placement.packing
    programs = make_step_programs(config, run.model, run.placement, settings.lora)
    state, _, frozen = programs.arguments
    resident_bytes = {
        "parameters": bytes_per_device(state.params),
        "optimizer": bytes_per_device(state.opt_state),
    }
    if frozen is not None:
        kind = "frozen base" if settings.lora else "reference policy"
        resident_bytes[kind] = bytes_per_device(frozen)
    return Lowerable(
        name="step",
        trace=functools.partial(programs.train_step.trace, *programs.arguments),
        resident=resident_bytes,
        row_lengths=packing.row_lengths,
        # Of the bucket with the fewest: an array of all logits is at least this large in each.
        tokens=min(predicted_tokens(packing, mesh)),
    )


def predicted_tokens(packing: RowShapes, mesh: Mesh) -> list[int]:
    """Tokens that a micro-batch of each bucket predicts on a device: all of a row but the first."""
    shapes = zip(packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    return [rows // row_shards(mesh) * (length - 1) for rows, length in shapes]


def compile_run(
    config: Config,
    topology: Topology,
    *,
    only: Sequence[str] = (),
    on_program: Callable[[str], None] = lambda name: None,
    read: Callable[
        [PlannedRun, Lowerable, jax.stages.Compiled], Any
    ] = lambda run, program, executable: None,
) -> CompiledRun:
    """Compile the programs of a run for a topology.

    Args:
        config: the settings; `config.mesh` has to fit the topology.
        topology: the devices.
        only: names of the programs to compile; empty for all.
        on_program: called with a program's name before it is compiled.
        read: called with the run, a program and its executable; `Compiled.account` has its result.

    Raises:
        UserError: if the mesh does not fit the devices or the model, a setting does not fit the
            model or the platform.
    """
    platform = topology.chip.platform
    check_run(config, platform, len(topology.devices))
    usable, reason = usable_memory(config, topology)
    mesh = make_mesh(
        *config.mesh.sizes,
        devices=topology.devices,
    )
    run = planned_run(
        config,
        mesh,
        machine=Machine(
            platform=platform,
            devices=len(topology.devices),
            device_bytes=usable,
            host_bytes=None,
        ),
    )
    step = plan_step(run)
    engine = plan_engine(run, run.placement.engine.memory.rows)
    if only and engine is None and "step" not in only:
        raise UserError(
            f"--programs: {', '.join(only)} are the embedded engine's, not "
            f"{config.rollout.engine}'s"
        )

    programs = [step]
    if engine is not None:
        programs += engine.programs
    compiled = {}
    for program in programs:
        if not only or program.name in only:
            on_program(program.name)
            compiled[program.name] = compile_program(program, functools.partial(read, run, program))
            jax.clear_caches()
    return CompiledRun(
        topology=topology,
        run=run,
        step=step,
        engine=engine,
        programs=compiled,
        usable=usable,
        usable_reason=reason,
    )


def plan_engine(run: PlannedRun, max_rows: int) -> EnginePlan | None:
    """The programs of the engine on the devices of the training mesh; None where they are not ours.

    Args:
        run: see `planned_run`.
        max_rows: completions decoded at a time, at most.

    Raises:
        UserError: if the engine's settings do not divide the devices or the model.
    """
    setup = run.placement.engine
    arguments = dataclasses.replace(setup.arguments, max_rows=max_rows)
    with as_settings(of_engine(setup.kind)):
        return setup.kind.programs(arguments, setup.workload)


def usable_memory(config: Config, topology: Topology) -> tuple[int, str]:
    """Bytes of each device that JAX may use, and a note on them.

    Raises:
        UserError: if an engine on the same devices leaves too little.
    """
    chip = topology.chip
    share = _share(config)
    if share is None:
        return int(chip.usable_gib * GIB), f"of {chip.memory_gib:g} GiB"
    return int(chip.memory_gib * share.trainer * GIB), f"{chip.memory_gib:g} GiB {share.reason}"


def _share(config: Config) -> DeviceShare | None:
    """How an engine on the same devices shares them; None with others, or in the same process."""
    kind = engine_of_run(config)
    with as_settings(of_engine(kind)):
        return kind.device_share(engine_arguments(config, kind))


def compile_program(program: Lowerable, read: Callable[[jax.stages.Compiled], Any]) -> Compiled:
    """Lower and compile a program. A program that does not fit is a result too.

    Args:
        program: the program.
        read: called with the executable, which is not kept; its result is kept as `account`.

    Raises:
        jax.errors.JaxRuntimeError: if the compiler fails for another reason than memory.
    """
    began = time.monotonic()
    try:
        executable = program.trace().lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if _OUT_OF_MEMORY not in str(error):
            raise
        seconds = time.monotonic() - began
        message = " ".join(str(error).removeprefix(f"{_OUT_OF_MEMORY}: ").split())
        needed = 0
        match = re.search(r"(?:Used |HLO temporaries \()([\d.]+)([KMGT])", message)
        if match:
            needed = int(float(match.group(1)) * _UNITS[match.group(2)])
        return Compiled(seconds=seconds, peak=needed, refused=message[:200])

    seconds = time.monotonic() - began
    memory = executable.memory_analysis()
    temporary = memory.temp_size_in_bytes
    arguments = memory.argument_size_in_bytes
    peak = memory.peak_memory_in_bytes
    if not peak:
        # The compiler has no figure: everything at once.
        peak = arguments + temporary + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        seconds=seconds,
        peak=peak,
        temporary=temporary,
        arguments=arguments,
        account=read(executable),
    )
