"""Alarms over the metrics of a run: they name its kind of mismatch by the reasoning of
`lab.mismatch.diagnosis`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import numpy as np

Series = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Metric -> (steps [n] int, values [n] float)."""

WINDOW = 10
"""Steps that an alarm looks at, the last ones of the run."""
_TREND_WINDOW = 20
_FLOORS = 3.0
_OVER_BUDGET = 1.5
_JUMP = 5.0
_USUAL_STEPS = 5
_GROWTH = 2.0
_ENTROPY_CHANGE = 0.4
_RANK_CORRELATION = 0.6
_TAIL_GROWTH = 1.5
_MISSING_MASS = 0.005
_LEAST_SAMPLE_SIZE = 0.8
_STALENESS = "staleness/log_ratio_abs_mean"
_MOST_STALENESS = 0.2
_BROKEN = 0.1
_BROKEN_TIMES = 10.0
_BROKEN_STEPS = 3
_CHARGE_SHARE = 0.1
_SHARE_STEPS = 5
"""A share of the update and steps: chosen on long completions, docs/evidence.md."""
_LEAST_SHARE = 0.01
_WHOLE_ADVANTAGE = 0.5
"""Guesses, not measured: a share that is worth a word, and a token's charge in advantages."""
_PUSH_ROUNDING = "mismatch/push_rounding"
_IDENTICAL = ("completion/identical_fraction", "completion/identical_chance")
_MOSTLY_KEPT = 0.7
_BEHIND = 10.0
_STEADY_BEHIND = 0.8
_ENGINE_MOVES = 0.2
_AS_ROUNDING = 0.04
_TWINS = 0.1
_CUT = 0.9
_CUT_BEFORE = 0.5
_CUT_STEPS = 2
"""Shares of completions at the length limit, now and at best before, and steps: guesses."""
_FLOAT32_ROUNDING = 1e-6
_ROUNDING_STEPS = 2
"""A mean |p - q| between float32 programs is 1e-8 to 1e-6, of bfloat16 1e-3. One step alone may
have no signal.
"""
_LAMBDA_RISE = 1.5
_STEADY = 0.9
_REWARD_FALL = 0.5
_NOTHING = np.zeros(0), np.zeros(0)

OF_A_BUDGET = ("noise", "mismatch", "staleness")
"""Alarms that compare with c, at least where delta mixes staleness in."""
WATCHED = (
    "discrepancy/mean",
    "discrepancy/broken_completions",
    "dual/tolerance",
    "mismatch/k1",
    "mismatch/k3",
    "mismatch/effective_sample_size",
    "mismatch/noise_floor",
    "rollout/staleness_max",
    "policy/entropy",
    _STALENESS,
    "completion/truncated_fraction",
    "policy/kl",
    "policy/router_loss",
    "discrepancy/max",
    "dual/multiplier",
    "dual/charge_share",
    "reward/mean",
    "reward/all_equal_groups",
    "discrepancy/spent",
    "displacement/abs_p95",
    _PUSH_ROUNDING,
    *_IDENTICAL,
)
"""Metrics that the alarms look at."""


class Alarm(NamedTuple):
    """One problem of a run.

    Attributes:
        name: member of `ALARMS`.
        text: observation and remedy, for people.
    """

    name: str
    text: str


