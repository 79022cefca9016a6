"""Write docs/metrics.md from the package's table: `python -m docs.metrics`."""

from __future__ import annotations

from pathlib import Path

from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe.metric_names import METRICS

PAGE = Path(__file__).with_suffix(".md")
_INTRO = """\
# Metrics

Why has a metric its value? Each row names the file below `dcmdp_jax/` and the function in it that makes the metric. A
part in braces is a name of yours. A run writes them to `metrics.jsonl`, TensorBoard and, if asked, W&B or Trackio;
`dcmdp report` draws them, and `dcmdp_jax.read_metrics` reads them.
Written by `python -m docs.metrics`.
"""


def page() -> str:
    """The page's text."""
    rows = [
        [f"`{name}`", metric.unit, metric.description.replace("|", r"\|"), f"`{metric.made_by}`"]
        for name, metric in METRICS.items()
    ]
    return (
        f"{_INTRO}\n"
        + "\n".join(markdown_table(["metric", "unit", "meaning", "made by"], rows))
        + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
