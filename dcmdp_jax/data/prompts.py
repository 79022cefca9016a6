"""Prompts as token ids: the tokenizer's own chat template, a suffix, a length limit."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dcmdp_jax.data.chat import chat_messages, problem_texts, render_checked, template_variables, with_suffix
from dcmdp_jax.data.tokenizer import check_tokenizer, encode_texts
from dcmdp_jax.errors import UserError
from dcmdp_jax.rewards.protocol import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)


class EncodedPrompts(NamedTuple):
    """The problems whose prompts fit, and their prompts.

    Attributes:
        problems: the problems kept, in order.
        token_ids: for each, [P_i] int32, from the template's first token to the start of the assistant's turn.
        dropped: number of problems left out because their prompts are over the limit.
        with_control_tokens: number of the problems asked for, kept or not, whose own text holds a control token.
    """

    problems: list[Problem]
    token_ids: list[np.ndarray]
    dropped: int
    with_control_tokens: int

    def select(self, places: slice) -> EncodedPrompts:
        """The problems at these places, and their prompts."""
        return self._replace(problems=self.problems[places], token_ids=self.token_ids[places])


def join_prompts(parts: Sequence[EncodedPrompts]) -> EncodedPrompts:
    """Several sets of prompts as one, in order."""
    return EncodedPrompts(
        problems=[problem for part in parts for problem in part.problems],
        token_ids=[ids for part in parts for ids in part.token_ids],
        dropped=sum(part.dropped for part in parts),
        with_control_tokens=sum(part.with_control_tokens for part in parts),
    )


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_suffix: str = "",
    max_prompt_tokens: int,
    chat_template_kwargs: str = "",
) -> EncodedPrompts:
    r"""Turn problems into prompts. Prompts over the length limit are left out, counted and logged.

    Problems whose own text holds a control token (`<|im_end|>`) are kept, counted and logged: the model reads it as the
    chat's own.

    A problem that says how its answer is to be written (DAPO-Math-17K: on the last line, after "Answer:") gets no
    suffix that says so too; how many, is logged.

    The ids encode the rendered template, which contains its special tokens: the tokenizer adds no others.

    Args:
        problems: the problems to ask.
        tokenizer: with a chat template and an end-of-sequence token.
        prompt_suffix: appended to the user's message unchanged; include a line break if you want one.
        max_prompt_tokens: longest prompt kept, template included, at least 1.
        chat_template_kwargs: variables of the template as a JSON object, `{"enable_thinking": false}` say.

    Raises:
        UserError: if the tokenizer is refused (`check_tokenizer`), the template does not know one of its variables or
            can't render a problem's messages, the limit is below 1, or it drops every problem.
    """
    if max_prompt_tokens < 1:
        raise UserError(f"max_prompt_tokens = {max_prompt_tokens}: must be at least 1")
    check_tokenizer(tokenizer)
    variables = template_variables(chat_template_kwargs, tokenizer)
    texts = []
    instructed = 0
    for problem in problems:
        instructed += bool(prompt_suffix) and with_suffix(problem, prompt_suffix) == problem.prompt
        what = f"problem {problem.index} of {problem.source}"
        messages = chat_messages(problem, prompt_suffix)
        texts.append(render_checked(tokenizer, messages, "the chat template", what, variables, problem.tools))
    with_control_tokens = _count_control_tokens(problems, tokenizer)
    if instructed:
        _LOG.warning(
            "%d of %d prompts say themselves how to write the answer, and get no prompt_suffix", instructed, len(texts)
        )
    encoded = encode_texts(tokenizer, texts, "the prompts")
    fits = [len(ids) <= max_prompt_tokens for ids in encoded]
    if dropped := fits.count(False):
        _LOG.warning(
            "%d of %d prompts are over max_prompt_tokens = %d (the longest has %d) and left out",
            *(dropped, len(fits), max_prompt_tokens, max(map(len, encoded))),
        )
        if dropped == len(fits):
            raise UserError(
                f"max_prompt_tokens = {max_prompt_tokens} leaves no prompt: the shortest has {min(map(len, encoded))}"
            )
    return EncodedPrompts(
        problems=[problem for problem, fit in zip(problems, fits, strict=True) if fit],
        token_ids=[np.asarray(ids, dtype=np.int32) for ids, fit in zip(encoded, fits, strict=True) if fit],
        dropped=dropped,
        with_control_tokens=with_control_tokens,
    )


def _count_control_tokens(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of problems whose own text holds a control token; logged with the tokens and the first problem."""
    added = tokenizer.added_tokens_decoder.values()
    # Some models do not call theirs special (<think>); other added tokens are plain text, such as runs of spaces.
    names = [token.content for token in added if token.special or re.fullmatch(r"<\S+>", token.content)]
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
    found = [(problem, set(pattern.findall("\0".join(problem_texts(problem))))) for problem in problems]
    counts = Counter(name for _, held in found for name in held)
    if holding := [problem for problem, held in found if held]:
        _LOG.warning(
            "%d of %d problems hold control tokens in their text, which the model reads as the chat's own: %s; the "
            "first is problem %d of %s",
            *(len(holding), len(found), ", ".join(f"{name} in {count}" for name, count in counts.most_common(5))),
            *(holding[0].index, holding[0].source),
        )
    return len(holding)
