"""The training loop: push weights, generate, verify, pack, step, record."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dcmdp_jax.algorithm.discrepancy import token_discrepancy
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import evaluate
from dcmdp_jax.models import hf_weights
from dcmdp_jax.models.params import param_shapes
from dcmdp_jax.observe.metrics_io import MetricsWriter, has_record
from dcmdp_jax.observe.progress import Progress
from dcmdp_jax.process_memory import release_freed_memory
from dcmdp_jax.rewards.protocol import RewardError
from dcmdp_jax.rewards.reward_metrics import reward_metrics
from dcmdp_jax.rollout.engine import EngineError
from dcmdp_jax.rollout.packing import pack
from dcmdp_jax.tasks.problems import source_name
from dcmdp_jax.tasks.prompts import save_tokenizer
from dcmdp_jax.training.build import Parts, build_parts, initial_params
from dcmdp_jax.training.checkpoint import PolicyScore
from dcmdp_jax.training.host_metrics import PhaseTimer, rollout_metrics, staleness_metrics
from dcmdp_jax.training.loss_scale import WARMUP_SCALE
from dcmdp_jax.training.row_logprobs import make_row_logprobs
from dcmdp_jax.training.run_directory import claimed, record_config
from dcmdp_jax.training.setup import Plan
from dcmdp_jax.training.state import measures_tolerance, new_state
from dcmdp_jax.training.step_rollout import StepRollout, StepRollouts
from dcmdp_jax.training.stop_signal import StopSignal
from dcmdp_jax.training.warmup import warm_up
from dcmdp_jax.types import Batch, Params, TrainState

logger = logging.getLogger(__name__)

# Held-out sampling must not repeat the draws of training.
_EVALUATION_SEED_OFFSET = 1_000_003
_REFERENCE_DIRECTORY = "reference"
_NOISE_FLOOR_COMPLETIONS = 32


class TrainingStopped(RuntimeError):
    """Training gave up: too many updates in a row had no finite gradient."""


class Trainer:
    """A run with its parts and its record. `run` is the loop."""

    def __init__(self, plan: Plan, parts: Parts, stop: StopSignal, show: Callable[[str], None]) -> None:
        """Takes the parts; nothing is compiled or loaded yet.

        Args:
            plan: the checked run.
            parts: of `build_parts`.
            stop: says when to leave.
            show: prints a line for people before the live display starts.
        """
        self.plan, self.parts, self.config, self.stop, self.show = plan, parts, plan.config, stop, show
        self.engine, self.checkpoints = parts.engine, parts.checkpoints
        self.rollouts = StepRollouts(plan, parts.engine, parts.scorer)
        self._pushed: tuple[int, dict[str, float]] | None = None
        # Positions of the stream of prompts that the finished steps have taken.
        self._prompts_taken = 0

    def start(self) -> tuple[TrainState, bool]:
        """The newest checkpoint's state, or a fresh one, warmed up if asked; and whether it was resumed."""
        parts, shardings = self.parts, self.parts.shardings
        create = jax.jit(
            lambda params: new_state(params, parts.optimizer, parts.dual, parts.loss_scale), out_shardings=shardings
        )
        shapes = jax.eval_shape(create, param_shapes(self.plan.model, self.config.model.param_dtype))
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings,
        )
        if (state := self.checkpoints.restore(abstract, self.plan.model)) is not None:
            step = int(state.step)
            self.show(f"resuming {self.config.run_dir} after step {step}")
            taken = self.checkpoints.prompts_taken(step)
            self._prompts_taken = step * self.config.training.prompts_per_step if taken is None else taken
            return state, True
        params = initial_params(self.plan)
        if self.config.warmup.steps:
            params = self._warm_up(params)
        if self.config.algorithm.kl_coefficient:
            hf_weights.save_params(
                params, self.plan.model, self._reference, dtype=self.config.model.param_dtype, overwrite=True
            )
        return create(params), False

    def _warm_up(self, params: Params) -> Params:
        self.show(f"warm-up: {self.config.warmup.steps} supervised steps on {self.config.warmup.task}")
        prompts, solutions = self.plan.worked_solutions
        # The sampling temperature belongs to sampling: solutions are fitted by the model as it is.
        row_logprobs = make_row_logprobs(self.plan.model, self.plan.compute, temperature=1.0, mesh=self.plan.mesh)
        length_multiple = 128 if self.plan.compute.attention == "splash" else 8
        began = time.monotonic()

        def on_step(done: int, loss: float) -> None:
            self.stop.check("in the warm-up, which starts again")
            if done % 500 == 0 or done == self.config.warmup.steps:
                self.show(f"warm-up: step {done}, loss {loss:.4f} nats a token, {time.monotonic() - began:.0f} s")

        return warm_up(
            params, prompts, solutions, row_logprobs, self.config.warmup, seed=self.config.training.seed,
            mesh=self.plan.mesh, length_multiple=length_multiple, on_step=on_step,
            loss_scale=WARMUP_SCALE if self.parts.loss_scale is not None else 1.0,
        )  # fmt: skip

    @property
    def _reference(self) -> Path:
        return Path(self.config.run_dir) / _REFERENCE_DIRECTORY

    def _reference_params(self) -> Params | None:
        """The frozen policy of the KL term, as it was before the first step; None when the term is off."""
        if not self.config.algorithm.kl_coefficient:
            return None
        return hf_weights.load_params(
            self._reference, self.plan.model, dtype=self.config.model.param_dtype, shardings=self.parts.shardings.params
        )

    def run(self, state: TrainState, writer: MetricsWriter, *, resumed: bool) -> None:
        """Trains from `state` to the last step, or until a signal comes; saves on the way and at the end.

        Every evaluated policy is saved, and its score with it, so that the best one can be kept. A signal ends
        sampling and evaluation at once: the state has been final since the last update. The resumed run samples that
        step, or evaluates that policy, again.
        """
        config, step = self.config, int(state.step)
        reference = self._reference_params()
        if not resumed:
            self._save(state, step)
        if self._evaluation_is_due(step) and not has_record(config.run_dir, step, f"{self._evaluation}/"):
            self._evaluate(state, step, writer)
        while step < config.training.steps:
            check_stop = functools.partial(self._check_stop, state, step)
            check_stop()
            timer = PhaseTimer()
            with timer.phase("push"):
                pushed = self._push(state, step)
            rollout = self._roll_out(state, step, timer, check_stop)
            measures = measures_tolerance(config.algorithm, jax.device_get(state.dual))
            floor = self._noise_floor(rollout) if step == 0 or measures else {}
            with timer.phase("pack"):
                batch, packed = self._pack(rollout, floor, state, step)
            check_stop()
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
            writer.write(step, metrics)
            self._write_samples(step, writer, rollout, completions)
            self._check_skipped(metrics)
            due = self._evaluation_is_due(step)
            if due or step == config.training.steps or step % config.checkpoint.every_steps == 0:
                self._save(state, step)
            if due:
                self._evaluate(state, step, writer)

    def _check_stop(self, state: TrainState, step: int) -> None:
        """Saves the state and leaves if a signal came."""
        if self.stop.received is not None:
            self._save(state, step)
            self.stop.check(f"after step {step}, saved")

    def _push(self, state: TrainState, step: int) -> dict[str, float]:
        """Pushes the policy of a step unless the engine holds it already; what was measured when it was pushed."""
        if self._pushed is None or self._pushed[0] != step:
            self._pushed = step, self.engine.push_weights(state.params, step)
        return self._pushed[1]

    def _evaluation_is_due(self, step: int) -> bool:
        """Whether to evaluate: before the first step, every N steps, and after the last."""
        every = self.config.evaluation.every_steps
        return every > 0 and (step % every == 0 or step == self.config.training.steps)

    def _roll_out(self, state: TrainState, step: int, timer: PhaseTimer, check_stop: Callable[[], None]) -> StepRollout:
        """Completions and rewards of a step. A reward function that fails may end the run: then its state is saved."""
        try:
            return self.rollouts.sample(step, self._prompts_taken, timer, check_stop)
        except RewardError as error:
            self._save(state, step)
            raise UserError(
                f"config.rewards.functions: {error}; saved after step {step}: mend the function and run the same "
                "command again, or go on without its values by rewards.on_error=none (time limit: rewards.timeout)"
            ) from error

    def _noise_floor(self, rollout: StepRollout) -> dict[str, float]:
        """The engine against itself in another batch shape, on the first completions: no budget below it can be met."""
        usable = [rollout.episodes[i] for i in np.flatnonzero(~rollout.dropped)[:_NOISE_FLOOR_COMPLETIONS]]
        try:
            scored = self.engine.score(
                [episode.prompt_ids for episode in usable],
                [episode.completion_ids for episode in usable],
                temperature=self.plan.sampling.temperature,
            )
        except EngineError as error:
            # A diagnostic does not end a run that is set to go on without what is broken.
            if self.config.rollout.on_non_finite != "drop":
                raise
            logger.warning("no noise floor: %s", error)
            return {}
        masks = [episode.sampled_mask[episode.prompt_length :] for episode in usable]
        again = np.concatenate([values[mask] for values, mask in zip(scored, masks, strict=True)])
        sampled = np.concatenate([episode.rollout_logprobs[episode.sampled_mask] for episode in usable])
        algorithm = self.config.algorithm
        # Compiled as one: each operation alone would be a program of its own.
        measure = jax.jit(functools.partial(token_discrepancy, measure=algorithm.measure, sided=algorithm.sided))
        return {"mismatch/noise_floor": float(np.mean(measure(again, sampled)))}

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
        batch = jax.device_put(batch, self.parts.batch_shardings)
        metrics["rollout/padding_fraction"] = 1.0 - report.tokens / report.computed_tokens
        if self.parts.rescore is not None:
            batch, metrics["mismatch/sampler"] = self.parts.rescore(state.params, batch)
        return batch, metrics

    def _check_skipped(self, metrics: Mapping[str, np.ndarray]) -> None:
        limit = self.config.training.max_skipped_in_row
        if int(metrics["optimizer/skipped_in_row"]) >= limit:
            raise TrainingStopped(
                f"{limit} updates in a row had a gradient that is not finite (training.max_skipped_in_row); export a "
                "checkpoint (bin.convert export) and start from it (model.path) with a lower optimizer.learning_rate"
            )

    @property
    def _evaluation(self) -> str:
        """The evaluation's name in the metrics: "eval/aime24" for a file aime24.jsonl."""
        return f"eval/{source_name(self.config.evaluation.task)}"

    def _evaluate(self, state: TrainState, step: int, writer: MetricsWriter) -> None:
        """Scores the inference engine's policy on the held-out problems: avg@K, kept with its checkpoint.

        The policy is saved already. The record comes last: it says that nothing of the evaluation is left to do.
        """
        settings, held_out = self.config.evaluation, self.plan.held_out
        check_stop = functools.partial(self._check_stop, state, step)
        check_stop()
        self._push(state, step)
        sampling = dataclasses.replace(
            self.plan.sampling, group_size=settings.samples, temperature=settings.temperature
        )
        result = evaluate(
            self.engine,
            self.parts.verifier,
            self.plan.tokenizer,
            held_out.token_ids,
            [problem.answer for problem in held_out.problems],
            sampling,
            task=self._evaluation,
            seed=self.config.training.seed + _EVALUATION_SEED_OFFSET,
            check_stop=check_stop,
        )
        average = f"{result.task}/avg@{result.samples}"
        name = f"{average} {settings.task} temperature={settings.temperature:g}"
        self.checkpoints.add_score(step, PolicyScore(name, result.average))
        writer.write(step, {average: result.average, f"{result.task}/pass@{result.samples}": result.pass_at_k})

    def _save(self, state: TrainState, step: int) -> None:
        self.checkpoints.save(step, state, model=self.plan.model, prompts_taken=self._prompts_taken)

    def _write_samples(self, step: int, writer: MetricsWriter, rollout: StepRollout, discrepancy: np.ndarray) -> None:
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
    """Runs a plan to its end, from its newest checkpoint if the run directory has one.

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
        stack.enter_context(claimed(config))
        stack.enter_context(stop.listening())
        parts = build(plan, stack)
        trainer = Trainer(plan, parts, stop, show)
        state, resumed = trainer.start()
        release_freed_memory()
        step = int(state.step)
        if step > config.training.steps:
            raise UserError(
                f"config.training.steps: got {config.training.steps}, the run in {config.run_dir} has already done "
                f"{step}; raise it or choose another run_dir"
            )
        record_config(config)
        save_tokenizer(plan.tokenizer, Path(config.run_dir) / "tokenizer", plan.sampling.stop_token_ids)
        progress = stack.enter_context(Progress(config.training.steps, step))
        writer = stack.enter_context(
            MetricsWriter(
                config.run_dir,
                wandb_project=config.observe.wandb_project or None,
                resume_step=step if resumed else None,
                listener=progress.update,
            )
        )
        trainer.run(state, writer, resumed=resumed)
        parts.checkpoints.wait()
