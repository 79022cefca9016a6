"""docs/evidence.md and the pages of research/: the numbers in their words are those of the kept
metrics.
"""

import json
import math
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import fisher_exact, nct
from scipy.stats import t as student_t

from dcmdp_jax.algorithm.corrections import CORRECTIONS
from dcmdp_jax.algorithm.losses import LOSSES
from dcmdp_jax.algorithm.penalties import PENALTIES
from dcmdp_jax.algorithm.trust_regions import TRUST_REGIONS
from dcmdp_jax.evaluation.estimators import t_half_width, t_quantile
from research import doses, paper_regime
from research.ascents import ascents, fixed
from research.dose_tables import (
    holm,
    measure_doses,
    oracle_panels,
    p_values,
    rank_correlation,
    t_p_value,
)
from research.long_tables import (
    RESPONSES,
    claims,
    claims_of_all,
    comparison,
    countdown,
    differences,
    ended,
    lost,
    parted,
    penalty_warnings,
    pooled,
    read,
    regimes,
    yardstick,
)
from research.oracle.gradients import Moments, quality
from research.oracle.page import draw_oracle
from research.oracle.table import KEPT, recomputed, without_sizes
from research.penalty_in_a_real_model import ENGINES, MEANS
from research.studies.results import held_out, read_kept_metrics, tables

_ROOT = Path(__file__).resolve().parents[2]
_KEPT = _ROOT / "research" / "kept"
_PAGE = _ROOT / "docs" / "evidence.md"
_APPENDIX = _ROOT / "research" / "appendix.md"
_MAP = (
    "2bits",
    "3bits",
    "rate4e-4",
    "rate1e-3",
    "four_updates",
    "128steps",
    "400steps",
    "200tokens",
)
"""Settings of configs/studies/mismatch_map.py that were run."""
_OTHER_COUNTS = {
    "200tokens": dict.fromkeys(("grpo", "grpo_perturbed", "exact"), 10),
    "400steps": {"grpo_perturbed": 3},
    "vllm": dict.fromkeys(("grpo", "grpo_perturbed", "reward_100"), 20),
}
"""Arms with another number of seeds than the others of their study."""


def _seeds(study, arm, count=5):
    return list(range(_OTHER_COUNTS.get(study, {}).get(arm, count)))


@pytest.mark.parametrize(
    ("name", "argument", "arms", "steps"),
    [("embedded", "", 9, 80), ("int4", "int4", 6, 80), ("vllm", "vllm", 7, 32)],
)
def test_the_tables_are_those_of_the_kept_metrics(name, argument, arms, steps):
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "evidence.py"))["get_study"](
        argument
    )
    runs = read_kept_metrics(_KEPT / f"{name}.jsonl.gz", list(study.arms))
    assert len(runs) == arms and all(sorted(seeds) == [0, 1, 2, 3, 4] for seeds in runs.values())
    for seeds in runs.values():
        for series in seeds.values():
            assert series["reward/mean"][0].tolist() == list(range(1, steps + 1))


@pytest.mark.parametrize(
    ("name", "study", "seeds"),
    [
        ("methods", "methods", 5),
        ("dual_learning_rate", "ablation_dual_learning_rate", 3),
        ("multiplier", "ablation_multiplier", 3),
        ("tolerance", "ablation_tolerance", 3),
    ],
)
def test_the_tables_without_strain_are_those_of_the_kept_metrics(name, study, seeds):
    made = runpy.run_path(str(_ROOT / "configs" / "studies" / f"{study}.py"))["get_study"]("")
    runs = read_kept_metrics(_KEPT / f"{name}.jsonl.gz", list(made.arms))
    assert list(runs) == list(made.arms) and all(
        sorted(each) == list(range(seeds)) for each in runs.values()
    )


def test_dose_and_response_is_that_of_the_kept_metrics():
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "dose_response.py"))["get_study"]("")
    runs = read_kept_metrics(_KEPT / "dose_response.jsonl.gz", list(study.arms))
    page = _APPENDIX.read_text()
    # What the text says with an interval is a difference of these runs.
    present = {arm: seeds for arm, seeds in runs.items() if seeds}
    found = [
        arm[1] for arms in measure_doses(present, study.baseline).values() for arm in arms.values()
    ]
    others = ("dose_response_one", "dose_response_one_state", "dose_response_vllm")
    for name in (*others, *(f"map_{setting}" for setting in _MAP)):
        kept = read_kept_metrics(_KEPT / f"{name}.jsonl.gz", None)
        found += [arm[1] for arms in measure_doses(kept, "grpo").values() for arm in arms.values()]
    planted = runpy.run_path(str(_ROOT / "examples" / "planted" / "planted.py"))["get_study"]("")
    kept = read_kept_metrics(_KEPT / "planted.jsonl.gz", list(planted.arms))
    known = set(
        re.findall(r"[+-][\d.e-]+ ± [\d.e-]*\d", tables(planted.title, kept, planted.baseline, []))
    )
    known |= {f"{each.mean:+.2g} ± {each.half_width:.2g}" for each in found}
    said = re.findall(r"[+-][\d.e-]+ ± [\d.e-]*\d", page[: page.index("## The old experiment")])
    assert len(said) >= 15 and set(said) <= known, set(said) - known
    assert len(runs) == 21 and all(sorted(seeds) == list(range(10)) for seeds in runs.values())
    for seeds in runs.values():
        for series in seeds.values():
            assert series["reward/mean"][0].tolist() == list(range(1, 33))


def _kept(name):
    return read_kept_metrics(_KEPT / f"{name}.jsonl.gz", None)


def test_where_the_papers_constants_would_move_lambda_is_as_the_page_says():
    studies = (
        "map_200tokens",
        "dose_response",
        "dose_response_vllm",
        "map_400steps",
        "map_128steps",
        "map_3bits",
    )
    ends = []
    for name in (*studies, "map_rate1e-3", "map_2bits"):
        last = []
        for series in _kept(name)["grpo"].values():
            multiplier = 0.1
            for delta in series["discrepancy/mean"][1]:
                multiplier = min(max(multiplier + 1.0 * (delta - 0.0037), 0.0), 1.0)
            last.append(multiplier)
        ends.append(f"{np.mean(last):.2g}" if np.mean(last) < 1 else "1.00")
    assert f"| lambda at the end | {' | '.join(ends)} |" in _APPENDIX.read_text()
    assert (ends[0], ends[5]) == ("0.027", "0.39")
    # And at which lambdas penalties were trained: from 1 up, two runs of 0.1 apart.
    studies = (
        "dose_response",
        "dose_response_one",
        "dose_response_one_state",
        "dose_response_vllm",
    )
    tried = [
        (name, arm, round(float(series["dual/multiplier"][1][0]), 6))
        for name in (*studies, "dose_response_wide", *(f"map_{setting}" for setting in _MAP))
        for arm, seeds in _kept(name).items()
        if not arm.startswith("ascent")
        for series in seeds.values()
    ]
    assert [one for one in tried if 0 < one[2] < 1] == 2 * [
        ("dose_response_wide", "token_0.1", 0.1)
    ]
    assert max(value for *_, value in tried) == 1000


