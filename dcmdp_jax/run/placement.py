"""Where a run computes: devices, shapes of a batch, forward pass, an engine that fits."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dcmdp_jax.config.algorithm import check_own_remedies
from dcmdp_jax.config.checks import (
    MESH,
    as_settings,
    engine_arguments,
    engine_of_run,
    forward_scheme,
    of_engine,
)
from dcmdp_jax.config.settings import Config, ModelSettings
from dcmdp_jax.data import episode, row_layout
from dcmdp_jax.engines.engine_kind import EngineArguments, EngineKind, Workload
from dcmdp_jax.engines.machine import Machine
from dcmdp_jax.engines.noise_floor import SCORED_AGAIN, sampled_again
from dcmdp_jax.engines.process_memory import share_heap
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.errors import UserError
from dcmdp_jax.models import attention, decoder, params, row_logprobs
from dcmdp_jax.models.ops import choose_ops
from dcmdp_jax.models.scheme import FULL, Scheme
from dcmdp_jax.parallel.backend import has_cuda_plugin, prepare_jax, present_gpus, usable_cores
from dcmdp_jax.parallel.hosts import ONE_PROCESS, Hosts
from dcmdp_jax.parallel.mesh import (
    check_training_mesh,
    connect_devices,
    row_shards,
    sampling_mesh,
    training_mesh,
)
from dcmdp_jax.parallel.sharding import data_parallel_only
from dcmdp_jax.run.memory_use import (
    EngineSetup,
    TrainingShapes,
    fit_engine,
    this_machine,
    training_memory,
)
from dcmdp_jax.run.task import Task
from dcmdp_jax.types import Params

_CPU_UNROLL = 8
"""Max layers that a CPU runs without a loop, in which gradients are copied. Deeper models gain no
time by it: the 30 layers of SmolLM2-135M compile in 9 CPU seconds in place of 22, and take 1.9 GiB
of temporary memory in place of 2.5.
"""
_SMALL_MODEL = 2_000_000
"""Parameters up to which every thread keeps a heap of its own, see `share_heap`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where and in what shapes a run computes.

    Attributes:
        hosts: the processes of the run.
        mesh: the training devices.
        compute: how the training stack computes, its attention kernel the one of this mesh.
        scheme: the engine's roundings that the forward pass repeats.
        packing: shapes of a batch, of prompts as long as those to train on.
        columns: per-token columns of a batch: name -> shape of a token's entry.
        frozen: shapes and shardings of the step's frozen parameters; None without.
        engine: the inference engine.
        samples_while_training: whether the engine samples while the trainer trains: in a process of
            its own. False with refills on several hosts, where all hosts must agree on another
            round.
    """

    hosts: Hosts
    mesh: Mesh
    compute: decoder.Compute
    scheme: Scheme
    packing: row_layout.RowShapes
    columns: dict[str, tuple[int, ...]]
    frozen: Params | None
    engine: EngineSetup
    samples_while_training: bool


def trainable_engine(config: Config) -> tuple[EngineKind, str]:
    """The record of a run's engine, and where it computes.

    Raises:
        UserError: in one line, for an engine that can't be trained with, or not on this machine.
    """
    kind = engine_of_run(config)
    with as_settings(of_engine(kind)):
        return kind, kind.check_machine(engine_arguments(config, kind))


def place(
    task: Task,
    *,
    kind: EngineKind,
    engine_platform: str,
    hosts: Hosts = ONE_PROCESS,
    fitted_rows: int = 0,
) -> Placement:
    """Start JAX's devices, check settings and model against them, fit the run into memory.

    Args:
        task: model and prompts.
        kind, engine_platform: see `trainable_engine`.
        hosts: the processes of the run.
        fitted_rows: rows that an earlier start fitted into memory; 0 finds them.

    Raises:
        UserError: in one line, naming the setting.
    """
    config = task.config
    engine = engine_arguments(
        config,
        kind,
        hosts.index,
        model=task.model,
        platform=engine_platform,
    )
    if kind.takes_adapters(engine.settings):
        engine = dataclasses.replace(engine, lora=task.lora)
    with as_settings(of_engine(kind)):
        kind.check(engine)

    if params.num_params(task.model) > _SMALL_MODEL:
        share_heap()
    prepare_jax(config.mesh.cpu_devices)
    platform = jax.devices()[0].platform
    check_platform(platform)
    scheme = forward_scheme_on(config, engine, platform)
    mesh = check_devices(task, platform)
    check_own_remedies(config.algorithm)
    if hosts.count > 1:
        connect_devices(mesh)

    prompt_lengths, completions = task.requests
    shapes = TrainingShapes(
        config=config,
        model=task.model,
        prompt_lengths=prompt_lengths,
        completions=completions,
        shortest_sequence=task.shortest_sequence,
        lora=task.lora,
        teacher=task.teacher,
    )
    return fit(
        shapes,
        kind,
        dataclasses.replace(engine, first_calls=planned_calls(task, hosts)),
        mesh=mesh,
        scheme=scheme,
        hosts=hosts,
        fitted_rows=fitted_rows,
    )


def check_devices(task: Task, platform: str) -> Mesh:
    """The training mesh, on which the models and the settings can run."""
    config = task.config
    with as_settings(MESH):
        mesh = training_mesh(
            config.mesh.sizes,
            num_params=params.num_params(task.model),
        )
        for model in (task.model, task.teacher):
            if model is not None:
                check_kernel(
                    config.model,
                    platform,
                    head_dim=model.head_dim,
                    segments_per_row=config.training.segments_per_row,
                )
                check_training_mesh(
                    mesh,
                    num_heads=model.num_heads,
                    num_experts=model.num_experts,
                    completions=config.completions_per_mini_batch,
                )
    check_reductions(config.model.compute_dtype, mesh)
    return mesh


def planned_calls(task: Task, hosts: Hosts) -> list[tuple[list[np.ndarray], SamplingParams | None]]:
    """The first calls of this process's engine, for which it prepares; None scores."""
    # Two cores have the step to compile and the warm-up; the turns of an environment are calls of
    # their own.
    if task.config.task.environment or usable_cores() <= 2:
        return []
    calls = []
    for prompts, sampling in task.first_calls:
        calls.append((prompts[hosts.share(len(prompts))], sampling))
    if calls:
        prompts, sampling = calls[-1]
        sequences = (list(prompts) * sampling.group_size)[:SCORED_AGAIN]
        calls += [(sequences, None), (prompts[:1], sampled_again(sampling))]
    return calls


