"""The training loop: sync weights, get the step's batch, train on it, record, evaluate, save."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

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
from dcmdp_jax.run.facts import data_facts
from dcmdp_jax.run.run import Run
from dcmdp_jax.run.services import Services
from dcmdp_jax.training import batches, phase_timer, rollout_record, rollout_sampler, step_metrics
from dcmdp_jax.training.exit import ENDS_A_RUN, CollectiveExit, StopSignal
from dcmdp_jax.training.giving_up import AlarmWatch, SkippedUpdates
from dcmdp_jax.training.start import Start, frozen_params, start
from dcmdp_jax.training.state import measure_tolerance
from dcmdp_jax.training.step_programs import StepPrograms, make_step_programs, make_teacher
from dcmdp_jax.types import Params, TrainState

logger = logging.getLogger(__name__)

_SUPERVISED_METRICS = (
    "policy/loss",
    "policy/entropy",
    "optimizer/",
    "moe/",
    "rollout/pad",
    "completion/length",
    "time/",
    "throughput/",
)
"""Beginnings of the names of the step's metrics that a supervised run has."""

# Held-out sampling must not repeat the draws of training.
_EVALUATION_SEED_OFFSET = 1_000_003


@dataclasses.dataclass(eq=False, kw_only=True)
class Trainer:
    """A run with its parts and its record. `train` is the loop.

    Attributes:
        run: the problems to train on and to evaluate on, and where it computes.
        services: engine, scorer and turns; None for a supervised run.
        programs: the step's programs.
        checkpoints: the run's checkpoints.
        stop: says when to leave.
        frozen: see `start.frozen_params`.
        compiled: see `Batches`.
    """

    batch_type: ClassVar[type[batches.Batches]] = batches.Batches

    run: Run
    services: Services | None
    programs: StepPrograms
    checkpoints: checkpoint.Checkpoints
    stop: StopSignal
    frozen: Params | None
    compiled: Callable[[], None]

    def __post_init__(self) -> None:
        self.task = self.run.task
        self.config = self.task.config
        self.hosts = self.run.placement.hosts
        self._finished: tuple[TrainState, int] | None = None
        self._prompts_taken = 0
        first = self.checkpoints.latest_step or 0
        self.stop.all_saved = functools.partial(self._nothing_to_lose, first)
        save = functools.partial(self._save, wait=True)
        self._exit = CollectiveExit(self.hosts, self.stop, save)
        self.batches = self.batch_type(
            self.services,
            self.run.placement,
            self.task,
            self.programs,
            self._exit,
            frozen=self.frozen if self.task.lora else None,
            compiled=self.compiled,
        )

    def _nothing_to_lose(self, first: int) -> bool:
        """Whether this process may leave at once: no step is done but the first, which is on disk.

        Until the first step is done programs compile; later on the step that runs would be lost.
        """
        if self.hosts.count > 1:
            return False
        if self._finished is None:
            return True
        return self._finished[1] == first and self.checkpoints.has(first)

    def train(self, start: Start, writer: MetricsWriter | NoWriter) -> None:
        """Train to the last step, or until a signal comes or the engine gives up; save in any case.

        Raises:
            EngineError, MemoryError, JaxRuntimeError: with a message that ends with what is saved.
        """
        try:
            self._train(start, writer)
        except ENDS_A_RUN as error:
            error.args = (f"{error}; {self._keep_finished_steps()}",)
            raise
        finally:
            self.batches.close()

    def _keep_finished_steps(self) -> str:
        """Save the state after the last finished step if that can be done; say what is saved.

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
        if saved is None:
            return "nothing was saved"
        return f"saved after step {saved}: the same command resumes there"

    def _train(self, start: Start, writer: MetricsWriter | NoWriter) -> None:
        """Train to the last step, or until a signal comes; save on the way and at the end.

        Every evaluated policy is saved, and its score with it, so that the best one can be kept. A
        signal ends sampling and evaluation at once: the state has been final since the last update.
        The resumed run samples that step, or evaluates that policy, again.
        """
        config = self.config
        state = start.state
        step = first_step = int(state.step)
        skipped = SkippedUpdates(config, step)
        alarms = AlarmWatch(config, step)
        self._finished = state, step
        self._prompts_taken = start.prompts_taken
        if not start.resumed:
            self._save()
        self.batches.resume(step, start.prompts_taken, self.checkpoints.behind)
        if self._evaluation_is_due(step) and not self._is_evaluated(step):
            self._evaluate(writer)

        while step < config.training.steps:
            timer = phase_timer.PhaseTimer(first=step == first_step)
            sync_metrics = self.batches.sync_weights(state.params, step, timer)
            step_batch = self.batches.make(state, step, timer)
            with timer.phase("step"), jax.transfer_guard("disallow"):
                # The step donates the state: what is compared with the new weights is kept.
                weights_before = self.programs.watched(state.params)
                state, metrics, recorded = self.programs.train_step(
                    state, step_batch.batch, self.frozen
                )
                metrics |= self.programs.arrival(weights_before, state.params)
                metrics, discrepancy = jax.device_get((metrics, recorded.discrepancy))
            step += 1
            self._prompts_taken += step_batch.rollout.prompts_taken

            metrics = self._step_metrics(metrics | sync_metrics, step_batch, timer, discrepancy)
            metrics |= skipped.record(step, metrics)
            if not config.supervised:
                metrics |= alarms.record(step, metrics, discrepancy)
            completions = None
            if writer.records(step):
                completions = self._recorded_completions(step_batch, recorded)
                metrics |= rollout_record.leg_metrics(
                    completions, step_batch.rollout.rows, step_batch.scored
                )
            writer.write(step, metrics)
            if step == config.algorithm.measured_steps:
                state = self._with_measured_tolerance(state)
            self._finished = state, step
            samples = rollout_record.shown_samples(self.task, step, step_batch.rollout, discrepancy)
            if samples:
                writer.write_samples(step, samples)
            if completions is not None:
                writer.write_rollouts(step, completions)

            skipped.check(metrics)
            self._save_and_evaluate(step, alarms, writer)

    def _save_and_evaluate(
        self,
        step: int,
        alarms: AlarmWatch,
        writer: MetricsWriter | NoWriter,
    ) -> None:
        """Save and evaluate the policy after a step where that is due; stop at an alarm, saved."""
        evaluates = self._evaluation_is_due(step)
        [stops] = self.hosts.largest(alarms.ends_the_run)
        last = step == self.config.training.steps
        if evaluates or stops or last or step % self.config.checkpoint.every_steps == 0:
            self._save(wait=bool(stops))
        if stops:
            alarms.stop(step)
        if evaluates:
            self._evaluate(writer)
            release_freed_memory(above=phase_timer.KEPT_BYTES)

    def _step_metrics(
        self,
        metrics: dict[str, Any],
        step_batch: batches.StepBatch,
        timer: phase_timer.PhaseTimer,
        discrepancy: np.ndarray,
    ) -> dict[str, Any]:
        """The metrics of a step with those of its batch, its time and its completions."""
        config = self.config
        metrics |= step_batch.metrics
        metrics |= timer.metrics(step_batch.rollout.episodes, lags=config.rollout.lag > 0)
        return metrics | rollout_record.rollout_metrics(
            step_batch.rollout, discrepancy, refills=config.algorithm.refill_rounds > 0
        )

    def _recorded_completions(
        self, step_batch: batches.StepBatch, recorded: step_metrics.RecordedTokens
    ) -> list[dict[str, Any]]:
        return rollout_record.recorded_completions(
            step_batch.rollout,
            self.task.train.problems,
            step_batch.rows,
            jax.device_get(recorded),
            exact=self.programs.rescore is not None,
        )

    def _is_evaluated(self, step: int) -> bool:
        """Whether the record has the evaluation of the policy after `step` steps."""
        run_dir = self.config.run_dir
        in_record = all(
            has_record(run_dir, step, f"eval/{task.name}/") for task, _ in self.task.held_out
        )
        [evaluated] = self.hosts.largest(in_record)
        return bool(evaluated)

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
        """Score the policy on every held-out task, avg@K; save their mean with its checkpoint.

        The policy is saved already. The record of all tasks comes last: it says that nothing is
        left to do.
        """
        state, step = self._finished
        self.batches.sync_weights(state.params, step, phase_timer.PhaseTimer())
        results = []
        samples = []
        name = ""
        metrics = {}
        for task, prompts in self.task.held_out:
            result = self._evaluate_task(step, task, prompts)
            results.append(result)
            name += f"{result.task}/avg@{result.samples} {task.location} ({digest_of(prompts)}) "
            metrics |= held_out.held_out_metrics(result)
            samples += held_out.held_out_samples(result, prompts, self.task.tokenizer)
        name += f"temperature={self.config.evaluation.temperature:g}"
        self.checkpoints.add_score(step, checkpoint.PolicyScore(name, table.plain_average(results)))
        writer.write_held_out(step, samples)
        writer.write(step, metrics)

    def _evaluate_task(
        self,
        step: int,
        task: held_out.HeldOutTask,
        prompts: EncodedPrompts,
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
        """Save the state after the last finished step, and wait if asked; return the step."""
        state, step = self._finished
        release_freed_memory(above=phase_timer.KEPT_BYTES)
        with activity("saving a checkpoint"):
            self.checkpoints.save(
                step,
                state,
                model=self.task.model,
                prompts_taken=self._prompts_taken,
                behind=self.batches.behind(step),
            )
        if wait:
            self.checkpoints.wait()
        return step


class SupervisedTrainer(Trainer):
    """A supervised run: no engine, and the loss of held-out conversations as its score."""

    batch_type = batches.ConversationBatches

    def _step_metrics(self, *arguments: Any) -> dict[str, Any]:
        metrics = super()._step_metrics(*arguments)
        return {name: x for name, x in metrics.items() if name.startswith(_SUPERVISED_METRICS)}

    def _evaluate(self, writer: MetricsWriter) -> None:
        """Save minus the mean loss of the held-out conversations with the policy's checkpoint."""
        state, step = self._finished
        losses = {}
        names = []
        for task, conversations in self.task.held_out:
            losses[f"eval/{task.name}/loss"] = self.batches.loss(state.params, conversations)
            names.append(f"loss of {task.location} ({digest_of(conversations)})")
        score = -float(np.mean([*losses.values()]))
        self.checkpoints.add_score(step, checkpoint.PolicyScore(" ".join(names), score))
        writer.write(step, losses)


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
    weights = run.weights
    placement = run.placement
    config = task.config
    hosts = placement.hosts
    stop = StopSignal(nothing_to_lose=hosts.count == 1)
    with contextlib.ExitStack() as stack:
        hosts.check_same(lambda: data_facts(task), "give all hosts the same files")
        stack.enter_context(directory.claimed(config, hosts))
        stack.enter_context(stop.listening())
        services = None
        if not config.supervised:
            services = stack.enter_context((start_services or run.start)())
        checkpoints = checkpoint.Checkpoints(
            config.run_dir,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            hosts=hosts,
            adapters=weights.saved_adapters,
            problems=digest_of(task.train),
        )
        stack.callback(checkpoints.close)

        # The step compiles while the weights are read, unless it has a frozen policy to wait for.
        programs = programs or make_step_programs(config, task.model, placement, task.lora)
        compiled = None
        if not weights.has_frozen:
            compiled = programs.compile_ahead(hosts, None)

        def check() -> None:
            if services is not None:
                placement.engine.kind.check_start(services.engine)

        began = start(run, programs, checkpoints, stop, check, show)
        release_freed_memory()
        step = int(began.state.step)
        if step > config.training.steps:
            raise UserError(
                f"config.training.steps: got {config.training.steps}, the run in {config.run_dir} "
                f"has already done {step}; raise it or choose another run_dir"
            )
        with activity("opening the run's records"):
            writer = NoWriter()
            if hosts.is_writer:
                writer = _open_records(run, stack, step, began.resumed)

        frozen = frozen_params(weights, checkpoints, step)
        if compiled is None:
            compiled = programs.compile_ahead(hosts, frozen)
        if task.teacher:
            programs = dataclasses.replace(programs, teacher=make_teacher(task, placement))
        trainer_type = SupervisedTrainer if config.supervised else Trainer
        trainer = trainer_type(
            run=run,
            services=services,
            programs=programs,
            checkpoints=checkpoints,
            stop=stop,
            frozen=frozen,
            compiled=compiled,
        )
        trainer.train(began, writer)
        with activity("writing the last checkpoint"):
            checkpoints.wait()


def _open_records(run: Run, stack: contextlib.ExitStack, step: int, resumed: bool) -> MetricsWriter:
    """Write what describes the run, and open what grows with it."""
    task = run.task
    config = task.config
    directory.record_config(config, run.placement.engine.memory.rows)
    save_tokenizer(task.tokenizer, Path(config.run_dir) / "tokenizer", task.stop_token_ids)
    progress = Progress(config.training.steps, step, measured_steps=config.algorithm.measured_steps)
    stack.enter_context(contextlib.closing(progress))
    writer = MetricsWriter(
        config.run_dir,
        projects={"wandb": config.observe.wandb_project, "trackio": config.observe.trackio_project},
        resume_step=step if resumed else None,
        devices=run.placement.mesh.size,
        started=task.started,
        listener=progress.update,
        rollouts_every_steps=config.observe.rollouts_every_steps,
    )
    return stack.enter_context(contextlib.closing(writer))
