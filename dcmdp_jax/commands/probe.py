"""Disagreement of two engines on the same tokens: how much, where, and why.

    dcmdp probe PATH...
        # what a framework, or a run of ours, recorded
    dcmdp probe PATH... --train-column NAME --rollout-column NAME
        # two columns of any other file
    dcmdp probe --model DIR --config.task.train=FILE --a vllm:bfloat16 --b trainer
        # sample with a, score with b
    dcmdp probe --config FILE
        # a run's engine against its training stack

Settings are a run's own, and each may be given: --config.rollout.max_completion_tokens=64,
docs/settings.md. But 8 completions of each problem are sampled whatever the run had, with seed 0.

Writes probe.json, probe.html and plots/*.png into --out and prints the table and the likely cause.
docs/probe.md has the engines' names and what the causes rest on.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dcmdp_jax.commands.cli import Parser, output_directory, real, whole
from dcmdp_jax.commands.flags import load_config, parse_settings
from dcmdp_jax.config.checks import settings_of
from dcmdp_jax.config.load import for_sampling
from dcmdp_jax.config.rollout import TRAINABLE, RolloutSettings
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.tokenizer import load_tokenizer, token_text
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.mismatch import page
from dcmdp_jax.lab.mismatch.analysis import Measured, analyze
from dcmdp_jax.lab.mismatch.formats import FORMATS, format_of
from dcmdp_jax.lab.mismatch.over_training import RecordedFile, find_files, read_recording, read_run
from dcmdp_jax.lab.mismatch.recording import Columns
from dcmdp_jax.lab.mismatch.recording_files import LeftOut
from dcmdp_jax.lab.probe.engines import ProbeSpec, parse_spec, settings_for
from dcmdp_jax.lab.probe.session import Session, check_specs, probe_pairs
from dcmdp_jax.observe.jsonl import CONFIG_FILE, METRICS_FILE
from dcmdp_jax.observe.metrics_io import read_metrics, without_placeholder
from dcmdp_jax.run.directory import read_config
from dcmdp_jax.run.saved_model import Policy, find_model

_PROBES_OWN = {
    "rollout.group_size": 8,
    "rollout.max_rows": 256,
    "training.seed": 0,
    "task.verifier_budget": 0.0,
}
_PROBES_OWN |= {"rewards.on_error": "error"}
"""Settings of a probe, whatever the run had."""
_WITHOUT_A_RUN = {"rollout.max_completion_tokens": 256}
_BY_ENGINE = (
    "rollout.engine",
    "rollout.precision",
    "rollout.compute_dtype",
    "rollout.kv_cache_dtype",
)
_MAX_TOKENS = 5_000_000
_FLOOR = "mismatch/noise_floor"
_TOKEN_COLUMN = "token_ids"
_RECORDED_BY = "trl", "verl", "skyrl"


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), measure, conclude, write and print."""
    arguments, overrides = parse_settings(_parser(), argv[1:])
    recorded = arguments.recording
    if sum(map(bool, (recorded, arguments.model, arguments.config))) != 1:
        raise UserError("give one of PATH (a recording), --model DIR and --config FILE; see --help")
    if recorded:
        if overrides:
            raise UserError(
                f"config.{next(iter(overrides))}: a recording has no settings, leave it out"
            )
        title, measured = _measure_recording(arguments)
    else:
        session, first = open_session(arguments, overrides)
        title = f"Mismatch of engines on {session.run.saved.name}"

        def keep(measured: list[Measured]) -> None:
            analyses = [analyze(one, arguments.tolerance) for one in measured]
            page.write_json(title, analyses, arguments.out, finished=False)

        measured = probe_pairs(dataclasses.replace(session, keep=keep), first, arguments.b)
    analyses = [analyze(one, arguments.tolerance) for one in measured]
    print(page.table(analyses))
    print(f"wrote {page.write(title, measured, analyses, arguments.out)}")
    means = {one.name: float(one.pairs.discrepancy.mean()) for one in measured}
    if above := [
        f"{name} {mean:.3g}" for name, mean in means.items() if mean > arguments.fail_above
    ]:
        print(
            f"mean |dp| above --fail-above={arguments.fail_above:g}: {', '.join(above)}",
            file=sys.stderr,
        )
        raise SystemExit(1)


def _parser() -> Parser:
    parser = Parser(
        "probe",
        description="How far two engines disagree on the same tokens, and why. "
        "--config.section.name=value overrides a setting of the run, such as "
        "--config.task.train=FILE.",
    )
    _add_recording(parser)
    engines = add_engines(parser).add_argument
    engines("--no-rescoring", action="store_true", help="name the cause from the two columns alone")
    add = parser.add_argument
    add(
        "--tolerance",
        type=real(0, 1),
        metavar="C",
        help="budget to count completions over (default: the recommended)",
    )
    add(
        "--fail-above",
        type=real(0, 1),
        default=1.0,
        metavar="X",
        help="exit code 1 where a mean |dp| is above it",
    )
    out = Path("runs/probe")
    add(
        "--out",
        type=output_directory,
        default=out,
        metavar="DIR",
        help="where to write (default: %(default)s)",
    )
    return parser


