"""Chats as text by the tokenizer's own chat template, and the calls of tools in a turn."""

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dcmdp_jax.data.tool_calls import CALL_FORMATS, Schema, argument_schemas, find_calls
from dcmdp_jax.errors import UserError, one_line, shorten, shorten_name
from dcmdp_jax.inputs import json_object
from dcmdp_jax.rewards.protocol import Message, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# DAPO-Math-17K (`Answer: $Answer`, `after "Answer:"`), its variants (`Answer:
# \boxed{<final_answer>}`), and an empty or named box (`\boxed{}`, `\boxed{answer}`, `within
# \boxed`). A box with anything else in it is part of a problem.
_ANSWER_FORM = re.compile(
    r"""\banswer\s?:\s?(?:\$answer\b|\\boxed\{|["'”’])|\\boxed(?![a-z])(?!\s?[{\d])"""
    r"""|\\boxed\{\s?(?:\.\.\.|…|<[^<>{}]{0,40}+>"""
    r"""|[$\[]?(?:your |the )?(?:final[ _]?)?answer[$\]]?)?\s?\}""",
    re.IGNORECASE,
)
THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
# Most characters of a template's own text; published ones have some thousands.
_TEMPLATE_CHARACTERS = 1_000_000
# Arguments of apply_chat_template, which a template's variables share.
_OURS = """
    messages conversation tokenize add_generation_prompt chat_template tools documents
    continue_final_message return_dict return_tensors padding truncation max_length strftime_now
""".split()
QUESTION = ({"role": "user", "content": "What is 2+3?"},)
# A call to try a format with, whose argument gets its type from the tool.
_CALL = {"name": "double", "arguments": {"number": 2}}
CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": _CALL}],
}
"""A turn with that call."""
_NUMBER = {"type": "object", "properties": {"number": {"type": "integer", "description": "?"}}}
_TOOL = {
    "type": "function",
    "function": {"name": "double", "description": "?", "parameters": _NUMBER},
}


def render_checked(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    noun: str,
    variables: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[Schema] = (),
    *,
    template: str = "the chat template",
) -> str:
    """The text of a chat up to the assistant's turn, checked by `check_written`.

    A chat that ends with the assistant's message goes on in it. A template may leave out an
    assistant's earlier thoughts, so the assistant's messages are not looked for.
    """
    try:
        text = render_chat(tokenizer, messages, tools, **variables)
    except Exception as error:  # jinja2's errors, and any that a template raises
        raise UserError(
            f"{template} can't render {noun}: {shorten_name(one_line(error))}"
        ) from error
    check_written(text, tokenizer, messages, noun, variables, tools, template=template)
    return text


def check_written(
    text: str,
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    noun: str,
    variables: Mapping[str, Any],
    tools: Sequence[Schema],
    *,
    template: str = "the chat template",
    schemas: bool = False,
) -> None:
    """Refuse a chat's text that leaves out a tool, or a message that is not the assistant's.

    A tool's name must stand in the chat without its calls; with `schemas` its parameters too, or
    the description of a tool without parameters.
    """
    for message in messages:
        if message["role"] != "assistant" and not is_written(message["content"].strip(), text):
            raise UserError(
                f"{template} leaves out the text of the {shorten_name(message['role'])} in "
                f"{noun}; it must write each message's content: compare chat_template.jinja with "
                "the model's own"
            )
    if tools:
        # Calls have a tool's name too, so its description is looked for in a chat without them.
        questions = [
            message for message in messages if message["role"] in ("system", "developer", "user")
        ]
        missing = _undescribed(tokenizer, questions, tools, variables, schemas=schemas)
        if missing and _undescribed(tokenizer, QUESTION, tools, variables, schemas=schemas):
            raise UserError(
                f"{template} leaves out {missing} in {noun}; use a template that describes tools, "
                "or name the column something else than tools"
            )


