r"""Answers as text: taking one out of a completion, bringing it to one notation, reading it as a number.

Only string work and exact rationals; nothing here imports an algebra system, so the trainer's process can use all of
it. What these functions leave open (`compare_literals` returns None) is decided by `equivalence`, in a worker.

The verifier's answer notation is LaTeX without dollar signs. One command is ours: an answer that ends in
`\tolerance{d}` is matched by every number at most d away from it.
"""

from __future__ import annotations

import re
from fractions import Fraction

from dcmdp_jax.tasks.numbers import parse_number, same_number

MAX_ANSWER_CHARACTERS = 2000
"""A longer answer is no answer: it is not graded."""


_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"\banswer\b[\s*]{0,8}:[\s*]{0,8}([^\n]*)", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]*\|>")
_TOLERANCE = re.compile(r"\\tolerance\{([^{}]*)\}\s*$")
_MATH_SEGMENT = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)", re.DOTALL)
_JOINERS = re.compile(r"(?:\s|,|;|\band\b|\bor\b)*")
_TEXT_COMMANDS = r"\\(?:text|mathrm|textbf|mathbf|textit|textnormal|mbox|textrm|operatorname|rm|bm|underline)\s*\{"
_WRAPPER = re.compile(_TEXT_COMMANDS + r"([^{}]*)\}")
_WHOLE_WRAPPER = re.compile(_TEXT_COMMANDS)
_UNIT_EXPONENT = r"(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|\d))?"
_UNIT_TEXT = re.compile(
    rf"(?<=[\w)}}\]])\s*\\(?:text|mbox|textnormal|textrm|textbf)\s*\{{\s*[^{{}}]*\}}{_UNIT_EXPONENT}\s*$"
)
_UNIT_ROMAN = re.compile(
    rf"(?<=\d)(?:\s|\\,)*(?:\\(?:mathrm|rm)\s*\{{[^{{}}]*[a-zA-Z][^{{}}]*\}}{_UNIT_EXPONENT}\s*)+$"
)
_UNIT_SYMBOL = re.compile(
    rf"(?<=[\d}}])\s+(?:sq\s+|square\s+)?(?:[cmk]m|kg|km/h|m/s|mi|ft|hrs?|min|sec|mph|mL)(?![a-zA-Z/]){_UNIT_EXPONENT}\s*$"
)
_UNIT_WORD = re.compile(r"(?<=[\d}])\s+(?!and\b|or\b|pi\b|sqrt\b|mod\b)[a-zA-Z]{3,}(?:\s+[a-zA-Z]{3,}){0,2}\s*$")
_CONJUNCTION = re.compile(
    r",?\s*\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}\s*,?|,?(?<![a-zA-Z\\])\s*(?:and|or)(?![a-zA-Z])\s*,?"
)
_IDLE_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
_INTEGER = re.compile(r"[+-]?\d+")
_BASED = re.compile(r"([+-]?\d+)_\{?(\d+)\}?")
_PERCENT = re.compile(r"\s*(?:\\?%|\bpercent(?:age)?\b|\bpct\b)", re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z][A-Za-z\s'\-]*")

_REPLACEMENTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[−–]", "-"),
        (r"×", r"\\times "),
        (r"(?<!\\)\\n(?![a-zA-Z])", " "),
        (r"(?<=\d)\s*(?:,\\!|\{,\})\s*(?=\d{3})", ","),
        (r"(?<!\\)\\(?:\!|,)", ""),
        (r"(?<!\\)\\(?:;|:|>| )|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?=\s*[\[\](){}|.\\])(?!\\[a-zA-Z])\s*(?:\.(?!\d))?", ""),
        (r"\\(?:displaystyle|limits|hfill|boldsymbol|bf|rm(?!\s*\{))(?![a-zA-Z])", ""),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:\$|£|€)|[€£¥]|\\(?:pounds|euro)(?![a-zA-Z])", ""),
        (r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|°)(?:\s*[CF]$)?", ""),
        (r"(?<=\d)\s*\^\s*\{?\s*(?:\\prime\s*)+\}?\s*$", ""),
        (r"(?<=\d)\.(?=\s*[/*])", ""),
        (r"\b(?:np|math)\.(?=[a-z])", r"\\"),
        (r"\\%", "%"),
    )
)


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces balance, without surrounding space; None when there is none.

    A box inside a box counts as later than the one around it. Escaped braces (`\{`) do not take part in the balance.
    """
    first = _BOXED.search(text)
    if first is None:
        return None
    # One pass with a stack: a looping completion may open ten thousand boxes and close none.
    opened: list[int | None] = []
    start, end = -1, -1
    for token in _BRACE_TOKEN.finditer(text, first.start()):
        if token[0] == "}":
            box = opened.pop() if opened else None
            if box is not None and box > start:
                start, end = box, token.start()
        elif token[0].endswith("{") and token[0] != r"\{":
            opened.append(token.end() if token[0].startswith("\\") else None)
    return text[start:end].strip() if start >= 0 else None


def extract_answer(completion: str) -> str | None:
    r"""The answer a completion commits to: its last `\boxed{...}`, else its last "Answer:" line.

    The line may be written in any case and in bold, as in `**Answer:** 42`, and may put the answer on the line after.
    Bare statements ("the answer is 42", a last number, an \fbox) are not answers.

    Args:
        completion: decoded text of one completion, of any length.

    Returns:
        The answer as written, stripped; None when there is none, when it is empty, has an unclosed box (a truncated
        completion) or is longer than `MAX_ANSWER_CHARACTERS`.
    """
    answer = last_boxed(completion)
    if answer is None:
        lines = _ANSWER_LINE.findall(completion)
        if not lines or "\\boxed" in lines[-1]:
            return None
        answer = _SPECIAL_TOKEN.sub("", lines[-1]).strip().strip("*").strip()
    return answer if answer and len(answer) <= MAX_ANSWER_CHARACTERS else None


def split_tolerance(answer: str) -> tuple[str, Fraction | None]:
    r"""Splits `4.2\tolerance{1e-1}` into the answer and its tolerance, absolute; None when it states none.

    Raises:
        ValueError: if the tolerance is not a positive number.
    """
    match = _TOLERANCE.search(answer)
    if match is None:
        return answer, None
    tolerance = parse_number(match.group(1))
    if tolerance is None or tolerance <= 0:
        raise ValueError(f"tolerance of answer {answer!r}: {match.group(1)!r} is not a positive number")
    return answer[: match.start()], tolerance


def normalize_answer(answer: str) -> str:
    r"""One notation for the many ways an answer is written; idempotent for what models commonly write.

    Takes the content of a box and of math delimiters ("the distance is $5$" gives `5`, "$1$ and $2$" gives `1, 2`),
    drops spacing and sizing commands, currency signs, degree signs, digit-group commands and units set as text after a
    value, rewrites `\dfrac` and its like, `\lt`, typographic minus, and "and"/"or" between values as commas.
    """
    text = _SPECIAL_TOKEN.sub("", answer)
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed
    text = _outside_delimiters(text)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = _strip_units(_unwrapped_value(text.replace("$", "").strip()))
    if not _WORDS.fullmatch(unwrap_text(text)):
        text = _CONJUNCTION.sub(", ", text)
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(r"[\s,;.\\]+$", "", text)


def without_spaces(text: str) -> str:
    """Removes every space but those between digits, where they tell `2 1/2` from `21/2`."""
    return _IDLE_SPACE.sub("", text)


def unwrap_text(text: str) -> str:
    r"""Replaces `\text{east}`, `\mathrm{E}` and their like by their content, and braces around the whole by nothing."""
    text = _WRAPPER.sub(r"\1", text)
    closes = _closing_braces(text)
    start, end = 0, len(text)
    while start < end:
        if text[start].isspace():
            start += 1
        elif text[end - 1].isspace():
            end -= 1
        elif closes.get(start) == end - 1:
            start, end = start + 1, end - 1
        else:
            break
    return text[start:end]


def is_percentage(answer: str) -> bool:
    r"""Whether an answer is given in percent (`28\%`, `28 percent`)."""
    return _PERCENT.search(answer) is not None


def strip_percent(text: str) -> str:
    """The answer without its percent sign or word."""
    return _PERCENT.sub("", text).strip()


def split_elements(text: str, separator: str, *, digit_groups: bool = True) -> list[str]:
    """Splits at the separators outside every bracket, dropping empty parts.

    Args:
        text: a list of answers.
        separator: one character.
        digit_groups: whether `1,000` is one number (else two answers).
    """
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth <= 0 and not (digit_groups and _groups_digits(text, position)):
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def compare_literals(prediction: str, gold: str) -> bool | None:
    r"""Compares two answers without algebra; None when only algebra can tell.

    Decides equal strings, two literal numbers (integers as integers, whatever their size), percentages (25\% is
    matched by 25 and by 0.25), words (`\text{east}`, `East`), choices (`(B)`, `B`), a numeral in a stated base given
    without it, and a numeric gold with a tolerance.

    Args:
        prediction: an answer as `extract_answer` returns it.
        gold: the reference answer, see the module's notation.

    Returns:
        True or False when decided, else None.

    Raises:
        ValueError: if the reference answer states an ill-written tolerance.
    """
    gold, tolerance = split_tolerance(gold)
    if _INTEGER.fullmatch(prediction) and _INTEGER.fullmatch(gold):
        equal = _canonical_integer(prediction) == _canonical_integer(gold)
        if equal or tolerance is None:
            return equal
    left, right = normalize_answer(prediction), normalize_answer(gold)
    if not left or not right:
        return False
    if without_spaces(left) == without_spaces(right):
        return True
    left_value, right_value = parse_number(strip_percent(left)), parse_number(strip_percent(right))
    if left_value is not None and right_value is not None:
        if tolerance is not None:
            return abs(left_value - right_value) <= tolerance
        left_scale, right_scale = (Fraction(1, 100 if is_percentage(text) else 1) for text in (left, right))
        same_written = same_number(left_value, right_value)
        return same_written or same_number(left_value * left_scale, right_value * right_scale)
    if _INTEGER.fullmatch(left) and _INTEGER.fullmatch(right):
        return _canonical_integer(left) == _canonical_integer(right)
    based = _BASED.fullmatch(right)
    if based and left_value is not None:
        return left == based[1]
    return _compare_words(left, right)


def answer_defect(answer: str) -> str | None:
    r"""Why no verifier could match anything against a reference answer, in a few words; None when nothing is wrong.

    Structural: empty, nothing but punctuation, braces or environments that do not balance, an ill-written tolerance,
    over `MAX_ANSWER_CHARACTERS`. Fast enough for a whole dataset at start-up.
    """
    if not answer.strip():
        return "is empty"
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return f"has {len(answer)} characters, more than {MAX_ANSWER_CHARACTERS}"
    try:
        answer, _ = split_tolerance(answer)
    except ValueError as error:
        return str(error)
    if not any(character.isalnum() for character in answer):
        return "has no letter, digit or symbol to compare"
    unescaped = re.sub(r"\\[{}]", "", answer)
    depth = 0
    for character in unescaped:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            break
    if depth != 0:
        return "has braces that do not balance"
    begins, ends = re.findall(r"\\begin\{(\w+)\}", answer), re.findall(r"\\end\{(\w+)\}", answer)
    if sorted(begins) != sorted(ends):
        return r"has \begin and \end that do not match"
    if re.search(r"(?:\\[dtc]?frac|\\sqrt|[=+*/^_])[\s$]*$|\\[dtc]?frac\s*\{[^{}]*\}\s*(?:\{\s*\}|$)", answer):
        return "breaks off in the middle of an expression"
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Each opening brace's position to that of the brace that closes it, in one pass; escaped ones don't count."""
    closes: dict[int, int] = {}
    opened: list[int] = []
    position = 0
    while position < len(text):
        if text[position] == "\\":
            position += 1
        elif text[position] == "{":
            opened.append(position)
        elif text[position] == "}" and opened:
            closes[opened.pop()] = position
        position += 1
    return closes


