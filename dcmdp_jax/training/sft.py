"""Supervised fine-tuning: the loop over conversations, and their held-out loss."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.config.checks import SUPERVISED_PACKING
from dcmdp_jax.config.settings import TrainingSettings
from dcmdp_jax.data import episode
from dcmdp_jax.data.prompts import EncodedPrompts, digest_of
from dcmdp_jax.run import checkpoint
from dcmdp_jax.run.placement import Placement
from dcmdp_jax.run.run import Run
from dcmdp_jax.run.task import Task
from dcmdp_jax.training import phase_timer, rescore
from dcmdp_jax.training.batches import BatchPacker, PackedBatch
from dcmdp_jax.training.giving_up import SkippedUpdates
from dcmdp_jax.training.rollout_record import length_metrics
from dcmdp_jax.training.step_programs import make_step_programs
from dcmdp_jax.training.training_session import TrainingSession, claimed_directory, open_session
from dcmdp_jax.types import Batch, Params

_STEP_METRICS = (
    "policy/loss",
    "policy/entropy",
    "optimizer/grad_norm",
    "optimizer/learning_rate",
    "optimizer/skipped_updates",
    "optimizer/skipped_in_row",
    "optimizer/loss_scale",
    "moe/load_max_over_mean",
    "moe/load_entropy",
    "moe/router_entropy",
    "moe/balance_loss",
)
"""Metrics of the step that say something without engine and rewards; `moe/` with experts."""


def train(run: Run, *, show: Callable[[str], None]) -> None:
    """Learn from conversations, from the newest checkpoint if the run directory has one.

    Each process of a run on several hosts calls this.

    Args:
        run: what is learned, where, and from which weights.
        show: prints a line for people.

    Raises:
        Interrupted: after SIGTERM, SIGINT or SIGHUP, once everything is saved.
        TrainingStopped: when the gradients stay broken.
        ValueError, OSError: in one line, what is wrong with input or files.
    """
    task = run.task
    programs = make_step_programs(task.config, task.model, run.placement, task.lora)
    setup = programs.setup
    # For the held-out loss.
    old_logprobs = rescore.make_old_logprobs(setup.row_logprobs, mesh=setup.mesh)
    programs = dataclasses.replace(programs, old_logprobs=old_logprobs)
    with (
        claimed_directory(run) as stop,
        open_session(run, programs, stop, show=show) as session,
        session.keeping_finished_steps(),
    ):
        _learn(session)


def _learn(session: TrainingSession) -> None:
    """Learn to the last step, or until a signal comes; save on the way and at the end."""
    config = session.config
    first_step = session.step
    skipped = SkippedUpdates(config.run_dir, first_step, updates=config.mini_batches)
    conversations = Conversations(
        task=session.run.task, placement=session.run.placement, training=config.training
    )
    evaluate = functools.partial(_evaluate, session, conversations)
    session.begin(evaluate)

    while session.step < session.last_step:
        timer = phase_timer.PhaseTimer(first=session.step == first_step)
        session.leave_if_asked()
        with timer.phase("pack"):
            episodes, packed = conversations.of_step(session.step)
        with timer.phase("step"):
            session.wait_until_compiled()
            with jax.transfer_guard("disallow"):
                state, step_metrics, _ = session.programs.train_step(
                    session.state, packed.on_devices, session.frozen
                )
                step_metrics = jax.device_get(step_metrics)

        step = session.step + 1
        metrics = {name: step_metrics[name] for name in _STEP_METRICS if name in step_metrics}
        metrics["rollout/padding_fraction"] = packed.padding_fraction
        metrics |= timer.metrics(episodes, lags=False)
        metrics |= length_metrics(episodes, None)
        del metrics["completion/truncated_fraction"]  # conversations that do not fit are left out
        metrics |= skipped.record(step, metrics)
        session.writer.write(step, metrics)
        session.finish_step(state, prompts=len(episodes))
        skipped.check(metrics)
        session.save_and_evaluate(evaluate)


def _evaluate(session: TrainingSession, conversations: "Conversations") -> None:
    """Record the losses of the held-out conversations; minus their mean is the policy's score."""
    session.wait_until_compiled()
    params = session.programs.setup.policy(session.state.params, session.frozen)
    losses = {}
    names = []
    for task, held_out in session.run.task.held_out:
        losses[f"eval/{task.name}/loss"] = conversations.mean_loss(
            session.programs.old_logprobs, params, held_out, session.leave_if_asked
        )
        names.append(f"loss of {task.location} ({digest_of(held_out)})")
    score = checkpoint.PolicyScore(" ".join(names), -float(np.mean([*losses.values()])))
    session.checkpoints.add_score(session.step, score)
    session.writer.write(session.step, losses)


@dataclasses.dataclass(eq=False, kw_only=True)
class Conversations:
    """Conversations as batches of the size of a step.

    Attributes:
        task: the conversations to learn from, and their order.
        placement: devices and shapes of a batch.
        training: the settings of steps.
    """

    task: Task
    placement: Placement
    training: TrainingSettings

    def __post_init__(self) -> None:
        self._count = self.training.prompts_per_step
        self._packer = BatchPacker(
            placement=self.placement,
            training=self.training,
            setting_names=SUPERVISED_PACKING,
        )

    def of_step(self, step: int) -> tuple[list[episode.Episode], PackedBatch]:
        """The next conversations of the stream, and their batch; `step` counts from 0."""
        count = self._count
        places = self.task.stream.at(seed=self.training.seed, first=step * count, count=count)
        return self._pack(self.task.train, places, step=step)

    def mean_loss(
        self,
        old_logprobs: Callable[[Params, Batch], Batch],
        params: Params,
        held_out: EncodedPrompts,
        before_each: Callable[[], None],
    ) -> float:
        """The mean negative log-likelihood of all targets, in nats.

        Args:
            old_logprobs: result of `make_old_logprobs`.
            params: of the training stack's forward pass.
            held_out: conversations with their targets.
            before_each: called before each batch; may raise to stop.
        """
        total = 0.0
        everything = np.arange(len(held_out.token_ids))
        for first in range(0, len(everything), self._count):
            before_each()
            places = everything[first : first + self._count]
            _, packed = self._pack(held_out, places, step=0)
            for rows in old_logprobs(params, packed.on_devices).rows:
                total -= float(jnp.sum(rows.columns[rescore.OLD_LOGPROBS]))
        return total / sum(int(targets.sum()) for targets in held_out.targets)

    def _pack(
        self, conversations: EncodedPrompts, places: np.ndarray, *, step: int
    ) -> tuple[list[episode.Episode], PackedBatch]:
        """Pack the conversations at these places, repeated up to a step; repeats are dropped."""
        episodes = []
        for group, place in enumerate(np.resize(places, self._count)):
            targets = conversations.targets[place]
            columns = {}
            for name in self.placement.columns:
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
