"""Countdown, an equation that uses each number once and equals a target: problems and reward.

    python examples/countdown/task.py      # writes runs/countdown/*.jsonl: 20,000 and 64 problems
                                             as published
    python examples/countdown/task.py small  # and those of the small size, with answers to start from

The prompt is TinyZero's, as Marek and Ryabinin (2026) have it; research/countdown.md compares the
two tasks. Plain Python: nothing of this project is imported.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import random
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

DIRECTORY = Path("runs/countdown")
LONGEST = 200
"""Characters of an answer; four numbers of three digits with signs and parentheses have 40."""
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_SYSTEM = (
    "You are a helpful assistant. You first thinks about the reasoning process in the mind and "
    "then provides the user with the answer."
)
_QUESTION = (
    " Using the numbers {numbers}, create an equation that equals {target}. You can use basic "
    "arithmetic operations (+, -, *, /) and each number can only be used once. Show your work in "
    "<think> </think> tags. And return the final answer in <answer> </answer> tags, for example "
    "<answer> (1 + 2) / 3 </answer>."
)


class Size(NamedTuple):
    """Ranges of a problem: count of numbers, largest number, largest target, operations."""

    numbers: int
    largest_number: int
    largest_target: int
    operations: str


PUBLISHED = Size(4, 100, 1000, "+-*/")
SMALL = Size(3, 9, 27, "+-")


def apply(operation: str, left: Fraction, right: Fraction) -> Fraction:
    """The exact value; ZeroDivisionError for a division by 0."""
    if operation == "/":
        return left / right
    return left + right if operation == "+" else left - right if operation == "-" else left * right


def expression(draw: random.Random, numbers: list[int], operations: str) -> tuple[Fraction, str]:
    """A random expression that joins the numbers pair by pair: its value and its text."""
    parts = [(Fraction(number), str(number)) for number in numbers]
    while len(parts) > 1:
        (a, left), (b, right) = (parts.pop(draw.randrange(len(parts))) for _ in range(2))
        operation = draw.choice(operations if b else operations.replace("/", ""))
        parts.append((apply(operation, a, b), f"({left}{operation}{right})"))
    value, text = parts[0]
    return value, text[1:-1]


def problems(size: Size, seed: int) -> Iterator[dict[str, Any]]:
    """Problems with `numbers`, `target` and an `answer`, without end; each can be solved."""
    draw = random.Random(seed)
    while True:
        numbers = [draw.randint(1, size.largest_number) for _ in range(size.numbers)]
        value, text = expression(draw, numbers, size.operations)
        if value.denominator == 1 and 1 <= value <= size.largest_target:
            yield {"numbers": numbers, "target": int(value), "answer": text}


def row(size: Size, problem: dict[str, Any]) -> dict[str, Any]:
    """The problem with its prompt: the published chat, or `3 5 7=15?`."""
    if size == SMALL:
        return {
            "prompt": f"{' '.join(map(str, problem['numbers']))}={problem['target']}?",
            **problem,
        }
    chat = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _QUESTION.format(**problem)},
    ]
    return {"prompt": chat, **problem}


def rows(
    size: Size, count: int, held_out: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Problems to train on, and held-out ones that training never asks in any order."""
    source = map(functools.partial(row, size), problems(size, 0))
    first = list(itertools.islice(source, held_out))
    asked = {_key(one) for one in first}
    return list(itertools.islice((one for one in source if _key(one) not in asked), count)), first


def _key(problem: dict[str, Any]) -> tuple[Any, ...]:
    return (*sorted(problem["numbers"]), problem["target"])


def worked(
    train: list[dict[str, Any]], count: int, error_rate: float, seed: int
) -> Iterator[dict[str, str]]:
    """Answers to start from; a share is any expression, so that the policy errs."""
    draw = random.Random(seed)
    for _ in range(count):
        one = draw.choice(train)
        answer = one["answer"]
        if draw.random() < error_rate:
            answer = expression(draw, one["numbers"], SMALL.operations)[1]
        yield {"prompt": one["prompt"], "solution": f"<answer>{answer}</answer>"}


def last_answer(text: str) -> str | None:
    """What stands in the last <answer>...</answer>; one pass over the text."""
    found = None
    place = 0
    while True:
        begin = text.find("<answer>", place)
        end = text.find("</answer>", begin)
        if begin < 0 or end < 0:
            return found
        found = text[begin + 8 : end].strip()
        place = end


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Value of a parsed expression; its numbers are added to `used`. Else ValueError."""
    match node:
        case ast.Constant(int(number)) if not isinstance(number, bool):
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left, operation, right) if type(operation) in _SIGNS:
            return apply(_SIGNS[type(operation)], _value(left, used), _value(right, used))
        case ast.UnaryOp(ast.USub() | ast.UAdd() as sign, operand):
            return _value(operand, used) * (-1 if isinstance(sign, ast.USub) else 1)
    raise ValueError(f"{type(node).__name__} in an answer")


def solves(answer: str | None, numbers: list[int], target: int) -> bool:
    """Whether the answer uses + - * / and each number exactly once, and equals the target.

    Nothing is evaluated: the text is parsed, and the tree is computed in fractions.
    """
    if answer is None or len(answer) > LONGEST or not set(answer) <= set("0123456789+-*/() \n\t"):
        return False
    used: list[int] = []
    try:
        value = _value(ast.parse(answer, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return sorted(used) == sorted(numbers) and value == target


def countdown(
    completions: list[Any], numbers: list[list[int]], target: list[int], **columns: Any
) -> list[float]:
    """The reward: 1 for a right answer, else 0."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    given = zip(texts, numbers, target, strict=True)
    return [float(solves(last_answer(text), list(those), goal)) for text, those, goal in given]


def _write(name: str, lines: Any) -> None:
    path = DIRECTORY / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{path}: {len(lines):,} rows")


def main(arguments: list[str]) -> int:
    """Write the files of a size."""
    if arguments not in ([], ["small"]):
        print("usage: python examples/countdown/task.py [small]", file=sys.stderr)
        return 2
    size, prefix = (SMALL, "small_") if arguments else (PUBLISHED, "")
    train, held_out = rows(size, 4096 if arguments else 20_000, 64)
    _write(f"{prefix}train", train)
    _write(f"{prefix}held_out", held_out)
    if arguments:
        _write("small_worked", list(worked(train, 16_384, 0.5, 1)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
