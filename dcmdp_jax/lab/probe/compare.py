"""Sample with one engine, score with another, and measure what `mismatch` needs to name the cause.

Controlled re-scorings among it: the tokens scored again with one thing changed, to see what
explains the mismatch.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.data.episode import Episode
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.engines.protocol import Engine, EngineError, SamplingParams, sample_alone
from dcmdp_jax.lab.mismatch.analysis import Measured, TokenText
from dcmdp_jax.lab.mismatch.diagnosis import FLOAT32_ROUNDING
from dcmdp_jax.lab.mismatch.evidence import Explanation
from dcmdp_jax.lab.mismatch.pairs import (
    TokenPairs,
    make_pairs,
    measure_states,
    probability_difference,
)
from dcmdp_jax.lab.probe.engines import LOGPROB_CHUNK, Sampled, Scorer, TrainingStack, in_rows
from dcmdp_jax.lab.probe.operators import operator_differences
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute, hidden_states, output_kernel
from dcmdp_jax.models.logprobs import token_logprobs
from dcmdp_jax.models.ops import choose_ops
from dcmdp_jax.models.params import HFTensor, hf_tensors, quantized_leaves
from dcmdp_jax.models.products import products_in
from dcmdp_jax.models.quantize import (
    QuantizedKernel,
    quantize_tree,
    straight_through,
    with_rounded_inputs,
)
from dcmdp_jax.models.scheme import GROUPED, Scheme
from dcmdp_jax.models.scheme_products import rounded_in_blocks
from dcmdp_jax.types import Array, Params, Rows

logger = logging.getLogger(__name__)

_SCORED_AGAIN = 16
_SAMPLED_AGAIN = 4
_TOKENS_AGAIN = 32
_ENOUGH = 0.95
_MOST_TOKENS = 4096
_TEMPERATURES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0)
_GRIDS = 3
_PROMISING = 0.2
_LEAST_CHANGE = 0.02


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
        as_rounded: weights with their adapters merged as the first engine rounds them; None without
            adapters.
        cache: how the first engine's fp8 cache rounds, of `scheme.CACHES`, where it has one or not.
        precision: precision of the first engine; a format in groups, of `scheme.GROUPED`, is tried
            too.
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
    precision: str = ""


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
    entropies = None
    states = None
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
                floor = noise_floor(engine, asked, together, temperature=setup.temperature)
                floors[engine_name] = max(floor, floors.get(engine_name, 0.0))
            except EngineError as error:
                logger.warning("no noise floor: %s", error)
    pairs = make_pairs(
        sampled.completion_ids, train, sampled.logprobs, entropies=entropies, states=states
    )
    try:
        operators = operator_differences(sampler, setup.params, setup.config, *asked)
    except EngineError as error:
        logger.warning("the engine's operators are not looked into: %s", error)
        operators = []
    # Until it is measured: `explained`.
    rounding = FLOAT32_ROUNDING if setup.compute == "float32" else None
    return Measured(
        name=name,
        source=source,
        pairs=pairs,
        text=setup.text,
        floors=floors,
        rounding=rounding,
        settings=setup.settings,
        operators=operators,
        scored=None if scored is None else np.concatenate(scored),
        recurrent=bool(setup.config.recurrent_layers),
    )


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
        show(
            f"{measured.name}: scoring with {explanation.name} explains "
            f"{max(explanation.share, 0):.0%}"
        )
        measured = dataclasses.replace(measured, explanations=[*measured.explanations, explanation])
        keep(measured)
        if agrees or is_settled(measured):
            break
    return measured


def is_settled(measured: Measured) -> bool:
    """Whether one change explains 95% of the mismatch."""
    return any(each.share >= _ENOUGH for each in measured.explanations)


def sampling_floor(
    engine: Engine, episodes: Sequence[Episode], sampling: SamplingParams, *, seed: int
) -> float | None:
    """Mean |q - q'| of the first completions' beginnings, sampled among the others and each alone
    (`sample_alone`).

    Args:
        engine: the engine that sampled.
        episodes: what it gave.
        sampling, seed: arguments of the call that sampled.

    Returns:
        The floor; None where not one first token is the same, or there is one completion only.
    """
    if len(episodes) < 2:
        return None
    short = dataclasses.replace(
        sampling, max_completion_tokens=min(_TOKENS_AGAIN, sampling.max_completion_tokens)
    )
    together, alone = sample_alone(
        engine, dict(enumerate(episodes[:_SAMPLED_AGAIN])), short, seed=seed, step=0
    )
    return float(probability_difference(together, alone).mean()) if together.size else None


def noise_floor(
    engine: Scorer,
    asked: Sequence[Sequence[np.ndarray]],
    together: Sequence[np.ndarray],
    *,
    temperature: float,
) -> float:
    """Mean |p - p'| of an engine against itself: the first 16 completions, each alone and all
    together.

    Args:
        engine: the engine.
        asked: prompts and completions, token ids.
        together: log-probs for all of them in one call.
        temperature: temperature of these.
    """
    alone = [
        engine.score([prompt], [completion], temperature=temperature)[0]
        for prompt, completion in list(zip(*asked, strict=True))[:_SCORED_AGAIN]
    ]
    return float(
        probability_difference(*map(np.concatenate, (together[: len(alone)], alone))).mean()
    )


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


_CHANNELS, _BLOCKS = (
    f"weights, a scale for each {part}" for part in ("output channel", "block of 128 x 128")
)
_EMULATED = (
    *(
        _Change(f"{each} {_CHANNELS}", "quantized_weights", precision=each)
        for each in ("int8", "int4", "fp8")
    ),
    _Change("an fp8 key-value cache", "quantized_cache", fp8_cache=True),
)


class Rescoring:
    """Second scoring of one set of completions, about 4,096 tokens of them.

    The layers of the training stack, scanned, are one program for a dtype and a shape of rows:
    weights, temperatures and the rounding of the cache are its arguments.
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
        self._setup = setup
        self._prompt_index = prompt_index[:count]
        self._completions = np.split(pairs.token_ids[:tokens], pairs.starts[1:count])
        self._train = pairs.train_logprobs[:tokens]
        self._rollout = pairs.rollout_logprobs[:tokens]

    def rounding(self) -> float:
        """Mean |p - h| of the same model computed in the engine's dtype."""
        return float(np.mean(probability_difference(self._train, self._plain)))

    @functools.cached_property
    def _plain(self) -> np.ndarray:
        return self._ask(_Change("", "", self._setup.compute))

    def explanations(self) -> Iterator[Explanation]:
        """Every re-scoring, the likeliest and cheapest first."""
        setup = self._setup
        compute = self._setup.compute
        if setup.as_rounded is not None:
            yield self._tried(
                _Change(
                    "the adapters merged as the engine rounds", "merge", params=setup.as_rounded
                )
            )
        yield Explanation(f"the model in {compute}", "rounding", self._share(self._plain))
        emulated = sorted(_EMULATED, key=lambda change: change.cause not in setup.settings)
        if (own := setup.precision) in GROUPED:
            emulated.insert(
                0,
                _Change(
                    f"{own} weights, a scale for each group", "quantized_weights", precision=own
                ),
            )
        for change in emulated:
            yield self._tried(change._replace(dtype=compute))
        blocks = _in_blocks(setup.params, setup.config)
        yield self._tried(_Change(f"fp8 {_BLOCKS}", "quantized_weights", params=blocks))
        del blocks
        if compute != "float32":
            yield self._tried(_Change("the model in float32", "rounding"))
        yield self._temperature()
        for name, prompts in setup.prompt_variants.items():
            yield self._tried(
                _Change(f"the prompt rendered as {name}", "chat_template", prompts=prompts)
            )
        for name, earlier in setup.earlier.items():
            yield self._tried(_Change(f"the weights of {name}", "stale_weights", params=earlier))
            yield from self._unsynchronized(name, earlier)

    def _tried(self, change: _Change) -> Explanation:
        explanation = Explanation(change.name, change.cause, self._share(self._ask(change)))
        release_freed_memory()
        return explanation

    def _share(self, logprobs: np.ndarray) -> float:
        whole = probability_difference(self._train, self._rollout).sum()
        return (
            float(1 - probability_difference(logprobs, self._rollout).sum() / whole)
            if whole
            else 0.0
        )

    def _ask(self, change: _Change, factors: Sequence[float] = (1.0,)) -> np.ndarray:
        """Log-probs [K, tokens] at the temperature times each of K factors."""
        setup = self._setup
        inverse = np.zeros(len(_TEMPERATURES), np.float32)
        inverse[: len(factors)] = 1 / (np.asarray(factors) * setup.temperature)
        params = setup.params if change.params is None else change.params
        weights = _as_multiplied(params, setup.config, change.precision)
        static = {
            "config": setup.config,
            "compute": Compute(dtype=change.dtype, logprob_chunk=LOGPROB_CHUNK),
        }
        run = functools.partial(
            _logprobs_at, weights, inverse, change.fp8_cache, cache=setup.cache, **static
        )
        prompts = setup.prompts if change.prompts is None else change.prompts
        found = in_rows(run, [prompts[index] for index in self._prompt_index], self._completions)
        return np.concatenate(found, axis=1)[: len(factors)]

    def _temperature(self) -> Explanation:
        """The best temperature but the one scored at: grids, each between the neighbors of the best
        of the last.
        """
        factors = _TEMPERATURES
        shares = {}
        for _ in range(_GRIDS):
            shares |= zip(
                factors, map(self._share, self._ask(_Change("", ""), factors)), strict=True
            )
            best = max(shares, key=shares.get)
            known = sorted(shares)
            if shares[best] < _PROMISING:
                break
            place = known.index(best)
            low, high = known[max(place - 1, 0)], known[min(place + 1, len(known) - 1)]
            # Never near 1, where nothing is changed.
            low, high = (
                (max(low, 1 + _LEAST_CHANGE), high)
                if best > 1
                else (low, min(high, 1 - _LEAST_CHANGE))
            )
            factors = np.linspace(low, high, len(_TEMPERATURES)).tolist()
        temperature = best * self._setup.temperature
        name = f"temperature {temperature:.2f} in place of {self._setup.temperature:.2f}"
        return Explanation(name, "temperature", shares[best])

    def _unsynchronized(self, name: str, earlier: Params) -> Iterator[Explanation]:
        """Every tensor of the earlier weights alone; all tensors of a layer. The best of each is
        shown.
        """
        now = self._setup.params
        tensors = {}
        layers = {}
        for tensor, place in hf_tensors(self._setup.config).items():
            if not np.array_equal(_part(now, place), _part(earlier, place)):
                tensors[tensor] = [place]
                if place.index:
                    layers.setdefault(f"layer {'.'.join(map(str, place.index))}", []).append(place)
        for candidates in (tensors, layers):
            if len(tensors) > 1 and candidates:
                shares = {
                    each: self._share(
                        self._ask(_Change("", "", params=_swapped(now, earlier, places)))
                    )
                    for each, places in candidates.items()
                }
                best = max(shares, key=shares.get)
                yield Explanation(
                    f"{best} of {name}, all else as it is", "unsynchronized_tensor", shares[best]
                )


