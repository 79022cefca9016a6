"""Engines by name, as the command line gives them: `vllm:bfloat16,cache=fp8,model=DIR`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from dcmdp_jax.config.rollout import TRAINABLE
from dcmdp_jax.engines.engine_kind import EngineKind
from dcmdp_jax.engines.registry import ENGINES, find_engine
from dcmdp_jax.errors import UserError, shorten

SAMPLING_KINDS = tuple(ENGINES)
"""Built-in engines that sample. `SCORERS` only score."""
SCORERS = {"trainer": ("float32", "bfloat16", "float16"), "hf": ("float32",)}
"""What only scores -> precisions; the first is the default."""
_A_SERVERS = ("float32", "bfloat16", "float16")
"""What a server with weights of its own may compute in."""


class ProbeSpec(NamedTuple):
    """An engine to build.

    Attributes:
        kind: a name in `SCORERS` or `SAMPLING_KINDS`, or an engine by path, `module:NAME` or `file.py:NAME`.
        precision: precision of the weights; for `trainer` the compute dtype.
        compute: dtype of activations.
        cache: dtype of the key-value cache; "auto" is the compute dtype.
        model: directory of its own model; "" for the one that is probed.
        like: with `trainer`, the engine whose roundings of weights, activations and `cache` it repeats, KIND:PRECISION.
    """

    kind: str
    precision: str
    compute: str
    cache: str = "auto"
    model: str = ""
    like: str = ""

    @property
    def record(self) -> EngineKind | None:
        """The engine's record; None of what only scores."""
        return None if self.kind in SCORERS else find_engine(self.kind)

    @property
    def costs(self) -> dict[str, str]:
        """Cause of `mismatch.causes` -> the setting that has it as its price."""
        found = {}
        if self.record is not None and self.precision in self.record.quantized:
            found["quantized_weights"] = f"the engine's weights are {self.precision}"
        if self.record is not None and self.cache != "auto":
            found["quantized_cache"] = f"the engine's key-value cache is {self.cache}"
        return found

    def without(self, cause: str) -> ProbeSpec:
        """The same engine without the setting that has this cause of `costs` as its price."""
        other = {"cache": "auto"} if cause == "quantized_cache" else {"precision": self.compute}
        return self._replace(**other)

    def __str__(self) -> str:
        usual = {"compute": (self.precision, _default_compute(self.kind, self.precision)), "cache": ("auto",)}
        options = {name: getattr(self, name) for name in ("compute", "like", "cache", "model")}
        given = [f"{name}={value}" for name, value in options.items() if value not in usual.get(name, ("",))]
        return ",".join([f"{self.kind}:{self.precision}", *given])


def parse_spec(text: str) -> ProbeSpec:
    """Read `KIND[:PRECISION][,compute=DTYPE][,cache=DTYPE][,model=DIR]`; KIND may be `file.py:NAME` or `module:NAME`.

    The trainer takes `like=KIND:PRECISION`, and with it `cache=DTYPE`, of an engine whose roundings it repeats.

    Raises:
        UserError: naming what is not known and what is allowed.
    """
    head, *options = text.split(",")
    kind, _, precision = head.partition(":")
    if precision and kind not in (*SCORERS, *SAMPLING_KINDS) and ("." in kind or (kind and find_spec(kind))):
        name, _, precision = precision.partition(":")
        kind = f"{kind}:{name}"
        record = find_engine(kind)
    else:
        _one_of("engine", kind, (*SCORERS, *SAMPLING_KINDS), text)
        record = ENGINES.get(kind)
    precisions = SCORERS[kind] if record is None else record.precisions or _A_SERVERS
    precision = precision or precisions[0]
    _one_of("precision", precision, precisions, text)
    values = {"compute": _default_compute(kind, precision), "cache": "auto", "model": "", "like": ""}
    allowed = {"compute": record.compute_dtypes, "cache": record.cache_dtypes} if record else {}
    if kind == "trainer":
        repeated = [one for one in TRAINABLE.values() if one.emulated]
        allowed["like"] = tuple(f"{one.name}:{each}" for one in repeated for each in one.precisions if each != "exact")
    for option in options:
        name, _, value = option.partition("=")
        if name == "like" and value in allowed.get("like", ()):
            allowed["cache"] = ("auto", *TRAINABLE[value.partition(":")[0]].emulated_caches)
        known = [key for key in values if key == "model" or allowed.get(key)]
        _one_of("option", name, tuple(known), text)
        if name != "model":
            _one_of(name, value, allowed[name], text)
        values[name] = value
    return ProbeSpec(kind, precision, **values)


def _default_compute(kind: str, precision: str) -> str:
    """The precision where it is a dtype; else what the engine computes quantized weights in."""
    if precision in ("float32", "float16", "bfloat16") or kind in SCORERS:
        return precision
    return find_engine(kind).quantized_compute


def _one_of(what: str, value: str, allowed: tuple[str, ...], text: str) -> None:
    if value not in allowed:
        raise UserError(f"engine {shorten(text)}: {what} {shorten(value)}, allowed are {', '.join(allowed)}")
