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
import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dcmdp_jax.commands import parsers
from dcmdp_jax.commands.flags import load_config, parse_settings
from dcmdp_jax.config.checks import settings_of
from dcmdp_jax.config.load import for_sampling
from dcmdp_jax.config.rollout import TRAINABLE, RolloutSettings
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.tokenizer import load_tokenizer, token_text
from dcmdp_jax.errors import UserError
from dcmdp_jax.observe.jsonl import CONFIG_FILE, METRICS_FILE
from dcmdp_jax.observe.metrics_io import read_metrics, without_placeholder
from dcmdp_jax.probe.columns import page
from dcmdp_jax.probe.columns.analysis import Analysis, Measured, analyze
from dcmdp_jax.probe.columns.formats import format_of
from dcmdp_jax.probe.columns.over_training import (
    RecordedFile,
    Recording,
    find_files,
    read_recording,
    read_run,
)
from dcmdp_jax.probe.columns.recording import Columns
from dcmdp_jax.probe.columns.recording_files import LeftOut
from dcmdp_jax.probe.live.engines import ProbeSpec, settings_for
from dcmdp_jax.probe.live.session import Session, check_specs, probe_pairs
from dcmdp_jax.run.directory import read_config
from dcmdp_jax.run.saved_model import Policy, SavedModel, find_model

# Settings of a probe, whatever the run had.
_PROBES_OWN = {
    "rollout.group_size": 8,
    "rollout.max_rows": 256,
    "training.seed": 0,
    "task.verifier_budget": 0.0,
    "rewards.on_error": "error",
}
# Tokens of a completion where no run says how many.
_WITHOUT_A_RUN = {"rollout.max_completion_tokens": 256}
# Settings that an engine of --a names.
_BY_ENGINE = (
    "rollout.engine",
    "rollout.precision",
    "rollout.compute_dtype",
    "rollout.kv_cache_dtype",
)
# Arguments that a recording has no use for.
_OF_ENGINES = ("a", "b", "prompts", "top_p", "earlier", "no_rescoring")
_FLOOR = "mismatch/noise_floor"


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), measure, conclude, write and print."""
    arguments, overrides = parse_settings(parsers.probe(), argv[1:])
    recorded = arguments.recording
    if sum(map(bool, (recorded, arguments.model, arguments.config))) != 1:
        raise UserError("give one of PATH (a recording), --model DIR and --config FILE; see --help")

    def conclude(pairs: list[Measured]) -> list[Analysis]:
        return [analyze(pair, arguments.tolerance) for pair in pairs]

    if recorded:
        if overrides:
            raise UserError(
                f"config.{next(iter(overrides))}: a recording has no settings, leave it out"
            )
        defaults = parsers.probe().parse_args([])
        for name in _OF_ENGINES:
            if getattr(arguments, name) != getattr(defaults, name):
                flag = name.replace("_", "-")
                raise UserError(f"--{flag}: a recording has no engines to ask, leave it out")
        title, pair = _measure_recording(arguments)
        pairs = [pair]
    else:
        session, sampling_specs = open_session(arguments, overrides)
        title = f"Mismatch of engines on {session.run.saved.name}"

        def keep(pairs: list[Measured]) -> None:
            page.write_json(title, conclude(pairs), arguments.out, finished=False)

        pairs = probe_pairs(dataclasses.replace(session, keep=keep), sampling_specs, arguments.b)

    analyses = conclude(pairs)
    print(page.table(analyses))
    print(f"wrote {page.write(title, pairs, analyses, arguments.out)}")
    means = {pair.name: float(pair.pairs.discrepancy.mean()) for pair in pairs}
    above = [f"{name} {mean:.3g}" for name, mean in means.items() if mean > arguments.fail_above]
    if above:
        print(
            f"mean |p - q| above --fail-above={arguments.fail_above:g}: {', '.join(above)}",
            file=sys.stderr,
        )
        raise SystemExit(1)


def open_session(
    arguments: argparse.Namespace, overrides: Mapping[str, Any]
) -> tuple[Session, list[ProbeSpec]]:
    """Read the probed model and its problems.

    Args:
        arguments: as added by `parsers.add_engines`, and `no_rescoring`.
        overrides: settings on top of the run's own.

    Returns:
        The session, and the engines that sample.

    Raises:
        UserError: in one line, naming the argument.
    """
    sampling_specs = arguments.a or []
    check_specs(sampling_specs, arguments.b)
    if arguments.config:
        base = load_config(arguments.config)
        has_run_settings = True
    else:
        saved = find_model(arguments.model)
        base = saved.settings
        has_run_settings = saved.run_dir is not None

    config_values = dict(_PROBES_OWN)
    if not has_run_settings:
        config_values |= _WITHOUT_A_RUN
    if sampling_specs:
        config_values |= _engine_values([*sampling_specs, arguments.b], base.rollout, overrides)
    elif not has_run_settings and "rollout.engine" not in overrides:
        raise UserError(
            "--a is missing: name the engine that samples, for example --a=local:fp8 or "
            "--a=vllm:bfloat16"
        )
    config = for_sampling(base, config_values | dict(overrides))
    rollout = config.rollout
    if not sampling_specs:
        sampling_specs = [_spec_of(rollout)]
        check_specs(sampling_specs, arguments.b)
    # The model of a config file is known only now: --config.model.path may replace it.
    if arguments.config:
        saved = _probed_model(config)
    if not config.task.train:
        raise UserError(
            "config.task.train: empty; --config.task.train=TASK names a file, arithmetic:... or a "
            "Hub name"
        )
    _reserve_device_shares(sampling_specs, arguments.b, rollout)

    run = Policy.of(saved, config)
    session = Session(
        run=run,
        problems=load_problems(config.task.train, limit=arguments.prompts, answers="unused"),
        sampling=dataclasses.replace(run.sampling, top_p=arguments.top_p),
        # A greedy engine (temperature 0) gives log-probs at temperature 1.
        score_temperature=rollout.temperature or 1.0,
        earlier=[find_model(path) for path in arguments.earlier],
        load=functools.cache(lambda path: Policy.of(find_model(path), config)),
        rescore=not arguments.no_rescoring,
        show=functools.partial(print, file=sys.stderr, flush=True),
    )
    return session, sampling_specs


def _engine_values(
    specs: list[ProbeSpec], rollout: RolloutSettings, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of the first engine that is named by path: rollout.engine_args belong to it."""
    for name in _BY_ENGINE:
        if name in overrides:
            raise UserError(
                f"config.{name}: --a names the engines and their precisions; leave one of the two "
                "out"
            )

    engine = RolloutSettings()
    for spec in specs:
        if spec.record and spec.kind not in TRAINABLE:
            engine = settings_for(spec, rollout)
            break
    return {name: getattr(engine, name.removeprefix("rollout.")) for name in _BY_ENGINE}


