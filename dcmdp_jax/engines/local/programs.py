"""The embedded engine's programs, with abstract arguments, ready to be compiled for any mesh."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.kind import EngineArguments, EnginePlan, Workload
from dcmdp_jax.engines.local import decode, score, sizes
from dcmdp_jax.engines.local.cache import abstract
from dcmdp_jax.engines.local.layout import Program, weight_specs
from dcmdp_jax.engines.local.weights import engine_shapes
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.parallel.sharding import Lowerable, bytes_per_device, sharded


def plan_engine(arguments: EngineArguments, load: Workload) -> EnginePlan:
    """The programs that the embedded engine would run.

    Args:
        arguments: of the engine; its mesh is the one it would have.
        load: what it is asked.

    Raises:
        UserError: if `tensor` or `expert` does not divide the devices or the model.
    """
    model, split = arguments.model, dataclasses.asdict(arguments.settings)
    engine = arguments.mesh(**split)
    program = Program.of(arguments, engine)
    weights = _weights(model, arguments.precision, load.param_dtype, engine)
    group, bucket = load.group_size, sizes.length_bucket(max(load.prompt_lengths))
    rows = sizes.batch_rows(arguments.max_rows, group, load.completions, engine.size)
    slots = bucket + load.max_completion_tokens
    cache = abstract(model, rows, slots, dtype=program.cache_dtype, sharding=program.cache)
    cache_bytes = bytes_per_device(cache)

    def by_row(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=program.rows)

    def scalar(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(engine, P()))

    state = decode.RowState(
        keys=by_row(jnp.uint32, rows, 2), prompt_lengths=by_row(jnp.int32, rows), last=by_row(jnp.int32, rows),
        sampled=by_row(jnp.int32, rows), done=by_row(jnp.bool_, rows),
    )  # fmt: skip
    prompts, groups = sizes.prefill_shape(model.num_heads, max(1, rows // group), bucket, engine.size)
    length = sizes.length_bucket(arguments.max_total_tokens)
    scored = sizes.score_rows(model.num_heads, length, arguments.max_rows, program.row_shards)
    held = {"engine's weights": bytes_per_device(weights)}
    programs = (
        Lowerable(
            "prefill",
            functools.partial(
                decode.prefill.trace, weights, by_row(jnp.int32, prompts, bucket), by_row(jnp.int32, prompts),
                program=program, groups=groups,
            ),
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
            held,
            (length,),
            scored // program.row_shards * length,
        ),
    )  # fmt: skip
    return EnginePlan(programs, held["engine's weights"], cache_bytes, rows, slots, rows < load.completions)


def _weights(model: ModelConfig, precision: str, param_dtype: str, mesh: Mesh) -> Any:
    """The engine's tree with shardings; its layers are alike."""
    shapes = engine_shapes(model, precision, param_dtype)
    specs = weight_specs(shapes, model, mesh)
    tree = sharded(shapes, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))
    return {**tree, "layers": [tree["layers"]] * model.num_layers}
