"""Score with one engine what another sampled, and measure what `columns.diagnosis` needs to name the
cause.

Controlled re-scorings among it: the tokens scored again with one thing changed, to see what
explains the mismatch.
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.data.episode import Episode
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.engines.protocol import Engine, EngineError, SamplingParams, sample_alone
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute, DecoderInputs, hidden_states, output_kernel
from dcmdp_jax.models.logprobs import LogprobOptions, token_logprobs
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
from dcmdp_jax.probe.columns.analysis import Measured, TokenText
from dcmdp_jax.probe.columns.diagnosis import FLOAT32_ROUNDING, is_far_above
from dcmdp_jax.probe.columns.evidence import Explanation
from dcmdp_jax.probe.columns.pairs import (
    Ragged,
    TokenPairs,
    make_pairs,
    measure_states,
    probability_difference,
)
from dcmdp_jax.probe.live.engines import LOGPROB_CHUNK, Sampled, Scorer, TrainingStack, in_rows
from dcmdp_jax.probe.live.operators import operator_differences
from dcmdp_jax.types import Array, Params, Rows

logger = logging.getLogger(__name__)

_SCORED_AGAIN = 16
"""Completions scored one by one for a noise floor."""
_SAMPLED_AGAIN = 4
"""Completions sampled one by one for it, which takes longer."""
_TOKENS_AGAIN = 32
"""Tokens of each of these: later ones depend on the first that differs."""
_ENOUGH = 0.95
"""Share of the mismatch that settles the cause: nothing else is scored again."""
_MOST_TOKENS = 4096
"""Tokens that are scored again for each change, which takes a pass through the model."""
_TEMPERATURES = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Factors of the temperature to try first."""
_GRIDS = 3
"""Grids of temperatures, each between the neighbors of the best of the last."""
_PROMISING = 0.2
"""Share that a temperature of the first grid explains for a finer one to be worth it."""
_LEAST_CHANGE = 0.02
"""Least change of the temperature that is tried: nearer to 1 nothing is changed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    prompts: Ragged
    temperature: float
    earlier: Mapping[str, Params] = dataclasses.field(default_factory=dict)
    prompt_variants: Mapping[str, Ragged] = dataclasses.field(default_factory=dict)
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
    (sampler_name, sampler), (scorer_name, scorer) = engines.items()
    prompts = [setup.prompts[index] for index in sampled.prompt_index]
    completions = sampled.completion_ids
    temperature = setup.temperature
    show(f"{name}: scoring {sum(map(len, completions)):,} tokens")
    entropies = None
    states = None
    if isinstance(scorer, TrainingStack):
        train, entropies = scorer.score_with_entropies(
            prompts, completions, temperature=temperature
        )
        if sampled.top_ids is not None:
            top = scorer.score_listed(
                prompts,
                completions,
                sampled.top_ids,
                temperature=temperature,
            )
            states = list(map(measure_states, sampled.top_ids, top, sampled.top_logprobs))
    else:
        train = scorer.score(prompts, completions, temperature=temperature)
    try:
        scored = sampler.score(prompts, completions, temperature=temperature)
    except EngineError as error:
        logger.warning("neither a noise floor nor the parts of decode and prefill: %s", error)
        scored = None

    floors = {}
    if setup.sampling_floor is not None:
        floors[sampler_name] = setup.sampling_floor
    for engine_name, together in ((sampler_name, scored), (scorer_name, train)):
        if together is None:
            continue
        try:
            floor = noise_floor(
                engines[engine_name],
                prompts,
                completions,
                together,
                temperature=temperature,
            )
            floors[engine_name] = max(floor, floors.get(engine_name, 0.0))
        except EngineError as error:
            logger.warning("no noise floor: %s", error)
    try:
        operators = operator_differences(sampler, setup.params, setup.config, prompts, completions)
    except EngineError as error:
        logger.warning("the engine's operators are not looked into: %s", error)
        operators = []

    # Until it is measured: `explained`.
    rounding = None
    if setup.compute == "float32":
        rounding = FLOAT32_ROUNDING
    return Measured(
        name=name,
        source=source,
        pairs=make_pairs(completions, train, sampled.logprobs, entropies=entropies, states=states),
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

    Where the mismatch is within the noise floor, or float32's rounding and not far above a noise
    floor, one change is enough.

    Args:
        measured: the pair.
        prompt_index: [N] int, the prompt that each completion answers.
        setup: arguments of `compare`.
        show: called with a line on what each change explains.
        keep: gets the pair as it is after each.
    """
    mean = measured.pairs.discrepancy.mean()
    floor = max(measured.floors.values(), default=None)
    agrees = mean <= max(floor or 0.0, FLOAT32_ROUNDING) and not is_far_above(mean, floor)
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
    return any(explanation.share >= _ENOUGH for explanation in measured.explanations)


