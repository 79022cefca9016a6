"""Rewards of a rollout, begun while other completions are still sampled."""

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
        self._begun: dict[int, tuple[np.ndarray, str]] = {}
        self.answers = answers

    def begin(self, rows: Sequence[int], completion_ids: Sequence[np.ndarray]) -> None:
        """Start to grade completions that have ended. Pass it to the engine as `on_finished`."""
        texts = self._decode(completion_ids)
        self._begun |= zip(rows, zip(completion_ids, texts, strict=True), strict=True)
        self._verifier.begin(texts, [self.answers[row] for row in rows])

    def finish(self, completion_ids: Sequence[np.ndarray]) -> tuple[list[str], Grades]:
        """Texts and rewards of all rows, in their order."""
        texts = self.texts(completion_ids)
        return texts, self.grade(texts)

    def grade(self, texts: Sequence[str]) -> Grades:
        """Rewards of all rows, in their order, from what `texts` returned."""
        return self._verifier.grade(texts, self.answers)

    def texts(self, completion_ids: Sequence[np.ndarray]) -> list[str]:
        """Texts of all rows, in their order."""
        # An engine that restarted may have reported other tokens for a row than the row ended with.
        texts = {row: text for row, (ids, text) in self._begun.items() if np.array_equal(ids, completion_ids[row])}
        rest = [row for row in range(len(completion_ids)) if row not in texts]
        texts |= zip(rest, self._decode([completion_ids[row] for row in rest]), strict=True)
        return [texts[row] for row in range(len(completion_ids))]

    def _decode(self, completion_ids: Sequence[np.ndarray]) -> list[str]:
        # transformers decodes an empty batch to one empty text.
        return self._tokenizer.batch_decode(completion_ids, skip_special_tokens=True) if completion_ids else []
