r"""Equivalence of two answers: literal comparison first, then structure, then `algebra`.

Nothing here limits time or memory, and a hostile answer (`9^{9^{9^9}}`) never ends: training grades
through `verifier.Verifier`, which runs this in processes that it can kill.

A false reward is worse than a missed one, because the policy learns it. Answers that neither a rule
nor algebra proves equal get no reward.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from dcmdp_jax.rewards.math import algebra
from dcmdp_jax.rewards.math.answers import compare_literals, split_tolerance
from dcmdp_jax.rewards.math.notation import (
    nesting,
    normalize_answer,
    split_elements,
    split_tuple,
    unwrap_text,
    without_spaces,
)
from dcmdp_jax.rewards.math.numbers import parse_number
from dcmdp_jax.rewards.math.relations import (
    SIGN,
    as_intervals,
    equation_parts,
    is_name,
    named_elements,
    split_label,
)
from dcmdp_jax.rewards.math.units import factors, measures

_INTERVAL_ENDS = re.compile(r"([\[(]).*([\])])", re.DOTALL)
_MATRIX = re.compile(
    r"\\begin ?\{([bpB]?matrix)\}((?:(?!\\begin|\\end).)*+)\\end ?\{\1\}", re.DOTALL
)
_UNION = re.compile(r"\\cup(?![a-zA-Z])")
_INTEGER_LIST = re.compile(r"(?:0|[1-9][0-9]*+)(?:,(?:0|[1-9][0-9]*+))*+")
_OPERATION = re.compile(
    r"\\(?:operatorname ?\{ ?)?(i*+nt|lim|sum|prod|gcd|lcm|det|max|min|bmod)(?![a-zA-Z])|\\begin ?\{(vmatrix)\}"
    r"|\\frac ?\{ ?(d|\\partial) ?(?:\^ ?[0-9] ?)?+\} ?\{ ?(?:d|\\partial) ?[a-zA-Z]"
)
_MODULUS = re.compile(
    r"[ ,]*+\(? ?\\?(?<![a-zA-Z])[pb]?mod(?:ulo)?(?![a-zA-Z])[ {]*+([1-9][0-9]*+|[a-zA-Z])[ })]*+\Z"
)
_CHOICE_AND_VALUE = re.compile(r"(?:\(([A-H])\)[.:]?|([A-H])[.):]) (.+)", re.DOTALL)
_TO = re.compile(r":|(?<=[0-9]) ?(?:\\text ?\{ ?to ?\}|(?<= )to(?= )) ?(?=[0-9])")
_QUOTIENT = re.compile(r"\\frac ?\{ ?([0-9]++) ?\} ?\{ ?([0-9]++) ?\}|([0-9]++) ?/ ?([0-9]++)")
_CUT_DECIMAL = re.compile(r"([+-]?[0-9]*+\.([0-9]{3,15}+))\\ldots")
_ABOUT = re.compile(
    r"\A\s*+(?:\\text ?\{)?\s*+(?:about|approximately|approx\.?)\s*+\}?\s*+(?=[0-9])"
)
_CLOCK = re.compile(r"[0-9]{1,2} ?: ?[0-9]{2}")
_SMALL_INTEGER = re.compile(r"-?[0-9]{1,9}")
_MAX_SPELLED_OUT = 1000
_EMPTY_SETS = (r"\emptyset", r"\varnothing")
_APPROXIMATES = 0.05


def load() -> Callable[[str, str], bool]:
    """`equivalent`, run once, so that sympy and the parser's tables are loaded."""
    equivalent("x+1", "1+x")
    return equivalent


