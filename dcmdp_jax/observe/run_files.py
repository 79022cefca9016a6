"""Names of the files in a run directory."""

from __future__ import annotations

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
HELD_OUT_FILE = "held_out_samples.jsonl"
ROLLOUTS_DIRECTORY = "rollouts"
STARTS_FILE = "starts.jsonl"
TENSORBOARD_DIRECTORY = "tensorboard"
PLOTS_DIRECTORY = "plots"
REPORT_FILE = "report.html"


def rewards_log(host: int) -> str:
    """File that has what the reward functions of a host printed."""
    return f"rewards_{host}.log" if host else "rewards.log"
