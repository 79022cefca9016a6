"""torch and transformers on the work of the part `step`: the same shape, SDPA attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.accelerator_parts.sizes import Size, Tell, completions, run_settings
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.models.hf_config import to_hf
from dcmdp_jax.plan.published import model_of


def _model(size: Size, device: str) -> Any:
    """Random weights in float32."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    fields = to_hf(model_of(from_config_dict(run_settings(size))), dtype="float32")
    config = Qwen3Config(
        **{
            name: value
            for name, value in fields.items()
            if name not in ("architectures", "model_type")
        }
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    ).to(device)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call, after one that is not counted."""
    import torch

    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times[1:]


def sorted_micro_batches(lengths: np.ndarray, most: int) -> list[np.ndarray]:
    """Sequences of like lengths together, longest first, up to `most` tokens with their padding."""
    order = np.argsort(-lengths)
    batches = []
    begin = 0
    while begin < len(order):
        count = max(1, most // int(lengths[order[begin]]))
        batches.append(order[begin : begin + count])
        begin += count
    return batches


def measure_step(size: Size, tell: Tell) -> None:
    """A clipped-ratio update of float32 parameters with bfloat16 autocast and AdamW, padded rows
    sorted by length.
    """
    import torch

    episodes = completions(size, model_of(from_config_dict(run_settings(size))))
    lengths = np.array([len(episode.token_ids) for episode in episodes])
    device = _device()
    model = _model(size, device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-6, weight_decay=0.0, fused=device == "cuda"
    )
    batches = sorted_micro_batches(lengths, size.micro_batch_tokens)
    found: dict[str, Any] = {
        "kind": "torch",
        "versions": torch.__version__,
        "tokens": int(lengths.sum()),
        "micro_batches": len(batches),
        "contenders": {},
    }

    def update() -> None:
        for rows in batches:
            longest = int(lengths[rows].max())
            prompt = size.prompt_tokens
            ids = torch.zeros(len(rows), longest, dtype=torch.long)
            for row, which in enumerate(rows):
                ids[row, : lengths[which]] = torch.as_tensor(episodes[which].token_ids)
            real = torch.arange(longest) < torch.as_tensor(lengths[rows])[:, None]
            ids = ids.to(device)
            real = real.to(device)
            with torch.autocast(device, torch.bfloat16):
                kept = longest - prompt + 1
                logits = model(
                    ids, attention_mask=real.long(), use_cache=False, logits_to_keep=kept
                ).logits[:, :-1]
            logits = logits.float()
            chosen = logits.gather(-1, ids[:, prompt:, None])[..., 0] - logits.logsumexp(-1)
            ratio = (chosen - chosen.detach()).exp()
            advantage = torch.ones(len(rows), 1, device=device)
            clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.24) * advantage)
            mask = real[:, prompt:].float()
            (-((clipped * mask).sum(-1) / mask.sum(-1)).sum() / len(lengths)).backward()
            del logits, chosen, ratio, clipped
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for name in ("no recomputation", "gradient checkpointing"):
        if name == "gradient checkpointing":
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        try:
            seconds = _timed(update, 2)
            found["contenders"][name] = {
                "seconds": seconds,
                "tokens_per_second": [found["tokens"] / each for each in seconds],
                "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            }
        except torch.OutOfMemoryError as error:
            found["contenders"][name] = {"error": str(error)[:200]}
            optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        tell(found)
