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
        dropped: how many problems were left out for prompts over the limit.
    """

    problems: list[Problem]
    token_ids: list[np.ndarray]
    dropped: int


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Loads a tokenizer that prompts can be made with; never runs code that comes with it.

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
    """Refuses a tokenizer that prompts can't be made with.

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
    r"""Turns problems into prompts; those over the length limit are left out, counted and logged.

    The ids are those of the rendered template, whose special tokens are in its text: the tokenizer adds none of its
    own on top.

    Args:
        problems: what to ask.
        tokenizer: with a chat template and an end-of-sequence token.
        prompt_suffix: appended to the user's message as it is, a line break included where one is wanted.
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
        except Exception as error:  # jinja2's own errors, and whatever a template raises
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
    """Every token that ends a completion: the tokenizer's own and those a model's directory names.

    Chat models end a turn with another token than a text; their generation_config.json lists both.

    Args:
        tokenizer: its `eos_token_id` counts where it has one.
        model_dir: directory whose generation_config.json and config.json are read for `eos_token_id`; files that are
            not there are passed over.

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
    """Writes a tokenizer and a generation_config.json that lists every end token, so that `end_token_ids` finds them.

    The list goes with an export: without it, an engine runs past the end of a chat turn. Nothing else is written
    there, since engines take a generation_config.json's temperature and top-k as their defaults.
    """
    tokenizer.save_pretrained(str(directory))
    path = Path(directory) / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": list(end_ids)}) + "\n", encoding="utf-8")
