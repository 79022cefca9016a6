"""The model card of an exported checkpoint: README.md as the Hub shows it."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dcmdp_jax.number_format import markdown_table, number
from dcmdp_jax.observe.metrics_io import Series
from dcmdp_jax.observe.run_summary import facts, provenance, read_run, verdict
from dcmdp_jax.version import REPOSITORY

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
    """The text of the card: the run's sentence and facts up to `step`, lambda's curve, command, versions, citation.

    What a run did not record is left out.

    Args:
        run_dir: the run directory.
        step: the checkpoint's step; later steps are left out.
        on_hub: whether the path that the run started from names a model on the Hub, which is then the base model.
    """
    run = read_run(run_dir, without_metrics=True).until(step)
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if on_hub(start := str(run.config.get("model.path") or "")):
        front.append(f"base_model: {start.partition('@')[0]}")
    front += ["tags: [dcmdp_jax, dc-grpo, grpo, reinforcement-learning]", "---"]
    parts = [
        "\n".join(front),
        f"# {run.label}, step {step}",
        f"Trained with {_PROJECT}, method `{run.config.get('algorithm.method', 'dc_grpo')}`: reinforcement learning "
        "under a budget c for the mean of |p_train - p_infer|, the difference between the probabilities that the "
        "training stack and the inference engine give a sampled token. Lambda is the price of that difference.",
    ]
    if run.series:
        rows = [[cell.replace("|", r"\|") for cell in fact] for fact in facts(run)]
        parts += [verdict(run), "\n".join(markdown_table(["", "at this step", ""], rows))]
        parts += _curve(run.series)
    if said := provenance(run):
        parts.append(f"## How it was made\n\n    {said.pop('command')}\n\n{', '.join(said.values())}.")
    parts.append(f"## Citation\n\n```bibtex\n{CITATION}\n```")
    return "\n\n".join(parts) + "\n"


def _curve(series: Series) -> list[str]:
    """Lambda and what it follows, at about a dozen steps."""
    if "dual/multiplier" not in series:
        return []
    names = [name for name in _COLUMNS if name in series]
    steps = series["dual/multiplier"][0]
    chosen = steps[np.unique(np.linspace(0, len(steps) - 1, min(_POINTS, len(steps))).round().astype(int))]
    values = {name: dict(zip(*map(np.ndarray.tolist, series[name]), strict=True)) for name in names}
    rows = [[str(each), *(number(values[name].get(each, math.nan)) for name in names)] for each in chosen.tolist()]
    return ["## Lambda's curve", "\n".join(markdown_table(["step", *map(_COLUMNS.get, names)], rows))]
