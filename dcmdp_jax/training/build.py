"""The compiled programs of a step, and the state that a run starts from."""

from __future__ import annotations

import collections
import functools
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh

from dcmdp_jax.activity import activity
from dcmdp_jax.config.engine import forward_scheme
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.episode import column_shapes
from dcmdp_jax.data.packing import abstract_batch
from dcmdp_jax.models import hf_weights
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.lora import merge_rounding, merged, trained
from dcmdp_jax.models.params import declared_shapes, quantized_leaves
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.parallel.backend import compile_beside
from dcmdp_jax.parallel.sharding import sharded
from dcmdp_jax.run.checkpoint import Checkpoints, needed_by
from dcmdp_jax.run.run import Run
from dcmdp_jax.training.arrival import arrival, watched_columns
from dcmdp_jax.training.rescore import make_old_logprobs, make_rescore
from dcmdp_jax.training.state import (
    WARMUP_SCALE,
    batch_shardings,
    initial_dual,
    initial_loss_scale,
    make_optimizer,
    make_schedule,
    new_state,
    train_state_shardings,
)
from dcmdp_jax.training.step import StepParts, make_train_step
from dcmdp_jax.training.step_metrics import Metrics
from dcmdp_jax.training.stopping import Interrupted, StopSignal
from dcmdp_jax.training.warmup import warm_up
from dcmdp_jax.types import Batch, LossScale, Params, TrainState

logger = logging.getLogger(__name__)


class StepPrograms(NamedTuple):
    """A training step and what it starts from.

    Attributes:
        optimizer, loss_scale: parts of a fresh state.
        shardings: shardings of the state.
        train_step: (state, batch, frozen parameters) -> (state, metrics), compiled at its first call.
        rescore: with rollout.precision=exact, puts the training stack's log-probs in place of the sampler's; else None.
        old_logprobs: with rollout.lag, adds those of the weights that sampled; else None.
        policy: (trained, frozen parameters) -> those of the training stack's forward pass; the trained ones without
            adapters.
        watched, arrival: programs of `arrival`, (trained parameters) and (watched, trained parameters) -> metrics; of
            adapters nothing is watched, `merged` measures them.
        merged: (trained, frozen parameters) -> those for an engine, and metrics of the merge; see `lora`.
    """

    optimizer: optax.GradientTransformationExtraArgs
    loss_scale: LossScale | None
    shardings: TrainState
    train_step: Callable
    rescore: Callable | None
    old_logprobs: Callable | None
    policy: Callable[[Params, Params | None], Params]
    merged: Callable[[Params, Params | None], tuple[Params, Metrics]]
    watched: Callable[[Params], list[jax.Array]]
    arrival: Callable[[list[jax.Array], Params], Metrics]

    def compile_ahead(self, run: Run) -> Callable[[], None]:
        """Compile the step in a thread, beside the start of the engine, the warm-up and the first batch.

        JAX keeps the program. Not where the step has frozen parameters, whose shapes nobody knows yet.

        Returns:
            A function that waits for it.
        """
        if run.lora or run.config.algorithm.kl_coefficient:
            return lambda: None

        return compile_beside(lambda: self.train_step.lower(*abstract_arguments(run, self), None).compile())


