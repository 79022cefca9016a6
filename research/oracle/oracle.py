"""Which remedy? The gradient that each gives on an engine's samples, against that of an exact
engine. No training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.algorithm.advantages import has_signal
from dcmdp_jax.algorithm.corrections import CORRECTIONS, KlOver, kl_rejection
from dcmdp_jax.algorithm.losses import LOSSES
from dcmdp_jax.algorithm.penalties import PENALTIES, STATE_PENALTIES
from dcmdp_jax.algorithm.remedies import Corrected, Tokens
from dcmdp_jax.algorithm.stats import KlEstimator
from dcmdp_jax.algorithm.trust_regions import TRUST_REGIONS
from dcmdp_jax.config.algorithm import AlgorithmSettings, canonical
from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS
from dcmdp_jax.data.packing import one_a_row
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.estimators import t_quantile
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.row_logprobs import RowOutputs, make_row_logprobs
from dcmdp_jax.named_functions import Call
from dcmdp_jax.number_format import number
from dcmdp_jax.parallel.mesh import one_device_mesh
from dcmdp_jax.probe.columns.analysis import StateMeasure, compare_states
from dcmdp_jax.probe.columns.pairs import make_pairs, measure_states
from dcmdp_jax.probe.live import engines
from dcmdp_jax.probe.live.engines import ProbeSpec, in_places
from dcmdp_jax.probe.live.session import Session
from dcmdp_jax.rewards.protocol import NEED_ANSWERS, Problem
from dcmdp_jax.types import Rows
from research.oracle.gradients import (
    Gradients,
    JudgedBatch,
    Moments,
    Quality,
    half_width,
    leave_one_out,
    moments,
    quality,
    token_slopes,
)

Grade = Callable[[Sequence[Problem], Sequence[np.ndarray]], np.ndarray]

EXACT = ProbeSpec(kind="local", precision="float32", compute="float32")
"""The control's engine: the embedded one in the trainer's precision, whose log-probs are then the
trainer's own.
"""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Effect of a remedy on the gradient.

    Attributes:
        name: name of the remedy.
        moments: second moments, from which all but the intervals is computed.
        quality, half_width: against the exact control, and half of the 95% interval of each figure.
        gain, gain_half_width: error without remedy less this one's, batch by batch on the same
            samples.
        effective: effective number of samples: completions of a batch times (sum e)^2 / (n sum
            e^2), e being the factor that the remedy gives the loss's slope in each token that has
            one without remedy.
        dropped: share of those tokens whose slope is 0.
    """

    name: str
    moments: Moments
    quality: Quality
    half_width: Quality
    gain: float
    gain_half_width: float
    effective: float
    dropped: float


@dataclasses.dataclass(frozen=True)
class Verdicts:
    """The result of an oracle.

    Attributes:
        model, engine: names.
        prompts, group_size, batches: size of the samples of each of the two engines.
        discrepancy: mean |p - q| of the engine's tokens.
        reward, control_reward: mean rewards.
        control: the exact control against itself, from two halves of its batches: what noise alone
            looks like.
        remedies: in order of the error (see `moments`), the smallest first.
        states: measures of whole states of the engine's tokens, where it gives its top k.
    """

    model: str
    engine: str
    prompts: int
    group_size: int
    batches: int
    discrepancy: float
    reward: float
    control_reward: float
    control: Verdict
    remedies: tuple[Verdict, ...]
    states: tuple[StateMeasure, ...] = ()


