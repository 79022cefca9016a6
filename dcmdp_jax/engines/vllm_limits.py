"""What holds for vLLM wherever it runs, in a sidecar of ours or as a server of somebody's."""

from __future__ import annotations

import re

from dcmdp_jax.errors import UserError

# The first version that works, and the first that was not tried.
_SUPPORTED = ((0, 32), (0, 34))
TEMPERATURES = (0.01, 2.0)
"""The smallest and the largest that vLLM samples at as they are, besides 0."""


def unsupported_version(version: str) -> str:
    """The versions that the bridge knows, as ">=a,<b", if this is none of them; else ""."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if _SUPPORTED[0] <= numbers < _SUPPORTED[1]:
        return ""
    low, high = (".".join(map(str, bound)) for bound in _SUPPORTED)
    return f">={low},<{high}"


def check_temperature(temperature: float) -> None:
    """Refuse a temperature that vLLM would change or refuse.

    Raises:
        UserError: naming it.
    """
    low, high = TEMPERATURES
    if temperature and not low <= temperature <= high:
        raise UserError(f"temperature: got {temperature}, vLLM takes 0 (greedy) or {low} .. {high}")
