"""The part of `dcmdp probe` that reads recordings: its arguments, and what is measured."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

from dcmdp_jax.commands.cli import whole
from dcmdp_jax.data.tokenizer import load_tokenizer, token_text
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.mismatch.analysis import Measured
from dcmdp_jax.lab.mismatch.formats import FORMATS, format_of
from dcmdp_jax.lab.mismatch.over_training import RecordedFile, find_files, read_recording, read_run
from dcmdp_jax.lab.mismatch.page import LEFT_OUT
from dcmdp_jax.lab.mismatch.recording import Columns
from dcmdp_jax.lab.mismatch.recording_files import LeftOut
from dcmdp_jax.lab.probe.engines import ProbeSpec
from dcmdp_jax.observe.jsonl import CONFIG_FILE, METRICS_FILE
from dcmdp_jax.observe.metrics_io import read_metrics, without_placeholder
from dcmdp_jax.run.directory import read_config

_MAX_TOKENS = 5_000_000
_FLOOR = "mismatch/noise_floor"
_TOKEN_COLUMN = "token_ids"
_RECORDED_BY = "trl", "verl", "skyrl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what was recorded, and where."""
    recording = parser.add_argument_group("a recording").add_argument
    formats = ("auto", *(name for name in FORMATS if name != "recorder"), *_RECORDED_BY)
    recording("recording", nargs="*", metavar="PATH", help="files, directories, globs, or a run directory")
    about = f"refuse others than: {', '.join(formats[1:])} (default: %(default)s)"
    recording("--format", default="auto", choices=formats, metavar="NAME", help=about)
    recording("--allow-gaps", action="store_true", help="go on where steps or ranks are missing in the middle")
    recording("--token-column", default=_TOKEN_COLUMN, metavar="NAME", help="lists of token ids (default: %(default)s)")
    recording("--train-column", metavar="NAME", help="lists of the training stack's log-probs, nats")
    recording("--rollout-column", metavar="NAME", help="lists of the engine's log-probs, nats")
    recording("--mask-column", default="", metavar="NAME", help="1 on sampled tokens (default: all are)")
    recording("--entropy-column", default="", metavar="NAME", help="the training stack's entropies (default: none)")
    recording("--lag-column", default="", metavar="NAME", help="age in steps of the weights that sampled")
    recording("--top-column", default="", metavar="NAME", help="the engine's likeliest tokens, as Recorder packs them")
    recording("--max-tokens", type=whole(1), default=_MAX_TOKENS, metavar="N", help="read an even share above it")
    recording("--tokenizer", metavar="DIR", help="shows tokens as text (default: ids)")


def measure(arguments: argparse.Namespace) -> tuple[str, list[Measured]]:
    """Read what the arguments name; a title and the one pair.

    Raises:
        UserError: in one line, what is wrong with the arguments or the recording.
    """
    paths = arguments.recording
    title = f"Mismatch of {Path(paths[0]).name or paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}"
    options = [field.name for field in dataclasses.fields(Columns)]
    columns = {name: value for name in options if (value := getattr(arguments, f"{name}_column"))}
    if columns != {"token": _TOKEN_COLUMN}:
        return title, [_by_columns(arguments, paths, columns)]
    left_out = LeftOut()
    files = find_files(paths, left_out)
    framework = files[0].framework
    if arguments.format not in ("auto", framework):
        raise UserError(f"--format={arguments.format}: {files[0].path} was recorded by {framework}; leave --format out")
    run = _own_run(files)
    metrics = without_placeholder(read_metrics(run), read_config(run).algorithm.measured_steps) if run else None
    asked = {name: getattr(arguments, name) for name in ("max_tokens", "allow_gaps", "tolerance")}
    found = read_run(files, left_out, metrics=metrics, **asked)
    names = format_of(framework).columns
    source = {
        "recording": paths[0] if len(paths) == 1 else f"{len(paths)} paths",
        "format": f"{framework} ({format_of(framework).writer})",
        "training stack": names.train, "engine": names.rollout,
        "files": f"{len(files):,}", "rows": _rows(found.rows, found.kept_every), **_said(left_out),
    }  # fmt: skip
    name = framework if len(files) > 1 else f"{framework} {files[0].path.stem}"
    known = {"over_training": found.over_training, "framework": framework}
    if run:
        rollout = read_config(run).rollout
        spec = ProbeSpec(rollout.engine, rollout.precision, rollout.compute_dtype, rollout.kv_cache_dtype)
        floors = {str(spec): float(metrics[_FLOOR][1][-1])} if _FLOOR in metrics else {}
        known |= {"floors": floors, "settings": spec.costs}
    return title, [Measured(name, source, found.pairs, _text(arguments.tokenizer), **known)]


def _own_run(files: list[RecordedFile]) -> Path | None:
    """The run directory of a recording of ours, if its metrics are there."""
    run = files[0].path.parent.parent
    own = files[0].framework == "dcmdp" and all(file.path.parent.parent == run for file in files)
    return run if own and all((run / name).is_file() for name in (METRICS_FILE, CONFIG_FILE)) else None


def _by_columns(arguments: argparse.Namespace, paths: list[str], given: dict[str, str]) -> Measured:
    for option, content in (("token", "token ids"), ("train", "train log-probs"), ("rollout", "rollout log-probs")):
        if option not in given:
            raise UserError(f"--{option}-column is missing: name the column of the {content}")
    if len(paths) > 1:
        raise UserError(f"{len(paths)} paths with --train-column: give one file; several need a known format")
    path, columns = Path(paths[0]), Columns(**given)
    recording = read_recording(path, columns, max_tokens=arguments.max_tokens)
    source = {
        "recording": paths[0], "training stack": columns.train, "engine": columns.rollout,
        "rows": _rows(recording.rows, recording.kept_every), **_said(recording.left_out),
    }  # fmt: skip
    return Measured(path.stem, source, recording.pairs, _text(arguments.tokenizer))


def _said(left_out: LeftOut) -> dict[str, str]:
    return {LEFT_OUT: str(left_out)} if str(left_out) else {}


def _rows(rows: int, kept_every: int) -> str:
    return f"{rows:,}, {'all' if kept_every == 1 else f'every {kept_every}th'} used"


def _text(tokenizer: str | None) -> Callable[[int], str] | None:
    return None if tokenizer is None else token_text(load_tokenizer(tokenizer))
