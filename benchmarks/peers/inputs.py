"""Inputs of all contenders: one random model as a Hugging Face directory, one file of problems."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.models.params import init_params

_PROBLEMS = 512
_PAD = "<pad>"
_END = "<end>"
# Characters of the plane of rare ideographs: there are enough of them for a vocabulary, one a token.
_FIRST_CHARACTER = 0x20000


def make_inputs(config: ModelConfig, directory: Path, *, prompt_tokens: int) -> tuple[Path, Path]:
    """Write weights with a tokenizer, and problems whose prompts are `prompt_tokens` random characters.

    A character is a token. The end token has the id after the vocabulary's last, so no model can sample it and every
    completion runs to its limit, with nothing to suppress at any step. (Id 1 is left without a token in exchange: a
    tokenizer may not have more tokens than the model.)

    Returns:
        The Hugging Face directory and the problems, .jsonl.
    """
    characters = [chr(_FIRST_CHARACTER + index) for index in range(config.vocab_size - 2)]
    tokenizer = directory / "tokenizer"
    vocabulary = {character: index for index, character in enumerate(characters, start=2)}
    _save_tokenizer({_PAD: 0, _END: config.vocab_size} | vocabulary, tokenizer)
    checkpoint = directory / "checkpoint"
    params = init_params(config, jax.random.key(0))
    save_params(params, config, checkpoint, dtype="float32", tokenizer_dir=tokenizer)
    drawn = np.random.default_rng(0).integers(0, len(characters), (_PROBLEMS, prompt_tokens))
    problems = directory / "problems.jsonl"
    rows = [{"problem": "".join(characters[i] for i in row), "answer": "1"} for row in drawn]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return checkpoint, problems


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
        # The prompt as it is: no contender's template adds tokens.
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(str(directory))
