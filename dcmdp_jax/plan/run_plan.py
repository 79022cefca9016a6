"""A run at full size: its programs compiled for a topology, its memory by kind, the search for what
fits.
"""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from dcmdp_jax.config.algorithm import check_own_remedies
from dcmdp_jax.config.checks import MESH, as_settings, engine_arguments, forward_scheme, of_engine
from dcmdp_jax.config.settings import Config, MeshSettings
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
from dcmdp_jax.models.params import param_shapes
from dcmdp_jax.parallel.mesh import axis_sizes, check_training_mesh, make_mesh, row_shards
from dcmdp_jax.parallel.sharding import bytes_per_device, sharded
from dcmdp_jax.plan.published import model_of
from dcmdp_jax.plan.topologies import CHIPS, Topology, platform_of
from dcmdp_jax.run import memory_use, task, weights
from dcmdp_jax.run.placement import Placement, fit, platform_kernel
from dcmdp_jax.training.build import make_step_programs

GIB = 2**30
_ENGINE_PLATFORM = {"gpu": "cuda", "tpu": "tpu", "cpu": "cpu"}
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
PROGRAMS = ("step", "prefill", "decode", "score")
"""Names of the programs of a run; the last three are the embedded engine's."""


class PlannedRun(NamedTuple):
    """A run whose shapes alone are known.

    Attributes:
        config: the settings.
        model: the model's shape.
        placement: devices, shapes and memory; its memory is by arithmetic, as `dcmdp train
            --dry_run` has it.
    """

    config: Config
    model: ModelConfig
    placement: Placement


class Compiled(NamedTuple):
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


class Phase(NamedTuple):
    """Memory of one device in a phase of the run.

    Attributes:
        name: a program's, or "push" or "sample", whose memory is arithmetic.
        peak: peak bytes of the compiled program; 0 without one.
        beside: bytes held through the phase outside its program's arguments, by kind.
    """

    name: str
    peak: int
    beside: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.peak + sum(self.beside.values())


@dataclasses.dataclass(frozen=True)
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
        """Every compiled program with what stays in memory outside its arguments, and the phases
        without a program.
        """
        found = [
            Phase(name, compiled.peak, self._beside(name))
            for name, compiled in self.programs.items()
        ]
        if self.engine is not None:
            parts = [
                part
                for part in self.run.placement.engine.memory.parts
                if "push" in part.phases and part.each
            ]
            found.append(Phase("push", 0, {part.name: part.each for part in parts}))
        elif (shared := _share(self.run.config)) is not None and shared.sampling:
            share = int(shared.sampling * self.topology.chip.memory_gib * GIB)
            found.append(Phase("sample", 0, self.step.held | {"the engine's share": share}))
        return found

    def _beside(self, name: str) -> dict[str, int]:
        """Memory that is held while a program runs and is none of its arguments."""
        parts = {
            part.name: part.each for part in self.run.placement.engine.memory.parts if part.each
        }
        if name == "step" or self.engine is None:
            return {
                part: size
                for part, size in parts.items()
                if name == "step" and part == memory_use.CUDNN_WORKSPACE
            }
        beside = dict(self.step.held)
        if name in ("prefill", "decode") and self.engine.refills:
            # New rows enter a batch while it decodes.
            beside |= {part: size for part, size in parts.items() if part == PREEMPTED}
            beside |= {"engine's cache": self.engine.cache_bytes} if name == "prefill" else {}
        return beside

    @property
    def fits(self) -> bool:
        """Whether every phase is within what a device has."""
        refused = any(compiled.refused is not None for compiled in self.programs.values())
        return not refused and all(phase.total <= self.usable for phase in self.phases)


