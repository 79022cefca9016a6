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
import numpy as np

from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.data.packing import pack
from dcmdp_jax.data.prompts import EncodedPrompts, save_tokenizer
from dcmdp_jax.engines.noise_floor import sample_alone
from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import EvaluationResult, evaluate
from dcmdp_jax.evaluation.held_out import HeldOutTask
from dcmdp_jax.evaluation.table import plain_average
from dcmdp_jax.observe.metrics_io import MetricsWriter, NoWriter, has_record
from dcmdp_jax.observe.progress import Progress
from dcmdp_jax.parallel.global_arrays import to_global
from dcmdp_jax.process_memory import release_freed_memory
from dcmdp_jax.rewards.protocol import RewardError
from dcmdp_jax.rewards.reward_metrics import reward_metrics
from dcmdp_jax.training.across_hosts import gather_evaluation
from dcmdp_jax.training.build import Parts, build_parts
from dcmdp_jax.training.checkpoint import PolicyScore
from dcmdp_jax.training.fingerprint import data_facts
from dcmdp_jax.training.host_metrics import PhaseTimer, rollout_metrics, staleness_metrics
from dcmdp_jax.training.run_directory import claimed, record_config
from dcmdp_jax.training.setup import Plan
from dcmdp_jax.training.skipped_updates import SkippedUpdates
from dcmdp_jax.training.start import reference_params, start
from dcmdp_jax.training.state import measures_tolerance
from dcmdp_jax.training.step_rollout import StepRollout, StepRollouts
from dcmdp_jax.training.stop_signal import Interrupted, StopSignal
from dcmdp_jax.types import Batch, TrainState

logger = logging.getLogger(__name__)

