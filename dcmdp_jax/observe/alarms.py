"""Alarms over the metrics of a run name its kind of mismatch, as `probe.columns.diagnosis`."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

Series = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Metric -> (steps [n] int, values [n] float)."""

# Thresholds. Where no source is named they are ours: `tests/observe` holds that no step of a clean
# run of 50 steps crosses one. They are not measured otherwise.
WINDOW = 10
"""Steps that an alarm looks at, the last ones of the run."""
_TREND_WINDOW = 20
"""Steps of a slow change, of which the means of the first and of the last 5 are compared."""
_LATEST_STEPS = 3
"""Steps that are the present. One step alone may be an outlier."""
_FLOORS = 3.0
"""Noise floors up to which a discrepancy may be noise."""
_OVER_BUDGET = 1.5
"""Times c above which a discrepancy is well above it."""
_JUMP = 5.0
"""Times the usual discrepancy that a jump reaches."""
_USUAL_STEPS = 5
"""Steps before the window without which nothing is usual."""
_GROWTH = 2.0
"""Last over first discrepancy of a collapse."""
_ENTROPY_CHANGE = 0.4
"""Relative change of the entropy of a collapse."""
_RANK_CORRELATION = 0.6
"""Rank correlation with the step of a steady change over `_TREND_WINDOW`."""
_TAIL_GROWTH = 1.5
"""Last over first 95th percentile of a displacement."""
_MISSING_MASS = 0.005
"""Probability that the trainer gives to tokens that the engine can't sample."""
_LEAST_SAMPLE_SIZE = 0.8
"""Effective sample size, a share, below which the mean of p / q is not known."""
_STANDARD_ERRORS = 4
"""Standard errors over the window's steps that a mean must be away by."""
_STALENESS = "staleness/log_ratio_abs_mean"
_MOST_STALENESS = 0.2
"""Nats: the clip of the ratio (0.2 below, 0.24 above) bites the typical token there."""
_BROKEN = 0.1
"""Mean discrepancy of a broken completion."""
_BROKEN_TIMES = 10.0
"""Times the median completion's discrepancy of a broken one."""
_PENALTY_SHARE = 0.1
"""Share of the penalty in the update: chosen on long completions, docs/evidence.md."""
_SHARE_STEPS = 5
"""Steps of which that share is the median: chosen on long completions, docs/evidence.md."""
_LEAST_SHARE = 0.01
"""Share of the penalty in the update that is worth a word: a guess."""
_WHOLE_ADVANTAGE = 0.5
"""Penalty of a token, in advantages, that is as much as one: a guess."""
_LAMBDA_RISE = 1.5
"""Last over first lambda of a window that is rising."""
_STEADY = 0.9
"""Rank correlation with the step of a lambda that rises steadily over the window."""
_MOSTLY_KEPT = 0.7
"""Norm that rounding keeps back, over the update's, with which hardly any of it arrives."""
_BEHIND = 10.0
"""Last over first discrepancy of an engine that stands still."""
_STEADY_BEHIND = 0.8
"""Rank correlation of that growth with the step, over the whole run."""
_ENGINE_MOVES = 0.2
"""Relative change of the engine's mean -log q that is none."""
_AS_ROUNDING = 0.04
"""Nats: largest median log-ratio of a first step whose engine has the trainer's weights."""
_TWINS = 0.1
"""Share of identical completions above the chance of them."""
_CUT = 0.9
"""Share of completions at the length limit, now: a guess."""
_CUT_BEFORE = 0.5
"""Share of completions at the length limit in the best step before: a guess."""
_CUT_STEPS = 2
"""Steps that are now: a guess."""
_FLOAT32_ROUNDING = 1e-6
"""A mean |p - q| between float32 programs is 1e-8 to 1e-6, of bfloat16 1e-3."""
_ROUNDING_STEPS = 2
"""Steps without a signal. One step alone may have none."""
_REWARD_FALL = 0.5
"""Part of the usual reward whose loss before a jump explains the jump."""
_NOTHING = np.zeros(0), np.zeros(0)

