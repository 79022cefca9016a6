r"""Mathematics written in Unicode, as LaTeX: `½`, `x²`, `√(x+1)`, `2·3`, `∞`, `θ`.

Linear time, as `notation`.
"""

import re
import unicodedata

_FRACTIONS = {
    sign: unicodedata.normalize("NFKC", sign).split("⁄") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅐⅛⅜⅝⅞⅑⅒↉"
}
_SCRIPTS = str.maketrans(
    "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑᵢⱼₖₘₙₓ", "0123456789+-=()ni0123456789+-=()aeijkmnx"
)
_GREEK = "αβγδεϵζηθικλμνξπρστυφϕχψωΓΔΘΛΞΠΣΦΨΩ"
GREEK_NAMES = (
    "alpha beta gamma delta varepsilon epsilon zeta eta theta iota kappa lambda mu nu xi pi rho "
    "sigma tau upsilon varphi phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
).split()
# Sign=name of its command.
_COMMANDS = """
    ∞=infty ·=cdot ⋅=cdot ∙=cdot •=cdot ±=pm ∓=mp ∪=cup ∩=cap ∈=in ∉=notin ∅=emptyset ∖=setminus
    ≈=approx ∠=angle △=triangle …=ldots ⋯=cdots ∣=mid ⌊=lfloor ⌋=rfloor ⌈=lceil ⌉=rceil ⟨=langle
    ⟩=rangle ⩽=leq ⩾=geq
"""
_SYMBOLS = str.maketrans("∗÷⁄∕′：（）。＝％", "*///':().=%") | str.maketrans(
    {
        "″": "''",
        "，": ", ",
        "；": "; ",
        "、": ", ",
        "或": " or ",
        "和": " and ",
        "¢": " cent ",
        "‰": " permille ",
        "‱": " bps ",
        **{sign: rf"\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)},
        **{letter: rf"\{name} " for letter, name in zip(_GREEK, GREEK_NAMES, strict=True)},
        **{sign[0]: rf"\{sign[2:]} " for sign in _COMMANDS.split()},
    }
)
# Units and counters of Chinese; 月, 日, 分, 角 and 万 have several meanings or change the number, and
# stay.
_CHINESE_UNITS = """
    平方=square 立方=cubic 毫米=mm 厘米=cm 分米=dm 千米=km 公里=km 米=meter 毫克=mg 千克=kg 公斤=kg
    克=gram 吨=tonne 毫秒=ms 秒=second 分钟=minute 小时=hour 天=day 周=week 星期=week 个月=month
    年=year 岁=year 升=liter 毫升=mL 公顷=hectare 美元=dollar 欧元=euro 英镑=GBP 日元=yen 元=yuan
    人民币=yuan 摄氏度=celsius 度=degree
"""
_CHINESE = dict(pair.split("=") for pair in _CHINESE_UNITS.split())
_CHINESE |= dict.fromkeys("个只名条本张次种棵辆件块位支人", "unit")
_CHINESE_WORDS = "|".join(sorted(_CHINESE, key=len, reverse=True))
_CHINESE_UNIT = re.compile(rf"(?<=[0-9)}}{{ ])(?:{_CHINESE_WORDS})+")
_CHINESE_WORD = re.compile(_CHINESE_WORDS)
_FRACTION = re.compile(rf"(?P<power>\^ ?)?+(?P<sign>[{''.join(_FRACTIONS)}])")
# A small number in front of a root that follows no base is the root's index: `³√8`.
_INDEX_OF_ROOT = re.compile(r"(?:(?<=[-+*/=(\[{,; ])|^)([²³⁴⁵⁶⁷⁸⁹ⁿ])√")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]++")
_LOGARITHM = re.compile("(?<![\\\\a-zA-Z])log(?=[₀-₉])")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑᵢⱼₖₘₙₓ]++")
_ROOT = re.compile(r"([√∛∜])(?:\[([0-9n])\])? ?")
_INDICES = {"√": "", "∛": "[3]", "∜": "[4]"}
_NUMBER_OR_NAME = re.compile(
    r"\\frac\{[0-9]++\}\{[0-9]++\}|[0-9]++(?:\.[0-9]++)?|\\[a-zA-Z]++|[a-zA-Z]"
)


def to_latex(text: str) -> str:
    r"""Write fractions, powers, indices, roots, dots, Greek letters and signs of Unicode as LaTeX.

    A root reaches over the number, the letter or the bracket after it: `√12x` is `\sqrt{12}x`, and
    `√(x+1)` is `\sqrt{x+1}`. `1½` is a mixed number. Text in ASCII is returned as it is.
    """
    if text.isascii():
        return text
    text = re.sub("第(?=[0-9])", "", text)
    text = _CHINESE_UNIT.sub(
        lambda units: _CHINESE_WORD.sub(lambda unit: f" {_CHINESE[unit[0]]} ", units[0]), text
    )
    text = _LOGARITHM.sub(r"\\log", _FRACTION.sub(_fraction, text))
    text = _INDEX_OF_ROOT.sub(lambda match: f"√[{match[1].translate(_SCRIPTS)}]", text)
    text = _SUPERSCRIPT.sub(lambda match: _script("^", match), text)
    text = _SUBSCRIPT.sub(lambda match: _script("_", match), text)
    return _with_roots(text.translate(_SYMBOLS))


def _fraction(match: re.Match[str]) -> str:
    above, below = _FRACTIONS[match["sign"]]
    fraction = rf"\frac{{{above}}}{{{below}}}"
    return f"^{{{fraction}}}" if match["power"] else fraction


def _script(sign: str, match: re.Match[str]) -> str:
    """A power or an index; one character, readable in a unit's text, goes without braces."""
    content = match[0].translate(_SCRIPTS)
    next_character = match.string[match.end() : match.end() + 1]
    if len(content) == 1 and not next_character.isalnum():
        return sign + content
    return f"{sign}{{{content}}}"


def _with_roots(text: str) -> str:
    """Roots as commands; the brackets around what a root reaches over become braces."""
    characters = list(text)
    closes = closing_brackets(text, "({", ")}")
    for root in _ROOT.finditer(text):
        start, end = root.span()
        index = _INDICES[root[1]]
        if root[2]:
            index = f"[{root[2]}]"
        characters[start] = rf"\sqrt{index}"
        characters[start + 1 : end] = [""] * (end - start - 1)
        argument = _NUMBER_OR_NAME.match(text, end)
        if argument:
            characters[end] = "{" + characters[end]
            characters[argument.end() - 1] += "}"
        elif end in closes:
            characters[end] = "{"
            characters[closes[end]] = "}"
    return "".join(characters)


def closing_brackets(text: str, opening: str, closing: str) -> dict[int, int]:
    """Position of each opening bracket -> position of the one that closes it, in one pass."""
    closes = {}
    opened = []
    for position, character in enumerate(text):
        if character in opening:
            opened.append(position)
        elif character in closing and opened:
            start = opened.pop()
            if opening.index(text[start]) == closing.index(character):
                closes[start] = position
    return closes
