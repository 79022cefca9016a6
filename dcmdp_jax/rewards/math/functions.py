r"""Whether two sympy expressions are the same function, decided by their values at sampled points.

Two expressions are the same function if they agree at points that an answer can't prepare for: their seed is a hash of
both answers, and their sizes reach beyond every constant in them, on both sides of zero. What is not smooth (absolute
values, floors, ...) is no matter of points: each such part must have its equal in the other expression.
"""

from __future__ import annotations

import functools
import random
from typing import Any

DIGITS = 60
_POINTS = 6
_MAX_DECADES = 2000
_MAX_EXACT_DIGITS = 1_000_000
_MAX_SPREAD = 200
_MAX_SPREAD_OF_EXPONENTS = 3


def plain_symbols(value: Any) -> Any:
    """The parser gives one letter different assumptions from one text to the next; the imaginary unit is a letter."""
    from sympy import I, Symbol

    return value.xreplace({s: I if s.name == "i" else Symbol(s.name) for s in value.free_symbols})


def same_expression(left: Any, right: Any, seed: bytes, *, exact: bool | None = None) -> bool | None:
    """Whether two expressions are one function; None where values can't tell.

    They can't where there are no finite values (unknown functions, infinity) and where a part that is not smooth has no
    equal on the other side. Where a root or logarithm is taken of what is not positive, roots may differ: answers of
    physics take every quantity for positive.
    """
    exact = is_exact(left, right) if exact is None else exact
    # Decimals first: to rebuild a sum is to add them up with 15 digits.
    left, right = plain_symbols(with_exact_decimals(left)), plain_symbols(with_exact_decimals(right))
    symbols = sorted(left.free_symbols | right.free_symbols, key=lambda symbol: symbol.name)
    decades = _decades(left, right)
    if decades > _MAX_DECADES:
        return bool(left == right or (not symbols and _same_integers(left, right)))
    # A constant however small beside the others must show.
    digits = DIGITS + 2 * decades
    agree = functools.partial(_agree_at, left, right, digits=digits, exact=exact)
    if not symbols:
        return agree({})
    left, right = _replace_kinks(left, right, seed)
    symbols = sorted(left.free_symbols | right.free_symbols, key=lambda symbol: symbol.name)
    no = None if any(symbol.name.startswith("kink") for symbol in symbols) else False
    agree = functools.partial(_agree_at, left, right, digits=digits, exact=exact)
    near = {agree(point) for point in sample_points(symbols, _POINTS, seed, positive=True)}
    if near != {True}:
        return no if False in near else None
    spread = min(decades, _MAX_SPREAD_OF_EXPONENTS if _has_powers(left, right) else _MAX_SPREAD)
    either = sample_points(symbols, 2 * _POINTS, seed + b"either") + sample_points(
        symbols, 2 * _POINTS, seed, decades=spread
    )
    points = sample_points(symbols, _POINTS, seed + b"wide", positive=True, decades=spread)
    verdicts = [agree(point) for point in points + [p for p in either if _has_one_branch(left, right, p)]]
    if False in verdicts:
        return no
    return True if verdicts.count(True) >= _POINTS else None


def _same_integers(left: Any, right: Any) -> bool:
    """Whether two constants of at most `_MAX_EXACT_DIGITS` digits are one rational: `2024!` and `2024(2023!)`."""
    if max(_size(left), _size(right)) > _MAX_EXACT_DIGITS:
        return False
    left, right = left.doit(), right.doit()
    return bool(left.is_Rational and left == right)


def is_exact(left: Any, right: Any) -> bool:
    """Whether two expressions must agree in every digit: no decimal in them is the rounding of something else."""
    from sympy import Float

    return not (left.has(Float) or right.has(Float)) or _is_terminating(right)


def _has_powers(*values: Any) -> bool:
    """Whether a variable stands in an exponent."""
    from sympy import Pow

    return any(power.exp.free_symbols for value in values for power in value.atoms(Pow))


def _is_terminating(value: Any) -> bool:
    """Whether decimals can write every constant of an expression without rounding, and none of them is one."""
    from sympy import Float

    return not value.has(Float) and all(_terminates(part) for part in _parts(value))


def _terminates(constant: Any) -> bool:
    """Whether a constant has finitely many decimals. The parser leaves `10^{15}` and `15!` as they are written."""
    from sympy import Rational

    if constant.is_integer or _decades(constant, constant) > _MAX_DECADES:
        return bool(constant.is_integer)
    value = constant.doit()
    return isinstance(value, Rational) and 10 ** value.q.bit_length() % value.q == 0


def with_exact_decimals(value: Any) -> Any:
    from sympy import Float, Rational

    return value.xreplace({part: Rational(str(part)) for part in value.atoms(Float) if part.is_finite})


