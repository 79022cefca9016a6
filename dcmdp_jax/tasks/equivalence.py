r"""Whether two answers mean the same: literal comparison first, then structure, then algebra by math-verify.

math-verify and sympy are imported on first use (about a second). Nothing here limits time or memory; a hostile answer
(`9^{9^{9^9}}`) runs for ever, so training grades through `verifier.Verifier`, which runs this in processes it can kill.
"""

from __future__ import annotations

import functools
import logging
import random
import re
from collections.abc import Callable
from typing import Any

from dcmdp_jax.tasks.answers import (
    compare_literals,
    extract_answer,
    normalize_answer,
    split_elements,
    split_tolerance,
    strip_percent,
    without_spaces,
)
from dcmdp_jax.tasks.numbers import parse_number, same_number

_OPEN, _CLOSE = "([{", ")]}"
_INTERVAL_ENDS = re.compile(r"([\[(]).*([\])])", re.DOTALL)
_LABEL = re.compile(r"(?:[a-zA-Z]|\\[a-zA-Z]+|[_'^|(){},:\s\d])+")
_NAMED_SUBSCRIPT = re.compile(r"_\s*\{\s*\\(odot|oplus|max|min)\s*\}")
_INDEXED_E = re.compile(r"(?<![\\a-zA-Z])E(?=\s*_)")
_E_NOTATION = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.])")
_NAME_APPROXIMATELY = re.compile(r"[a-zA-Z_\\]+\s*\\approx\s*")
_EQUALS = re.compile(r"(?<![<>!\\:])=(?!=)")


def judge(completion: str, answer: str) -> bool:
    r"""Whether a completion's answer equals the reference answer.

    Pure, without time or memory limit (see the module's note); may raise what sympy raises.

    Args:
        completion: decoded text; the answer is taken from it by `extract_answer`.
        answer: reference answer in the verifier's notation, `$...$` or a box around it allowed.

    Returns:
        False when the completion commits to no answer.
    """
    prediction = extract_answer(completion)
    return prediction is not None and equivalent(prediction, answer)


def equivalent(prediction: str, gold: str) -> bool:
    """Whether two answers mean the same; `gold` may carry a tolerance, which only literal or numeric answers can meet.

    Lists compare as multisets, tuples and intervals in order with their brackets, everything else as numbers (exact,
    to 1e-6 relative where one side is a decimal) or by symbolic equality. A left-hand side that only one answer has
    (`y = 2x`, `V_1 : V_2 = 11 : 21`) is dropped.
    """
    decided = compare_literals(prediction, gold)
    if decided is not None:
        return decided
    gold, tolerance = split_tolerance(gold)
    left, right = normalize_answer(prediction), normalize_answer(gold)
    left, right = _without_approximation(left), _without_approximation(right)
    if tolerance is not None:
        return _within(left, right, float(tolerance))
    return _same(left, right)


def _same(left: str, right: str) -> bool:
    if without_spaces(left) == without_spaces(right):
        return True
    left_items, right_items = _elements(left), _elements(right)
    if len(left_items) > 1 or len(right_items) > 1:
        if len(left_items) == 1:
            left_items = left.split(",")  # `5,113` may be the list 5, 113
        return len(left_items) == len(right_items) and _match_all(left_items, right_items)
    ordered = _ordered(left, right)
    if ordered is not None:
        return ordered
    if _contradicts(left, right):
        return False
    shorter = _without_label(left, right)
    if shorter != (left, right):
        return _same(*shorter)
    decided = compare_literals(left, right)
    return _algebra(left, right) if decided is None else decided


def _contradicts(left: str, right: str) -> bool:
    """Whether a chain of equalities on the left (`4 = 5`) holds a number that is not the number on the right."""
    value = parse_number(right)
    numbers = [parse_number(part) for part in _EQUALS.split(left)]
    return len(numbers) > 1 and value is not None and any(n is not None and not same_number(n, value) for n in numbers)


def _without_approximation(text: str) -> str:
    r"""`\sqrt{2} \approx 1.41` gives `\sqrt{2}`, `x \approx 11` gives `11`."""
    return _NAME_APPROXIMATELY.sub("", text, count=1).split(r"\approx")[0].strip() or text


def _match_all(left: list[str], right: list[str]) -> bool:
    """Whether a one-to-one matching of equal elements exists, whatever the order."""
    remaining = list(left)
    for item in right:
        match = next((index for index, other in enumerate(remaining) if _same(other, item)), None)
        if match is None:
            return False
        remaining.pop(match)
    return True


def _ordered(left: str, right: str) -> bool | None:
    """Compares two tuples or intervals element by element; None when either is neither."""
    left_body, right_body = _bracketed(left), _bracketed(right)
    if left_body is None or right_body is None:
        return None
    left_items, right_items = split_elements(left_body, ","), split_elements(right_body, ",")
    if min(len(left_items), len(right_items)) < 2:
        return None
    if (left[0], left[-1], len(left_items)) != (right[0], right[-1], len(right_items)):
        return False
    return all(_same(a, b) for a, b in zip(left_items, right_items, strict=True))


def _bracketed(text: str) -> str | None:
    """The inside of `(...)`, `[...)` and the like when the first bracket closes at the very end, else None."""
    if _INTERVAL_ENDS.fullmatch(text) is None:
        return None
    depth = 0
    for position, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0:
            return text[1:-1] if position == len(text) - 1 else None
    return None