def test_the_intervals_that_the_page_leaves_open_and_its_p_values_are_those_of_the_runs():
    page = _APPENDIX.read_text()
    found = {
        name: measure_doses(_kept(name), "grpo") for name in ("dose_response", "dose_response_vllm")
    }
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \((\d+)\) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for arm, int4, vllm, runs in rows:
        for said, of_study in zip((int4, vllm), found.values(), strict=True):
            own = of_study["discrepancy"]["grpo"][0].mean
            paired = of_study["discrepancy"][arm][1]
            low, high = (100 * (paired.mean + sign * paired.half_width) / own for sign in (-1, 1))
            assert said == f"{low:+.1f} to {high:+.1f}", arm
        assert len(found["dose_response_vllm"]["discrepancy"][arm][1].values) == int(runs)
        assert float(int4.split()[0]) > -10
    for study, response, arm, p in (
        ("dose_response", "reward", "token_10", 0.0008),
        ("dose_response_vllm", "reward", "token_10", 0.0007),
        ("dose_response", "discrepancy", "token_1000", 0.001),
    ):
        values = p_values(found[study], ("grpo", "grpo_perturbed"))
        assert float(f"{values[response, arm]:.1g}") == p and (response, arm) not in holm(values)
        assert f"p {p:g}, not by Holm" in " ".join(page.split())
    long = p_values(measure_doses(_kept("map_200tokens"), "grpo"), ("grpo", "grpo_perturbed"))
    assert (
        f"(p {long['reward', 'token_1']:.0e})" in page
        and f"p {long['reward', 'exact']:.1g})" in page
    )
    planted = _kept("planted")
    for arm, times, p in (("state_3", 5.35, 0.005), ("sequence_3", 3.4, 0.002)):
        late = [
            np.array([planted[name][seed]["discrepancy/mean"][1][-10:].mean() for seed in range(5)])
            for name in (arm, "grpo")
        ]
        change = late[0] - late[1]
        assert late[0].mean() / late[1].mean() == pytest.approx(times, abs=0.02)
        assert t_p_value(5, change.mean() / t_half_width(list(change))) == pytest.approx(
            p, abs=5e-4
        )
        assert f"{times:g} times" in page and f"(p {p:g})" in page


def test_the_rule_of_two_half_widths_is_the_p_that_the_page_says_and_has_the_power():
    page = " ".join(_APPENDIX.read_text().split())
    found = [f"{t_p_value(count, 2.0):.2g}" for count in (5, 10, 20)]
    assert "The rule is p = {} for five runs, {} for ten, {} for twenty.".format(*found) in page
    for count in (5, 10, 20):
        # An effect of 2.5 expected half widths: the t statistic has this noncentrality.
        threshold = 2 * t_quantile(count)
        assert nct.sf(threshold, count - 1, 2.5 * t_quantile(count)) == pytest.approx(0.8, abs=0.03)


def test_between_runs_of_a_penalty_delta_goes_with_the_entropy():
    slopes = []
    for study in ("dose_response", "dose_response_vllm"):
        for arm in ("token_10", "token_100"):
            seeds = _kept(study)[arm].values()
            delta, entropy = (
                [np.log(series[name][1][16:].mean()) for series in seeds]
                for name in ("discrepancy/mean", "policy/entropy")
            )
            slopes.append(np.polyfit(entropy, delta, 1)[0])
    assert (round(min(slopes), 1), round(max(slopes), 1)) == (0.9, 2.1)


@pytest.mark.parametrize(("argument", "arms", "seeds"), [("vllm", 22, 5), ("one", 14, 10)])
def test_other_doses_are_those_of_the_kept_metrics(argument, arms, seeds):
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "dose_response.py"))["get_study"](
        argument
    )
    runs = read_kept_metrics(_KEPT / f"dose_response_{argument}.jsonl.gz", list(study.arms))
    runs = {arm: each for arm, each in runs.items() if each}
    assert len(runs) == arms
    assert all(sorted(each) == _seeds(argument, arm, seeds) for arm, each in runs.items())


def test_dual_ascent_against_vllm_and_its_runs_on_another_processor_are_those_of_the_kept_metrics():
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "dose_response.py"))["get_study"](
        "vllm"
    )
    for name, arms in (("vllm", 22), ("vllm_xeon", 5)):
        runs = read_kept_metrics(_KEPT / f"dose_response_{name}.jsonl.gz", list(study.arms))
        runs = {arm: each for arm, each in runs.items() if each}
        assert len(runs) == arms
    # What the text says of each run: 15 of 20 have less, the first five all.
    kept = read_kept_metrics(_KEPT / "dose_response_vllm.jsonl.gz", None)
    late = [
        [kept[arm][s]["discrepancy/mean"][1][16:].mean() for s in range(20)]
        for arm in ("grpo", "reward_100")
    ]
    less = [penalized < plain for plain, penalized in zip(*late, strict=True)]
    assert sum(less) == 15 and all(less[:5])


def test_long_completions_end_as_the_page_says():
    runs = read_kept_metrics(_KEPT / "map_200tokens.jsonl.gz", None)
    late = {
        arm: [each[seed]["reward/mean"][1][16:].mean() for seed in sorted(each)]
        for arm, each in runs.items()
    }
    assert all(exact > plain for exact, plain in zip(late["exact"], late["grpo"], strict=True))
    ended = {
        arm: sum(each[seed]["reward/mean"][1][-4:].mean() < 0.06 for seed in each)
        for arm, each in runs.items()
    }
    fall = {"token_1": 5, "token_10": 5, "reward_1": 4, "reward_10": 2, "reward_100": 3}
    assert ended == {arm: fall.get(arm, 0) for arm in runs}
    begun = [int(np.argmax(each["reward/mean"][1] < 0.1)) + 1 for each in runs["token_1"].values()]
    assert (min(begun), max(begun)) == (5, 9)


def test_the_one_sided_state_is_that_of_the_kept_metrics():
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "dose_response.py"))["get_study"](
        "one"
    )
    runs = read_kept_metrics(_KEPT / "dose_response_one_state.jsonl.gz", list(study.arms))
    runs = {arm: each for arm, each in runs.items() if each}
    assert list(runs) == [
        "grpo",
        "grpo_perturbed",
        *(f"state_one_{strength}" for strength in (1, 10, 100, 1000)),
    ]
    assert all(sorted(each) == list(range(10)) for each in runs.values())


@pytest.mark.parametrize("setting", _MAP)
def test_the_map_is_that_of_the_kept_metrics(setting):
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "mismatch_map.py"))["get_study"](
        setting
    )
    runs = read_kept_metrics(_KEPT / f"map_{setting}.jsonl.gz", list(study.arms))
    runs = {arm: each for arm, each in runs.items() if each}
    assert all(sorted(seeds) == _seeds(setting, arm) for arm, seeds in runs.items())
    # The control's own delta is that of products of different shapes, far below the engine's.
    control, engine = (runs[arm][0]["discrepancy/mean"][1].mean() for arm in ("exact", "grpo"))
    assert control < 1e-5 < 1e-3 < engine


def test_the_planted_way_out_is_that_of_the_kept_metrics():
    study = runpy.run_path(str(_ROOT / "examples" / "planted" / "planted.py"))["get_study"]("")
    runs = read_kept_metrics(_KEPT / "planted.jsonl.gz", list(study.arms))
    assert list(runs) == list(study.arms) and all(
        sorted(seeds) == [0, 1, 2, 3, 4] for seeds in runs.values()
    )
    # Yes or no, in every run: the last tenth is at the reward of the clean way or at that of the
    # noisy one.
    goes = {"sequence_30", "reward_3", "reward_30", "reward_undivided_3", "reward_undivided_30"}
    for arm, seeds in runs.items():
        for series in seeds.values():
            last = series["reward/mean"][1][-10:].mean()
            assert last < 0.91 if arm in goes else last > 0.97


def test_the_figure_of_the_oracle_marks_a_gradient_of_zero():
    panels = oracle_panels(_KEPT / "oracle.json")
    assert all(len(points) == 17 for points in panels.values())
    figure = draw_oracle("", panels)
    assert len(figure.axes) == 2 * len(panels)
    assert all(
        [1.0, 1.0] in [list(line.get_xdata()) for line in axes.lines] for axes in figure.axes
    )
    for points in panels.values():
        assert all(error <= 1 for error, *_ in points.values()) and list(points)[0] in (
            "no remedy",
            "token_one_10",
        )


