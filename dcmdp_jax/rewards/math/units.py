r"""Units of measurement, counted things and words for numbers (`million`) that stand after a value.

A prediction may state only what is listed here: an unknown word may change the value (`42
squared`), so it stays and the answer does not match. A reference answer may count anything that
stands in the plural (`16 daps`).
"""

import functools
import itertools
import re
from fractions import Fraction
from typing import NamedTuple

from dcmdp_jax.rewards.math.numbers import parse_number


def vocabulary(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Dimension -> its units: their names, and their size in the dimension's base unit.
_MEASURES = {
    "length": "m meter metre 1, micron 1e-6, in inch 0.0254, ft foot feet 0.3048, yd yard 0.9144, "
    "mi mile 1609.344",
    "mass": "g gram 1, tonne 1000000, lb pound 453.59237, oz ounce 28.349523125",
    "time": "s second 1, sec 1, min minute 60, h hr hour 3600, d day 86400, week 604800",
    "months": "month 1, year yr 12",
    "volume": "L l liter litre 1, mL ml milliliter millilitre 1/1000",
    "gallons": "gallon gal 1, quart 1/4, pint 1/8, cup 1/16",
    "money": "dollar USD 1, cent 1/100",
    "euro": "euro EUR 1",
    "sterling": "GBP 1, pence 1/100",
    "yuan": "yuan RMB 1",
    "yen": "yen JPY 1",
    "rupee": "rupee Rs INR 1",
    "angle": "degree deg 1",
    "radian": "radian rad 1",
    "celsius": "celsius 1",
    "fahrenheit": "fahrenheit 1",
    "K": "K kelvin 1",
    "force": "N newton 1",
    "energy": "J joule 1",
    "erg": "erg 1",
    "eV": "eV 1",
    "power": "W watt 1",
    "charge": "C coulomb 1",
    "voltage": "V volt 1",
    "current": "A ampere 1",
    "frequency": "Hz hertz 1",
    "pressure": "Pa pascal 1",
    "field": "T tesla 1",
    "amount": "mol mole 1",
    "acre": "acre 1",
    "hectare": "hectare 1",
    "before noon": "am a.m a.m. 1",
    "after noon": "pm p.m p.m. 1",
}
_CURRENCIES = (
    "won KRW, lira lire, krona kronor SEK, krone kroner, peso, franc CHF, ruble rouble, rupiah, "
    "ringgit, baht, dong, zloty PLN, forint, dirham, dinar, riyal rial, shekel, rand"
)
_MEASURES |= {names.split()[0]: f"{names} 1" for names in _CURRENCIES.split(", ")}
# Before a symbol, before a name, the power of ten.
_PREFIXES = (
    "n nano -9, µ micro -6, u micro -6, m milli -3, c centi -2, d deci -1, k kilo 3, M "
    "mega 6, G giga 9"
)
# Dimensions whose units take all prefixes of physics; in the others those in use.
_PREFIXED = vocabulary("energy power charge voltage current frequency pressure amount force eV")
# Dimension -> letters of the prefixes that its first unit takes.
_TAKES = dict.fromkeys(_PREFIXED, "nµumkMG") | {"length": "nµumcdk", "mass": "mkM", "time": "nµum"}
_COUNTED = vocabulary(
    "unit apple ball balloon banana block boat book bottle box boy bus cake candy car card cat "
    "chair child children choice class coin color combination cookie cow cube customer dog door "
    "egg employee face fish flower friend game girl goal group guest handshake horse house "
    "integer item jar kid letter man marble match member men method mark number orange orchid "
    "page pair parent passenger path pen pencil penny people permutation person piece pizza plant "
    "player point possibility problem puppy question road room row salmon seat sheep shell shirt "
    "slice solution square step sticker student sweet table teacher team term ticket tile time "
    "toy tree triangle truck value vertex vote way white woman women word worker dime nickel"
)
_SCALES = {"dozen": 12, "hundred": 100, "myriad": 10**4, "lakh": 10**5, "crore": 10**7}
_SCALES |= {"thousand": 10**3, "million": 10**6, "milliard": 10**9, "billion": 10**9}
_SCALES |= {"trillion": 10**12, "quadrillion": 10**15}
_ORDINALS = (
    "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
_TENS = "thirtieth fortieth fiftieth sixtieth seventieth eightieth ninetieth"
# Parts of one, which change the number in front of them; two words are joined by `_PARTS`.
_FRACTIONS = {"half": Fraction(1, 2), "halve": Fraction(1, 2), "permille": Fraction(1, 1000)}
_FRACTIONS |= {name: Fraction(1, size) for size, name in enumerate(_ORDINALS.split(), 3)}
_FRACTIONS |= {name: Fraction(1, 10 * tens) for tens, name in enumerate(_TENS.split(), 3)}
_FRACTIONS |= {f"{name}th": Fraction(1, size) for name, size in _SCALES.items()}
_FRACTIONS["basispoint"] = Fraction(1, 10**4)
_CHANGES_A_VALUE = vocabulary(
    "about above and approximately at base below between binary but choose cubed decimal divided "
    "double either equals except factorial fewer from greater hex if inf infinite infinity least "
    "less log many maybe minus mod modulo more most neither never no nor not of off or out over "
    "percent percentage plus power quarter raised root score some square squared sqrt than times "
    "to triple twice under up when where with without wrong arc arg cos cosec cosh cot csc det "
    "exp gcd lcm lim ln log mil mill sec sgn sin sinh tan tanh cis abs ten one gross fold grand "
    "reciprocal negative positive inverse opposite conjugate infinities grosses googol"
).union(_FRACTIONS)


def _sizes() -> dict[str, tuple[str, Fraction]]:
    """Dimension and size of every unit by name, with its prefixes."""
    sizes = {}
    prefixes = [prefix.split() for prefix in _PREFIXES.split(", ")]
    for dimension, units in _MEASURES.items():
        for place, unit in enumerate(units.split(", ")):
            symbol, *words, size = unit.split()
            sizes |= dict.fromkeys((symbol, *words), (dimension, Fraction(size)))
            for letter, name, power in prefixes if place == 0 else ():
                if letter in _TAKES.get(dimension, ""):
                    prefixed = letter + symbol, *(name + word for word in words)
                    sizes |= dict.fromkeys(
                        prefixed, (dimension, Fraction(size) * Fraction(10) ** int(power))
                    )
    return sizes


_BY_NAME = _sizes()
_CLEAR = vocabulary("kJ MJ GJ kN kV kW MW GW Hz Pa eV")
_AMBIGUOUS = frozenset(
    name
    for name, (dimension, _) in _BY_NAME.items()
    if len(name) <= (2 if dimension in _PREFIXED else 1)
).difference(_CLEAR)
"""Without a text command around it, a lone letter or a pair such as `mA` is variables."""

_NOUN = re.compile(r"(?=[a-z]{0,40}[aeiouy])(?![a-z]{0,40}(?:illions?|fold)$)[a-z]{3,40}+")
"""A noun of a reference that no list has; `5\\text{k}` or `3\\mathrm{e}` has a factor instead."""
_PLURAL = re.compile(r"[a-z]++(?<=[^sui]s)")
"""A noun that counts. In the singular it may say another value: `5\\text{ reciprocal}`, `5\\text{
halved}`.
"""
_PROSE = re.compile(r"\\(?:text|mbox)")
TEXT_COMMANDS = (
    r"\\(?:text|mathrm|textbf|mathbf|textit|textnormal|mbox|textrm|texttt|mathtt"
    r"|operatorname|rm|bm|underline) ?\{"
)
"""Start of a text command, after runs of spaces were reduced to one. The closing brace follows."""
_EXPONENT = r"\^ ?(?:\{ ?-?[0-9] ?\}|[0-9])"
_PIECE = re.compile(
    rf"(?P<text>{TEXT_COMMANDS}(?P<content>[^{{}}]*+)\}})|(?P<degree>\\degree)(?: ?(?P<scale>[CF])(?![a-zA-Z]))?"
    rf"|(?P<exponent>{_EXPONENT})|(?P<word>[a-zA-Zµ]++(?:\.[a-zA-Z])?+\.?+)|(?P<join>/|\\cdot(?![a-zA-Z])|·)"
    rf"|(?P<percent>%)|(?P<sign>[€£₩₺])|(?P<space> )|(?P<other>\\[a-zA-Z]++|.)",
    re.DOTALL,
)
_UNIT_TOKEN = re.compile(r"[a-zA-Zµ]++(?:\.[a-zA-Z])?+\.?+|\^[{ ]*+(-?[0-9])|/|%|\\degree")
WRAPPED_TEXT = re.compile(TEXT_COMMANDS + r"([^{}]*+)\}")
_AMOUNT = re.compile(
    r"(?<![0-9]) ?([0-9]++(?:\.[0-9]++)?+) ?([a-zA-Z]++)\.?+ ?,?+ ?(?:and(?![a-zA-Z]))?+ ?"
)
_CURRENCY = re.compile(
    r"([+-]?) ?(?:(?P<money>\\\$)|(?P<euro>€|\\euro(?![a-zA-Z]))|(?P<sterling>£|\\pounds(?![a-zA-Z]))"
    r"|(?P<yuan_or_yen>¥)|(?P<won>₩)|(?P<lira>₺)|(?P<rupee>₹|(?:\\text ?\{ ?)?+Rs\.?+ ?\}?+(?= ?[0-9]))) ?"
)
_CURRENCY_SIGNS = {"€": "euro", "£": "GBP", "₩": "won", "₺": "lira"}
_ONE_SIGN = [{(("yuan_or_yen", 1),), ((name, 1),)} for name in ("yuan", "yen")]
_SPEED = re.compile(r"(?<![a-zA-Z])(?:mph|kph|kmph)(?![a-zA-Z])")
_PARTS = {
    "percent": re.compile(r"(?<![a-z])per cent(?![a-z])", re.IGNORECASE),
    "permille": re.compile(
        r"(?<![a-z])(?:(?:per|pro) ?mil(?:le?)?s?|per thousand)(?![a-z])",
        re.IGNORECASE,
    ),
    "basispoint": re.compile(r"(?<![a-z])(?:basis points?|bps?)(?![a-z])", re.IGNORECASE),
}
# Says of a number that it counts for each, or that it is the whole.
_SHARE = re.compile(
    r"(?<![a-zA-Z])(?:each|apiece|altogether|overall|(?:in )?total|in all"
    r"|per (?:person|head|capita))[ .)}]*+\Z"
)
PERIODIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_MAX_PIECES = 12


class Quantity(NamedTuple):
    """A value and its unit.

    Attributes:
        text: the value alone.
        scale: factor of a number word such as `million`.
        dimension: dimensions of the unit with their exponents, sorted; empty without a unit.
        size: size of the unit in the dimension's base unit.
        percent: whether it is given in percent.
    """

    text: str
    scale: Fraction = Fraction(1)
    dimension: tuple[tuple[str, int], ...] = ()
    size: Fraction = Fraction(1)
    percent: bool = False


def measures(prediction: str, gold: str) -> tuple[Quantity, Quantity]:
    """Split both answers into value and unit.

    A lone letter (`5 m`) is a unit where the other answer states a unit, or where both are of one
    kind but differ in size (`2 mA`, `0.002 A`); else it is a variable.
    """
    left, right = _measure(prediction, any_noun=False), _measure(gold, any_noun=True)
    left_unit = left if left.dimension else _measure(prediction, any_noun=False, letters=True)
    right_unit = right if right.dimension else _measure(gold, any_noun=True, letters=True)
    differ_in_size = (
        left_unit.dimension == right_unit.dimension and left_unit.size != right_unit.size
    )
    return (
        (left_unit, right_unit)
        if left.dimension or right.dimension or differ_in_size
        else (left, right)
    )


def factors(left: Quantity, right: Quantity) -> list[tuple[Fraction, Fraction]]:
    """Factors for the two values, any pair of which makes them comparable; empty if their units
    disagree.

    A unit that only one answer has is dropped. A percentage is matched by its number and by its
    hundredth; a reference below 1 without a percent sign is not a number of percent (0.5% is not
    1/2), and a percentage equals a number of fractions (`5 permilles`) by value alone.
    """
    if left.dimension and right.dimension:
        units = {left.dimension, right.dimension}
        if (len(units) > 1 and units not in _ONE_SIGN) or left.percent != right.percent:
            return []
        return [(left.scale * left.size, right.scale * right.size)]
    pairs = [(left.scale, right.scale)]
    if left.percent != right.percent:
        if left.dimension or right.dimension:
            return []
        hundredth = Fraction(1, 100)
        if min(left.scale, right.scale) < 1:
            left_unit = hundredth if left.percent else Fraction(1)
            right_unit = hundredth if right.percent else Fraction(1)
            return [(left.scale * left_unit, right.scale * right_unit)]
        if not left.percent:
            return [*pairs, (left.scale, right.scale * hundredth)]
        value = parse_number(right.text)
        plain = pairs if value is not None and abs(value * right.scale) >= 1 else []
        return [*plain, (left.scale * hundredth, right.scale)]
    return pairs


def unit_words(text: str) -> bool:
    """Whether the text is nothing but a unit, a counted thing or a percent sign."""
    return _read(text, any_noun=False, letters=True) is not None


def is_unit(word: str) -> bool:
    """Whether a word is the name of a unit as it is written."""
    return word in _BY_NAME


@functools.lru_cache(maxsize=4096)
def _measure(text: str, *, any_noun: bool, letters: bool = False) -> Quantity:
    found = Quantity(text)
    if currency := _CURRENCY.match(text):
        text = currency[1] + text[currency.end() :]
        found = Quantity(text, dimension=((currency.lastgroup, 1),))
    if (together := _sum_of_amounts(text)) is not None:
        return together
    for begin in _tail_start(text):
        spaced = text[begin - 1 : begin] == " " or "{ " in text[begin:]  # else a factor
        unit = _read(text[begin:], any_noun=any_noun and spaced, letters=letters)
        value = text[:begin].rstrip()
        if unit is None or not value or (unit.percent and value.endswith("%")):
            continue
        if unit.dimension == (("angle", 1),) and PERIODIC.search(value):
            continue
        joined = dict(found.dimension)
        for name, power in unit.dimension:
            joined[name] = power if name in _CURRENCY.groupindex else joined.get(name, 0) + power
        return unit._replace(text=value, dimension=tuple(sorted(joined.items())))
    return found


def _sum_of_amounts(text: str) -> Quantity | None:
    r"""`1 hour 30 minutes`, `5\text{ feet }3\text{ inches}` in the dimension's own unit; None for
    anything else.
    """
    plain = " ".join(WRAPPED_TEXT.sub(r" \1 ", text).split())
    position = 0
    total = Fraction(0)
    sizes = []
    while match := _AMOUNT.match(plain, position):
        known = _look_up(match[2])
        value = parse_number(match[1])
        if known is None or value is None:
            return None
        sizes.append(known)
        total = total + value * known[1]
        position = match.end()
    falling = all(a[0] == b[0] and a[1] > b[1] for a, b in itertools.pairwise(sizes))
    if len(sizes) < 2 or position < len(plain) or not falling:
        return None
    return Quantity(str(total), dimension=((sizes[0][0], 1),))


def _tail_start(text: str) -> list[int]:
    """Positions where the unit may start, the longest unit first. One pass; at most `_MAX_PIECES`
    positions.
    """
    starts: list[int] = []
    previous = ""
    for piece in _PIECE.finditer(text):
        kind = piece.lastgroup
        if kind == "space":
            continue
        # `2x cm`: what follows a variable is a variable.
        variable = kind == "word" and not starts and not (previous.isdigit() or previous in ")}]")
        if kind == "other":
            starts = []
        elif not variable and kind not in ("exponent", "join"):
            starts.append(piece.start())
        previous = piece[0][-1]
    return starts[:1] + starts[1:][-_MAX_PIECES:]


def _read(tail: str, *, any_noun: bool, letters: bool) -> Quantity | None:
    """Read a unit (` \\text{ cm}^2`, `km/h`, `million dollars`); None if it holds a word that is
    not a unit.
    """
    plain = []
    in_text = False
    in_prose = False
    for piece in _PIECE.finditer(tail):
        if piece.lastgroup == "text":
            in_text = True
            in_prose |= _PROSE.search(piece[0]) is not None
            plain.append(f" {piece['content']} ")
        elif piece.lastgroup == "scale":
            plain.append({"C": " celsius ", "F": " fahrenheit "}[piece["scale"]])
        elif piece.lastgroup == "sign":
            plain.append(f" {_CURRENCY_SIGNS[piece[0]]} ")
        elif piece.lastgroup == "other":
            return None
        else:
            plain.append(piece[0])
    return _read_words("".join(plain), any_noun=any_noun and in_prose, letters=letters or in_text)


def _read_words(text: str, *, any_noun: bool, letters: bool) -> Quantity | None:
    text = _SPEED.sub(
        lambda match: " mi/h " if match[0] == "mph" else " km/h ", text.replace(r"\cdot", "·")
    )
    for name, pattern in _PARTS.items():
        text = pattern.sub(f" {name} ", text)
    share = _SHARE.search(text)
    if share:
        text = text[: share.start()]
    words = text.strip(" .}·()").lower()
    if share and not words:
        return Quantity("")
    if (fraction := _FRACTIONS.get(words, _FRACTIONS.get(words.removesuffix("s")))) is not None:
        return Quantity("", scale=fraction)

    scale = Fraction(1)
    size = Fraction(1)
    percent = False
    powers: dict[str, int] = {}
    sign = 1
    next_power = 1
    last = None
    nouns = []
    counts = False
    lone_letters = 0
    joined = False
    position = 0
    for token in _UNIT_TOKEN.finditer(text):
        if text[position : token.start()].strip(" }·()"):
            return None
        position = token.end()
        word = token[0]
        if word == "%" or word.lower().rstrip(".") in ("percent", "percentage", "pct"):
            if percent or powers:
                return None
            percent = True
        elif word.startswith("^"):
            exponent = int(token[1])
            if last is None or percent or exponent == 0:
                return None
            name, power, one = last
            powers[name] += power * exponent - power
            size *= one ** (power * exponent - power)
            last = None
        elif word == "/" or word == "per":
            sign = -1
            joined = True
        elif word.lower().rstrip(".") in ("square", "sq", "cubic", "cu") and next_power == 1:
            next_power = 2 if word.lower().startswith("sq") else 3
        elif word in _SCALES or (word.endswith("s") and word[:-1] in _SCALES):
            if powers or nouns or percent or joined:
                return None
            scale *= _SCALES.get(word) or _SCALES[word[:-1]]
        else:
            known = _BY_NAME["degree"] if word == r"\degree" else _look_up(word)
            noun = word.lower().rstrip(".")
            if (
                known is None
                and any_noun
                and _NOUN.fullmatch(noun)
                and not {noun, noun[:-1]} & _CHANGES_A_VALUE
            ):
                nouns.append(_singular(noun))
                counts |= _PLURAL.fullmatch(noun) is not None
                continue
            if known is None:
                return None
            lone_letters += word in _AMBIGUOUS
            name, one = known
            power = sign * next_power
            powers[name] = powers.get(name, 0) + power
            size *= one**power
            sign = 1
            next_power = 1
            last = (name, power, one)
    if text[position:].strip(" .,})") or next_power != 1 and not powers:
        return None
    if lone_letters and not letters and not joined:
        return None
    if nouns:
        if not (counts or powers):
            return None
        powers[" ".join(nouns)] = 1
    if "angle" in powers and len(powers) == 2 and {"celsius", "fahrenheit"} & powers.keys():
        del powers["angle"]
    if not powers and not percent and scale == 1:
        return None
    return Quantity(
        "", scale, tuple(sorted(item for item in powers.items() if item[1])), size, percent
    )


def _look_up(word: str) -> tuple[str, Fraction] | None:
    word = word.rstrip(".")
    lower = word.lower()
    for name in (word, lower, lower.removesuffix("s"), lower.removesuffix("es")):
        # `Km` is `km`, but `Mg` is not `mg`, `Nm` not `nm`.
        if name in _BY_NAME and (
            name == word or len(name) > 2 or (len(name) > 1 and word[0] not in "MNU")
        ):
            return _BY_NAME[name]
    singular = _singular(lower)
    return (singular, Fraction(1)) if singular in _COUNTED else None


def _singular(word: str) -> str:
    if word in _COUNTED:
        return word
    for ending, replacement in (("ies", "y"), ("es", ""), ("s", ""), ("ices", "ex")):
        if word.endswith(ending) and word.removesuffix(ending) + replacement in _COUNTED:
            return word.removesuffix(ending) + replacement
    return word.removesuffix("s")
