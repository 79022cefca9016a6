"""Definition of a study, and the checks before it runs."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dcmdp_jax.algorithm.penalties import FIXED_MULTIPLIERS
from dcmdp_jax.errors import UserError, shorten

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=+-]*")
SET_BY_THE_STUDY = ("run_dir", "training.seed")
"""Settings that differ between a study's runs by themselves."""
_SET_IN_EVALUATION = ("--method", "--out", "--table", "--help", "-h")


@dataclasses.dataclass(frozen=True)
class Arm:
    """One config of a study.

    Attributes:
        config: value of train's --config, `configs/demo.py:grpo`.
        settings: dotted name -> value, on top of it.
        past: True for an arm that does not run any more; its kept metrics are shown.
        differs: of an arm with `dc_grpo` in its name, the settings of `algorithm` that differ from
            configs/qwen3_8b.py: `("tolerance",)`.
    """

    config: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    past: bool = False
    differs: Sequence[str] = ()

    def __post_init__(self) -> None:
        _require(
            isinstance(self.config, str),
            "an arm's config is",
            self.config,
            "text as --config of train",
        )
        _require(
            isinstance(self.settings, Mapping) and _all_of(str, self.settings),
            "an arm's settings are",
            self.settings,
            "a mapping from a setting's name to its value",
        )
        _require(
            not isinstance(self.differs, str) and _all_of(str, self.differs),
            "an arm's `differs` is",
            self.differs,
            "a tuple of names",
        )

    def arguments(self) -> list[str]:
        """Arguments of `dcmdp train`."""
        settings = [f"--config.{name}={_text(value)}" for name, value in self.settings.items()]
        return [f"--config={self.config}", *settings]


@dataclasses.dataclass(frozen=True)
class Study:
    """A grid of configs and seeds. Construction refuses one that can't be run, in one line.

    Attributes:
        title: heading of its tables and figures.
        arms: label -> config; a label is also a directory.
        baseline: label that the others are compared with, seed by seed.
        seeds: seeds of every arm.
        evaluation: arguments of `dcmdp evaluate` for each finished run, without --method and --out;
            empty: the runs' own held-out scores are compared alone.
    """

    title: str
    arms: Mapping[str, Arm]
    baseline: str
    seeds: Sequence[int]
    evaluation: Sequence[str] = ()

    def __post_init__(self) -> None:
        _require(isinstance(self.title, str), "the title is", self.title, "text")
        _require(
            isinstance(self.arms, Mapping), "the arms are", self.arms, "a mapping from label to Arm"
        )
        for label, arm in self.arms.items():
            _require(
                isinstance(label, str), "an arm's label is", label, "text, which names a directory"
            )
            _require(isinstance(arm, Arm), f"arm {label!r} is", arm, "an Arm")

        for name, kind, kind_text in (
            ("seeds", int, "whole numbers"),
            ("evaluation", str, "texts"),
        ):
            values = getattr(self, name)
            is_sequence = isinstance(values, Sequence) and not isinstance(values, str)
            _require(
                is_sequence and _all_of(kind, values),
                f"{name} is",
                values,
                f"a tuple of {kind_text}",
            )

        _check_grid(self)
        for word in self.evaluation:
            if word.partition("=")[0] in _SET_IN_EVALUATION:
                raise UserError(
                    f"evaluation has {word}, which the study gives for each run; leave it out"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One cell of the grid.

    Attributes:
        arm, seed: arm and seed of the run.
        directory: run directory.
        arguments: command line of `dcmdp train`.
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
    """The grid's runs, seed by seed: a study that is stopped has compared arms on some seeds.

    Args:
        study: the study.
        directory: study directory; a run's is `directory`/ARM/seedN.
        overrides: arguments of `dcmdp train` for every run.
    """
    runs = []
    for seed in study.seeds:
        for label, arm in study.arms.items():
            if arm.past:
                continue
            run_dir = directory / label / f"seed{seed}"
            arguments = (
                *arm.arguments(),
                *overrides,
                f"--config.training.seed={seed}",
                f"--config.run_dir={run_dir}",
            )
            runs.append(StudyRun(arm=label, seed=seed, directory=run_dir, arguments=arguments))
    return runs


def check_collisions(runs: Sequence[StudyRun], configs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse two runs that would be the same run.

    Settings that a method without dual ascent does not use make no difference.

    Args:
        runs: runs of one study.
        configs: each run's resolved config as a nested dict.

    Raises:
        UserError: naming both.
    """
    contents: list[dict[str, Any]] = []
    for run, config in zip(runs, configs, strict=True):
        idle = unused(config["algorithm"])
        used = {name: value for name, value in config["algorithm"].items() if name not in idle}
        contents.append({**config, "run_dir": "", "algorithm": used})
        other = runs[contents.index(contents[-1])]
        if other is not run:
            raise UserError(
                f"study: {other.label!r} and {run.label!r} are one config, every setting that is "
                "used is equal; drop one or make them differ"
            )


_OF_THE_ASCENT = {
    "multiplier",
    "dual_learning_rate",
    "multiplier_max",
    "tolerance_steps",
    "tolerance_factor",
}


def unused(algorithm: Mapping[str, Any]) -> frozenset[str]:
    """Names of the settings of the algorithm that its other settings override."""
    method = algorithm["method"]
    idle = set()
    if method == "grpo":
        idle.add("level")
    if method in FIXED_MULTIPLIERS:
        idle |= _OF_THE_ASCENT
    if method not in FIXED_MULTIPLIERS and algorithm.get("dual_learning_rate", 1.0) > 0:
        idle.add("tolerance" if algorithm.get("tolerance_steps") else "tolerance_factor")
        return frozenset(idle)
    idle |= {"tolerance_steps", "tolerance_factor"}
    # A function of a user's may look at c.
    if method != "threshold_grpo" and ":" not in method:
        idle.add("tolerance")
    return frozenset(idle)


def _require(is_right: bool, subject: str, value: object, allowed: str) -> None:
    """Refuse a field of another type than declared; the file that makes it is anyone's program."""
    if not is_right:
        raise UserError(f"{subject} {shorten(value)}, must be {allowed}")


def _all_of(kind: type, values: Iterable[object]) -> bool:
    # A bool is no seed.
    return all(type(value) is kind for value in values)


def _check_grid(study: Study) -> None:
    if not study.arms or not study.seeds:
        raise UserError(
            f"{len(study.arms)} arms and {len(study.seeds)} seeds, must have at least one of each"
        )
    if study.baseline not in list(study.arms):
        raise UserError(
            f"the baseline {shorten(study.baseline)} is none of its arms {', '.join(study.arms)}"
        )
    for index, seed in enumerate(study.seeds):
        if not 0 <= seed < 2**31:
            raise UserError(f"seed {shorten(seed)}: must be in [0, 2147483647]")
        if seed in study.seeds[:index]:
            raise UserError(f"seed {seed} is there twice")
    directories: dict[str, str] = {}
    for label, arm in study.arms.items():
        if not _NAME.fullmatch(label):
            raise UserError(
                f"arm {shorten(label)} names a directory, must be letters, digits and any of _.=+-"
            )
        # Some file systems do not tell capitals apart.
        other = directories.setdefault(label.lower(), label)
        if other != label:
            raise UserError(f"arms {other!r} and {label!r} would share a directory; rename one")
        for name in SET_BY_THE_STUDY:
            if name in arm.settings:
                raise UserError(
                    f"arm {label!r} sets {name}, which the study sets for each run; leave it out"
                )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"({','.join(map(str, value))})"
    return str(value)
