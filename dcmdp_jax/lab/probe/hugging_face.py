"""The model as transformers computes it, float32 on the CPU: an implementation that shares no code with ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.process_memory import show_torch
from dcmdp_jax.types import Params


class HuggingFace:
    """Scores completions one by one, without padding."""

    def __init__(self, config: ModelConfig, params: Params, directory: Path) -> None:
        """Write the parameters to `directory` in float32 and load them with transformers.

        Raises:
            UserError: if torch is not installed.
        """
        show_torch()  # commands hide it
        try:
            import torch
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise UserError("engine hf: torch is not installed (BUILD.md tells how to get its CPU build)") from None
        self._torch = torch
        save_params(params, config, directory, dtype="float32", tokenizer_dir=None, overwrite=True)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()

    def score(
        self, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], *, temperature: float
    ) -> list[np.ndarray]:
        """Log-probs, float32 nats, one array for each completion."""
        torch, found = self._torch, []
        with torch.no_grad():
            for prompt, completion in zip(prompts, completions, strict=True):
                ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.long)
                logits = self._model(ids[None]).logits[0, len(prompt) - 1 : -1].float() / temperature
                logprobs = torch.log_softmax(logits, dim=-1)
                found.append(logprobs.gather(1, ids[len(prompt) :, None])[:, 0].numpy())
        return found

    def close(self) -> None:
        """Free the model."""
        self._model = None