def check_platform(platform: str) -> None:
    """Refuse the CPU where JAX should have found a GPU: it logs that its plugin failed and goes on.

    Args:
        platform: platform of JAX's devices.
    """
    hidden = os.environ.get("JAX_PLATFORMS") or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if platform == "cpu" and not hidden and present_gpus() and has_cuda_plugin():
        raise UserError(
            "JAX: computes on the CPU, though this machine has an NVIDIA GPU and JAX's plugin for "
            "it is installed; its log above says why the plugin failed. JAX_PLATFORMS=cpu trains "
            "on the CPU"
        )


def forward_scheme_on(config: Config, engine: EngineArguments, platform: str) -> Scheme:
    """The engine's roundings that the forward pass repeats; another build of the engine is refused.

    Args:
        config: the settings.
        engine: with its model and platform.
        platform: platform of JAX's devices.
    """
    scheme = forward_scheme(config, platform, model=engine.model)
    if scheme != FULL and engine.platform and (engine.platform == "cpu") != (platform == "cpu"):
        name = "forward_precision" if config.model.forward_precision != "full" else "forward_cache"
        raise UserError(
            f"config.model.{name}: got {getattr(config.model, name)!r}; the engine computes on "
            f"{engine.platform}, the trainer on {platform}, and its build for {platform} rounds "
            "otherwise; set 'full'"
        )
    return scheme