def sampling_floor(
    engine: Engine,
    episodes: Sequence[Episode],
    sampling: SamplingParams,
    *,
    seed: int,
) -> float | None:
    """Mean |q - q'| of beginnings of completions, sampled among the others and each alone.

    Args:
        engine: the engine that sampled.
        episodes: what it gave.
        sampling, seed: arguments of the call that sampled.

    Returns:
        The floor; None where not one first token is the same, or there is one completion only.
    """
    if len(episodes) < 2:
        return None
    length = min(_TOKENS_AGAIN, sampling.max_completion_tokens)
    short = dataclasses.replace(sampling, max_completion_tokens=length)
    first = dict(enumerate(episodes[:_SAMPLED_AGAIN]))
    together, alone = sample_alone(engine, first, short, seed=seed, step=0)
    if together.size:
        return probability_difference(together, alone).mean()
    return None


def noise_floor(
    engine: Scorer,
    prompts: Ragged,
    completions: Ragged,
    together: Ragged,
    *,
    temperature: float,
) -> float:
    """Mean |p - p'| of an engine's scores of 16 completions, each alone and all together.

    Args:
        engine: the engine.
        prompts, completions: token ids.
        together: log-probs for all of them in one call.
        temperature: temperature of these.
    """
    alone = [
        engine.score([prompt], [completion], temperature=temperature)[0]
        for prompt, completion in zip(
            prompts[:_SCORED_AGAIN], completions[:_SCORED_AGAIN], strict=True
        )
    ]
    expected = np.concatenate(together[: len(alone)])
    return probability_difference(expected, np.concatenate(alone)).mean()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Change:
    """One thing that is changed.

    Attributes:
        name, cause: see `Explanation`.
        dtype: dtype of activations and products.
        precision: precision of `quantize.PRECISIONS` that weights are quantized to; "" for none.
        fp8_cache: whether keys and values are rounded as `Setup.cache` says.
        params, prompts: others than the setup's.
    """

    name: str = ""
    cause: str = ""
    dtype: str = "float32"
    precision: str = ""
    fp8_cache: bool = False
    params: Params | None = None
    prompts: Ragged | None = None