def _undescribed(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[Schema],
    variables: Mapping[str, Any],
    *,
    schemas: bool,
) -> str:
    """The first part of the tools that a template does not write; see `check_written`."""
    text = ""
    # A template may want the turns that are left out.
    with contextlib.suppress(Exception):
        text = write_chat(tokenizer, messages, tools=tools, add_generation_prompt=True, **variables)
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            function = {}
        name = function.get("name")
        if not isinstance(name, str) or not is_written(name, text):
            return f"the tool {shorten(name)}"
        if not schemas:
            continue
        parameters = argument_schemas(function)
        description = str(function.get("description") or "").strip()
        if not parameters and not is_written(description, text):
            return f"the description of the tool {shorten(name)}"
        # A description has the names of parameters as words.
        text_beside = text.replace(description, "") if description else text
        for parameter in parameters:
            if not is_written(parameter, text_beside):
                return f"the parameter {shorten(parameter)} of the tool {shorten(name)}"
    return ""


def is_written(content: str, text: str) -> bool:
    """Whether a template's text has a content, or its JSON, as Llama's has a tool result's."""
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[Schema] = (),
    *,
    generation: bool = True,
    **variables: Any,
) -> str:
    """A chat as its template writes it, up to the assistant's turn, or within a last one.

    A last message of the assistant's follows the generation prompt as it is: templates write an
    empty thought before an answer, or drop one from it. A thought that the generation prompt
    begins, or leaves empty, gives way to the message's.

    Raises:
        Exception: any exception of the template; ValueError if it writes far more than the chat.
    """
    write = functools.partial(write_chat, tokenizer, tools=tools, **variables)
    *earlier, last = messages
    if last["role"] != "assistant":
        return write(messages, add_generation_prompt=generation)
    if not earlier:
        return write(messages, continue_final_message=True)

    content = last["content"]
    prompt = write(earlier, add_generation_prompt=True)
    text = write(messages)
    # What the template puts between the two, if it is space.
    space = ""
    if text.startswith(prompt):
        between, _, _ = text[len(prompt) :].partition(content.strip() or "\0")
        if not between.strip():
            space = between
    if content.startswith("<think>"):
        prompt = THOUGHT.sub("", prompt)
    return prompt + space + content


def write_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] = (),
    **options: Any,
) -> Any:
    """Messages as the template writes them, by `apply_chat_template` with these options.

    Raises:
        Exception: any exception of the template; ValueError if it writes far more than the chat.
    """
    message_dicts = [dict(message) for message in messages]
    tool_dicts = [dict(tool) for tool in tools] or None
    limit = _TEMPLATE_CHARACTERS + 8 * len(str((message_dicts, tool_dicts)))
    options.setdefault("tokenize", False)
    text = tokenizer.apply_chat_template(message_dicts, tools=tool_dicts, **options)
    if len(text) > limit:
        raise ValueError(
            f"it writes {len(text):,} characters, at most {limit:,} are taken for this chat"
        )
    return text


def chat_messages(problem: Problem, prompt_suffix: str) -> list[Message]:
    """The chat of a problem, with the suffix at the end of the user's last message."""
    question = {"role": "user", "content": with_suffix(problem, prompt_suffix)}
    if not problem.messages:
        return [question]
    messages = list(problem.messages)
    for position in reversed(range(len(messages))):
        if messages[position]["role"] == "user":
            messages[position] = {**messages[position], **question}
            break
    return messages


def problem_name(problem: Problem) -> str:
    """A problem by its row, for messages."""
    return f"problem {problem.index} of {problem.source}"


def problem_texts(problem: Problem) -> list[str]:
    """The problem's own texts."""
    messages = *problem.messages, *problem.completion
    return [problem.prompt, *(message["content"] for message in messages)]


def with_suffix(problem: Problem, prompt_suffix: str) -> str:
    """The problem and the suffix, unless both say how the answer is to be written.

    An example's "Answer: 4", or a box in a puzzle, does not say so.
    """
    if _ANSWER_FORM.search(prompt_suffix) and any(map(_ANSWER_FORM.search, problem_texts(problem))):
        return problem.prompt
    return problem.prompt + prompt_suffix


