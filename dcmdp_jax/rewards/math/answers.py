r"""Answers as text: extract one from a completion, and compare two as far as that needs no algebra.

Only strings and exact rationals: nothing here imports an algebra system, and all of it takes time
linear in the text's length, so the trainer's process can run it. `equivalence` decides, in a
worker, where `compare_literals` returns None.

The verifier's answer notation is LaTeX without dollar signs. One command is ours: an answer that
ends in `\tolerance{d}` is matched by every number at most d away from it.

The rewards `last_number` and `math_verify` are simpler ways than `math` to compare with the
reference answer.
"""

import collections
import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from dcmdp_jax.rewards.math.notation import (
    has_box,
    last_boxed,
    nesting,
    normalize_answer,
    unwrap_text,
    upright,
    without_spaces,
    without_special_tokens,
)
from dcmdp_jax.rewards.math.numbers import parse_number, same_number
from dcmdp_jax.rewards.math.units import factors, measures, vocabulary
from dcmdp_jax.rewards.protocol import completion_text

MAX_ANSWER_CHARACTERS = 2000
"""A longer answer is not graded."""

_ANSWER_LINE = re.compile(r"\banswer\b[\s*]{0,8}+[:：][\s*]{0,8}+([^\n]*+)", re.IGNORECASE)
# What `flexible` reads besides: `#### 72` to the line's end, `The answer is: $72$.` to the
# sentence's.
_STATED = re.compile(
    r"####[ \t]*+([^\n]*+)|\banswer\b(?: to [^\n.:]{1,80}?)? is\b[\s:*]{0,8}+((?:[^\n.]|\.(?=[0-9]))*+)",
    re.IGNORECASE,
)
_TOLERANCE = re.compile(r"\\tolerance\{([^{}]*+)\}\s*+$")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_BASED = re.compile(r"([+-]?(?=[A-Z]*+[0-9])[0-9A-Z]++)_(?:([0-9])|\{([0-9]{1,2}|[a-z]++)\})")
_PREFIXED = re.compile(r"([+-]?)0([xXbBoO])([0-9a-fA-F]++)")
_INDICES = {"b": "_2", "o": "_8", "x": "_{16}"}
_BASE_WORDS = {
    word: str(base)
    for base, word in enumerate("two three four five six seven eight nine ten".split(), 2)
}
_CHOICE = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_CHOICE_AND_VALUE = re.compile(
    r"(?:\(([A-Z])\)|([A-Z])[.):])[ :.]*+(?![/)])(?:[0-9./^+\-(){} ]|\\(?:frac|sqrt|pi|cdot|times)(?![a-zA-Z]))*+"
)
# `E: the square`; a word that may deny it or name another (`A: false`, `A. or B`) makes it no
# choice.
_CHOICE_AND_WORDS = re.compile(
    r"(?:\(([A-Z])\)|([A-Z])[.):]) ?(?=[a-z0-9])((?:[a-z0-9,'\-]++ ?)++)", re.DOTALL
)
_DENIALS = vocabulary(
    "b c d e f g h and or is are was not no nor neither either false wrong incorrect except but "
    "unless if never none"
)
_CHOICES = re.compile(r"\(?[A-H]\)?(?: ?[,;] ?\(?[A-H]\)?)++")
_OPTION = re.compile(r"\A(?:option|choice|answer) ?:? ?(?=\(?[A-Z]\)?(?![a-zA-Z]))", re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z](?:[A-Za-z' \-])*+")
_PLAIN_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}+")
_PREDICATE = re.compile(
    r"\b(?:is|are|was|were|has|have|there|because|since|where|which)\b", re.IGNORECASE
)
_CAPITALS = re.compile(r"[A-Z]{2,}+")
_PLAIN_NUMBER = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
_SERIES = re.compile(r"[0-9]++(?:-{1,2}[0-9]++)++|[0-9]++(?:/[0-9]++){2,}+|[0-9]++/0[0-9]++")
_DATE = re.compile(r"(?<![0-9])0[0-9]")
_CLOCK = re.compile(r"([0-9]{1,2}) ?: ?([0-9]{2})(?: ?([ap])\.? ?m\.?)?", re.IGNORECASE)
_LONGEST_READ = 100_000


def extract_answer(completion: str, extraction: str = "strict") -> str | None:
    r"""The answer a completion commits to: its last `\boxed{...}`, else its last "Answer:" line.

    The line may be written in any case and in bold, as in `**Answer:** 42`, and may put the answer
    on the line after. Bare statements ("the answer is 42", a last number, an \fbox) are not
    answers. Where `extraction` is "flexible", the last "#### 42" or "the answer is 42" counts if
    there is neither box nor line.

    Args:
        completion: decoded text of one completion, of any length.
        extraction: the setting `rewards.answer_extraction`.

    Returns:
        The answer as written, stripped; None when there is none, when it is empty, has an unclosed
        box (a truncated completion) or is longer than `MAX_ANSWER_CHARACTERS`.
    """
    answer = last_boxed(completion)
    if answer is None:
        line = _last(_ANSWER_LINE, completion) or (
            _last(_STATED, completion) if extraction == "flexible" else None
        )
        if (
            has_box(completion)
            or line is None
            or "\\boxed" in (answer := line[1] or line[line.re.groups] or "")
        ):
            return None
        answer = without_special_tokens(answer).strip().strip("*").strip()
    return answer if answer and len(answer) <= MAX_ANSWER_CHARACTERS else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = collections.deque(pattern.finditer(text), maxlen=1)
    return found[0] if found else None


def split_tolerance(answer: str) -> tuple[str, Fraction | None]:
    r"""Split `4.2\tolerance{1e-1}` into the answer and its tolerance; None when it states none.

    It is absolute, in the answer's unit: `500 mm\\tolerance{1}` is 499 to 501 mm.

    Raises:
        ValueError: if the tolerance is not a positive number.
    """
    match = _TOLERANCE.search(answer)
    if match is None:
        return answer, None
    tolerance = parse_number(match.group(1))
    if tolerance is None or tolerance <= 0:
        raise ValueError(
            f"tolerance of answer {answer!r}: {match.group(1)!r} is not a positive number"
        )
    return answer[: match.start()], tolerance


def compare_literals(prediction: str, gold: str) -> bool | None:
    r"""Compare two answers without algebra; None when only algebra can tell.

    Decides equal strings, two literal numbers (integers as integers, whatever their size) with
    their units (a unit that one answer alone has is dropped; two units must measure the same),
    percentages (25\% is matched by 25 and by 0.25), words (`\text{east}`, `East`), choices (`(B)`,
    `B`), numerals in a stated base, which a prediction may leave out but not change, and a numeric
    gold with a tolerance.

    Args:
        prediction: an answer as `extract_answer` returns it.
        gold: the reference answer, see the module's note.

    Returns:
        True or False when decided, else None.

    Raises:
        ValueError: if the reference answer states an ill-written tolerance.
    """
    gold, tolerance = split_tolerance(gold)
    if len(prediction) > MAX_ANSWER_CHARACTERS:
        return False
    if _INTEGER.fullmatch(prediction) and _INTEGER.fullmatch(gold):
        equal = _canonical_integer(prediction) == _canonical_integer(gold)
        if equal or tolerance is None:
            return equal
    left, right = normalize_answer(prediction), normalize_answer(gold)
    if not left or not right:
        return False
    if without_spaces(left) == without_spaces(right):
        return True
    if not right.isascii() and unwrap_text(left) == unwrap_text(right):  # `\text{甲}`
        return True
    if (decided := _compare_clocks(left, right)) is not None:
        return decided
    left_measure, right_measure = measures(left, right)
    left_text = left_measure.text
    right_text = right_measure.text
    scales = factors(left_measure, right_measure)
    if (decided := _compare_series(left_text, right_text)) is not None:
        return decided and any(a == b for a, b in scales)
    left_value = parse_number(left_text)
    right_value = parse_number(right_text)
    if left_value is not None and right_value is not None:
        if tolerance is not None:
            return any(abs(left_value * a - right_value * b) <= tolerance * b for a, b in scales)
        return any(same_number(left_value * a, right_value * b) for a, b in scales)
    if _INTEGER.fullmatch(left_text) and _INTEGER.fullmatch(right_text):
        equal = _canonical_integer(left_text) == _canonical_integer(right_text)
        return equal and any(a == b for a, b in scales)
    based = _compare_based(left, right)
    return _compare_words(left, right) if based is None else based


def answer_defect(answer: str) -> str | None:
    r"""Describe in a few words why nothing could match a reference answer; None when nothing is
    wrong.

    Structural: empty, nothing but punctuation, braces or environments that do not balance, an
    ill-written tolerance, over `MAX_ANSWER_CHARACTERS`. Fast enough for a whole dataset at
    start-up.
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
    depths = nesting(re.sub(r"\\[{}]", "", answer), "{", "}")
    if min(depths) < 0 or depths[-1] != 0:
        return "has braces that do not balance"
    begins = re.findall(r"\\begin\{(\w+)\}", answer)
    ends = re.findall(r"\\end\{(\w+)\}", answer)
    if sorted(begins) != sorted(ends):
        return r"has \begin and \end that do not match"
    ending = answer.rstrip(" \t\n$")
    if re.search(
        r"(?:\\[dtc]?frac|\\sqrt|[=+*/^_])$|\\[dtc]?frac\s*+\{[^{}]*+\}\s*+(?:\{\s*+\}|$)", ending
    ):
        return "breaks off in the middle of an expression"
    found = extract_answer(rf"\boxed{{{answer}}}")
    if found is None or compare_literals(found, answer) is False:
        return "is not matched by itself in a box"
    return None


def is_sentence(answer: str) -> bool:
    """Whether a reference answer says its value in a sentence, so that no answer but the same words
    matches it.
    """
    plain = unwrap_text(answer)
    return len(_PLAIN_WORD.findall(plain)) > 2 and _PREDICATE.search(plain) is not None


def _canonical_integer(text: str) -> str:
    digits = text.lstrip("+-").lstrip("0") or "0"
    return f"-{digits}" if text.startswith("-") and digits != "0" else digits


def _compare_clocks(left: str, right: str) -> bool | None:
    """Times of day, `3:45 PM` and `15:45`; None unless one alone names the half and the other has
    no twelve hours.
    """
    found = [_CLOCK.fullmatch(unwrap_text(text)) for text in (left, right)]
    named = [m for m in found if m and m[3]]
    bare = [m for m in found if m and not m[3] and not 1 <= int(m[1]) <= 12]
    if not (named and bare):
        return None
    hour = int(named[0][1]) % 12 + 12 * (named[0][3].lower() == "p")
    return (hour, named[0][2]) == (int(bare[0][1]), bare[0][2])


def _compare_series(left: str, right: str) -> bool | None:
    """Dates, ranges and scores (`2019-05-01`, `5-7`, `3-0`) number by number: none is arithmetic in
    a reference.
    """
    given, wanted = (without_spaces(unwrap_text(text)).replace("--", "-") for text in (left, right))
    if not _SERIES.fullmatch(wanted):
        return False if _SERIES.fullmatch(given) and _DATE.search(given) else None
    parts = [[part.lstrip("0") for part in re.split("([-/])", text)] for text in (given, wanted)]
    return parts[0] == parts[1]


def _compare_based(left: str, right: str) -> bool | None:
    """Numerals with a base: the same digits in the same base; a prediction may leave out the
    reference's base.

    A prefix states the base as an index does (`0xff` is `FF_{16}`), and is never left out.
    """
    if _PREFIXED.fullmatch(left) or _PREFIXED.fullmatch(right):
        return _with_base_as_index(left) == _with_base_as_index(right)
    left_based = _BASED.fullmatch(left)
    right_based = _BASED.fullmatch(right)
    bases = [
        match and (match[2] or _BASE_WORDS.get(match[3], match[3]))
        for match in (left_based, right_based)
    ]
    if right_based:
        if left_based:
            return left_based[1] == right_based[1] and bases[0] == bases[1]
        return left == right_based[1] if re.fullmatch(r"[+-]?[0-9A-Z]++", left) else None
    if left_based and parse_number(right) is not None:
        return bases[0] == "10" and _canonical_integer(left_based[1]) == right
    return None


def _with_base_as_index(text: str) -> str:
    return _PREFIXED.sub(
        lambda match: match[1] + match[3].upper() + _INDICES[match[2].lower()],
        text,
    )


def _compare_words(left: str, right: str) -> bool | None:
    left_words = unwrap_text(left).strip()
    right_words = unwrap_text(right).strip()
    wrapped = (left_words, right_words) != (left, right)
    left_words = _OPTION.sub("", left_words, count=1)
    right_words = _OPTION.sub("", right_words, count=1)
    if choice := _CHOICE.fullmatch(right_words):
        if picked := _CHOICE.fullmatch(left_words):
            in_any_case = wrapped or "(" in left_words + right_words
            return picked[1] == choice[1] or (
                in_any_case and picked[1].lower() == choice[1].lower()
            )
        described = _CHOICE_AND_WORDS.fullmatch(left_words)
        denied = described and _DENIALS & set(re.findall("[a-z0-9']+", described[3]))
        picked = _CHOICE_AND_VALUE.fullmatch(left_words) or (None if denied else described)
        return None if picked is None else (picked[1] or picked[2]) == choice[1]
    for listed, joined, least in (
        (left_words, right_words, 2),
        (right_words, left_words, 3),
    ):  # `A, C, D` and `ACD`
        if _CHOICES.fullmatch(listed) and _CAPITALS.fullmatch(joined) and len(joined) >= least:
            return re.findall("[A-H]", listed) == list(joined) == sorted(set(joined))
    if _CAPITALS.fullmatch(left_words) and _CAPITALS.fullmatch(right_words):
        return left_words == right_words
    if not (_WORDS.fullmatch(left_words) and _WORDS.fullmatch(right_words)):
        return None
    if "'" in left_words + right_words:
        return left_words.lower() == right_words.lower() if wrapped else None
    left_split = left_words.replace("-", " ").split()
    right_split = right_words.replace("-", " ").split()
    shortest, longest = (f(map(len, left_split + right_split)) for f in (min, max))
    if [word.lower() for word in left_split] == [word.lower() for word in right_split]:
        if left_words.count("-") != right_words.count("-"):  # `x-y` is not `x y`
            return True if shortest > 2 else None
        same_case = [word[1:] for word in left_split] == [word[1:] for word in right_split]
        return True if wrapped or (longest > 2 and same_case) else None
    return False if wrapped or longest > 2 else None


def last_number(
    completions: Sequence[Any], reference_answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 where the last number of a completion is the reference answer, digit by digit; else 0.

    Args:
        completions: texts, or lists of messages, whose last one is read.
        reference_answer: the reference answers.
        columns: unused.
    """
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    found = [_PLAIN_NUMBER.findall(text[-_LONGEST_READ:]) for text in texts]
    return [
        float(numbers[-1:] == [right])
        for numbers, right in zip(found, reference_answer, strict=True)
    ]


def math_verify(
    completions: Sequence[Any], reference_answer: Sequence[str | None], **columns: Any
) -> list[float | None]:
    r"""1 where math-verify finds the reference answer in the completion, else 0; None where it
    can't read the answer, or there is none.

    The library reads the texts without our parsing of answers, but factors set upright lose their
    commands first, as it takes `\mathrm{e}` in `3\mathrm{e}` for a unit and drops it. Its own time
    limits apply: 5 seconds to parse a text and 5 to compare; an answer over them gets 0.

    Args:
        completions: texts, or lists of messages.
        reference_answer: the reference answers.
        columns: not used.
    """
    import math_verify as library

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns about each time limit that it is given
    golds = [
        None if text is None else library.parse(upright(rf"\boxed{{{text}}}"))
        for text in reference_answer
    ]
    return [
        float(library.verify(gold, library.parse(upright(completion_text(completion)))))
        if gold
        else None
        for gold, completion in zip(golds, completions, strict=True)
    ]
