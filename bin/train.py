"""Train a policy: python -m bin.train --config=configs/demo.py [--config.section.name=value ...] [--dry_run]."""

from __future__ import annotations

from bin.cli import keep_tracebacks_in, run_main
from bin.flags import parse
from dcmdp_jax.config_text import print_config
from dcmdp_jax.rollout.engine import EngineError
from dcmdp_jax.training.loop import TrainingStopped, train
from dcmdp_jax.training.setup import describe, make_plan_of_run
from dcmdp_jax.training.stop_signal import Interrupted


def main(argv: list[str]) -> int:
    """Check everything, print the plan, train, write the report."""
    arguments = parse(argv)
    config = arguments.config
    if arguments.print_config:
        print(print_config(config))
        return 0
    keep_tracebacks_in(config.run_dir)
    plan = make_plan_of_run(config)
    print(describe(plan), flush=True)
    if arguments.dry_run:
        return 0
    try:
        train(plan, show=lambda line: print(line, flush=True))
    except Interrupted as stopped:
        print(f"{stopped}; the same command resumes", flush=True)
        return 128 + stopped.signal_number
    # Imported late: the plotting library takes most of a second.
    from dcmdp_jax.observe.report import write_report

    print(f"report: {write_report([config.run_dir], config.run_dir)}")
    return 0


if __name__ == "__main__":
    run_main(main, expected=(EngineError, MemoryError, TrainingStopped))