def test_the_order_of_the_oracle_is_that_of_the_kept_numbers_and_lambda_alone_does_as_well():
    runs = {arm: seeds for arm, seeds in _kept("dose_response").items() if seeds}
    path = _KEPT / "oracle.json"
    (oracle,) = json.loads(path.read_text())
    errors = {
        "grpo" if one["name"] == "no remedy" else one["name"]: one["quality"]["error"]
        for one in oracle["remedies"]
    }
    strengths = {
        arm: float(arm.rpartition("_")[2]) if arm != "grpo" else 0.0
        for arm in errors
        if arm in runs
    }
    few = {arm: errors[arm] for arm, strength in strengths.items() if strength <= 10}
    found = measure_doses(runs, "grpo")
    said = []
    for name in ("reward", "discrepancy", "held_out"):
        ends = {arm: own.mean for arm, (own, _) in found[name].items()}
        said.append(
            (round(rank_correlation(strengths, ends), 2), round(rank_correlation(few, ends), 2))
        )
    assert len(few) == 7 and said == [(-0.87, -0.86), (0.88, 0.93), (-0.81, -0.54)]


def test_the_remedies_at_three_policies_are_those_of_the_kept_numbers():
    oracles = json.loads((_KEPT / "remedies.json").read_text())
    errors = {
        (oracle["engine"], oracle["model"]): {
            without_sizes(one["name"]): recomputed(one["quality"])[0] for one in oracle["remedies"]
        }
        for oracle in oracles
    }
    for engine in ("local:int4", "vllm:bfloat16,cache=fp8"):
        for step in (20, 40):
            found = errors[engine, f"oracle step {step}"]
            # What the text says: filters of whole completions before none, filters of tokens after
            # it.
            whole = (
                "kl_rejection(estimator=k1,over=mean)",
                "kl_rejection(estimator=k2,over=sum)",
                "sequence_rejection",
            )
            single = (
                *(f"kl_rejection(estimator={k},over=token)" for k in ("k1", "k2")),
                "geometric_rejection",
            )
            assert max(found[name] for name in whole) < found["no remedy"]
            assert min(found[name] for name in single) > found["no remedy"]
    assert all(not error > 1 for found in errors.values() for error in found.values())


def test_every_remedy_on_the_demos_policy_is_that_of_the_kept_numbers():
    (kept,) = json.loads(KEPT.read_text())
    for one in kept["remedies"]:
        found = quality(
            Moments(**one["moments"])
        )  # the figures from the moments, kept to five digits
        assert found.error == pytest.approx(one["quality"]["error"], abs=2e-3), one["name"]
    names = {one["name"].split("(")[0].split(",")[0] for one in kept["remedies"]}
    assert names == {"no remedy", *PENALTIES, *CORRECTIONS, *TRUST_REGIONS, *LOSSES} - {
        "grpo",
        "surrogate",
        "likelihood",
    }


def test_the_runs_that_were_tried_first_are_on_the_page():
    runs = read_kept_metrics(_KEPT / "dose_response_wide.jsonl.gz", None)
    assert sum(len(seeds) for seeds in runs.values()) == 25


def _cells(table):
    """(arm, column) -> cell of a table of Markdown."""
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()]
    return {(row[0], column): cell for row in rows for column, cell in zip(head, row, strict=True)}


def _lag(argument, name, arms):
    """Cells of the study's means, and of its differences to GRPO without a lag."""
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "lag.py"))["get_study"](argument)
    runs = read_kept_metrics(_KEPT / f"{name}.jsonl.gz", list(study.arms))
    runs = {arm: seeds for arm, seeds in runs.items() if seeds}
    assert len(runs) == arms and all(sorted(seeds) == list(range(5)) for seeds in runs.values())
    return map(_cells, tables(study.title, runs, study.baseline, []).strip().split("\n\n")[2::2])


def test_the_figures_of_runs_with_a_lag_are_on_their_page():
    page = " ".join((_ROOT / "docs" / "overlap.md").read_text().split())
    means, changes = _lag("", "lag", 12)
    columns = (
        "staleness, last tenth, nats",
        "mismatch, last tenth, nats",
        "discrepancy, last tenth",
    )
    for lag in (0, 1, 2, 4):
        arm = f"lag{lag}_grpo"
        change = changes[arm, "reward, last tenth"] if lag else "-"
        assert (
            " | ".join([f"| {lag}", *(means[arm, column] for column in columns), f"{change} |"])
            in page
        )
    held_out = changes["lag1_grpo", "held-out avg@K, %"]
    assert (
        f"GRPO's validation score at `lag=1` is {held_out.removeprefix('+')} points above `lag=0`"
        in page
    )
    _, changes = _lag("corrections", "lag_corrections", 10)
    found = [
        changes[f"lag{lag}_{arm}", "reward, last tenth"]
        for arm in ("icepop", "tis")
        for lag in (0, 4)
    ]
    assert (
        "IcePop's reward differs by {} at `lag=0` and {} at `lag=4`, TIS's by {} and {}.".format(
            *found
        )
        in page
    )


def test_the_tables_of_long_completions_are_those_of_the_kept_metrics():
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "long_completions.py"))["get_study"](
        ""
    )
    runs = read_kept_metrics(_KEPT / "long_completions.jsonl.gz", None)
    assert set(runs) <= set(study.arms)
    page = (_ROOT / "research" / "long.md").read_text()
    for series in (series for seeds in runs.values() for series in seeds.values()):
        assert series["reward/mean"][0].tolist() == list(range(1, 33))
    over = {arm: len(seeds) for arm, seeds in ended(runs).items()}
    found = differences(runs)
    told = {
        "token_0.03": 0,
        "token_0.1": 1,
        "centered": 0,
        "token_0.3": 2,
        "token_1": 4,
        "dc_grpo_eta50": 1,
        "grpo": 0,
        "exact": 0,
    }
    told |= {
        "trainer_above_1": 0,
        "engine_above_1": 4,
        "signed_1": 4,
        "token_1_tis": 1,
        "rare_1": 4,
        "not_rare_1": 5,
    }
    told |= {
        "log": 3,
        "ratio": 2,
        "logit": 0,
        "state_tv_1": 0,
        "tis": 0,
        "tis_centered": 1,
        "ascent_0.9": 2,
        "ascent_logit_p95": 0,
    }
    assert {arm: over[arm] for arm in told} == told
    for arm in ("ascent_0.9", "ascent_1.25"):
        assert over[arm] == 2 and all(
            runs[arm][seed]["dual/multiplier"][1][-1] == 1 for seed in ended(runs)[arm]
        )
    last = sorted(
        float(series["dual/multiplier"][1][-1]) for series in runs["dc_grpo_eta50"].values()
    )
    assert last == [0] * 9 + [1]
    assert f"p = {fisher_exact([[5, 0], [0, 5]]).pvalue:.3f} by Fisher's" in page
    assert {arm for heading, arm in claims(runs)[1] if "held-out" in heading} == {
        "token_1",
        "not_rare_1",
    }
    said = "in {in_time} of {ended} runs that collapse, and in {warned} of {lived} others"
    assert said.format(**penalty_warnings(runs)) in page
    norms = json.loads((_KEPT / "penalty_gradients.json").read_text())
    ratio = {
        arm: [row["penalty"] / row["advantage"] for row in rows if row["advantage"]]
        for arm, rows in norms.items()
    }
    assert [round(ratio["token_1"][0], 2), round(max(ratio["token_1"]))] == [0.77, 21]
    assert norms["token_1"][ratio["token_1"].index(max(ratio["token_1"]))]["step"] == 4
    assert round(max(ratio["trainer_above_1"]), 1) == 0.2
    share = runs["token_1"][4]["dual/penalty_share"][1]
    assert f"{100 * share[0]:.0f}% and {100 * share[3]:.0f}% in these two steps" in page
    exact = [found[f"held-out, {engine} engine, %", "exact"] for engine in ("exact", "own")]
    for each in exact:
        assert f"{each.mean:+.1f} ± {each.half_width:.1f}" in page


