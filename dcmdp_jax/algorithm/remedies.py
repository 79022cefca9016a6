"""The convention of remedies: from one struct of token arrays to token terms and statistics.

A remedy is a pure function

    remedy(tokens: Tokens, *, parameters) -> terms,    or    (terms, {name: Sum, Mean, Max or Min})

| kind | terms | setting |
|---|---|---|
| penalty | advantages [R, L] | `algorithm.method` |
| correction | `Corrected(weights, keep)` | `algorithm.corrections` |
| trust region | `Region(objective)`, to be maximized | `algorithm.trust_region` |
| loss | token losses [R, L], to be minimized | `algorithm.loss` |

Terms are float32. Penalties and corrections are constants to the gradient; in trust regions and
losses it flows through `train_logprobs` and `ratio`. Statistics are merged over micro-batches,
devices and updates by their type.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from dcmdp_jax.algorithm.masked import CompletionIndex
from dcmdp_jax.algorithm.require import require_gradient, require_rank, require_same_shape
from dcmdp_jax.algorithm.stats import Statistic, values
from dcmdp_jax.types import Array

Statistics = dict[str, Statistic]


class Tokens(NamedTuple):
    """Input of every mitigation, rows [R, L]. All tokens of a completion are in the same call.

    What lies outside `completion_mask` is undefined for penalties and corrections; for trust
    regions and losses `ratio` is 1 there, all else 0.

    Attributes:
        train_logprobs: nats, training stack, weights now. Equal to `old_logprobs` in the first
            update of a step.
        old_logprobs: nats, training stack, weights that made the batch.
        rollout_logprobs: nats, the inference engine's.
        advantages: float32, of each token's completion; penalized in trust regions and losses.
        discrepancy: float32 >= 0, delta as it is penalized: the token's, or its completion's mean
            (`algorithm.level`). 0 outside the mask.
        completion_mask: true on sampled tokens; in trust regions and losses on those in the loss.
        completion_index: the completion of a token.
        num_completions: N, static.
        multiplier: lambda_k.
        tolerance: c, in the discrepancy's unit.
        anchor_logprobs: nats, denominator of the importance ratio (`algorithm.ratio_denominator`);
            None for penalties and corrections.
        ratio: float32, importance ratio gamma of the token or its completion
            (`algorithm.ratio_level`); None for penalties and corrections.
        start_logprobs: nats, training stack, weights at the start of the step; equal to
            `old_logprobs` unless it lags behind (`rollout.lag`). None for trust regions and losses
            that are called without it.
    """

    train_logprobs: Float[Array, "R L"] = None
    old_logprobs: Float[Array, "R L"] = None
    rollout_logprobs: Float[Array, "R L"] = None
    advantages: Float[Array, "R L"] = None
    discrepancy: Float[Array, "R L"] = None
    completion_mask: Bool[Array, "R L"] = None
    completion_index: Int[Array, "R L"] = None
    num_completions: int = 0
    multiplier: Float[Array, ""] = None
    tolerance: Float[Array, ""] = None
    anchor_logprobs: Float[Array, "R L"] = None
    ratio: Float[Array, "R L"] = None
    start_logprobs: Float[Array, "R L"] = None

    @property
    def where(self) -> CompletionIndex:
        """Which completion each sampled token belongs to."""
        return CompletionIndex(self.completion_mask, self.completion_index, self.num_completions)


def require_tokens(tokens: Tokens) -> None:
    """Raise unless the arrays that are there have one shape, and lambda and c are single numbers.

    Raises:
        ValueError: naming every array with its shape, or log-probs in float16, see
            `require_gradient`.
    """
    require_gradient("train_logprobs", tokens.train_logprobs)
    arrays = tokens._asdict()
    for name in ("multiplier", "tolerance", "num_completions"):
        require_rank(name, arrays.pop(name), 0)
    present_arrays = {name: array for name, array in arrays.items() if array is not None}
    require_same_shape(**present_arrays)


class Corrected(NamedTuple):
    """Result of a correction of rows [R, L].

    Attributes:
        weights: float32 >= 0, factor of a token's loss; 0 outside the mask.
        keep: false on tokens to leave out.
        truncated: tokens whose weight a bound has changed; False: none.
    """

    weights: Float[jax.Array, "R L"]
    keep: Bool[jax.Array, "R L"]
    truncated: Bool[jax.Array, "R L"] | bool = False


class Region(NamedTuple):
    """The objective of tokens within a trust region.

    Attributes:
        objective: float32, to be maximized; the gradient flows through it.
        low, high: tokens whose gradient is stopped because the ratio fell or rose too far; False:
            none.
    """

    objective: Float[jax.Array, "R L"]
    low: Bool[jax.Array, "R L"] | bool = False
    high: Bool[jax.Array, "R L"] | bool = False


Function = Callable[[Tokens], Any]
"""From tokens to terms, or (terms, statistics)."""


def split(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Terms and statistics of a remedy's result; no statistics for terms alone.

    Raises:
        ValueError: for a tuple of something else.
    """
    if type(result) is not tuple:
        return result, {}
    if len(result) != 2 or not isinstance(result[1], Mapping):
        raise ValueError(
            f"returned a tuple of {len(result)}; return the terms, or (terms, statistics): "
            f"{_STATISTICS}"
        )
    return result


