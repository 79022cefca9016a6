"""TRL's side of the comparison; runs in TRL's own environment.

A train step is plain torch and transformers with TRL's loss on the completion tokens' logits. TRL's
own costs more: it scores the prompt as well and computes entropies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.rounds import Job, Rounds, work

_PACKAGES = ("trl", "torch", "peft", "transformers", "accelerate", "datasets", "numpy")
_LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
_CLIP = 0.2
_LEARNING_RATE = 1e-6
_MAX_GRAD_NORM = 1.0


def train(job: Job, rounds: Rounds) -> None:
    """Forward, clipped surrogate, backward, clipping, AdamW on all rows; or old log-probs, then
    four such updates.

    As its trainer lays them out: prompts padded on the left, completions on the right, to the
    longest of each. Rows with padding are computed in four parts, as all at once take more memory
    and no less time.
    """
    model = _model(job).train()
    model = get_peft_model(model, _LORA) if job.lora else model
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_LEARNING_RATE, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.tensor(job.prompt_lengths).repeat_interleave(job.group)[:, None]
    completions = torch.tensor(job.lengths)[:, None]
    begin = int(prompts.max())
    length = begin + int(completions.max())
    ids = torch.randint(2, model.config.vocab_size, (job.rows, length), generator=generator)
    advantages = torch.randn(job.rows, 1, generator=generator)
    places = torch.arange(length)
    real = (places >= begin - prompts) & (places < begin + completions)
    mask = real[:, begin:].float()
    # Position t predicts token t + 1.
    predicting = torch.arange(begin - 1, length - 1)
    size = job.rows // 4

    def logprobs(ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        attends = {"attention_mask": real.long()} if job.ragged else {}
        with torch.autocast("cpu", torch.bfloat16, enabled=job.dtype == "bfloat16"):
            logits = model(
                input_ids=ids, **attends, use_cache=False, logits_to_keep=predicting
            ).logits.float()
        return logits.log_softmax(-1).gather(-1, ids[:, begin:, None])[..., 0]

    def backward(
        ids: torch.Tensor, real: torch.Tensor, mask: torch.Tensor, *rest: torch.Tensor, share: float
    ) -> None:
        old, advantages = rest
        ratio = torch.exp(logprobs(ids, real) - old)
        clipped = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        terms = -torch.minimum(ratio * advantages, clipped * advantages)
        mean = ((terms * mask).sum(-1) / mask.sum(-1)).mean() if job.ragged else terms.mean()
        (share * mean).backward()

    def apply() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def old_logprobs(size: int) -> torch.Tensor:
        return torch.cat(
            [logprobs(*part) for part in zip(ids.split(size), real.split(size), strict=True)]
        )

    def parts(old: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
        return zip(*(x.split(size) for x in (ids, real, mask, old, advantages)), strict=True)

    def four() -> None:
        for part in parts(old_logprobs(size if job.ragged else job.rows), size):
            backward(*part, share=1.0)
            apply()

    def one() -> None:
        for part in parts(fixed, size if job.ragged else job.rows):
            backward(*part, share=1 / 4 if job.ragged else 1.0)
        apply()

    fixed = old_logprobs(size)
    rounds.hello(_PACKAGES)
    rounds.repeat(four if job.part == "train4" else one)


def sampler(job: Job, rounds: Rounds) -> None:
    """The trainer's own call of transformers' generate: token ids in, token ids out."""
    trainer = _trainer(job)
    trainer.model.to(getattr(torch, job.dtype))
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

    parts = 4 if job.ragged else 1
    settings = GRPOConfig(
        output_dir=job.scratch,
        use_cpu=True,
        bf16=job.dtype == "bfloat16",
        # On by default, at the cost of a second forward pass.
        gradient_checkpointing=False,
        per_device_train_batch_size=job.rows // parts,
        gradient_accumulation_steps=parts,
        steps_per_generation=parts,
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
        peft_config=_LORA if job.lora else None,
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
    trains = dict.fromkeys(("train1", "train4", "train_lora"), train)
    work({**trains, "rl": reinforce, "rl_lora": reinforce, "sampler": sampler})
