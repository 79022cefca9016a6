"""Controlled re-scorings: the tokens scored again with one thing changed, to see what explains the mismatch."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.lab.mismatch.analysis import TokenText
from dcmdp_jax.lab.mismatch.evidence import Explanation
from dcmdp_jax.lab.mismatch.pairs import TokenPairs, probability_difference
from dcmdp_jax.lab.probe.engines import LOGPROB_CHUNK, in_rows
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute, hidden_states, output_kernel
from dcmdp_jax.models.logprobs import token_logprobs
from dcmdp_jax.models.ops import choose_ops
from dcmdp_jax.models.params import HFTensor, hf_tensors, quantized_leaves
from dcmdp_jax.models.products import products_in
from dcmdp_jax.models.quantize import QuantizedKernel, quantize_tree, straight_through
from dcmdp_jax.models.scheme import FULL, Scheme
from dcmdp_jax.models.scheme_products import rounded_in_blocks
from dcmdp_jax.types import Array, Params, Rows

_MOST_TOKENS = 4096
_TEMPERATURES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0)
_GRIDS, _PROMISING, _LEAST_CHANGE = 3, 0.2, 0.02


@dataclasses.dataclass(frozen=True)
class Setup:
    """Requests to both engines of a pair.

    Attributes:
        config, params: the trainer's model, for re-scoring.
        prompts: token ids as the second engine gets them.
        temperature: temperature of the second engine's log-probs.
        earlier: name -> earlier parameters that the first engine may still hold.
        prompt_variants: name -> the same prompts rendered in another way.
        text: id -> text; None without a tokenizer.
        compute: dtype that the first engine computes in.
        settings: cause -> setting of the first engine that has it as its price.
        sampling_floor: floor of the first engine, from `sampling_floor`; None if not measured.
        as_rounded: weights with their adapters merged as the first engine rounds them; None without adapters.
        cache: how the first engine's fp8 cache rounds, of `scheme.CACHES`, where it has one or not.
    """

    config: ModelConfig
    params: Params
    prompts: Sequence[np.ndarray]
    temperature: float
    earlier: Mapping[str, Params] = dataclasses.field(default_factory=dict)
    prompt_variants: Mapping[str, Sequence[np.ndarray]] = dataclasses.field(default_factory=dict)
    text: TokenText | None = None
    compute: str = "float32"
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sampling_floor: float | None = None
    as_rounded: Params | None = None
    cache: str = "fp8"


class _Change(NamedTuple):
    """One thing that is changed.

    Attributes:
        name, cause: see `Explanation`.
        dtype: dtype of activations and products.
        precision: precision of `quantize.PRECISIONS` that weights are quantized to; "" for none.
        fp8_cache: whether keys and values are rounded as `Setup.cache` says.
        params, prompts: others than the setup's.
    """

    name: str
    cause: str
    dtype: str = "float32"
    precision: str = ""
    fp8_cache: bool = False
    params: Params | None = None
    prompts: Sequence[np.ndarray] | None = None


_CHANNELS, _BLOCKS = (f"weights, a scale for each {part}" for part in ("output channel", "block of 128 x 128"))
_EMULATED = (
    *(_Change(f"{each} {_CHANNELS}", "quantized_weights", precision=each) for each in ("int8", "int4", "fp8")),
    _Change("an fp8 key-value cache", "quantized_cache", fp8_cache=True),
)


class Rescoring:
    """Second scoring of one set of completions, about 4,096 tokens of them.

    The layers of the training stack, scanned, are one program for a dtype and a shape of rows: weights, temperatures
    and the rounding of the cache are its arguments.
    """

    def __init__(self, setup: Setup, pairs: TokenPairs, prompt_index: np.ndarray) -> None:
        """Cut the completions to the ones to score again.

        Args:
            setup: the model, and what it is asked.
            pairs: the completions with both log-probs.
            prompt_index: [N] int, the prompt that each of them answers.
        """
        count = max(1, int(np.searchsorted(np.cumsum(pairs.lengths), _MOST_TOKENS, side="right")))
        tokens = int(pairs.lengths[:count].sum())
        self._setup, self._prompt_index = setup, prompt_index[:count]
        self._completions = np.split(pairs.token_ids[:tokens], pairs.starts[1:count])
        self._train, self._rollout = pairs.train_logprobs[:tokens], pairs.rollout_logprobs[:tokens]

    def rounding(self) -> float:
        """Mean |p - h| of the same model computed in the engine's dtype."""
        return float(np.mean(probability_difference(self._train, self._plain)))

    @functools.cached_property
    def _plain(self) -> np.ndarray:
        return self._ask(_Change("", "", self._setup.compute))

    def explanations(self) -> Iterator[Explanation]:
        """Every re-scoring, the likeliest and cheapest first."""
        setup, compute = self._setup, self._setup.compute
        if setup.as_rounded is not None:
            yield self._tried(_Change("the adapters merged as the engine rounds", "merge", params=setup.as_rounded))
        yield Explanation(f"the model in {compute}", "rounding", self._share(self._plain))
        for change in sorted(_EMULATED, key=lambda change: change.cause not in setup.settings):
            yield self._tried(change._replace(dtype=compute))
        blocks = _in_blocks(setup.params, setup.config)
        yield self._tried(_Change(f"fp8 {_BLOCKS}", "quantized_weights", params=blocks))
        del blocks
        if compute != "float32":
            yield self._tried(_Change("the model in float32", "rounding"))
        yield self._temperature()
        for name, prompts in setup.prompt_variants.items():
            yield self._tried(_Change(f"the prompt rendered as {name}", "chat_template", prompts=prompts))
        for name, earlier in setup.earlier.items():
            yield self._tried(_Change(f"the weights of {name}", "stale_weights", params=earlier))
            yield from self._unsynchronized(name, earlier)

    def _tried(self, change: _Change) -> Explanation:
        explanation = Explanation(change.name, change.cause, self._share(self._ask(change)))
        release_freed_memory()
        return explanation

    def _share(self, logprobs: np.ndarray) -> float:
        whole = probability_difference(self._train, self._rollout).sum()
        return float(1 - probability_difference(logprobs, self._rollout).sum() / whole) if whole else 0.0

    def _ask(self, change: _Change, factors: Sequence[float] = (1.0,)) -> np.ndarray:
        """Log-probs [K, tokens] at the temperature times each of K factors."""
        setup = self._setup
        inverse = np.zeros(len(_TEMPERATURES), np.float32)
        inverse[: len(factors)] = 1 / (np.asarray(factors) * setup.temperature)
        params = setup.params if change.params is None else change.params
        weights = _as_multiplied(params, setup.config, change.precision)
        static = {"config": setup.config, "compute": Compute(dtype=change.dtype, logprob_chunk=LOGPROB_CHUNK)}
        run = functools.partial(_logprobs_at, weights, inverse, change.fp8_cache, cache=setup.cache, **static)
        prompts = setup.prompts if change.prompts is None else change.prompts
        found = in_rows(run, [prompts[index] for index in self._prompt_index], self._completions)
        return np.concatenate(found, axis=1)[: len(factors)]

    def _temperature(self) -> Explanation:
        """The best temperature but the one scored at: grids, each between the neighbors of the best of the last."""
        factors, shares = _TEMPERATURES, {}
        for _ in range(_GRIDS):
            shares |= zip(factors, map(self._share, self._ask(_Change("", ""), factors)), strict=True)
            best, known = max(shares, key=shares.get), sorted(shares)
            if shares[best] < _PROMISING:
                break
            place = known.index(best)
            low, high = known[max(place - 1, 0)], known[min(place + 1, len(known) - 1)]
            # Never near 1, where nothing is changed.
            low, high = (max(low, 1 + _LEAST_CHANGE), high) if best > 1 else (low, min(high, 1 - _LEAST_CHANGE))
            factors = np.linspace(low, high, len(_TEMPERATURES)).tolist()
        temperature = best * self._setup.temperature
        name = f"temperature {temperature:.2f} in place of {self._setup.temperature:.2f}"
        return Explanation(name, "temperature", shares[best])

    def _unsynchronized(self, name: str, earlier: Params) -> Iterator[Explanation]:
        """Every tensor of the earlier weights alone; all tensors of a layer. The best of each is shown."""
        config, now = self._setup.config, self._setup.params
        tensors = hf_tensors(config).items()
        equal = {tensor: np.array_equal(_part(now, place), _part(earlier, place)) for tensor, place in tensors}
        differing = {tensor: place for tensor, place in tensors if not equal[tensor]}
        layers: dict[str, list[str]] = {}
        for tensor, place in differing.items():
            if place.index:
                layers.setdefault(f"layer {'.'.join(map(str, place.index))}", []).append(tensor)
        for candidates in ({tensor: [tensor] for tensor in differing}, layers):
            if len(differing) > 1 and candidates:
                shares = {
                    each: self._share(self._ask(_Change("", "", params=_swapped(config, now, earlier, names))))
                    for each, names in candidates.items()
                }
                best = max(shares, key=shares.get)
                yield Explanation(f"{best} of {name}, all else as it is", "unsynchronized_tensor", shares[best])