def test_the_published_models_tables_are_those_of_the_kept_metrics():
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "smollm2.py"))["get_study"]("")
    runs = read_kept_metrics(_KEPT / "smollm2.jsonl.gz", None)
    assert set(runs) == set(study.arms)
    page = (_ROOT / "research" / "real.md").read_text()
    for series in (series for seeds in runs.values() for series in seeds.values()):
        assert series["reward/mean"][0].tolist() == list(range(1, 9))
    exactly = "held-out, exact engine, %"
    own = "held-out, own engine, %"
    found, (p, held) = differences(runs), claims(runs)
    told = [found[exactly, arm] for arm in ("exact", "tis", "tis_centered")] + [found[own, "exact"]]
    assert all(f"{each.mean:+.1f} ± {each.half_width:.1f}" in page for each in told)
    assert f"p {p[exactly, 'exact']:.2g}, not by Holm" in page
    begun = [series["eval/arithmetic/avg@4"][1][0] for series in runs["exact"].values()]
    for arm in ("dc_grpo", "ascent_logit"):
        assert (
            max(series["evaluation/arithmetic/avg@4"][1][-1] for series in runs[arm].values())
            < 0.02
            < min(begun)
        )
    plain = [series["evaluation/arithmetic/avg@4"][1][-1] for series in runs["grpo"].values()]
    assert len(plain) == len(runs["dc_grpo"]) == 5 and min(plain) > 0.14
    assert f"p = {fisher_exact([[5, 0], [0, 5]]).pvalue:.3f} by Fisher's" in page
    assert held == {(own, "exact"), (own, "ascent_logit")}
    assert (
        max(np.argmax(series["dual/multiplier"][1] >= 1) for series in runs["dc_grpo"].values()) < 5
    )


def test_the_tables_of_regimes_are_those_of_the_kept_metrics():
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "long_completions.py"))["get_study"](
        "regimes"
    )
    folder = _KEPT
    long, kept = (read(folder / f"{name}.jsonl.gz") for name in ("long_completions", "regimes"))
    assert set(kept) <= set(study.arms)
    page = " ".join((_ROOT / "research" / "regimes.md").read_text().split())
    int3 = parted(kept, "int3", long["exact"])
    updates = parted(kept, "four_updates", kept["four_updates_exact"])
    for arms, names in (
        (int3, ("exact", "tis", "icepop", "tis_centered")),
        (updates, ("centered", "tis", "grpo_shaken")),
    ):
        told = differences(arms)
        for each in (told["held-out, exact engine, %", name] for name in names):
            assert f"{each.mean:+.0f} ± {each.half_width:.0f}" in page
    (least, most), (worst, best) = (
        [round(bound(_exactly(runs))) for bound in (min, max)]
        for runs in (int3["grpo"], int3["exact"])
    )
    assert (
        f"between {least} and {most}%, a zero-mismatch engine between {worst} and {best}%" in page
        and most < worst
    )
    over = ended(int3)
    assert (len(over["dc_grpo_eta50"]), len(over["token_0.03"]), len(int3["dc_grpo_eta50"])) == (
        5,
        1,
        5,
    )
    assert max(_exactly(int3["dc_grpo_eta50"])) < 0.4 and all(
        series["dual/multiplier"][1][-1] == 1 for series in int3["dc_grpo_eta50"].values()
    )
    p, held = claims(int3)
    exactly = sorted(
        p[heading, arm] for heading, arm in p if "exact engine" in heading and arm != "exact"
    )
    assert exactly[2] == p["held-out, exact engine, %", "centered"]
    assert (
        f"p {exactly[2]:.3f}, {exactly[2] * (len(exactly) - 2):.3f} by Holm over the variants"
        in page
    )
    assert {("reward", arm) for arm in ("tis", "icepop", "dc_grpo_eta50")} <= held
    assert ("reward", "tis_centered") not in held  # it held before one more arm was counted
    assert ("held-out, exact engine, %", "centered") not in held
    told = differences(int3)
    fallen = (-told["reward", arm].mean for arm in ("tis", "icepop", "tis_centered"))
    assert "lower the reward by {:.2f}, {:.2f} and {:.2f}".format(*fallen) in page
    for name in ("own", "exact"):
        each = told[f"held-out, {name} engine, %", "matched"]
        assert f"({each.mean:+.0f} ± {each.half_width:.0f}" in page
    repaired = [round(bound(_exactly(int3["centered"]))) for bound in (min, max)]
    assert (
        "{} to {}% where GRPO has {} to {}%".format(*repaired, least, most) in page
        and not over["centered"]
    )
    ends = ended(long)
    told = {
        "dc_grpo_eta50": (1, 10),
        "token_0.03": (0, 10),
        "token_0.1": (1, 10),
        "token_0.3": (2, 5),
    }
    assert {arm: (len(ends[arm]), len(long[arm])) for arm in told} == told
    for arms, name, said in (
        (int3, "centered", "score centering +22.8 (10.3 to 35.2, p 0.0011)"),
        (int3, "exact", "a zero-mismatch engine +35.9 (24.0 to 47.9)"),
        (updates, "exact", "with four updates a zero-mismatch engine +32.8 (20.3 to 45.3)"),
    ):
        mean, half, p_of = pooled(arms, "held-out, exact engine, %", name)
        assert said in page and f"{mean:+.1f} ({mean - half:.1f} to {mean + half:.1f}" in said, name
        assert name != "centered" or f"{p_of:.2g}" == "0.0011"
    pairs = [_exactly({s: int3[arm][s] for s in range(10)}) for arm in ("grpo", "centered")]
    assert f"(correlation {np.corrcoef(pairs)[0, 1]:.2f} between" in page


def test_the_first_page_is_that_of_the_kept_metrics():
    page, readme = (" ".join(path.read_text().split()) for path in (_PAGE, _ROOT / "README.md"))
    text = _PAGE.read_text()
    assert ascents().strip() in text and fixed().strip() in text
    long, kept = (read(_KEPT / f"{name}.jsonl.gz") for name in ("long_completions", "regimes"))
    exactly = paper_regime.EXACTLY
    gains = {
        name: differences(runs)[exactly, "exact"] for name, runs in regimes(long, kept).items()
    }
    small = read(_KEPT / "smollm2.jsonl.gz")
    gains["smollm2"] = differences(small)[exactly, "exact"]
    plain = {
        "int4": long,
        "int3": {"grpo": kept["int3"]},
        "fp8_cache": {"grpo": kept["fp8_cache"]},
        "smollm2": small,
    }
    rows = re.findall(r"^\| (.+) \| (\d+) \| ([\d.]+) \| (\S+ ± \S+) \|$", text, re.MULTILINE)
    assert len(rows) == len(plain)
    for name, (_, runs, grpo, paired) in zip(plain, rows, strict=True):
        gain = gains[name]
        assert len(gain.values) == int(runs), name
        digits = 0 if gain.half_width > 10 else 1
        assert paired == f"{gain.mean:+.{digits}f} ± {gain.half_width:.{digits}f}", name
        assert f"{np.mean(_exactly(plain[name]['grpo'])):.1f}" == grpo, name
    cost = f"{gains['int3'].mean:.0f} ± {gains['int3'].half_width:.0f} points with 3-bit weights"
    assert f"no loss seen with an FP8 cache; {cost}" in readme
    cache = gains["fp8_cache"]
    assert cache.mean - cache.half_width < 0 < cache.mean + cache.half_width
    over = ended(long)
    assert f"collapses {len(over['engine_above_1'])} of {len(long['engine_above_1'])} runs" in page
    assert not over["trainer_above_1"]
    assert len(text.split()) <= 1500


