"""The training step of a run, with abstract arguments, ready to be compiled for any mesh."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.columns import columns_of_run
from dcmdp_jax.data.packing import abstract_batch
from dcmdp_jax.data.row_layout import RowShapes
from dcmdp_jax.models.params import param_shapes
from dcmdp_jax.parallel.mesh import row_shards
from dcmdp_jax.parallel.sharding import Lowerable, bytes_per_device, sharded
from dcmdp_jax.plan.published import model_of
from dcmdp_jax.run.run import Run
from dcmdp_jax.training.build import make_step_programs
from dcmdp_jax.training.state import batch_shardings, initial_dual, new_state
from dcmdp_jax.types import TrainState


class StepPlan(NamedTuple):
    """A training step to compile.

    Attributes:
        program: the step.
        run: the parts it is made of.
        params_bytes, optimizer_bytes: on each device.
        micro_batches: micro-batches of one mini-batch in the worst case: all completions have the longest length.
    """

    program: Lowerable
    run: Run
    params_bytes: int
    optimizer_bytes: int
    micro_batches: int


def planned_run(config: Config, mesh: Mesh, **parts: Any) -> Run:
    """A run whose shapes alone are asked for: no data, no run directory, prompts of the longest length.

    Args:
        config: the settings.
        mesh: the training devices.
        parts: others that are made already.
    """
    known = {"settings": config, "mesh": mesh, "held_out": (), "shortest_prompt": 0}
    known |= {"prompt_lengths": [config.task.max_prompt_tokens]}
    return Run(config, **known | ({} if "model" in parts else {"model": model_of(config)}) | parts)


def plan_step(run: Run) -> StepPlan:
    """The step that `dcmdp train` would run. Nothing is allocated."""
    config, model, mesh, packing = run.asked, run.model, run.mesh, run.packing
    programs = make_step_programs(config, model, run.compute, mesh)
    shapes = param_shapes(model, config.model.param_dtype)
    dual = initial_dual(config.algorithm)
    state = jax.eval_shape(lambda params: new_state(params, programs.optimizer, dual, programs.loss_scale), shapes)
    state: TrainState = sharded(state, programs.shardings)
    batch = abstract_batch(packing, columns_of_run(config, model))
    batch = sharded(batch, batch_shardings(mesh, buckets=len(packing.row_lengths)))
    reference = state.params if config.algorithm.kl_coefficient else None
    params, optimizer = bytes_per_device(state.params), bytes_per_device(state.opt_state)
    held = {"parameters": params, "optimizer": optimizer}
    if reference is not None:
        held["reference policy"] = params
    trace = functools.partial(programs.train_step.trace, state, batch, reference)
    program = Lowerable("step", trace, held, packing.row_lengths, min(predicted_tokens(packing, mesh)))
    return StepPlan(program, run, params, optimizer, packing.micro_batches[-1])


def predicted_tokens(packing: RowShapes, mesh: Mesh) -> list[int]:
    """Count the tokens that a micro-batch of each bucket predicts on a device: all of a row but the first."""
    shapes = zip(packing.rows_per_micro_batch, packing.row_lengths, strict=True)
    return [rows // row_shards(mesh) * (length - 1) for rows, length in shapes]
