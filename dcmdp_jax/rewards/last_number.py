"""The reward `last_number`: for models that write a number and no box."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
_LONGEST = 100_000


def last_number(completions: Sequence[Any], reference_answer: Sequence[str], **columns: Any) -> list[float]:
    """1 where the last number of a completion is the reference answer, digit by digit; else 0.

    Args:
        completions: texts, or lists of messages, whose last one is read.
        reference_answer: the reference answers.
        columns: unused.
    """
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    found = [_NUMBER.findall(text[-_LONGEST:]) for text in texts]
    return [
        float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(found, reference_answer, strict=True)
    ]