def _shares_in_time(runs):
    """The alarm by its own definition alone: the median of five shares above a tenth, of runs with
    a lambda.
    """
    bar = yardstick(runs)
    over = ended(runs)
    counts = {"in time": 0, "collapsed": 0, "warned": 0, "others": 0}
    for arm, seeds in runs.items():
        for seed, series in seeds.items():
            if series["dual/multiplier"][1].max() <= 0:
                continue
            share = series["dual/penalty_share"][1]
            loud = [
                step for step in range(5, len(share) + 1) if np.median(share[step - 5 : step]) > 0.1
            ]
            if seed not in over[arm]:
                counts["others"] += 1
                counts["warned"] += bool(loud)
                continue
            means = paper_regime.smoothed(series)
            # The step at which the first window is complete after which all are below the bar.
            last_above = np.flatnonzero(means >= bar)
            end = (last_above[-1] + 1 if len(last_above) else 0) + 4
            counts["collapsed"] += 1
            counts["in time"] += bool(loud) and loud[0] <= end
    return counts


def test_the_alarm_is_told_by_its_own_definition():
    page = " ".join(_PAGE.read_text().split())
    long, late = (read(_KEPT / f"{name}.jsonl.gz") for name in ("long_completions", "paper_regime"))
    chosen = (
        "in time in {in time} of {collapsed} runs that collapse, and in {warned} of {others} others"
    )
    assert chosen.format(**_shares_in_time(long)) in page
    fresh = _shares_in_time({arm: late[arm] for arm in ("grpo", "dc_grpo")})
    assert "in {in time} of {collapsed}, and in {warned} of {others}.".format(**fresh) in page


def unreported(page, intervals):
    """Arms of which a page gives one primary measure's interval and not the other's.

    Args:
        page: its text.
        intervals: arm -> "LOW to HIGH" by each measure, as gain and as cost.
    """
    missing = []
    for arm, by_measure in intervals.items():
        given = [
            any(f"({each}" in page or f", {each}" in page for each in texts) for texts in by_measure
        ]
        if any(given) and not all(given):
            missing.append(arm)
    return missing


def test_an_arm_with_one_of_two_measures_is_found():
    intervals = {"tis": [("4 to 34", "-34 to -4"), ("1 to 29", "-29 to -1")]}
    assert unreported("TIS +19 (4 to 34), held", intervals) == ["tis"]
    assert unreported("TIS costs -19 (-34 to -4)", intervals) == ["tis"]
    assert unreported("TIS +19 (4 to 34; own +15, 1 to 29)", intervals) == []
    assert unreported("nothing of it", intervals) == []


def test_each_claim_about_an_arm_of_late_collapse_is_given_for_both_primary_measures():
    runs = paper_regime.read_kept("paper_regime")
    intervals = {}
    for each in (runs, paper_regime.fresh(runs)):
        by_measure = [paper_regime.differences(each, heading) for heading in paper_regime.PRIMARY]
        for arm in by_measure[0]:
            intervals[arm, each is runs] = [
                (
                    f"{found[arm].low:.0f} to {found[arm].high:.0f}",
                    f"{-found[arm].high:.0f} to {-found[arm].low:.0f}",
                )
                for found in by_measure
            ]
    for path in (_PAGE, _ROOT / "README.md"):
        page = " ".join(path.read_text().split())
        assert unreported(page, intervals) == [], path.name
    # The rules' arms are all on the first page, by both.
    assert paper_regime.claims(runs).strip() in _PAGE.read_text()


def test_what_the_first_screens_say_of_the_papers_ascent_is_what_the_kept_runs_did():
    """Runs of eta 1 are SmolLM2's and Countdown's; delta in units of c = 0.0037 is GRPO's mean over
    all steps.
    """
    folder = _KEPT
    small, long = (read(folder / f"{name}.jsonl.gz") for name in ("smollm2", "long_completions"))
    found = countdown(read(folder / "countdown.jsonl.gz"))
    c = 0.0037

    def over(runs):
        return (
            np.mean([series["discrepancy/mean"][1].mean() for series in runs["grpo"].values()]) / c
        )

    times = [over(small), *(over(found[name]) for name in ("int4", "noise5", "stale64"))]
    assert [round(times[0]), *(round(each, 1) for each in times[1:3]), round(times[3])] == [
        83,
        1.5,
        1.6,
        10,
    ]
    (harmless,), (lost,) = (found[name]["dc_grpo"].values() for name in ("int4", "noise5"))
    assert round(float(harmless["dual/multiplier"][1].max()), 2) == 0.29
    assert abs(differences(found["int4"])["held-out, exact engine, %", "dc_grpo"].mean) < 1.5
    assert lost["evaluation/small_held_out/avg@8"][1][-1] == 0
    # Both runs of "one of ten" are one event: lambda 0.1 and eta 50 end learning with seed 4.
    assert ended(long)["token_0.1"] == ended(long)["dc_grpo_eta50"] == [4]
    ascent = long["dc_grpo_eta50"]
    assert all(series["dual/multiplier"][1][1] == 0 for series in ascent.values())
    assert (
        ascent[4]["dual/multiplier"][1][1:8].max() == 0 and ascent[4]["discrepancy/mean"][1][7] > c
    )
    assert round(fisher_exact([[1, 9], [0, 25]]).pvalue, 2) == 0.29
    # The same runs with the paper's eta, and what the alarm, whose threshold was chosen before
    # them, says of them.
    again = long["dc_grpo"]
    int3 = parted(read(folder / "regimes.jsonl.gz"), "int3", {})
    assert ended(long)["dc_grpo"] == [4] and len(again) == 10
    last = {seed: float(series["dual/multiplier"][1][-1]) for seed, series in again.items()}
    assert max(value for seed, value in last.items() if seed != 4) < 0.0195 and last[4] > 0.3
    assert max(_exactly(int3["dc_grpo"])) < 5 and len(int3["dc_grpo"]) == 5
    assert penalty_warnings({"grpo": long["grpo"], "dc_grpo": again}) == {
        "ended": 1,
        "in_time": 0,
        "lived": 9,
        "warned": 0,
    }
    page = " ".join(_PAGE.read_text().split())
    readme = " ".join((_ROOT / "README.md").read_text().split())
    collapsed = ended(long)
    said = f"at lambda 1, {len(collapsed['token_1'])} of {len(long['token_1'])} runs of 200 tokens"
    assert f"{said} collapsed; no harm seen at 0.03" in readme
    for arm in ("token_0.03", "grpo", "grpo_shaken"):
        assert not collapsed[arm], arm
    # Fisher's p of four tests: Holm's 0.3 is 3 x 0.023, 1 is 4 x 0.00018.
    p = [fisher_exact([[ends, 5 - ends], [0, 25]]).pvalue for ends in (2, 4)]
    assert f"1 harms ({4 * p[1]:.1g}), 0.3 likely does ({3 * p[0]:.2g})" in page
    # Rows whose c the paper would not choose; the late collapse's is 0.36 before a fall.
    above = re.findall(r"^\| [^|]+ \| 3.7 \| ([\d.]+) \| ([\d.]+) \|", ascents(), re.MULTILINE)
    assert (sum(float(times) >= 1.5 for times, _ in above), len(above)) == (5, 8)
    assert (
        "Five of the eight rows" in page
        and ("0.91", "0.36") in above
        and "0.36 c before a fall" in page
    )


