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
    r"\\(?:operatorname ?\{ ?)?(i*+nt|lim|sum|prod|gcd|lcm|det|max|min|bmod)(?![a-zA-Z])"
    r"|\\begin ?\{(vmatrix)\}"
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
# Numbers that a list with dots may stand for.
_MAX_SPELLED_OUT = 1000
# Largest relative difference of the two sides of `\approx`.
_APPROXIMATES = 0.05


def load() -> Callable[[str, str], bool]:
    """`equivalent`, run once, so that sympy and the parser's tables are loaded."""
    equivalent("x+1", "1+x")
    return equivalent


def equivalent(prediction: str, gold: str) -> bool:
    """Whether two answers mean the same.

    Lists compare as multisets, tuples, matrices and intervals in order with their brackets,
    everything else as numbers (exact, to 1e-6 relative where one side is a decimal) or as
    functions. A name that only one answer has (`y = 2x`, `V_1 : V_2 = 11 : 21`) and a unit that
    only one has are dropped. An integral, sum or limit left to evaluate is no answer unless the
    reference leaves it too.

    Args:
        prediction: the policy's answer.
        gold: the reference; may carry a tolerance, which only literal or numeric answers can meet.
    """
    verdict = compare_literals(prediction, gold)
    if verdict is not None:
        return verdict
    gold, tolerance = split_tolerance(gold)
    gold = _ABOUT.sub("", gold, count=1)
    predicted = _without_approximation(normalize_answer(prediction))
    expected = _without_approximation(normalize_answer(gold), trusted=True)
    if predicted is None or _leaves_work(predicted, expected):
        return False

    if tolerance is not None:
        predicted_measure, expected_measure = measures(predicted, expected)
        if not any(a == b for a, b in factors(predicted_measure, expected_measure)):
            return False
        _, value = split_label(predicted_measure.text)
        return algebra.within(value, expected_measure.text, float(tolerance))
    cut_decimal = _CUT_DECIMAL.fullmatch(expected)
    if cut_decimal:  # `3.14159\ldots` is what begins so
        half = Fraction(4995, 10 ** (len(cut_decimal[2]) + 4))
        if cut_decimal[1].startswith("-"):
            half = -half
        middle = float((parse_number(cut_decimal[1]) or 0) + half)
        return algebra.within(predicted, str(middle), abs(float(half)) * 1.0001)
    predicted, expected = as_intervals(prediction, gold, predicted, expected)
    return _same(predicted, expected)


def _leaves_work(predicted: str, expected: str) -> bool:
    r"""Whether a prediction ends in an operation (`\int`) that the reference lacks.

    It may be the problem.
    """
    ends = [equation_parts(item)[-1] for item in _elements(predicted)]
    return not _operations(" ".join(ends)) <= _operations(expected)


def _operations(text: str) -> set[str]:
    return {match[match.lastindex] for match in _OPERATION.finditer(text)}


def _same(predicted: str, expected: str) -> bool:
    predicted = _pooled(predicted)
    expected = _pooled(expected)
    if without_spaces(predicted) == without_spaces(expected):
        return True
    for comparison in (_residues, _nested_sets):
        verdict = comparison(predicted, expected)
        if verdict is not None:
            return verdict

    predicted_items = _spelled_out(named_elements(_elements(predicted)))
    expected_items = _spelled_out(named_elements(_elements(expected)))
    if len(predicted_items) > 1 or len(expected_items) > 1:
        if len(predicted_items) == 1 and _INTEGER_LIST.fullmatch(predicted):
            predicted_items = predicted.split(",")  # `5,113` may be the list 5, 113
        return _same_lists(predicted_items, expected_items)

    # a set of one is its element; a list in brackets is what it was
    if predicted_items:
        predicted = predicted_items[0]
    if expected_items:
        expected = expected_items[0]
    for comparison in _COMPARISONS:
        verdict = comparison(predicted, expected)
        if verdict is not None:
            return verdict
    only_one_has_a_sign = bool(SIGN.search(predicted)) != bool(SIGN.search(expected))
    if only_one_has_a_sign and not _is_set(predicted) and not _is_set(expected):
        return False
    try:
        return algebra.same_value(predicted, expected)
    except RecursionError:  # sympy, of a sum to n
        return False


