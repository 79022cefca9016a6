"""Controlled re-scorings: the tokens scored again with one thing changed, to see what explains the mismatch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.engines.kind import EngineArguments
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.lab.mismatch.evidence import Explanation
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import hf_tensors, quantized_leaves
from dcmdp_jax.types import Params

_MOST_TOKENS = 4096
_TEMPERATURES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0)
_REFINEMENTS, _LEAST_CHANGE = 7, 0.02
_BLOCK, _FP8_MAX = 128, 448.0


class _Place(NamedTuple):
    """Place of a tensor: keys into the nested parameters, and its index on the stacked axes of the leaf."""

    path: tuple[str, ...]
    index: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Scored:
    """Completions with both log-probs, and everything needed to score them again.

    Attributes:
        config, params: the trainer's model.
        prompts: prompts that the training stack scored, one for each completion.
        completions: token ids.
        train, rollout: log-probs of both.
        temperature: temperature of the training stack's log-probs.
        earlier: name -> earlier parameters, which the engine may still hold all or a part of.
        prompt_variants: name -> the prompts rendered in another way, one for each completion.
    """

    config: ModelConfig
    params: Params
    prompts: Sequence[np.ndarray]
    completions: Sequence[np.ndarray]
    train: Sequence[np.ndarray]
    rollout: Sequence[np.ndarray]
    temperature: float
    earlier: Mapping[str, Params] = dataclasses.field(default_factory=dict)
    prompt_variants: Mapping[str, Sequence[np.ndarray]] = dataclasses.field(default_factory=dict)


class _Emulated(NamedTuple):
    """A cause that the embedded engine can emulate; a precision of "" is the compute dtype."""

    name: str
    cause: str
    precision: str
    cache: str


_EMULATED = (
    _Emulated("int8 weights, a scale for each output channel", "quantized_weights", "int8", "auto"),
    _Emulated("int4 weights, a scale for each output channel", "quantized_weights", "int4", "auto"),
    _Emulated("fp8 weights, a scale for each output channel", "quantized_weights", "fp8", "auto"),
    _Emulated("an fp8 key-value cache", "quantized_cache", "", "fp8"),
)


class Rescoring:
    """Second scoring of one set of completions, about 4,096 tokens of them, with the embedded engine."""

    def __init__(self, scored: Scored, *, compute: str, max_rows: int) -> None:
        """Cut the completions to those that are scored again.

        Args:
            scored: the completions.
            compute: dtype that the engine computes in.
            max_rows: completions in one batch.
        """
        self._compute = compute
        lengths = np.cumsum([len(ids) for ids in scored.completions])
        self._count = max(1, int(np.searchsorted(lengths, _MOST_TOKENS, side="right")))
        self._scored, self._max_rows = scored, max_rows
        self._prompts, self._completions = scored.prompts[: self._count], scored.completions[: self._count]
        self._train, self._rollout = (np.concatenate(x[: self._count]) for x in (scored.train, scored.rollout))

    def rounding(self) -> float:
        """Mean |p - h| of the same model computed by the embedded engine in the engine's dtype."""
        return float(np.mean(_distance(self._train, self._plain)))

    @functools.cached_property
    def _plain(self) -> np.ndarray:
        return self._score(self._compute, self._compute, "auto")

    def explanations(self) -> Iterator[Explanation]:
        """Every re-scoring, cheapest first."""
        yield Explanation(f"the model in {self._compute}", "rounding", self._share(self._plain))
        for name, cause, precision, cache in _EMULATED:
            share = self._share(self._score(precision or self._compute, self._compute, cache))
            yield Explanation(name, cause, share)
        exact = self._engine("exact", "float32", "auto")
        exact.push_weights(_in_blocks(self._scored.params, self._scored.config), 0)
        name = "fp8 weights, a scale for each block of 128 x 128"
        yield Explanation(name, "quantized_weights", self._share(self._ask(exact)))
        exact.push_weights(self._scored.params, 0)
        if self._compute != "float32":
            yield Explanation("the model in float32", "rounding", self._share(self._ask(exact)))
        yield self._temperature(exact)
        for name, prompts in self._scored.prompt_variants.items():
            share = self._share(self._ask(exact, prompts=prompts[: self._count]))
            yield Explanation(f"the prompt rendered as {name}", "chat_template", share)
        for name, params in self._scored.earlier.items():
            yield from self._stale(exact, name, params)
        exact.close()

    def _share(self, logprobs: np.ndarray) -> float:
        whole = _distance(self._train, self._rollout).sum()
        return float(1 - _distance(logprobs, self._rollout).sum() / whole) if whole else 0.0

    def _engine(self, precision: str, compute: str, cache: str) -> LocalEngine:
        longest = max(len(p) + len(c) for p, c in zip(self._prompts, self._completions, strict=True))
        variants = [
            len(p) + len(c)
            for prompts in self._scored.prompt_variants.values()
            for p, c in zip(prompts, self._completions, strict=False)
        ]
        arguments = EngineArguments(
            precision, compute, cache, max([longest, *variants]), self._max_rows, model=self._scored.config
        )
        return LocalEngine(arguments)

    def _score(self, precision: str, compute: str, cache: str) -> np.ndarray:
        engine = self._engine(precision, compute, cache)
        engine.push_weights(self._scored.params, 0)
        logprobs = self._ask(engine)
        engine.close()
        return logprobs

    def _ask(
        self, engine: LocalEngine, *, prompts: Sequence[np.ndarray] | None = None, temperature: float | None = None
    ) -> np.ndarray:
        prompts = self._prompts if prompts is None else prompts
        temperature = self._scored.temperature if temperature is None else temperature
        return np.concatenate(engine.score(prompts, self._completions, temperature=temperature))

    def _temperature(self, engine: LocalEngine) -> Explanation:
        """The best temperature but the one scored at: a grid of factors, then golden-section steps around the best."""

        def share(factor: float) -> float:
            return self._share(self._ask(engine, temperature=factor * self._scored.temperature))

        shares = {factor: share(factor) for factor in _TEMPERATURES}
        best = max(shares, key=shares.get)
        place = _TEMPERATURES.index(best)
        low, high = _TEMPERATURES[max(place - 1, 0)], _TEMPERATURES[min(place + 1, len(_TEMPERATURES) - 1)]
        # Never near 1, where nothing is changed.
        low, high = (max(low, 1 + _LEAST_CHANGE), high) if best > 1 else (low, min(high, 1 - _LEAST_CHANGE))
        best = _golden_maximum(share, low, high, best, shares)
        temperature = best * self._scored.temperature
        name = f"temperature {temperature:.2f} in place of {self._scored.temperature:.2f}"
        return Explanation(name, "temperature", shares[best])

    def _stale(self, engine: LocalEngine, name: str, earlier: Params) -> Iterator[Explanation]:
        """All of the earlier weights; every tensor of them alone; all tensors of a layer. The best of each is told."""
        config, now = self._scored.config, self._scored.params

        def share(names: Sequence[str]) -> float:
            engine.push_weights(_swapped(config, now, earlier, names), 0)
            return self._share(self._ask(engine))

        differing = _differing(config, now, earlier)
        yield Explanation(f"the weights of {name}", "stale_weights", share(list(differing)))
        layers: dict[str, list[str]] = {}
        for tensor, place in differing.items():
            layers.setdefault(f"layer {'.'.join(map(str, place.index))}", []).append(tensor)
        layers = {layer: names for layer, names in layers.items() if differing[names[0]].index}
        for candidates in ({tensor: [tensor] for tensor in differing}, layers):
            if len(differing) > 1 and candidates:
                shares = {each: share(names) for each, names in candidates.items()}
                best = max(shares, key=shares.get)
                yield Explanation(f"{best} of {name}, all else as it is", "unsynchronized_tensor", shares[best])


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.abs(np.exp(a.astype(np.float64)) - np.exp(b.astype(np.float64)))