def equivalent(prediction: str, gold: str) -> bool:
    """Whether two answers mean the same; `gold` may carry a tolerance, which only literal or
    numeric answers can meet.

    Lists compare as multisets, tuples, matrices and intervals in order with their brackets,
    everything else as numbers (exact, to 1e-6 relative where one side is a decimal) or as
    functions. A name that only one answer has (`y = 2x`, `V_1 : V_2 = 11 : 21`) and a unit that
    only one has are dropped. An integral, sum or limit left to evaluate is no answer unless the
    reference leaves it too.
    """
    if (decided := compare_literals(prediction, gold)) is not None:
        return decided
    gold, tolerance = split_tolerance(gold)
    gold = _ABOUT.sub("", gold, count=1)
    left = _without_approximation(normalize_answer(prediction))
    right = _without_approximation(normalize_answer(gold), trusted=True)
    if left is None or right is None or _leaves_work(left, right):
        return False
    if tolerance is not None:
        left_measure, right_measure = measures(left, right)
        if not any(a == b for a, b in factors(left_measure, right_measure)):
            return False
        return algebra.within(
            split_label(left_measure.text)[1], right_measure.text, float(tolerance)
        )
    if cut := _CUT_DECIMAL.fullmatch(right):  # `3.14159\\ldots` is what begins so
        half = (-1 if cut[1].startswith("-") else 1) * Fraction(4995, 10 ** (len(cut[2]) + 4))
        return algebra.within(
            left, str(float((parse_number(cut[1]) or 0) + half)), abs(float(half)) * 1.0001
        )
    return _same(*as_intervals(prediction, gold, left, right))


def _leaves_work(left: str, right: str) -> bool:
    r"""Whether a prediction ends in an operation (`\int`, `\lim`) that the reference lacks: it may
    be the problem.
    """
    ends = [equation_parts(item)[-1] for item in _elements(left)]
    left_work, right_work = (
        {match[match.lastindex or 0] for match in _OPERATION.finditer(text)}
        for text in (" ".join(ends), right)
    )
    return not left_work <= right_work


def _same(left: str, right: str) -> bool:
    left, right = _pooled(left), _pooled(right)
    if without_spaces(left) == without_spaces(right):
        return True
    for comparison in (_residues, _nested_sets):
        if (decided := comparison(left, right)) is not None:
            return decided
    left_items, right_items = (
        _spelled_out(named_elements(_elements(text))) for text in (left, right)
    )
    if len(left_items) > 1 or len(right_items) > 1:
        if len(left_items) == 1 and _INTEGER_LIST.fullmatch(left):
            left_items = left.split(",")  # `5,113` may be the list 5, 113
        return _same_lists(left_items, right_items)
    # a set of one is its element; a list in brackets is what it was
    left, right = (
        items[0] if len(items) == 1 else text
        for items, text in ((left_items, left), (right_items, right))
    )
    for comparison in (
        compare_literals,
        _choices,
        _measured,
        _ordered,
        _matrices,
        _equations,
        _ratios,
        _unions,
    ):
        if (decided := comparison(left, right)) is not None:
            return decided
    if (
        bool(SIGN.search(left)) != bool(SIGN.search(right))
        and not _is_set(left)
        and not _is_set(right)
    ):
        return False
    try:
        return algebra.same_value(left, right)
    except RecursionError:  # sympy, of a sum to n
        return False


def _residues(left: str, right: str) -> bool | None:
    r"""Compare `3 \pmod{7}`, `x \equiv 10 (mod 7)` and the like as residues; None unless one answer
    has a modulus.
    """
    if "mod" not in left + right:
        return None
    texts = unwrap_text(left), unwrap_text(right)
    found = [_MODULUS.search(text) for text in texts]
    if found[0] is None or found[1] is None:
        return None if found == [None, None] else False
    parts = [
        text[: match.start()].split(r"\equiv")
        for text, match in zip(texts, found, strict=True)
        if match
    ]
    names = {without_spaces(part[0]) for part in parts if len(part) > 1}
    if (
        found[0][1] != found[1][1]
        or len(names) > 1
        or max(map(len, parts)) > 2
        or not all(map(is_name, names))
    ):
        return False
    values = [part[-1].strip() for part in parts]
    if all(map(_SMALL_INTEGER.fullmatch, values)) and found[0][1].isdigit():
        return (int(values[0]) - int(values[1])) % int(found[0][1]) == 0
    return all(values) and _same(*values)