def _residues(predicted: str, expected: str) -> bool | None:
    r"""Compare `3 \pmod{7}`, `x \equiv 10 (mod 7)` and the like; None without any modulus."""
    if "mod" not in predicted + expected:
        return None
    predicted_sides, modulus = _sides_and_modulus(predicted)
    expected_sides, expected_modulus = _sides_and_modulus(expected)
    if modulus is None and expected_modulus is None:
        return None
    if modulus != expected_modulus:
        return False
    if max(len(predicted_sides), len(expected_sides)) > 2:
        return False

    names = {
        without_spaces(sides[0]) for sides in (predicted_sides, expected_sides) if len(sides) > 1
    }
    if len(names) > 1 or not all(map(is_name, names)):
        return False
    predicted_value = predicted_sides[-1].strip()
    expected_value = expected_sides[-1].strip()
    are_integers = all(map(_SMALL_INTEGER.fullmatch, (predicted_value, expected_value)))
    if are_integers and modulus.isdigit():
        return (int(predicted_value) - int(expected_value)) % int(modulus) == 0
    return bool(predicted_value and expected_value) and _same(predicted_value, expected_value)


def _sides_and_modulus(text: str) -> tuple[list[str], str | None]:
    r"""The sides of a congruence around its `\equiv`, and its modulus, if it states one."""
    text = unwrap_text(text)
    modulus = _MODULUS.search(text)
    if modulus is None:
        return [text], None
    return text[: modulus.start()].split(r"\equiv"), modulus[1]


def _choices(predicted: str, expected: str) -> bool | None:
    """Match a reference `(B) 42` with `B`, with `42` and with both."""
    reference = _CHOICE_AND_VALUE.fullmatch(unwrap_text(expected))
    if reference is None or reference[1] is None:
        return None
    letter = reference[1]
    value = reference[3]
    prediction = _CHOICE_AND_VALUE.fullmatch(unwrap_text(predicted))
    if prediction is not None:
        return (prediction[1] or prediction[2]) == letter and _same(prediction[3], value)
    return _same(predicted, letter) or _same(predicted, value)


def _spelled_out(items: list[str]) -> list[str]:
    r"""`1, 2, \ldots, 5` as its five numbers if they are integers in even steps; else the items."""
    numbers = [item for item in items if item != r"\ldots"]
    if len(numbers) != len(items) - 1 or not all(map(_SMALL_INTEGER.fullmatch, numbers)):
        return items
    before = items.index(r"\ldots")
    after = len(numbers) - before
    if before < 2 or after < 1:
        return items
    integers = list(map(int, numbers))
    step = integers[1] - integers[0]
    if step == 0:
        return items
    series = range(integers[0], integers[-1] + step, step)
    if not len(numbers) <= len(series) <= _MAX_SPELLED_OUT:
        return items
    if integers != [*series[:before], *series[-after:]]:
        return items
    return list(map(str, series))


def _pooled(text: str) -> str:
    r"""A union with its finite sets as one: `\{1\} \cup \{2, 3\}` is `\{1, 2, 3\}`."""
    others = []
    finite_sets = 0
    elements = {}
    for operand in _UNION.split(text):
        operand = operand.strip()
        inside = _inside_set(operand)
        if inside and not re.search(r"[|:]|\\mid", operand):
            finite_sets += 1
            elements |= dict.fromkeys(split_elements(inside, ","))
        else:
            others.append(operand)
    if finite_sets < 2:
        return text
    return r" \cup ".join([rf"\{{{', '.join(elements)}\}}", *others])