OF_A_BUDGET = ("noise", "mismatch", "staleness")
"""Alarms that compare with c, at least where delta mixes staleness in."""
WATCHED = """
    discrepancy/mean discrepancy/broken_completions dual/tolerance mismatch/k1 mismatch/k3
    mismatch/effective_sample_size mismatch/noise_floor rollout/staleness_max policy/entropy
    staleness/log_ratio_abs_mean completion/truncated_fraction policy/kl policy/router_loss
    discrepancy/max dual/multiplier dual/penalty_share reward/mean reward/all_equal_groups
    discrepancy/spent displacement/abs_p95 mismatch/sync_rounding completion/identical_fraction
    completion/identical_chance
""".split()
"""Metrics that the alarms look at."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alarm:
    """One problem of a run.

    Attributes:
        name: member of `ALARMS`.
        text: observation and remedy, for people.
    """

    name: str
    text: str


def alarms(series: Series) -> list[Alarm]:
    """The alarms of a run, from its metrics so far; empty for a healthy one.

    c is `dual/tolerance`, delta `discrepancy/mean`; noise and mismatch compare with c the quantile
    that `algorithm.budget` names, if it does. Unless it is said, a rule looks at the last 10 steps.

    support: mean p / q = 1 - k1 + k3 is below 0.995 by four standard errors over steps, at an
        effective sample size of 0.8 or more
    retokenization: in each of the last 3 steps `discrepancy/broken_completions` is above 0, and no
        weights are stale
    staleness: with `rollout.lag`, mean `staleness/log_ratio_abs_mean` is above 0.2 nats, where the
        clip of the ratio bites the typical token; without, delta is above 1.5 c and 3 noise floors,
        and weights of earlier steps sampled (`rollout/staleness_max`)
    penalty: one of three. The median of `dual/penalty_share` of the last 5 steps is above 0.1, over
        the steps that have a prompt with unequal rewards (at least half of them). lambda rises
        steadily (rank correlation of 0.9 or more) by half or more while the mean delta of the later
        5 steps is not below that of the earlier 5, and that share, where it is recorded, is 0.01 or
        more. delta rises as for weight_sync while the largest penalty of a token, lambda
        `discrepancy/max`, is 0.5 of an advantage or more in each of the last 3 steps
    weight_sync: delta of each of the last 3 steps is above 5 times the median of the steps before
        the window and 3 noise floors, no weights are stale, no completion is broken, the reward of
        the 3 steps before the rise was not below the usual by half of its size, no penalty alarm
        says why, and the entropy does not move as under collapse
    unseen_updates: delta rises steadily (rank correlation of 0.8 or more over all steps, at least
        10) to ten times its first and 3 noise floors, no weights are stale, and the engine stands
        still: `mismatch/sync_rounding` is 0.7 or more in the median of the last 10 steps; in a
        recording the first step's median log-ratio is 0.04 nats at most and the engine's mean -log
        q moves by 20% at most
    identical: `completion/identical_fraction` is above `completion/identical_chance` by 0.1 and
        four standard errors over steps: samples that are not independent
    noise: delta is above c on most steps, and within 3 noise floors; c is not below the floor
        itself, of which the report warns anyway
    mismatch: delta is above 1.5 c and 3 noise floors, and no alarm above but penalty says why
    collapse: over 20 steps delta at least doubles and the entropy changes by 40% or more, both
        steadily (rank correlation with the step of 0.6 or more), above 3 noise floors and without a
        weight_sync alarm
    rounding: in each of the last 2 steps all prompts have equal rewards, no teacher, KL or load-
        balancing term has a gradient, and lambda penalizes a delta within 3 noise floors, or below
        1e-6: the update is rounding alone
    truncation: 90% or more of the completions are cut by the length limit in each of the last 2
        steps, and half or fewer were in some step before
    displacement: over 20 steps the 95th percentile of |logit p - logit q| grows by half or more,
        steadily (rank correlation of 0.6 or more), while delta does not rise: confidence hides from
        delta that the engines diverge

    The mean of p / q is 1 for tokens sampled from q, whatever p is; see `evidence.Evidence`. A run
    shorter than the window raises none but `penalty` by its share. That share and its 5 steps were
    chosen on long completions (docs/evidence.md), the other numbers of `penalty` are guesses.
    """
    raised = {}
    for name, rule in _RULES.items():
        if raised.keys() & _EXPLAINED_BY.get(name, set()):
            continue
        text = next(rule(series), None)
        if text is not None:
            raised[name] = Alarm(name=name, text=text)
    return list(raised.values())


def broken_completions(discrepancy: np.ndarray) -> float:
    """Share of the completions whose mean discrepancy is above 0.1 and 10 times the median one's.

    A precision or other weights affect every completion. Retokenized completions diverge from the
    first changed token on, in the affected completions only.

    Args:
        discrepancy: mean of each completion; 0 on padding, which does not count. Any shape.
    """
    values = discrepancy[discrepancy > 0]
    if not len(values):
        return 0.0
    return float(np.mean(values > max(_BROKEN, _BROKEN_TIMES * float(np.median(values)))))


def _last(series: Series, name: str, count: int = WINDOW) -> np.ndarray:
    """The last `count` values; all NaN, so that no rule holds, if fewer or one is not finite."""
    _, values = series.get(name, _NOTHING)
    values = np.asarray(values[-count:], np.float64)
    if len(values) < count or not np.isfinite(values).all():
        return np.full(count, np.nan)
    return values


def finite_points(series: Series, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a metric, where they are finite; none if it was not recorded."""
    steps, values = map(np.asarray, series.get(name, _NOTHING))
    is_finite = np.isfinite(values)
    return steps[is_finite], values[is_finite]