def alarms(series: Series) -> list[Alarm]:
    """The alarms of a run, from its metrics so far; empty for a healthy one.

    c is `dual/tolerance`, delta `discrepancy/mean`; noise and mismatch compare with c the quantile that
    `algorithm.budget` names, if it does. Unless it is said, a rule looks at the last 10 steps.

    | alarm | rule |
    |---|---|
    | support | mean p / q = 1 - k1 + k3 is below 0.995 by four standard errors over steps, at an effective sample size of 0.8 or more |
    | retokenization | in each of the last 3 steps `discrepancy/broken_completions` is above 0, and no weights are stale |
    | staleness | with `rollout.lag`, mean `staleness/log_ratio_abs_mean` is above 0.2 nats, where the clip of the ratio bites the typical token; without, delta is above 1.5 c and 3 noise floors, and weights of earlier steps sampled (`rollout/staleness_max`) |
    | charge | one of three. The median of `dual/charge_share` of the last 5 steps is above 0.1, over the steps that have a prompt with unequal rewards (at least half of them). lambda rises steadily (rank correlation of 0.9 or more) by half or more while the mean delta of the later 5 steps is not below that of the earlier 5, and that share, where it is recorded, is 0.01 or more. delta rises as for weight_sync while the largest charge of a token, lambda `discrepancy/max`, is 0.5 of an advantage or more in each of the last 3 steps |
    | weight_sync | delta of each of the last 3 steps is above 5 times the median of the steps before the window and 3 noise floors, no weights are stale, no completion is broken, the reward of the 3 steps before the rise was not below the usual by half of its size, no charge alarm says why, and the entropy does not move as under collapse |
    | unseen_updates | delta rises steadily (rank correlation of 0.8 or more over all steps, at least 10) to ten times its first and 3 noise floors, no weights are stale, and the engine stands still: `mismatch/push_rounding` is 0.7 or more in the median of the last 10 steps; in a recording the first step's median log-ratio is 0.04 nats at most and the engine's mean -log q moves by 20% at most |
    | identical | `completion/identical_fraction` is above `completion/identical_chance` by 0.1 and four standard errors over steps: samples that are not independent |
    | noise | delta is above c on most steps, and within 3 noise floors; c is not below the floor itself, of which the report warns anyway |
    | mismatch | delta is above 1.5 c and 3 noise floors, and no alarm above but charge says why |
    | collapse | over 20 steps delta at least doubles and the entropy changes by 40% or more, both steadily (rank correlation with the step of 0.6 or more), above 3 noise floors and without a weight_sync alarm |
    | rounding | in each of the last 2 steps all prompts have equal rewards, no teacher, KL or load-balancing term has a gradient, and lambda charges a delta within 3 noise floors, or below 1e-6: the update is rounding alone |
    | truncation | 90% or more of the completions are cut by the length limit in each of the last 2 steps, and half or fewer were in some step before |
    | displacement | over 20 steps the 95th percentile of |logit p - logit q| grows by half or more, steadily (rank correlation of 0.6 or more), while delta does not rise: confidence hides from delta that the engines diverge |

    The mean of p / q is 1 for tokens sampled from q, whatever p is; see `evidence.Evidence`. A run shorter than the
    window raises none but `charge` by its share. That share and its 5 steps were chosen on long completions (docs/evidence.md), the
    other numbers of `charge` are guesses.
    """  # noqa: E501 - a table
    found: dict[str, str] = {}
    for name, (rule, explained_by) in _RULES.items():
        if not found.keys() & explained_by and (text := next(rule(series), None)):
            found[name] = text
    return [Alarm(name, text) for name, text in found.items()]


