r"""One notation for the many ways an answer is written in LaTeX, and its parts.

The trainer's process runs this on arbitrary model output, so every function takes linear time: runs
of spaces are reduced to one first, quantifiers are not nested, and possessive where they could
backtrack.
"""

import itertools
import re

from dcmdp_jax.rewards.math.numbers import join_digit_groups
from dcmdp_jax.rewards.math.unicode import GREEK_NAMES, closing_brackets, to_latex
from dcmdp_jax.rewards.math.units import (
    TEXT_COMMANDS,
    WRAPPED_TEXT,
    is_unit,
    unit_words,
    vocabulary,
)

_BOXED = re.compile(r"\\boxed\s*+\{")
# What brackets nothing or balances at once, then braces that matter. It matches wherever it is
# tried.
_BRACES = re.compile(
    r"(?:[^{}\\]++|\\(?!boxed\s*+\{).|\{[^{}\\]*+\})*+"
    r"(?:(?P<open>\{(?:\{(?![^{}\\]*+\}))*+)|(?P<close>\}++)|(?P<box>\\boxed\s*+\{)|\\?\Z)",
    re.DOTALL,
)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]*+\|>|[\u200b\ufeff]")
_SPACE = re.compile(r"\s+")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_DELIMITER = re.compile(r"(?P<literal>\\\\|\\\$)|\$\$?|\\[\[\]()]")
# Opening mark -> the one that closes it.
_CLOSING = {"$": "$", "$$": "$$", r"\[": r"\]", r"\(": r"\)"}
_JOINERS = re.compile(r"(?:[\s,;]|and(?![a-zA-Z])|or(?![a-zA-Z]))*+")
_AFTER_A_VALUE = vocabulary("is are the our final answer answers solution solutions result")
_STATES_A_VALUE = vocabulary(
    """
    is are was be equal equals gives yields get obtain have find becomes exactly answer solution
    result value total so thus hence therefore that
    """
)
_TURNS_A_VALUE = vocabulary(
    """
    not no never neither nor none isn't isnt aren't arent or either less more greater fewer
    least most than below above under over between except excluding without wrong incorrect
    false minus plus times twice thrice half double triple negative square squared root cube
    cubed reciprocal inverse percent mod modulo base factorial divided if unless but versus to
    exceeds exceed any other from
    """
)
_WHOLE_WRAPPER = re.compile(TEXT_COMMANDS)
_WORDS = re.compile(r"[A-Za-z](?:[A-Za-z' \-])*+")
_LETTERS_JOINED = re.compile(r"[A-Z](?: (?:and|or) [A-Z])++")
_READ_COMMANDS = vocabulary(
    """
    frac sqrt pi sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp cdot
    times div infty cup cap binom lfloor rfloor lceil rceil begin end left right max min gcd lcm
    det sum prod int lim to mathrm operatorname mathbf leq geq neq in emptyset varnothing mathbb
    setminus degree lvert rvert vert mid lbrace rbrace odot oplus langle rangle notin subset
    parallel perp Vert ast star mod
    """
)
GREEK_COMMANDS = vocabulary("vartheta varpi varrho varsigma hbar ell").union(GREEK_NAMES)
_CONJUNCTION = re.compile(
    r",? ?\\(?:text|mbox|textrm|mathrm) ?\{ ?,? ?(?:and|or) ?\} ?,?"
    r"|,?(?<![a-zA-Z\\]) ?(?:and|or)(?![a-zA-Z]) ?,?"
)
_INDEX = re.compile(rf"_ ?(\{{ ?)?{TEXT_COMMANDS} ?([^{{}}]*?) ?\}}(?(1) ?\}})")
# A colour or a frame around a value; `{\\color{red} 5}` only sets the colour.
_ORNAMENT = re.compile(
    r"\\(?:(?:textcolor|colorbox|fcolorbox ?\{[^{}]*+\})(?: ?\[[^\[\]{}]*+\])? ?\{[^{}]*+\}"
    r"|fbox|framebox) ?(?=\{)"
    r"|\\color(?: ?\[[^\[\]{}]*+\])? ?\{[^{}]*+\}"
)
# The exponent in front of the index: `v^2_0` is the square of `v_0`.
_POWER_BEFORE_INDEX = re.compile(
    r"((?<=[a-zA-Z])|(?<=[a-zA-Z]\})) ?(\^ ?(?:[0-9a-zA-Z]|\{[^{}]*+\})) ?"
    r"(_ ?(?:[0-9a-zA-Z]|\{[^{}]*+\}))"
)
_BRACED_INDEX = re.compile(r"_ ?\{ ?([a-zA-Z0-9]) ?\}")
_PRIMES = re.compile(r"\^ ?(?:\{ ?((?:\\prime ?)++)\}|(\\prime(?![a-zA-Z])))")
_ANGLES = re.compile(r"\\langle(?![a-zA-Z])([^|,]*+,(?:(?!\\[lr]angle)[^|])*+)\\rangle(?![a-zA-Z])")
_DIGIT_GROUPS = re.compile(r"(?<![0-9,])[0-9]{1,3}(?:,[0-9]{3}(?![0-9]))++")

