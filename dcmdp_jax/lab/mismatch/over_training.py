"""What recordings hold: one file by its columns; many files of a run, measured over its steps,
ranks and sources.
"""

import collections
import glob
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dcmdp_jax.errors import UserError, shorten, shorten_name
from dcmdp_jax.lab.mismatch.formats import (
    Place,
    RecordedFile,
    files_below,
    format_of,
    identify,
    rows_of,
)
from dcmdp_jax.lab.mismatch.pairs import (
    Statistics,
    TokenPairs,
    measure,
    probability_difference,
    recommend,
)
from dcmdp_jax.lab.mismatch.recording import Columns, KeptRows, Row, checked_row, pairs_of
from dcmdp_jax.lab.mismatch.recording_files import LeftOut, UnreadableError, read_rows
from dcmdp_jax.observe.alarms import OF_A_BUDGET, Alarm, Series, alarms
from dcmdp_jax.observe.jsonl import METRICS_FILE, ROLLOUTS_DIRECTORY

_SHOWN = 5
_FIRST_STEPS = 5
# A rank or source stands out where its mean is this many times the others' median, and not within
# float32's rounding.
_STANDS_OUT = 3.0
_ROUNDING = 1e-5


class StepMismatch(NamedTuple):
    """Mismatch of one training step.

    Attributes:
        step: its number, as the framework counts.
        statistics: over all its tokens.
        entropy: mean over its tokens, nats; NaN if not known.
        lag: oldest weights that sampled a token of it, in steps; NaN if not known.
        engine_surprise: mean of -log q, nats.
    """

    step: int
    statistics: Statistics
    entropy: float
    lag: float
    engine_surprise: float


class Slice(NamedTuple):
    """Mismatch of one rank or one source over all steps: its name, size, and mean |p - q|."""

    name: str
    completions: int
    tokens: int
    mean: float


class OverTraining(NamedTuple):
    """Mismatch over a run.

    Attributes:
        steps: in order.
        ranks, sources: empty where there is only one or none is recorded.
        odd_rank: the first rank that stands out, in words: no budget bounds other weights on one
            rank; "" without one.
        notes: sentences about outliers among ranks and sources.
        alarms: alarms over the steps; see `observe.alarms`.
        tolerance: c that the alarms compare with; NaN if there is none.
        tolerance_from: where it comes from.
    """

    steps: tuple[StepMismatch, ...]
    ranks: tuple[Slice, ...]
    sources: tuple[Slice, ...]
    odd_rank: str
    notes: tuple[str, ...]
    alarms: tuple[Alarm, ...]
    tolerance: float
    tolerance_from: str

    def without_recommendation(self) -> "OverTraining":
        """The same where no c is recommended: without the alarms that compare with one."""
        if not self.tolerance_from.startswith("recommended"):
            return self
        kept = tuple(alarm for alarm in self.alarms if alarm.name not in OF_A_BUDGET)
        return self._replace(alarms=kept, tolerance=np.nan, tolerance_from="")


class Recording(NamedTuple):
    """Content of a recording.

    Attributes:
        pairs: the tokens.
        rows: in the file.
        kept_every: 1 if all rows are in `pairs`; k if only every k-th is, because of `max_tokens`.
        left_out: tokens and lines that are not in `pairs` nor in `rows`.
        over_training: None where the steps are not known.
    """

    pairs: TokenPairs
    rows: int
    kept_every: int
    left_out: LeftOut
    over_training: OverTraining | None = None


def find_files(paths: Sequence[str], left_out: LeftOut) -> list[RecordedFile]:
    """The recorded files of paths, in the order of steps and ranks.

    Args:
        paths: files, directories, which are searched at any depth, and globs.
        left_out: is told of the newest file of several if it is not readable: it may still be
            written.

    Raises:
        UserError: in one line, if there is none, no format knows one of them (with its keys and the
            formats tried), or they are of several frameworks.
    """
    found: dict[Path, RecordedFile] = {}
    for text in paths:
        path = Path(text)
        if (path / METRICS_FILE).is_file() and not any(
            path.glob(f"{ROLLOUTS_DIRECTORY}/*.parquet")
        ):
            raise UserError(
                f"{text}: a run directory without recorded tokens ({ROLLOUTS_DIRECTORY}/); sample "
                f"anew with its model by --model={text}, or record by observe.rollouts_every_steps"
            )
        roots = [path] if path.exists() else sorted(map(Path, glob.glob(text, recursive=True)))
        files = [
            each for root in roots for each in (files_below(root) if root.is_dir() else [root])
        ]
        if not files and roots == [path]:
            raise UserError(f"{text}: no .jsonl, .parquet or .pt file in this directory or below")
        if not files:
            raise FileNotFoundError(2, "No such file or directory", text)
        newest = max(files, key=lambda each: each.stat().st_mtime) if len(files) > 1 else None
        for each in files:
            try:
                if (one := identify(each, left_out)) is not None:
                    found.setdefault(each.resolve(), one)
            except UnreadableError:
                if each != newest:
                    raise
                left_out.unfinished.append(str(each))
    if not found:
        raise UserError(
            f"{shorten_name(', '.join(paths))}: no row in any file{left_out.after('; left out: ')}"
        )
    _refuse_mixed(list(found.values()))
    return sorted(
        found.values(),
        key=lambda each: ([-1 if at is None else at for at in each.place], each.path),
    )