def _unwrapped_value(text: str) -> str:
    r"""`\textbf{42}` and `\mathbf{\frac{1}{2}}` without the command around the whole; words keep theirs."""
    wrapper = _WHOLE_WRAPPER.match(text)
    if wrapper is None or _closing_braces(text).get(wrapper.end() - 1) != len(text) - 1:
        return text
    inside = text[wrapper.end() : -1].strip()
    return inside if re.search(r"\d", inside) else text


def _groups_digits(text: str, position: int) -> bool:
    before = re.search(r"(?<![\d,])\d{1,3}(?:,\d{3})*$", text[:position])
    return before is not None and re.match(r",\d{3}(?!\d)", text[position:]) is not None


def _outside_delimiters(text: str) -> str:
    masked = text.replace(r"\$", "\x00")
    if masked.count("$") % 2 or re.search(r"(?<!\$)\$\s+\$(?!\$)", masked):
        return text.replace("$", " ") if "\x00" not in masked else masked.replace("$", " ").replace("\x00", r"\$")
    segments = [
        next(group for group in match.groups() if group is not None) for match in _MATH_SEGMENT.finditer(masked)
    ]
    if segments:
        between = [part for part in re.split(r"\x01", _MATH_SEGMENT.sub("\x01", masked)) if part.strip(" .\n")]
        joined = len(segments) > 1 and all(_JOINERS.fullmatch(part.strip(" .\n")) for part in between)
        text = ", ".join(segments) if joined else segments[-1] if between else "".join(segments)
        text += " percent" if between and is_percentage(between[-1]) else ""
    return text.replace("\x00", r"\$")