def _choices(left: str, right: str) -> bool | None:
    """A reference `(B) 42` is matched by `B`, by `42` and by both."""
    gold = _CHOICE_AND_VALUE.fullmatch(unwrap_text(right))
    if gold is None or gold[1] is None:
        return None
    given = _CHOICE_AND_VALUE.fullmatch(unwrap_text(left))
    if given is not None:
        return (given[1] or given[2]) == gold[1] and _same(given[3], gold[3])
    return _same(left, gold[1]) or _same(left, gold[3])


def _spelled_out(items: list[str]) -> list[str]:
    r"""`1, 2, \ldots, 5` as its five numbers where they are integers in even steps; any other list
    as it is.
    """
    place = items.index(r"\ldots") if items.count(r"\ldots") == 1 else 0
    ends = [item for item in items if item != r"\ldots"]
    if place < 2 or place == len(ends) or not all(map(_SMALL_INTEGER.fullmatch, ends)):
        return items
    numbers = list(map(int, ends))
    step = numbers[1] - numbers[0]
    whole = range(numbers[0], numbers[-1] + (1 if step > 0 else -1), step) if step else range(0)
    if not len(numbers) <= len(whole) <= _MAX_SPELLED_OUT:
        return items
    fits = [*whole[:place], *whole[place - len(numbers) :]] == numbers
    return list(map(str, whole)) if fits else items


def _pooled(text: str) -> str:
    r"""A union with its finite sets as one: `\{1\} \cup \{2, 3\}` is `\{1, 2, 3\}`."""
    parts = [part.strip() for part in _UNION.split(text)]
    finite = [part for part in parts if _inside_set(part) and not re.search(r"[|:]|\\mid", part)]
    if len(finite) < 2:
        return text
    items = dict.fromkeys(
        item for part in finite for item in split_elements(_inside_set(part) or "", ",")
    )
    return r" \cup ".join(
        [rf"\{{{', '.join(items)}\}}", *(part for part in parts if part not in finite)]
    )


def _measured(left: str, right: str) -> bool | None:
    """Compare the values of answers with units; None when neither has any."""
    left_measure, right_measure = measures(left, right)
    if not any(
        each.dimension or each.percent or each.scale != 1 for each in (left_measure, right_measure)
    ):
        return None
    scales = factors(left_measure, right_measure)
    if any(a == b for a, b in scales) and _same(left_measure.text, right_measure.text):
        return True
    values = left_measure.text, right_measure.text
    return any(a != b and algebra.same_value(*values, factor=a / b) for a, b in scales)


def _without_approximation(text: str, *, trusted: bool = False) -> str | None:
    r"""`\sqrt{2} \approx 1.41` gives `\sqrt{2}`, `x \approx 11` gives `11`; None if the two are far
    from equal.
    """
    parts = [part.strip() for part in re.split(r"\\approx(?![a-zA-Z])", text)]
    if len(parts) > 1 and (not parts[0] or is_name(parts[0])):
        parts = parts[1:]
    if len(parts) == 1:
        return parts[0] or text
    label, value = split_label(parts[0])
    if len(parts) > 2 and not trusted:
        return None
    if trusted:
        return parts[0]
    exact, rounded = (measures(part, part)[0].text for part in (value, parts[1]))
    number = parse_number(rounded)
    if number is None or not algebra.within(exact, rounded, abs(float(number)) * _APPROXIMATES):
        return None
    return parts[0] if label is None else f"{label}={value}"


def _same_lists(left: list[str], right: list[str]) -> bool:
    """Compare as multisets; in order where only one side gives its elements different names."""
    left_labels = _labels(left)
    right_labels = _labels(right)
    if len(left) == 1 and None not in right_labels:
        left = _tuple_elements(left[0])
    elif len(right) == 1 and None not in left_labels:
        right = _tuple_elements(right[0])
    left, right = _without_repeats(left), _without_repeats(right)
    if len(left) != len(right):
        return False
    left_labels = _labels(left)
    right_labels = _labels(right)
    if None not in left_labels and set(right_labels) == {None} and _out_of_order(left_labels):
        return False  # `y = 1, x = 2` for (1, 2)
    in_order = None not in left_labels and left_labels == right_labels and len(set(left_labels)) > 1
    for labels, others in ((left_labels, right_labels), (right_labels, left_labels)):
        in_order |= len(set(labels)) == len(labels) and None not in labels and set(others) == {None}
    if in_order:
        return _same_in_order(left, right)
    return _match_all(left, right)


