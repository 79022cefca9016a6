"""The training loop: push weights, get the batch of the step, train on it, record, evaluate,
save.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from dcmdp_jax.activity import activity
from dcmdp_jax.data.prompts import EncodedPrompts, digest_of
from dcmdp_jax.data.tokenizer import save_tokenizer
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation import held_out, table
from dcmdp_jax.evaluation.average import EvaluationResult, evaluate, join
from dcmdp_jax.observe.metrics_io import MetricsWriter, NoWriter, has_record, read_metrics
from dcmdp_jax.observe.progress import Progress
from dcmdp_jax.parallel.sharding import to_global
from dcmdp_jax.run import checkpoint, directory
from dcmdp_jax.run.placement import Placement
from dcmdp_jax.run.services import Services
from dcmdp_jax.run.task import Task
from dcmdp_jax.run.weights import Weights
from dcmdp_jax.training import batches, loss_terms, phase_timer, rollout_record, rollout_sampler
from dcmdp_jax.training.build import (
    StepPrograms,
    frozen_params,
    make_step_programs,
    make_teacher,
    start,
)
from dcmdp_jax.training.state import measure_tolerance
from dcmdp_jax.training.stopping import (
    ENDS_A_RUN,
    AlarmWatch,
    CollectiveExit,
    SkippedUpdates,
    StopSignal,
    data_facts,
)
from dcmdp_jax.types import Batch, Params, TrainState

logger = logging.getLogger(__name__)

_OF_LEARNING = (
    *"policy/loss policy/entropy optimizer/ moe/ rollout/pad completion/length time/ throughput/".split(),
)
"""Beginnings of the names of the step's metrics that a supervised run has."""

# Held-out sampling must not repeat the draws of training.
_EVALUATION_SEED_OFFSET = 1_000_003


