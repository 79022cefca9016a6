r"""The reward `math_verify`: the library math-verify, without our parsing of answers.

Factors set upright lose their commands first: the library takes `\mathrm{e}` in `3\mathrm{e}` for a unit and drops it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import math_verify as library

from dcmdp_jax.rewards.math.notation import upright
from dcmdp_jax.rewards.verl_signature import completion_text

# It warns about each time limit that it is given.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify(
    completions: Sequence[Any], reference_answer: Sequence[str | None], **columns: Any
) -> list[float | None]:
    """1 where math-verify finds the reference answer in the completion, else 0; None where it can't read the answer, or
    there is none.

    The library's own time limits apply: 5 seconds to parse a text and 5 to compare; an answer over them gets 0.

    Args:
        completions: texts, or lists of messages.
        reference_answer: the reference answers.
        columns: not used.
    """
    del columns
    golds = [None if text is None else library.parse(upright(rf"\boxed{{{text}}}")) for text in reference_answer]
    return [
        float(library.verify(gold, library.parse(upright(completion_text(completion))))) if gold else None
        for gold, completion in zip(golds, completions, strict=True)
    ]
