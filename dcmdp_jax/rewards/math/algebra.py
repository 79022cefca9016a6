r"""Equality of expressions, equations or inequalities in LaTeX, decided by their values.

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

# Digits of a comparison at a point, beside those that the constants span.
_DIGITS = 60
# Points of one kind at which two functions must agree.
_POINTS = 6
# Powers of ten that constants may span: beyond, only exact integers are compared.
_MAX_DECADES = 2000
# Digits of the largest such integer.
_MAX_EXACT_DIGITS = 1_000_000
# Powers of ten that sample points reach each way; fewer where a variable is an exponent.
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
# Functions that are not smooth.
_KINKS = tuple(
    getattr(sympy, name)
    for name in vocabulary("Abs sign floor ceiling frac Mod Max Min Heaviside re im arg conjugate")
)
_INFINITIES = sympy.oo, -sympy.oo, sympy.zoo
_E_NOTATION = re.compile(r"(?<![\w.])([0-9]++(?:\.[0-9]*+)?|\.[0-9]++)[eE]([+-]?[0-9]++)(?![\w.])")
_EULER_LOOKALIKE = re.compile(r"(?<![\\a-zA-Z])E(?![a-zA-Z])|(?<=[0-9a-zA-Z} ])(?<!\\)E(?=[_^ ]|$)")
_NAMED_INDEX = re.compile(r"_ ?(\{ ?)?\\(odot|oplus|max|min)(?(1) ?\}|(?![a-zA-Z]))")
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_LETTER_OR_COMMAND = re.compile(r"\\[a-zA-Z]++|[a-zA-Z]")
_ABBREVIATION = re.compile(r"(?<![\\a-zA-Z])[A-Z]{3,}+(?![a-z])")
_PRIMED = re.compile(r"(\\[a-zA-Z]++|[a-zA-Z])(?:_([a-zA-Z0-9]))?('++)")
_ACCENT = re.compile(
    r"\\(dot|ddot|bar|hat|tilde|vec|overline|widehat|overrightarrow) ?"
    r"(?:\{ ?([a-zA-Z]|\\[a-zA-Z]++) ?\}|([a-zA-Z]))"
    r"(?:_(?:\{([a-zA-Z0-9]++)\}|([a-zA-Z0-9])))?"
)
_CHANGE = re.compile(r"\\(?:Delta|nabla) ?([a-zA-Z]|\\(?!cdot|times)[a-zA-Z]++)(?!_)")
_GAMMA = re.compile(r"\\gamma(?![a-zA-Z]| ?_)")
_CROSS = re.compile(r"\\times(?! ?[0-9])")
_TRANSPOSED = re.compile(r"\^ ?(?:T(?![a-zA-Z])|\{ ?T ?\})")
_MATRIX = re.compile(r"\\(?:begin|mathbf)(?![a-zA-Z])")
_OWN_MEANING = re.compile(r"!!|(?<![a-zA-Z\\])[fgh] ?\^ ?\{ ?-1 ?\}")
_PRODUCT = re.compile(r"((?<![\w^{.])[0-9]++(?= ?\( ?\\frac)|\( ?[0-9]++ ?\)(?= ?\\frac)) ?")
_VECTOR = re.compile(r"\\(?:vec|overrightarrow|mathbf)(?![a-zA-Z])")
_DERIVATIVE = re.compile(
    r"\\frac ?\{ ?(?:d|\\partial) ?(\\?[a-zA-Z]++)(?:\([a-z]\))? ?\} ?"
    r"\{ ?(?:d|\\partial) ?([a-zA-Z]|\\[a-zA-Z]++) ?\}"
)
_QUOTE_OR_NUMERAL = re.compile(r"['\"]|[0-9] ?_")
# The parser takes `12 34` for a product or a sum and `0xFF` for zero times letters.
_NO_NUMBER = re.compile(r"(?<![0-9_^])[0-9]++ [0-9]|(?<![0-9._^])(?<!_\{)0++[ {}]*+[xXbBoO]")
_DEGREES = re.compile(r"([0-9]++(?:\.[0-9]++)?) ?\\degree")


def same_value(predicted: str, expected: str, factor: Fraction | int = 1) -> bool:
    """Whether two answers in `notation.normalize_answer`'s notation are equal by algebra.

    Args:
        predicted: the policy's answer.
        expected: the reference.
        factor: rational number that `predicted` is multiplied with.
    """
    if _VECTOR.search(predicted + expected) and _CROSS.search(predicted + expected):
        return False  # the parser takes a cross product for a product
    if sorted(_OWN_MEANING.findall(predicted)) != sorted(_OWN_MEANING.findall(expected)):
        return False  # the parser takes `n!!` for `(n!)!` and an inverse function for a reciprocal
    predicted, expected = _with_distinct_case(
        _with_named_parts(predicted), _with_named_parts(expected)
    )
    if not (_is_readable(predicted) and _is_readable(expected)):
        return False
    if sorted(_ABBREVIATION.findall(predicted)) != sorted(_ABBREVIATION.findall(expected)):
        return False  # `SRMC` is a name, no product

    seed = hashlib.sha256(f"{predicted}\0{expected}".encode()).digest()
    predicted_values = parse(predicted)
    expected_values = parse(expected)
    verdicts = []
    for predicted_value in predicted_values:
        for expected_value in expected_values:
            is_decimal = getattr(predicted_value, "is_Float", False)
            if is_decimal and getattr(expected_value, "is_NumberSymbol", False):
                verdicts.append(False)  # digits are not e or pi
            elif _is_expression(predicted_value) and _is_expression(expected_value):
                scaled_value = predicted_value
                if factor != 1:
                    scaled_value = predicted_value * factor
                verdicts.append(_same_expression(scaled_value, expected_value, seed))
            elif factor == 1 and _is_relation(predicted_value) and _is_relation(expected_value):
                verdicts.append(_same_relation(predicted_value, expected_value, seed))

    if verdicts and None not in verdicts:
        return any(verdicts)
    if factor != 1 or not predicted_values or not expected_values:
        return False  # math-verify takes no factor, and an empty list is an unreadable answer

    # Undecided, or no two values of one kind: math-verify compares them.
    return _library_verifies(predicted_values, expected_values)


def _library_verifies(predicted_values: list[Any], expected_values: list[Any]) -> bool:
    """Whether a predicted and an expected value are equal to math-verify."""
    is_equal = math_verify.verify(
        expected_values,
        predicted_values,
        timeout_seconds=None,
        strict=True,
        raise_on_error=True,
    )
    return bool(is_equal)


def within(predicted: str, expected: str, tolerance: float) -> bool:
    """Whether both answers are numbers, at most `tolerance` apart."""
    for predicted_value in parse(predicted):
        for expected_value in parse(expected):
            if not getattr(predicted_value, "is_number", False):
                continue
            if not getattr(expected_value, "is_number", False):
                continue
            if abs(complex(predicted_value.evalf()) - complex(expected_value.evalf())) <= tolerance:
                return True
    return False


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
    text = _PRODUCT.sub(r"\1 \\cdot ", text)
    # latex2sympy2-extended 1.11 reads E as Euler's number, which takes no index, and no command as
    # an index.
    text = _NAMED_INDEX.sub(r"_{\2}", text)
    text = _EULER_LOOKALIKE.sub(r"\\Xi ", text)

    values = math_verify.parse(f"${text}$", _EXTRACTION, parsing_timeout=None, raise_on_error=True)
    # What it can't read it returns as text, stripped of what it takes for ornament, and what it
    # misreads may have no value at all: no ground for a reward.
    readable_values = []
    for value in values:
        is_undefined = hasattr(value, "has") and value.has(sympy.nan, sympy.zoo)
        if not isinstance(value, str) and not is_undefined:
            readable_values.append(value)
    return readable_values


def _is_readable(text: str) -> bool:
    """Whether the parser reads all of an answer: it may drop words; `25_8` is a numeral."""
    if not all(map(is_read_command, _COMMAND.findall(text))):
        return False
    return not _QUOTE_OR_NUMERAL.search(text)


def _with_named_parts(text: str) -> str:
    r"""Make primes, accents, changes and derivatives parts of names: `\Delta p` is `p_{Delta}`.

    `y''` is `y_{pp}`. So is `\gamma`, which the parser takes for the gamma function: it reads
    `(\gamma^2 - 1)` as `\gamma(-1)^2`.
    """
    text = _CHANGE.sub(r"{\1_{Delta}}", text)
    text = _DERIVATIVE.sub(lambda m: f"{{z_{{d{m[1]}by{m[2]}}}}}".replace("\\", ""), text)
    text = _ACCENT.sub(lambda m: f"{{{m[2] or m[3]}_{{{m[1]}{m[4] or m[5] or ''}}}}}", text)
    text = _PRIMED.sub(lambda m: f"{{{m[1]}_{{{'p' * len(m[3])}{m[2] or ''}}}}}", text)
    return _GAMMA.sub("{z_{gamma}}", text)


def _with_distinct_case(predicted: str, expected: str) -> tuple[str, str]:
    r"""Rename `R` where an answer also holds an `r`, `\Delta` and `\delta`: the parser folds case.

    `C` is kept, because it is a constant of integration in either case.
    """
    both = predicted + expected
    names = set(_LETTER_OR_COMMAND.findall(both))
    renamed = []
    for name in sorted(names - {"C"}):
        lower = name.lower()
        if name != lower and lower in names and (len(name) == 1 or lower[1:] in GREEK_COMMANDS):
            renamed.append(name)
    if "T" not in renamed and _TRANSPOSED.search(both) and not _MATRIX.search(both):
        renamed.append("T")  # a power: the parser takes it for a transpose and drops it

    unused_letters = []
    for letter in "abghjklmnpqrstuvwxyz":
        if not names & {letter, letter.upper()}:
            unused_letters.append(letter)
    if len(unused_letters) < len(renamed):
        raise ValueError(f"too many letters to distinguish: {predicted!r}, {expected!r}")
    new_names = {}
    for name, letter in zip(renamed, unused_letters, strict=False):
        new_names[name] = f"{{{letter}}}"

    def rename(text: str) -> str:
        return _LETTER_OR_COMMAND.sub(lambda match: new_names.get(match[0], match[0]), text)

    return rename(predicted), rename(expected)


def _is_expression(value: Any) -> bool:
    return isinstance(value, sympy.Expr) and not isinstance(value, sympy.MatrixExpr)


def _is_relation(value: Any) -> bool:
    return isinstance(value, sympy.Rel) and _is_expression(value.lhs) and _is_expression(value.rhs)


def _difference(relation: Any) -> Any:
    return _normalized(relation.lhs) - _normalized(relation.rhs)


def _same_relation(predicted: Any, expected: Any, seed: bytes) -> bool | None:
    """Whether the differences of the sides of two relations are proportional.

    The factor of inequalities must be positive. None where math-verify must decide: relations that
    are not proportional may have the same solutions, such as (x + y)^3 = 1 and x + y = 1.
    """
    if isinstance(predicted, sympy.Gt | sympy.Ge):
        predicted = predicted.reversed
    if isinstance(expected, sympy.Gt | sympy.Ge):
        expected = expected.reversed
    if type(predicted) is not type(expected):
        return False

    written_predicted = predicted.lhs - predicted.rhs
    written_expected = expected.lhs - expected.rhs
    exact = _is_exact(written_predicted, written_expected)
    predicted_difference = _difference(predicted)
    expected_difference = _difference(expected)
    if predicted_difference.free_symbols != expected_difference.free_symbols:
        return False
    symbols = sorted(predicted_difference.free_symbols, key=str)
    if not symbols:
        return _same_sides(predicted, expected, seed)
    point = _sample_points(symbols, 1, seed + b"ratio")[0]
    predicted_scale = predicted_difference.subs(point).doit()
    expected_scale = expected_difference.subs(point).doit()
    is_proportional = None
    if _is_scale(predicted_scale) and _is_scale(expected_scale):
        is_proportional = _same_expression(
            predicted_difference / predicted_scale,
            expected_difference / expected_scale,
            seed,
            exact=exact,
        )

    if isinstance(predicted, sympy.Lt | sympy.Le):
        if not is_proportional:
            return None
        ratio = (predicted_scale / expected_scale).evalf(_DIGITS)
        return bool(ratio.is_real and ratio > 0)
    if is_proportional:
        return True
    # math-verify 0.9 compares the lists of solutions that sympy finds. If it finds none of either,
    # as of |x| + |y| = 1 and |x| + |y| = 2, it takes the two for equal. For two inequations (`!=`)
    # that are not equal it raises KeyError.
    if isinstance(predicted, sympy.Eq) and _is_solvable(expected):
        return None
    if is_proportional is False:
        return False
    # The differences are equal, or opposite.
    return _library_verifies([written_predicted], [written_expected]) or _library_verifies(
        [-written_predicted], [written_expected]
    )


def _same_sides(predicted: Any, expected: Any, seed: bytes) -> bool:
    """Whether two relations have equal sides, in either order for `=` and `!=`.

    For relations without a variable: each is true or false, and `2 < 3` is still no answer where
    `4 < 6` is expected.
    """
    orders = [predicted.args]
    if isinstance(predicted, sympy.Eq | sympy.Ne):
        orders.append(predicted.args[::-1])
    for left, right in orders:
        same_left = _same_expression(left, expected.lhs, seed)
        if same_left and _same_expression(right, expected.rhs, seed):
            return True
    return False


def _is_scale(value: Any) -> bool:
    """Whether a difference's value at a point can be divided by."""
    return bool(value.is_number and value.is_finite and value.evalf(_DIGITS) != 0)


