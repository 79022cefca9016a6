r"""Inequalities as intervals: `x > 1` is `(1,\infty)`, `1 \leq x < 3` is `[1,3)`, `x < 1 or x > 3` is a union.

Only inequalities that are solved for a name: `2x > 2` is not `(1,\infty)`. In time linear in the text's length.
"""

from __future__ import annotations

import re
from fractions import Fraction

from dcmdp_jax.rewards.math.labels import is_variable, split_label
from dcmdp_jax.rewards.math.notation import split_elements, without_spaces
from dcmdp_jax.rewards.math.numbers import parse_number

_RELATION = re.compile(r"(\\leq|\\geq|\\neq)(?![a-zA-Z])|([<>])")
_UPWARD = {"<": ("(", ")"), r"\leq": ("[", "]")}
_DOWNWARD = {">": "<", r"\geq": r"\leq"}
_NAMES = re.compile(r"\\?[a-zA-Z]++")
_INTERVALS = re.compile(r"[(\[].*[,;].*[)\]]", re.DOTALL)
_BUILDER = re.compile(r"\\\{ ?([^{}|:\\]++)(?:\\in ?\\mathbb ?\{R\} ?)?(?:\\mid(?![a-zA-Z])|[|:]) ?(.*)\\\}", re.DOTALL)
_ABSOLUTE = re.compile(r"\| ?(\\?[a-zA-Z]++) ?(?:([+-]) ?([0-9]++(?:\.[0-9]++)?) ?)?\|")
_AND = re.compile(r"(?<![a-zA-Z])and(?![a-zA-Z])")


def as_intervals(prediction: str, gold: str, left: str, right: str) -> tuple[str, str]:
    r"""Both answers as intervals or unions of them, where each is one or is an inequality.

    Inequalities joined by "and" are one interval, by "or" or commas a union. Unchanged where the names differ
    (`y > 1` for `x \in (1,\infty)`).

    Args:
        prediction, gold: the answers as they were written.
        left: the prediction in `notation.normalize_answer`'s notation.
        right: the reference in that notation.
    """
    if not _RELATION.search(left + right):
        return left, right
    found = _intervals(prediction, left), _intervals(gold, right)
    if found[0] is None or found[1] is None or None not in (found[0][0], found[1][0]) and found[0][0] != found[1][0]:
        return left, right
    return found[0][1], found[1][1]


def _intervals(written: str, text: str) -> tuple[str | None, str] | None:
    """The name in an answer, if it has one, and its intervals; None if it is neither interval nor inequality."""
    if not _RELATION.search(text):
        name, intervals = split_label(text)
        return (name, intervals) if _INTERVALS.fullmatch(intervals) else None
    builder = _BUILDER.fullmatch(text)
    found = [_solved(item) for item in split_elements(builder[2] if builder else text, ",")]
    names = {each[0] for each in found if each} | ({without_spaces(builder[1])} if builder else set())
    if None in found or len(names) != 1:
        return None
    if len(found) > 1 and _AND.search(written):
        both = _intersection([each[1:] for each in found if each])
        return (names.pop(), both) if both else None
    return names.pop(), r" \cup ".join(_written(*each[1:]) for each in found if each)


def _solved(text: str) -> tuple[str, str, str, str] | None:
    """Name, relation to it from below, lower end and upper end of an inequality; None if it is not solved for a name.

    The fourfold: name, kinds of the ends such as `<` and `\\leq` joined by a space, lower end, upper end.
    """
    relations = [match[1] or match[2] for match in _RELATION.finditer(text)]
    parts = [part.strip() for part in re.split(r"\\(?:leq|geq|neq)(?![a-zA-Z])|[<>]", text)]
    if not relations or not all(parts):
        return None
    if all(relation in _DOWNWARD for relation in relations):
        relations, parts = [_DOWNWARD[relation] for relation in reversed(relations)], parts[::-1]
    if len(parts) == 3 and all(relation in _UPWARD for relation in relations):
        low, name, high = parts
    elif len(parts) == 2 and relations[0] in _UPWARD and "|" not in text:
        low, name, high = (r"-\infty", *parts) if is_variable(parts[0]) else (*parts, r"\infty")
        relations = ["<", *relations] if is_variable(parts[0]) else [*relations, "<"]
    elif len(parts) == 2 and relations[0] in _UPWARD and (bounds := _absolute(*parts, relations[0])):
        return bounds
    elif len(parts) == 2 and relations == [r"\neq"]:
        low, name, high, relations = parts[1], parts[0], parts[1], [r"\neq"]
    else:
        return None
    if not is_variable(name) or {name} & {*_NAMES.findall(low), *_NAMES.findall(high)}:
        return None
    ends = parse_number(low), parse_number(high)
    if None not in ends and relations != [r"\neq"] and not ends[0] < ends[1]:
        return None
    return without_spaces(name), " ".join(relations), low, high


def _absolute(low: str, high: str, relation: str) -> tuple[str, str, str, str] | None:
    """What `_solved` gives for `|x| < 3` and `3 < |x - 1|`, whose kind of ends is `outside` and the relation."""
    inside, outside = _ABSOLUTE.fullmatch(low), _ABSOLUTE.fullmatch(high)
    found, size = inside or outside, parse_number(high if inside else low)
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
    ends = parse_number(low), parse_number(high)
    if None not in ends and not ends[0] < ends[1]:
        return None
    return _written(f"{above[0][0].split()[0]} {below[0][0].split()[1]}", low, high)
