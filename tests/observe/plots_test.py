"""Figures: the numbers of the curves, read back from the axes."""

import io
import math
import warnings

import numpy as np
import pytest
from matplotlib.colors import to_hex

from dcmdp_jax.observe.metric_names import STEP_PHASES
from dcmdp_jax.observe.plots import FIGURES, smooth


def _draw(stem, runs):
    return FIGURES[stem][1](runs)


def _series(values, first=1):
    values = np.array(values, np.float64)
    return np.arange(first, first + len(values)), values


def _curves(axes):
    return {
        line.get_label(): (
            np.asarray(line.get_xdata()).tolist(),
            np.asarray(line.get_ydata()).tolist(),
        )
        for line in axes.get_lines()
    }


def test_smooth_by_hand():
    values = np.array([1.0, 2.0, np.nan, 6.0, 11.0])
    # Window 3: (1+2)/2, (1+2)/2, (2+6)/2, (6+11)/2, (6+11)/2.
    np.testing.assert_array_equal(smooth(values, 3), [1.5, 1.5, 4.0, 8.5, 8.5])
    np.testing.assert_array_equal(smooth(values, 1), values)
    assert np.isnan(smooth(np.array([np.nan, np.nan, np.nan, 1.0]), 3)[0])


def test_forty_steps_are_drawn_raw_and_forty_one_smoothed():
    values = np.arange(60.0) ** 2
    (axes,) = _draw("reward", {"r": {"reward/mean": _series(values[:40])}}).axes
    assert [line.get_ydata().tolist() for line in axes.get_lines()] == [values[:40].tolist()]
    (axes,) = _draw("reward", {"r": {"reward/mean": _series(values)}}).axes
    raw, mean = axes.get_lines()
    assert raw.get_ydata().tolist() == values.tolist() and raw.get_alpha() == 0.3
    # 60 steps: window 3. (9 + 16 + 25) / 3 at the fifth.
    assert mean.get_ydata()[4] == pytest.approx(50 / 3, rel=1e-12)


def test_each_data_source_has_its_curves():
    run = {
        "reward/source/a/b/mean": _series([0.5, 1.0]),
        "reward/source/c/mean": _series([0.25]),
        "completion/source/c/length_mean": _series([7.0]),
    }
    reward, length = _draw("sources", {"r": run}).axes
    assert _curves(reward) == {"a/b": ([1, 2], [0.5, 1.0]), "c": ([1], [0.25])}
    assert _curves(length) == {"c": ([1], [7.0])}
    several, _ = _draw("sources", {"r": run, "s": run}).axes
    assert set(_curves(several)) == {"r: a/b", "r: c", "s: a/b", "s: c"}
    assert _draw("sources", {"r": {"reward/mean": _series([0.5])}}) is None


def test_each_held_out_score_has_a_panel():
    run = {
        "eval/a/avg@4": _series([0.25, 0.5], 0),
        "eval/b/avg@4": _series([0.5, 0.75], 0),
        "eval/b/pass@4": _series([1.0], 0),
    }
    panels = _draw("evaluation", {"r": run}).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["a avg@4", "b avg@4", "b pass@4"]
    assert [_curves(axes)["r"] for axes in panels] == [
        ([0, 1], [0.25, 0.5]),
        ([0, 1], [0.5, 0.75]),
        ([0], [1.0]),
    ]


def test_each_runs_budget_is_dashed_in_its_color():
    def run(tolerance):
        return {
            "discrepancy/mean": _series([0.005, 0.003]),
            "dual/tolerance": _series([tolerance] * 2),
        }

    axes = _draw("discrepancy", {"a": run(0.0037)}).axes[0]
    dashed = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert [(line.get_label(), list(line.get_ydata())) for line in dashed] == [
        ("tolerance c = 0.0037", [0.0037] * 2)
    ]
    axes = _draw("discrepancy", {"a": run(0.0037), "b": run(0.005)}).axes[0]
    dashed = {
        line.get_ydata()[0]: to_hex(line.get_color())
        for line in axes.get_lines()
        if line.get_linestyle() == "--"
    }
    solid = {
        line.get_label(): to_hex(line.get_color())
        for line in axes.get_lines()
        if line.get_linestyle() == "-"
    }
    assert dashed == {0.0037: solid["a"], 0.005: solid["b"]}
    assert axes.get_ylim()[0] == 0.0


