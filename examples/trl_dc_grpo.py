"""From a first look to a decision, in TRL: record, probe, choose c, train with DC-GRPO, compare.

    pip install trl==1.16.0                # in the trainer's environment, and this package's code:
    pip install --no-deps PATH_OF_A_CHECKOUT
    python examples/trl_dc_grpo.py         # a minute on two idle cores; writes runs/trl

The policy, 0.2M parameters, learns to write one letter. Its engine has the policy's weights rounded
to 4 bits of mantissa; the control's engine has them as they are. In a script of your own keep what
`train` does, put your model, data and reward in, and let vLLM sample: `use_vllm=True` in place of
`rollout_func`. The control is then TRL's GRPOTrainer with `use_vllm=False`.
"""

import functools
import os
import statistics
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is experimental.

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl import GRPOConfig

from dcmdp_jax.integrations.dc_grpo_torch import DcGrpo
from dcmdp_jax.integrations.trl_trainer import DcGrpoTrainer
from dcmdp_jax.record import Recorder, record_trl

RUNS = Path("runs/trl")
LETTERS = "abcdefghijklmnop"
TOKENS = 16  # of a completion
STEPS = 60


def main() -> None:
    # More threads wait for each other longer than a model of this size computes.
    torch.set_num_threads(1)

    # 1. Record GRPO: with lambda 0 and eta 0 the advantages stay as they are. And its control.
    grpo = train("grpo", without_penalty(), rounded_engine)
    exact = train("exact", without_penalty(), exact_engine)

    # 2. Probe. In an environment with this package's own dependencies (pip install PATH):
    probe = f"dcmdp probe {RUNS / 'grpo_recordings'}"
    print(f"\n{probe}    # names the cause, or what it cannot tell apart; recommends a c\n")

    # 3. Choose c from this engine: 1.25 times the mean discrepancy while GRPO learns well, which
    # the probe recommends too, rounded up.
    tolerance = 1.25 * statistics.mean(grpo["dc_grpo/mean"])

    # 4. Train with DC-GRPO from the same start, with the same seed.
    penalty = DcGrpo(tolerance=tolerance, multiplier=0.1, dual_learning_rate=1.0)
    dc_grpo = train("dc_grpo", penalty, rounded_engine)

    # 5. Compare. Where grpo scores as the control does, the mismatch costs nothing: keep GRPO. One
    # run each shows how; a decision needs several seeds.
    print(f"{'':10}{'first reward':>14}{'last reward':>14}{'|p - q|':>10}{'mean lambda':>14}")
    for name, metrics in {"exact": exact, "grpo": grpo, "dc_grpo": dc_grpo}.items():
        first = statistics.mean(metrics["reward"][:5])
        last = statistics.mean(metrics["reward"][-5:])
        discrepancy = statistics.mean(metrics["dc_grpo/mean"])
        multiplier = statistics.mean(metrics["dc_grpo/multiplier"])
        print(f"{name:10}{first:14.2f}{last:14.2f}{discrepancy:10.4f}{multiplier:14.4f}")
    print(
        f"c = {tolerance:.4f}, the probe's before rounding up. Lambda falls while |p - q| is below it."
    )


def without_penalty() -> DcGrpo:
    return DcGrpo(tolerance=0.0, multiplier=0.0, dual_learning_rate=0.0)


def train(name: str, dc_grpo: DcGrpo, engine: Callable[..., dict]) -> dict[str, list[float]]:
    """Train a policy from the same start; record every batch; return TRL's metrics by step."""
    print(f"training {name}, {STEPS} steps; recordings in {RUNS / name}_recordings")
    torch.manual_seed(0)
    tokenizer = letter_tokenizer()
    recorder = Recorder(RUNS / f"{name}_recordings", "trl")
    trainer = DcGrpoTrainer(
        dc_grpo=dc_grpo,
        on_batch=lambda step, batch, logprobs: record_trl(
            recorder, step, batch, logprobs, rewards=batch["rewards"]
        ),
        model=tiny_model(tokenizer),
        processing_class=tokenizer,
        reward_funcs=share_of_a,
        train_dataset=Dataset.from_list([{"prompt": letter} for letter in LETTERS]),
        rollout_func=engine,
        args=GRPOConfig(
            output_dir=str(RUNS / name),
            # DC-GRPO answers for the mismatch. TRL's importance weights would do so once more.
            vllm_importance_sampling_correction=False,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=TOKENS,
            max_steps=STEPS,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            dataloader_pin_memory=False,
        ),
    )
    trainer.remove_callback(PrinterCallback)  # of each step's metrics
    trainer.train()
    metrics: dict[str, list[float]] = {}
    for entry in trainer.state.log_history:
        for key, value in entry.items():
            metrics.setdefault(key, []).append(value)
    return metrics


def share_of_a(completions: list[str], **_: object) -> list[float]:
    """The reward: the share of the letter a."""
    return [completion.replace(" ", "").count("a") / TOKENS for completion in completions]


@torch.no_grad()
def sample(prompts: list[str], trainer: DcGrpoTrainer, *, rounded: bool) -> dict[str, list]:
    """Sample with the policy's weights, and report the log-probs of the sampled tokens."""
    model = Qwen3ForCausalLM(trainer.model.config).eval()
    model.load_state_dict(trainer.model.state_dict())
    if rounded:
        for parameter in model.parameters():
            mantissa, exponent = torch.frexp(parameter)
            parameter.copy_(torch.ldexp((mantissa * 16).round() / 16, exponent))

    prompt_ids = trainer.processing_class(prompts)["input_ids"]  # one token each
    sequences = torch.tensor(prompt_ids)
    logprobs = []
    for _ in range(TOKENS):
        distribution = model(sequences).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(distribution.exp(), 1)
        logprobs.append(distribution.gather(1, token))
        sequences = torch.cat([sequences, token], dim=1)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": sequences[:, 1:].tolist(),
        "logprobs": torch.cat(logprobs, dim=1).tolist(),
    }


rounded_engine = functools.partial(sample, rounded=True)
exact_engine = functools.partial(sample, rounded=False)


def tiny_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def letter_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


if __name__ == "__main__":
    main()