def make_step_programs(
    config: Config, model: ModelConfig, compute: Compute, mesh: Mesh, lora: Lora | None = None
) -> StepPrograms:
    """Make the programs of a step. Nothing is compiled or allocated but scalars.

    Args:
        config: the settings.
        model: the model.
        compute: how the training stack computes.
        mesh: the training devices.
        lora: shape of the adapters; None trains all parameters.
    """
    schedule = make_schedule(config.optimizer, updates=config.training.steps * config.mini_batches)
    optimizer = make_optimizer(config.optimizer, schedule)
    dual = initial_dual(config.algorithm)
    loss_scale = initial_loss_scale(config.model.compute_dtype)
    shardings = train_state_shardings(model, optimizer, dual, config.model.param_dtype, mesh, loss_scale, lora)
    exact = config.rollout.precision == "exact"
    row_logprobs = make_row_logprobs(
        model, compute, temperature=config.rollout.temperature, mesh=mesh,
        scheme=forward_scheme(config, mesh.devices.flat[0].platform, model=model), head_dtype=config.model.head_dtype,
        top_gradient=config.algorithm.differentiates_head,
        cut=config.rollout.cuts,
    )  # fmt: skip
    parts = StepParts(
        row_logprobs=row_logprobs,
        compute_dtype=compute.dtype,
        settings=config.algorithm,
        max_completion_tokens=config.rollout.max_completion_tokens,
        optimizer=optimizer,
        schedule=schedule,
        mesh=mesh,
        always_recompute=exact,
        record_tokens=config.observe.rollouts_every_steps > 0,
        lora=lora,
    )
    train_step = make_train_step(parts, shardings)
    rescore = make_rescore(row_logprobs, mesh=mesh) if exact else None
    old_logprobs = make_old_logprobs(row_logprobs, mesh=mesh) if config.rollout.lag else None
    return StepPrograms(
        optimizer,
        loss_scale,
        shardings,
        train_step,
        rescore,
        old_logprobs,
        policy=parts.policy,
        merged=_merge(config, lora),
        **_watch(config, model, lora),
    )


def _watch(config: Config, model: ModelConfig, lora: Lora | None) -> dict[str, Callable]:
    if lora is not None:
        return {"watched": lambda _: [], "arrival": lambda *_: {}}
    marks = {"quantized": quantized_leaves(model)}
    measure = functools.partial(arrival, **marks, precision=config.rollout.precision)
    return {"watched": jax.jit(functools.partial(watched_columns, **marks)), "arrival": jax.jit(measure)}


def _merge(config: Config, lora: Lora | None) -> Callable[[Params, Params | None], tuple[Params, Metrics]]:
    if lora is None:
        return lambda params, _: (params, {})

    def merge(params: Params, base: Params) -> tuple[Params, Metrics]:
        rounding = merge_rounding(base, params, lora, config.rollout.precision)
        return merged(base, params, lora), {"mismatch/merge_rounding": rounding}

    return jax.jit(merge)


def start(
    run: Run, programs: StepPrograms, checkpoints: Checkpoints, stop: StopSignal, show: Callable[[str], None]
) -> tuple[TrainState, bool, int]:
    """The newest checkpoint's state, or a fresh one, warmed up if asked.

    Args:
        run: checked.
        programs: the step's programs.
        checkpoints: the run's checkpoints.
        stop: ends the warm-up.
        show: prints a line for people.

    Returns:
        The state; whether it was resumed; the position in the stream of prompts where its next step begins.

    Raises:
        Interrupted: after a signal to any process of the run, in the warm-up.
        CheckpointError: if there are checkpoints and none can be read.
    """
    config, shardings = run.config, programs.shardings
    create = jax.jit(
        lambda params: new_state(params, programs.optimizer, initial_dual(config.algorithm), programs.loss_scale),
        out_shardings=shardings,
    )
    shapes = jax.eval_shape(create, declared_shapes(trained(run.model, run.lora), config.model.param_dtype))
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
    with activity(
        "restoring the newest checkpoint" if checkpoints.latest_step is not None else "looking for checkpoints"
    ):
        state = checkpoints.restore(abstract, run.model)
    if state is not None:
        step = int(state.step)
        for name in TrainState._field_defaults:
            if getattr(state, name) is None and getattr(abstract, name) is not None:
                given = step, name, needed_by(name)
                logger.warning("checkpoint %d has no %s (%s): it begins as in a new run", *given)
                initial = jax.jit(lambda params, name=name: getattr(create(params), name))
                state = state._replace(**{name: jax.device_put(initial(state.params), getattr(shardings, name))})
        checkpoints.check_problems(step, may_change=config.task.on_changed_data == "continue")
        show(f"resuming {config.run_dir} after step {step}")
        taken = checkpoints.prompts_taken(step)
        return state, True, step * config.training.prompts_per_step if taken is None else taken
    with activity(f"loading the weights of {config.model.path}" if config.model.path else "drawing fresh weights"):
        params = run.initial_params()
    if config.warmup.steps:
        scale = WARMUP_SCALE if programs.loss_scale is not None else 1.0
        params = _warm_up(run, params, stop, show, loss_scale=scale)
    if config.algorithm.kl_coefficient or run.lora and run.base_path is None:
        with activity("saving the initial policy"):
            _save_reference(run, params)
    with activity("making the optimizer's state"):
        return create(run.initial_adapters(shardings.params) if run.lora else params), False, 0


