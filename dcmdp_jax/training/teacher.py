"""The reward `teacher:MODEL` adds a column: log-probs of the sampled tokens by another model.

A model that the trainer holds scores packed batches on the devices; one that a server has scores
completions as they are sampled. `objective.distillation` is the reward made of that column.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from dcmdp_jax.activity import activity
from dcmdp_jax.data.episode import TEACHER_LOGPROBS, Episode
from dcmdp_jax.engines.protocol import Engine
from dcmdp_jax.models.hf_hub import model_directory
from dcmdp_jax.models.hf_weights import load_params
from dcmdp_jax.models.row_logprobs import make_row_logprobs, without_replay
from dcmdp_jax.run.placement import Placement
from dcmdp_jax.run.task import Task
from dcmdp_jax.run.weights import model_shardings
from dcmdp_jax.training.rescore import make_old_logprobs
from dcmdp_jax.types import Batch


def make_teacher(task: Task, placement: Placement) -> Callable[[Batch], Batch]:
    """Load the model of the reward `teacher:MODEL`; return what adds its log-probs to a batch.

    Without that reward a batch stays as it is.
    """
    if task.teacher is None:
        return lambda batch: batch

    config = task.config
    mesh = placement.mesh
    dtype = config.teacher_dtype
    row_logprobs = make_row_logprobs(
        task.teacher,
        placement.compute,
        temperature=config.rollout.temperature,
        mesh=mesh,
        head_dtype=config.model.head_dtype,
        cut=config.rollout.cuts,
    )

    with activity("loading the teacher"):
        params = load_params(
            model_directory(config.teacher[0]),
            task.teacher,
            dtype=dtype,
            shardings=model_shardings(task.teacher, mesh),
        )
    score = make_old_logprobs(
        lambda params, rows: row_logprobs(params, without_replay(rows)),
        mesh=mesh,
        names=[TEACHER_LOGPROBS],
    )
    return functools.partial(score, params)


def score_episodes(server: Engine, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes with the server's log-probs of their completions as a column."""
    scores = server.score(
        [episode.prompt_ids for episode in episodes],
        [episode.completion_ids for episode in episodes],
        temperature=1.0,
    )
    scored_episodes = []
    for episode, logprobs in zip(episodes, scores, strict=True):
        column = np.pad(logprobs, (episode.prompt_length, 0))
        scored_episodes.append(episode.with_columns(teacher_logprobs=column))
    return scored_episodes
