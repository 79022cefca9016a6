"""research/frozen.md: what is kept of an engine by hand, and the page's numbers from what is
kept.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from research.frozen_model import (
    CONTROL,
    DECADES,
    ENGINES,
    LOWEST,
    Tokens,
    histogram,
    log_odds,
    quantiles,
    summarize,
)
from research.frozen_tables import answer, mean, read_kept, tail_like, verdict

PAGE = Path(__file__).resolve().parents[1] / "frozen.md"


def _tokens():
    """Three tokens of two prompts: p 0.5, 0.5, 0.1 and q 0.75, 0.25, 0.65, in states of two
    tokens.
    """
    p = np.array([0.5, 0.5, 0.1])
    q = np.array([0.75, 0.25, 0.65])
    top = [np.log(np.stack([x, 1 - x], axis=1)).astype(np.float32) for x in (p, q)]
    return Tokens(
        np.array([0, 0, 1]),
        np.log(p).astype(np.float32),
        np.log(q).astype(np.float32),
        np.array([0.7, 0.7, 0.3]),
        *top,
        np.ones(3),
    )


def test_what_is_kept_of_three_tokens_is_as_computed_by_hand():
    kept = summarize(_tokens())
    # delta 0.25, 0.25, 0.55; eps log(1 / 3), log(3), log((1 / 9) / (13 / 7)) = -log(117 / 7).
    assert kept["by_prompt"]["tokens"] == [2, 1]
    assert kept["by_prompt"]["delta"] == pytest.approx([0.5, 0.55], abs=1e-6)
    assert kept["by_prompt"]["abs_displacement"] == pytest.approx(
        [2 * math.log(3), math.log(117 / 7)], abs=1e-3
    )
    assert kept["by_prompt"]["displacement"] == pytest.approx([0, -math.log(117 / 7)], abs=1e-3)
    assert [kept["by_prompt"][name] for name in ("q_above_p", "large", "over_4_nats")] == [
        [1, 1],
        [0, 1],
        [0, 0],
    ]
    # p of the last token is float32's 0.1, which may lie above 0.1: "rare" is not decided by it.
    assert kept["by_prompt"]["total_variation"] == pytest.approx([0.5, 0.55], abs=1e-6)
    # r - 1 - log r with r = p / q: 2 / 3, 2, 2 / 13.
    by_hand = [2 / 3 - 1 + math.log(1.5) + 1 - math.log(2), 2 / 13 - 1 + math.log(6.5)]
    assert kept["by_prompt"]["k3"] == pytest.approx(by_hand, abs=1e-3)
    # C = 0.25 * 0.5 + 0.25 * 0.5 + 0.55 * 0.9 = 0.745, S = 0.5 + 0.5 + 0.9 = 1.9.
    assert kept["penalty"]["1"]["share"] == pytest.approx(0.745 / 2.645, abs=1e-4)
    assert kept["penalty"]["0.1"]["share"] == pytest.approx(0.0745 / 1.9745, abs=1e-5)
    assert (
        kept["penalty"]["1"]["largest"] == pytest.approx(0.55)
        and kept["penalty"]["0.1"]["over_half"] == 0
    )
    # The two tokens of p = 0.5 are in (0.1, 0.5], not in (0.5, 0.9].
    assert [one["tokens"] for one in kept["by_p"]][3:5] == [2, 0]
    assert [one["tokens"] for one in kept["by_entropy"]] == [0, 0, 1, 2, 0, 0, 0, 0]
    # The mean over tokens; without either prompt 0.55 and 0.25, of which the jackknife takes half
    # of the difference.
    value, half = mean(kept, "delta")
    assert value == pytest.approx(0.35, abs=1e-6) and half == pytest.approx(12.706 * 0.15, rel=1e-3)


def test_log_odds_stay_finite_and_histograms_and_quantiles_hold_every_token():
    assert log_odds(np.array([math.log(0.75)])) == pytest.approx(math.log(3))
    assert np.isfinite(log_odds(np.zeros(1, np.float32)))
    counts = histogram(np.array([0.0, 1e-8, 0.0105, 0.0105, 1e3]))
    assert (counts[0], counts[60], counts[-1], sum(counts)) == (2, 2, 1, 5)
    found = quantiles(np.arange(1001.0), np.repeat([0, 1], [500, 501]))
    assert (found["p50"], found["p99.9"], found["max"]) == (500, 999, 1000)
    # Where the upper prompt is drawn in neither place, the largest value of the lower one is left.
    assert found["p99.9_interval"] == [499, 1000]


def test_the_pages_answer_is_that_of_the_kept_numbers():
    kept = read_kept()
    page = PAGE.read_text()
    assert set(kept) <= {
        *ENGINES,
        *(f"the demo's policy, {name}" for name in (CONTROL, "local:int4")),
    }
    assert answer(kept) in page
    for one in kept.values():
        assert (
            sum(one["by_prompt"]["tokens"]) == one["tokens"]
            and len(one["by_prompt"]["tokens"]) == 64
        )
        for name in ("by_p", "by_entropy"):
            assert sum(each["tokens"] for each in one[name]) == one["tokens"]
        for name, counts in one["histograms"].items():
            assert sum(counts) == one["tokens"]
            at = math.floor(DECADES * (math.log10(one["quantiles"][name]["p99.9"]) - LOWEST))
            above = sum(counts[at + 1 :]) / one["tokens"]
            assert above <= 0.0011 and above + counts[at] / one["tokens"] >= 0.0009
        # delta of the sampled tokens is one draw of each state's expectation.
        value, half = mean(one, "delta")
        expected, bound = (mean(one, f"expected_discrepancy{end}")[0] for end in ("", "_bound"))
        assert expected - 2 * half <= value <= expected + bound + 2 * half


def _engine(k3, large, tail):
    """A thousand tokens of each of two prompts."""
    by_prompt = {
        "tokens": [1000, 1000],
        "k3": [1000 * k3] * 2,
        "large": [large, large],
        "delta": [10, 10],
    }
    return {
        "by_prompt": by_prompt,
        "quantiles": {"delta": {"p99.9": tail, "p99.9_interval": [tail / 2, 2 * tail]}},
    }


def test_the_verdicts_are_those_of_the_rule():
    # Bars: k3 0.015 and 0.15, large deltas 1e-4 and 1e-3 of the tokens, that is 0.2 and 2 of these
    # 2,000.
    calm = _engine(0.014, 0, 0.1)
    watch = _engine(0.016, 0, 0.1)
    rare = _engine(0, 1, 0.1)
    afraid = _engine(0, 2, 0.1)
    assert [verdict(one) for one in (calm, watch, rare, afraid)] == [
        "calm",
        "watch",
        "watch",
        "afraid",
    ]
    assert verdict(_engine(0.16, 0, 0.1)) == "afraid"
    # delta's mean is 0.01: tails of 10 and 1.5 means against the demo's 48; with 8 large ones the
    # shares count.
    demo = _engine(0, 1, 0.48)
    other = _engine(0, 4, 0.48)
    assert [tail_like(_engine(0, 0, tail), demo)[0] for tail in (0.3, 0.1, 0.015)] == [
        "yes",
        "open",
        "no",
    ]
    assert [tail_like(_engine(0, large, 0.3), other)[0] for large in (2, 1, 0)] == [
        "yes",
        "open",
        "no",
    ]
    found = answer(
        {"local:int4": afraid, "vllm:bfloat16": calm, "the demo's policy, local:int4": demo}
    )
    assert (
        "- **Afraid** (k3, large deltas of 10,000): `local:int4` (0, 20)." in found
        and "**Watch**: none." in found
    )
    assert "yet: `local:float32`, `local:int8`," in found


def test_what_the_text_says_of_the_demos_policy_is_what_is_kept():
    page = " ".join(PAGE.read_text().split())
    one = read_kept()["the demo's policy, local:int4"]
    found = one["quantiles"]["delta"]
    said = (
        f"{one['tokens']:,} tokens of `local:int4` before any training have "
        f"{sum(one['by_prompt']['large']):.0f} large deltas ({found['max']:.3f} the largest), k3 "
        f"of {mean(one, 'k3')[0]:.5f}, and p99.9 of delta is "
        f"{found['p99.9'] / mean(one, 'delta')[0]:.0f} times its mean."
    )
    assert (
        said in page
        and f"at lambda 1 is {100 * one['penalty']['1']['share']:.1f}% of the update" in page
    )


def test_what_the_text_says_of_the_engines_is_what_is_kept():
    page = " ".join(PAGE.read_text().split())
    kept = read_kept()
    calm = [
        kept[name]
        for name in (
            "local:int8",
            "vllm:bfloat16",
            "local:float32,cache=fp8",
            "vllm:bfloat16,cache=fp8",
        )
    ]
    int4 = kept["local:int4"]
    assert f"median |eps| is {int4['quantiles']['abs_displacement']['p50']:.1f} nats" in page
    assert f"{100 * mean(int4, 'large')[0]:.1f}% of its tokens have a delta" in page
    assert f"{100 * mean(int4, 'rare')[0]:.0f}% have p of at most 0.1" in page
    assert round(int4["penalty"]["1"]["over_half"], 4) == round(mean(int4, "large")[0], 4)
    assert f"one of {sum(one['tokens'] for one in calm):,} tokens has" in page
    assert [sum(sum(one["by_prompt"][name]) for one in calm) for name in ("large", "rare")] == [
        1,
        0,
    ]
    assert max(one["quantiles"]["delta"]["max"] for one in calm) == pytest.approx(0.628, abs=5e-4)
    shares = sorted(100 * one["penalty"]["1"]["share"] for one in calm)
    assert f"the penalty is {shares[0]:.2f} to {shares[-1]:.1f}% of the update" in page
    int3 = kept["local:int3"]
    said = [100 * mean(int3, name)[0] for name in ("large", "rare", "q_above_p")]
    assert "{:.0f}% large, {:.0f}% rare, q > p on {:.0f}% of the tokens".format(*said) in page
    assert (
        f"at lambda 1 the penalty is {100 * int3['penalty']['1']['share']:.0f}% of the update"
        in page
    )
    found = int3["quantiles"]["abs_displacement"]
    int2 = kept["local:int2"]
    coarsest = int2["quantiles"]["abs_displacement"]
    ratios = found["p99.9"] / found["p50"], coarsest["p99.9"] / coarsest["p50"]
    assert "`local:int3` ({:.0f}) and `local:int2` ({:.1f}) have".format(*ratios) in page
    assert min(mean(int2, name)[0] for name in ("large", "rare")) > 0.5
    k3 = {name.removeprefix("local:"): mean(one, "k3")[0] for name, one in kept.items()}
    parts = {name: k3[name] / k3["int4"] for name in ("nvfp4", "nf4", "mxfp4", "int4_g32")}
    assert [parts["nvfp4"], parts["nf4"]] == pytest.approx([0.25, 0.25], abs=0.04)
    assert "NVFP4 and NF4 have a quarter of `local:int4`'s k3" in page
    assert f"in groups of 32 {parts['mxfp4']:.1f} and {parts['int4_g32']:.1f} of it" in page
    held = [100 * mean(kept[f"local:{name}"], "head_mass")[0] for name in ("int4_g32", "nf4")]
    assert "top 32 hold {:.0f}%, NF4's {:.0f}%".format(*held) in page
    more = sorted((k3["mxfp8_w8a8"] / k3["mxfp8"], k3["nvfp4_w4a4"] / k3["nvfp4"]))
    assert f"MXFP8 has {k3['mxfp8'] / k3['int8']:.0f} times INT8's k3" in page
    assert "k3 is {:.1f} to {:.1f} times as much".format(*more) in page
    groups = [
        one for name, one in kept.items() if name.startswith(("local:mx", "local:n", "local:int4_"))
    ]
    shapes = [one["quantiles"]["abs_displacement"] for one in (*calm, int4, *groups)]
    shapes = [found["p99.9"] / found["p50"] for found in shapes]
    assert (
        f"p99.9 of |eps| is {min(shapes):.0f} to {max(shapes):.0f} times its median, the demo's 9"
        in page
    )
    for name, said in (
        ("vllm:bfloat16", "for BF16 its mean is {} to {} in"),
        ("local:int8", "for INT8 {} to {}, while"),
    ):
        means = [each["abs_displacement"]["mean"] for each in kept[name]["by_p"]]
        assert said.format(f"{min(means):.2g}", f"{max(means):.2g}") in page
    above = [round(100 * each["q_above_p"]) for each in calm[3]["by_p"][4:]]
    assert (min(above), max(above)) == (15, 24) and round(100 * mean(int4, "q_above_p")[0]) == 80
    floor = mean(kept[CONTROL], "delta")[0]
    assert (
        f"{floor:.0e}".replace("e-0", "e-") == "8e-7"
        and min(mean(one, "delta")[0] for one in calm) > 7000 * floor
    )
