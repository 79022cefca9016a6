"""A comparison's results as Markdown and JSON.

The result is a dict, kept as JSON:

    date, command, machine  when, how and where
    versions                of each contender
    prompts, group          completions of a batch are their product
    parts                   for each part, size, dtype and workload `part`, `size`, `dtype`,
                            `lengths`, `in_turn`, `matmul_gflops` before and after,
                            `matmul_gflop_per_cpu_second`, `needed_flop`, `contenders`, by name
                            `seconds` and `cpu_seconds` of the rounds, the same of the warm-up,
                            `peak_mib`, and `error` if it did not come to its end
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import median_and_spread, ratio
from dcmdp_jax.atomic_write import atomic_write

LABELS = {"ours": "ours", "trl": "TRL", "tunix": "Tunix", "vllm": "vLLM"}
PARTS = {
    "train1": "a train step, one mini-batch; TRL: plain torch with TRL's loss, as in train4",
    "train4": "old log-probs, then four updates of a quarter each",
    "rl": "a whole RL step in the trainer's own loop: sample, reward, one update",
    "train_lora": "as train1, adapters of rank 16 on every linear layer over a float32 base; TRL: "
    "with PEFT",
    "rl_lora": "as rl, with these adapters",
    "sampler": "as many completions by the trainer's own sampler",
}


WITHOUT = {
    part: ("tunix", "vllm") if part.endswith("_lora") else ("vllm",)
    for part in PARTS
    if part != "sampler"
}
"""Contenders that a part has not got."""
FLOOR_PARTS = ("train1", "train4")


def complete(measured: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A contender's figures in one part and size; None if it did not come to its end."""
    found = measured["contenders"].get(name)
    return None if found is None or "error" in found else found


def head(part: str, names: Sequence[str], apart: Sequence[str]) -> str:
    """Caption and head of a part's table; `apart` are the sizes at which the contenders do not take
    turns.
    """
    note = f". One after another, not in turn: {', '.join(apart)}" if apart else ""
    peers = [LABELS[name] for name in names if name != "ours"]
    columns = ["size, dtype", "lengths", *(f"{LABELS[name]}, CPU s" for name in names)]
    columns += [f"{peer} / ours" for peer in peers] + [f"{peer} / ours, wall" for peer in peers]
    columns += [f"{LABELS[name]}, MiB" for name in names]
    if part in FLOOR_PARTS:
        columns += [f"{LABELS[name]}, of the floor" for name in names]
    return f"\n{part}: {PARTS[part]}{note}.\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def row(measured: Mapping[str, Any], names: Sequence[str]) -> str:
    """A line of the table under `head`."""
    found = {name: complete(measured, name) for name in names}
    ours = found["ours"]

    def cells(names: Sequence[str], form: Any) -> list[str]:
        return ["-" if found[name] is None else form(found[name]) for name in names]

    def against_ours(peer: Mapping[str, Any], clock: str) -> str:
        return "-" if ours is None else ratio(peer[clock], ours[clock])

    def share(one: Mapping[str, Any]) -> str:
        if measured["dtype"] != "float32":
            return "-"
        least = measured["needed_flop"] / measured["matmul_gflop_per_cpu_second"] / 1e9
        return f"{least / statistics.median(one['cpu_seconds']):.0%}"

    columns = [f"{measured['size']}, {measured['dtype']}", measured["lengths"]]
    columns += cells(names, lambda one: median_and_spread(one["cpu_seconds"]))
    for clock in ("cpu_seconds", "seconds"):
        peers = [name for name in names if name != "ours"]
        columns += cells(peers, lambda peer, clock=clock: against_ours(peer, clock))
    columns += cells(names, lambda one: f"{one['peak_mib']:,.0f}")
    if measured["part"] in FLOOR_PARTS:
        columns += cells(names, share)
    return f"| {' | '.join(columns)} |"


def foot(result: Mapping[str, Any]) -> str:
    """Where the numbers come from."""
    machine = result["machine"]
    completions = f"{result['prompts']} prompts x {result['group']} completions"
    waits = "" if machine["omp_wait"] == "default" else f", OMP_WAIT_POLICY={machine['omp_wait']}"
    lines = [
        f"\n{result['date']}, {machine['processor']}, {machine['cores']} cores, "
        f"{completions}{waits}."
    ]
    rates = [
        f"{measured['part']} {measured['size']} {measured['dtype']} {measured['lengths']} "
        + " to ".join(f"{rate:.0f}" for rate in measured["matmul_gflops"])
        for measured in result["parts"]
    ]
    lines.append(
        f"GFLOP/s of a 1024^3 float32 product in JAX, before and after each: {', '.join(rates)}."
    )
    for name, versions in result["versions"].items():
        listed = ", ".join(f"{package} {version}" for package, version in versions.items())
        lines.append(f"{LABELS[name]}: {listed}.")
    return "\n".join(lines)


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write the JSON, atomically."""
    atomic_write(path, json.dumps(result, indent=1) + "\n")
