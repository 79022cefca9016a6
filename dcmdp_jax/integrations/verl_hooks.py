"""DC-GRPO in verl: a registered advantage estimator and a registered policy loss. And a recorder.

To record for `dcmdp probe`, without a change to training, put into a module of your own, named in
VERL_USE_EXTERNAL_MODULES so that verl imports it where its driver runs:

    from dcmdp_jax.integrations.verl_hooks import register_recorder
    from dcmdp_jax.record import Recorder
    register_recorder(Recorder("recordings", "verl"))

and set `actor_rollout_ref.rollout.calculate_log_probs=True`. To train with DC-GRPO:

    from dcmdp_jax.integrations.dc_grpo_torch import DcGrpo
    from dcmdp_jax.integrations.verl_hooks import register
    register(DcGrpo(tolerance=0.0037), state_path="checkpoints/dc_grpo.json")

and set `algorithm.adv_estimator=dc_grpo`, `actor_rollout_ref.actor.policy_loss.loss_mode=dc_grpo`,
`actor_rollout_ref.rollout.calculate_log_probs=True`, and no `algorithm.rollout_correction`.

verl gives an estimator rewards and masks but no log-probs. So the estimator makes verl's own
group-relative advantages, and `compute_advantage`, which calls it with the whole batch on the
driver, penalizes them. Where an agent loop gives a session several outputs, the session counts once
in its group, by its last output, as under verl's own grpo; every output's tokens are penalized.
"""

import functools
import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dcmdp_jax.integrations.dc_grpo_torch import (
    DcGrpo,
    clipped_surrogate,
    described,
    require_columns,
    require_same_shape,
)
from dcmdp_jax.record import Recorder, record_verl

NAME = "dc_grpo"
_LOG = logging.getLogger(__name__)
# Modules that import the functions by name.
_CALLERS = (
    "verl.trainer.ppo.ray_trainer",
    "verl.trainer.ppo.v1.utils",
    "verl.trainer.ppo.v1.trainer_base",
    "verl.experimental.separation.ray_trainer",
)


