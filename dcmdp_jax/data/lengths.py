"""Lengths of completions to expect, and what a step computes for them."""

import dataclasses

import numpy as np

from dcmdp_jax.data.row_layout import RowShapes, computed_tokens, lay_out, lognormal_lengths

QUANTILES = (10, 25, 50, 75, 90)
"""Percentiles of a step's completion lengths that a run records, as `completion/length_p10`."""
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


def typical_lengths(limit: int) -> Lengths:
    """The lengths expected where nothing is known, with a median of a quarter of the limit."""
    return lognormal(limit // 4, limit)


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
