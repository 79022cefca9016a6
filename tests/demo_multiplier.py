"""What the demos show, from their recorded metrics: lambda rises above lambda_0 and later comes down from its peak.

    python -m tests.demo_multiplier RUN_DIR [RUN_DIR ...]

Prints a line for each run. The exit code is 1 if one does not show it, or raised a false alarm.
"""

import sys

import numpy as np

from dcmdp_jax.observe.alarms import ALARMS
from dcmdp_jax.observe.metrics_io import read_metrics


def what_it_shows(values):
    """(Whether lambda rises above its first value and later comes down by a tenth of that, a line that says so)."""
    first, peak = values[0], max(values)
    place = list(values).index(peak)
    lowest = min(values[place:])
    line = f"lambda_0 {first:.3f}, peak {peak:.3f} at step {place + 1} of {len(values)}, then down to {lowest:.3f}"
    return peak > first and lowest < peak - first / 10, line


def false_alarms(series):
    """Names of the alarms that were raised at any step, where nothing is wrong.

    Not `noise`: on some processors vLLM's BF16 disagrees with itself by as much as the demo's budget, and it says so.
    """
    return [name for name in ALARMS if name != "noise" and np.any(series[f"alarm/{name}"][1])]


def main(run_dirs):
    """Check each run; the exit code."""
    good = True
    for run_dir in run_dirs:
        series = read_metrics(run_dir)
        shown, line = what_it_shows(series["dual/multiplier"][1].tolist())
        raised = false_alarms(series)
        print(f"{run_dir}: {line}{'' if shown else ': it must rise above lambda_0 and later come down'}")
        if raised:
            print(f"{run_dir}: alarms {', '.join(raised)} in a run where nothing is wrong")
        good &= shown and not raised
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
