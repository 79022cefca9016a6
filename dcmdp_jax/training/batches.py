"""The batch of each step: push weights, sample, verify, exchange, pack, score; with a lag, of
earlier weights.

With a lag of k, step m trains on what the weights of step max(0, m - k) sampled: which weights
never depends on how fast anything is, so a resumed run has the bits of an undisturbed one. An
engine with a process of its own samples in a thread, one batch after the other, while the main
thread trains; weights are pushed between batches.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.algorithm import discrepancy, dual
from dcmdp_jax.config.checks import PACKING, SUPERVISED_PACKING, in_settings
from dcmdp_jax.data import episode, lengths, prompts
from dcmdp_jax.data.packing import pack, staleness_metrics
from dcmdp_jax.engines.noise_floor import NOISE_FLOOR_STEPS, noise_floor
from dcmdp_jax.engines.protocol import check_versions
from dcmdp_jax.parallel.sharding import to_global
from dcmdp_jax.rewards.scoring import BatchScores
from dcmdp_jax.run.placement import Placement
from dcmdp_jax.run.services import Services
from dcmdp_jax.run.task import Task
from dcmdp_jax.training import build, loss_terms, rescore, stopping
from dcmdp_jax.training.phase_timer import PhaseTimer
from dcmdp_jax.training.rollout_sampler import StepRollout, StepRollouts
from dcmdp_jax.training.state import batch_shardings
from dcmdp_jax.types import Batch, Params, Rows, TrainState

logger = logging.getLogger(__name__)

# Share of padding in a step that people are told of, once.
_MUCH_PADDING = 0.3


class Sampled(NamedTuple):
    """A step's samples; with several hosts and a lag, this host's share only.

    Attributes:
        rollout: completions and rewards.
        floor: the noise floor of this host's engine, where it was measured; `scored`, the scores it
            rests on.
        timer: the phases of sampling.
    """

    rollout: StepRollout
    floor: float | None
    scored: dict[int, np.ndarray]
    timer: PhaseTimer


class StepBatch(NamedTuple):
    """The batch of a step, ready to be trained on.

    Attributes:
        rollout: completions and rewards of all hosts.
        batch: on the devices.
        rows: the rows on the host.
        metrics: metrics of sampling and packing.
        scored: number of a completion -> its log-probs in one pass of the engine, see
            `noise_floor`.
    """

    rollout: StepRollout
    batch: Batch
    rows: tuple[Rows, ...]
    metrics: dict[str, Any]
    scored: dict[int, np.ndarray]


class Batches:
    """Makes batches in the order of their steps.

    Args:
        services: engine, scorer and turns.
        placement: hosts, devices and shapes of a batch.
        task: the problems, and how they are sampled.
        programs: the step's programs.
        behind: older versions of the parameters by their steps, as restored.
        leave: ends the work of this process with that of the others.
        taken: positions of the stream of prompts that the finished steps have taken.
        frozen: the base of the adapters, if what is trained are adapters.
        teacher: result of `make_teacher`; None without a teacher in the trainer.
        compiled: collective, waits for the programs that are being compiled.
    """

    def __init__(
        self,
        services: Services,
        placement: Placement,
        task: Task,
        programs: build.StepPrograms,
        behind: Mapping[int, Params],
        leave: stopping.CollectiveExit,
        *,
        taken: int,
        frozen: Params | None = None,
        teacher: Callable[[Batch], Batch] | None = None,
        compiled: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = services.engine
        self._placement = placement
        self._task = task
        self._programs = programs
        self._config = task.config
        self._hosts = placement.hosts
        self._exit = leave
        self._frozen = frozen
        self._lag = task.config.rollout.lag
        self._next = 0
        self._position = taken
        self._thread = (
            stopping.ThreadExit(leave) if self._lag and placement.samples_while_training else None
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sampling") if self._thread else None
        # The sampler's thread calls nothing collective: what it leaves is exchanged by the
        # trainer's.
        self._exchanges = self._thread is not None and self._hosts.count > 1
        own = self._thread or leave
        self._rollouts = StepRollouts(
            services, task, self._hosts, own, collective=not self._exchanges
        )
        # Compiled as one: each operation alone would be a program of its own.
        self._discrepancy = jax.jit(
            functools.partial(
                discrepancy.token_discrepancy, **loss_terms.measure_of(task.config.algorithm)
            )
        )
        self._teacher = teacher or (lambda batch: batch)
        self._compiled = compiled
        self._in_flight: dict[int, Future[Sampled]] = {}
        # In the parameters' own dtype: a push of a copy in another one would not give the engine
        # the same weights.
        self._copy = jax.jit(
            lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=programs.shardings.params
        )
        self._kept = dict(behind)
        self._pushed: tuple[int, dict[str, float]] | None = None
        self._sampled_until: float | None = None
        self._padding_told = False

    def close(self) -> None:
        """Give up what is being sampled."""
        if self._thread:
            self._thread.cancelled.set()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def resume(self, step: int) -> None:
        """Begin after `step` finished steps: sample again what was in flight, each batch by the
        weights it had.
        """
        self._next = step
        for version in self.behind(step) if step < self._config.training.steps else ():
            self.push(self._kept[version], version, timer := PhaseTimer())
            self._start(version, timer)

    def behind(self, step: int) -> dict[int, Params]:
        """Parameters of the older versions that batches in flight after `step` steps were sampled
        by.
        """
        return {version: self._kept[version] for version in range(max(0, step - self._lag), step)}

    def push(self, params: Params, step: int, timer: PhaseTimer) -> dict[str, float]:
        """Push the policy of a step, once nothing is being sampled, unless the engine holds it
        already.

        Returns:
            What was measured when it was pushed.
        """
        with self._waiting(timer):
            for future in self._in_flight.values():
                future.result()
        with timer.phase("push"):
            if self._pushed is None or self._pushed[0] != step:
                whole, merge = self._programs.merged(params, self._frozen)
                measured = self._engine.push_weights(whole, step) | jax.device_get(merge)
                largest = self._hosts.largest(*measured.values())
                self._pushed = step, dict(zip(measured, largest, strict=True))
        return self._pushed[1]

    def make(self, state: TrainState, step: int, timer: PhaseTimer) -> StepBatch:
        """The batch of a step. The engine holds the policy of `state`, which samples the batch of
        `step + lag`.

        Args:
            state: after `step` steps.
            step: number of the step that begins, from 0.
            timer: the step's timer.
        """
        self._start(step, timer)
        with self._waiting(timer):
            rollout, floor, scored, sampler = self._in_flight.pop(step).result()
        timer.seconds |= sampler.seconds
        with timer.phase("pack"):
            if self._exchanges:
                rollout = self._rollouts.exchange(rollout)
            batch, rows, metrics = self._pack(rollout, step)
        if step in NOISE_FLOOR_STEPS:
            # c must be moved by the same number on all hosts.
            [floor] = self._hosts.largest(-1.0 if floor is None else floor)
            if floor >= 0:
                metrics["mismatch/noise_floor"] = floor
        if self._lag:
            (began, _), (_, ended) = sampler.spans[0], sampler.spans[-1]
            metrics["time/engine_idle"] = max(0.0, began - (self._sampled_until or began))
            self._sampled_until = ended
        version = max(0, step - self._lag)
        with timer.phase("step"):
            batch = self._score(
                state.params if version == step else self._kept[version], batch, metrics
            )
        if self._lag:
            self._keep(state.params, step)
        return StepBatch(rollout, batch, rows, metrics, scored)

    @contextlib.contextmanager
    def _waiting(self, timer: PhaseTimer) -> Iterator[None]:
        """Wait for the sampler; if it fails on any host, raise on all."""
        with self._exit.scope(), timer.phase("wait") if self._lag else contextlib.nullcontext():
            yield
            self._exit.check()

    def _start(self, version: int, timer: PhaseTimer) -> None:
        """Sample every batch assigned to policy `version`: in the sampler thread, or here."""
        while self._next <= min(version + self._lag, self._config.training.steps - 1):
            arguments = self._next, version, PhaseTimer(first=timer.first)
            if self._pool is None:
                future: Future[Sampled] = Future()
                future.set_result(self._sample(*arguments))
            else:
                future = self._pool.submit(self._sample, *arguments)
            self._in_flight[self._next] = future
            self._next += 1
        if self._pool is None and self._engine:
            # Before the step, whose peak they would add to; the next push brings new ones in any
            # case.
            self._engine.release_weights()

    def _sample(self, step: int, version: int, timer: PhaseTimer) -> Sampled:
        """Sample and verify the batch of a step, which begins in the stream where the one before
        ends.
        """
        try:
            rollout = self._rollouts.sample(step, self._position, timer)
            self._position += rollout.taken
            if self._lag:
                check_versions(rollout.episodes, version)
            first = self._hosts.share(rollout.batch_groups).start if self._exchanges else 0
            config = self._config
            sampling = self._task.sampling
            numbers = {
                "seed": config.training.seed,
                "step": step,
                "first": first * sampling.group_size,
            }
            with timer.phase("noise_floor"):
                given = self._engine, rollout.episodes, sampling, self._distance
                measured = noise_floor(
                    *given, **numbers, drop=config.rollout.on_non_finite == "drop"
                )
            return Sampled(rollout, *measured, timer)
        except BaseException:
            if self._thread:
                self._thread.cancelled.set()
            raise

    def _distance(self, again: np.ndarray, sampled: np.ndarray) -> float:
        """The discrepancy of log-probs, by the statistic that c bounds."""
        values = self._discrepancy(again, sampled)
        share = dual.QUANTILES.get(self._config.algorithm.budget)
        return float(np.mean(values) if share is None else np.quantile(values, share))

    def _pack(
        self, rollout: StepRollout, step: int
    ) -> tuple[Batch, tuple[Rows, ...], dict[str, Any]]:
        """The batch on the devices, its rows on the host, and metrics."""
        config = self._config
        packing = self._placement.packing
        chosen = rollout.rows
        batch, (tokens, computed) = pack(
            [rollout.episodes[row] for row in chosen],
            rollout.scores.totals[chosen],
            packing,
            mask_truncated=config.algorithm.mask_truncated,
            dropped=rollout.dropped[chosen],
        )
        padding = 1.0 - tokens / computed
        metrics = {
            "rollout/dropped_completions": int(rollout.dropped.sum()),
            "rollout/padding_fraction": padding,
        }
        metrics |= staleness_metrics(batch, step)
        if padding > _MUCH_PADDING and not self._padding_told:
            self._padding_told = True
            training = config.training
            advice = lengths.padding_advice(
                packing, chosen=not training.row_lengths, limited=training.segments_per_row > 0
            )
            advice = in_settings(advice, SUPERVISED_PACKING if config.supervised else PACKING)
            logger.warning(
                "step %d: %.0f%% of what is computed is padding; %s",
                step + 1,
                100 * padding,
                advice,
            )
        on_devices = to_global(batch, batch_shardings(self._placement.mesh))
        return on_devices, batch.rows, metrics

    def _score(self, params: Params, batch: Batch, metrics: dict[str, Any]) -> Batch:
        """Add what the training stack gives the batch under the weights that sampled it, where that
        is needed.
        """
        self._compiled()
        params = self._programs.policy(params, self._frozen)
        batch = self._teacher(batch)
        if self._programs.rescore is not None:
            batch, metrics["mismatch/sampler"] = self._programs.rescore(params, batch)
        return self._programs.old_logprobs(params, batch) if self._lag else batch

    def _keep(self, params: Params, step: int) -> None:
        """Copy this step's parameters; drop copies no in-flight batch needs."""
        oldest = max(0, step + 1 - self._lag)
        self._kept = {version: kept for version, kept in self._kept.items() if version >= oldest}
        self._kept[step] = self._copy(params)


