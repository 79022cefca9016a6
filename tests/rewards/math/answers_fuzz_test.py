"""Whatever a model writes is read in linear time and raises nothing: the trainer's process has no time limit."""

import json
import random
import re
import string
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dcmdp_jax.rewards.math import answers, notation, numbers, unicode, units
from dcmdp_jax.rewards.math.answers import MAX_ANSWER_CHARACTERS, answer_defect, compare_literals, extract_answer

_JUDGED = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "verifier"
_FRAGMENTS = (
    r"\mathrm{cm}", r"\mathrm{cm}^2 ", r"\text{ cm}", r"\text{and}", r"\text{", "cm ", "km/h ", "5 cm ", " per ",
    "^2", "^{-2}", "/", r"\cdot ", r"\degree ", r"^\circ", r"^{\circ}", "%", r"\%", r"\$", "$", "$$", "$ $", "$1$",
    r"\[", r"\]", r"\(", r"\)", r"\boxed{", r"\boxed {1}", r"\boxed", "{", "}", "{}", "(", ")", "[", r"\{", r"\}",
    "\\", r"\\", r"\,", r"\!", r"\ ", "~", " ", "\t ", "\n", "\n ", ",", ", ", ",1", "1,", "1,000", ",000", "1 000 ",
    "12 ", "1", "0", "9", ".", "1.", ".5", "-", "+", "--", "e9", "1e9", "10^", "10^{9}", "_8", "_{8}", "A_8", "'",
    r"^\prime", r"^{\prime}", r"\prime ", "=", "x=", "x=5,", "a:b", "|", "<|x|>", "<|", "|>", "and ", " and", "or",
    ", or ", "answer", "Answer:", "answer: ", "answer :*", "*", "**", "million ", "thousand", "percent ", " percent",
    "x", "x ", "xy", "A", "(A)", "(A), ", r"\frac", r"\frac{1}", r"\frac{1}{2}", r"\dfrac12", r"\sqrt", r"\left(",
    r"\right)", r"\left.", r"\big", r"\quad", r"\displaystyle", r"\overline{3}", r"\pm", r"\approx ", "×", "−", "≤",
    "€", "５", "é", "\x00", "\\n", "word ", "a-b ", r"\tolerance{1}", r"\tolerance{", r"\begin{pmatrix}",
    r"\end{pmatrix}", "&", "!", "_", "^", "°", "°C ", "p.m. ", ";", ":", "np.", "#",
    r"\mathrm{e}", r"2\text{k} ", r"\mathbf{e}", r"\ldots ", "...", ",...", "0.33...", "0.(3)", r"\dot{3}", "#### ",
    "the answer is ",
    "answer to ", "“", "`", '"', "：", r"\begin{aligned}", r"\end{aligned}", r"\\=", "]1,2[", "],", "(mod 7)",
    "Option B", "A, C, ",
    "1 hour 30 minutes ", "12 h ", "Total: ", "exactly ", "pi", "sqrt(", "xyz", r"\text{xyz} ",
    "½", "x²", "²", "x₀", "√", "√(", "√{", "√(x", "³√", "∞", "·", "θ", "µ", "v^2_0", "x^{2}_{", "kJ ",
    r"\textcolor{red}{", r"\textcolor[", r"\color{red}", r"\fbox{", r"\fbox", "^{", "_{",
)  # fmt: skip
_LINEAR: tuple[Callable[[str], object], ...] = (
    extract_answer,
    lambda text: extract_answer(text, "flexible"),
    lambda text: extract_answer(f"the answer is {text}", "flexible"),
    notation.upright,
    lambda text: extract_answer(rf"\boxed{{{text}}}"),
    lambda text: extract_answer(f"Answer: {text}"),
    notation.normalize_answer,
    unicode.to_latex,
    lambda text: notation.normalize_answer(f"5{text}=3"),
    notation.without_spaces,
    notation.unwrap_text,
    lambda text: notation.split_elements(text, ","),
    lambda text: units.measures(f"5{text}", f"5{text}=3"),
    numbers.parse_number,
    lambda text: answers.split_tolerance(f"{text}x"),
    lambda text: answers._compare_words(text, "B"),
    lambda text: answers._compare_words(text, f"B{text}"),
    lambda text: answers._compare_based(text, "25_8"),
)
_BASES = (
    r"The area is $\frac{1}{2} \cdot 3 \cdot 4 = 6$, so the answer is $\boxed{6 \text{ cm}^2}$.",
    "Adding up, 3+4=7.\n\n**Answer:** $x = \\frac{7}{2}$ or $x=-3$<|im_end|>",
    r"\boxed{\left(-\infty, \tfrac{3}{4}\right] \cup \left[2.5 \times 10^{-3}, 7\right)}",
    r"Thus \[ \boxed{\begin{pmatrix} 1 & -2 \\ 3\,000 & \dfrac{5}{6} \end{pmatrix}} \]",
    r"so $2516_8$ in base nine is \boxed{\text{(B)}~1{,}234_{9}\ \text{million dollars}}",
    r"Answer: $p=5$, $q=2\%$ and $\sin 30^\circ$ is 0.5 km/h",
)
_CHARACTERS = string.ascii_letters + string.digits + "\\{}[]()$^_=+-*/,.;:!|<>&%'\" \n~"


