"""Prompts as token ids: the tokenizer's own chat template, a suffix, a length limit."""

import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dcmdp_jax.data import chat
from dcmdp_jax.data.conversations import ConversationEncoder
from dcmdp_jax.data.tokenizer import check_tokenizer, control_tokens, encode_texts
from dcmdp_jax.errors import UserError
from dcmdp_jax.rewards.protocol import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)


class EncodedPrompts(NamedTuple):
    """The problems whose prompts fit, and their prompts.

    Attributes:
        problems: the problems kept, in order.
        token_ids: for each, [P_i] int32, from the template's first token to the start of the
            assistant's turn.
        dropped: number of problems left out because their prompts are over the limit.
        with_control_tokens: number of the problems asked for, kept or not, whose own text holds a
            control token.
        targets: for each conversation to learn from, [P_i] bool, the tokens that are learned; empty
            for prompts.
    """

    problems: list[Problem]
    token_ids: list[np.ndarray]
    dropped: int
    with_control_tokens: int
    targets: Sequence[np.ndarray] = ()

    def select(self, places: slice | Sequence[int]) -> "EncodedPrompts":
        """The problems at these places, their prompts and targets."""
        chosen = range(len(self.problems))[places] if isinstance(places, slice) else places
        return self._replace(
            problems=[self.problems[i] for i in chosen],
            token_ids=[self.token_ids[i] for i in chosen],
            targets=[self.targets[i] for i in chosen] if self.targets else (),
        )


def join_prompts(parts: Sequence[EncodedPrompts]) -> EncodedPrompts:
    """Several sets of prompts as one, in order."""
    return EncodedPrompts(
        problems=[problem for part in parts for problem in part.problems],
        token_ids=[ids for part in parts for ids in part.token_ids],
        dropped=sum(part.dropped for part in parts),
        with_control_tokens=sum(part.with_control_tokens for part in parts),
        targets=[targets for part in parts for targets in part.targets],
    )


def digest_of(prompts: EncodedPrompts) -> str:
    """Number of problems, and a digest of prompts, answers and columns in their order, and of what
    is learned.
    """

    def parts() -> Iterable[bytes]:
        for ids, problem in zip(prompts.token_ids, prompts.problems, strict=True):
            yield ids.tobytes()
            yield json.dumps(
                [problem.answer, problem.columns], sort_keys=True, default=str
            ).encode()
        for targets in prompts.targets:
            yield targets.tobytes()

    return f"{len(prompts.problems)}, {digest(parts())}"


