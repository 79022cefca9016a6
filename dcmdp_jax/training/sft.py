"""Supervised fine-tuning: the loop over conversations, and their held-out loss."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from dcmdp_jax.data.prompts import digest_of
from dcmdp_jax.run import checkpoint
from dcmdp_jax.run.run import Run
from dcmdp_jax.training import phase_timer, rescore
from dcmdp_jax.training.conversation_batches import Conversations
from dcmdp_jax.training.giving_up import SkippedUpdates
from dcmdp_jax.training.rollout_record import length_metrics
from dcmdp_jax.training.step_programs import make_step_programs
from dcmdp_jax.training.training_session import TrainingSession, claimed_directory, open_session

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
"""Metrics of the step that mean something without engine and rewards; `moe/`: only of experts."""


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
    conversations = Conversations(session)
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


def _evaluate(session: TrainingSession, conversations: Conversations) -> None:
    """Record the losses of the held-out conversations; minus their mean is the policy's score."""
    session.wait_until_compiled()
    losses = {}
    names = []
    for task, held_out in session.run.task.held_out:
        losses[f"eval/{task.name}/loss"] = conversations.mean_loss(held_out)
        names.append(f"loss of {task.location} ({digest_of(held_out)})")
    score = checkpoint.PolicyScore(" ".join(names), -float(np.mean([*losses.values()])))
    session.checkpoints.add_score(session.step, score)
    session.writer.write(session.step, losses)