def check_reductions(compute_dtype: str, mesh: Mesh) -> None:
    """Refuse bfloat16 on CPU devices that split the model.

    XLA's CPU compiler (jaxlib 0.10) aborts the process when it promotes the bfloat16 reductions of
    such a mesh.
    """
    split = [axis for axis in ("fsdp", "tensor", "expert") if mesh.shape[axis] > 1]
    on_cpu = decoder.platform_of(mesh) == "cpu"
    if split and on_cpu and compute_dtype == "bfloat16":
        axes = ", ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in split)
        raise UserError(
            f"config.model.compute_dtype: got 'bfloat16' with {axes} on CPU devices, where XLA "
            "can't add up bfloat16; choose float32, or split nothing but rows (mesh.data)"
        )


def check_kernel(
    settings: ModelSettings, platform: str, *, head_dim: int, segments_per_row: int
) -> None:
    """Refuse an attention kernel that this machine can't run.

    Compiles the attention of two small rows with cuDNN, to see whether it is there and takes this
    dtype and head width: one row of one segment, as the embedded engine has them, one of a run's.
    """
    if platform_kernel(settings, platform) != "cudnn":
        return
    heads = jax.ShapeDtypeStruct((1, 128, 1, head_dim), jnp.dtype(settings.compute_dtype))
    ids = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    for segments in (1, segments_of(segments_per_row, "cudnn")):
        kernel = attention.RowKernel(
            name="cudnn",
            ops=choose_ops(platform),
            one_segment=segments == 1,
            segments=segments,
        )
        row_attention = functools.partial(attention.row_attention, kernel=kernel)
        try:
            jax.jit(row_attention).lower(heads, heads, heads, ids).compile()
        except Exception as error:
            # A missing or old library and an unknown width raise differently.
            reason = " ".join((str(error) or type(error).__name__).split())[:200]
            remedy = "choose training.segments_per_row=1"
            if segments == 1:
                remedy = (
                    "install nvidia-cudnn-cu12 (nvidia-cudnn-cu13 where JAX is for CUDA 13), or "
                    "choose xla"
                )
            raise UserError(
                f"config.model.attention: {settings.attention!r} is cuDNN's attention here, "
                f"which does not work with {segments} segment(s) a row ({reason}); {remedy}"
            ) from error


def platform_kernel(settings: ModelSettings, platform: str) -> str:
    """The attention kernel on a platform.

    Raises:
        UserError: if the platform does not have the one of the settings, or it does not compute in
            their dtype.
    """
    dtype = jnp.dtype(settings.compute_dtype)
    kernel = attention.choose_kernel(settings.attention, dtype, platform)
    device = ""
    if kernel == "splash" and platform != "tpu":
        device = "a TPU"
    elif kernel == "cudnn" and platform not in ("gpu", "cuda"):
        device = "an NVIDIA GPU with cuDNN"
    if device:
        raise UserError(
            f"config.model.attention: got {kernel!r}, which needs {device}, this is {platform}; "
            "choose auto"
        )
    if kernel == "cudnn" and dtype == jnp.float32:
        raise UserError(
            "config.model.attention: got 'cudnn', which computes in half precision alone; choose "
            "auto, or model.compute_dtype=bfloat16"
        )
    return kernel


def segments_of(segments_per_row: int, kernel: str) -> int:
    """Segments of a row at most, by the setting and the attention kernel; 0 for any number."""
    return segments_per_row or attention.SKIP_SEGMENTS.get(kernel, 1)


