"""The reward `math_verify`: the library math-verify as it comes, without our reading of answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import math_verify as library

# It warns of each time limit that it is told to have.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float | None]:
    """1 where math-verify finds the reference answer in the completion, else 0; None where it can't read the answer.

    The library's own time limits apply, 5 seconds on the wall to read a text and 5 to compare; an answer over them
    gets 0. They use the process's alarm, and with it the pool's: a call over the pool's limit ends a minute late.

    Args:
        completions: texts.
        answer: the reference answers.
    """
    del columns
    golds = [library.parse(rf"\boxed{{{text}}}") for text in answer]
    return [
        float(library.verify(gold, library.parse(text))) if gold else None
        for gold, text in zip(golds, completions, strict=True)
    ]
