"""The protocol of inference engines, and the validation of their inputs and outputs."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS, Episode, collect
from dcmdp_jax.data.top_logprobs import list_problems
from dcmdp_jax.errors import ArgumentError
from dcmdp_jax.errors import EngineError as EngineError
from dcmdp_jax.types import Params

TokenRows = Sequence[np.ndarray]
"""Token ids of several sequences, [length] int32 each."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The distribution to sample from.

    Attributes:
        group_size: completions for each prompt, G.
        max_completion_tokens: length limit of a completion, end-of-sequence included.
        temperature: divides the logits; 0 is greedy (evaluation only, its log-probs are those at
            temperature 1).
        top_p: nucleus mass; below 1 the log-probs are of the cut distribution.
        top_k: top-k tokens to sample from, cut before the nucleus, likewise; 0: all.
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
            raise ArgumentError(
                "max_completion_tokens", f"got {self.max_completion_tokens}, must be at least 1"
            )
        if not self.temperature >= 0:
            raise ArgumentError(
                "temperature", f"got {self.temperature}, must be 0 (greedy) or above"
            )
        if not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", f"got {self.top_p}, must be in (0, 1]")

    @property
    def cuts(self) -> bool:
        """Whether unlikely tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0


class Engine(Protocol):
    """Samples completions and reports the probabilities it sampled them with.

    Weights arrive by `sync_weights` and stay until the next weight sync or `release_weights`.
    Sampling is a function of (seed, step, row), row being `(first_prompt + prompt) * group_size +
    member`: neither batch composition nor earlier calls change it, nor which of several engines
    samples a prompt.
    """

    def sync_weights(self, params: Params, policy_version: int) -> dict[str, float]:
        """Convert the trainer's parameters to the engine's precision; return once they are in use.

        Returns:
            What was measured on the way, by the names of observe/metric_names.py.
        """

    def generate(
        self,
        prompts: TokenRows,
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        first_prompt: int = 0,
    ) -> Iterator[list[Episode]]:
        """Sample `group_size` completions for each prompt.

        Groups come as they finish, each complete and once, a restart of the engine included. The
        caller pulls: what it does with a group overlaps with sampling where the engine samples in
        another process, and an error of its own does not reach the engine. An empty list says that
        no group has finished since; it lets the caller look for a signal.

        Close the iterator to stop sampling; the engine stays usable. Calls do not overlap: the next
        one may end an iterator that was left open.

        Log-probs are returned as they are, NaN too: `protocol.unusable_completions` decides what
        becomes of those.

        Args:
            prompts: int32 token ids, one array per prompt.
            sampling: the distribution; `top_p` is ignored at temperature 0.
            seed, step: 0 .. 2^32 - 1; with the row they determine the random numbers.
            first_prompt: number of the first prompt where these are a share of a larger batch.
                Episodes number their groups from 0 in any case.

        Returns:
            The groups that are complete, maybe none, now and then.

        Raises:
            ValueError: for no prompts, an empty one, an id outside the vocabulary, a prompt too
                long for the engine, a seed, a step or a temperature out of range; at once, before
                the first group is asked for.
            EngineError: if no weights were synced; later if the engine breaks for good.
        """

    def score(
        self,
        prompts: TokenRows,
        completions: TokenRows,
        *,
        temperature: float,
    ) -> list[np.ndarray]:
        """The engine's own log-probs of given completions, each row in one pass.

        They differ from those reported while sampling by the rounding of differently shaped
        products alone: the engine's noise floor.

        Args:
            prompts: int32 token ids, one array per completion.
            completions: int32 token ids.
            temperature: divides the logits; 0 gives the log-probs at temperature 1, as `generate`
                does.

        Returns:
            [T] float32 nats for each completion, full support.

        Raises:
            ValueError: see `generate`; also for lists of different lengths, or for a negative
                temperature.
            EngineError: if a log-prob is not finite, no weights were synced, or the engine breaks
                for good.
        """

    def release_weights(self) -> None:
        """Free the weights until the next weight sync, if the trainer needs their memory."""

    def close(self) -> None:
        """Free what the engine holds; safe to call twice."""


def unusable_completions(episodes: Sequence[Episode], *, drop: bool) -> np.ndarray:
    """Episodes in which the log-prob of a sampled token is broken, [N] bool.

    Args:
        episodes: result of the engine's `generate`.
        drop: return them to be left out and counted; otherwise any is an error.

    Raises:
        EngineError: naming the first such completion, token and value, unless `drop`; or if all are
            unusable.
    """
    broken = [broken_tokens(episode) for episode in episodes]
    unusable = np.array([tokens.any() for tokens in broken], bool)
    if unusable.any() and not drop:
        i = int(np.argmax(unusable))
        t = int(np.argmax(broken[i]))
        episode = episodes[i]
        raise EngineError(
            f"rollout: log-prob of token {t - episode.prompt_length} (id {episode.token_ids[t]}) "
            f"of completion {i} is {episode.rollout_logprobs[t]}; the engine's numbers are "
            "broken, or set `drop` to leave it out"
        )
    if unusable.all():
        raise EngineError(
            "rollout: no completion has usable log-probs; the engine's numbers are broken"
        )
    return unusable


def broken_tokens(episode: Episode) -> np.ndarray:
    """Sampled tokens whose log-prob is NaN, infinite or above 0 by more than rounding, [T] bool."""
    logprobs = episode.rollout_logprobs
    return episode.sampled_mask & (~np.isfinite(logprobs) | (logprobs > 1e-3))


def check_versions(episodes: Sequence[Episode], version: int) -> None:
    """Refuse tokens sampled by other weights than were synced for them.

    Raises:
        EngineError: naming both versions.
    """
    for row, episode in enumerate(episodes):
        versions = episode.policy_versions[episode.sampled_mask]
        others = versions[versions != version]
        if others.size:
            raise EngineError(
                f"completion {row} has tokens of version {int(others[0])}, version {version} was "
                "synced for them; each step must be sampled by the version announced for it"
            )


def check_top_logprobs(
    episodes: Sequence[Episode],
    count: int,
    vocab_size: int,
    *,
    complete: bool = False,
) -> None:
    """Refuse top-k tokens that can't be the engine's.

    Measures of whole distributions would be wrong, silently.

    Args:
        episodes: answer of an engine that was asked for them.
        count: k.
        vocab_size: ids are below it.
        complete: the lists must hold all tokens that the engine samples from.

    Raises:
        EngineError: naming the first completion and token, and what is wrong.
    """
    for i, episode in enumerate(episodes):
        expected = (len(episode.token_ids), count)
        for name in (TOP_IDS, TOP_LOGPROBS):
            column = episode.columns.get(name)
            if column is None or column.shape != expected:
                actual = "no top-k tokens"
                if column is not None:
                    actual = f"top-k tokens of shape {column.shape}"
                raise EngineError(
                    f"rollout: completion {i}: {actual}, expected [tokens, k] = {expected} "
                    "(`top_logprobs`)"
                )

        usable = np.flatnonzero(episode.sampled_mask & ~broken_tokens(episode))
        ids = episode.columns[TOP_IDS][usable]
        logprobs = episode.columns[TOP_LOGPROBS][usable]
        problems = list(
            list_problems(
                ids,
                logprobs,
                episode.token_ids[usable],
                episode.rollout_logprobs[usable],
                vocab_size,
                _LIST_TOLERANCE,
            )
        )
        if complete:
            mass = np.where(ids >= 0, np.exp(logprobs), 0).sum(axis=1)
            problems.append((_INCOMPLETE, mass < 1 - _LIST_TOLERANCE))
        for problem, tokens in problems:
            if tokens.any():
                token = usable[np.argmax(tokens)] - episode.prompt_length
                raise EngineError(
                    f"rollout: completion {i}, token {token}: {problem} (`top_logprobs` is "
                    f"{count}, 0 asks for none)"
                )


_INCOMPLETE = "the engine samples from more tokens than it lists; set a larger number"
# Nats, and probability: more than rounding.
_LIST_TOLERANCE = 1e-3


def check_routed_experts(
    episodes: Sequence[Episode],
    layers: int,
    per_token: int,
    experts: int,
) -> None:
    """Refuse experts that the model does not have.

    A forward pass would take others in their place, silently.

    Args:
        episodes: answer of an engine that was asked for the experts of each token.
        layers: L of the model.
        per_token: k, experts of a token in each layer.
        experts: E of each layer; ids are below it.

    Raises:
        EngineError: naming the first completion whose experts are missing, of a wrong shape, out of
            range, or the same twice for a token.
    """
    for i, episode in enumerate(episodes):
        expected = (len(episode.token_ids), layers, per_token)
        problem = _routing_problem(episode.columns.get("routed_experts"), expected, experts)
        if problem:
            raise EngineError(f"rollout: completion {i}: {problem} (`routed_experts`)")


def _routing_problem(
    routed: np.ndarray | None, expected: tuple[int, int, int], experts: int
) -> str:
    """The first problem with the experts of an episode's tokens; "" for none."""
    if routed is None:
        return "the engine returned no routed experts"
    if routed.shape != expected:
        return f"routed experts of shape {routed.shape}, expected [tokens, layers, k] = {expected}"
    read = routed[(routed != -1).any(axis=(1, 2))]
    outside = (read < 0) | (read >= experts)
    if outside.any():
        return f"routed expert {read[outside][0]} is outside 0 .. {experts - 1}"
    ordered = np.sort(read, axis=-1)
    if (np.diff(ordered) == 0).any():
        return "a token was routed to the same expert twice"
    return ""


