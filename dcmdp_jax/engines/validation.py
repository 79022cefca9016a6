"""Validation of engine inputs and outputs, shared by all engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcmdp_jax.data.columns import COLUMNS
from dcmdp_jax.data.episode import Episode
from dcmdp_jax.engines.protocol import EngineError, SamplingParams


def unusable_completions(episodes: Sequence[Episode], *, drop: bool) -> np.ndarray:
    """[N] bool: episodes in which a sampled token's log-prob is NaN, infinite or above 0 by more than rounding.

    Args:
        episodes: what the engine returned.
        drop: return them to be left out and counted; otherwise any is an error.

    Raises:
        EngineError: naming the first such completion, token and value, unless `drop`; or if all are unusable.
    """
    unusable = np.array([broken_tokens(episode).any() for episode in episodes], bool)
    if unusable.any() and not drop:
        i = int(np.argmax(unusable))
        t = int(np.argmax(broken_tokens(episodes[i])))
        token = f"token {t - episodes[i].prompt_length} (id {episodes[i].token_ids[t]}) of completion {i}"
        raise EngineError(
            f"rollout: log-prob of {token} is {episodes[i].rollout_logprobs[t]}; the engine's numbers are broken, or "
            "set `drop` to leave it out"
        )
    if unusable.all():
        raise EngineError("rollout: no completion has usable log-probs; the engine's numbers are broken")
    return unusable


def broken_tokens(episode: Episode) -> np.ndarray:
    """[T] bool: sampled tokens whose log-prob is NaN, infinite or above 0 by more than rounding."""
    logprobs = episode.rollout_logprobs
    return episode.sampled_mask & (~np.isfinite(logprobs) | (logprobs > 1e-3))


def check_routed_experts(episodes: Sequence[Episode], layers: int, per_token: int, experts: int) -> None:
    """Refuse experts that the model does not have: a forward pass would take others in their place, silently.

    Args:
        episodes: what an engine returned that was asked for the experts of each token.
        layers: L of the model.
        per_token: k, experts of a token in each layer.
        experts: E of each layer; ids are below it.

    Raises:
        EngineError: naming the first completion whose experts are missing, of a wrong shape, out of range, or the same
            twice for a token.
    """
    for i, episode in enumerate(episodes):
        expected = (len(episode.token_ids), layers, per_token)
        if problem := _routing_problem(episode.columns.get("routed_experts"), expected, experts):
            raise EngineError(f"rollout: completion {i}: {problem} (`routed_experts`)")


def _routing_problem(routed: np.ndarray | None, expected: tuple[int, int, int], experts: int) -> str:
    """Describe the first thing wrong with the experts of an episode's tokens; empty if nothing is."""
    if routed is None:
        return "the engine returned no routed experts"
    if routed.shape != expected:
        return f"routed experts of shape {routed.shape}, expected [tokens, layers, k] = {expected}"
    read = routed[(routed != -1).any(axis=(1, 2))]
    outside = (read < 0) | (read >= experts)
    if outside.any():
        return f"routed expert {read[outside][0]} is outside 0 .. {experts - 1}"
    ordered = np.sort(read, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        return "a token was routed to the same expert twice"
    return ""


def checked_sequences(
    sequences: Sequence[np.ndarray], what: str, *, vocab_size: int, limit: int, reserve: int = 0
) -> list[np.ndarray]:
    """The sequences as int32 vectors, refused where they are none, empty, outside the vocabulary or too long.

    Args:
        sequences: token ids.
        what: their name in errors, "prompt".
        vocab_size: ids are below it.
        limit: tokens of a sequence and `reserve` together.
        reserve: tokens that are to come after it.

    Raises:
        ValueError: naming the first that is wrong.
    """
    if not len(sequences):
        raise ValueError(f"{what}s: got none, at least one is needed")
    checked = []
    for index, sequence in enumerate(sequences):
        ids = np.asarray(sequence)
        if ids.ndim != 1 or ids.size == 0:
            raise ValueError(f"{what} {index}: shape {ids.shape}, must be a non-empty vector of token ids")
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{what} {index}: dtype {ids.dtype}, token ids must be integers")
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            token = ids[outside][0]
            raise ValueError(f"{what} {index}: token id {token} is outside 0 .. {vocab_size - 1}")
        if ids.size + reserve > limit:
            extra = f" and max_completion_tokens={reserve}" if reserve else ""
            raise ValueError(f"{what} {index}: {ids.size} tokens{extra} exceed max_total_tokens={limit}")
        checked.append(ids.astype(np.int32))
    return checked


def scored_rows(
    prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], *, vocab_size: int, limit: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs of `Engine.score`: the prompts, and each prompt with its completion, as int32 vectors.

    Raises:
        ValueError: as `checked_sequences`, or for lists of different lengths.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"score: got {len(prompts)} prompts and {len(completions)} completions")
    limits = {"vocab_size": vocab_size, "limit": limit}
    prompts = checked_sequences(prompts, "prompt", **limits)
    completions = checked_sequences(completions, "completion", **limits)
    rows = [np.concatenate(pair) for pair in zip(prompts, completions, strict=True)]
    return prompts, checked_sequences(rows, "prompt and completion", **limits)


