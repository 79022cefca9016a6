"""A whole probe: pairs of engines on one model and one task."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.data.prompts import encode_prompts, token_text
from dcmdp_jax.engines.kind import EngineKind
from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.mismatch.analysis import Measured
from dcmdp_jax.lab.mismatch.evidence import Lifted
from dcmdp_jax.lab.mismatch.pairs import TokenPairs
from dcmdp_jax.lab.probe import engines
from dcmdp_jax.lab.probe.compare import Setup, compare, sampling_floor
from dcmdp_jax.lab.probe.models import Model, prompt_variants
from dcmdp_jax.lab.probe.specs import SAMPLING_KINDS, ProbeSpec
from dcmdp_jax.rewards.protocol import Problem

_MOST_LIFTED = 64


@dataclasses.dataclass(frozen=True)
class Session:
    """Objects that all pairs of a probe share.

    Attributes:
        model: the trainer's, of every engine that names no other.
        problems: what is asked.
        prompt_suffix, chat_template_kwargs: of each prompt, as the settings of `task`.
        sampling: the distribution that the first engine samples from.
        score_temperature: that the second one scores at.
        seed: of the samples.
        earlier: models whose weights the first engine may still hold.
        load: reads the model of an engine that names its own.
        settings: gives an engine's own settings.
        max_rows: completions in one batch.
        rescore: whether to score again with one thing changed at a time.
        show: is told what is being done.
    """

    model: Model
    problems: Sequence[Problem]
    prompt_suffix: str
    chat_template_kwargs: str
    sampling: SamplingParams
    score_temperature: float
    seed: int
    earlier: Sequence[Model]
    load: Callable[[Path], Model]
    settings: Callable[[EngineKind], Any]
    max_rows: int
    rescore: bool
    show: Callable[[str], None]


def check_specs(first: Sequence[ProbeSpec], second: ProbeSpec) -> None:
    """Refuse engines that can't do what is asked of them, before anything is loaded.

    Raises:
        UserError: in one line.
    """
    for spec in first:
        if spec.record is None:
            raise UserError(f"--a: {spec} only scores; engines that sample are {', '.join(SAMPLING_KINDS)}")
        if not spec.record.pushes:
            raise UserError(f"--a: {spec} holds weights of its own; the probe gives both engines the same")
    if second.record is not None and not (second.record.scores and second.record.pushes):
        raise UserError(f"--b: {second} can't score pushed weights; trainer, hf and {', '.join(SAMPLING_KINDS)} can")
    if second.kind == "trainer" and second.model:
        raise UserError("--b: trainer is of the probed model (--model); it takes no model of its own")


def probe_pairs(session: Session, first: Sequence[ProbeSpec], second: ProbeSpec) -> list[Measured]:
    """Measure each engine of `first` against `second`. One that this machine can't run is told and left out.

    Raises:
        UserError: if the engines' vocabularies differ, a prompt leaves no room, or no pair could be measured.
    """
    measured = []
    for spec in first:
        try:
            measured.append(_probe(session, spec, second))
        except _Refused as error:
            session.show(f"{spec} left out: {error}")
    if not measured:
        raise UserError("no pair could be measured; the lines above say why")
    return measured


class _Refused(Exception):
    """An engine that does not start here."""


def _probe(session: Session, spec: ProbeSpec, other: ProbeSpec) -> Measured:
    models = [session.load(Path(each.model)) if each.model else session.model for each in (spec, other)]
    names = _names(spec, other)
    engines.check_same_tokens(*(model.tokenizer.get_vocab() for model in models), names)
    suffix, variables = session.prompt_suffix, session.chat_template_kwargs
    # Each engine renders the prompts by its own tokenizer, as two frameworks would.
    prompts = [
        encode_prompts(
            session.problems,
            model.tokenizer,
            prompt_suffix=suffix,
            max_prompt_tokens=2**31 - 1,
            chat_template_kwargs=variables,
        ).token_ids
        for model in models
    ]
    variants = prompt_variants(session.problems, models[1].tokenizer, suffix, variables) if session.rescore else {}
    limit = session.sampling.max_completion_tokens
    longest = max(len(ids) for side in prompts for ids in side)
    total = longest + limit
    if total > (room := min(model.config.max_position_embeddings for model in models)):
        raise UserError(
            f"--max-completion-tokens: {limit} and the longest prompt of {longest} make {total} tokens, the model has "
            f"max_position_embeddings={room}"
        )
    variants = {name: side for name, side in variants.items() if max(map(len, side)) + limit <= room}
    sizes = {"max_total_tokens": total, "max_rows": session.max_rows, "settings": session.settings}
    with contextlib.ExitStack() as stack:
        built = []
        for place, (each, model) in enumerate(zip((spec, other), models, strict=True)):
            session.show(f"starting {each}")
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / str(place)
            try:
                engine = engines.build(each, model.config, model.params, directory=directory, **sizes)
            except (UserError, EngineError, MemoryError) as error:
                raise _Refused(" ".join(str(error).split())) from error
            built.append(stack.enter_context(contextlib.closing(engine)))
        sampling = dataclasses.replace(session.sampling, stop_token_ids=models[0].stop_token_ids)
        session.show(f"{names[0]}: sampling {len(prompts[0]) * sampling.group_size} completions")
        sampled = engines.sample(built[0], prompts[0], sampling, seed=session.seed)
        setup = Setup(
            session.model.config, session.model.params, prompts[1], session.score_temperature,
            {model.name: model.params for model in session.earlier}, variants,
            token_text(models[1].tokenizer), session.max_rows,
            spec.compute, spec.costs, sampling_floor(built[0], prompts[0], sampling, sampled, seed=session.seed),
        )  # fmt: skip
        source = {
            "model": session.model.name, "sampled by": names[0], "scored by": names[1],
            "temperature": f"{sampling.temperature:g} sampled, {session.score_temperature:g} scored",
            "top-p": f"{sampling.top_p:g}",
        }  # fmt: skip
        pair = dict(zip(names, built, strict=True))
        measured = compare(
            f"{spec} - {other}", source, sampled, pair, setup, rescore=session.rescore, show=session.show
        )
    if not session.rescore:
        return measured
    lifted = _lifted(session, spec, models[0], prompts[0], sampled, measured, sizes)
    return dataclasses.replace(measured, lifted=lifted)


def _lifted(
    session: Session, spec: ProbeSpec, model: Model, prompts: Sequence[np.ndarray], sampled: engines.Sampled,
    measured: Measured, sizes: Mapping[str, Any],
) -> list[Lifted]:  # fmt: skip
    """Price of each quantization, by the engine without it; empty if that engine does not run here."""
    with tempfile.TemporaryDirectory() as directory:

        def build(other: ProbeSpec) -> engines.Scorer:
            session.show(f"{measured.name}: scoring with {other}")
            return engines.build(other, model.config, model.params, directory=Path(directory) / other.cache, **sizes)

        try:
            return lift(spec, build, prompts, sampled, measured.pairs, temperature=session.sampling.temperature)
        except (UserError, EngineError, MemoryError) as error:
            session.show(f"{measured.name}: not scored without its settings: {' '.join(str(error).split())}")
            return []


def _names(spec: ProbeSpec, other: ProbeSpec) -> tuple[str, str]:
    """The names of a pair's engines, which may be two of the same kind."""
    return (f"{spec} (a)", f"{other} (b)") if spec == other else (str(spec), str(other))


