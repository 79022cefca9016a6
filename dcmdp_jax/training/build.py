"""The compiled programs of a step, and the state that a run starts from."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import jax

from dcmdp_jax.activity import activity
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data import episode, packing
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.hf_hub import model_directory
from dcmdp_jax.models.hf_weights import load_params
from dcmdp_jax.models.lora import Adapted, merged_and_measured, trained
from dcmdp_jax.models.params import declared_shapes, quantized_leaves
from dcmdp_jax.models.quantize import arrival, watched_columns
from dcmdp_jax.models.row_logprobs import make_row_logprobs, without_replay
from dcmdp_jax.parallel.backend import compile_beside
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.parallel.sharding import sharded
from dcmdp_jax.run.checkpoint import Checkpoints, needed_by
from dcmdp_jax.run.placement import Placement
from dcmdp_jax.run.run import Run
from dcmdp_jax.run.task import Task
from dcmdp_jax.run.weights import Weights, model_shardings
from dcmdp_jax.training import loss_terms, stopping, warmup
from dcmdp_jax.training.rescore import OLD_LOGPROBS, make_old_logprobs, make_rescore
from dcmdp_jax.training.state import (
    batch_shardings,
    initial_dual,
    initial_loss_scale,
    make_optimizer,
    make_schedule,
    new_state,
    train_state_shardings,
)
from dcmdp_jax.training.step import StepSetup, make_train_step
from dcmdp_jax.types import Batch, DualState, Params, TrainState

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPrograms:
    """A training step and what it starts from.

    Attributes:
        create: (parameters, dual state) -> a fresh state.
        arguments: state and batch of the step: shapes, dtypes and shardings.
        shardings: shardings of the state.
        train_step: see `make_train_step`; compiled at its first call.
        rescore: with rollout.precision=exact, puts the training stack's log-probs in place of the
            sampler's; else None.
        old_logprobs: with rollout.lag, adds the log-probs under the weights that sampled; in a
            supervised run those under any, for its evaluation; else None.
        policy: (trained, frozen parameters) -> parameters of the training stack's forward pass.
        watched, arrival: programs of `arrival`, (trained parameters) and (watched, trained
            parameters) -> metrics; of adapters nothing is watched, `merged` measures them.
        merged: (trained, frozen parameters) -> those for an engine, and metrics of the merge; see
            `lora`. `Adapted` for an engine that takes adapters.
        teacher: result of `make_teacher`; None without a teacher in the trainer.
    """

    create: Callable[[Params, DualState], TrainState]
    arguments: tuple[TrainState, Batch]
    shardings: TrainState
    train_step: Callable
    rescore: Callable | None
    old_logprobs: Callable | None
    policy: Callable[[Params, Params | None], Params]
    merged: Callable[[Params, Params | None], tuple[Params, loss_terms.Metrics]]
    watched: Callable[[Params], list[jax.Array]]
    arrival: Callable[[list[jax.Array], Params], loss_terms.Metrics]
    teacher: Callable[[Batch], Batch] | None = None

    def compile_ahead(self, hosts: Hosts, frozen: Params | None) -> Callable[[], None]:
        """Compile the step and the passes before it, while the engine starts and samples.

        JAX keeps the programs.

        Args:
            hosts: the processes that run them.
            frozen: the frozen parameters.

        Returns:
            Collective: a function that waits, once, until all processes have compiled them. One
            that had not would compile them in its main thread, and wait there for the others, see
            `SeveralHosts.starting_programs_together`.
        """
        state, batch = self.arguments
        # Of the batches before `old_logprobs` adds its columns.
        added = OLD_LOGPROBS, episode.OLD_TOP_LOGPROBS
        buckets = []
        for rows in batch.rows:
            columns = {name: x for name, x in rows.columns.items() if name not in added}
            buckets.append(rows._replace(columns=columns))
        sampled = batch._replace(rows=tuple(buckets))

        def compile_later(name: str, program: Any, *arguments: Any) -> Callable[[], None]:
            return compile_beside(lambda: program.lower(*arguments).compile(), name)

        waits = [compile_later("the step", self.train_step, state, batch, frozen)]
        for program in (self.rescore, self.old_logprobs):
            if program is not None:
                params = self.policy(state.params, frozen)
                waits.append(compile_later(program.__name__, program, params, sampled))

        @functools.cache
        def wait_until_compiled() -> None:
            for wait in waits:
                wait()
            hosts.wait_for_all()

        return wait_until_compiled


def make_step_programs(
    config: Config,
    model: ModelConfig,
    placement: Placement,
    lora: Lora | None = None,
) -> StepPrograms:
    """Make the programs of a step. Nothing but scalars is compiled or allocated.

    Args:
        config: the settings.
        model: the model.
        placement: devices, computation and shapes of a batch.
        lora: shape of the adapters; None trains all parameters.
    """
    compute = placement.compute
    mesh = placement.mesh
    schedule = make_schedule(config.optimizer, updates=config.training.steps * config.mini_batches)
    optimizer = make_optimizer(config.optimizer, schedule)
    dual = initial_dual(config.algorithm)
    loss_scale = initial_loss_scale(config.model.compute_dtype)

    def fresh(params: Params, dual: DualState) -> TrainState:
        return new_state(params, optimizer, dual, loss_scale)

    shapes = declared_shapes(trained(model, lora), config.model.param_dtype)
    state = jax.eval_shape(fresh, shapes, dual)
    shardings = train_state_shardings(state, model, mesh, lora)
    exact = config.rollout.precision == "exact"
    row_logprobs = make_row_logprobs(
        model,
        compute,
        temperature=config.rollout.temperature,
        mesh=mesh,
        scheme=placement.scheme,
        head_dtype=config.model.head_dtype,
        top_gradient=config.algorithm.differentiates_head,
        cut=config.rollout.cuts,
    )
    setup = StepSetup(
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
        teacher_weight=config.teacher[1],
    )
    batch = packing.abstract_batch(placement.packing, placement.columns)
    old_logprobs = None
    if config.rollout.lag or config.supervised:
        old_logprobs = make_old_logprobs(row_logprobs, mesh=mesh)
    quantized = quantized_leaves(model)
    programs = StepPrograms(
        create=jax.jit(fresh, out_shardings=shardings),
        arguments=(sharded(state, shardings), sharded(batch, batch_shardings(mesh))),
        shardings=shardings,
        train_step=make_train_step(setup, shardings),
        rescore=make_rescore(row_logprobs, mesh=mesh) if exact else None,
        old_logprobs=old_logprobs,
        policy=setup.policy,
        merged=lambda params, _: (params, {}),
        watched=jax.jit(functools.partial(watched_columns, quantized=quantized)),
        arrival=jax.jit(
            functools.partial(arrival, quantized=quantized, precision=config.rollout.precision)
        ),
    )
    if lora is None:
        return programs
    return dataclasses.replace(
        programs,
        merged=_merging(lora, config, apart=placement.engine.arguments.lora is not None),
        watched=lambda _: [],
        arrival=lambda *_: {},
    )


def make_teacher(task: Task, placement: Placement) -> Callable[[Batch], Batch]:
    """Load the reward `teacher:MODEL`'s model; return batch -> batch with its log-probs."""
    config = task.config
    mesh = placement.mesh
    dtype = config.teacher_dtype
    row_logprobs = make_row_logprobs(
        task.teacher,
        placement.compute,
        temperature=config.rollout.temperature,
        mesh=mesh,
        head_dtype=config.model.head_dtype,
        cut=config.rollout.cuts,
    )
    with activity("loading the teacher"):
        params = load_params(
            model_directory(config.teacher[0]),
            task.teacher,
            dtype=dtype,
            shardings=model_shardings(task.teacher, dtype, mesh),
        )
    score = make_old_logprobs(
        lambda params, rows: row_logprobs(params, without_replay(rows)),
        mesh=mesh,
        names=[episode.TEACHER_LOGPROBS],
    )
    return functools.partial(score, params)


def _merging(lora: Lora, config: Config, *, apart: bool) -> Callable:
    """(adapters, base) -> parameters for an engine, and metrics; with `apart` not merged."""
    precision = config.rollout.precision
    if not apart:
        return jax.jit(lambda params, base: merged_and_measured(base, params, lora, precision))
    measure = jax.jit(lambda params, base: merged_and_measured(base, params, lora, precision)[1])
    return lambda params, base: (Adapted(base, params, lora), measure(params, base))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts.

    Attributes:
        state: the state.
        resumed: whether it is a checkpoint's.
        prompts_taken: position in the stream of prompts where its next step begins.
    """

    state: TrainState
    resumed: bool
    prompts_taken: int


def start(
    run: Run,
    programs: StepPrograms,
    checkpoints: Checkpoints,
    stop: stopping.StopSignal,
    check: Callable[[], None],
    show: Callable[[str], None],
) -> Start:
    """The newest checkpoint's state, or a fresh one, warmed up if asked.

    Args:
        run: the settings, the model, the weights, and the worked solutions of the warm-up.
        programs: the step's programs.
        checkpoints: the run's checkpoints.
        stop: ends the warm-up.
        check: raises what should end the warm-up, an engine that does not start.
        show: prints a line for people.

    Raises:
        Interrupted: after a signal to any process of the run, in the warm-up.
        EngineError: from `check`.
        CheckpointError: if there are checkpoints and none can be read.
    """
    task = run.task
    weights = run.weights
    config = task.config
    abstract = programs.arguments[0]
    dual = initial_dual(config.algorithm)
    with activity("restoring the newest checkpoint"):
        state = checkpoints.restore(abstract, task.model)
    if state is not None:
        step = int(state.step)
        for name in TrainState._field_defaults:
            if getattr(state, name) is None and getattr(abstract, name) is not None:
                logger.warning(
                    "checkpoint %d has no %s (%s): it begins as in a new run",
                    step,
                    name,
                    needed_by(name),
                )
                new = programs.create(state.params, dual)
                state = state._replace(**{name: getattr(new, name)})
        checkpoints.check_problems(step, may_change=config.task.on_changed_data == "continue")
        show(f"resuming {config.run_dir} after step {step}")
        prompts_taken = checkpoints.prompts_taken(step)
        if prompts_taken is None:
            prompts_taken = step * config.training.prompts_per_step
        return Start(state=state, resumed=True, prompts_taken=prompts_taken)

    path = config.model.path
    with activity(f"loading the weights of {path}" if path else "drawing fresh weights"):
        params = weights.initial()
    if config.warmup.steps:
        params = _warm_up(run, params, stop, check, show)
    if weights.saves_initial:
        with activity("saving the initial policy"):
            weights.save_initial(params, run.placement.hosts)
    with activity("making the optimizer's state"):
        if task.lora:
            params = weights.initial_adapters(programs.shardings.params)
        return Start(state=programs.create(params, dual), resumed=False, prompts_taken=0)


def _warm_up(
    run: Run,
    params: Params,
    stop: stopping.StopSignal,
    check: Callable[[], None],
    show: Callable[[str], None],
) -> Params:
    task = run.task
    settings = task.config.warmup
    placement = run.placement
    mesh = placement.mesh
    compute = placement.compute
    show(f"warm-up: {settings.steps} supervised steps on {settings.task}")
    # The sampling temperature belongs to sampling: solutions are fitted by the model as it is.
    row_logprobs = make_row_logprobs(task.model, compute, temperature=1.0, mesh=mesh)
    began = time.monotonic()

    def on_step(step: int, loss: float) -> None:
        progress.done = step
        check()
        [signal_number] = placement.hosts.largest(stop.received or 0)
        if signal_number:
            raise stopping.Interrupted(int(signal_number), "in the warm-up, which starts again")
        if step % 500 == 0 or step == settings.steps:
            seconds = time.monotonic() - began
            show(f"warm-up: step {step}, loss {loss:.4f} nats a token, {seconds:.0f} s")

    with activity("warming up (it compiles first)", settings.steps, "steps") as progress:
        return warmup.warm_up(
            params,
            task.worked_solutions,
            row_logprobs,
            settings,
            seed=task.config.training.seed,
            mesh=mesh,
            length_multiple=128 if compute.attention == "splash" else 8,
            on_step=on_step,
        )


def frozen_params(weights: Weights, checkpoints: Checkpoints, step: int) -> Params | None:
    """The policy before the first step: reference of the KL term and base of the adapters.

    None when there is neither.

    Args:
        weights: what the run starts from.
        checkpoints: the run's checkpoints.
        step: finished steps, whose checkpoint knows the policy's digests.

    Raises:
        CheckpointError: if it is another policy than the one that the run began with.
    """
    if not weights.has_frozen:
        return None
    with activity("loading the initial policy"):
        frozen = weights.frozen()
        checkpoints.check_reference(frozen, step, weights.frozen_path)
    return frozen