def _out_of_order(names: list[str | None]) -> bool:
    """Whether the names are neighbors in the alphabet, each once, but not in its order."""
    codes = [ord(name) if name and len(name) == 1 else 0 for name in names]
    return codes != sorted(codes) and sorted(codes) == list(
        range(min(codes), min(codes) + len(codes))
    )


def _labels(items: list[str]) -> list[str | None]:
    return [label for label, _ in map(split_label, items)]


def _without_repeats(items: list[str]) -> list[str]:
    """A tuple stated twice is one solution; a number stated twice may be two roots."""
    seen: dict[str, str] = {}
    for index, item in enumerate(items):
        seen.setdefault(without_spaces(item) if _bracketed(item) is not None else str(index), item)
    return list(seen.values())


def _tuple_elements(item: str) -> list[str]:
    body = _bracketed(item)
    return [item] if body is None or item[0] != "(" or item[-1] != ")" else split_tuple(body)


def _same_in_order(left: list[str], right: list[str]) -> bool:
    return len(left) == len(right) and all(map(_same, left, right))


def _match_all(left: list[str], right: list[str]) -> bool:
    """Whether a one-to-one matching of equal elements exists, in any order."""
    remaining = list(left)
    for item in right:
        alike = (
            index
            for index, other in enumerate(remaining)
            if _holds_a_set(other) == _holds_a_set(item)
        )
        match = next((index for index in alike if _same(remaining[index], item)), None)
        if match is None:
            return False
        remaining.pop(match)
    return True


def _ordered(left: str, right: str) -> bool | None:
    """Compare two tuples or intervals element by element; None unless both are."""
    left_body = _bracketed(left)
    right_body = _bracketed(right)
    if left_body is None or right_body is None:
        return None
    left_items, right_items = (
        split_tuple(body, digit_groups=not _INTEGER_LIST.fullmatch(body))
        for body in (left_body, right_body)
    )
    if max(len(left_items), len(right_items)) < 2:
        return None
    if (left[0], left[-1], len(left_items)) != (right[0], right[-1], len(right_items)):
        return False
    return all(_same_element(a, b) for a, b in zip(left_items, right_items, strict=True))


def _same_element(left: str, right: str) -> bool:
    """Compare elements of two tuples; `1,2` in `(1,2;3,4)` is in order."""
    in_order = _ordered(f"({left})", f"({right})")
    return _same(left, right) if in_order is None else in_order


def _matrices(left: str, right: str) -> bool | None:
    """Compare two matrices cell by cell; None unless both are."""
    given = _rows(left)
    wanted = _rows(right)
    if given is None or wanted is None:
        return None
    return len(given) == len(wanted) and all(map(_same_in_order, given, wanted))


def _rows(text: str) -> list[list[str]] | None:
    r"""The cells of a matrix, or of `[[1,2],[3,4]]`; None for anything else."""
    if match := _MATRIX.fullmatch(text):
        rows = match[2].strip().removesuffix(r"\\").split(r"\\")
        return [[cell.strip() for cell in row.split("&")] for row in rows]
    rows = split_elements(_bracketed(text) or "", ",") if text.startswith("[[") else []
    bodies = [_bracketed(row) for row in rows]
    return [split_tuple(body or "") for body in bodies] if bodies and all(bodies) else None


def _equations(left: str, right: str) -> bool | None:
    """Compare equations; None where only algebra can decide, and when neither answer is an
    equation.
    """
    left_parts = equation_parts(left)
    right_parts = equation_parts(right)
    if len(left_parts) == 1 and len(right_parts) == 1:
        return None
    if not all(left_parts + right_parts):
        return False
    left_named = len(left_parts) > 1 and is_name(left_parts[0])
    right_named = len(right_parts) > 1 and is_name(right_parts[0], trusted=True)
    if len(right_parts) == 1:
        # Every member of a chain must be the answer: `2+3 = 5`, not `4 = 5`.
        return all(_same(part, right) for part in left_parts[1 if left_named else 0 :])
    if len(left_parts) == 1:
        return right_named and _same(left, right_parts[-1])
    if (
        left_named
        and right_named
        and without_spaces(left_parts[0]) == without_spaces(right_parts[0])
    ):
        return all(_same(part, right_parts[-1]) for part in left_parts[1:])
    return None if len(left_parts) == len(right_parts) == 2 else False


