"""Lengths of completions to plan for: a lognormal distribution, or a run's recorded ones."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np

from dcmdp_jax.data.row_layout import RowShapes, computed_tokens, lay_out, lognormal_lengths
from dcmdp_jax.errors import UserError

QUANTILES = (10, 25, 50, 75, 90)
"""Percentiles of a step's completion lengths that a run records, as `completion/length_p10`."""
_FORM = re.compile(r"lognormal\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_USAGE = "lognormal(MEDIAN,CAP) in tokens, such as lognormal(2048,8192), or the directory of a run"
# Steps that are drawn for an expectation, and how much of each.
_DRAWS = 4
_MOST_MINI_BATCHES = 8
_MOST_COMPLETIONS = 2048


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Completion lengths.

    Attributes:
        name: for people.
        shares: [q] probabilities, rising from 0 to 1.
        tokens: [q] lengths that these shares of the completions do not exceed.
    """

    name: str
    shares: tuple[float, ...]
    tokens: tuple[float, ...]

    def draw(self, count: int, seed: int) -> np.ndarray:
        """[count] lengths in tokens, at least 1."""
        lengths = np.interp(np.random.default_rng(seed).random(count), self.shares, self.tokens)
        return np.maximum(1, np.rint(lengths)).astype(np.int64)


def lognormal(median: int, cap: int) -> Lengths:
    """Lengths with a lognormal distribution, cut at `cap`."""
    sample = np.sort(lognormal_lengths(median, cap, 4096, seed=0))
    shares = np.linspace(0.0, 1.0, 129)
    return Lengths(f"lognormal({median},{cap})", tuple(shares), tuple(np.quantile(sample, shares)))


def parse_lengths(text: str, *, limit: int) -> Lengths:
    """The lengths that a text names: `lognormal(MEDIAN,CAP)`, or the directory of a run.

    Args:
        text: the setting as written.
        limit: most tokens of a completion.

    Raises:
        UserError: one line with the text and what is allowed.
    """
    match = _FORM.fullmatch(text.strip())
    if match:
        median, cap = map(int, match.groups())
        if not 1 <= median <= cap <= limit:
            raise UserError(
                f"--lengths: got {text}, must have 1 <= MEDIAN <= CAP <= `limit` = {limit}"
            )
        return lognormal(median, cap)
    if not Path(text).is_dir():
        raise UserError(f"--lengths: got {text!r}, must be {_USAGE}")
    return _recorded(Path(text), limit)


def _recorded(run_dir: Path, limit: int) -> Lengths:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(
            f"--lengths: {run_dir} has no metrics.jsonl; name the directory of a run, or {_USAGE}"
        )
    names = [
        "completion/length_min",
        *(f"completion/length_p{p}" for p in QUANTILES),
        "completion/length_max",
    ]
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
            steps.append([float(record[name]) for name in names])
        except (ValueError, TypeError, KeyError):
            continue  # of an evaluation, or cut by a crash
    if not steps:
        raise UserError(
            f"--lengths: {path} holds no percentiles of lengths (completion/length_p50); runs of "
            "this version record them: use lognormal(MEDIAN,CAP) for an older one"
        )
    tokens = np.mean(steps, axis=0)
    if tokens[-1] > limit:
        raise UserError(
            f"--lengths: {run_dir} has completions of {tokens[-1]:.0f} tokens, `limit` is {limit}"
        )
    shares = (0.0, *(p / 100 for p in QUANTILES), 1.0)
    return Lengths(f"{run_dir}, {len(steps)} steps", shares, tuple(tokens.tolist()))


def typical_lengths(limit: int) -> Lengths:
    """The lengths expected where nothing is known, with a median of a quarter of the limit."""
    return lognormal(max(1, limit // 4), limit)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """Expected computation of a step, means over a few drawn steps.

    Attributes:
        tokens: real ones, prompts included.
        computed: positions, padding included.
        squares: sum of the squares of the sequences' lengths, which attention's operations grow
            with.
    """

    tokens: float
    computed: float
    squares: float


def expected_step(shapes: RowShapes, prompts: np.ndarray, completions: Lengths) -> ExpectedStep:
    """Expected computation of a step for completions of such lengths.

    Args:
        shapes: shapes of a batch.
        prompts: tokens of the prompts that a step draws from.
        completions: their lengths.
    """
    # Some of a very large step shows as much.
    mini_batches = min(shapes.mini_batches, _MOST_MINI_BATCHES)
    size = min(shapes.completions, _MOST_COMPLETIONS)
    share = mini_batches * size / (shapes.mini_batches * shapes.completions)
    sums = []
    for seed in range(_DRAWS):
        completion_lengths = completions.draw(mini_batches * size, seed).reshape(mini_batches, size)
        prompt_lengths = np.random.default_rng(seed).choice(
            np.asarray(prompts, np.int64), (mini_batches, size)
        )
        lengths = np.minimum(completion_lengths + prompt_lengths, shapes.longest)
        computed = 0
        for mini_batch in lengths:
            computed += computed_tokens(shapes, lay_out(mini_batch, shapes).micro_batches)
        sums.append((lengths.sum(), computed, np.square(lengths.astype(np.float64)).sum()))
    tokens, computed, squares = (np.mean(sums, axis=0) / share).tolist()
    return ExpectedStep(tokens=tokens, computed=computed, squares=squares)


def padding_advice(shapes: RowShapes, *, automatic: bool, limited: bool) -> str:
    """The argument that lowers a step's padding.

    Args:
        shapes: shapes of a batch.
        automatic: whether `make_row_shapes` chose the row lengths.
        limited: whether the user limited the sequences in a row.
    """
    if not automatic:
        return "`row_lengths`=() chooses the lengths of rows"
    if limited:
        return (
            "`segments_per_row`=0 puts as many completions in a row as the attention kernel allows"
        )
    if shapes.completions < 8 * shapes.row_shards:
        return (
            f"a mini-batch has {shapes.completions} completions for {shapes.row_shards} "
            "devices: raise `completions`"
        )
    if shapes.segments_per_row == 1:
        return (
            "rows hold one completion each, as the attention skips no other segments: set "
            "`segments_per_row`"
        )
    return (
        f"completions are far shorter than {shapes.longest} tokens: lower `max_completion_tokens`"
    )
