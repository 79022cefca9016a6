r"""Equality of two expressions, equations or inequalities in LaTeX, read by math-verify and decided
by their values.

Two expressions are the same function if they agree at points that an answer can't prepare for:
their seed is a hash of both answers, and their sizes reach beyond every constant in them, on both
sides of zero. What is not smooth (absolute values, floors, ...) can't be compared at points: each
such part must have its equal in the other expression.

Nothing here limits time or memory; sympy takes about a second to import, so only the worker
processes do.
"""

import functools
import hashlib
import logging
import random
import re
from fractions import Fraction
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig

from dcmdp_jax.rewards.math.notation import GREEK_COMMANDS, is_read_command
from dcmdp_jax.rewards.math.units import PERIODIC, vocabulary

_DIGITS = 60
_POINTS = 6
_MAX_DECADES = 2000
_MAX_EXACT_DIGITS = 1_000_000
_MAX_SPREAD = 200
_MAX_SPREAD_OF_EXPONENTS = 3
# The library warns once per process that its own time limit (SIGALRM in the calling thread) is off;
# the process that runs this is killed from outside instead, which also works inside C code.
logging.getLogger("math_verify").setLevel(logging.ERROR)
# Its removal of units would take the variables m, t and c for meter, tonne and cent.
_NORMALIZATION = NormalizationConfig(
    basic_latex=True,
    units=False,
    malformed_operators=True,
    nits=True,
    boxed="none",
    equations=False,
)
_EXTRACTION = [math_verify.LatexExtractionConfig(normalization_config=_NORMALIZATION)]
_KINKS = tuple(
    getattr(sympy, name)
    for name in vocabulary("Abs sign floor ceiling frac Mod Max Min Heaviside re im arg conjugate")
)
_INFINITIES = sympy.oo, -sympy.oo, sympy.zoo
_E_NOTATION = re.compile(r"(?<![\w.])([0-9]++(?:\.[0-9]*+)?|\.[0-9]++)[eE]([+-]?[0-9]++)(?![\w.])")
_EULER_LOOKALIKE = re.compile(r"(?<![\\a-zA-Z])E(?![a-zA-Z])|(?<=[0-9a-zA-Z} ])(?<!\\)E(?=[_^ ]|$)")
_NAMED_INDEX = re.compile(
    r"_ ?(?:\{ ?\\(odot|oplus|max|min) ?\}|\\(odot|oplus|max|min)(?![a-zA-Z]))"
)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_LETTER_OR_COMMAND = re.compile(r"\\[a-zA-Z]++|[a-zA-Z]")
_ABBREVIATION = re.compile(r"(?<![\\a-zA-Z])[A-Z]{3,}+(?![a-z])")
_PRIMED = re.compile(r"(\\[a-zA-Z]++|[a-zA-Z])(?:_([a-zA-Z0-9]))?('++)")
_ACCENT = re.compile(
    r"\\(dot|ddot|bar|hat|tilde|vec|overline|widehat|overrightarrow) ?(?:\{ ?([a-zA-Z]|\\[a-zA-Z]++) ?\}|([a-zA-Z]))"
    r"(?:_(?:\{([a-zA-Z0-9]++)\}|([a-zA-Z0-9])))?"
)
_CHANGE = re.compile(r"\\(?:Delta|nabla) ?([a-zA-Z]|\\(?!cdot|times)[a-zA-Z]++)(?!_)")
_GAMMA = re.compile(r"\\gamma(?![a-zA-Z]| ?_)")
_CROSS = re.compile(r"\\times(?! ?[0-9])")
_TRANSPOSED = re.compile(r"\^ ?(?:T(?![a-zA-Z])|\{ ?T ?\})")
_MATRIX = re.compile(r"\\(?:begin|mathbf)(?![a-zA-Z])")
_OWN_MEANING = re.compile(r"!!|(?<![a-zA-Z\\])[fgh] ?\^ ?\{ ?-1 ?\}")
_PRODUCT = re.compile(r"(?<![\w^{.])([0-9]++) ?\((?= ?\\frac)|(\( ?[0-9]++ ?\)) ?(?=\\frac)")
_VECTOR = re.compile(r"\\(?:vec|overrightarrow|mathbf)(?![a-zA-Z])")
_DERIVATIVE = re.compile(
    r"\\frac ?\{ ?(?:d|\\partial) ?(\\?[a-zA-Z]++)(?:\([a-z]\))? ?\} ?\{ ?(?:d|\\partial) ?([a-zA-Z]|\\[a-zA-Z]++) ?\}"
)
_NUMBER_WITH_INDEX = re.compile(r"[0-9] ?_")
# The parser takes `12 34` for a product or a sum and `0xFF` for zero times letters.
_NO_NUMBER = re.compile(r"(?<![0-9_^])[0-9]++ [0-9]|(?<![0-9._^])(?<!_\{)0++[ {}]*+[xXbBoO]")
_DEGREES = re.compile(r"([0-9]++(?:\.[0-9]++)?) ?\\degree")


