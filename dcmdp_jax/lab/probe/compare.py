"""Sample with one engine, score with another, and measure what `mismatch` needs to name the cause."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dcmdp_jax.data.episode import single_turn
from dcmdp_jax.engines.protocol import Engine, EngineError, SamplingParams, sample_alone
from dcmdp_jax.lab.mismatch.analysis import Measured
from dcmdp_jax.lab.mismatch.diagnosis import FLOAT32_ROUNDING
from dcmdp_jax.lab.mismatch.evidence import OperatorDifference
from dcmdp_jax.lab.mismatch.pairs import make_pairs, probability_difference
from dcmdp_jax.lab.mismatch.states import measure_states
from dcmdp_jax.lab.probe.engines import Sampled, Scorer, TrainingStack
from dcmdp_jax.lab.probe.operators import observed, operator_differences, tokens_of
from dcmdp_jax.lab.probe.rescoring import Rescoring, Setup

logger = logging.getLogger(__name__)

_SCORED_AGAIN, _SAMPLED_AGAIN, _TOKENS_AGAIN = 16, 4, 32
_ENOUGH = 0.95


def compare(
    name: str,
    source: Mapping[str, str],
    sampled: Sampled,
    engines: Mapping[str, Scorer],
    setup: Setup,
    *,
    show: Callable[[str], None] = logger.info,
) -> Measured:
    """Score what was sampled with the second engine, and measure both noise floors.

    Args:
        name, source: title and origin of the pair, for people.
        sampled: tokens of the first engine, or what became of them on the way to the second.
        engines: name -> the engine that sampled, and the one that scores.
        setup: the prompts and sampling that both engines got.
        show: called with a line on what is being done.
    """
    prompts = [setup.prompts[index] for index in sampled.prompt_index]
    (first, sampler), (_, scorer) = engines.items()
    show(f"{name}: scoring {sum(map(len, sampled.completion_ids)):,} tokens")
    entropies, states = None, None
    asked = prompts, sampled.completion_ids
    if isinstance(scorer, TrainingStack):
        train, entropies = scorer.score_with_entropies(*asked, temperature=setup.temperature)
        if sampled.top_ids is not None:
            top = scorer.score_listed(*asked, sampled.top_ids, temperature=setup.temperature)
            states = list(map(measure_states, sampled.top_ids, top, sampled.top_logprobs))
    else:
        train = scorer.score(*asked, temperature=setup.temperature)
    try:
        scored = sampler.score(*asked, temperature=setup.temperature)
    except EngineError as error:
        logger.warning("neither a noise floor nor the legs of the gap: %s", error)
        scored = None
    floors = {} if setup.sampling_floor is None else {first: setup.sampling_floor}
    for (engine_name, engine), together in zip(engines.items(), (scored, train), strict=True):
        if together is not None:
            try:
                floor = noise_floor(engine, *asked, temperature=setup.temperature, together=together)
                floors[engine_name] = max(floor, floors.get(engine_name, 0.0))
            except EngineError as error:
                logger.warning("no noise floor: %s", error)
    pairs = make_pairs(sampled.completion_ids, train, sampled.logprobs, entropies=entropies, states=states)
    # Until it is measured: `explained`.
    rounding = FLOAT32_ROUNDING if setup.compute == "float32" else None
    return Measured(
        name, source, pairs, setup.text, floors, rounding, settings=setup.settings,
        operators=_operators(sampler, setup, *asked),
        scored=None if scored is None else np.concatenate(scored), recurrent=bool(setup.config.recurrent_layers),
    )  # fmt: skip


def _operators(
    engine: Scorer, setup: Setup, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]
) -> list[OperatorDifference]:
    """Differences of the engine's operators; none of another model's, or of one that can't be looked into."""
    if getattr(engine, "config", setup.config) != setup.config:
        return []
    tokens = tokens_of(prompts, completions)
    try:
        seen = observed(engine, tokens)
    except EngineError as error:
        logger.warning("the engine's operators are not looked into: %s", error)
        return []
    return operator_differences(setup.params, setup.config, tokens, seen) if seen else []


def explained(
    measured: Measured,
    prompt_index: np.ndarray,
    setup: Setup,
    *,
    show: Callable[[str], None] = logger.info,
    keep: Callable[[Measured], None] = lambda measured: None,
) -> Measured:
    """Score again with one thing changed at a time, until one change explains 95% of the mismatch.

    Where the mismatch is within the noise floor, one change is enough.

    Args:
        measured: the pair.
        prompt_index: [N] int, the prompt that each completion answers.
        setup: arguments of `compare`.
        show: called with a line on what each change explains.
        keep: gets the pair as it is after each.
    """
    agrees = measured.pairs.discrepancy.mean() <= max([*measured.floors.values(), FLOAT32_ROUNDING])
    rescoring = Rescoring(setup, measured.pairs, prompt_index)
    measured = dataclasses.replace(measured, rounding=rescoring.rounding())
    for explanation in rescoring.explanations():
        show(f"{measured.name}: scoring with {explanation.name} explains {max(explanation.share, 0):.0%}")
        measured = dataclasses.replace(measured, explanations=[*measured.explanations, explanation])
        keep(measured)
        if agrees or is_settled(measured):
            break
    return measured


def is_settled(measured: Measured) -> bool:
    """Whether one change explains 95% of the mismatch."""
    return any(each.share >= _ENOUGH for each in measured.explanations)


def sampling_floor(
    engine: Engine, prompts: Sequence[np.ndarray], sampling: SamplingParams, sampled: Sampled, *, seed: int
) -> float | None:
    """Mean |q - q'| of the first completions' beginnings, sampled among the others and each alone (`sample_alone`).

    Args:
        engine: the engine that sampled.
        prompts, sampling, seed: arguments of the call that sampled.
        sampled: its result.

    Returns:
        The floor; None where not one first token is the same, or there is one completion only.
    """
    count = len(sampled.completion_ids)
    if count < 2:
        return None
    few = {
        row: single_turn(
            prompts[sampled.prompt_index[row]], sampled.completion_ids[row], sampled.logprobs[row], policy_version=0,
            group=0, member=0, finish_reason="length",
        )
        for row in range(min(count, _SAMPLED_AGAIN))
    }  # fmt: skip
    short = dataclasses.replace(sampling, max_completion_tokens=min(_TOKENS_AGAIN, sampling.max_completion_tokens))
    together, alone = sample_alone(engine, few, short, seed=seed, step=0)
    return float(probability_difference(together, alone).mean()) if together.size else None


def noise_floor(
    engine: Scorer,
    prompts: Sequence[np.ndarray],
    completions: Sequence[np.ndarray],
    *,
    temperature: float,
    together: Sequence[np.ndarray],
) -> float:
    """Mean |p - p'| of an engine against itself: the first 16 completions, each alone and all together.

    Args:
        engine: the engine.
        prompts, completions: token ids.
        temperature: temperature of its log-probs.
        together: log-probs for all of them in one call.
    """
    alone = [
        engine.score([prompt], [completion], temperature=temperature)[0]
        for prompt, completion in zip(prompts[:_SCORED_AGAIN], completions, strict=False)
    ]
    return float(probability_difference(*map(np.concatenate, (together[: len(alone)], alone))).mean())
