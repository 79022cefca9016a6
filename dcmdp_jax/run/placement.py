"""Where a run computes: devices, shapes of a batch, the forward pass, and an engine that fits into memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dcmdp_jax.config.algorithm import check_own_remedies
from dcmdp_jax.config.arguments import MESH, as_settings, of_engine
from dcmdp_jax.config.engine import engine_arguments, find_trainable
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.episode import column_shapes
from dcmdp_jax.data.row_layout import ANY_NUMBER, RowShapes, make_row_shapes
from dcmdp_jax.engines.engine_kind import EngineArguments, EngineKind, Workload
from dcmdp_jax.engines.machine import Machine
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.attention import choose_kernel
from dcmdp_jax.models.config import Lora
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import num_params
from dcmdp_jax.models.row_logprobs import make_probe
from dcmdp_jax.models.scheme import Scheme
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.parallel.hosts import ONE_PROCESS, Hosts
from dcmdp_jax.parallel.mesh import check_training_mesh, connect_devices, row_shards, sampling_mesh, training_mesh
from dcmdp_jax.run.memory_use import EngineSetup, fit_engine, this_machine, training_memory
from dcmdp_jax.run.model_checks import check_kernel, check_platform, check_reductions, forward_scheme_on, segments_of
from dcmdp_jax.run.task import Requests, Task

_CPU_UNROLL = 8
"""Most layers that a CPU runs without a loop, in which gradients are copied. Deeper models gain no time by it: the 30
layers of SmolLM2-135M compile in 9 CPU seconds in place of 22, and take 1.9 GiB of temporary memory in place of 2.5."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where and in what shapes a run computes.

    Attributes:
        hosts: the processes of the run.
        mesh: the training devices.
        compute: how the training stack computes, its attention kernel the one of this mesh.
        scheme: the engine's roundings that the forward pass repeats.
        packing: shapes of a batch, of prompts as long as those to train on.
        columns: per-token columns of a batch: name -> shape of a token's entry.
        engine: the inference engine.
        samples_while_training: whether the engine samples while the trainer trains: in a process of its own. False with
            refills on several hosts, where all hosts must agree on another round.
    """

    hosts: Hosts
    mesh: Mesh
    compute: Compute
    scheme: Scheme
    packing: RowShapes
    columns: dict[str, tuple[int, ...]]
    engine: EngineSetup
    samples_while_training: bool


def trainable_engine(config: Config) -> tuple[EngineKind, str]:
    """The record of the engine of `rollout.engine`, and where it computes; what it needs is installed.

    Raises:
        UserError: in one line, for an engine that can't be trained with, or not on this machine.
    """
    kind = find_trainable(config.rollout.engine)
    _, arguments = engine_arguments(config, kind=kind)
    with as_settings(of_engine(kind)):
        return kind, kind.check_machine(arguments)


def place(
    task: Task, kind: EngineKind, platform: str, hosts: Hosts = ONE_PROCESS, *, fitted_rows: int = 0
) -> Placement:
    """Start JAX's devices, check the settings against them and the model, and fit the run into memory.

    Args:
        task: model and prompts.
        kind, platform: see `trainable_engine`.
        hosts: the processes of the run.
        fitted_rows: rows that an earlier start fitted into memory; 0 finds them.

    Raises:
        UserError: in one line, naming the setting.
    """
    config, model = task.config, task.model
    known = {"kind": kind, "model": model, "platform": platform}
    _, engine = engine_arguments(config, hosts.index, **known)
    with as_settings(of_engine(kind)):
        kind.check(engine)
    prepare_jax(config.mesh.cpu_devices)
    mesh, scheme = _training_devices(config, engine)
    if hosts.count > 1:
        connect_devices(mesh)
    shortest = min(map(len, task.train.token_ids))
    found = {"shortest_prompt": shortest, "hosts": hosts, "fitted_rows": fitted_rows}
    return placed(config, kind, engine, mesh, scheme, task.requests, task.lora, **found)


def _training_devices(config: Config, engine: EngineArguments) -> tuple[Mesh, Scheme]:
    """The training devices, and the roundings of the forward pass on them."""
    model, platform = engine.model, jax.devices()[0].platform
    check_platform(platform)
    check_kernel(config, platform, model.head_dim)
    scheme = forward_scheme_on(config, engine, platform)
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor, config.mesh.expert
    with as_settings(MESH):
        mesh = training_mesh(*sizes, num_params=num_params(model))
        check_training_mesh(
            mesh,
            num_heads=model.num_heads,
            num_experts=model.num_experts,
            completions=config.completions_per_mini_batch,
        )
    check_reductions(config, mesh)
    check_own_remedies(config.algorithm)
    return mesh, scheme


def placed(
    config: Config,
    kind: EngineKind,
    engine: EngineArguments,
    mesh: Mesh,
    scheme: Scheme,
    requests: Requests,
    lora: Lora | None,
    *,
    shortest_prompt: int = 0,
    hosts: Hosts = ONE_PROCESS,
    machine: Machine | None = None,
    fitted_rows: int = 0,
) -> Placement:
    """A run on given devices. Nothing is allocated.

    Args:
        config: the settings.
        kind, engine: the engine and its arguments, but for its devices and the rows that fit.
        mesh: the training devices.
        scheme: the engine's roundings that the forward pass repeats.
        requests: the largest ones to the engine.
        lora: shape of the adapters; None trains all parameters.
        shortest_prompt: minimum number of tokens of a prompt to train on.
        hosts: the processes of the run.
        machine: memory that there is; None looks at this machine.
        fitted_rows: rows that an earlier start fitted into memory; 0 finds them.
    """
    model, rollout = engine.model, config.rollout
    compute = compute_on(config, mesh, layers=model.num_layers)
    packing = packing_on(config, mesh, compute, shortest=1 + shortest_prompt)
    columns = column_shapes(config.columns, k=rollout.top_logprobs, routing=model.routing)
    machine = machine or this_machine(mesh.devices.flat[0].platform)
    dtype = "float32" if config.model.lora_rank or config.model.adapter else config.model.param_dtype
    lengths, completions = requests
    workload = Workload(completions, rollout.group_size, lengths, rollout.max_completion_tokens, dtype)
    engine = dataclasses.replace(
        engine,
        mesh=lambda **split: sampling_mesh(mesh, num_params=num_params(model), **split),
        probe=lambda: make_probe(model, compute, mesh),
        prepare=True,
    )
    trainer = training_memory(config, model, compute, scheme, mesh, packing, machine, completions, lora)
    setup = fit_engine(kind, engine, workload, machine, trainer, fitted_rows=fitted_rows)
    refills = config.algorithm.refill_rounds > 0 and hosts.count > 1
    return Placement(hosts, mesh, compute, scheme, packing, columns, setup, kind.own_process and not refills)


def compute_on(config: Config, mesh: Mesh, *, layers: int = _CPU_UNROLL) -> Compute:
    """Computation of the training stack on a mesh, of a model with `layers` layers."""
    platform = mesh.devices.flat[0].platform
    dtype = np.dtype(jnp.dtype(config.model.compute_dtype))
    longest = -(-max((config.max_total_tokens, *config.training.row_lengths)) // 128) * 128
    kernel = choose_kernel(config.model.attention, dtype, platform, longest)
    return Compute(
        dtype=config.model.compute_dtype,
        remat=config.model.remat,
        scan_unroll=config.model.scan_unroll or (_CPU_UNROLL if platform == "cpu" and layers <= _CPU_UNROLL else 1),
        attention=kernel,
        logprob_chunk=config.model.logprob_chunk,
        one_segment=segments_of(config, kernel) == 1,
        segments=segments_of(config, kernel),
    )


def packing_on(config: Config, mesh: Mesh, compute: Compute, shortest: int = 1) -> RowShapes:
    """Shapes of a batch of sequences of at least `shortest` tokens, for a computation on a mesh."""
    splash, row_lengths = compute.attention == "splash", config.training.row_lengths
    if splash and (odd := [length for length in row_lengths if length % 128]):
        raise UserError(f"config.training.row_lengths: got {odd[0]}, splash attention needs multiples of 128")
    return make_row_shapes(
        row_lengths=row_lengths,
        longest=config.max_total_tokens,
        shortest=shortest,
        length_multiple=512 if splash else 8,
        micro_batch_tokens=config.training.micro_batch_tokens,
        mini_batches=config.mini_batches,
        completions=config.completions_per_mini_batch,
        segments_per_row=segments_of(config, compute.attention) or ANY_NUMBER,
        row_shards=row_shards(mesh),
    )
