"""Conversations to learn from: token ids, the targets among them, and a check of the targets."""

import bisect
import contextlib
import functools
import itertools
import json
import logging
import os.path
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dcmdp_jax.data import chat
from dcmdp_jax.data.tokenizer import encode_texts, token_offsets
from dcmdp_jax.errors import UserError, one_line, shorten_name
from dcmdp_jax.rewards.protocol import LEARNED, Message, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Encoded = tuple[list[int], np.ndarray]
"""Token ids, and [T] bool, which of them are learned."""

_LOG = logging.getLogger(__name__)
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THOUGHT_FIELDS = "reasoning_content", "reasoning", "thinking"
_THOUGHT_TAGS = re.compile(r"</?think(?:ing)?>")
# An answer that no template writes by itself.
_ANSWER = "It is five."
# Of a longer chat so many turns, spread evenly, are compared with the chats that end with them:
# each comparison takes as long as the chat, and all of them would take its square.
_COMPARED_TURNS = 8
# Tokenizers that were warned about: a run encodes several sets of conversations.
_NEVER_STOPPING: "weakref.WeakSet[PreTrainedTokenizerBase]" = weakref.WeakSet()


class ConversationEncoder:
    """Encodes conversations with one tokenizer and its chat template.

    Args:
        tokenizer: with a chat template.
        variables: variables of the template.
        stop_token_ids: tokens at which sampling stops.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        variables: Mapping[str, Any],
        stop_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = variables
        self._stop_token_ids = set(stop_token_ids)
        added = tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special}
        self._end_token_ids = self._stop_token_ids | special | set(tokenizer.all_special_ids)
        self._end_texts = [
            tokenizer.decode([token_id]) for token_id in self._stop_token_ids | special
        ]
        self._has_marks = bool(_MARKS.search(str(tokenizer.chat_template)))

    def encode(
        self,
        problem: Problem,
        prompt_messages: Sequence[Message],
        prompt_ids: Sequence[int],
    ) -> _Encoded:
        """Encode a problem with its completion.

        Args:
            problem: has a completion, messages or text.
            prompt_messages: the prompt; empty where the completion is the whole chat.
            prompt_ids: the prompt, for a completion that is text.

        Returns:
            The token ids, and [P] bool, the targets among them, never the first.

        Raises:
            UserError: in one line with the row's number and field, if the template or the tokenizer
                does not write what is learned as the row has it.
        """
        if not problem.completion:
            return self._encode_text(problem.solution, prompt_ids)
        chat_to_learn = _Chat(self, problem, prompt_messages)
        try:
            ids, targets = chat_to_learn.encode()
        except UserError:
            raise
        except Exception as error:  # any that a template raises
            raise UserError(
                f"the chat template can't render {chat_to_learn.name}: "
                f"{shorten_name(one_line(error))}"
            ) from error
        if not targets.any():
            raise UserError(
                f"the chat template marks nothing of the assistant's turns in {chat_to_learn.name}"
            )
        return ids, targets

    def _encode_text(self, text: str, prompt_ids: Sequence[int]) -> _Encoded:
        """A completion as a policy would sample it, with one end token."""
        if any(text.rstrip().endswith(end) for end in self._end_texts):
            text = text.rstrip()
        completion = encode_texts(self._tokenizer, [text], "the completions")[0]
        if not completion or completion[-1] not in self._end_token_ids:
            completion = [*completion, self._tokenizer.eos_token_id]
        ids = [*prompt_ids, *completion]
        return ids, np.arange(len(ids)) >= len(prompt_ids)

    def warn_if_never_stopping(
        self, token_ids: Sequence[np.ndarray], targets: Sequence[np.ndarray]
    ) -> None:
        """Warn once if no token at which sampling stops is learned."""
        for ids, learned in zip(token_ids, targets, strict=True):
            if self._stop_token_ids & set(np.asarray(ids)[learned].tolist()):
                return
        if self._tokenizer in _NEVER_STOPPING:
            return
        _NEVER_STOPPING.add(self._tokenizer)
        names = ", ".join(
            repr(self._tokenizer.decode([token_id])) for token_id in sorted(self._stop_token_ids)
        )
        if self._has_marks:
            reason = (
                "the {% generation %} marks of the chat template leave it out: move {% "
                "endgeneration %} behind it"
            )
        else:
            reason = (
                "the chat template ends a turn otherwise: name its token as eos_token_id in "
                "generation_config.json"
            )
        _LOG.warning(
            "stopping is never learned: no target is a token at which sampling stops (%s); %s",
            names,
            reason,
        )

    @functools.cached_property
    def call_format(self) -> tuple[bool, chat.CallFormat | None]:
        """Whether the template takes a call's arguments as JSON text, and its format of calls.

        Templates take an object, or text that they write as it is. The format is None if it is not
        known.
        """
        for as_text in (False, True):
            with contextlib.suppress(UserError):
                call_format = chat.find_call_format(
                    self._tokenizer, self._variables, arguments_as_text=as_text
                )
                return as_text, chat.CallFormat(call_format.template)
        try:
            self.write([*chat.QUESTION, chat.CALLED])
        except Exception:  # any that a template raises: it joins the arguments to its text
            return True, None
        return False, None

    @functools.cached_property
    def frame(self) -> tuple[str, str]:
        """The template's text before and behind an assistant's words; empty if unknown.

        The text before a turn is that of the generation prompt as far as both agree, without a
        thought.
        """
        question = self.write(chat.QUESTION)
        prompt = self.write(chat.QUESTION, add_generation_prompt=True)
        written = self.write([*chat.QUESTION, {"role": "assistant", "content": _ANSWER}])
        if not written.startswith(question) or not prompt.startswith(question):
            return "", ""
        header, has_answer, tail = written[len(question) :].partition(_ANSWER)
        if not has_answer:
            return "", ""
        return os.path.commonprefix([header, prompt[len(question) :]]), tail

    def write(self, messages: Sequence[Message], tools: Sequence[Any] = (), **options: Any) -> Any:
        """Messages as the template writes them."""
        return chat.write_chat(self._tokenizer, messages, tools=tools, **self._variables, **options)


class _Chat:
    """One conversation, as the template writes it."""

    def __init__(
        self,
        encoder: ConversationEncoder,
        problem: Problem,
        prompt_messages: Sequence[Message],
    ) -> None:
        self._encoder = encoder
        self._tokenizer = encoder._tokenizer
        self._problem = problem
        self._prompt_size = len(prompt_messages)
        self.name = chat.problem_name(problem)
        messages = (*prompt_messages, *problem.completion)
        self._messages = [self._prepared(message) for message in messages]
        # Numbers of messages: all of the assistant's, those behind the prompt, those learned.
        self._assistants = [
            i for i, message in enumerate(messages) if message["role"] == "assistant"
        ]
        self._turns = [turn for turn in self._assistants if turn >= self._prompt_size]
        self._learned_turns = [turn for turn in self._turns if messages[turn].get(LEARNED, True)]

    def _prepared(self, message: Message) -> Message:
        """A message as the template takes it: without an end token, calls in their form."""
        message = {field: value for field, value in message.items() if field != LEARNED}
        if message["role"] != "assistant":
            return message
        content = message["content"]
        for end in self._encoder._end_texts:
            if content.rstrip().endswith(end):
                message["content"] = content.rstrip().removesuffix(end)
        if message.get("tool_calls"):
            as_text, _ = self._encoder.call_format
            if as_text:
                message["tool_calls"] = chat.with_arguments_as_text(message["tool_calls"])
        return message

    def encode(self) -> _Encoded:
        """See `ConversationEncoder.encode`."""
        text = self._write(self._messages)
        chat.check_written(
            text,
            self._tokenizer,
            self._messages,
            noun=self.name,
            variables=self._encoder._variables,
            tools=self._problem.tools,
            schemas=True,
        )
        if self._encoder._has_marks:
            ids, targets, turn_texts = self._marked(text)
        else:
            ids, targets, turn_texts = self._unmarked(text)
        for turn, turn_text in turn_texts.items():
            field = self._changed_field(self._messages[turn], turn_text)
            if field:
                raise UserError(self._left_out(field, turn))
        return ids, targets

    def _left_out(self, field: str, turn: int) -> str:
        return (
            f"the chat template leaves out or changes {field} of {self._place(turn)} in "
            f"{self.name}, which then is not learned; use a template that writes it, or take it "
            "out of the row"
        )

    def _write(self, messages: Sequence[Message], **options: Any) -> Any:
        return self._encoder.write(messages, self._problem.tools, **options)

    def _place(self, turn: int) -> str:
        """The message in its field of the row."""
        if self._prompt_size == 0:
            return f"messages[{turn}]"
        return f"completion[{turn - self._prompt_size}]"

    # Templates with marks.

    def _marked(self, text: str) -> tuple[list[int], np.ndarray, dict[int, str]]:
        """Ids, targets, and the marked text of each learned turn."""
        encoded = self._write(
            self._messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = encoded["input_ids"]
        marked = np.array(encoded["assistant_masks"], bool)
        offsets = token_offsets(self._tokenizer, text, self.name)
        starts = [start for start, _ in offsets]
        turn_starts = self._turn_starts(text)

        targets = np.zeros(len(ids), bool)
        turn_texts = {}
        spans = itertools.pairwise([*turn_starts, len(text)])
        for turn, (start, end) in zip(self._turns, spans, strict=True):
            if turn not in self._learned_turns:
                continue
            first = bisect.bisect_left(starts, start)
            last = bisect.bisect_left(starts, end)
            tokens = first + np.flatnonzero(marked[first:last])
            targets[tokens] = True
            turn_texts[turn] = "".join(text[slice(*offsets[token])] for token in tokens)
        targets[0] = False
        return ids, targets, turn_texts

    def _turn_starts(self, text: str) -> list[int]:
        """Where the words of each turn behind the prompt begin, in characters."""
        starts = self._header_ends(text)
        if starts:
            return [starts[turn] for turn in self._turns]
        return [len(os.path.commonprefix([self._text_before(turn), text])) for turn in self._turns]

    def _header_ends(self, text: str) -> dict[int, int]:
        """Where the header of each message of the assistant's ends; empty if that is unclear."""
        header, _ = self._encoder.frame
        if not header or text.count(header) != len(self._assistants):
            return {}
        ends = [match.end() for match in re.finditer(re.escape(header), text)]
        return dict(zip(self._assistants, ends, strict=True))

    # Templates without marks.

    def _unmarked(self, text: str) -> tuple[list[int], np.ndarray, dict[int, str]]:
        """Ids, targets, and the text of each learned turn.

        The chat before a turn with its generation prompt, and the chat that ends with the turn,
        must be prefixes of the whole, token by token. Of a long chat some turns are compared so,
        and the others are found between the texts that the template writes around a turn.
        """
        learned = self._learned_turns
        compared = learned
        if len(learned) > _COMPARED_TURNS:
            spread = np.linspace(0, len(learned) - 1, _COMPARED_TURNS).round().astype(int)
            compared = [learned[i] for i in spread]
        ids, spans, turn_texts = self._compared(text, compared)
        if len(compared) < len(learned):
            limits = self._turn_limits(text, turn_texts)
            if limits is None:
                # Words of the chat look like the template's.
                ids, spans, turn_texts = self._compared(text, learned)
            else:
                offsets = token_offsets(self._tokenizer, text, self.name)
                for turn, (start, end) in limits.items():
                    turn_texts[turn] = text[start:end]
                    spans.setdefault(turn, self._token_span(offsets, start, end))

        targets = np.zeros(len(ids), bool)
        last = 0
        for first, last in spans.values():
            # Space behind a turn is no part of it.
            while last > first and not self._tokenizer.decode(ids[last - 1 : last]).strip():
                last -= 1
            targets[max(1, first) : last] = True
        ends_chat = learned[-1:] == [len(self._messages) - 1]
        if ends_chat and ids[last - 1] not in self._encoder._end_token_ids:
            ids = [*ids[:last], self._tokenizer.eos_token_id]
            targets = np.append(targets[:last], True)
        return ids, targets, turn_texts

    def _compared(
        self, text: str, turns: Sequence[int]
    ) -> tuple[list[int], dict[int, tuple[int, int]], dict[int, str]]:
        """Return the ids of the chat, and the span of tokens and the text of each turn."""
        texts_before = [self._text_before(turn) for turn in turns]
        texts_after = [self._write(self._messages[: turn + 1]) for turn in turns]
        ids, *prefixes = encode_texts(
            self._tokenizer, [text, *texts_before, *texts_after], self.name
        )

        spans = {}
        turn_texts = {}
        for i, turn in enumerate(turns):
            ids_before = prefixes[i]
            ids_after = prefixes[i + len(turns)]
            if ids[: len(ids_before)] != ids_before or ids[: len(ids_after)] != ids_after:
                raise UserError(self._why_no_prefix(text, turn, texts_before[i], texts_after[i]))
            spans[turn] = len(ids_before), len(ids_after)
            turn_texts[turn] = text[len(texts_before[i]) : len(texts_after[i])]
        return ids, spans, turn_texts

    def _text_before(self, turn: int) -> str:
        if turn:
            return self._write(self._messages[:turn], add_generation_prompt=True)
        # Many templates can't write a chat of nothing: here the words follow the header.
        question = self._encoder.write(chat.QUESTION)
        header = self._encoder.write(chat.QUESTION, add_generation_prompt=True)
        return "".join(self._write(self._messages).partition(header.removeprefix(question))[:2])

    def _why_no_prefix(self, text: str, turn: int, before: str, after: str) -> str:
        message = self._messages[turn]
        has_thought = "<think" in message["content"] or any(map(message.get, _THOUGHT_FIELDS))
        if chat.THOUGHT.search(before) and has_thought:
            field = self._changed_field(message, text[len(os.path.commonprefix([before, text])) :])
            if field:
                return self._left_out(field, turn)
        elif chat.THOUGHT.search(before):
            advice = f"give it one as {_THOUGHT_FIELDS[0]}"
            if re.search(r"\benable_thinking\b", str(self._tokenizer.chat_template)):
                advice = f'set {{"enable_thinking": false}} in chat_template_kwargs, or {advice}'
            return (
                "the generation prompt of the chat template begins a thought, and "
                f"{self._place(turn)} of {self.name} has none; {advice}"
            )
        if text.startswith(before) and text.startswith(after):
            return (
                f"the tokenizer joins space around a turn of {self.name} to the template's; "
                "strip that turn"
            )
        return (
            f"the chat template writes the start of {self.name} otherwise once the chat goes on; "
            "mark the assistant's turns in it with {% generation %}, or give each turn a row of "
            "its own"
        )

    def _turn_limits(
        self, text: str, turn_texts: Mapping[int, str]
    ) -> dict[int, tuple[int, int]] | None:
        """Start and end of each learned turn in characters; None if unknown or not as compared."""
        _, tail = self._encoder.frame
        starts = self._header_ends(text)
        if not starts or not tail:
            return None
        limits = {}
        for turn in self._learned_turns:
            limits[turn] = starts[turn], text.find(tail, starts[turn]) + len(tail)
        for turn, turn_text in turn_texts.items():
            if not text[slice(*limits[turn])].endswith(turn_text) or not turn_text.endswith(tail):
                return None
        # The generation prompt may begin a turn with a text of its own.
        beginnings = {
            text[slice(*limits[turn])].removesuffix(turn_text)
            for turn, turn_text in turn_texts.items()
        }
        if len(beginnings) > 1:
            return None
        [beginning] = beginnings
        if not all(text.startswith(beginning, start) for start, _ in limits.values()):
            return None
        return {turn: (start + len(beginning), end) for turn, (start, end) in limits.items()}

    def _token_span(
        self,
        offsets: Sequence[tuple[int, int]],
        start: int,
        end: int,
    ) -> tuple[int, int]:
        """The first token of a turn and the one behind its last."""
        first = bisect.bisect_left(offsets, start, key=lambda offset: offset[0])
        last = bisect.bisect_left(offsets, end, key=lambda offset: offset[0])
        if offsets[first - 1][1] > start or offsets[last - 1][1] > end:
            raise UserError(
                f"the tokenizer joins space around a turn of {self.name} to the template's; strip "
                "that turn"
            )
        return first, last

    # What is learned, read back.

    def _changed_field(self, message: Message, text: str) -> str | None:
        """The first of a message's thought, content and calls that its turn does not hold."""
        unread = text
        thoughts = set()
        for field in _THOUGHT_FIELDS:
            # Some rows have one thought under two names.
            thought = str(message.get(field) or "").strip()
            if thought and thought not in thoughts:
                thoughts.add(thought)
                _, is_written, unread = unread.partition(thought)
                if not is_written:
                    return field
        for piece in self._content_pieces(message["content"], unread):
            _, is_written, unread = unread.partition(piece)
            if not is_written:
                return "content"
        calls = message.get("tool_calls")
        # Most templates write calls behind the content.
        if calls and not self._holds_calls(unread, calls) and not self._holds_calls(text, calls):
            return "tool_calls"
        if message.get("function_call"):
            return "function_call"
        return None

    def _content_pieces(self, content: str, text: str) -> list[str]:
        """The stripped content, split at thought tags, where templates write their own space."""
        content = content.strip()
        if content and content in text:
            return [content]
        return list(filter(None, map(str.strip, _THOUGHT_TAGS.split(content))))

    def _holds_calls(self, text: str, calls: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a text has these calls, and no others where their format is known."""
        expected = [chat.named_call(call) for call in calls]
        _, call_format = self._encoder.call_format
        if call_format is None:
            # In a format that is not known: names and values as text, in their order.
            for call in expected:
                for word in (call["name"], *_words(call["arguments"])):
                    if word not in text:  # written as JSON
                        word = json.dumps(word, ensure_ascii=False)[1:-1]
                    _, is_written, text = text.partition(word)
                    if not is_written:
                        return False
            return True
        # Without schemas nothing is read as another type than it is written in.
        tools = [{"name": call["name"]} for call in expected]
        if "syntax" not in call_format.template:
            ids = encode_texts(self._tokenizer, [text], self.name)[0]
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
        written, problems = call_format.find(text, tools)
        is_text = call_format.template.get("syntax") == "xml"
        return not problems and _equal(written, expected, is_text=is_text)


def _words(value: Any) -> list[str]:
    """The names and values inside a value as texts to search for, in order.

    An empty text has its quotes: every text holds an empty one.
    """
    words = []
    if isinstance(value, Mapping):
        for name, entry in value.items():
            words += [str(name), *_words(entry)]
        return words
    if isinstance(value, list):
        for entry in value:
            words += _words(entry)
        return words
    if isinstance(value, str) and value:
        return [value]
    return [json.dumps(value)]


def _equal(written: Any, expected: Any, *, is_text: bool) -> bool:
    """Whether values are the same, true and 1 not; with `is_text` also a text of the value."""
    if isinstance(written, Mapping) and isinstance(expected, Mapping):
        if written.keys() != expected.keys():
            return False
        return all(_equal(written[name], expected[name], is_text=is_text) for name in written)
    if isinstance(written, list) and isinstance(expected, list):
        if len(written) != len(expected):
            return False
        pairs = zip(written, expected, strict=True)
        return all(_equal(a, b, is_text=is_text) for a, b in pairs)
    if is_text and isinstance(written, str) and not isinstance(expected, str):
        if written.strip() == str(expected):
            return True
        with contextlib.suppress(ValueError):
            written = json.loads(written)
    elif is_text and isinstance(written, str):
        return written.strip() == expected.strip()
    return written == expected and isinstance(written, bool) == isinstance(expected, bool)
