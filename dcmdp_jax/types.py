"""The structs that cross module borders. No logic lives here.

Letters: `N` completions of a mini-batch, `M` mini-batches, `A` micro-batches, `R` rows of one, `L`
row length. Every token array is aligned to the token it describes: `logprobs[t] = log pi(token t |
tokens before t)`.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

Array = jax.Array | np.ndarray
Scalar = float | Float[Array, ""]
"""One number, of Python or an array of shape ()."""
Params = dict[str, Any]
"""Model parameters: nested dict of arrays, layers stacked on the leading axis."""


class DualState(NamedTuple):
    """State of the dual ascent between steps.

    Attributes:
        multiplier: [] float32, lambda, in advantage units per unit of discrepancy.
        tolerance: [] float32, c, in the discrepancy's unit.
    """

    multiplier: Array
    tolerance: Array


class LossScale(NamedTuple):
    """Dynamic loss scale of float16.

    Attributes:
        scale: [] float32, a power of two that the loss is multiplied by before its gradient is
            taken.
        finite_updates: [] int32, updates with a finite gradient since it changed.
    """

    scale: Array
    finite_updates: Array


class TrainState(NamedTuple):
    """Everything that learns, one pure state.

    A field that is added gets None as its default here, and what `training.state.new_state` gives
    it: an earlier version's checkpoint, which lacks it, is read, and the field begins as in a new
    run.

    Attributes:
        step: [] int32, finished training steps.
        params: float32 or bfloat16 master parameters.
        opt_state: the optax state.
        dual: the multiplier and the tolerance.
        skipped_in_row: [] int32, optimizer updates skipped without a finite one in between.
        loss_scale: None unless the model computes in float16.
    """

    step: Array
    params: Params
    opt_state: Any
    dual: DualState
    skipped_in_row: Array
    loss_scale: LossScale | None = None


TOP_IDS = "top_ids"
"""Column of the engine's top-k token ids, see `data.episode.COLUMNS`."""


class Rows(NamedTuple):
    """Packed rows of one length, `[M, A, R, L]` each, or `[R, L]` inside a micro-batch.

    Attributes:
        input_ids: int32 token ids.
        position_ids: int32, restart at 0 with every segment.
        segment_ids: int32, 1, 2, ... within a row; 0 is padding.
        completion_mask: bool, true on sampled tokens, end-of-sequence included.
        completion_index: int32, which completion of the mini-batch a token belongs to; 0 where the
            mask is false.
        columns: name -> [M, A, R, L, ...], the columns of `data.episode.COLUMNS` that the
            completions have.
    """

    input_ids: Array
    position_ids: Array
    segment_ids: Array
    completion_mask: Array
    completion_index: Array
    columns: dict[str, Array]

    @property
    def rollout_logprobs(self) -> Array:
        """float32 nats, the inference engine's; 0 where the mask is false."""
        return self.columns["rollout_logprobs"]

    def with_columns(self, **columns: Array) -> "Rows":
        """The rows with columns added or replaced."""
        return self._replace(columns={**self.columns, **columns})


class Batch(NamedTuple):
    """One training step's data: M mini-batches, each in a few row-length buckets.

    Attributes:
        rows: one `Rows` for each bucket, shortest first; `[M, A_b, R_b, L_b]`.
        micro_batches: [M, buckets] int32, how many of the A_b micro-batches hold any row; the step
            runs only those.
        rewards: [M, N] float32.
        group_ids: [M, N] int32 in 0 .. N-1, which prompt a completion answers.
        completion_lengths: [M, N] int32 sampled tokens.
        loss_mask: [M, N] bool; false: the completion takes no part in the loss (padding, dropped,
            or truncated when a setting says so). Group statistics and discrepancy still see it
            where `valid` is true.
        valid: [M, N] bool; false on padding and on dropped completions.
    """

    rows: tuple[Rows, ...]
    micro_batches: Array
    rewards: Array
    group_ids: Array
    completion_lengths: Array
    loss_mask: Array
    valid: Array