def test_what_the_first_screens_say_of_late_collapse_is_what_the_kept_runs_did():
    """The rules are paper_regime.md's; an arm is compared with runs of its own seeds."""
    runs = read(_KEPT / "paper_regime.jsonl.gz")
    page = " ".join(_PAGE.read_text().split())
    readme = " ".join((_ROOT / "README.md").read_text().split())
    over = ended(runs)
    exact, own = (paper_regime.differences(runs, heading) for heading in paper_regime.PRIMARY)
    assert {len(runs[arm]) for arm in ("grpo", "grpo_shaken", "exact", "dc_grpo")} == {20}
    grpos = len(over["grpo"]) + len(over["grpo_shaken"])
    said = (
        f"{len(over['dc_grpo'])} of 20 runs of DC-GRPO, {grpos} of 40 of GRPO and its replicate, "
    )
    assert f"{said}{len(over['exact'])} of 20 with a zero-mismatch engine" in page
    ours = exact["dc_grpo"]
    assert (
        paper_regime.outcome(ours) == "open"
        and ours.low < -paper_regime.SMALLEST
        and ours.high < 17
    )
    exact_text, own_text = (
        f"{one['dc_grpo'].mean:+.0f} ({one['dc_grpo'].low:.0f} to {one['dc_grpo'].high:.0f})"
        for one in (exact, own)
    )
    assert f"not shown: {exact_text} by a zero-mismatch engine, {own_text} by its own |" in readme
    tens = ("dc_grpo_1.25", "token_0.1", "centered", "tis", "dc_grpo_centered")
    assert {arm for arm in tens if exact[arm].held} == {"token_0.1", "tis", "dc_grpo_centered"}
    assert {arm for arm in tens if own[arm].held} == set(tens)
    harmful = [-one[arm].mean for one in (exact, own) for arm in tens if arm != "tis"]
    assert f"larger doses cost {min(harmful):.0f} to {max(harmful):.0f} points" in page
    fresh = paper_regime.fresh(runs)
    texts = []
    for arm in ("exact", "dc_grpo"):
        one, other = (
            paper_regime.differences(fresh, heading)[arm] for heading in paper_regime.PRIMARY
        )
        said = f"{one.mean:+.0f} ({one.low:.0f} to {one.high:.0f}; own {other.mean:+.0f}, "
        texts.append(f"{said}{other.low:.0f} to {other.high:.0f})")
    assert "Fresh alone: a zero-mismatch engine {}, DC-GRPO {}.".format(*texts) in page
    # The prediction of paper_regime.md, from the open loop on GRPO's kept delta.
    halfway = [series["dual/multiplier"][1][31] for series in runs["dc_grpo"].values()]
    assert round(min(halfway), 3) == 0.019 and round(max(halfway), 2) == 0.20


def _both_engines(differences, arm):
    """An arm's difference by an exact engine and by its own, and * behind one that holds."""
    texts = []
    for heading in paper_regime.PRIMARY:
        difference = differences[arm, heading]
        points = difference.points
        mark = "*" if difference.holds else ""
        texts.append(f"{points.mean:+.0f} ± {points.half_width:.0f}{mark}")
    return texts


def test_what_the_pages_say_of_small_doses_is_what_the_kept_runs_did():
    runs = doses.read_complete(doses.COARSE)
    by_name = doses.differences(runs, doses.COARSE.margin)
    rules = (_ROOT / "research" / "doses.md").read_text()
    primary, _, _ = doses.text(runs, doses.COARSE.margin).partition("\n\n")
    assert primary in rules
    page, readme, rules = (
        " ".join(text.split())
        for text in (_PAGE.read_text(), (_ROOT / "README.md").read_text(), rules)
    )
    for before, arm in (
        ("lambda 0.001, the one such dose: ", "token_0.001"),
        ("On sums a trained model has that of 0.003, ", "token_0.003"),
        ("to 0.01, ", "token_0.01"),
        ("The dual ascent: ", "dc_own_c"),
        ("in {} seeds: ", "dc_from_0"),
        ("Score centering: ", "centered"),
    ):
        moved = sum(len(set(run["dual/multiplier"][1])) > 1 for run in runs[arm].values())
        exact, own = _both_engines(by_name, arm)
        assert f"{before.format(moved)}{exact} ({own})" in page, arm
    exact, own = _both_engines(by_name, "token_0.001")
    assert f"by more than 12 points: {exact}, by the engine that sampled {own} (40 seeds" in readme
    trained = [_both_engines(by_name, f"token_{dose}")[0] for dose in (0.003, 0.01)]
    link = "[open](docs/evidence.md#does-a-small-dose-help)"
    assert f"At that of a trained one it is {link}: {', '.join(trained)}. Where" in readme
    # What the rule says.
    conclusions = {arm: doses.conclusion(by_name, arm) for arm, _ in by_name}
    assert conclusions["token_0.001"] == conclusions["dc_from_0"] == "neither"
    assert conclusions["dc_own_c"] == "open" and conclusions["centered"] == "helps, open"
    assert sum("open" in conclusion for conclusion in conclusions.values()) == 6
    small = [by_name["token_0.001", heading].points for heading in paper_regime.PRIMARY]
    assert min(one.mean - one.half_width for one in small) > -8.4
    assert max(one.mean + one.half_width for one in small) < 10.5
    widest = max(small, key=lambda one: one.half_width)
    low, high = widest.mean - widest.half_width, widest.mean + widest.half_width
    assert f"widest interval {low:.0f} to {high:.0f}" in rules
    spreads = [np.std(list(one.points.values.values()), ddof=1) for one in by_name.values()]
    assert f"varied by {min(spreads):.0f} to {max(spreads):.0f} points between seeds" in rules
    collapsed = ended(runs)
    fallen = len(collapsed["grpo"]) + len(collapsed["grpo_shaken"])
    assert f"{fallen} of 80 runs of the baselines collapsed" in rules
    assert f"GRPO: {fallen} of 80 collapsed" in page


def test_what_the_pages_say_of_small_doses_in_late_collapse_is_what_the_kept_runs_did():
    runs = doses.read_complete(doses.LATE)
    by_name = doses.differences(runs, doses.LATE.margin)
    rules = (_ROOT / "research" / "doses.md").read_text()
    primary, _, _ = doses.text(runs, doses.LATE.margin).partition("\n\n")
    assert primary in rules
    page, readme = (" ".join(path.read_text().split()) for path in (_PAGE, _ROOT / "README.md"))
    for before, arm in (
        ("own engine in brackets): ", "dc_own_c"),
        ("From lambda 0: ", "dc_from_0"),
        ("At 0.003: ", "token_0.003"),
        ("At 0.01: ", "token_0.01"),
        ("TIS: ", "tis"),
    ):
        exact, own = _both_engines(by_name, arm)
        assert f"{before}{exact} ({own})" in page, arm
    exact, own = (by_name["dc_own_c", heading].points for heading in paper_regime.PRIMARY)
    assert (
        f"cost {-exact.mean:.0f} ± {exact.half_width:.0f} points, by the engine that sampled "
        f"{-own.mean:.0f} ± {own.half_width:.0f} ({len(runs['grpo'])} seeds" in readme
    )
    conclusions = {arm: doses.conclusion(by_name, arm) for arm, _ in by_name}
    assert conclusions == {
        "token_0.003": "open",
        "token_0.01": "open",
        "dc_own_c": "harms",
        "dc_from_0": "open, harms",
        "tis": "open",
    }
    collapsed = ended(runs)
    fallen = len(collapsed["grpo"]) + len(collapsed["grpo_shaken"])
    assert f"{len(collapsed['dc_own_c'])} of 16 collapsed, GRPO {fallen} of 32" in page
    spreads = [np.std(list(one.points.values.values()), ddof=1) for one in by_name.values()]
    said = f"varied by {min(spreads):.0f} to {max(spreads):.0f} points between seeds"
    assert said in " ".join(rules.split())


def _smallest_seen(spread, runs, others):
    """The difference that Welch's test finds in 80% of cases."""
    error = math.hypot(spread[0] / math.sqrt(runs), spread[1] / math.sqrt(others))
    shares = spread[0] ** 2 / runs, spread[1] ** 2 / others
    freedom = error**4 / (shares[0] ** 2 / (runs - 1) + shares[1] ** 2 / (others - 1))
    least = student_t.ppf(0.975, freedom)
    return next(d for d in np.arange(0, 100, 0.05) if nct.sf(least, freedom, d / error) >= 0.8)


