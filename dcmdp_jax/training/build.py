"""The parts of a checked run: the engine, the rewards, the checkpoints, the compiled step."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcmdp_jax.activity import activity
from dcmdp_jax.config.arguments import as_settings, of_engine
from dcmdp_jax.config.engine import find_trainable, forward_scheme
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.prompts import template_variables
from dcmdp_jax.engines.protocol import Engine
from dcmdp_jax.engines.sidecar.weights import Probe
from dcmdp_jax.environments.pool import EnvironmentPool
from dcmdp_jax.environments.turns import TurnLimits, TurnSampler
from dcmdp_jax.models import hf_weights
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.hf_hub import model_directory
from dcmdp_jax.models.params import init_params, logical_axes, param_shapes
from dcmdp_jax.observe.run_files import rewards_log
from dcmdp_jax.parallel.mesh import row_shards
from dcmdp_jax.parallel.sharding import param_shardings, replicated, shard_map_over_data
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rewards.scoring import RewardScorer
from dcmdp_jax.training.checkpoint import Checkpoints, WindowedDual
from dcmdp_jax.training.row_logprobs import make_old_logprobs, make_rescore, make_row_logprobs
from dcmdp_jax.training.setup import Plan
from dcmdp_jax.training.state import (
    WARMUP_SCALE,
    batch_shardings,
    dual_of_window,
    initial_dual,
    initial_loss_scale,
    make_optimizer,
    make_schedule,
    new_state,
    train_state_shardings,
)
from dcmdp_jax.training.step import StepParts, make_train_step
from dcmdp_jax.training.stopping import Interrupted, StopSignal
from dcmdp_jax.training.warmup import warm_up
from dcmdp_jax.types import Batch, DualState, LossScale, Params, Rows, TrainState


class StepPrograms(NamedTuple):
    """A training step and what it starts from.

    Attributes:
        optimizer, dual, loss_scale: what a fresh state is made with.
        shardings: of the state.
        train_step: (state, batch, reference parameters) -> (state, metrics), compiled at its first call.
        rescore: with rollout.precision=exact, puts the training stack's log-probs in place of the sampler's; else None.
        old_logprobs: with rollout.lag, adds those of the weights that sampled; else None.
    """

    optimizer: optax.GradientTransformationExtraArgs
    dual: DualState
    loss_scale: LossScale | None
    shardings: TrainState
    train_step: Callable
    rescore: Callable | None
    old_logprobs: Callable | None


def make_step_programs(config: Config, model: ModelConfig, compute: Compute, mesh: Mesh) -> StepPrograms:
    """Make the programs of a step. Nothing is compiled or allocated but scalars.

    Args:
        config: the settings.
        model: the model.
        compute: how the training stack computes.
        mesh: the training devices.
    """
    schedule = make_schedule(config.optimizer, updates=config.training.steps * config.mini_batches)
    optimizer = make_optimizer(config.optimizer, schedule)
    dual = initial_dual(config.algorithm)
    loss_scale = initial_loss_scale(config.model.compute_dtype)
    shardings = train_state_shardings(model, optimizer, dual, config.model.param_dtype, mesh, loss_scale)
    exact = config.rollout.precision == "exact"
    row_logprobs = make_row_logprobs(
        model, compute, temperature=config.rollout.temperature, mesh=mesh,
        scheme=forward_scheme(config, mesh.devices.flat[0].platform, model=model), head_dtype=config.model.head_dtype,
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
    )
    train_step = make_train_step(parts, shardings)
    rescore = make_rescore(row_logprobs, mesh=mesh) if exact else None
    old_logprobs = make_old_logprobs(row_logprobs, mesh=mesh) if config.rollout.lag else None
    return StepPrograms(optimizer, dual, loss_scale, shardings, train_step, rescore, old_logprobs)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts that the training loop works with.

    Attributes:
        engine: samples; has no weights yet.
        verifier: judges answers, for the reward `math` and for evaluation.
        scorer: computes rewards.
        turns: samples in turns with the environment; None without one.
        checkpoints: of the run directory.
        optimizer, dual, loss_scale: what a fresh state is made with.
        shardings, batch_shardings: of the state and of a batch.
        train_step: (state, batch, reference parameters) -> (state, metrics), compiled at its first call.
        rescore: with rollout.precision=exact, puts the training stack's log-probs in place of the sampler's; else None.
        old_logprobs: with rollout.lag, adds those of the weights that sampled; else None.
    """

    engine: Engine
    verifier: Verifier
    scorer: RewardScorer
    turns: TurnSampler | None
    checkpoints: Checkpoints
    optimizer: optax.GradientTransformation
    dual: DualState
    loss_scale: LossScale | None
    shardings: TrainState
    batch_shardings: Batch
    train_step: Callable
    rescore: Callable | None
    old_logprobs: Callable | None = None


@dataclasses.dataclass(frozen=True)
class SharedParts:
    """Parts that several runs of like configs may use one after another; whoever made them closes them.

    Attributes:
        engine, verifier: as in `Parts`.
        programs: whose compiled step is in memory after the first run. Its `dual` is not used.
    """

    engine: Engine
    verifier: Verifier
    programs: StepPrograms


def share_parts(plan: Plan, stack: contextlib.ExitStack) -> SharedParts:
    """Make the parts that runs may share. Starts the engine; `stack` closes engine and verifier."""
    config = plan.config
    engine = make_engine(plan)
    stack.callback(engine.close)
    verifier = stack.enter_context(
        Verifier(
            config.task.verifier_workers,
            config.task.verifier_timeout,
            config.task.verifier_budget,
            config.rewards.answer_extraction,
        )  # fmt: skip
    )
    return SharedParts(engine, verifier, make_step_programs(config, plan.model, plan.compute, plan.mesh))


