"""Chats as text by the tokenizer's own chat template: the messages of a problem, and the calls of
tools in a turn.
"""

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from dcmdp_jax.data.tool_calls import CALL_FORMATS as CALL_FORMATS
from dcmdp_jax.data.tool_calls import find_calls
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
    r"""|\\boxed\{\s?(?:\.\.\.|…|<[^<>{}]{0,40}+>|[$\[]?(?:your |the )?(?:final[ _]?)?answer[$\]]?)?\s?\}""",
    re.IGNORECASE,
)
THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
# Of a template's own text; published ones have some thousands.
_TEMPLATE_CHARACTERS = 1_000_000
# Arguments of apply_chat_template, which a template's variables share.
_OURS = (
    "messages conversation tokenize add_generation_prompt chat_template tools documents "
    "continue_final_message return_dict return_tensors padding truncation max_length strftime_now"
).split()
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
    template: str,
    what: str,
    variables: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The text of a chat up to the assistant's turn; refused without each message's text and each
    tool's name.

    A chat that ends with the assistant's message goes on in it. A template may leave out an
    assistant's earlier thoughts, so the assistant's messages are not looked for.
    """
    try:
        text = render_chat(tokenizer, messages, tools, **variables)
    except Exception as error:  # jinja2's errors, and any that a template raises
        raise UserError(
            f"{template} can't render {what}: {shorten_name(one_line(error))}"
        ) from error
    check_written(text, tokenizer, messages, template, what, variables, tools)
    return text


def check_written(
    text: str,
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    template: str,
    what: str,
    variables: Mapping[str, Any] = MappingProxyType({}),
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    schemas: bool = False,
) -> None:
    """Refuse the text of a chat without the text of a message that is not the assistant's, or
    without a tool.

    A tool's name must stand in the chat without its calls; with `schemas` its parameters too, or
    the description of a tool without parameters.
    """
    for message in messages:
        if message["role"] != "assistant" and not is_written(message["content"].strip(), text):
            raise UserError(
                f"{template} leaves out the text of the {shorten_name(message['role'])} in "
                f"{what}; it must write each message's content: compare chat_template.jinja with "
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
                f"{template} leaves out {missing} in {what}; use a template that describes tools, "
                "or name the column something else than tools"
            )


def _undescribed(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
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
        function = function if isinstance(function, Mapping) else {}
        name = function.get("name")
        if not isinstance(name, str) or not is_written(name, text):
            return f"the tool {shorten(name)}"
        if not schemas:
            continue
        parameters = (function.get("parameters") or {}).get("properties") or {}
        description = str(function.get("description") or "").strip()
        if not parameters and not is_written(description, text):
            return f"the description of the tool {shorten(name)}"
        # A description has the names of parameters as words.
        beside = text.replace(description, "") if description else text
        for parameter in parameters:
            if not is_written(parameter, beside):
                return f"the parameter {shorten(parameter)} of the tool {shorten(name)}"
    return ""


def is_written(content: str, text: str) -> bool:
    """Whether a template's text has a message's content, or the JSON of it, which Llama's write of
    a tool's result.
    """
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    generation: bool = True,
    **variables: Any,
) -> str:
    """A chat as its template writes it, up to the assistant's turn, or within it if the last
    message is its.

    A last message of the assistant's follows the generation prompt as it is: templates write an
    empty thought before an answer, or drop one from it. A thought that the generation prompt
    begins, or leaves empty, gives way to the message's.

    Raises:
        Exception: any exception of the template; ValueError if it writes far more than the chat.
    """
    given = list(messages)
    write = functools.partial(write_chat, tokenizer, tools=tools, **variables)
    if given[-1]["role"] != "assistant":
        return write(given, add_generation_prompt=generation)
    if len(given) == 1:
        return write(given, continue_final_message=True)
    begun = given[-1]["content"]
    prompt = write(given[:-1], add_generation_prompt=True)
    whole = write(given)
    # What the template puts between the two, if it is space.
    space = (
        whole[len(prompt) :].partition(begun.strip() or "\0")[0] if whole.startswith(prompt) else ""
    )
    prompt = THOUGHT.sub("", prompt) if begun.startswith("<think>") else prompt
    return prompt + ("" if space.strip() else space) + begun


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
    given = [dict(message) for message in messages]
    described = [dict(tool) for tool in tools] or None
    most = _TEMPLATE_CHARACTERS + 8 * len(str((given, described)))
    text = tokenizer.apply_chat_template(given, tools=described, **{"tokenize": False, **options})
    if len(text) > most:
        raise ValueError(
            f"it writes {len(text):,} characters, at most {most:,} are taken for this chat"
        )
    return text


def chat_messages(problem: Problem, prompt_suffix: str) -> list[Message]:
    """The chat of a problem, with the suffix at the end of the user's last message."""
    asked = {"role": "user", "content": with_suffix(problem, prompt_suffix)}
    if not problem.messages:
        return [asked]
    messages = list(problem.messages)
    if users := [place for place, message in enumerate(messages) if message["role"] == "user"]:
        messages[users[-1]] = {**messages[users[-1]], **asked}
    return messages