def same_value(left: str, right: str, factor: Fraction | int = 1) -> bool:
    """Whether two answers in `notation.normalize_answer`'s notation are equal by algebra.

    Args:
        left: the policy's answer.
        right: the reference.
        factor: rational number that `left` is multiplied with.
    """
    if _VECTOR.search(left + right) and _CROSS.search(left + right):
        return False  # the parser takes a cross product for a product
    if sorted(_OWN_MEANING.findall(left)) != sorted(_OWN_MEANING.findall(right)):
        return False  # the parser takes `n!!` for `(n!)!` and an inverse function for a reciprocal
    left, right = _with_distinct_case(_with_named_parts(left), _with_named_parts(right))
    if not (_is_readable(left) and _is_readable(right)):
        return False
    if sorted(_ABBREVIATION.findall(left)) != sorted(
        _ABBREVIATION.findall(right)
    ):  # `SRMC` is a name, no product
        return False
    seed = hashlib.sha256(f"{left}\0{right}".encode()).digest()
    left_values = parse(left)
    right_values = parse(right)
    decided = []
    for a in left_values:
        for b in right_values:
            if getattr(a, "is_Float", False) and getattr(b, "is_NumberSymbol", False):
                decided.append(False)  # digits are not e or pi
            elif _is_expression(a) and _is_expression(b):
                decided.append(_same_expression(a * factor if factor != 1 else a, b, seed))
            elif factor == 1 and _is_relation(a) and _is_relation(b):
                decided.append(_same_relation(a, b, seed))
    if decided and None not in decided:
        return any(decided)
    if factor != 1 or not left_values or not right_values:
        return False
    return bool(
        math_verify.verify(
            right_values, left_values, timeout_seconds=None, strict=True, raise_on_error=True
        )
    )


def within(left: str, right: str, tolerance: float) -> bool:
    """Whether both answers are numbers, at most `tolerance` apart."""
    return any(
        getattr(a, "is_number", False)
        and getattr(b, "is_number", False)
        and abs(complex(a.evalf()) - complex(b.evalf())) <= tolerance
        for a in parse(left)
        for b in parse(right)
    )


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> list[Any]:
    """Parse an answer with math-verify: sympy objects, an empty list where it can't be parsed."""
    if _NO_NUMBER.search(text):
        return []
    text = _E_NOTATION.sub(r"\1 \\times 10^{\2}", text)
    if PERIODIC.search(text):
        text = _DEGREES.sub(r"{(\1 \\cdot \\frac{\\pi}{180})}", text)
    text = re.sub(r"\\degree ?", "", text)
    # The parser takes `2(\frac{1}{2})` for a mixed number.
    text = _PRODUCT.sub(lambda m: rf"{m[1]} \cdot (" if m[1] else rf"{m[2]} \cdot ", text)
    # latex2sympy2-extended 1.11 reads E as Euler's number, which takes no index, and no command as
    # an index.
    text = _EULER_LOOKALIKE.sub(r"\\Xi ", _NAMED_INDEX.sub(lambda m: f"_{{{m[1] or m[2]}}}", text))
    # What it can't read it returns as text, stripped of what it takes for ornament, and what it
    # misreads may have no value at all: no ground for a reward.
    values = math_verify.parse(f"${text}$", _EXTRACTION, parsing_timeout=None, raise_on_error=True)
    undefined = (sympy.nan, sympy.zoo)
    return [
        v
        for v in values
        if not isinstance(v, str) and not (hasattr(v, "has") and v.has(*undefined))
    ]