def ask(
    session: Session,
    specs: Sequence[ProbeSpec],
    algorithm: AlgorithmSettings,
    *,
    batches: int,
    grade: Grade,
    arms: Mapping[str, AlgorithmSettings] | None = None,
) -> Iterator[Verdicts]:
    """Sample batches from an exact engine and from others, and compare each remedy's gradient with
    the exact one's.

    Args:
        session: model, problems, sampling, seed; the same prompts make every batch.
        specs: the engines.
        algorithm: settings that the remedies are options of.
        batches: number for each engine, at least 4.
        grade: the rewards of completions, from the problem and the token ids of each.
        arms: settings that are compared with no remedy in place of `entries`.

    Returns:
        The verdicts on each engine, as they are known.

    Raises:
        UserError: in one line: too few batches, problems without an answer, samples without a
            signal.
    """
    _check(session, batches, [algorithm, *(arms or {}).values()])
    row_logprobs = make_row_logprobs(
        session.run.model,
        Compute(),
        temperature=session.sampling.temperature,
        mesh=one_device_mesh(),
        top_gradient=True,
    )
    gradients = Gradients(
        lambda params, rows: _every(row_logprobs(params, rows)), session.run.params
    )
    truth, control_reward = _control(session, gradients, algorithm, batches, grade)
    samples = len(session.problems) * session.sampling.group_size
    half = batches // 2
    halves = truth[:half], truth[half : 2 * half]
    own = _verdict("exact control", *halves, [(1.0, 0.0)], samples, plain=halves[0])
    for spec in specs:
        collected, spreads, seen = _under_remedies(
            session, spec, gradients, algorithm, batches, grade, arms
        )
        plain = np.stack(collected[NOTHING])
        verdicts = [
            _verdict(name, np.stack(rows), truth, spreads[name], samples, plain=plain)
            for name, rows in collected.items()
        ]
        yield Verdicts(
            model=session.run.saved.name,
            engine=str(spec),
            prompts=len(session.problems),
            group_size=session.sampling.group_size,
            batches=batches,
            control_reward=control_reward,
            control=own,
            remedies=tuple(sorted(verdicts, key=_order)),
            **seen,
        )


def _check(session: Session, batches: int, settings: Sequence[AlgorithmSettings]) -> None:
    for each in settings:
        if (each.centers or each.state_penalty) and not session.run.config.rollout.top_logprobs:
            name = "score_centering" if each.centers else each.state_penalty
            raise UserError(
                f"config.rollout.top_logprobs: got 0, {name} needs the engine's top-k tokens; "
                "set 32"
            )
    if batches < 4:
        raise UserError(f"--batches: got {batches}, must be at least 4, to tell noise from bias")
    if session.sampling.group_size < 2:
        raise UserError(
            "config.rollout.group_size: got 1, must be at least 2 (one completion has no group to "
            "be compared with)"
        )
    if session.sampling.temperature == 0:
        raise UserError(
            "config.rollout.temperature: got 0 (greedy), whose samples are all equal; give one "
            "above 0"
        )
    all_need = all(name in NEED_ANSWERS for name in session.run.config.rewards.names)
    if all_need and (bare := [problem.index for problem in session.problems if not problem.answer]):
        raise UserError(f"config.task.train: row {bare[0]} has no answer; --remedies needs rewards")


def _control(
    session: Session, gradients: Gradients, algorithm: AlgorithmSettings, batches: int, grade: Grade
) -> tuple[np.ndarray, float]:
    """The gradient of each batch of the exact engine without remedy [B, K], and the mean reward."""
    program = _program(without_remedy(algorithm), session.sampling.max_completion_tokens)
    found = []
    rewards = []
    signals = 0
    for sampled in _batches(session, EXACT, grade, batches, seed=2 * session.seed + 1):
        everyone = np.ones(len(sampled.rewards), bool)
        signals += bool(np.any(has_signal(sampled.rewards, sampled.group_ids, everyone)))
        rewards.append(sampled.rewards.mean())
        if not signals and len(rewards) == 3:
            raise UserError(
                "--remedies: the rewards of every prompt are all equal in three batches, so no "
                "advantage is left to compare; give more --prompts or rollout.group_size, or "
                "problems that the model solves sometimes"
            )
        train = gradients.score(sampled.rows)
        # As precision "exact" has it: the sampler's log-probs are replaced by the trainer's own.
        sampled = sampled._replace(
            rows=sampled.rows.with_columns(rollout_logprobs=_of_sampled(sampled, train))
        )
        found.append(gradients.of(sampled.rows, {NOTHING: program(sampled, train)})[NOTHING])
        session.show(f"exact control: batch {len(found)} of {batches}")
    return np.stack(found), float(np.mean(rewards))