class Trainer:
    """A run with its parts and its record. `train` is the loop."""

    def __init__(
        self,
        services: Services,
        placement: Placement,
        task: Task,
        programs: StepPrograms,
        checkpoints: checkpoint.Checkpoints,
        stop: StopSignal,
        *,
        taken: int,
        frozen: Params | None,
        teacher: Callable[[Batch], Batch] | None = None,
        compiled: Callable[[], None] = lambda: None,
    ) -> None:
        """Store the parts; nothing is compiled or loaded yet.

        Args:
            services: engine, scorer and turns.
            placement: hosts, devices and shapes of a batch.
            task: the problems to train on and to evaluate on.
            programs: the step's programs.
            checkpoints: the run's checkpoints.
            stop: says when to leave.
            taken: positions of the stream of prompts that the finished steps have taken.
            frozen: see `build.frozen_params`.
            teacher, compiled: see `Batches`.
        """
        self.services = services
        self.task = task
        self.config = task.config
        self.programs = programs
        self.hosts = placement.hosts
        self.checkpoints = checkpoints
        self.frozen = frozen
        self._finished: tuple[TrainState, int] | None = None
        stop.all_saved = functools.partial(self._nothing_to_lose, checkpoints.latest_step or 0)
        self._prompts_taken = taken
        self._exit = CollectiveExit(self.hosts, stop, functools.partial(self._save, wait=True))
        made_of = services, placement, task, programs, checkpoints.behind, self._exit
        kind = batches.ConversationBatches if self.config.supervised else batches.Batches
        held = {"frozen": frozen if task.lora else None, "teacher": teacher, "compiled": compiled}
        self.batches = kind(*made_of, taken=taken, **held)

    def _nothing_to_lose(self, first: int) -> bool:
        """Whether this process may leave at once: nothing was finished since the step it began at,
        which is on disk.

        Until the first step is done programs compile; later on the step that runs would be lost.
        """
        unmoved = not self._finished or self._finished[1] == first and self.checkpoints.has(first)
        return self.hosts.count == 1 and unmoved

    def train(self, state: TrainState, writer: MetricsWriter | NoWriter, *, resumed: bool) -> None:
        """Train from `state` to the last step, or until a signal comes or the engine gives up; save
        in any case.

        Raises:
            EngineError, MemoryError, JaxRuntimeError: with a message that ends with what is kept.
        """
        try:
            self._train(state, writer, resumed=resumed)
        except ENDS_A_RUN as error:
            error.args = (f"{error}; {self._keep_finished_steps()}",)
            raise
        finally:
            self.batches.close()

    def _keep_finished_steps(self) -> str:
        """Save the state after the last finished step if that can be done; say what is kept.

        On several hosts saving needs all of them, and only `CollectiveExit` knows that all leave.
        It has saved then.
        """
        saved = self.checkpoints.latest_step
        if self._finished is not None:
            state, step = self._finished
            alive = not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
            if saved != step and alive and self.hosts.count == 1:
                try:
                    saved = self._save(wait=True)
                except Exception as failure:  # whatever it is, the first error is the one to report
                    logger.warning("step %d was not saved: %s", step, failure)
        return (
            "nothing was saved"
            if saved is None
            else f"saved after step {saved}: the same command resumes there"
        )

    def _train(self, state: TrainState, writer: MetricsWriter | NoWriter, *, resumed: bool) -> None:
        """Train from `state` to the last step, or until a signal comes; save on the way and at the
        end.

        Every evaluated policy is saved, and its score with it, so that the best one can be kept. A
        signal ends sampling and evaluation at once: the state has been final since the last update.
        The resumed run samples that step, or evaluates that policy, again.
        """
        config = self.config
        step = int(state.step)
        skipped = SkippedUpdates(config, step)
        alarms = AlarmWatch(config, step)
        self._finished = (state, step)
        began = step
        if not resumed:
            self._save()
        self.batches.resume(step)
        tasks = [task.name for task, _ in self.task.held_out]
        recorded = all(has_record(config.run_dir, step, f"eval/{name}/") for name in tasks)
        [evaluated] = self.hosts.largest(recorded)
        if self._evaluation_is_due(step) and not evaluated:
            self._evaluate(writer)
        while step < config.training.steps:
            timer = phase_timer.PhaseTimer(first=step == began)
            pushed = self.batches.push(state.params, step, timer)
            made = self.batches.make(state, step, timer)
            rollout = made.rollout
            with timer.phase("step"), jax.transfer_guard("disallow"):
                watched = self.programs.watched(state.params)
                state, metrics = self.programs.train_step(state, made.batch, self.frozen)
                metrics |= self.programs.arrival(watched, state.params)
                recorded = [metrics.pop(name, None) for name in loss_terms.RECORDED]
                metrics = jax.device_get(metrics)
            step += 1
            self._prompts_taken += rollout.taken
            completions = metrics.pop("completions/discrepancy")
            metrics |= (
                pushed | made.metrics | timer.metrics(rollout.episodes, lags=config.rollout.lag > 0)
            )
            metrics |= rollout_record.rollout_metrics(
                rollout, completions, refills=config.algorithm.refill_rounds > 0
            )
            if config.supervised:
                metrics = {
                    name: value for name, value in metrics.items() if name.startswith(_OF_LEARNING)
                }
            metrics |= skipped.record(step, metrics)
            metrics |= {} if config.supervised else alarms.record(step, metrics, completions)
            if writer.records(step):
                exact = self.programs.rescore is not None
                given = rollout, self.task.train.problems, made.rows, jax.device_get(recorded)
                tokens = rollout_record.recorded_completions(*given, exact=exact)
                metrics |= rollout_record.leg_metrics(
                    tokens, rollout.rows, {} if exact else made.scored
                )
            writer.write(step, metrics)
            if step == config.algorithm.measured_steps:
                state = self._with_measured_tolerance(state)
            self._finished = state, step
            if samples := rollout_record.shown_samples(self.task, step, rollout, completions):
                writer.write_samples(step, samples)
            if writer.records(step):
                writer.write_rollouts(step, tokens)
            skipped.check(metrics)
            due, [stops] = self._evaluation_is_due(step), self.hosts.largest(alarms.ends_the_run)
            if (
                due
                or stops
                or step == config.training.steps
                or step % config.checkpoint.every_steps == 0
            ):
                self._save(wait=bool(stops))
            if stops:
                alarms.stop(step)
            if due:
                self._evaluate(writer)
                release_freed_memory(above=phase_timer.KEPT_BYTES)

    def _with_measured_tolerance(self, state: TrainState) -> TrainState:
        """The state with c from the metrics of the steps so far, which are written."""
        measured = -1.0
        if self.hosts.is_writer:
            measured = measure_tolerance(self.config.algorithm, read_metrics(self.config.run_dir))
        [tolerance] = self.hosts.largest(float(measured))
        tolerance = to_global(np.float32(tolerance), self.programs.shardings.dual.tolerance)
        return state._replace(dual=state.dual._replace(tolerance=tolerance))

    def _evaluation_is_due(self, step: int) -> bool:
        """Whether to evaluate: before the first step, every N steps, and after the last."""
        every = self.config.evaluation.every_steps
        return every > 0 and (step % every == 0 or step == self.config.training.steps)

    def _evaluate(self, writer: MetricsWriter) -> None:
        """Score the inference engine's policy on every held-out task: avg@K; their mean is kept
        with its checkpoint.

        A supervised run's score is minus the mean loss of its held-out conversations. The policy is
        saved already. The record of all tasks comes last: it says that nothing is left to do.
        """
        state, step = self._finished
        if self.config.supervised:
            held = self.task.held_out
            losses = {
                f"eval/{task.name}/loss": self.batches.loss(state.params, each)
                for task, each in held
            }
            name = " ".join(f"loss of {task.location} ({digest_of(each)})" for task, each in held)
            self.checkpoints.add_score(
                step, checkpoint.PolicyScore(name, -float(np.mean([*losses.values()])))
            )
            writer.write(step, losses)
            return
        self.batches.push(state.params, step, phase_timer.PhaseTimer())
        results = []
        samples = []
        name = ""
        metrics = {}
        for task, prompts in self.task.held_out:
            results.append(result := self._evaluate_task(step, task, prompts))
            name += f"{result.task}/avg@{result.samples} {task.location} ({digest_of(prompts)}) "
            metrics |= held_out.held_out_metrics(result)
            samples += held_out.held_out_samples(result, prompts, self.task.tokenizer)
        name += f"temperature={self.config.evaluation.temperature:g}"
        self.checkpoints.add_score(step, checkpoint.PolicyScore(name, table.plain_average(results)))
        writer.write_held_out(step, samples)
        writer.write(step, metrics)

    def _evaluate_task(
        self, step: int, task: held_out.HeldOutTask, prompts: EncodedPrompts
    ) -> EvaluationResult:
        temperature = self.config.evaluation.temperature
        sampling = dataclasses.replace(
            self.task.sampling, group_size=task.samples, temperature=temperature
        )
        share = self.hosts.share(len(prompts.problems))
        with self._exit.scope():
            result = evaluate(
                self.services,
                prompts.select(share),
                sampling,
                task=f"eval/{task.name}",
                seed=self.config.training.seed + _EVALUATION_SEED_OFFSET,
                first_prompt=share.start,
                state=rollout_sampler.trainer_state(self.task, step, self._prompts_taken),
                check_stop=self._exit.check,
            )
        return join(self.hosts.gather(result, EvaluationResult))

    def _save(self, *, wait: bool = False) -> int:
        """Save the state after the last finished step, and wait for the disk if asked; return that
        step.
        """
        state, step = self._finished
        release_freed_memory(above=phase_timer.KEPT_BYTES)
        with activity("saving a checkpoint"):
            behind = self.batches.behind(step)
            self.checkpoints.save(
                step, state, model=self.task.model, prompts_taken=self._prompts_taken, behind=behind
            )
        if wait:
            self.checkpoints.wait()
        return step


