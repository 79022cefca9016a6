"""Train a policy: dcmdp train --config=demo [--config.section.name=value ...] [--dry-run]."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dcmdp_jax.activity import activity
from dcmdp_jax.commands import failures, flags
from dcmdp_jax.config import checks, load, settings, text
from dcmdp_jax.errors import UserError, shorten
from dcmdp_jax.number_format import labelled
from dcmdp_jax.parallel.hosts import join_hosts
from dcmdp_jax.run import facts
from dcmdp_jax.run.description import describe
from dcmdp_jax.run.run import Run
from dcmdp_jax.training import exit, loop, sft


def main(argv: list[str], *, supervised: bool = False) -> int:
    """Check everything, print the plan, train, write the report."""
    arguments = flags.parse(argv, "sft" if supervised else "train")
    config = arguments.config
    if supervised:
        config = load.for_supervision(config)
    if arguments.print_config:
        print(text.print_config(config))
        return 0

    failures.keep_tracebacks_in(config.run_dir)
    try:
        _run(config, functools.partial(print, flush=True), dry_run=arguments.dry_run)
    except exit.Interrupted as stopped:
        return 128 + stopped.signal_number
    return 0


def train(
    config: settings.Config | ConfigDict | Mapping[str, Any] | str,
    *,
    show: Callable[[str], None] | None = None,
) -> Path:
    """Train a policy as `dcmdp train` does, in this process. The same call resumes a stopped run.

    glibc's memory settings, for which the command restarts, are left as they are: on a CPU a step
    may take longer.

    Args:
        config: checked settings; a ConfigDict or nested mapping of settings; or text as for
            `load_config`, such as "demo:debug".
        show: is called with each line that the command prints; None shows nothing.

    Returns:
        The run directory: report.html, metrics.jsonl, checkpoints/ and the rest.

    Raises:
        UserError: in one line, for a wrong config, file or machine.
        EngineError: an engine gave up.
        TrainingStopped: the gradients stay broken, or an alert ends the run.
        Interrupted: after SIGTERM, SIGINT or SIGHUP, once everything is saved.
    """
    if isinstance(config, str):
        config = flags.load_config(config)
    elif isinstance(config, Mapping | ConfigDict):
        config = load.from_config_dict(config)
    if not isinstance(config, settings.Config):
        raise UserError(
            f"config: got {shorten(config)}, must be a Config, a ConfigDict or a preset's name"
        )
    _run(config, show or _silent)
    return Path(config.run_dir)


def _silent(line: str) -> None:
    pass


def _run(config: settings.Config, show: Callable[[str], None], *, dry_run: bool = False) -> None:
    """Train. Each process of a run on several hosts calls this; the first one prints."""
    if config.supervised:
        config = load.for_supervision(config)
    stopped = None
    with contextlib.ExitStack() as stack:
        with checks.as_settings(checks.HOSTS):
            hosts = stack.enter_context(join_hosts(**dataclasses.asdict(config.hosts)))
        if not hosts.is_writer:
            show = _silent
        hosts.check_same(
            lambda: facts.settings_and_code(config),
            "start all hosts with the same command and package version",
        )
        run = Run.check(config, hosts)
        show(describe(run, full=dry_run))
        if dry_run:
            return

        train_run = sft.train if config.supervised else loop.train
        try:
            train_run(run, show=show)
        except exit.Interrupted as error:
            show(f"{error}; the same command resumes")
            stopped = error
        if hosts.is_writer and stopped is None:
            # Imported late: the plotting library takes most of a second.
            from dcmdp_jax.observe.report import read_run, verdict, write_report

            with activity("drawing the report"):
                report = write_report([config.run_dir], config.run_dir)
            show(labelled(verdict(read_run(config.run_dir))))
            show(f"report: {report}")
    # Not in the block, where it would tell the other hosts of a failure.
    if stopped is not None:
        raise stopped
