"""Runs that two kept studies have: the table of research/README.md, `tables/repeated.txt`.

Such a run is one run, whatever number of studies it stands in. Two runs are the same if their
rewards, discrepancies and entropies are equal to the bit in each of their first `STEPS` steps;
chance separates others within a few.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from dcmdp_jax.number_format import markdown_table
from dcmdp_jax.observe.metrics_io import Series
from research.kept_studies import KEPT, STUDIES, WITHOUT_A_STUDY
from research.studies.results import Table, read_kept_metrics

STEPS = 8
_COMPARED = ("reward/mean", "discrepancy/mean", "policy/entropy")


class RunName(NamedTuple):
    """A kept run.

    Attributes:
        study: name of the kept metrics.
        arm, seed: the run in them.
    """

    study: str
    arm: str
    seed: int


def fingerprint(series: Series) -> bytes:
    """The bits of a run's first steps."""
    return b"".join(series[name][1][:STEPS].tobytes() for name in _COMPARED)


def repeated_runs(studies: Mapping[str, Table]) -> list[tuple[RunName, RunName]]:
    """Pairs of names of one run: of two studies, or of one study under two seeds.

    Arms of one study may begin equal with one seed: they differ in what moves the policy later.
    """
    names_by_bits: dict[bytes, list[RunName]] = defaultdict(list)
    for study, runs in studies.items():
        for arm, seeds in runs.items():
            for seed, series in seeds.items():
                names_by_bits[fingerprint(series)].append(RunName(study=study, arm=arm, seed=seed))
    pairs = []
    for names in names_by_bits.values():
        for first, second in itertools.combinations(names, 2):
            if first.study != second.study or first.seed != second.seed:
                pairs.append((first, second))
    return pairs


def kept_studies() -> dict[str, Table]:
    """The kept metrics of every study."""
    names = dict.fromkeys((*STUDIES, *WITHOUT_A_STUDY))
    return {name: read_kept_metrics(KEPT / f"{name}.jsonl.gz", None) for name in names}


def text() -> str:
    """Markdown: the arms of which two studies have the same runs, and their number."""
    counts: dict[tuple[str, str, str, str], int] = defaultdict(int)
    for first, second in repeated_runs(kept_studies()):
        counts[first.study, first.arm, second.study, second.arm] += 1
    rows = []
    for (study, arm, other_study, other_arm), count in counts.items():
        rows.append([f"`{study}`: {arm}", f"`{other_study}`: {other_arm}", str(count)])
    return "\n".join(markdown_table(["runs of", "are those of", "runs"], rows)) + "\n"
