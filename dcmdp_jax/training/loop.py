"""The training loop: push weights, generate, verify, pack, step, record."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.config.arguments import PACKING, in_settings
from dcmdp_jax.data.lengths import padding_advice
from dcmdp_jax.data.packing import pack
from dcmdp_jax.data.prompts import EncodedPrompts, save_tokenizer
from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import EvaluationResult, evaluate
from dcmdp_jax.evaluation.held_out import HeldOutTask, held_out_rewards
from dcmdp_jax.evaluation.table import plain_average
from dcmdp_jax.observe.metric_names import STEP_PHASES
from dcmdp_jax.observe.metrics_io import MetricsWriter, NoWriter, has_record
from dcmdp_jax.observe.progress import Progress
from dcmdp_jax.parallel.global_arrays import to_global
from dcmdp_jax.process_memory import release_freed_memory
from dcmdp_jax.rewards.protocol import RewardError
from dcmdp_jax.rewards.scoring import reward_metrics
from dcmdp_jax.training.across_hosts import data_facts, gather_evaluation
from dcmdp_jax.training.ahead import (
    KeptParams,
    Sampled,
    SamplingAhead,
    check_versions,
    version_of,
    versions_in_flight,
    versions_of,
)
from dcmdp_jax.training.batch_metrics import PhaseTimer, rollout_metrics, staleness_metrics
from dcmdp_jax.training.build import Parts, build_parts, reference_params, start
from dcmdp_jax.training.checkpoint import PolicyScore
from dcmdp_jax.training.run_directory import claimed, record_config
from dcmdp_jax.training.setup import Plan, samples_beside
from dcmdp_jax.training.state import measures_tolerance
from dcmdp_jax.training.step import ADVANTAGES, TRAIN_LOGPROBS
from dcmdp_jax.training.step_rollout import (
    NoiseFloor,
    StepRollout,
    StepRollouts,
    recorded_completions,
    shown_samples,
    trainer_state,
)
from dcmdp_jax.training.stopping import AlarmWatch, Interrupted, SkippedUpdates, StopSignal
from dcmdp_jax.types import Batch, Params, Rows, TrainState

logger = logging.getLogger(__name__)

# Share of padding in a step that people are told of, once.
_MUCH_PADDING = 0.3

# Held-out sampling must not repeat the draws of training.
_EVALUATION_SEED_OFFSET = 1_000_003


_ENDS_A_RUN = EngineError, MemoryError, jax.errors.JaxRuntimeError
"""Errors after which the finished steps are saved."""


class _Leaving(Exception):
    """This process or another one was asked to stop: what it does alone ends here."""


class Trainer:
    """A run with its parts and its record. `run` is the loop."""

    def __init__(self, plan: Plan, parts: Parts, stop: StopSignal, *, prompts_taken: int) -> None:
        """Store the parts; nothing is compiled or loaded yet.

        Args:
            plan: the checked run.
            parts: of `build_parts`.
            stop: says when to leave.
            prompts_taken: positions of the stream of prompts that the finished steps have taken.
        """
        self.plan, self.parts, self.config = plan, parts, plan.config
        self.hosts, self.stop = plan.hosts, stop
        self.engine, self.checkpoints = parts.engine, parts.checkpoints
        self.rollouts = StepRollouts(plan, parts.engine, parts.scorer, parts.turns)
        self._pushed: tuple[int, dict[str, float]] | None = None
        self._sampled_until: float | None = None
        self._finished: tuple[TrainState, int] | None = None
        self._prompts_taken = prompts_taken
        self._padding_told = False
        self._lag, self._ahead, self._kept = self.config.rollout.lag, None, None
        self._partial, self._floor = self.config.rollout.partial, None
        if self._lag:
            self._kept = KeptParams(
                parts.shardings.params, on_host=self.config.rollout.old_logprobs == "current",
                kept=self.checkpoints.behind,
            )  # fmt: skip
            self._ahead = SamplingAhead(
                self._lag, self.config.training.steps, self._make_ahead, taken=prompts_taken,
                beside=samples_beside(plan),
            )  # fmt: skip
        self._noise_floor = NoiseFloor(plan, parts.engine)

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
            if self._ahead is not None:
                self._ahead.close()

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
                    self._save(state, step)
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
        reference = reference_params(self.plan, self.parts, step)
        if not resumed:
            self._save(state, step)
        if self._lag and step < config.training.steps:
            self._sample_in_flight(state, step)
        tasks = [task.name for task, _ in self.plan.held_out]
        recorded = all(has_record(config.run_dir, step, f"eval/{name}/") for name in tasks)
        [evaluated] = self.hosts.largest(recorded)
        if self._evaluation_is_due(step) and not evaluated:
            self._evaluate(state, step, writer)
        while step < config.training.steps:
            self._finished = state, step
            timer = PhaseTimer()
            with self._alone(state, step):
                if self._ahead is not None and not self._partial:
                    with timer.phase("wait"):
                        self._ahead.settle()
                self._check_stop()
            with timer.phase("push"):
                pushed = self._push(state.params, step)
            sampled = self._batch_ahead(state, step, timer) if self._lag else self._batch_now(state, step, timer)
            rollout = sampled.rollout
            with timer.phase("step"), jax.transfer_guard("disallow"):
                state, metrics = self.parts.train_step(state, sampled.batch, reference)
                recorded = [metrics.pop(name, None) for name in (TRAIN_LOGPROBS, ADVANTAGES)]
                metrics = jax.device_get(metrics)
            step += 1
            self._prompts_taken += len(rollout.problems)
            completions = metrics.pop("completions/discrepancy")
            metrics |= rollout.source_metrics(completions.reshape(-1))
            metrics |= pushed | sampled.metrics | sampled.floor | self._times(sampled, timer)
            metrics |= rollout_metrics(rollout.episodes, rollout.scores.grades) | reward_metrics(rollout.scores)
            if config.algorithm.refill_rounds:
                metrics |= rollout.dynamic_metrics()
            metrics |= skipped.record(step, metrics)
            metrics |= alarms.record(step, metrics, completions)
            writer.write(step, metrics)
            self._finished = state, step
            if samples := shown_samples(self.plan, step, rollout, completions):
                writer.write_samples(step, samples)
            if writer.records(step):
                given = rollout, self.plan.train.problems, sampled.rows, *jax.device_get(recorded)
                exact = self.parts.rescore is not None
                writer.write_rollouts(step, recorded_completions(*given, exact=exact))
            skipped.check(metrics)
            due, [stops] = self._evaluation_is_due(step), self.hosts.largest(alarms.ends_the_run)
            if due or stops or step == config.training.steps or step % config.checkpoint.every_steps == 0:
                self._save(state, step)
            if stops:
                self.checkpoints.wait()
                alarms.stop(step)
            if due:
                self._evaluate(state, step, writer)

    def _batch_now(self, state: TrainState, step: int, timer: PhaseTimer) -> Sampled:
        """The batch of a step, sampled by the policy that it trains."""
        alone = functools.partial(self._alone, state, step)
        rollout = self.rollouts.sample(step, self._prompts_taken, timer, alone, self._check_stop)
        measures = measures_tolerance(self.config.algorithm, jax.device_get(state.dual))
        floor = self._noise_floor.metrics(rollout, step, wanted=measures)
        # Before the step, whose peak they would add to; the next push brings new ones in any case.
        self.engine.release_weights()
        with timer.phase("pack"):
            sampled = Sampled(rollout, floor, *self._pack(rollout, floor, step), timer)
            self._recompute(state.params, sampled)
        return sampled

    def _batch_ahead(self, state: TrainState, step: int, timer: PhaseTimer) -> Sampled:
        """The batch of a step, sampled by earlier weights; those of this step begin to sample a later one."""
        kept, version = self._kept, version_of(step, self._lag)
        with timer.phase("wait"), self._beside(state, step):
            self._start_ahead(state.params, step, step)
            sampled = self._ahead.take(step)
        if not self._ahead.beside:
            self.engine.release_weights()
        if self.config.rollout.old_logprobs == "kept":
            params = lambda each: state.params if each == step else kept.get(each)  # noqa: E731
            with timer.phase("step"):
                if self._partial:
                    self._recompute_each(params, sampled)
                else:
                    self._recompute(params(version), sampled)
        kept.drop_before(version_of(step + 1, self._lag))
        kept.keep(step, state.params)
        return sampled

    def _start_ahead(self, params: Params, version: int, step: int) -> None:
        """Start to sample with the weights in the engine; wait for it where p^Train is computed while they are here."""
        for each in self._ahead.start_all(version, step):
            if self.config.rollout.old_logprobs == "current":
                self._recompute(params, self._ahead.batch(each))

    def _sample_in_flight(self, state: TrainState, step: int) -> None:
        """Sample the batches again that were in flight when the state was saved, each with the weights it had."""
        self._finished = state, step
        for version in versions_in_flight(step, self._lag):
            params = self._kept.get(version)
            self._push(params, version)
            with self._beside(state, step):
                self._start_ahead(params, version, step)
                self._ahead.settle()
            if not self._ahead.beside:
                self.engine.release_weights()

    @contextlib.contextmanager
    def _beside(self, state: TrainState, step: int) -> Iterator[None]:
        """The sampler's work: alone where it has a thread, else in turn with other hosts, which it meets itself."""
        if not self._ahead.beside:
            yield
            self._ahead.settle()
            return
        with self._alone(state, step):
            yield
            self._check_stop()

    def _make_ahead(self, step: int, first: int) -> Sampled:
        """The batch of a step, in the sampler's thread where it has one; the engine has the weights for it."""
        alone = contextlib.nullcontext if self._ahead.beside else functools.partial(self._alone, *self._finished)

        def check_stop() -> None:
            if self._ahead.closing.is_set():
                raise _Leaving
            self._check_stop()

        if self._ahead.closing.is_set():
            raise _Leaving
        with alone():
            self._check_stop()
        timer, algorithm = PhaseTimer(), self.config.algorithm
        rollout = self.rollouts.sample(step, first, timer, alone, check_stop)
        oldest = version_of(step, self._lag)
        check_versions(rollout.episodes, range(oldest, (step if self._partial else oldest) + 1))
        floor: dict[str, float] = {}
        if self._floor is None or not self._partial:
            # With partial rollouts of the first batch alone: no weights come while it is made and measured.
            measures = algorithm.fixed_multiplier is None and step < algorithm.tolerance_steps
            floor = self._floor = self._noise_floor.metrics(rollout, step, wanted=measures)
        with timer.phase("pack"):
            return Sampled(rollout, floor, *self._pack(rollout, self._floor, step), timer)

    def _recompute(self, params: Params, sampled: Sampled) -> None:
        """Put into a batch what the training stack gives it under the weights that sampled it, where that is needed."""
        if self.parts.rescore is not None:
            sampled.batch, sampled.metrics["mismatch/sampler"] = self.parts.rescore(params, sampled.batch)
        if self._lag:
            sampled.batch = self.parts.old_logprobs(params, sampled.batch)

    def _recompute_each(self, params: Callable[[int], Params], sampled: Sampled) -> None:
        """As `_recompute` for a batch of several versions, each token by its own."""
        batch = sampled.batch
        empty = [bucket.with_columns(old_logprobs=jnp.zeros_like(bucket.rollout_logprobs)) for bucket in batch.rows]
        batch = batch._replace(rows=tuple(empty))
        versions = versions_of(sampled.rows)
        for version in versions:
            batch = self.parts.old_logprobs(params(version), batch, np.int32(version))
        sampled.batch, sampled.metrics["rollout/versions"] = batch, len(versions)

    def _times(self, sampled: Sampled, timer: PhaseTimer) -> dict[str, float]:
        """Seconds of each phase; where sampling runs ahead also what the overlap won and how long each side waited."""
        if not self._lag:
            return timer.metrics(sampled.rollout.episodes)
        timer.seconds |= sampled.timer.seconds
        times = timer.metrics(sampled.rollout.episodes)
        began, ended = sampled.timer.spans[0][1], sampled.timer.spans[-1][2]
        idle, self._sampled_until = max(0.0, began - (self._sampled_until or began)), ended
        in_turn = sum(times[f"time/{phase}"] for phase in STEP_PHASES)
        starts = {f"time/start_{phase}": at for phase, at in {**timer.starts, **sampled.timer.starts}.items()}
        return times | starts | {"time/engine_idle": idle, "time/overlap": in_turn - times["time/total"]}

    def _check_stop(self) -> None:
        """Leave what this process does alone if a signal came, here or to another process."""
        if self.stop.received is not None or self.hosts.called_together:
            raise _Leaving

    @contextlib.contextmanager
    def _alone(self, state: TrainState, step: int) -> Iterator[None]:
        """Work that each process does by itself; all leave the block together.

        After a signal to any of them, or the failure of an engine or of a reward function, all save the state and end
        the run.
        """
        failure: Exception | None = None
        try:
            yield
        except _Leaving:
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
        self._save(state, step)
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

    def _push(self, params: Params, step: int) -> dict[str, float]:
        """Push the policy of a step unless the engine holds it already; return what was measured when it was pushed."""
        if self._pushed is None or self._pushed[0] != step:
            beside = self._partial and self._ahead.busy
            measured = (self.engine.publish_weights if beside else self.engine.push_weights)(params, step)
            self._pushed = step, dict(zip(measured, self.hosts.largest(*measured.values()), strict=True))
        return self._pushed[1]

    def _evaluation_is_due(self, step: int) -> bool:
        """Whether to evaluate: before the first step, every N steps, and after the last."""
        every = self.config.evaluation.every_steps
        return every > 0 and (step % every == 0 or step == self.config.training.steps)

    def _pack(
        self, rollout: StepRollout, floor: Mapping[str, float], step: int
    ) -> tuple[Batch, tuple[Rows, ...], dict[str, Any]]:
        """The batch on the devices, its rows on the host, and metrics."""
        batch, report = pack(
            [rollout.episodes[row] for row in rollout.rows],
            rollout.scores.totals[rollout.rows],
            self.plan.packing,
            mask_truncated=self.config.algorithm.mask_truncated,
            dropped=rollout.dropped[rollout.rows],
        )
        metrics: dict[str, Any] = {"rollout/dropped_completions": int(rollout.dropped.sum())}
        metrics |= staleness_metrics(batch, step)
        if self.config.algorithm.tolerance_steps:
            batch = batch._replace(noise_floor=np.float32(floor.get("mismatch/noise_floor", 0.0)))
        host_rows = batch.rows
        batch = to_global(batch, self.parts.batch_shardings)
        padding = metrics["rollout/padding_fraction"] = 1.0 - report.tokens / report.computed_tokens
        if padding > _MUCH_PADDING and not self._padding_told:
            self._padding_told = True
            advice = padding_advice(
                self.plan.packing,
                longest=self.config.max_total_tokens,
                chosen=not self.config.training.row_lengths,
                limited=self.config.training.segments_per_row > 0,
            )
            advice = in_settings(advice, PACKING)
            logger.warning("step %d: %.0f%% of what is computed is padding; %s", step + 1, 100 * padding, advice)
        return batch, host_rows, metrics

    def _evaluate(self, state: TrainState, step: int, writer: MetricsWriter) -> None:
        """Score the inference engine's policy on every held-out task: avg@K; their mean is kept with its checkpoint.

        The policy is saved already. The record of all tasks comes last: it says that nothing is left to do.
        """
        with self._alone(state, step):
            if self._ahead is not None:
                self._ahead.settle()
            self._check_stop()
        self._push(state.params, step)
        results = [self._evaluate_task(state, step, task, prompts) for task, prompts in self.plan.held_out]
        named = zip(results, self.plan.held_out, strict=True)
        name = " ".join(f"{result.task}/avg@{result.samples} {task.location}" for result, (task, _) in named)
        score = PolicyScore(f"{name} temperature={self.config.evaluation.temperature:g}", plain_average(results))
        self.checkpoints.add_score(step, score)
        metrics: dict[str, float] = {}
        for result in results:
            metrics[f"{result.task}/avg@{result.samples}"] = result.average
            metrics[f"{result.task}/pass@{result.samples}"] = result.pass_at_k
            metrics |= held_out_rewards(result)
        writer.write(step, metrics)

    def _evaluate_task(
        self, state: TrainState, step: int, task: HeldOutTask, prompts: EncodedPrompts
    ) -> EvaluationResult:
        temperature = self.config.evaluation.temperature
        sampling = dataclasses.replace(self.plan.sampling, group_size=task.samples, temperature=temperature)
        share = self.hosts.share(len(prompts.problems))
        with self._alone(state, step):
            result = evaluate(
                self.engine,
                self.parts.scorer,
                self.plan.tokenizer,
                prompts.token_ids[share],
                prompts.problems[share],
                sampling,
                task=f"eval/{task.name}",
                seed=self.config.training.seed + _EVALUATION_SEED_OFFSET,
                first_prompt=share.start,
                state=trainer_state(self.plan, step, self._prompts_taken),
                turns=self.parts.turns,
                check_stop=self._check_stop,
            )
        return gather_evaluation(self.hosts, result)

    def _save(self, state: TrainState, step: int) -> None:
        behind = self._kept.of(versions_in_flight(step, self._lag)) if self._lag else {}
        self.checkpoints.save(
            step, state, model=self.plan.model, prompts_taken=self._prompts_taken, behind=behind
        )  # fmt: skip


