"""DC-GRPO in SkyRL: a trainer whose advantages are penalized, once in a step, on the driver.

A trainer that only records for `dcmdp probe` is `make_recording_trainer(RayPPOTrainer)`, with
`recorder=Recorder("recordings", "skyrl")` in place of `dc_grpo`. With DC-GRPO:

    class Experiment(BasePPOExp):
        def get_trainer(self, *args, **options):
            return make_trainer(RayPPOTrainer)(*args, dc_grpo=DcGrpo(tolerance=0.0037), **options)

with `trainer.algorithm.policy_loss_type=regular`, no `off_policy_correction`, and
`generator.sampling_params.logprobs=0` or more. Lambda is kept as dc_grpo.json in each checkpoint's
folder.
"""

import os
from typing import Any

import torch

from dcmdp_jax.integrations.dc_grpo_torch import STATE_FILE, DcGrpo, prefixed, require_columns
from dcmdp_jax.record import Recorder, record_skyrl


def make_trainer(base: type) -> type:
    """A subclass of `RayPPOTrainer`, or of another trainer of SkyRL, that takes `dc_grpo`."""

    class DcGrpoTrainer(base):
        """SkyRL's trainer with DC-GRPO."""

        def __init__(self, *args: Any, dc_grpo: DcGrpo, **options: Any) -> None:
            super().__init__(*args, **options)
            self.dc_grpo = dc_grpo

        def compute_advantages_and_returns(self, data: Any) -> Any:
            """Penalize what SkyRL's estimator gives."""
            data = super().compute_advantages_and_returns(data)
            self.all_metrics.update(prefixed(penalize(self.dc_grpo, data)))
            return data

        def save_checkpoints(self) -> str:
            """Save lambda with the checkpoint."""
            folder = super().save_checkpoints()
            self.dc_grpo.save(os.path.join(folder, STATE_FILE))
            return folder

        def load_checkpoints(self) -> tuple[int, str]:
            """Take lambda from the checkpoint that the run resumes from."""
            step, folder = super().load_checkpoints()
            if step > 0:
                self.dc_grpo.load(os.path.join(folder, STATE_FILE))
            return step, folder

    return DcGrpoTrainer


def make_recording_trainer(base: type) -> type:
    """A subclass of `RayPPOTrainer`, or of another trainer of SkyRL, that takes `recorder`."""

    class RecordingTrainer(base):
        """SkyRL's trainer; it records each batch, and trains as before."""

        def __init__(self, *args: Any, recorder: Recorder, **options: Any) -> None:
            super().__init__(*args, **options)
            self.recorder = recorder

        def compute_advantages_and_returns(self, data: Any) -> Any:
            """Record what SkyRL's estimator was given and gives."""
            data = super().compute_advantages_and_returns(data)
            record_skyrl(self.recorder, self.global_step, data)
            return data

    return RecordingTrainer


def penalize(dc_grpo: DcGrpo, batch: Any) -> dict[str, float]:
    """Penalize a `TrainingInputBatch`'s `advantages` in place and move lambda; return the metrics.

    The advantages are 0 outside `loss_mask`, whatever is there before.

    Raises:
        ValueError: if one of the two log-probs is not there, naming what gives it.
    """
    advice = {
        "action_log_probs": "a policy loss that recomputes them, such as regular",
        "rollout_logprobs": "generator.sampling_params.logprobs=0",
    }
    require_columns(batch, advice)
    mask = batch["loss_mask"]
    penalized, metrics = dc_grpo.penalize(
        batch["advantages"],
        batch["action_log_probs"],
        batch["rollout_logprobs"],
        mask,
    )
    # Not a product: NaN * 0 is NaN.
    batch["advantages"] = torch.where(mask.bool(), penalized, 0.0)
    return metrics