def template_variables(text: str, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """`chat_template_kwargs` as a dict, without variables that the template does not know.

    It would ignore them, so these are refused.
    """
    variables = json_object(text, "chat_template_kwargs")
    for name in variables:
        if name in _OURS:
            reason = "is set by encode_prompts"
        elif not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            reason = "is no variable of the tokenizer's chat template"
        else:
            continue
        raise UserError(f"chat_template_kwargs: {shorten(name)} {reason}; leave it out")

    def render(values: Mapping[str, Any]) -> str:
        return render_checked(tokenizer, QUESTION, "a question", values)

    booleans = {"false": False, "true": True, "0": False, "1": True}
    for name, value in variables.items():
        boolean = booleans.get(str(value).lower(), value)
        if render(variables) != render({**variables, name: boolean}):
            raise UserError(
                f"chat_template_kwargs: {name!r} is {json.dumps(value)}, which this template does "
                f"not take for {json.dumps(boolean)}; write {json.dumps(boolean)}"
            )
    return variables


class CallFormat(NamedTuple):
    """How a chat template writes calls of tools.

    Attributes:
        template: one of `CALL_FORMATS`, or a `response_template` of transformers.
        prefix: what a turn of the assistant begins with, such as a thought.
    """

    template: Mapping[str, Any]
    prefix: str = ""

    def find(self, text: str, tools: Sequence[Schema]) -> tuple[list[dict[str, Any]], list[str]]:
        """Find the calls in a turn, each with `name` and `arguments`, typed by the tools' schemas.

        Returns:
            The calls, and what is wrong with unreadable ones; see `find_calls`.
        """
        if "syntax" in self.template:
            if self.prefix.rstrip().endswith("<think>"):
                text = f"<think>{text}"
            return find_calls(text, tools, self.template)
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(
                text,
                dict(self.template),
                prefix=self.prefix,
                tools=list(tools),
            )
            calls = []
            for call in message.get("tool_calls", ()):
                function = call["function"]
                calls.append({field: function[field] for field in _CALL})
        except Exception as error:  # the parser's are of many kinds
            return [], [one_line(error)]
        for call in calls:
            if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
                problem = (
                    "a call needs the tool's name, which is text, and its arguments, which are an "
                    "object"
                )
                return [], [problem]
        return calls, []


def named_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Name and arguments of a message's call, also where they are in `function` or JSON text."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments or {}}


def with_arguments_as_text(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls of a message, their arguments as JSON text."""
    written = []
    for call in calls:
        text = json.dumps(named_call(call)["arguments"], ensure_ascii=False)
        if "function" in call:
            function = {**call["function"], "arguments": text}
            written.append({**call, "function": function})
        else:
            written.append({**call, "arguments": text})
    return written


def find_call_format(
    tokenizer: "PreTrainedTokenizerBase",
    variables: Mapping[str, Any],
    *,
    arguments_as_text: bool = False,
) -> CallFormat:
    """The format in which the chat template writes calls, known or the tokenizer's own.

    Args:
        tokenizer: with a chat template.
        variables: variables of the template.
        arguments_as_text: give the template a call's arguments as JSON text, in place of an object.

    Raises:
        UserError: in one line, if none reads the call that the template writes.
    """
    write = functools.partial(write_chat, tokenizer, tools=[_TOOL], **variables)
    called = CALLED
    if arguments_as_text:
        called = {**CALLED, "tool_calls": with_arguments_as_text(CALLED["tool_calls"])}
    templates = [getattr(tokenizer, "response_template", None), *CALL_FORMATS.values()]
    with contextlib.suppress(Exception):  # any that a template raises
        question = write(QUESTION)
        prompt = write(QUESTION, add_generation_prompt=True)
        turn = write([*QUESTION, called]).removeprefix(THOUGHT.sub("", prompt))
        ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        for template in filter(None, templates):
            with contextlib.suppress(Exception):
                if template.get("open", "") not in text:
                    continue
                calls, _ = CallFormat(template).find(text, [_TOOL])
                # The last one: where the prompt is no prefix, its description of the tool may look
                # like a call.
                if calls[-1:] == [_CALL]:
                    return CallFormat(template, prompt.removeprefix(question))
    raise UserError(
        "the chat template writes calls of tools in no format that is known: "
        f"{', '.join(CALL_FORMATS)}, or the tokenizer's own response_template, by transformers "
        "5.16 or newer"
    )