def _strip_units(text: str) -> str:
    for pattern in (_UNIT_TEXT, _UNIT_ROMAN):
        if pattern.search(text) and not _CONJUNCTION.search(pattern.search(text)[0]):
            text = pattern.sub("", text)
    if not is_percentage(text):
        text = _UNIT_SYMBOL.sub("", text)
        text = _UNIT_WORD.sub("", text)
    return text.strip()


def _canonical_integer(text: str) -> str:
    digits = text.lstrip("+-").lstrip("0") or "0"
    return f"-{digits}" if text.startswith("-") and digits != "0" else digits


def _compare_words(left: str, right: str) -> bool | None:
    left_words, right_words = unwrap_text(left), unwrap_text(right)
    choice = re.fullmatch(r"\(?([A-Za-z])\)?", right_words)
    if choice:
        picked = re.fullmatch(r"\(?([A-Za-z])\)?\.?|\(([A-Z])\)\s*.+", left_words)
        if picked:
            found = picked[1] or picked[2]
            wrapped = (left_words, right_words) != (left, right) or "(" in left_words + right_words
            return found == choice[1] or (wrapped and found.lower() == choice[1].lower())
        return None
    if not (_WORDS.fullmatch(left_words) and _WORDS.fullmatch(right_words)):
        return None
    if re.sub(r"[^a-z]", "", left_words.lower()) == re.sub(r"[^a-z]", "", right_words.lower()):
        return True
    written_as_text = left_words != left or right_words != right or len(right_words) > 3
    return False if written_as_text else None