def check_run(config: Config, platform: str, devices: int) -> ModelConfig:
    """Refuse what dcmdp train refuses on such devices, without their compiler, and adapters whose
    shape is not given.

    Args:
        config: the settings.
        platform: "tpu" or "gpu".
        devices: how many.

    Returns:
        The model.

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
    platform_kernel(config, platform)
    check_own_remedies(config.algorithm)
    near = CHIPS["h100"].devices_near if platform == "gpu" else devices
    kind, arguments = _engine(
        config, model=model, platform=_ENGINE_PLATFORM[platform], host_devices=min(devices, near)
    )
    with as_settings(of_engine(kind)):
        kind.check(arguments)
    with as_settings(MESH):
        sizes = axis_sizes(
            devices, config.mesh.data, config.mesh.fsdp, config.mesh.tensor, config.mesh.expert
        )
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        sizes = {"num_heads": model.num_heads, "num_experts": model.num_experts}
        check_training_mesh(mesh, **sizes, completions=config.completions_per_mini_batch)
    return model


def _engine(config: Config, **found: Any) -> tuple[EngineKind, EngineArguments]:
    """The engine of a run with what it gets of adapters; a supervised run has none."""
    kind, arguments = engine_arguments(
        config, kind=EngineKind() if config.supervised else None, **found
    )
    lora = config.model.lora if kind.takes_adapters(arguments.settings) else None
    return kind, dataclasses.replace(arguments, lora=lora)


def planned_run(
    config: Config, mesh: Mesh, *, model: ModelConfig | None = None, machine: Machine | None = None
) -> PlannedRun:
    """A run whose shapes alone are asked for: no data, no run directory, prompts of the longest
    length.

    Args:
        config: the settings.
        mesh: the training devices.
        model: None reads it from the settings.
        machine: memory that there is; None looks at this machine.
    """
    model = model or model_of(config)
    platform = mesh.devices.flat[0].platform
    kind, engine = _engine(config, model=model, platform=_ENGINE_PLATFORM.get(platform, platform))
    of_teacher = dataclasses.replace(
        config, model=dataclasses.replace(config.model, path=config.teacher[0])
    )
    completions = config.training.prompts_per_step * config.rollout.group_size
    placement = fit(
        config,
        kind,
        engine,
        mesh=mesh,
        scheme=forward_scheme(config, platform, model=model),
        requests=([config.task.max_prompt_tokens], completions),
        lora=config.model.lora,
        teacher=model_of(of_teacher) if config.loads_teacher else None,
        machine=machine,
    )
    return PlannedRun(config, model, placement)


def plan_step(run: PlannedRun) -> Lowerable:
    """The step that `dcmdp train` would run. Nothing is allocated."""
    config = run.config
    model = run.model
    mesh = run.placement.mesh
    packing = run.placement.packing
    programs = make_step_programs(config, model, run.placement, config.model.lora)
    state, batch = programs.arguments
    held = {
        "parameters": bytes_per_device(state.params),
        "optimizer": bytes_per_device(state.opt_state),
    }
    frozen = None
    if config.model.lora or config.algorithm.kl_coefficient:
        dtype = config.model.lora_base if config.model.lora else config.model.param_dtype
        shapes = param_shapes(model, "bfloat16" if dtype == "int8" else dtype)
        frozen = sharded(shapes, weights.model_shardings(model, config.model.param_dtype, mesh))
        held["frozen base" if config.model.lora else "reference policy"] = bytes_per_device(frozen)
    trace = functools.partial(programs.train_step.trace, state, batch, frozen)
    return Lowerable("step", trace, held, packing.row_lengths, min(predicted_tokens(packing, mesh)))


def predicted_tokens(packing: RowShapes, mesh: Mesh) -> list[int]:
    """Count the tokens that a micro-batch of each bucket predicts on a device: all of a row but the
    first.
    """
    shapes = zip(packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    return [rows // row_shards(mesh) * (length - 1) for rows, length in shapes]


def compile_run(
    config: Config,
    topology: Topology,
    *,
    only: Sequence[str] = (),
    on_program: Callable[[str], None] = lambda name: None,
    refuse: bool = False,
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
        refuse: compile nothing where what the run certainly holds does not fit.
        read: called with the run, a program and its executable; `Compiled.account` has its result.

    Raises:
        UserError: if the mesh does not fit the devices or the model, a setting does not fit the
            model or the platform, or with `refuse`.
    """
    model = check_run(config, platform_of(topology.name), len(topology.devices))
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor, config.mesh.expert
    usable, reason = usable_memory(config, topology)
    run = planned_run(
        config,
        make_mesh(*sizes, devices=topology.devices),
        model=model,
        machine=Machine(platform_of(topology.name), len(topology.devices), usable, None),
    )
    if refuse:
        run.placement.engine.memory.check()
    step = plan_step(run)
    engine = plan_engine(run, run.placement.engine.memory.rows)
    if only and engine is None and "step" not in only:
        raise UserError(
            f"--programs: {', '.join(only)} are the embedded engine's, not "
            f"{config.rollout.engine}'s"
        )
    programs: dict[str, Compiled] = {}
    for program in (step, *(engine.programs if engine else ())):
        if not only or program.name in only:
            on_program(program.name)
            programs[program.name] = compile_program(program, functools.partial(read, run, program))
            jax.clear_caches()
    return CompiledRun(topology, run, step, engine, programs, usable, reason)


def plan_engine(run: PlannedRun, max_rows: int) -> EnginePlan | None:
    """The programs of the engine on the devices of the training mesh; None where they are not ours.

    Args:
        run: see `planned_run`.
        max_rows: completions decoded at a time, at most.

    Raises:
        UserError: if the engine's settings do not divide the devices or the model.
    """
    setup = run.placement.engine
    with as_settings(of_engine(setup.kind)):
        return setup.kind.programs(
            dataclasses.replace(setup.arguments, max_rows=max_rows), setup.workload
        )


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
    """How an engine on the same devices shares them; None where it has others, or is in the
    trainer's process.
    """
    kind, arguments = engine_arguments(config)
    with as_settings(of_engine(kind)):
        return kind.device_share(arguments)


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
        message = " ".join(str(error).removeprefix(f"{_OUT_OF_MEMORY}: ").split())
        used = re.search(r"(?:Used |HLO temporaries \()([\d.]+)([KMGT])", message)
        needed = int(float(used.group(1)) * _UNITS[used.group(2)]) if used else 0
        return Compiled(time.monotonic() - began, needed, refused=message[:200])
    seconds = time.monotonic() - began
    memory = executable.memory_analysis()
    temporary = memory.temp_size_in_bytes
    arguments = memory.argument_size_in_bytes
    # Where the compiler has no figure: everything at once.
    together = arguments + temporary + memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = getattr(memory, "peak_memory_in_bytes", 0) or together
    return Compiled(seconds, peak, temporary, arguments, read(executable))