def train(
    task: Task,
    placement: Placement,
    weights: Weights,
    start_services: Callable[[], Services],
    *,
    show: Callable[[str], None],
    programs: StepPrograms | None = None,
) -> None:
    """Train a run to its end, from its newest checkpoint if the run directory has one.

    Each process of a run on several hosts calls this.

    Args:
        task: the problems to train on and to evaluate on, with the settings.
        placement: where the run computes.
        weights: what it starts from.
        start_services: starts engine, scorer and turns, once the run directory is claimed; they are
            closed at the end.
        show: prints a line for people.
        programs: programs of an earlier run of the same kind; None makes them.

    Raises:
        Interrupted: after SIGTERM, SIGINT or SIGHUP, once everything is saved.
        TrainingStopped: when the gradients stay broken.
        ValueError, OSError, EngineError: in one line, what is wrong with input, files or engine.
    """
    config = task.config
    hosts = placement.hosts
    stop = StopSignal(nothing_to_lose=placement.hosts.count == 1)
    with contextlib.ExitStack() as stack:
        hosts.check_same(lambda: data_facts(task), "give all hosts the same files")
        stack.enter_context(directory.claimed(config, hosts))
        stack.enter_context(stop.listening())
        services = stack.enter_context(start_services())
        kept = config.checkpoint
        checkpoints = checkpoint.Checkpoints(
            config.run_dir,
            keep_last=kept.keep_last,
            keep_best=kept.keep_best,
            hosts=hosts,
            adapters=weights.saved_adapters,
            problems=digest_of(task.train),
        )
        stack.callback(checkpoints.close)
        programs = programs or make_step_programs(config, task.model, placement, task.lora)
        compiled = None if weights.has_frozen else programs.compile_ahead(hosts, None)
        check = functools.partial(placement.engine.kind.check_start, services.engine)
        state, resumed, taken = start(
            task, placement, weights, programs, checkpoints, stop, check, show
        )
        release_freed_memory()
        step = int(state.step)
        if step > config.training.steps:
            raise UserError(
                f"config.training.steps: got {config.training.steps}, the run in {config.run_dir} "
                f"has already done {step}; raise it or choose another run_dir"
            )
        with activity("opening the run's records"):
            writer = (
                _open_records(task, placement, stack, step, resumed)
                if hosts.is_writer
                else NoWriter()
            )
        held = {"frozen": frozen_params(weights, checkpoints, step)}
        held["compiled"] = compiled or programs.compile_ahead(hosts, held["frozen"])
        held["teacher"] = make_teacher(task, placement) if task.teacher else None
        parts = services, placement, task, programs, checkpoints, stop
        trainer = Trainer(*parts, taken=taken, **held)
        trainer.train(state, writer, resumed=resumed)
        with activity("writing the last checkpoint"):
            checkpoints.wait()


def _open_records(
    task: Task, placement: Placement, stack: contextlib.ExitStack, step: int, resumed: bool
) -> MetricsWriter:
    """Write what describes the run, and open what grows with it."""
    config = task.config
    directory.record_config(config, placement.engine.memory.rows)
    save_tokenizer(task.tokenizer, Path(config.run_dir) / "tokenizer", task.stop_token_ids)
    measured = config.algorithm.measured_steps
    progress = stack.enter_context(
        contextlib.closing(Progress(config.training.steps, step, measured_steps=measured))
    )
    writer = MetricsWriter(
        config.run_dir,
        projects={"wandb": config.observe.wandb_project, "trackio": config.observe.trackio_project},
        resume_step=step if resumed else None,
        devices=placement.mesh.size,
        started=task.started,
        listener=progress.update,
        rollouts_every_steps=config.observe.rollouts_every_steps,
    )
    return stack.enter_context(contextlib.closing(writer))
