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
        answers: the right answer of each row, `prompt * group_size + member`; None for a row without one.
    """

    def __init__(self, verifier: Verifier, tokenizer: PreTrainedTokenizerBase, answers: Sequence[str | None]) -> None:
        self._verifier, self._tokenizer = verifier, tokenizer
        self._texts: dict[int, str] = {}
        self._answers = answers
        self.tokens = self.beyond = 0
        """Tokens decoded, and those of them that are ids beyond the tokenizer's, which have no text."""

    @property
    def judged(self) -> list[int]:
        """The rows that have an answer."""
        return [row for row, answer in enumerate(self._answers) if answer is not None]

    def begin(self, rows: Sequence[int], completion_ids: Sequence[np.ndarray]) -> None:
        """Start to grade completions, each row once."""
        texts = self.decode(rows, completion_ids)
        known = [
            (text, answer) for row, text in zip(rows, texts, strict=True) if (answer := self._answers[row]) is not None
        ]
        self._verifier.begin([text for text, _ in known], [answer for _, answer in known])

    def decode(self, rows: Sequence[int], completion_ids: Sequence[np.ndarray]) -> list[str]:
        """Texts of completions, each row once; they are kept for `texts`."""
        # transformers decodes an empty batch to one empty text.
        texts = self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True) if rows else []
        self._texts |= zip(rows, texts, strict=True)
        self.tokens += sum(map(len, completion_ids))
        self.beyond += sum(int(np.sum(np.asarray(ids) >= len(self._tokenizer))) for ids in completion_ids)
        return texts

    def texts(self) -> list[str]:
        """Texts of all rows, in their order, once each was decoded."""
        return [self._texts[row] for row in range(len(self._answers))]

    def grade(self) -> Grades:
        """Rewards of the rows of `judged`, in their order."""
        texts, rows = self.texts(), self.judged
        return self._verifier.grade([texts[row] for row in rows], [self._answers[row] for row in rows])