def _measured(predicted: str, expected: str) -> bool | None:
    """Compare the values of answers with units; None when neither has any."""
    predicted_measure, expected_measure = measures(predicted, expected)
    if predicted_measure.is_plain and expected_measure.is_plain:
        return None
    scales = factors(predicted_measure, expected_measure)
    predicted = predicted_measure.text
    expected = expected_measure.text
    if any(a == b for a, b in scales) and _same(predicted, expected):
        return True
    return any(a != b and algebra.same_value(predicted, expected, factor=a / b) for a, b in scales)


def _without_approximation(text: str, *, trusted: bool = False) -> str | None:
    r"""`\sqrt{2} \approx 1.41` gives `\sqrt{2}`; None if the two are far from equal.

    `x \approx 11` gives `11`.
    """
    sides = [side.strip() for side in re.split(r"\\approx(?![a-zA-Z])", text)]
    if len(sides) > 1 and (not sides[0] or is_name(sides[0])):
        del sides[0]
    if len(sides) == 1:
        return sides[0] or text
    if trusted:
        return sides[0]
    if len(sides) > 2:
        return None
    label, value = split_label(sides[0])
    exact = measures(value, value)[0].text
    rounded = measures(sides[1], sides[1])[0].text
    number = parse_number(rounded)
    if number is None or not algebra.within(exact, rounded, abs(float(number)) * _APPROXIMATES):
        return None
    if label is None:
        return sides[0]
    return f"{label}={value}"


def _same_lists(predicted: list[str], expected: list[str]) -> bool:
    """Compare as multisets; in order where only one side gives its elements different names."""
    if len(predicted) == 1 and None not in _labels(expected):
        predicted = _tuple_elements(predicted[0])
    elif len(expected) == 1 and None not in _labels(predicted):
        expected = _tuple_elements(expected[0])
    predicted = _without_repeats(predicted)
    expected = _without_repeats(expected)
    if len(predicted) != len(expected):
        return False

    predicted_labels = _labels(predicted)
    expected_labels = _labels(expected)
    predicted_is_bare = set(predicted_labels) == {None}
    expected_is_bare = set(expected_labels) == {None}
    if expected_is_bare and _out_of_order(predicted_labels):
        return False  # `y = 1, x = 2` for (1, 2)
    if predicted_labels == expected_labels:
        in_order = None not in predicted_labels and len(set(predicted_labels)) > 1
    elif expected_is_bare:
        in_order = _names_each(predicted_labels)
    else:
        in_order = predicted_is_bare and _names_each(expected_labels)
    if in_order:
        return _same_in_order(predicted, expected)
    return _match_all(predicted, expected)


def _names_each(labels: list[str | None]) -> bool:
    """Whether every element has a name that no other has."""
    return None not in labels and len(set(labels)) == len(labels)


def _out_of_order(names: list[str | None]) -> bool:
    """Whether the names are neighbors in the alphabet, each once, but not in its order."""
    codes = [ord(name) if name and len(name) == 1 else 0 for name in names]
    ordered = sorted(codes)
    return codes != ordered and ordered == list(range(ordered[0], ordered[0] + len(codes)))


def _labels(items: list[str]) -> list[str | None]:
    return [label for label, _ in map(split_label, items)]


def _without_repeats(items: list[str]) -> list[str]:
    """Drop the repeats of a tuple, one solution; a number stated twice may be two roots."""
    unique = {}
    for index, item in enumerate(items):
        key = without_spaces(item)
        if _bracketed(item) is None:
            key = index
        unique.setdefault(key, item)
    return list(unique.values())


def _tuple_elements(item: str) -> list[str]:
    body = _bracketed(item)
    if body is None or item[0] != "(" or item[-1] != ")":
        return [item]
    return split_tuple(body)


def _same_in_order(predicted: list[str], expected: list[str]) -> bool:
    return len(predicted) == len(expected) and all(map(_same, predicted, expected))