@functools.partial(jax.jit, static_argnames=("config", "compute", "cache"))
def _logprobs_at(
    weights: Params,
    inverse: Array,
    fp8_cache: Array,
    rows: Rows,
    *,
    config: ModelConfig,
    compute: Compute,
    cache: str,
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
    how = {
        "temperature": 1.0,
        "chunk": compute.logprob_chunk,
        "ops": choose_ops(jax.default_backend()),
    }
    hidden = functools.partial(hidden_states, weights, config, *place, compute)

    def at(k: jax.Array, found: jax.Array) -> jax.Array:
        scaled = (states * inverse[k]).astype(states.dtype)
        logprobs = token_logprobs(
            scaled, weights["output"], rows.input_ids, rows.completion_mask, **how
        )[0]
        return found.at[k].set(logprobs)

    with products_in(compute.dtype):
        states = jax.lax.cond(
            fp8_cache, functools.partial(hidden, scheme=Scheme(cache=cache)), hidden
        )
        found = jnp.zeros((len(inverse), *rows.input_ids.shape), jnp.float32)
        return jax.lax.fori_loop(0, jnp.sum(inverse > 0), at, found)


def _as_multiplied(params: Params, config: ModelConfig, precision: str) -> Params:
    """Weights as an engine of this precision multiplies by them: values and scales of 1 for "", all
    in float32.
    """

    def leaf(x: jax.Array, chosen: bool) -> jax.Array | QuantizedKernel:
        return QuantizedKernel(x, jnp.ones(x.shape[:-2] + x.shape[-1:])) if chosen else x

    layers = params["layers"]
    output = output_kernel(params)
    chosen = quantized_leaves(config)["layers"]
    if precision in GROUPED:
        layers = straight_through(layers, chosen, precision)
        output = straight_through(output, True, precision)
    elif precision:
        return params | _quantized(params, config=config, precision=precision)
    return params | {
        "layers": with_rounded_inputs(jax.tree.map(leaf, layers, chosen), precision),
        "output": output,
    }


@functools.partial(jax.jit, static_argnames=("config", "precision"))
def _quantized(params: Params, *, config: ModelConfig, precision: str) -> Params:
    """Quantized layers and output matrix; the matrix rounded, for log-probs take no scales."""
    tree = quantize_tree(params["layers"], quantized_leaves(config)["layers"], precision)
    layers = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    return {"layers": layers, "output": straight_through(output_kernel(params), True, precision)}


def _in_blocks(params: Params, config: ModelConfig) -> Params:
    """The matrices that engines quantize, rounded as vLLM does with a scale for each block of 128 x
    128.
    """

    def leaf(x: jax.Array, chosen: bool) -> jax.Array:
        # One after another: the temporary memory of each is several times its own.
        return jax.block_until_ready(_block_rounded(x)) if chosen else x

    return jax.tree.map(leaf, params, quantized_leaves(config))


@jax.jit
def _block_rounded(x: jax.Array) -> jax.Array:
    return jax.lax.map(_block_rounded, x) if x.ndim > 2 else rounded_in_blocks(x)


def _part(params: Params, place: HFTensor) -> np.ndarray:
    return np.asarray(place.leaf(params)[place.index])


def _swapped(now: Params, earlier: Params, places: Sequence[HFTensor]) -> Params:
    """`now`, with some tensors of `earlier`."""

    def leaf(path: tuple[jax.tree_util.DictKey, ...], x: jax.Array) -> jax.Array:
        for place in places:
            if place.path == tuple(key.key for key in path):
                x = jnp.asarray(x).at[place.index].set(_part(earlier, place))
        return x

    return jax.tree_util.tree_map_with_path(leaf, now)
