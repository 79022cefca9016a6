"""Completions on a page: small, whole where they can be, counted where not; shown by a browser."""

import math

import numpy as np
import pytest

from dcmdp_jax.observe.page_kit import Completion, completions_data, render_page
from tests.support.browser import CHROMIUM, look_at

_HOSTILE = "</script><b>"
_EMPTY = {name: [] for name in ("verdicts", "provenance", "problems", "figures")}


def _completion(tokens=("1", "+", "1"), **fields):
    p = np.linspace(0.1, 0.9, len(tokens))
    return Completion(tokens=list(tokens), train_probs=p, rollout_probs=p[::-1].copy(), **fields)


def test_probabilities_have_five_decimals_and_words_are_kept_once():
    data = completions_data(
        [_completion(reward=1.0, step=3, prompt="1+1?"), _completion(tokens=("2", "+"))]
    )
    assert data["words"] == ["1", "+", "2"] and data["left_out"] == 0
    # The larger mean |p - q| first: 0.8 of both tokens, then (0.8 + 0 + 0.8) / 3.
    second, first = data["rows"]
    assert (second["discrepancy"], first["discrepancy"]) == (0.8, 0.5333)
    assert first["tokens"] == [0, 1, 0] and second["tokens"] == [2, 1]
    assert first["p"] == [10_000, 50_000, 90_000] and first["q"] == [90_000, 50_000, 10_000]
    assert (first["reward"], first["step"], first["more"]) == (1.0, 3, 0)
    assert second["reward"] is None


def test_long_texts_and_prompts_are_cut_and_say_so():
    """2,000 texts of 20,000 characters; the question at the end of a prompt stays."""
    prompt = "system " * 1000 + "QUESTION?"
    data = completions_data(
        [Completion(text="x" * 20_000, prompt=prompt) for _ in range(2000)], most_tokens=260_000
    )
    row = data["rows"][0]
    assert row["more"] + len(row["text"]) == row["length"] == 20_000
    assert sum(len(row["text"]) for row in data["rows"]) <= 17 * 260_000
    assert row["prompt"].endswith("QUESTION?") and "[... 5,009 characters ...]" in row["prompt"]
    (short,) = completions_data([Completion(text="x" * 20_000, prompt="p" * 2000)])["rows"]
    assert (short["text"], short["more"], short["prompt"]) == ("x" * 20_000, 0, "p" * 2000)


def test_full_color_is_a_quantile_of_the_page():
    """101 tokens whose |p - q| is 0, 1e-5, ... 1e-3: the 99% quantile is 9.9e-4; without a mismatch
    it is the unit.
    """
    q = np.full(101, 0.5)
    data = completions_data(
        [Completion(tokens=["x"] * 101, train_probs=q + np.arange(101) * 1e-5, rollout_probs=q)]
    )
    assert data["full_color"] == pytest.approx(9.9e-4) and data["unit"] == 100_000
    assert (
        completions_data([Completion(tokens=["x"], train_probs=q[:1], rollout_probs=q[:1])])[
            "full_color"
        ]
        == 1e-5
    )


def test_given_tokens_have_no_probabilities_and_count_for_nothing():
    p = np.array([0.5, math.nan, 0.25])
    row = completions_data(
        [Completion(tokens=["a", "b", "c"], train_probs=p, rollout_probs=p + 0.1)]
    )["rows"][0]
    assert row["p"] == [50_000, None, 25_000] and row["discrepancy"] == 0.1


def test_what_does_not_fit_is_cut_or_left_out_and_counted():
    long = completions_data([_completion(tokens=["x"] * 2_345)])["rows"][0]
    assert len(long["tokens"]) == len(long["p"]) == 2_000 and long["more"] == 345
    steps = [
        _completion(tokens=["x"] * 80, step=step) for step in range(100)
    ]  # each counts 80 + 20
    data = completions_data(steps, most_tokens=2_500)
    assert [row["step"] for row in data["rows"]] == list(range(0, 100, 4)) and data[
        "left_out"
    ] == 75  # a tie: in order


def test_two_thousand_completions_stay_below_5_mb_and_are_all_there():
    rng = np.random.default_rng(0)
    words = [f" w{i}" for i in range(5_000)]
    each = [
        Completion(
            **dict(
                tokens=[words[i] for i in rng.integers(0, 5_000, 300)],
                prompt="p" * 200,
                step=n // 100,
            ),
            **{f"{side}_probs": rng.uniform(size=300) for side in ("train", "rollout")},
        )
        for n in range(2_000)
    ]
    data = completions_data(each)
    page = render_page(
        "view.html", scripts=["completions.js"], title="t", completions=data, **_EMPTY
    )
    assert data["left_out"] == 0 and len(page) < 5_000_000
    # 2,000 x (n + 20) <= 260,000: n = 110, and 100 of the steps of 50 from 100 on.
    assert {row["more"] for row in data["rows"]} == {200}


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_them_a_few_at_a_time(tmp_path, width):
    many = [
        _completion(tokens=("<i>", _HOSTILE, "x" * 300), step=n, prompt=_HOSTILE, reward=n % 2)
        for n in range(50)
    ]
    page = tmp_path / "view.html"
    page.write_text(
        render_page(
            "view.html",
            scripts=["completions.js"],
            title="t",
            completions=completions_data(many),
            **_EMPTY,
        )
    )
    facts, console = look_at(page, tmp_path, width)
    assert console == [] and facts["shown"] == 20 and facts["wide"] <= width


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("hidden", [False, True])
def test_a_browser_groups_identical_completions_and_hides_control_tokens_when_asked(
    tmp_path, hidden
):
    """Two are alike token by token; of the other two one has another step, the other another
    text.
    """
    tokens = ("4", "2", "<|im_end|>")
    four = [
        *(_completion(tokens=tokens, step=1, prompt="<|im_start|>user\n6 * 7?") for _ in range(2)),
        _completion(tokens=tokens, step=2, prompt="<|im_start|>user\n6 * 7?"),
        _completion(tokens=("4", "1", "<|im_end|>"), step=1, prompt="<|im_start|>user\n6 * 7?"),
    ]
    data = completions_data(four)
    page = tmp_path / "view.html"
    page.write_text(
        render_page("view.html", scripts=["completions.js"], title="t", completions=data, **_EMPTY)
    )
    tick = "d.getElementById('plain').click()" if hidden else ""
    # innerText is what can be seen; the first entry is open.
    seen = "[...d.querySelectorAll('.completion')].map(c => c.innerText)"
    facts, console = look_at(page, tmp_path, 1280, first=tick, more=seen)
    texts = facts["more"]
    assert console == [] and len(texts) == 3
    assert [("2 identical" in text) for text in texts].count(True) == 1
    opened = [text for text in texts if "completion" in text.split()]
    assert len(opened) == 1 and "6 * 7?" in opened[0]
    assert [mark in opened[0] for mark in ("<|im_start|>", "<|im_end|>")] == [not hidden] * 2
