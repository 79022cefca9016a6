r"""Names in front of an answer: `x = 5`, `f(x) = ...`, `\angle ABC = 40`, `(p, q) = (5, 2)`, `V_1 : V_2 = 11 : 21`.

Only a name is dropped. `2x = 42` or `x^2 = 42` says something else than 42.
"""

from __future__ import annotations

import re

from dcmdp_jax.rewards.math.notation import split_tuple, unwrap_text, without_spaces
from dcmdp_jax.rewards.math.units import vocabulary

_EQUALS = re.compile(r"(?<![<>!\\:=])(?<!_\{[a-z])(?<!_\{[a-z] )=(?!=)|\\in(?![a-zA-Z])")
_LETTERS = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|"
    "upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega|ell|hbar"
)
_QUANTITIES = vocabulary(
    "answer area length width height volume perimeter circumference radius diameter distance speed velocity rate time "
    "probability cost price sum product difference ratio total number average mean median mode range max min maximum "
    "minimum value result slope angle degree side base age weight mass gcd lcm det rank order period amplitude domain "
    "solution solutions root roots the of is a an surface final ans"
)
_INDEX = r"(?: ?_ ?(?:\{[^{}=<>]*+\}|\\[a-zA-Z]++|[a-zA-Z0-9]))?+"
_NAME = re.compile(
    r"(?:(?:\\(?:Delta|angle|measuredangle|triangle|partial)(?![a-zA-Z])|[mdS](?=\\angle|\\triangle)) ?)*+"
    rf"(?:\\(?:{_LETTERS})(?![a-zA-Z])"
    r"|\\(?:vec|overline|overrightarrow|widehat|hat|bar|dot|ddot|tilde|mathbf|mathrm|mathcal) ?\{[a-zA-Z ]++\}"
    r"|[A-Z](?: ?[A-Z]){1,5}+|[a-zA-Z])"
    rf"{_INDEX}'*+(?: ?\^ ?(?:\\\*|\*|\{{\*\}}))?+"
)
_APPLIED = re.compile(rf"(?:[fghFGHPENTSuy]{_INDEX}'*+(?:\^\{{-1\}})?+|[a-zA-Z](?=\([a-z]\)$)) ?\([^()=<>]*+\)")
_LENGTH = re.compile(r"\|(?:[A-Z]{2}|\\(?:vec|overline|overrightarrow) ?\{[a-zA-Z ]++\})\|")
_SIZE = re.compile(r"\|[^|=]++\|")
_DERIVATIVE = re.compile(r"\\frac ?\{ ?d[^{}]*+\} ?\{ ?d[^{}]*+\}")
_LETTER = re.compile(r"[a-zA-Z]")
_SEGMENT = (
    r"(?:[A-Z]{2}|\|[A-Z]{2}\||\\(?:overline|vec|overrightarrow) ?\{[A-Z]{2}\}|\[[A-Z]{3,6}\])"
    r"(?: ?\^ ?(?:\{[0-9]\}|[0-9]))?+"
)
_SEGMENTS = rf"{_SEGMENT}(?: ?(?:[+\-*/]|\\cdot|\\times) ?{_SEGMENT})*+"
_LENGTHS = re.compile(rf"{_SEGMENTS}|\\frac ?\{{{_SEGMENTS}\}} ?\{{{_SEGMENTS}\}}")


def equation_parts(text: str) -> list[str]:
    r"""The parts of an answer between its equals signs and `\in`, outside of brackets or not."""
    return [part.strip() for part in _EQUALS.split(text)]


def is_name(text: str, *, trusted: bool = False) -> bool:
    """Whether a left-hand side only names what the right-hand side gives.

    Args:
        text: the left-hand side.
        trusted: whether this is a reference answer; then `|z|` is a name too, and so is a sum, product or quotient of
            lengths such as `AB^2 + CD`.
    """
    text = text.strip()
    if any(pattern.fullmatch(text) for pattern in (_NAME, _APPLIED, _LENGTH, _DERIVATIVE)):
        return True
    words = unwrap_text(text).lower().split()
    if words and len(words[0]) > 2 and _QUANTITIES.issuperset(words):
        return True
    if trusted and (_SIZE.fullmatch(text) or _LENGTHS.fullmatch(text)):
        return True
    if ":" in text:
        return all(is_name(part) for part in text.split(":"))
    terms = [term.strip() for term in text.split("+")]
    if len(terms) > 1:  # a sum that a problem may ask for, unless it repeats a letter
        return len(set(terms)) == len(terms) and all(_LETTER.fullmatch(term) for term in terms)
    return names_of_tuple(text) is not None


def is_variable(text: str) -> bool:
    """Whether the text is one name or a function of one, such as `x_1` or `f(x)`."""
    return bool(_NAME.fullmatch(text) or _APPLIED.fullmatch(text))


def names_of_tuple(text: str) -> list[str] | None:
    """The names in `(p, q)`; None if it is no tuple of names."""
    if not (text.startswith("(") and text.endswith(")")):
        return None
    names = split_tuple(text[1:-1])
    return names if len(names) > 1 and all(_NAME.fullmatch(name) for name in names) else None


def split_label(item: str, *, trusted: bool = False) -> tuple[str | None, str]:
    """The name in front of an element, or None, and the element without it."""
    parts = equation_parts(item)
    if len(parts) == 2 and all(parts) and is_name(parts[0], trusted=trusted):
        return without_spaces(parts[0]), parts[1]
    return None, item


def named_elements(items: list[str]) -> list[str]:
    """The elements with `(p, q) = (5, 2)` as two, `p = 5` and `q = 2`."""
    expanded: list[str] = []
    for item in items:
        parts = equation_parts(item)
        names = names_of_tuple(parts[0]) if len(parts) == 2 else None
        values = split_tuple(parts[1][1:-1]) if names and parts[1][:1] == "(" and parts[1][-1:] == ")" else []
        if names and len(values) == len(names) and len(items) == 1:
            expanded += [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        else:
            expanded.append(item)
    return expanded