def test_what_could_have_been_seen_is_what_the_spread_of_the_kept_runs_gives():
    long, late = (read(_KEPT / f"{name}.jsonl.gz") for name in ("long_completions", "paper_regime"))
    int3 = parted(read(_KEPT / "regimes.jsonl.gz"), "int3", {})
    calm, three, collapsing = (
        np.std(_exactly(runs["grpo"]) + _exactly(runs["grpo_shaken"]), ddof=1)
        for runs in (long, int3, late)
    )
    ours = np.std(_exactly(late["dc_grpo"]), ddof=1)
    seen = (
        _smallest_seen((calm, calm), 10, 25),
        _smallest_seen((ours, collapsing), 20, 40),
        _smallest_seen((three, three), 5, 15),
    )
    page, readme = (" ".join(path.read_text().split()) for path in (_PAGE, _ROOT / "README.md"))
    assert f"differ by {calm:.0f} to {collapsing:.0f} points" in page
    assert "A gain of the paper's size is too small to be seen in our runs." in readme
    assert min(seen) > 3.7
    said = (
        "Differences found in 8 of 10 tries: {:.0f} points (GRPO stable), {:.0f} (late collapse), "
        "{:.0f} (3-bit weights)"
    )
    assert said.format(*seen) in page, seen


def test_what_the_pages_say_is_harmless_is_what_the_kept_runs_did():
    page = " ".join(_PAGE.read_text().split())
    demo = read_kept_metrics(_KEPT / "methods.jsonl.gz", None)
    paired = {}
    for arm in ("dc_grpo", "dual_grpo"):
        ends = [
            [100 * held_out(demo[name][seed])[1][-1] for seed in range(5)] for name in (arm, "grpo")
        ]
        change = [ours - theirs for ours, theirs in zip(*ends, strict=True)]
        paired[arm] = f"{np.mean(change):.1f} ± {t_half_width(change):.1f}"
    assert (
        f"the demo's task ({paired['dc_grpo']} points, five seeds; at lambda 1 "
        f"{paired['dual_grpo']})" in page
    )
    short = measure_doses(
        {arm: runs for arm, runs in _kept("dose_response").items() if runs}, "grpo"
    )
    thirty = short["held_out"]["token_1"][1]
    assert (round(thirty.mean, 2), round(thirty.half_width), len(thirty.values)) == (0, 4, 10)
    calm = paper_regime.read_kept("paper_regime_calm")
    scores = [
        np.mean([RESPONSES[heading](run) for run in calm[arm].values()])
        for heading in paper_regime.PRIMARY
        for arm in ("completion_mean", "token_1")
    ]
    assert "({:.0f}%, the token's {:.0f}; own {:.0f} and {:.0f})".format(*scores) in page


def test_what_the_page_says_of_other_readings_is_what_the_kept_runs_did():
    """Five runs each: `paper_regime_readings` beside the main study's GRPO, `paper_regime_calm`
    beside its own.
    """
    page = " ".join((_ROOT / "research" / "paper_regime.md").read_text().split())
    late, calm = (paper_regime.read_kept(f"paper_regime_{name}") for name in ("readings", "calm"))
    ends = [{arm: len(seeds) for arm, seeds in ended(runs).items()} for runs in (late, calm)]
    arms = ("threshold", "less_batch_mean", "completion_mean", "charge_verl")
    texts = (
        "penalty above c alone",
        "less its batch's mean",
        "a completion's mean",
        "verl's defaults",
    )
    for arm, text in zip(arms, texts, strict=True):
        assert len(late[arm]) == len(calm[arm]) == 5
        assert f"{text} {ends[0][arm]} and {ends[1][arm]}" in page, arm
    assert len(calm["charge_centered"]) == 5
    said = (
        f"with score centering {ends[1]['charge_centered']} of the latter (the token's: "
        f"{ends[1]['token_1']})"
    )
    five = [[ends[1][arm], 5 - ends[1][arm]] for arm in ("charge_centered", "token_1")]
    assert said in page and round(fisher_exact(five).pvalue, 2) == 0.05  # the rule's difference
    found = paper_regime.differences(late, paper_regime.EXACTLY)
    assert {arm for arm in found if found[arm].held} == {"threshold"}


def test_what_the_first_screens_say_of_a_real_model_is_what_was_measured():
    """Geometric means over 16 batches of |penalty| / |advantages| at lambda 0.1, the mean over
    completions.
    """
    kept = json.loads((_KEPT / "penalty_in_a_real_model.json").read_text())
    assert {engine: len(batches) for engine, batches in kept.items()} == dict.fromkeys(ENGINES, 16)
    ratios = {}
    for engine, batches in kept.items():
        for mean in MEANS:
            each = [batch[f"{mean} penalty"] / batch[f"{mean} advantages"] for batch in batches]
            ratios[engine, mean] = 100 * math.exp(np.mean(np.log(each)))
    bf16, cache, int8 = (ratios[engine, MEANS[0]] for engine in ENGINES)
    page = " ".join(_PAGE.read_text().split())
    assert f"{bf16:.2g}% (vLLM's BF16), {cache:.2g}% (FP8 cache), {int8:.2g}% (INT8)" in page
    trained = _after_the_demo()
    assert (
        f"on its sums: {trained['bfloat16']:.2g}%, {trained['fp8_cache']:.2g}% and "
        f"{trained['int8']:.2g}% (INT8 before it: {trained['int8_untrained']:.2g}%)" in page
    )
    norms = json.loads((_KEPT / "penalty_gradients.json").read_text())["token_1"][0]
    toy = 100 * 0.1 * norms["penalty"] / norms["advantage"]
    assert (
        f"{toy:.0f}% of the advantages' in our policy's first step; in untrained SmolLM2-135M, "
        f"answering in sentences, {bf16:.2g}%" in page
    )
    assert f"{0.1 * toy / max(ratios.values()):.1f} to {0.1 * toy / bf16:.0f} there" in page
    assert f"{toy / max(trained.values()):.0f} to {toy / bf16:.0f} times smaller" in page


def _after_the_demo():
    """Geometric means of |penalty| / |advantages| in % at lambda 0.1, after `make demo-real`.

    A batch in which all groups have equal rewards has no advantages, and no ratio.
    """
    rows_by_engine = json.loads((_KEPT / "smollm2_penalty_gradients.json").read_text())
    batches = {"int8": 8, "int8_untrained": 8, "fp8_cache": 7, "bfloat16": 8}
    percent_by_engine = {}
    for engine, rows in rows_by_engine.items():
        assert [row["step"] for row in rows] == list(range(1, 9))
        ratios = [row["penalty"] / row["advantage"] for row in rows if row["advantage"]]
        assert len(ratios) == batches[engine]
        percent_by_engine[engine] = 100 * math.exp(np.mean(np.log(ratios)))
    return percent_by_engine


def test_the_doses_of_a_trained_model_are_those_of_two_arms():
    """A's pilots had lambda 0.01; a dose's ratio is proportional to lambda."""
    pilots = json.loads((_KEPT / "doses_pilot_gradients.json").read_text())
    ratios = [
        100 * row["penalty"] / row["advantage"]
        for rows in pilots.values()
        for row in rows
        if row["step"] in (1, 2, 4, 8, 16)
    ]
    trained = _after_the_demo()
    del trained["int8_untrained"]
    doses_inside = [
        dose
        for dose in (0.001, 0.003, 0.01, 0.03)
        if min(trained.values()) <= np.median(ratios) * dose / 0.01 <= max(trained.values())
    ]
    assert doses_inside == [0.003, 0.01]


def _exactly(runs):
    """Scores of runs by an exact engine, %."""
    return [100 * float(series["evaluation/arithmetic/avg@4"][1][-1]) for series in runs.values()]


