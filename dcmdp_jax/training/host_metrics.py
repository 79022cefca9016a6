"""Metrics that the host measures: times, throughput, lengths of completions, verifier failures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np

from dcmdp_jax.data.episode import Episode
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.types import Batch


class PhaseTimer:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; blocks of one name add up."""
        began = time.monotonic()
        yield
        self.seconds[f"time/{name}"] = self.seconds.get(f"time/{name}", 0.0) + time.monotonic() - began

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
        "reward/no_answer_fraction": grades.unparsed / len(lengths),
    }  # fmt: skip
    return judged | {
        "completion/length_mean": float(np.mean(lengths)),
        "completion/length_min": min(lengths),
        "completion/length_max": max(lengths),
        "completion/truncated_fraction": float(np.mean([episode.finish_reason == "length" for episode in episodes])),
    }


def staleness_metrics(batch: Batch, policy_version: int) -> dict[str, float]:
    """Steps between the policy that is trained and those that sampled the batch's tokens; 0 in a synchronous run.

    Args:
        batch: packed, before it goes to the devices.
        policy_version: the training step of the parameters that the batch trains.
    """
    lag = np.concatenate([policy_version - rows.policy_versions[rows.completion_mask] for rows in batch.rows])
    return {"rollout/staleness_mean": float(lag.mean()), "rollout/staleness_max": float(lag.max())}
