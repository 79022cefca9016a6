"""A figure's panels as data: what matplotlib draws is what the page draws."""

import json
import math
import re

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dcmdp_jax.observe.interactive import figure_data
from dcmdp_jax.observe.plots import draw_discrepancy, draw_multiplier, draw_time


def _axes():
    figure = Figure()
    return figure, figure.subplots()


def test_a_curve_keeps_its_values_color_and_gaps():
    figure, axes = _axes()
    axes.plot([1, 2, 3], [0.123456789, math.nan, 3e-9], color="#0072B2", linestyle="--", label="run a", marker="o")
    axes.plot([1, 3], [1, 1], label="_hidden")
    (panel,) = figure_data(figure)["panels"]
    line, hidden = panel["lines"]
    assert line["data"] == [[1, 0.123457], [2, None], [3, 3e-9]]
    assert (line["label"], line["color"], line["marker"], bool(line["dash"])) == ("run a", "#0072b2", True, True)
    assert (hidden["label"], hidden["dash"]) == ("", [])


def test_a_level_is_no_curve():
    figure, axes = _axes()
    axes.plot([0, 10], [0, 1])
    axes.axhline(0.25, label="c")
    curve, level = figure_data(figure)["panels"][0]["lines"]
    assert (level["level"], level["data"], level["label"]) == (0.25, [], "c")
    assert curve["level"] is None


def test_bars_areas_points_limits_and_scales():
    figure, axes = _axes()
    axes.bar([1, 2], [3, -4], width=0.5, label="b", color="#D55E00")
    axes.fill_between([0, 2], [1, 1], [2, 4], color="#009E73", alpha=0.25, linewidth=0, label="range")
    axes.scatter([1, 2], [5, 6], color="#000000", label="dots")
    axes.set_xlim(0, 3)
    axes.set_ylim(-5, 8)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    (panel,) = figure_data(figure)["panels"]
    assert [bar["box"] for bar in panel["bars"]] == [[0.75, 0, 0.5, 3], [1.75, 0, 0.5, -4]]
    assert {bar["label"] for bar in panel["bars"]} == {"b"}
    (area,) = panel["areas"]
    assert area["opacity"] == 0.25 and {tuple(p) for p in area["data"]} >= {(0, 1), (2, 1), (0, 2), (2, 4)}
    assert panel["points"][0]["data"] == [[1, 5], [2, 6]]
    assert (panel["xlim"], panel["ylim"], panel["percent"], panel["log"]) == ([0, 3], [-5, 8], True, [False, False])


def test_a_long_curve_loses_no_spike():
    values = np.zeros(100_000)
    values[54_321], values[77_777] = 1.0, -2.0
    figure, axes = _axes()
    axes.plot(np.arange(100_000), values)
    data = figure_data(figure)["panels"][0]["lines"][0]["data"]
    assert [54_321, 1.0] in data and [77_777, -2.0] in data and len(data) <= 4_002
    assert data[0][0] == 0 and data[-1][0] == 99_999
    assert [x for x, _ in data] == sorted(x for x, _ in data)


def test_the_figures_of_a_run_hold_its_metrics():
    steps = np.arange(1, 4)
    series = {
        "discrepancy/mean": (steps, np.array([0.001, 0.003, 0.002])),
        "dual/tolerance": (steps, np.full(3, 0.0015)),
        "dual/multiplier": (steps, np.array([0.1, 0.05, 0.2])),
        "dual/violation": (steps, np.array([-0.0005, 0.0015, 0.0005])),
        "time/generate": (steps, np.array([1.0, 2.0, 4.0])),
        "time/step": (steps, np.array([3.0, 3.0, 3.0])),
    }
    lines = figure_data(draw_discrepancy({"run": series}))["panels"][0]["lines"]
    assert lines[0]["data"] == [[1, 0.001], [2, 0.003], [3, 0.002]]
    assert (lines[1]["level"], lines[1]["label"]) == (0.0015, "tolerance c = 0.0015")
    bars = figure_data(draw_multiplier({"run": series}))["panels"][1]["bars"]
    assert {bar["label"] for bar in bars} == {"over budget: lambda rises", "under budget: lambda falls"}
    assert sorted(bar["box"][3] for bar in bars if bar["box"][3]) == [-0.0005, 0.0005, 0.0015]
    panel = figure_data(draw_time({"run": series}))["panels"][0]
    # Median of 1, 2, 4 is 2: the step's bar starts there.
    assert [(bar["label"], bar["box"][0], bar["box"][2]) for bar in panel["bars"]] == [
        ("generate", 0, 2),
        ("step", 2, 3),
    ]
    assert panel["rows"] == [[0, "run"]]
    json.dumps(panel, allow_nan=False)


def test_numbers_on_an_axis_are_no_names():
    figure, axes = _axes()
    axes.semilogy([1, 2], [1e-3, 1e3])
    panel = figure_data(figure)["panels"][0]
    assert panel["rows"] == [] and panel["log"] == [False, True]
    assert not re.search("mathdefault", json.dumps(panel))