def _is_solvable(equation: Any) -> bool:
    """Whether sympy finds a solution of an equation."""
    try:
        return bool(sympy.solve(equation, equation.free_symbols))
    except Exception:  # sympy's are of many kinds
        return False


def _normalized(value: Any) -> Any:
    """Give a letter the same assumptions in all texts, make `i` the imaginary unit.

    Decimals become rationals: sympy adds them up with 15 digits when it rebuilds a sum.
    """
    replacements = {}
    for decimal in value.atoms(sympy.Float):
        if decimal.is_finite:
            replacements[decimal] = sympy.Rational(str(decimal))
    for symbol in value.free_symbols:
        replacements[symbol] = sympy.Symbol(symbol.name)
        if symbol.name == "i":
            replacements[symbol] = sympy.I
    return value.xreplace(replacements)


def _same_expression(
    predicted: Any,
    expected: Any,
    seed: bytes,
    *,
    exact: bool | None = None,
) -> bool | None:
    """Whether two expressions are one function; None where values can't tell.

    They can't where there are no finite values (unknown functions) and where a part that is not
    smooth has no equal on the other side. Where a root or logarithm is taken of what is not
    positive, roots may differ: answers of physics take every quantity for positive.
    """
    if exact is None:
        exact = _is_exact(predicted, expected)
    predicted = _normalized(predicted)
    expected = _normalized(expected)
    decades = _decades(predicted, expected)
    is_constant = not (predicted.free_symbols | expected.free_symbols)
    if decades > _MAX_DECADES:
        return bool(predicted == expected or (is_constant and _same_integers(predicted, expected)))
    if is_constant and (predicted.has(*_INFINITIES) or expected.has(*_INFINITIES)):
        return bool(predicted.doit() == expected.doit())

    predicted, expected = _replace_kinks(predicted, expected, seed)  # a constant has none
    # A constant must show, however small it is.
    agree = functools.partial(
        _agree_at,
        predicted,
        expected,
        digits=_DIGITS + 2 * decades,
        exact=exact,
    )
    if is_constant:
        return agree({})
    symbols = sorted(predicted.free_symbols | expected.free_symbols, key=str)
    has_kinks = any(symbol.name.startswith("kink") for symbol in symbols)
    verdict_if_unequal = False
    if has_kinks:
        verdict_if_unequal = None

    points = _sample_points(symbols, _POINTS, seed, positive=True)
    verdicts = set(map(agree, points))
    if False in verdicts:
        return verdict_if_unequal
    if None in verdicts:
        return None

    max_spread = _MAX_SPREAD
    if _has_powers(predicted, expected):
        max_spread = _MAX_SPREAD_OF_EXPONENTS
    spread = min(decades, max_spread)
    points = _sample_points(symbols, _POINTS, seed + b"wide", positive=True, decades=spread)
    any_sign_points = _sample_points(symbols, 2 * _POINTS, seed + b"either")
    any_sign_points += _sample_points(symbols, 2 * _POINTS, seed, decades=spread)
    for point in any_sign_points:
        if _has_one_branch(predicted, expected, point):
            points.append(point)
    verdicts = list(map(agree, points))
    if False in verdicts:
        return verdict_if_unequal
    if verdicts.count(True) < _POINTS:
        return None
    return True


