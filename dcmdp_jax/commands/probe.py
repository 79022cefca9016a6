"""Disagreement of two engines on the same tokens: how much, where, and why.

    dcmdp probe PATH...                                       what a framework, or a run of ours, recorded
    dcmdp probe PATH... --train-column NAME --rollout-column NAME              two columns of any other file
    dcmdp probe --model DIR --config.task.train=FILE --a vllm:bfloat16 --b trainer     sample with a, score with b
    dcmdp probe --config FILE                                 a run's engine against its training stack

Settings are a run's own, and each may be given: --config.rollout.max_completion_tokens=64, docs/settings.md. But 8
completions of each problem are sampled whatever the run had, with seed 0.

Writes probe.json, probe.html and plots/*.png into --out and prints the table and the likely cause. docs/probe.md has
the engines' names and what the causes rest on.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dcmdp_jax.commands import probe_recordings
from dcmdp_jax.commands.cli import Parser, output_directory, real, whole
from dcmdp_jax.commands.flags import load_config, parse_rest, split_overrides
from dcmdp_jax.config.checks import settings_of
from dcmdp_jax.config.load import for_sampling
from dcmdp_jax.config.rollout import TRAINABLE, RolloutSettings
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.mismatch import page
from dcmdp_jax.lab.mismatch.analysis import Measured, analyze
from dcmdp_jax.lab.probe.engines import ProbeSpec, parse_spec, settings_for
from dcmdp_jax.lab.probe.session import Session, check_specs, probe_pairs
from dcmdp_jax.run.saved_model import Policy, find_model

_PROBES_OWN = {"rollout.group_size": 8, "rollout.max_rows": 256, "training.seed": 0, "task.verifier_budget": 0.0}
_PROBES_OWN |= {"rewards.on_error": "error"}
"""Settings of a probe, whatever the run had."""
_WITHOUT_A_RUN = {"rollout.max_completion_tokens": 256}
_BY_ENGINE = ("rollout.engine", "rollout.precision", "rollout.compute_dtype", "rollout.kv_cache_dtype")
EXPECTED = (EngineError, MemoryError)
"""Failures whose message is enough."""


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), measure, conclude, write and print."""
    overrides, rest = split_overrides(argv[1:])
    arguments = parse_rest(_parser(), rest)
    recorded = arguments.recording
    if sum(map(bool, (recorded, arguments.model, arguments.config))) != 1:
        raise UserError("give one of PATH (a recording), --model DIR and --config FILE; see --help")
    if recorded:
        if overrides:
            raise UserError(f"config.{next(iter(overrides))}: a recording has no settings, leave it out")
        title, measured = probe_recordings.measure(arguments)
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
    if above := [f"{name} {mean:.3g}" for name, mean in means.items() if mean > arguments.fail_above]:
        print(f"mean |dp| above --fail-above={arguments.fail_above:g}: {', '.join(above)}", file=sys.stderr)
        raise SystemExit(1)


def _parser() -> Parser:
    parser = Parser(
        "probe",
        description="How far two engines disagree on the same tokens, and why. "
        "--config.section.name=value overrides a setting of the run, such as --config.task.train=FILE.",
    )
    probe_recordings.add_arguments(parser)
    engines = add_engines(parser).add_argument
    engines("--no-rescoring", action="store_true", help="name the cause from the two columns alone")
    add = parser.add_argument
    add("--tolerance", type=real(0, 1), metavar="C", help="budget to count completions over (default: the recommended)")
    add("--fail-above", type=real(0, 1), default=1.0, metavar="X", help="exit code 1 where a mean |dp| is above it")
    out = Path("runs/probe")
    add("--out", type=output_directory, default=out, metavar="DIR", help="where to write (default: %(default)s)")
    return parser


def add_engines(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments of `open_session`."""
    group = parser.add_argument_group("engines")
    live = group.add_argument
    live("--model", type=Path, metavar="DIR", help="model directory, OWNER/NAME on the Hub, run or checkpoint")
    live("--config", metavar="FILE[:ARGUMENT]", help="a config file: its model.path or last checkpoint, task, engine")
    live("--a", action="append", type=_engine, metavar="ENGINE", help="samples; several times for several engines")
    live("--b", type=_engine, default=parse_spec("trainer"), metavar="ENGINE", help="scores (default: trainer)")
    live("--prompts", type=whole(1), default=32, metavar="N", help="problems to ask (default: %(default)s)")
    live("--top-p", type=real(0, 1), default=1.0, metavar="P", help="nucleus mass of sampling (default: %(default)s)")
    live("--earlier", action="append", type=Path, metavar="DIR", help="weights that a may still hold, all or in part")
    return group


def _engine(text: str) -> ProbeSpec:
    try:
        return parse_spec(text)
    except UserError as error:  # a ValueError, whose message argparse would drop
        raise argparse.ArgumentTypeError(str(error)) from error


def open_session(arguments: argparse.Namespace, overrides: Mapping[str, Any]) -> tuple[Session, list[ProbeSpec]]:
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
        raise UserError(f"config.{given[0]}: --a names the engines and their precisions; leave one of the two out")
    if first:
        # The settings have the engine that rollout.engine_args belong to.
        by_path = [spec for spec in (*first, arguments.b) if spec.record and spec.kind not in TRAINABLE]
        engine = settings_for(by_path[0], base.rollout) if by_path else RolloutSettings()
        overrides = {name: getattr(engine, name.partition(".")[2]) for name in _BY_ENGINE} | dict(overrides)
    elif not known and "rollout.engine" not in overrides:
        raise UserError("--a is missing: name the engine that samples, for example --a=local:fp8 or --a=vllm:bfloat16")
    config = for_sampling(base, _PROBES_OWN | ({} if known else _WITHOUT_A_RUN) | dict(overrides))
    rollout = config.rollout
    if not first:
        first = [ProbeSpec(rollout.engine, rollout.precision, rollout.compute_dtype, rollout.kv_cache_dtype)]
        check_specs(first, arguments.b)
    if saved is None:
        saved = find_model(_model_of(config))
    if not config.task.train:
        raise UserError("config.task.train: empty; --config.task.train=TASK names a file, arithmetic:... or a Hub name")
    for kind, spec in {spec.record: spec for spec in (*first, arguments.b) if spec.record}.items():
        count = max(spec.record is kind for spec in first) + (arguments.b.record is kind)
        kind.reserve_device_share(settings_of(settings_for(spec, rollout), kind), count)
    run = Policy.of(saved, config)
    session = Session(
        run=run,
        problems=load_problems(config.task.train, limit=arguments.prompts, answers="unused"),
        sampling=dataclasses.replace(run.sampling, top_p=arguments.top_p),
        score_temperature=rollout.temperature or 1.0,  # what is sampled greedily has its log-probs at 1
        earlier=[find_model(path) for path in arguments.earlier or ()],
        load=functools.cache(lambda path: Policy.of(find_model(path), config)),
        rescore=not arguments.no_rescoring,
        show=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return session, first


def _model_of(config: Config) -> Path:
    """The run's newest checkpoint if there is one, else the model it starts from."""
    if (Path(config.run_dir) / "checkpoints").is_dir():
        return Path(config.run_dir)
    if config.model.path:
        return Path(config.model.path)
    raise UserError(f"--config: {config.run_dir} has no checkpoint and the config no model.path; train first")