def digest(parts: Iterable[bytes]) -> str:
    """Digest of parts, of their lengths too."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()[:16]


def encode_prompts(
    problems: Sequence[Problem],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    prompt_suffix: str = "",
    max_prompt_tokens: int,
    chat_template_kwargs: str = "",
    learned: bool = False,
    stop_token_ids: Sequence[int] = (),
) -> EncodedPrompts:
    r"""Turn problems into prompts. Prompts over the length limit are left out, counted and logged.

    Problems whose own text holds a control token (`<|im_end|>`) are kept, counted and logged: the
    model reads it as the chat's own.

    A problem that says how its answer is to be written (DAPO-Math-17K: on the last line, after
    "Answer:") gets no suffix that says so too; how many, is logged.

    The ids encode the rendered template, which contains its special tokens: the tokenizer adds no
    others.

    With `learned` they are whole conversations. A completion that is text follows its prompt as a
    policy would sample it, one end token behind it; these are the targets. Of messages the targets
    are the assistant's turns: what the template's `{% generation %}` marks, or without marks what
    the chat up to a turn has more than the chat before it with its generation prompt, both of which
    must be prefixes of the whole, token by token. Space behind a turn is no target, and the end
    token follows the last one where the template writes no special token there. A turn must hold
    the message's thought, content and calls (`conversations`).

    Args:
        problems: the problems to ask.
        tokenizer: with a chat template and an end-of-sequence token.
        prompt_suffix: appended to the user's message unchanged; include a line break if you want
            one.
        max_prompt_tokens: longest prompt kept, template included, at least 1; with `learned`
            longest conversation.
        chat_template_kwargs: variables of the template as a JSON object, `{"enable_thinking":
            false}` say.
        learned: the problems have completions, which are learned; the result has `targets`.
        stop_token_ids: tokens at which sampling stops, of which a learned turn ends with one; empty
            for the tokenizer's end token.

    Raises:
        UserError: if the tokenizer is refused (`check_tokenizer`), the template does not know one
            of its variables or can't render a problem's messages, the limit is below 1, or it drops
            every problem.
    """
    if max_prompt_tokens < 1:
        raise UserError(f"max_prompt_tokens = {max_prompt_tokens}: must be at least 1")
    check_tokenizer(tokenizer)
    variables = chat.template_variables(chat_template_kwargs, tokenizer)
    asked = [
        chat.chat_messages(problem, prompt_suffix) if problem.prompt else [] for problem in problems
    ]
    texts = []
    instructed = 0
    for problem, messages in zip(problems, asked, strict=True):
        instructed += (
            bool(prompt_suffix and messages)
            and chat.with_suffix(problem, prompt_suffix) == problem.prompt
        )
        text = ""
        if not problem.completion:
            text = chat.render_checked(
                tokenizer, messages, "the chat template", _name(problem), variables, problem.tools
            )
        texts.append(text)
    with_control_tokens = _count_control_tokens(problems, tokenizer, learned=learned)
    if instructed:
        _LOG.warning(
            "%d of %d prompts say themselves how to write the answer, and get no prompt_suffix",
            instructed,
            len(texts),
        )
    encoded = encode_texts(tokenizer, texts, "the prompts")
    targets = []
    sum_of = "max_prompt_tokens + max_completion_tokens"
    nouns, limit = ("conversations", sum_of) if learned else ("prompts", "max_prompt_tokens")
    if learned:
        encoder = ConversationEncoder(
            tokenizer, variables, stop_token_ids or [tokenizer.eos_token_id]
        )
        prompts = encoded
        encoded = []
        for problem, messages, prompt in zip(problems, asked, prompts, strict=True):
            ids, learned_tokens = encoder.encode(problem, messages, prompt)
            encoded.append(ids)
            targets.append(learned_tokens)
        encoder.warn_if_never_stopping(encoded, targets)
    fits = [len(ids) <= max_prompt_tokens for ids in encoded]
    if dropped := fits.count(False):
        lengths = [*map(len, encoded)]
        _LOG.warning(
            "%d of %d %s are over %s = %d (the longest has %d) and left out",
            *(dropped, len(fits), nouns, limit, max_prompt_tokens, max(lengths)),
        )
        if dropped == len(fits):
            raise UserError(
                f"{limit} = {max_prompt_tokens} leaves no {nouns[:-1]}: the shortest has "
                f"{min(lengths)}"
            )
    return EncodedPrompts(
        problems=[*itertools.compress(problems, fits)],
        token_ids=[np.asarray(ids, dtype=np.int32) for ids in itertools.compress(encoded, fits)],
        dropped=dropped,
        with_control_tokens=with_control_tokens,
        targets=[*itertools.compress(targets, fits)],
    )


def _name(problem: Problem) -> str:
    return f"problem {problem.index} of {problem.source}"


def _count_control_tokens(
    problems: Sequence[Problem], tokenizer: "PreTrainedTokenizerBase", *, learned: bool
) -> int:
    """The number of problems whose own text holds a control token; logged with the tokens and the
    first problem.
    """
    pattern = control_tokens(tokenizer)
    texts = [[*chat.problem_texts(problem), problem.solution * learned] for problem in problems]
    found = [
        (problem, set(pattern.findall("\0".join(own))))
        for problem, own in zip(problems, texts, strict=True)
    ]
    counts = Counter(name for _, held in found for name in held)
    if holding := [problem for problem, held in found if held]:
        _LOG.warning(
            "%d of %d problems hold control tokens in their text, which the model reads as the "
            "chat's own: %s; the first is %s",
            *(
                len(holding),
                len(found),
                ", ".join(f"{name} in {count}" for name, count in counts.most_common(5)),
            ),
            _name(holding[0]),
        )
    return len(holding)
