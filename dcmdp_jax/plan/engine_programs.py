"""The embedded engine's programs, with abstract arguments, ready to be compiled for any mesh."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.config import Config
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import param_shapes
from dcmdp_jax.plan.step_program import Lowerable, bytes_per_device, sharded
from dcmdp_jax.rollout.local import decode, score
from dcmdp_jax.rollout.local.cache import FLOAT8
from dcmdp_jax.rollout.local.schedule import ATTENTION_ELEMENTS, round_up
from dcmdp_jax.rollout.local.weights import convert


class EnginePlan(NamedTuple):
    """The embedded engine of a run.

    Attributes:
        programs: prefill, decode and score at their largest shapes.
        weights_bytes, cache_bytes: on each device; the cache of a full batch of the longest rows.
        rows: completions decoded at a time.
        slots: cache slots of a row.
    """

    programs: tuple[Lowerable, ...]
    weights_bytes: int
    cache_bytes: int
    rows: int
    slots: int


def plan_engine(config: Config, model: ModelConfig, mesh: Mesh) -> EnginePlan:
    """The programs that the embedded engine would run on the devices of the training mesh.

    Args:
        config: the settings.
        model: the model.
        mesh: the training devices.
    """
    rollout = config.rollout
    devices = Mesh(mesh.devices.reshape(-1), ("rows",))
    cache_dtype = FLOAT8 if rollout.kv_cache_dtype == "fp8" else rollout.compute_dtype
    program = decode.Program(model, rollout.compute_dtype, cache_dtype, devices)
    replicated, rows_split = NamedSharding(devices, P()), program.rows
    weights = sharded(_weight_shapes(model, rollout.precision, config.model.param_dtype), replicated)
    group, bucket = rollout.group_size, _bucket(config.task.max_prompt_tokens)
    completions = config.training.prompts_per_step * group
    rows = round_up(min(rollout.max_rows // group * group or rollout.max_rows, completions), devices.size)
    slots = bucket + rollout.max_completion_tokens
    prompts = _prefill_rows(model, rows // group, bucket, devices.size)
    cache = sharded(_cache_shapes(model, rows, slots, rollout.compute_dtype, cache_dtype), rows_split)
    state = decode.RowState(
        keys=_array((rows, 2), jnp.uint32, rows_split), prompt_lengths=_array((rows,), jnp.int32, rows_split),
        last=_array((rows,), jnp.int32, rows_split), sampled=_array((rows,), jnp.int32, rows_split),
        done=_array((rows,), jnp.bool_, rows_split),
    )  # fmt: skip
    integer, real = _array((), jnp.int32, replicated), _array((), jnp.float32, replicated)
    scored = 1 << (config.max_total_tokens - 1).bit_length()
    score_rows = round_up(
        max(1, min(rollout.max_rows, ATTENTION_ELEMENTS // (model.num_heads * scored**2))), devices.size
    )
    held = {"engine's weights": bytes_per_device(weights)}
    cache_bytes = bytes_per_device(cache)

    def trips(op_name: str) -> float | None:
        # One token for each row: the caller multiplies.
        return 1

    return EnginePlan(
        programs=(
            Lowerable("prefill", functools.partial(
                decode.prefill.lower, weights, _array((prompts[0], bucket), jnp.int32, rows_split),
                _array((prompts[0],), jnp.int32, rows_split), program=program, groups=prompts[1],
            ), trips, held),
            Lowerable("decode", functools.partial(
                decode.decode.lower, weights, cache, state, integer, integer, integer, real, real,
                _array((1,), jnp.int32, replicated), program=program, prompt_slots=bucket, prefix_slots=bucket,
                mode="sample",
            ), trips, held | {"cache": cache_bytes}),
            Lowerable("score", functools.partial(
                score.score.lower, weights, _array((score_rows, scored), jnp.int32, rows_split),
                _array((score_rows,), jnp.int32, rows_split), real, program=program,
            ), trips, held),
        ),
        weights_bytes=held["engine's weights"],
        cache_bytes=cache_bytes,
        rows=rows,
        slots=slots,
    )  # fmt: skip


def _array(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _weight_shapes(model: ModelConfig, precision: str, param_dtype: str) -> Any:
    """The tree of `weights.convert`, traced for one layer."""
    one = dataclasses.replace(model, num_layers=1)
    tree = jax.eval_shape(lambda params: convert(params, one, precision), param_shapes(one, param_dtype))
    return {**tree, "layers": tree["layers"] * model.num_layers}


def _cache_shapes(model: ModelConfig, rows: int, slots: int, compute_dtype: str, cache_dtype: str) -> Any:
    dtype = jnp.uint8 if cache_dtype == FLOAT8 else jnp.dtype(compute_dtype)
    key = jax.ShapeDtypeStruct((rows, model.num_kv_heads, model.head_dim, slots), dtype)
    value = jax.ShapeDtypeStruct((rows, model.num_kv_heads, slots, model.head_dim), dtype)
    return ((key, value),) * model.num_layers


def _prefill_rows(model: ModelConfig, prompts: int, bucket: int, devices: int) -> tuple[int, int]:
    """Padded prompts of a prefill and the parts that it runs them in, as `Scheduler` does."""
    count = max(1, prompts)
    groups = min(count, -(-count * model.num_heads * bucket**2 // ATTENTION_ELEMENTS))
    return round_up(count, groups * devices), groups


def _bucket(tokens: int) -> int:
    return max(16, 1 << (tokens - 1).bit_length())