def build_parts(plan: Plan, stack: contextlib.ExitStack, shared: SharedParts | None = None) -> Parts:
    """Make the parts of a run. Starts the engine; compiles and loads nothing.

    Args:
        plan: the checked run.
        stack: closes engine, verifier, reward functions and checkpoints.
        shared: of an earlier run whose config differs in directory, seed and lambda_0 alone; not closed here.

    Raises:
        EngineError, MemoryError: in one line, if the engine does not start.
    """
    config, shared = plan.config, shared or share_parts(plan, stack)
    scorer = RewardScorer(
        plan.rewards,
        shared.verifier,
        plan.columns,
        by_source=len({problem.source for problem in plan.train.problems}) > 1,
        output=Path(config.run_dir) / rewards_log(plan.hosts.index),
        timeout_s=config.rewards.timeout,
        memory_gib=config.rewards.memory_limit,
        stop_on_error=config.rewards.on_error == "error",
    )
    stack.callback(scorer.close)
    checkpoints = Checkpoints(
        config.run_dir,
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        hosts=plan.hosts,
    )
    stack.callback(checkpoints.close)
    programs = shared.programs
    return Parts(
        engine=shared.engine,
        verifier=shared.verifier,
        scorer=scorer,
        turns=_turn_sampler(plan, shared.engine, stack) if config.task.environment else None,
        checkpoints=checkpoints,
        optimizer=programs.optimizer,
        dual=initial_dual(config.algorithm),
        loss_scale=programs.loss_scale,
        shardings=programs.shardings,
        batch_shardings=batch_shardings(plan.mesh, buckets=len(plan.packing.row_lengths)),
        train_step=programs.train_step,
        rescore=programs.rescore,
        old_logprobs=programs.old_logprobs,
    )


def _turn_sampler(plan: Plan, engine: Engine, stack: contextlib.ExitStack) -> TurnSampler:
    """What plays the environment of `task.environment`."""
    config = plan.config
    pool = EnvironmentPool(
        config.task.environment, plan.columns, timeout_s=config.rewards.timeout,
        memory_gib=config.rewards.memory_limit, output=Path(config.run_dir) / rewards_log(plan.hosts.index),
    )  # fmt: skip
    stack.callback(pool.close)
    return TurnSampler(
        engine, pool, plan.tokenizer, plan.columns,
        TurnLimits(config.task.max_turns, config.turn_tokens, config.task.max_prompt_tokens),
        prompt_suffix=config.task.prompt_suffix,
        variables=template_variables(config.task.chat_template_kwargs, plan.tokenizer),
        stop_on_error=config.rewards.on_error == "error",
    )  # fmt: skip


def make_engine(plan: Plan) -> Engine:
    """The inference engine of `rollout.engine`, ready for weights.

    Raises:
        UserError, EngineError, MemoryError: in one line, if it does not start.
    """
    kind = find_trainable(plan.config.rollout.engine)
    probe = functools.partial(make_probe, plan.model, plan.compute, plan.mesh)
    with activity(f"starting the engine {plan.config.rollout.engine}"), as_settings(of_engine(kind)):
        return kind.start(dataclasses.replace(plan.engine, probe=probe, prepare=True))


def initial_params(plan: Plan) -> Params:
    """The starting parameters on the mesh: from `model.path`, or fresh from the seed."""
    settings = plan.config.model
    shapes = param_shapes(plan.model, settings.param_dtype)
    shardings = param_shardings(logical_axes(plan.model), shapes, plan.mesh)
    if settings.path:
        path = model_directory(settings.path)
        return hf_weights.load_params(path, plan.model, dtype=settings.param_dtype, shardings=shardings)
    key = jax.random.key(plan.config.training.seed)
    return jax.jit(lambda: init_params(plan.model, key, settings.param_dtype), out_shardings=shardings)()


def make_probe(model: ModelConfig, compute: Compute, mesh: Mesh) -> Probe:
    """The training stack's own log-probs of a few short rows, as the step computes them."""
    row_logprobs = make_row_logprobs(model, compute, temperature=1.0, mesh=mesh)
    rows = P("data")
    mapped = shard_map_over_data(lambda *args: row_logprobs(*args)[0], mesh, in_specs=(P(), rows), out_specs=rows)
    compiled = jax.jit(mapped, out_shardings=replicated(mesh))

    def probe(params: Params, ids: np.ndarray) -> jax.Array:
        count, tokens = ids.shape
        shards, multiple = row_shards(mesh), 128 if compute.attention == "splash" else 1
        padded = np.zeros((-(-count // shards) * shards, -(-tokens // multiple) * multiple), np.int32)
        padded[:count, :tokens] = ids
        places = np.broadcast_to(np.arange(padded.shape[1], dtype=np.int32), padded.shape)
        real = np.zeros(padded.shape, bool)
        real[:count, :tokens] = True
        rows = Rows(
            input_ids=padded,
            position_ids=places,
            segment_ids=real.astype(np.int32),
            completion_mask=real & (places > 0),
            completion_index=np.zeros_like(padded),
            columns={},
        )
        return compiled(params, rows)[:count, 1:tokens]

    return probe


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
    with activity("restoring the newest checkpoint"):
        state = parts.checkpoints.restore(abstract, plan.model)
    if state is not None:
        if isinstance(state.dual, WindowedDual):
            state = state._replace(dual=dual_of_window(config.algorithm, state.dual))
        step = int(state.step)
        show(f"resuming {config.run_dir} after step {step}")
        taken = parts.checkpoints.prompts_taken(step)
        return state, True, step * config.training.prompts_per_step if taken is None else taken
    with activity("loading the weights"):
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
