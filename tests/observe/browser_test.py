"""The pages in a real browser, at the width of a phone and of a laptop."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from dcmdp_jax.observe.metrics_io import MetricsWriter
from dcmdp_jax.observe.report import write_report
from tests.waiting import HANGS_S

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--allow-file-access-from-files", "--enable-logging=stderr",
    "--virtual-time-budget=4000", "--dump-dom",
)  # fmt: skip

pytestmark = [pytest.mark.long, pytest.mark.skipif(_CHROMIUM is None, reason="needs chromium")]


def look_at(page, tmp_path, width):
    """(facts of the page laid out at that width, what the browser's console says)."""
    frame = tmp_path / f"frame{width}.html"
    frame.write_text(
        f'<iframe id="f" src="file://{page}" style="width:{width}px;height:800px;border:0"></iframe><pre id="r"></pre>'
        "<script>addEventListener('load', () => setTimeout(() => { const d = document.getElementById('f')"
        ".contentDocument, e = d.documentElement; document.getElementById('r').textContent = JSON.stringify({"
        "wide: e.scrollWidth, svgs: [...d.querySelectorAll('svg')].filter(s => s.clientWidth > 100).length,"
        "shown: d.querySelectorAll('.completion').length}); }, 1000));</script>"
    )
    done = subprocess.run(
        [_CHROMIUM, *_FLAGS, f"--user-data-dir={tmp_path}/profile{width}", "--window-size=1400,900", f"file://{frame}"],
        capture_output=True, text=True, timeout=HANGS_S,
    )  # fmt: skip
    found = re.search(r'<pre id="r">(.*?)</pre>', done.stdout, re.S)
    assert found and found[1], done.stderr[-2000:]
    return json.loads(found[1]), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    runs = [folder / "dc_grpo", folder / "grpo_with_a_name_that_is_rather_long_for_a_narrow_screen"]
    for run in runs:
        with MetricsWriter(run) as writer:
            for step in range(1, 61):
                noise = float(rng.uniform())
                writer.write(step, {"reward/mean": noise, "discrepancy/mean": 1e-3 * noise, "dual/tolerance": 5e-4,
                                    "dual/multiplier": noise, "dual/violation": noise - 0.5})  # fmt: skip
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
    assert facts["svgs"] == len(list(page.parent.glob("plots/*.png"))) >= 3