def _is_readable(text: str) -> bool:
    """Whether the parser reads all of an answer. It may drop unknown words and commands; `25_8` is
    a numeral.
    """
    commands = (command[1:] for command in _COMMAND.findall(text))
    known = all(is_read_command(command) for command in commands)
    return known and not _NUMBER_WITH_INDEX.search(text) and not {"'", '"'} & set(text)


def _with_named_parts(text: str) -> str:
    r"""Primes, accents, changes and derivatives as parts of names: `y''` is `y_{pp}`, `\Delta p` is
    `p_{Delta}`.

    So is `\gamma`, which the parser takes for the gamma function: it reads `(\gamma^2 - 1)` as
    `\gamma(-1)^2`.
    """
    text = _CHANGE.sub(lambda m: f"{{{m[1]}_{{Delta}}}}", text)
    text = _DERIVATIVE.sub(lambda m: f"{{z_{{d{m[1]}by{m[2]}}}}}".replace("\\", ""), text)
    text = _ACCENT.sub(lambda m: f"{{{m[2] or m[3]}_{{{m[1]}{m[4] or m[5] or ''}}}}}", text)
    text = _PRIMED.sub(lambda m: f"{{{m[1]}_{{{'p' * len(m[3])}{m[2] or ''}}}}}", text)
    return _GAMMA.sub("{z_{gamma}}", text)


def _with_distinct_case(left: str, right: str) -> tuple[str, str]:
    r"""Rename `R` where the two answers also hold an `r`, `\Delta` and `\delta`: the parser folds
    case.

    `C` is kept, because it is a constant of integration in either case.
    """
    names = set(_LETTER_OR_COMMAND.findall(left + right))
    lower = {name.lower() for name in names if name != name.lower()} & names
    both = sorted(
        name for name in names if name != name.lower() and name.lower() in lower and name != "C"
    )
    both = [name for name in both if len(name) == 1 or name[1:].lower() in GREEK_COMMANDS]
    if "T" not in both and _TRANSPOSED.search(left + right) and not _MATRIX.search(left + right):
        both.append("T")  # a power: the parser takes it for a transpose and drops it
    letters = {name for name in names if len(name) == 1}
    free = [letter for letter in "abghjklmnpqrstuvwxyz" if not {letter, letter.upper()} & letters]
    if len(free) < len(both):
        raise ValueError(f"too many letters to distinguish: {left!r}, {right!r}")
    new_names = dict(zip(both, free, strict=False))
    rename = functools.partial(
        _LETTER_OR_COMMAND.sub,
        lambda match: f"{{{new_names[match[0]]}}}" if match[0] in new_names else match[0],
    )
    return rename(left), rename(right)


