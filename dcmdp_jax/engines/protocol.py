"""The protocol that every inference engine implements."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from dcmdp_jax.data.episode import Episode
from dcmdp_jax.errors import ArgumentError
from dcmdp_jax.errors import EngineError as EngineError
from dcmdp_jax.types import Params


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The distribution to sample from.

    Attributes:
        group_size: completions for each prompt, G.
        max_completion_tokens: length limit of a completion, end-of-sequence included.
        temperature: divides the logits; 0 is greedy (evaluation only, its log-probs are those at temperature 1).
        top_p: nucleus mass; below 1 the log-probs are of the cut distribution.
        top_k: likeliest tokens to sample from, cut before the nucleus, likewise; 0: all.
        stop_token_ids: a completion ends with the first of these.
    """

    group_size: int
    max_completion_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ArgumentError("group_size", f"got {self.group_size}, must be at least 1")
        if self.max_completion_tokens < 1:
            raise ArgumentError("max_completion_tokens", f"got {self.max_completion_tokens}, must be at least 1")
        if not self.temperature >= 0:
            raise ArgumentError("temperature", f"got {self.temperature}, must be 0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", f"got {self.top_p}, must be in (0, 1]")

    @property
    def cuts(self) -> bool:
        """Whether unlikely tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0


class Engine(Protocol):
    """Samples completions and reports the probabilities it sampled them with.

    Weights arrive by `push_weights` and stay until the next push or `release_weights`. Sampling is a function of (seed,
    step, row), row being `(first_prompt + prompt) * group_size + member`: neither batch composition nor earlier calls
    change it, nor which of several engines samples a prompt.
    """

    def push_weights(self, params: Params, policy_version: int) -> dict[str, float]:
        """Take the trainer's parameters, converted to the engine's own precision; return when they are in use.

        Returns:
            What was measured on the way, by the names of observe/metric_names.py.
        """

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: SamplingParams, *, seed: int, step: int, first_prompt: int = 0
    ) -> Iterator[list[Episode]]:
        """Sample `group_size` completions for each prompt.

        Groups come as they finish, each complete and once, a restart of the engine included. The caller pulls: what it
        does with a group overlaps with sampling where the engine samples in another process, and an error of its own
        does not reach the engine. An empty list says that no group has finished since; it lets the caller look for a
        signal.

        Close the iterator to stop sampling; the engine stays usable. Calls do not overlap: the next one may end an
        iterator that was left open.

        Log-probs are returned as they are, NaN too: `validation.unusable_completions` decides what becomes of those.

        Args:
            prompts: int32 token ids, one array per prompt.
            sampling: the distribution; `top_p` is ignored at temperature 0.
            seed, step: 0 .. 2^32 - 1; with the row they determine the random numbers.
            first_prompt: number of the first prompt where these are a share of a larger batch. Episodes number their
                groups from 0 in any case.

        Returns:
            The groups that are complete, maybe none, now and then.

        Raises:
            ValueError: for no prompts, an empty one, an id outside the vocabulary, a prompt too long for the engine, a
                seed, a step or a temperature out of range; at once, before the first group is asked for.
            EngineError: if no weights were pushed; later if the engine breaks for good.
        """

    def score(
        self, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], *, temperature: float
    ) -> list[np.ndarray]:
        """The engine's own log-probs of given completions, each row in one pass.

        They differ from those reported while sampling by the rounding of differently shaped products alone: the
        engine's noise floor.

        Args:
            prompts: int32 token ids, one array per completion.
            completions: int32 token ids.
            temperature: divides the logits; 0 gives the log-probs at temperature 1, as `generate` does.

        Returns:
            [T] float32 nats for each completion, full support.

        Raises:
            ValueError: see `generate`; also for lists of different lengths, or for a negative temperature.
            EngineError: if a log-prob is not finite, no weights were pushed, or the engine breaks for good.
        """

    def release_weights(self) -> None:
        """Free the weights until the next push if they are in the trainer's memory, which its step needs."""

    def close(self) -> None:
        """Free what the engine holds; safe to call twice."""