@functools.partial(jax.jit, static_argnames=("config", "compute", "cache"))
def _logprobs_at(
    weights: Params, inverse: Array, fp8_cache: Array, rows: Rows, *, config: ModelConfig, compute: Compute, cache: str
) -> jax.Array:
    """Log-probs of rows at several temperatures, from one pass through the layers.

    Args:
        weights: tree of `_as_multiplied`.
        inverse: [K] float32, inverse temperatures; from the first 0 on none is wanted.
        fp8_cache: [] bool, see `_Change`.
        rows: [R, L], a completion each.
        config, compute: the model, and how it is computed.
        cache: see `Setup`.

    Returns:
        [K, R, L] float32 nats; 0 where none is wanted.
    """
    place = rows.input_ids, rows.position_ids, rows.segment_ids
    how = {"temperature": 1.0, "chunk": compute.logprob_chunk, "ops": choose_ops(jax.default_backend())}

    def hidden(scheme: Scheme) -> Callable[[], jax.Array]:
        return lambda: hidden_states(weights, config, *place, compute, scheme=scheme)

    def at(k: jax.Array, found: jax.Array) -> jax.Array:
        scaled = (states * inverse[k]).astype(states.dtype)
        logprobs = token_logprobs(scaled, weights["output"], rows.input_ids, rows.completion_mask, **how)[0]
        return found.at[k].set(logprobs)

    with products_in(compute.dtype):
        states = jax.lax.cond(fp8_cache, hidden(Scheme(cache=cache)), hidden(FULL))
        found = jnp.zeros((len(inverse), *rows.input_ids.shape), jnp.float32)
        return jax.lax.fori_loop(0, jnp.sum(inverse > 0), at, found)


