"""Prompts as token ids: the tokenizer's own chat template, a suffix, a length limit; and the tokens that end a text."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dcmdp_jax.errors import UserError, one_line
from dcmdp_jax.inputs import read_json_object, shorten, shorten_name
from dcmdp_jax.tasks.problems import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EncodedPrompts:
    """The problems whose prompts fit, and their prompts.

    Attributes:
        problems: the problems kept, in order.
        token_ids: for each, [P_i] int32, from the template's first token to the start of the assistant's turn.
        dropped: number of problems left out because their prompts are over the limit.
    """

    problems: list[Problem]
    token_ids: list[np.ndarray]
    dropped: int


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer for chat prompts; never run code that comes with it.

    Args:
        path: a directory in Hugging Face format, or a Hub name.

    Raises:
        UserError: if there is no tokenizer there, or it has no chat template or no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    directory = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not directory.is_dir():
        raise UserError(f"tokenizer {path}: no such directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory) if directory.is_dir() else path, trust_remote_code=False, local_files_only=directory.is_dir()
        )
    except Exception as error:  # missing files, broken JSON and unknown classes all raise differently
        reason = shorten_name((str(error) or type(error).__name__).strip().splitlines()[0])
        raise UserError(f"tokenizer {path}: not loadable ({reason})") from error
    check_tokenizer(tokenizer)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that can't make chat prompts.

    Raises:
        UserError: if it has no chat template or no end-of-sequence token.
    """
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if not tokenizer.chat_template:
        raise UserError(
            f"tokenizer {name}: no chat template; put the model's chat_template.jinja beside tokenizer_config.json, "
            "or use the tokenizer of its instruction-tuned version"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {name}: no end-of-sequence token, so no completion would end; set eos_token in "
            "tokenizer_config.json"
        )


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_suffix: str = "",
    max_prompt_tokens: int,
) -> EncodedPrompts:
    r"""Turn problems into prompts. Prompts over the length limit are left out, counted and logged.

    The ids are those of the rendered template, which contains its special tokens: the tokenizer adds no others.

    Args:
        problems: the problems to ask.
        tokenizer: with a chat template and an end-of-sequence token.
        prompt_suffix: appended to the user's message unchanged; include a line break if you want one.
        max_prompt_tokens: longest prompt kept, template included, at least 1.

    Raises:
        UserError: if the tokenizer is refused (`check_tokenizer`), the template can't render a problem's messages, the
            limit is below 1, or it drops every problem.
    """
    if max_prompt_tokens < 1:
        raise UserError(f"max_prompt_tokens = {max_prompt_tokens}: must be at least 1")
    check_tokenizer(tokenizer)
    texts = []
    for problem in problems:
        messages = [{"role": role, "content": content} for role, content in problem.context]
        messages.append({"role": "user", "content": problem.prompt + prompt_suffix})
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # jinja2's errors, and any that a template raises
            reason = shorten_name(one_line(error))
            raise UserError(
                f"the chat template can't render problem {problem.index} of {problem.source}: {reason}"
            ) from error
        texts.append(text)
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    fits = [len(ids) <= max_prompt_tokens for ids in encoded]
    dropped = fits.count(False)
    if dropped:
        longest = max(map(len, encoded))
        _LOG.warning(
            "%d of %d prompts are over max_prompt_tokens = %d (the longest has %d) and left out",
            *(dropped, len(fits), max_prompt_tokens, longest),
        )
        if dropped == len(fits):
            raise UserError(
                f"max_prompt_tokens = {max_prompt_tokens} leaves no prompt: the shortest has {min(map(len, encoded))}"
            )
    return EncodedPrompts(
        problems=[problem for problem, fit in zip(problems, fits, strict=True) if fit],
        token_ids=[np.asarray(ids, dtype=np.int32) for ids, fit in zip(encoded, fits, strict=True) if fit],
        dropped=dropped,
    )


def end_token_ids(tokenizer: PreTrainedTokenizerBase, model_dir: str | Path | None = None) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's own and those that a model's directory lists.

    Chat models end a turn and a text with different tokens; their generation_config.json lists both.

    Args:
        tokenizer: its `eos_token_id` counts where it has one.
        model_dir: directory whose generation_config.json and config.json are read for `eos_token_id`; missing
            files are skipped.

    Returns:
        The ids, ascending, without repeats.

    Raises:
        UserError: if one of the files is malformed, or nothing names an end token.
    """
    ids: set[int] = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("generation_config.json", "config.json") if model_dir is not None else ():
        path = Path(model_dir).expanduser() / name
        if not path.is_file():
            continue
        value = read_json_object(path).get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < 2**31:
                raise UserError(f"{path}: eos_token_id is {shorten(value)}, must be a token id or a list of them")
            ids.add(item)
    if not ids:
        raise UserError("no end token: neither the tokenizer nor the model's configuration names an eos_token_id")
    return tuple(sorted(ids))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: str | Path, end_ids: Sequence[int]) -> None:
    """Write a tokenizer and a generation_config.json that lists every end token, so that `end_token_ids` finds them.

    An exported model needs the list: without it, an engine samples past the end of a chat turn. The file has nothing
    else, because engines take its temperature and top-k as their defaults.
    """
    tokenizer.save_pretrained(str(directory))
    path = Path(directory) / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": list(end_ids)}) + "\n", encoding="utf-8")
