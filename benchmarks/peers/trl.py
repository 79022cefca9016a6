"""TRL's side of the comparison; runs in TRL's own environment.

A train step is plain torch and transformers with TRL's loss on the completion tokens' logits. TRL's own costs more: it
scores the prompt as well and computes entropies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.rounds import Job, Rounds, work

_PACKAGES = ("trl", "torch", "transformers", "accelerate", "datasets", "numpy")
_CLIP, _LEARNING_RATE, _MAX_GRAD_NORM = 0.2, 1e-6, 1.0


def train(job: Job, rounds: Rounds) -> None:
    """Forward, clipped surrogate, backward, clipping, AdamW on all rows; or old log-probs, then four such updates."""
    model = _model(job).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(0)
    length = job.prompt_tokens + job.new_tokens
    ids = torch.randint(2, model.config.vocab_size, (job.rows, length), generator=generator)
    advantages = torch.randn(job.rows, 1, generator=generator)
    # Position t predicts token t + 1.
    predicting = torch.arange(job.prompt_tokens - 1, length - 1)

    def logprobs(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=predicting).logits
        return logits.log_softmax(-1).gather(-1, ids[:, job.prompt_tokens :, None])[..., 0]

    def update(ids: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> None:
        ratio = torch.exp(logprobs(ids) - old)
        clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        (-torch.minimum(ratio * advantages, clipped * advantages).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def old_logprobs(ids: torch.Tensor) -> torch.Tensor:
        return logprobs(ids)

    def four() -> None:
        for part in zip(*(x.split(job.rows // 4) for x in (ids, old_logprobs(ids), advantages)), strict=True):
            update(*part)

    fixed = torch.cat([old_logprobs(part) for part in ids.split(job.rows // 4)])
    rounds.hello(_PACKAGES)
    rounds.repeat(four if job.part == "train4" else lambda: update(ids, fixed, advantages))


def sampler(job: Job, rounds: Rounds) -> None:
    """The trainer's own call of transformers' generate: token ids in, token ids out."""
    trainer = _trainer(job)
    prompts = trainer.processing_class(text=job.texts()[: job.prompts])["input_ids"]
    repeated = [ids for ids in prompts for _ in range(job.group)]
    rounds.hello(_PACKAGES)
    while rounds.boundary():
        completions, _ = trainer._generate_single_turn(repeated, None, {}, job.group)
        job.check_completions(completions)


def reinforce(job: Job, rounds: Rounds) -> None:
    """GRPOTrainer.train, from one step's end to the next."""
    trainer = _trainer(job)
    trainer.add_callback(_Stepped(rounds))
    rounds.hello(_PACKAGES)
    trainer.train()


class _Stepped(TrainerCallback):
    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = not self._rounds.boundary()


def _trainer(job: Job) -> GRPOTrainer:
    def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        job.check_completions(completion_ids)
        return [float(ids[-1] % 2) for ids in completion_ids]

    settings = GRPOConfig(
        output_dir=job.scratch,
        use_cpu=True,
        bf16=False,
        # On by default, at the cost of a second forward pass.
        gradient_checkpointing=False,
        per_device_train_batch_size=job.rows,
        steps_per_generation=1,
        num_generations=job.group,
        max_completion_length=job.new_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=_CLIP,
        loss_type="grpo",
        learning_rate=_LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=_MAX_GRAD_NORM,
        max_steps=10**6,
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return GRPOTrainer(
        model=_model(job),
        args=settings,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": job.texts()}),
        processing_class=AutoTokenizer.from_pretrained(job.checkpoint),
    )


def _model(job: Job) -> PreTrainedModel:
    torch.set_num_threads(job.cores)
    model = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32)
    job.check_parameters(sum(parameter.numel() for parameter in model.parameters()))
    return model


if __name__ == "__main__":
    work({"train1": train, "train4": train, "rl": reinforce, "sampler": sampler})