def lift(
    spec: ProbeSpec,
    build: Callable[[ProbeSpec], engines.Scorer],
    prompts: Sequence[np.ndarray],
    sampled: engines.Sampled,
    pairs: TokenPairs,
    *,
    temperature: float,
) -> list[Lifted]:
    """Measure the mismatch that is left without each setting that has a price (`ProbeSpec.costs`).

    An emulation tells a quantized cache or weights only where it rounds as the engine does. The engine itself, built
    once more without the setting, needs no emulation: the rest of it, kernels included, stays as it is.

    Args:
        spec: the engine that sampled.
        build: makes an engine with the same weights.
        prompts: token ids, as that engine got them.
        sampled: by it; the first 64 completions are scored again.
        pairs: the same completions with both log-probs.
        temperature: of the sampling.

    Raises:
        UserError, EngineError, MemoryError: if such an engine does not start or score here.
    """
    count = min(_MOST_LIFTED, len(pairs.lengths))
    tokens = int(pairs.lengths[:count].sum())
    p, q = (np.exp(x[:tokens].astype(np.float64)) for x in (pairs.train_logprobs, pairs.rollout_logprobs))
    whole = np.abs(q - p).sum()
    asked = [prompts[index] for index in sampled.prompt_index[:count]], sampled.completion_ids[:count]
    found = []
    for cause in spec.costs:
        other = spec.without(cause)
        engine = build(other)
        try:
            h = np.exp(np.concatenate(engine.score(*asked, temperature=temperature)).astype(np.float64))
        finally:
            engine.close()
        found.append(Lifted(str(other), cause, float(1 - np.abs(h - p).sum() / whole) if whole else 0.0))
    return found
