"""How long the trainer's process takes to read whatever a model writes: it has no time limit there.

    python -m benchmarks.answers                     # one fragment, short and eight times as long
    python -m benchmarks.answers --fuzzed 100000     # random answers: the slowest

Work that is linear in the text takes about 8 times as long, quadratic work 64 times.
"""

import argparse
import json
import random
import re
import string
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from dcmdp_jax.rewards.math import answers, notation, numbers, unicode, units
from dcmdp_jax.rewards.math.answers import compare_literals, extract_answer

FRAGMENTS = (
    r"\mathrm{cm}",
    r"\mathrm{cm}^2 ",
    r"\text{ cm}",
    r"\text{and}",
    r"\text{",
    "cm ",
    "km/h ",
    "5 cm ",
    " per ",
    "^2",
    "^{-2}",
    "/",
    r"\cdot ",
    r"\degree ",
    r"^\circ",
    r"^{\circ}",
    "%",
    r"\%",
    r"\$",
    "$",
    "$$",
    "$ $",
    "$1$",
    r"\[",
    r"\]",
    r"\(",
    r"\)",
    r"\boxed{",
    r"\boxed {1}",
    r"\boxed",
    "{",
    "}",
    "{}",
    "(",
    ")",
    "[",
    r"\{",
    r"\}",
    "\\",
    r"\\",
    r"\,",
    r"\!",
    r"\ ",
    "~",
    " ",
    "\t ",
    "\n",
    "\n ",
    ",",
    ", ",
    ",1",
    "1,",
    "1,000",
    ",000",
    "1 000 ",
    "12 ",
    "1",
    "0",
    "9",
    ".",
    "1.",
    ".5",
    "-",
    "+",
    "--",
    "e9",
    "1e9",
    "10^",
    "10^{9}",
    "_8",
    "_{8}",
    "A_8",
    "'",
    r"^\prime",
    r"^{\prime}",
    r"\prime ",
    "=",
    "x=",
    "x=5,",
    "a:b",
    "|",
    "<|x|>",
    "<|",
    "|>",
    "and ",
    " and",
    "or",
    ", or ",
    "answer",
    "Answer:",
    "answer: ",
    "answer :*",
    "*",
    "**",
    "million ",
    "thousand",
    "percent ",
    " percent",
    "x",
    "x ",
    "xy",
    "A",
    "(A)",
    "(A), ",
    r"\frac",
    r"\frac{1}",
    r"\frac{1}{2}",
    r"\dfrac12",
    r"{1\over ",
    r"\sqrt",
    r"\left(",
    r"\right)",
    r"\left.",
    r"\big",
    r"\quad",
    r"\displaystyle",
    r"\overline{3}",
    r"\pm",
    r"\approx ",
    "×",
    "−",
    "≤",
    "€",
    "５",
    "é",
    "\x00",
    "\\n",
    "word ",
    "a-b ",
    r"\tolerance{1}",
    r"\tolerance{",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    "&",
    "!",
    "_",
    "^",
    "°",
    "°C ",
    "p.m. ",
    ";",
    ":",
    "np.",
    "#",
    r"\mathrm{e}",
    r"2\text{k} ",
    r"\mathbf{e}",
    r"\ldots ",
    "...",
    ",...",
    "0.33...",
    "0.(3)",
    r"\dot{3}",
    "#### ",
    "the answer is ",
    "answer to ",
    "“",
    "`",
    '"',
    "：",
    r"\begin{aligned}",
    r"\end{aligned}",
    r"\\=",
    "]1,2[",
    "],",
    "(mod 7)",
    "Option B",
    "A, C, ",
    "1 hour 30 minutes ",
    "12 h ",
    "Total: ",
    "exactly ",
    "pi",
    "sqrt(",
    "xyz",
    r"\text{xyz} ",
    "½",
    "x²",
    "²",
    "x₀",
    "√",
    "√(",
    "√{",
    "√(x",
    "³√",
    "∞",
    "·",
    "θ",
    "µ",
    "v^2_0",
    "x^{2}_{",
    "kJ ",
    r"\textcolor{red}{",
    r"\textcolor[",
    r"\color{red}",
    r"\fbox{",
    r"\fbox",
    "^{",
    "_{",
)
LINEAR: tuple[Callable[[str], object], ...] = (
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
BASES = (
    r"The area is $\frac{1}{2} \cdot 3 \cdot 4 = 6$, so the answer is $\boxed{6 \text{ cm}^2}$.",
    "Adding up, 3+4=7.\n\n**Answer:** $x = \\frac{7}{2}$ or $x=-3$<|im_end|>",
    r"\boxed{\left(-\infty, \tfrac{3}{4}\right] \cup \left[2.5 \times 10^{-3}, 7\right)}",
    r"Thus \[ \boxed{\begin{pmatrix} 1 & -2 \\ 3\,000 & \dfrac{5}{6} \end{pmatrix}} \]",
    r"so $2516_8$ in base nine is \boxed{\text{(B)}~1{,}234_{9}\ \text{million dollars}}",
    r"Answer: $p=5$, $q=2\%$ and $\sin 30^\circ$ is 0.5 km/h",
)
GOLDS = (
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
CHARACTERS = string.ascii_letters + string.digits + "\\{}[]()$^_=+-*/,.;:!|<>&%'\" \n~"
MODULES: tuple[ModuleType, ...] = (answers, notation, numbers, unicode, units)
"""Whose patterns read what a model writes."""
_SECONDS_TOO_SHORT = 0.05
_QUADRATIC = 24.0


def patterns(module: ModuleType) -> list[re.Pattern[str]]:
    """The compiled patterns of a module."""
    found = [value for value in vars(module).values() if isinstance(value, re.Pattern)]
    if module is notation:
        found += [pattern for pattern, _ in notation._REPLACEMENTS]
    return found


def fuzzed(count: int, seed: int, bases: Sequence[str]) -> Iterator[str]:
    """Completions: repeats up to 100 kB, random LaTeX, and real answers with pieces cut, doubled
    and exchanged.
    """
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.randrange(4)
        if kind == 0:
            size = (
                int(10 ** draw.uniform(1, 5))
                if draw.random() < 0.2
                else int(10 ** draw.uniform(1, 3.4))
            )
            pieces = [draw.choice(FRAGMENTS) for _ in range(draw.randint(1, 3))]
            body = "".join(pieces) * max(1, size // sum(map(len, pieces)))
            yield draw.choice(
                (r"\boxed{%s}", r"\boxed{5%s=3}", "Answer: %s", "Answer: 5%s x", "%s")
            ).replace("%s", body)
        elif kind == 1:
            yield rf"\boxed{{{''.join(draw.choice(FRAGMENTS) for _ in range(draw.randint(1, 60)))}}}"
        elif kind == 2:
            yield "".join(draw.choice(CHARACTERS) for _ in range(draw.randint(0, 300)))
        else:
            text = draw.choice(bases)
            for _ in range(draw.randint(1, 6)):
                cut, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
                piece = draw.choice(
                    ("", text[cut:end] * 2, draw.choice(FRAGMENTS), draw.choice(CHARACTERS))
                )
                text = text[:cut] + piece + text[end if draw.random() < 0.3 else cut :]
            yield text[:100_000]


def grade(completion: str, gold: str) -> None:
    """Read a completion's answer and compare it."""
    answer = extract_answer(completion)
    if answer is not None:
        compare_literals(answer, gold)


def growth(function: Callable[[str], object], short: str, long: str) -> float:
    """Times that the long text takes over the short one, the least of five; 0 where it is too short
    to measure.
    """
    least = float("inf")
    for _ in range(5):
        seconds = _cpu_seconds(function, long)
        if seconds < _SECONDS_TOO_SHORT:
            return 0.0
        least = min(least, seconds / _cpu_seconds(function, short))
        if least < _QUADRATIC:
            break
    return least


def _cpu_seconds(function: Callable[[str], object], text: str) -> float:
    start = time.process_time()
    function(text)
    return time.process_time() - start


def _repeated() -> None:
    slowest: list[tuple[float, str]] = []
    for fragment in FRAGMENTS:
        short, long = (fragment * (size // len(fragment)) for size in (2_000, 16_000))
        for number, function in enumerate(LINEAR):
            slowest.append((growth(function, short, long), f"function {number} on {fragment!r}"))
        one_space = re.sub(r"\s+", " ", fragment)
        short, long = (
            "5" + one_space * (size // len(one_space)) + "\x01" for size in (1_000, 8_000)
        )
        for module in MODULES:
            for pattern in patterns(module):
                attempt = (
                    pattern.findall if module in (notation, unicode, units) else pattern.fullmatch
                )
                slowest.append(
                    (
                        growth(attempt, short, long),
                        f"{module.__name__} {pattern.pattern!r} on {fragment!r}",
                    )
                )
    quadratic = [line for times, line in slowest if times >= _QUADRATIC]
    print(
        f"{len(slowest)} texts eight times as long: at most {max(slowest)[0]:.1f} times the seconds"
    )
    print("\n".join(quadratic) or "none is quadratic")


def _fuzz(count: int, judged: Sequence[Path]) -> None:
    bases = list(BASES)
    for path in judged:
        bases += [json.loads(line)["pred"] for line in path.read_text().splitlines()]
    seconds = []
    for index, completion in enumerate(fuzzed(count, 2, bases)):
        gold = GOLDS[index % len(GOLDS)]
        seconds.append(_cpu_seconds(lambda text, gold=gold: grade(text, gold), completion))
    seconds.sort()
    print(
        f"{count} answers: p99.9 {seconds[-1 - count // 1000] * 1e3:.1f} ms, at most "
        f"{seconds[-1] * 1e3:.1f} ms of CPU"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fuzzed", type=int, default=0, help="number of random answers")
    parser.add_argument(
        "--judged",
        type=Path,
        nargs="*",
        default=(),
        help="JSON lines with answers in `pred`, to vary",
    )
    arguments = parser.parse_args()
    if arguments.fuzzed:
        _fuzz(arguments.fuzzed, arguments.judged)
    else:
        _repeated()


if __name__ == "__main__":
    main()
