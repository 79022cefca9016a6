"""What each arm of a study is with all that it inherits: its row in a table, what is refused."""

from collections.abc import Collection, Mapping
from typing import Any

from dcmdp_jax.algorithm.penalties import FIXED_MULTIPLIERS
from dcmdp_jax.errors import UserError
from dcmdp_jax.number_format import markdown_table
from research.studies.study import Arm, unused

Values = Mapping[str, Any]
"""Dotted name of every setting -> its value."""

_PAPERS = "dc_grpo"
"""An arm with this in its name is the paper's."""
_TUNED = ("algorithm.", "optimizer.", "training.prompts_per_")
"""Settings that an arm must give where they differ from configs/base.py."""
_OF_THE_ENGINE = (
    "rollout.kv_cache_dtype",
    "rollout.lag",
    "rollout.engine_args",
    "model.forward_precision",
    "model.forward_cache",
)
"""Settings besides engine and precision that make the engine differ from the trainer."""
_HEADING = (
    "arm",
    "method",
    "lambda_0",
    "c",
    "eta",
    "cap",
    "measure",
    "level",
    "aggregation",
    "A / std",
    "updates per weight sync",
    "engine",
    "steps",
    "else",
    "not the paper's",
)
_IN_COLUMNS = """
    method multiplier tolerance tolerance_steps tolerance_factor budget dual_learning_rate
    multiplier_max measure sided level aggregation normalize_std
""".split()
"""Settings of the algorithm that a column has."""


def algorithm_of(values: Values) -> dict[str, Any]:
    """The settings of the algorithm, without the section's name."""
    algorithm = {}
    for name, value in values.items():
        if name.startswith("algorithm."):
            algorithm[name.removeprefix("algorithm.")] = value
    return algorithm


def check_arm(
    label: str, arm: Arm, values: Values, given_names: Collection[str], base: Values, paper: Values
) -> None:
    """Refuse an arm that differs from its name or its settings.

    Args:
        label: name of the arm.
        arm: the arm.
        values: its resolved settings.
        given_names: names of the settings that the arm, or the command line, gives.
        base: the defaults.
        paper: the resolved settings of the paper's main config.

    Raises:
        UserError: in one line, for a setting of the algorithm or the optimizer that its config
            changes and the arm does not say; for one that the arm names and another of its settings
            overrides; for an arm with the paper's name that differs from the paper in what
            `differs` does not say, or says and does not.
    """
    algorithm = algorithm_of(values)
    idle = {f"algorithm.{name}" for name in unused(algorithm)}
    for name, value in values.items():
        if not name.startswith(_TUNED) or name in given_names or name in idle:
            continue
        if value != base.get(name):
            raise UserError(
                f"arm {label!r} inherits {name}={value} from {arm.config}; say it in the arm"
            )
    for name in arm.settings:
        if name in idle and values[name] != base[name]:
            raise UserError(
                f"arm {label!r} names {name}, which its other settings override; leave it out"
            )

    differs = []
    if _PAPERS in label:
        for name, papers_value in algorithm_of(paper).items():
            if algorithm.get(name) == papers_value:
                continue
            differs.append(name)
            if name not in arm.differs:
                raise UserError(
                    f"arm {label!r} has the paper's name and "
                    f"algorithm.{name}={algorithm.get(name)}, the paper's is {papers_value}; "
                    "rename it, or name the setting in `differs`"
                )
    wrong = sorted(set(arm.differs) - set(differs))
    if wrong:
        raise UserError(
            f"arm {label!r} says that it differs from the paper in {wrong[0]!r}, and does not; "
            "leave it out"
        )


def arm_table(arms: Mapping[str, tuple[Arm, Values]], base: Values) -> str:
    """Markdown: each arm by its resolved settings; "-" where a setting does nothing.

    Args:
        arms: label -> the arm and its settings.
        base: the defaults; `else` has what differs from them and has no column.
    """
    rows = [_row(label, arm, values, base) for label, (arm, values) in arms.items()]
    return "\n".join(markdown_table(_HEADING, rows)) + "\n"


def _row(label: str, arm: Arm, values: Values, base: Values) -> list[str]:
    algorithm = algorithm_of(values)
    idle = unused(algorithm)

    def number(name: str) -> str:
        return "-" if name in idle else f"{algorithm[name]:g}"

    first = FIXED_MULTIPLIERS.get(algorithm["method"], algorithm["multiplier"])
    c = number("tolerance")
    if algorithm["tolerance_steps"] and "tolerance_steps" not in idle:
        c = f"{algorithm['tolerance_factor']:g} x first {algorithm['tolerance_steps']} steps"
    elif algorithm["budget"] != "mean":
        c += f" ({algorithm['budget']})"
    measure = algorithm["measure"]
    if algorithm["sided"] == "one":
        measure += ", one-sided"
    further = []
    for name, value in algorithm.items():
        if name not in _IN_COLUMNS and value != base[f"algorithm.{name}"]:
            further.append(f"{name}={value}")
    engine = [values["rollout.engine"].rpartition("/")[2], values["rollout.precision"]]
    for name in _OF_THE_ENGINE:
        if values[name] != base[name]:
            engine.append(f"{name.partition('.')[2]}={values[name]}")
    updates = values["training.prompts_per_step"] // values["training.prompts_per_mini_batch"]
    return [
        f"`{label}`",
        algorithm["method"].rpartition("/")[2],
        f"{first:g}",
        c,
        number("dual_learning_rate"),
        number("multiplier_max"),
        measure,
        "-" if "level" in idle else algorithm["level"],
        algorithm["aggregation"],
        "yes" if algorithm["normalize_std"] else "no",
        str(updates),
        " ".join(engine),
        str(values["training.steps"]),
        " ".join(further) or "-",
        ", ".join(arm.differs) or "-",
    ]
