"""The rewards `last_number` and `math_verify`: simpler ways than `math` to compare with the reference answer."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from dcmdp_jax.rewards.math.notation import upright
from dcmdp_jax.rewards.protocol import completion_text

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
    return [float(numbers[-1:] == [right]) for numbers, right in zip(found, reference_answer, strict=True)]


def math_verify(
    completions: Sequence[Any], reference_answer: Sequence[str | None], **columns: Any
) -> list[float | None]:
    r"""1 where math-verify finds the reference answer in the completion, else 0; None where it can't read the answer,
    or there is none.

    The library reads the texts without our parsing of answers, but factors set upright lose their commands first: it
    takes `\mathrm{e}` in `3\mathrm{e}` for a unit and drops it. Its own time limits apply: 5 seconds to parse a text
    and 5 to compare; an answer over them gets 0.

    Args:
        completions: texts, or lists of messages.
        reference_answer: the reference answers.
        columns: not used.
    """
    import math_verify as library

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about each time limit that it is given
    golds = [None if text is None else library.parse(upright(rf"\boxed{{{text}}}")) for text in reference_answer]
    return [
        float(library.verify(gold, library.parse(upright(completion_text(completion))))) if gold else None
        for gold, completion in zip(golds, completions, strict=True)
    ]
