"""Each fault planted in the real trainer raises its own alarm while the run goes on.

It does so as soon as its rule can hold.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dcmdp_jax.errors import TrainingStopped
from dcmdp_jax.observe.alarms import ALARMS, broken_completions
from dcmdp_jax.parallel.hosts import ONE_PROCESS
from dcmdp_jax.training.giving_up import AlarmWatch
from tests.support.our_log import our_log
from tests.support.processes import finished
from tests.support.waiting import HANGS_S
from tests.training.planted_alarms import FAULTS, STEPS

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def runs(run_environment, tmp_path_factory):
    """Directory of the runs, and the program's lines by fault."""
    directory = tmp_path_factory.mktemp("planted")
    # Compiled as for a user: several hundred steps are worth it.
    environment = {name: value for name, value in run_environment.items() if name != "XLA_FLAGS"}
    done = finished(
        "-m", "tests.training.planted_alarms", directory, env=environment, timeout=3 * HANGS_S
    )
    return directory, {
        line.split()[0]: line for line in done.stdout.splitlines() if line.split()[0] in FAULTS
    }


@pytest.mark.long
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "clean"])
def test_a_planted_fault_raises_its_own_alarm_and_stops_the_run(runs, fault):
    directory, ends = runs
    records = [
        json.loads(line) for line in (directory / fault / "metrics.jsonl").read_text().splitlines()
    ]
    *before, last = [record for record in records if "reward/mean" in record]
    step = last["step"]
    assert ends[fault].startswith(
        f"{fault} stopped: alert {fault} at step {step}, saved (observe.on_alarm=stop);"
    )
    assert {name for name in ALARMS if last[f"alarm/{name}"]} == {fault}
    assert not any(record[f"alarm/{name}"] for record in before for name in ALARMS)
    console = (directory / f"{fault}.log").read_text()
    assert f"step {step}: alert {fault}: " in console and console.count(": alert ") == 1
    assert (directory / fault / "checkpoints" / str(step)).is_dir()
    # As early as its rule can hold: ten steps of a fault that is there from the first; three of one
    # that comes later. How fast the policy moves depends on the processor's rounding: this one
    # comes before the run's end.
    earliest = {"weight_sync": 23, "retokenization": 7}.get(fault, 10)
    assert earliest <= step <= (STEPS if fault == "weight_sync" else earliest)


@pytest.mark.long
def test_a_clean_run_of_fifty_steps_raises_none(runs):
    directory, ends = runs
    assert ends["clean"] == "clean ended"
    records = [
        json.loads(line)
        for line in (directory / "clean" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(records) == 50
    assert not any(record[f"alarm/{name}"] for record in records for name in ALARMS)
    assert [record["step"] for record in records if "mismatch/noise_floor" in record] == [1, 17]


def test_broken_completions_stand_apart_from_the_others():
    # The median is 0.02: 10 times that is 0.2, of which two of five are above. Padding has 0 and
    # does not count.
    assert broken_completions(np.array([[0.01, 0.02, 0.02], [0.21, 0.5, 0.0]])) == pytest.approx(
        2 / 5
    )
    assert broken_completions(np.array([0.001, 0.002, 0.09])) == 0  # 45 times the median, and small
    assert broken_completions(np.array([0.4, 0.5, 0.6])) == 0  # all alike
    assert broken_completions(np.zeros(4)) == 0


def _watch(tmp_path, step=0, action="stop", measured=0):
    return AlarmWatch(str(tmp_path), step, stops=action == "stop", measured_steps=measured)


def _over(step):
    return {
        "step": step,
        "discrepancy/mean": 0.1,
        "dual/tolerance": 0.01,
        "mismatch/noise_floor": 0.001,
    }


def test_a_resumed_run_does_not_stop_again_at_the_alarm_that_it_stopped_at(tmp_path, caplog):
    watch = _watch(tmp_path)
    for step in range(1, 11):
        recorded = watch.record(step, _over(step), np.full(4, 0.1))
        assert recorded["alarm/mismatch"] == float(step == 10) and watch.ends_the_run is (
            step == 10
        )
    saved = []
    session = SimpleNamespace(
        hosts=ONE_PROCESS, step=10, save=lambda *, wait: saved.append((10, wait))
    )
    with pytest.raises(TrainingStopped, match="alert mismatch at step 10, saved .*on_alarm=warn"):
        watch.check(session)
    assert saved == [(10, True)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(_over(step)) + "\n" for step in range(1, 11))
    )
    resumed = _watch(tmp_path, step=10)
    assert resumed.record(11, _over(11), np.full(4, 0.1))["alarm/mismatch"] == 1
    assert not resumed.ends_the_run and len(our_log(caplog)) == 1


def test_nothing_is_over_c_while_c_is_measured(tmp_path):
    watch = _watch(tmp_path, measured=12)
    raised = [
        watch.record(step, _over(step), np.full(4, 0.1))["alarm/mismatch"] for step in range(1, 14)
    ]
    assert raised == [0] * 12 + [1]


def test_warn_ends_nothing(tmp_path):
    watch = _watch(tmp_path, action="warn")
    for step in range(1, 12):
        watch.record(step, _over(step), np.full(4, 0.1))
        watch.check(SimpleNamespace(hosts=ONE_PROCESS))