def abstract_arguments(run: Run, programs: StepPrograms) -> tuple[TrainState, Batch]:
    """State and batch of the step: shapes, dtypes and shardings."""
    config, packing, dual = run.asked, run.packing, initial_dual(run.asked.algorithm)
    shapes = declared_shapes(trained(run.model, run.lora), config.model.param_dtype)
    state = jax.eval_shape(lambda params: new_state(params, programs.optimizer, dual, programs.loss_scale), shapes)
    columns = column_shapes(config.columns, k=config.rollout.top_logprobs, routing=run.model.routing)
    batch = abstract_batch(packing, columns)
    placed = batch_shardings(run.mesh, buckets=len(packing.row_lengths))
    return sharded(state, programs.shardings), sharded(batch, placed)


def _warm_up(run: Run, params: Params, stop: StopSignal, show: Callable[[str], None], *, loss_scale: float) -> Params:
    settings = run.config.warmup
    show(f"warm-up: {settings.steps} supervised steps on {settings.task}")
    prompts, solutions = run.worked_solutions
    # The sampling temperature belongs to sampling: solutions are fitted by the model as it is.
    row_logprobs = make_row_logprobs(run.model, run.compute, temperature=1.0, mesh=run.mesh)
    length_multiple = 128 if run.compute.attention == "splash" else 8
    began = time.monotonic()

    def on_step(done: int, loss: float) -> None:
        doing.done = done
        [signal_number] = run.hosts.largest(stop.received or 0)
        if signal_number:
            raise Interrupted(int(signal_number), "in the warm-up, which starts again")
        if done % 500 == 0 or done == settings.steps:
            show(f"warm-up: step {done}, loss {loss:.4f} nats a token, {time.monotonic() - began:.0f} s")

    with activity("warming up (it compiles first)", settings.steps, "steps") as doing:
        return warm_up(
            params, prompts, solutions, row_logprobs, settings, seed=run.config.training.seed, mesh=run.mesh,
            length_multiple=length_multiple, on_step=on_step, loss_scale=loss_scale,
        )  # fmt: skip


def _save_reference(run: Run, params: Params) -> None:
    dtype = run.config.model.param_dtype
    if run.hosts.is_writer:
        hf_weights.save_params(params, run.model, run.reference, dtype=dtype, overwrite=True)
    else:
        # Process 0 writes the tensors; the others have parts of them.
        collections.deque(hf_weights.iterate_hf_tensors(params, run.model, dtype), maxlen=0)
    run.hosts.wait_for_all()


def frozen_params(run: Run, checkpoints: Checkpoints, step: int) -> Params | None:
    """The reference policy of the KL term and the base of the adapters: the policy before the first step.

    None when there is neither.

    Args:
        run: checked.
        checkpoints: the run's checkpoints.
        step: finished steps, whose checkpoint knows the policy's digests.

    Raises:
        CheckpointError: if it is another policy than the one that the run began with.
    """
    if run.lora is None and not run.config.algorithm.kl_coefficient:
        return None
    path = run.base_path if run.lora and run.base_path else run.reference
    with activity("loading the initial policy"):
        frozen = run.load_base(path) if run.lora else run.load_params(path)
        checkpoints.check_reference(frozen, step, path)
    return frozen
