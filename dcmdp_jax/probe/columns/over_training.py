"""The content of recordings: one file by its columns, or a run by step, rank and source."""

import collections
import dataclasses
import glob
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from dcmdp_jax.errors import UserError, shorten, shorten_name
from dcmdp_jax.observe.alarms import OF_A_BUDGET, Alarm, Series, alarms
from dcmdp_jax.observe.collapse import LEAST_STEPS, CollapseSigns, collapse_signs
from dcmdp_jax.observe.jsonl import METRICS_FILE, ROLLOUTS_DIRECTORY
from dcmdp_jax.probe.columns.formats import (
    RecordedFile,
    RecordedRow,
    StepRank,
    files_below,
    format_of,
    identify,
    rows_of,
)
from dcmdp_jax.probe.columns.pairs import (
    Statistics,
    TokenPairs,
    mean_of,
    measure,
    probability_difference,
    recommend,
)
from dcmdp_jax.probe.columns.recording import Columns, Row, RowSample, checked_row, pairs_of
from dcmdp_jax.probe.columns.recording_files import LeftOut, UnreadableError, read_rows

_SHOWN = 5
"""Missing steps or ranks named in a message."""
_FIRST_STEPS = 5
"""Steps whose mean recommends a c for the alarms."""
_STANDS_OUT = 3.0
"""Mean of a rank or source that stands out, in multiples of the others' median."""
_ROUNDING = 1e-5
"""Mean |p - q| that float32's rounding explains: within it nothing stands out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMismatch:
    """Mismatch of one training step.

    Attributes:
        step: its number, as the framework counts.
        statistics: over all its tokens.
        entropy: mean over its tokens, nats; NaN if not known.
        lag: oldest weights that sampled a token of it, in steps; NaN if not known.
        engine_surprise: mean of -log q, nats.
        reward: mean over its completions; NaN if not recorded.
    """

    step: int
    statistics: Statistics
    entropy: float
    lag: float
    engine_surprise: float
    reward: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """Mismatch of one rank or one source over all steps: its name, size, and mean |p - q|."""

    name: str
    completions: int
    tokens: int
    mean: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverTraining:
    """Mismatch over a run.

    Attributes:
        steps: in order.
        ranks, sources: empty where there is only one or none is recorded.
        odd_rank: the first rank that stands out, in words: no c bounds other weights on one
            rank; "" without one.
        notes: sentences about outliers among ranks and sources.
        alarms: alarms over the steps; see `observe.alarms`.
        tolerance: c that the alarms compare with; NaN if there is none.
        tolerance_from: where it comes from.
        collapse: whether a fall of the reward is the mismatch's; None where it did not fall.
    """

    steps: Sequence[StepMismatch]
    ranks: Sequence[Slice]
    sources: Sequence[Slice]
    odd_rank: str
    notes: tuple[str, ...]
    alarms: Sequence[Alarm]
    tolerance: float
    tolerance_from: str
    collapse: CollapseSigns | None

    @property
    def has_rewards(self) -> bool:
        """Whether every step has a reward."""
        return not np.isnan([step.reward for step in self.steps]).any()

    @property
    def without_collapse(self) -> str:
        """Why `collapse` is None, in words; "" where it is not."""
        if self.collapse:
            return ""
        lacking = [step.step for step in self.steps if np.isnan(step.reward)]
        if len(lacking) == len(self.steps):
            return (
                "no reward in this recording: whether it collapsed is not judged "
                "(dcmdp_jax.record takes rewards=)"
            )
        if lacking:
            return (
                f"no reward in {len(lacking)} of {len(self.steps)} steps, the first is step "
                f"{lacking[0]}: whether the reward collapsed is not judged"
            )
        if len(self.steps) < LEAST_STEPS:
            return f"fewer than {LEAST_STEPS} steps: whether the reward collapsed is not judged"
        return "the reward did not fall by more than half"

    def without_recommendation(self) -> "OverTraining":
        """The same where no c is recommended: without the alarms that compare with one."""
        if not self.tolerance_from.startswith("of the first"):
            return self
        alarms = [alarm for alarm in self.alarms if alarm.name not in OF_A_BUDGET]
        return dataclasses.replace(self, alarms=alarms, tolerance=np.nan, tolerance_from="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """Content of a recording.

    Attributes:
        pairs: the tokens.
        rows: in the file.
        stride: 1 if all rows are in `pairs`; k if only every k-th is, because of `max_tokens`.
        left_out: tokens and lines that are not in `pairs` nor in `rows`.
        over_training: None where the steps are not known.
    """

    pairs: TokenPairs
    rows: int
    stride: int
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
    recorded: dict[Path, RecordedFile] = {}
    for text in paths:
        files = _files_of(text)
        newest = None
        if len(files) > 1:
            newest = max(files, key=lambda path: path.stat().st_mtime)
        for path in files:
            try:
                file = identify(path, left_out)
            except UnreadableError:
                if path != newest:
                    raise
                left_out.unfinished.append(str(path))
                continue
            if file is not None:
                recorded.setdefault(path.resolve(), file)

    if not recorded:
        raise UserError(
            f"{shorten_name(', '.join(paths))}: no row in any file{left_out.after('; left out: ')}"
        )
    _refuse_mixed(recorded.values())
    return sorted(recorded.values(), key=lambda file: (file.step_rank.order, file.path))


def _files_of(text: str) -> list[Path]:
    """The files of one path: itself, those below a directory, or those that a glob matches."""
    path = Path(text)
    is_run = (path / METRICS_FILE).is_file()
    if is_run and not any(path.glob(f"{ROLLOUTS_DIRECTORY}/*.parquet")):
        raise UserError(
            f"{text}: a run directory without recorded tokens ({ROLLOUTS_DIRECTORY}/); sample anew "
            f"with its model by --model={text}, or record by observe.rollouts_every_steps"
        )
    roots = [path]
    if not path.exists():
        roots = sorted(map(Path, glob.glob(text, recursive=True)))
    files = []
    for root in roots:
        if root.is_dir():
            files += files_below(root)
        else:
            files.append(root)
    if not files and roots == [path]:
        raise UserError(f"{text}: no .jsonl, .parquet or .pt file in this directory or below")
    if not files:
        raise FileNotFoundError(2, "No such file or directory", text)
    return files


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
        left_out.unfinished += _refuse_gaps([file.step_rank for file in files])
    _refuse_doubles(files)
    sample = RowSample(max_tokens)
    recorded = set()
    # Rows, tokens and sum of |p - q| of each rank, and of each source.
    rank_sums = collections.defaultdict(lambda: np.zeros(3))
    source_sums = collections.defaultdict(lambda: np.zeros(3))
    rewards = collections.defaultdict(list)
    without_reward = []

    def rows() -> Iterator[tuple[int | None, Row]]:
        for read in rows_of(files, left_out):
            row = checked_row(read.where, read.cells, read.columns, left_out)
            sample.add(row, read.where)
            if not len(row["token"]):
                continue
            step_rank = read.step_rank
            recorded.add(step_rank)
            delta = probability_difference(row["train"], row["rollout"])
            sums = (1, len(delta), delta.sum())
            if step_rank.rank is not None:
                rank_sums[step_rank.rank] += sums
            if read.source is not None:
                source_sums[read.source] += sums
            reward = _reward(read)
            if np.isfinite(reward):
                rewards[step_rank.step].append(reward)
            else:
                without_reward.append(read.where)
            yield step_rank.step, row

    steps: dict[int, StepMismatch] = {}
    for step, group in itertools.groupby(rows(), key=lambda numbered: numbered[0]):
        if step is None:
            continue
        if step in steps:
            raise UserError(
                f"step {step}: its rows are not together; probe the files of one run alone"
            )
        step_rows = [row for _, row in group]
        steps[step] = _step_mismatch(step, step_rows, mean_of(np.array(rewards[step])))
    if not allow_gaps:
        # Raises by the rows too: one file may hold several steps and ranks.
        _refuse_gaps(recorded)

    if without_reward and any(rewards.values()):
        left_out.rewards = len(without_reward)
        left_out.first_reward = without_reward[0]

    where = str(files[0].path)
    if len(files) > 1:
        where += f" and {len(files) - 1} more"
    pairs = sample.pairs(where, format_of(files[0].framework).columns, left_out)
    over_training = None
    if steps:
        over_training = _over_training(
            [steps[step] for step in sorted(steps)],
            ranks=_slices(rank_sums, "rank {}"),
            sources=_slices(source_sums, "{}"),
            tolerance=tolerance,
            metrics=metrics,
        )
    return Recording(
        pairs=pairs,
        rows=sample.rows,
        stride=sample.stride,
        left_out=left_out,
        over_training=over_training,
    )


def read_recording(path: str | Path, columns: Columns, *, max_tokens: int) -> Recording:
    """Read a recording in bounded memory (`RowSample`); every row is checked, kept or not.

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
        other = options.setdefault(name, option)
        if other != option:
            raise UserError(
                f"{other} and {option}: both are {shorten(name)}; name a column of its own for each"
            )
    sample = RowSample(max_tokens)
    left_out = LeftOut()
    for where, cells in read_rows(path, columns.options(), left_out=left_out):
        sample.add(checked_row(where, cells, columns, left_out), where)
    return Recording(
        pairs=sample.pairs(path, columns, left_out),
        rows=sample.rows,
        stride=sample.stride,
        left_out=left_out,
    )


