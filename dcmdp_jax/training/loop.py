"""The training loop: push weights, get the batch of the step, train on it, record, evaluate, save."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np

from dcmdp_jax.activity import activity
from dcmdp_jax.data.prompts import EncodedPrompts, save_tokenizer
from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import EvaluationResult, evaluate
from dcmdp_jax.evaluation.held_out import HeldOutTask, held_out_rewards, held_out_samples
from dcmdp_jax.evaluation.table import plain_average
from dcmdp_jax.observe.metrics_io import MetricsWriter, NoWriter, has_record, read_metrics
from dcmdp_jax.observe.progress import Progress
from dcmdp_jax.parallel.sharding import to_global
from dcmdp_jax.process_memory import release_freed_memory
from dcmdp_jax.rewards.protocol import RewardError
from dcmdp_jax.rewards.scoring import reward_metrics
from dcmdp_jax.run.checkpoint import Checkpoints, PolicyScore
from dcmdp_jax.run.directory import claimed, record_config
from dcmdp_jax.run.run import Run
from dcmdp_jax.training.across_hosts import data_facts, gather_evaluation
from dcmdp_jax.training.batch_metrics import PhaseTimer, rollout_metrics
from dcmdp_jax.training.batches import Batches
from dcmdp_jax.training.build import StepPrograms, make_step_programs, reference_params, start
from dcmdp_jax.training.state import measure_tolerance
from dcmdp_jax.training.step_metrics import RECORDED
from dcmdp_jax.training.step_rollout import recorded_completions, shown_samples, trainer_state
from dcmdp_jax.training.stopping import AlarmWatch, Interrupted, Leaving, SkippedUpdates, StopSignal
from dcmdp_jax.types import TrainState

logger = logging.getLogger(__name__)

# Held-out sampling must not repeat the draws of training.
_EVALUATION_SEED_OFFSET = 1_000_003

_ENDS_A_RUN = EngineError, MemoryError, jax.errors.JaxRuntimeError
"""Errors after which the finished steps are saved."""


class Trainer:
    """A run with its parts and its record. `run` is the loop."""

    def __init__(
        self, plan: Run, programs: StepPrograms, checkpoints: Checkpoints, stop: StopSignal, *, prompts_taken: int
    ) -> None:
        """Store the parts; nothing is compiled or loaded yet.

        Args:
            plan: the checked run.
            programs: of the step.
            checkpoints: of the run.
            stop: says when to leave.
            prompts_taken: positions of the stream of prompts that the finished steps have taken.
        """
        self.plan, self.programs, self.config = plan, programs, plan.config
        self.hosts, self.stop = plan.hosts, stop
        self.engine, self.checkpoints = plan.engine, checkpoints
        self._finished: tuple[TrainState, int] | None = None
        self._prompts_taken = prompts_taken
        self.batches = Batches(
            plan, programs, checkpoints.behind, alone=self._alone, check_stop=self._check_stop, taken=prompts_taken
        )

    def run(self, state: TrainState, writer: MetricsWriter | NoWriter, *, resumed: bool) -> None:
        """Train from `state` to the last step, or until a signal comes or the engine gives up; save in any case.

        Raises:
            EngineError, MemoryError, JaxRuntimeError: with a message that ends with what is kept.
        """
        try:
            self._train(state, writer, resumed=resumed)
        except _ENDS_A_RUN as error:
            error.args = (f"{error}; {self._keep_finished_steps()}",)
            raise
        finally:
            self.batches.close()

    def _keep_finished_steps(self) -> str:
        """Save the state after the last finished step if that can be done; say what is kept.

        On several hosts saving needs all of them, and only `_alone` knows that all leave together: it has saved.
        """
        saved = self.checkpoints.latest_step
        if self._finished is not None:
            state, step = self._finished
            alive = not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
            if saved != step and alive and self.hosts.count == 1:
                try:
                    self._save()
                    self.checkpoints.wait()
                    saved = step
                except Exception as failure:  # whatever it is, the first error is the one to report
                    logger.warning("step %d was not saved: %s", step, failure)
        return "nothing was saved" if saved is None else f"saved after step {saved}: the same command resumes there"

    def _train(self, state: TrainState, writer: MetricsWriter | NoWriter, *, resumed: bool) -> None:
        """Train from `state` to the last step, or until a signal comes; save on the way and at the end.

        Every evaluated policy is saved, and its score with it, so that the best one can be kept. A signal ends
        sampling and evaluation at once: the state has been final since the last update. The resumed run samples that
        step, or evaluates that policy, again.
        """
        config, step = self.config, int(state.step)
        skipped, alarms = SkippedUpdates(config, step), AlarmWatch(config, step)
        reference = reference_params(self.plan, self.programs, self.checkpoints, step)
        self._finished, began = (state, step), step
        if not resumed:
            self._save()
        self.batches.sample_in_flight(step)
        tasks = [task.name for task, _ in self.plan.held_out]
        recorded = all(has_record(config.run_dir, step, f"eval/{name}/") for name in tasks)
        [evaluated] = self.hosts.largest(recorded)
        if self._evaluation_is_due(step) and not evaluated:
            self._evaluate(writer)
        while step < config.training.steps:
            timer = PhaseTimer(first=step == began)
            with self._alone():
                self.batches.settle_for_push(timer)
                self._check_stop()
            with timer.phase("push"):
                pushed = self.batches.push(state.params, step)
            sampled = self.batches.make(state, step, self._prompts_taken, timer)
            rollout = sampled.rollout
            with timer.phase("step"), jax.transfer_guard("disallow"):
                state, metrics = self.programs.train_step(state, sampled.batch, reference)
                recorded = [metrics.pop(name, None) for name in RECORDED]
                metrics = jax.device_get(metrics)
            step += 1
            self._prompts_taken += len(rollout.problems)
            completions = metrics.pop("completions/discrepancy")
            metrics |= rollout.source_metrics(completions.reshape(-1))
            metrics |= pushed | sampled.metrics | sampled.floor | self.batches.times(sampled, timer)
            metrics |= rollout_metrics(rollout.episodes, rollout.scores.grades) | reward_metrics(rollout.scores)
            if config.algorithm.refill_rounds:
                metrics |= rollout.dynamic_metrics()
            metrics |= skipped.record(step, metrics)
            metrics |= alarms.record(step, metrics, completions)
            writer.write(step, metrics)
            if step == config.algorithm.measured_steps:
                state = self._with_measured_tolerance(state)
            self._finished = state, step
            if samples := shown_samples(self.plan, step, rollout, completions):
                writer.write_samples(step, samples)
            if writer.records(step):
                given = rollout, self.plan.train.problems, sampled.rows, *jax.device_get(recorded)
                exact = self.programs.rescore is not None
                writer.write_rollouts(step, recorded_completions(*given, exact=exact))
            skipped.check(metrics)
            due, [stops] = self._evaluation_is_due(step), self.hosts.largest(alarms.ends_the_run)
            if due or stops or step == config.training.steps or step % config.checkpoint.every_steps == 0:
                self._save()
            if stops:
                self.checkpoints.wait()
                alarms.stop(step)
            if due:
                self._evaluate(writer)

    def _with_measured_tolerance(self, state: TrainState) -> TrainState:
        """The state with c from the metrics of the steps so far, which are written."""
        measured = -1.0
        if self.hosts.is_writer:
            series = read_metrics(self.config.run_dir)
            floors = dict(zip(*series.get("mismatch/noise_floor", ((), ())), strict=True))
            steps, means = series["discrepancy/mean"]
            measured = measure_tolerance(self.config.algorithm, means, [floors.get(step, 0.0) for step in steps])
        [tolerance] = self.hosts.largest(float(measured))
        tolerance = to_global(np.float32(tolerance), self.programs.shardings.dual.tolerance)
        return state._replace(dual=state.dual._replace(tolerance=tolerance))

    def _check_stop(self) -> None:
        """Leave what this process does alone if a signal came, here or to another process."""
        if self.stop.received is not None or self.hosts.called_together:
            raise Leaving

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Work that each process does by itself; all leave the block together.

        After a signal to any of them, or the failure of an engine or of a reward function, all save what is finished
        and end the run.
        """
        failure: Exception | None = None
        try:
            yield
        except Leaving:
            self.hosts.call_together()
        except (RewardError, *_ENDS_A_RUN) as error:
            failure = error
            self.hosts.call_together()
        broken = isinstance(failure, _ENDS_A_RUN)
        signal_number, failures, breaks = self.hosts.largest(self.stop.received or 0, failure is not None, broken)
        if not signal_number and not failures:
            return
        if broken and self.hosts.count == 1:
            raise failure
        step = self._save()
        if breaks:
            self.checkpoints.wait()
            raise failure if broken else EngineError("the engine gave up on another host, which says why")
        if signal_number:
            raise Interrupted(int(signal_number), f"after step {step}, saved")
        raise UserError(
            f"config.rewards.functions: {failure or 'one failed on another host'}; saved after step {step}: mend the "
            "function and run the same command again, or go on without its values by rewards.on_error=none (time "
            "limit: rewards.timeout)"
        ) from failure

    def _evaluation_is_due(self, step: int) -> bool:
        """Whether to evaluate: before the first step, every N steps, and after the last."""
        every = self.config.evaluation.every_steps
        return every > 0 and (step % every == 0 or step == self.config.training.steps)

    def _evaluate(self, writer: MetricsWriter) -> None:
        """Score the inference engine's policy on every held-out task: avg@K; their mean is kept with its checkpoint.

        The policy is saved already. The record of all tasks comes last: it says that nothing is left to do.
        """
        state, step = self._finished
        with self._alone():
            self.batches.settle()
            self._check_stop()
        self.batches.push(state.params, step)
        results = [self._evaluate_task(step, task, prompts) for task, prompts in self.plan.held_out]
        named = zip(results, self.plan.held_out, strict=True)
        name = " ".join(f"{result.task}/avg@{result.samples} {task.location}" for result, (task, _) in named)
        score = PolicyScore(f"{name} temperature={self.config.evaluation.temperature:g}", plain_average(results))
        self.checkpoints.add_score(step, score)
        metrics: dict[str, float] = {}
        for result in results:
            metrics[f"{result.task}/avg@{result.samples}"] = result.average
            metrics[f"{result.task}/pass@{result.samples}"] = result.pass_at_k
            metrics |= held_out_rewards(result)
        for result, (_, prompts) in zip(results, self.plan.held_out, strict=True):
            writer.write_held_out(step, held_out_samples(result, prompts, self.plan.tokenizer))
        writer.write(step, metrics)

    def _evaluate_task(self, step: int, task: HeldOutTask, prompts: EncodedPrompts) -> EvaluationResult:
        temperature = self.config.evaluation.temperature
        sampling = dataclasses.replace(self.plan.sampling, group_size=task.samples, temperature=temperature)
        share = self.hosts.share(len(prompts.problems))
        with self._alone():
            result = evaluate(
                self.engine,
                self.plan.scorer,
                self.plan.tokenizer,
                prompts.token_ids[share],
                prompts.problems[share],
                sampling,
                task=f"eval/{task.name}",
                seed=self.config.training.seed + _EVALUATION_SEED_OFFSET,
                first_prompt=share.start,
                state=trainer_state(self.plan, step, self._prompts_taken),
                turns=self.plan.turns,
                check_stop=self._check_stop,
            )
        return gather_evaluation(self.hosts, result)

    def _save(self) -> int:
        """Save the state after the last finished step; return that step."""
        state, step = self._finished
        behind = self.batches.behind(step)
        self.checkpoints.save(step, state, model=self.plan.model, prompts_taken=self._prompts_taken, behind=behind)
        return step