def _match_all(predicted: list[str], expected: list[str]) -> bool:
    """Whether a one-to-one matching of equal elements exists, in any order."""
    remaining = list(predicted)
    for item in expected:
        is_set = _holds_a_set(item)
        for index, candidate in enumerate(remaining):
            if _holds_a_set(candidate) == is_set and _same(candidate, item):
                del remaining[index]
                break
        else:
            return False
    return True


def _ordered(predicted: str, expected: str) -> bool | None:
    """Compare two tuples or intervals element by element; None unless both are."""
    predicted_body = _bracketed(predicted)
    expected_body = _bracketed(expected)
    if predicted_body is None or expected_body is None:
        return None
    predicted_items = split_tuple(
        predicted_body, digit_groups=not _INTEGER_LIST.fullmatch(predicted_body)
    )
    expected_items = split_tuple(
        expected_body, digit_groups=not _INTEGER_LIST.fullmatch(expected_body)
    )
    if max(len(predicted_items), len(expected_items)) < 2:
        return None
    if (
        predicted[0] != expected[0]
        or predicted[-1] != expected[-1]
        or len(predicted_items) != len(expected_items)
    ):
        return False
    return all(map(_same_element, predicted_items, expected_items))


def _same_element(predicted: str, expected: str) -> bool:
    """Compare elements of two tuples; `1,2` in `(1,2;3,4)` is in order."""
    in_order = _ordered(f"({predicted})", f"({expected})")
    return _same(predicted, expected) if in_order is None else in_order


def _matrices(predicted: str, expected: str) -> bool | None:
    """Compare two matrices cell by cell; None unless both are."""
    predicted_rows = _rows(predicted)
    expected_rows = _rows(expected)
    if predicted_rows is None or expected_rows is None:
        return None
    return len(predicted_rows) == len(expected_rows) and all(
        map(_same_in_order, predicted_rows, expected_rows)
    )


def _rows(text: str) -> list[list[str]] | None:
    r"""The cells of a matrix, or of `[[1,2],[3,4]]`; None for anything else."""
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = matrix[2].strip().removesuffix(r"\\").split(r"\\")
        return [list(map(str.strip, row.split("&"))) for row in rows]
    if not text.startswith("[["):
        return None
    cells = []
    for row in split_elements(_bracketed(text) or "", ","):
        body = _bracketed(row)
        if not body:
            return None
        cells.append(split_tuple(body))
    return cells or None


def _equations(predicted: str, expected: str) -> bool | None:
    """Compare equations; None where only algebra can decide, and when neither is an equation."""
    predicted_sides = equation_parts(predicted)
    expected_sides = equation_parts(expected)
    if len(predicted_sides) == 1 and len(expected_sides) == 1:
        return None
    if not all(predicted_sides + expected_sides):
        return False
    predicted_named = len(predicted_sides) > 1 and is_name(predicted_sides[0])
    expected_named = len(expected_sides) > 1 and is_name(expected_sides[0], trusted=True)
    if len(expected_sides) == 1:
        # Every member of a chain must be the answer: `2+3 = 5`, not `4 = 5`.
        members = predicted_sides
        if predicted_named:
            members = predicted_sides[1:]
        return all(_same(member, expected) for member in members)
    if len(predicted_sides) == 1:
        return expected_named and _same(predicted, expected_sides[-1])
    name = without_spaces(predicted_sides[0])
    if predicted_named and expected_named and name == without_spaces(expected_sides[0]):
        return all(_same(member, expected_sides[-1]) for member in predicted_sides[1:])
    if len(predicted_sides) == len(expected_sides) == 2:
        return None
    return False


