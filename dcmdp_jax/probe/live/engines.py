"""Engines that a probe compares, by name, and the training stack as one that scores.

A name is `vllm:bfloat16,cache=fp8,model=DIR`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.config.checks import as_settings, engine_arguments, of_engine
from dcmdp_jax.config.rollout import TRAINABLE, RolloutSettings
from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS, Episode, collect
from dcmdp_jax.data.packing import one_a_row
from dcmdp_jax.engines import engine_kind, process_memory, protocol
from dcmdp_jax.engines.local.sizes import length_bucket, round_up
from dcmdp_jax.engines.registry import ENGINES, find_engine
from dcmdp_jax.errors import UserError, shorten, suggestion
from dcmdp_jax.models import decoder, hf_weights
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.row_logprobs import make_probe, make_row_logprobs
from dcmdp_jax.models.scheme import FULL, Scheme
from dcmdp_jax.parallel.mesh import one_device_mesh
from dcmdp_jax.probe.columns.pairs import Ragged
from dcmdp_jax.run.saved_model import Policy
from dcmdp_jax.types import Params, Rows

SAMPLING_KINDS = tuple(ENGINES)
"""Built-in engines that sample. `SCORERS` only score."""
_DTYPES = ("float32", "bfloat16", "float16")
"""What a server with weights of its own may compute in, and the trainer."""
_OPTIONS = ("compute", "cache", "model", "like")
SCORERS = {"trainer": _DTYPES, "hf": ("float32",)}
"""What only scores -> precisions; the first is the default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeSpec:
    """An engine to build.

    Attributes:
        kind: a name in `SCORERS` or `SAMPLING_KINDS`, or an engine by path, `module:NAME` or
            `file.py:NAME`.
        precision: precision of the weights; for `trainer` the compute dtype.
        compute: dtype of activations.
        cache: dtype of the key-value cache; "auto" is the compute dtype.
        model: directory of its own model; "" for the one that is probed.
        like: with `trainer`, the engine whose roundings of weights, activations and `cache` it
            repeats, KIND:PRECISION.
    """

    kind: str
    precision: str
    compute: str
    cache: str = "auto"
    model: str = ""
    like: str = ""

    @property
    def record(self) -> engine_kind.EngineKind | None:
        """The engine's record; None of what only scores."""
        return None if self.kind in SCORERS else find_engine(self.kind)

    @property
    def costs(self) -> dict[str, str]:
        """Cause of `columns.causes` -> the setting that has it as its price."""
        if self.record is None:
            return {}
        costs = {}
        if self.precision in self.record.quantized:
            costs["quantized_weights"] = f"the engine's weights are {self.precision}"
        if self.cache != "auto":
            costs["quantized_cache"] = f"the engine's key-value cache is {self.cache}"
        return costs

    def without(self, cause: str) -> "ProbeSpec":
        """The same engine without the setting that has this cause of `costs` as its price."""
        if cause == "quantized_cache":
            return dataclasses.replace(self, cache="auto")
        return dataclasses.replace(self, precision=self.compute)

    def __str__(self) -> str:
        text = f"{self.kind}:{self.precision}"
        if self.compute not in (self.precision, _default_compute(self.kind, self.precision)):
            text += f",compute={self.compute}"
        if self.like:
            text += f",like={self.like}"
        if self.cache != "auto":
            text += f",cache={self.cache}"
        if self.model:
            text += f",model={self.model}"
        return text


def parse_spec(text: str) -> ProbeSpec:
    """Read `KIND[:PRECISION][,compute=DTYPE][,cache=DTYPE][,model=DIR]`.

    KIND may be `file.py:NAME` or `module:NAME`.

    The trainer takes `like=KIND:PRECISION`, and with it `cache=DTYPE`, of an engine whose roundings
    it repeats.

    Raises:
        UserError: naming what is not known and what is allowed.
    """
    head, *options = text.split(",")
    kind, _, after_kind = head.partition(":")
    built_in = (*SCORERS, *SAMPLING_KINDS)
    if after_kind and kind not in built_in and ("." in kind or (kind and find_spec(kind))):
        name, _, precision = after_kind.partition(":")
        kind = f"{kind}:{name}"
        record = find_engine(kind)
    else:
        precision = after_kind
        _check("engine", kind, built_in, text)
        record = ENGINES.get(kind)
    if record is None:
        precisions = SCORERS[kind]
    else:
        precisions = record.precisions or _DTYPES
    precision = precision or precisions[0]
    _check("precision", precision, precisions, text)

    allowed = {}
    if record:
        allowed = {"compute": record.compute_dtypes, "cache": record.cache_dtypes}
    if kind == "trainer":
        allowed["like"] = _repeated_engines()

    named_values = [option.partition("=") for option in options]
    for name, _, value in named_values:
        if name == "like" and value in allowed.get("like", ()):
            like_kind, _, _ = value.partition(":")
            allowed["cache"] = ("auto", *TRAINABLE[like_kind].emulated_caches)

    spec = ProbeSpec(kind=kind, precision=precision, compute=_default_compute(kind, precision))
    for name, _, value in named_values:
        possible = [key for key in _OPTIONS if key == "model" or allowed.get(key)]
        _check("option", name, tuple(possible), text)
        if name != "model":
            _check(name, value, allowed[name], text)
        spec = dataclasses.replace(spec, **{name: value})
    return spec