_WAYS = (1, 2, 4, 8)
# Rows of the splash kernel have a multiple of this length.
_ROW_MULTIPLE = 512
_ROWS = (1, 2, 4)


class Tried(NamedTuple):
    """A candidate and its plan.

    Attributes:
        mesh: the settings.
        micro_batch_tokens: on each device.
        plan: with the step compiled; None if the mesh does not fit the model.
        refused: why, if so.
    """

    mesh: MeshSettings
    micro_batch_tokens: int
    plan: CompiledRun | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether the step fits."""
        return self.plan is not None and self.plan.fits

    @property
    def peak(self) -> int | None:
        """Bytes of the largest phase; None without a plan."""
        return None if self.plan is None else max(phase.total for phase in self.plan.phases)


def table(tried: Sequence[Tried]) -> str:
    """A line for each candidate."""
    lines = ["rank  data fsdp tensor expert  micro_batch_tokens  peak GiB"]
    for rank, one in enumerate(tried, 1):
        mesh = one.mesh
        shape = (
            f"{mesh.data:4} {mesh.fsdp:4} {mesh.tensor:6} {mesh.expert:6}  "
            f"{one.micro_batch_tokens:18}"
        )
        said = one.refused or f"{one.peak / GIB:8.2f}{'' if one.fits else '  does not fit'}"
        lines.append(f"{rank if one.fits else '-':>4}  {shape}  {said}")
    return "\n".join(lines if any(one.fits for one in tried) else [*lines, "nothing of these fits"])


def search_record(tried: Sequence[Tried]) -> dict[str, Any]:
    """The table as a tree for JSON."""
    return {
        "candidates": [
            {
                "mesh": dataclasses.asdict(one.mesh),
                "micro_batch_tokens": one.micro_batch_tokens,
                "refused": one.refused,
                "fits": one.fits,
                "peak_bytes": one.peak,
            }
            for one in tried
        ]
    }


def search(config: Config, topology: Topology, *, tell: Callable[[str], None]) -> list[Tried]:
    """Compile the step for every candidate; minutes for each of a large model.

    Meshes: tensor 1, 2, 4, 8 and, with experts, expert 1, 2, 4, 8, the rest of the devices fsdp.
    Micro-batches of 1, 2 and 4 rows on each device; no more once one does not fit. Where what a
    phase holds for certain does not fit, nothing is compiled.

    Args:
        config: the settings.
        topology: the devices.
        tell: called with a line for each candidate.

    Returns:
        The candidates: fitting ones first, then those with the fewest devices that exchange
        activations in every layer, then the fewest gathers of parameters, by larger micro-batches.

    Raises:
        UserError: if all are refused for one and the same reason.
    """
    tried: list[Tried] = []
    longest = -(-config.max_total_tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE
    for mesh in candidates(len(topology.devices), model_of(config).num_experts > 0):
        for rows in _ROWS:
            tokens = rows * longest
            training = dataclasses.replace(config.training, micro_batch_tokens=tokens)
            changed = dataclasses.replace(config, mesh=mesh, training=training)
            try:
                one = Tried(
                    mesh, tokens, compile_run(changed, topology, only=("step",), refuse=True)
                )
            except UserError as error:
                one = Tried(mesh, tokens, None, str(error))
            tried.append(one)
            result = (
                one.refused or f"{one.peak / GIB:.2f} GiB{'' if one.fits else ', does not fit'}"
            )
            tell(
                f"fsdp {mesh.fsdp}, tensor {mesh.tensor}, expert {mesh.expert}, {tokens} tokens a "
                f"device: {result}"
            )
            if not one.fits:
                break
    if len({one.refused for one in tried}) == 1 and tried[0].plan is None:
        raise UserError(tried[0].refused)
    return sorted(
        tried,
        key=lambda one: (not one.fits, one.mesh.tensor * one.mesh.expert, -one.micro_batch_tokens),
    )


def candidates(devices: int, experts: bool) -> Iterator[MeshSettings]:
    """Meshes to try, the ones without a tensor axis first."""
    for expert in _WAYS if experts else (1,):
        for tensor in _WAYS:
            if devices % (expert * tensor) == 0:
                yield MeshSettings(
                    data=1, fsdp=devices // (expert * tensor), tensor=tensor, expert=expert
                )
