r"""The built-in environment `calculator` and its problems: those of `arithmetic`, and worked turns to start from.

    prompt     4*6-7+9=?
    turn 1     calc(4*6-7+9)
    answered   26
    turn 2     \boxed{26}

A turn that ends with `calc(...)` is answered by the value; any other ends the completion. The reward is 1 for a last
box that equals the reference answer, else 0.

    calculator:difficulty=4,count=2048,seed=0                    problems
    calculator:difficulty=4,count=4096,seed=1,error_rate=0.5,worked=true

With `worked=true` each problem is there twice: with the first turn as its solution, `calc(4*6-7+9)`; and, as a chat
that goes on after the answer, with the second, `\boxed{26}`. A share `error_rate` of either has one digit wrong, so
that a policy that starts from them errs, which reinforcement learning can correct.
"""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

from dcmdp_jax.data.arithmetic import ArithmeticSpec, arithmetic_rows
from dcmdp_jax.rewards.math.answers import last_boxed
from dcmdp_jax.rewards.protocol import Problem

_CALL = re.compile(r"calc\(([^()]*)\)\s*\Z")
_EXPRESSION = re.compile(r"\d{1,6}(?:[+*-]\d{1,6}){0,15}")


@dataclasses.dataclass(frozen=True)
class CalculatorSpec(ArithmeticSpec):
    """A set of problems of the calculator.

    Attributes:
        worked: whether they are worked turns to start from.
    """

    worked: bool = False


def calculator_problems(location: str) -> list[Problem]:
    """The problems of a location; each has the columns `prompt` and `ground_truth`'s row of `arithmetic`.

    Raises:
        UserError: see `ArithmeticSpec.parse` and `arithmetic_rows`.
    """
    spec = CalculatorSpec.parse(location)
    rows = arithmetic_rows(dataclasses.replace(spec, error_rate=0.0))
    return _worked(rows, spec) if spec.worked else [_problem(row, index) for index, row in enumerate(rows)]


def _problem(row: dict[str, Any], index: int, **fields: Any) -> Problem:
    answer = row["reward_model"]["ground_truth"]
    columns = {"reward_model": row["reward_model"]}
    asked = {"prompt": row["prompt"][0]["content"]} | fields
    return Problem(answer=answer, source="calculator", index=index, columns=columns, **asked)


def _worked(rows: list[dict[str, Any]], spec: ArithmeticSpec) -> list[Problem]:
    noise = random.Random(f"calculator {spec.difficulty} {spec.split} {spec.seed}")
    problems = []
    for index, row in enumerate(rows):
        asked, answer = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        call = f"calc({asked.removesuffix('=?')})"
        turns = (("user", asked), ("assistant", call), ("user", answer))
        chat = tuple({"role": role, "content": content} for role, content in turns)
        wrong = [noise.random() < spec.error_rate for _ in range(2)]
        problems.append(_problem(row, index, solution=_spoiled(call, noise) if wrong[0] else call))
        said = _spoiled(answer, noise) if wrong[1] else answer
        problems.append(_problem(row, index, prompt=answer, messages=chat, solution=rf"\boxed{{{said}}}"))
    return problems


def _spoiled(text: str, noise: random.Random) -> str:
    """The text with another digit in the place of one."""
    place = noise.choice([place for place, character in enumerate(text) if character.isdigit()])
    other = noise.choice([digit for digit in "0123456789" if digit != text[place]])
    return text[:place] + other + text[place + 1 :]


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