def _repeated_engines() -> tuple[str, ...]:
    """KIND:PRECISION of the engines whose roundings the trainer repeats."""
    names = []
    for record in TRAINABLE.values():
        if not record.emulated:
            continue
        for precision in record.precisions:
            if precision != "exact":
                names.append(f"{record.name}:{precision}")
    return tuple(names)


def _default_compute(kind: str, precision: str) -> str:
    """The precision where it is a dtype; else what the engine computes quantized weights in."""
    if precision in _DTYPES or kind in SCORERS:
        return precision
    return find_engine(kind).quantized_compute


def _check(subject: str, value: str, allowed: tuple[str, ...], text: str) -> None:
    if value not in allowed:
        near = suggestion(value, allowed)
        raise UserError(
            f"engine {shorten(text)}: {subject} {shorten(value)}, allowed are "
            f"{', '.join(allowed)}{near}"
        )


LOGPROB_CHUNK = 256
"""Tokens whose logits exist at one time: 50 MB of a vocabulary of 50,000."""
_MOST_ROWS = 32
"""Rows in one call, at most."""
_ROWS = 8
"""Rows of a call are a multiple of it, where there are as many, so that few shapes compile."""
_TOKENS = 16
"""Tokens of a row are a multiple of it."""


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingStack:
    """Scores completions with the forward pass of the training step, on one device.

    Nothing is compiled before the first call.

    Attributes:
        config: the model.
        params: the trainer's parameters.
        compute: dtype and kernel of the forward pass.
        scheme: roundings of an engine that it repeats.
    """

    config: ModelConfig
    params: Params
    _: dataclasses.KW_ONLY
    compute: decoder.Compute
    scheme: Scheme = FULL

    def score(self, prompts: Ragged, completions: Ragged, *, temperature: float) -> Ragged:
        """Log-probs, float32 nats, one array for each completion."""
        return self.score_with_entropies(prompts, completions, temperature=temperature)[0]

    def score_with_entropies(
        self,
        prompts: Ragged,
        completions: Ragged,
        *,
        temperature: float,
    ) -> tuple[Ragged, Ragged]:
        """Log-probs and entropies, float32 nats, one array each for each completion."""
        program = _program(
            self.config,
            self.compute,
            self.scheme,
            temperature,
        )
        run = functools.partial(program, self.params)
        results = in_rows(run, prompts, completions)
        return [logprobs for logprobs, _ in results], [entropies for _, entropies in results]

    def score_listed(
        self,
        prompts: Ragged,
        completions: Ragged,
        listed: Ragged,
        *,
        temperature: float,
    ) -> Ragged:
        """Log-probs of listed ids [T_i, k] in the place of each token, float32 nats, likewise."""
        program = _program(
            self.config,
            self.compute,
            self.scheme,
            temperature,
            listed=True,
        )
        run = functools.partial(program, self.params)
        return [logprobs for (logprobs,) in in_rows(run, prompts, completions, listed)]

    def close(self) -> None:
        """Nothing to free: the parameters are the caller's."""


@functools.lru_cache(maxsize=16)
def _program(
    config: ModelConfig,
    compute: decoder.Compute,
    scheme: Scheme,
    temperature: float,
    *,
    listed: bool = False,
) -> Callable[[Params, Rows], jax.Array]:
    row_logprobs = make_row_logprobs(
        config,
        compute,
        temperature=temperature,
        mesh=one_device_mesh(),
        scheme=scheme,
    )

    def scored(params: Params, rows: Rows) -> jax.Array:
        scores = row_logprobs(params, rows)
        if listed:
            return scores.top_logprobs[None]
        return jnp.stack(scores[:2])

    return jax.jit(scored)


