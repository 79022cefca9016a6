"""Sampling that runs ahead of training: the batches in flight, and the parameters they were sampled with.

With a lag of k, step m trains on what the weights of step max(0, m - k) sampled: which weights never depends on how
fast anything is, so a resumed run has the bits of an undisturbed one. The engine is asked in a thread of its own, one
batch after the other; weights are pushed between batches.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.data.episode import Episode
from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.training.batch_metrics import PhaseTimer
from dcmdp_jax.training.step_rollout import Share, StepRollout
from dcmdp_jax.types import Batch, Params, Rows


@dataclasses.dataclass
class Sampled:
    """The batch of a step, ready to be trained on.

    Attributes:
        rollout: what was sampled.
        floor: the noise floor's metric, where it was measured.
        batch: on the devices.
        rows: its rows on the host.
        metrics: of the packing.
        timer: of the sampler's work.
    """

    rollout: StepRollout
    floor: dict[str, float]
    batch: Batch
    rows: tuple[Rows, ...]
    metrics: dict[str, Any]
    timer: PhaseTimer

    @property
    def problems(self) -> np.ndarray:
        """Places of the problems that it took from their stream."""
        return self.rollout.problems


@dataclasses.dataclass(frozen=True)
class Begun:
    """What one of several hosts sampled for a step, before the hosts exchange it.

    Attributes:
        share: this host's part.
        floor, timer: as in `Sampled`.
    """

    share: Share
    floor: dict[str, float]
    timer: PhaseTimer

    @property
    def problems(self) -> np.ndarray:
        """Places of the problems that the step takes from their stream, of all hosts."""
        return self.share.problems


def version_of(step: int, lag: int) -> int:
    """The step whose weights sample the batch of `step`."""
    return max(0, step - lag)


def versions_in_flight(step: int, lag: int) -> range:
    """Versions older than the policy that the batches of `step` and later are sampled with, once `step` are done."""
    return range(version_of(step, lag), step)


def check_versions(episodes: list[Episode], version: int) -> None:
    """Refuse tokens of other weights than those that were pushed for them.

    Raises:
        EngineError: naming both versions.
    """
    for row, episode in enumerate(episodes):
        found = episode.policy_versions[episode.sampled_mask]
        if (found != version).any():
            other = int(found[found != version][0])
            raise EngineError(
                f"completion {row} has tokens of version {other}, version {version} was pushed for them; with "
                "rollout.lag the weights of each step are those that were announced"
            )


_T = TypeVar("_T", Sampled, Begun)


class SamplingAhead(Generic[_T]):
    """Makes batches in order, beside training where the engine can.

    Args:
        lag: steps that sampling runs ahead, at least 1.
        steps: of the run; no batch is made beyond.
        make: (step, first) -> batch of a step, whose prompts begin at position `first` of their stream. It stops early,
            with an error, where `closing` is set.
        taken: position in the stream of prompts where the first batch begins.
        beside: whether `make` runs in a thread; else `start` returns when it is done.
    """

    def __init__(self, lag: int, steps: int, make: Callable[[int, int], _T], *, taken: int, beside: bool) -> None:
        self._lag, self._steps, self._make, self._taken = lag, steps, make, taken
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sampling") if beside else None
        self._batches: dict[int, Future[_T]] = {}
        self.beside = beside
        self.closing = threading.Event()
        """Set: what is being sampled is given up."""

    def start(self, step: int) -> None:
        """Start the batch of a step after those that are in flight; the engine must hold the weights for it."""
        future: Future[_T] = Future()
        self._batches[step] = future
        if self._pool is None:
            self._run(step, future)
        else:
            self._pool.submit(self._run, step, future)

    def start_all(self, version: int, step: int) -> None:
        """Start the batches of a version, those of `step` and later."""
        last = min(version + self._lag, self._steps - 1)
        for each in range(step, last + 1):
            if version_of(each, self._lag) == version:
                self.start(each)

    def _run(self, step: int, future: Future[_T]) -> None:
        try:
            made = self._make(step, self._taken)
            self._taken += len(made.problems)
            future.set_result(made)
        except BaseException as error:
            # The later batches begin where this one ends.
            self.closing.set()
            future.set_exception(error)

    def settle(self) -> None:
        """Return when nothing is being sampled; it raises what went wrong first."""
        for future in list(self._batches.values()):
            future.result()

    def take(self, step: int) -> _T:
        """Wait for the batch of a step and remove it from those in flight; raises what went wrong."""
        made = self._batches[step].result()
        del self._batches[step]
        return made

    def close(self) -> None:
        """Give up what is being sampled and end the thread."""
        self.closing.set()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class KeptParams:
    """Parameters of older versions, for as long as batches of theirs are in flight.

    In the parameters' own dtype: a push of a copy in another one would not give the engine the same weights.

    Args:
        shardings: of the parameters.
        kept: of a checkpoint.
    """

    def __init__(self, shardings: Any, kept: Mapping[int, Params]) -> None:
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)
        self._kept = dict(kept)

    def keep(self, version: int, params: Params) -> None:
        """Keep a copy, before the step takes the parameters' memory."""
        self._kept[version] = self._copy(params)

    def get(self, version: int) -> Params:
        """Parameters of a version on the training devices."""
        return self._kept[version]

    def drop_before(self, version: int) -> None:
        """Forget the older ones."""
        self._kept = {each: params for each, params in self._kept.items() if each >= version}

    def of(self, versions: range) -> dict[int, Params]:
        """Return the kept parameters of the given policy versions.

        Raises:
            KeyError: if one is not there.
        """
        return {version: self._kept[version] for version in versions}