def _reward(read: RecordedRow) -> float:
    """The reward of a row; NaN if it has none.

    Raises:
        UserError: it is no number that float64 holds.
    """
    reward = read.cells.get("reward")
    if reward is None:
        return np.nan
    try:
        if isinstance(reward, int | float):
            return float(reward)
    except OverflowError:
        pass
    raise UserError(
        f"{read.where}: reward is {shorten(reward)}, must be one number for the completion, or null"
    )


def _step_mismatch(step: int, rows: list[Row], reward: float) -> StepMismatch:
    """Measure the rows of one step."""
    pairs = pairs_of(rows)
    entropy = lag = np.nan
    if pairs.entropies is not None:
        entropy = pairs.entropies.mean(dtype=np.float64)
    if pairs.lags is not None:
        lag = float(pairs.lags.max())
    return StepMismatch(
        step=step,
        statistics=measure(pairs),
        entropy=entropy,
        lag=lag,
        engine_surprise=-pairs.rollout_logprobs.mean(dtype=np.float64),
        reward=reward,
    )


def _slices(sums: Mapping[int | str, np.ndarray], title: str) -> list[Slice]:
    """The ranks or sources in order; a single one has no others to compare with: none.

    Args:
        sums: rank or source -> its rows, tokens and sum of |p - q|.
        title: of its name, with {} for the rank or source.
    """
    if len(sums) < 2:
        return []
    slices = []
    for name in sorted(sums):
        rows, tokens, total = sums[name].tolist()
        slices.append(
            Slice(
                name=title.format(name),
                completions=int(rows),
                tokens=int(tokens),
                mean=total / tokens,
            )
        )
    return slices


