"""Train a policy: dcmdp train --config=demo [--config.section.name=value ...] [--dry_run]."""

import contextlib
import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from dcmdp_jax.activity import COMPILING, activity
from dcmdp_jax.commands import cli, flags
from dcmdp_jax.config import checks, load, settings, text
from dcmdp_jax.errors import UserError, shorten
from dcmdp_jax.parallel.hosts import join_hosts
from dcmdp_jax.run.description import describe
from dcmdp_jax.run.run import Run
from dcmdp_jax.training import loop, stopping


def main(argv: list[str], *, supervised: bool = False) -> int:
    """Check everything, print the plan, train, write the report."""
    arguments = flags.parse(argv, "sft" if supervised else "train")
    config = load.for_supervision(arguments.config) if supervised else arguments.config
    if arguments.print_config:
        print(text.print_config(config))
        return 0
    cli.keep_tracebacks_in(config.run_dir)
    try:
        _run(config, functools.partial(print, flush=True), dry_run=arguments.dry_run)
    except stopping.Interrupted as stopped:
        if any(thread.name.startswith(COMPILING) for thread in threading.enumerate()):
            sys.stdout.flush()
            os._exit(128 + stopped.signal_number)
        return 128 + stopped.signal_number
    return 0


def train(
    config: settings.Config | ConfigDict | Mapping[str, Any] | str,
    *,
    show: Callable[[str], None] | None = None,
) -> Path:
    """Train a policy as the command `dcmdp train` does, in this process. The same call resumes an
    interrupted run.

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
        TrainingStopped: the gradients stay broken.
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
    _run(config, show or (lambda line: None))
    return Path(config.run_dir)


def _run(config: settings.Config, show: Callable[[str], None], *, dry_run: bool = False) -> None:
    """Each process of a run on several hosts calls this; the first one speaks."""
    config = load.for_supervision(config) if config.supervised else config
    with contextlib.ExitStack() as stack:
        with checks.as_settings(checks.HOSTS):
            hosts = stack.enter_context(join_hosts(**dataclasses.asdict(config.hosts)))
        say = show if hosts.is_writer else (lambda line: None)
        hosts.check_same(
            lambda: stopping.settings_and_code(config),
            "start all hosts with the same command and package version",
        )
        run = Run.check(config, hosts)
        say(describe(run, full=dry_run))
        stopped = None if dry_run else _loop(run, say)
        if hosts.is_writer and not dry_run and stopped is None:
            # Imported late: the plotting library takes most of a second.
            from dcmdp_jax.observe.report import read_run, verdict, write_report

            with activity("drawing the report"):
                report = write_report([config.run_dir], config.run_dir)
            say(verdict(read_run(config.run_dir)))
            say(f"report: {report}")
    # Not in the block, where it would tell the other hosts of a failure.
    if stopped is not None:
        raise stopped


def _loop(run: Run, say: Callable[[str], None]) -> stopping.Interrupted | None:
    try:
        loop.train(run.task, run.placement, run.weights, run.start, show=say)
    except stopping.Interrupted as stopped:
        say(f"{stopped}; the same command resumes")
        return stopped
    return None
