"""DC-GRPO in slime: a function for `--custom-advantage-function-path`.

    --custom-advantage-function-path dcmdp_jax.integrations.slime_hooks.dc_grpo_advantages
    --custom-config-path dc_grpo.yaml
        # dc_grpo_tolerance: 0.0037; dc_grpo_state: checkpoints/dc_grpo.json; ...
    --get-mismatch-metrics
        # so that slime computes the training stack's log-probs before the update
    --custom-tis-function-path dcmdp_jax.integrations.slime_hooks.no_weights
        # which that flag asks for

slime calls it once in a step in each data-parallel rank, with the rank's whole batch.
"""

import logging
from typing import Any

import torch

from dcmdp_jax.integrations.dc_grpo_torch import DcGrpo, described, require_columns

_LOG = logging.getLogger(__name__)
_PREFIX = "dc_grpo_"
"""Begins the name of each of our settings in slime's arguments; all others are slime's."""
_SETTINGS = (
    "tolerance",
    "multiplier",
    "dual_learning_rate",
    "multiplier_min",
    "multiplier_max",
    "measure",
    "sided",
)
_state: DcGrpo | None = None


def dc_grpo_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set `advantages` and `returns` of a batch, lists of [T_i] tensors; move lambda.

    `rewards` are group-relative already (`--rewards-normalization`), as slime's own GRPO takes
    them.

    Args:
        args: slime's; `dc_grpo_tolerance` and, if given, `dc_grpo_multiplier`,
            `dc_grpo_dual_learning_rate`, `dc_grpo_multiplier_min`, `dc_grpo_multiplier_max`,
            `dc_grpo_measure`, `dc_grpo_sided`, and `dc_grpo_state`, the path of lambda's JSON file,
            or its directory, as in `DcGrpo.save`.
        rollout_data: `log_probs`, `rollout_log_probs`, `loss_masks`, `rewards`, a list entry for
            each sample.

    Raises:
        ValueError: in one line, if a setting or the log-probs are not there, a setting that begins
            with dc_grpo_ is unknown, or context parallelism splits samples.
    """
    dc_grpo = _dc_grpo_of_process(args)
    advice = {
        "log_probs": f"--get-mismatch-metrics and --custom-tis-function-path {__name__}.no_weights",
        "rollout_log_probs": "sample.rollout_log_probs in --custom-generate-function-path",
    }
    require_columns(rollout_data, advice)
    train = rollout_data["log_probs"]
    rollout = rollout_data["rollout_log_probs"]
    masks = rollout_data["loss_masks"]
    lengths = [*map(len, train)]
    if [*map(len, rollout)] != lengths or [*map(len, masks)] != lengths:
        raise ValueError(
            "dc_grpo: log-probs and masks differ in length: context parallelism above 1 is not "
            "supported"
        )
    rewards = rollout_data["rewards"]
    if len(rewards) != len(lengths):
        raise ValueError(
            f"dc_grpo: {len(rewards)} rewards of {len(lengths)} samples: must be one of each"
        )

    device = train[0].device

    def token_rows(samples: list[Any]) -> torch.Tensor:
        """Samples behind one another: a row for each token."""
        return torch.cat([torch.as_tensor(sample, device=device) for sample in samples])[:, None]

    rewards = torch.tensor(rewards, dtype=torch.float32, device=device)
    advantages = rewards.repeat_interleave(torch.tensor(lengths, device=device))
    penalized, metrics = dc_grpo.penalize(
        advantages,
        token_rows(train),
        token_rows(rollout),
        token_rows(masks),
        reduce=_over_ranks,
    )
    rollout_data["advantages"] = list(penalized[:, 0].split(lengths))
    rollout_data["returns"] = list(advantages.split(lengths))
    _LOG.info("dc_grpo: %s", described(metrics))
    path = getattr(args, "dc_grpo_state", None)
    if path and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0):
        dc_grpo.save(path)


def no_weights(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Loss and masks as they are, no metrics: the penalty already answers for the mismatch.

    slime refuses `--get-mismatch-metrics` without `--custom-tis-function-path`, and multiplies the
    loss by what that function makes of it.
    """
    return pg_loss, loss_masks, {}


def _dc_grpo_of_process(args: Any) -> DcGrpo:
    """The state of this process, made at the first call."""
    global _state
    if _state is None:
        _require_known_settings(args)
        if not hasattr(args, "dc_grpo_tolerance"):
            raise ValueError("dc_grpo: set dc_grpo_tolerance in the file of --custom-config-path")
        settings = {
            name: getattr(args, _PREFIX + name)
            for name in _SETTINGS
            if hasattr(args, _PREFIX + name)
        }
        _state = DcGrpo(**settings)
        _state.resume(getattr(args, "dc_grpo_state", None) or None)
    return _state


def _require_known_settings(args: Any) -> None:
    """Raise a ValueError that names the arguments with our prefix that are no setting."""
    known = [_PREFIX + name for name in (*_SETTINGS, "state")]
    unknown = [name for name in vars(args) if name.startswith(_PREFIX) and name not in known]
    if unknown:
        raise ValueError(
            f"dc_grpo: unknown settings {', '.join(unknown)}: allowed are {', '.join(known)}"
        )


def _over_ranks(sums: torch.Tensor) -> torch.Tensor:
    """Over the data-parallel ranks; tensor-parallel ones hold the same tokens."""
    if torch.distributed.is_initialized():
        from megatron.core import mpu

        torch.distributed.all_reduce(
            sums, group=mpu.get_data_parallel_group(with_context_parallel=True)
        )
    return sums