def _same_integers(predicted: Any, expected: Any) -> bool:
    """Whether two constants are one rational, such as `2024!` and `2024(2023!)`."""
    if max(_size(predicted), _size(expected)) > _MAX_EXACT_DIGITS:
        return False
    predicted = predicted.doit()
    return bool(predicted.is_Rational and predicted == expected.doit())


def _is_exact(predicted: Any, expected: Any) -> bool:
    """Whether two expressions must agree in every digit: no decimal in them is a rounding.

    A predicted decimal is no rounding where decimals can write every expected constant.
    """
    if expected.has(sympy.Float):
        return False
    return not predicted.has(sympy.Float) or all(map(_terminates, _constants(expected)))


def _has_powers(predicted: Any, expected: Any) -> bool:
    """Whether a variable stands in an exponent."""
    powers = predicted.atoms(sympy.Pow) | expected.atoms(sympy.Pow)
    return any(power.exp.free_symbols for power in powers)


def _terminates(constant: Any) -> bool:
    """Whether a constant has finitely many decimals; the parser leaves `10^{15}` as written."""
    if constant.is_integer or _decades(constant, constant) > _MAX_DECADES:
        return bool(constant.is_integer)
    value = constant.doit()
    return isinstance(value, sympy.Rational) and 10 ** value.q.bit_length() % value.q == 0


