"""Conversations as batches of a step's size, and their held-out loss."""

import jax.numpy as jnp
import numpy as np

from dcmdp_jax.config.checks import SUPERVISED_PACKING
from dcmdp_jax.data import episode
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.training.batches import BatchPacker, PackedBatch
from dcmdp_jax.training.rescore import OLD_LOGPROBS
from dcmdp_jax.training.training_session import TrainingSession


class Conversations:
    """The conversations of a run as batches of a step's size."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._task = session.run.task
        self._training = session.config.training
        self._count = self._training.prompts_per_step
        self._columns = session.run.placement.columns
        self._packer = BatchPacker(
            placement=session.run.placement,
            training=self._training,
            setting_names=SUPERVISED_PACKING,
        )

    def of_step(self, step: int) -> tuple[list[episode.Episode], PackedBatch]:
        """The next conversations of the stream, and their batch; `step` counts from 0."""
        count = self._count
        places = self._task.stream.at(seed=self._training.seed, first=step * count, count=count)
        return self._pack(self._task.train, places, step=step)

    def mean_loss(self, held_out: EncodedPrompts) -> float:
        """The mean negative log-likelihood of all targets of other conversations, in nats."""
        programs = self._session.programs
        params = programs.setup.policy(self._session.state.params, self._session.frozen)
        total = 0.0
        everything = np.arange(len(held_out.token_ids))
        for first in range(0, len(everything), self._count):
            self._session.leave_if_asked()
            places = everything[first : first + self._count]
            _, packed = self._pack(held_out, places, step=0)
            # 0 where nothing is learned; repeats have no row.
            for rows in programs.old_logprobs(params, packed.on_devices).rows:
                total -= float(jnp.sum(rows.columns[OLD_LOGPROBS]))
        return total / sum(int(targets.sum()) for targets in held_out.targets)

    def _pack(
        self, conversations: EncodedPrompts, places: np.ndarray, *, step: int
    ) -> tuple[list[episode.Episode], PackedBatch]:
        """Pack the conversations at these places; repeats that fill a step are marked as dropped."""
        episodes = []
        for group, place in enumerate(np.resize(places, self._count)):
            targets = conversations.targets[place]
            columns = {}
            for name in self._columns:
                columns[name] = np.zeros(len(targets), episode.COLUMNS[name].dtype)
            conversation = episode.Episode(
                token_ids=conversations.token_ids[place],
                sampled_mask=targets,
                group=group,
                member=0,
                finish_reason="stop",
                columns=columns,
            )
            episodes.append(conversation)
        packed = self._packer.pack(
            episodes,
            np.zeros(self._count, np.float32),
            step=step,
            dropped=np.arange(self._count) >= len(places),
        )
        return episodes, packed