def finite_values(series: Series, name: str) -> np.ndarray:
    """The finite values of a metric, in the order of the steps."""
    _, values = finite_points(series, name)
    return values


def until(series: Series, step: int) -> Series:
    """The metrics up to a step, without those that were recorded later only."""
    earlier = {}
    for name, (steps, values) in series.items():
        before = steps <= step
        if before.any():
            earlier[name] = steps[before], values[before]
    return earlier


def last_value(series: Series, name: str) -> float:
    """The last finite value of a metric; NaN without one."""
    values = finite_values(series, name)
    if not len(values):
        return np.nan
    return values[-1]


def _floor(series: Series) -> float:
    return np.nan_to_num(last_value(series, "mismatch/noise_floor"))


def bounded_metric(metrics: Collection[str]) -> str:
    """The metric that c bounds: the mean discrepancy, or a quantile (`algorithm.budget`)."""
    if "discrepancy/spent" in metrics:
        return "discrepancy/spent"
    return "discrepancy/mean"


def _over_budget(series: Series) -> tuple[float, float] | None:
    """Mean delta of the window and c, if that delta is well above both c and the noise floor."""
    mean = _last(series, bounded_metric(series)).mean()
    c = _last(series, "dual/tolerance", 1)[0]
    if mean > max(_OVER_BUDGET * c, _FLOORS * _floor(series)):
        return mean, c
    return None


def _mixed_lag(series: Series, count: int = WINDOW) -> float:
    """Age in steps of the oldest token of the last steps, if delta mixes staleness in; else 0."""
    if _STALENESS in series:
        return 0.0
    return np.nan_to_num(_last(series, "rollout/staleness_max", count).max())


def _discrepancies(series: Series) -> np.ndarray:
    """The mean discrepancy of every step; empty if one is not finite, or mixes staleness in."""
    values = np.asarray(series.get("discrepancy/mean", _NOTHING)[1], np.float64)
    if _mixed_lag(series) or not np.isfinite(values).all():
        return np.zeros(0)
    return values


def _trend(series: Series, name: str) -> tuple[float, float, float]:
    """Means of the first and the last 5 of 20 steps, and the rank correlation with the step."""
    values = _last(series, name, _TREND_WINDOW)
    return values[:5].mean(), values[-5:].mean(), _rank_correlation(values)


def _surely_above(excess: np.ndarray, threshold: float) -> bool:
    """Whether the mean over the window's steps is above a threshold by four standard errors."""
    return excess.mean() - _STANDARD_ERRORS * excess.std() / np.sqrt(WINDOW) > threshold


def _support(series: Series) -> Iterator[str]:
    missing = _last(series, "mismatch/k1") - _last(series, "mismatch/k3")
    sample_size = _last(series, "mismatch/effective_sample_size").mean()
    if sample_size >= _LEAST_SAMPLE_SIZE and _surely_above(missing, _MISSING_MASS):
        yield (
            f"The trainer gives {missing.mean():.1%} of its probability to tokens that the engine "
            "did not: sampling is cut (top-p, top-k). Sample with top_p=1 and no top_k."
        )


