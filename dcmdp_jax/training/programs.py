"""The compiled programs of a training step, from the settings, for any mesh: also one of devices that are not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import optax
from jax.sharding import Mesh

from dcmdp_jax.config.settings import Config
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.training.loss_scale import initial_loss_scale
from dcmdp_jax.training.optimizer import make_optimizer, make_schedule
from dcmdp_jax.training.row_logprobs import make_row_logprobs
from dcmdp_jax.training.state import initial_dual, train_state_shardings
from dcmdp_jax.training.step import make_rescore, make_train_step
from dcmdp_jax.types import DualState, LossScale, TrainState


class StepPrograms(NamedTuple):
    """A training step and what it starts from.

    Attributes:
        optimizer, dual, loss_scale: what a fresh state is made with.
        shardings: of the state.
        train_step: (state, batch, reference parameters) -> (state, metrics), compiled at its first call.
        rescore: with rollout.precision=exact, puts the training stack's log-probs in place of the sampler's; else None.
    """

    optimizer: optax.GradientTransformationExtraArgs
    dual: DualState
    loss_scale: LossScale | None
    shardings: TrainState
    train_step: Callable
    rescore: Callable | None


def make_step_programs(config: Config, model: ModelConfig, compute: Compute, mesh: Mesh) -> StepPrograms:
    """Make the programs of a step. Nothing is compiled or allocated but scalars.

    Args:
        config: the settings.
        model: the model.
        compute: how the training stack computes.
        mesh: the training devices.
    """
    schedule = make_schedule(config.optimizer, updates=config.training.steps * config.mini_batches)
    optimizer = make_optimizer(config.optimizer, schedule)
    dual = initial_dual(config.algorithm)
    loss_scale = initial_loss_scale(config.model.compute_dtype)
    shardings = train_state_shardings(model, optimizer, dual, config.model.param_dtype, mesh, loss_scale)
    exact = config.rollout.precision == "exact"
    row_logprobs = make_row_logprobs(
        model, compute, temperature=config.rollout.temperature, mesh=mesh,
        forward_precision=config.model.forward_precision, head_dtype=config.model.head_dtype,
    )  # fmt: skip
    train_step = make_train_step(
        row_logprobs=row_logprobs,
        compute_dtype=compute.dtype,
        settings=config.algorithm,
        max_completion_tokens=config.rollout.max_completion_tokens,
        optimizer=optimizer,
        schedule=schedule,
        mesh=mesh,
        always_recompute=exact,
        shardings=shardings,
    )
    rescore = make_rescore(row_logprobs, mesh=mesh) if exact else None
    return StepPrograms(optimizer, dual, loss_scale, shardings, train_step, rescore)