def problem_texts(problem: Problem) -> list[str]:
    """The problem's own texts."""
    return [
        problem.prompt,
        *(message["content"] for message in (*problem.messages, *problem.completion)),
    ]


def with_suffix(problem: Problem, prompt_suffix: str) -> str:
    """The user's last message: the problem and the suffix, unless both say how the answer is to be
    written.

    An example's "Answer: 4", or a box in a puzzle, does not say so.
    """
    twice = _ANSWER_FORM.search(prompt_suffix) and any(
        _ANSWER_FORM.search(text) for text in problem_texts(problem)
    )
    return problem.prompt if twice else problem.prompt + prompt_suffix


def template_variables(text: str, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """`chat_template_kwargs` as a dict. A template ignores variables that it does not know, so
    these are refused.
    """
    variables = json_object(text, "chat_template_kwargs")
    for name in variables:
        if name in _OURS or not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            reason = (
                "is set by encode_prompts"
                if name in _OURS
                else "is no variable of the tokenizer's chat template"
            )
            raise UserError(f"chat_template_kwargs: {shorten(name)} {reason}; leave it out")
    for name, value in variables.items():
        meant = {"false": False, "true": True, "0": False, "1": True}.get(str(value).lower(), value)
        given, other = ({**variables, name: each} for each in (value, meant))
        render = functools.partial(
            render_checked, tokenizer, QUESTION, "the chat template", "a question"
        )
        if render(given) != render(other):
            raise UserError(
                f"chat_template_kwargs: {name!r} is {json.dumps(value)}, which this template does "
                f"not take for {json.dumps(meant)}; write {json.dumps(meant)}"
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

    def find(
        self, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Find the calls in a turn, and what is wrong with those that can't be read; see
        `find_calls`.
        """
        if "syntax" in self.template:
            thought = "<think>" if self.prefix.rstrip().endswith("<think>") else ""
            return find_calls(thought + text, tools, self.template)
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(
                text, dict(self.template), prefix=self.prefix, tools=list(tools)
            )
            calls = [
                {field: call["function"][field] for field in _CALL}
                for call in message.get("tool_calls", ())
            ]
        except Exception as error:  # the parser's are of many kinds
            return [], [one_line(error)]
        if not all(
            isinstance(call["name"], str) and isinstance(call["arguments"], dict) for call in calls
        ):
            return [], [
                "a call needs the tool's name, which is text, and its arguments, which are an "
                "object"
            ]
        return calls, []

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Read the calls in a turn, each with `name` and `arguments`; the tools' JSON schemas give
        arguments types.

        Raises:
            ValueError: in one line, for a malformed call.
        """
        calls, problems = self.find(text, tools)
        if problems:
            raise ValueError(problems[0])
        return calls


def named_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Name and arguments of a call of a message, which may have them in `function`, and arguments
    as JSON text.
    """
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
        is_wrapped = "function" in call
        function = {**(call["function"] if is_wrapped else call), "arguments": text}
        written.append({**call, "function": function} if is_wrapped else function)
    return written


def find_call_format(
    tokenizer: "PreTrainedTokenizerBase",
    variables: Mapping[str, Any],
    *,
    arguments_as_text: bool = False,
) -> CallFormat:
    """The format in which the chat template writes calls: the tokenizer's own `response_template`,
    or a known one.

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
    with contextlib.suppress(Exception):  # any that a template raises
        before = write(QUESTION)
        begun = write(QUESTION, add_generation_prompt=True)
        ids = tokenizer(
            write([*QUESTION, called]).removeprefix(THOUGHT.sub("", begun)),
            add_special_tokens=False,
        )
        text = tokenizer.decode(ids["input_ids"], skip_special_tokens=True)
        for template in filter(
            None, (getattr(tokenizer, "response_template", None), *CALL_FORMATS.values())
        ):
            with contextlib.suppress(Exception):
                is_marked = template.get("open", "") in text
                # The last one: where the prompt is no prefix, its description of the tool may look
                # like a call.
                if is_marked and CallFormat(template).find(text, [_TOOL])[0][-1:] == [_CALL]:
                    return CallFormat(template, begun.removeprefix(before))
    raise UserError(
        "the chat template writes calls of tools in no format that is known: "
        f"{', '.join(CALL_FORMATS)}, or the tokenizer's own response_template, by transformers "
        "5.16 or newer"
    )