def read_run(
    files: Sequence[RecordedFile],
    left_out: LeftOut,
    *,
    max_tokens: int,
    allow_gaps: bool = False,
    tolerance: float | None = None,
    metrics: Series | None = None,
) -> Recording:
    """Read and measure a recording, with one step and the kept tokens in memory at a time.

    Args:
        files: result of `find_files`.
        left_out: is told what is not read. Ranks that the last step still lacks are.
        max_tokens: tokens to keep at most.
        allow_gaps: go on where steps or ranks are missing in the middle.
        tolerance: c for the alarms; None: the run's own, else the one recommended for the first
            steps.
        metrics: the run's own, if known: the alarms look at them.

    Raises:
        UserError: in one line, if a step or rank is missing in the middle or comes twice, or a row
            is wrong.
    """
    if not allow_gaps:
        left_out.unfinished += _refuse_gaps([file.place for file in files])
    _refuse_doubles(files)
    kept = KeptRows(max_tokens)
    places = set()
    ranks, sources = (collections.defaultdict(lambda: np.zeros(3)) for _ in range(2))

    def rows() -> Iterator[tuple[int | None, Row]]:
        for file in files:
            for number, (place, source, columns, cells) in enumerate(rows_of(file, left_out)):
                row = checked_row(f"{file.path}, row {number}", cells, columns, left_out)
                kept.add(row)
                if len(row["token"]):
                    places.add(place)
                    delta = probability_difference(row["train"], row["rollout"])
                    for sums, part in ((ranks, place.rank), (sources, source)):
                        if part is not None:
                            sums[part] += (1, len(delta), delta.sum())
                    yield place.step, row

    steps: dict[int, StepMismatch] = {}
    for step, group in itertools.groupby(rows(), key=operator.itemgetter(0)):
        if step is None:
            collections.deque(group, maxlen=0)
        elif step in steps:
            raise UserError(
                f"step {step}: its rows are not together; probe the files of one run alone"
            )
        else:
            steps[step] = _step_mismatch(step, [row for _, row in group])
    if not allow_gaps:
        _refuse_gaps(places)
    where = str(files[0].path) if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
    pairs = kept.pairs(where, format_of(files[0].framework).columns, left_out)
    slices = _slices(ranks, "rank {}"), _slices(sources, "{}")
    over = (
        _over_training([steps[step] for step in sorted(steps)], *slices, tolerance, metrics)
        if steps
        else None
    )
    return Recording(pairs, kept.rows, kept.every, left_out, over)


def read_recording(path: str | Path, columns: Columns, *, max_tokens: int) -> Recording:
    """Read a recording in bounded memory (`KeptRows`); every row is checked, kept or not.

    Args:
        path: .parquet, or .jsonl or .jsonl.gz with one JSON object a line.
        columns: names of the columns.
        max_tokens: tokens to keep at most, except that one row is always kept.

    Raises:
        UserError: one line naming file, row, column and what is wrong: a column that is not there
            (with the ones that are), there twice or given for two things, text that is not UTF-8,
            cells of different lengths, a value that the column cannot have, log-probs in base 2 or
            10 or never filled in.
        FileNotFoundError: if the file is missing.
    """
    path = Path(path)
    options: dict[str, str] = {}
    for option, name in columns.options().items():
        if (other := options.setdefault(name, option)) != option:
            raise UserError(
                f"{other} and {option}: both are {shorten(name)}; name a column of its own for each"
            )
    kept = KeptRows(max_tokens)
    left_out = LeftOut()
    for number, cells in enumerate(read_rows(path, columns.options(), left_out=left_out)):
        kept.add(checked_row(f"{path}, row {number}", cells, columns, left_out))
    return Recording(kept.pairs(path, columns, left_out), kept.rows, kept.every, left_out)


def _step_mismatch(step: int, rows: list[Row]) -> StepMismatch:
    pairs = pairs_of(rows)
    entropy = np.nan if pairs.entropies is None else float(pairs.entropies.mean(dtype=np.float64))
    lag = np.nan if pairs.lags is None else float(pairs.lags.max())
    return StepMismatch(
        step, measure(pairs), entropy, lag, -float(pairs.rollout_logprobs.mean(dtype=np.float64))
    )


def _slices(sums: Mapping[int | str, np.ndarray], title: str) -> list[Slice]:
    """Rows, tokens and sum of |p - q| of each part as its `Slice`, in order."""
    parts = ((part, *sums[part].tolist()) for part in sorted(sums))
    return [
        Slice(title.format(part), int(rows), int(tokens), total / tokens)
        for part, rows, tokens, total in parts
    ]


