"""DC-GRPO in prime-rl: a custom loss.

    [trainer.loss]
    type = "custom"
    import_path = "dcmdp_jax.integrations.prime_rl_loss.dc_grpo_loss"
    kwargs = { tolerance = 0.0037, state_path = "outputs/dc_grpo.json" }

    [orchestrator]
    max_off_policy_steps = 0

prime-rl calls it for each sample and makes one optimizer update in a step, at whose end lambda
moves. p is of the weights being trained: with one update a step these made the batch, unless
rollouts lag behind the trainer, by up to `orchestrator.max_off_policy_steps` (8 by default). What
the policy moved since is then in the discrepancy too; 0 keeps it out: older rollouts are dropped.
"""

from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dcmdp_jax.integrations.dc_grpo_torch import DcGrpo, penalized_advantages, require_same_shape

_COLUMNS = ("trainer_logprobs", "inference_logprobs", "advantages", "loss_mask", "loss_weights")
"""Fields of prime-rl's `LossInputs`; the last may be None."""


class DcGrpoLoss:
    """The loss, its multiplier, and the sums of the step so far.

    Args:
        state_path: path of lambda's JSON file, or its directory, as in `DcGrpo.save`; read now if
            it is there and written by rank 0 after each step.
        resume_steps: training steps of the checkpoint that the run resumes from, if it is not the
            last one.
        settings: keyword arguments of `DcGrpo`.

    Raises:
        ValueError: naming the setting that is missing, unknown or out of its range.
    """

    def __init__(
        self,
        *,
        state_path: str | Path | None = None,
        resume_steps: int | None = None,
        **settings: Any,
    ) -> None:
        try:
            self.dc_grpo = DcGrpo(**settings)
        except TypeError as error:
            raise ValueError(f"dc_grpo: kwargs of [trainer.loss]: {error}") from None
        self._path = state_path
        self.dc_grpo.resume(state_path, steps=resume_steps)
        self._sums = torch.zeros(2, dtype=torch.float64)
        self._optimizer = None
        register_optimizer_step_post_hook(self._after_update)

    def __call__(self, inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a sample, summed over its tokens, and metrics.

            l_t = -r_t (A - lambda delta_t)
            r_t = exp(log pi - sg(log pi)) = 1, whose gradient is that of log pi

        which is Eq. 9 where each batch is used once; its clip never bites there. A token whose
        engine reported no log-prob (NaN) is neither penalized nor counted, as in `DcGrpo.penalize`;
        a NaN of the trainer stays. Outside `loss_mask` every column is ignored, NaN included: loss
        and gradient are 0 there.

        Args:
            inputs: prime-rl's `LossInputs`: `trainer_logprobs`, `inference_logprobs`, `advantages`,
                `loss_mask`, `loss_weights` or None, [T] each.
        """
        columns = {name: getattr(inputs, name) for name in _COLUMNS}
        require_same_shape(
            **{name: column for name, column in columns.items() if column is not None}
        )
        mask = inputs.loss_mask.bool()
        # Before the arithmetic: a mask after it leaves 0 * NaN in the gradient.
        train = torch.where(mask, inputs.trainer_logprobs, 0.0)
        advantages = torch.where(mask, inputs.advantages, 0.0)

        delta, counted = self.dc_grpo.penalized_tokens(train, inputs.inference_logprobs, mask)
        sums = torch.stack([delta.double().sum(), counted.double().sum()])
        self._sums += sums.to(self._sums.device)
        (penalized,) = penalized_advantages(advantages[None], delta[None], self.dc_grpo.multiplier)
        ratio = torch.exp(train - train.detach())
        losses = ratio * penalized
        if inputs.loss_weights is not None:
            losses = losses * torch.where(mask, inputs.loss_weights, 0.0)
        loss = -losses.sum()
        mean = delta.sum() / counted.sum().clamp(min=1)
        return loss, {
            "dc_grpo/mean": mean,
            "dc_grpo/multiplier": torch.full_like(mean, self.dc_grpo.multiplier),
        }

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        """End a step: move lambda by the mean over all ranks. Only the first optimizer counts."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        sums = self._sums
        distributed = torch.distributed.is_initialized()
        if distributed:
            sums = sums.to(optimizer.param_groups[0]["params"][0].device)
            torch.distributed.all_reduce(sums)
        total, count = sums.tolist()
        self._sums = torch.zeros(2, dtype=torch.float64)
        if not count:
            return
        self.dc_grpo.move(total / count)
        if self._path is not None and (not distributed or torch.distributed.get_rank() == 0):
            self.dc_grpo.save(self._path)


_loss: DcGrpoLoss | None = None


def dc_grpo_loss(inputs: Any, **settings: Any) -> Any:
    """The function that `import_path` names; `settings` are those of `DcGrpoLoss`, made once."""
    global _loss
    from prime_rl.trainer.rl.loss import LossOutputs

    if _loss is None:
        _loss = DcGrpoLoss(**settings)
    loss, metrics = _loss(inputs)
    return LossOutputs(loss=loss, metrics=metrics)