def train(
    run: Run,
    *,
    show: Callable[[str], None],
    programs: StepPrograms | None = None,
) -> None:
    """Run a plan to its end, from its newest checkpoint if the run directory has one.

    Each process of a run on several hosts calls this.

    Args:
        run: its parts; what is not checked yet is checked first. It is closed at the end.
        show: prints a line for people.
        programs: of a run of the same kind before; None makes them.

    Raises:
        Interrupted: after SIGTERM, SIGINT or SIGHUP, once everything is saved.
        TrainingStopped: when the gradients stay broken.
        ValueError, OSError, EngineError: in one line, what is wrong with input, files or engine.
    """
    config = run.check().config
    stop = StopSignal()
    with contextlib.ExitStack() as stack:
        run.hosts.check_same(lambda: data_facts(run), "give all hosts the same files")
        stack.enter_context(claimed(config, run.hosts))
        stack.enter_context(stop.listening())
        stack.callback(run.close)
        run.start()
        kept = config.checkpoint
        checkpoints = Checkpoints(config.run_dir, keep_last=kept.keep_last, keep_best=kept.keep_best, hosts=run.hosts)
        stack.callback(checkpoints.close)
        programs = programs or make_step_programs(config, run.model, run.compute, run.mesh)
        state, resumed, prompts_taken = start(run, programs, checkpoints, stop, show)
        release_freed_memory()
        step = int(state.step)
        if step > config.training.steps:
            raise UserError(
                f"config.training.steps: got {config.training.steps}, the run in {config.run_dir} has already done "
                f"{step}; raise it or choose another run_dir"
            )
        writer = _open_records(run, stack, step, resumed) if run.hosts.is_writer else NoWriter()
        trainer = Trainer(run, programs, checkpoints, stop, prompts_taken=prompts_taken)
        trainer.run(state, writer, resumed=resumed)
        with activity("writing the last checkpoint"):
            checkpoints.wait()


def _open_records(run: Run, stack: contextlib.ExitStack, step: int, resumed: bool) -> MetricsWriter:
    """Write what describes the run, and open what grows with it."""
    config = run.config
    record_config(config, run.memory.rows)
    save_tokenizer(run.tokenizer, Path(config.run_dir) / "tokenizer", run.sampling.stop_token_ids)
    progress = stack.enter_context(Progress(config.training.steps, step))
    return stack.enter_context(
        MetricsWriter(
            config.run_dir,
            wandb_project=config.observe.wandb_project or None,
            trackio_project=config.observe.trackio_project or None,
            resume_step=step if resumed else None,
            devices=run.mesh.size,
            listener=progress.update,
            rollouts_every_steps=config.observe.rollouts_every_steps,
        )
    )
