"""What a run did: its record, facts, sentence and warnings; the report: plots as PNG, one
self-contained HTML page.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import flatten
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.number_format import duration, number, percent
from dcmdp_jax.observe import jsonl, metric_names, page_kit, plots
from dcmdp_jax.observe.alarms import alarms, bounded_metric, finite_values
from dcmdp_jax.observe.metrics_io import Series, read_metrics, without_placeholder

_STUCK_STEPS = 5
_ENGINE = ("rollout.engine", "rollout.precision", "rollout.compute_dtype", "rollout.kv_cache_dtype")
_SHARES = {
    "completion/truncated_fraction": (
        0.5,
        "{} of the last completions were cut by the length limit: rewards measure "
        "the limit as much as the policy. Raise the limit.",
    ),
    "reward/all_equal_groups": (
        0.9,
        "In {} of the last prompts all completions got one reward, so nearly nothing is "
        "learned: the task is too easy or too hard for the policy.",
    ),
}
"""Metric -> share above which its mean over the last steps is a warning, and the warning."""
_COUNTS = {
    "reward/verifier_timeouts": "The verifier ran out of time on {:.0f} answers; they got reward "
    "0.",
    "reward/verifier_errors": "The verifier failed on {:.0f} answers; they got reward 0.",
    "reward/verifier_over_budget": "The verifier's budget for a batch ran out on {:.0f} answers. "
    "Raise the budget.",
    "optimizer/skipped_updates": "{:.0f} optimizer updates were skipped because their gradient "
    "was not finite.",
}
"""Metric -> warning where its sum is above 0."""


class Fact(NamedTuple):
    """One thing to know about a run: its name, the value, and details ("" if none)."""

    name: str
    value: str
    more: str = ""


class RecordedRun(NamedTuple):
    """Content of a run directory.

    Attributes:
        label: name in a report, unique among the runs shown together.
        series: its metrics.
        config: dotted key to value; empty if the run saved none.
        held_out: completions of held-out problems, in the order written.
        starts: records of command, code, machine and date.
        nodes: with Ray, replica to the nodes that it was started on.
    """

    label: str
    series: Series
    config: dict[str, Any]
    held_out: list[dict[str, Any]]
    starts: list[dict[str, Any]]
    nodes: dict[str, list[str]]

    def until(self, step: int) -> Self:
        """The same run with its metrics up to a step."""
        kept = {
            name: (steps[steps <= step], values[steps <= step])
            for name, (steps, values) in self.series.items()
        }
        return self._replace(series={name: one for name, one in kept.items() if len(one[0])})


def read_run(
    run_dir: str | Path, label: str | None = None, *, without_metrics: bool = False
) -> RecordedRun:
    """Read a run directory; skip a last line torn by a kill.

    Args:
        run_dir: the directory.
        label: the run's name; by default the directory's.
        without_metrics: allow a directory that holds no metrics.

    Raises:
        ValueError: if it is not a run directory, has no metrics yet, or has a file that cannot be
            parsed.
        OSError: if a file can't be read.
    """
    run_dir = Path(run_dir)
    series = (
        {}
        if without_metrics and not (run_dir / jsonl.METRICS_FILE).is_file()
        else read_metrics(run_dir)
    )
    path = run_dir / jsonl.CONFIG_FILE
    config = flatten(read_json_object(path)) if path.exists() else {}
    return RecordedRun(
        label=label or run_dir.resolve().name,
        series=without_placeholder(series, config.get("algorithm.tolerance_steps", 0)),
        config=config,
        held_out=jsonl.read(run_dir / jsonl.HELD_OUT_FILE),
        starts=jsonl.readable(run_dir / jsonl.STARTS_FILE),
        nodes={
            path.parent.name.replace("vllm", "0"): path.read_text(encoding="utf-8").splitlines()
            for path in run_dir.glob("vllm/**/nodes.txt")
        },
    )


def write_report(run_dirs: Sequence[str | Path], out_dir: str | Path) -> Path:
    """Write `out_dir`/plots/*.png and `out_dir`/report.html; several runs overlay and are compared
    in a table.

    Args:
        run_dirs: one or more run directories, in display order.
        out_dir: created if absent; an existing report in it is replaced.

    Returns:
        Path of report.html. The page embeds its figures, runs no script and makes no request.

    Raises:
        ValueError: if no directory is given, one is given twice, or one is not a readable run (see
            `read_run`).
        OSError: if `out_dir` is not writable.
    """
    if not run_dirs:
        raise UserError("no run directory given; name at least one")
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    runs = [read_run(path, label) for path, label in zip(paths, labels_of(paths), strict=True)]
    # matplotlib would read a dollar in a directory's name as mathematics.
    series = {page_kit.drawable(run.label).replace("$", r"\$"): run.series for run in runs}
    drawn = ((stem, caption, draw(series)) for stem, (caption, draw) in plots.FIGURES.items())
    figures = page_kit.page_figures(drawn, Path(out_dir) / jsonl.PLOTS_DIRECTORY)
    report = Path(out_dir) / jsonl.REPORT_FILE
    atomic_write(
        report, page_kit.render_page("report.html", figures=figures, **report_content(runs))
    )
    return report


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that are unique.

    Raises:
        UserError: if one is there twice.
    """
    if twice := [path for place, path in enumerate(paths) if path in paths[:place]]:
        raise UserError(f"run directory {twice[0]} is given twice")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def report_content(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Values of the template `report.html`, all but its images.

    Args:
        runs: one or more; several are compared.
    """
    several = len(runs) > 1
    named = [(f"{run.label}: " if several else "", run) for run in runs]
    columns = [
        {name: f"{value} ({more})" if more else value for name, value, more in facts(run)}
        for run in runs
    ]
    names = dict.fromkeys(name for column in columns for name in column)
    return {
        "title": " / ".join(run.label for run in runs),
        "labels": [run.label for run in runs],
        "verdicts": [label + verdict(run) for label, run in named],
        "provenance": [] if several else list(provenance(runs[0]).values()),
        "facts": facts(runs[0]),
        "comparison": [[name, *(column.get(name, "-") for column in columns)] for name in names],
        "problems": [label + text for label, run in named for text in warnings(run.series)],
        "held_out": _held_out(runs),
        "settings": _settings(runs),
        "metrics": _metrics(runs),
    }


def _held_out(runs: Sequence[RecordedRun]) -> list[tuple[str, list[str], list[dict[str, Any]]]]:
    """(task, headings, problems) of what was written before and after; a problem has a prompt and
    both completions.
    """
    parts = []
    for run in runs:
        for task in dict.fromkeys(record["task"] for record in run.held_out):
            found = {
                (record["step"], record["place"]): record
                for record in run.held_out
                if record["task"] == task
            }
            steps = sorted({step for step, _ in found})
            ends = list(dict.fromkeys((steps[0], steps[-1])))
            rows = [
                {
                    "prompt": record["prompt"],
                    "answer": record["answer"],
                    "written": [found.get((end, place), {}) for end in ends],
                }
                for (step, place), record in found.items()
                if step == ends[0]
            ]
            name = task if len(runs) == 1 else f"{run.label}, {task}"
            parts.append(
                (name, [f"after step {step}" if step else "before training" for step in ends], rows)
            )
    return parts


def _settings(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Every setting; first the ones that differ between runs."""
    texts = [
        {key: json.dumps(value, ensure_ascii=False) for key, value in run.config.items()}
        for run in runs
    ]
    keys = dict.fromkeys(key for text in texts for key in text)
    rows = [[key, *(text.get(key, "-") for text in texts)] for key in keys]
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    return {"rows": rows, "differs": [len(set(row[1:])) > 1 for row in rows]}


def _metrics(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Every metric, with its unit and meaning."""
    order = {name: place for place, name in enumerate(metric_names.METRICS)}
    names = sorted(
        {name for run in runs for name in run.series},
        key=lambda name: (order.get(name, len(order)), name),
    )
    rows = []
    for name in names:
        metric = metric_names.metric_of(name)
        if len(runs) == 1:
            values = runs[0].series[name][1]
            finite = np.where(np.isfinite(values), values, np.nan)
            chosen = [values[0], values[-1], np.fmin.reduce(finite), np.fmax.reduce(finite)]
        else:
            chosen = [run.series[name][1][-1] if name in run.series else math.nan for run in runs]
        show, unit = (percent, "share") if metric.unit == "fraction" else (number, metric.unit)
        rows.append([name, *(show(float(value)) for value in chosen), unit, metric.description])
    columns = (
        ["first", "last", "lowest", "highest"]
        if len(runs) == 1
        else [f"last, {run.label}" for run in runs]
    )
    return {"header": ["metric", *columns, "unit", "meaning"], "rows": rows}


def facts(run: RecordedRun) -> list[Fact]:
    """The facts of a run, in the order to show them; what it did not record has none."""
    series = run.series
    config = run.config
    rewards = finite_values(series, "reward/mean")
    discrepancy = finite_values(series, "discrepancy/mean")
    found = [Fact("Training steps", str(_steps(series)))]
    if len(rewards):
        before, after, which = _ends(rewards)
        found.append(Fact("Training reward", f"{before:.3f} → {after:.3f}", f"mean of {which}"))
    for name, steps, values, form in _scores(series):
        gain = values[-1] - values[0]
        best = int(np.argmax(values))
        gained = f"{100 * gain:+.1f} points" if form is percent else f"{gain:+.4g}"
        more = (
            f"{gained} from step {steps[0]} to {steps[-1]}; best {form(values[best])} at step "
            f"{steps[best]}"
        )
        found.append(Fact(f"Held-out {name}", f"{form(values[0])} → {form(values[-1])}", more))
    if len(discrepancy):
        c = _tolerance(series)
        share = percent(_mean(_over(series)))
        more = (
            "no budget c yet"
            if math.isnan(c)
            else f"budget c = {number(c)}, exceeded in {share} of steps"
        )
        found.append(Fact("Mean discrepancy", number(_mean(discrepancy)), more))
    if len(floors := finite_values(series, "mismatch/noise_floor")):
        found.append(
            Fact(
                "Noise floor",
                number(float(floors[-1])),
                "the engine against itself, last measurement",
            )
        )
    if len(multiplier := finite_values(series, "dual/multiplier")):
        moves = np.diff(multiplier)
        more = (
            f"rose {(moves > 0).sum()} times, fell {(moves < 0).sum()} times; last "
            f"{number(float(multiplier[-1]))}"
        )
        span = f"{number(float(multiplier.min()))} to {number(float(multiplier.max()))}"
        found.append(Fact("Lambda, lowest and highest", span, more))
    if len(speeds := finite_values(series, "throughput/tokens_per_second")):
        total = finite_values(series, "time/total")
        more = (
            f"median step; {duration(float(total.sum()) if len(total) else math.nan)} in "
            "training steps"
        )
        found.append(Fact("Throughput", f"{number(_median(speeds), ',.0f')} tokens/s", more))
    found += [fact for fact in (overlap(series), legs(series)) if fact]
    for replica, nodes in sorted(run.nodes.items()):
        work = (
            finite_values(series, f"replica/{replica}/{name}").sum()
            for name in ("tokens", "seconds", "restarts")
        )
        tokens, seconds, restarts = work
        more = (
            f"{duration(float(seconds))} at work, {restarts:.0f} restarts; on "
            f"{', '.join(dict.fromkeys(nodes))}"
        )
        found.append(Fact(f"Replica {replica}", f"{number(float(tokens), ',.0f')} tokens", more))
    engine = ", ".join(
        f"{name.rpartition('.')[2]} {config[name]}"
        for name in _ENGINE
        if config.get(name) is not None
    )
    engine *= config.get("algorithm.loss") != "likelihood"
    settings = {"Engine": engine, "Training data": config.get("task.train")}
    settings |= {"Started from": config.get("model.path") or "a fresh model"} if config else {}
    return found + [Fact(name, str(value)) for name, value in settings.items() if value]


def verdict(run: RecordedRun) -> str:
    """One sentence on what happened in a run."""
    learns = run.config.get("algorithm.loss") == "likelihood"
    said = []
    first = f"{_steps(run.series)} {'supervised' if learns else 'training'} steps"
    if model := run.config.get("model.path"):
        engine = (
            f"the engine {run.config.get('rollout.engine')} in "
            f"{run.config.get('rollout.precision')}"
        )
        first += f" of {model}" + f" against {engine}" * (not learns)
    if scores := _scores(run.series):
        name, steps, values, form = scores[0]
        ends = (
            f"{form(values[place])}{_interval(run, name, steps[place], form)}" for place in (0, -1)
        )
        said.append(f"held-out {name} went from {' to '.join(ends)}")
    elif len(rewards := finite_values(run.series, "reward/mean")):
        said.append(f"the training reward went from {' to '.join(map(number, _ends(rewards)[:2]))}")
    if story := describe_multiplier(run.series):
        said.append(story + "; lambda began at its cap" * _begins_at_cap(run))
    return f"{first}: {'; '.join(said)}." if said else f"{first}."


def provenance(run: RecordedRun) -> dict[str, str]:
    """When, by which command, with which code and on which machine a run was started; empty if it
    recorded none.
    """
    if not run.starts:
        return {}
    last = run.starts[-1]
    said = {
        "time": f"{run.starts[0].get('time')}",
        "command": f"{last.get('command')}",
        "code": f"dcmdp_jax {last.get('version')}"
        + (f", commit {last['commit']}" if last.get("commit") else ""),
        "machine": f"{last.get('machine')}, jax {last.get('jax')}, Python {last.get('python')}",
    }
    if len(run.starts) > 1:
        said["resumed"] = f"resumed {len(run.starts) - 1} times, last at step {last.get('step')}"
    return said


def _begins_at_cap(run: RecordedRun) -> bool:
    eta, first, cap = (
        run.config.get(f"algorithm.{n}")
        for n in ("dual_learning_rate", "multiplier", "multiplier_max")
    )
    return bool(
        eta
        and first == cap
        and (was := run.series.get("dual/multiplier"))
        and was[1][0] == np.float32(first)
    )


def describe_multiplier(series: Series) -> str:
    """Describe the course of lambda, budget and discrepancy; empty for a run that recorded none of
    them.
    """
    multiplier, discrepancy = (
        finite_values(series, name) for name in ("dual/multiplier", "discrepancy/mean")
    )
    over = _over(series)
    said = []
    if len(multiplier):
        first, last, peak = (
            number(float(value)) for value in (multiplier[0], multiplier[-1], multiplier.max())
        )
        at = int(series["dual/multiplier"][0][np.nanargmax(series["dual/multiplier"][1])])
        moved = f"lambda went from {first} to {last}, with its peak of {peak} at step {at}"
        said.append(f"lambda stayed at {first}" if multiplier.min() == multiplier.max() else moved)
    if len(over):
        said.append(f"the budget c was exceeded in {over.sum():.0f} of {len(over)} steps")
    if len(discrepancy) > 1:
        before, after, which = _ends(discrepancy)
        how = "fell" if after < before else "rose" if after > before else "stayed"
        said.append(f"the discrepancy {how} from {number(before)} to {number(after)} ({which})")
    return "; ".join(said)


def overlap(series: Series) -> Fact | None:
    """Describe the time that sampling ahead saves in a median step, and how; None for a run without
    it.
    """
    if "time/overlap" not in series:
        return None

    def seconds(*phases: str) -> str:
        return (
            f"{number(sum(_median(finite_values(series, f'time/{phase}')) for phase in phases))} s"
        )

    sampling = seconds("generate", "verify", "pack")
    training = seconds("push", "step")
    more = (
        f"a step with {sampling} of sampling and {training} of training takes "
        f"{seconds('total')}; the trainer waits "
    )
    more += f"{seconds('wait')}, the sampler {seconds('engine_idle')}"
    return Fact("Overlap won", f"{seconds('overlap')} a step", more)


def legs(series: Series) -> Fact | None:
    """Describe where the gap to the engine was, when it was last looked at; None for a run that did
    not.
    """
    names = "mismatch/leg_decoding_share", "mismatch/leg_decoding", "mismatch/leg_one_pass"
    if names[0] not in series:
        return None
    share, decoding, one_pass = (float(series[name][1][-1]) for name in names)
    more = (
        f"step {series[names[0]][0][-1]}: mean |dp| {number(decoding)} to the engine's own "
        "scores in one pass, "
    )
    more += f"{number(one_pass)} from there to the trainer"
    return Fact("Where the gap is", f"{percent(share)} while the engine decodes", more)


def warnings(series: Series) -> list[str]:
    """List the problems in a run's metrics that put its result in doubt, each with a remedy."""
    found = []
    window = max(1, len(finite_values(series, "reward/mean")) // 10)
    c = _tolerance(series)
    for name, (most, text) in _SHARES.items():
        taught = name == "reward/all_equal_groups" and "policy/teacher_kl" in series
        if (share := _mean(finite_values(series, name)[-window:])) > most and not taught:
            found.append(text.format(percent(share)))
    found += [
        text.format(total)
        for name, text in _COUNTS.items()
        if (total := finite_values(series, name).sum()) > 0
    ]
    if c < (floor := _mean(finite_values(series, "mismatch/noise_floor"))):
        found.append(
            f"The budget c = {c:.4g} is below the noise floor {floor:.4g}, the mismatch the "
            "engine shows against itself: no policy can meet it. Raise c."
        )
    if (stuck := _steps_at_cap(series)) >= _STUCK_STEPS:
        found.append(
            f"Lambda stayed at {finite_values(series, 'dual/multiplier').max():.4g} over the last "
            f"{stuck} steps with the budget exceeded: it is at its cap. Raise the cap or c."
        )
    found += [alarm.text for alarm in alarms(series)]
    if broken := [name for name, (_, values) in series.items() if not np.isfinite(values).all()]:
        found.append(f"Values that are not finite were recorded for {', '.join(broken)}.")
    return found


def _steps(series: Series) -> int:
    """The last training step; 0 where only evaluations were recorded."""
    found = series.get("reward/mean", series.get("policy/loss"))
    return int(found[0][-1]) if found else 0


def _ends(values: np.ndarray) -> tuple[float, float, str]:
    """The means over the first and the last tenth of the steps, at least one, and which steps these
    are.
    """
    window = max(1, len(values) // 10)
    which = f"first and last {f'{window} steps' if window > 1 else 'step'}"
    return _mean(values[:window]), _mean(values[-window:]), which


def _tolerance(series: Series) -> float:
    values = finite_values(series, "dual/tolerance")
    return float(values[-1]) if len(values) else math.nan


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _over(series: Series) -> np.ndarray:
    """[n] float64, 1 where what c bounds exceeds it, else 0, at the steps that recorded both."""
    recorded = (
        series.get(name, (np.zeros(0), np.zeros(0)))
        for name in (bounded_metric(series), "dual/tolerance")
    )
    (steps, values), (known, tolerance) = recorded
    _, left, right = np.intersect1d(steps, known, return_indices=True)
    over = values[left] - tolerance[right]
    return (over[np.isfinite(over)] > 0).astype(np.float64)


def _steps_at_cap(series: Series) -> int:
    """Count the steps at the end of the run with lambda at its maximum and the discrepancy over
    budget.
    """
    multiplier = finite_values(series, "dual/multiplier")
    over = _over(series)
    if not 0 < len(over) <= len(multiplier) or multiplier.min() == multiplier.max():
        return 0
    capped = (multiplier[-len(over) :] == multiplier.max()) & (over > 0)
    return len(capped) if capped.all() else int(np.argmin(capped[::-1]))


def _scores(series: Series) -> list[tuple[str, np.ndarray, np.ndarray, Callable[[float], str]]]:
    """(`<task>/avg@K` or `<task>/pass@K`, steps that evaluated it, its values, how to write it),
    avg@K first.
    """
    found = []
    for name in sorted(
        (name for name in series if name.startswith("eval/")), key=lambda x: ("/avg@" not in x, x)
    ):
        steps, values = series[name]
        if (finite := np.isfinite(values)).any():
            form = metric_names.form_of_score(name, values[finite], series)
            found.append((name.removeprefix("eval/"), steps[finite], values[finite], form))
    return found


def _interval(run: RecordedRun, score: str, step: int, form: Callable[[float], str]) -> str:
    """The 95% interval of a score at one of its steps, where it was recorded."""
    found = []
    for bound in ("low", "high"):
        name = f"eval_interval/{score.rpartition('/')[0]}/{bound}"
        steps, values = run.series.get(name, (np.zeros(0), np.zeros(0)))
        found += map(form, values[steps == step].tolist())
    return f" (95% interval {found[0]} to {found[1]})" if len(found) == 2 else ""
