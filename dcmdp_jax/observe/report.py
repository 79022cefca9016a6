"""What a run did: its record, facts, verdict, warnings, and the report of plots and a page."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.dotted_names import flatten
from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.number_format import duration, number, percent
from dcmdp_jax.observe import jsonl, metric_names, page_kit, plots
from dcmdp_jax.observe.alarms import (
    alarms,
    bounded_metric,
    finite_points,
    finite_values,
    last_value,
    until,
)
from dcmdp_jax.observe.collapse import collapse_signs
from dcmdp_jax.observe.metrics_io import Series, read_metrics, without_placeholder

_STUCK_STEPS = 5
"""Last steps with lambda at its cap that are worth a warning: a guess."""
_ENGINE_FORMATS = ("precision", "compute_dtype", "kv_cache_dtype")
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
    "reward/verifier_over_budget": "The verifier's time for a batch ran out on {:.0f} answers. "
    "Raise task.verifier_budget.",
    "optimizer/skipped_updates": "{:.0f} optimizer updates were skipped because their gradient "
    "was not finite.",
}
"""Metric -> warning where its sum is above 0."""


@dataclasses.dataclass(frozen=True)
class Fact:
    """One thing to know about a run: its name, the value, and details ("" if none)."""

    name: str
    value: str
    details: str = ""

    @property
    def text(self) -> str:
        """The value with the details."""
        if not self.details:
            return self.value
        return f"{self.value} ({self.details})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
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
    held_out: list[jsonl.Record]
    starts: list[jsonl.Record]
    nodes: dict[str, list[str]]

    def until(self, step: int) -> Self:
        """The same run with its metrics up to a step."""
        return dataclasses.replace(self, series=until(self.series, step))


Runs = Sequence[RecordedRun]


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
    series = {}
    if not without_metrics or (run_dir / jsonl.METRICS_FILE).is_file():
        series = read_metrics(run_dir)
    config = {}
    path = run_dir / jsonl.CONFIG_FILE
    if path.exists():
        config = flatten(read_json_object(path))

    nodes = {}
    for path in run_dir.glob("vllm/**/nodes.txt"):
        # A single replica has the directory vllm/ to itself.
        replica = path.parent.name.replace("vllm", "0")
        nodes[replica] = path.read_text(encoding="utf-8").splitlines()

    # While the first steps measure c, what compares with c is a placeholder.
    measured_steps = config.get("algorithm.tolerance_steps", 0)
    return RecordedRun(
        label=label or run_dir.resolve().name,
        series=without_placeholder(series, measured_steps),
        config=config,
        held_out=jsonl.read(run_dir / jsonl.HELD_OUT_FILE),
        # They only describe the run: a broken line is left out here, and no error.
        starts=jsonl.readable(run_dir / jsonl.STARTS_FILE),
        nodes=nodes,
    )


def write_report(run_dirs: Sequence[str | Path], out_dir: str | Path) -> Path:
    """Write `out_dir`/plots/*.png and `out_dir`/report.html; several runs are compared.

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
    figures = page_kit.page_figures(
        ((stem, caption, draw(series)) for stem, (caption, draw) in plots.FIGURES.items()),
        Path(out_dir) / jsonl.PLOTS_DIRECTORY,
    )
    report = Path(out_dir) / jsonl.REPORT_FILE
    page = page_kit.render_page("report.html", figures=figures, **report_content(runs))
    atomic_write(report, page)
    return report


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that are unique.

    Raises:
        UserError: if one is there twice.
    """
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise UserError(f"run directory {path} is given twice")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def report_content(runs: Runs) -> dict[str, Any]:
    """Values of the template `report.html`, all but its images.

    Args:
        runs: one or more; several are compared.
    """
    several = len(runs) > 1
    problems = []
    for run in runs:
        label = f"{run.label}: " if several else ""
        problems += [label + text for text in warnings(run.series)]
    return {
        "title": " / ".join(run.label for run in runs),
        "labels": [run.label for run in runs],
        "verdicts": [verdict(run) for run in runs],
        "provenance": [] if several else provenance(runs[0]).values(),
        "facts": facts(runs[0]),
        "comparison": _comparison(runs),
        "problems": problems,
        "collapses": [collapse_signs(run.series) for run in runs],
        "held_out": _held_out(runs),
        "settings": _settings(runs),
        "metrics": _metrics(runs),
    }


def _comparison(runs: Runs) -> list[list[str]]:
    """The facts of all runs: a row is a fact's name and its value in each."""
    columns = []
    for run in runs:
        columns.append({fact.name: fact.text for fact in facts(run)})
    return _rows_by_key(columns)


def _rows_by_key(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Rows of key and texts, "-" where a column has none, in the order of first occurrence."""
    keys = dict.fromkeys(itertools.chain.from_iterable(columns))
    return [[key, *(column.get(key, "-") for column in columns)] for key in keys]


def _held_out(runs: Runs) -> list[tuple[str, list[str], list[jsonl.Record]]]:
    """(task, headings, problems) of what was written before and after training.

    A problem has a prompt, an answer and both completions.
    """
    sections = []
    for run in runs:
        by_task: dict[str, dict[tuple[int, int], jsonl.Record]] = {}
        for record in run.held_out:
            records = by_task.setdefault(record["task"], {})
            records[record["step"], record["place"]] = record

        for task, records in by_task.items():
            steps = [step for step, _ in records]
            ends = sorted({min(steps), max(steps)})
            problems = []
            for (step, problem), record in records.items():
                if step == ends[0]:
                    written = [records.get((end, problem), {}) for end in ends]
                    problems.append(record | {"written": written})
            title = task if len(runs) == 1 else f"{run.label}, {task}"
            headings = [f"after step {step}" if step else "before training" for step in ends]
            sections.append((title, headings, problems))
    return sections


def _settings(runs: Runs) -> dict[str, Any]:
    """Every setting, those that differ between runs first."""
    columns = []
    for run in runs:
        texts = {key: json.dumps(value, ensure_ascii=False) for key, value in run.config.items()}
        columns.append(texts)
    rows = _rows_by_key(columns)
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    return {"rows": rows, "differs": [len(set(row[1:])) > 1 for row in rows]}


def _metrics(runs: Runs) -> dict[str, Any]:
    """Every metric, with its unit and meaning."""
    order = {name: index for index, name in enumerate(metric_names.METRICS)}
    names = sorted(
        set().union(*(run.series for run in runs)),
        key=lambda name: (order.get(name, len(order)), name),
    )
    if len(runs) == 1:
        columns = ["first", "last", "lowest", "highest"]
    else:
        columns = [f"last, {run.label}" for run in runs]

    rows = []
    for name in names:
        if len(runs) == 1:
            values = runs[0].series[name][1]
            finite = np.where(np.isfinite(values), values, np.nan)
            row_values = [values[0], values[-1], np.fmin.reduce(finite), np.fmax.reduce(finite)]
        else:
            row_values = []
            for run in runs:
                value = math.nan
                if name in run.series:
                    value = run.series[name][1][-1]
                row_values.append(value)
        metric = metric_names.metric_of(name)
        write = number
        unit = metric.unit
        if unit == "fraction":
            write = percent
            unit = "share"
        rows.append([name, *map(write, row_values), unit, metric.description])
    return {"header": ["metric", *columns, "unit", "meaning"], "rows": rows}


def facts(run: RecordedRun) -> list[Fact]:
    """The facts that a run recorded, in the order to show them."""
    series = run.series
    run_facts = [Fact("Training steps", str(_steps(series)))]
    run_facts += _score_facts(series)
    run_facts += _mismatch_facts(series)

    speeds = finite_values(series, "throughput/tokens_per_second")
    if len(speeds):
        seconds = finite_values(series, "time/total")
        total = math.nan
        if len(seconds):
            total = seconds.sum()
        speed = f"{number(_median(speeds), ',.0f')} tokens/s"
        details = f"median step; {duration(total)} in training steps"
        run_facts.append(Fact("Throughput", speed, details=details))
    run_facts += _overlap_facts(series)
    run_facts += _leg_facts(series)
    run_facts += _replica_facts(run)
    run_facts += _setting_facts(run.config)
    return run_facts


def _score_facts(series: Series) -> Iterator[Fact]:
    rewards = finite_values(series, "reward/mean")
    if len(rewards):
        first, last, steps = _ends(rewards)
        yield Fact("Training reward", f"{first:.3f} → {last:.3f}", details=f"mean of {steps}")
    for score in _scores(series):
        values = score.values
        gain = values[-1] - values[0]
        gained = f"{100 * gain:+.1f} points" if score.text is percent else f"{gain:+.4g}"
        best = np.argmax(values)
        yield Fact(
            f"Validation {score.name}",
            f"{score.text(values[0])} → {score.text(values[-1])}",
            details=f"{gained} from step {score.steps[0]} to {score.steps[-1]}; best "
            f"{score.text(values[best])} at step {score.steps[best]}",
        )


def _mismatch_facts(series: Series) -> Iterator[Fact]:
    discrepancy = finite_values(series, "discrepancy/mean")
    if len(discrepancy):
        c = last_value(series, "dual/tolerance")
        details = "no tolerance c yet"
        if not math.isnan(c):
            share = percent(_mean(_over_budget(series)))
            details = f"tolerance c = {number(c)}, exceeded in {share} of steps"
        yield Fact("Mean discrepancy", number(_mean(discrepancy)), details=details)

    floor = last_value(series, "mismatch/noise_floor")
    if not math.isnan(floor):
        details = "the engine against itself, last measurement"
        yield Fact("Noise floor", number(floor), details=details)

    multiplier = finite_values(series, "dual/multiplier")
    if len(multiplier):
        moves = np.diff(multiplier)
        yield Fact(
            "Lambda, lowest and highest",
            f"{number(multiplier.min())} to {number(multiplier.max())}",
            details=f"rose {(moves > 0).sum()} times, fell {(moves < 0).sum()} times; last "
            f"{number(multiplier[-1])}",
        )


def _replica_facts(run: RecordedRun) -> Iterator[Fact]:
    for replica, nodes in sorted(run.nodes.items()):
        tokens = finite_values(run.series, f"replica/{replica}/tokens").sum()
        seconds = finite_values(run.series, f"replica/{replica}/seconds").sum()
        restarts = finite_values(run.series, f"replica/{replica}/restarts").sum()
        yield Fact(
            f"Replica {replica}",
            f"{number(tokens, ',.0f')} tokens",
            details=f"{duration(seconds)} at work, {restarts:.0f} restarts; on "
            f"{', '.join(dict.fromkeys(nodes))}",
        )


def _setting_facts(config: Mapping[str, Any]) -> Iterator[Fact]:
    if config.get("rollout.engine") and not _supervised(config):
        formats = []
        for name in _ENGINE_FORMATS:
            value = config.get(f"rollout.{name}")
            if value is not None:
                formats.append(f"{name} {value}")
        yield Fact("Engine", config["rollout.engine"], details=", ".join(formats))
    if config.get("task.train"):
        yield Fact("Training data", str(config["task.train"]))
    if config:
        yield Fact("Started from", config.get("model.path") or "a fresh model")


def _supervised(config: Mapping[str, Any]) -> bool:
    return config.get("algorithm.loss") == "likelihood"


def verdict(run: RecordedRun) -> dict[str, str]:
    """What happened in a run: at most four labels, each with its text."""
    config = run.config
    supervised = _supervised(config)
    kind = "supervised" if supervised else "training"
    trained = f"{_steps(run.series)} {kind} steps"
    if config.get("model.path"):
        trained += f" of {config['model.path']}"
        if not supervised:
            engine = f"{config.get('rollout.engine')} in {config.get('rollout.precision')}"
            trained += f" against the engine {engine}"
    lines = {"trained": trained}

    scores = _scores(run.series)
    rewards = finite_values(run.series, "reward/mean")
    if scores:
        first = _score_at(run, scores[0], 0)
        last = _score_at(run, scores[0], -1)
        lines["score"] = f"validation {scores[0].name} from {first} to {last}"
    elif len(rewards):
        first, last, _ = _ends(rewards)
        lines["score"] = f"training reward from {number(first)} to {number(last)}"
    multiplier = describe_multiplier(run.series)
    if multiplier and _begins_at_cap(run):
        multiplier += ", began at its cap"
    lines["lambda"] = multiplier
    lines["discrepancy"] = describe_discrepancy(run.series)
    return {label: text for label, text in lines.items() if text}


def provenance(run: RecordedRun) -> dict[str, str]:
    """When, by which command, code and machine a run was started; empty if it recorded none."""
    if not run.starts:
        return {}
    last = run.starts[-1]
    code = f"dcmdp_jax {last.get('version')}"
    if last.get("commit"):
        code += f", commit {last['commit']}"
    origin = {
        "time": f"{run.starts[0].get('time')}",
        "command": f"{last.get('command')}",
        "code": code,
        "machine": f"{last.get('machine')}, jax {last.get('jax')}, Python {last.get('python')}",
    }
    if len(run.starts) > 1:
        origin["resumed"] = f"resumed {len(run.starts) - 1} times, last at step {last.get('step')}"
    return origin


def _begins_at_cap(run: RecordedRun) -> bool:
    config = run.config
    cap = config.get("algorithm.multiplier_max")
    if not config.get("algorithm.dual_learning_rate") or config.get("algorithm.multiplier") != cap:
        return False
    # A method with a lambda of its own records another one than the setting.
    return run.series["dual/multiplier"][1][0] == np.float32(cap)


def describe_multiplier(series: Series) -> str:
    """The course of lambda; empty if it was not recorded."""
    steps, multiplier = finite_points(series, "dual/multiplier")
    if not len(multiplier):
        return ""
    first = number(multiplier[0])
    last = number(multiplier[-1])
    if multiplier.min() == multiplier.max():
        return f"stayed at {first}"
    peak = np.argmax(multiplier)
    return f"from {first} to {last}, peak {number(multiplier[peak])} at step {steps[peak]}"


def describe_discrepancy(series: Series) -> str:
    """The course of the mean discrepancy and the steps over c; empty if neither was recorded."""
    discrepancy = finite_values(series, "discrepancy/mean")
    over = _over_budget(series)
    clauses = []
    if len(discrepancy) > 1:
        first, last, steps = _ends(discrepancy)
        clauses.append(f"from {number(first)} to {number(last)} ({steps})")
    if len(over):
        clauses.append(f"above the tolerance c in {over.sum()} of {len(over)} steps")
    return "; ".join(clauses)


def _overlap_facts(series: Series) -> Iterator[Fact]:
    """The time that sampling ahead saves in a median step."""
    if "time/overlap" not in series:
        return

    def seconds(*phases: str) -> str:
        total = sum(_median(finite_values(series, f"time/{phase}")) for phase in phases)
        return f"{number(total)} s"

    yield Fact(
        "Overlap won",
        f"{seconds('overlap')} a step",
        details=f"a step with {seconds('generate', 'verify', 'pack')} of sampling and "
        f"{seconds('weight_sync', 'step')} of training takes {seconds('total')}; the trainer waits "
        f"{seconds('wait')}, the sampler {seconds('engine_idle')}",
    )


def _leg_facts(series: Series) -> Iterator[Fact]:
    """Where the mismatch arose, when last measured."""
    if "mismatch/leg_decoding_share" not in series:
        return
    steps, shares = series["mismatch/leg_decoding_share"]
    decoding = series["mismatch/leg_decoding"][1][-1]
    one_pass = series["mismatch/leg_one_pass"][1][-1]
    yield Fact(
        "Mismatch from decoding",
        percent(shares[-1]),
        details=f"step {steps[-1]}: mean |p - q| {number(decoding)} from decode to prefill, "
        f"{number(one_pass)} from prefill to the trainer",
    )


def warnings(series: Series) -> list[str]:
    """List the problems in a run's metrics that put its result in doubt, each with a remedy."""
    texts = []
    window = max(1, len(finite_values(series, "reward/mean")) // 10)
    for name, (limit, text) in _SHARES.items():
        # A teacher teaches where rewards are equal too.
        if name == "reward/all_equal_groups" and "policy/teacher_kl" in series:
            continue
        share = _mean(finite_values(series, name)[-window:])
        if share > limit:
            texts.append(text.format(percent(share)))
    for name, text in _COUNTS.items():
        total = finite_values(series, name).sum()
        if total > 0:
            texts.append(text.format(total))

    c = last_value(series, "dual/tolerance")
    floor = _mean(finite_values(series, "mismatch/noise_floor"))
    if c < floor:
        texts.append(
            f"The tolerance c = {c:.4g} is below the noise floor {floor:.4g}, the mismatch the "
            "engine shows against itself: no policy can meet it. Raise c."
        )
    stuck = _steps_at_cap(series)
    if stuck >= _STUCK_STEPS:
        texts.append(
            f"Lambda stayed at {finite_values(series, 'dual/multiplier').max():.4g} over the last "
            f"{stuck} steps with c exceeded: it is at its cap. Raise the cap or c."
        )

    texts += [alarm.text for alarm in alarms(series)]
    broken = [name for name, (_, values) in series.items() if not np.isfinite(values).all()]
    if broken:
        texts.append(f"Values that are not finite were recorded for {', '.join(broken)}.")
    return texts


def _steps(series: Series) -> int:
    """The last training step; 0 where only evaluations were recorded."""
    for name in ("reward/mean", "policy/loss"):
        if name in series:
            return series[name][0][-1]
    return 0


def _ends(values: np.ndarray) -> tuple[float, float, str]:
    """Means over the first and the last tenth of the steps, at least one, and the steps' name."""
    window = max(1, len(values) // 10)
    steps = f"{window} steps" if window > 1 else "step"
    return _mean(values[:window]), _mean(values[-window:]), f"first and last {steps}"


def _mean(values: np.ndarray) -> float:
    if not len(values):
        return math.nan
    return values.mean()


def _median(values: np.ndarray) -> float:
    if not len(values):
        return math.nan
    return np.median(values)


def _over_budget(series: Series) -> np.ndarray:
    """[n] bool, whether what c bounds exceeds it, at the steps that recorded both."""
    if not {bounded_metric(series), "dual/tolerance"} <= series.keys():
        return np.zeros(0, bool)
    steps, values = series[bounded_metric(series)]
    tolerance_steps, tolerance = series["dual/tolerance"]
    _, at, tolerance_at = np.intersect1d(steps, tolerance_steps, return_indices=True)
    excess = values[at] - tolerance[tolerance_at]
    return excess[np.isfinite(excess)] > 0


def _steps_at_cap(series: Series) -> int:
    """Count the last steps with lambda at its maximum and the discrepancy above c."""
    multiplier = finite_values(series, "dual/multiplier")
    over = _over_budget(series)
    if not 0 < len(over) <= len(multiplier) or multiplier.min() == multiplier.max():
        return 0
    capped = (multiplier[-len(over) :] == multiplier.max()) & over
    if capped.all():
        return len(capped)
    return np.argmin(capped[::-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Score:
    """A held-out score: `<task>/avg@K` or `<task>/pass@K`, its course, and how to write a value."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    text: Callable[[float], str]


def _scores(series: Series) -> list[_Score]:
    """The scores at the steps that evaluated them, avg@K first."""
    scores = []
    for name in sorted(series, key=lambda name: ("/avg@" not in name, name)):
        steps, values = finite_points(series, name)
        if name.startswith("eval/") and len(steps):
            scores.append(
                _Score(
                    name=name.removeprefix("eval/"),
                    steps=steps,
                    values=values,
                    text=metric_names.form_of_score(name, values, series),
                )
            )
    return scores


def _score_at(run: RecordedRun, score: _Score, index: int) -> str:
    """A value of a score, with its 95% interval where it was recorded."""
    value = score.text(score.values[index])
    bounds = []
    for bound in ("low", "high"):
        name = f"eval_interval/{score.name.rpartition('/')[0]}/{bound}"
        steps, values = run.series.get(name, (np.zeros(0), np.zeros(0)))
        bounds += map(score.text, values[steps == score.steps[index]])
    if len(bounds) < 2:
        return value
    return f"{value} (95% interval {bounds[0]} to {bounds[1]})"
