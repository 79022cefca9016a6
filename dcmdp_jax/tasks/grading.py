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
        self.answers = answers

    def begin(self, rows: Sequence[int], completion_ids: Sequence[np.ndarray]) -> None:
        """The engine's `on_finished`."""
        self._verifier.begin(self._texts(completion_ids), [self.answers[row] for row in rows])

    def finish(self, completion_ids: Sequence[np.ndarray]) -> tuple[list[str], Grades]:
        """Texts and rewards of all rows, in their order."""
        texts = self._texts(completion_ids)
        return texts, self._verifier.grade(texts, self.answers)

    def _texts(self, completion_ids: Sequence[np.ndarray]) -> list[str]:
        return self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
