"""The batch of each step: sync weights, sample, verify, exchange, pack, score; maybe with a lag.

With a lag of k, step m trains on what the weights of step max(0, m - k) sampled: which weights
never depends on how fast anything is, so a resumed run has the bits of an undisturbed one. An
engine with a process of its own samples in a thread, one batch after the other, while the main
thread trains; weights are synced between batches.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.algorithm import discrepancy, dual
from dcmdp_jax.config.checks import PACKING, in_settings
from dcmdp_jax.config.settings import TrainingSettings
from dcmdp_jax.data import lengths
from dcmdp_jax.data.episode import Episode
from dcmdp_jax.data.packing import pack, staleness_metrics
from dcmdp_jax.engines.noise_floor import NOISE_FLOOR_STEPS, noise_floor
from dcmdp_jax.engines.protocol import check_versions
from dcmdp_jax.parallel.sharding import batch_shardings, to_global
from dcmdp_jax.run.placement import Placement
from dcmdp_jax.run.services import Services
from dcmdp_jax.training import exit, objective
from dcmdp_jax.training.phase_timer import PhaseTimer
from dcmdp_jax.training.rollout_sampler import StepRollout, StepRollouts
from dcmdp_jax.training.training_session import TrainingSession
from dcmdp_jax.types import Batch, Params, Rows, TrainState

logger = logging.getLogger(__name__)

# Share of padding in a step that people are told of, once.
_MUCH_PADDING = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A batch, and what packing it took.

    Attributes:
        on_host: as NumPy arrays.
        on_devices: the same, sharded over the mesh.
        padding_fraction: padding among the tokens that are computed.
    """

    on_host: Batch
    on_devices: Batch
    padding_fraction: float