def _agree_at(left: Any, right: Any, point: dict[Any, Any], *, digits: int, exact: bool) -> bool | None:
    if _has_powers(left, right):  # sympy writes out every digit of a rational power of a rational
        a, b = (value.doit().evalf(digits, subs=point, maxn=2 * digits) for value in (left, right))
    else:
        a, b = (value.subs(point).doit() for value in (left, right))
    if a.is_Rational and b.is_Rational and (exact or a == b):
        return bool(a == b)
    a, b = (_without_noise(value.evalf(digits, maxn=2 * digits)) for value in (a, b))
    if not (a.is_number and b.is_number and a.is_finite and b.is_finite):
        return None
    size = max(abs(a).evalf(digits), abs(b).evalf(digits))
    return bool(abs(a - b).evalf(digits) <= _tolerance(digits, exact) * size)


def _tolerance(digits: int, exact: bool) -> Any:
    from sympy import Rational

    return Rational(1, 10 ** (digits - 10 if exact else 6))


def _has_one_branch(left: Any, right: Any, point: dict[Any, Any]) -> bool:
    """Whether no root at this point is of what is not positive, and logarithms of it are on both sides."""
    from sympy import Pow, log

    values = []
    for value in (left, right):
        bases = [power.base for power in value.atoms(Pow) if not power.exp.is_Integer and power.base.free_symbols]
        if not all(base.evalf(15, subs=point).is_positive for base in bases):
            return False
        values.append(value.evalf(15, subs=point).is_real)
    logarithms = [log_.args[0] for value in (left, right) for log_ in value.atoms(log)]
    if all(argument.subs(point).evalf(15).is_positive is not False for argument in logarithms):
        return True
    return values[0] != values[1]


def _without_noise(value: Any) -> Any:
    """Zero for what evaluates to zero as far as sympy can tell: a Float of one bit."""
    from sympy import Float, Integer

    return value.xreplace({part: Integer(0) for part in value.atoms(Float) if part._prec == 1})


def sample_points(
    symbols: list[Any], count: int, seed: bytes, *, positive: bool = False, decades: int = 0
) -> list[dict[Any, Any]]:
    """Points with rational coordinates: of size 0.5 to 2, or spread evenly over `decades` powers of ten both ways."""
    from sympy import Integer, Rational

    draw = random.Random(seed)
    columns = []
    for _ in symbols:
        signs = [1 if positive else (1, -1)[k % 2] for k in range(count)]
        powers = [0 if not decades else round(-decades + 2 * decades * (k + 0.5) / count) for k in range(count)]
        draw.shuffle(signs)
        draw.shuffle(powers)
        columns.append(
            [
                sign * Rational(draw.randrange(10**9, 4 * 10**9), 2 * 10**9 - 57) * Integer(10) ** power
                for sign, power in zip(signs, powers, strict=True)
            ]
        )
    return [dict(zip(symbols, row, strict=True)) for row in zip(*columns, strict=True)]


def _decades(left: Any, right: Any) -> int:
    """Number of powers of ten that the constants of two expressions span together, with a margin."""
    return int(min(2.0 + _size(left) + _size(right), _MAX_DECADES)) + 1


def _size(value: Any) -> float:
    """Number of powers of ten that the constants of an expression span."""
    from sympy import log

    parts = {part for part in _parts(value) if part.is_number and part.is_finite and part != 0}
    return sum(float(abs(log(abs(part)).evalf(5))) / 2.302585 for part in parts)


def _parts(value: Any) -> list[Any]:
    """The constants that are no sums and not part of a larger one."""
    if not value.free_symbols and not value.is_Add:
        return [value]
    return [part for argument in value.args for part in _parts(argument)]


def _replace_kinks(left: Any, right: Any, seed: bytes) -> tuple[Any, Any]:
    """Both with each part that is not smooth as a variable, the same for equal parts."""
    import sympy
    from sympy import Symbol

    kinds = tuple(
        getattr(sympy, name)
        for name in (
            "Abs", "sign", "floor", "ceiling", "frac", "Mod", "Max", "Min", "Heaviside", "re", "im", "arg", "conjugate"
        )
    )  # fmt: skip
    known: list[tuple[Any, Any]] = []
    for _ in range(64):
        found = left.atoms(*kinds) | right.atoms(*kinds)
        inner = [part for part in found if part.free_symbols and not any(a.has(*kinds) for a in part.args)]
        inner.sort(key=sympy.default_sort_key)
        if not inner:
            return left, right
        names = {}
        for part in inner:
            match = next((name for other, name in known if _same_kink(part, other, seed)), None)
            if match is None:
                match = Symbol(f"kink{len(known)}")
                known.append((part, match))
            names[part] = match
        left, right = left.xreplace(names), right.xreplace(names)
    return left, right


def _same_kink(left: Any, right: Any, seed: bytes) -> bool:
    from sympy import Abs

    if left.func is not right.func or len(left.args) != len(right.args):
        return False
    if left == right:
        return True
    if all(same_expression(a, b, seed) for a, b in zip(left.args, right.args, strict=True)):
        return True
    return left.func is Abs and bool(same_expression(left.args[0], -right.args[0], seed))
