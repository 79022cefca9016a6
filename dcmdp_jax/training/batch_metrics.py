"""Metrics of a training batch that are measured on the host: lengths, answers, staleness, time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np

from dcmdp_jax.activity import activity
from dcmdp_jax.data.episode import Episode
from dcmdp_jax.data.lengths import QUANTILES
from dcmdp_jax.process_memory import release_freed_memory
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.types import Batch

_SAID = {
    "push": "pushing the weights to the engine",
    "wait": "waiting for the sampler",
    "generate": "sampling",
    "verify": "scoring the completions",
    "noise_floor": "measuring the engine against itself",
    "pack": "packing tokens into rows",
    "step": "training",
}


_KEPT_BYTES = 2**30
"""Freed memory that the process keeps from one phase to the next."""


class PhaseTimer:
    """Seconds of each phase of a step, and when it was; on the console, what the step does.

    Args:
        first: the first step of this process, whose programs are compiled.
    """

    def __init__(self, *, first: bool = False) -> None:
        self._more = " (the first time it compiles)" if first else ""
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        """(phase, start, end) by `time.monotonic`."""
        self._began = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; blocks of one name add up."""
        began = time.monotonic()
        with activity(_SAID[name] + self._more):
            yield
        release_freed_memory(above=_KEPT_BYTES)
        ended = time.monotonic()
        self.spans.append((name, began, ended))
        self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + ended - began

    @property
    def starts(self) -> dict[str, float]:
        """Unix time at which each phase began first."""
        offset = time.time() - time.monotonic()
        return {name: began + offset for name, began, _ in reversed(self.spans)}

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """The phases, the total, and tokens per second."""
        total = time.monotonic() - self._began
        sampled = sum(episode.num_sampled for episode in episodes)
        tokens = sum(len(episode.token_ids) for episode in episodes)
        return self.seconds | {
            "time/total": total,
            "throughput/tokens_per_second": tokens / total,
            "throughput/sampled_tokens_per_second": sampled / self.seconds["time/generate"],
        }


def rollout_metrics(episodes: Sequence[Episode], grades: Grades | None) -> dict[str, float]:
    """Lengths, truncations, and what the verifier could not read if it was asked, by the names of metric_names.py."""
    lengths = [episode.num_sampled for episode in episodes]
    judged = {} if grades is None else {
        "reward/verifier_timeouts": grades.timeouts,
        "reward/verifier_errors": grades.errors,
        "reward/verifier_over_budget": grades.over_budget,
        "reward/no_answer_fraction": grades.unparsed / max(1, grades.rewards.size),
    }  # fmt: skip
    return judged | {
        "completion/length_mean": float(np.mean(lengths)),
        "completion/length_min": min(lengths),
        **{f"completion/length_p{p}": float(np.percentile(lengths, p)) for p in QUANTILES},
        "completion/length_max": max(lengths),
        "completion/truncated_fraction": float(np.mean([episode.finish_reason == "length" for episode in episodes])),
    }


def staleness_metrics(batch: Batch, policy_version: int) -> dict[str, float]:
    """Steps between the policy that is trained and those that sampled the batch's tokens; 0 in a synchronous run.

    Args:
        batch: packed, before it goes to the devices.
        policy_version: the training step of the parameters that the batch trains.
    """
    versions = [rows.columns["policy_versions"][rows.completion_mask] for rows in batch.rows]
    lag = policy_version - np.concatenate(versions)
    return {"rollout/staleness_mean": float(lag.mean()), "rollout/staleness_max": float(lag.max())}
