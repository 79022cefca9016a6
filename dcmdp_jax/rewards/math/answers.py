r"""Answers as text: extract one from a completion, and compare two as far as that needs no algebra.

Only strings and exact rationals: nothing here imports an algebra system, and all of it takes time
linear in the text's length, so the trainer's process can run it. `equivalence` decides, in a
worker, where `compare_literals` returns None.

The verifier's answer notation is LaTeX without dollar signs. One command is ours: an answer that
ends in `\tolerance{d}` is matched by every number at most d away from it.

The rewards `last_number` and `math_verify` are simpler ways than `math` to compare with the
reference answer.
"""

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
    r"####[ \t]*+([^\n]*+)"
    r"|\banswer\b(?: to [^\n.:]{1,80}?)? is\b[\s:*]{0,8}+((?:[^\n.]|\.(?=[0-9]))*+)",
    re.IGNORECASE,
)
_TOLERANCE = re.compile(r"\\tolerance\{([^{}]*+)\}\s*+$")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_BASED = re.compile(r"([+-]?(?=[A-Z]*+[0-9])[0-9A-Z]++)_(?:([0-9])|\{([0-9]{1,2}|[a-z]++)\})")
_PREFIXED = re.compile(r"([+-]?)0([xXbBoO])([0-9a-fA-F]++)")
_INDICES = {"b": "_2", "o": "_8", "x": "_{16}"}
_WORDS_FOR_BASES = "two three four five six seven eight nine ten".split()
_BASE_WORDS = {word: str(base) for base, word in enumerate(_WORDS_FOR_BASES, 2)}
_CHOICE = re.compile(r"\(?([A-Za-z])\)?[.:]?")
_CHOICE_AND_VALUE = re.compile(
    r"(?:\(([A-Z])\)|([A-Z])[.):])[ :.]*+(?![/)])"
    r"(?:[0-9./^+\-(){} ]|\\(?:frac|sqrt|pi|cdot|times)(?![a-zA-Z]))*+"
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
_BREAKS_OFF = re.compile(
    r"(?:\\[dtc]?frac|\\sqrt|[=+*/^_])$|\\[dtc]?frac\s*+\{[^{}]*+\}\s*+(?:\{\s*+\}|$)"
)
# Characters at the end of a completion in which `last_number` looks.
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
    if not has_box(completion):
        line = _last(_ANSWER_LINE, completion)
        if line is None and extraction == "flexible":
            line = _last(_STATED, completion)
        answer = ""
        if line is not None:
            answer = line[1] or line[line.re.groups] or ""
        if "\\boxed" in answer:
            return None
        answer = without_special_tokens(answer).strip().strip("*").strip()
    if not answer or len(answer) > MAX_ANSWER_CHARACTERS:
        return None
    return answer


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    matches = list(pattern.finditer(text))
    return matches[-1] if matches else None


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
    predicted = normalize_answer(prediction)
    expected = normalize_answer(gold)
    if not predicted or not expected:
        return False
    if without_spaces(predicted) == without_spaces(expected):
        return True
    if not expected.isascii() and unwrap_text(predicted) == unwrap_text(expected):  # `\text{甲}`
        return True
    verdict = _compare_clocks(predicted, expected)
    if verdict is not None:
        return verdict

    predicted_measure, expected_measure = measures(predicted, expected)
    predicted_text = predicted_measure.text
    expected_text = expected_measure.text
    unit_factors = factors(predicted_measure, expected_measure)  # none: the units disagree
    same_unit = any(a == b for a, b in unit_factors)
    verdict = _compare_series(predicted_text, expected_text)
    if verdict is not None:
        return verdict and same_unit
    predicted_value = parse_number(predicted_text)
    expected_value = parse_number(expected_text)
    if predicted_value is not None and expected_value is not None:
        if tolerance is not None:
            # The tolerance is in the reference's unit.
            return any(
                abs(predicted_value * a - expected_value * b) <= tolerance * b
                for a, b in unit_factors
            )
        return any(same_number(predicted_value * a, expected_value * b) for a, b in unit_factors)
    if _INTEGER.fullmatch(predicted_text) and _INTEGER.fullmatch(expected_text):
        return same_unit and _canonical_integer(predicted_text) == _canonical_integer(expected_text)

    verdict = _compare_based(predicted, expected)
    if verdict is not None:
        return verdict
    return _compare_words(predicted, expected)


def answer_defect(answer: str) -> str | None:
    r"""Say in a few words why nothing could match a reference answer; None when it is sound.

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
    if not any(map(str.isalnum, answer)):
        return "has no letter, digit or symbol to compare"

    depths = nesting(re.sub(r"\\[{}]", "", answer), "{", "}")
    if min(depths) < 0 or depths[-1] != 0:
        return "has braces that do not balance"
    begins = re.findall(r"\\begin\{(\w+)\}", answer)
    ends = re.findall(r"\\end\{(\w+)\}", answer)
    if sorted(begins) != sorted(ends):
        return r"has \begin and \end that do not match"
    if _BREAKS_OFF.search(answer.rstrip(" \t\n$")):
        return "breaks off in the middle of an expression"
    extracted = extract_answer(rf"\boxed{{{answer}}}")
    if extracted is None or compare_literals(extracted, answer) is False:
        return "is not matched by itself in a box"
    return None


def is_sentence(answer: str) -> bool:
    """Whether a reference answer is a sentence, which only the same words match."""
    plain = unwrap_text(answer)
    return len(_PLAIN_WORD.findall(plain)) > 2 and _PREDICATE.search(plain) is not None


def _canonical_integer(text: str) -> str:
    digits = text.lstrip("+-").lstrip("0") or "0"
    if text.startswith("-") and digits != "0":
        return f"-{digits}"
    return digits


def _compare_clocks(predicted: str, expected: str) -> bool | None:
    """Compare times of day, `3:45 PM` and `15:45`; None unless one has 12 hours, one 24."""
    clock = _CLOCK.fullmatch(unwrap_text(predicted))
    other = _CLOCK.fullmatch(unwrap_text(expected))
    if clock is None or other is None:
        return None
    if other[3]:
        clock, other = other, clock
    if not clock[3] or other[3] or 1 <= int(other[1]) <= 12:
        return None
    hour = int(clock[1]) % 12
    if clock[3].lower() == "p":
        hour += 12
    return (hour, clock[2]) == (int(other[1]), other[2])


def _compare_series(predicted: str, expected: str) -> bool | None:
    """Compare dates, ranges and scores (`2019-05-01`, `5-7`, `3-0`) number by number.

    They are no arithmetic in a reference. None where neither is one.
    """
    predicted = without_spaces(unwrap_text(predicted)).replace("--", "-")
    expected = without_spaces(unwrap_text(expected)).replace("--", "-")
    if not _SERIES.fullmatch(expected):
        if _SERIES.fullmatch(predicted) and _DATE.search(predicted):
            return False
        return None
    predicted_numbers = [number.lstrip("0") for number in re.split("([-/])", predicted)]
    expected_numbers = [number.lstrip("0") for number in re.split("([-/])", expected)]
    return predicted_numbers == expected_numbers


def _compare_based(predicted: str, expected: str) -> bool | None:
    """Compare numerals with a base: the same digits in the same base.

    A prediction may leave out the reference's base. A prefix states the base as an index does
    (`0xff` is `FF_{16}`), and is never left out.
    """
    if _PREFIXED.fullmatch(predicted) or _PREFIXED.fullmatch(expected):
        return _with_base_as_index(predicted) == _with_base_as_index(expected)
    predicted_numeral = _BASED.fullmatch(predicted)
    expected_numeral = _BASED.fullmatch(expected)
    if predicted_numeral and expected_numeral:
        same_base = _base(predicted_numeral) == _base(expected_numeral)
        return same_base and predicted_numeral[1] == expected_numeral[1]
    if expected_numeral:
        if not re.fullmatch(r"[+-]?[0-9A-Z]++", predicted):
            return None
        return predicted == expected_numeral[1]
    if predicted_numeral and parse_number(expected) is not None:
        is_decimal = _base(predicted_numeral) == "10"
        return is_decimal and _canonical_integer(predicted_numeral[1]) == expected
    return None


def _base(numeral: re.Match[str]) -> str:
    return numeral[2] or _BASE_WORDS.get(numeral[3], numeral[3])


def _with_base_as_index(text: str) -> str:
    return _PREFIXED.sub(
        lambda match: match[1] + match[3].upper() + _INDICES[match[2].lower()],
        text,
    )


def _compare_words(predicted: str, expected: str) -> bool | None:
    predicted_words = unwrap_text(predicted).strip()
    expected_words = unwrap_text(expected).strip()
    is_text = (predicted_words, expected_words) != (predicted, expected)
    predicted_words = _OPTION.sub("", predicted_words, count=1)
    expected_words = _OPTION.sub("", expected_words, count=1)
    choice = _CHOICE.fullmatch(expected_words)
    if choice:
        in_any_case = is_text or "(" in predicted_words + expected_words
        return _compare_choice(predicted_words, choice[1], in_any_case)
    verdict = _compare_joined_choices(predicted_words, expected_words)
    if verdict is not None:
        return verdict
    if _CAPITALS.fullmatch(predicted_words) and _CAPITALS.fullmatch(expected_words):
        return predicted_words == expected_words
    if not (_WORDS.fullmatch(predicted_words) and _WORDS.fullmatch(expected_words)):
        return None
    if "'" in predicted_words + expected_words:
        if not is_text:
            return None
        return predicted_words.lower() == expected_words.lower()

    predicted_split = predicted_words.replace("-", " ").split()
    expected_split = expected_words.replace("-", " ").split()
    lengths = list(map(len, predicted_split + expected_split))
    may_be_variables = not is_text and max(lengths) <= 2
    if " ".join(predicted_split).lower() != " ".join(expected_split).lower():
        if may_be_variables:
            return None
        return False
    if predicted_words.count("-") != expected_words.count("-"):  # `x-y` is not `x y`
        if min(lengths) <= 2:
            return None
        return True
    same_case = [word[1:] for word in predicted_split] == [word[1:] for word in expected_split]
    if is_text or (same_case and not may_be_variables):
        return True
    return None


def _compare_choice(words: str, choice: str, in_any_case: bool) -> bool | None:
    """Whether words pick a choice, alone or with its value or description; None if they don't."""
    letter = _CHOICE.fullmatch(words)
    if letter:
        same_in_any_case = in_any_case and letter[1].lower() == choice.lower()
        return letter[1] == choice or same_in_any_case
    pick = _CHOICE_AND_VALUE.fullmatch(words)
    if pick is None:
        pick = _CHOICE_AND_WORDS.fullmatch(words)
        if pick is None or _DENIALS & set(re.findall("[a-z0-9']+", pick[3])):
            return None
    return (pick[1] or pick[2]) == choice


def _compare_joined_choices(predicted: str, expected: str) -> bool | None:
    """Compare `A, C, D` and `ACD`; None for other answers."""
    if _CHOICES.fullmatch(predicted) and _CAPITALS.fullmatch(expected):
        listed = predicted
        joined = expected
    elif _CHOICES.fullmatch(expected) and _CAPITALS.fullmatch(predicted) and len(predicted) > 2:
        listed = expected
        joined = predicted
    else:
        return None
    return re.findall("[A-H]", listed) == list(joined) == sorted(set(joined))


def last_number(
    completions: Sequence[Any], reference_answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 where the last number of a completion is the reference answer, digit by digit; else 0.

    Args:
        completions: texts, or lists of messages, whose last one is read.
        reference_answer: the reference answers.
        columns: unused.
    """
    rewards = []
    for completion, answer in zip(completions, reference_answer, strict=True):
        text = completion
        if not isinstance(completion, str):
            text = completion[-1]["content"]
        numbers = _PLAIN_NUMBER.findall(text[-_LONGEST_READ:])
        rewards.append(float(numbers[-1:] == [answer]))
    return rewards


def math_verify(
    completions: Sequence[Any], reference_answer: Sequence[str | None], **columns: Any
) -> list[float | None]:
    r"""1 where math-verify finds the reference answer in the completion, else 0.

    None where it can't read the reference answer, or there is none.

    The library reads the texts without our parsing of answers, but factors set upright lose their
    commands first, as it takes `\mathrm{e}` in `3\mathrm{e}` for a unit and drops it. Its own time
    limits apply: 5 seconds to parse a text and 5 to compare; an answer over them gets 0.

    Args:
        completions: texts, or lists of messages.
        reference_answer: the reference answers.
        columns: not used.
    """
    import math_verify as library

    # It warns about each time limit that it is given.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    rewards = []
    for completion, answer in zip(completions, reference_answer, strict=True):
        gold = None
        if answer is not None:
            gold = library.parse(upright(rf"\boxed{{{answer}}}"))
        if gold:
            prediction = library.parse(upright(completion_text(completion)))
            rewards.append(float(library.verify(gold, prediction)))
        else:
            rewards.append(None)
    return rewards