class _Reader(Protocol):
    """Attributes of an engine that bound the token ids it reads."""

    config: Any
    max_total_tokens: int


def checked_sequences(
    engine: _Reader,
    sequences: TokenRows,
    name: str,
    *,
    reserve: int = 0,
) -> list[np.ndarray]:
    """The sequences as int32 vectors, checked for vocabulary and length.

    Args:
        engine: reads them; bounds the ids, and the tokens of a sequence and `reserve` together.
        sequences: token ids.
        name: their name in errors, "prompt".
        reserve: tokens that are to come after it.

    Raises:
        ValueError: naming the first that is empty, no vector of integers, outside the vocabulary
            or too long; or if there are none.
    """
    if not len(sequences):
        raise ValueError(f"{name}s: got none, at least one is needed")

    checked = []
    vocab_size = engine.config.vocab_size
    limit = engine.max_total_tokens
    for index, sequence in enumerate(sequences):
        ids = np.asarray(sequence)
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError(
                f"{name} {index}: shape {ids.shape}, must be a non-empty vector of token ids"
            )
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{name} {index}: dtype {ids.dtype}, token ids must be integers")
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            token = ids[outside][0]
            raise ValueError(f"{name} {index}: token id {token} is outside 0 .. {vocab_size - 1}")
        if ids.size + reserve > limit:
            extra = ""
            if reserve:
                extra = f" and max_completion_tokens={reserve}"
            raise ValueError(
                f"{name} {index}: {ids.size} tokens{extra} exceed max_total_tokens={limit}"
            )
        checked.append(ids.astype(np.int32))
    return checked