def _over_training(
    steps: list[StepMismatch],
    *,
    ranks: Sequence[Slice],
    sources: Sequence[Slice],
    tolerance: float | None,
    metrics: Series | None,
) -> OverTraining:
    """Conclude from the measured steps, and from the ranks and sources beside each other."""
    series = _series(steps) if metrics is None else dict(metrics)
    origin = "--tolerance"
    is_own = tolerance is None and "dual/tolerance" in series
    if is_own:
        tolerance = float(series["dual/tolerance"][1][-1])
        origin = "the run's own"
    elif tolerance is None:
        first = [step.statistics for step in steps[:_FIRST_STEPS]]
        tokens = [statistics.tokens for statistics in first]
        mean = np.average([statistics.mean for statistics in first], weights=tokens)
        tolerance = recommend(mean, floor=None, defect=None).tolerance
        origin = (
            f"of the first {len(first)} steps, so that a rise shows; train with the recommended c"
        )

    if not is_own and np.isfinite(tolerance):
        numbers = np.array([step.step for step in steps])
        series["dual/tolerance"] = (numbers, np.full(len(steps), tolerance))

    rank_outliers = _outliers(ranks)
    odd_rank = ""
    if rank_outliers:
        odd_rank = f"{next(iter(rank_outliers))} stands out"
    return OverTraining(
        steps=steps,
        ranks=ranks,
        sources=sources,
        odd_rank=odd_rank,
        notes=(*rank_outliers.values(), *_outliers(sources).values()),
        alarms=alarms(series),
        tolerance=tolerance,
        tolerance_from=origin,
        collapse=collapse_signs(series),
    )


