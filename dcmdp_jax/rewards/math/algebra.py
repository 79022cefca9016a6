r"""Equality of two expressions, equations or inequalities in LaTeX, read by math-verify and decided by their values.

math-verify and sympy are imported on first use (about a second). Nothing here limits time or memory.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable
from typing import Any

from dcmdp_jax.rewards.math.functions import (
    DIGITS,
    is_exact,
    plain_symbols,
    same_expression,
    sample_points,
    with_exact_decimals,
)
from dcmdp_jax.rewards.math.units import vocabulary

_E_NOTATION = re.compile(r"(?<![\w.])([0-9]++(?:\.[0-9]*+)?|\.[0-9]++)[eE]([+-]?[0-9]++)(?![\w.])")
_EULER_LOOKALIKE = re.compile(r"(?<![\\a-zA-Z])E(?![a-zA-Z])|(?<=[0-9a-zA-Z} ])(?<!\\)E(?=[_^ ]|$)")
_NAMED_INDEX = re.compile(r"_ ?(?:\{ ?\\(odot|oplus|max|min) ?\}|\\(odot|oplus|max|min)(?![a-zA-Z]))")
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
_PERIODIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"([0-9]++(?:\.[0-9]++)?) ?\\degree")
_UNDERSTOOD = vocabulary(
    "frac sqrt pi sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp cdot times div infty cup cap "
    "binom lfloor rfloor lceil rceil begin end left right max min gcd lcm det sum prod int lim to mathrm operatorname "
    "mathbf leq geq neq in emptyset varnothing mathbb setminus degree lvert rvert vert mid lbrace rbrace odot oplus "
    "langle rangle notin subset parallel perp Vert ast star mod"
)
_GREEK = vocabulary(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi varpi rho varrho "
    "sigma varsigma tau upsilon phi varphi chi psi omega hbar ell"
)


def same_value(left: str, right: str, factor: Any = 1) -> bool:
    """Whether two answers in `notation.normalize_answer`'s notation are equal by algebra.

    Args:
        left: what the policy answered.
        right: the reference.
        factor: what `left` is multiplied by, a rational number.
    """
    if _VECTOR.search(left + right) and _CROSS.search(left + right):
        return False  # the parser takes a cross product for a product
    if sorted(_OWN_MEANING.findall(left)) != sorted(_OWN_MEANING.findall(right)):
        return False  # the parser takes `n!!` for `(n!)!` and an inverse function for a reciprocal
    left, right = _with_distinct_case(_with_named_parts(left), _with_named_parts(right))
    if not (_is_readable(left) and _is_readable(right)):
        return False
    if sorted(_ABBREVIATION.findall(left)) != sorted(_ABBREVIATION.findall(right)):  # `SRMC` is a name, no product
        return False
    seed = hashlib.sha256(f"{left}\0{right}".encode()).digest()
    left_values, right_values = parse(left), parse(right)
    decided = []
    for a in left_values:
        for b in right_values:
            if getattr(a, "is_Float", False) and getattr(b, "is_NumberSymbol", False):
                decided.append(False)  # digits are not e or pi
            elif _is_expression(a) and _is_expression(b):
                decided.append(same_expression(a * factor if factor != 1 else a, b, seed))
            elif factor == 1 and _is_relation(a) and _is_relation(b):
                decided.append(_same_relation(a, b, seed))
    if decided and None not in decided:
        return any(decided)
    if factor != 1 or not left_values or not right_values:
        return False
    _, verify = _math_verify()
    return bool(verify(right_values, left_values, timeout_seconds=None, strict=True, raise_on_error=True))


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
    read, _ = _math_verify()
    text = _E_NOTATION.sub(r"\1 \\times 10^{\2}", text)
    if _PERIODIC.search(text):
        text = _DEGREES.sub(r"{(\1 \\cdot \\frac{\\pi}{180})}", text)
    text = re.sub(r"\\degree ?", "", text)
    # The parser takes `2(\frac{1}{2})` for a mixed number.
    text = _PRODUCT.sub(lambda m: rf"{m[1]} \cdot (" if m[1] else rf"{m[2]} \cdot ", text)
    # latex2sympy2-extended 1.11 reads E as Euler's number, which takes no index, and no command as an index.
    text = _EULER_LOOKALIKE.sub(r"\\Xi ", _NAMED_INDEX.sub(lambda m: f"_{{{m[1] or m[2]}}}", text))
    # What it can't read it returns as text, stripped of what it takes for ornament, and what it misreads may have no
    # value at all: no ground for a reward.
    values = read(f"${text}$", raise_on_error=True)
    return [value for value in values if not isinstance(value, str) and not _is_undefined(value)]


def _is_undefined(value: Any) -> bool:
    from sympy import nan, zoo

    return getattr(value, "has", None) is not None and bool(value.has(nan, zoo))


def _is_readable(text: str) -> bool:
    """Whether the parser reads all of an answer. It may drop unknown words and commands; `25_8` is a numeral."""
    commands = (command[1:] for command in _COMMAND.findall(text))
    known = all(command in _UNDERSTOOD or command.lower() in _GREEK for command in commands)
    return known and not _NUMBER_WITH_INDEX.search(text) and not {"'", '"'} & set(text)


def _with_named_parts(text: str) -> str:
    r"""Primes, accents, changes and derivatives as parts of names: `y''` is `y_{pp}`, `\Delta p` is `p_{Delta}`.

    So is `\gamma`, which the parser takes for the gamma function: it reads `(\gamma^2 - 1)` as `\gamma(-1)^2`.
    """
    text = _CHANGE.sub(lambda m: f"{{{m[1]}_{{Delta}}}}", text)
    text = _DERIVATIVE.sub(lambda m: f"{{z_{{d{m[1]}by{m[2]}}}}}".replace("\\", ""), text)
    text = _ACCENT.sub(lambda m: f"{{{m[2] or m[3]}_{{{m[1]}{m[4] or m[5] or ''}}}}}", text)
    text = _PRIMED.sub(lambda m: f"{{{m[1]}_{{{'p' * len(m[3])}{m[2] or ''}}}}}", text)
    return _GAMMA.sub("{z_{gamma}}", text)


def _with_distinct_case(left: str, right: str) -> tuple[str, str]:
    r"""Rename `R` where the two answers also hold an `r`, `\Delta` beside `\delta`: the parser folds case.

    `C` is kept: it is a constant of integration in either case.
    """
    names = set(_LETTER_OR_COMMAND.findall(left + right))
    lower = {name.lower() for name in names if name != name.lower()} & names
    both = sorted(name for name in names if name != name.lower() and name.lower() in lower and name != "C")
    both = [name for name in both if len(name) == 1 or name[1:].lower() in _GREEK]
    if "T" not in both and _TRANSPOSED.search(left + right) and not _MATRIX.search(left + right):
        both.append("T")  # a power: the parser takes it for a transpose and drops it
    letters = {name for name in names if len(name) == 1}
    free = [letter for letter in "abghjklmnpqrstuvwxyz" if not {letter, letter.upper()} & letters]
    if len(free) < len(both):
        raise ValueError(f"too many letters to distinguish: {left!r}, {right!r}")
    new_names = dict(zip(both, free, strict=False))
    rename = functools.partial(
        _LETTER_OR_COMMAND.sub, lambda match: f"{{{new_names[match[0]]}}}" if match[0] in new_names else match[0]
    )
    return rename(left), rename(right)


def _is_expression(value: Any) -> bool:
    from sympy import Expr, MatrixExpr

    return isinstance(value, Expr) and not isinstance(value, MatrixExpr)


def _is_relation(value: Any) -> bool:
    from sympy.core.relational import Relational

    return isinstance(value, Relational) and _is_expression(value.lhs) and _is_expression(value.rhs)


def _same_relation(left: Any, right: Any, seed: bytes) -> bool | None:
    """Equations and inequalities are the same if the differences of their sides are proportional (by more than 0)."""
    from sympy import Eq, Ge, Gt, Le, Lt, Ne

    kinds = {Eq: (Eq, 1), Ne: (Ne, 1), Lt: (Lt, 1), Gt: (Lt, -1), Le: (Le, 1), Ge: (Le, -1)}
    if type(left) not in kinds or type(right) not in kinds:
        return None
    (left_kind, left_sign), (right_kind, right_sign) = kinds[type(left)], kinds[type(right)]
    if left_kind is not right_kind:
        return False
    exact = is_exact(left.lhs - left.rhs, right.lhs - right.rhs)
    a, b = (
        plain_symbols(sign * (with_exact_decimals(value.lhs) - with_exact_decimals(value.rhs)))
        for value, sign in ((left, left_sign), (right, right_sign))
    )
    if a.free_symbols != b.free_symbols:
        return False
    point = sample_points(sorted(a.free_symbols, key=str), 1, seed + b"ratio")[0]
    at_point = [value.subs(point).doit() for value in (a, b)]
    if not all(value.is_number and value.is_finite and value.evalf(DIGITS) != 0 for value in at_point):
        return None
    # b(point) a(x) = a(point) b(x) for every x
    same = same_expression(a / at_point[0], b / at_point[1], seed, exact=exact)
    if same and left_kind in (Lt, Le):
        ratio = (at_point[0] / at_point[1]).evalf(DIGITS)
        return bool(ratio.is_real and ratio > 0)
    return bool(same) if left_kind is Ne else same or None


@functools.cache
def _math_verify() -> tuple[Callable[..., list[Any]], Callable[..., bool]]:
    import math_verify
    from latex2sympy2_extended.math_normalization import NormalizationConfig

    # The library warns once per process that its own time limit (SIGALRM in the calling thread) is off; the process
    # that runs this is killed from outside instead, which also works inside C code.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Its removal of units would take the variables m, t and c for meter, tonne and cent.
    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    config = [math_verify.LatexExtractionConfig(normalization_config=normalization)]
    return functools.partial(math_verify.parse, extraction_config=config, parsing_timeout=None), math_verify.verify