# Held-out sampling must not repeat the draws of training.
_EVALUATION_SEED_OFFSET = 1_000_003
# Of the noise floor: completions scored in one pass, and completions and tokens of each sampled alone.
_SCORED_AGAIN, _SAMPLED_AGAIN, _TOKENS_SAMPLED_AGAIN = 32, 4, 64


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
        self.rollouts = StepRollouts(plan, parts.engine, parts.scorer)
        self._pushed: tuple[int, dict[str, float]] | None = None
        self._finished: tuple[TrainState, int] | None = None
        self._prompts_taken = prompts_taken
        algorithm = self.config.algorithm
        # For the noise floor. Compiled as one: each operation alone would be a program of its own.
        self._token_discrepancy = jax.jit(
            functools.partial(
                token_discrepancy, measure=algorithm.measure, sided=algorithm.sided, ratio_limit=algorithm.ratio_limit
            )
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
        skipped = SkippedUpdates(config, step)
        reference = reference_params(self.plan, self.parts, step)
        if not resumed:
            self._save(state, step)
        tasks = [task.name for task, _ in self.plan.held_out]
        recorded = all(has_record(config.run_dir, step, f"eval/{name}/") for name in tasks)
        [evaluated] = self.hosts.largest(recorded)
        if self._evaluation_is_due(step) and not evaluated:
            self._evaluate(state, step, writer)
        while step < config.training.steps:
            self._finished = state, step
            with self._alone(state, step):
                self._check_stop()
            timer = PhaseTimer()
            with timer.phase("push"):
                pushed = self._push(state, step)
            alone = functools.partial(self._alone, state, step)
            rollout = self.rollouts.sample(step, self._prompts_taken, timer, alone, self._check_stop)
            measures = measures_tolerance(config.algorithm, jax.device_get(state.dual))
            floor = self._noise_floor(rollout, step) if step == 0 or measures else {}
            # Before the step, whose peak they would add to; the next push brings new ones in any case.
            self.engine.release_weights()
            with timer.phase("pack"):
                batch, packed = self._pack(rollout, floor, state, step)
            with timer.phase("step"), jax.transfer_guard("disallow"):
                state, metrics = self.parts.train_step(state, batch, reference)
                metrics = jax.device_get(metrics)
            step += 1
            self._prompts_taken += len(rollout.problems)
            completions = metrics.pop("completions/discrepancy")
            metrics |= pushed | packed | floor | timer.metrics(rollout.episodes)
            metrics |= rollout_metrics(rollout.episodes, rollout.scores.grades) | reward_metrics(rollout.scores)
            if config.algorithm.refill_rounds:
                metrics |= rollout.dynamic_metrics()
            metrics |= skipped.record(step, metrics)
            writer.write(step, metrics)
            self._finished = state, step
            self._write_samples(step, writer, rollout, completions)
            skipped.check(metrics)
            due = self._evaluation_is_due(step)
            if due or step == config.training.steps or step % config.checkpoint.every_steps == 0:
                self._save(state, step)
            if due:
                self._evaluate(state, step, writer)

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

    def _push(self, state: TrainState, step: int) -> dict[str, float]:
        """Push the policy of a step unless the engine holds it already; return what was measured when it was pushed."""
        if self._pushed is None or self._pushed[0] != step:
            measured = self.engine.push_weights(state.params, step)
            self._pushed = step, dict(zip(measured, self.hosts.largest(*measured.values()), strict=True))
        return self._pushed[1]

    def _evaluation_is_due(self, step: int) -> bool:
        """Whether to evaluate: before the first step, every N steps, and after the last."""
        every = self.config.evaluation.every_steps
        return every > 0 and (step % every == 0 or step == self.config.training.steps)

    def _noise_floor(self, rollout: StepRollout, step: int) -> dict[str, float]:
        """The engine against itself in another batch shape, on the first completions: no budget below it can be met.

        Scored in one pass, and the first few sampled once more, each alone: the larger mean, and the largest of all
        processes' engines.
        """
        own = self._own_noise_floor(rollout, step)
        [floor] = self.hosts.largest(-1.0 if own is None else own)
        return {"mismatch/noise_floor": floor} if floor >= 0 else {}

    def _own_noise_floor(self, rollout: StepRollout, step: int) -> float | None:
        usable = {int(row): rollout.episodes[row] for row in np.flatnonzero(~rollout.dropped)[:_SCORED_AGAIN]}
        episodes, sampling = list(usable.values()), self.plan.sampling
        few = {row: usable[row] for row in list(usable)[:_SAMPLED_AGAIN]}
        shorter = dataclasses.replace(
            sampling, max_completion_tokens=min(_TOKENS_SAMPLED_AGAIN, sampling.max_completion_tokens)
        )
        try:
            scored = self.engine.score(
                [episode.prompt_ids for episode in episodes],
                [episode.completion_ids for episode in episodes],
                temperature=sampling.temperature,
            )
            together, alone = sample_alone(self.engine, few, shorter, seed=self.config.training.seed, step=step)
        except EngineError as error:
            # A diagnostic does not end a run that is set to go on without what is broken.
            if self.config.rollout.on_non_finite != "drop":
                raise
            logger.warning("no noise floor: %s", error)
            return None
        masks = [episode.sampled_mask[episode.prompt_length :] for episode in episodes]
        again = np.concatenate([values[mask] for values, mask in zip(scored, masks, strict=True)])
        sampled = np.concatenate([episode.rollout_logprobs[episode.sampled_mask] for episode in episodes])
        differences = [self._token_discrepancy(again, sampled)]
        if together.size:
            differences.append(self._token_discrepancy(alone, together))
        return max(float(np.mean(each)) for each in differences)

    def _pack(
        self, rollout: StepRollout, floor: Mapping[str, float], state: TrainState, step: int
    ) -> tuple[Batch, dict[str, Any]]:
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
        batch = to_global(batch, self.parts.batch_shardings)
        metrics["rollout/padding_fraction"] = 1.0 - report.tokens / report.computed_tokens
        if self.parts.rescore is not None:
            batch, metrics["mismatch/sampler"] = self.parts.rescore(state.params, batch)
        return batch, metrics

    def _evaluate(self, state: TrainState, step: int, writer: MetricsWriter) -> None:
        """Score the inference engine's policy on every held-out task: avg@K; their mean is kept with its checkpoint.

        The policy is saved already. The record of all tasks comes last: it says that nothing is left to do.
        """
        with self._alone(state, step):
            self._check_stop()
        self._push(state, step)
        results = [self._evaluate_task(state, step, task, prompts) for task, prompts in self.plan.held_out]
        named = zip(results, self.plan.held_out, strict=True)
        name = " ".join(f"{result.task}/avg@{result.samples} {task.location}" for result, (task, _) in named)
        score = PolicyScore(f"{name} temperature={self.config.evaluation.temperature:g}", plain_average(results))
        self.checkpoints.add_score(step, score)
        metrics: dict[str, float] = {}
        for result in results:
            metrics[f"{result.task}/avg@{result.samples}"] = result.average
            metrics[f"{result.task}/pass@{result.samples}"] = result.pass_at_k
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
                self.parts.verifier,
                self.plan.tokenizer,
                prompts.token_ids[share],
                [problem.answer for problem in prompts.problems[share]],
                sampling,
                task=f"eval/{task.name}",
                seed=self.config.training.seed + _EVALUATION_SEED_OFFSET,
                first_prompt=share.start,
                check_stop=self._check_stop,
            )
        return gather_evaluation(self.hosts, result)

    def _save(self, state: TrainState, step: int) -> None:
        self.checkpoints.save(step, state, model=self.plan.model, prompts_taken=self._prompts_taken)

    def _write_samples(
        self, step: int, writer: MetricsWriter | NoWriter, rollout: StepRollout, discrepancy: np.ndarray
    ) -> None:
        settings, size = self.config.observe, self.plan.sampling.group_size
        if not settings.samples or (step - 1) % settings.samples_every_steps:
            return
        means = discrepancy.reshape(-1)
        # One completion of each of the first prompts says more than many of one prompt.
        picked = [(place * size, group) for place, group in enumerate(rollout.groups[: settings.samples])]
        writer.write_samples(step, [
            {
                "prompt": self.plan.train.problems[rollout.problems[group]].prompt,
                "completion": rollout.texts[group * size],
                "answer": rollout.answers[group * size],
                "reward": float(rollout.scores.totals[group * size]),
                "rewards": rollout.scores.of_completion(group * size),
                "discrepancy_mean": float(means[place]),
            }
            for place, group in picked
        ])  # fmt: skip


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
            resume_step=step if resumed else None,
            listener=progress.update,
        )
    )
