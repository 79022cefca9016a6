r"""Names in front of an answer (`x = 5`, `f(x) = ...`, `\angle ABC = 40`, `V_1 : V_2 = 11 : 21`),
and inequalities.

Only a name is dropped. `2x = 42` or `x^2 = 42` says something else than 42. Inequalities that are
solved for a name are intervals: `x > 1` is `(1,\infty)`, `1 \leq x < 3` is `[1,3)`, `x < 1 or x >
3` is a union.
"""

import re
from fractions import Fraction

from dcmdp_jax.rewards.math import numbers, unicode, units
from dcmdp_jax.rewards.math.notation import split_elements, split_tuple, unwrap_text, without_spaces

_EQUALS = re.compile(r"(?<![<>!\\:=])(?<!_\{[a-z])(?<!_\{[a-z] )=(?!=)|\\in(?![a-zA-Z])")
_LETTERS = "|".join((*unicode.GREEK_NAMES, "vartheta", "Upsilon", "ell", "hbar"))
_QUANTITIES = units.vocabulary(
    "answer area length width height volume perimeter circumference radius diameter distance "
    "speed velocity rate time probability cost price sum product difference ratio total number "
    "average mean median mode range max min maximum minimum value result slope angle degree side "
    "base age weight mass gcd lcm det rank order period amplitude domain solution solutions root "
    "roots the of is a an surface final ans"
)
_INDEX = r"(?: ?_ ?(?:\{[^{}=<>]*+\}|\\[a-zA-Z]++|[a-zA-Z0-9]))?+"
_NAME = re.compile(
    r"(?:(?:\\(?:Delta|angle|measuredangle|triangle|partial)(?![a-zA-Z])|[mdS](?=\\angle|\\triangle)) ?)*+"
    rf"(?:\\(?:{_LETTERS})(?![a-zA-Z])"
    r"|\\(?:vec|overline|overrightarrow|widehat|hat|bar|dot|ddot|tilde|mathbf|mathrm|mathcal) ?\{[a-zA-Z ]++\}"
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
# Of an inequality.
SIGN = re.compile(r"[<>]|\\(?:leq|geq|neq)(?![a-zA-Z])")
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
    return [part.strip() for part in _EQUALS.split(text)]


def is_name(text: str, *, trusted: bool = False) -> bool:
    """Whether a left-hand side only names what the right-hand side gives.

    Args:
        text: the left-hand side.
        trusted: whether this is a reference answer; then `|z|` is a name too, and so is a sum,
            product or quotient of lengths such as `AB^2 + CD`.
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
    """The names in `(p, q)`; None for anything else."""
    if not (text.startswith("(") and text.endswith(")")):
        return None
    names = split_tuple(text[1:-1])
    return names if len(names) > 1 and all(_NAME.fullmatch(name) for name in names) else None


def split_label(item: str) -> tuple[str | None, str]:
    """The name in front of an element, or None, and the element without it."""
    parts = equation_parts(item)
    if len(parts) == 2 and all(parts) and is_name(parts[0]):
        return without_spaces(parts[0]), parts[1]
    return None, item


def named_elements(items: list[str]) -> list[str]:
    """The elements with `(p, q) = (5, 2)` as two, `p = 5` and `q = 2`."""
    parts = equation_parts(items[0]) if len(items) == 1 else []
    names = names_of_tuple(parts[0]) if len(parts) == 2 else None
    values = (
        split_tuple(parts[1][1:-1])
        if names and parts[1][:1] == "(" and parts[1][-1:] == ")"
        else []
    )
    if not names or len(values) != len(names):
        return items
    return [f"{name}={value}" for name, value in zip(names, values, strict=True)]


def as_intervals(prediction: str, gold: str, left: str, right: str) -> tuple[str, str]:
    r"""Both answers as intervals or unions of them, where each is one or is an inequality.

    Inequalities joined by "and" are one interval, by "or" or commas a union. Unchanged where the
    names differ (`y > 1` for `x \in (1,\infty)`).

    Args:
        prediction, gold: the answers as they were written.
        left: the prediction in `notation.normalize_answer`'s notation.
        right: the reference in that notation.
    """
    if not SIGN.search(left + right):
        return left, right
    found = _intervals(prediction, left), _intervals(gold, right)
    if (
        found[0] is None
        or found[1] is None
        or None not in (found[0][0], found[1][0])
        and found[0][0] != found[1][0]
    ):
        return left, right
    return found[0][1], found[1][1]


def _intervals(written: str, text: str) -> tuple[str | None, str] | None:
    """The name in an answer, if it has one, and its intervals; None if it is neither interval nor
    inequality.
    """
    if not SIGN.search(text):
        name, intervals = split_label(text)
        return (name, intervals) if _INTERVALS.fullmatch(intervals) else None
    builder = _BUILDER.fullmatch(text)
    found = [_solved(item) for item in split_elements(builder[2] if builder else text, ",")]
    names = {each[0] for each in found if each} | (
        {without_spaces(builder[1])} if builder else set()
    )
    if None in found or len(names) != 1:
        return None
    if len(found) > 1 and _AND.search(written):
        both = _intersection([each[1:] for each in found if each])
        return (names.pop(), both) if both else None
    return names.pop(), r" \cup ".join(_written(*each[1:]) for each in found if each)


def _solved(text: str) -> tuple[str, str, str, str] | None:
    """Name, relation to it from below, lower end and upper end of an inequality; None if it is not
    solved for a name.

    The fourfold: name, kinds of the ends such as `<` and `\\leq` joined by a space, lower end,
    upper end.
    """
    relations = SIGN.findall(text)
    parts = [part.strip() for part in SIGN.split(text)]
    if not relations or not all(parts):
        return None
    if all(relation in _DOWNWARD for relation in relations):
        relations = [_DOWNWARD[relation] for relation in reversed(relations)]
        parts = parts[::-1]
    if len(parts) == 3 and all(relation in _UPWARD for relation in relations):
        low, name, high = parts
    elif len(parts) == 2 and relations[0] in _UPWARD and "|" not in text:
        low, name, high = (r"-\infty", *parts) if is_variable(parts[0]) else (*parts, r"\infty")
        relations = ["<", *relations] if is_variable(parts[0]) else [*relations, "<"]
    elif (
        len(parts) == 2 and relations[0] in _UPWARD and (bounds := _absolute(*parts, relations[0]))
    ):
        return bounds
    elif len(parts) == 2 and relations == [r"\neq"]:
        low = parts[1]
        name = parts[0]
        high = parts[1]
        relations = [r"\neq"]
    else:
        return None
    if not is_variable(name) or {name} & {
        *_COMMANDS_AND_NAMES.findall(low),
        *_COMMANDS_AND_NAMES.findall(high),
    }:
        return None
    ends = numbers.parse_number(low), numbers.parse_number(high)
    if None not in ends and relations != [r"\neq"] and not ends[0] < ends[1]:
        return None
    return without_spaces(name), " ".join(relations), low, high


def _absolute(low: str, high: str, relation: str) -> tuple[str, str, str, str] | None:
    """The result of `_solved` for `|x| < 3` and `3 < |x - 1|`; the latter's ends are `outside` and
    the relation.
    """
    inside = _ABSOLUTE.fullmatch(low)
    outside = _ABSOLUTE.fullmatch(high)
    found = inside or outside
    size = numbers.parse_number(high if inside else low)
    if found is None or size is None or size <= 0:
        return None
    center = Fraction(found[3] or 0) * (1 if found[2] == "-" else -1)
    kind = f"{relation} {relation}" if inside else f"outside {relation}"
    return found[1], kind, str(center - size), str(center + size)


def _written(relations: str, low: str, high: str) -> str:
    if relations.startswith("outside"):
        start, end = _UPWARD[relations.split()[1]]
        return rf"(-\infty,{low}{end} \cup {start}{high},\infty)"
    if relations == r"\neq":
        return rf"(-\infty,{low}) \cup ({low},\infty)"
    first, second = relations.split()
    return f"{_UPWARD[first][0]}{low},{high}{_UPWARD[second][1]}"


def _intersection(found: list[tuple[str, str, str]]) -> str | None:
    """One inequality from below and one from above as an interval; None for anything else."""
    above = [each for each in found if each[2] == r"\infty"]
    below = [each for each in found if each[1] == r"-\infty"]
    if len(found) != 2 or len(above) != 1 or len(below) != 1:
        return None
    low, high = above[0][1], below[0][2]
    ends = numbers.parse_number(low), numbers.parse_number(high)
    if None not in ends and not ends[0] < ends[1]:
        return None
    return _written(f"{above[0][0].split()[0]} {below[0][0].split()[1]}", low, high)