def _agree_at(
    predicted: Any,
    expected: Any,
    point: dict[Any, Any],
    *,
    digits: int,
    exact: bool,
) -> bool | None:
    """Whether two expressions have one value at a point; None where they have none there."""
    if _has_powers(predicted, expected):
        # sympy writes out every digit of a rational power of a rational.
        predicted = predicted.doit().evalf(digits, subs=point, maxn=2 * digits)
        expected = expected.doit().evalf(digits, subs=point, maxn=2 * digits)
    else:
        predicted = predicted.subs(point).doit()
        expected = expected.subs(point).doit()
    if predicted.is_Rational and expected.is_Rational and (exact or predicted == expected):
        return bool(predicted == expected)

    predicted = _without_noise(predicted.evalf(digits, maxn=2 * digits))
    expected = _without_noise(expected.evalf(digits, maxn=2 * digits))
    if not (
        predicted.is_number and expected.is_number and predicted.is_finite and expected.is_finite
    ):
        return None
    size = max(abs(predicted).evalf(digits), abs(expected).evalf(digits))
    tolerance = sympy.Rational(1, 10 ** (digits - 10 if exact else 6))
    return bool(abs(predicted - expected).evalf(digits) <= tolerance * size)


def _has_one_branch(predicted: Any, expected: Any, point: dict[Any, Any]) -> bool:
    """Whether roots and logarithms are defined by positive values at a point.

    A logarithm of another value counts where only one side is real with it.
    """
    are_real = []
    for value in (predicted, expected):
        for power in value.atoms(sympy.Pow):
            is_root = not power.exp.is_Integer and power.base.free_symbols
            if is_root and not power.base.evalf(15, subs=point).is_positive:
                return False
        are_real.append(value.evalf(15, subs=point).is_real)

    for logarithm in predicted.atoms(sympy.log) | expected.atoms(sympy.log):
        if logarithm.args[0].subs(point).evalf(15).is_positive is False:
            return are_real[0] != are_real[1]
    return True