def register(
    dc_grpo: DcGrpo,
    *,
    state_path: str | Path | None = None,
    resume_steps: int | None = None,
    on_batch: Callable[[Any], None] | None = None,
) -> None:
    """Register the estimator and the loss under the name "dc_grpo".

    Args:
        dc_grpo: c, lambda and what moves it.
        state_path: path of lambda's JSON file, or its directory, as in `DcGrpo.save`; read now if
            it is there and written in each step.
        resume_steps: training steps of the checkpoint that the run resumes from, if it is not the
            last one.
        on_batch: called with each `DataProto` after its advantages are penalized, for example to
            record it.
    """
    from verl.trainer.ppo import core_algos, ray_trainer

    dc_grpo.resume(state_path, steps=resume_steps)
    core_algos.register_adv_est(NAME)(group_advantages)
    core_algos.register_policy_loss(NAME)(policy_loss)

    def penalized(data: Any) -> Any:
        penalize(dc_grpo, data.batch)
        if state_path is not None:
            dc_grpo.save(state_path)
        if on_batch is not None:
            on_batch(data)
        return data

    original = ray_trainer.compute_advantage

    @functools.wraps(original)
    def compute_advantage(data: Any, adv_estimator: Any, *args: Any, **options: Any) -> Any:
        data = original(data, adv_estimator, *args, **options)
        if adv_estimator == NAME:
            data = penalized(data)
        return data

    # Imported before the replacement: the module copies `compute_advantage` by name, and
    # `_replace` reaches only copies that exist.
    utils = _session_utils()
    _replace(original, compute_advantage)
    if utils is None:
        return
    original_of_sessions = utils.compute_advantage_for_multi_trajectories

    @functools.wraps(original_of_sessions)
    def compute_advantage_of_sessions(
        data: Any,
        batch_keys: Any,
        adv_estimator: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        if adv_estimator != NAME:
            return original_of_sessions(data, batch_keys, adv_estimator, *args, **options)
        # Under its own GRPO alone verl counts a session of several outputs once, so it gets that
        # name; its advantages are then penalized like ours.
        grpo = core_algos.AdvantageEstimator.GRPO
        return penalized(original_of_sessions(data, batch_keys, grpo, *args, **options))

    _replace(original_of_sessions, compute_advantage_of_sessions)


def register_recorder(recorder: Recorder, *, first_step: int = 1) -> None:
    """Record each batch on the driver once verl has its advantages, with any estimator.

    Args:
        recorder: writes a file for each step.
        first_step: number of the first batch; a resumed run gives its step, so that files of before
            stay.
    """
    from verl.trainer.ppo import ray_trainer

    steps = itertools.count(first_step)
    # The function for sessions calls the other with some of the rows: only the outer is recorded.
    depth = 0

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compute(*args: Any, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                data = original(*args, **options)
            finally:
                depth -= 1
            if depth == 0:
                record_verl(recorder, next(steps), data.batch, data.non_tensor_batch)
            return data

        return compute

    utils = _session_utils()
    _replace(ray_trainer.compute_advantage, recorded(ray_trainer.compute_advantage))
    if utils is not None:
        original_of_sessions = utils.compute_advantage_for_multi_trajectories
        _replace(original_of_sessions, recorded(original_of_sessions))


def _session_utils() -> Any:
    """Import the module of verl's newer trainer that counts sessions; None where there is none."""
    try:
        from verl.trainer.ppo.v1 import utils
    except ImportError:  # before 0.9, or without what that trainer needs
        return None
    return utils


def _replace(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Put a function in another's place in the modules of verl that have imported it by name."""
    for name in _CALLERS:
        if getattr(sys.modules.get(name), by.__name__, None) is function:
            setattr(sys.modules[name], by.__name__, by)


def penalize(dc_grpo: DcGrpo, batch: Any) -> None:
    """Penalize a batch's `advantages` in place and move lambda; they are 0 outside `response_mask`.

    Raises:
        ValueError: if the engine's log-probs are not there, naming the setting.
    """
    advice = "actor_rollout_ref.rollout.calculate_log_probs=True and no bypass_mode"
    require_columns(batch, dict.fromkeys(("old_log_probs", "rollout_log_probs"), advice))
    penalized, metrics = dc_grpo.penalize(
        batch["advantages"],
        batch["old_log_probs"],
        batch["rollout_log_probs"],
        batch["response_mask"],
    )
    # Not a product: NaN * 0 is NaN.
    batch["advantages"] = torch.where(batch["response_mask"].bool(), penalized, 0.0)
    _LOG.info("dc_grpo: %s", described(metrics))


def group_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's own GRPO advantages, [N, T] each; `compute_advantage` penalizes them."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    by_std = config is None or config.get("norm_adv_by_std_in_grpo", True)
    return compute_grpo_outcome_advantage(
        token_level_rewards=token_level_rewards,
        response_mask=response_mask,
        index=index,
        norm_adv_by_std_in_grpo=by_std,
    )


def policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The clipped surrogate of Eq. 9, averaged as verl does, without dual clip and weights.

    The penalty already answers for the mismatch; weights on top would answer twice. Outside
    `response_mask` what is given is ignored, NaN included: loss and gradient are 0 there.

    Raises:
        ValueError: if there are importance weights, or the shapes differ.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    if rollout_is_weights is not None:
        raise ValueError(
            "dc_grpo: importance weights on top of the penalty; set "
            "algorithm.rollout_correction=null"
        )
    low = config.clip_ratio_low
    if low is None:
        low = config.clip_ratio
    high = config.clip_ratio_high
    if high is None:
        high = config.clip_ratio
    require_same_shape(
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
        response_mask=response_mask,
    )

    # Before the arithmetic: a mask after it leaves 0 * NaN in the gradient.
    mask = response_mask.bool()
    log_prob = torch.where(mask, log_prob, 0.0)
    old_log_prob = torch.where(mask, old_log_prob, 0.0)
    advantages = torch.where(mask, advantages, 0.0)

    losses = clipped_surrogate(log_prob, old_log_prob, advantages, clip_low=low, clip_high=high)
    loss = agg_loss(
        loss_mat=losses,
        loss_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        **config.global_batch_info,
    )
    drift = (log_prob - old_log_prob).detach().sum()
    return loss, {"actor/ppo_kl": -(drift / response_mask.sum().clamp(min=1)).item()}