def _over_training(
    steps: list[StepMismatch],
    ranks: list[Slice],
    sources: list[Slice],
    tolerance: float | None,
    metrics: Series | None,
) -> OverTraining:
    odd = _standing_out(ranks)
    notes = [*odd, *_standing_out(sources)]
    series = _series(steps) if metrics is None else dict(metrics)
    said = "--tolerance"
    if tolerance is None and "dual/tolerance" in series:
        tolerance = float(series["dual/tolerance"][1][-1])
        said = "the run's own"
    if tolerance is None:
        first = steps[:_FIRST_STEPS]
        tokens = np.array([step.statistics.tokens for step in first], np.float64)
        mean = float(np.average([step.statistics.mean for step in first], weights=tokens))
        tolerance = recommend(mean, None, None).tolerance
        said = f"recommended for the first {len(first)} steps"
    numbers = np.array([step.step for step in steps])
    if said != "the run's own" and np.isfinite(tolerance):
        series["dual/tolerance"] = (numbers, np.full(len(numbers), tolerance))
    return OverTraining(
        tuple(steps),
        tuple(ranks if len(ranks) > 1 else ()),
        tuple(sources if len(sources) > 1 else ()),
        odd[0].partition(":")[0] if odd else "",
        tuple(notes),
        tuple(alarms(series)),
        tolerance,
        said,
    )


def _series(steps: list[StepMismatch]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The metrics that the alarms look at, as a run of ours has them."""
    numbers = np.array([step.step for step in steps], np.int64)
    values: dict[str, list[float]] = {
        "discrepancy/mean": [step.statistics.mean for step in steps],
        "mismatch/k1": [step.statistics.k1 for step in steps],
        "mismatch/k3": [step.statistics.k3 for step in steps],
        "mismatch/effective_sample_size": [step.statistics.effective_sample_size for step in steps],
        "policy/entropy": [step.entropy for step in steps],
        "engine/surprise": [step.engine_surprise for step in steps],
        "mismatch/median_log_ratio": [step.statistics.median_log_ratio for step in steps],
        "rollout/staleness_max": [step.lag for step in steps],
    }
    return {
        name: (numbers, np.array(x, np.float64))
        for name, x in values.items()
        if np.isfinite(x).all()
    }


def _standing_out(parts: list[Slice]) -> list[str]:
    """A line for each part that differs far more than the others: a rank with other weights, a
    broken environment.
    """
    lines = []
    for part in parts:
        others = [each.mean for each in parts if each is not part]
        usual = float(np.median(others)) if others else np.inf
        if part.mean > max(_STANDS_OUT * usual, _ROUNDING):
            lines.append(
                f"{part.name} stands out: mean |dp| {part.mean:.2g}, the others' median is "
                f"{usual:.2g}."
            )
    return lines


def _refuse_mixed(files: list[RecordedFile]) -> None:
    first: dict[str, Path] = {}
    for file in files:
        first.setdefault(file.framework, file.path)
    if len(first) > 1:
        said = ", ".join(f"{name} ({path})" for name, path in first.items())
        raise UserError(f"recordings of several frameworks in one call: {said}; probe each alone")


def _refuse_doubles(files: Sequence[RecordedFile]) -> None:
    seen: dict[Place, Path] = {}
    for file in files:
        if (
            file.place.step is not None
            and (other := seen.setdefault(file.place, file.path)) != file.path
        ):
            rank = "" if file.place.rank is None else f", rank {file.place.rank}"
            raise UserError(
                f"step {file.place.step}{rank} is in {other} and in {file.path}; probe one run at "
                "a time"
            )


def _refuse_gaps(places: Iterable[Place]) -> list[str]:
    """One line for a step that is missing between others, and for a rank that is; what the last
    step lacks.
    """
    ranks: dict[int, set[int]] = {}
    for place in places:
        if place.step is not None:
            ranks.setdefault(place.step, set()).update(() if place.rank is None else (place.rank,))
    steps = sorted(ranks)
    spacing = min((b - a for a, b in itertools.pairwise(steps)), default=1)
    if missing := [
        step for a, b in itertools.pairwise(steps) for step in range(a + spacing, b, spacing)
    ]:
        raise UserError(
            f"{_listed('step', missing)} between steps {steps[0]} and {steps[-1]}, {spacing} "
            "apart elsewhere; add the files, or read on without them by --allow-gaps"
        )
    all_of_them = set(range(max(set().union(*ranks.values()), default=-1) + 1))
    for step in steps:
        if lacking := sorted(all_of_them - ranks[step]):
            if step == steps[-1] and len(steps) > 1:
                return [f"{_listed('rank', lacking)} in step {step}, the last one"]
            raise UserError(
                f"{_listed('rank', lacking)} in step {step}, of 0 to {max(all_of_them)}; add the "
                "files, or read on without them by --allow-gaps (prime-rl writes for the first "
                "rank of each context-parallel group alone)"
            )
    return []


def _listed(kind: str, numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (
        f" and {len(numbers) - _SHOWN} more" * (len(numbers) > _SHOWN)
    )
    return f"{kind} {shown} is missing" if len(numbers) == 1 else f"{kind}s {shown} are missing"