def _elements(text: str) -> list[str]:
    r"""The elements of a list or set, `a \pm b` counted as two; a single answer gives a list of one."""
    text = text.strip()
    for start, end in ((r"\{", r"\}"), ("{", "}")):
        inside = text[len(start) : -len(end)]
        if text.startswith(start) and text.endswith(end) and _balanced(inside):
            text = inside.strip()
    items = [item for part in split_elements(text, ";") for item in split_elements(part, ",")]
    expanded: list[str] = []
    for item in items:
        if item.count(r"\pm") == 1 and r"\mp" not in item:
            expanded += [item.replace(r"\pm", "+").strip().removeprefix("+"), item.replace(r"\pm", "-")]
        else:
            expanded.append(item)
    return expanded


def _balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth < 0:
            return False
    return depth == 0


def _without_label(left: str, right: str) -> tuple[str, str]:
    """Drops `x =` or `x \\in` where only one of the two has it and what stands there is only a name."""

    def strip(text: str) -> str:
        parts = _EQUALS.split(text) if r"\in " not in text else text.split(r"\in ")
        is_label = len(parts) == 2 and _LABEL.fullmatch(parts[0]) and re.search(r"[a-zA-Z|]", parts[0])
        return parts[1].strip() if is_label and parts[1].strip() else text

    short_left, short_right = strip(left), strip(right)
    for one, short, other in ((left, short_left, right), (right, short_right, left)):
        if short != one and not _EQUALS.search(other) and r"\in " not in other:
            return (short, other) if one is left else (other, short)
    return left, right


def _within(left: str, right: str, tolerance: float) -> bool:
    return any(
        getattr(a, "is_number", False)
        and getattr(b, "is_number", False)
        and abs(complex(a.evalf()) - complex(b.evalf())) <= tolerance
        for a in _parse(left)
        for b in _parse(right)
    )


def _algebra(left: str, right: str) -> bool:
    left_values, right_values = map(_parse, _apart(left, right))
    decided = [_same_expression(a, b) for a in left_values for b in right_values if _is_expression(a, b)]
    if decided and None not in decided:
        return any(decided)
    _, verify = _math_verify()
    return bool(verify(right_values, left_values, timeout_seconds=None, strict=True, raise_on_error=True))


def _apart(left: str, right: str) -> tuple[str, str]:
    r"""Renames `R` where the two answers also hold an `r`: the parser reads both as one variable.

    Except for `C`, which is a constant of integration in either case.
    """
    letters = set(re.sub(r"\\[a-zA-Z]+", "", left + right))
    both = sorted(letter for letter in letters - {"C"} if letter.isupper() and letter.lower() in letters)
    free = [letter for letter in "abghjklmnpqrstuvwxyz" if not {letter, letter.upper()} & letters]
    if not both or len(free) < len(both):
        return left, right
    names = dict(zip(both, free, strict=False))
    rename = functools.partial(re.sub, r"\\[a-zA-Z]+|[A-Z]", lambda match: names.get(match[0], match[0]))
    return rename(left), rename(right)


def _is_expression(*values: Any) -> bool:
    from sympy import Expr, MatrixExpr

    return all(isinstance(value, Expr) and not isinstance(value, MatrixExpr) for value in values)


def _same_expression(left: Any, right: Any) -> bool | None:
    """Equality of two closed forms by their values, at drawn points where they have variables.

    Two expressions that agree to 25 digits at random points are the same function; symbolic simplification is slower
    and knows less. None where there are no finite values (unknown functions, infinity), and where the two agree only
    for positive variables (sqrt(x^2) and x), which is left to the algebra system.
    """
    from sympy import Float, I, Rational, Symbol

    # The parser gives one letter different assumptions from one text to the next; the imaginary unit is a letter too.
    left, right = (
        value.xreplace({s: I if s.name == "i" else Symbol(s.name) for s in value.free_symbols})
        for value in (left, right)
    )
    symbols = sorted(left.free_symbols | right.free_symbols, key=lambda symbol: symbol.name)
    decimal = (left.has(Float) or right.has(Float)) and not right.is_Integer
    tolerance = Float("1e-6") if decimal else Float("1e-25", 40)
    for seed, signs in enumerate(((1, 1), (1, 1), (1, -1), (-1, 1)) if symbols else ((1, 1),)):
        draw = random.Random(seed)
        point = {s: signs[index % 2] * Rational(draw.randrange(500, 2000), 997) for index, s in enumerate(symbols)}
        a, b = (value.subs(point).doit() for value in (left, right))
        if not symbols and a.is_Rational and b.is_Rational:
            return bool(a == b)
        a, b = a.evalf(40), b.evalf(40)
        if not (a.is_number and b.is_number and a.is_finite and b.is_finite):
            return None
        if abs(a - b).evalf(40) > tolerance * max(abs(a).evalf(40), abs(b).evalf(40)) + Float("1e-35", 40):
            return None if min(signs) < 0 else False
    return True


@functools.cache
def _math_verify() -> tuple[Callable[..., list[Any]], Callable[..., bool]]:
    import math_verify
    from latex2sympy2_extended.math_normalization import NormalizationConfig

    # The library warns once per process that its own time limit (SIGALRM in the calling thread) is off; the process
    # that runs this is killed from outside instead, which also works inside C code.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Its removal of units would take the variables m, t and c for metre, tonne and cent.
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    config = [math_verify.LatexExtractionConfig(normalization_config=normalization)]
    return functools.partial(math_verify.parse, extraction_config=config, parsing_timeout=None), math_verify.verify


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> list[Any]:
    parse, _ = _math_verify()
    text = _E_NOTATION.sub(r"\1 \\times 10^{\2}", strip_percent(text))
    # latex2sympy2-extended 1.11 reads E as Euler's number, which takes no index, and no command as an index.
    text = _INDEXED_E.sub(r"\\Xi ", _NAMED_SUBSCRIPT.sub(r"_{\1}", text))
    return parse(f"${text}$", raise_on_error=True)
