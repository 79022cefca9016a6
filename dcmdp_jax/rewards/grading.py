"""Rewards of a rollout, computed while other completions are still sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dcmdp_jax.rewards.math.verifier import Grades, Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Grading:
    """Texts and rewards of the completions that one call of an engine's `generate` samples.

    Args:
        verifier: grades the texts.
        tokenizer: turns token ids into text.
        answers: the right answer of each row, `prompt * group_size + member`.
    """

    def __init__(self, verifier: Verifier, tokenizer: PreTrainedTokenizerBase, answers: Sequence[str]) -> None:
        self._verifier, self._tokenizer = verifier, tokenizer
        self._texts: dict[int, str] = {}
        self.answers = answers

    def begin(self, rows: Sequence[int], completion_ids: Sequence[np.ndarray]) -> None:
        """Start to grade completions, each row once."""
        texts = self.decode(rows, completion_ids)
        self._verifier.begin(texts, [self.answers[row] for row in rows])

    def decode(self, rows: Sequence[int], completion_ids: Sequence[np.ndarray]) -> list[str]:
        """Texts of completions, each row once; they are kept for `texts`."""
        # transformers decodes an empty batch to one empty text.
        texts = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True) if rows else []
        self._texts |= zip(rows, texts, strict=True)
        return texts

    def texts(self) -> list[str]:
        """Texts of all rows, in their order, once each was decoded."""
        return [self._texts[row] for row in range(len(self.answers))]

    def grade(self) -> Grades:
        """Rewards of all rows, in their order."""
        return self._verifier.grade(self.texts(), self.answers)