def test_the_noise_floor_is_drawn_beside_c():
    runs = {
        "a": {"discrepancy/mean": _series([0.001] * 3), "mismatch/noise_floor": _series([0.004])}
    }
    axes = _draw("discrepancy", runs).axes[0]
    dotted = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert [(line.get_label(), line.get_ydata()[0]) for line in dotted] == [
        ("noise floor = 0.004", 0.004)
    ]
    assert axes.get_ylim()[1] > 0.004


def test_zero_discrepancy_is_drawn_at_the_scale_of_the_budget():
    runs = {
        "exact": {"discrepancy/mean": _series([0.0] * 5), "dual/tolerance": _series([0.0037] * 5)}
    }
    low, high = _draw("discrepancy", runs).axes[0].get_ylim()
    assert low == 0.0 and 0.0037 < high < 0.005
    del runs["exact"]["dual/tolerance"]
    assert _draw("discrepancy", runs).axes[0].get_ylim() == (0.0, 0.001)


def test_constant_multiplier_is_not_magnified():
    low, high = (
        _draw("multiplier", {"r": {"dual/multiplier": _series([0.1] * 4)}}).axes[0].get_ylim()
    )
    assert (low, high) == (pytest.approx(0.05), pytest.approx(0.15))


def test_lengths_show_their_mean_and_range():
    run = {
        "completion/length_mean": _series([10.0, 20.0]),
        "completion/length_min": _series([5.0, 6.0]),
        "completion/length_max": _series([30.0, 40.0]),
    }
    expected = {"length mean": [10.0, 20.0], "length min": [5.0, 6.0], "length max": [30.0, 40.0]}
    curves = _curves(_draw("lengths", {"r": run}).axes[0])
    assert curves == {name: ([1, 2], values) for name, values in expected.items()}


def test_time_is_the_median_step_so_compilation_does_not_show():
    run = {"time/generate": _series([50.0, 2.0, 2.0]), "time/step": _series([90.0, 3.0, 3.5])}
    (axes,) = _draw("time", {"r": run}).axes
    assert [(bar.get_x(), bar.get_width()) for (bar,) in axes.containers] == [
        (0.0, 2.0),
        (2.0, 3.5),
    ]
    assert axes.get_legend_handles_labels()[1] == ["generate", "step"]


def test_curves_of_one_run_differ_in_color_and_of_several_in_color_by_run():
    run = {
        "policy/clip_low_fraction": _series([0.1, 0.2]),
        "policy/clip_high_fraction": _series([0.3, 0.4]),
    }
    one = _draw("optimization", {"a": run}).axes[0].get_lines()
    assert one[0].get_color() != one[1].get_color()
    two = {
        line.get_label(): line
        for line in _draw("optimization", {"a": run, "b": run}).axes[0].get_lines()
    }
    assert two["a: clip low fraction"].get_color() == two["a: clip high fraction"].get_color()
    assert two["a: clip low fraction"].get_color() != two["b: clip low fraction"].get_color()
    assert (
        two["a: clip low fraction"].get_linestyle() != two["a: clip high fraction"].get_linestyle()
    )


def test_importance_ratio_panel_shows_min_mean_and_max():
    run = {
        "policy/ratio_min": _series([0.5, 0.75]),
        "policy/ratio_mean": _series([1.0, 1.0]),
        "policy/ratio_max": _series([1.5, 2.0]),
    }
    (axes,) = _draw("optimization", {"a": run}).axes
    assert axes.get_title(loc="left") == "importance ratio"
    assert _curves(axes) == {
        "ratio min": ([1, 2], [0.5, 0.75]),
        "ratio mean": ([1, 2], [1.0, 1.0]),
        "ratio max": ([1, 2], [1.5, 2.0]),
    }


