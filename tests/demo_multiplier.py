"""What each demo promises of its multiplier, checked from the record of a run: the rule, and no false alarm.

    python -m tests.demo_multiplier RUN_DIR [RUN_DIR ...]

Prints the report's sentence for each run. The exit code is 1 if the record breaks the rule, or an alarm was raised.
Where lambda goes is not promised: it follows the discrepancy, which depends on the processor.
"""

import sys

import numpy as np

from dcmdp_jax.observe.alarms import ALARMS
from dcmdp_jax.observe.metrics_io import read_metrics
from dcmdp_jax.observe.report import read_run
from dcmdp_jax.observe.run_summary import what_the_multiplier_did


def broken_rule(series, config):
    """Steps that contradict lambda_{k+1} = clip(lambda_k + eta (mean delta_k - c), minimum, maximum), in words.

    In float32, as the run computes it: up to two roundings of the largest term, since a compiler may fuse the product
    with the sum. While c is measured lambda rests; then c is factor x median of max(mean delta, latest noise floor).
    """
    multiplier, delta, c = (
        series[f"{name}"][1].astype(np.float32) for name in ("dual/multiplier", "discrepancy/mean", "dual/tolerance")
    )
    low = np.float32(0)
    eta, high, factor = (
        np.float32(config[f"algorithm.{name}"]) for name in ("dual_learning_rate", "multiplier_max", "tolerance_factor")
    )
    measured = config["algorithm.tolerance_steps"]
    if measured:
        at, floors = series["mismatch/noise_floor"]
        first = [max(delta[step], np.float32(floors[at <= step + 1][-1])) for step in range(measured)]
        wanted = factor * np.median(np.array(first, np.float32))
        if not np.allclose(c[measured:], wanted, rtol=1e-6, atol=0):
            yield f"c is {c[measured]}, {factor} times the first steps' median is {wanted}"
    if multiplier[0] != np.float32(config["algorithm.multiplier"]):
        yield f"lambda begins at {multiplier[0]}"
    for step in range(len(multiplier) - 1):
        moved = eta * (delta[step] - c[step]) * np.float32(step >= measured)
        wanted = np.clip(multiplier[step] + moved, low, high)
        rounding = 2 * np.spacing(max(abs(multiplier[step]), abs(moved)))
        if abs(multiplier[step + 1] - wanted) > rounding:
            yield f"lambda is {multiplier[step + 1]} at step {step + 2}, the rule gives {wanted}"


def false_alarms(series):
    """Names of the alarms that were raised at any step, where nothing is wrong.

    Not `noise`: on some processors vLLM's BF16 disagrees with itself by as much as the demo's budget, and it says so.
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
        print(f"{run_dir}: {what_the_multiplier_did(run.series)}")
        for line in [*wrong, *([f"alarms {', '.join(raised)} in a run where nothing is wrong"] if raised else [])]:
            print(f"{run_dir}: {line}")
        good &= not wrong and not raised
    return int(not good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
