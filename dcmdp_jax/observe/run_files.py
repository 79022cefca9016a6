"""Names of the files in a run directory."""

from __future__ import annotations

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
PLOTS_DIRECTORY = "plots"
REPORT_FILE = "report.html"
