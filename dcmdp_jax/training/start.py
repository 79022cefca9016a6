"""The state that a run starts from, and the frozen reference policy."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from pathlib import Path

import jax

from dcmdp_jax.models import hf_weights
from dcmdp_jax.models.params import param_shapes
from dcmdp_jax.training.build import Parts, initial_params
from dcmdp_jax.training.loss_scale import WARMUP_SCALE
from dcmdp_jax.training.row_logprobs import make_row_logprobs
from dcmdp_jax.training.setup import Plan
from dcmdp_jax.training.state import new_state
from dcmdp_jax.training.stop_signal import Interrupted, StopSignal
from dcmdp_jax.training.warmup import warm_up
from dcmdp_jax.types import Params, TrainState

_REFERENCE_DIRECTORY = "reference"


def start(plan: Plan, parts: Parts, stop: StopSignal, show: Callable[[str], None]) -> tuple[TrainState, bool, int]:
    """The newest checkpoint's state, or a fresh one, warmed up if asked.

    Args:
        plan: the checked run.
        parts: of `build_parts`.
        stop: ends the warm-up.
        show: prints a line for people.

    Returns:
        The state; whether it was resumed; the position in the stream of prompts where its next step begins.

    Raises:
        Interrupted: after a signal to any process of the run, in the warm-up.
        CheckpointError: if there are checkpoints and none can be read.
    """
    config, shardings = plan.config, parts.shardings
    create = jax.jit(
        lambda params: new_state(params, parts.optimizer, parts.dual, parts.loss_scale), out_shardings=shardings
    )
    shapes = jax.eval_shape(create, param_shapes(plan.model, config.model.param_dtype))
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    if (state := parts.checkpoints.restore(abstract, plan.model)) is not None:
        step = int(state.step)
        show(f"resuming {config.run_dir} after step {step}")
        taken = parts.checkpoints.prompts_taken(step)
        return state, True, step * config.training.prompts_per_step if taken is None else taken
    params = initial_params(plan)
    if config.warmup.steps:
        scale = WARMUP_SCALE if parts.loss_scale is not None else 1.0
        params = _warm_up(plan, params, stop, show, loss_scale=scale)
    if config.algorithm.kl_coefficient:
        _save_reference(plan, params)
    return create(params), False, 0


def _warm_up(plan: Plan, params: Params, stop: StopSignal, show: Callable[[str], None], *, loss_scale: float) -> Params:
    settings = plan.config.warmup
    show(f"warm-up: {settings.steps} supervised steps on {settings.task}")
    prompts, solutions = plan.worked_solutions
    # The sampling temperature belongs to sampling: solutions are fitted by the model as it is.
    row_logprobs = make_row_logprobs(plan.model, plan.compute, temperature=1.0, mesh=plan.mesh)
    length_multiple = 128 if plan.compute.attention == "splash" else 8
    began = time.monotonic()

    def on_step(done: int, loss: float) -> None:
        [signal_number] = plan.hosts.largest(stop.received or 0)
        if signal_number:
            raise Interrupted(int(signal_number), "in the warm-up, which starts again")
        if done % 500 == 0 or done == settings.steps:
            show(f"warm-up: step {done}, loss {loss:.4f} nats a token, {time.monotonic() - began:.0f} s")

    return warm_up(
        params, prompts, solutions, row_logprobs, settings, seed=plan.config.training.seed, mesh=plan.mesh,
        length_multiple=length_multiple, on_step=on_step, loss_scale=loss_scale,
    )  # fmt: skip


def _reference(plan: Plan) -> Path:
    return Path(plan.config.run_dir) / _REFERENCE_DIRECTORY


def _save_reference(plan: Plan, params: Params) -> None:
    dtype = plan.config.model.param_dtype
    if plan.hosts.is_writer:
        hf_weights.save_params(params, plan.model, _reference(plan), dtype=dtype, overwrite=True)
    else:
        # Process 0 writes the tensors; the others have parts of them.
        collections.deque(hf_weights.iterate_hf_tensors(params, plan.model, dtype), maxlen=0)
    plan.hosts.wait_for_all()


def reference_params(plan: Plan, parts: Parts, step: int) -> Params | None:
    """The frozen policy of the KL term, as it was before the first step; None when the term is off.

    Args:
        plan: the checked run.
        parts: of `build_parts`.
        step: finished steps, whose checkpoint knows the policy's digests.

    Raises:
        CheckpointError: if it is another policy than the one that the run began with.
    """
    if not plan.config.algorithm.kl_coefficient:
        return None
    reference = hf_weights.load_params(
        _reference(plan), plan.model, dtype=plan.config.model.param_dtype, shardings=parts.shardings.params
    )
    parts.checkpoints.check_reference(reference, step)
    return reference