def _as_multiplied(params: Params, config: ModelConfig, precision: str) -> Params:
    """Weights as an engine of this precision multiplies by them: values and scales of 1 for "", all in float32."""

    def leaf(x: jax.Array, chosen: bool) -> jax.Array | QuantizedKernel:
        return QuantizedKernel(x, jnp.ones(x.shape[:-2] + x.shape[-1:])) if chosen else x

    if precision:
        return params | _quantized(params, config=config, precision=precision)
    layers = jax.tree.map(leaf, params["layers"], quantized_leaves(config)["layers"])
    return params | {"layers": layers, "output": output_kernel(params)}


@functools.partial(jax.jit, static_argnames=("config", "precision"))
def _quantized(params: Params, *, config: ModelConfig, precision: str) -> Params:
    """Quantized layers and output matrix; the matrix rounded, for log-probs take no scales."""
    tree = quantize_tree(params["layers"], quantized_leaves(config)["layers"], precision)
    layers = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    return {"layers": layers, "output": straight_through(output_kernel(params), True, precision)}


def _in_blocks(params: Params, config: ModelConfig) -> Params:
    """The matrices that engines quantize, rounded as vLLM does with a scale for each block of 128 x 128."""

    def leaf(x: jax.Array, chosen: bool) -> jax.Array:
        # One after another: the temporary memory of each is several times its own.
        return jax.block_until_ready(_block_rounded(x)) if chosen else x

    return jax.tree.map(leaf, params, quantized_leaves(config))


@jax.jit
def _block_rounded(x: jax.Array) -> jax.Array:
    return jax.lax.map(_block_rounded, x) if x.ndim > 2 else rounded_in_blocks(x)


def _part(params: Params, place: HFTensor) -> np.ndarray:
    return np.asarray(place.leaf(params)[place.index])


def _swapped(config: ModelConfig, now: Params, earlier: Params, names: Sequence[str]) -> Params:
    """`now`, with the named tensors of `earlier`."""
    places = hf_tensors(config)
    changed = jax.tree.map(lambda leaf: leaf, now)
    for name in names:
        *parents, last = places[name].path
        node = changed
        for key in parents:
            node = node[key]
        node[last] = jnp.asarray(node[last]).at[places[name].index].set(_part(earlier, places[name]))
    return changed
