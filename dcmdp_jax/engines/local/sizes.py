"""The scheduler's arithmetic: shapes of batches and caches. The memory plan and `dcmdp plan` ask it
too.
"""

# Max attention scores in memory during a forward pass over whole rows: 1 GiB in float32.
ATTENTION_ELEMENTS = 2**28
PREEMPTED_CACHES = 2
"""Max caches of preempted rows, in caches of a full batch of the longest rows."""
_SMALLEST_BUCKET = 16


def default_cache_block(platform: str) -> int:
    """First completion slots of a cache: few on a CPU, where a step's time is proportional to the
    cache.
    """
    return 32 if platform == "cpu" else 128


def smallest_batch(platform: str) -> int:
    """Rows that a batch shrinks to as its rows finish: few on a CPU, where a step's time is
    proportional to its rows; elsewhere a step of fewer rows takes as long, for the weights are read
    once for all.
    """
    return 16 if platform == "cpu" else 32


def cache_capacities(block: int, limit: int) -> list[int]:
    """Completion tokens that the cache of each level holds, for completions of at most `limit`
    tokens.
    """
    # One doubling is not worth a second program and the copy.
    capacities = [limit if limit <= 2 * block else block]
    # A row of n tokens holds n - 1 of them in the cache.
    while capacities[-1] < limit - 1:
        capacities.append(min(2 * capacities[-1], limit))
    return capacities


def batch_rows(max_rows: int, group: int, completions: int, devices: int) -> int:
    """Rows of a full batch: whole groups, if they fit, on every device."""
    return round_up(min(max_rows // group * group or max_rows, completions), devices)


def prefill_shape(heads: int, prompts: int, bucket: int, devices: int) -> tuple[int, int]:
    """Padded prompts of a prefill, and the parts that it runs them in, so that attention fits."""
    groups = min(prompts, -(-prompts * heads * bucket**2 // ATTENTION_ELEMENTS))
    return round_up(prompts, groups * devices), groups


def score_rows(heads: int, length: int, max_rows: int, devices: int) -> int:
    """Rows of `length` tokens that are scored at a time."""
    return round_up(max(1, min(max_rows, ATTENTION_ELEMENTS // (heads * length**2))), devices)


def length_bucket(tokens: int) -> int:
    """The length that a prompt, or a row to score, is padded to: 16, 32, 64, ..."""
    return max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple
