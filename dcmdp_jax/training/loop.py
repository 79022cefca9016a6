"""The training loop: sync weights, get the step's batch, train on it, record, save, evaluate."""

import contextlib
import functools
from collections.abc import Callable

import jax
import numpy as np

from dcmdp_jax.data.prompts import digest_of
from dcmdp_jax.evaluation import held_out, table
from dcmdp_jax.evaluation.average import EvaluationResult, evaluate, join
from dcmdp_jax.observe.metrics_io import read_metrics
from dcmdp_jax.parallel.sharding import to_global
from dcmdp_jax.run import checkpoint
from dcmdp_jax.run.run import Run
from dcmdp_jax.run.services import Services
from dcmdp_jax.training import phase_timer, rollout_sampler
from dcmdp_jax.training.batches import Batches
from dcmdp_jax.training.giving_up import AlarmWatch, SkippedUpdates
from dcmdp_jax.training.rollout_record import CompletionRecords
from dcmdp_jax.training.state import measure_tolerance
from dcmdp_jax.training.step_programs import StepPrograms, make_step_programs
from dcmdp_jax.training.teacher import make_teacher
from dcmdp_jax.training.training_session import TrainingSession, claimed_directory, open_session
from dcmdp_jax.types import TrainState

# Held-out sampling must not repeat the draws of training.
_EVALUATION_SEED_OFFSET = 1_000_003


def _train(session: TrainingSession, step_batches: Batches) -> None:
    """Train to the last step, or until a signal comes; save on the way and at the end.

    A signal ends sampling and evaluation at once (`session.exit`): the state has been final since
    the last update. The resumed run samples that step, or evaluates that policy, again.
    """
    config = session.config
    programs = session.programs
    writer = session.writer
    task = session.run.task
    state = session.state
    step = first_step = session.step
    skipped = SkippedUpdates(config.run_dir, step, updates=config.mini_batches)
    alarms = AlarmWatch(
        config.run_dir,
        step,
        stops=config.observe.on_alarm == "stop",
        measured_steps=config.algorithm.measured_steps,
    )
    completions = CompletionRecords(task, writer, exact=programs.rescore is not None)
    step_batches.resume(step, session.prompts_taken, session.checkpoints.behind)
    evaluate_policy = functools.partial(_evaluate, session, step_batches)
    session.begin(evaluate_policy)

    while step < session.last_step:
        timer = phase_timer.PhaseTimer(first=step == first_step)
        sync_metrics = step_batches.sync_weights(state.params, step, timer)
        # The first batch also waits for the step's programs, which compile while it is sampled.
        step_batch = step_batches.make(state, step, timer)
        with timer.phase("step"), jax.transfer_guard("disallow"):
            # The step donates the state: what is compared with the new weights is kept.
            weights_before = programs.sync.watched(state.params)
            state, metrics, recorded = programs.train_step(state, step_batch.batch, session.frozen)
            metrics |= programs.sync.arrival(weights_before, state.params)
            metrics, discrepancy = jax.device_get((metrics, recorded.discrepancy))
        step += 1

        metrics |= sync_metrics | step_batch.metrics
        metrics |= timer.metrics(step_batch.rollout.episodes, lags=config.rollout.lag > 0)
        # What these three find is recorded here, and acted upon once the step is written.
        metrics |= completions.read(step, step_batch, discrepancy, recorded)
        metrics |= skipped.record(step, metrics)
        metrics |= alarms.record(step, metrics, discrepancy)
        writer.write(step, metrics)
        state = _with_measured_tolerance(session, state, step)
        session.finish_step(state, prompts=step_batch.rollout.prompts_taken)
        completions.write(step)
        skipped.check(metrics)
        alarms.check(session)
        session.save_and_evaluate(evaluate_policy)


def _with_measured_tolerance(session: TrainingSession, state: TrainState, step: int) -> TrainState:
    """The state; after the last step that measures c, with c set from the metrics of those steps.

    The run directory has all of them by then.
    """
    config = session.config
    if step != config.algorithm.measured_steps:
        return state
    # Process 0 has the metrics; the largest of its c and -1 is the same on all.
    measured = -1.0
    if session.hosts.is_writer:
        measured = measure_tolerance(config.algorithm, read_metrics(config.run_dir))
    [tolerance] = session.hosts.largest(float(measured))
    tolerance = to_global(np.float32(tolerance), session.programs.shardings.dual.tolerance)
    return state._replace(dual=state.dual._replace(tolerance=tolerance))


def _evaluate(session: TrainingSession, step_batches: Batches) -> None:
    """Score the policy on every held-out task, avg@K; save their mean with its checkpoint.

    The policy is saved already. The record of all tasks comes last: it says that nothing is left to
    do.
    """
    config = session.config
    task = session.run.task
    step = session.step
    step_batches.sync_weights(session.state.params, step, phase_timer.PhaseTimer())
    results = []
    samples = []
    names = []
    metrics = {}
    for held_out_task, prompts in task.held_out:
        share = session.hosts.share(len(prompts.problems))
        with session.exit.scope():
            own_result = evaluate(
                step_batches.services,
                prompts.select(share),
                task.evaluation_sampling(held_out_task),
                task=f"eval/{held_out_task.name}",
                seed=config.training.seed + _EVALUATION_SEED_OFFSET,
                first_prompt=share.start,
                state=rollout_sampler.trainer_state(task, step, session.prompts_taken),
                check_stop=session.exit.check,
            )
        result = join(session.hosts.gather(own_result, EvaluationResult))

        results.append(result)
        location = f"{held_out_task.location} ({digest_of(prompts)})"
        names.append(f"{result.task}/avg@{result.samples} {location}")
        metrics |= held_out.held_out_metrics(result)
        samples += held_out.held_out_samples(result, prompts, task.tokenizer)

    names.append(f"temperature={config.evaluation.temperature:g}")
    score = checkpoint.PolicyScore(" ".join(names), table.plain_average(results))
    session.checkpoints.add_score(step, score)
    session.writer.write_held_out(step, samples)
    session.writer.write(step, metrics)


def train(
    run: Run,
    *,
    show: Callable[[str], None],
    start_services: Callable[[], Services] | None = None,
    programs: StepPrograms | None = None,
) -> None:
    """Train a run to its end, from its newest checkpoint if the run directory has one.

    Each process of a run on several hosts calls this.

    Args:
        run: what is trained, where, and from which weights.
        show: prints a line for people.
        start_services: starts engine, scorer and turns, once the run directory is claimed; they are
            closed at the end. None: `run.start`.
        programs: programs of an earlier run of the same kind; None makes them.

    Raises:
        Interrupted: after SIGTERM, SIGINT or SIGHUP, once everything is saved.
        TrainingStopped: when the gradients stay broken.
        ValueError, OSError, EngineError: in one line, what is wrong with input, files or engine.
    """
    task = run.task
    placement = run.placement
    start_services = start_services or run.start
    with claimed_directory(run) as stop, start_services() as services:
        programs = programs or make_step_programs(task.config, task.model, placement, task.lora)
        check = functools.partial(placement.engine.kind.check_start, services.engine)
        with open_session(run, programs, stop, show=show, check=check) as session:
            step_batches = Batches(session, services, make_teacher(task, placement))
            # A checkpoint has the older parameters that batches in flight are sampled with.
            session.older_params = step_batches.behind
            with contextlib.closing(step_batches), session.keeping_finished_steps():
                _train(session, step_batches)