def in_rows(
    run: Callable[[Rows], jax.Array],
    prompts: Ragged,
    completions: Ragged,
    listed: Ragged | None = None,
) -> Ragged:
    """Run a program on completions, one a row, and cut its results to their tokens.

    Rows are at most 32 a call, of one length for each power of two, so few shapes compile.

    Args:
        run: makes [K, R, L, ...] of R rows.
        prompts, completions: token ids.
        listed: ids [T_i, k] of each completion, which the rows have as the column `top_ids`.

    Returns:
        [K, T_i, ...] for each completion.
    """
    totals = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    buckets: dict[int, list[int]] = {}
    for index, total in enumerate(totals):
        buckets.setdefault(length_bucket(total), []).append(index)

    results = [None] * len(totals)
    for members in buckets.values():
        length = round_up(max(totals[index] for index in members), _TOKENS)
        count = len(members)
        if count >= _ROWS:
            count = min(_MOST_ROWS, round_up(count, _ROWS))
        for start in range(0, len(members), count):
            indices = members[start : start + count]
            rows = one_a_row(
                [prompts[index] for index in indices],
                [completions[index] for index in indices],
                length,
                count,
            )
            if listed is not None:
                ids = np.concatenate([listed[index] for index in indices])
                rows = rows.with_columns(**{TOP_IDS: in_places(rows, ids)})
            outputs = np.asarray(run(rows))
            for row, index in enumerate(indices):
                results[index] = outputs[:, row, len(prompts[index]) : totals[index]].copy()
    return results


def in_places(rows: Rows, values: np.ndarray) -> np.ndarray:
    """A column [R, L, ...] of rows from values [n, ...] of all sampled tokens; 0 elsewhere."""
    column = np.zeros((*rows.input_ids.shape, *values.shape[1:]), values.dtype)
    column[rows.completion_mask] = values
    return column


_MIN_ROWS = 32
"""Completions that an engine decodes at a time, however few are left: one shape to compile."""


