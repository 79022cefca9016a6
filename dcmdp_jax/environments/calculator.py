r"""The built-in environment: a policy that may use a calculator.

    prompt     4*6-7+9=?
    turn 1     calc(4*6-7+9)
    answered   26
    turn 2     \boxed{26}

A turn that ends with `calc(...)` is answered by the value; any other ends the completion. The reward is 1 for a last
box that equals the reference answer, else 0.
"""

from __future__ import annotations

import re
from typing import Any

from dcmdp_jax.rewards.math.answers import last_boxed

_CALL = re.compile(r"calc\(([^()]*)\)\s*\Z")
_EXPRESSION = re.compile(r"\d{1,6}(?:[+*-]\d{1,6}){0,15}")


class Calculator:
    """One completion with a calculator."""

    def reset(self, prompt: Any, reference_answer: str | None = None, **columns: Any) -> None:
        """Keep the answer."""
        self._answer = reference_answer

    def step(self, text: str) -> tuple[str, float, bool]:
        """The value of the expression that the text calls for, or the reward of its box and the end."""
        if call := _CALL.search(text):
            return value_of(call[1]), 0.0, False
        return "", float(self._answer is not None and last_boxed(text) == self._answer), True


def value_of(expression: str) -> str:
    """The value of sums, differences and products of whole numbers; "error" for anything else."""
    if not _EXPRESSION.fullmatch(expression):
        return "error"
    total = 0
    for sign, product in re.findall(r"([+-]?)([\d*]+)", expression):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return str(total)
