"""Memory of a run by arithmetic, before anything is allocated, by kind and phase.

Counts arrays with known shapes: parameters, moments, gradients, the engine's weights, its cache. A
worst case is marked ~. Temporary memory of the training step, its activations and logits, is not
counted: `dcmdp plan` has it from the compiler. Devices of a CPU share the host's memory and count
as the host.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dcmdp_jax.config.checks import as_settings, in_settings, of_engine
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.episode import COLUMNS, column_shapes
from dcmdp_jax.data.packing import abstract_batch
from dcmdp_jax.data.row_layout import RowShapes
from dcmdp_jax.engines.engine_kind import EngineArguments, EngineKind, Workload
from dcmdp_jax.engines.machine import MEMORY_PHASES, Machine, MemoryPart
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.engines.sidecar.segments import available_bytes
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.attention import statistics_kept
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.declare import Declaration
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.lora import trained
from dcmdp_jax.models.params import declared_axes, declared_shapes, model_declarations, num_params
from dcmdp_jax.number_format import text_table
from dcmdp_jax.parallel.mesh import row_shards
from dcmdp_jax.parallel.sharding import (
    DATA,
    bytes_per_device,
    data_parallel_only,
    param_shardings,
    sharded,
    total_bytes,
)
from dcmdp_jax.run.weights import frozen_shapes
from dcmdp_jax.types import Params

_GIB = 2**30
_WEIGHT_SYNC = frozenset({"weight_sync"})
_SAMPLE = frozenset({"sample"})
_STEP = frozenset({"step"})
_Maker = Callable[..., MemoryPart]
_NOT_COUNTED = "not counted: programs, temporary memory of the training step (`dcmdp plan`)"
CUDNN_WORKSPACE = "cuDNN's workspace"
"""A part that a compiler without a GPU can't see: 8 bytes of each query's element for each segment
that a row may have, by what cuDNN 9.19 took on an H200 for 7 segments a row and for 16.
"""


@dataclasses.dataclass(frozen=True)
class _Peak:
    """The largest use of a location: "device" or "host".

    Attributes:
        location: the location.
        label: its name for people.
        capacity: its bytes; None if unknown.
        phase: the phase of the largest use.
        needed: bytes of that use.
    """

    location: str
    _: dataclasses.KW_ONLY
    label: str
    capacity: int | None
    phase: str
    needed: int


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """The parts of a run, and its machine.

    Attributes:
        parts: the parts, one of each kind.
        machine: the memory available.
        note: memory that can't be computed here, or empty.
        rows: completions that the engine decodes at a time; fewer than it was asked for where those
            do not fit.
    """

    parts: tuple[MemoryPart, ...]
    machine: Machine
    note: str = ""
    rows: int = 0

    def total(self, phase: str, location: str, *, certain: bool = False) -> int:
        """Bytes in a phase, on each "device" or in the "host"'s memory."""
        components = self._parts_in(phase, certain=certain)
        return sum(component.on(location) for component in components)

    def _parts_in(self, phase: str, *, certain: bool) -> list[MemoryPart]:
        """The parts that a phase holds; with `certain` without worst cases."""
        components = [component for component in self.parts if phase in component.phases]
        if certain:
            return [component for component in components if component.certain]
        return components

    def peak(self, location: str, *, certain: bool = False) -> tuple[str, int]:
        """The phase with the largest use of a location, and its bytes."""
        totals = {phase: self.total(phase, location, certain=certain) for phase in MEMORY_PHASES}
        return max(totals.items(), key=lambda total: total[1])

    def _peaks(self, *, certain: bool = False) -> list[_Peak]:
        """The peak of each location with memory of its own."""
        machine = self.machine
        places = [("host", "this machine", machine.host_bytes)]
        if machine.platform != "cpu":
            places.insert(0, ("device", "each device", machine.device_bytes))
        peaks = []
        for location, label, capacity in places:
            phase, needed = self.peak(location, certain=certain)
            peaks.append(
                _Peak(location, label=label, capacity=capacity, phase=phase, needed=needed)
            )
        return peaks

    def shortages(self, *, certain: bool = False) -> list[str]:
        """A sentence for each location with too little memory: its largest part, what to lower."""
        sentences = []
        at_least = "at least " if certain else ""
        for peak in self._peaks(certain=certain):
            if peak.capacity is None or peak.needed <= peak.capacity:
                continue
            components = self._parts_in(peak.phase, certain=certain)
            adjustable = [component for component in components if component.lower]
            largest = max(adjustable, key=lambda component: component.on(peak.location))
            sentences.append(
                f"{peak.label} has {peak.capacity / _GIB:.1f} GiB and the phase {peak.phase!r} "
                f"takes {at_least}{peak.needed / _GIB:.1f}, of which {largest.name} "
                f"{largest.on(peak.location) / _GIB:.1f}; smaller with {largest.lower}"
            )
        return sentences

    def check(self) -> None:
        """Refuse a run whose certain parts alone don't fit.

        Raises:
            ValueError: in one line, naming the largest part and the settings that make it smaller.
        """
        shortages = self.shortages(certain=True)
        if shortages:
            raise UserError(f"memory: {shortages[0]}")

    def lines(self, *, full: bool) -> list[str]:
        """One line where every location keeps half of its memory free, else the `table`.

        Args:
            full: the table in any case.
        """
        uses = []
        for peak in self._peaks():
            if full or peak.capacity is None or 2 * peak.needed > peak.capacity:
                return self.table()
            free = f"{peak.capacity / _GIB:.1f} GiB of {peak.label}"
            uses.append(f"{peak.needed / _GIB:.1f} of {free}")
        return [f"{', '.join(uses)} (--dry-run lists the parts)", *filter(None, [self.note])]

    def table(self) -> list[str]:
        """The largest phase of each location, its parts (~ at most), what does not fit."""
        lines = []
        for peak in self._peaks():
            unit = _GIB
            unit_name = "GiB"
            if peak.needed < _GIB:
                unit = 2**20
                unit_name = "MiB"
            available = "" if peak.capacity is None else f" of {peak.capacity / unit:,.2f}"
            lines.append(
                f"{peak.label}: {peak.needed / unit:,.2f}{available} {unit_name}, in the phase "
                f"{peak.phase!r}"
            )
            rows = []
            for component in self._parts_in(peak.phase, certain=False):
                size = component.on(peak.location)
                if size:
                    mark = "" if component.certain else "~"
                    rows.append((f"  {mark}{component.name}", f"{size / unit:,.2f}"))
            lines += text_table(rows)
        lines += [f"does not fit: {shortage}" for shortage in self.shortages()]
        return [*lines, _NOT_COUNTED, *filter(None, [self.note])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """An inference engine and the memory it is started in.

    Attributes:
        kind: the engine's record.
        arguments: all that the engine may want to know; `max_rows` is the number of rows that fit.
        workload: requests to the engine.
        memory: memory that engine and trainer take, and memory that there is.
    """

    kind: EngineKind
    arguments: EngineArguments
    workload: Workload
    memory: MemoryUse


def fit_engine(
    kind: EngineKind,
    arguments: EngineArguments,
    workload: Workload,
    machine: Machine,
    others: Sequence[MemoryPart],
    *,
    fitted_rows: int = 0,
) -> EngineSetup:
    """Choose the engine's rows: those that fit into memory, where it decodes on JAX's devices.

    Args:
        kind, arguments: the engine.
        workload: requests to the engine.
        machine: the memory available.
        others: everything else.
        fitted_rows: rows of an earlier start; 0 for a search.
    """
    names = of_engine(kind)
    rows = arguments.max_rows
    if fitted_rows:
        rows = min(rows, fitted_rows)

    def use(rows: int) -> MemoryUse:
        with as_settings(names):
            engine_components = kind.memory(arguments, workload, machine, rows)
        components = [*others]
        for item in engine_components:
            components.append(dataclasses.replace(item, lower=in_settings(item.lower, names)))
        note = in_settings(kind.memory_note(arguments), names)
        return MemoryUse(parts=tuple(components), machine=machine, note=note, rows=rows)

    def fits(rows: int) -> bool:
        return use(rows).total("sample", "device") <= machine.device_bytes

    # A CPU's free memory differs from run to run; rows fitted to it would too.
    limited = machine.platform != "cpu" and machine.device_bytes is not None
    if limited and not kind.own_process and not fitted_rows and not fits(rows):
        devices = machine.devices
        max_per_device = -(-min(rows, workload.completions) // devices)
        # The index of the first count that does not fit is the largest count that does.
        per_device = bisect.bisect_left(
            range(1, max_per_device), True, key=lambda count: not fits(count * devices)
        )
        rows = max(per_device, 1) * devices
    return EngineSetup(
        kind=kind,
        arguments=dataclasses.replace(arguments, max_rows=rows),
        workload=workload,
        memory=use(rows),
    )


def this_machine(platform: str) -> Machine:
    """The machine that this process runs on."""
    devices = jax.local_devices()
    device_bytes = None
    if platform != "cpu":
        device_bytes = (devices[0].memory_stats() or {}).get("bytes_limit")
    # The conversion of a model, or an earlier run, leaves memory that this one takes again.
    release_freed_memory()
    return Machine(
        platform=platform,
        devices=len(devices),
        device_bytes=device_bytes,
        host_bytes=free_host_bytes(),
    )


def free_host_bytes() -> int | None:
    """Memory that can still be allocated on this host, swap included; None if it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        swap = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapFree:"))
        return available_bytes() + swap
    except (OSError, ValueError, KeyError, StopIteration):
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingShapes:
    """Settings and shapes that the memory of a run depends on.

    Attributes:
        config: the settings.
        model: the model's shape.
        prompt_lengths, completions: length of each prompt, and maximum number of completions
            sampled in one call of the engine.
        shortest_sequence: minimum number of tokens of a sequence to train on.
        lora: shape of the adapters; None trains all parameters.
        teacher: shape of the teacher in the trainer's memory; None without.
    """

    config: Config
    model: ModelConfig
    prompt_lengths: list[int]
    completions: int
    shortest_sequence: int = 1
    lora: Lora | None = None
    teacher: ModelConfig | None = None

    def frozen(self, mesh: Mesh) -> Params | None:
        """Frozen parameters of the step: the adapters' base, or the reference policy."""
        settings = self.config.model
        if self.lora is not None:
            return frozen_shapes(self.model, settings.lora_base, mesh)
        if self.config.algorithm.kl_coefficient:
            return frozen_shapes(self.model, settings.param_dtype, mesh)
        return None


def training_memory(
    shapes: TrainingShapes,
    compute: Compute,
    mesh: Mesh,
    packing: RowShapes,
    machine: Machine,
) -> list[MemoryPart]:
    """Memory that the trainer itself needs, by kind, but for the step's temporary memory.

    Args:
        shapes: what is trained.
        compute: options of the training stack.
        mesh: the training devices.
        packing: shapes of a batch.
        machine: the memory available.
    """
    make = functools.partial(machine.part, devices=mesh.size)
    components = [
        *_state_parts(make, shapes, mesh, machine),
        _workspace(make, shapes.model, compute, mesh, packing),
        *_batch_parts(make, shapes, mesh, packing),
    ]
    if shapes.teacher is not None:
        values = _values(model_declarations(shapes.teacher), mesh)
        size = jnp.dtype(shapes.config.teacher_dtype).itemsize * values
        components.append(make("teacher", size, lower="a smaller teacher"))
    return [component for component in components if component.per_device or component.host]


def loaded_parameters(model: ModelConfig, dtype: str, machine: Machine) -> list[MemoryPart]:
    """Parameters on one device, that are synced to an engine without a trainer."""
    parameters = machine.part(
        "parameters",
        num_params(model) * jnp.dtype(dtype).itemsize,
        devices=1,
        lower="a smaller model",
        phases=_WEIGHT_SYNC,
    )
    return [parameters]


def _values(declared: Sequence[Declaration], mesh: Mesh) -> int:
    """Values of declared parameters on one device."""
    shapes = declared_shapes(declared, "float32")
    shardings = param_shardings(declared_axes(declared), shapes, mesh)
    return bytes_per_device(sharded(shapes, shardings)) // 4


def _state_parts(
    make: _Maker,
    shapes: TrainingShapes,
    mesh: Mesh,
    machine: Machine,
) -> list[MemoryPart]:
    """State that is kept between steps, the gradients, and what is frozen."""
    config = shapes.config
    item_bytes = jnp.dtype(config.model.param_dtype).itemsize
    lag = config.rollout.lag
    values = _values(trained(shapes.model, shapes.lora), mesh)
    size = values * item_bytes
    on_cpu = machine.platform == "cpu"
    smaller_model = "a smaller model"
    if not on_cpu:
        smaller_model += ", or more devices along mesh.fsdp or mesh.tensor"
    remedy = smaller_model
    if item_bytes == 4:
        remedy += ", or model.param_dtype=bfloat16"
    # A checkpoint is copied before it is written, so that the next steps need not wait: on an
    # accelerator to the host, by the devices that hold different parts of the state; a CPU's
    # devices copy it each, a replicated state once.
    copies = max(1, machine.devices // mesh.shape[DATA])
    if on_cpu:
        copies = 1 if data_parallel_only(mesh) else mesh.size
    saved = (3 + lag) * size * copies
    checkpoint = MemoryPart(
        "checkpoint's copy of the state", host=saved, lower=remedy, certain=False
    )
    components = [
        make("parameters", size, lower=remedy),
        make("Adam's moments", 2 * size, lower=remedy),
        # In float32; with a single micro-batch possibly in the parameters' dtype, if the compiler
        # manages it.
        make("gradients", 4 * values, lower=remedy, phases=_STEP, certain=item_bytes == 4),
        # One micro-batch's gradient before it is added; afterwards the update.
        make("gradients of a micro-batch", 4 * values, lower=remedy, phases=_STEP, certain=False),
        checkpoint,
        # A disk has written it by the time that the next step's completions are there.
        dataclasses.replace(
            checkpoint, name="checkpoint being written", phases=_WEIGHT_SYNC | _SAMPLE
        ),
        make(f"parameters of {lag} older version(s)", lag * size, lower="rollout.lag"),
    ]
    frozen = shapes.frozen(mesh)
    if frozen is None:
        return components
    frozen_bytes = bytes_per_device(frozen)
    if shapes.lora is None:
        reference = make("reference policy", frozen_bytes, lower="algorithm.kl_coefficient=0")
        return [*components, reference]
    merged_values = _values(model_declarations(shapes.model), mesh)
    return [
        *components,
        make("frozen base", frozen_bytes, lower=f"{smaller_model}, or model.lora_base=int8"),
        make(
            "merged weights",
            4 * merged_values,
            lower=smaller_model,
            phases=_WEIGHT_SYNC,
            certain=False,
        ),
    ]


def _workspace(
    make: _Maker,
    model: ModelConfig,
    compute: Compute,
    mesh: Mesh,
    packing: RowShapes,
) -> MemoryPart:
    """cuDNN's memory for the largest micro-batch; none of another attention kernel."""
    rows = np.array(packing.rows_per_micro_batch) // row_shards(mesh)
    tokens = int(max(rows * packing.row_lengths))
    segments = statistics_kept(compute.attention, compute.segments)
    size = 8 * tokens * model.num_heads * model.head_dim * segments
    return make(
        CUDNN_WORKSPACE, size, lower="training.segments_per_row", phases=_STEP, certain=False
    )


def _batch_parts(
    make: _Maker,
    shapes: TrainingShapes,
    mesh: Mesh,
    packing: RowShapes,
) -> list[MemoryPart]:
    """The batch, on the devices and before, and its columns that have a vector for each token."""
    config = shapes.config
    rollout = config.rollout
    columns = column_shapes(config.columns, k=rollout.top_logprobs, routing=shapes.model.routing)
    batch = abstract_batch(packing, columns)
    lag = rollout.lag
    batch_bytes = total_bytes(batch.rows)
    remedy = "training.prompts_per_step or rollout.max_completion_tokens"
    components = [
        make("batch", batch_bytes // row_shards(mesh), lower=remedy, phases=_STEP),
        MemoryPart(
            "batch, before it is split over devices",
            host=batch_bytes,
            phases=_STEP,
            lower=remedy,
            certain=False,
        ),
        make(
            f"{lag} batch(es) sampled ahead",
            lag * batch_bytes // row_shards(mesh),
            lower=f"{remedy}, or rollout.lag",
        ),
    ]
    tokens = shapes.completions * config.max_total_tokens
    for name, shape in columns.items():
        if not shape:
            continue
        setting = "rollout.top_logprobs"
        if name == "routed_experts":
            setting = "rollout.router_replay=False"
        column = MemoryPart(
            f"{name.replace('_', ' ')} of the completions' tokens",
            host=tokens * np.dtype(COLUMNS[name].dtype).itemsize * math.prod(shape),
            phases=_SAMPLE | _STEP,
            lower=f"{remedy}, or {setting}",
            certain=False,
        )
        components.append(column)
    if not (config.observe.rollouts_every_steps and rollout.top_logprobs):
        return components

    # The trainer's log-probs, float32 on every device. The host takes 30 bytes for each: float32
    # twice, of all positions and by completion, and a text of 11 bytes twice, in Python and Arrow.
    positions = 0
    for bucket in batch.rows:
        positions += math.prod(bucket.completion_mask.shape)
    values = rollout.top_logprobs * positions
    recorded = make(
        "recorded top-k tokens",
        4 * values,
        lower=f"{remedy}, or rollout.top_logprobs",
        phases=_STEP,
        certain=False,
    )
    return [*components, dataclasses.replace(recorded, host=recorded.host + 30 * values)]