def check_finite(scored: Sequence[np.ndarray]) -> None:
    """Refuse scores that are not finite.

    Raises:
        EngineError: naming the first completion and token whose log-prob is not finite.
    """
    for completion, values in enumerate(scored):
        if not np.isfinite(values).all():
            token = int(np.flatnonzero(~np.isfinite(values))[0])
            raise EngineError(f"completion {completion}: the log-prob of token {token} is {values[token]}")


def check_episodes(
    episodes: Sequence[Episode], prompts: Sequence[np.ndarray], sampling: SamplingParams, vocab_size: int
) -> None:
    """Refuse episodes that are not of these prompts, or whose arrays are not what `Episode` says.

    Log-probs that are not finite are left to `unusable_completions`.

    Raises:
        EngineError: naming the first episode and array that is wrong.
    """
    for episode in episodes:
        if not isinstance(episode, Episode):
            raise EngineError(f"generate gave {type(episode).__name__}, must give lists of Episode")
        where = f"completion {episode.member} of prompt {episode.group}"
        if not 0 <= episode.group < len(prompts) or not 0 <= episode.member < sampling.group_size:
            raise EngineError(f"{where}: asked were {len(prompts)} prompts with {sampling.group_size} completions each")
        if problem := _array_problem(episode):
            raise EngineError(f"{where}: {problem}")
        prompt = np.asarray(prompts[episode.group])
        length = len(episode.token_ids) - len(prompt)
        if not 1 <= length <= sampling.max_completion_tokens:
            raise EngineError(f"{where}: {length} tokens, must be 1 .. {sampling.max_completion_tokens}")
        if not np.array_equal(episode.token_ids[: len(prompt)], prompt) or episode.sampled_mask[: len(prompt)].any():
            raise EngineError(f"{where}: token_ids must begin with the prompt, whose sampled_mask is False")
        if not episode.sampled_mask.any():
            raise EngineError(f"{where}: sampled_mask says that no token was sampled")
        outside = (episode.token_ids < 0) | (episode.token_ids >= vocab_size)
        if outside.any():
            raise EngineError(f"{where}: token id {episode.token_ids[outside][0]} is outside 0 .. {vocab_size - 1}")


def _array_problem(episode: Episode) -> str:
    """Describe the first array of an episode that is missing, or of another dtype or length; empty if none is."""
    size = np.size(episode.token_ids)
    arrays = {"token_ids": (episode.token_ids, np.int32), "sampled_mask": (episode.sampled_mask, np.bool_)}
    for name in ("rollout_logprobs", "policy_versions", *episode.columns):
        if name not in COLUMNS:
            return f"column {name!r} is none of {', '.join(COLUMNS)}"
        arrays[name] = episode.columns.get(name), COLUMNS[name].dtype
    for name, (array, dtype) in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape[:1] != (size,):
            found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            return f"{name} is {found}, must be {np.dtype(dtype)} with an entry for each of {size} tokens"
    return ""


def check_scores(scores: Sequence[np.ndarray], completions: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The scores, refused where they are not one float32 log-prob for each token of each completion.

    Raises:
        EngineError: naming the first that is wrong.
    """
    scores = list(scores)
    if len(scores) != len(completions):
        raise EngineError(f"score gave {len(scores)} arrays for {len(completions)} completions")
    for index, (values, ids) in enumerate(zip(scores, completions, strict=True)):
        if not isinstance(values, np.ndarray) or values.dtype != np.float32 or values.shape != np.shape(ids):
            found = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise EngineError(f"score of completion {index} is {found}, must be float32 {np.shape(ids)}")
    check_finite(scores)
    return scores