def _spec_of(rollout: RolloutSettings) -> ProbeSpec:
    """The engine of a run."""
    return ProbeSpec(
        kind=rollout.engine,
        precision=rollout.precision,
        compute=rollout.compute_dtype,
        cache=rollout.kv_cache_dtype,
    )


def _probed_model(config: Config) -> SavedModel:
    """The last checkpoint of a config's run, or the model that it starts from."""
    path = config.model.path
    if (Path(config.run_dir) / "checkpoints").is_dir():
        path = config.run_dir
    if not path:
        raise UserError(
            f"--config: {config.run_dir} has no checkpoint and the config no model.path; train "
            "first"
        )
    return find_model(Path(path))


def _reserve_device_shares(
    sampling_specs: list[ProbeSpec], scoring_spec: ProbeSpec, rollout: RolloutSettings
) -> None:
    """Leave room on the devices for each kind of engine: one that samples, and the one that scores.

    Engines that sample run one after the other.
    """
    by_record = {spec.record: spec for spec in (*sampling_specs, scoring_spec) if spec.record}
    counts = collections.Counter({spec.record for spec in sampling_specs})
    counts[scoring_spec.record] += 1
    for record, spec in by_record.items():
        settings = settings_of(settings_for(spec, rollout), record)
        record.reserve_device_share(settings, counts[record])


