"""A whole probe: pairs of engines on one model and one task."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.config.settings import TaskSettings
from dcmdp_jax.data.chat import chat_messages, render_chat, template_variables, with_suffix
from dcmdp_jax.data.prompts import encode_prompts
from dcmdp_jax.data.tokenizer import encode_texts, token_text
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from dcmdp_jax.errors import UserError, one_line
from dcmdp_jax.probe.columns.analysis import Measured
from dcmdp_jax.probe.columns.evidence import Lifted
from dcmdp_jax.probe.columns.pairs import Ragged, TokenPairs, probability_difference
from dcmdp_jax.probe.live import engines
from dcmdp_jax.probe.live.compare import Setup, compare, explained, is_settled, sampling_floor
from dcmdp_jax.probe.live.engines import SAMPLING_KINDS, ProbeSpec
from dcmdp_jax.rewards.protocol import Problem
from dcmdp_jax.run.saved_model import Policy, SavedModel

_MOST_LIFTED = 64
"""Completions scored again by an engine without one of its settings."""
_PROBE_SEED_OFFSET = 13_000_027
"""Added to the seed: what a run has trained on is likelier now than samples are, and the same seed
would draw it again.
"""
_SYSTEM = "You are a helpful assistant."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """Objects that all pairs of a probe share.

    Attributes:
        run: the trainer's model, of every engine that names no other, and the settings.
        problems: the problems that are sampled.
        sampling: the distribution that the first engine samples from.
        score_temperature: temperature that the second one scores at.
        earlier: models whose weights the first engine may still hold.
        load: reads the model of an engine that names its own.
        rescore: whether to score again with one thing changed at a time.
        show: called with a line on what is being done.
        keep: gets the pairs as they are after each measurement.
    """

    run: Policy
    problems: Sequence[Problem]
    sampling: SamplingParams
    score_temperature: float
    earlier: Sequence[SavedModel]
    load: Callable[[Path], Policy]
    rescore: bool
    show: Callable[[str], None]
    keep: Callable[[list[Measured]], None] = lambda measured: None

    @property
    def seed(self) -> int:
        """Seed of the samples."""
        return self.run.config.training.seed + _PROBE_SEED_OFFSET

    def run_of(self, spec: ProbeSpec) -> Policy:
        """The model of an engine."""
        if spec.model:
            return self.load(Path(spec.model))
        return self.run

    def prompts(self, run: Policy) -> Ragged:
        """The problems as token ids, by a model's tokenizer."""
        task = self.run.config.task
        return encode_prompts(
            self.problems,
            run.tokenizer,
            prompt_suffix=task.prompt_suffix,
            max_prompt_tokens=2**31 - 1,
            chat_template_kwargs=task.chat_template_kwargs,
        ).token_ids

    def total_tokens(self, prompts: Ragged, runs: Sequence[Policy]) -> int:
        """Tokens of the longest prompt with its completion.

        Raises:
            UserError: in one line, if a model has no room for them.
        """
        limit = self.sampling.max_completion_tokens
        longest = max(map(len, prompts))
        total = longest + limit
        room = _room(runs)
        if total > room:
            raise UserError(
                f"config.rollout.max_completion_tokens: {limit} and the longest prompt of "
                f"{longest} make {total} tokens, the model has max_position_embeddings={room}"
            )
        return total


def _room(runs: Sequence[Policy]) -> int:
    return min(run.model.max_position_embeddings for run in runs)


def check_specs(first: Sequence[ProbeSpec], second: ProbeSpec) -> None:
    """Refuse engines that can't do what is asked of them, before anything is loaded.

    Raises:
        UserError: in one line.
    """
    for spec in first:
        if spec.record is None:
            raise UserError(
                f"--a: {spec} only scores; engines that sample are {', '.join(SAMPLING_KINDS)}"
            )
        if not (spec.record.takes_weights or spec.record.scores):
            raise UserError(
                f"--a: {spec} holds weights of its own and can't score; a server of `http` can"
            )
    if second.record is not None and not (second.record.scores and second.record.takes_weights):
        raise UserError(
            f"--b: {second} can't score synced weights; trainer, hf and "
            f"{', '.join(SAMPLING_KINDS)} can"
        )
    if second.kind == "trainer" and second.model:
        raise UserError(
            "--b: trainer is of the probed model (--model); it takes no model of its own"
        )