def _without_noise(value: Any) -> Any:
    """Zero for what evaluates to zero as far as sympy can tell: a Float of one bit."""
    noise = [number for number in value.atoms(sympy.Float) if number._prec == 1]
    return value.xreplace(dict.fromkeys(noise, sympy.Integer(0)))


def _sample_points(
    symbols: list[Any],
    count: int,
    seed: bytes,
    *,
    positive: bool = False,
    decades: int = 0,
) -> list[dict[Any, Any]]:
    """Draw points with rational coordinates of size 0.5 to 2, times a power of ten.

    The powers are spread evenly over `decades` both ways.
    """
    draw = random.Random(seed)

    def coordinates() -> list[Any]:
        signs = ([1, -1] * count)[:count]
        if positive:
            signs = [1] * count
        powers = [round(-decades + 2 * decades * (k + 0.5) / count) for k in range(count)]
        draw.shuffle(signs)
        draw.shuffle(powers)
        values = []
        for sign, power in zip(signs, powers, strict=True):
            size = sympy.Rational(draw.randrange(10**9, 4 * 10**9), 2 * 10**9 - 57)
            values.append(sign * size * sympy.Integer(10) ** power)
        return values

    columns = [coordinates() for _ in symbols]
    return [dict(zip(symbols, row, strict=True)) for row in zip(*columns, strict=True)]