def _ratios(left: str, right: str) -> bool | None:
    """Compare `11:21`, `11 to 21` and `11/21` part by part; ratios in other terms do not match, nor
    times of day.
    """
    left_parts = _TO.split(left)
    right_parts = _TO.split(right)
    if len(left_parts) == 1 and len(right_parts) == 1:
        return None
    if any(map(_CLOCK.fullmatch, (left, right))) and not (":" in left and ":" in right):
        return False
    if len(left_parts) != len(right_parts):
        quotients = [_QUOTIENT.fullmatch(text) for text in (left, right)]
        left_parts, right_parts = (
            [match[1] or match[3], match[2] or match[4]] if match else parts
            for match, parts in zip(quotients, (left_parts, right_parts), strict=True)
        )
    return len(left_parts) == len(right_parts) and all(
        _same(a.strip(), b.strip())
        for a, b in zip(left_parts, right_parts, strict=True)
        if (a or b)
    )


def _unions(left: str, right: str) -> bool | None:
    """Compare unions of equally many sets, in any order; None when only algebra can decide."""
    left_parts, right_parts = (
        [part.strip() for part in _UNION.split(text)] for text in (left, right)
    )
    if len(left_parts) == 1 or len(left_parts) != len(right_parts):
        return None
    return _match_all(left_parts, right_parts) or None


def _nested_sets(left: str, right: str) -> bool | None:
    r"""Compare answers one of which is a set of one set, such as `\{\emptyset\}`; None if neither
    is.
    """
    insides = _inside_set(left), _inside_set(right)
    nested = [inside is not None and _holds_a_set(inside) for inside in insides]
    if not any(nested):
        return None
    return all(nested) and _same(*(inside or "" for inside in insides))


def _holds_a_set(text: str) -> bool:
    r"""Whether an element is a set itself. Braces without a backslash group in LaTeX: `{{5}}` is
    5.
    """
    inside = _inside_set(text)
    if inside is None or text.strip().startswith("\\"):
        return inside is not None or text.strip() in _EMPTY_SETS
    return len(split_tuple(inside)) > 1 or _holds_a_set(inside)


def _inside_set(text: str) -> str | None:
    r"""Content of the braces around the whole, `\{...\}` or `{...}`; None without any."""
    text = text.strip()
    for start, end in ((r"\{", r"\}"), ("{", "}")):
        inside = text[len(start) : -len(end)]
        if (
            text.startswith(start)
            and text.endswith(end)
            and min(depths := [0, *nesting(inside)]) == depths[-1] == 0
        ):
            return inside.strip()
    return None


def _is_set(text: str) -> bool:
    return _bracketed(text) is not None or r"\{" in text or _UNION.search(text) is not None


def _bracketed(text: str) -> str | None:
    """The inside of `(...)`, `[...)` and the like when the first bracket closes at the very end,
    else None.
    """
    if _INTERVAL_ENDS.fullmatch(text) is None:
        return None
    return text[1:-1] if (depths := nesting(text))[-1] == 0 and 0 not in depths[:-1] else None


def _elements(text: str) -> list[str]:
    r"""The elements of a list or set, `a \pm b` counted as two; a single answer gives a list of
    one.
    """
    inside = _inside_set(text)
    text = text.strip() if inside is None else inside
    items = [item for part in split_elements(text, ";") for item in split_elements(part, ",")]
    expanded: list[str] = []
    for item in items:
        if item.count(r"\pm") == 1 and r"\mp" not in item:
            expanded += [
                item.replace(r"\pm", "+").strip().removeprefix("+"),
                item.replace(r"\pm", "-"),
            ]
        else:
            expanded.append(item)
    return expanded