def _is_expression(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and not isinstance(value, sympy.MatrixExpr)


def _is_relation(value: Any) -> bool:
    return isinstance(value, sympy.Rel) and _is_expression(value.lhs) and _is_expression(value.rhs)


def _same_relation(left: Any, right: Any, seed: bytes) -> bool | None:
    """Equations and inequalities are the same if the differences of their sides are proportional
    (by more than 0).
    """
    left, right = (
        each.reversed if isinstance(each, sympy.Gt | sympy.Ge) else each for each in (left, right)
    )
    if not {type(left), type(right)} <= {sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le}:
        return None
    if type(left) is not type(right):
        return False
    exact = _is_exact(left.lhs - left.rhs, right.lhs - right.rhs)
    a, b = (
        _plain_symbols(_with_exact_decimals(value.lhs) - _with_exact_decimals(value.rhs))
        for value in (left, right)
    )
    if a.free_symbols != b.free_symbols:
        return False
    point = _sample_points(sorted(a.free_symbols, key=str), 1, seed + b"ratio")[0]
    at_point = [value.subs(point).doit() for value in (a, b)]
    if not all(
        value.is_number and value.is_finite and value.evalf(_DIGITS) != 0 for value in at_point
    ):
        return None
    # b(point) a(x) = a(point) b(x) for every x
    same = _same_expression(a / at_point[0], b / at_point[1], seed, exact=exact)
    if same and isinstance(left, sympy.Lt | sympy.Le):
        ratio = (at_point[0] / at_point[1]).evalf(_DIGITS)
        return bool(ratio.is_real and ratio > 0)
    return bool(same) if isinstance(left, sympy.Ne) else same or None


def _plain_symbols(value: Any) -> Any:
    """The parser gives one letter different assumptions from one text to the next; the imaginary
    unit is a letter.
    """
    return value.xreplace(
        {s: sympy.I if s.name == "i" else sympy.Symbol(s.name) for s in value.free_symbols}
    )


def _same_expression(
    left: Any, right: Any, seed: bytes, *, exact: bool | None = None
) -> bool | None:
    """Whether two expressions are one function; None where values can't tell.

    They can't where there are no finite values (unknown functions) and where a part that is not
    smooth has no equal on the other side. Where a root or logarithm is taken of what is not
    positive, roots may differ: answers of physics take every quantity for positive.
    """
    exact = _is_exact(left, right) if exact is None else exact
    # Decimals first: to rebuild a sum is to add them up with 15 digits.
    left, right = (
        _plain_symbols(_with_exact_decimals(left)),
        _plain_symbols(_with_exact_decimals(right)),
    )
    decades = _decades(left, right)
    constant = not (left.free_symbols | right.free_symbols)
    if decades > _MAX_DECADES:
        return bool(left == right or (constant and _same_integers(left, right)))
    if constant and (left.has(*_INFINITIES) or right.has(*_INFINITIES)):
        return bool(left.doit() == right.doit())
    left, right = _replace_kinks(left, right, seed)  # a constant has none
    # A constant must show, however small it is.
    agree = functools.partial(_agree_at, left, right, digits=_DIGITS + 2 * decades, exact=exact)
    if constant:
        return agree({})
    symbols = sorted(left.free_symbols | right.free_symbols, key=lambda symbol: symbol.name)
    no = None if any(symbol.name.startswith("kink") for symbol in symbols) else False
    near = {agree(point) for point in _sample_points(symbols, _POINTS, seed, positive=True)}
    if near != {True}:
        return no if False in near else None
    spread = min(decades, _MAX_SPREAD_OF_EXPONENTS if _has_powers(left, right) else _MAX_SPREAD)
    either = _sample_points(symbols, 2 * _POINTS, seed + b"either") + _sample_points(
        symbols, 2 * _POINTS, seed, decades=spread
    )
    points = _sample_points(symbols, _POINTS, seed + b"wide", positive=True, decades=spread)
    verdicts = [
        agree(point) for point in points + [p for p in either if _has_one_branch(left, right, p)]
    ]
    if False in verdicts:
        return no
    return True if verdicts.count(True) >= _POINTS else None


def _same_integers(left: Any, right: Any) -> bool:
    """Whether two constants of at most `_MAX_EXACT_DIGITS` digits are one rational: `2024!` and
    `2024(2023!)`.
    """
    if max(_size(left), _size(right)) > _MAX_EXACT_DIGITS:
        return False
    left, right = left.doit(), right.doit()
    return bool(left.is_Rational and left == right)


def _is_exact(left: Any, right: Any) -> bool:
    """Whether two expressions must agree in every digit: no decimal in them is the rounding of
    something else.

    A decimal on the left is no rounding where decimals can write every constant on the right.
    """
    return not right.has(sympy.Float) and (
        not left.has(sympy.Float) or all(map(_terminates, _parts(right)))
    )


def _has_powers(*values: Any) -> bool:
    """Whether a variable stands in an exponent."""
    return any(power.exp.free_symbols for value in values for power in value.atoms(sympy.Pow))


def _terminates(constant: Any) -> bool:
    """Whether a constant has finitely many decimals. The parser leaves `10^{15}` and `15!` as they
    are written.
    """
    if constant.is_integer or _decades(constant, constant) > _MAX_DECADES:
        return bool(constant.is_integer)
    value = constant.doit()
    return isinstance(value, sympy.Rational) and 10 ** value.q.bit_length() % value.q == 0


def _with_exact_decimals(value: Any) -> Any:
    return value.xreplace(
        {part: sympy.Rational(str(part)) for part in value.atoms(sympy.Float) if part.is_finite}
    )


def _agree_at(
    left: Any, right: Any, point: dict[Any, Any], *, digits: int, exact: bool
) -> bool | None:
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
    return bool(
        abs(a - b).evalf(digits) <= sympy.Rational(1, 10 ** (digits - 10 if exact else 6)) * size
    )


def _has_one_branch(left: Any, right: Any, point: dict[Any, Any]) -> bool:
    """Whether no root at this point is of what is not positive, and logarithms of it are on both
    sides.
    """
    values = []
    for value in (left, right):
        bases = [
            power.base
            for power in value.atoms(sympy.Pow)
            if not power.exp.is_Integer and power.base.free_symbols
        ]
        if not all(base.evalf(15, subs=point).is_positive for base in bases):
            return False
        values.append(value.evalf(15, subs=point).is_real)
    logarithms = [log_.args[0] for value in (left, right) for log_ in value.atoms(sympy.log)]
    positive = all(
        argument.subs(point).evalf(15).is_positive is not False for argument in logarithms
    )
    return positive or values[0] != values[1]


def _without_noise(value: Any) -> Any:
    """Zero for what evaluates to zero as far as sympy can tell: a Float of one bit."""
    return value.xreplace(
        {part: sympy.Integer(0) for part in value.atoms(sympy.Float) if part._prec == 1}
    )


def _sample_points(
    symbols: list[Any], count: int, seed: bytes, *, positive: bool = False, decades: int = 0
) -> list[dict[Any, Any]]:
    """Points with rational coordinates, of size 0.5 to 2, or spread evenly over `decades` powers of
    ten both ways.
    """
    draw = random.Random(seed)
    columns = []
    for _ in symbols:
        signs = [1 if positive else (1, -1)[k % 2] for k in range(count)]
        powers = [
            0 if not decades else round(-decades + 2 * decades * (k + 0.5) / count)
            for k in range(count)
        ]
        draw.shuffle(signs)
        draw.shuffle(powers)
        sizes = [
            sympy.Rational(draw.randrange(10**9, 4 * 10**9), 2 * 10**9 - 57) for _ in range(count)
        ]
        columns.append(
            [
                s * size * sympy.Integer(10) ** p
                for s, size, p in zip(signs, sizes, powers, strict=True)
            ]
        )
    return [dict(zip(symbols, row, strict=True)) for row in zip(*columns, strict=True)]


def _decades(left: Any, right: Any) -> int:
    """Number of powers of ten that the constants of two expressions span together, with a
    margin.
    """
    return int(min(2.0 + _size(left) + _size(right), _MAX_DECADES)) + 1


def _size(value: Any) -> float:
    """Number of powers of ten that the constants of an expression span."""
    parts = {part for part in _parts(value) if part.is_number and part.is_finite and part != 0}
    return sum(float(abs(sympy.log(abs(part)).evalf(5))) / 2.302585 for part in parts)


def _parts(value: Any) -> list[Any]:
    """The constants that are no sums and not part of a larger one."""
    if not value.free_symbols and not value.is_Add:
        return [value]
    return [part for argument in value.args for part in _parts(argument)]


def _replace_kinks(left: Any, right: Any, seed: bytes) -> tuple[Any, Any]:
    """Both with each part that is not smooth as a variable, the same for equal parts."""
    known: list[tuple[Any, Any]] = []
    for _ in range(64):
        found = left.atoms(*_KINKS) | right.atoms(*_KINKS)
        inner = [
            part
            for part in found
            if part.free_symbols and not any(a.has(*_KINKS) for a in part.args)
        ]
        inner.sort(key=sympy.default_sort_key)
        if not inner:
            return left, right
        names = {}
        for part in inner:
            match = next((name for other, name in known if _same_kink(part, other, seed)), None)
            if match is None:
                match = sympy.Symbol(f"kink{len(known)}")
                known.append((part, match))
            names[part] = match
        left, right = left.xreplace(names), right.xreplace(names)
    return left, right


def _same_kink(left: Any, right: Any, seed: bytes) -> bool:
    if left.func is not right.func or len(left.args) != len(right.args):
        return False
    if left == right or all(
        _same_expression(a, b, seed) for a, b in zip(left.args, right.args, strict=True)
    ):
        return True
    return left.func is sympy.Abs and bool(_same_expression(left.args[0], -right.args[0], seed))