def _decades(predicted: Any, expected: Any) -> int:
    """Number of powers of ten that the constants of both expressions span, with a margin."""
    return int(min(2.0 + _size(predicted) + _size(expected), _MAX_DECADES)) + 1


def _size(value: Any) -> float:
    """Number of powers of ten that the constants of an expression span."""
    decades = 0.0
    for constant in set(_constants(value)):
        if constant.is_number and constant.is_finite and constant != 0:
            decades += float(abs(sympy.log(abs(constant)).evalf(5))) / 2.302585
    return decades


def _constants(value: Any) -> list[Any]:
    """The constants that are no sums and not part of a larger one."""
    if not value.free_symbols and not value.is_Add:
        return [value]
    constants = []
    for argument in value.args:
        constants += _constants(argument)
    return constants


def _replace_kinks(predicted: Any, expected: Any, seed: bytes) -> tuple[Any, Any]:
    """Both with each part that is not smooth as a variable, the same for equal parts."""
    variables = {}
    for _ in range(64):
        innermost = []
        for kink in predicted.atoms(*_KINKS) | expected.atoms(*_KINKS):
            if kink.free_symbols and not any(value.has(*_KINKS) for value in kink.args):
                innermost.append(kink)
        if not innermost:
            return predicted, expected

        replacements = {}
        for kink in sorted(innermost, key=sympy.default_sort_key):
            equal_kink = kink
            for other in variables:
                if _same_kink(kink, other, seed):
                    equal_kink = other
                    break
            new_variable = sympy.Symbol(f"kink{len(variables)}")
            replacements[kink] = variables.setdefault(equal_kink, new_variable)
        predicted = predicted.xreplace(replacements)
        expected = expected.xreplace(replacements)
    return predicted, expected


def _same_kink(predicted: Any, expected: Any, seed: bytes) -> bool:
    if predicted.func is not expected.func or len(predicted.args) != len(expected.args):
        return False
    arguments = zip(predicted.args, expected.args, strict=True)
    if predicted == expected or all(_same_expression(a, b, seed) for a, b in arguments):
        return True
    return predicted.func is sympy.Abs and bool(
        _same_expression(predicted.args[0], -expected.args[0], seed)
    )
