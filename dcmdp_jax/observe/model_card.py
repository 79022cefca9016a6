"""The model card of an exported checkpoint: README.md as the Hub shows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax import REPOSITORY
from dcmdp_jax.fields import flatten
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe import jsonl
from dcmdp_jax.observe.jsonl import CONFIG_FILE, METRICS_FILE, STARTS_FILE
from dcmdp_jax.observe.metrics_io import Series, read_metrics, without_placeholder

_POINTS = 12
"""Rows of the curve's table."""
_COLUMNS = {"dual/multiplier": "lambda", "discrepancy/mean": "mean discrepancy", "dual/tolerance": "c"}
_COLUMNS["reward/mean"] = "reward"
_PROJECT = f"[dcmdp_jax]({REPOSITORY})" if REPOSITORY else "dcmdp_jax"
CITATION = """@article{liu2026dcmdp,
  title = {Reformulate LLM Reinforcement Learning for Efficient Training under Black-box Discrepancy},
  author = {Liu, Jiashun and Liu, Runze and Wan, Xu and Liang, Jing and Tang, Hongyao and Pan, Ling},
  year = {2026}
}
@software{dcmdp_jax,
  title = {dcmdp_jax: DC-GRPO in JAX}
}"""


def model_card(run_dir: Path, step: int, *, on_hub: Callable[[str], bool]) -> str:
    """The text of the card.

    It has budget, lambda's curve, discrepancy and noise floor up to `step`, engine, versions, command and citation.
    What a run did not record is left out.

    Args:
        run_dir: the run directory.
        step: the checkpoint's step; later steps are left out.
        on_hub: whether the path that the run started from names a model on the Hub, which is then the base model.
    """
    config = flatten(read_json_object(run_dir / CONFIG_FILE)) if (run_dir / CONFIG_FILE).is_file() else {}
    series = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else {}
    series = without_placeholder(series, config.get("algorithm.tolerance_steps", 0))
    starts: list[dict[str, Any]] = jsonl.readable(run_dir / STARTS_FILE)
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    start = str(config.get("model.path") or "")
    front += [f"base_model: {start.partition('@')[0]}"] if on_hub(start) else []
    front += ["tags: [dcmdp_jax, dc-grpo, grpo, reinforcement-learning]", "---"]
    method = config.get("algorithm.method", "dc_grpo")
    parts = [
        "\n".join(front),
        f"# {run_dir.resolve().name}, step {step}",
        f"Trained with {_PROJECT}, method `{method}`: reinforcement learning "
        "under a budget c for the mean of |p_train - p_infer|, the difference between the probabilities that the "
        "training stack and the inference engine give a sampled token. Lambda is the price of that difference.",
        _facts(config, series, step),
        _curve(series, step),
    ]
    if starts:
        last = starts[-1]
        code = f"{last.get('version')}" + (f", commit {last['commit']}" if last.get("commit") else "")
        parts.append(
            f"## How it was made\n\n    {last.get('command')}\n\n{last.get('time')}, dcmdp_jax {code}, jax "
            f"{last.get('jax')}, Python {last.get('python')}, on {last.get('machine')}."
        )
    parts.append(f"## Citation\n\n```bibtex\n{CITATION}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def _facts(config: dict[str, Any], series: Series, step: int) -> str:
    engine = ", ".join(
        f"{name.rpartition('.')[2]} {value}"
        for name in ("rollout.engine", "rollout.precision", "rollout.compute_dtype", "rollout.kv_cache_dtype")
        if (value := config.get(name)) is not None
    )
    rows = {
        "budget c": _last(series, "dual/tolerance", step),
        "lambda": _last(series, "dual/multiplier", step),
        "mean discrepancy": _last(series, "discrepancy/mean", step),
        "noise floor of the engine": _last(series, "mismatch/noise_floor", step),
        "reward": _last(series, "reward/mean", step),
        **{name: _last(series, name, step) for name in series if name.startswith("eval/") and "/avg@" in name},
        "inference engine": engine,
        "training data": config.get("task.train"),
        "started from": config.get("model.path") or "a fresh model",
    }
    shown = [[name, str(value)] for name, value in rows.items() if value]
    return "\n".join(markdown_table(["", "at this step"], shown))


def _curve(series: Series, step: int) -> str:
    """Lambda and what it follows, at about a dozen steps."""
    names = [name for name in _COLUMNS if name in series]
    if "dual/multiplier" not in names:
        return ""
    steps = series["dual/multiplier"][0]
    steps = steps[steps <= step]
    if not len(steps):
        return ""
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, min(_POINTS, len(steps))).round().astype(int))]
    rows = [[str(each), *(_last(series, name, int(each)) for name in names)] for each in chosen]
    return "## Lambda's curve\n\n" + "\n".join(markdown_table(["step", *map(_COLUMNS.get, names)], rows))


def _last(series: Series, name: str, step: int) -> str:
    """The value at the last recorded step up to `step`; "" where there is none."""
    steps, values = series.get(name, (np.zeros(0), np.zeros(0)))
    values = values[steps <= step]
    return f"{values[-1]:.4g}" if len(values) and math.isfinite(values[-1]) else ""
