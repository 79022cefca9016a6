"""Completions for a page: tokens with both probabilities, in few bytes.

2,000 completions with short prompts stay below 5 MB: tokens are numbers into one list of words, probabilities have five
decimals, long completions are cut, and long prompts in their middle; both say by how much. Those with the largest
mismatch come first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_TOKENS = 260_000
"""Tokens on one page, at `_BYTES` each."""
_BYTES = 17
_FULL_COLOR = 0.99
"""Quantile of |p - q| over a page's tokens from which on a token has the full color: mismatch differs by orders between
engines, so no absolute scale shows all."""
_UNIT = 100_000
_LEAST_SHOWN, _MOST_SHOWN = 100, 2_000
_LONGEST_PROMPT = 2_000


@dataclasses.dataclass(frozen=True)
class Completion:
    """A completion to look at. What is not known is None.

    Attributes:
        run, source: names.
        step: finished training steps.
        prompt, answer, found: texts, the last what was read as the completion's answer; "" if not known.
        text: the completion, where its tokens are not known.
        tokens: text of each token.
        train_probs, rollout_probs: [T] of each token; NaN where it was not sampled.
        reward, advantage: of the completion.
        discrepancy: mean |p - q| over its sampled tokens, where the tokens are not known.
    """

    run: str | None = None
    step: int | None = None
    source: str | None = None
    prompt: str = ""
    answer: str = ""
    found: str = ""
    text: str = ""
    tokens: Sequence[str] | None = None
    train_probs: np.ndarray | None = None
    rollout_probs: np.ndarray | None = None
    reward: float | None = None
    advantage: float | None = None
    discrepancy: float | None = None


def completions_data(completions: Sequence[Completion], most_tokens: int = MOST_TOKENS) -> dict[str, Any]:
    """What `completions.js` shows.

    Args:
        completions: in any order. If they are too many, each is cut to as many tokens as fit, but not below 100, or
            without tokens to 17 times as many characters; then every k-th is kept, so that all steps stay. What is cut
            or left out is counted.
        most_tokens: on the page.

    Returns:
        Values that JSON can hold: `words`; `rows`, the largest mean |p - q| first; `left_out`; `unit`, by which
        probabilities are multiplied; and `full_color`, the |p - q| from which on a token has the full color.
    """
    sizes = np.array([len(each.tokens or ()) or len(each.text) // _BYTES for each in completions], np.int64)
    overhead = 20  # of a completion, in tokens
    fitting = [n for n in range(_LEAST_SHOWN, _MOST_SHOWN + 1, 50)
               if (np.minimum(sizes, n) + overhead).sum() <= most_tokens]  # fmt: skip
    longest = max(fitting, default=_LEAST_SHOWN)
    every = max(1, math.ceil((np.minimum(sizes, longest) + overhead).sum() / most_tokens))
    kept = completions[::every]
    words: dict[str, int] = {}
    rows = sorted((_row(each, words, longest) for each in kept), key=lambda row: -(row["discrepancy"] or 0))
    apart = [
        abs(p - q) for row in rows for p, q in zip(row.get("p", ()), row.get("q", ()), strict=True) if p is not None
    ]
    full = max(1, float(np.quantile(apart, _FULL_COLOR)) if apart else 0) / _UNIT
    left_out = len(completions) - len(kept)
    return {"words": list(words), "rows": rows, "left_out": left_out, "unit": _UNIT, "full_color": full}


def _row(each: Completion, words: dict[str, int], longest: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run": each.run, "step": each.step, "source": each.source, "prompt": _without_middle(each.prompt),
        "reward": _finite(each.reward), "advantage": _finite(each.advantage), "answer": each.answer,
        "found": each.found,
    }  # fmt: skip
    if each.tokens is None:
        text = each.text[: longest * _BYTES]
        row |= {"discrepancy": _finite(each.discrepancy), "text": text, "length": len(each.text)}
        return row | {"more": len(each.text) - len(text)}
    p, q = np.asarray(each.train_probs, float), np.asarray(each.rollout_probs, float)
    sampled = np.isfinite(p) & np.isfinite(q)
    mean = float(np.abs(p - q)[sampled].mean()) if sampled.any() else None
    shown = slice(0, longest)
    row |= {
        "discrepancy": _finite(mean), "length": len(each.tokens), "more": max(0, len(each.tokens) - longest),
        "tokens": [words.setdefault(word, len(words)) for word in each.tokens[shown]],
        "p": _whole(p[shown], sampled[shown]), "q": _whole(q[shown], sampled[shown]),
    }  # fmt: skip
    return row


def _without_middle(prompt: str) -> str:
    """A prompt with what it begins with and, as the question may come last, what it ends with."""
    cut, half = len(prompt) - _LONGEST_PROMPT, _LONGEST_PROMPT // 2
    return prompt if cut <= 0 else f"{prompt[:half]}\n[... {cut:,} characters ...]\n{prompt[-half:]}"


def _whole(values: np.ndarray, known: np.ndarray) -> list[int | None]:
    return [round(_UNIT * v) if k else None for v, k in zip(values.tolist(), known.tolist(), strict=True)]


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
