"""A test kit for an engine of a user: `check_engine` asks it for all that the protocol promises."""

from collections.abc import Sequence

import numpy as np

from dcmdp_jax.data.episode import COLUMNS, Episode
from dcmdp_jax.engines.protocol import Engine, EngineError, SamplingParams, TokenRows, check_finite
from dcmdp_jax.types import Params


def check_engine(
    engine: Engine,
    params: Params,
    prompts: TokenRows,
    sampling: SamplingParams,
    *,
    vocab_size: int,
    scores: bool = True,
) -> float:
    """Ask an engine, in a test of yours, for all that `protocol.Engine` promises. It stays open.

    What its methods return, the same completions for the same (seed, step, row) in a call of its
    own, sampling that goes on after an iterator was closed, and scores of what it sampled.

    Args:
        engine: engine to check.
        params: parameters that are synced.
        prompts: int32 token ids, at least two.
        sampling: sampling parameters; temperature above 0.
        vocab_size: ids of the model are below it.
        scores: whether it has `score`.

    Returns:
        The largest difference in nats between a sampled token's log-prob and its score; 0 without
        `score`.

    Raises:
        EngineError: for what it returns.
    """
    engine.sync_weights(params, 0)
    group_size = sampling.group_size

    def sample(prompts: TokenRows, first_prompt: int) -> list[Episode]:
        episodes_by_row: dict[tuple[int, int], Episode] = {}
        for episodes in engine.generate(
            prompts,
            sampling,
            seed=1,
            step=2,
            first_prompt=first_prompt,
        ):
            check_episodes(episodes, prompts, sampling, vocab_size)
            for episode in episodes:
                row = episode.group, episode.member
                if row in episodes_by_row:
                    raise EngineError("generate gave a completion twice")
                episodes_by_row[row] = episode
        missing = len(prompts) * group_size - len(episodes_by_row)
        if missing:
            raise EngineError(f"generate gave nothing for {missing} completion(s)")
        return [episode for _, episode in sorted(episodes_by_row.items())]

    # The same completions in a smaller call, and after an iterator was closed.
    episodes = sample(prompts, 3)
    engine.generate(prompts, sampling, seed=1, step=2).close()
    for episode, again in zip(episodes[group_size:], sample(prompts[1:], 4), strict=True):
        if not np.array_equal(episode.token_ids, again.token_ids):
            raise EngineError(
                f"completion {episode.member} of prompt {episode.group} is another one when its "
                "prompt is sampled in a smaller call with the same seed, step and row: a resumed "
                "run would not repeat an uninterrupted one"
            )
    engine.release_weights()
    engine.sync_weights(params, 1)
    if not scores:
        return 0.0

    completions = [episode.completion_ids for episode in episodes]
    score_arrays = list(
        engine.score(
            [prompts[episode.group] for episode in episodes],
            completions,
            temperature=sampling.temperature,
        )
    )
    if len(score_arrays) != len(completions):
        raise EngineError(
            f"score gave {len(score_arrays)} arrays for {len(completions)} completions"
        )
    for index, (score, token_ids) in enumerate(zip(score_arrays, completions, strict=True)):
        is_float32 = isinstance(score, np.ndarray) and score.dtype == np.float32
        if not is_float32 or score.shape != token_ids.shape:
            raise EngineError(
                f"score of completion {index} is {_array_text(score)}, must be float32 "
                f"{token_ids.shape}"
            )
    check_finite(score_arrays)
    differences = []
    for score, episode in zip(score_arrays, episodes, strict=True):
        logprobs = episode.rollout_logprobs[episode.prompt_length :]
        differences.append(float(np.abs(score - logprobs).max()))
    return max(differences)


def check_episodes(
    episodes: Sequence[Episode],
    prompts: TokenRows,
    sampling: SamplingParams,
    vocab_size: int,
) -> None:
    """Refuse episodes of other prompts, or with arrays that `Episode` does not allow.

    Log-probs that are not finite are left to `protocol.unusable_completions`.

    Raises:
        EngineError: naming the first episode and array that is wrong.
    """
    for episode in episodes:
        if not isinstance(episode, Episode):
            raise EngineError(f"generate gave {type(episode).__name__}, must give lists of Episode")
        where = f"completion {episode.member} of prompt {episode.group}"
        if not 0 <= episode.group < len(prompts) or not 0 <= episode.member < sampling.group_size:
            raise EngineError(
                f"{where}: asked were {len(prompts)} prompts with {sampling.group_size} "
                "completions each"
            )
        problem = _array_problem(episode)
        if problem:
            raise EngineError(f"{where}: {problem}")

        prompt = np.asarray(prompts[episode.group])
        length = len(episode.token_ids) - len(prompt)
        if not 1 <= length <= sampling.max_completion_tokens:
            raise EngineError(
                f"{where}: {length} tokens, must be 1 .. {sampling.max_completion_tokens}"
            )
        begins_with_prompt = np.array_equal(episode.token_ids[: len(prompt)], prompt)
        if not begins_with_prompt or episode.sampled_mask[: len(prompt)].any():
            raise EngineError(
                f"{where}: token_ids must begin with the prompt, whose sampled_mask is False"
            )
        if not episode.sampled_mask.any():
            raise EngineError(f"{where}: sampled_mask says that no token was sampled")
        outside = (episode.token_ids < 0) | (episode.token_ids >= vocab_size)
        if outside.any():
            raise EngineError(
                f"{where}: token id {episode.token_ids[outside][0]} is outside 0 .. "
                f"{vocab_size - 1}"
            )


def _array_problem(episode: Episode) -> str:
    """Describe the first array that is missing, or of another dtype or length; empty if none is."""
    size = np.size(episode.token_ids)
    arrays = {
        "token_ids": (episode.token_ids, np.int32),
        "sampled_mask": (episode.sampled_mask, np.bool_),
    }
    for name in ("rollout_logprobs", "policy_versions", *episode.columns):
        if name not in COLUMNS:
            return f"column {name!r} is none of {', '.join(COLUMNS)}"
        arrays[name] = episode.columns.get(name), COLUMNS[name].dtype
    for name, (array, dtype) in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape[:1] != (size,):
            return (
                f"{name} is {_array_text(array)}, must be {np.dtype(dtype)} with an entry for "
                f"each of {size} tokens"
            )
    return ""


def _array_text(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    return type(value).__name__