@dataclasses.dataclass(eq=False, kw_only=True)
class BatchPacker:
    """Packs batches, and warns of much padding once.

    Attributes:
        placement: devices and shapes of a batch.
        training: the settings of rows.
        setting_names: argument in `lengths.padding_advice` -> the setting to name.
        has_warned: whether it has.
    """

    placement: Placement
    training: TrainingSettings
    setting_names: Mapping[str, str]
    has_warned: bool = False

    def pack(
        self,
        episodes: Sequence[Episode],
        rewards: np.ndarray,
        *,
        step: int,
        dropped: np.ndarray,
        mask_truncated: bool = False,
    ) -> PackedBatch:
        """Pack the completions of a step, from 0, whose arguments are those of `packing.pack`."""
        batch, (tokens, computed) = pack(
            episodes,
            rewards,
            self.placement.packing,
            mask_truncated=mask_truncated,
            dropped=dropped,
        )
        padding = 1.0 - tokens / computed
        if padding > _MUCH_PADDING and not self.has_warned:
            self.has_warned = True
            advice = lengths.padding_advice(
                self.placement.packing,
                automatic=not self.training.row_lengths,
                limited=self.training.segments_per_row > 0,
            )
            logger.warning(
                "step %d: %.0f%% of what is computed is padding; %s",
                step + 1,
                100 * padding,
                in_settings(advice, self.setting_names),
            )

        return PackedBatch(
            on_host=batch,
            on_devices=to_global(batch, batch_shardings(self.placement.mesh)),
            padding_fraction=padding,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """A step's samples; with several hosts and a lag, this host's share only.

    Attributes:
        rollout: completions and rewards.
        timer: the phases of sampling.
        floor: the noise floor of this host's engine, where it was measured.
        scored: number of a completion -> its log-probs in one pass of the engine, on which it
            rests; see `noise_floor`.
    """

    rollout: StepRollout
    timer: PhaseTimer
    floor: float | None
    scored: dict[int, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBatch:
    """The batch of a step, ready to be trained on.

    Attributes:
        rollout: completions and rewards of all hosts.
        batch: on the devices.
        rows: the rows on the host.
        metrics: metrics of sampling and packing.
        scored: see `Sampled`; none where the engine's log-probs were replaced.
    """

    rollout: StepRollout
    batch: Batch
    rows: tuple[Rows, ...]
    metrics: dict[str, Any]
    scored: dict[int, np.ndarray]


@dataclasses.dataclass(eq=False)
class Batches:
    """Makes batches in the order of their steps.

    Attributes:
        session: the run, its programs and its frozen parameters, and when to leave.
        services: engine, scorer and turns.
        add_teacher: result of `make_teacher`.
    """

    session: TrainingSession
    services: Services
    add_teacher: Callable[[Batch], Batch] = lambda batch: batch

    def __post_init__(self) -> None:
        task = self.session.run.task
        placement = self.session.run.placement
        config = task.config
        self._sampling = task.sampling
        self._training = config.training
        self._algorithm = config.algorithm
        self._drops_non_finite = config.rollout.on_non_finite == "drop"
        self._lag = config.rollout.lag
        self._hosts = placement.hosts

        # What is sampled: the next step to start, its position in the stream, futures by step.
        self._next = 0
        self._position = 0
        self._in_flight: dict[int, Future[Sampled]] = {}
        self._sampled_until: float | None = None
        self._thread: exit.ThreadExit | None = None
        self._pool: ThreadPoolExecutor | None = None
        if self._lag and placement.samples_while_training:
            self._thread = exit.ThreadExit(self.session.exit)
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="sampling")
        # The sampler's thread calls nothing collective: the trainer's exchanges what it leaves.
        self._exchanges = self._thread is not None and self._hosts.count > 1
        self._rollouts = StepRollouts(
            services=self.services,
            task=task,
            hosts=self._hosts,
            leave=self._thread or self.session.exit,
            collective=not self._exchanges,
        )

        self._packer = BatchPacker(
            placement=placement,
            training=self._training,
            setting_names=PACKING,
        )

        # Parameters: those that the engine has, and copies that batches in flight need. In their
        # own dtype: a weight sync of a copy in another one would not give the engine the same
        # weights.
        self._synced: tuple[int, dict[str, float]] | None = None
        self._versions: dict[int, Params] = {}
        self._copy = jax.jit(
            lambda tree: jax.tree.map(jnp.copy, tree),
            out_shardings=self.session.programs.shardings.params,
        )
        # Compiled as one: each operation alone would be a program of its own.
        measure = objective.discrepancy_arguments(self._algorithm)
        self._discrepancy = jax.jit(functools.partial(discrepancy.token_discrepancy, **measure))

    def close(self) -> None:
        """Give up what is being sampled."""
        if self._thread:
            self._thread.cancelled.set()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def resume(
        self,
        step: int,
        prompts_taken: int = 0,
        versions: Mapping[int, Params] | None = None,
    ) -> None:
        """Begin after `step` finished steps: sample again what was in flight.

        Args:
            step: finished steps.
            prompts_taken: position in the stream of prompts where the next step begins.
            versions: older versions of the parameters by their steps, by which batches in flight
                were sampled.
        """
        self._next = step
        self._position = prompts_taken
        self._versions = dict(versions or {})
        if step >= self._training.steps:
            return
        for version in self.behind(step):
            timer = PhaseTimer()
            self.sync_weights(self._versions[version], version, timer)
            self._start(version, timer)

    def behind(self, step: int) -> dict[int, Params]:
        """The older parameters that sampled what is in flight after `step` steps, by version."""
        versions = range(max(0, step - self._lag), step)
        return {version: self._versions[version] for version in versions}

    def sync_weights(self, params: Params, step: int, timer: PhaseTimer) -> dict[str, float]:
        """Sync the policy of a step when nothing is being sampled, unless it is there already.

        Returns:
            What was measured when it was synced.
        """
        with self._waiting(timer):
            for future in self._in_flight.values():
                future.result()
        with timer.phase("weight_sync"):
            if self._synced is None or self._synced[0] != step:
                sync = self.session.programs.sync
                synced, merge_metrics = sync.merged(params, self.session.frozen)
                metrics = {
                    **self.services.engine.sync_weights(synced, step),
                    **jax.device_get(merge_metrics),
                }
                largest = self._hosts.largest(*metrics.values())
                self._synced = step, dict(zip(metrics, largest, strict=True))
        return self._synced[1]

    def make(self, state: TrainState, step: int, timer: PhaseTimer) -> StepBatch:
        """The batch of a step. With a lag the policy of `state` begins to sample step `step + lag`.

        Args:
            state: after `step` steps.
            step: number of the step that begins, from 0.
            timer: the step's timer.
        """
        self._start(step, timer)
        with self._waiting(timer):
            sampled = self._in_flight.pop(step).result()
        timer.seconds |= sampled.timer.seconds
        rollout = sampled.rollout
        with timer.phase("pack"):
            if self._exchanges:
                rollout = self._rollouts.exchange(rollout)
            packed, metrics = self._pack(rollout, step)
        if step in NOISE_FLOOR_STEPS:
            # The largest of the hosts', as c must move by the same number on all; -1 is no floor.
            own_floor = -1.0 if sampled.floor is None else sampled.floor
            [floor] = self._hosts.largest(own_floor)
            if floor >= 0:
                metrics["mismatch/noise_floor"] = floor
        if self._lag:
            metrics["time/engine_idle"] = self._idle_seconds(sampled.timer)

        version = max(0, step - self._lag)
        with timer.phase("step"):
            params = state.params if version == step else self._versions[version]
            batch = self._score(params, packed.on_devices, metrics)
        if self._lag:
            self._keep(state.params, step)
        # The engine's second log-probs say nothing about the batch's where `rescore` replaced these.
        scored_again = {}
        if self.session.programs.rescore is None:
            scored_again = sampled.scored
        return StepBatch(
            rollout=rollout,
            batch=batch,
            rows=packed.on_host.rows,
            metrics=metrics,
            scored=scored_again,
        )

    def _idle_seconds(self, sampling: PhaseTimer) -> float:
        """Seconds from the end of the batch before to the start of this one; 0 for the first."""
        start, _ = sampling.spans[0]
        _, end = sampling.spans[-1]
        idle = 0.0
        if self._sampled_until is not None:
            idle = max(0.0, start - self._sampled_until)
        self._sampled_until = end
        return idle

    @contextlib.contextmanager
    def _waiting(self, timer: PhaseTimer) -> Iterator[None]:
        """Wait for the sampler; if it fails on any host, raise on all."""
        phase = timer.phase("wait") if self._lag else contextlib.nullcontext()
        with self.session.exit.scope(), phase:
            yield
            self.session.exit.check()

    def _start(self, version: int, timer: PhaseTimer) -> None:
        """Sample every batch assigned to policy `version`: in the sampler thread, or here."""
        while self._next <= min(version + self._lag, self._training.steps - 1):
            sampling_timer = PhaseTimer(first=timer.first)
            if self._pool is None:
                future: Future[Sampled] = Future()
                future.set_result(self._sample(self._next, version, sampling_timer))
            else:
                future = self._pool.submit(self._sample, self._next, version, sampling_timer)
            self._in_flight[self._next] = future
            self._next += 1
        if self._pool is None:
            # Before the step, whose peak they would add to; the next weight sync brings new ones
            # anyway.
            self.services.engine.release_weights()

    def _sample(self, step: int, version: int, timer: PhaseTimer) -> Sampled:
        """Sample and verify the batch of a step, whose prompts follow those of the one before."""
        try:
            rollout = self._rollouts.sample(step, self._position, timer)
            self._position += rollout.prompts_taken
            if self._lag:
                check_versions(rollout.episodes, version)
            first_group = self._hosts.share(rollout.batch_groups).start if self._exchanges else 0
            sampling = self._sampling
            with timer.phase("noise_floor"):
                floor, scored = noise_floor(
                    self.services.engine,
                    rollout.episodes,
                    sampling,
                    self._distance,
                    seed=self._training.seed,
                    step=step,
                    first=first_group * sampling.group_size,
                    drop=self._drops_non_finite,
                )
            return Sampled(rollout=rollout, timer=timer, floor=floor, scored=scored)
        except BaseException:
            if self._thread:
                self._thread.cancelled.set()
            raise

    def _distance(self, again: np.ndarray, sampled: np.ndarray) -> float:
        """The discrepancy of log-probs, by the statistic that c bounds."""
        values = self._discrepancy(again, sampled)
        quantile = dual.QUANTILES.get(self._algorithm.budget)
        if quantile is None:
            return float(np.mean(values))
        return float(np.quantile(values, quantile))

    def _pack(self, rollout: StepRollout, step: int) -> tuple[PackedBatch, dict[str, Any]]:
        """The batch, and its metrics."""
        rows = rollout.rows
        packed = self._packer.pack(
            [rollout.episodes[row] for row in rows],
            rollout.scores.totals[rows],
            step=step,
            dropped=rollout.dropped[rows],
            mask_truncated=self._algorithm.mask_truncated,
        )
        return packed, {
            "rollout/dropped_completions": int(rollout.dropped.sum()),
            "rollout/padding_fraction": packed.padding_fraction,
            **staleness_metrics(packed.on_host, step),
        }

    def _score(self, params: Params, batch: Batch, metrics: dict[str, Any]) -> Batch:
        """Add log-probs of other passes: a teacher's, and those of the weights that sampled."""
        self.session.wait_until_compiled()
        programs = self.session.programs
        params = programs.setup.policy(params, self.session.frozen)
        batch = self.add_teacher(batch)
        if programs.rescore is not None:
            batch, metrics["mismatch/sampler"] = programs.rescore(params, batch)
        if self._lag:
            batch = programs.old_logprobs(params, batch)
        return batch

    def _keep(self, params: Params, step: int) -> None:
        """Copy this step's parameters; drop copies no in-flight batch needs."""
        for version in [*self._versions]:
            if version < step + 1 - self._lag:
                del self._versions[version]
        self._versions[step] = self._copy(params)
