"""DC-GRPO in TRL: a `GRPOTrainer` whose advantages are penalized for the mismatch with the engine.

    arguments = GRPOConfig(use_vllm=True, ...)
    trainer = DcGrpoTrainer(dc_grpo=DcGrpo(tolerance=0.0037), model=..., args=arguments, ...)

The engine must report log-probs: vLLM does, and so may a `rollout_func`. Set
`vllm_importance_sampling_correction=False` unless you want TRL's importance weights on top.

The penalty changes the advantages alone: `loss_type`, `epsilon`, `importance_sampling_level` and
TRL's other settings of the loss stay yours. The paper's are `loss_type="grpo"` (TRL's default is
"dapo"), `epsilon=0.2`, `epsilon_high=0.24` and `beta=0.0`.

Metrics are logged as `dc_grpo/*`; lambda is kept as dc_grpo.json in each checkpoint, and a resumed
run takes it from there.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from dcmdp_jax.integrations.dc_grpo_torch import DcGrpo, prefixed

OnBatch = Callable[[int, dict[str, Any], torch.Tensor], None]
"""(step, batch of TRL with penalized advantages and `rewards`, log-probs under the weights that
made it).
"""


class DcGrpoTrainer(GRPOTrainer):
    """`GRPOTrainer` with DC-GRPO.

    Args:
        dc_grpo: c, lambda and what moves it.
        on_batch: called with each training batch, for example to record it
            (`dcmdp_jax.record.record_trl`).
        options: keyword arguments of `GRPOTrainer`.

    Raises:
        ValueError: with `use_liger_kernel`, whose fused loss drops the ratio and the tokens'
            advantages; without an engine that reports log-probs.
    """

    def __init__(
        self,
        *args: Any,
        dc_grpo: DcGrpo,
        on_batch: OnBatch | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(dc_grpo, DcGrpo):
            raise ValueError(
                f"DcGrpoTrainer: dc_grpo is {dc_grpo!r}: must be DcGrpo(tolerance=...)"
            )
        self.dc_grpo = dc_grpo
        self._on_batch = on_batch
        _check(inspect.signature(GRPOTrainer).bind_partial(*args, **options).arguments)
        super().__init__(*args, **options)
        self.add_callback(_SavesState(dc_grpo))

    def _calculate_rewards(self, *arguments: Any) -> torch.Tensor:
        # Of all processes, a column for each function.
        rewards = super()._calculate_rewards(*arguments)
        totals = rewards.nan_to_num() @ self.reward_weights.to(rewards.device)
        accelerator = self.accelerator
        self._rewards = totals.chunk(accelerator.num_processes)[accelerator.process_index]
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        rollout = output.get("sampling_per_token_logps")
        if rollout is None:
            raise ValueError(
                "DcGrpoTrainer: the batch has no sampling_per_token_logps: set use_vllm=True, or "
                "have rollout_func return logprobs"
            )
        mode = "train" if self.model.training else "eval"
        train = self._old_logprobs(output)
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        output["advantages"], metrics = self.dc_grpo.penalize(
            output["advantages"],
            train,
            rollout,
            mask,
            update=mode == "train",
            reduce=lambda sums: self.accelerator.reduce(sums.to(self.accelerator.device), "sum"),
        )
        for name, value in prefixed(metrics).items():
            self._metrics[mode][name].append(value)
        if self._on_batch is not None and mode == "train":
            self._on_batch(self.state.global_step, output | {"rewards": self._rewards}, train)
        return output

    def _old_logprobs(self, output: dict[str, Any]) -> torch.Tensor:
        """Log-probs under the weights that made the batch; TRL computes them only for its loss."""
        logprobs = output.get("old_per_token_logps")
        if logprobs is not None:
            return logprobs
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        with torch.no_grad():
            logprobs, *_ = self._get_per_token_logps_and_entropies(
                self.model,
                ids,
                attention,
                output["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
                **{name: output[name] for name in _MODEL_INPUTS if name in output},
            )
        return logprobs

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.dc_grpo.load(Path(resume_from_checkpoint))


def _check(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `GRPOTrainer`, by name, with which the penalty cannot work."""
    # The class has the defaults.
    config = arguments.get("args") or GRPOConfig
    if config.use_liger_kernel:
        raise ValueError(
            "DcGrpoTrainer: use_liger_kernel=True: its fused loss takes no advantage of a token"
        )
    if not config.use_vllm and arguments.get("rollout_func") is None:
        raise ValueError(
            "DcGrpoTrainer: use_vllm=False: transformers reports no log-probs of what it samples; "
            "set use_vllm=True, or give a rollout_func that returns logprobs; a control without an "
            "engine is TRL's own GRPOTrainer"
        )
    if config.use_vllm and config.vllm_importance_sampling_correction:
        logging.getLogger(__name__).warning(
            "DcGrpoTrainer: vllm_importance_sampling_correction=True: TRL's importance weights are "
            "applied on top of the penalty; set it to False for the penalty alone"
        )


_MODEL_INPUTS = """
    pixel_values image_grid_thw num_images num_tiles pixel_attention_mask spatial_shapes image_sizes
    token_type_ids mm_token_type_ids image_position_ids
""".split()


class _SavesState(TrainerCallback):
    """Writes lambda into each checkpoint."""

    def __init__(self, dc_grpo: DcGrpo) -> None:
        self._dc_grpo = dc_grpo

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by transformers after a checkpoint is on disk."""
        if state.is_world_process_zero:
            self._dc_grpo.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")
