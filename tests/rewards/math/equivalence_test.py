"""Equality of answers that needs structure or algebra, and the judged sets of other projects' verifiers."""

import json
from pathlib import Path

import pytest

from dcmdp_jax.rewards.math import algebra
from dcmdp_jax.rewards.math.answers import math_verify
from dcmdp_jax.rewards.math.equivalence import equivalent
from tests.rewards.math.judging import judge

_JUDGED = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "verifier"


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("1+x", "x+1"),
        (r"\sin^2 x + \cos^2 x", "1"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        ("(1+i)^2", "2i"),
        ("5!", "120"),
        ("2^{100}", "1267650600228229401496703205376"),
        (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
        ("2, 1", r"\{1,2\}"),
        ("(3,4), (4,3), (3,4)", "(4,3), (3,4)"),  # a solution stated twice is one
        ("p=5, q=2", "(p,q)=(5,2)"),
        ("p=5, q=2", "(5,2)"),
        (r"k_{\mathrm{B}} T", "k_B T"),
        (r"\sin 90^\circ", "1"),
        (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"),
        (r"|5-x|", "|x-5|"),
        (r"12.5\%", r"\frac{1}{8}"),
        (r"90^{\circ}, 60^{\circ}", r"$60^{\circ}$,$90^{\circ}$"),
        (r"1 \pm \sqrt{5}", r"1-\sqrt{5}, 1+\sqrt{5}"),
        (r"x = 2 \text{ or } x = 3", "2, 3"),
        ("5,113", "5, 113"),
        (r"(1, \frac{9}{2})", "(1, 4.5)"),
        (r"[1,2) \cup (3,4)", r"(3,4) \cup [1,2)"),
        ("y = 2x + 3", "2x+3"),
        ("3 < x", "x > 3"),
        (r"x \approx 11", "11"),
        (r"\frac{21}{5}", r"4.2\tolerance{1e-1}"),
        (r"\sqrt{17.5}", r"4.2\tolerance{1e-1}"),
        (r"100\sqrt{25.01}\text{ mm}", r"500\text{ mm}\tolerance{1}"),
        (r"\frac{t}{m}", r"\frac{1}{m} t"),  # t and m are no units here
        (r"C e^{2 t}", "ce^{2t}"),
        (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\frac{E_{1}+2E_{2}}{3}"),
        (r"\begin{bmatrix}1 & 2\\3 & 4\end{bmatrix}", r"\begin{pmatrix}1&2\\3&\frac{8}{2}\end{pmatrix}"),
        (r"\infty", r"\infty"),
        (r"\text{42}", "42"),
        (r"\mathbf{\frac{1}{2}}", "0.5"),
        (r"\underline{42}", "42"),
        (r"{\bf 42}", "42"),
        (r"\textbf{5 cm}", "5"),
        ("2+3=5", "5"),
        ("a+b=5", "5"),
    ],
)
def test_equivalent(prediction, gold):
    assert equivalent(prediction, gold)


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("x+2", "x+1"),
        ("4=5", "5"),
        ("5,5", "5"),
        ("1,1,2", "1,2"),
        ("x=3=5", "5"),
        ("|x|", "x"),
        (r"\sqrt{x^2}", "x"),
        ("2^{100}", "1267650600228229401496703205377"),
        ("(2,1)", "(1,2)"),
        ("[1,2]", "(1,2)"),
        ("1,2,2", "1,1,2"),  # equal as sets
        ("1,2", "1,2,3"),
        ("5-x", "|x-5|"),
        ("x+3", "|x+3|"),
        (r"\lfloor x^2/10\rfloor", "0"),
        (r"\lfloor x/10^{60}\rfloor", "0"),
        (r"\sqrt{(x-10^{50})^2}", "10^{50}-x"),
        ("x^2=42", "42"),
        ("p=2, q=5", "(5,2)"),
        (r"e^{\pi\sqrt{163}}", "262537412640768744"),  # equal to 30 digits
        (r"\pi R^2", r"\pi r^2"),  # the parser folds case
        (r"\pi(r^2-R^2)", r"\pi(R^2-r^2)"),  # folded, both are 0
        ("y = 2x + 4", "2x+3"),
        ("1", "2x + z = 1"),
        ("x < 3", "x > 3"),
        (r"-\infty", r"\infty"),
        (r"2021", r"\pm 2021"),
        (r"\sqrt{18.9}", r"4.2\tolerance{1e-1}"),
        (r"100\sqrt{25.3}\text{ mm}", r"500\text{ mm}\tolerance{1}"),
        ("0,123", "123"),
        ("1.000001e-7 x", "1.1e-7 x"),
        ("x+y", "x+z"),
        (r"\frac{0}{0}", "x"),
    ],
)
def test_not_equivalent(prediction, gold):
    assert not equivalent(prediction, gold)


def test_an_infinity_is_not_left_to_the_library(monkeypatch):
    monkeypatch.setattr(algebra.math_verify, "verify", lambda *values, **options: True)
    pairs = [("-3∞", "-3"), (r"-\infty", r"\infty"), (r"-2\infty", r"-\infty"), (r"\infty+1", r"\infty")]
    assert [equivalent(*pair) for pair in pairs] == [False, False, True, True]


def test_plain_math_verify_drops_no_factor_either():
    pairs = [
        (r"7-4\mathrm{i}", "3"),
        (r"6\mathrm{e}", "6"),
        (r"7\text{k}", "7"),
        ("6", r"6\mathrm{e}"),
        (r"8\text{M}", "8"),
    ]
    pairs += [(r"6\mathrm{e}", "6e"), (r"7-4\mathrm{i}", "7-4i"), (r"9\text{ cm}", "9")]
    rewards = math_verify([rf"\boxed{{{right}}}" for _, right in pairs], [gold for gold, _ in pairs])
    assert rewards == [0, 0, 0, 0, 0, 1, 1, 1]


def test_judge_takes_the_answer_from_the_completion():
    assert judge(r"first \boxed{3}, no: \boxed{x+1}", "1+x")
    assert not judge("it is x+1", "x+1")


@pytest.mark.parametrize(("name", "rows"), [("cases", 347), ("model_outputs", 349)])
def test_judged_sets_of_other_projects(name, rows):
    path = _JUDGED / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"the judged answers {path} are not here")
    judged = [row for row in map(json.loads, path.read_text().splitlines()) if not row["contested"]]
    wrong = []
    for row in judged:
        completion = row["pred"] if row["kind"] == "response" else rf"\boxed{{{row['pred']}}}"
        if judge(completion, row["gold"]) != row["expected"]:
            wrong.append((row["id"], row["gold"], row["pred"][-80:], row["expected"]))
    assert len(judged) == rows
    assert wrong == []