_STATISTICS = (
    "statistics are a dict of name -> Sum, Mean, Max or Min of "
    "dcmdp_jax.algorithm.stats, each of shape ()"
)


@dataclasses.dataclass(frozen=True)
class OwnRemedy:
    """A user's remedy: a `Function` whose statistics are metrics `remedy/NAME/STATISTIC`.

    Attributes:
        name: the function's name.
        function: the remedy.
        parameters: its keyword arguments.
    """

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, Any]

    def __call__(self, tokens: Tokens) -> tuple[Any, dict[str, Any]]:
        terms, statistics = split(self.function(tokens, **self.parameters))
        prefix = f"remedy/{self.name}"
        metrics = {f"{prefix}/{name}": value for name, value in statistics.items()}
        return terms, metrics


def check_terms(kind: str, function: Function) -> None:
    """Trace a remedy on small rows of two shapes: nothing is computed.

    Args:
        kind: "penalty", "correction", "policy-loss variant" or "loss".
        function: the remedy.

    Raises:
        ValueError: in one line, for terms or statistics of a wrong type, shape or dtype.
        Exception: any error of the function.
    """
    for tokens in (_probe(), _probe(rows=3, length=5)):
        terms, statistics = split(_trace(function, tokens))
        for name, value in _named(kind, terms).items():
            kinds = "f"
            if name in _FLAGS:
                kinds = "b"
            _check_array(name, value, tokens.completion_mask.shape, kinds)
        for name, statistic in statistics.items():
            if not isinstance(name, str) or not isinstance(statistic, Statistic):
                raise ValueError(
                    f"returned the statistic {name!r} as {type(statistic).__name__}; {_STATISTICS}"
                )
            for value in statistic:
                _check_array(f"the statistic {name!r}", value, (), "fiub")


def _trace(function: Function, tokens: Tokens) -> Any:
    """Result of a remedy on tracers. It does not pass through JAX, which refuses wrong types."""
    results = []

    def keep_result(traced: Tokens) -> None:
        results.append(function(traced._replace(num_completions=tokens.num_completions)))

    jax.eval_shape(keep_result, tokens)
    return results[0]


