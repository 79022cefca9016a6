"""Memory of a run by arithmetic, before anything is allocated, by kind, device and phase.

Parts that are arrays with known shapes are exact: parameters, moments, gradients, the engine's
weights, its cache. The compiler's temporary memory is an estimate, marked ~. Devices of a CPU share
the host's memory and count as the host.
"""

import bisect
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
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
from dcmdp_jax.engines.machine import (
    LOGITS_HELD,
    MEMORY_PHASES,
    Machine,
    MemoryPart,
    exact,
)
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.engines.sidecar.segments import available_bytes
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.attention import has_scores, statistics_kept
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.declare import Declaration
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.gated_delta import CHUNK
from dcmdp_jax.models.lora import trained
from dcmdp_jax.models.params import declared_axes, declared_shapes, model_declarations, num_params
from dcmdp_jax.models.scheme import Scheme
from dcmdp_jax.number_format import text_table
from dcmdp_jax.parallel.mesh import row_shards
from dcmdp_jax.parallel.sharding import (
    DATA,
    bytes_per_device,
    data_parallel_only,
    param_shardings,
    sharded,
)

_GIB = 2**30
_STEP = frozenset({"step"})
_Maker = Callable[..., MemoryPart]
_KEPT_BYTES = int(1.05 * _GIB)
"""What a process on a CPU keeps besides the parts: at most 1 GiB that the compiler or a phase has
freed, and compiled programs. Measured runs are in docs/plan.md.
"""
CUDNN_WORKSPACE = "cuDNN's workspace"
"""A part that a compiler without a GPU can't see: 8 bytes of each query's element for each segment
that a row may have, by what cuDNN 9.19 took on an H200 for 7 segments a row and for 16.
"""


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
        """Bytes in a phase: on the "first" device, each "other" one, or in the "host"'s memory."""
        total = 0
        for component in self.parts:
            if phase in component.phases:
                total += component.on(location, certain=certain)
        return total

    def peak(self, location: str, *, certain: bool = False) -> tuple[str, int]:
        """The phase with the largest use of a location, and its bytes."""
        totals = {phase: self.total(phase, location, certain=certain) for phase in MEMORY_PHASES}
        return max(totals.items(), key=lambda total: total[1])

    def _peaks(self, *, certain: bool = False) -> Iterator[tuple[str, str, int | None, str, int]]:
        """Each location with memory of its own, its name for people, its bytes; phase and peak."""
        machine = self.machine
        if machine.platform != "cpu":
            peak = self.peak("first", certain=certain)
            yield "first", "the first device", machine.device_bytes, *peak
        yield "host", "this machine", machine.host_bytes, *self.peak("host", certain=certain)

    def shortages(self, *, certain: bool = False) -> list[str]:
        """A sentence for each location with too little memory: its largest part, what to lower."""
        sentences = []
        at_least = "at least " if certain else ""
        for location, label, capacity, phase, needed in self._peaks(certain=certain):
            if capacity is None or needed <= capacity:
                continue
            components = [item for item in self.parts if phase in item.phases and item.lower]
            largest = max(components, key=lambda item: item.on(location, certain=certain))
            largest_size = largest.on(location, certain=certain)
            sentences.append(
                f"{label} has {capacity / _GIB:.1f} GiB and the phase {phase!r} takes "
                f"{at_least}{needed / _GIB:.1f}, of which {largest.name} "
                f"{largest_size / _GIB:.1f}; smaller with {largest.lower}"
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
        for _, label, capacity, _, needed in self._peaks():
            if full or capacity is None or 2 * needed > capacity:
                return self.table()
            uses.append(f"{needed / _GIB:.1f} of {capacity / _GIB:.1f} GiB of {label}")
        return [f"{', '.join(uses)} (--dry-run lists the parts)", *filter(None, [self.note])]

    def table(self) -> list[str]:
        """The largest phase of each location, its parts (~ if estimated), what does not fit."""
        lines = []
        for location, label, capacity, phase, needed in self._peaks():
            unit = _GIB
            unit_name = "GiB"
            if needed < _GIB:
                unit = 2**20
                unit_name = "MiB"
            available = "" if capacity is None else f" of {capacity / unit:,.2f}"
            lines.append(
                f"{label}: {needed / unit:,.2f}{available} {unit_name}, in the phase {phase!r}"
            )
            rows = []
            for component in self.parts:
                size = component.on(location)
                if phase in component.phases and size:
                    mark = "" if size == component.on(location, certain=True) else "~"
                    rows.append((f"  {mark}{component.name}", f"{size / unit:,.2f}"))
            lines += text_table(rows)
        lines += [f"does not fit: {shortage}" for shortage in self.shortages()]
        return [*lines, *filter(None, [self.note])]


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
    if machine.process_bytes:
        others = (
            exact("Python and libraries", host=machine.process_bytes, lower=""),
            MemoryPart("compiled programs, freed memory", host=_KEPT_BYTES, lower=""),
            *others,
        )

    def use(rows: int) -> MemoryUse:
        with as_settings(names):
            engine_components = kind.memory(arguments, workload, machine, rows)
        components = [*others]
        for item in engine_components:
            components.append(dataclasses.replace(item, lower=in_settings(item.lower, names)))
        note = in_settings(kind.memory_note(arguments), names)
        return MemoryUse(tuple(components), machine, note, rows)

    def fits(rows: int) -> bool:
        return use(rows).total("sample", "first") <= machine.device_bytes

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
    free = free_host_bytes()
    if platform != "cpu":
        stats = devices[0].memory_stats() or {}
        return Machine(
            platform=platform,
            devices=len(devices),
            device_bytes=stats.get("bytes_limit"),
            host_bytes=free,
        )
    if free is None:
        return Machine(platform=platform, devices=len(devices), device_bytes=None, host_bytes=None)
    return Machine(
        platform=platform,
        devices=len(devices),
        device_bytes=None,
        host_bytes=free + _resident_bytes(),
        process_bytes=_first_resident_bytes(),
    )


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _first_resident_bytes() -> int:
    """What this process had at the first call: a run leaves memory that the next takes again.

    So does the conversion of a model: what it freed is returned first.
    """
    release_freed_memory()
    return _resident_bytes()


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
        shortest_prompt: minimum number of tokens of a prompt to train on.
        lora: shape of the adapters; None trains all parameters.
        teacher: shape of the teacher in the trainer's memory; None without.
    """

    config: Config
    model: ModelConfig
    prompt_lengths: list[int]
    completions: int
    shortest_prompt: int = 0
    lora: Lora | None = None
    teacher: ModelConfig | None = None


def training_memory(
    shapes: TrainingShapes,
    compute: Compute,
    scheme: Scheme,
    mesh: Mesh,
    packing: RowShapes,
    machine: Machine,
) -> list[MemoryPart]:
    """Memory that the trainer itself needs, by kind.

    Args:
        shapes: what is trained.
        compute: options of the training stack.
        scheme: the engine's roundings that the forward pass repeats.
        mesh: the training devices.
        packing: shapes of a batch.
        machine: the memory available.
    """
    config = shapes.config
    model = shapes.model
    make = functools.partial(machine.part, mesh.size)
    components = [
        *_state_parts(make, config, model, mesh, machine, shapes.lora),
        *_step_parts(make, model, compute, scheme, mesh, packing, machine),
        *_batch_parts(make, config, model, mesh, packing, shapes.completions),
    ]
    if shapes.teacher is not None:
        values = _values(model_declarations(shapes.teacher), mesh)
        size = jnp.dtype(config.teacher_dtype).itemsize * values
        components.append(make("teacher", size, "a smaller teacher", sure=size))
    return [component for component in components if component.per_device or component.host]


def loaded_parameters(model: ModelConfig, dtype: str, machine: Machine) -> list[MemoryPart]:
    """Parameters on the first device, that are synced to an engine without a trainer."""
    size = num_params(model) * jnp.dtype(dtype).itemsize
    first = size
    host = 0
    if machine.platform == "cpu":
        first = 0
        host = size
    parameters = exact(
        "parameters",
        first=first,
        host=host,
        phases=frozenset({"weight_sync"}),
        lower="a smaller model",
    )
    return [parameters]


def _values(declared: Sequence[Declaration], mesh: Mesh) -> int:
    """Values of declared parameters on one device."""
    shapes = declared_shapes(declared, "float32")
    shardings = param_shardings(declared_axes(declared), shapes, mesh)
    return bytes_per_device(sharded(shapes, shardings)) // 4


def _state_parts(
    make: _Maker,
    config: Config,
    model: ModelConfig,
    mesh: Mesh,
    machine: Machine,
    lora: Lora | None,
) -> list[MemoryPart]:
    """State that is kept between steps, the gradients, and what is frozen."""
    item_bytes = jnp.dtype(config.model.param_dtype).itemsize
    lag = config.rollout.lag
    values = _values(trained(model, lora), mesh)
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
    components = [
        make("parameters", size, remedy, sure=size),
        make("Adam's moments", 2 * size, remedy, sure=2 * size),
        # In float32; with a single micro-batch possibly in the parameters' dtype, if the compiler
        # manages it.
        make("gradients", 4 * values, remedy, _STEP, sure=size),
        # One micro-batch's gradient before it is added; afterwards the update.
        make("gradients of a micro-batch", 4 * values, remedy, _STEP),
        MemoryPart("checkpoint's copy of the state", host=saved, lower=remedy),
        # A disk has written it by the time that the next step's completions are there.
        MemoryPart(
            "checkpoint being written",
            host=saved,
            phases=frozenset({"weight_sync", "sample"}),
            lower=remedy,
        ),
        make(f"parameters of {lag} older version(s)", lag * size, "rollout.lag", sure=lag * size),
    ]
    if lora is None:
        if config.algorithm.kl_coefficient:
            reference = make("reference policy", size, "algorithm.kl_coefficient=0", sure=size)
            components.append(reference)
        return components

    # A quantized matrix has a byte for each value; the scale of each column is not counted.
    declared = model_declarations(model)
    base_values = _values(declared, mesh)
    int8_values = 0
    if config.model.lora_base == "int8":
        int8_values = _values([matrix for matrix in declared if matrix.quantized], mesh)
    width = 4 if config.model.lora_base == "float32" else 2
    base = width * (base_values - int8_values) + int8_values
    product = machine.product_item(config.model.compute_dtype)
    cast = 0
    if on_cpu and (width != product or int8_values):
        # XLA's CPU compiler converts the layers before it loops over them.
        cast = product * base_values
    return [
        *components,
        make("frozen base", base, f"{smaller_model}, or model.lora_base=int8", sure=base),
        make("merged weights", 4 * base_values, smaller_model, frozenset({"weight_sync"})),
        make("frozen base, cast for products", cast, smaller_model, _STEP),
    ]


def _step_parts(
    make: _Maker,
    model: ModelConfig,
    compute: Compute,
    scheme: Scheme,
    mesh: Mesh,
    packing: RowShapes,
    machine: Machine,
) -> list[MemoryPart]:
    """Activations and logits of the largest micro-batch: saved by all layers, temporary in one."""
    shards = row_shards(mesh)
    item = machine.product_item(compute.dtype)
    queries = model.num_heads * model.head_dim
    width = model.hidden_size
    keys = 2 * model.num_kv_heads * model.head_dim
    projected = queries + keys
    # A token's hidden state is copied to each of its experts and back.
    copies = 2 * model.num_experts_per_tok * width
    segments = statistics_kept(compute.attention, compute.segments)
    # Bytes of the largest micro-batch with its tokens, and cuDNN's.
    largest = (0, 0)
    workspace = 0
    for length, rows in zip(packing.row_lengths, packing.rows_per_micro_batch, strict=True):
        rows //= shards
        tokens = rows * length
        layer_width = 8 * width + 2 * projected + 2 * queries + 4 * model.active_mlp_width + copies
        layer = tokens * item * layer_width + 4 * tokens * model.num_heads * segments
        if model.recurrent_layers:
            # Float32: a dozen matrices of a chunk's tokens by its tokens, a few copies of the
            # heads.
            head = 12 * CHUNK + 4 * (model.linear_key_head_dim + model.linear_value_head_dim)
            heads = 4 * model.linear_num_value_heads * head
            layer += tokens * (heads + 2 * item * model.mixed_width)
        scores = 0
        if has_scores(compute.attention, rows * shards, length, model.num_heads, mesh):
            scores = rows * model.num_heads * length**2
        products = tokens * item * (3 * width + projected + 2 * model.active_mlp_width + copies)
        if compute.remat == "full":
            saved = tokens * item * width
        elif compute.remat == "dots":
            saved = products
        elif machine.platform == "gpu":
            saved = products + tokens * item * queries + scores * item
        else:
            saved = layer + scores * item
        # Scores in float32 and their exponentials, forward and backward.
        working = layer + scores * (8 + 2 * item)
        largest = max(largest, (model.num_layers * saved + working, tokens))
        workspace = max(workspace, 8 * tokens * queries * segments)
    activations, tokens = largest
    logits = min(compute.logprob_chunk, tokens) * model.vocab_size * 4 * LOGITS_HELD

    model_shards = mesh.size // mesh.shape[DATA]
    matrices = width * (2 * queries + keys + 3 * model.stored_mlp_width)
    output = model.vocab_size * width
    rounded = 0
    if scheme.weights:
        rounded = 4 * (model.num_layers * matrices + output) // model_shards
    elif scheme.products:
        # Of one layer at a time: float32 values and those times their scale, and a micro-batch's
        # tokens alike.
        inputs = tokens * max(width, queries, model.intermediate_size)
        rounded = 8 * (matrices + inputs) // mesh.shape["tensor"]
    cast = 0
    if machine.platform == "gpu" and compute.scan_unroll >= model.num_layers and item < 4:
        # Without a loop a GPU casts all matrices before the first layer, and has all their
        # gradients before it stacks them.
        cast = 2 * item * model.num_layers * matrices // model_shards
    copied = 0 if item == jnp.dtype(compute.dtype).itemsize else 2 * 4 * output
    remedy = "training.micro_batch_tokens"
    if compute.remat != "full":
        remedy += ", or model.remat=full"
    return [
        make("activations", activations, remedy, _STEP),
        make("logits", logits, "model.logprob_chunk", _STEP),
        make(CUDNN_WORKSPACE, workspace, "training.segments_per_row", _STEP),
        make("layers in model.compute_dtype", cast, "model.scan_unroll=1", _STEP),
        make("rounded factors", rounded, "model.forward_precision=full", _STEP),
        make("float32 copies of the output layer", copied, "model.compute_dtype=float32", _STEP),
    ]


def _batch_parts(
    make: _Maker,
    config: Config,
    model: ModelConfig,
    mesh: Mesh,
    packing: RowShapes,
    completions: int,
) -> list[MemoryPart]:
    """The batch, on the devices and before, and its columns that have a vector for each token."""
    columns = column_shapes(config.columns, k=config.rollout.top_logprobs, routing=model.routing)
    batch = abstract_batch(packing, columns)
    lag = config.rollout.lag
    batch_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch.rows))
    shard_bytes = batch_bytes // row_shards(mesh)
    ahead_bytes = lag * batch_bytes // row_shards(mesh)
    remedy = "training.prompts_per_step or rollout.max_completion_tokens"
    components = [
        make("batch", shard_bytes, remedy, _STEP, sure=shard_bytes),
        MemoryPart(
            "batch, before it is split over devices",
            host=batch_bytes,
            phases=_STEP,
            lower=remedy,
        ),
        make(
            f"{lag} batch(es) sampled ahead",
            ahead_bytes,
            f"{remedy}, or rollout.lag",
            sure=ahead_bytes,
        ),
    ]
    tokens = completions * config.max_total_tokens
    for name, shape in columns.items():
        if not shape:
            continue
        setting = "rollout.top_logprobs"
        if name == "routed_experts":
            setting = "rollout.router_replay=False"
        column = MemoryPart(
            f"{name.replace('_', ' ')} of the completions' tokens",
            host=tokens * np.dtype(COLUMNS[name].dtype).itemsize * math.prod(shape),
            phases=frozenset({"sample", "step"}),
            lower=f"{remedy}, or {setting}",
        )
        components.append(column)
    if not (config.observe.rollouts_every_steps and config.rollout.top_logprobs):
        return components

    # The trainer's log-probs, float32 on every device. The host takes 30 bytes for each: float32
    # twice, of all positions and by completion, and a text of 11 bytes twice, in Python and Arrow.
    positions = 0
    for bucket in batch.rows:
        positions += math.prod(bucket.completion_mask.shape)
    values = config.rollout.top_logprobs * positions
    name = "recorded top-k tokens"
    recorded = make(name, 4 * values, f"{remedy}, or rollout.top_logprobs", _STEP)
    return [*components, dataclasses.replace(recorded, host=recorded.host + 30 * values)]