def _golden_maximum(
    share: Callable[[float], float], low: float, high: float, best: float, shares: dict[float, float]
) -> float:
    """The best point seen after a few golden-section steps in [low, high]; `shares` gets all of them."""
    ratio = (np.sqrt(5) - 1) / 2
    for _ in range(_REFINEMENTS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        for point in (left, right):
            if point not in shares:
                shares[point] = share(point)
        if shares[left] >= shares[right]:
            high = right
        else:
            low = left
        best = max((best, left, right), key=shares.get)
    return best


def _in_blocks(params: Params, config: ModelConfig) -> Params:
    """The matrices that engines quantize, rounded to float8_e4m3fn with a scale for each block of 128 x 128."""

    def leaf(x: jax.Array, chosen: bool) -> jax.Array:
        if not chosen:
            return x
        *stack, rows, columns = x.shape
        padded = (-rows % _BLOCK, -columns % _BLOCK)
        wide = jnp.pad(x.astype(jnp.float32), [(0, 0)] * len(stack) + [(0, padding) for padding in padded])
        blocks = wide.reshape(*stack, (rows + padded[0]) // _BLOCK, _BLOCK, (columns + padded[1]) // _BLOCK, _BLOCK)
        scale = jnp.max(jnp.abs(blocks), axis=(-3, -1), keepdims=True) / _FP8_MAX
        scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
        rounded = jnp.clip(blocks / scale, -_FP8_MAX, _FP8_MAX).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale
        return rounded.reshape(wide.shape)[..., :rows, :columns].astype(x.dtype)

    return jax.tree.map(leaf, params, quantized_leaves(config))


def _places(config: ModelConfig) -> dict[str, _Place]:
    """Tensor by its Hugging Face name -> where it lies in the parameters."""
    return {name: _Place(tensor.path, tensor.index) for name, tensor in hf_tensors(config).items()}


def _differing(config: ModelConfig, now: Params, earlier: Params) -> dict[str, _Place]:
    """The tensors that are not equal in both."""
    return {
        name: place
        for name, place in _places(config).items()
        if not np.array_equal(*(_part(tree, place) for tree in (now, earlier)))
    }


def _part(params: Params, place: _Place) -> np.ndarray:
    for key in place.path:
        params = params[key]
    return np.asarray(params[place.index])


def _swapped(config: ModelConfig, now: Params, earlier: Params, names: Sequence[str]) -> Params:
    """`now`, with the named tensors of `earlier`."""
    places = _places(config)
    changed = jax.tree.map(lambda leaf: leaf, now)
    for name in names:
        *parents, last = places[name].path
        node = changed
        for key in parents:
            node = node[key]
        node[last] = jnp.asarray(node[last]).at[places[name].index].set(_part(earlier, places[name]))
    return changed