def probe_pairs(session: Session, first: Sequence[ProbeSpec], second: ProbeSpec) -> list[Measured]:
    """Measure each engine of `first` against `second`.

    One that this machine can't run is left out with a line.

    Raises:
        UserError: if the engines' vocabularies differ, a prompt leaves no room, or no pair could be
            measured.
    """
    measured: list[Measured] = []
    for spec in first:
        pair = _probe(session, spec, second, lambda pair: session.keep([*measured, pair]))
        if pair is not None:
            measured.append(pair)
    if not measured:
        raise UserError("no pair could be measured; the lines above say why")
    return measured


def _probe(
    session: Session,
    spec: ProbeSpec,
    other: ProbeSpec,
    keep: Callable[[Measured], None],
) -> Measured | None:
    """Measure a pair of engines; None, after a line, if one of them does not start here."""
    sampling_run = session.run_of(spec)
    scoring_run = session.run_of(other)
    runs = (sampling_run, scoring_run)
    names = (str(spec), str(other))
    if spec == other:
        names = (f"{spec} (a)", f"{other} (b)")
    engines.check_same_tokens(
        sampling_run.tokenizer.get_vocab(), scoring_run.tokenizer.get_vocab(), names
    )
    # Each engine renders the prompts by its own tokenizer, as two frameworks would.
    sampling_prompts = session.prompts(sampling_run)
    scoring_prompts = session.prompts(scoring_run)
    total = session.total_tokens([*sampling_prompts, *scoring_prompts], runs)
    longest_prompt = _room(runs) - session.sampling.max_completion_tokens

    with contextlib.ExitStack() as stack:
        engine_of_name = {}
        for name, engine_spec, run in zip(names, (spec, other), runs, strict=True):
            session.show(f"starting {engine_spec}")
            # `hf` writes its copy of the model beside the directory first, then moves it there.
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "engine"
            try:
                engine = engines.build(
                    engine_spec,
                    run,
                    directory=directory,
                    max_total_tokens=total,
                )
            except (UserError, EngineError, MemoryError) as error:
                reason = one_line(error)
                if name == names[1]:
                    reason = f"{other} did not start: {reason}"
                session.show(f"{spec} left out: {reason}")
                return None
            engine_of_name[name] = stack.enter_context(contextlib.closing(engine))

        sampling = dataclasses.replace(session.sampling, stop_token_ids=sampling_run.stop_token_ids)
        sampler = engine_of_name[names[0]]
        completions = len(sampling_prompts) * sampling.group_size
        session.show(f"{names[0]}: sampling {completions} completions")
        sampled = engines.sample(sampler, sampling_prompts, sampling, seed=session.seed)
        floor = sampling_floor(sampler, sampled.episodes, sampling, seed=session.seed)
        setup = _setup(session, spec, scoring_run, scoring_prompts, longest_prompt, floor)
        source = {
            "model": session.run.saved.name,
            "family": session.run.model.model_type,
            "sampled by": names[0],
            "scored by": names[1],
            "temperature": f"{sampling.temperature:g} sampled, {session.score_temperature:g} "
            "scored",
            "top-p": f"{sampling.top_p:g}",
        }
        release_freed_memory()
        measured = compare(
            f"{spec} - {other}", source, sampled, engine_of_name, setup, show=session.show
        )
    release_freed_memory()
    keep(measured)
    if not session.rescore:
        return measured

    measured = explained(measured, sampled.prompt_index, setup, show=session.show, keep=keep)
    if is_settled(measured):
        return measured
    lifted = _lifted(session, spec, sampling_run, sampling_prompts, sampled, measured, total)
    return dataclasses.replace(measured, lifted=lifted)


def _setup(
    session: Session,
    spec: ProbeSpec,
    scoring_run: Policy,
    prompts: Ragged,
    longest_prompt: int,
    floor: float | None,
) -> Setup:
    """Gather what a comparison needs beside the two engines.

    Args:
        session: the probe.
        spec: the engine that samples.
        scoring_run: model of the engine that scores.
        prompts: token ids as that engine gets them.
        longest_prompt: tokens that fit beside a completion; longer variants are not scored.
        floor: noise of the sampling engine, if measured.
    """
    variants = {}
    rounded_params = None
    if session.rescore:
        rounded_params = session.run.saved.load_as_rounded(spec.precision)
        task = session.run.config.task
        prompts_by_name = prompt_variants(session.problems, scoring_run.tokenizer, task)
        for name, variant in prompts_by_name.items():
            if max(map(len, variant)) <= longest_prompt:
                variants[name] = variant

    return Setup(
        config=session.run.model,
        params=session.run.params,
        prompts=prompts,
        temperature=session.score_temperature,
        earlier={saved.name: saved.load("float32") for saved in session.earlier},
        prompt_variants=variants,
        text=token_text(scoring_run.tokenizer),
        compute=spec.compute,
        settings=spec.costs,
        sampling_floor=floor,
        as_rounded=rounded_params,
        cache=engines.cache_rounding(spec),
        precision=spec.precision,
    )


