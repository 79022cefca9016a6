"""Run a study: a grid of configs and seeds, one after another, and compares them.

    python -m research.studies --study=methods                 # demo size, on a CPU
    python -m research.studies --study=methods:paper           # the paper's constants
    python -m research.studies --study=... --seeds=0,1,2 --config.training.steps=20
    python -m research.studies --study=... --arms=grpo,exact   # some arms
    python -m research.studies --study=... --dry-run           # list runs and resolved arms
    python -m research.studies --study=... --redraw=research/kept/embedded.jsonl.gz

Each run is `dcmdp train` in OUT/ARM/seedN, its output in OUT/ARM/seedN.log. The same command
continues a study that was stopped: finished runs are skipped, a cut one resumes. When the command
ends, OUT has of the finished runs results.md, figures/ and metrics.jsonl.gz, which is small and
enough to draw the others again. docs/paper.md lists the studies.
"""

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcmdp_jax.commands import flags
from dcmdp_jax.commands.arguments import Parser, whole
from dcmdp_jax.commands.flags import parse as parse_run
from dcmdp_jax.config import load, settings
from dcmdp_jax.dotted_names import flatten
from dcmdp_jax.errors import UserError, naming
from dcmdp_jax.run.directory import check_run_directory
from research.arguments import each_once
from research.studies.arms import Values, arm_table, check_arm
from research.studies.results import read_kept_metrics
from research.studies.study import (
    SET_BY_THE_STUDY,
    Arm,
    Study,
    StudyRun,
    check_collisions,
    runs_of,
)
from research.studies.study_runs import (
    EVALUATION,
    STOPPED,
    compare,
    evaluation_words,
    finish_run,
    write_results,
)

_OVERRIDE = "--config."
_PAPERS_CONFIG = "qwen3_8b"
_show = functools.partial(print, flush=True)


def main(argv: list[str]) -> int:
    """Parse the arguments (program name first), check every run, run the unfinished, compare."""
    parser = study_parser(
        "Run a study's grid of configs and seeds, one after another, and compare them. "
        "--config.section.name=value overrides a setting in every run; the same command continues."
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs, check all settings, and stop"
    )
    parser.add_argument(
        "--redraw", type=Path, metavar="FILE", help="draw a study's metrics.jsonl.gz; run nothing"
    )
    arguments, study, out, overrides = parse_study(parser, argv)
    if arguments.redraw is not None:
        if overrides or arguments.seeds is not None or arguments.dry_run:
            raise UserError(
                "--redraw: the metrics are kept already; leave out --seeds, --dry-run and "
                "--config.*"
            )
        print(write_results(study, read_kept_metrics(arguments.redraw, list(study.arms)), out))
        return 0

    runs, configs = resolve(study, out, overrides, arguments.arms)
    if arguments.dry_run:
        for run in runs:
            print(f"{run.label}: dcmdp train {' '.join(run.arguments)}")
        arms = {run.arm: study.arms[run.arm] for run in runs}
        print(f"\n{table_of(arms, overrides)}")
    for config in configs:
        check_run_directory(config)
    check_evaluation(study, runs, configs)
    if arguments.dry_run:
        return 0

    failed = []
    for number, (run, config) in enumerate(zip(runs, configs, strict=True), start=1):
        label = f"[{number}/{len(runs)}] {run.label}"
        code = finish_run(run, config.training.steps, evaluation_words(study, run), label, _show)
        if code in STOPPED:
            _show("stopped; the same command continues")
            print(compare(study, runs, failed, out))
            return code
        if code:
            failed.append(run)
    print(compare(study, runs, failed, out))
    return int(bool(failed))


def study_parser(description: str) -> Parser:
    """Parser of a command that runs a study; see `parse_study`."""
    parser = Parser(prog="python -m research.studies", description=description)
    add = parser.add_argument
    add("--study", metavar="FILE[:ARGUMENT]", help="name of a study of configs/studies/, or a file")
    add(
        "--seeds",
        type=each_once(whole(0), "seed"),
        metavar="N,N,...",
        help="default: the study's own",
    )
    add(
        "--arms",
        type=lambda text: text.split(","),
        metavar="ARM,ARM,...",
        help="run these alone, in this order",
    )
    add("--out", type=Path, metavar="DIR", help="default: runs/studies/NAME of the study")
    return parser