def test_every_figure_draws_values_that_are_not_finite():
    names = [
        *(
            "reward/mean",
            "discrepancy/mean",
            "dual/tolerance",
            "dual/multiplier",
            "dual/violation",
            "mismatch/k3",
        ),
        *(
            "completion/length_mean",
            "completion/truncated_fraction",
            "policy/entropy",
            "time/step",
            "eval/a/avg@8",
        ),
        *(
            "time/total",
            "reward/source/a/mean",
            "staleness/log_ratio_abs_mean",
            "mismatch/log_ratio_abs_mean",
        ),
        *(f"time/{phase}" for phase in STEP_PHASES),
    ]
    runs = {
        "r": {name: _series([math.inf, 0.5, math.nan, -math.inf]) for name in names},
        "empty": {},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, draw in FIGURES.values():
            figure = draw(runs)
            figure.savefig(io.BytesIO(), format="png", dpi=20)
            assert all(np.isfinite(axes.get_ylim()).all() for axes in figure.axes)


def test_a_reward_outside_0_to_1_is_no_percentage_and_a_step_axis_has_whole_steps():
    (axes,) = _draw("evaluation", {"r": {"eval/t/avg@8": (np.array([3]), np.array([41.5]))}}).axes
    axes.figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert not any("%" in label for label in labels) and len(set(labels)) == len(labels)
    steps = [label.get_text() for label in axes.get_xticklabels()]
    assert (
        all(step.removeprefix("−").isdigit() for step in steps)
        and len(set(steps)) == len(steps) > 2
    )
    (axes,) = _draw(
        "evaluation", {"r": {"eval/t/avg@8": (np.array([3, 4]), np.array([0.25, 0.5]))}}
    ).axes
    assert axes.yaxis.get_major_formatter()(0.25).endswith("%")
    # A sum of rewards that happens to be within 0 .. 1 is no share; pass@K of it, solved or not, is
    # one.
    run = {"eval/t/avg@8": _series([0.25, 0.5], 0), "eval/t/pass@8": _series([0.5], 0)}
    figure = _draw("evaluation", {"r": run | {"eval_reward/t/math": _series([0.25], 0)}})
    written = [axes.yaxis.get_major_formatter()(0.25) for axes in figure.axes]
    assert [text.endswith("%") for text in written] == [False, True]


def test_all_panels_have_one_step_axis_and_c_is_drawn_from_where_it_is_known():
    c = np.array([1, 2, 3, 4]), np.array([math.nan, math.nan, 0.004, 0.004])
    run = {
        "discrepancy/mean": _series([0.005] * 4),
        "dual/tolerance": c,
        "dual/multiplier": _series([0.1] * 4),
    }
    run |= {"discrepancy/completions_over_tolerance": (np.array([3, 4]), np.array([0.5, 0.5]))}
    run |= {
        "eval/t/avg@8": (np.array([0, 4]), np.array([0.25, 0.5])),
        "reward/mean": _series([0.5] * 4),
    }
    drawn = [
        _draw(name, {"r": run}) for name in ("reward", "discrepancy", "multiplier", "evaluation")
    ]
    assert {axes.get_xlim() for figure in drawn for axes in figure.axes} == {(-0.08, 4.08)}
    [line] = [line for line in drawn[1].axes[0].get_lines() if line.get_linestyle() == "--"]
    assert (line.get_label(), list(line.get_xdata())) == ("tolerance c = 0.004", [3, 4])


def test_nothing_recorded_is_no_figure():
    assert [draw({"r": {"other": _series([1.0])}}) for _, draw in FIGURES.values()] == [None] * len(
        FIGURES
    )


def test_the_interval_of_a_held_out_score_is_shaded_and_only_of_avg_at_k():
    steps = np.array([0, 20])
    series = {
        "eval/t/avg@8": (steps, np.array([0.25, 0.5])),
        "eval/t/pass@8": (steps, np.array([0.5, 0.75])),
        "eval_interval/t/low": (steps, np.array([0.125, 0.375])),
        "eval_interval/t/high": (steps, np.array([0.375, 0.625])),
    }
    _, draw = FIGURES["evaluation"]
    average, passed = draw({"run": series}).axes
    [area] = average.collections
    assert {tuple(point) for point in area.get_paths()[0].vertices.tolist()} == {
        (0.0, 0.125),
        (0.0, 0.375),
        (20.0, 0.375),
        (20.0, 0.625),
    }
    assert len(passed.collections) == 0