def broken_completions(discrepancy: np.ndarray) -> float:
    """Share of the completions that stand apart: mean discrepancy above 0.1 and 10 times the median
    completion's.

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
    """The last `count` values; NaN, by which no rule speaks, if there are fewer or one is not
    finite.
    """
    values = np.asarray(series.get(name, _NOTHING)[1][-count:], np.float64)
    return values if len(values) == count and np.isfinite(values).all() else np.full(count, np.nan)


def finite_values(series: Series, name: str) -> np.ndarray:
    """The finite values of a metric, in the order of the steps."""
    values = series.get(name, _NOTHING)[1]
    return values[np.isfinite(values)]


def _floor(series: Series) -> float:
    values = finite_values(series, "mismatch/noise_floor")
    return float(values[-1]) if len(values) else 0.0


def bounded_metric(metrics: Collection[str]) -> str:
    """Which of a run's metrics its budget c bounds: the mean discrepancy, or a quantile
    (`algorithm.budget`).
    """
    return "discrepancy/spent" if "discrepancy/spent" in metrics else "discrepancy/mean"


def _over(series: Series) -> tuple[float, float] | None:
    """Mean delta of the window and c, if that delta is well above both c and the noise floor."""
    mean = float(_last(series, bounded_metric(series)).mean())
    c = float(_last(series, "dual/tolerance", 1)[0])
    return (mean, c) if mean > max(_OVER_BUDGET * c, _FLOORS * _floor(series)) else None


def _mixed_lag(series: Series, count: int = WINDOW) -> float:
    """Age of the oldest token of the last steps, where delta mixes it in; 0 where the two are
    apart.
    """
    return (
        0.0
        if _STALENESS in series
        else float(np.nan_to_num(_last(series, "rollout/staleness_max", count).max()))
    )


def _course(series: Series) -> np.ndarray:
    """The mean discrepancy of every step; empty if one is not finite, or mixes staleness in."""
    values = np.asarray(series.get("discrepancy/mean", _NOTHING)[1], np.float64)
    return values if np.isfinite(values).all() and not _mixed_lag(series) else np.zeros(0)


def _trend(series: Series, name: str) -> tuple[float, float, float]:
    """Means of the first and the last 5 of 20 steps, and the rank correlation with the step."""
    values = _last(series, name, _TREND_WINDOW)
    return float(values[:5].mean()), float(values[-5:].mean()), _rank_correlation(values)


def _support(series: Series) -> Iterator[str]:
    k1, k3, size = (
        _last(series, f"mismatch/{name}") for name in ("k1", "k3", "effective_sample_size")
    )
    missing = k1 - k3
    if (
        size.mean() >= _LEAST_SAMPLE_SIZE
        and missing.mean() - 4 * missing.std() / np.sqrt(WINDOW) > _MISSING_MASS
    ):
        yield (
            f"The trainer gives {missing.mean():.1%} of its probability to tokens that the engine "
            "did not: sampling is cut (top-p, top-k). Sample with top_p=1 and no top_k."
        )


def _retokenization(series: Series) -> Iterator[str]:
    broken = _last(series, "discrepancy/broken_completions", _BROKEN_STEPS)
    if broken.min() > 0 and not _mixed_lag(series, _BROKEN_STEPS):
        yield (
            f"{broken.mean():.1%} of the completions disagree wildly while the others agree: "
            "they, or their prompts, were decoded and encoded again on their way. Pass the "
            "sampled token ids on."
        )


def _staleness(series: Series) -> Iterator[str]:
    if (moved := _last(series, _STALENESS).mean()) > _MOST_STALENESS:
        yield (
            f"Since its tokens were sampled the policy moved by {moved:.2g} nats a token: the "
            "clip stops many. Lower rollout.lag or the learning rate, or set "
            "algorithm.ratio_denominator=proximal."
        )
    if (lag := _mixed_lag(series)) and (over := _over(series)):
        yield (
            f"The discrepancy is {over[0]:.3g} at a budget of {over[1]:.3g}, and the tokens were "
            f"sampled by weights up to {lag:.0f} steps old. Push weights more often, or correct "
            "by importance weights."
        )


def _jump(series: Series) -> tuple[float, float, int] | None:
    """Usual and last delta, and the place where it rose, if it rose to 5 times what was usual
    before the window.
    """
    values = _course(series)
    if len(values) < WINDOW + _USUAL_STEPS:
        return None
    usual = float(np.median(values[:-WINDOW]))
    low = np.flatnonzero(values <= max(_JUMP * usual, _FLOORS * _floor(series)))
    start = int(low[-1]) + 1 if len(low) else 0
    return (usual, float(values[-3:].mean()), start) if start <= len(values) - 3 else None


def _charge(series: Series) -> Iterator[str]:
    """The charge is much of the update; or lambda rises in vain; or it charges tokens an advantage
    as delta rises.
    """
    share, equal = (
        _last(series, name, _SHARE_STEPS)
        for name in ("dual/charge_share", "reward/all_equal_groups")
    )
    # Without a prompt that has a signal the charge is all there is, however small: another problem.
    share = share[~(equal >= 1)]
    share = float(np.median(share)) if 2 * len(share) >= _SHARE_STEPS else np.nan
    names = "dual/multiplier", bounded_metric(series), "discrepancy/max"
    multiplier, delta, largest = (_last(series, name) for name in names)
    (first, last), (earlier, later) = (
        multiplier[[0, -1]],
        (half.mean() for half in np.split(delta, 2)),
    )
    vain = (
        later >= earlier
        and not later <= _last(series, "dual/tolerance", 1)[0]
        and not share < _LEAST_SHARE
    )
    rises = last > max(_LAMBDA_RISE * first, 0) and _rank_correlation(multiplier) >= _STEADY
    every = series.get("dual/multiplier", _NOTHING)[1]
    whole = (multiplier * largest)[-3:]
    if len(every) and share > _CHARGE_SHARE:
        text = (
            f"The charge is {share:.1%} of the update at lambda = {every[-1]:.3g}: the policy "
            "learns the charge."
        )
    elif vain and rises:
        text = (
            f"lambda went from {first:.3g} to {last:.3g} over {WINDOW} steps, and the "
            f"discrepancy, now {later:.3g}, did not follow: c may be below what a charge reaches."
        )
    elif whole.min() >= _WHOLE_ADVANTAGE and (jump := _jump(series)):
        text = (
            f"The discrepancy rose from {jump[0]:.3g} to {jump[1]:.3g}, and lambda = {last:.3g} "
            f"charges single tokens {whole.max():.2g}, as much as an advantage: the charge may be "
            "the cause. If not, check the push."
        )
    else:
        return
    remedy = (
        "or a smaller multiplier"
        if every.min() == every.max()
        else "lower multiplier_max, or raise c"
    )
    yield f"{text} Set algorithm.method=grpo, {remedy}."


def _weight_sync(series: Series) -> Iterator[str]:
    if (jump := _jump(series)) is None or _entropy_moves(series):
        return
    usual, last, place = jump
    rewards = np.asarray(series.get("reward/mean", _NOTHING)[1], np.float64)
    if len(rewards) == len(series["discrepancy/mean"][1]) and place >= 3:
        before = float(np.median(rewards[:-WINDOW]))
        if rewards[place - 3 : place].mean() < before - _REWARD_FALL * abs(before):
            return
    yield (
        f"The discrepancy rose from {usual:.3g} to {last:.3g} within a few steps: the engine's "
        "weights are not the trainer's. Check the push, compare checksums, and run dcmdp probe "
        "with --earlier."
    )


def _unseen_updates(series: Series) -> Iterator[str]:
    delta = _course(series)
    if len(delta) < WINDOW:
        return
    first, last = float(delta[0]), float(delta[-3:].mean())
    if (
        last < max(_BEHIND * first, _FLOORS * _floor(series))
        or _rank_correlation(delta) < _STEADY_BEHIND
    ):
        return
    kept = np.median(_last(series, _PUSH_ROUNDING))
    surprise = _last(series, "engine/surprise", len(delta))
    before, now = (float(part.mean()) for part in np.array_split(surprise, 3)[::2])
    still = np.isnan(kept) and abs(now - before) <= _ENGINE_MOVES * before
    if kept >= _MOSTLY_KEPT:
        why = f"rounding keeps back {kept:.0%} of an update's norm"
    elif still and series["mismatch/median_log_ratio"][1][0] <= _AS_ROUNDING:
        why = f"its own mean -log q stays at {before:.2g} to {now:.2g} nats"
    else:
        return
    yield (
        f"The discrepancy rose steadily from {first:.2g} to {last:.2g} while the engine stands "
        f"still: {why}. The updates do not reach it: no push, or updates below what its dtype "
        "holds. Compare its weights over steps; give the engine float32, or raise the learning "
        "rate."
    )


def _identical(series: Series) -> Iterator[str]:
    twins, chance = (_last(series, name) for name in _IDENTICAL)
    more = twins - chance
    if more.mean() - 4 * more.std() / np.sqrt(WINDOW) > _TWINS:
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
            f"The discrepancy {delta.mean():.3g} is over the budget c = {c:.3g} but within the "
            f"noise of the engine, {floor:.3g} against itself: lambda charges for rounding. Raise "
            f"c above {2 * floor:.2g}."
        )


def _mismatch(series: Series) -> Iterator[str]:
    if over := _over(series):
        floor = f"of {_floor(series):.3g}" if _floor(series) else "that was not measured"
        yield (
            f"The discrepancy is {over[0]:.3g} at a budget of {over[1]:.3g} and a noise floor "
            f"{floor}: the engines differ. Run dcmdp probe on this run for the cause; then raise "
            "c, or the engine's precision."
        )


def _entropy_moves(series: Series) -> bool:
    """Whether the entropy changes by 40% or more over the window, steadily."""
    first, last, steady = _trend(series, "policy/entropy")
    least = 1 - _ENTROPY_CHANGE
    return first > 0 and not least < last / first < 1 / least and abs(steady) >= _RANK_CORRELATION


def _collapse(series: Series) -> Iterator[str]:
    first, last, steady = _trend(series, "discrepancy/mean")
    rises = (
        last > _FLOORS * _floor(series) and last >= _GROWTH * first and steady >= _RANK_CORRELATION
    )
    if rises and _entropy_moves(series):
        before, after, _ = _trend(series, "policy/entropy")
        yield (
            f"Over {_TREND_WINDOW} steps the discrepancy rose from {first:.3g} to {last:.3g} and "
            f"the entropy went from {before:.3g} to {after:.3g} nats: a collapse may be ahead. Go "
            "back to an earlier checkpoint with a lower learning rate, a more precise engine or, "
            "where lambda is above 0, without the charge."
        )


def _displacement(series: Series) -> Iterator[str]:
    first, last, steady = _trend(series, "displacement/abs_p95")
    before, after, _ = _trend(series, "discrepancy/mean")
    if after <= before and last >= _TAIL_GROWTH * first and steady >= _RANK_CORRELATION:
        yield (
            f"Over {_TREND_WINDOW} steps the 95th percentile of |logit p - logit q| rose from "
            f"{first:.3g} to {last:.3g}, the discrepancy did not: the policy became confident "
            "while the engines diverged. Constrain log-odds instead: measure=logit, budget=p95."
        )


def _rounding(series: Series) -> Iterator[str]:
    names = "reward/all_equal_groups", "dual/charge_share", "discrepancy/mean"
    equal, share, delta = (_last(series, name, _ROUNDING_STEPS) for name in names)
    others = [name for name in ("policy/kl", "policy/router_loss") if name in series]
    floor = max(_FLOORS * _floor(series), _FLOAT32_ROUNDING)
    # A charge of exactly 0, as without a mismatch, has a share of 0.
    if not others and equal.min() >= 1 and share.min() >= 1 and delta.max() <= floor:
        yield (
            "No prompt has unequal rewards, so the charge is the whole update, and its "
            f"discrepancy, {delta[-1]:.2g}, is the rounding of the engine: the optimizer makes "
            "full steps of it, however small. Take problems whose rewards differ, or set "
            "algorithm.drop_equal_groups=true, or algorithm.method=grpo."
        )


def _truncation(series: Series) -> Iterator[str]:
    cut = finite_values(series, "completion/truncated_fraction")
    before = cut[:-_CUT_STEPS]
    now = cut[-_CUT_STEPS:]
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
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])


_RULES: Mapping[str, tuple[Callable[[Series], Iterator[str]], tuple[str, ...]]] = {
    "support": (_support, ()),
    "retokenization": (_retokenization, ()),
    "staleness": (_staleness, ()),
    "unseen_updates": (_unseen_updates, ()),
    "identical": (_identical, ()),
    "noise": (_noise, ()),
    "charge": (_charge, ()),
    "weight_sync": (_weight_sync, ("retokenization", "charge", "unseen_updates")),
    "mismatch": (
        _mismatch,
        ("support", "retokenization", "staleness", "noise", "weight_sync", "unseen_updates"),
    ),
    "collapse": (_collapse, ("weight_sync", "unseen_updates")),
    "displacement": (_displacement, ("collapse",)),
    "rounding": (_rounding, ()),
    "truncation": (_truncation, ()),
}
"""Alarm -> its rule, which yields what is wrong (the first counts), and the alarms before it that
explain it.
"""

ALARMS = {name: f"alarm/{name}" for name in _RULES}
"""Every alarm's name -> its metric."""