def test_the_probe_names_no_false_defect_in_the_kept_recordings():
    *_, last = (_KEPT / "causes.txt").read_text().splitlines()
    assert last == "329 recordings, false defects 0 (0.0%)."
    assert (
        "329 recordings with known causes the recorded log-probs name no false defect"
        in (_ROOT / "docs/probe.md").read_text()
    )
    assert "**329 recordings, no false defect.**" in (_ROOT / "research" / "causes.md").read_text()


def test_what_countdowns_page_says_is_what_the_kept_runs_did():
    path = _KEPT / "countdown.jsonl.gz"
    page = (_ROOT / "research" / "countdown.md").read_text()
    found = countdown(read(path))
    assert len(found) == 4 and not any(claims_of_all(found).values())
    over = ended(found["stale64"])
    assert (len(over["grpo"]), len(over["centered"])) == (2, 2)
    stale = {
        arm: [
            round(100 * float(series["evaluation/small_held_out/avg@8"][1][-1]))
            for series in runs.values()
        ]
        for arm, runs in found["stale64"].items()
    }
    assert stale["dc_grpo"] == stale["dc_logit"] == [0, 0, 0]
    three = "{}, {} and {}%"
    for arm, said in (
        ("grpo", three),
        ("exact", three),
        ("centered", "({}, {}, {}%)"),
        ("tis_centered", "({}, {}, {}%)"),
    ):
        assert said.format(*stale[arm]) in page
    assert [
        sum(score > 20 for score in stale[arm]) for arm in ("tis", "icepop", "tis_centered")
    ] == [2, 2, 2]


def _of_long(rewards, **values):
    """32 steps: `rewards` in the first 28 and the last four, other numbers all along."""
    steps = np.arange(1, 33)
    series = {"reward/mean": (steps, np.repeat(rewards, (28, 4)))}
    names = ("discrepancy/mean", "displacement/abs_mean", "displacement/abs_p95", "policy/entropy")
    series |= {name: (steps, np.full(32, values.get(name.split("/")[1], 0.5))) for name in names}
    return series | {
        name: (np.array([32]), np.array([rewards[1]])) for name in ("eval/arithmetic/avg@4",)
    }


def test_the_table_of_long_completions_by_hand():
    """Late reward: (12 x 0.8 + 4 x r) / 16. GRPO's best step has a mean of 0.8: below 0.4 at the
    end a run has ended.

    By half of GRPO's of its own seed, 0.4 and 0.15, neither GRPO's second run nor the token's would
    have.
    """
    runs = {
        "grpo": {0: _of_long((0.8, 0.8)), 1: _of_long((0.8, 0.3))},
        "token": {0: _of_long((0.8, 0.41)), 1: _of_long((0.8, 0.19))},
    }
    assert yardstick(runs) == pytest.approx(0.4) and ended(runs) == {"grpo": [1], "token": [1]}
    first = (12 * 0.8 + 4 * 0.41) / 16 - 0.8
    second = (4 * 0.19 - 4 * 0.3) / 16
    mean, (plain, row) = (first + second) / 2, comparison(runs).splitlines()[2:]
    assert plain.startswith("| `grpo` | 2 | 1 |") and row.startswith("| `token` | 2 | 1 |")
    assert float(row.split("|")[4].split("±")[0]) == pytest.approx(mean, rel=5e-3)
    p, held = claims(runs)
    t = mean / (abs(first - second) / 2)
    assert (
        p["reward", "token"] == pytest.approx(1 - 2 / math.pi * math.atan(abs(t)), rel=1e-6)
        and not held
    )


def test_a_pooled_difference_by_hand():
    """60 and 80 against 40, 60 and 50 pooled: 70 - 50 = 20; variances 200 / 2 and 100 / 3."""

    def scored(*scores):
        at = np.array([32])
        return {
            s: _of_long((0.8, 0.8)) | {"evaluation/arithmetic/avg@4": (at, np.array([x]))}
            for s, x in enumerate(scores)
        }

    runs = {"grpo": scored(0.4, 0.6), "grpo_shaken": scored(0.5), "arm": scored(0.6, 0.8)}
    mean, half, p = pooled(runs, "held-out, exact engine, %", "arm")
    square = 100 + 100 / 3
    freedom = (100 + 100 / 3) ** 2 / (100**2 / 1 + (100 / 3) ** 2 / 2)
    assert mean == pytest.approx(20) and half == pytest.approx(
        student_t.ppf(0.975, freedom) * math.sqrt(square)
    )
    assert p == pytest.approx(2 * student_t.sf(20 / math.sqrt(square), freedom))


def test_the_losses_of_regimes_by_hand():
    """Exact less GRPO of each seed: 30 and 10 points against `int3`, their mean 20, half width t(1)
    x 10.
    """

    def scored(score):
        series = _of_long((0.8, 0.8))
        return series | {"evaluation/arithmetic/avg@4": (np.array([32]), np.array([score]))}

    long = {
        "grpo": {0: scored(0.7), 1: scored(0.9)},
        "exact": {s: scored(x) for s, x in enumerate((0.8, 0.9, 0.1))},
    }
    kept = {
        "int3": {0: scored(0.5), 1: scored(0.8)},
        "int3_tis": {0: scored(0.4)},
        "int3_shaken": {0: scored(0.5)},
    }
    found = regimes(long, kept)
    assert {name: sorted(runs["exact"]) for name, runs in found.items()} == {
        "int4": [0, 1, 2],
        "int3": [0, 1],
    }
    row = lost(found).splitlines()[3].split("|")
    assert (
        row[1:3] == [" `int3` ", " 2 "]
        and row[3].startswith(" 65 ")
        and row[4].startswith(" +20 ± 1.3e+02 ")
    )
    assert float(row[5]) == pytest.approx(1 - 2 / math.pi * math.atan(2), abs=0.005)
    arms = parted(kept, "int3", long["exact"])
    assert set(arms) == {"grpo", "tis", "grpo_shaken", "exact"} and 2 not in arms["exact"]


def test_what_holds_counts_the_differences_of_every_table():
    """Holm's first bar is 5% over the number of all tables' differences, not of one's."""
    shift = {0: 0.10, 1: 0.12, 2: 0.11}
    one = {
        "grpo": {s: _of_long((0.5, 0.5)) for s in shift},
        "arm": {s: _of_long((0.5 + x, 0.5 + x)) for s, x in shift.items()},
    }
    alone = claims(one)
    assert alone[1] and claims_of_all({"a": one})["a"] == alone[1]
    p = min(alone[0].values())
    many = {str(number): one for number in range(math.ceil(0.05 / p))}
    assert not any(claims_of_all(many).values())


def test_a_picture_is_of_one_thing():
    """A figure that takes another's name would take its place on the other's page."""
    said = {}
    for page in (
        _ROOT / "README.md",
        *(_ROOT / "docs").glob("*.md"),
        *(_ROOT / "research").glob("*.md"),
    ):
        for text, path in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            said.setdefault(Path(path).name, set()).add(text)
    assert {
        name for name, texts in said.items() if len(texts) > 1
    } == set() and "smollm2.png" in said


def test_k3_of_4_bits_with_one_scale_over_that_of_groups():
    table = (_ROOT / "research" / "tables" / "frozen.txt").read_text()
    k3 = {
        name: float(value)
        for name, value in re.findall(r"^\| `local:(\w+)` \| ([\d.e-]+) ± [\d.e-]+ \|", table, re.M)
    }
    said = (
        f"{k3['int4'] / k3['nvfp4']:.1f} times NVFP4's, {k3['int4'] / k3['mxfp4']:.1f} times "
        "MXFP4's"
    )
    assert f"k3 on fixed SmolLM2: {said}" in " ".join(_PAGE.read_text().split())