def train(
    plan: Plan,
    *,
    show: Callable[[str], None],
    build: Callable[[Plan, contextlib.ExitStack], Parts] = build_parts,
) -> None:
    """Run a plan to its end, from its newest checkpoint if the run directory has one.

    Each process of a run on several hosts calls this.

    Args:
        plan: from `make_plan_of_run`.
        show: prints a line for people.
        build: makes the parts that the loop works with.

    Raises:
        Interrupted: after SIGTERM or SIGINT, once everything is saved.
        TrainingStopped: when the gradients stay broken.
        ValueError, OSError, EngineError: in one line, what is wrong with input, files or engine.
    """
    config = plan.config
    stop = StopSignal()
    with contextlib.ExitStack() as stack:
        plan.hosts.check_same(lambda: data_facts(plan), "give all hosts the same files")
        stack.enter_context(claimed(config, plan.hosts))
        stack.enter_context(stop.listening())
        parts = build(plan, stack)
        state, resumed, prompts_taken = start(plan, parts, stop, show)
        release_freed_memory()
        step = int(state.step)
        if step > config.training.steps:
            raise UserError(
                f"config.training.steps: got {config.training.steps}, the run in {config.run_dir} has already done "
                f"{step}; raise it or choose another run_dir"
            )
        writer = _open_records(plan, stack, step, resumed) if plan.hosts.is_writer else NoWriter()
        Trainer(plan, parts, stop, prompts_taken=prompts_taken).run(state, writer, resumed=resumed)
        parts.checkpoints.wait()


def _open_records(plan: Plan, stack: contextlib.ExitStack, step: int, resumed: bool) -> MetricsWriter:
    """Write what describes the run, and open what grows with it."""
    config = plan.config
    record_config(config)
    save_tokenizer(plan.tokenizer, Path(config.run_dir) / "tokenizer", plan.sampling.stop_token_ids)
    progress = stack.enter_context(Progress(config.training.steps, step))
    return stack.enter_context(
        MetricsWriter(
            config.run_dir,
            wandb_project=config.observe.wandb_project or None,
            trackio_project=config.observe.trackio_project or None,
            resume_step=step if resumed else None,
            listener=progress.update,
            rollouts_every_steps=config.observe.rollouts_every_steps,
            rollouts_max_bytes=config.observe.rollouts_max_gib * 2**30,
        )
    )
