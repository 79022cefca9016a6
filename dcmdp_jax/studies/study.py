"""Definition of a study, and the checks before it runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=+-]*")
SET_BY_THE_STUDY = ("run_dir", "training.seed")
"""Settings that differ between a study's runs by themselves."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One config of a study.

    Attributes:
        config: as --config of bin.train, `configs/demo.py:grpo`.
        settings: dotted name -> value, on top of it.
    """

    config: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def arguments(self) -> list[str]:
        """Arguments of bin.train."""
        return [f"--config={self.config}", *(f"--config.{name}={_text(self.settings[name])}" for name in self.settings)]


@dataclasses.dataclass(frozen=True)
class Study:
    """A grid of configs and seeds.

    Attributes:
        title: heading of its tables and figures.
        arms: label -> config; a label is also a directory.
        baseline: label that the others are compared with, seed by seed.
        seeds: of every arm.
        evaluation: arguments of bin.evaluate for each finished run, `--tasks` among them; empty: the runs' own held-out
            scores are compared alone.
    """

    title: str
    arms: Mapping[str, Arm]
    baseline: str
    seeds: Sequence[int]
    evaluation: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class StudyRun:
    """One cell of the grid.

    Attributes:
        arm, seed: which.
        directory: of the run.
        arguments: of bin.train.
    """

    arm: str
    seed: int
    directory: Path
    arguments: tuple[str, ...]

    @property
    def label(self) -> str:
        """`arm, seed N`."""
        return f"{self.arm}, seed {self.seed}"


def runs_of(study: Study, directory: Path, overrides: Sequence[str] = ()) -> list[StudyRun]:
    """The grid's runs, seed by seed, so that a study that is stopped has compared arms on some seeds.

    Args:
        study: what to run.
        directory: of the study; a run's is `directory`/ARM/seedN.
        overrides: arguments of bin.train for every run.

    Raises:
        UserError: in one line, if two runs would share a directory or an arm sets what the study sets.
    """
    _check(study)
    return [
        StudyRun(
            arm,
            seed,
            path := directory / arm / f"seed{seed}",
            (*study.arms[arm].arguments(), *overrides, f"--config.training.seed={seed}", f"--config.run_dir={path}"),
        )
        for seed in study.seeds
        for arm in study.arms
    ]


def check_collisions(runs: Sequence[StudyRun], configs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse two runs that would be the same run.

    Args:
        runs: of one study.
        configs: each run's resolved config as a nested dict.

    Raises:
        UserError: naming both.
    """
    seen: list[tuple[StudyRun, dict[str, Any]]] = []
    for run, config in zip(runs, configs, strict=True):
        content = {name: value for name, value in config.items() if name != "run_dir"}
        for other, before in seen:
            if before == content:
                raise UserError(
                    f"study: {other.label!r} and {run.label!r} are one config, every setting is equal; "
                    "drop one or make them differ"
                )
        seen.append((run, content))


def _check(study: Study) -> None:
    if not study.arms or not study.seeds:
        raise UserError(f"study: {len(study.arms)} arms and {len(study.seeds)} seeds, must have at least one of each")
    if study.baseline not in study.arms:
        raise UserError(f"study: the baseline {study.baseline!r} is none of its arms {', '.join(study.arms)}")
    for place, seed in enumerate(study.seeds):
        if seed in study.seeds[:place]:
            raise UserError(f"study: seed {seed} is there twice")
    directories: dict[str, str] = {}
    for label, arm in study.arms.items():
        if not _NAME.fullmatch(label):
            raise UserError(f"study: arm {label!r} names a directory, must be letters, digits and any of _.=+-")
        # Some file systems do not tell capitals apart.
        other = directories.setdefault(label.lower(), label)
        if other != label:
            raise UserError(f"study: arms {other!r} and {label!r} would share a directory; rename one")
        for name in SET_BY_THE_STUDY:
            if name in arm.settings:
                raise UserError(f"study: arm {label!r} sets {name}, which the study sets for each run; leave it out")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"({','.join(map(str, value))})" if isinstance(value, tuple | list) else str(value)
