"""The batch of each step: weights to the engine, completions and rewards, rows on the devices; with a lag, ahead."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dcmdp_jax.config.arguments import PACKING, in_settings
from dcmdp_jax.data.lengths import padding_advice
from dcmdp_jax.data.packing import pack
from dcmdp_jax.observe.metric_names import STEP_PHASES
from dcmdp_jax.parallel.sharding import to_global
from dcmdp_jax.run.run import Run
from dcmdp_jax.training.ahead import (
    Begun,
    KeptParams,
    Sampled,
    SamplingAhead,
    check_versions,
    version_of,
    versions_in_flight,
)
from dcmdp_jax.training.batch_metrics import PhaseTimer, staleness_metrics
from dcmdp_jax.training.build import StepPrograms
from dcmdp_jax.training.state import batch_shardings
from dcmdp_jax.training.step_rollout import NoiseFloor, Share, StepRollout, StepRollouts
from dcmdp_jax.training.stopping import Leaving
from dcmdp_jax.types import Batch, Params, Rows, TrainState

logger = logging.getLogger(__name__)

# Share of padding in a step that people are told of, once.
_MUCH_PADDING = 0.3


class Batches:
    """Makes batches in the order of their steps.

    Args:
        plan: the checked run.
        programs: of the step.
        behind: older versions of the parameters by their steps, as restored.
        alone: a block of work that each process does by itself and all leave together.
        check_stop: raises `Leaving` within such a block when the run is to end.
        taken: positions of the stream of prompts that the finished steps have taken.
    """

    def __init__(
        self,
        plan: Run,
        programs: StepPrograms,
        behind: Mapping[int, Params],
        *,
        alone: Callable[[], contextlib.AbstractContextManager[None]],
        check_stop: Callable[[], None],
        taken: int,
    ) -> None:
        self._plan, self._programs, self._config = plan, programs, plan.config
        self._alone, self._check_stop = alone, check_stop
        self._rollouts = StepRollouts(plan, plan.engine, plan.scorer, plan.turns)
        self._noise_floor = NoiseFloor(plan, plan.engine)
        self._pushed: tuple[int, dict[str, float]] | None = None
        self._sampled_until: float | None = None
        self._padding_told = False
        self._lag = plan.config.rollout.lag
        self._ahead, self._kept = None, None
        beside = plan.samples_beside
        # The sampler's thread does not meet other hosts: what it leaves is exchanged by the trainer's.
        self._exchanges = beside and plan.hosts.count > 1
        if self._lag:
            self._kept = KeptParams(programs.shardings.params, behind)
            self._ahead = SamplingAhead(
                self._lag, self._config.training.steps, self._make_ahead, taken=taken, beside=beside
            )

    def close(self) -> None:
        """Give up what is being sampled."""
        if self._ahead is not None:
            self._ahead.close()

    def settle(self) -> None:
        """Return when nothing is being sampled; it raises what went wrong."""
        if self._ahead is not None:
            self._ahead.settle()

    def settle_for_push(self, timer: PhaseTimer) -> None:
        """Wait for in-flight sampling before a push; the wait is a phase of the step."""
        if self._ahead is not None:
            with timer.phase("wait"):
                self._ahead.settle()

    def push(self, params: Params, step: int) -> dict[str, float]:
        """Push the policy of a step unless the engine holds it already; return what was measured when it was pushed."""
        if self._pushed is None or self._pushed[0] != step:
            measured = self._plan.engine.push_weights(params, step)
            self._pushed = step, dict(zip(measured, self._plan.hosts.largest(*measured.values()), strict=True))
        return self._pushed[1]

    def behind(self, step: int) -> dict[int, Params]:
        """Parameters of the older versions that a run resumed after `step` samples with."""
        return self._kept.of(versions_in_flight(step, self._lag)) if self._lag else {}

    def make(self, state: TrainState, step: int, first: int, timer: PhaseTimer) -> Sampled:
        """The batch of a step. The engine holds the policy of `state`.

        Args:
            state: after `step` steps.
            step: that begins, from 0.
            first: position of its first prompt in their stream.
            timer: of the step.
        """
        return self._ahead_of(state, step, timer) if self._lag else self._now(state, step, first, timer)

    def _now(self, state: TrainState, step: int, first: int, timer: PhaseTimer) -> Sampled:
        """The batch of a step, sampled by the policy that it trains."""
        rollout = self._rollouts.sample(step, first, timer, self._alone, self._check_stop)
        measures = step < self._config.algorithm.measured_steps
        with timer.phase("noise_floor"):
            floor = self._agreed(self._noise_floor.metrics(rollout.episodes, step, wanted=measures))
        # Before the step, whose peak they would add to; the next push brings new ones in any case.
        self._plan.engine.release_weights()
        with timer.phase("pack"):
            sampled = Sampled(rollout, floor, *self._pack(rollout, step), timer)
            self._recompute(state.params, sampled)
        return sampled

    def _ahead_of(self, state: TrainState, step: int, timer: PhaseTimer) -> Sampled:
        """The batch of a step, sampled by earlier weights; those of this step begin to sample a later one."""
        kept, version = self._kept, version_of(step, self._lag)
        with timer.phase("wait"), self._beside():
            self._ahead.start_all(step, step)
            taken = self._ahead.take(step)
        sampled = self._exchanged(taken, step, timer) if isinstance(taken, Begun) else taken
        if not self._ahead.beside:
            self._plan.engine.release_weights()
        with timer.phase("step"):
            self._recompute(state.params if version == step else kept.get(version), sampled)
        kept.drop_before(version_of(step + 1, self._lag))
        kept.keep(step, state.params)
        return sampled

    def sample_in_flight(self, step: int) -> None:
        """Sample the batches again that were in flight when the state was saved, each with the weights it had."""
        if not self._lag or step >= self._config.training.steps:
            return
        for version in versions_in_flight(step, self._lag):
            params = self._kept.get(version)
            self.push(params, version)
            with self._beside():
                self._ahead.start_all(version, step)
                self._ahead.settle()
            if not self._ahead.beside:
                self._plan.engine.release_weights()

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """The sampler's work: alone where it has a thread, else in turn with other hosts, which it meets itself."""
        if not self._ahead.beside:
            yield
            self._ahead.settle()
            return
        with self._alone():
            yield
            self._check_stop()

    def _make_ahead(self, step: int, first: int) -> Sampled | Begun:
        """The batch of a step, in the sampler's thread where it has one; the engine has the weights for it."""
        alone = contextlib.nullcontext if self._ahead.beside else self._alone

        def check_stop() -> None:
            if self._ahead.closing.is_set():
                raise Leaving
            self._check_stop()

        if self._ahead.closing.is_set():
            raise Leaving
        with alone():
            self._check_stop()
        timer = PhaseTimer()
        sample = self._rollouts.sample_share if self._exchanges else self._rollouts.sample
        found = sample(step, first, timer, alone, check_stop)
        check_versions(found.episodes, version_of(step, self._lag))
        measures = step < self._config.algorithm.measured_steps
        before = found.start * self._plan.sampling.group_size if isinstance(found, Share) else 0
        with timer.phase("noise_floor"):
            floor = self._noise_floor.metrics(found.episodes, step, wanted=measures, first=before)
        if isinstance(found, Share):
            return Begun(found, floor, timer)
        floor = self._agreed(floor)
        with timer.phase("pack"):
            return Sampled(found, floor, *self._pack(found, step), timer)

    def _exchanged(self, begun: Begun, step: int, timer: PhaseTimer) -> Sampled:
        """Collective: the batch of all hosts."""
        with timer.phase("pack"):
            rollout, floor = self._rollouts.exchanged(begun.share), self._agreed(begun.floor)
            return Sampled(rollout, floor, *self._pack(rollout, step), begun.timer)

    def _agreed(self, floor: Mapping[str, float]) -> dict[str, float]:
        """Collective: the largest noise floor of all hosts' engines, which measure it at the same steps."""
        [value] = self._plan.hosts.largest(floor.get("mismatch/noise_floor", -1.0))
        return {"mismatch/noise_floor": value} if value >= 0 else {}

    def _recompute(self, params: Params, sampled: Sampled) -> None:
        """Put into a batch what the training stack gives it under the weights that sampled it, where that is needed."""
        if self._programs.rescore is not None:
            sampled.batch, sampled.metrics["mismatch/sampler"] = self._programs.rescore(params, sampled.batch)
        if self._lag:
            sampled.batch = self._programs.old_logprobs(params, sampled.batch)

    def _pack(self, rollout: StepRollout, step: int) -> tuple[Batch, tuple[Rows, ...], dict[str, Any]]:
        """The batch on the devices, its rows on the host, and metrics."""
        batch, report = pack(
            [rollout.episodes[row] for row in rollout.rows],
            rollout.scores.totals[rollout.rows],
            self._plan.packing,
            mask_truncated=self._config.algorithm.mask_truncated,
            dropped=rollout.dropped[rollout.rows],
        )
        metrics: dict[str, Any] = {"rollout/dropped_completions": int(rollout.dropped.sum())}
        metrics |= staleness_metrics(batch, step)
        host_rows = batch.rows
        batch = to_global(batch, batch_shardings(self._plan.mesh, buckets=len(self._plan.packing.row_lengths)))
        padding = metrics["rollout/padding_fraction"] = 1.0 - report.tokens / report.computed_tokens
        if padding > _MUCH_PADDING and not self._padding_told:
            self._padding_told = True
            advice = padding_advice(
                self._plan.packing,
                longest=self._config.max_total_tokens,
                chosen=not self._config.training.row_lengths,
                limited=self._config.training.segments_per_row > 0,
            )
            advice = in_settings(advice, PACKING)
            logger.warning("step %d: %.0f%% of what is computed is padding; %s", step + 1, 100 * padding, advice)
        return batch, host_rows, metrics

    def times(self, sampled: Sampled, timer: PhaseTimer) -> dict[str, float]:
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
