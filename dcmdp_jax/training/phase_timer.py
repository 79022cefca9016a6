"""Seconds of a step's phases; on the console, what the step does."""

import contextlib
import time
from collections.abc import Iterator, Sequence

from dcmdp_jax.activity import activity
from dcmdp_jax.data.episode import Episode
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.observe.metric_names import STEP_PHASES

PHASES = {
    "weight_sync": ("time/weight_sync", "syncing the weights to the engine"),
    "wait": ("time/wait", "waiting for the sampler"),
    "generate": ("time/generate", "sampling"),
    "verify": ("time/verify", "scoring the completions"),
    "noise_floor": ("time/noise_floor", "measuring the engine against itself"),
    "pack": ("time/pack", "packing tokens into rows"),
    "step": ("time/step", "training"),
}
"""Phase of a step -> metric of its seconds, and its label on the console."""
KEPT_BYTES = 2**30
"""Freed memory that the process keeps in a checkpoint and an evaluation, and after compiling."""
_KEPT_BETWEEN_STEPS = 3 * 2**30
"""Freed memory that it keeps from one phase to the next in other steps, which need as much again:
to clear the pages of 2.3 GiB took 2 to 3 of the 15 processor seconds of a step of 135M parameters.
"""


class PhaseTimer:
    """Seconds of each phase of a step, and when it was; on the console, what the step does.

    Args:
        first: the first step of this process, whose programs are compiled.
    """

    def __init__(self, *, first: bool = False) -> None:
        self.first = first
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[float, float]] = []
        """(start, end) by `time.monotonic`."""
        self._began = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; blocks of one name add up."""
        metric, label = PHASES[name]
        if self.first:
            label += " (the first time it compiles)"
        began = time.monotonic()
        with activity(label):
            yield
        kept_bytes = KEPT_BYTES if self.first else _KEPT_BETWEEN_STEPS
        release_freed_memory(above=kept_bytes)
        ended = time.monotonic()
        self.spans.append((began, ended))
        self.seconds[metric] = self.seconds.get(metric, 0.0) + ended - began

    def metrics(self, episodes: Sequence[Episode], *, lags: bool) -> dict[str, float]:
        """The phases, the total, and tokens per second; with a lag also what overlap won."""
        total = time.monotonic() - self._began
        tokens = sum(len(episode.token_ids) for episode in episodes)
        metrics = self.seconds | {
            "time/total": total,
            "throughput/tokens_per_second": tokens / total,
        }
        if self.seconds.get("time/generate"):
            sampled = sum(episode.num_sampled for episode in episodes)
            metrics["throughput/sampled_tokens_per_second"] = (
                sampled / self.seconds["time/generate"]
            )
        if lags:
            seconds = sum(self.seconds[PHASES[phase][0]] for phase in STEP_PHASES)
            metrics["time/overlap"] = seconds - total
        return metrics
