"""The pages in a real browser, at the width of a phone and of a laptop."""

import contextlib

import numpy as np
import pytest

from dcmdp_jax.observe.metrics_io import MetricsWriter
from dcmdp_jax.observe.report import write_report
from tests.support.browser import CHROMIUM, look_at

pytestmark = [pytest.mark.long, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    runs = [folder / "dc_grpo", folder / "grpo_with_a_name_that_is_rather_long_for_a_narrow_screen"]
    for run in runs:
        with contextlib.closing(MetricsWriter(run)) as writer:
            for step in range(1, 61):
                noise = float(rng.uniform())
                dual = {
                    "dual/multiplier": noise,
                    "dual/violation": noise - 0.5,
                    "dual/tolerance": 5e-4,
                }
                writer.write(step, {"reward/mean": noise, "discrepancy/mean": 1e-3 * noise, **dual})
                if step % 20 == 0:
                    writer.write(step, {"eval/math/avg@8": noise})
    write_report(runs[:1], folder / "one")
    write_report(runs, folder / "two")
    return folder


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("which", ["one", "two"])
def test_a_report_draws_every_figure_without_errors_or_overflow(report, tmp_path, which, width):
    page = report / which / "report.html"
    facts, console = look_at(page, tmp_path, width)
    assert console == []
    assert facts["wide"] <= width
    assert facts["figures"] == len(list(page.parent.glob("plots/*.png"))) >= 3
