"""Headline numbers of a run, and its warnings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from dcmdp_jax.number_format import number, percent
from dcmdp_jax.observe.alarms import alarms, spent
from dcmdp_jax.observe.metric_names import form_of_score
from dcmdp_jax.observe.metrics_io import Series

_TRUNCATED_LIMIT = 0.5
_ALL_EQUAL_LIMIT = 0.9
_STUCK_STEPS = 5


@dataclasses.dataclass(frozen=True)
class ScoreHistory:
    """One held-out score; `first` is the initial policy's if that was evaluated.

    Attributes:
        name: `<task>/avg@K` or `<task>/pass@K`.
        first: value at `first_step`; likewise `last` and `best` (ties: the earliest).
        form: writes a value, as a percentage or a number.
    """

    name: str
    first_step: int
    first: float
    last_step: int
    last: float
    best_step: int
    best: float
    form: Callable[[float], str]

    @property
    def gained(self) -> str:
        """Last minus first, of a share in percentage points."""
        gain = self.last - self.first
        return f"{100 * gain:+.1f} points" if self.form is percent else f"{gain:+.4g}"


@dataclasses.dataclass(frozen=True)
class Summary:
    """Headline numbers of a run; NaN if the run recorded no metric for them.

    Attributes:
        steps: the last training step; 0 when only evaluations were recorded.
        window: training steps averaged for "first" and "last": a tenth of the run, at least one.
        first_reward: mean reward over the first `window` steps; `last_reward` over the last.
        scores: held-out scores, avg@K before pass@K.
        mean_discrepancy: over all steps.
        tolerance: c of the last step.
        share_over_tolerance: steps whose mean discrepancy exceeds c, as a fraction of the steps with both.
        multiplier_low, multiplier_high: range of lambda.
        multiplier_rises, multiplier_falls: steps with lambda above, below that of the previous step.
        tokens_per_second: median over steps.
        seconds: sum of `time/total`.
    """

    steps: int
    window: int
    first_reward: float
    last_reward: float
    scores: tuple[ScoreHistory, ...]
    mean_discrepancy: float
    tolerance: float
    share_over_tolerance: float
    multiplier_low: float
    multiplier_high: float
    multiplier_rises: int
    multiplier_falls: int
    tokens_per_second: float
    seconds: float


def summarize(series: Series) -> Summary:
    """Compute the headline numbers of a run's metrics, ignoring values that are not finite."""
    reward_steps, _ = series.get("reward/mean", (np.zeros(0, np.int64), None))
    rewards, multiplier = _finite(series, "reward/mean"), _finite(series, "dual/multiplier")
    window = max(1, len(rewards) // 10)
    discrepancy, tolerance = _finite(series, "discrepancy/mean"), _finite(series, "dual/tolerance")
    moves = np.sign(np.diff(multiplier))
    return Summary(
        steps=int(reward_steps[-1]) if len(reward_steps) else 0,
        window=window,
        first_reward=_mean(rewards[:window]),
        last_reward=_mean(rewards[-window:]),
        scores=_scores(series),
        mean_discrepancy=_mean(discrepancy),
        tolerance=float(tolerance[-1]) if len(tolerance) else math.nan,
        share_over_tolerance=_mean(_over(series)),
        multiplier_low=float(multiplier.min()) if len(multiplier) else math.nan,
        multiplier_high=float(multiplier.max()) if len(multiplier) else math.nan,
        multiplier_rises=int((moves > 0).sum()),
        multiplier_falls=int((moves < 0).sum()),
        tokens_per_second=_median(_finite(series, "throughput/tokens_per_second")),
        seconds=float(_finite(series, "time/total").sum()) if "time/total" in series else math.nan,
    )


def what_the_multiplier_did(series: Series, *, begins_at_cap: bool = False) -> str:
    """Describe the course of lambda, budget and discrepancy; empty for a run that recorded none of them."""
    multiplier, discrepancy = (_finite(series, name) for name in ("dual/multiplier", "discrepancy/mean"))
    over, said = _over(series), []
    if len(multiplier):
        first, last, peak = (number(float(value)) for value in (multiplier[0], multiplier[-1], multiplier.max()))
        at = int(series["dual/multiplier"][0][np.nanargmax(series["dual/multiplier"][1])])
        moved = f"lambda went from {first} to {last}, with its peak of {peak} at step {at}"
        said.append(f"lambda stayed at {first}" if multiplier.min() == multiplier.max() else moved)
        said += ["it began at its cap"] * begins_at_cap
    if len(over):
        said.append(f"the budget c was exceeded in {over.sum():.0f} of {len(over)} steps")
    if len(discrepancy) > 1:
        window = max(1, len(discrepancy) // 10)
        before, after = _mean(discrepancy[:window]), _mean(discrepancy[-window:])
        how = "fell" if after < before else "rose" if after > before else "stayed"
        steps = f"{window} steps" if window > 1 else "step"
        said.append(f"the discrepancy {how} from {number(before)} to {number(after)} (first and last {steps})")
    return "; ".join(said)


def overlap(series: Series) -> tuple[str, str] | None:
    """Describe the time that sampling ahead saves in a median step, and how; None for a run without it."""
    if "time/overlap" not in series:
        return None

    def seconds(*phases: str) -> float:
        return sum(_median(_finite(series, f"time/{phase}")) for phase in phases)

    sampling, training = seconds("generate", "verify", "pack"), seconds("push", "step")
    wait, idle = seconds("wait"), seconds("engine_idle")
    waits = "the trainer waits" if wait > idle else "the sampler waits"
    more = (
        f"a step with {number(sampling)} s of sampling and {number(training)} s of training takes "
        f"{number(seconds('total'))} s; {waits}: the trainer {number(wait)} s, the sampler {number(idle)} s"
    )
    return f"{number(seconds('overlap'))} s a step", more


def legs(series: Series) -> tuple[str, str] | None:
    """Describe where the gap to the engine was, when it was last looked at; None for a run that did not."""
    names = [f"mismatch/leg_{name}" for name in ("decoding_share", "decoding", "one_pass")]
    if names[0] not in series:
        return None
    share, decoding, one_pass = (float(series[name][1][-1]) for name in names)
    scored = f"mean |dp| {number(decoding)} to the engine's own scores in one pass, {number(one_pass)} from there"
    return f"{percent(share)} while the engine decodes", f"step {series[names[0]][0][-1]}: {scored} to the trainer"


def warnings(series: Series) -> list[str]:
    """List the problems in a run's metrics that put its result in doubt, each with a remedy."""
    found = []
    summary = summarize(series)
    truncated = _mean(_finite(series, "completion/truncated_fraction")[-summary.window :])
    if truncated > _TRUNCATED_LIMIT:
        found.append(
            f"{percent(truncated)} of the last completions were cut by the length limit: "
            "rewards measure the limit as much as the policy. Raise the limit."
        )
    timeouts, errors, over_budget = (
        _finite(series, f"reward/verifier_{kind}").sum() for kind in ("timeouts", "errors", "over_budget")
    )
    if timeouts > 0:
        found.append(f"The verifier ran out of time on {timeouts:.0f} answers; they got reward 0.")
    if errors > 0:
        found.append(f"The verifier failed on {errors:.0f} answers; they got reward 0.")
    if over_budget > 0:
        found.append(
            f"The verifier's budget for a batch ran out on {over_budget:.0f} answers; they got reward 0, right or "
            "wrong. Use more verifier processes or raise the budget."
        )
    skipped = _finite(series, "optimizer/skipped_updates").sum()
    if skipped > 0:
        found.append(f"{skipped:.0f} optimizer updates were skipped because their gradient was not finite.")
    equal = _mean(_finite(series, "reward/all_equal_groups")[-summary.window :])
    if equal > _ALL_EQUAL_LIMIT:
        found.append(
            f"In {percent(equal)} of the last prompts all completions got one reward, so nearly nothing is learned: "
            "the task is too easy or too hard for the policy."
        )
    floor = _mean(_finite(series, "mismatch/noise_floor"))
    if summary.tolerance < floor:
        found.append(
            f"The budget c = {summary.tolerance:.4g} is below the noise floor {floor:.4g}, the mismatch the engine "
            "shows against itself: no policy can meet it. Raise c."
        )
    stuck = _steps_at_cap(series)
    if stuck >= _STUCK_STEPS:
        found.append(
            f"Lambda stayed at {summary.multiplier_high:.4g} over the last {stuck} steps with the budget exceeded: "
            "it is at its cap. Raise the cap or c."
        )
    found += [alarm.text for alarm in alarms(series)]
    broken = [name for name, (_, values) in series.items() if not np.isfinite(values).all()]
    if broken:
        found.append(f"Values that are not finite were recorded for {', '.join(broken)}.")
    return found


def _finite(series: Series, name: str) -> np.ndarray:
    values = series[name][1] if name in series else np.zeros(0)
    return values[np.isfinite(values)]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _over(series: Series) -> np.ndarray:
    """[n] float64, 1 where what c bounds exceeds it, else 0, at the steps that recorded both."""
    name = spent(series)
    if name not in series or "dual/tolerance" not in series:
        return np.zeros(0)
    _, left, right = np.intersect1d(series[name][0], series["dual/tolerance"][0], return_indices=True)
    discrepancy, tolerance = series[name][1][left], series["dual/tolerance"][1][right]
    both = np.isfinite(discrepancy) & np.isfinite(tolerance)
    return (discrepancy[both] > tolerance[both]).astype(np.float64)


def _steps_at_cap(series: Series) -> int:
    """Count the steps at the end of the run with lambda at its maximum and the discrepancy over budget."""
    multiplier, over = _finite(series, "dual/multiplier"), _over(series)
    if not 0 < len(over) <= len(multiplier) or multiplier.min() == multiplier.max():
        return 0
    capped = (multiplier[-len(over) :] == multiplier.max()) & (over > 0)
    return len(capped) if capped.all() else int(np.argmin(capped[::-1]))


def _scores(series: Series) -> tuple[ScoreHistory, ...]:
    scores = []
    names = [name for name in series if name.startswith("eval/")]
    for name in sorted(names, key=lambda name: ("/avg@" not in name, name)):
        steps, values = series[name]
        steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
        if len(values):
            best = int(np.argmax(values))
            scores.append(
                ScoreHistory(
                    name=name.removeprefix("eval/"),
                    first_step=int(steps[0]),
                    first=float(values[0]),
                    last_step=int(steps[-1]),
                    last=float(values[-1]),
                    best_step=int(steps[best]),
                    best=float(values[best]),
                    form=form_of_score(name, values, series),
                )
            )
    return tuple(scores)