def check_values(kind: str, function: Function) -> None:
    """Compute a remedy and the gradient that it lets through on a few finite tokens.

    They include equal log-probs, some far apart, advantages of 0 and rows with padding.

    Raises:
        ValueError: in one line, for a term, a gradient or a statistic that is not finite, and for a
            trust region or a loss without any gradient.
    """
    tokens = _probe()
    mask = tokens.completion_mask

    def first_term_sum(
        variables: dict[str, jax.Array], constants: Tokens
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        """Sum of the first term; all terms and the values of the statistics beside it."""
        # `jit` traces every field, but the number of completions has to stay a Python number.
        constants = constants._replace(num_completions=tokens.num_completions)
        result, statistics = split(function(constants._replace(**variables)))
        terms = _named(kind, result)
        # The first is the one that is trained on.
        first_term = next(iter(terms.values()))
        return jnp.sum(jnp.where(mask, first_term, 0.0)), (terms, values(statistics))

    differentiate = jax.jit(jax.grad(first_term_sum, has_aux=True))
    gradient, (terms, statistics) = differentiate(
        {"train_logprobs": tokens.train_logprobs, "ratio": tokens.ratio}, tokens
    )

    checked = dict(terms)
    if kind in ("policy-loss variant", "loss"):
        if not any(np.any(value) for value in gradient.values()):
            raise ValueError(
                f"returned {next(iter(terms))} without any gradient, so that nothing is learned; "
                "compute them from tokens.train_logprobs or tokens.ratio, without stop_gradient"
            )
        for name, value in gradient.items():
            checked[f"the gradient of {name}"] = value

    for name, value in checked.items():
        non_finite = np.sum(~np.isfinite(np.asarray(value, np.float32)) & mask)
        if non_finite:
            raise ValueError(
                f"returned {name} that are not finite on {non_finite} of {mask.sum()} tokens with "
                "finite log-probs"
            )
    for name, value in statistics.items():
        if not np.isfinite(value):
            raise ValueError(f"returned the statistic {name!r} = {value} of finite log-probs")


def _check_array(name: str, value: Any, shape: tuple[int, ...], kinds: str) -> None:
    if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float):
        raise ValueError(f"returned {name} as {type(value).__name__}; must be an array")
    dtype = jnp.result_type(value)
    if np.shape(value) != shape:
        remedy = ""
        if shape:
            remedy = " as the tokens"
        raise ValueError(f"returned {name} of shape {np.shape(value)}; must be {shape}{remedy}")
    if dtype.kind not in kinds or (kinds == "f" and dtype != jnp.float32):
        allowed = {"f": "float32", "b": "bool"}.get(kinds, "a number")
        raise ValueError(f"returned {name} in {dtype}; must be {allowed}")


# Kind of remedy -> the type of its terms, or the name of the array that they are.
_KINDS = {
    "penalty": "advantages",
    "correction": Corrected,
    "policy-loss variant": Region,
    "loss": "losses",
}
_FLAGS = ("keep", "truncated", "low", "high")


def _named(kind: str, terms: Any) -> dict[str, Any]:
    """Name and array of each term of a remedy; flags that are False are no arrays."""
    term_type = _KINDS[kind]
    if isinstance(term_type, str):
        return {term_type: terms}
    if not isinstance(terms, term_type):
        fields = ", ".join(term_type._fields)
        returned = type(terms).__name__
        if isinstance(terms, jax.Array):
            returned = "an array"
        raise ValueError(
            f"returned {returned}; must be {term_type.__name__}({fields}) of "
            "dcmdp_jax.algorithm.remedies"
        )
    arrays = {}
    for name, value in terms._asdict().items():
        if value is not False or name == "keep":
            arrays[name] = value
    return arrays


def _probe(rows: int = 2, length: int = 12) -> Tokens:
    """Tokens of one completion a row, each two tokens shorter than the last, and an empty one."""
    rng = np.random.default_rng(0)
    shape = (rows, length)
    old = -rng.exponential(1.0, shape).astype(np.float32)
    train = np.minimum(old + rng.normal(0, 0.05, shape), 0).astype(np.float32)
    rollout = np.minimum(old + rng.normal(0, 0.2, shape), 0).astype(np.float32)

    # Half of the first row agrees exactly; two tokens of the second row lie far apart.
    half = length // 2
    old[0, half:] = train[0, half:] = rollout[0, half:]
    train[1, :2] = -0.01, -15.0
    old[1, :2] = -12.0, -0.01
    rollout[1, :2] = -15.0, 0.0

    position = np.arange(length)
    row = np.arange(rows, dtype=np.int32)[:, None]
    mask = position < length - 2 * row
    advantages = np.where(position % 3 == 0, 0.0, np.where(row % 2 == 0, 1.0, -0.7))
    delta = np.where(mask, np.abs(np.exp(old) - np.exp(rollout)), 0)
    return Tokens(
        train_logprobs=train,
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=advantages.astype(np.float32),
        discrepancy=delta.astype(np.float32),
        completion_mask=mask,
        completion_index=np.repeat(row, length, axis=1),
        num_completions=rows + 1,
        multiplier=np.float32(0.5),
        tolerance=np.float32(0.01),
        anchor_logprobs=rollout,
        ratio=np.exp(train - rollout),
        start_logprobs=old,
    )
