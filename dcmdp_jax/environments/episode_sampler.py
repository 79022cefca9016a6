"""Sample episodes in one turn or several, and begin their rewards while others are sampled."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from dcmdp_jax.activity import activity
from dcmdp_jax.data.episode import Episode
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.engines.protocol import Engine, SamplingParams
from dcmdp_jax.environments.turns import TurnSampler
from dcmdp_jax.rewards.scoring import BatchScoring


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleKey:
    """What the random numbers of a call depend on, see `Engine.generate`."""

    seed: int
    step: int
    first_prompt: int


def sampled_episodes(
    engine: Engine,
    turns: TurnSampler | None,
    scoring: BatchScoring,
    prompts: EncodedPrompts,
    sampling: SamplingParams,
    sample_key: SampleKey,
    *,
    doing: str,
    check_stop: Callable[[], None],
) -> Iterator[Episode]:
    """Sample completions in one turn or several, and start to score each group as it comes.

    Args:
        engine: the engine, with weights synced.
        turns: samples in turns with an environment; None for one turn.
        scoring: of these problems; once all episodes are taken, it can finish.
        prompts: the problems and their token ids.
        sampling: K, temperature, length limit.
        sample_key: what the random numbers depend on.
        doing: name of the activity that is shown.
        check_stop: called now and then; what it raises ends the sampling.
    """
    prompt_ids = prompts.token_ids
    size = sampling.group_size
    if turns is None:
        generated = engine.generate(
            prompt_ids,
            sampling,
            seed=sample_key.seed,
            step=sample_key.step,
            first_prompt=sample_key.first_prompt,
        )
    else:
        generated = turns.generate(
            prompt_ids,
            prompts.problems,
            sampling,
            seed=sample_key.seed,
            step=sample_key.step,
            first_prompt=sample_key.first_prompt,
            check_stop=check_stop,
        )

    with (
        activity(doing, len(prompt_ids) * size, "completions") as progress,
        contextlib.closing(generated) as groups,
    ):
        for group in groups:
            check_stop()
            progress.done += len(group)
            rows = []
            completion_ids = []
            for episode in group:
                rows.append(episode.group * size + episode.member)
                completion_ids.append(episode.token_ids[episode.sampled_mask])
            scoring.begin(rows, completion_ids)
            yield from group

    if turns is not None:
        scoring.add_played(turns.played)