def _retokenization(series: Series) -> Iterator[str]:
    broken = _last(series, "discrepancy/broken_completions", _LATEST_STEPS)
    if broken.min() > 0 and not _mixed_lag(series, _LATEST_STEPS):
        yield (
            f"{broken.mean():.1%} of the completions disagree wildly while the others agree: "
            "they, or their prompts, were decoded and encoded again on their way. Pass the "
            "sampled token ids on."
        )


def _staleness(series: Series) -> Iterator[str]:
    staleness = _last(series, _STALENESS).mean()
    if staleness > _MOST_STALENESS:
        yield (
            f"Since its tokens were sampled the policy moved by {staleness:.2g} nats a token: the "
            "clip stops many. Lower rollout.lag or the learning rate, or set "
            "algorithm.ratio_denominator=proximal."
        )

    # Where delta compares with the weights of now, it holds the tokens' age too; else `lag` is 0.
    lag = _mixed_lag(series)
    over_budget = _over_budget(series)
    if lag and over_budget:
        delta, tolerance = over_budget
        yield (
            f"The discrepancy is {delta:.3g} at a tolerance c of {tolerance:.3g}, "
            f"and the tokens were sampled by weights up to {lag:.0f} steps old. Sync weights more "
            "often, or correct by importance weights."
        )


def _jump(series: Series) -> tuple[float, float, int] | None:
    """Usual and last delta, and the index of the first step above, if it rose to 5 times the usual.

    What is usual is the median of the steps before the window.
    """
    values = _discrepancies(series)
    if len(values) < WINDOW + _USUAL_STEPS:
        return None
    usual = np.median(values[:-WINDOW])
    low_steps = np.flatnonzero(values <= max(_JUMP * usual, _FLOORS * _floor(series)))
    start = 0
    if len(low_steps):
        start = low_steps[-1] + 1
    if start > len(values) - _LATEST_STEPS:
        return None
    return usual, values[-_LATEST_STEPS:].mean(), start


def _penalty_share(series: Series) -> float:
    """Median share of the penalty over the last steps that have a prompt with unequal rewards.

    Without one the penalty is all there is, however small: that is another problem. NaN where such
    steps are fewer than half.
    """
    share = _last(series, "dual/penalty_share", _SHARE_STEPS)
    equal_groups = _last(series, "reward/all_equal_groups", _SHARE_STEPS)
    share = share[~(equal_groups >= 1)]
    if 2 * len(share) < _SHARE_STEPS:
        return np.nan
    return np.median(share)


def _rises_in_vain(series: Series, share: float) -> bool:
    """Whether lambda rises steadily over the window, and the discrepancy over c does not fall."""
    multiplier = _last(series, "dual/multiplier")
    delta = _last(series, bounded_metric(series))
    earlier, later = (half.mean() for half in np.split(delta, 2))
    return (
        multiplier[-1] > max(_LAMBDA_RISE * multiplier[0], 0)
        and _rank_correlation(multiplier) >= _STEADY
        and later >= earlier
        and not later <= _last(series, "dual/tolerance", 1)[0]
        and not share < _LEAST_SHARE
    )


