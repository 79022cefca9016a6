"""Wrong answers made from right ones, in the ways a policy could be paid for: none is rewarded."""

import contextlib
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from dcmdp_jax.data.problems import load_problems
from tests.rewards.math import judging

_DATA = Path(__file__).resolve().parents[3].parent / "shared" / "data"
_INTEGERS = ("42", "7", "204", "-3", "1024", "15", "360", "2500000", "10", "96")
_OF_INTEGERS = (
    # left-hand sides that are no names
    "x^2={n}",
    "2x={n}",
    "x+1={n}",
    "-x={n}",
    r"\frac{{x}}{{2}}={n}",
    "1/x={n}",
    r"\sqrt{{x}}={n}",
    "|x|={n}",
    "x(x+1)={n}",
    r"\sin x={n}",
    "xy={n}",
    "10^x={n}",
    "x!={n}",
    "{m}={n}",
    "x={m}={n}",
    "x={n}={m}",
    "x^2+y^2={n}",
    r"\log x = {n}",
    # words and signs after and before the value
    "{n} million",
    r"{n}\text{{ million}}",
    r"{n}\text{{ thousand dollars}}",
    "{n} hundred",
    "{n} dozen",
    "{n} squared",
    r"{n}\text{{ cubed}}",
    "{n} factorial",
    r"{n}\text{{ or more}}",
    r"{n}\text{{ or less}}",
    r"\text{{at least }}{n}",
    r"\text{{not }}{n}",
    "not ${n}$",
    "less than ${n}$",
    r"{n}\text{{ base }}7",
    r"{n}\text{{ halves}}",
    "{n} foo",
    "minus ${n}$",
    r"{n}\text{{ if }}x>0",
    r"{n}^{{\text{{th}}}}",
    "{n}'",
    r"{n}\ldots",
    r"\overline{{{n}}}",
    r"\neg {n}",
    r"{n}^*",
    "#{n}",
    # several answers
    "{n}, {m}",
    "{n} or {m}",
    r"{n}\text{{ and }}{m}",
    "{n}; {m}",
    r"\{{{n}, {m}\}}",
    "({n}, {n})",
    r"\pm {n}",
    r"{n}\pm 1",
    "${m}$ then ${n}$",
    "${m}$, no: ${n}$",
    r"{n}\ {m}",
    r"{n}\mid {m}",
    r"{n}\lor {m}",
    r"{n}\\{m}",
    "{n}/{m}",
    "{n}, {n}",
    r"x={n}\text{{ or }}x={m}",
    r"x={n}, y={m}",
    r"{n}\approx {double}",
    r"{n}\neq {m}",
    r"\begin{{cases}}{n}\\{m}\end{{cases}}",
    # relations
    "x<{n}",
    r"x\leq {n}",
    "> {n}",
    "{n} < {m}",
    r"x\geq {n}",
    r"x\neq {n}",
    r"{n}\to {m}",
    r"{n}\pmod 5",
    r"x\equiv {n}\pmod 5",
    # bases
    "{n}_7",
    "{n}_{{9}}",
    r"{n}_{{\text{{eight}}}}",
    "{n}_{{16}}",
    # near or other values
    "{n}.5",
    "{n}.0000001",
    "{n}+0.0000001",
    "{n}+10^{{-30}}",
    "{m}",
    "{n}0",
    "{n}x",
    "{n}i",
    "{n}+x",
    "x{n}",
    r"{n}\pi",
    "10^{{{n}}}",
    r"{n}\%\text{{ of }}10",
    "({n}){n}",
    r"{n}+\lfloor x^2/10\rfloor",
    r"{n}+|x-5|-5+x",
    r"{n}+|x-10^{{99}}|-10^{{99}}+x",
    r"{n}+\sqrt{{x^2}}-x",
    r"{n}+\lfloor x/10^{{80}}\rfloor",
    r"{n}\cdot\frac{{|x|}}{{x}}",
    r"{n}+\max(x,-10^9)-x",
    "\uff11{n}",
    r"\vec{{{n}}}",
    r"\frac{{{n}}}{{0}}",
    "0{n}1",
    "{n}e3",
    "{n} 000",
    "{n},000",
    # in Unicode, in colours and frames, in braces
    "{n}½",
    "{n}²",
    "√{n}",
    "{n}₇",
    "{n}·{m}",
    "{n}∞",
    "½{n}",
    "{n}√2",
    "{n}θ",
    r"\fbox{{{n}}}0",
    r"\textcolor{{{n}}}{{{m}}}",
    r"\color{{red}}{{{n}}}0",
    r"\{{\{{{n}\}}\}}",
    r"\{{{n}, \emptyset\}}",
    "{n}mA",
    "{n}nC",
)
_OF_FUNCTIONS = (
    "|{f}|",
    "-({f})",
    "{f}+1",
    "({f})^2",
    "2({f})",
    "{f}+0.0000001",
    "({f})(1+10^{{-40}})",
    r"({f})\frac{{|{v}|}}{{{v}}}",
    r"{f}+|{v}-3|-3+{v}",
    r"{f}+|{v}+3|-3-{v}",
    r"{f}+\lfloor {v}^2/10\rfloor",
    r"{f}+\lceil {v}/10^{{40}}\rceil",
    r"{f}+\sqrt{{{v}^2}}-{v}",
    r"{f}+\sqrt{{({v}-5)^2}}-5+{v}",
    r"{f}+\sqrt{{{v}^2-200{v}+10000}}+{v}-100",
    "{f}, 0",
    r"{f}+\max({v},0)-{v}",
    r"{f}+10^{{-30}}{v}",
    "{f}={f}+1",
    "2y={f}",
    "y^2={f}",
    "y+1={f}",
    "{upper}",
    "{primed}",
    "{indexed}",
    "{other}",
    r"{f}\text{{ or }}0",
    r"\text{{not }}{f}",
    r"{f}\ldots",
    r"{f}\pm 1",
    "({f})!",
    r"{f} \text{{ million}}",
    "{f} > 0",
    r"({f})^{{1.0000001}}",
    "({f}, {f})",
    r"\frac{{{f}}}{{2}}",
    r"({f})\operatorname{{sgn}}({v})",
    r"{f}+e^{{-10^9}}",
)
_FUNCTIONS = ("x+3", r"x^2-2x", r"\frac{x}{x^2+1}", "5-x", r"2\sin x", r"x^3+\sqrt{2}x", r"e^x+x")
_PAIRS = (
    # the same number in other units, another unit, another currency
    (r"5 \text{ km}", r"5 \text{ m}"),
    ("5 km", "5 m"),
    ("5 m", "5 km"),
    ("42 feet", "42 inches"),
    (r"15\text{ cm}", r"15\mbox{ cm}^2"),
    (r"15\text{ cm}^3", r"15\mbox{ cm}^2"),
    (r"3\mathrm{kg}", r"3\mathrm{g}"),
    ("9 hours", r"9\text{ min}"),
    ("12 cents", r"\$12"),
    ("€12", r"\$12"),
    ("£12", "€12"),
    (r"12\text{ yuan}", "12 dollars"),
    (r"20^\circ C", r"20^\circ F"),
    ("60 km/h", "60 m/s"),
    ("60 mph", "60 km/h"),
    (r"30^\circ", r"30\text{ rad}"),
    ("5%", "5 km"),
    ("3 dozen", "3"),
    ("1.5 million", "1.5"),
    ("16 dogs", "16 cats"),
    (r"\$5 \text{ million}", r"\$5"),
    ("34 units", r"34\text{ sq. units}"),
    (r"8:34\text{ a.m.}", r"8:34\text{ p.m.}"),
    ("8:34", "4:17"),
    ("4 years", "4 months"),
    ("2 gallons", "2 quarts"),
    ("7 lb", "7 kg"),
    ("5 erg", "5 J"),
    (r"3 \text{ m/s}^2", r"3 \text{ m/s}"),
    # a letter that the parser takes for a function
    (r"m_p c^2(\gamma^2-2)", r"m_p c^2(\gamma^2-1)"),
    (r"(\gamma-3)c", r"(\gamma-1)c"),
    # bases
    ("2516_9", "2516_8"),
    ("1101_2", "1101_3"),
    (r"204_{\text{six}}", "204_5"),
    ("54", "204_5"),
    ("101010_2", "42"),
    ("0x2A", "42"),
    ("2516_8+1", "2516_8"),
    ("2516_8, 2516_9", "2516_8"),
    (r"2516_{10}", "2516_8"),
    ("A5_{12}", "A5_{11}"),
    ("_8 2516", "2516"),
    # choices
    ("(A), (B), (C), (D)", "A"),
    ("(A) or (B)", "A"),
    (r"\text{(A) or (B)}", r"\text{(A)}"),
    ("(A)(B)(C)(D)", "A"),
    ("ABCD", "A"),
    ("A, B", "A"),
    ("A/B", "A"),
    ("(A) (B)", r"\text{(A)}"),
    ("A and B", "A"),
    (r"\text{A, B, C, D, E}", "B"),
    ("not A", "A"),
    (r"\text{not (A)}", "A"),
    ("(A) is wrong", "A"),
    (r"\text{neither A}", "A"),
    ("(B) (A)", "A"),
    ("A B", "A"),
    (r"A \lor B", "A"),
    (r"\text{A, B, C}", r"\text{A, C}"),
    ("A", r"\text{A, C}"),
    ("A or C", r"\text{A}"),
    ("A.B.C", "A"),
    ("A|B", "A"),
    ("(A), 12", "A"),
    ("(A)/2", "A"),
    (r"\text{(A)}\text{ or }12", "A"),
    (r"(A)\vee(B)", "A"),
    # degrees
    (r"\sin(30)", r"\sin(30^\circ)"),
    (r"\sin 30^\circ", r"\sin 30"),
    (r"\cos 60", r"\frac12"),
    (r"\tan 45", "1"),
    (r"\sin 1^\circ", r"\sin 1"),
    (r"42^\circ 30'", r"42^\circ"),
    (r"42'", r"42^\circ"),
    (r"42''", r"42'"),
    (r"\cos 90", "0"),
    (r"2\sin 10", r"2\sin 10^\circ"),
    # names
    ("x-y", "xy"),
    ("p - q", "pq"),
    ("R-r", "Rr"),
    ("f'", "f"),
    ("f''", "f'"),
    ("X", "x"),
    ("x_1", "x_2"),
    ("k_B", "k_b"),
    (r"\Omega", r"\omega"),
    (r"\Delta", r"\delta"),
    (r"\bar x", "x"),
    (r"\hat{x}", r"\bar{x}"),
    (r"\dot{x}+x", r"2\dot{x}"),
    ("f(x)", "fx"),
    ("f(2)", "2f"),
    ("y'+y", "2y"),
    (r"\pi R^2", r"\pi r^2"),
    (r"\pi(r^2-R^2)", r"\pi(R^2-r^2)"),
    ("RM=CRMS", "MR=SRMC"),
    ("XSQL", "LQSX"),
    ("ABC", r"\text{CBA}"),
    (r"\frac{\partial f}{\partial x}", r"\frac{\partial f}{\partial y}"),
    (r"\frac{dx}{dt}+x", r"2\frac{dx}{dt}+x"),
    ("2E", "2e"),
    ("mE", "me"),
    (r"\vec a\cdot\vec b", r"\vec a\times\vec b"),
    (r"\frac{\Delta p}{p}", r"\Delta"),
    ("k_{\\mathrm{B}}T", "kT"),
    ("h", r"\hbar"),
    # pairs, lists, sets, intervals
    ("p=2, q=5", "p=5, q=2"),
    ("p=2, q=5", "(p, q)=(5, 2)"),
    ("q=5, p=2", "(p,q)=(5,2)"),
    ("2, 5", "p=5, q=2"),
    ("(2, 5)", "p=5, q=2"),
    ("p=5", "p=5, q=2"),
    ("p=5, q=2, r=1", "p=5, q=2"),
    ("(2,1)", "(1,2)"),
    ("(2,1)", "1,2"),
    ("[312,123]", "(312,123)"),
    ("1,2", "(1,2)"),
    (r"\{1,2\}", "(1,2)"),
    ("[1,2]", r"\{1,2\}"),
    ("(1,2)", r"\{1,2\}"),
    ("[1,2]", "(1,2)"),
    ("(1,2]", "[1,2)"),
    ("1,2,2", "1,1,2"),
    ("1,2", "1,2,3"),
    ("1,2,3", "1,2"),
    ("2", r"\pm 2"),
    ("3,3", "3"),
    ("(-5, \\infty)", "[-5, \\infty)"),
    ("(0,1)\\cup(1,2)", "(0,2)"),
    ("(0,1)\\cap(1,2)", "(0,1)\\cup(1,2)"),
    ("(0,1),(1,2)", "(0,1)\\cup(1,2)"),
    ("(-\\infty, 5)", "(\\infty, 5)"),
    ("\\mathbb{R}", "\\mathbb{Z}"),
    ("[2,\\infty)", "x>2"),
    ("(0, 0.0000002)", "(0, 0.0000001)"),
    ("1,2,3,\\ldots", "1,2,3"),
    ("\\{1,\\ldots,n\\}", "\\{1,n\\}"),
    ("1,000", "1,0"),
    ("1,23", "123"),
    ("x=1", "y=1"),
    ("x>5", "x<5"),
    ("x \\geq 5", "x>5"),
    ("-x>2", "x>2"),
    ("x>2, y>3", "x>2"),
    ("x \\neq 3", "x=3"),
    ("1", "2x+z=1"),
    ("x=-2", "x=2"),
    ("y=2x+4", "y=2x+3"),
    ("x<0.0000002", "x<0.0000001"),
    ("x^2=4", "x=2"),
    ("(x-2)^2=1", "x-2=1"),
    ("0=0", "x=0"),
    # matrices
    (r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("(1,2)", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\begin{pmatrix}0.0000002\\1\end{pmatrix}", r"\begin{pmatrix}0.0000001\\1\end{pmatrix}"),
    ("-2", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    # numbers
    (r"e^{\pi\sqrt{163}}", "262537412640768744"),
    ("0.333", r"\frac13"),
    ("3.14", r"\pi"),
    (r"\frac{22}{7}", r"\pi"),
    ("10^{-36}x", "10^{-37}x"),
    ("1.78e-6", "1.77e-6"),
    ("0.3", r"0.\overline{3}"),
    (r"3\frac12", r"\frac32"),
    (r"3\cdot\frac12", r"3\frac12"),
    ("3 1/2", "31/2"),
    ("2.5%", "25%"),
    ("4:2", "2:1"),
    ("0.5", "5%"),
    (r"\sqrt{2}\approx 5", r"\sqrt2"),
    ("1e-9", "0"),
    ("1.5E-3", "1500"),
    ("2^{100}", "1267650600228229401496703205377"),
    (r"\ln(x^2)", r"2\ln x"),
    (r"\ln|x|", r"\ln x"),
    (r"\sqrt{x^2}", "x"),
    ("|x|", "x"),
    ("x", "|x|"),
    (r"\sin^{-1}x", r"\frac{1}{\sin x}"),
    (r"\lfloor n/2\rfloor", r"\lceil n/2\rceil"),
    (r"\max(a,b)", r"\min(a,b)"),
    (r"\lfloor x\rfloor", "x"),
    ("e^x+C", "e^x"),
    (r"n!", "n"),
    # words
    (r"\text{not even}", r"\text{even}"),
    (r"\text{even or odd}", r"\text{even}"),
    (r"\text{Monday or Tuesday}", r"\text{Monday}"),
    (r"\text{yes and no}", r"\text{yes}"),
    (r"\text{yes}, \text{no}", r"\text{yes}"),
    ("oddd", "odd"),
    (r"\text{October 31}", r"\text{October 30}"),
    (r"\text{two circles}", r"\text{two lines}"),
    (r"\text{three}", r"\text{four}"),
    (r"\text{North-east}", r"\text{North}"),
    ("red, blue", "red"),
    # words before a value that change it
    ("the prime after $3$", "3"),
    ("opposite of $12$", "12"),
    ("the number after $3$", "3"),
    ("log of $12$", "12"),
    ("almost $3$", "3"),
    ("roughly $3$", "3"),
    ("the cosine of $3$", "3"),
    ("sum of digits of $12$", "12"),
    ("successor of $3$", "3"),
    ("opposite sign of $-2$", "-2"),
    # the problem itself
    (r"\int_0^1 x^2 dx", r"\frac13"),
    (r"\int 2x\,dx", "x^2"),
    (r"\lim_{x\to0}\frac{\sin x}{x}", "1"),
    (r"\gcd(84,63)", "21"),
    (r"\lcm(4,6)", "12"),
    (r"\operatorname{lcm}(4,6)", "12"),
    (r"\max(3,4)", "4"),
    (r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", "-2"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"),
    (r"\frac{d}{dx}x^2", "2x"),
    (r"\frac{d}{dx}\sin x", r"\cos x"),
    (r"x=\int_0^1 x^2 dx", r"\frac13"),
    (r"1, \lim_{x\to 0}\frac{\sin x}{x}+1", "1, 2"),
    (r"\sum_{k=1}^{100}k", "5050"),
    # what the parser drops or takes for something else
    ("1+r", "(1+r)^T"),
    ("P(1+r)", "P(1+r)^{T}"),
    ("2", "2^T"),
    ("e", "e^T"),
    ("(1+r)^S", "(1+r)^T"),
    ("A", "A^T"),
    ("720", "3!!"),
    ("(n!)!", "n!!"),
    (r"\frac{1}{f(x)}", "f^{-1}(x)"),
    ("f^{-1}(x)", r"\frac{1}{f(x)}"),
    (r"\vec b\times\vec a", r"\vec a\times\vec b"),
    (r"2(\frac12)", r"2\frac{1}{2}"),
    (r"(2)\frac12", r"2\frac12"),
    # percentages and relations near another; names in another order; words after a tuple
    ("0.5%", r"\frac12"),
    (r"\frac12\%", r"\frac12"),
    ("0.25%", "0.25"),
    (r"\frac{\sqrt3}{2}\%", r"\frac{\sqrt3}{2}"),
    (r"5\%\%", "5"),
    ("5%%", "5"),
    ("x>3.0000001", "x>3"),
    ("y=2x+3.0000001", "y-2x=3"),
    ("(y,x)=(1,5)", "(1,5)"),
    ("y=1, x=5", "(1,5)"),
    ("(c,b,a)=(1,2,3)", "(1,2,3)"),
    ("n=1, m=2", "(1,2)"),
    (r"(1,2,3)\text{ and permutations}", "(1,2,3)"),
)


@pytest.fixture(scope="module")
def rewarded():
    """`judging.rewarded` of pairs in a process of its own, as in training.

    No other test has touched its sympy.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield lambda pairs: list(pool.map(judging.rewarded, pairs))


def _wrongly(rewarded, pairs):
    return [pair for pair, reward in zip(pairs, rewarded(pairs), strict=True) if reward]


def _of_integer(gold):
    value = int(gold)
    for form in _OF_INTEGERS:
        yield form.format(n=gold, m=value + 1, double=2 * value if abs(value) > 1 else 9), gold


def _of_function(gold):
    names = {
        "upper": re.sub(r"(?<![\\a-z])x", "X", gold),
        "primed": re.sub(r"(?<![\\a-z])x", "x'", gold),
        "indexed": re.sub(r"(?<![\\a-z])x", "x_1", gold),
        "other": re.sub(r"(?<![\\a-z])x", "y", gold),
    }
    for form in _OF_FUNCTIONS:
        yield form.format(f=gold, v="x", **names), gold


def _made():
    made = [pair for gold in _INTEGERS for pair in _of_integer(gold)]
    return made + [pair for gold in _FUNCTIONS for pair in _of_function(gold)]


def test_no_wrong_answer_made_from_a_right_one_is_rewarded(rewarded):
    attacks = [*_PAIRS, *_made()[::3]]
    assert len(attacks) >= 500
    assert _wrongly(rewarded, attacks) == []


@pytest.mark.long
def test_none_of_all_wrong_answers_is_rewarded(rewarded):
    assert _wrongly(rewarded, _made()) == []


def test_the_answers_that_were_attacked_are_rewarded_themselves(rewarded):
    golds = dict.fromkeys([*_INTEGERS, *_FUNCTIONS, *(gold for _, gold in _PAIRS)])
    assert all(rewarded([(gold, gold) for gold in golds]))


@pytest.mark.long
@pytest.mark.parametrize("name", ["aime24", "amc23", "math500", "minerva", "olympiadbench"])
def test_no_attack_on_a_benchmark_is_rewarded(rewarded, name):
    path = _DATA / "benchmarks" / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"the benchmark {path} is not here")
    golds = list(dict.fromkeys(problem.answer for problem in load_problems(str(path))))
    attacks: list[tuple[str, str]] = []
    for index, gold in enumerate(golds):
        if re.fullmatch(r"-?[1-9][0-9]{1,9}", gold):
            attacks += list(_of_integer(gold))[index % 7 :: 7]
        elif (
            re.fullmatch(r"[^,;<>=]*(?<![\\a-zA-Z])x(?![a-zA-Z])[^,;<>=]*", gold)
            and r"\in" not in gold
        ):
            attacks += list(_of_function(gold.strip("$")))[index % 5 :: 5]
        else:
            with contextlib.suppress(ValueError):
                attacks += list(_damaged(gold))
    assert len(attacks) > 50
    assert _wrongly(rewarded, attacks) == []


def _damaged(gold):
    """An answer of any form with a change that makes it wrong.

    One number changed, its sign, its brackets, or another answer beside it.
    """
    body = gold.strip("$")
    number = re.search(r"(?<![0-9.^_{])[0-9]+(?![0-9.])", body)
    if number and r"\tolerance" not in gold:
        yield body[: number.start()] + str(int(number[0]) + 1) + body[number.end() :], gold
    if re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", body):
        flipped = body.translate(str.maketrans("()[]", "[]()"))
        yield flipped, gold
    elif r"\tolerance" not in gold and body != "0":
        yield rf"{body}, 12345", gold
        if not re.search(r"(?<![0-9.])0$", body):  # 0 million is 0
            yield rf"{body} \text{{ million}}", gold
        yield rf"12345={body}", gold
        yield rf"{body}\text{{ or }}12345", gold
