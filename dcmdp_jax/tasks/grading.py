"""Rewards of a rollout, some of them found out while others are still sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dcmdp_jax.tasks.verifier import Grades, Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Grading:
    """Of one call of an engine's `generate`.

    Args:
        verifier: judges.
        tokenizer: turns token ids into text.
        answers: the right answer of each row, `prompt * group_size + member`.
    """

    def __init__(self, verifier: Verifier, tokenizer: PreTrainedTokenizerBase, answers: Sequence[str]) -> None:
        self._verifier, self._tokenizer = verifier, tokenizer
        self._begun: dict[int, tuple[np.ndarray, str]] = {}
        self.answers = answers

    def begin(self, rows: Sequence[int], completion_ids: Sequence[np.ndarray]) -> None:
        """The engine's `on_finished`."""
        texts = self._texts(completion_ids)
        self._begun |= zip(rows, zip(completion_ids, texts, strict=True), strict=True)
        self._verifier.begin(texts, [self.answers[row] for row in rows])

    def finish(self, completion_ids: Sequence[np.ndarray]) -> tuple[list[str], Grades]:
        """Texts and rewards of all rows, in their order."""
        # An engine that had to begin anew may have told of other tokens than a row ended with.
        texts = {row: text for row, (ids, text) in self._begun.items() if np.array_equal(ids, completion_ids[row])}
        rest = [row for row in range(len(completion_ids)) if row not in texts]
        texts |= zip(rest, self._texts([completion_ids[row] for row in rest]), strict=True)
        in_order = [texts[row] for row in range(len(completion_ids))]
        return in_order, self._verifier.grade(in_order, self.answers)

    def _texts(self, completion_ids: Sequence[np.ndarray]) -> list[str]:
        # Of no completions transformers makes one empty text.
        return self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True) if completion_ids else []