class ConversationBatches(Batches):
    """The batches of a supervised run: the conversations of the data, in place of what an engine
    samples.
    """

    def push(self, params: Params, step: int, timer: PhaseTimer) -> dict[str, float]:
        """No engine gets the policy."""
        return {}

    def _sample(self, step: int, version: int, timer: PhaseTimer) -> Sampled:
        """The next conversations of the stream."""
        count = self._config.training.prompts_per_step
        seed = self._config.training.seed
        chosen = self._task.stream.at(seed=seed, first=step * count, count=count)
        return Sampled(self._conversations(self._task.train, chosen), None, {}, timer)

    def loss(self, params: Params, held: prompts.EncodedPrompts) -> float:
        """The mean negative log-likelihood of all targets, in nats."""
        self._compiled()
        params = self._programs.policy(params, self._frozen)
        total = 0.0
        size = self._config.training.prompts_per_step
        count = len(held.token_ids)
        for first in range(0, count, size):
            batch, *_ = self._pack(
                self._conversations(held, np.arange(first, min(first + size, count))), 0
            )
            for rows in self._programs.old_logprobs(params, batch).rows:
                total -= float(jnp.sum(rows.columns[rescore.OLD_LOGPROBS]))
        return total / sum(int(targets.sum()) for targets in held.targets)

    def _conversations(self, given: prompts.EncodedPrompts, chosen: np.ndarray) -> StepRollout:
        """Conversations as completions; what is missing to a whole step is dropped."""
        with self._exit.scope():
            self._exit.check()
        count = self._config.training.prompts_per_step
        episodes = []
        for place, number in enumerate(np.resize(chosen, count)):
            targets = given.targets[number]
            columns = {
                name: np.zeros(len(targets), episode.COLUMNS[name].dtype)
                for name in self._placement.columns
            }
            episodes.append(
                episode.Episode(given.token_ids[number], targets, place, 0, "stop", columns)
            )
        scores = BatchScores(np.zeros(count, np.float32), {}, {}, None)
        dropped = np.arange(count) >= len(chosen)
        return StepRollout(
            np.resize(chosen, count), episodes, [], scores, dropped, count, taken=count
        )