def _under_remedies(
    session: Session,
    spec: ProbeSpec,
    gradients: Gradients,
    algorithm: AlgorithmSettings,
    batches: int,
    grade: Grade,
    arms: Mapping[str, AlgorithmSettings] | None,
) -> tuple[dict[str, list[np.ndarray]], dict[str, list[tuple[float, float]]], dict[str, Any]]:
    """Gradients of an engine's batches and shares of its tokens kept, by remedy; discrepancy,
    reward, states.
    """
    collected: dict[str, list[np.ndarray]] = {}
    spreads: dict[str, list[tuple[float, float]]] = {}
    programs: dict[str, Callable] = {}
    deltas = []
    rewards = []
    tokens = []
    states = []
    for sampled in _batches(session, spec, grade, batches, seed=2 * session.seed):
        train = gradients.score(sampled.rows)
        if not programs:
            compared = (
                entries(algorithm, _tokens(sampled, train), listed=train.ndim == 3)
                if arms is None
                else ({NOTHING: without_remedy(algorithm), **arms})
            )
            limit = session.sampling.max_completion_tokens
            programs = {name: _program(one, limit) for name, one in compared.items()}
        slopes = {name: np.asarray(program(sampled, train)) for name, program in programs.items()}
        for name, gradient in gradients.of(sampled.rows, slopes).items():
            collected.setdefault(name, []).append(gradient)
            spreads.setdefault(name, [])
            if slopes[NOTHING].any():
                spreads[name].append(
                    _spread(*(_of_sampled(sampled, slopes[one]) for one in (name, NOTHING)))
                )
        rows = sampled.rows
        mask = sampled.rows.completion_mask
        own = _of_sampled(sampled, train)
        deltas.append(np.abs(np.exp(own) - np.exp(rows.rollout_logprobs))[mask].mean())
        tokens.append([x[mask] for x in (rows.input_ids, own, rows.rollout_logprobs)])
        if train.ndim == 3:
            ids, rollout = (rows.columns[name][mask] for name in (TOP_IDS, TOP_LOGPROBS))
            states.append(measure_states(ids, train[mask][:, 1:], rollout))
        rewards.append(sampled.rewards.mean())
        session.show(f"{spec}: batch {len(rewards)} of {batches}")
    seen = {"discrepancy": float(np.mean(deltas)), "reward": float(np.mean(rewards))}
    pairs = make_pairs(*zip(*tokens, strict=True), states=states or None)
    return collected, spreads, seen | {"states": compare_states(pairs)}


def _verdict(
    name: str,
    rows: np.ndarray,
    truth: np.ndarray,
    spreads: Sequence[tuple[float, float]],
    samples: int,
    *,
    plain: np.ndarray,
) -> Verdict:
    effective, dropped = np.mean(spreads, axis=0) if spreads else (0.0, 1.0)
    found = moments(rows, truth)
    judged = quality(found)
    before = quality(moments(plain, truth))
    left = []
    widths = Quality(*(math.nan,) * 5)
    width = math.nan
    if len(rows) > 2:
        left = leave_one_out(rows, truth)
        widths = Quality(*map(half_width, left.T))
        width = half_width(leave_one_out(plain, truth)[:, 0] - left[:, 0])
    return Verdict(
        name,
        found,
        judged,
        widths,
        before.error - judged.error,
        width,
        float(effective * samples),
        float(dropped),
    )


def _order(verdict: Verdict) -> float:
    return verdict.quality.error if math.isfinite(verdict.quality.error) else math.inf


def _program(settings: AlgorithmSettings, limit: int) -> Callable:
    # Not compiled: op by op all remedies share the programs of their operations, and the arrays are
    # small.
    return functools.partial(token_slopes, settings, settings.remedies(), limit=limit)


def _spread(slopes: np.ndarray, plain: np.ndarray) -> tuple[float, float]:
    """Effective share of the tokens under a remedy's factors, and the share of those that it
    stops.
    """
    penalized = plain != 0
    factors = slopes[penalized].astype(np.float64) / plain[penalized]
    squares = np.sum(factors**2)
    return float(np.sum(factors) ** 2 / (len(factors) * squares)) if squares else 0.0, float(
        np.mean(factors == 0)
    )


