"""Argument checks of the algorithm, of static shapes and Python values: they hold under jit too."""

import math
import numbers
from typing import Any

import jax
import numpy as np

LOGPROB_ROUNDING = 1e-3
"""Nats by which a log-prob of a certain token may be above 0."""


def require_same_shape(**arrays: Any) -> None:
    """Raise unless all named arrays have one shape (no broadcasting).

    Raises:
        ValueError: naming every array with its shape.
    """
    shapes = {name: np.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes differ: {listed}; all must be equal")


def concrete(value: Any) -> np.ndarray | None:
    """The value as a NumPy array; None where it is traced by jit or vmap, or on another host.

    What grad alone traces is known: its tracers carry their value.
    """
    while isinstance(value, jax.core.Tracer) and hasattr(value, "primal"):
        value = value.primal
    if isinstance(value, jax.core.Tracer) or (
        isinstance(value, jax.Array) and not value.is_fully_addressable
    ):
        return None
    return np.asarray(value)


def require_logprobs(name: str, logprobs: Any, mask: Any = None) -> None:
    """Raise for probabilities in place of log-probs: nowhere below 0 on sampled tokens.

    Not checked where the values are not known (`concrete`).

    Args:
        name: the argument's name, for the message.
        logprobs: any shape.
        mask: same shape, true on sampled tokens; None: all are.

    Raises:
        ValueError: naming the argument.
    """
    array = concrete(logprobs)
    if mask is None:
        mask = True
    sampled = concrete(mask)
    if array is None or sampled is None:
        return
    values = array.astype(float)[np.broadcast_to(sampled.astype(bool), array.shape)]
    if (values >= 0).all() and (values > LOGPROB_ROUNDING).any():
        raise ValueError(
            f"{name} is nowhere below 0 on sampled tokens; must be log-probs, not probabilities or "
            "negated log-probs"
        )


def require_gradient(name: str, logprobs: Any) -> None:
    """Raise for log-probs in float16, whose gradient is lost: a ratio goes beyond its range.

    A ratio goes to e^20, float16 ends at 65,504. Known under jit too. bfloat16 has float32's range.

    Raises:
        ValueError: naming the argument and the remedy.
    """
    if getattr(logprobs, "dtype", None) == np.float16:
        raise ValueError(
            f"{name} has dtype float16, in which a gradient above 65504 is inf; convert the "
            "logits to float32 before the log-softmax"
        )


def require_rank(name: str, array: Any, rank: int) -> None:
    """Raise unless `array` has `rank` axes.

    Raises:
        ValueError: naming the array, its shape and the rank wanted.
    """
    shape = np.shape(array)
    if len(shape) != rank:
        raise ValueError(f"{name} has shape {shape}; must have {rank} axes, not {len(shape)}")


def require_option(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `allowed`.

    Raises:
        ValueError: naming the option, its value and the choices.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; must be one of {', '.join(map(repr, allowed))}")


def require_number(
    name: str,
    value: Any,
    *,
    minimum: float,
    maximum: float = math.inf,
    open_maximum: bool = False,
    open_minimum: bool = False,
) -> None:
    """Raise unless a scalar is a finite number in [minimum, maximum].

    Of traced values only the shape is known here.

    Args:
        name: the argument's name, for the message.
        value: the argument.
        minimum: smallest value allowed.
        maximum: largest value allowed.
        open_maximum, open_minimum: true: `maximum`, or `minimum`, itself is refused.

    Raises:
        ValueError: naming the argument, its value and the range.
    """
    require_rank(name, value, 0)
    if isinstance(value, jax.Array | np.ndarray):
        array = concrete(value)
        if array is None:
            return
        value = array.item()
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r}; must be a number")

    below = value < minimum or open_minimum and value == minimum
    above = value > maximum or open_maximum and value == maximum
    if not math.isfinite(value) or below or above:
        opening = "["
        if open_minimum:
            opening = "("
        closing = "]"
        if open_maximum or maximum == math.inf:
            closing = ")"
        raise ValueError(
            f"{name}={value!r}; must be a finite number in {opening}{minimum}, {maximum}{closing}"
        )


def require_multiplier_range(multiplier_min: Any, multiplier_max: Any) -> None:
    """Raise unless both are finite, and 0 <= min <= max as far as known: `require_number`."""
    require_number("multiplier_min", multiplier_min, minimum=0)
    known_min = concrete(multiplier_min)
    least_max = 0.0
    if known_min is not None:
        least_max = known_min.item()
    require_number("multiplier_max", multiplier_max, minimum=least_max)


def require_sizes(*, open_minimum: bool = False, **sizes: Any) -> None:
    """Raise unless every named scalar is finite and at least 0, or above it: `require_number`."""
    for name, size in sizes.items():
        require_number(name, size, minimum=0, open_minimum=open_minimum)


def require_integer(name: str, value: Any, *, minimum: int) -> None:
    """Raise unless `value` is an integer of at least `minimum` (a bool is not an integer here).

    Raises:
        ValueError: naming the argument, its value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"{name}={value!r}; must be an integer of at least {minimum}")
