"""Memory of a run, by arithmetic: parts of a `plan.MemoryPlan`, before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.batch_shapes import abstract_batch
from dcmdp_jax.data.packing import PackingPlan
from dcmdp_jax.engines.sidecar.bridge import WeightBridge
from dcmdp_jax.engines.vllm import launch
from dcmdp_jax.memory.engine import LOGITS_HELD, EngineMemory, product_item
from dcmdp_jax.memory.plan import MORE_DEVICES, Machine, MemoryPlan, Part, certain, exact
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import logical_axes, num_params, param_shapes
from dcmdp_jax.parallel.mesh import AXES, row_shards, sampling_mesh
from dcmdp_jax.parallel.sharding import DATA, data_parallel_only, param_shardings


def plan_memory(
    config: Config,
    model: ModelConfig,
    compute: Compute,
    mesh: Mesh,
    packing: PackingPlan,
    machine: Machine,
    *,
    prompt_lengths: Sequence[int],
    completions: int,
    vllm_on_cpu: bool = False,
) -> MemoryPlan:
    """The parts of a run.

    Args:
        config: the settings.
        model: the model's shape.
        compute: options of the training stack.
        mesh: the training devices.
        packing: shapes of a batch.
        machine: the memory available.
        prompt_lengths: tokens of each prompt.
        completions: maximum number sampled in one call of the engine.
        vllm_on_cpu: whether vLLM is the CPU build.
    """
    parts = [*_training_parts(config, model, mesh, machine), *_step_parts(model, compute, mesh, packing, machine)]
    parts += _batch_parts(config, model, mesh, packing, machine, completions)
    note, rows = "", 0
    if config.rollout.engine == "vllm":
        parts += _vllm_parts(config, model, machine, on_cpu=vllm_on_cpu)
        if not vllm_on_cpu:
            note = (
                f"besides: vLLM takes {config.rollout.vllm.memory_share:g} of each of its GPUs "
                f"(rollout.vllm.memory_share){', while it samples' * (config.rollout.vllm.sleep > 0)}"
            )
    else:
        local = config.rollout.local
        engine = EngineMemory(
            model,
            machine,
            mesh=sampling_mesh(mesh, tensor=local.tensor, expert=local.expert).abstract_mesh,
            precision=config.rollout.precision,
            compute_dtype=config.rollout.compute_dtype,
            kv_cache_dtype=config.rollout.kv_cache_dtype,
            param_dtype=config.model.param_dtype,
            completions=completions,
            prompt_lengths=prompt_lengths,
            max_completion_tokens=config.rollout.max_completion_tokens,
            router_replay=config.rollout.router_replay,
            options="rollout.",
        )
        rows = engine.fitting_rows(config.rollout.max_rows, parts)
        parts += engine.parts(rows)
    return MemoryPlan(tuple(parts), machine, note, rows)


def plan_engine_memory(
    model: ModelConfig,
    machine: Machine,
    *,
    precision: str,
    compute_dtype: str,
    kv_cache_dtype: str,
    param_dtype: str,
    max_rows: int,
    completions: int,
    prompt_lengths: Sequence[int],
    max_completion_tokens: int,
) -> MemoryPlan:
    """The parts of bin.evaluate's embedded engine on all devices, with parameters loaded onto the first.

    Args:
        model: the model's shape.
        machine: the memory available.
        precision, compute_dtype, kv_cache_dtype: the engine's settings.
        param_dtype: dtype of the loaded parameters.
        max_rows: maximum number of completions decoded at a time.
        completions: maximum number sampled in one call.
        prompt_lengths: tokens of each prompt.
        max_completion_tokens: limit of each completion.
    """
    size = num_params(model) * jnp.dtype(param_dtype).itemsize
    loaded = exact("parameters", **machine.on_first(size), phases=frozenset({"push"}), lower="a smaller model")
    engine = EngineMemory(
        model,
        machine,
        mesh=AbstractMesh((machine.devices, 1, 1, 1), AXES),
        precision=precision,
        compute_dtype=compute_dtype,
        kv_cache_dtype=kv_cache_dtype,
        param_dtype=param_dtype,
        completions=completions,
        prompt_lengths=prompt_lengths,
        max_completion_tokens=max_completion_tokens,
        router_replay=False,
        options="--",
    )
    rows = engine.fitting_rows(max_rows, [loaded])
    return MemoryPlan((loaded, *engine.parts(rows)), machine, rows=rows)


def _training_parts(config: Config, model: ModelConfig, mesh: Mesh, machine: Machine) -> list[Part]:
    """State that is kept between steps, and the gradients."""
    shapes = param_shapes(model, config.model.param_dtype)
    shardings = param_shardings(logical_axes(model), shapes, mesh)
    sizes = [
        math.prod(sharding.shard_shape(leaf.shape))
        for leaf, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    ]
    item = jnp.dtype(config.model.param_dtype).itemsize
    values = sum(sizes)
    step = frozenset({"step"})
    fewer = "a smaller model" if machine.platform == "cpu" else MORE_DEVICES
    state_lower = f"{fewer}, or model.param_dtype=bfloat16" if item == 4 else fewer

    # A checkpoint is copied before it is written, so that the next steps need not wait: on an accelerator to the host,
    # by the devices that hold different parts of the state; a CPU's devices copy it each, a replicated state once.
    if machine.platform != "cpu":
        copies = max(1, machine.devices // mesh.shape[DATA])
    else:
        copies = 1 if data_parallel_only(mesh) else mesh.size
    saved = 3 * values * item * copies

    def on_mesh(size: int) -> dict[str, int]:
        return machine.on_each(size, mesh.size)

    parts = [
        exact("parameters", **on_mesh(values * item), lower=state_lower),
        exact("Adam's moments", **on_mesh(2 * values * item), lower=state_lower),
        # In float32; with a single micro-batch possibly in the parameters' dtype, if the compiler manages it.
        Part(
            "gradients",
            **on_mesh(4 * values),
            phases=step,
            lower=state_lower,
            certain=certain(**on_mesh(item * values)),
        ),
        # One micro-batch's gradient before it is added; afterwards the update.
        Part("gradients of a micro-batch", **on_mesh(4 * values), phases=step, lower=state_lower),
        Part("checkpoint's copy of the state", host=saved, lower=state_lower),
        Part("checkpoint being written", host=saved, lower=state_lower),
    ]
    if config.algorithm.kl_coefficient:
        parts.append(exact("reference policy", **on_mesh(values * item), lower="algorithm.kl_coefficient=0"))
    return parts


def _step_parts(model: ModelConfig, compute: Compute, mesh: Mesh, packing: PackingPlan, machine: Machine) -> list[Part]:
    """Activations and logits of the largest micro-batch: saved by each layer, and temporary in one layer."""
    shards, item = row_shards(mesh), product_item(compute.dtype, machine)
    most, step = (0, 0), frozenset({"step"})
    for length, rows in zip(packing.row_lengths, packing.rows_per_micro_batch, strict=True):
        rows //= shards
        keys, tokens = length, rows * length
        if packing.group_size:
            keys += packing.prompt_length
            tokens += rows // packing.group_size * packing.prompt_length
        queries, width = model.num_heads * model.head_dim, model.hidden_size
        projected = queries + 2 * model.num_kv_heads * model.head_dim
        # A token's hidden state is copied to each of its experts and back.
        copies = 2 * model.num_experts_per_tok * width
        whole = tokens * item * (8 * width + 2 * projected + 2 * queries + 4 * model.active_mlp_width + copies)
        scores = rows * model.num_heads * length * keys if compute.attention == "xla" else 0
        saved = {
            "full": tokens * item * width,
            "dots": tokens * item * (3 * width + projected + 2 * model.active_mlp_width + copies),
            "none": whole + scores * item,
        }[compute.remat]
        # Scores in float32 and their exponentials, forward and backward.
        working = whole + scores * (8 + 2 * item)
        most = max(most, (model.num_layers * saved + working, tokens))
    logits = min(compute.logprob_chunk, most[1]) * model.vocab_size * 4 * LOGITS_HELD
    remat = "" if compute.remat == "full" else ", or model.remat=full"
    parts = [
        Part("activations", **machine.on_each(most[0], mesh.size), phases=step,
             lower=f"training.micro_batch_tokens{remat}"),
        Part("logits", **machine.on_each(logits, mesh.size), phases=step, lower="model.logprob_chunk"),
    ]  # fmt: skip
    if item != jnp.dtype(compute.dtype).itemsize:
        copies = machine.on_each(2 * 4 * model.vocab_size * model.hidden_size, mesh.size)
        lower = "model.compute_dtype=float32"
        parts.append(Part("float32 copies of the output layer", **copies, phases=step, lower=lower))
    return parts


def _batch_parts(
    config: Config, model: ModelConfig, mesh: Mesh, packing: PackingPlan, machine: Machine, completions: int
) -> list[Part]:
    """The batch, on the devices and before, and the experts of each token that an engine returns for router replay."""
    routed = model.routing[:2] if config.rollout.router_replay else None
    rows = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_batch(packing, routed).rows))
    step, lower = frozenset({"step"}), "training.prompts_per_step or rollout.max_completion_tokens"
    parts = [
        exact("batch", **machine.on_each(rows // row_shards(mesh), mesh.size), phases=step, lower=lower),
        Part("batch, before it is split over devices", host=rows, phases=step, lower=lower),
    ]
    if routed:
        lower += ", or rollout.router_replay=False"
        tokens = completions * 2 * math.prod(routed)
        parts.append(Part("experts of the completions' tokens", host=tokens * config.max_total_tokens,
                          phases=frozenset({"sample", "step"}), lower=lower))  # fmt: skip
        if config.rollout.engine == "local":
            parts.append(Part("engine's record of them", host=tokens * config.rollout.max_completion_tokens,
                              phases=frozenset({"sample"}), lower=lower))  # fmt: skip
    return parts


def _vllm_parts(config: Config, model: ModelConfig, machine: Machine, *, on_cpu: bool) -> list[Part]:
    """Two copies of the weights in shared memory, and the memory of vLLM's CPU build."""
    rollout = config.rollout
    bridge = WeightBridge(model, dtype=rollout.compute_dtype, int8=rollout.precision == "int8")
    lower = "a smaller model" + ", or rollout.compute_dtype=bfloat16" * (rollout.compute_dtype == "float32")
    parts = [exact("two copies of the weights for vLLM", host=2 * bridge.num_bytes, lower=lower)]
    if on_cpu:
        settings = dataclasses.replace(rollout.vllm, replicas=rollout.vllm.replicas or 1)
        arguments = launch.engine_arguments(
            model, settings, Path(config.run_dir) / "vllm", precision=rollout.precision,
            compute_dtype=rollout.compute_dtype, kv_cache_dtype=rollout.kv_cache_dtype,
            max_total_tokens=config.max_total_tokens, max_rows=rollout.max_rows, cpu=True,
            available=max(0, (machine.host_bytes or 0) - 2 * bridge.num_bytes),
        )  # fmt: skip
        count = settings.replicas
        fewer = "rollout.vllm.replicas, " * (count > 1)
        parts.append(exact("vLLM's weights", host=count * bridge.num_bytes, lower=fewer + lower))
        parts.append(
            exact("vLLM's key-value cache", host=count * arguments["kv_cache_memory_bytes"],
                  lower=f"{fewer}rollout.vllm.kv_cache_gib or rollout.max_rows")
        )  # fmt: skip
    return parts
