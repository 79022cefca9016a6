"""The embedded engine's programs, with abstract arguments, ready to be compiled for any mesh."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.config.settings import Config
from dcmdp_jax.engines.local import decode, score
from dcmdp_jax.engines.local.cache import FLOAT8
from dcmdp_jax.engines.local.layout import Program, check_mesh, weight_specs
from dcmdp_jax.engines.local.schedule import ATTENTION_ELEMENTS, round_up
from dcmdp_jax.engines.local.weights import engine_shapes
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.parallel.mesh import sampling_mesh
from dcmdp_jax.plan.step_program import Lowerable, bytes_per_device, expert_blocks, sharded


class EnginePlan(NamedTuple):
    """The embedded engine of a run.

    Attributes:
        programs: prefill, decode and score at their largest shapes.
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


def plan_engine(config: Config, model: ModelConfig, mesh: Mesh, *, max_rows: int) -> EnginePlan:
    """The programs that the embedded engine would run on the devices of the training mesh.

    Args:
        config: the settings.
        model: the model.
        mesh: the training devices.
        max_rows: completions decoded at a time, at most.

    Raises:
        UserError: if `rollout.local` does not divide the devices or the model.
    """
    rollout = config.rollout
    try:
        check_mesh(model, rollout.local.tensor, rollout.local.expert)
    except UserError as error:
        raise UserError(f"config.rollout.local.{error}") from None
    engine = sampling_mesh(mesh, tensor=rollout.local.tensor, expert=rollout.local.expert)
    cache_dtype = FLOAT8 if rollout.kv_cache_dtype == "fp8" else rollout.compute_dtype
    program = Program(model, rollout.compute_dtype, cache_dtype, engine, rollout.router_replay)
    weights = _weights(model, rollout.precision, config.model.param_dtype, engine)
    group, bucket = rollout.group_size, _bucket(config.task.max_prompt_tokens)
    completions = config.training.prompts_per_step * group
    rows = round_up(min(max_rows // group * group or max_rows, completions), engine.size)
    slots = bucket + rollout.max_completion_tokens
    cache = _cache(model, rows, slots, program)
    cache_bytes = bytes_per_device(cache)

    def by_row(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=program.rows)

    def scalar(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(engine, P()))

    state = decode.RowState(
        keys=by_row(jnp.uint32, rows, 2), prompt_lengths=by_row(jnp.int32, rows), last=by_row(jnp.int32, rows),
        sampled=by_row(jnp.int32, rows), done=by_row(jnp.bool_, rows),
    )  # fmt: skip
    prompts, groups = _prefill_shape(model, rows // group, bucket, engine.size)
    # As `LocalEngine.score` pads a row of the longest length.
    length = _bucket(config.max_total_tokens)
    scored = round_up(max(1, min(max_rows, ATTENTION_ELEMENTS // (model.num_heads * length**2))), program.row_shards)
    held = {"engine's weights": bytes_per_device(weights)}
    programs = (
        Lowerable(
            "prefill",
            functools.partial(
                decode.prefill.trace, weights, by_row(jnp.int32, prompts, bucket), by_row(jnp.int32, prompts),
                program=program, groups=groups,
            ),
            _one_token,
            held,
            (bucket,),
            prompts // groups // program.row_shards * bucket,
        ),
        Lowerable(
            "decode",
            functools.partial(
                decode.decode.trace, weights, cache, state, *(scalar(jnp.int32) for _ in range(3)),
                scalar(jnp.float32), scalar(jnp.float32), scalar(jnp.int32, 1), program=program, prompt_slots=bucket,
                prefix_slots=bucket, mode="sample",
            ),
            _one_token,
            held | {"engine's cache": cache_bytes},
            (),
            # One token of each row, whose logits are wanted.
            rows + 1,
        ),
        Lowerable(
            "score",
            functools.partial(
                score.score.trace, weights, by_row(jnp.int32, scored, length), by_row(jnp.int32, scored),
                scalar(jnp.float32), program=program,
            ),
            _one_token,
            held,
            (length,),
            scored // program.row_shards * length,
        ),
    )  # fmt: skip
    return EnginePlan(programs, held["engine's weights"], cache_bytes, rows, slots, rows < completions)


def _one_token(op_name: str) -> float:
    """Loops whose end is data count blocks of experts' rows, or tokens to decode: what is compiled is told for one."""
    return expert_blocks(op_name) or 1


def _weights(model: ModelConfig, precision: str, param_dtype: str, mesh: Mesh) -> Any:
    """The engine's tree with shardings; its layers are alike."""
    shapes = engine_shapes(model, precision, param_dtype)
    specs = weight_specs(shapes, model, mesh)
    tree = sharded(shapes, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    return {**tree, "layers": [tree["layers"]] * model.num_layers}


def _cache(model: ModelConfig, rows: int, slots: int, program: Program) -> Any:
    dtype = jnp.uint8 if program.cache_dtype == FLOAT8 else jnp.dtype(program.cache_dtype)
    key = jax.ShapeDtypeStruct((rows, model.num_kv_heads, model.head_dim, slots), dtype, sharding=program.cache)
    value = jax.ShapeDtypeStruct((rows, model.num_kv_heads, slots, model.head_dim), dtype, sharding=program.cache)
    return ((key, value),) * model.num_layers


def _prefill_shape(model: ModelConfig, prompts: int, bucket: int, devices: int) -> tuple[int, int]:
    """Padded prompts of a prefill, and the parts that it runs them in, as `Scheduler` has them."""
    count = max(1, prompts)
    groups = min(count, -(-count * model.num_heads * bucket**2 // ATTENTION_ELEMENTS))
    return round_up(count, groups * devices), groups


def _bucket(tokens: int) -> int:
    """The length that the engine pads a prompt or a scored row to."""
    return max(16, 1 << (tokens - 1).bit_length())