class Scorer(Protocol):
    """An engine that returns the log-probs of given tokens."""

    def score(self, prompts: Ragged, completions: Ragged, *, temperature: float) -> Ragged:
        """Log-probs, float32 nats, one array for each completion."""

    def close(self) -> None:
        """Free what it holds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """Completions of an engine, N of them.

    Attributes:
        prompt_index: [N] int, the prompt that each answers.
        completion_ids: [T_i] int32 each.
        logprobs: [T_i] float32 each, as the engine reported them while sampling.
        top_ids, top_logprobs: [T_i, k] int32 and float32 each, the engine's top-k tokens; None
            without `rollout.top_logprobs`.
        episodes: the engine's own, of which these are.
    """

    prompt_index: np.ndarray
    completion_ids: Ragged
    logprobs: Ragged
    top_ids: Ragged | None = None
    top_logprobs: Ragged | None = None
    episodes: Sequence[Episode] = ()


def sample(
    engine: protocol.Engine,
    prompts: Ragged,
    sampling: protocol.SamplingParams,
    *,
    seed: int,
) -> Sampled:
    """Sample from an engine; the one place that reads what `Engine.generate` gives."""
    episodes = collect(engine.generate(prompts, sampling, seed=seed, step=0))
    top_ids = None
    top_logprobs = None
    if TOP_IDS in episodes[0].columns:
        k = episodes[0].columns[TOP_IDS].shape[-1]
        protocol.check_top_logprobs(episodes, k, engine.config.vocab_size)
        top_ids = [episode.columns[TOP_IDS][episode.sampled_mask] for episode in episodes]
        top_logprobs = [episode.columns[TOP_LOGPROBS][episode.sampled_mask] for episode in episodes]
    return Sampled(
        prompt_index=np.array([episode.group for episode in episodes]),
        completion_ids=[episode.completion_ids for episode in episodes],
        logprobs=[episode.rollout_logprobs[episode.sampled_mask] for episode in episodes],
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        episodes=episodes,
    )


def build(spec: ProbeSpec, policy: Policy, *, directory: Path, max_total_tokens: int) -> Scorer:
    """Build an engine and give it the weights.

    Args:
        spec: the engine.
        policy: its model, and the engine's own settings.
        directory: for a sidecar's files, or a copy of the model for `hf`.
        max_total_tokens: longest prompt with its completion.

    Raises:
        UserError, EngineError, MemoryError: in one line, if this machine can't run it.
    """
    config = policy.model
    params = policy.params
    if spec.kind == "trainer":
        compute = decoder.Compute(dtype=spec.compute, logprob_chunk=LOGPROB_CHUNK)
        scheme = FULL
        if spec.like:
            scheme = _scheme(spec.like, spec.cache, config)
        return TrainingStack(config, params, compute=compute, scheme=scheme)
    if spec.kind == "hf":
        return HuggingFace(config, params, directory)
    kind = spec.record
    arguments = engine_arguments(
        dataclasses.replace(policy.config, rollout=settings_for(spec, policy.config.rollout)),
        kind,
        model=config,
        max_total_tokens=max_total_tokens,
        min_rows=_MIN_ROWS,
        mesh=lambda **split: one_device_mesh(),
        probe=lambda: make_probe(config, decoder.Compute(), one_device_mesh()),
        directory=directory,
    )
    with as_settings(of_engine(kind)):
        kind.check(arguments)
        kind.check_top_logprobs(arguments.top_logprobs)
        engine = kind.start(arguments)
    try:
        # Else it is a server of the same model.
        if kind.takes_weights:
            engine.sync_weights(params, 0)
    except BaseException:
        engine.close()
        raise
    return engine


def settings_for(spec: ProbeSpec, rollout: RolloutSettings) -> RolloutSettings:
    """The settings of an engine that samples, `engine_args` for one by path alone."""
    engine_args = "" if spec.kind in TRAINABLE else rollout.engine_args
    return dataclasses.replace(
        rollout,
        engine=spec.kind,
        precision=spec.precision,
        compute_dtype=spec.compute,
        kv_cache_dtype=spec.cache,
        engine_args=engine_args,
    )


def cache_rounding(spec: ProbeSpec) -> str:
    """How the fp8 cache of an engine rounds, its own or what it could have: of `scheme.CACHES`."""
    if spec.kind not in TRAINABLE:
        return "fp8"
    cache = spec.cache if spec.cache in spec.record.emulated_caches else "fp8"
    return _scheme(f"{spec.kind}:full", cache, None).cache


def _scheme(like: str, cache: str, config: ModelConfig | None) -> Scheme:
    """The roundings of an engine, KIND:PRECISION, and its cache that the trainer repeats."""
    name, _, precision = like.partition(":")
    kind = TRAINABLE[name]
    if precision not in kind.emulated:
        precision = "full"
    if cache not in kind.emulated_caches:
        cache = "full"
    arguments = engine_kind.EngineArguments(model=config, settings=kind.settings())
    return kind.scheme(arguments, precision, cache, jax.default_backend())


def check_same_tokens(
    first: dict[str, int], second: dict[str, int], names: tuple[str, str]
) -> None:
    """Refuse two engines that do not mean the same by a token id.

    Args:
        first, second: text of a token -> its id, of the engines' tokenizers.
        names: names of the engines.

    Raises:
        UserError: with the first id that differs.
    """
    if first == second:
        return
    first_texts = {number: text for text, number in first.items()}
    second_texts = {number: text for text, number in second.items()}
    differing = {number for number, _ in first_texts.items() ^ second_texts.items()}
    number = min(differing)
    raise UserError(
        f"the engines' vocabularies differ in {len(differing)} tokens: token {number} is "
        f"{first_texts.get(number)!r} for {names[0]} and {second_texts.get(number)!r} for "
        f"{names[1]}; log-probs of token ids can't be compared, give both the same tokenizer"
    )


class HuggingFace:
    """The model as transformers computes it in float32 on the CPU, unpadded: no code is ours."""

    def __init__(self, config: ModelConfig, params: Params, directory: Path) -> None:
        """Write the parameters to `directory` in float32 and load them with transformers.

        Raises:
            UserError: if torch is not installed.
        """
        process_memory.show_torch()  # commands hide it
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise UserError(
                "engine hf: torch is not installed (BUILD.md tells how to get its CPU build)"
            ) from None
        hf_weights.save_params(
            params,
            config,
            directory,
            dtype="float32",
            tokenizer_dir=None,
            overwrite=True,
        )
        self._model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        ).eval()

    def score(self, prompts: Ragged, completions: Ragged, *, temperature: float) -> Ragged:
        """Log-probs, float32 nats, one array for each completion."""
        import torch

        scores = []
        with torch.no_grad():
            for prompt, completion in zip(prompts, completions, strict=True):
                ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.long)
                logits = self._model(ids[None]).logits[0, len(prompt) - 1 : -1].float()
                logprobs = torch.log_softmax(logits / temperature, dim=-1)
                scores.append(logprobs.gather(1, ids[len(prompt) :, None])[:, 0].numpy())
        return scores

    def close(self) -> None:
        """Free the model."""
        self._model = None
