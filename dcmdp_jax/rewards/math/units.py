r"""Units of measurement, counted things and words for numbers (`million`) that stand after a value.

A prediction may state only what is listed here: an unknown word may change the value (`42
squared`), so it stays and the answer does not match. A reference answer may count anything that
stands in the plural (`16 daps`).
"""

import dataclasses
import functools
import itertools
import re
from collections import Counter
from fractions import Fraction

from dcmdp_jax.rewards.math.numbers import parse_number


def vocabulary(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


# Dimension: its units, each with its names and its size in the dimension's base unit.
_MEASURES_TABLE = """
length: m meter metre 1, micron 1e-6, in inch 0.0254, ft foot feet 0.3048, yd yard 0.9144, \
mi mile 1609.344
mass: g gram 1, tonne 1000000, lb pound 453.59237, oz ounce 28.349523125
time: s second 1, sec 1, min minute 60, h hr hour 3600, d day 86400, week 604800
months: month 1, year yr 12
volume: L l liter litre 1, mL ml milliliter millilitre 1/1000
gallons: gallon gal 1, quart 1/4, pint 1/8, cup 1/16
money: dollar USD 1, cent 1/100
euro: euro EUR 1
sterling: GBP 1, pence 1/100
yuan: yuan RMB 1
yen: yen JPY 1
rupee: rupee Rs INR 1
angle: degree deg \\degree 1
radian: radian rad 1
celsius: celsius 1
fahrenheit: fahrenheit 1
K: K kelvin 1
force: N newton 1
energy: J joule 1
erg: erg 1
eV: eV 1
power: W watt 1
charge: C coulomb 1
voltage: V volt 1
current: A ampere 1
frequency: Hz hertz 1
pressure: Pa pascal 1
field: T tesla 1
amount: mol mole 1
acre: acre 1
hectare: hectare 1
before noon: am a.m a.m. 1
after noon: pm p.m p.m. 1
won: won KRW 1
lira: lira lire 1
krona: krona kronor SEK 1
krone: krone kroner 1
peso: peso 1
franc: franc CHF 1
ruble: ruble rouble 1
rupiah: rupiah 1
ringgit: ringgit 1
baht: baht 1
dong: dong 1
zloty: zloty PLN 1
forint: forint 1
dirham: dirham 1
dinar: dinar 1
riyal: riyal rial 1
shekel: shekel 1
rand: rand 1
"""
_MEASURES = dict(line.split(": ") for line in _MEASURES_TABLE.strip().splitlines())
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
    """
    unit apple ball balloon banana block boat book bottle box boy bus cake candy car card cat
    chair child children choice class coin color combination cookie cow cube customer dog door
    egg employee face fish flower friend game girl goal group guest handshake horse house
    integer item jar kid letter man marble match member men method mark number orange orchid
    page pair parent passenger path pen pencil penny people permutation person piece pizza plant
    player point possibility problem puppy question road room row salmon seat sheep shell shirt
    slice solution square step sticker student sweet table teacher team term ticket tile time
    toy tree triangle truck value vertex vote way white woman women word worker dime nickel
    """
)
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "myriad": 10**4,
    "lakh": 10**5,
    "crore": 10**7,
    "thousand": 10**3,
    "million": 10**6,
    "milliard": 10**9,
    "billion": 10**9,
    "trillion": 10**12,
    "quadrillion": 10**15,
}
_ORDINALS = (
    "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)
_TENS = "thirtieth fortieth fiftieth sixtieth seventieth eightieth ninetieth"
# Parts of one, which change the number in front of them; two words are joined by `_PARTS`.
_FRACTIONS = {
    "half": Fraction(1, 2),
    "halve": Fraction(1, 2),
    "permille": Fraction(1, 1000),
    "basispoint": Fraction(1, 10**4),
}
_FRACTIONS |= {name: Fraction(1, size) for size, name in enumerate(_ORDINALS.split(), 3)}
_FRACTIONS |= {name: Fraction(1, 10 * tens) for tens, name in enumerate(_TENS.split(), 3)}
_FRACTIONS |= {f"{name}th": Fraction(1, size) for name, size in _SCALES.items()}
_CHANGES_A_VALUE = vocabulary(
    """
    about above and approximately at base below between binary but choose cubed decimal divided
    double either equals except factorial fewer from greater hex if inf infinite infinity least
    less log many maybe minus mod modulo more most neither never no nor not of off or out over
    percent percentage plus power quarter raised root score some square squared sqrt than times
    to triple twice under up when where with without wrong arc arg cos cosec cosh cot csc det
    exp gcd lcm lim ln log mil mill sec sgn sin sinh tan tanh cis abs ten one gross fold grand
    reciprocal negative positive inverse opposite conjugate infinities grosses googol
    """
).union(_FRACTIONS)


def _sizes() -> dict[str, tuple[str, Fraction]]:
    """Dimension and size of every unit by name, with its prefixes."""
    sizes = {}
    prefixes = [prefix.split() for prefix in _PREFIXES.split(", ")]
    for dimension, measures_of_one in _MEASURES.items():
        units = [unit.split() for unit in measures_of_one.split(", ")]
        for *names, size in units:
            sizes |= dict.fromkeys(names, (dimension, Fraction(size)))

        symbol, *words, size = units[0]
        for letter, prefix, power in prefixes:
            if letter in _TAKES.get(dimension, ""):
                names = [letter + symbol, *(prefix + word for word in words)]
                prefixed_size = Fraction(size) * Fraction(10) ** int(power)
                sizes |= dict.fromkeys(names, (dimension, prefixed_size))
    return sizes


_BY_NAME = _sizes()
_CLEAR = vocabulary("kJ MJ GJ kN kV kW MW GW Hz Pa eV")
_AMBIGUOUS = frozenset(
    name
    for name, (dimension, _) in _BY_NAME.items()
    if len(name) == 1 or (len(name) == 2 and dimension in _PREFIXED)
).difference(_CLEAR)
"""Without a text command around it, a lone letter or a pair such as `mA` is variables."""

_NOUN = re.compile(r"(?=[a-z]{0,40}[aeiouy])(?![a-z]{0,40}(?:illions?|fold)$)[a-z]{3,40}+")
"""A noun of a reference that no list has; `5\\text{k}` or `3\\mathrm{e}` has a factor instead."""
_PLURAL = re.compile(r"[a-z]++(?<=[^sui]s)")
"""A noun that counts. In the singular it may say another value: `5\\text{ reciprocal}`."""
_PROSE = re.compile(r"\\(?:text|mbox)")
TEXT_COMMANDS = (
    r"\\(?:text|mathrm|textbf|mathbf|textit|textnormal|mbox|textrm|texttt|mathtt"
    r"|operatorname|rm|bm|underline) ?\{"
)
"""Start of a text command, after runs of spaces were reduced to one. The closing brace follows."""
_EXPONENT = r"\^ ?(?:\{ ?-?[0-9] ?\}|[0-9])"
_PIECE = re.compile(
    rf"(?P<text>{TEXT_COMMANDS}(?P<content>[^{{}}]*+)\}})"
    r"|(?P<degree>\\degree)(?: ?(?P<scale>[CF])(?![a-zA-Z]))?"
    rf"|(?P<exponent>{_EXPONENT})|(?P<word>[a-zA-Zµ]++(?:\.[a-zA-Z])?+\.?+)"
    r"|(?P<join>/|\\cdot(?![a-zA-Z])|·)|(?P<percent>%)|(?P<sign>[€£₩₺])|(?P<space> )"
    r"|(?P<other>\\[a-zA-Z]++|.)",
    re.DOTALL,
)
_UNIT_TOKEN = re.compile(r"[a-zA-Zµ]++(?:\.[a-zA-Z])?+\.?+|\^[{ ]*+(-?[0-9])|/|%|\\degree")
WRAPPED_TEXT = re.compile(TEXT_COMMANDS + r"([^{}]*+)\}")
_AMOUNT = re.compile(
    r"(?<![0-9]) ?([0-9]++(?:\.[0-9]++)?+) ?([a-zA-Z]++)\.?+ ?,?+ ?(?:and(?![a-zA-Z]))?+ ?"
)
_CURRENCY = re.compile(
    r"([+-]?) ?(?:(?P<money>\\\$)|(?P<euro>€|\\euro(?![a-zA-Z]))"
    r"|(?P<sterling>£|\\pounds(?![a-zA-Z]))|(?P<yuan_or_yen>¥)|(?P<won>₩)|(?P<lira>₺)"
    r"|(?P<rupee>₹|(?:\\text ?\{ ?)?+Rs\.?+ ?\}?+(?= ?[0-9]))) ?"
)
# Currency sign, or letter of a temperature scale -> its word.
_SIGNS = {"€": "euro", "£": "GBP", "₩": "won", "₺": "lira", "C": "celsius", "F": "fahrenheit"}
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
# Positions at which a unit may begin, counted from the end, beside the first.
_MAX_PIECES = 12


@dataclasses.dataclass(frozen=True)
class Quantity:
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

    @property
    def is_plain(self) -> bool:
        """Whether the value is all there is."""
        return not self.dimension and not self.percent and self.scale == 1


def measures(prediction: str, gold: str) -> tuple[Quantity, Quantity]:
    """Split both answers into value and unit.

    A lone letter (`5 m`) is a unit where the other answer states a unit, or where both are of one
    kind but differ in size (`2 mA`, `0.002 A`); else it is a variable.
    """
    predicted = _measure(prediction, any_noun=False)
    expected = _measure(gold, any_noun=True)
    predicted_unit = predicted
    if not predicted.dimension:
        predicted_unit = _measure(prediction, any_noun=False, letters=True)
    expected_unit = expected
    if not expected.dimension:
        expected_unit = _measure(gold, any_noun=True, letters=True)
    is_same_kind = predicted_unit.dimension == expected_unit.dimension
    if (
        predicted.dimension
        or expected.dimension
        or (is_same_kind and predicted_unit.size != expected_unit.size)
    ):
        return predicted_unit, expected_unit
    return predicted, expected


def factors(predicted: Quantity, expected: Quantity) -> list[tuple[Fraction, Fraction]]:
    """Pairs of factors that make the two values comparable; none if their units disagree.

    A unit that only one answer has is dropped. A percentage is matched by its number and by its
    hundredth; a reference below 1 without a percent sign is not a number of percent (0.5% is not
    1/2), and a percentage equals a number of fractions (`5 permilles`) by value alone.
    """
    if predicted.dimension and expected.dimension:
        dimensions = {predicted.dimension, expected.dimension}
        if len(dimensions) > 1 and dimensions not in _ONE_SIGN:
            return []
        if predicted.percent != expected.percent:
            return []
        return [(predicted.scale * predicted.size, expected.scale * expected.size)]
    scales = (predicted.scale, expected.scale)
    if predicted.percent == expected.percent:
        return [scales]
    if predicted.dimension or expected.dimension:
        return []

    if predicted.percent:
        by_hundredth = (predicted.scale / 100, expected.scale)
        reference = parse_number(expected.text)
        number_may_match = reference is not None and abs(reference * expected.scale) >= 1
    else:
        by_hundredth = (predicted.scale, expected.scale / 100)
        number_may_match = True
    if min(scales) < 1 or not number_may_match:
        return [by_hundredth]
    return [scales, by_hundredth]


def unit_words(text: str) -> bool:
    """Whether the text is nothing but a unit, a counted thing or a percent sign."""
    return _read(text, any_noun=False, letters=True) is not None


def is_unit(word: str) -> bool:
    """Whether a word is the name of a unit as it is written."""
    return word in _BY_NAME


@functools.lru_cache(maxsize=4096)
def _measure(text: str, *, any_noun: bool, letters: bool = False) -> Quantity:
    quantity = Quantity(text)
    currency = _CURRENCY.match(text)
    if currency:
        text = currency[1] + text[currency.end() :]
        quantity = Quantity(text, dimension=((currency.lastgroup, 1),))
    total = _sum_of_amounts(text)
    if total is not None:
        return total

    for start in _tail_start(text):
        is_spaced = text[start - 1 : start] == " " or "{ " in text[start:]  # else a factor
        unit = _read(text[start:], any_noun=any_noun and is_spaced, letters=letters)
        value = text[:start].rstrip()
        if unit is None or not value or (unit.percent and value.endswith("%")):
            continue
        if unit.dimension == (("angle", 1),) and PERIODIC.search(value):
            continue
        powers = dict(quantity.dimension) | dict(unit.dimension)
        return dataclasses.replace(unit, text=value, dimension=tuple(sorted(powers.items())))
    return quantity


def _sum_of_amounts(text: str) -> Quantity | None:
    """`1 hour 30 minutes` in the dimension's own unit; None for anything else."""
    plain = " ".join(WRAPPED_TEXT.sub(r" \1 ", text).split())
    position = 0
    total = Fraction(0)
    units = []
    while match := _AMOUNT.match(plain, position):
        unit = _look_up(match[2])
        value = parse_number(match[1])
        if unit is None or value is None:
            return None
        units.append(unit)
        total += value * unit[1]
        position = match.end()
    if len(units) < 2 or position < len(plain):
        return None
    for (dimension, size), (next_dimension, next_size) in itertools.pairwise(units):
        if dimension != next_dimension or size <= next_size:
            return None
    return Quantity(str(total), dimension=((dimension, 1),))


def _tail_start(text: str) -> list[int]:
    """At most `_MAX_PIECES` positions where the unit may start, the longest unit first."""
    starts = []
    previous = ""
    for piece in _PIECE.finditer(text):
        kind = piece.lastgroup
        if kind == "space":
            continue
        if kind == "other":
            starts = []
        elif kind == "word" and not starts and not (previous.isdigit() or previous in ")}]"):
            pass  # `2x cm`: what follows a variable is a variable
        elif kind not in ("exponent", "join"):
            starts.append(piece.start())
        previous = piece[0][-1]
    return starts[:1] + starts[1:][-_MAX_PIECES:]


def _read(tail: str, *, any_noun: bool, letters: bool) -> Quantity | None:
    r"""Read a unit (` \text{ cm}^2`, `million dollars`); None if a word in it is not a unit."""
    plain = ""
    in_text = False
    in_prose = False
    for piece in _PIECE.finditer(tail):
        kind = piece.lastgroup
        if kind == "other":
            return None
        if kind == "text":
            in_text = True
            in_prose |= _PROSE.search(piece[0]) is not None
            plain += f" {piece['content']} "
        elif kind in ("scale", "sign"):
            plain += f" {_SIGNS[piece[kind]]} "
        else:
            plain += piece[0]
    return _read_words(plain, any_noun=any_noun and in_prose, letters=letters or in_text)


def _read_words(text: str, *, any_noun: bool, letters: bool) -> Quantity | None:
    text = text.replace(r"\cdot", "·")
    text = _SPEED.sub(lambda match: " mi/h " if match[0] == "mph" else " km/h ", text)
    for name, pattern in _PARTS.items():
        text = pattern.sub(f" {name} ", text)
    share = _SHARE.search(text)
    if share:
        text = text[: share.start()]
    words = text.strip(" .}·()").lower()
    if share and not words:
        return Quantity("")
    fraction = _FRACTIONS.get(words.removesuffix("s"))
    if fraction:
        return Quantity("", scale=fraction)

    unit = _UnitReader(any_noun)
    end = 0
    for token in _UNIT_TOKEN.finditer(text):
        if text[end : token.start()].strip(" }·()") or not unit.read(token):
            return None
        end = token.end()
    if text[end:].strip(" .,})") or (unit.lone_letters and not letters and not unit.is_joined):
        return None
    return unit.quantity()


@dataclasses.dataclass
class _UnitReader:
    """A unit that is read word by word.

    Attributes:
        any_noun: whether a noun that no list has may count.
        last: dimension, power and size of the word that an exponent would raise.
        is_joined: whether it has a `/` or "per".
        lone_letters: whether a word may be a variable.
    """

    any_noun: bool
    scale: Fraction = Fraction(1)
    size: Fraction = Fraction(1)
    percent: bool = False
    powers: Counter[str] = dataclasses.field(default_factory=Counter)
    last: tuple[str, int, Fraction] | None = None
    next_power: int = 1
    next_sign: int = 1
    nouns: tuple[str, ...] = ()
    has_plural: bool = False
    is_joined: bool = False
    lone_letters: bool = False

    def read(self, token: re.Match[str]) -> bool:
        """Add a word; False where a unit can't have it."""
        word = token[0]
        plain = word.lower().rstrip(".")
        if word == "%" or plain in ("percent", "percentage", "pct"):
            is_first = not self.percent and not self.powers
            self.percent = True
            return is_first
        if word.startswith("^"):
            return self._raise_last(int(token[1]))
        if word in ("/", "per"):
            self.next_sign = -1
            self.is_joined = True
            return True
        if plain in ("square", "sq", "cubic", "cu") and self.next_power == 1:
            self.next_power = 3
            if plain.startswith("sq"):
                self.next_power = 2
            return True
        scale = _SCALES.get(word.removesuffix("s"))
        if scale:
            self.scale *= scale
            return not (self.powers or self.nouns or self.percent or self.is_joined)

        unit = _look_up(word)
        if unit is None:
            return self._read_noun(plain)
        self.lone_letters |= word in _AMBIGUOUS
        self.last = (unit[0], self.next_sign * self.next_power, unit[1])
        self._multiply(*self.last)
        self.next_sign = 1
        self.next_power = 1
        return True

    def quantity(self) -> Quantity | None:
        """The unit that was read, without a value; None if it is none."""
        powers = self.powers
        if self.next_power != 1 and not powers:
            return None
        if self.nouns:
            if not self.has_plural and not powers:
                return None
            powers[" ".join(self.nouns)] = 1
        if powers.keys() in ({"angle", "celsius"}, {"angle", "fahrenheit"}):
            del powers["angle"]
        if not powers and not self.percent and self.scale == 1:
            return None
        return Quantity(
            text="",
            scale=self.scale,
            dimension=tuple(sorted(item for item in powers.items() if item[1])),
            size=self.size,
            percent=self.percent,
        )

    def _raise_last(self, exponent: int) -> bool:
        if self.last is None or self.percent or exponent == 0:
            return False
        name, power, size = self.last
        self._multiply(name, power * exponent - power, size)
        self.last = None
        return True

    def _multiply(self, name: str, power: int, size: Fraction) -> None:
        self.powers[name] += power
        self.size *= size**power

    def _read_noun(self, noun: str) -> bool:
        if not self.any_noun or not _NOUN.fullmatch(noun) or {noun, noun[:-1]} & _CHANGES_A_VALUE:
            return False
        self.nouns += (_singular(noun),)
        self.has_plural |= _PLURAL.fullmatch(noun) is not None
        return True


def _look_up(word: str) -> tuple[str, Fraction] | None:
    """Dimension and size of a unit, or of one counted thing; None for another word."""
    word = word.rstrip(".")
    lower = word.lower()
    for name in (word, lower, lower.removesuffix("s"), lower.removesuffix("es")):
        # `Km` is `km`, but `Mg` is not `mg`, `Nm` not `nm`.
        same_unit = name == word or len(name) > 2 or (len(name) > 1 and word[0] not in "MNU")
        if same_unit and name in _BY_NAME:
            return _BY_NAME[name]
    singular = _singular(lower)
    if singular not in _COUNTED:
        return None
    return singular, Fraction(1)


def _singular(word: str) -> str:
    if word in _COUNTED:
        return word
    for ending, replacement in (("ies", "y"), ("es", ""), ("s", ""), ("ices", "ex")):
        singular = word.removesuffix(ending) + replacement
        if word.endswith(ending) and singular in _COUNTED:
            return singular
    return word.removesuffix("s")
