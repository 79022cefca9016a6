r"""Names in front of an answer, and inequalities.

Names are those of `x = 5`, `f(x) = ...`, `\angle ABC = 40`, `V_1 : V_2 = 11 : 21`. Only a name is
dropped. `2x = 42` or `x^2 = 42` says something else than 42. Inequalities that are
solved for a name are intervals: `x > 1` is `(1,\infty)`, `1 \leq x < 3` is `[1,3)`, `x < 1 or x >
3` is a union.
"""

import itertools
import re
from fractions import Fraction

from dcmdp_jax.rewards.math import numbers, unicode, units
from dcmdp_jax.rewards.math.notation import split_elements, split_tuple, unwrap_text, without_spaces

_EQUALS = re.compile(r"(?<![<>!\\:=])(?<!_\{[a-z])(?<!_\{[a-z] )=(?!=)|\\in(?![a-zA-Z])")
_LETTERS = "|".join((*unicode.GREEK_NAMES, "vartheta", "Upsilon", "ell", "hbar"))
_QUANTITIES = units.vocabulary(
    """
    answer area length width height volume perimeter circumference radius diameter distance speed
    velocity rate time probability cost price sum product difference ratio total number average
    mean median mode range max min maximum minimum value result slope angle degree side base age
    weight mass gcd lcm det rank order period amplitude domain solution solutions root roots the of
    is a an surface final ans
    """
)
_INDEX = r"(?: ?_ ?(?:\{[^{}=<>]*+\}|\\[a-zA-Z]++|[a-zA-Z0-9]))?+"
_NAME = re.compile(
    r"(?:(?:\\(?:Delta|angle|measuredangle|triangle|partial)(?![a-zA-Z])"
    r"|[mdS](?=\\angle|\\triangle)) ?)*+"
    rf"(?:\\(?:{_LETTERS})(?![a-zA-Z])"
    r"|\\(?:vec|overline|overrightarrow|widehat|hat|bar|dot|ddot|tilde|mathbf|mathrm|mathcal)"
    r" ?\{[a-zA-Z ]++\}"
    r"|[A-Z](?: ?[A-Z]){1,5}+|[a-zA-Z])"
    rf"{_INDEX}'*+(?: ?\^ ?(?:\\\*|\*|\{{\*\}}))?+"
)
_APPLIED = re.compile(
    rf"(?:[fghFGHPENTSuy]{_INDEX}'*+(?:\^\{{-1\}})?+|[a-zA-Z](?=\([a-z]\)$)) ?\([^()=<>]*+\)"
)
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
SIGN = re.compile(r"[<>]|\\(?:leq|geq|neq)(?![a-zA-Z])")
"""Sign of an inequality."""
# Sign that points upward -> brackets of its interval; sign that points downward -> its mirror.
_UPWARD = {"<": ("(", ")"), r"\leq": ("[", "]")}
_DOWNWARD = {">": "<", r"\geq": r"\leq"}
_COMMANDS_AND_NAMES = re.compile(r"\\?[a-zA-Z]++")
_INTERVALS = re.compile(r"[(\[].*[,;].*[)\]]", re.DOTALL)
_BUILDER = re.compile(
    r"\\\{ ?([^{}|:\\]++)(?:\\in ?\\mathbb ?\{R\} ?)?(?:\\mid(?![a-zA-Z])|[|:]) ?(.*)\\\}",
    re.DOTALL,
)
_ABSOLUTE = re.compile(r"\| ?(\\?[a-zA-Z]++) ?(?:([+-]) ?([0-9]++(?:\.[0-9]++)?) ?)?\|")
_AND = re.compile(r"(?<![a-zA-Z])and(?![a-zA-Z])")


def equation_parts(text: str) -> list[str]:
    r"""The parts of an answer between its equals signs and `\in`, outside of brackets or not."""
    return [side.strip() for side in _EQUALS.split(text)]


def is_name(text: str, *, trusted: bool = False) -> bool:
    """Whether a left-hand side only names what the right-hand side gives.

    Args:
        text: the left-hand side.
        trusted: whether this is a reference answer; then `|z|` is a name too, and so is a sum,
            product or quotient of lengths such as `AB^2 + CD`.
    """
    text = text.strip()
    patterns = [_NAME, _APPLIED, _LENGTH, _DERIVATIVE]
    if trusted:
        patterns += [_SIZE, _LENGTHS]
    if any(pattern.fullmatch(text) for pattern in patterns):
        return True
    words = unwrap_text(text).lower().split()
    if words and len(words[0]) > 2 and _QUANTITIES.issuperset(words):
        return True
    if ":" in text:
        return all(map(is_name, text.split(":")))
    terms = [term.strip() for term in text.split("+")]
    if len(terms) > 1:  # a sum that a problem may ask for, unless it repeats a letter
        return len(set(terms)) == len(terms) and all(map(_LETTER.fullmatch, terms))
    return names_of_tuple(text) is not None


def is_variable(text: str) -> bool:
    """Whether the text is one name or a function of one, such as `x_1` or `f(x)`."""
    return bool(_NAME.fullmatch(text) or _APPLIED.fullmatch(text))


def names_of_tuple(text: str) -> list[str] | None:
    """The names in `(p, q)`; None for anything else."""
    names = _tuple_elements(text)
    if len(names) < 2 or not all(map(_NAME.fullmatch, names)):
        return None
    return names


def _tuple_elements(text: str) -> list[str]:
    """The elements in parentheses around the whole; none without these."""
    if not (text.startswith("(") and text.endswith(")")):
        return []
    return split_tuple(text[1:-1])


def split_label(item: str) -> tuple[str | None, str]:
    """The name in front of an element, or None, and the element without it."""
    sides = equation_parts(item)
    if len(sides) == 2 and all(sides) and is_name(sides[0]):
        return without_spaces(sides[0]), sides[1]
    return None, item


