"""Gradient norms of the advantages alone and of the penalty alone while a run trains
(research/long.md).

    python -m research.penalty_gradients --study=configs/studies/long_completions.py \
        --arms=token_1,signed_1 --seeds=4 --out=research/kept/penalty_gradients.json \
        --config.model.path=runs/evidence/policy_long

The run's own compiled step is called twice more on a copy of the state: with lambda = 0, and with
equal rewards, whose advantages are 0. Its `optimizer/grad_norm` is then that of the one part; the
loss is linear in the two, so that the whole's squared norm gives their cosine. Only penalties on a
token (`algorithm.level=token`) in one update a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.commands.arguments import whole
from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.run.run import Run
from dcmdp_jax.training.loop import train
from dcmdp_jax.training.step_programs import make_step_programs
from research.arguments import each_once
from research.studies.sweep import load_study, resolve

STEPS = (1, 2, 4, 6, 8, 12, 16, 24, 32)


def measured(step: Any, rows: list[dict[str, float]], steps: Collection[int]) -> Any:
    """A training step that adds a row of `rows` at each of `steps`, and otherwise is `step`."""

    def call(state: Any, batch: Any, frozen: Any) -> Any:
        number = int(state.step) + 1
        if number not in steps:
            return step(state, batch, frozen)

        def norm(other: Any, given: Any) -> float:
            copy = jax.tree.map(jnp.copy, other)  # the step takes the state's memory
            return float(step(copy, given, frozen)[1]["optimizer/grad_norm"])

        with jax.transfer_guard("allow"):
            unpenalized = state._replace(
                dual=state.dual._replace(multiplier=jnp.zeros_like(state.dual.multiplier))
            )
            equal = batch._replace(rewards=jnp.zeros_like(batch.rewards))
            row = {"advantage": norm(unpenalized, batch), "penalty": norm(state, equal)}
        state, metrics, recorded = step(state, batch, frozen)
        whole = float(metrics["optimizer/grad_norm"])
        square = whole**2 - row["advantage"] ** 2 - row["penalty"] ** 2
        product = 2 * row["advantage"] * row["penalty"]
        row |= {"whole": whole, "cosine": square / product if product else 0.0}
        row |= {
            name: float(metrics[name])
            for name in ("reward/mean", "discrepancy/mean", "policy/entropy")
        }
        rows.append({"step": number} | {name: float(f"{value:.4g}") for name, value in row.items()})
        return state, metrics, recorded

    return call


def gradient_table(found: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: norms and cosine of every arm and step."""
    names = ("advantage", "penalty", "cosine", "reward/mean", "discrepancy/mean")
    rows = [
        [f"`{arm}`", str(row["step"]), *(f"{row[n]:.3g}" for n in names)]
        for arm, of in found.items()
        for row in of
    ]
    heading = ["arm", "step", "norm of advantages", "norm of penalty", "cosine", "reward", "delta"]
    return "\n".join(markdown_table(heading, rows)) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Train each arm and seed once and write its norms."""
    parser = argparse.ArgumentParser(prog="python -m research.penalty_gradients")
    parser.add_argument("--study", required=True)
    parser.add_argument("--arms", required=True, type=lambda text: text.split(","))
    parser.add_argument("--seeds", type=each_once(whole(0), "seed"), default=(0,))
    parser.add_argument("--steps", type=each_once(whole(1), "step"), default=STEPS)
    parser.add_argument("--out", required=True, type=Path)
    arguments, overrides = parser.parse_known_args(argv)
    study = load_study(arguments.study)
    runs, configs = resolve(study, Path("runs") / "penalty_gradients", overrides, arguments.arms)
    found = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for one, config in zip(runs, configs, strict=True):
        label = one.arm if len(arguments.seeds) == 1 else one.label
        if one.seed not in arguments.seeds or label in found:
            continue
        shutil.rmtree(one.directory, ignore_errors=True)
        rows: list[dict[str, float]] = []
        run = Run.check(config)
        programs = make_step_programs(config, run.task.model, run.placement)
        watched = dataclasses.replace(
            programs, train_step=measured(programs.train_step, rows, arguments.steps)
        )
        train(run, show=lambda line: None, programs=watched)
        shutil.rmtree(one.directory)
        found[label] = rows
        atomic_write(arguments.out, json.dumps(found, indent=1) + "\n")
    print(gradient_table(found))


if __name__ == "__main__":
    main()
