"""Reference answers as datasets write them: what stands around an answer is dropped."""

import ast
import html
import json
import math
import re
from decimal import Decimal
from typing import Any

from dcmdp_jax.errors import UserError, shorten
from dcmdp_jax.rewards.math.notation import is_read_command, unwrap_text

# Entities of HTML, tags, a sentence that only states it.
_ENTITY = re.compile(r"&(?:#[0-9]{1,6}|[a-zA-Z]{2,8});")
_TAGGED = re.compile(r"(?is)<answer>((?:(?!</?answer>).)*+)</answer>")
_STATED = re.compile(
    r"(?is)(?:(?:so|thus|hence|therefore),?\s++)?+(?:(?:the|my|our|final|correct|right)\s++)*+"
    r"answer\s*+(?:is\b|[:=])[\s:]*+(.*)"
)
# Links, pictures and blocks of code: the grader compares none of them.
_MARKUP = re.compile(
    r"(?i)\w://|\bwww\.|data:[a-z]+/|!\[[^\]]{0,200}\]\(|\]\([\w./-]*\.[a-z]"
    r"|\w\.(?:png|jpe?g|gif|svg|webp|bmp|tiff?|pdf)\b|(?-i:\[/?[a-z]{3,}\])|\[asy\]|```"
    r"|\\(?:includegraphics|href|url)(?![a-z])"
    r"|\\begin\{(?:asy|tikz\w*|figure|picture|verbatim|lstlisting|proof)"
)
_TAGS_ALONE = re.compile(r"(?i)(?:\s*</?(?:[a-z][a-z0-9]{2,}|a)(?:\s[^<>]*)?>)+")
# What programs write for a missing value. Python's is `None`: `none` may answer "how many?".
_MISSING = ("null", "nan", "na")
# A remark in place of the answer: it refers elsewhere, reports a proof, or says that there is none.
_REMARK = re.compile(
    r"\A(?:see|refer|cf|consult|check|look)\b.*"
    r"|\A(?:as|in) (?:the )?(?:above|below|shown|given|stated|required|desired"
    r"|figure|diagram|image|picture|graph|text|solution)\b.*"
    r"|\A(?:above|below|attached|here|omitted)\Z|\b(?:given|provided|supplied|attached)\Z"
    r"|\A(?:figure|diagram|image|picture|graph|sketch)(?: [0-9]+)?\Z"
    r"|\b(?:pro(?:ofs?|ve[dns]?|ving)|show(?:n|s|ed)|demonstrated|verified|omitted|q\.? ?e\.? ?d)\b"
    r"|\bnot ?(?:found|available|provided|given|applicable|known)\b|\bno answers?\b|\bleft to\b"
    r"|\A(?:unknown|unavailable|missing|pending|tb[ad]|todo|varies|various|trivial|obvious)\Z"
)
_NOUN_OF_A_REMARK = re.compile(r"\b(?:answers?|solutions?|explanations?)\b")
_COUNTS = re.compile(
    r"\b(?:no|not|one|two|three|four|five|many|unique|only|single|infinite|infinitely|every|all"
    r"|real|any|set|trivial)\b"
)
_PROOF_TASK = re.compile(r"(?i)\bprove\b(?! or)|\b(?:show|demonstrate|verify|establish) that\b")
_QUESTION = re.compile(
    r"(?i)\?|\b(?:find|determine|compute|calculate|evaluate|decide|whether|name|state|give"
    r"|what|which|who|how)\b"
)
# A longer text may be an answer in words.
_MAX_REMARK_CHARACTERS = 80


class NoAnswer(UserError):
    """The row has no answer that is text or a number."""


def answer_text(value: Any, field: str) -> str:
    """The answer alone in `["42"]`, `<answer>42</answer>`, `42&nbsp;` or `The answer is 42.`

    Raises:
        NoAnswer: if it is neither text nor a finite number.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), value)
        text = ([text] + _TAGGED.findall(text))[-1].strip()
        inner = None
        if text[:1] in ("[", "{", '"', "'"):
            inner = literal(text)
        if isinstance(inner, str) or (isinstance(inner, list) and len(inner) == 1):
            return answer_text(inner, field)
        has_texts = isinstance(inner, list) and any(isinstance(item, str) for item in inner)
        if has_texts or isinstance(inner, dict):
            raise NoAnswer(
                f"field {field!r}: an answer must be one text or number, not {shorten(text)}"
            )

        stated = _STATED.fullmatch(text)
        if stated is None:
            return text
        return stated[1].removesuffix(".").strip()
    if isinstance(value, float) and math.isfinite(value):
        if value.is_integer():
            # 1e23 as it is written; its float is 99999999999999991611392.
            return str(int(Decimal(repr(value))))
        return repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise NoAnswer(
        f"field {field!r}: an answer must be text or a finite number, not {shorten(value)}"
    )


def reason_for_no_answer(answer: str, prompt: str) -> str | None:
    """Say why a reference is no answer to its problem; None where it may be one.

    An answer has a value: a number, an expression, a choice, a name. A link, a picture or code has
    none. Neither have words about the answer (`see solution`, `proved`), unless the problem has
    these words itself, or any words where the problem asks for a proof alone.
    """
    if _MARKUP.search(answer) or _TAGS_ALONE.fullmatch(answer):
        return "which is a link, a picture or code"

    bare = answer.strip("$.[] ")
    text = unwrap_text(bare).strip(" .!:()[]").lower()
    command = re.fullmatch(r"\\([a-zA-Z]+)", bare)
    is_read = command is None or is_read_command(command[1])
    if not is_read or not any(character.isalnum() for character in answer):
        return "which is a sign without a value"
    in_words = len(text) > 2 and text.isascii() and re.fullmatch(r"[a-z][a-z ,'.!-]*", text)
    if in_words and _PROOF_TASK.search(prompt) and not _QUESTION.search(prompt):
        return "and the problem asks for a proof"
    if re.sub("[^a-z]", "", text) in _MISSING or bare in ("None", "<NA>"):
        return "which says that there is none"

    remark = _REMARK.search(text)
    if remark is None and not _COUNTS.search(text):
        remark = _NOUN_OF_A_REMARK.search(text)
    if remark is None or len(text) > _MAX_REMARK_CHARACTERS:
        return None
    words_of_prompt = set(re.findall("[a-z]+", prompt.lower()))
    if words_of_prompt.issuperset(re.findall("[a-z]+", remark[0])):
        return None
    return "which is a remark without a value"


def literal(text: str) -> Any:
    """The value of a text in JSON, or as Python prints it; None for anything else."""
    if re.search(r"(?<!\\)\\[a-zA-Z]{2}", text):  # the backslashes of LaTeX, not escaped
        text = text.replace("\\", r"\\")
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
    return None
