"""Metrics that the host measures: times, throughput, lengths of completions, verifier failures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np

from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.types import Rollout


class PhaseTimer:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block."""
        began = time.monotonic()
        yield
        self.seconds[f"time/{name}"] = time.monotonic() - began

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        """The phases, the total, and tokens per second."""
        total = time.monotonic() - self._began
        sampled = sum(len(ids) for ids in rollout.completion_ids)
        tokens = sampled + sum(len(ids) for ids in rollout.prompt_ids)
        return self.seconds | {
            "time/total": total,
            "throughput/tokens_per_second": tokens / total,
            "throughput/sampled_tokens_per_second": sampled / self.seconds["time/generate"],
        }


def rollout_metrics(rollout: Rollout, grades: Grades | None) -> dict[str, float]:
    """Lengths, truncations and, with the math reward, the verifier's failures; named as in observe/metric_names.py."""
    lengths = [len(ids) for ids in rollout.completion_ids]
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
        "completion/truncated_fraction": float(np.mean([reason == "length" for reason in rollout.finish_reasons])),
    }