def add_engines(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments of `open_session`."""
    group = parser.add_argument_group("engines")
    live = group.add_argument
    live(
        "--model",
        type=Path,
        metavar="DIR",
        help="model directory, OWNER/NAME on the Hub, run or checkpoint",
    )
    live(
        "--config",
        metavar="FILE[:ARGUMENT]",
        help="a config file: its model.path or last checkpoint, task, engine",
    )
    live(
        "--a",
        action="append",
        type=_engine,
        metavar="ENGINE",
        help="samples; several times for several engines",
    )
    live(
        "--b",
        type=_engine,
        default=parse_spec("trainer"),
        metavar="ENGINE",
        help="scores (default: trainer)",
    )
    live(
        "--prompts",
        type=whole(1),
        default=32,
        metavar="N",
        help="problems to ask (default: %(default)s)",
    )
    live(
        "--top-p",
        type=real(0, 1),
        default=1.0,
        metavar="P",
        help="nucleus mass of sampling (default: %(default)s)",
    )
    live(
        "--earlier",
        action="append",
        type=Path,
        metavar="DIR",
        help="weights that a may still hold, all or in part",
    )
    return group


def _engine(text: str) -> ProbeSpec:
    try:
        return parse_spec(text)
    except UserError as error:  # a ValueError, whose message argparse would drop
        raise argparse.ArgumentTypeError(str(error)) from error


def open_session(
    arguments: argparse.Namespace, overrides: Mapping[str, Any]
) -> tuple[Session, list[ProbeSpec]]:
    """Read the probed model and its problems; the session, and the engines that sample.

    Args:
        arguments: as added by `add_engines`, and `no_rescoring`.
        overrides: settings on top of the run's own.

    Raises:
        UserError: in one line, naming the argument.
    """
    first = arguments.a or []
    check_specs(first, arguments.b)
    saved = None if arguments.config else find_model(arguments.model)
    base = load_config(arguments.config) if saved is None else saved.settings
    known = arguments.config or saved.run_dir
    if first and (given := [name for name in _BY_ENGINE if name in overrides]):
        raise UserError(
            f"config.{given[0]}: --a names the engines and their precisions; leave one of the two "
            "out"
        )
    if first:
        # The settings have the engine that rollout.engine_args belong to.
        by_path = [
            spec for spec in (*first, arguments.b) if spec.record and spec.kind not in TRAINABLE
        ]
        engine = settings_for(by_path[0], base.rollout) if by_path else RolloutSettings()
        overrides = {name: getattr(engine, name.partition(".")[2]) for name in _BY_ENGINE} | dict(
            overrides
        )
    elif not known and "rollout.engine" not in overrides:
        raise UserError(
            "--a is missing: name the engine that samples, for example --a=local:fp8 or "
            "--a=vllm:bfloat16"
        )
    config = for_sampling(base, _PROBES_OWN | ({} if known else _WITHOUT_A_RUN) | dict(overrides))
    rollout = config.rollout
    if not first:
        first = [
            ProbeSpec(
                rollout.engine, rollout.precision, rollout.compute_dtype, rollout.kv_cache_dtype
            )
        ]
        check_specs(first, arguments.b)
    if saved is None:
        trained = (Path(config.run_dir) / "checkpoints").is_dir()
        if not (path := config.run_dir if trained else config.model.path):
            raise UserError(
                f"--config: {config.run_dir} has no checkpoint and the config no model.path; "
                "train first"
            )
        saved = find_model(Path(path))
    if not config.task.train:
        raise UserError(
            "config.task.train: empty; --config.task.train=TASK names a file, arithmetic:... or a "
            "Hub name"
        )
    for kind, spec in {spec.record: spec for spec in (*first, arguments.b) if spec.record}.items():
        count = max(spec.record is kind for spec in first) + (arguments.b.record is kind)
        kind.reserve_device_share(settings_of(settings_for(spec, rollout), kind), count)
    run = Policy.of(saved, config)
    session = Session(
        run=run,
        problems=load_problems(config.task.train, limit=arguments.prompts, answers="unused"),
        sampling=dataclasses.replace(run.sampling, top_p=arguments.top_p),
        score_temperature=rollout.temperature
        or 1.0,  # what is sampled greedily has its log-probs at 1
        earlier=[find_model(path) for path in arguments.earlier or ()],
        load=functools.cache(lambda path: Policy.of(find_model(path), config)),
        rescore=not arguments.no_rescoring,
        show=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return session, first


def _add_recording(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what was recorded, and where."""
    recording = parser.add_argument_group("a recording").add_argument
    formats = ("auto", *(name for name in FORMATS if name != "recorder"), *_RECORDED_BY)
    recording(
        "recording", nargs="*", metavar="PATH", help="files, directories, globs, or a run directory"
    )
    about = f"refuse others than: {', '.join(formats[1:])} (default: %(default)s)"
    recording("--format", default="auto", choices=formats, metavar="NAME", help=about)
    recording(
        "--allow-gaps",
        action="store_true",
        help="go on where steps or ranks are missing in the middle",
    )
    recording(
        "--token-column",
        default=_TOKEN_COLUMN,
        metavar="NAME",
        help="lists of token ids (default: %(default)s)",
    )
    recording(
        "--train-column", metavar="NAME", help="lists of the training stack's log-probs, nats"
    )
    recording("--rollout-column", metavar="NAME", help="lists of the engine's log-probs, nats")
    recording(
        "--mask-column", default="", metavar="NAME", help="1 on sampled tokens (default: all are)"
    )
    recording(
        "--entropy-column",
        default="",
        metavar="NAME",
        help="the training stack's entropies (default: none)",
    )
    recording(
        "--lag-column", default="", metavar="NAME", help="age in steps of the weights that sampled"
    )
    recording(
        "--top-column",
        default="",
        metavar="NAME",
        help="the engine's likeliest tokens, as Recorder packs them",
    )
    recording(
        "--max-tokens",
        type=whole(1),
        default=_MAX_TOKENS,
        metavar="N",
        help="read an even share above it",
    )
    recording("--tokenizer", metavar="DIR", help="shows tokens as text (default: ids)")


def _measure_recording(arguments: argparse.Namespace) -> tuple[str, list[Measured]]:
    """Read what the arguments name; a title and the one pair.

    Raises:
        UserError: in one line, what is wrong with the arguments or the recording.
    """
    paths = arguments.recording
    title = (
        "Mismatch of "
        f"{Path(paths[0]).name or paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}"
    )
    options = [field.name for field in dataclasses.fields(Columns)]
    columns = {name: value for name in options if (value := getattr(arguments, f"{name}_column"))}
    if columns != {"token": _TOKEN_COLUMN}:
        return title, [_by_columns(arguments, paths, columns)]
    left_out = LeftOut()
    files = find_files(paths, left_out)
    framework = files[0].framework
    if arguments.format not in ("auto", framework):
        raise UserError(
            f"--format={arguments.format}: {files[0].path} was recorded by {framework}; leave "
            "--format out"
        )
    run = _own_run(files)
    metrics = (
        without_placeholder(read_metrics(run), read_config(run).algorithm.measured_steps)
        if run
        else None
    )
    asked = {name: getattr(arguments, name) for name in ("max_tokens", "allow_gaps", "tolerance")}
    found = read_run(files, left_out, metrics=metrics, **asked)
    names = format_of(framework).columns
    source = {
        "recording": paths[0] if len(paths) == 1 else f"{len(paths)} paths",
        "format": f"{framework} ({format_of(framework).writer})",
        "training stack": names.train,
        "engine": names.rollout,
        "files": f"{len(files):,}",
        "rows": _rows(found.rows, found.kept_every),
        **_said(left_out),
    }
    name = framework if len(files) > 1 else f"{framework} {files[0].path.stem}"
    known = {"over_training": found.over_training, "framework": framework}
    if run:
        rollout = read_config(run).rollout
        spec = ProbeSpec(
            rollout.engine, rollout.precision, rollout.compute_dtype, rollout.kv_cache_dtype
        )
        floors = {str(spec): float(metrics[_FLOOR][1][-1])} if _FLOOR in metrics else {}
        known |= {"floors": floors, "settings": spec.costs}
    return title, [Measured(name, source, found.pairs, _text(arguments.tokenizer), **known)]


def _own_run(files: list[RecordedFile]) -> Path | None:
    """The run directory of a recording of ours, if its metrics are there."""
    run = files[0].path.parent.parent
    own = files[0].framework == "dcmdp" and all(file.path.parent.parent == run for file in files)
    return (
        run if own and all((run / name).is_file() for name in (METRICS_FILE, CONFIG_FILE)) else None
    )


def _by_columns(arguments: argparse.Namespace, paths: list[str], given: dict[str, str]) -> Measured:
    for option, content in (
        ("token", "token ids"),
        ("train", "train log-probs"),
        ("rollout", "rollout log-probs"),
    ):
        if option not in given:
            raise UserError(f"--{option}-column is missing: name the column of the {content}")
    if len(paths) > 1:
        raise UserError(
            f"{len(paths)} paths with --train-column: give one file; several need a known format"
        )
    path = Path(paths[0])
    columns = Columns(**given)
    recording = read_recording(path, columns, max_tokens=arguments.max_tokens)
    source = {
        "recording": paths[0],
        "training stack": columns.train,
        "engine": columns.rollout,
        "rows": _rows(recording.rows, recording.kept_every),
        **_said(recording.left_out),
    }
    return Measured(path.stem, source, recording.pairs, _text(arguments.tokenizer))


def _said(left_out: LeftOut) -> dict[str, str]:
    return {page.LEFT_OUT: str(left_out)} if str(left_out) else {}


def _rows(rows: int, kept_every: int) -> str:
    return f"{rows:,}, {'all' if kept_every == 1 else f'every {kept_every}th'} used"


def _text(tokenizer: str | None) -> Callable[[int], str] | None:
    return None if tokenizer is None else token_text(load_tokenizer(tokenizer))
