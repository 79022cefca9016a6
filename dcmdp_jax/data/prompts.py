"""Prompts as token ids: the tokenizer's own chat template, a suffix, a length limit."""

import dataclasses
import hashlib
import itertools
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dcmdp_jax.data import chat
from dcmdp_jax.data.conversations import ConversationEncoder
from dcmdp_jax.data.tokenizer import check_tokenizer, control_tokens, encode_texts
from dcmdp_jax.errors import UserError
from dcmdp_jax.rewards.protocol import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedPrompts:
    """The problems whose prompts fit, and their prompts.

    Attributes:
        problems: the problems, in order.
        token_ids: for each, [P_i] int32, from the template's first token to the start of the
            assistant's turn.
        dropped: number of problems left out because their prompts are over the limit.
        with_control_tokens: number of problems, those left out included, whose own text holds a
            control token.
        targets: for each conversation to learn from, [P_i] bool, the tokens that are learned; empty
            for prompts.
    """

    problems: list[Problem]
    token_ids: list[np.ndarray]
    dropped: int = 0
    with_control_tokens: int = 0
    targets: Sequence[np.ndarray] = ()

    def select(self, places: slice | Sequence[int]) -> "EncodedPrompts":
        """The problems at these places, their prompts and targets."""
        if isinstance(places, slice):
            places = range(len(self.problems))[places]
        targets = ()
        if self.targets:
            targets = [self.targets[i] for i in places]
        return dataclasses.replace(
            self,
            problems=[self.problems[i] for i in places],
            token_ids=[self.token_ids[i] for i in places],
            targets=targets,
        )


def join_prompts(sets: Sequence[EncodedPrompts]) -> EncodedPrompts:
    """Several sets of prompts as one, in order."""
    chain = itertools.chain.from_iterable
    return EncodedPrompts(
        problems=list(chain(prompts.problems for prompts in sets)),
        token_ids=list(chain(prompts.token_ids for prompts in sets)),
        dropped=sum(prompts.dropped for prompts in sets),
        with_control_tokens=sum(prompts.with_control_tokens for prompts in sets),
        targets=list(chain(prompts.targets for prompts in sets)),
    )


def digest_of(prompts: EncodedPrompts) -> str:
    """Number of problems, and a digest of prompts, answers, columns and targets in their order."""

    def blocks() -> Iterable[bytes]:
        for ids, problem in zip(prompts.token_ids, prompts.problems, strict=True):
            content = [problem.answer, problem.columns]
            yield ids.tobytes()
            yield json.dumps(content, sort_keys=True, default=str).encode()
        for targets in prompts.targets:
            yield targets.tobytes()

    return f"{len(prompts.problems)}, {digest(blocks())}"


def digest(blocks: Iterable[bytes]) -> str:
    """Digest of blocks, of their lengths too."""
    sha256 = hashlib.sha256()
    for block in blocks:
        sha256.update(len(block).to_bytes(8, "little") + block)
    return sha256.hexdigest()[:16]


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
    chats = []
    texts = []
    instructed = 0
    for problem in problems:
        messages = chat.chat_messages(problem, prompt_suffix) if problem.prompt else []
        chats.append(messages)
        if prompt_suffix and messages:
            instructed += chat.with_suffix(problem, prompt_suffix) == problem.prompt
        text = ""
        if not problem.completion:
            text = chat.render_checked(
                tokenizer,
                messages,
                chat.problem_name(problem),
                variables,
                problem.tools,
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
    noun = "prompt"
    limit = "max_prompt_tokens"
    if learned:
        noun = "conversation"
        limit = "max_prompt_tokens + max_completion_tokens"
        encoder = ConversationEncoder(
            tokenizer, variables, stop_token_ids or [tokenizer.eos_token_id]
        )
        prompts = encoded
        encoded = []
        for problem, messages, prompt in zip(problems, chats, prompts, strict=True):
            ids, learned_tokens = encoder.encode(problem, messages, prompt)
            encoded.append(ids)
            targets.append(learned_tokens)
        encoder.warn_if_never_stopping(encoded, targets)

    lengths = [len(ids) for ids in encoded]
    fits = [length <= max_prompt_tokens for length in lengths]
    dropped = fits.count(False)
    if dropped:
        _LOG.warning(
            "%d of %d %ss are over %s = %d (the longest has %d) and left out",
            dropped,
            len(fits),
            noun,
            limit,
            max_prompt_tokens,
            max(lengths),
        )
        if dropped == len(fits):
            raise UserError(
                f"{limit} = {max_prompt_tokens} leaves no {noun}: the shortest has {min(lengths)}; "
                "raise it"
            )
    return EncodedPrompts(
        problems=list(itertools.compress(problems, fits)),
        token_ids=[np.asarray(ids, dtype=np.int32) for ids in itertools.compress(encoded, fits)],
        dropped=dropped,
        with_control_tokens=with_control_tokens,
        targets=list(itertools.compress(targets, fits)),
    )


def _count_control_tokens(
    problems: Sequence[Problem], tokenizer: "PreTrainedTokenizerBase", *, learned: bool
) -> int:
    """The number of problems whose own text holds a control token; logged with the tokens."""
    pattern = control_tokens(tokenizer)
    affected = []
    counts = Counter()
    for problem in problems:
        texts = chat.problem_texts(problem)
        if learned:
            texts.append(problem.solution)
        tokens = set(pattern.findall("\0".join(texts)))
        counts.update(tokens)
        if tokens:
            affected.append(problem)
    if affected:
        _LOG.warning(
            "%d of %d problems hold control tokens in their text, which the model reads as the "
            "chat's own: %s; the first is %s",
            len(affected),
            len(problems),
            ", ".join(f"{name} in {count}" for name, count in counts.most_common(5)),
            chat.problem_name(affected[0]),
        )
    return len(affected)