def _measure_recording(arguments: argparse.Namespace) -> tuple[str, Measured]:
    """Read and measure what the arguments name.

    Returns:
        A title, and the measured pair.

    Raises:
        UserError: in one line, what is wrong with the arguments or the recording.
    """
    paths = arguments.recording
    title = f"Mismatch of {Path(paths[0]).name or paths[0]}"
    if len(paths) > 1:
        title += f" and {len(paths) - 1} more"
    columns = {}
    for field in dataclasses.fields(Columns):
        column = getattr(arguments, f"{field.name}_column")
        if column:
            columns[field.name] = column
    if columns == {"token": parsers.TOKEN_COLUMN}:
        return title, _by_format(arguments)
    return title, _by_columns(arguments, columns)


def _by_format(arguments: argparse.Namespace) -> Measured:
    """Measure a recording of a known framework or of one of our runs."""
    paths = arguments.recording
    left_out = LeftOut()
    files = find_files(paths, left_out)
    framework = files[0].framework
    if arguments.format not in ("auto", framework):
        raise UserError(
            f"--format={arguments.format}: {files[0].path} was recorded by {framework}; leave "
            "--format out"
        )

    run = _own_run(files)
    metrics = None
    floors = {}
    costs = {}
    if run is not None:
        config = read_config(run)
        metrics = without_placeholder(read_metrics(run), config.algorithm.measured_steps)
        engine = _spec_of(config.rollout)
        costs = engine.costs
        if _FLOOR in metrics:
            _, floor_values = metrics[_FLOOR]
            floors[str(engine)] = float(floor_values[-1])
    recording = read_run(
        files,
        left_out,
        max_tokens=arguments.max_tokens,
        allow_gaps=arguments.allow_gaps,
        tolerance=arguments.tolerance,
        metrics=metrics,
    )

    path = paths[0] if len(paths) == 1 else f"{len(paths)} paths"
    name = framework
    if len(files) == 1:
        name += f" {files[0].path.stem}"
    known_format = format_of(framework)
    source = {
        "recording": path,
        "format": f"{framework} ({known_format.writer})",
        "training stack": known_format.columns.train,
        "engine": known_format.columns.rollout,
        "files": f"{len(files):,}",
        **_counts(recording, left_out),
    }
    return Measured(
        name=name,
        source=source,
        pairs=recording.pairs,
        text=_text(arguments.tokenizer),
        floors=floors,
        over_training=recording.over_training,
        framework=framework,
        settings=costs,
    )


def _own_run(files: list[RecordedFile]) -> Path | None:
    """The run directory of a recording of ours, if its metrics are there."""
    runs = {file.path.parent.parent for file in files}
    if files[0].framework != "dcmdp" or len(runs) > 1:
        return None
    [run] = runs
    if (run / METRICS_FILE).is_file() and (run / CONFIG_FILE).is_file():
        return run
    return None


def _by_columns(arguments: argparse.Namespace, names: dict[str, str]) -> Measured:
    """Measure two columns of any file."""
    paths = arguments.recording
    for option, content in {
        "token": "token ids",
        "train": "train log-probs",
        "rollout": "rollout log-probs",
    }.items():
        if option not in names:
            raise UserError(f"--{option}-column is missing: name the column of the {content}")
    if len(paths) > 1:
        raise UserError(
            f"{len(paths)} paths with --train-column: give one file; several need a known format"
        )

    path = Path(paths[0])
    columns = Columns(**names)
    recording = read_recording(path, columns, max_tokens=arguments.max_tokens)
    source = {
        "recording": paths[0],
        "training stack": columns.train,
        "engine": columns.rollout,
        **_counts(recording, recording.left_out),
    }
    return Measured(
        name=path.stem,
        source=source,
        pairs=recording.pairs,
        text=_text(arguments.tokenizer),
    )


def _counts(recording: Recording, left_out: LeftOut) -> dict[str, str]:
    """The rows of a recording and what is left out of it, for `Measured.source`."""
    used = "all" if recording.stride == 1 else f"every {recording.stride}th"
    counts = {"rows": f"{recording.rows:,}, {used} used"}
    if str(left_out):
        counts[page.LEFT_OUT] = str(left_out)
    return counts


def _text(tokenizer: str | None) -> Callable[[int], str] | None:
    if tokenizer is None:
        return None
    return token_text(load_tokenizer(tokenizer))
