"""Templates: everything in them is escaped, and a value that is missing is an error."""

import re
import tomllib
from pathlib import Path

import jinja2
import numpy as np
import pytest
from matplotlib.figure import Figure

from dcmdp_jax.observe.page_kit import inline_svg, make_figure, render_page, style_axes, title_of
from dcmdp_jax.observe.report import Fact

_ROOT = Path(__file__).resolve().parents[2]


def _figure(title):
    figure = Figure(figsize=(4, 3))
    figure.subplots().set_title(title)
    return figure


_CONTENT = {
    "title": "<b>",
    "labels": ["<b>"],
    "facts": [Fact(name="<i>", value="1 & 2", details='"')],
    "problems": ["</li>"],
    "collapses": [
        {"lines": ["<h>", "<s>"], "supporting": ["<s>"], "opposing": [], "undecided": ["<u>"]}
    ],
    "verdicts": [{"lambda": "</p>"}],
    "provenance": [],
    "figures": [('<b>"', inline_svg(_figure("</svg><b>")))],
    "settings": {"rows": [["<k>", "<v>"]], "differs": [False]},
    "metrics": {"header": ["<m>", "last", "unit", "meaning"], "rows": []},
    "held_out": [
        ("<t>", ["<e>"], [{"prompt": "<p>", "written": [{"completion": "<w>"}], "answer": "<a>"}])
    ],
}


def test_every_value_is_escaped():
    page = render_page("report.html", **_CONTENT)
    assert "<title>&lt;b&gt;</title>" in page and "<h1>&lt;b&gt;</h1>" in page
    assert (
        '<div class="name">&lt;i&gt;</div><div class="value">1 &amp; 2</div><div '
        'class="more">&#34;</div>' in page
    )
    assert "<li>&lt;/li&gt;</li>" in page
    assert (
        "<figcaption>&lt;b&gt;&#34;</figcaption>" in page and "&lt;/svg&gt;&lt;b&gt;</text>" in page
    )
    assert all(f"&lt;{text}&gt;" in page and f"<{text}>" not in page for text in "tew")
    assert (
        '<td class="key">&lt;k&gt;</td>' in page
        and "<td>&lt;v&gt;</td>" in page
        and "<th>&lt;m&gt;</th>" in page
    )


def test_a_missing_value_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'metrics' is undefined"):
        render_page(
            "report.html", **{name: value for name, value in _CONTENT.items() if name != "metrics"}
        )


def test_a_curve_is_drawn_within_the_page_and_a_long_one_is_a_picture_in_it():
    """A short line's path has a point for each value; of 100,000 values the page has fewer bytes
    than values.
    """
    short = _figure("a")
    long = _figure("a")
    short.axes[0].plot([0, 1, 2], [0, 5, 1], color="#0072B2")
    long.axes[0].plot(np.random.default_rng(0).normal(size=100_000))
    svg = inline_svg(short)
    [path] = re.findall(
        r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: #0072b2', svg
    )
    assert len(re.findall(r"[ML]", path)) == 3
    assert svg == inline_svg(short) and svg.startswith("<svg") and "<metadata" not in svg
    assert "data:image/png" in inline_svg(long) and len(inline_svg(long)) < 100_000


def test_an_installation_has_the_templates():
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["package-data"]["dcmdp_jax.observe"]
    package = _ROOT / "dcmdp_jax" / "observe"
    assert sorted(package.glob(pattern)) == sorted((package / "templates").iterdir())


def test_a_long_area_is_a_picture_within_the_svg():
    figure = Figure(figsize=(4, 2))
    at = np.arange(20_000)
    figure.subplots().fill_between(at, np.sin(at), step="mid")
    drawn = inline_svg(figure)
    assert "<image" in drawn and len(drawn) < 300_000


@pytest.mark.parametrize(
    ("prompt", "title"),
    {
        "<|im_start|>system\nBe.<|im_end|><|im_start|>user\n4+9=?\nThink.<|im_end|>\n<|im_start|>assistant\n": "4+9=?",
        "<|im_start|>user\none<|im_end|><|im_start|>assistant\ntwo<|im_end|><|im_start|>user\nthree<|im_end|>": "three",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>": "Hi "
        "there",
        "<bos><start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n": "Why?",
        "<s>[INST] Add 1 < 2 [/INST]": "Add 1 < 2",
        "<｜begin▁of▁sentence｜><｜User｜>Solve x<｜Assistant｜><think>\n": "Solve x",
        "<|start|>user<|message|>Sum<|end|><|start|>assistant": "Sum",
        "\nproblem 7\nmore": "problem 7",
        "": "",
    }.items(),
)
def test_the_title_of_a_row_is_the_first_line_of_its_last_question(prompt, title):
    assert title_of(prompt) == title


def test_each_panel_is_a_picture_of_its_own_without_the_heading_that_the_page_has():
    figure, axes = make_figure(8, 6, "the heading", rows=2, columns=2)
    for number, each in enumerate(axes[:3]):
        style_axes(each, f"panel {number}")
    axes[3].remove()
    page = str(inline_svg(figure))
    assert page.count("<svg") == 3 and "the heading" not in page
    assert [page.count(f">panel {number}<") for number in range(3)] == [1, 1, 1]
    widths = [float(width) for width in re.findall(r'<svg [^>]*width="([0-9.]+)pt"', page)]
    assert len(widths) == 3 and all(
        200 < width < 320 for width in widths
    )  # of 8 inches, 576 points, half
