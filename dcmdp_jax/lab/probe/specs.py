"""Engines by name, as the command line gives them: `vllm:bfloat16,cache=fp8,model=DIR`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from dcmdp_jax.config.rollout import QUANTIZED
from dcmdp_jax.config.settings import ENGINE_CHOICES
from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import shorten

SAMPLING_KINDS = tuple(ENGINE_CHOICES)
"""Engines that sample. The others, `trainer` and `hf`, only score."""
PRECISIONS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "trainer": ("float32", "bfloat16", "float16"),
    "hf": ("float32",),
    **{kind: choices["rollout.precision"] for kind, choices in ENGINE_CHOICES.items()},
})  # fmt: skip
"""Kind of engine -> precisions; the first is the default."""


@dataclasses.dataclass(frozen=True)
class ProbeSpec:
    """An engine to build.

    Attributes:
        kind: key of `PRECISIONS`.
        precision: of the weights; for `trainer` the compute dtype.
        compute: dtype of activations.
        cache: dtype of the key-value cache; "auto" is the compute dtype.
        model: directory of its own model; "" for the one that is probed.
    """

    kind: str
    precision: str
    compute: str
    cache: str = "auto"
    model: str = ""

    @property
    def costs(self) -> dict[str, str]:
        """Cause of `mismatch.causes` -> the setting that has it as its price."""
        found = {}
        if self.precision in QUANTIZED.get(self.kind, ()):
            found["quantized_weights"] = f"the engine's weights are {self.precision}"
        if self.cache != "auto":
            found["quantized_cache"] = f"the engine's key-value cache is {self.cache}"
        return found

    def without(self, cause: str) -> ProbeSpec:
        """The same engine without the setting that has this cause of `costs` as its price."""
        if cause == "quantized_cache":
            return dataclasses.replace(self, cache="auto")
        return dataclasses.replace(self, precision=self.compute)

    def __str__(self) -> str:
        parts = [f"{self.kind}:{self.precision}"]
        if self.compute not in (self.precision, _default_compute(self.kind, self.precision)):
            parts.append(f"compute={self.compute}")
        if self.cache != "auto":
            parts.append(f"cache={self.cache}")
        if self.model:
            parts.append(f"model={self.model}")
        return ",".join(parts)


def parse_spec(text: str) -> ProbeSpec:
    """Read `KIND[:PRECISION][,compute=DTYPE][,cache=DTYPE][,model=DIR]`.

    Raises:
        UserError: naming what is not known and what is allowed.
    """
    head, *options = text.split(",")
    kind, _, precision = head.partition(":")
    _one_of("engine", kind, tuple(PRECISIONS), text)
    precision = precision or PRECISIONS[kind][0]
    _one_of("precision", precision, PRECISIONS[kind], text)
    values = {"compute": _default_compute(kind, precision), "cache": "auto", "model": ""}
    choices = ENGINE_CHOICES.get(kind, {})
    allowed = {"compute": choices.get("rollout.compute_dtype", ()), "cache": choices.get("rollout.kv_cache_dtype", ())}
    for option in options:
        name, _, value = option.partition("=")
        known = [key for key in values if key == "model" or allowed[key]]
        _one_of("option", name, tuple(known), text)
        if name != "model":
            _one_of(name, value, allowed[name], text)
        values[name] = value
    return ProbeSpec(kind, precision, **values)


def _default_compute(kind: str, precision: str) -> str:
    """The precision where it is a dtype; else float32 embedded, which is exact but for the weights, and vLLM's own."""
    if precision in ("float32", "float16", "bfloat16"):
        return precision
    return "bfloat16" if kind == "vllm" else "float32"


def _one_of(what: str, value: str, allowed: tuple[str, ...], text: str) -> None:
    if value not in allowed:
        raise UserError(f"engine {shorten(text)}: {what} {shorten(value)}, allowed are {', '.join(allowed)}")