def _penalty(series: Series) -> Iterator[str]:
    """The penalty is much of the update, costs a token an advantage, or lambda rises in vain."""
    _, recorded = series.get("dual/multiplier", _NOTHING)
    multiplier = _last(series, "dual/multiplier")
    share = _penalty_share(series)
    penalties = (multiplier * _last(series, "discrepancy/max"))[-_LATEST_STEPS:]
    jump = _jump(series)

    if len(recorded) and share > _PENALTY_SHARE:
        text = (
            f"The penalty is {share:.1%} of the update at lambda = {recorded[-1]:.3g}: the policy "
            "learns the penalty."
        )
    elif _rises_in_vain(series, share):
        later = _last(series, bounded_metric(series))[WINDOW // 2 :].mean()
        text = (
            f"lambda went from {multiplier[0]:.3g} to {multiplier[-1]:.3g} over {WINDOW} steps, "
            f"and the discrepancy, now {later:.3g}, did not follow: c may be below what a penalty "
            "reaches."
        )
    elif penalties.min() >= _WHOLE_ADVANTAGE and jump is not None:
        text = (
            f"The discrepancy rose from {jump[0]:.3g} to {jump[1]:.3g}, and lambda = "
            f"{multiplier[-1]:.3g} penalizes single tokens {penalties.max():.2g}, as much as an "
            "advantage: the penalty may be the cause. If not, check the weight sync."
        )
    else:
        return

    remedy = "lower multiplier_max, or raise c"
    if recorded.min() == recorded.max():
        remedy = "or a smaller multiplier"
    yield f"{text} Set algorithm.method=grpo, {remedy}."


def _weight_sync(series: Series) -> Iterator[str]:
    jump = _jump(series)
    if jump is None or _entropy_moves(series):
        return
    usual, last, start = jump

    # A reward that fell first says that the policy, not the weight sync, made the discrepancy.
    rewards = np.asarray(series.get("reward/mean", _NOTHING)[1], np.float64)
    if len(rewards) == len(series["discrepancy/mean"][1]) and start >= _LATEST_STEPS:
        usual_reward = np.median(rewards[:-WINDOW])
        lowest = usual_reward - _REWARD_FALL * abs(usual_reward)
        if rewards[start - _LATEST_STEPS : start].mean() < lowest:
            return
    yield (
        f"The discrepancy rose from {usual:.3g} to {last:.3g} within a few steps: the engine's "
        "weights are not the trainer's. Check the weight sync, compare checksums, and run dcmdp "
        "probe with --earlier."
    )


def _unseen_updates(series: Series) -> Iterator[str]:
    delta = _discrepancies(series)
    if len(delta) < WINDOW:
        return
    first = delta[0]
    last = delta[-_LATEST_STEPS:].mean()
    if last < max(_BEHIND * first, _FLOORS * _floor(series)):
        return
    if _rank_correlation(delta) < _STEADY_BEHIND:
        return

    rounding = np.median(_last(series, "mismatch/sync_rounding"))
    surprise = _last(series, "engine/surprise", len(delta))
    first_third, _, last_third = np.array_split(surprise, 3)
    before = first_third.mean()
    now = last_third.mean()
    stands_still = np.isnan(rounding) and abs(now - before) <= _ENGINE_MOVES * before
    if rounding >= _MOSTLY_KEPT:
        evidence = f"rounding keeps back {rounding:.0%} of an update's norm"
    elif stands_still and series["mismatch/median_log_ratio"][1][0] <= _AS_ROUNDING:
        evidence = f"its own mean -log q stays at {before:.2g} to {now:.2g} nats"
    else:
        return
    yield (
        f"The discrepancy rose steadily from {first:.2g} to {last:.2g} while the engine stands "
        f"still: {evidence}. The updates do not reach it: no weight sync, or updates below what "
        "its dtype holds. Compare its weights over steps; give the engine float32, or raise the "
        "learning rate."
    )


def _identical(series: Series) -> Iterator[str]:
    twins = _last(series, "completion/identical_fraction")
    chance = _last(series, "completion/identical_chance")
    if _surely_above(twins - chance, _TWINS):
        yield (
            f"{twins.mean():.1%} of the completions equal another one of their group token by "
            f"token, {chance.mean():.1%} would by chance. Seed each completion of a group "
            "differently."
        )


def _noise(series: Series) -> Iterator[str]:
    delta = _last(series, bounded_metric(series))
    c = _last(series, "dual/tolerance", 1)[0]
    floor = _floor(series)
    if np.mean(delta > c) > 0.5 and floor <= c and delta.mean() <= _FLOORS * floor:
        yield (
            f"The discrepancy {delta.mean():.3g} is above the tolerance c = {c:.3g} but within the "
            f"noise of the engine, {floor:.3g} against itself: lambda penalizes for rounding. "
            f"Raise c above {2 * floor:.2g}."
        )


def _mismatch(series: Series) -> Iterator[str]:
    over_budget = _over_budget(series)
    if over_budget:
        floor = f"of {_floor(series):.3g}" if _floor(series) else "that was not measured"
        yield (
            f"The discrepancy is {over_budget[0]:.3g} at a tolerance c of {over_budget[1]:.3g} "
            f"and a noise floor {floor}: the engines differ. Repair the cause that dcmdp probe "
            "names; else raise c, or the engine's precision."
        )


def _entropy_moves(series: Series) -> bool:
    """Whether the entropy changes by 40% or more over the window, steadily."""
    first, last, correlation = _trend(series, "policy/entropy")
    least = 1 - _ENTROPY_CHANGE
    moves = first > 0 and not least < last / first < 1 / least
    return moves and abs(correlation) >= _RANK_CORRELATION


def _collapse(series: Series) -> Iterator[str]:
    first, last, correlation = _trend(series, "discrepancy/mean")
    grows = last > _FLOORS * _floor(series) and last >= _GROWTH * first
    if grows and correlation >= _RANK_CORRELATION and _entropy_moves(series):
        before, after, _ = _trend(series, "policy/entropy")
        yield (
            f"Over {_TREND_WINDOW} steps the discrepancy rose from {first:.3g} to {last:.3g} and "
            f"the entropy went from {before:.3g} to {after:.3g} nats: a collapse may be ahead. Go "
            "back to an earlier checkpoint with a lower learning rate, a more precise engine or, "
            "where lambda is above 0, without the penalty."
        )


def _displacement(series: Series) -> Iterator[str]:
    first, last, correlation = _trend(series, "displacement/abs_p95")
    before, after, _ = _trend(series, "discrepancy/mean")
    if after <= before and last >= _TAIL_GROWTH * first and correlation >= _RANK_CORRELATION:
        yield (
            f"Over {_TREND_WINDOW} steps the 95th percentile of |logit p - logit q| rose from "
            f"{first:.3g} to {last:.3g}, the discrepancy did not: the policy became confident "
            "while the engines diverged. Constrain log-odds instead: measure=logit, budget=p95."
        )


def _rounding(series: Series) -> Iterator[str]:
    # The penalty is alone only where no other term of the loss has a gradient.
    if "policy/kl" in series or "policy/router_loss" in series:
        return
    equal_groups = _last(series, "reward/all_equal_groups", _ROUNDING_STEPS)
    # A penalty of exactly 0, as without a mismatch, has a share of 0.
    share = _last(series, "dual/penalty_share", _ROUNDING_STEPS)
    delta = _last(series, "discrepancy/mean", _ROUNDING_STEPS)
    floor = max(_FLOORS * _floor(series), _FLOAT32_ROUNDING)
    if equal_groups.min() >= 1 and share.min() >= 1 and delta.max() <= floor:
        yield (
            "No prompt has unequal rewards, so the penalty is the whole update, and its "
            f"discrepancy, {delta[-1]:.2g}, is the rounding of the engine: the optimizer makes "
            "full steps of it, however small. Take problems whose rewards differ, or set "
            "algorithm.drop_equal_groups=true, or algorithm.method=grpo."
        )


def _truncation(series: Series) -> Iterator[str]:
    fractions = finite_values(series, "completion/truncated_fraction")
    before = fractions[:-_CUT_STEPS]
    now = fractions[-_CUT_STEPS:]
    if len(before) and before.min() <= _CUT_BEFORE and now.min() >= _CUT:
        yield (
            f"The length limit cuts {now[-1]:.0%} of the completions, where it cut "
            f"{before.min():.0%} before. Compare the end tokens of the policy, of its teacher and "
            "of its data (eos_token_id in generation_config.json); if completions only need more "
            "room, raise rollout.max_completion_tokens."
        )


def _rank_correlation(values: np.ndarray) -> float:
    """Spearman's correlation with the step; 0 for a constant."""
    if values.min() == values.max():
        return 0.0
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable")
    return np.corrcoef(ranks, np.arange(len(values)))[0, 1]


_RULES: Mapping[str, Callable[[Series], Iterator[str]]] = {
    "support": _support,
    "retokenization": _retokenization,
    "staleness": _staleness,
    "unseen_updates": _unseen_updates,
    "identical": _identical,
    "noise": _noise,
    "penalty": _penalty,
    "weight_sync": _weight_sync,
    "mismatch": _mismatch,
    "collapse": _collapse,
    "displacement": _displacement,
    "rounding": _rounding,
    "truncation": _truncation,
}
"""Alarm -> its rule, which yields what is wrong; the first text counts."""
_EXPLAINED_BY = {
    "weight_sync": {"retokenization", "penalty", "unseen_updates"},
    "mismatch": {
        "support",
        "retokenization",
        "staleness",
        "noise",
        "weight_sync",
        "unseen_updates",
    },
    "collapse": {"weight_sync", "unseen_updates"},
    "displacement": {"collapse"},
}
"""Alarm -> alarms before it that say why, so that it is not raised."""

ALARMS = {name: f"alarm/{name}" for name in _RULES}
"""Every alarm's name -> its metric."""
