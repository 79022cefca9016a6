"""Invariants of the record of any run."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.observe.metric_names import METRICS, STEP_PHASES, metric_of
from dcmdp_jax.observe.metrics_io import Series, read_metrics
from dcmdp_jax.observe.report import read_run

_NOT_NEGATIVE = (0.0, np.inf)
# The unit of a metric says where its values can lie.
_RANGES = {
    "fraction": (0.0, 1.0),
    "correlation": (-1.0, 1.0),
    "tokens": (1.0, np.inf),
    **dict.fromkeys(
        (
            "completions",
            "discrepancy",
            "nats",
            "ratio",
            "norm",
            "1",
            "updates",
            "steps",
            "seconds",
            "tokens / s",
            "advantage / discrepancy",
        ),
        _NOT_NEGATIVE,
    ),
}
_EITHER_SIGN = (
    "dual/violation",
    "mismatch/k1",
    "policy/loss",
    "time/overlap",
    "displacement/mean",
    "mismatch/leg_decoding_share",
    *(f"{part}/log_ratio_mean" for part in ("staleness", "mismatch", "gap")),
)
# Ascending.
_ORDERED = (
    ("completion/length_min", "completion/length_mean", "completion/length_max"),
    ("policy/ratio_min", "policy/ratio_mean", "policy/ratio_max"),
    ("discrepancy/p50", "discrepancy/p99", "discrepancy/max"),
    ("discrepancy/mean", "discrepancy/max"),
    ("displacement/abs_p50", "displacement/abs_p95", "displacement/abs_p99"),
    ("rollout/staleness_mean", "rollout/staleness_max"),
)
# With rollout.lag.
_ORDERED_LAGGED = tuple(
    (f"{part}/log_ratio_abs_mean", f"{part}/log_ratio_max")
    for part in ("staleness", "mismatch", "gap")
)
# Only rewards of the verifier lie in [0, 1]; those of users are any number.
_JUDGED = ("math", "math_verify")
# Not at a step whose completions have no value of the reward, or are none of the source's; or a
# function logs nothing.
_SOMETIMES = re.compile(
    r"reward/.+/(mean|std)|eval_(interval|reward)/.+|(eval_)?logged/.+|discrepancy/source/.+|completion/source/.+|mismatch/leg_.+"
)
_ROUNDING = 1e-5


def contradictions(run_dir: str | Path) -> list[str]:
    """Violated invariants of a run's metrics, one line each; empty for a sound record.

    Args:
        run_dir: a run directory with metrics.jsonl and config.json.
    """
    # The report leaves out the steps that measure c.
    series = read_metrics(run_dir)
    config = read_run(run_dir).config
    # What is missing somewhere can't be compared with what is there.
    return [*_of_steps(series, config)] or [
        *_of_values(series, config),
        *_of_counts(series, config),
        *_of_the_multiplier(series, config),
    ]


def _of_steps(series: Series, config: Mapping[str, Any]) -> Iterator[str]:
    """Every training metric at every step from 1 on; an evaluation wherever one is due."""
    last = int(series["reward/mean"][0][-1])
    every = config["evaluation.every_steps"]
    steps = config["training.steps"]
    if last > steps:
        yield f"step {last} of {steps}"
    due = [step for step in range(last + 1) if every and (step % every == 0 or step == steps)]
    for name, (at, _) in series.items():
        expected = (
            due
            if name.startswith(("eval/", "eval_interval/", "eval_reward/", "eval_logged/"))
            else list(range(1, last + 1))
        )
        if name == "mismatch/noise_floor":
            expected = [step for step in expected if step in (1, 17, 65, 257, 1025)]
        if name == "time/clock":  # of every line, an evaluation's too
            expected = sorted({*range(1, last + 1), *due})
        if _SOMETIMES.fullmatch(name) and set(at.tolist()) <= set(expected):
            continue
        if at.tolist() != expected:
            yield f"{name}: recorded at steps {at.tolist()}, expected {expected}"
    for name in series:
        if not metric_of(name).unit:
            yield f"{name}: observe/metric_names.py does not know it"
    if due and not any(name.startswith("eval/") for name in series):
        yield "no evaluation was recorded"


def _of_values(series: Series, config: Mapping[str, Any]) -> Iterator[str]:
    """Finite, within what their units allow, and in order."""
    ranges = _RANGES | ({"reward": (0.0, 1.0)} if _is_verified(config) else {})
    for name, (steps, values) in series.items():
        low, high = (
            (-np.inf, np.inf)
            if name in _EITHER_SIGN
            else ranges.get(metric_of(name).unit, (-np.inf, np.inf))
        )
        if name.endswith("/std"):
            low = 0.0
        for step in steps[~np.isfinite(values)]:
            yield f"{name}: not finite at step {step}"
        # A share is a mean in float32.
        for step, value in zip(steps, values, strict=True):
            if not low - 1e-6 <= value <= high + 1e-6:
                yield f"{name}: {value} at step {step}, outside {low} .. {high}"
    lag = config.get("rollout.lag", 0)
    for names in _ORDERED + _ORDERED_LAGGED * bool(lag):
        for low, high in zip(names, names[1:], strict=False):
            yield from _not_above(low, series[low], high, series[high][1])
    # Sampling ahead is beside the step's time.
    # A run of before did not record each of today's phases.
    recorded = [
        f"time/{phase}" for phase in (("wait", "weight_sync", "step") if lag else STEP_PHASES)
    ]
    phases = sum(series[name][1] for name in recorded if name in series)
    yield from _not_above(
        "the phases' times",
        (series["time/total"][0], phases),
        "time/total",
        series["time/total"][1],
    )
    for name in series:
        if "/pass@" in name and _is_verified(config):
            average = name.replace("/pass@", "/avg@")
            yield from _not_above(average, series[average], name, series[name][1])


def _is_verified(config: Mapping[str, Any]) -> bool:
    """Whether every reward is 0 or 1: the answer is right, or it is not."""
    return config.get("rewards.functions", "math") in _JUDGED and not config.get("rewards.weights")


def _of_counts(series: Series, config: Mapping[str, Any]) -> Iterator[str]:
    """Shares of a batch are whole numbers of its completions, and these add up."""
    get = {name: values for name, (_, values) in series.items()}
    # Dynamic sampling samples more prompts than the step trains on.
    prompts = get.get("rollout/sampled_prompts", config["training.prompts_per_step"])
    total = prompts * config["rollout.group_size"]
    limit = config["rollout.max_completion_tokens"]
    steps = series["reward/mean"][0]
    kept = total - get["rollout/dropped_completions"]
    wholes = {
        "reward/all_equal_groups": get["reward/all_equal_groups"] * prompts,
        "completion/truncated_fraction": get["completion/truncated_fraction"] * total,
        "completion/length_mean": get["completion/length_mean"] * total,
        **{
            name: get[name]
            for name, metric in METRICS.items()
            if metric.unit in ("completions", "updates") and name in get
        },
    }
    if _is_verified(config):
        wholes["reward/mean"] = get["reward/mean"] * kept
        # Rewards are 0 or 1.
        variance = get["reward/mean"] * (1 - get["reward/mean"])
        yield from _differing("reward/std squared", steps, get["reward/std"] ** 2, variance)
    if "reward/no_answer_fraction" in get:
        wholes["reward/no_answer_fraction"] = get["reward/no_answer_fraction"] * total
    for name, counts in wholes.items():
        for step in steps[np.abs(counts - np.round(counts)) > 1e-3]:
            yield f"{name}: no whole number of completions, groups or tokens at step {step}"
    if "reward/no_answer_fraction" in get and _is_verified(config):
        wrong = (
            get["reward/no_answer_fraction"] * total
            + get["reward/verifier_timeouts"]
            + get["reward/verifier_errors"]
        )
        yield from _not_above(
            "right and unjudged completions", (steps, wholes["reward/mean"] + wrong), "all", total
        )
    for name, counts in get.items():
        if name.startswith("reward/") and metric_of(name).unit == "completions":
            yield from _not_above(name, (series[name][0], counts), "all completions", total)
    yield from _not_above(
        "completion/length_max", (steps, get["completion/length_max"]), "the limit", limit
    )
    if lag := config.get("rollout.lag", 0):
        expected = np.minimum(steps - 1, lag)
        yield from _differing(
            "rollout/staleness_max", steps, get["rollout/staleness_max"], expected
        )
        apart = get["staleness/log_ratio_mean"] + get["mismatch/log_ratio_mean"]
        yield from _differing(
            "gap/log_ratio_mean", steps, get["gap/log_ratio_mean"], apart, scale=1.0
        )
    cut = get["completion/truncated_fraction"] > 0
    if config.get("task.environment"):  # a turn has a limit of its own
        return
    for step in steps[cut & (get["completion/length_max"] != limit)]:
        yield (
            f"completion/truncated_fraction: above 0 at step {step} where no completion reaches "
            "the limit"
        )
    sampled = get["throughput/sampled_tokens_per_second"] * get["time/generate"]
    yield from _differing("sampled tokens", steps, sampled, get["completion/length_mean"] * total)
    tokens = get["throughput/tokens_per_second"] * get["time/total"]
    yield from _not_above("sampled tokens", (steps, sampled), "all tokens", tokens)
    updates = config["training.prompts_per_step"] // config["training.prompts_per_mini_batch"]
    yield from _not_above(
        "optimizer/skipped_updates", (steps, get["optimizer/skipped_updates"]), "updates", updates
    )


def _of_the_multiplier(series: Series, config: Mapping[str, Any]) -> Iterator[str]:
    """lambda_1 = lambda_0;  lambda_{k+1} = clip(lambda_k + eta (dbar_k - c), lambda_min,
    lambda_max).
    """
    steps, multiplier = series["dual/multiplier"]
    discrepancy = series["discrepancy/mean"][1]
    violation = series["dual/violation"][1]
    measured = (
        config.get("algorithm.tolerance_steps", 0) if config["algorithm.method"] == "dc_grpo" else 0
    )
    tolerance = np.full(len(steps), config["algorithm.tolerance"])
    if 0 < measured < len(steps):  # from then on one that the first steps give
        tolerance[measured:] = series["dual/tolerance"][1][measured]
    yield from _differing("dual/tolerance", steps, series["dual/tolerance"][1], tolerance)
    if config["algorithm.method"] != "dc_grpo":
        fixed = 0.0 if config["algorithm.method"] == "grpo" else 1.0
        yield from _differing("dual/multiplier", steps, multiplier, np.full(len(steps), fixed))
        yield from _differing("dual/violation", steps, violation, discrepancy - tolerance)
        return
    yield from _differing(
        "dual/violation", steps, violation, discrepancy - tolerance, scale=tolerance[0]
    )
    low, high = 0.0, config["algorithm.multiplier_max"]
    for step in steps[(multiplier < np.float32(low)) | (multiplier > np.float32(high))]:
        yield f"dual/multiplier: outside {low} .. {high} at step {step}"
    rate = config["algorithm.dual_learning_rate"]
    following = np.clip(multiplier[:-1] + rate * violation[:-1], low, high)
    following[:measured] = multiplier[:-1][:measured]  # it waits while c is measured
    expected = np.concatenate([[config["algorithm.multiplier"]], following])
    yield from _differing("dual/multiplier", steps, multiplier, expected)


def _not_above(
    low: str, lows: tuple[np.ndarray, np.ndarray], high: str, highs: np.ndarray | float
) -> Iterator[str]:
    steps, values = lows
    for step in steps[values > np.asarray(highs) * (1 + _ROUNDING) + 1e-9]:
        yield f"{low}: above {high} at step {step}"


def _differing(
    name: str, steps: np.ndarray, values: np.ndarray, expected: np.ndarray, *, scale: float = 0.0
) -> Iterator[str]:
    away = np.abs(values - expected) > _ROUNDING * np.maximum(np.abs(expected), scale) + 1e-7
    for step, value, wanted in zip(steps[away], values[away], expected[away], strict=True):
        yield f"{name}: {value} at step {step}, expected {wanted}"