def _ratios(predicted: str, expected: str) -> bool | None:
    """Compare `11:21`, `11 to 21` and `11/21` term by term; None when neither is a ratio.

    Ratios in other terms do not match, nor do times of day.
    """
    predicted_terms = _TO.split(predicted)
    expected_terms = _TO.split(expected)
    if len(predicted_terms) == 1 and len(expected_terms) == 1:
        return None
    is_time = _CLOCK.fullmatch(predicted) or _CLOCK.fullmatch(expected)
    if is_time and not (":" in predicted and ":" in expected):
        return False
    if len(predicted_terms) != len(expected_terms):
        predicted_terms = _quotient_terms(predicted) or predicted_terms
        expected_terms = _quotient_terms(expected) or expected_terms
    if len(predicted_terms) != len(expected_terms):
        return False
    pairs = zip(predicted_terms, expected_terms, strict=True)
    return all(_same(a.strip(), b.strip()) for a, b in pairs if a or b)


def _quotient_terms(text: str) -> list[str] | None:
    match = _QUOTIENT.fullmatch(text)
    if match is None:
        return None
    return [match[1] or match[3], match[2] or match[4]]


def _unions(predicted: str, expected: str) -> bool | None:
    """Compare unions of equally many sets, in any order; None when only algebra can decide."""
    predicted_sets = [operand.strip() for operand in _UNION.split(predicted)]
    expected_sets = [operand.strip() for operand in _UNION.split(expected)]
    if len(predicted_sets) == 1 or len(predicted_sets) != len(expected_sets):
        return None
    return _match_all(predicted_sets, expected_sets) or None


def _nested_sets(predicted: str, expected: str) -> bool | None:
    r"""Compare answers one of which is a set of one set (`\{\emptyset\}`); None if neither is."""
    predicted_inside = _inside_set(predicted) or ""
    expected_inside = _inside_set(expected) or ""
    predicted_is_nested = _holds_a_set(predicted_inside)
    expected_is_nested = _holds_a_set(expected_inside)
    if not predicted_is_nested and not expected_is_nested:
        return None
    return predicted_is_nested and expected_is_nested and _same(predicted_inside, expected_inside)


def _holds_a_set(text: str) -> bool:
    r"""Whether an element is a set itself; plain braces only group in LaTeX: `{{5}}` is 5."""
    inside = _inside_set(text)
    if inside is None:
        return text.strip() == r"\emptyset"
    if text.strip().startswith("\\"):
        return True
    return len(split_tuple(inside)) > 1 or _holds_a_set(inside)


def _inside_set(text: str) -> str | None:
    r"""Content of the braces around the whole, `\{...\}` or `{...}`; None without any."""
    text = text.strip()
    for start, end in ((r"\{", r"\}"), ("{", "}")):
        if text.startswith(start) and text.endswith(end):
            inside = text[len(start) : -len(end)]
            depths = [0, *nesting(inside)]
            if min(depths) == depths[-1] == 0:
                return inside.strip()
    return None


def _is_set(text: str) -> bool:
    return _bracketed(text) is not None or r"\{" in text or _UNION.search(text) is not None


def _bracketed(text: str) -> str | None:
    """The inside of `(...)`, `[...)` and the like if the first bracket closes at the end."""
    if _INTERVAL_ENDS.fullmatch(text) is None:
        return None
    depths = nesting(text)
    if depths[-1] != 0 or 0 in depths[:-1]:
        return None
    return text[1:-1]


def _elements(text: str) -> list[str]:
    r"""The elements of a list or set, `a \pm b` counted as two; one for a single answer."""
    inside = _inside_set(text)
    if inside is not None:
        text = inside
    elements = []
    for group in split_elements(text, ";"):
        for item in split_elements(group, ","):
            if item.count(r"\pm") == 1 and r"\mp" not in item:
                elements.append(item.replace(r"\pm", "+").strip().removeprefix("+"))
                elements.append(item.replace(r"\pm", "-"))
            else:
                elements.append(item)
    return elements


# Tried in this order; the first that decides counts.
_COMPARISONS = (
    compare_literals,
    _choices,
    _measured,
    _ordered,
    _matrices,
    _equations,
    _ratios,
    _unions,
)
