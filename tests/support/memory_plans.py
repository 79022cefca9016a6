"""The memory of a run on hardware that is not here."""

import dataclasses
import functools

import jax

from dcmdp_jax.config.checks import engine_arguments, find_trainable
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.engines.engine_kind import Workload
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.parallel.mesh import make_mesh, sampling_mesh
from dcmdp_jax.run.memory_use import TrainingShapes, fit_engine, training_memory
from dcmdp_jax.run.placement import compute_on, packing_on

QWEN3_8B = ModelConfig(
    "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, rope_theta=1e6, max_position_embeddings=40960
)


def memory_plan_of(config, model, machine, shape, *, prompts=(1024,), vllm_on_cpu=False):
    config = from_config_dict(config)
    devices = shape[0] * shape[1] * shape[2]
    mesh = make_mesh(*shape, devices=jax.devices()[:devices])
    compute = compute_on(config, mesh)
    packing = packing_on(config, mesh, compute)
    if machine.platform == "gpu":
        compute = dataclasses.replace(
            compute, attention="cudnn", segments=config.training.segments_per_row
        )
    completions = config.training.prompts_per_step * config.rollout.group_size
    kind = find_trainable(config.rollout.engine)
    engine = engine_arguments(
        config,
        kind,
        model=model,
        mesh=functools.partial(sampling_mesh, mesh),
        platform="cpu" if vllm_on_cpu else "cuda",
        param_dtype=config.model.param_dtype,
    )
    load = Workload(
        completions=completions,
        group_size=config.rollout.group_size,
        prompt_lengths=prompts,
        max_completion_tokens=config.rollout.max_completion_tokens,
    )
    shapes = TrainingShapes(
        config=config, model=model, prompt_lengths=prompts, completions=completions
    )
    trainer = training_memory(shapes, compute, mesh, packing, machine)
    return fit_engine(kind, engine, load, machine, trainer).memory


def part_of(plan, name):
    return next(part for part in plan.parts if part.name.startswith(name))


def bytes_of(plan, name):
    """Bytes on each device of the parts whose names begin so, and on a CPU in the host."""
    return sum(part.per_device or part.host for part in plan.parts if part.name.startswith(name))