def _cpu_seconds(function, text):
    start = time.process_time()
    function(text)
    return time.process_time() - start


def _grows_linearly(function, short, long):
    """Whether eight times the text takes about eight times as long: quadratic work would take 64 times."""
    return any(
        (seconds := _cpu_seconds(function, long)) < 0.05 or seconds < 24 * _cpu_seconds(function, short)
        for _ in range(5)
    )


@pytest.mark.parametrize("fragment", _FRAGMENTS, ids=[repr(fragment) for fragment in _FRAGMENTS])
def test_time_grows_linearly_with_a_repeated_fragment(fragment):
    short, long = (fragment * (size // len(fragment)) for size in (2_000, 16_000))
    for function in _LINEAR:
        assert _grows_linearly(function, short, long), function


@pytest.mark.parametrize("module", [answers, notation, numbers, unicode, units], ids=lambda module: module.__name__)
def test_every_pattern_of_the_trainers_process_is_linear(module):
    """Each by itself, where a repeat is followed by what does not fit; searched for where the module searches."""
    patterns = [value for value in vars(module).values() if isinstance(value, re.Pattern)]
    patterns += [pattern for pattern, _ in notation._REPLACEMENTS] if module is notation else []
    assert patterns
    for pattern in patterns:
        try_pattern = pattern.findall if module in (notation, unicode, units) else pattern.fullmatch
        for fragment in _FRAGMENTS:
            one_space = re.sub(r"\s+", " ", fragment)
            short, long = ("5" + one_space * (size // len(one_space)) + "\x01" for size in (1_000, 8_000))
            assert _grows_linearly(try_pattern, short, long), (pattern.pattern, fragment)


def test_a_looping_unit_is_read_at_once():
    loop = r"\mathrm{cm}" * 40
    start = time.process_time()
    assert compare_literals(rf"5{loop}=3", "5") is not True
    assert time.process_time() - start < 10.0  # exponential time would not end


def test_gigantic_numbers_are_left_unread():
    for text in ("9" * 2000, "1e999999999", "10^{999999999}", "1e" + "9" * 1990, "1/" + "9" * 1990, "0." + "9" * 1990):
        assert numbers.parse_number(text) is None
        assert compare_literals(text, "5") is not True


def _fuzzed(count, seed, bases):
    """Completions: repeats up to 100 kB, random LaTeX, and real answers with pieces cut, doubled and exchanged."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.randrange(4)
        if kind == 0:
            size = int(10 ** draw.uniform(1, 5)) if draw.random() < 0.2 else int(10 ** draw.uniform(1, 3.4))
            pieces = [draw.choice(_FRAGMENTS) for _ in range(draw.randint(1, 3))]
            body = "".join(pieces) * max(1, size // sum(map(len, pieces)))
            yield draw.choice((r"\boxed{%s}", r"\boxed{5%s=3}", "Answer: %s", "Answer: 5%s x", "%s")).replace(
                "%s", body
            )
        elif kind == 1:
            yield rf"\boxed{{{''.join(draw.choice(_FRAGMENTS) for _ in range(draw.randint(1, 60)))}}}"
        elif kind == 2:
            yield "".join(draw.choice(_CHARACTERS) for _ in range(draw.randint(0, 300)))
        else:
            text = draw.choice(bases)
            for _ in range(draw.randint(1, 6)):
                cut, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
                piece = draw.choice(("", text[cut:end] * 2, draw.choice(_FRAGMENTS), draw.choice(_CHARACTERS)))
                text = text[:cut] + piece + text[end if draw.random() < 0.3 else cut :]
            yield text[:100_000]


def _grade(completion, gold):
    answer = extract_answer(completion)
    if answer is not None:
        assert len(answer) <= MAX_ANSWER_CHARACTERS
        compare_literals(answer, gold)


_GOLDS = (
    "5",
    r"\frac{1}{2}",
    "2516_8",
    r"5 \text{ km}",
    "A",
    r"\text{east}",
    "(1,2)",
    "x=3, y=4",
    r"4.2\tolerance{1e-1}",
)


def test_no_completion_raises():
    for index, completion in enumerate(_fuzzed(3_000, 1, list(_BASES))):
        _grade(completion, _GOLDS[index % len(_GOLDS)])
        answer_defect(completion)


@pytest.mark.long
def test_a_hundred_thousand_fuzzed_answers_take_under_50_ms_each():
    bases = list(_BASES)
    for name in ("model_outputs", "cases"):
        path = _JUDGED / f"{name}.jsonl"
        if path.is_file():
            bases += [json.loads(line)["pred"] for line in path.read_text().splitlines()]
    seconds = []
    for index, completion in enumerate(_fuzzed(100_000, 2, bases)):
        gold = _GOLDS[index % len(_GOLDS)]
        spent = _cpu_seconds(lambda text, gold=gold: _grade(text, gold), completion)
        for _ in range(3):  # another try where the machine was busy with something else
            if spent > 0.05:
                spent = min(spent, _cpu_seconds(lambda text, gold=gold: _grade(text, gold), completion))
        seconds.append(spent)
    seconds.sort()
    print(f"{len(seconds)} answers: p99.9 {seconds[-100] * 1e3:.1f} ms, maximum {seconds[-1] * 1e3:.1f} ms of CPU")
    assert seconds[-1] < 0.05
