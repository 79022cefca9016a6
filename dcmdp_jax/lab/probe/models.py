"""Models that are probed: Hugging Face directories and runs, with their tokenizers and prompts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dcmdp_jax.data.prompts import (
    chat_messages,
    end_token_ids,
    load_tokenizer,
    render_chat,
    template_variables,
    with_suffix,
)
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig, read_model_config
from dcmdp_jax.models.hf_weights import load_params
from dcmdp_jax.rewards.protocol import Problem
from dcmdp_jax.types import Params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SYSTEM = "You are a helpful assistant."


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with its tokenizer.

    Attributes:
        name: for people.
        config, params: the model, float32.
        tokenizer: its own.
        stop_token_ids: every token that ends a completion.
    """

    name: str
    config: ModelConfig
    params: Params
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]


def load_model(path: Path) -> Model:
    """Read a Hugging Face directory, a run directory (its newest checkpoint), or a checkpoint of a run.

    Raises:
        UserError: in one line, if there is none or it can't be read.
    """
    resolved = path.resolve()
    if run_directory(path) is not None:
        # Orbax takes seconds to import; only a checkpoint needs it.
        from dcmdp_jax.run.checkpoint import load_params_only

        params, config, step, tokenizer = load_params_only(resolved)
        name = f"{tokenizer.parent.name} step {step}"
    else:
        config, tokenizer, name = read_model_config(path), path, resolved.name
        params = load_params(path, config, dtype="float32")
    loaded = load_tokenizer(str(tokenizer.resolve()), vocab_size=config.vocab_size)
    return Model(name, config, params, loaded, end_token_ids(loaded, tokenizer, vocab_size=config.vocab_size))


def run_directory(path: Path) -> Path | None:
    """The run that a directory is, or is a checkpoint of; None for another directory.

    Raises:
        UserError: if there is none.
    """
    if not path.is_dir():
        raise UserError(f"model {path}: no such directory")
    resolved = path.resolve()
    if (resolved / "checkpoints").is_dir():
        return resolved
    return next((one.parent for one in (resolved, resolved.parent) if one.name == "checkpoints"), None)


def prompt_variants(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, suffix: str, chat_template_kwargs: str = ""
) -> dict[str, list[np.ndarray]]:
    """The prompts as a wrong pipeline would render them: name -> token ids; those equal to the right ones are left out.

    Without the chat template, without the start of the assistant's turn, with a system message, without the suffix,
    with the beginning-of-sequence token in front.
    """

    variables = template_variables(chat_template_kwargs, tokenizer)

    def chat(problem: Problem, *, system: bool = False, ending: str = suffix, generation: bool = True) -> str:
        messages = [*([{"role": "system", "content": _SYSTEM}] if system else []), *chat_messages(problem, ending)]
        return render_chat(tokenizer, messages, problem.tools, generation=generation, **variables)

    texts = {"": [chat(problem) for problem in problems]}
    texts["text without a chat template"] = [with_suffix(problem, suffix) for problem in problems]
    texts["a chat without the start of the assistant's turn"] = [chat(each, generation=False) for each in problems]
    with contextlib.suppress(Exception):  # templates raise what they like at a role they do not have
        texts["a chat with a system message in front"] = [chat(each, system=True) for each in problems]
    texts["a chat without the prompt suffix"] = [chat(each, ending="") for each in problems]
    if tokenizer.bos_token:
        texts["a chat with the beginning-of-sequence token in front"] = [tokenizer.bos_token + t for t in texts[""]]
    right = texts.pop("")
    return {
        name: [np.asarray(ids, np.int32) for ids in tokenizer(rendered, add_special_tokens=False)["input_ids"]]
        for name, rendered in texts.items()
        if rendered != right and all(rendered)
    }