def _series(steps: list[StepMismatch]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The metrics that the alarms look at, as a run of ours has them."""
    rows = []
    for step in steps:
        statistics = step.statistics
        rows.append(
            {
                "reward/mean": step.reward,
                "policy/entropy": step.entropy,
                "engine/surprise": step.engine_surprise,
                "rollout/staleness_max": step.lag,
                "discrepancy/mean": statistics.mean,
                "mismatch/k1": statistics.k1,
                "mismatch/k3": statistics.k3,
                "mismatch/effective_sample_size": statistics.effective_sample_size,
                "mismatch/median_log_ratio": statistics.median_log_ratio,
            }
        )

    numbers = np.array([step.step for step in steps], np.int64)
    series = {}
    for metric in rows[0]:
        column = np.array([row[metric] for row in rows], np.float64)
        if np.isfinite(column).all():
            series[metric] = (numbers, column)
    return series


def _outliers(slices: Sequence[Slice]) -> dict[str, str]:
    """Slices far above the others: name -> sentence.

    Other weights on one rank do that, or a broken environment of one source.
    """
    sentences = {}
    for candidate in slices:
        others = [other.mean for other in slices if other is not candidate]
        median = np.median(others)
        if candidate.mean > max(_STANDS_OUT * median, _ROUNDING):
            sentences[candidate.name] = (
                f"{candidate.name} stands out: mean |p - q| {candidate.mean:.2g}, the others' "
                f"median is {median:.2g}."
            )
    return sentences


def _refuse_mixed(files: Iterable[RecordedFile]) -> None:
    first: dict[str, Path] = {}
    for file in files:
        first.setdefault(file.framework, file.path)
    if len(first) > 1:
        frameworks = ", ".join(f"{name} ({path})" for name, path in first.items())
        raise UserError(
            f"recordings of several frameworks in one call: {frameworks}; probe each alone"
        )


def _refuse_doubles(files: Sequence[RecordedFile]) -> None:
    seen: dict[StepRank, Path] = {}
    for file in files:
        step_rank = file.step_rank
        other = seen.setdefault(step_rank, file.path)
        if step_rank.step is not None and other != file.path:
            rank = "" if step_rank.rank is None else f", rank {step_rank.rank}"
            raise UserError(
                f"step {step_rank.step}{rank} is in {other} and in {file.path}; probe one run at "
                "a time"
            )


def _refuse_gaps(recorded: Iterable[StepRank]) -> list[str]:
    """Refuse missing steps between others, and missing ranks.

    Returns:
        A line on the ranks that the last step of several lacks; else nothing.
    """
    ranks_of_step: dict[int, set[int]] = {}
    for step_rank in recorded:
        if step_rank.step is not None:
            ranks = ranks_of_step.setdefault(step_rank.step, set())
            if step_rank.rank is not None:
                ranks.add(step_rank.rank)
    if not ranks_of_step:
        return []

    steps = sorted(ranks_of_step)
    spacing = min((b - a for a, b in itertools.pairwise(steps)), default=1)
    missing = []
    for step, following in itertools.pairwise(steps):
        missing += range(step + spacing, following, spacing)
    if missing:
        raise UserError(
            f"{_listed('step', missing)} between steps {steps[0]} and {steps[-1]}, {spacing} "
            "apart elsewhere; add the files, or read on without them by --allow-gaps"
        )

    # -1: no row says its rank, so that no rank is missing.
    last_rank = max(set().union(*ranks_of_step.values()), default=-1)
    for step in steps:
        lacking = sorted(set(range(last_rank + 1)) - ranks_of_step[step])
        # The last step of a running job may still be written.
        if lacking and step == steps[-1] and len(steps) > 1:
            return [f"{_listed('rank', lacking)} in step {step}, the last one"]
        if lacking:
            raise UserError(
                f"{_listed('rank', lacking)} in step {step}, of 0 to {last_rank}; add the files, "
                "or read on without them by --allow-gaps (prime-rl writes for the first rank of "
                "each context-parallel group alone)"
            )
    return []


def _listed(kind: str, numbers: list[int]) -> str:
    """The missing steps or ranks of a message, the first few by number."""
    if len(numbers) == 1:
        return f"{kind} {numbers[0]} is missing"
    text = ", ".join(map(str, numbers[:_SHOWN]))
    if len(numbers) > _SHOWN:
        text += f" and {len(numbers) - _SHOWN} more"
    return f"{kind}s {text} are missing"