def parse_study(
    parser: Parser, argv: Sequence[str]
) -> tuple[argparse.Namespace, Study, Path, list[str]]:
    """Parse the arguments (program name first).

    Returns:
        The arguments; the study with the seeds of --seeds; its directory; and
        --config.section.name=value of every run.

    Raises:
        UserError: in one line, without a study or for one that can't be read.
    """
    overrides = [word for word in argv[1:] if word.startswith(_OVERRIDE)]
    arguments = parser.parse_args([word for word in argv[1:] if word not in overrides])
    if arguments.study is None:
        raise UserError("--study is missing; for example --study=methods")
    study = load_study(arguments.study)
    if arguments.seeds is not None:
        study = dataclasses.replace(study, seeds=arguments.seeds)
    location, _, argument = arguments.study.partition(":")
    name = Path(location).stem
    if argument:
        name += f"_{argument}"
    return arguments, study, arguments.out or Path("runs/studies") / name, overrides


def load_study(program: str) -> Study:
    """Run a study file's `get_study`, once.

    Args:
        program: `FILE[:ARGUMENT]` of --study.
    """
    return flags.call_function("--study", program, "get_study", (Study,), "studies")


def resolve(
    study: Study, out: Path, overrides: Sequence[str] = (), arms: Sequence[str] | None = None
) -> tuple[list[StudyRun], list[settings.Config]]:
    """List every run of `arms`, else of all, with its checked config, before the first is begun.

    Raises:
        UserError: in one line, naming the run or the argument.
    """
    common_values, _ = flags.split_overrides(overrides)
    for name in SET_BY_THE_STUDY:
        if name in common_values:
            raise UserError(
                f"--config.{name}={common_values[name]}: the study sets {name} for each run; use "
                "--out and --seeds"
            )

    runs = runs_of(study, out, overrides)
    if arms is not None:
        selected_runs = []
        for arm in arms:
            arm_runs = [run for run in runs if run.arm == arm]
            if not arm_runs:
                names = ", ".join(dict.fromkeys(run.arm for run in runs))
                raise UserError(f"--arms: got {arm!r}, which is none of the study's: {names}")
            selected_runs += arm_runs
        runs = selected_runs

    base = default_values()
    paper = arm_values(Arm(_PAPERS_CONFIG))
    configs = []
    for run in runs:
        with naming(f"study: {run.label}"):
            configs.append(parse_run(["train", *run.arguments]).config)
    for label in dict.fromkeys(run.arm for run in runs):
        arm = study.arms[label]
        with naming("study"):
            changed_names = {*arm.settings, *common_values}
            check_arm(label, arm, arm_values(arm, overrides), changed_names, base, paper)
    check_collisions(runs, [settings.to_dict(config) for config in configs])
    return runs, configs


def default_values() -> Values:
    """The default of every setting, by its dotted name."""
    return flatten(settings.to_dict(settings.Config()))


def arm_values(arm: Arm, overrides: Sequence[str] = ()) -> Values:
    """Every setting of an arm after all that it inherits; unchecked: arms of the past have theirs.

    Args:
        arm: the arm.
        overrides: --config.section.name=value of every run.
    """
    changes, _ = flags.split_overrides([*arm.arguments()[1:], *overrides])
    return default_values() | flatten(flags.load_values(arm.config, changes))


def table_of(arms: Mapping[str, Arm], overrides: Sequence[str] = ()) -> str:
    """Markdown: the arms of a study by their resolved settings."""
    return arm_table(
        {label: (arm, arm_values(arm, overrides)) for label, arm in arms.items()}, default_values()
    )


def check_evaluation(
    study: Study, runs: Sequence[StudyRun], configs: Sequence[settings.Config]
) -> None:
    """Refuse what dcmdp evaluate would refuse once a run is trained: arguments, tasks, lengths."""
    if not study.evaluation:
        return
    # transformers takes a while to import; a study without an evaluation does not need it.
    from dcmdp_jax.commands.evaluate import parse, read_tasks
    from dcmdp_jax.run.evaluation_setup import asked_settings
    from dcmdp_jax.run.saved_model import Policy
    from dcmdp_jax.run.task import model_directory, read_model

    checked = set()
    for run, config in zip(runs, configs, strict=True):
        if (run.directory / EVALUATION).exists():
            continue
        with naming(f"study: evaluation of {run.label}"):
            arguments, overrides = parse([str(run.directory), *evaluation_words(study, run)])
            if arguments.step is not None and arguments.step > config.training.steps:
                raise UserError(
                    f"--step: got {arguments.step}, the run has "
                    f"training.steps={config.training.steps}"
                )

            sampled = load.for_sampling(config, asked_settings(overrides, of_a_run=True))
            # Seeds, and most arms, are asked the same by the same kind of model.
            questions = sampled.task, sampled.rewards, sampled.rollout, sampled.evaluation
            key = repr((config.model, config.max_total_tokens, questions, arguments.overlap))
            if key not in checked:
                checked.add(key)
                read_tasks(
                    Policy(sampled, None, *read_model(config, model_directory(config.model))),
                    arguments.overlap,
                )