def _every(outputs: RowOutputs) -> jax.Array:
    """The log-probs of sampled tokens [R, L], with those of listed ones behind [R, L, 1 + k]."""
    if outputs.top_logprobs is None:
        return outputs.logprobs
    return jnp.concatenate([outputs.logprobs[..., None], outputs.top_logprobs], axis=-1)


def _of_sampled(sampled: JudgedBatch, values: np.ndarray) -> np.ndarray:
    return values.reshape(*sampled.rows.input_ids.shape, -1)[..., 0]


def _tokens(sampled: JudgedBatch, train: np.ndarray) -> Tokens:
    rows = sampled.rows
    train = _of_sampled(sampled, train)
    return Tokens(
        train_logprobs=train,
        old_logprobs=train,
        rollout_logprobs=rows.rollout_logprobs,
        advantages=np.zeros_like(train),
        completion_mask=rows.completion_mask,
        completion_index=rows.completion_index,
        num_completions=len(sampled.rewards),
    )


def _batches(
    session: Session, spec: ProbeSpec, grade: Grade, batches: int, *, seed: int
) -> Iterator[JudgedBatch]:
    """Batches of one engine on the session's prompts, with their rewards."""
    run = session.run
    prompts = session.prompts(run)
    total = session.total_tokens(prompts, [run])
    session.show(f"starting {spec}")
    with tempfile.TemporaryDirectory() as directory:
        engine = engines.build(
            spec, run, directory=Path(directory) / "engine", max_total_tokens=total
        )
        with contextlib.closing(engine):
            for batch in range(batches):
                found = engines.sample(
                    engine, prompts, session.sampling, seed=seed * batches + batch
                )
                problems = [session.problems[index] for index in found.prompt_index]
                rewards = np.asarray(grade(problems, found.completion_ids), np.float32)
                yield JudgedBatch(
                    _rows(prompts, found, total), rewards, found.prompt_index.astype(np.int32)
                )


def _rows(prompts: Sequence[np.ndarray], found: engines.Sampled, length: int) -> Rows:
    rows = one_a_row([prompts[index] for index in found.prompt_index], found.completion_ids, length)
    logprobs = np.zeros(rows.input_ids.shape, np.float32)
    logprobs[rows.completion_mask] = np.concatenate(found.logprobs)
    lists = {TOP_IDS: found.top_ids, TOP_LOGPROBS: found.top_logprobs} if found.top_ids else {}
    lists = {name: in_places(rows, np.concatenate(values)) for name, values in lists.items()}
    return rows.with_columns(rollout_logprobs=logprobs, **lists)


def summary(verdicts: Verdicts) -> Mapping[str, str]:
    """The result in words: the best remedy if it is told from none, and what it costs."""
    best = verdicts.remedies[0]
    plain = next(v for v in verdicts.remedies if v.name == NOTHING)
    if not math.isfinite(best.quality.error):
        return {
            "best": "not known: noise hides the exact engine's gradient itself; give more "
            "--batches or --prompts"
        }
    if best is plain:
        return {
            "best": "no remedy: none of them brings the gradient nearer to the exact engine's at "
            "this batch size"
        }
    others = len(verdicts.remedies) - 1
    batches = verdicts.batches
    # The best of several is ahead by chance: Bonferroni's interval.
    width = best.gain_half_width * t_quantile(batches, 1 - 0.05 / others) / t_quantile(batches)
    lead = (
        f"{best.quality.error:.2f} against {plain.quality.error:.2f} without remedy and 1 of a "
        "gradient of zero"
    )
    words = {
        "best": f"{best.name}: its gradient has the smallest error at its best length, {lead}, on "
        "this model and engine"
    }
    if not best.gain > width:
        words["best"] = (
            f"not told: {best.name} has the smallest error at its best length, {lead}, but a lead "
            f"of {best.gain:.2f} is within what chance gives the first of {others} "
            f"({number(width, '.2f')}); more --batches would tell"
        )
    noise, before = (one.quality.variance / one.quality.length**2 for one in (best, plain))
    more = (
        ""
        if math.isnan(noise / before)
        else (
            f"{abs(noise / before - 1):.0%} {'more' if noise > before else 'less'} variance at "
            "equal length; "
        )
    )
    words["cost"] = (
        f"{more}{best.dropped:.1%} of the tokens have no gradient; {best.effective:.0f} effective "
        f"samples of {verdicts.prompts * verdicts.group_size}"
    )
    return words