def _lifted(
    session: Session,
    spec: ProbeSpec,
    run: Policy,
    prompts: Ragged,
    sampled: engines.Sampled,
    measured: Measured,
    total: int,
) -> list[Lifted]:
    """Price of each quantization, by the engine without it; none if that does not run here."""
    with tempfile.TemporaryDirectory() as directory:

        def build(other: ProbeSpec) -> engines.Scorer:
            session.show(f"{measured.name}: scoring with {other}")
            path = Path(directory) / other.cache
            return engines.build(other, run, directory=path, max_total_tokens=total)

        temperature = session.sampling.temperature
        try:
            return lift(spec, build, prompts, sampled, measured.pairs, temperature=temperature)
        except (UserError, EngineError, MemoryError) as error:
            session.show(f"{measured.name}: not scored without its settings: {one_line(error)}")
            return []


def lift(
    spec: ProbeSpec,
    build: Callable[[ProbeSpec], engines.Scorer],
    prompts: Ragged,
    sampled: engines.Sampled,
    pairs: TokenPairs,
    *,
    temperature: float,
) -> list[Lifted]:
    """Measure the mismatch that is left without each setting that has a price (`ProbeSpec.costs`).

    An emulation tells a quantized cache or weights only where it rounds as the engine does. The
    engine itself, built once more without the setting, needs no emulation: the rest of it, kernels
    included, stays as it is.

    Args:
        spec: the engine that sampled.
        build: makes an engine with the same weights.
        prompts: token ids, as that engine got them.
        sampled: tokens of the engine; the first 64 completions are scored again.
        pairs: the same completions with both log-probs.
        temperature: sampling temperature.

    Raises:
        UserError, EngineError, MemoryError: if such an engine does not start or score here.
    """
    pairs = pairs.where(pairs.completion < _MOST_LIFTED)
    mismatch = pairs.discrepancy.sum()
    asked_prompts = [prompts[index] for index in sampled.prompt_index[:_MOST_LIFTED]]
    completions = sampled.completion_ids[:_MOST_LIFTED]

    lifted = []
    for cause in spec.costs:
        other = spec.without(cause)
        with contextlib.closing(build(other)) as engine:
            logprobs = engine.score(asked_prompts, completions, temperature=temperature)
        remaining = probability_difference(np.concatenate(logprobs), pairs.train_logprobs).sum()
        share = 1 - remaining / mismatch if mismatch else 0.0
        lifted.append(Lifted(engine=str(other), cause=cause, share=share))
    return lifted


def prompt_variants(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, task: TaskSettings
) -> dict[str, Ragged]:
    """The prompts as a wrong pipeline would render them: name -> token ids.

    Without the chat template, without the start of the assistant's turn, with a system message,
    without the suffix, with the beginning-of-sequence token in front. Those equal to the right
    ones, or with an empty prompt, are left out.
    """
    variables = template_variables(task.chat_template_kwargs, tokenizer)
    suffix = task.prompt_suffix

    def chats(*, system: bool = False, ending: str = suffix, generation: bool = True) -> list[str]:
        rendered = []
        for problem in problems:
            messages = chat_messages(problem, ending)
            if system:
                messages = [{"role": "system", "content": _SYSTEM}, *messages]
            rendered.append(
                render_chat(tokenizer, messages, problem.tools, generation=generation, **variables)
            )
        return rendered

    right_texts = chats()
    texts = {
        "text without a chat template": [with_suffix(problem, suffix) for problem in problems],
        "a chat without the start of the assistant's turn": chats(generation=False),
    }
    # Templates raise what they like at a role they do not have.
    with contextlib.suppress(Exception):
        texts["a chat with a system message in front"] = chats(system=True)
    texts["a chat without the prompt suffix"] = chats(ending="")
    if tokenizer.bos_token:
        in_front = [tokenizer.bos_token + text for text in right_texts]
        texts["a chat with the beginning-of-sequence token in front"] = in_front

    variants = {}
    for name, rendered in texts.items():
        if rendered != right_texts and all(rendered):
            encoded = encode_texts(tokenizer, rendered, "the prompts")
            variants[name] = [np.asarray(ids, np.int32) for ids in encoded]
    return variants
