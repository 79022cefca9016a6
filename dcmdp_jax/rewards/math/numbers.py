"""Literal numbers, read exactly: nothing here goes through a float."""

import re
from fractions import Fraction

# Digits of a literal, and its largest exponent.
_MAX_LITERAL_DIGITS = 400
_RELATIVE_TOLERANCE = Fraction(1, 10**6)

_GROUPED = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})++(?:\.[0-9]++)?")
# Not the argument behind an index or a power: `\\log_2 800`. `2 125/999` may be a mixed number.
_SPACED_DIGITS = re.compile(
    r"(?<![0-9.,_^])(?<![_^] )(?P<number>(?P<whole>[0-9]++(?: [0-9]++)*+)"
    r"(?:\.[0-9]++(?: [0-9]++)*+)?+)(?: ?/ ?(?P<below>[0-9]++))?+"
)
_IN_GROUPS = re.compile(
    r"(?:[0-9]++|[1-9][0-9]{0,2}(?: [0-9]{3})++)(?:\.(?:[0-9]++|(?:[0-9]{3} )++[0-9]{1,3}))?"
)
_DECIMAL = re.compile(r"[+-]?(?=\.?[0-9])[0-9]*+(?:\.[0-9]*+)?(?:[eE]([+-]?[0-9]++))?")
# `0.1\overline{6}`, `0.1(6)`, `0.1\dot{6}`, `0.\dot{1}4\dot{2}`, and `0.1666\ldots` with its period
# thrice, or twice.
_REPEATING = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*+)\.(?P<fixed>[0-9]*+)"
    r"(?:\\(?:overline|bar) ?\{(?P<over>[0-9]++)\}|\((?P<round>[0-9]++)\)|(?P<dots>\\ldots)"
    r"|\\dot ?\{?(?P<first>[0-9])\}?(?:(?P<between>[0-9]*+)\\dot ?\{?(?P<last>[0-9])\}?)?+)"
)
_PERIOD = re.compile(r"(?P<fixed>[0-9]{0,20}?)(?P<period>(?P<one>[0-9]{1,20}?)(?P=one){1,40}+)")
_SCIENTIFIC = re.compile(
    r"(?P<sign>[+-]?)(?:(?P<mantissa>[0-9]++(?:\.[0-9]*+)?|\.[0-9]++) ?(?:\\times|\\cdot|\*|×) ?)?"
    r"10 ?(?:\^|\*\*) ?(?:\{ ?(?P<braced>[+-]? ?[0-9]++) ?\}|\( ?(?P<round>[+-]?[0-9]++) ?\)"
    r"|(?P<bare>[+-]?[0-9]++))"
)
_FRACTION = re.compile(
    r"([+-]?) ?([0-9]++ ?)?\\frac ?(?:\{ ?([+-]?[0-9]++) ?\}|([0-9])) ?"
    r"(?:\{ ?([+-]?[0-9]++) ?\}|([0-9]))"
)
_SLASH = re.compile(r"([+-]?)(?:([0-9]++) )?([0-9]++) ?/ ?([0-9]++)")


def parse_number(text: str) -> Fraction | None:
    r"""Read a literal number exactly; None for anything that is not one.

    Integers with leading zeros or digit groups (`1,000`, `1 000`), decimals, e-notation, `a \times
    10^{b}`, `a/b`, `\frac{a}{b}`, mixed numbers and repeating decimals. Never goes through a float:
    `105263157894736842` is itself. Literals of more than 400 digits or exponents beyond 400 are not
    read.
    """
    if len(text) > 2 * _MAX_LITERAL_DIGITS:
        return None
    text = join_digit_groups(re.sub(r"\s+", " ", text).strip())
    if len(text) > _MAX_LITERAL_DIGITS:
        return None
    if _GROUPED.fullmatch(text):
        text = text.replace(",", "")
    for read in (_read_decimal, _read_scientific, _read_fraction, _read_repeating):
        value = read(text)
        if value is not None:
            return value
    return None


def join_digit_groups(text: str) -> str:
    r"""The text without spaces between groups of three digits: `1 234 567`, `3.141 59`.

    The groups are counted from the point, so the outer ones may be shorter. Digits that are spaced
    in another way (`1 2 3`, `12 34`) are not one number and stay, and so does `2 125/999`.
    """
    return _SPACED_DIGITS.sub(_without_group_spaces, text)


def _without_group_spaces(match: re.Match[str]) -> str:
    if not _IN_GROUPS.fullmatch(match["number"]):
        return match[0]

    # A numerator may stand beside a whole number.
    _, *groups = match["whole"].split(" ")
    below = (match["below"] or "").lstrip("0")
    if len(groups) == 1 and not groups[0].startswith("0") and (len(below), below) > (3, groups[0]):
        return match[0]
    return match[0].replace(" ", "")


def same_number(prediction: Fraction, gold: Fraction) -> bool:
    """Whether two literal numbers agree: exactly for an integer gold, else to 1e-6 of its size.

    The tolerance makes a decimal expansion match a fraction; two decimals that differ in a written
    digit do not agree unless they agree to a millionth.
    """
    near = abs(prediction - gold) <= _RELATIVE_TOLERANCE * abs(gold)
    return prediction == gold or (near and gold.denominator != 1)


def _sign(text: str) -> int:
    return -1 if text == "-" else 1


def _read_decimal(text: str) -> Fraction | None:
    match = _DECIMAL.fullmatch(text)
    if match is None or abs(int(match[1] or 0)) > _MAX_LITERAL_DIGITS:
        return None
    return Fraction(text)


def _read_scientific(text: str) -> Fraction | None:
    match = _SCIENTIFIC.fullmatch(text)
    if match is None:
        return None
    exponent = int((match["braced"] or match["round"] or match["bare"]).replace(" ", ""))
    if abs(exponent) > _MAX_LITERAL_DIGITS:
        return None
    return _sign(match["sign"]) * Fraction(match["mantissa"] or 1) * Fraction(10) ** exponent


def _read_fraction(text: str) -> Fraction | None:
    match = _FRACTION.fullmatch(text) or _SLASH.fullmatch(text)
    if match is None:
        return None
    above, below = map(int, filter(None, match.groups()[2:]))
    if below == 0:
        return None
    return _sign(match[1]) * (int(match[2] or 0) + Fraction(above, below))


def _read_repeating(text: str) -> Fraction | None:
    match = _REPEATING.fullmatch(text)
    if match is None:
        return None
    fixed = match["fixed"]
    if match["dots"]:
        repeated = _PERIOD.fullmatch(fixed)
        if repeated is None or len(repeated["period"]) < 3:
            return None
        fixed = repeated["fixed"]
        period = repeated["one"]
    elif match["first"]:
        period = match["first"] + (match["between"] or "") + (match["last"] or "")
    else:
        period = match["over"] or match["round"]
    repeating = Fraction(int(period), 10 ** len(period) - 1)
    fraction = (int(fixed or 0) + repeating) / 10 ** len(fixed)
    return _sign(match["sign"]) * (int(match["whole"] or 0) + fraction)
