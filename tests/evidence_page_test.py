"""docs/evidence.md: its tables are those of the metrics that are kept beside it."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.lab.studies.dose import ascent_table, dose_claims, dose_table, measure_doses
from dcmdp_jax.lab.studies.kept_metrics import read_kept_metrics
from dcmdp_jax.lab.studies.oracle_order import oracle_order, oracle_panels, rank_correlation
from dcmdp_jax.lab.studies.results import markdown, tables
from dcmdp_jax.observe.study_figures import draw_oracle

_ROOT = Path(__file__).resolve().parents[1]
_MAP = ("2bits", "3bits", "rate4e-4", "rate1e-3", "four_updates", "128steps", "400steps", "200tokens")
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
    ("name", "argument", "arms", "steps"), [("embedded", "", 9, 80), ("int4", "int4", 6, 80), ("vllm", "vllm", 7, 32)]
)
def test_the_tables_are_those_of_the_kept_metrics(name, argument, arms, steps):
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "evidence.py"))["get_study"](argument)
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / f"{name}.jsonl.gz", list(study.arms))
    assert len(runs) == arms and all(sorted(seeds) == [0, 1, 2, 3, 4] for seeds in runs.values())
    for seeds in runs.values():
        for series in seeds.values():
            assert series["reward/mean"][0].tolist() == list(range(1, steps + 1))
    page = (_ROOT / "docs" / "evidence.md").read_text()
    for block in tables(study.title, runs, study.baseline, []).split("\n\n"):
        if block.startswith("|"):
            assert block.strip() in page


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
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / f"{name}.jsonl.gz", list(made.arms))
    assert list(runs) == list(made.arms) and all(sorted(each) == list(range(seeds)) for each in runs.values())
    page = (_ROOT / "docs" / "evidence.md").read_text()
    for block in tables(made.title, runs, made.baseline, []).split("\n\n"):
        if block.startswith("|"):
            assert block.strip() in page


def test_dose_and_response_is_that_of_the_kept_metrics():
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "dose_response.py"))["get_study"]("")
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / "dose_response.jsonl.gz", list(study.arms))
    page = (_ROOT / "docs" / "evidence.md").read_text()
    assert dose_table(runs, study.baseline).strip() in page
    assert ascent_table(runs, study.baseline).strip() in page
    assert "\n".join(dose_claims(runs, study.baseline, study.control)) in page
    # What the text says with an interval is a difference of these runs.
    present = {arm: seeds for arm, seeds in runs.items() if seeds}
    found = [arm[1] for arms in measure_doses(present, study.baseline).values() for arm in arms.values()]
    others = ("dose_response_one", "dose_response_one_state", "dose_response_vllm")
    for name in (*others, *(f"map_{setting}" for setting in _MAP)):
        kept = read_kept_metrics(_ROOT / "docs" / "evidence" / f"{name}.jsonl.gz", None)
        found += [arm[1] for arms in measure_doses(kept, "grpo").values() for arm in arms.values()]
    planted = runpy.run_path(str(_ROOT / "examples" / "planted" / "planted.py"))["get_study"]("")
    kept = read_kept_metrics(_ROOT / "docs" / "evidence" / "planted.jsonl.gz", list(planted.arms))
    known = set(re.findall(r"[+-][\d.e-]+ ± [\d.e-]*\d", tables(planted.title, kept, planted.baseline, [])))
    known |= {f"{each.mean:+.2g} ± {each.half_width:.2g}" for each in found}
    said = re.findall(r"[+-][\d.e-]+ ± [\d.e-]*\d", page[: page.index("## A regime to measure in")])
    assert len(said) >= 10 and set(said) <= known
    assert len(runs) == 21 and all(sorted(seeds) == list(range(10)) for seeds in runs.values())
    for seeds in runs.values():
        for series in seeds.values():
            assert series["reward/mean"][0].tolist() == list(range(1, 33))


@pytest.mark.parametrize(("argument", "arms", "seeds"), [("vllm", 22, 5), ("one", 14, 10)])
def test_other_doses_are_those_of_the_kept_metrics(argument, arms, seeds):
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "dose_response.py"))["get_study"](argument)
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / f"dose_response_{argument}.jsonl.gz", list(study.arms))
    runs = {arm: each for arm, each in runs.items() if each}
    assert len(runs) == arms
    assert all(sorted(each) == _seeds(argument, arm, seeds) for arm, each in runs.items())
    page = (_ROOT / "docs" / "evidence.md").read_text()
    assert dose_table(runs, study.baseline).strip() in page
    assert "\n".join(dose_claims(runs, study.baseline, study.control)) in page


def test_dual_ascent_against_vllm_and_its_runs_on_another_processor_are_those_of_the_kept_metrics():
    page = (_ROOT / "docs" / "evidence.md").read_text()
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "dose_response.py"))["get_study"]("vllm")
    for name, table, arms in (("vllm", ascent_table, 22), ("vllm_xeon", dose_table, 5)):
        runs = read_kept_metrics(_ROOT / "docs" / "evidence" / f"dose_response_{name}.jsonl.gz", list(study.arms))
        runs = {arm: each for arm, each in runs.items() if each}
        assert len(runs) == arms and table(runs, study.baseline).strip() in page
    # What the text says of each run: 15 of 20 have less, the first five all.
    kept = read_kept_metrics(_ROOT / "docs" / "evidence" / "dose_response_vllm.jsonl.gz", None)
    late = [[kept[arm][s]["discrepancy/mean"][1][16:].mean() for s in range(20)] for arm in ("grpo", "reward_100")]
    less = [charged < plain for plain, charged in zip(*late, strict=True)]
    assert sum(less) == 15 and all(less[:5])


def test_long_completions_end_as_the_page_says():
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / "map_200tokens.jsonl.gz", None)
    late = {arm: [each[seed]["reward/mean"][1][16:].mean() for seed in sorted(each)] for arm, each in runs.items()}
    assert all(exact > plain for exact, plain in zip(late["exact"], late["grpo"], strict=True))
    ended = {arm: sum(each[seed]["reward/mean"][1][-4:].mean() < 0.06 for seed in each) for arm, each in runs.items()}
    fall = {"token_1": 5, "token_10": 5, "reward_1": 4, "reward_10": 2, "reward_100": 3}
    assert ended == {arm: fall.get(arm, 0) for arm in runs}
    begun = [int(np.argmax(each["reward/mean"][1] < 0.1)) + 1 for each in runs["token_1"].values()]
    assert (min(begun), max(begun)) == (5, 9)


def test_the_one_sided_state_is_that_of_the_kept_metrics():
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "dose_response.py"))["get_study"]("one")
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / "dose_response_one_state.jsonl.gz", list(study.arms))
    runs = {arm: each for arm, each in runs.items() if each}
    assert list(runs) == ["grpo", "grpo_perturbed", *(f"state_one_{strength}" for strength in (1, 10, 100, 1000))]
    assert all(sorted(each) == list(range(10)) for each in runs.values())
    page = (_ROOT / "docs" / "evidence.md").read_text()
    assert dose_table(runs, study.baseline).strip() in page
    assert "\n".join(dose_claims(runs, study.baseline, study.control)) in page


@pytest.mark.parametrize("setting", _MAP)
def test_the_map_is_that_of_the_kept_metrics(setting):
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "mismatch_map.py"))["get_study"](setting)
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / f"map_{setting}.jsonl.gz", list(study.arms))
    runs = {arm: each for arm, each in runs.items() if each}
    assert all(sorted(seeds) == _seeds(setting, arm) for arm, seeds in runs.items())
    page = (_ROOT / "docs" / "evidence.md").read_text()
    assert dose_table(runs, study.baseline).strip() in page
    assert "\n".join(dose_claims(runs, study.baseline, study.control)) in page
    # The control's own delta is that of products of different shapes, far below the engine's.
    control, engine = (runs[arm][0]["discrepancy/mean"][1].mean() for arm in ("exact", "grpo"))
    assert control < 1e-5 < 1e-3 < engine


def test_the_planted_way_out_is_that_of_the_kept_metrics():
    study = runpy.run_path(str(_ROOT / "examples" / "planted" / "planted.py"))["get_study"]("")
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / "planted.jsonl.gz", list(study.arms))
    assert list(runs) == list(study.arms) and all(sorted(seeds) == [0, 1, 2, 3, 4] for seeds in runs.values())
    page = (_ROOT / "docs" / "evidence.md").read_text()
    blocks = [block for block in tables(study.title, runs, study.baseline, []).split("\n\n") if block.startswith("|")]
    assert len(blocks) == 2 and all(block.strip() in page for block in blocks)
    # Yes or no, in every run: the last tenth is at the reward of the clean way or at that of the noisy one.
    goes = {"sequence_30", "reward_3", "reward_30", "reward_undivided_3", "reward_undivided_30"}
    for arm, seeds in runs.items():
        for series in seeds.values():
            last = series["reward/mean"][1][-10:].mean()
            assert last < 0.91 if arm in goes else last > 0.97


def test_the_figure_of_the_oracle_marks_the_smallest_squared_error():
    panels = oracle_panels(_ROOT / "docs" / "evidence" / "oracle.json")
    assert list(panels) == ["local:int4", "local:fp8", "vllm:bfloat16,cache=fp8"]
    for best, points in panels.values():
        assert best == "no remedy" and len(points) == 17
        assert min(variance + bias**2 for variance, bias, _ in points.values()) == sum(
            (points[best][0], points[best][1] ** 2)
        )
    figure = draw_oracle("", panels)
    assert [axes.get_title(loc="left").split("\n")[0] for axes in figure.axes] == list(panels)


def test_the_order_of_the_oracle_is_that_of_the_kept_numbers():
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / "dose_response.jsonl.gz", None)
    page = (_ROOT / "docs" / "evidence.md").read_text()
    path = _ROOT / "docs" / "evidence" / "oracle.json"
    assert "\n".join(oracle_order(path, runs, "grpo")) in page


def _three_policies(oracles):
    """A row for each remedy in the order of the last policy; bias, its standard error, and variance at each policy."""

    def cell(one):
        bias, error, variance = one["quality"]["bias"], one["error"]["bias"], one["quality"]["variance"]
        bias, error, variance = ("-" if value is None else f"{value:.2f}" for value in (bias, error, variance))
        return f"{bias} ± {error}, {variance}"

    found = [
        {one["name"].split("(")[0]: cell(one) for one in (*oracle["remedies"], oracle["control"])} for oracle in oracles
    ]
    rows = [[f"`{name}`", *(names[name] for names in found)] for name in found[-1]]
    return "\n".join(markdown(["remedy", *(oracle["model"] for oracle in oracles)], rows))


def test_the_remedies_at_three_policies_are_those_of_the_kept_numbers():
    page = (_ROOT / "docs" / "probe.md").read_text()
    squared = {}
    oracles = json.loads((_ROOT / "docs" / "evidence" / "remedies.json").read_text())
    for oracle in oracles:
        squared[oracle["engine"], oracle["model"]] = {
            one["name"].split("(")[0]: one["quality"]["bias"] ** 2 + one["quality"]["variance"]
            for one in oracle["remedies"]
            if one["quality"]["bias"] is not None
        }
    for engine in ("local:int4", "vllm:bfloat16,cache=fp8"):
        assert _three_policies([oracle for oracle in oracles if oracle["engine"] == engine]) in page
    orders = [place for place in squared if not place[1].endswith(" 0")]
    alike = [rank_correlation(squared[a], squared[b]) for i, a in enumerate(orders) for b in orders[:i]]
    first = [rank_correlation(squared[a], squared[b]) for a in squared if a not in orders for b in orders]
    assert (round(min(alike), 2), round(max(alike), 2)) == (0.58, 0.92) and -0.54 < min(first) < max(first) < 0.27


def test_the_runs_that_were_tried_first_are_on_the_page():
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / "dose_response_wide.jsonl.gz", None)
    assert sum(len(seeds) for seeds in runs.values()) == 25
    assert dose_table(runs, "grpo").strip() in (_ROOT / "docs" / "evidence.md").read_text()


@pytest.mark.parametrize(("argument", "name", "arms"), [("", "lag", 12), ("corrections", "lag_corrections", 10)])
def test_the_runs_with_a_lag_are_on_their_page(argument, name, arms):
    study = runpy.run_path(str(_ROOT / "configs" / "studies" / "lag.py"))["get_study"](argument)
    runs = read_kept_metrics(_ROOT / "docs" / "evidence" / f"{name}.jsonl.gz", list(study.arms))
    runs = {arm: seeds for arm, seeds in runs.items() if seeds}
    assert len(runs) == arms and all(sorted(seeds) == list(range(5)) for seeds in runs.values())
    page = (_ROOT / "docs" / "overlap.md").read_text()
    blocks = [block for block in tables(study.title, runs, study.baseline, []).split("\n\n") if block.startswith("|")]
    assert len(blocks) == 2 and all(block.strip() in page for block in blocks)
