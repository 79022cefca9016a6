"""What each demo promises of its multiplier, checked from the record of a run: the rule, and no
false alarm.

    python -m tests.demo_multiplier RUN_DIR [RUN_DIR ...]

Prints the report's lines on lambda and the discrepancy for each run. The exit code is 1 if the
record breaks the rule, or an alarm was raised. Where lambda goes is not promised: it
follows the discrepancy, which depends on the processor.
"""

import sys

import numpy as np

from dcmdp_jax.observe.alarms import ALARMS
from dcmdp_jax.observe.metrics_io import read_metrics
from dcmdp_jax.observe.report import describe_discrepancy, describe_multiplier, read_run
from research.replay import broken_rule


def false_alarms(series):
    """Names of the alarms that were raised at any step, where nothing is wrong.

    Not `noise`: on some processors vLLM's BF16 disagrees with itself by as much as the demo's
    budget, and it says so.
    """
    return [name for name in ALARMS if name != "noise" and np.any(series[f"alarm/{name}"][1])]


def main(run_dirs):
    """Check each run; the exit code."""
    good = True
    for run_dir in run_dirs:
        run = read_run(run_dir)
        # The report leaves out the steps that measure c.
        wrong = list(broken_rule(read_metrics(run_dir), run.config))
        raised = false_alarms(run.series)
        print(f"{run_dir}: lambda {describe_multiplier(run.series)}")
        print(f"{run_dir}: discrepancy {describe_discrepancy(run.series)}")
        for line in [
            *wrong,
            *([f"alarms {', '.join(raised)} in a run where nothing is wrong"] if raised else []),
        ]:
            print(f"{run_dir}: {line}")
        good &= not wrong and not raised
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