def fit(
    shapes: TrainingShapes,
    kind: EngineKind,
    engine: EngineArguments,
    *,
    mesh: Mesh,
    scheme: Scheme,
    hosts: Hosts = ONE_PROCESS,
    machine: Machine | None = None,
    fitted_rows: int = 0,
) -> Placement:
    """Fit a run into the memory of its devices. Nothing is allocated.

    Args:
        shapes: what is trained.
        kind, engine: the engine and its arguments, but for its devices and the rows that fit.
        mesh: the training devices.
        scheme: the engine's roundings that the forward pass repeats.
        hosts: the processes of the run.
        machine: memory that there is; None looks at this machine.
        fitted_rows: rows that an earlier start fitted into memory; 0 finds them.
    """
    config = shapes.config
    model = shapes.model
    rollout = config.rollout
    compute = compute_on(config, mesh, layers=model.num_layers)
    packing = packing_on(config, mesh, compute, shortest=shapes.shortest_sequence)
    columns = episode.column_shapes(config.columns, k=rollout.top_logprobs, routing=model.routing)
    machine = machine or this_machine(decoder.platform_of(mesh))
    dtype = config.model.param_dtype
    if config.model.lora_rank or config.model.adapter:
        dtype = "float32"
    trainer = training_memory(shapes, compute, mesh, packing, machine)

    setup = fit_engine(
        kind,
        dataclasses.replace(
            engine,
            mesh=lambda **split: sampling_mesh(mesh, num_params=params.num_params(model), **split),
            probe=lambda: row_logprobs.make_probe(model, compute, mesh),
            prepare=True,
            param_dtype=dtype,
        ),
        Workload(
            completions=shapes.completions,
            group_size=rollout.group_size,
            prompt_lengths=shapes.prompt_lengths,
            max_completion_tokens=rollout.max_completion_tokens,
        ),
        machine,
        trainer,
        fitted_rows=fitted_rows,
    )

    refills = config.algorithm.refill_rounds > 0 and hosts.count > 1
    return Placement(
        hosts=hosts,
        mesh=mesh,
        compute=compute,
        scheme=scheme,
        packing=packing,
        columns=columns,
        frozen=shapes.frozen(mesh),
        engine=setup,
        samples_while_training=kind.own_process and not refills,
    )


def compute_on(config: Config, mesh: Mesh, *, layers: int = _CPU_UNROLL) -> decoder.Compute:
    """Computation of the training stack on a mesh, of a model with `layers` layers."""
    settings = config.model
    platform = decoder.platform_of(mesh)
    dtype = jnp.dtype(settings.compute_dtype)
    longest = -(-max((config.max_total_tokens, *config.training.row_lengths)) // 128) * 128
    kernel = attention.choose_kernel(settings.attention, dtype, platform, longest)
    segments = segments_of(config.training.segments_per_row, kernel)
    return decoder.Compute(
        dtype=settings.compute_dtype,
        remat=settings.remat,
        scan_unroll=settings.scan_unroll or _layers_at_once(settings.remat, mesh, layers),
        attention=kernel,
        logprob_chunk=settings.logprob_chunk,
        one_segment=segments == 1,
        segments=segments,
    )


def _layers_at_once(remat: str, mesh: Mesh, layers: int) -> int:
    """The default of `scan_unroll`: a loop copies what its backward pass needs to stacks and back.

    By the compiler, on an H100 those copies are a quarter of the memory traffic of Qwen3-1.7B with
    remat=none; without the loop its step takes 49.6 GiB in place of 45.2, and less than twice as
    long to compile.
    """
    platform = decoder.platform_of(mesh)
    if platform == "gpu" and remat == "none" and data_parallel_only(mesh):
        return layers
    if platform == "cpu" and layers <= _CPU_UNROLL:
        return _CPU_UNROLL
    return 1


def packing_on(
    config: Config,
    mesh: Mesh,
    compute: decoder.Compute,
    shortest: int = 1,
) -> row_layout.RowShapes:
    """Shapes of a batch of sequences of at least `shortest` tokens, for a computation on a mesh."""
    splash = compute.attention == "splash"
    training = config.training
    for length in training.row_lengths:
        if splash and length % 128:
            raise UserError(
                f"config.training.row_lengths: got {length}, splash attention needs multiples of "
                "128"
            )
    multiple = 8
    if splash:
        multiple = 512
    return row_layout.make_row_shapes(
        row_lengths=training.row_lengths,
        longest=config.max_total_tokens,
        length_choice=row_layout.LengthChoice(shortest=shortest, multiple=multiple),
        micro_batch_tokens=training.micro_batch_tokens,
        mini_batches=config.mini_batches,
        completions=config.completions_per_mini_batch,
        segments_per_row=segments_of(training.segments_per_row, compute.attention)
        or row_layout.ANY_NUMBER,
        row_shards=row_shards(mesh),
    )