_EMULATED = (
    *(
        _Change(
            name=f"{precision} weights, a scale for each output channel",
            cause="quantized_weights",
            precision=precision,
        )
        for precision in ("int8", "int4", "fp8")
    ),
    _Change(name="an fp8 key-value cache", cause="quantized_cache", fp8_cache=True),
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
        count = max(1, np.searchsorted(np.cumsum(pairs.lengths), _MOST_TOKENS, side="right"))
        self._setup = setup
        self._prompt_index = prompt_index[:count]
        self._pairs = pairs.where(pairs.completion < count)

    def rounding(self) -> float:
        """Mean |p - h| of the same model computed in the engine's dtype."""
        return np.mean(probability_difference(self._pairs.train_logprobs, self._plain))

    @functools.cached_property
    def _plain(self) -> np.ndarray:
        return self._ask(_Change(dtype=self._setup.compute))

    def explanations(self) -> Iterator[Explanation]:
        """Every re-scoring, the most probable and cheapest first."""
        setup = self._setup
        if setup.as_rounded is not None:
            yield self._explanation(
                _Change(
                    name="the adapters merged as the engine rounds",
                    cause="merge",
                    params=setup.as_rounded,
                )
            )
        yield Explanation(
            name=f"the model in {setup.compute}",
            cause="rounding",
            share=self._share(self._plain),
        )
        for change in self._other_precisions():
            yield self._explanation(change)
        yield self._temperature()

        for name, prompts in setup.prompt_variants.items():
            yield self._explanation(
                _Change(
                    name=f"the prompt rendered as {name}",
                    cause="chat_template",
                    prompts=prompts,
                )
            )
        for name, earlier in setup.earlier.items():
            yield self._explanation(
                _Change(name=f"the weights of {name}", cause="stale_weights", params=earlier)
            )
            yield from self._unsynchronized(name, earlier)

    def _other_precisions(self) -> Iterator[_Change]:
        """Quantizations, those of the engine's own settings first, and float32."""
        setup = self._setup
        if setup.precision in GROUPED:
            yield _Change(
                name=f"{setup.precision} weights, a scale for each group",
                cause="quantized_weights",
                dtype=setup.compute,
                precision=setup.precision,
            )
        for change in sorted(_EMULATED, key=lambda change: change.cause not in setup.settings):
            yield dataclasses.replace(change, dtype=setup.compute)
        yield _Change(
            name="fp8 weights, a scale for each block of 128 x 128",
            cause="quantized_weights",
            params=_in_blocks(setup.params, setup.config),
        )
        if setup.compute != "float32":
            yield _Change(name="the model in float32", cause="rounding")

    def _explanation(self, change: _Change) -> Explanation:
        share = self._share(self._ask(change))
        release_freed_memory()
        return Explanation(name=change.name, cause=change.cause, share=share)

    def _share(self, logprobs: np.ndarray) -> float:
        mismatch = self._pairs.discrepancy.sum()
        if not mismatch:
            return 0.0
        return 1 - probability_difference(logprobs, self._pairs.rollout_logprobs).sum() / mismatch

    def _ask(self, change: _Change, factors: Sequence[float] = (1.0,)) -> np.ndarray:
        """Log-probs [K, tokens] at the temperature times each of K factors."""
        setup = self._setup
        inverse = np.zeros(len(_TEMPERATURES), np.float32)
        inverse[: len(factors)] = 1 / (np.asarray(factors) * setup.temperature)
        params = setup.params if change.params is None else change.params
        prompts = setup.prompts if change.prompts is None else change.prompts
        run = functools.partial(
            _logprobs_at,
            _as_multiplied(params, setup.config, change.precision),
            inverse,
            change.fp8_cache,
            config=setup.config,
            compute=Compute(dtype=change.dtype, logprob_chunk=LOGPROB_CHUNK),
            cache=setup.cache,
        )
        completions = np.split(self._pairs.token_ids, self._pairs.starts[1:])
        logprobs = in_rows(run, [prompts[index] for index in self._prompt_index], completions)
        return np.concatenate(logprobs, axis=1)[: len(factors)]

    def _temperature(self) -> Explanation:
        """The best temperature but the one scored at, by ever finer grids."""
        factors = _TEMPERATURES
        shares = {}
        for _ in range(_GRIDS):
            for factor, logprobs in zip(factors, self._ask(_Change(), factors), strict=True):
                shares[factor] = self._share(logprobs)
            best = max(shares, key=shares.get)
            if shares[best] < _PROMISING:
                break
            low = max((factor for factor in shares if factor < best), default=best)
            high = min((factor for factor in shares if factor > best), default=best)
            if best > 1:
                low = max(low, 1 + _LEAST_CHANGE)
            else:
                high = min(high, 1 - _LEAST_CHANGE)
            factors = np.linspace(low, high, len(_TEMPERATURES)).tolist()
        usual = self._setup.temperature
        return Explanation(
            name=f"temperature {best * usual:.2f} in place of {usual:.2f}",
            cause="temperature",
            share=shares[best],
        )

    def _unsynchronized(self, name: str, earlier: Params) -> Iterator[Explanation]:
        """The best of every tensor of the earlier weights alone, and of all tensors of a layer."""
        now = self._setup.params
        changed = {}
        layers = {}
        for tensor_name, tensor in hf_tensors(self._setup.config).items():
            if np.array_equal(_values(now, tensor), _values(earlier, tensor)):
                continue
            changed[tensor_name] = [tensor]
            if tensor.index:
                layer = f"layer {'.'.join(map(str, tensor.index))}"
                layers.setdefault(layer, []).append(tensor)
        if len(changed) < 2:
            return
        for candidates in (changed, layers):
            shares = {}
            for candidate, tensors in candidates.items():
                swapped = _swapped(now, earlier, tensors)
                shares[candidate] = self._share(self._ask(_Change(params=swapped)))
            if shares:
                best = max(shares, key=shares.get)
                yield Explanation(
                    name=f"{best} of {name}, all else as it is",
                    cause="unsynchronized_tensor",
                    share=shares[best],
                )


@functools.partial(jax.jit, static_argnames=("config", "compute", "cache"))
def _logprobs_at(
    weights: Params,
    inverse_temperatures: Array,
    caches_fp8: Array,
    rows: Rows,
    *,
    config: ModelConfig,
    compute: Compute,
    cache: str,
) -> Array:
    """Log-probs of rows at several temperatures, from one pass through the layers.

    Args:
        weights: tree of `_as_multiplied`.
        inverse_temperatures: [K] float32; from the first 0 on none is wanted.
        caches_fp8: [] bool, see `fp8_cache` of `_Change`.
        rows: [R, L], a completion each.
        config, compute: the model, and how it is computed.
        cache: see `Setup`.

    Returns:
        [K, R, L] float32 nats; 0 where none is wanted.
    """
    inputs = DecoderInputs(
        input_ids=rows.input_ids,
        position_ids=rows.position_ids,
        segment_ids=rows.segment_ids,
    )
    compute_states = functools.partial(hidden_states, weights, config, inputs, compute)
    options = LogprobOptions(
        temperature=1.0,
        chunk=compute.logprob_chunk,
        ops=choose_ops(jax.default_backend()),
    )

    with products_in(compute.dtype):
        states = jax.lax.cond(
            caches_fp8,
            functools.partial(compute_states, scheme=Scheme(cache=cache)),
            compute_states,
        )

        def add_temperature(k: Array, logprobs: Array) -> Array:
            scaled = (states * inverse_temperatures[k]).astype(states.dtype)
            row_logprobs, _ = token_logprobs(
                scaled,
                weights["output"],
                rows.input_ids,
                rows.completion_mask,
                options=options,
            )
            return logprobs.at[k].set(row_logprobs)

        num_temperatures = jnp.sum(inverse_temperatures > 0)
        zeros = jnp.zeros((len(inverse_temperatures), *rows.input_ids.shape), jnp.float32)
        return jax.lax.fori_loop(0, num_temperatures, add_temperature, zeros)


def _as_multiplied(params: Params, config: ModelConfig, precision: str) -> Params:
    """Weights, in float32, as an engine of this precision multiplies by them.

    Values and scales of 1 for "".
    """
    layers = params["layers"]
    output = output_kernel(params)
    quantized = quantized_leaves(config)["layers"]
    if precision in GROUPED:
        layers = straight_through(layers, quantized, precision)
        output = straight_through(output, True, precision)
    elif precision:
        return params | _quantized(params, config=config, precision=precision)

    def leaf(x: Array, is_quantized: bool) -> Array | QuantizedKernel:
        if not is_quantized:
            return x
        return QuantizedKernel(x, jnp.ones(x.shape[:-2] + x.shape[-1:]))

    return params | {
        "layers": with_rounded_inputs(jax.tree.map(leaf, layers, quantized), precision),
        "output": output,
    }


@functools.partial(jax.jit, static_argnames=("config", "precision"))
def _quantized(params: Params, *, config: ModelConfig, precision: str) -> Params:
    """Quantized layers and output matrix; the matrix rounded, for log-probs take no scales."""
    tree = quantize_tree(params["layers"], quantized_leaves(config)["layers"], precision)
    layers = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    return {"layers": layers, "output": straight_through(output_kernel(params), True, precision)}


def _in_blocks(params: Params, config: ModelConfig) -> Params:
    """The matrices that engines quantize, as vLLM rounds them by blocks of 128 x 128."""

    def leaf(x: Array, is_quantized: bool) -> Array:
        if not is_quantized:
            return x
        # One after another: the temporary memory of each is several times its own.
        return jax.block_until_ready(_block_rounded(x))

    return jax.tree.map(leaf, params, quantized_leaves(config))


@jax.jit
def _block_rounded(x: Array) -> Array:
    if x.ndim > 2:
        return jax.lax.map(_block_rounded, x)
    return rounded_in_blocks(x)


def _values(params: Params, tensor: HFTensor) -> np.ndarray:
    return np.asarray(tensor.leaf(params)[tensor.index])


def _swapped(now: Params, earlier: Params, tensors: Sequence[HFTensor]) -> Params:
    """`now`, with some tensors of `earlier`."""

    def leaf(path: tuple[jax.tree_util.DictKey, ...], x: Array) -> Array:
        for tensor in tensors:
            if tensor.path == tuple(key.key for key in path):
                x = jnp.asarray(x).at[tensor.index].set(_values(earlier, tensor))
        return x

    return jax.tree_util.tree_map_with_path(leaf, now)