def scored_rows(
    engine: _Reader,
    prompts: TokenRows,
    completions: TokenRows,
    temperature: float,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs of `Engine.score`: the prompts, and each prompt with its completion, as int32 vectors.

    Raises:
        ValueError: see `checked_sequences`; also for lists of different lengths or a negative
            temperature.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature: got {temperature}, must be 0 (scored at 1) or above")
    if len(prompts) != len(completions):
        raise ValueError(f"score: got {len(prompts)} prompts and {len(completions)} completions")
    prompts = checked_sequences(engine, prompts, "prompt")
    completions = checked_sequences(engine, completions, "completion")
    rows = [np.concatenate(pair) for pair in zip(prompts, completions, strict=True)]
    return prompts, checked_sequences(engine, rows, "prompt and completion")


def check_finite(scored: Sequence[np.ndarray]) -> None:
    """Refuse scores that are not finite.

    Raises:
        EngineError: naming the first completion and token whose log-prob is not finite.
    """
    for completion, values in enumerate(scored):
        if not np.isfinite(values).all():
            token = int(np.flatnonzero(~np.isfinite(values))[0])
            raise EngineError(
                f"completion {completion}: the log-prob of token {token} is {values[token]}"
            )


def sample_alone(
    engine: Engine,
    episodes: Mapping[int, Episode],
    sampling: SamplingParams,
    *,
    seed: int,
    step: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of tokens as they were sampled among others, and as they are sampled alone.

    Sampling is a function of (seed, step, row), so the same tokens come again but for what rounding
    tips over; each completion is compared up to there. What differs is the batch that the engine
    computed them in. Scoring them again in one pass shows less: vLLM's CPU kernels compute a whole
    row bit for bit as a large batch of single tokens.

    Args:
        engine: the engine that sampled, with the same weights.
        episodes: row, counted over the completions of the call that sampled them -> what it gave.
        sampling: distribution of that call, but for a limit of completion tokens that may be lower.
        seed, step: numbers of that call.

    Returns:
        Both [N] float32 nats; N is 0 if not one first token came again.

    Raises:
        EngineError: if the engine breaks.
    """
    alone = dataclasses.replace(sampling, group_size=1)
    together = [np.zeros(0, np.float32)]
    again = [np.zeros(0, np.float32)]
    for row, episode in episodes.items():
        [other] = collect(
            engine.generate([episode.prompt_ids], alone, seed=seed, step=step, first_prompt=row)
        )
        end = min(len(episode.token_ids), len(other.token_ids))
        both = slice(episode.prompt_length, end)
        same = episode.token_ids[both] == other.token_ids[both]
        same = np.cumprod(same).astype(bool)
        same &= episode.sampled_mask[both]
        together.append(episode.rollout_logprobs[both][same])
        again.append(other.rollout_logprobs[both][same])
    return np.concatenate(together), np.concatenate(again)
