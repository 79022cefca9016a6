"""Inputs of all contenders: lengths, one random model as a Hugging Face directory, one file of
problems.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.workload import GROUP, NEW_TOKENS, PROMPT_TOKENS, PROMPTS
from dcmdp_jax.data.row_layout import lognormal_lengths
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.models.params import init_params
from dcmdp_jax.types import Params

_PROBLEMS = 512
_PAD = "<pad>"
_END = "<end>"
# Characters of the plane of rare ideographs: there are enough of them for a vocabulary, one a
# token.
_FIRST_CHARACTER = 0x20000
# Of the residual stream's first entry: so large that the layers' outputs hardly change a token's
# norm.
_CONSTANT = 32.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """Lengths of a comparison, in tokens.

    Attributes:
        name: "uniform" or "ragged".
        prompt_tokens, new_tokens: the most of a prompt and of a completion.
        least_prompt: the fewest of a prompt.
        median: of the completions of a train step, lognormal; `new_tokens`: all have so many.
        end_probability: of a sampled token to be the end token.
    """

    name: str
    prompt_tokens: int
    new_tokens: int
    least_prompt: int
    median: int
    end_probability: float

    @property
    def ends(self) -> bool:
        """Whether completions may end before their limit."""
        return self.median < self.new_tokens

    def prompt_lengths(self, count: int) -> list[int]:
        """[count] lengths of prompts, uniform between the fewest and the most."""
        return (
            np.random.default_rng(0)
            .integers(self.least_prompt, self.prompt_tokens + 1, count)
            .tolist()
        )

    def lengths(self, count: int = PROMPTS * GROUP) -> list[int]:
        """Lengths of the completions of a train step."""
        if not self.ends:
            return [self.new_tokens] * count
        return lognormal_lengths(self.median, self.new_tokens, count, seed=0).tolist()


WORKLOADS = {
    # So rare that every completion runs to its limit.
    "uniform": Workload("uniform", PROMPT_TOKENS, NEW_TOKENS, PROMPT_TOKENS, NEW_TOKENS, 1e-12),
    # A constant hazard gives geometric lengths; their median is that of the train step's.
    "ragged": Workload("ragged", 48, 256, 16, 64, 0.0108),
}


def make_inputs(config: ModelConfig, directory: Path, workload: Workload) -> tuple[Path, Path]:
    """Write weights with a tokenizer, and problems whose prompts are random characters.

    A character is a token. The end token has id 1; the weights give it the workload's probability
    at every position.

    Returns:
        The Hugging Face directory and the problems, .jsonl.
    """
    characters = [chr(_FIRST_CHARACTER + index) for index in range(config.vocab_size - 2)]
    tokenizer = directory / "tokenizer"
    vocabulary = {character: index for index, character in enumerate(characters, start=2)}
    _save_tokenizer({_PAD: 0, _END: 1} | vocabulary, tokenizer)
    checkpoint = directory / "checkpoint"
    params = _ending(init_params(config, jax.random.key(0)), config, workload.end_probability)
    save_params(params, config, checkpoint, dtype="float32", tokenizer_dir=tokenizer)
    drawn = np.random.default_rng(0).integers(
        0, len(characters), (_PROBLEMS, workload.prompt_tokens)
    )
    lengths = workload.prompt_lengths(_PROBLEMS)
    problems = directory / "problems.jsonl"
    rows = [
        {"problem": "".join(characters[i] for i in row[:length]), "answer": "1"}
        for row, length in zip(drawn, lengths, strict=True)
    ]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return checkpoint, problems


def _ending(params: Params, config: ModelConfig, probability: float) -> Params:
    """Weights whose end token, id 1, has about this probability everywhere; the padding token has
    none.

    One entry of all embeddings is the same and large, so that it is sqrt(hidden_size) after the
    final norm at every position: what the end token's has more of it is a constant logit.
    """
    embedding = np.array(params["embedding"])
    logit = math.log(probability * (config.vocab_size - 2) / (1 - probability))
    embedding[:, 0] = _CONSTANT
    embedding[1] = 0.0
    embedding[1, 0] = _CONSTANT + logit / math.sqrt(config.hidden_size)
    embedding[0, 0] = -_CONSTANT
    return {**params, "embedding": jnp.asarray(embedding)}


def _save_tokenizer(vocabulary: dict[str, int], directory: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=_PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=_END,
        pad_token=_PAD,
        unk_token=_PAD,
        # The prompt as it is: no contender's template adds tokens.
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(str(directory))
