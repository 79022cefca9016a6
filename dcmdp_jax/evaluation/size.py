"""Whether an evaluation can be held in memory, before anything is allocated for it."""

from __future__ import annotations

from dcmdp_jax.errors import UserError

MOST_COMPLETIONS = 10**7
"""Max completions of one task. Each is a few Python objects, about a kilobyte: 10 GB."""
_TOKEN_BYTES = 8  # an int32 id and a float32 log-prob


def check_size(task: str, problems: int, samples: int, max_completion_tokens: int, *, free: int | None) -> None:
    """Refuse a task whose completions, all as long as they may be, are more than this machine's memory holds.

    Args:
        task: its name.
        problems: that are asked.
        samples: K, completions of each.
        max_completion_tokens: of each.
        free: bytes of memory that can still be allocated; None where that is unknown.

    Raises:
        UserError: with the product, what it takes and which arguments to lower.
    """
    completions = problems * samples
    product = f"{task} has {problems:,} problems x {samples:,} samples = {completions:,} completions"
    if completions > MOST_COMPLETIONS:
        raise UserError(
            f"--samples: got {samples}; {product}, the most are {MOST_COMPLETIONS:,}; lower --samples or --max_problems"
        )
    needed = completions * max_completion_tokens * _TOKEN_BYTES
    if free is not None and needed > free:
        raise UserError(
            f"--samples: got {samples}; {product} of up to {max_completion_tokens:,} tokens take {needed / 2**30:,.1f} "
            f"GiB, {free / 2**30:,.1f} GiB are free; lower --samples, --max_problems or --max_completion_tokens"
        )
