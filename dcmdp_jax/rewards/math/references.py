"""Reference answers as datasets write them: what stands around an answer is dropped."""

import ast
import html
import json
import math
import re
from typing import Any

from dcmdp_jax.errors import UserError, shorten

# Entities of HTML, tags, a sentence that only states it.
_ENTITY = re.compile(r"&(?:#[0-9]{1,6}|[a-zA-Z]{2,8});")
_TAGGED = re.compile(r"(?is)<answer>((?:(?!</?answer>).)*+)</answer>")
_STATED = re.compile(
    r"(?is)(?:(?:so|thus|hence|therefore),?\s++)?+(?:(?:the|my|our|final|correct|right)\s++)*+answer\s*+(?:is\b|[:=])[\s:]*+(.*)"
)


class NoAnswer(UserError):
    """The row has no answer that is text or a number."""


def answer_text(value: Any, field: str) -> str:
    """The answer in a field, alone: of `["42"]`, `<answer>42</answer>`, `42&nbsp;`, `The answer is 42.`

    Raises:
        NoAnswer: if it is neither text nor a finite number.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), value)
        text = ([text] + _TAGGED.findall(text))[-1].strip()
        inner = literal(text) if text[:1] in ("[", "{", '"', "'") else None
        texts = [isinstance(item, str) for item in inner] if isinstance(inner, list) else []
        if isinstance(inner, dict) or (len(texts) > 1 and any(texts)):
            raise NoAnswer(f"field {field!r}: an answer must be one text or number, not {shorten(text)}")
        if isinstance(inner, str) or len(texts) == 1:
            return answer_text(inner, field)
        stated = _STATED.fullmatch(text)
        return stated[1].removesuffix(".").strip() if stated else text
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise NoAnswer(f"field {field!r}: an answer must be text or a finite number, not {shorten(value)}")


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
