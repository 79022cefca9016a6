"""Templates: everything in them is escaped, and a value that is missing is an error."""

import tomllib
from pathlib import Path

import jinja2
import pytest

from dcmdp_jax.observe.html_page import render_page

_ROOT = Path(__file__).resolve().parents[2]
_CONTENT = {
    "title": "<b>", "labels": ["<b>"], "steps": 0, "cards": [("<i>", "1 & 2", '"')], "problems": ["</li>"],
    "verdicts": ["</p>"], "provenance": [], "figures": [("a", '<b>"', {"title": "</script>"})], "samples": [],
    "settings": {"rows": [["<k>", "<v>"]], "differs": [False]},
    "metrics": {"header": ["<m>", "last", "unit", "meaning"], "rows": []},
}  # fmt: skip


def test_every_value_is_escaped():
    page = render_page("report.html", **_CONTENT)
    assert "<title>&lt;b&gt;</title>" in page and "<h1>&lt;b&gt;</h1>" in page
    assert '<div class="name">&lt;i&gt;</div><div class="value">1 &amp; 2</div><div class="more">&#34;</div>' in page
    assert "<li>&lt;/li&gt;</li>" in page
    assert "<figcaption>&lt;b&gt;&#34;</figcaption>" in page and '{"title":"\\u003c/script\\u003e"}' in page
    assert '<td class="key">&lt;k&gt;</td>' in page and "<td>&lt;v&gt;</td>" in page and "<th>&lt;m&gt;</th>" in page


def test_a_missing_value_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'metrics' is undefined"):
        render_page("report.html", **{name: value for name, value in _CONTENT.items() if name != "metrics"})


def test_an_installation_has_the_templates():
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["package-data"]["dcmdp_jax.observe"]
    package = _ROOT / "dcmdp_jax" / "observe"
    assert sorted(package.glob(pattern)) == sorted((package / "templates").iterdir())