def named_elements(items: list[str]) -> list[str]:
    """The elements with `(p, q) = (5, 2)` as two, `p = 5` and `q = 2`."""
    if len(items) != 1:
        return items
    sides = equation_parts(items[0])
    if len(sides) != 2:
        return items
    names = names_of_tuple(sides[0])
    values = _tuple_elements(sides[1])
    if names is None or len(values) != len(names):
        return items
    return [f"{name}={value}" for name, value in zip(names, values, strict=True)]


def as_intervals(prediction: str, gold: str, predicted: str, expected: str) -> tuple[str, str]:
    r"""Both answers as intervals or unions of them, where each is one or is an inequality.

    Inequalities joined by "and" are one interval, by "or" or commas a union. Unchanged where the
    names differ (`y > 1` for `x \in (1,\infty)`).

    Args:
        prediction, gold: the answers as they were written.
        predicted: the prediction in `notation.normalize_answer`'s notation.
        expected: the reference in that notation.
    """
    if not SIGN.search(predicted + expected):
        return predicted, expected
    predicted_solution = _intervals(prediction, predicted)
    expected_solution = _intervals(gold, expected)
    if predicted_solution is None or expected_solution is None:
        return predicted, expected
    predicted_name, predicted_intervals = predicted_solution
    expected_name, expected_intervals = expected_solution
    if predicted_name and expected_name and predicted_name != expected_name:
        return predicted, expected
    return predicted_intervals, expected_intervals


def _intervals(written: str, text: str) -> tuple[str | None, str] | None:
    """The name, if any, and the intervals in an answer; None without interval or inequality."""
    if not SIGN.search(text):
        name, intervals = split_label(text)
        if not _INTERVALS.fullmatch(intervals):
            return None
        return name, intervals
    names = set()
    builder = _BUILDER.fullmatch(text)
    if builder:
        names.add(without_spaces(builder[1]))
        text = builder[2]
    bounds = []
    for item in split_elements(text, ","):
        solution = _solved(item)
        if solution is None:
            return None
        names.add(solution[0])
        bounds.append(solution[1:])
    if len(names) != 1:
        return None

    if len(bounds) > 1 and _AND.search(written):
        intervals = _intersection(bounds)
        if intervals is None:
            return None
        return names.pop(), intervals
    return names.pop(), r" \cup ".join(itertools.starmap(_written, bounds))


def _solved(text: str) -> tuple[str, list[str], str, str] | None:
    r"""Name, kinds of the ends, lower end and upper end of an inequality; None if it is unsolved.

    The kinds are two signs such as `<` and `\leq`, or see `_written`.
    """
    relations = SIGN.findall(text)
    sides = [side.strip() for side in SIGN.split(text)]
    if not all(sides):
        return None
    if all(relation in _DOWNWARD for relation in relations):
        relations = [_DOWNWARD[relation] for relation in reversed(relations)]
        sides.reverse()

    if len(sides) == 3 and _UPWARD.keys() >= set(relations):
        low, name, high = sides
    elif relations == [r"\neq"]:
        name, low = sides
        high = low
    elif len(sides) == 2 and relations[0] in _UPWARD:
        if "|" in text:
            return _absolute(sides[0], sides[1], relations[0])
        if is_variable(sides[0]):
            low = r"-\infty"
            name, high = sides
            relations.insert(0, "<")
        else:
            low, name = sides
            high = r"\infty"
            relations.append("<")
    else:
        return None

    if not is_variable(name) or name in _COMMANDS_AND_NAMES.findall(f"{low} {high}"):
        return None
    if relations != [r"\neq"] and _is_empty(low, high):
        return None
    return without_spaces(name), relations, low, high


def _is_empty(low: str, high: str) -> bool:
    """Whether both ends are numbers and in the wrong order."""
    low_number = numbers.parse_number(low)
    high_number = numbers.parse_number(high)
    return low_number is not None and high_number is not None and low_number >= high_number


def _absolute(low: str, high: str, relation: str) -> tuple[str, list[str], str, str] | None:
    """The result of `_solved` for `|x| < 3` and `3 < |x - 1|`, whose first kind is `outside`."""
    match = _ABSOLUTE.fullmatch(low)
    size = numbers.parse_number(high)
    kind = relation
    if match is None:
        match = _ABSOLUTE.fullmatch(high)
        size = numbers.parse_number(low)
        kind = "outside"
    if match is None or size is None or size <= 0:
        return None
    center = Fraction(match[3] or 0)
    if match[2] != "-":
        center = -center
    return match[1], [kind, relation], str(center - size), str(center + size)


def _written(relations: list[str], low: str, high: str) -> str:
    r"""The interval or union of kinds of ends such as `<, \leq`, of `outside, <` or of `\neq`."""
    if relations == [r"\neq"]:
        return rf"(-\infty,{low}) \cup ({low},\infty)"
    lower, upper = relations
    if lower == "outside":
        start, end = _UPWARD[upper]
        return rf"(-\infty,{low}{end} \cup {start}{high},\infty)"
    return f"{_UPWARD[lower][0]}{low},{high}{_UPWARD[upper][1]}"


def _intersection(bounds: list[tuple[list[str], str, str]]) -> str | None:
    """One inequality from below and one from above as an interval; None for anything else."""
    above = [bound for bound in bounds if bound[2] == r"\infty"]
    below = [bound for bound in bounds if bound[1] == r"-\infty"]
    if len(bounds) != 2 or len(above) != 1 or len(below) != 1:
        return None
    lower, low, _ = above[0]
    upper, _, high = below[0]
    if _is_empty(low, high):
        return None
    return _written([lower[0], upper[1]], low, high)
