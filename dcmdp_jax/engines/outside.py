"""An engine that a user brings: its record and its methods are checked when it is made, its completions at every call.

`check_engine` is for a test beside such an engine: it asks for all that the protocol promises.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dcmdp_jax.data.episode import Episode
from dcmdp_jax.engines.kind import EngineArguments, EngineKind
from dcmdp_jax.engines.protocol import Engine, EngineError, SamplingParams
from dcmdp_jax.engines.validation import check_episodes, check_scores
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import declared
from dcmdp_jax.inputs import shorten
from dcmdp_jax.types import Params
from dcmdp_jax.user_code import load_object

# How each method of the protocol is called.
_METHODS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "push_weights": ((None, 0), {}),
    "generate": (((), None), {"seed": 0, "step": 0, "first_prompt": 0}),
    "score": (((), ()), {"temperature": 1.0}),
    "release_weights": ((), {}),
    "close": ((), {}),
}


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
    for field in dataclasses.fields(EngineKind):
        value, default = getattr(kind, field.name), field.default
        if field.name == "build" or inspect.isfunction(default):
            taken = (None,) * (1 if field.name == "build" else len(inspect.signature(default).parameters))
            _check_call(f"engine: {place}: {field.name}", value, taken, {})
        elif isinstance(default, tuple | bool) and type(value) is not type(default):
            said = "a tuple" if isinstance(default, tuple) else "True or False"
            raise UserError(f"engine: {place}: {field.name}={shorten(value)}, must be {said}")
    try:
        declared(kind.settings)
    except (TypeError, KeyError, NameError) as error:
        raise UserError(
            f"engine: {place}: settings={shorten(kind.settings)}, must be a dataclass whose fields are declared with "
            "dcmdp_jax.fields.setting"
        ) from error

    def build(arguments: EngineArguments) -> Engine:
        engine = kind.build(arguments)
        _check_methods(place, engine, kind.scores)
        return _Checked(place, engine, arguments.model.vocab_size)

    return dataclasses.replace(kind, build=build)


def check_engine(
    engine: Engine, params: Params, prompts: Sequence[np.ndarray], sampling: SamplingParams, *, vocab_size: int,
    scores: bool = True,
) -> float:  # fmt: skip
    """Ask an engine for all that `protocol.Engine` promises; for a test beside it. The engine stays open.

    Its methods, what they return, the same completions for the same (seed, step, row) in a call of its own, sampling
    that goes on after an iterator was closed, and scores of what it sampled.

    Args:
        engine: to be checked.
        params: to push.
        prompts: int32 token ids, at least two.
        sampling: what to ask for; temperature above 0.
        vocab_size: of the model.
        scores: whether it has `score`.

    Returns:
        The largest difference in nats between a sampled token's log-prob and its score; 0 without `score`.

    Raises:
        UserError: for a method that is missing or can't be called as the protocol does.
        EngineError: for what it returns.
    """
    _check_methods("check_engine", engine, scores)
    checked = _Checked("check_engine", engine, vocab_size)
    engine.push_weights(params, 0)

    def sampled(prompts: Sequence[np.ndarray], first: int) -> list[Episode]:
        groups = checked.generate(prompts, sampling, seed=1, step=2, first_prompt=first)
        return sorted((one for group in groups for one in group), key=lambda one: (one.group, one.member))

    whole = sampled(prompts, 3)
    checked.generate(prompts, sampling, seed=1, step=2).close()
    for one, again in zip(whole[sampling.group_size :], sampled(prompts[1:], 4), strict=True):
        if not np.array_equal(one.token_ids, again.token_ids):
            raise EngineError(
                f"completion {one.member} of prompt {one.group} is another one when its prompt is sampled in a smaller "
                "call with the same seed, step and row: a resumed run would not repeat an uninterrupted one"
            )
    engine.release_weights()
    engine.push_weights(params, 1)
    if not scores:
        return 0.0
    ends = [one.prompt_length for one in whole]
    given = [one.token_ids[end:] for one, end in zip(whole, ends, strict=True)]
    values = engine.score([prompts[one.group] for one in whole], given, temperature=sampling.temperature)
    own = (one.rollout_logprobs[end:] for one, end in zip(whole, ends, strict=True))
    return max(
        float(np.abs(score - logprobs).max()) for score, logprobs in zip(check_scores(values, given), own, strict=True)
    )


def _check_call(what: str, function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> None:
    if not callable(function):
        raise UserError(f"{what}={shorten(function)}, must be a function of {len(given)} argument(s)")
    try:
        inspect.signature(function).bind(*given, **named)
    except TypeError as error:
        by_name = "".join(f", {name}=" for name in named)
        raise UserError(f"{what} can't be called with {len(given)} argument(s){by_name}: {error}") from None
    except ValueError:  # some functions written in C have no signature
        return


def _check_methods(place: str, engine: Any, scores: bool) -> None:
    for name, (given, named) in _METHODS.items():
        if name == "score" and not scores:
            continue
        if not callable(method := getattr(engine, name, None)):
            raise UserError(f"engine: {place}: build returned {shorten(engine)}, which has no method {name}")
        _check_call(f"engine: {place}: {name}", method, given, named)


class _Checked:
    """A user's engine, whose completions are checked as they come."""

    def __init__(self, place: str, engine: Engine, vocab_size: int) -> None:
        self._place, self._engine, self._vocab_size = place, engine, vocab_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: SamplingParams, *, seed: int, step: int, first_prompt: int = 0
    ) -> Iterator[list[Episode]]:
        """As the engine, each group checked."""
        groups = self._engine.generate(prompts, sampling, seed=seed, step=step, first_prompt=first_prompt)
        return self._checked(groups, prompts, sampling)

    def _checked(
        self, groups: Iterator[list[Episode]], prompts: Sequence[np.ndarray], sampling: SamplingParams
    ) -> Iterator[list[Episode]]:
        expected = {(group, member) for group in range(len(prompts)) for member in range(sampling.group_size)}
        try:
            for episodes in groups:
                check_episodes(episodes, prompts, sampling, self._vocab_size)
                rows = {(episode.group, episode.member) for episode in episodes}
                if len(rows) < len(episodes) or not rows <= expected:
                    raise EngineError("generate gave a completion twice, or of a prompt that was not asked")
                expected -= rows
                yield episodes
            if expected:
                raise EngineError(f"generate gave nothing for {len(expected)} completion(s)")
        except EngineError as error:
            raise EngineError(f"engine {self._place}: {error}") from error
        finally:
            if close := getattr(groups, "close", None):
                close()
