"""Train a policy: python -m bin.train --config=configs/demo.py [--config.section.name=value ...] [--dry_run]."""

from __future__ import annotations

import dataclasses

from bin.cli import keep_tracebacks_in, run_main
from bin.flags import parse
from dcmdp_jax.config.settings import Config
from dcmdp_jax.config.text import print_config
from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.parallel.hosts import Hosts, join_hosts
from dcmdp_jax.training.fingerprint import settings_and_code
from dcmdp_jax.training.loop import train
from dcmdp_jax.training.setup import describe, make_plan_of_run
from dcmdp_jax.training.skipped_updates import TrainingStopped
from dcmdp_jax.training.stop_signal import Interrupted


def main(argv: list[str]) -> int:
    """Check everything, print the plan, train, write the report."""
    arguments = parse(argv)
    config = arguments.config
    if arguments.print_config:
        print(print_config(config))
        return 0
    keep_tracebacks_in(config.run_dir)
    with join_hosts(**dataclasses.asdict(config.hosts)) as hosts:
        return _run(config, hosts, dry_run=arguments.dry_run)


def _run(config: Config, hosts: Hosts, *, dry_run: bool) -> int:
    """Each process of a run on several hosts calls this; the first one speaks."""

    def show(line: str) -> None:
        if hosts.is_writer:
            print(line, flush=True)

    hosts.check_same(lambda: settings_and_code(config), "start all hosts alike")
    plan = make_plan_of_run(config, hosts)
    show(describe(plan))
    if dry_run:
        return 0
    try:
        train(plan, show=show)
    except Interrupted as stopped:
        show(f"{stopped}; the same command resumes")
        return 128 + stopped.signal_number
    if not hosts.is_writer:
        return 0
    # Imported late: the plotting library takes most of a second.
    from dcmdp_jax.observe.report import write_report

    print(f"report: {write_report([config.run_dir], config.run_dir)}")
    return 0


if __name__ == "__main__":
    run_main(main, expected=(EngineError, MemoryError, TrainingStopped))