# (pattern, what takes its place, an example), in this order.
_RULES = (
    (r"[−–]", "-", "−3 => -3"),
    (r"×", r"\\times ", r"2×3 => 2\times 3"),
    (r"(?<!\\)\\n(?![a-zA-Z])", " ", r"5\n => 5 "),
    (r"(?<=[0-9]) ?(?:,\\!|\{,\}) ?(?=[0-9]{3})", ",", "1{,}000 => 1,000"),
    (r"\\thinspace(?![a-zA-Z])|\{ ?\\, ?\}", r"\\,", r"5\thinspace => 5\,"),
    (r"(?<=[0-9.,])(?<!\\,) ?(?:\\[,!] ?)++(?=[0-9])", " ", r"1\,000 => 1 000"),
    (r"(?<!\\)\\(?:\!|,)", "", r"5\, => 5"),
    (r"\{ ?: ?\}", ":", "10{:}20 => 10:20"),
    (r"\\text ?\{ ?(\\\$|€|£|¥|₹) ?\}", r"\1", r"\text{\$}5 => \$5"),
    (r"(?<!\\)\\(?:;|:|>| )|~|\\q?quad(?![a-zA-Z])", " ", r"5\;cm => 5 cm"),
    (r"\\colon(?![a-zA-Z])", ":", r"2\colon3 => 2:3"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", r"\dfrac12 => \frac12"),
    (r"\\frac ?([0-9]) ?([0-9])", r"\\frac{\1}{\2}", r"\frac12 => \frac{1}{2}"),
    (
        r"(?<!\\)\{([^{}\\]*+(?:\\(?!over(?![a-zA-Z]))[^{}\\]*+)*+)\\over(?![a-zA-Z])([^{}]*+)\}",
        r"\\frac{\1}{\2}",
        r"{3\over 5} => \frac{3}{ 5}",
    ),
    (r"(?<![\\a-zA-Z])sqrt(?![a-zA-Z])", r"\\sqrt", r"2sqrt(3) => 2\sqrt(3)"),
    (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])|\\(?:uppi|textpi)(?![a-zA-Z])", r"\\pi ", r"2pi/3 => 2\pi /3"),
    (r"(?<![\\a-zA-Z])(?:infinity|inf)(?![a-zA-Z])", r"\\infty ", r"(0,inf) => (0,\infty )"),
    (r"\\sqrt ?([0-9])", r"\\sqrt{\1}", r"\sqrt2 => \sqrt{2}"),
    (r"\\sqrt ?\(([^()]*+)\)", r"\\sqrt{\1}", r"\sqrt(x+1) => \sqrt{x+1}"),
    (
        r"\\(?:left|right|[bB]igg?[lr]?)(?= ?[\[\](){}|.\\])(?!\\[a-zA-Z]) ?(?:\.(?![0-9]))?",
        "",
        r"\left(5 => (5",
    ),
    (
        r"\\(?:displaystyle|limits|hfill|boldsymbol|bf|rm(?! ?\{)|tiny|small|normalsize"
        r"|large|Large|LARGE|huge|Huge)(?![a-zA-Z])",
        "",
        r"\large 5 =>  5",
    ),
    (r"\\lt(?![a-zA-Z])", "<", r"x\lt 5 => x< 5"),
    (r"\\gt(?![a-zA-Z])", ">", r"x\gt 5 => x> 5"),
    (r"\\(?:leqslant|le)(?![a-zA-Z])|<=|≤", r"\\leq ", r"x<=5 => x\leq 5"),
    (r"\\(?:geqslant|ge)(?![a-zA-Z])|>=|≥", r"\\geq ", r"x>=5 => x\geq 5"),
    (r"\\ne(?![a-zA-Z])|!=|≠", r"\\neq ", r"x!=5 => x\neq 5"),
    (
        r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|°",
        r"\\degree ",
        r"5^\circ => 5\degree ",
    ),
    (r"\\pounds(?![a-zA-Z])|\\£", "£", r"\pounds 5 => £ 5"),
    (r"\\euro(?![a-zA-Z])|\\€", "€", r"\euro 5 => € 5"),
    (
        r"\\(?:dots[cbmio]?|cdots|hdots)(?![a-zA-Z])|(?<=,) ?\.\.\.",
        r"\\ldots ",
        r"1,2,...,9 => 1,2,\ldots ,9",
    ),
    (r"(?<=[0-9a-zA-Z)}]) ?\.\.\.", r"\\ldots ", r"1,2,3... => 1,2,3\ldots "),
    (
        r"(?<![0-9])([0-9]*+\.[0-9]++) ?(?:\.\.\.|\\ldots(?![a-zA-Z]))",
        r"\1\\ldots ",
        r"0.33... => 0.33\ldots ",
    ),
    (r"(?<=[0-9])\.(?= ?[/*])", "", "5./2 => 5/2"),
    (r"\b(?:np|math)\.(?=[a-z])", r"\\", r"np.exp(5) => \exp(5)"),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset ", r"\varnothing => \emptyset "),
    (
        r"\\(?:operatorname|mathrm|textrm|text|rm) ?\{ ?(?!sec ?\}[ .]*+$)"
        r"(arc(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|ln|log|lg|exp) ?\}",
        r"\\\1 ",
        r"\mathrm{ln}2 => \ln 2",
    ),
    (r"\\lg(?![a-zA-Z])", r"\\log_{10}", r"\lg 2 => \log_{10} 2"),
    (
        r"\\mathrm ?\{ ?C ?\} ?_ ?(?:\{([^{}]*+)\}|([0-9a-z])) ?\^ ?(?:\{([^{}]*+)\}|([0-9a-z]))",
        r"\\binom{\1\2}{\3\4}",
        r"\mathrm{C}_{5}^2 => \binom{5}{2}",
    ),
    (r"(^|\\cup ?|\\in ?|=) ?\](?=[^\[\](),;]*+[,;][^\[\]()]*+[\[\]])", r"\1(", "]0,1] => (0,1]"),
    (r"(?<=[\[(])(?=[^\[\](),;]*+[,;])([^\[\]()]*+)\[(?= ?(?:$|\\cup))", r"\1)", "(0,1[ => (0,1)"),
    (r"\\(?:text)?per(?:mil|thousand)(?![a-zA-Z])", " permille ", r"5\permil => 5 permille "),
    (r"\\%", "%", r"5\% => 5%"),
)
_REPLACEMENTS = tuple((re.compile(pattern), replacement) for pattern, replacement, _ in _RULES)
# A factor set upright or bold: `2+3\mathrm{i}` is `2+3i`. What may be a unit (`5\mathrm{m}`) or a
# choice stays.
_UPRIGHT = re.compile(
    r"(?P<factor>(?<=[0-9})]) ?)?+"
    r"\\(?:(?P<bold>mathbf|bm|textbf)|(?P<text>text(?:rm|it)?)|mathrm|mathit|operatorname|rm) ?"
    r"\{ ?(?P<name>[a-zA-Z]|\\[a-zA-Z]++) ?\}(?P<applied>(?= ?(?P<index>_)|\())?+"
)
_ALIGNED = re.compile(r" ?\\(?:begin|end) ?\{(?:aligned|align\*?|gathered|gather\*?|split)\} ?")
_QUOTES = {'"': '"', "'": "'", "`": "`'", "*": "*", "“": "”", "‘": "’", "«": "»", "„": "“”"}
_IN_TEXT = r"\A(\\(?:text|mathrm|textbf) ?\{)? ?"
_VALUE_NEXT = r"(?=[0-9+\-.$\\(])"
_LABEL = re.compile(rf"{_IN_TEXT}([A-Za-z]{{3,}}+(?: [A-Za-z]++)*+) ?:(?(1) ?\}}) ?{_VALUE_NEXT}")
_EXACTLY = re.compile(
    rf"{_IN_TEXT}(?:exactly|precisely)(?(1) ?\}}| ) ?{_VALUE_NEXT}", re.IGNORECASE
)


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, stripped; None without one, or if one is not closed.

    A box inside a box counts as later than the one around it. Escaped braces (`\{`) do not take
    part in the balance.
    """
    first = _BOXED.search(text)
    if first is None:
        return None

    # One pass: a looping completion may open ten thousand boxes and close none. A token is a box,
    # or a run of braces, which moves the depth by its length.
    depth = 0
    open_boxes = []  # depth inside and where the content starts
    start = -1
    end = -1
    for token in _BRACES.finditer(text, first.start()):
        kind = token.lastgroup
        if kind == "box":
            depth += 1
            open_boxes.append((depth, token.end()))
        elif kind == "open":
            depth += token.end() - token.start("open")
        elif kind == "close":
            depth_after = max(0, depth - (token.end() - token.start("close")))
            while open_boxes and open_boxes[-1][0] > depth_after:
                depth_inside, box_start = open_boxes.pop()
                if box_start > start:
                    # The first brace of the run that goes below the box's depth closes it.
                    start = box_start
                    end = token.start("close") + depth - depth_inside
            depth = depth_after
    if start < 0 or open_boxes:
        return None
    return text[start:end].strip()


def is_read_command(name: str) -> bool:
    """Whether the parser of `algebra` reads a LaTeX command; it may drop others."""
    return name in _READ_COMMANDS or name.lower() in GREEK_COMMANDS


def has_box(text: str) -> bool:
    r"""Whether a `\boxed{` opens in the text, closed or not."""
    return _BOXED.search(text) is not None


def without_special_tokens(text: str) -> str:
    """The text without tokens of the form `<|im_end|>`, zero-width spaces and byte order marks."""
    return _SPECIAL_TOKEN.sub("", text)


def normalize_answer(answer: str) -> str:
    r"""One notation for the many ways an answer is written; idempotent for what models write.

    Takes the content of a box and of math delimiters ("the distance is $5$" gives `5`, "$1$ and
    $2$" gives `1, 2`), drops spacing and sizing commands and digit-group commands, rewrites
    `\dfrac` and its like, `\lt`, degree signs, typographic minus, and "and"/"or" between values as
    commas. Units, degrees and currency signs stay: see `units`.
    """
    text = _SPACE.sub(" ", without_special_tokens(answer))
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed
    text = _without_rows(_unquoted(text))
    text = _outside_delimiters(_without_ornament(to_latex(text)))
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = join_digit_groups(_SPACE.sub(" ", upright(text)))

    text = _ANGLES.sub(
        lambda m: r"\begin{pmatrix}" + m[1].replace(",", r"\\") + r"\end{pmatrix}", text
    )
    text = _PRIMES.sub(lambda match: "'" * match[0].count("prime"), text)
    text = _INDEX.sub(r"_{\2}", text)
    text = _POWER_BEFORE_INDEX.sub(r"\1\3\2", _BRACED_INDEX.sub(r"_\1", text))
    text = _LABEL.sub(r"\2 = ", _unwrapped_value(text.strip()), count=1)
    text = _EXACTLY.sub("", text, count=1)
    plain = unwrap_text(text)
    if not _WORDS.fullmatch(plain) or _LETTERS_JOINED.fullmatch(_SPACE.sub(" ", plain)):
        text = _CONJUNCTION.sub(", ", text)
    return _SPACE.sub(" ", text).strip().rstrip(" ,;.\\")


def upright(text: str) -> str:
    r"""Set variables and constants without commands: `\mathrm{e}`, `2\text{x}`, `5\text{k}`."""
    return _UPRIGHT.sub(_plain, text)


def _plain(match: re.Match[str]) -> str:
    name = match["name"]
    if len(name) > 1:
        if match["bold"]:
            return match[0]
        return f"{name} "
    may_be_unit = is_unit(name) and match["index"] is None
    is_bold_variable = match["bold"] is not None and name != "e"
    if may_be_unit or is_bold_variable:
        return match[0]
    stands_alone = match["factor"] is None and match["applied"] is None
    is_whole_text = match["text"] is not None and match[0] == match.string
    if stands_alone and (name.isupper() or is_whole_text):
        return match[0]
    return name


def without_spaces(text: str) -> str:
    """Remove spaces but after commands and between digits: `2 1/2` is not `21/2`."""
    words = text.split()
    joined = []
    for word, next_word in itertools.zip_longest(words, words[1:], fillvalue=""):
        joined.append(word)
        # `\pi r` is not the command `\pir`
        is_command = "\\" in word and word.rpartition("\\")[2].isalpha()
        between_letters = is_command and next_word[:1].isalpha()
        if between_letters or (word[-1].isdigit() and next_word[:1].isdigit()):
            joined.append(" ")
    return "".join(joined)


def unwrap_text(text: str) -> str:
    r"""Replace `\text{east}`, `\mathrm{E}` and the like by their content; drop outer braces."""
    return _without_outer_braces(WRAPPED_TEXT.sub(r"\1", text))


def _without_outer_braces(text: str) -> str:
    closes = _closing_braces(text)
    start = 0
    end = len(text)
    while start < end:
        if text[start].isspace():
            start += 1
        elif text[end - 1].isspace():
            end -= 1
        elif closes.get(start) == end - 1:
            start += 1
            end -= 1
        else:
            break
    return text[start:end]


def split_elements(text: str, separator: str, *, digit_groups: bool = True) -> list[str]:
    """Split at the separators outside every bracket, dropping empty parts.

    Args:
        text: a list of answers.
        separator: one character.
        digit_groups: whether `1,000` is one number (else two answers).
    """
    grouped = set()
    if digit_groups and separator == ",":
        for match in _DIGIT_GROUPS.finditer(text):
            grouped.update(range(*match.span()))
    elements = []
    start = 0
    for position, depth in enumerate(nesting(text)):
        if text[position] == separator and depth <= 0 and position not in grouped:
            elements.append(text[start:position].strip())
            start = position + 1
    elements.append(text[start:].strip())
    return list(filter(None, elements))


def split_tuple(body: str, *, digit_groups: bool = True) -> list[str]:
    """Split a tuple without its brackets at semicolons where it has some, else at commas."""
    elements = split_elements(body, ";")
    if len(elements) > 1:
        return elements
    return split_elements(body, ",", digit_groups=digit_groups)


def nesting(text: str, opening: str = "([{", closing: str = ")]}") -> list[int]:
    """Number of brackets open after each character."""
    steps = ((character in opening) - (character in closing) for character in text)
    return list(itertools.accumulate(steps))


def _closing_braces(text: str) -> dict[int, int]:
    """Position of each opening brace -> position of its closing brace; skips escaped braces."""
    return closing_brackets(_ESCAPED.sub("  ", text), "{", "}")


def _unquoted(text: str) -> str:
    """The text without quotes, backticks or asterisks around the whole."""
    start = 0
    end = len(text.rstrip(" ."))
    while end - start > 2 and text[end - 1] in _QUOTES.get(text[start], ""):
        start += 1
        end -= 1
    return text[start:end].strip() if start else text


def _without_rows(text: str) -> str:
    r"""Join the rows of `\begin{aligned} x &= 2 \\\\ y &= 3 \end{aligned}` to `x = 2, y = 3`.

    A row that begins with `=` goes on.
    """
    plain = _ALIGNED.sub(" ", text)
    if plain == text or r"\begin" in plain:
        return text
    joined = ""
    for row in plain.split(r"\\"):
        row = row.replace("&", "").strip(" ,;.")
        if row.startswith("="):
            joined += row
        elif row:
            joined += f", {row}"
    return joined.removeprefix(", ")


def _unwrapped_value(text: str) -> str:
    r"""`\textbf{42}` and `\text{A, C}` without the command around the whole; words keep theirs."""
    wrapper = _WHOLE_WRAPPER.match(text)
    if wrapper is None or _closing_braces(text).get(wrapper.end() - 1) != len(text) - 1:
        return text
    inside = text[wrapper.end() : -1].strip()
    is_value = any(character.isdigit() or character in ",;" for character in inside)
    if is_value:
        return inside
    return text


def _without_ornament(text: str) -> str:
    """The text without colours and frames; the braces around the whole go with them."""
    plain = _ORNAMENT.sub("", text)
    return text if plain == text else _without_outer_braces(plain)


def _leads_to_value(text: str) -> bool:
    """Whether words say that the value follows, and none of them may change it."""
    words = [word.strip(".,:;'\"()") for word in text.lower().split()]
    if _TURNS_A_VALUE & set(words):
        return False
    return not text or text[-1] in "=:" or words[-1] in _STATES_A_VALUE


def _outside_delimiters(text: str) -> str:
    """The content of math delimiters, or the text with blanks for them.

    Blanks where the words around may change the meaning of the content.
    """
    delimiters = [token for token in _DELIMITER.finditer(text) if not token["literal"]]
    if not delimiters:
        return text
    segments = []
    around = []
    start = 0
    opening = ""
    for token in delimiters:
        mark = token[0]
        before = text[start : token.start()]
        if not opening and mark in _CLOSING:
            around.append(before)
            opening = mark
        elif mark == _CLOSING.get(opening):
            segments.append(before.strip())
            opening = ""
        elif opening == "$" and mark == "$$":  # `$1$$2$`: one closes, one opens
            segments.append(before.strip())
            around.append("")
        else:
            continue  # a mark of another kind, within this one
        start = token.end()
    around.append(text[start:])
    segments = list(filter(None, segments))

    blanked = _DELIMITER.sub(lambda token: token["literal"] or " ", text)
    # A lone dollar sign within other marks: they do not say what is math.
    dollars = sum(token[0].count("$") for token in delimiters)
    if opening or dollars % 2 or not segments:
        return blanked
    words_around = [words.strip(" .") for words in around]
    if all(map(_JOINERS.fullmatch, words_around)):
        return ", ".join(segments)
    if len(segments) > 1 or not _leads_to_value(words_around[0]):
        return blanked

    after = words_around[-1]
    if not after or _AFTER_A_VALUE.issuperset(after.lower().split()):
        return segments[0]
    if not unit_words(after):
        return blanked
    if "%" not in after:
        after = rf" \text{{{after}}}"
    return segments[0] + after
