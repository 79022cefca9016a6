"""The study of doses: `python -m research.doses` runs what is not kept; doses.md has the rules.

All arms of a seed run one after another on one machine, then those of the next seed. A seed that was cut is run again
from its first arm. Nothing is compared here: no table is made before every seed is there.

    python -m research.doses --seeds=20,21        these seeds alone
    python -m research.doses --keep=FILE          copy the whole seeds of another checkout's FILE into the kept metrics
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from dcmdp_jax.commands.cli import each_once, run_main, whole
from dcmdp_jax.commands.sweep import check_evaluation, load_study, resolve
from dcmdp_jax.lab.studies.results import Table, read_kept_metrics, write_kept_metrics
from dcmdp_jax.lab.studies.study import Study
from dcmdp_jax.training.stopping import Interrupted
from research.kept_studies import KEPT
from research.sweep import check_kept, evaluated, run_in_one_process

STUDY = "configs/studies/doses.py"
METRICS = KEPT / "doses.jsonl.gz"
_RUNS = Path("runs/studies/doses")


def whole_seeds(runs: Table, arms: Sequence[str]) -> list[int]:
    """Seeds that every arm has, in order."""
    in_every_arm = [set(runs.get(arm, {})) for arm in arms]
    return sorted(set.intersection(*in_every_arm))


def only_seeds(runs: Table, seeds: Sequence[int]) -> Table:
    """The runs of these seeds."""
    return {arm: {seed: runs[arm][seed] for seed in seeds} for arm in runs}


def read_whole(path: Path, study: Study) -> Table:
    """Kept runs of the seeds that every arm has."""
    if not path.exists():
        return {arm: {} for arm in study.arms}
    runs = read_kept_metrics(path, list(study.arms))
    return only_seeds(runs, whole_seeds(runs, list(study.arms)))


def run_seed(study: Study, seed: int) -> None:
    """Train, score and keep the arms of a seed that are not kept."""
    study = dataclasses.replace(study, seeds=(seed,))
    runs, configs = resolve(study, _RUNS)
    check_evaluation(study, runs, configs)
    show = functools.partial(print, flush=True)
    run_in_one_process(runs, configs, METRICS, show, functools.partial(evaluated, study))


def main(argv: list[str]) -> int:
    """Parse the arguments (program name first); run or copy."""
    parser = argparse.ArgumentParser(prog="python -m research.doses")
    parser.add_argument("--seeds", type=each_once(whole(0), "seed"))
    parser.add_argument("--keep", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv[1:])
    study = load_study(STUDY)
    runs = read_whole(METRICS, study)

    if arguments.keep is not None:
        check_kept(arguments.keep, study)
        more = read_whole(arguments.keep, study)
        # A seed that is kept already stays as it is.
        runs = {arm: dict(sorted({**more[arm], **runs[arm]}.items())) for arm in study.arms}
        write_kept_metrics(METRICS, runs)
        print(f"{METRICS}: seeds {whole_seeds(runs, list(study.arms))}")
        return 0

    check_kept(METRICS, study)
    if METRICS.exists():
        write_kept_metrics(METRICS, runs)
    try:
        for seed in arguments.seeds or study.seeds:
            run_seed(study, seed)
    except Interrupted as stopped:
        print("stopped; the same command continues with the seed that was cut")
        return 128 + stopped.signal_number
    return 0


if __name__ == "__main__":
    run_main(main)