NOTHING = "no remedy"
CONFIGURED = "as configured"
SKYRL_BAND = Call("geometric_rejection", {"low": 0.99, "high": 1.01})
DROPPED_SHARE = 0.05
"""Share of the tokens that a filter without a default size is set to drop."""


def without_remedy(base: AlgorithmSettings) -> AlgorithmSettings:
    """GRPO with the normalizations of `base`."""
    return dataclasses.replace(
        base,
        method="grpo",
        corrections="",
        trust_region="clip",
        loss="surrogate",
        ratio_denominator="train",
        ratio_level="token",
        level="token",
    )


def entries(
    base: AlgorithmSettings, tokens: Tokens, *, listed: bool = False
) -> dict[str, AlgorithmSettings]:
    """Settings of each remedy by name: none, penalties, corrections, trust regions, losses, `base`
    if it is another.

    Penalties penalty at lambda and c of `base`. Trust regions have the engine's probability in the
    ratio's denominator: at the first update of a step they would all do the same with the
    trainer's. `acr` is a bound beside `tis`. A filter without a default size gets the one that
    drops 5% of the tokens; `geometric_rejection` has its own band and SkyRL's.

    Args:
        base: settings of the run.
        tokens: some of the engine's, which sizes are taken from.
        listed: the engine's top-k tokens are known: penalties of a state and `score_centering`
            are compared too.
    """
    plain = without_remedy(base)
    found = {NOTHING: plain}
    for name in PENALTIES:
        if name != "grpo":
            for level in ("token", "sequence"):
                label = name if level == "token" else f"{name}, whole completions"
                found[label] = dataclasses.replace(plain, method=name, level=level)
    calls = [Call(name, {}) for name in CORRECTIONS if name != "kl_rejection"]
    for over, estimator in itertools.product(get_args(KlOver), get_args(KlEstimator)):
        kind = {"estimator": estimator, "over": over}
        calls.append(
            Call(
                "kl_rejection",
                kind | {"high": _size(functools.partial(kl_rejection, **kind), tokens)},
            )
        )
    for call in map(str, (*calls, SKYRL_BAND)):
        found[call] = dataclasses.replace(plain, corrections=call)
    for call in map(_with_sizes, TRUST_REGIONS.items()):
        beside = (
            {"corrections": "tis"} if call.startswith("acr") else {"ratio_denominator": "rollout"}
        )
        found[call] = dataclasses.replace(plain, trust_region=call, **beside)
    for call in map(_with_sizes, LOSSES.items()):
        found[call] = dataclasses.replace(plain, loss=call)
    del (
        found["surrogate"],
        found["likelihood"],
    )  # the loss without remedy, and that of conversations
    if listed:
        found |= {name: dataclasses.replace(plain, method=name) for name in STATE_PENALTIES}
        for call in ("score_centering", "tis,score_centering"):
            found[call] = dataclasses.replace(plain, corrections=call)
    if base not in map(canonical, found.values()):
        found[CONFIGURED] = base
    return found


def _with_sizes(named: tuple[str, Callable[..., Any]]) -> str:
    name, function = named
    sizes = inspect.getfullargspec(function).kwonlydefaults or {}
    return str(
        Call(
            name,
            {size: value for size, value in sizes.items() if isinstance(value, float) and value},
        )
    )


def _size(filter_of: Callable[..., Corrected], tokens: Tokens) -> float:
    """The largest estimate, to three digits, at which a filter drops 5% of the tokens; 1e-6 if it
    never does.
    """
    low, high = -6.0, 3.0
    mask = np.asarray(tokens.completion_mask)
    for _ in range(24):
        middle = (low + high) / 2
        dropped = ~np.asarray(filter_of(tokens, high=10.0**middle).keep)[mask]
        low, high = (middle, high) if dropped.mean() > DROPPED_SHARE else (low, middle)
    return float(f"{10.0**high:.3g}")
