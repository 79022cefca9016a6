"""An engine that a user brings: its record is checked when it is loaded, what it returns at every call."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dcmdp_jax.data.episode import Episode
from dcmdp_jax.engines.kind import EngineArguments, EngineKind
from dcmdp_jax.engines.protocol import Engine, EngineError, SamplingParams
from dcmdp_jax.engines.validation import check_episodes, check_scores
from dcmdp_jax.errors import UserError, one_line
from dcmdp_jax.fields import declared
from dcmdp_jax.inputs import shorten
from dcmdp_jax.machine import Part
from dcmdp_jax.models.scheme import Scheme
from dcmdp_jax.types import Params
from dcmdp_jax.user_code import describe_error, load_object

# How each method of the protocol is called.
_METHODS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "push_weights": ((None, 0), {}),
    "generate": (((), None), {"seed": 0, "step": 0, "first_prompt": 0}),
    "score": (((), ()), {"temperature": 1.0}),
    "release_weights": ((), {}),
    "close": ((), {}),
}
_EXPECTED = (UserError, EngineError, MemoryError)


def load_engine(place: str) -> EngineKind:
    """The record at `package.module:NAME` or `path/to/file.py:NAME`, checked; its functions are not called.

    Raises:
        UserError: in one line with the place, for what can't be imported, is no `EngineKind`, or has a field that is
            not what the kind says.
    """
    try:
        kind = load_object(place)
    except UserError as error:
        raise UserError(f"engine: {error}") from error
    if not isinstance(kind, EngineKind):
        raise UserError(f"engine: {place} is {shorten(kind)}, must be a dcmdp_jax.engines.kind.EngineKind")
    guarded = {}
    for field in dataclasses.fields(EngineKind):
        value, default = getattr(kind, field.name), field.default
        if field.name == "build" or inspect.isfunction(default):
            guarded[field.name] = _guarded(place, field.name, value, None if field.name == "build" else default)
        elif isinstance(default, tuple) and not isinstance(value, tuple):
            raise UserError(f"engine: {place}: {field.name}={shorten(value)}, must be a tuple")
        elif isinstance(default, bool) and not isinstance(value, bool):
            raise UserError(f"engine: {place}: {field.name}={shorten(value)}, must be True or False")
    try:
        declared(kind.settings)
    except (TypeError, KeyError, NameError) as error:
        raise UserError(
            f"engine: {place}: settings={shorten(kind.settings)}, must be a dataclass whose fields are declared with "
            "dcmdp_jax.fields.setting"
        ) from error
    build = guarded["build"]
    return dataclasses.replace(
        kind, **guarded | {"build": lambda arguments: _Checked(place, kind, build(arguments), arguments)}
    )


def _guarded(place: str, name: str, function: Any, example: Any) -> Callable[..., Any]:
    """A function of the record whose own errors, and results of another type, become one line.

    Args:
        place, name: of the record and of its field.
        function: the user's.
        example: the field's default, which takes as many arguments and gives the same type; None of one argument.
    """
    taken = (None,) * (1 if example is None else len(inspect.signature(example).parameters))
    kind = None if example is None else type(example(*taken))
    if not callable(function):
        raise UserError(f"engine: {place}: {name}={shorten(function)}, must be a function of {len(taken)} argument(s)")
    _check_signature(f"engine: {place}: {name}", function, taken, {})
    expected = {
        str: "a text", list: "a list of dcmdp_jax.machine.Part", Scheme: "a dcmdp_jax.models.scheme.Scheme",
    }  # fmt: skip

    @functools.wraps(function)
    def guarded(*arguments: Any) -> Any:
        try:
            found = function(*arguments)
        except _EXPECTED:
            raise
        except Exception as error:
            raise UserError(f"engine: {place}: {name} raised {_said(error, place)}") from error
        parts = found if kind is list and isinstance(found, list) else ()
        of_kind = kind not in expected or isinstance(found, kind)
        if not of_kind or not all(isinstance(part, Part) for part in parts):
            raise UserError(f"engine: {place}: {name} gave {shorten(found)}, must give {expected[kind]}")
        return found

    return guarded


def _check_signature(what: str, function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind(*given, **named)
    except TypeError as error:
        by_name = "".join(f", {name}=" for name in named)
        raise UserError(f"{what} can't be called with {len(given)} argument(s){by_name}: {error}") from None
    except ValueError:  # some functions written in C have no signature
        return


def _said(error: Exception, place: str) -> str:
    return one_line(describe_error(error, place.rpartition(":")[0]), 500)


class _Checked:
    """Keeps the `Engine` protocol with a user's engine. What it returns is checked, what it raises is one line."""

    def __init__(self, place: str, kind: EngineKind, engine: Engine, arguments: EngineArguments) -> None:
        self._place, self._kind, self._engine, self._arguments = place, kind, engine, arguments
        for name, (given, named) in _METHODS.items():
            if name == "score" and not kind.scores:
                continue
            method = getattr(engine, name, None)
            if not callable(method):
                raise UserError(f"engine: {place}: build returned {shorten(engine)}, which has no method {name}")
            _check_signature(f"engine: {place}: {name}", method, given, named)

    def _call(self, name: str, *given: Any, **named: Any) -> Any:
        try:
            return getattr(self._engine, name)(*given, **named)
        except _EXPECTED:
            raise
        except Exception as error:
            raise EngineError(f"engine {self._place}: {name} raised {_said(error, self._place)}") from error

    def push_weights(self, params: Params, policy_version: int) -> dict[str, float]:
        """As the engine."""
        found = self._call("push_weights", params, policy_version) or {}
        if not isinstance(found, dict):
            raise EngineError(f"engine {self._place}: push_weights gave {shorten(found)}, must give a dict of metrics")
        return found

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: SamplingParams, *, seed: int, step: int, first_prompt: int = 0
    ) -> Iterator[list[Episode]]:
        """As the engine, each group checked."""
        groups = self._call("generate", prompts, sampling, seed=seed, step=step, first_prompt=first_prompt)
        return self._checked(groups, prompts, sampling)

    def _checked(
        self, groups: Iterator[list[Episode]], prompts: Sequence[np.ndarray], sampling: SamplingParams
    ) -> Iterator[list[Episode]]:
        expected = {(group, member) for group in range(len(prompts)) for member in range(sampling.group_size)}
        try:
            for episodes in groups:
                check_episodes(episodes, prompts, sampling, self._arguments.model.vocab_size)
                rows = {(episode.group, episode.member) for episode in episodes}
                if len(rows) < len(episodes) or not rows <= expected:
                    raise EngineError("generate gave a completion twice, or of a prompt that was not asked")
                expected -= rows
                yield episodes
        except _EXPECTED as error:
            raise type(error)(f"engine {self._place}: {error}") from error
        except Exception as error:
            raise EngineError(f"engine {self._place}: generate raised {_said(error, self._place)}") from error
        finally:
            if close := getattr(groups, "close", None):
                close()
        if expected:
            raise EngineError(f"engine {self._place}: generate gave nothing for {len(expected)} completion(s)")

    def score(
        self, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], *, temperature: float
    ) -> list[np.ndarray]:
        """As the engine, shapes and dtypes checked."""
        if not self._kind.scores:
            raise EngineError(f"engine {self._place}: it has no score")
        scores = self._call("score", prompts, completions, temperature=temperature)
        try:
            return check_scores(scores, completions)
        except EngineError as error:
            raise EngineError(f"engine {self._place}: {error}") from error

    def release_weights(self) -> None:
        """As the engine."""
        self._call("release_weights")

    def close(self) -> None:
        """As the engine."""
        self._call("close")
