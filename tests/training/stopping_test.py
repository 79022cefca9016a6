"""Updates that are skipped in part: their share, the line on the console, and the end of a run."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dcmdp_jax.errors import TrainingStopped
from dcmdp_jax.training import exit as leaving
from dcmdp_jax.training.exit import Interrupted, StopSignal
from dcmdp_jax.training.giving_up import SkippedUpdates
from tests.support.our_log import our_log
from tests.support.processes import demo
from tests.support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]

# bin.train, where one token of the first mini-batch of each step has NaN for the engine's log-prob.
_PROGRAM = """
import numpy as np
from dcmdp_jax.commands import failures, train
from dcmdp_jax.training import batches

pack = batches.pack

def broken(*arguments, **options):
    batch, report = pack(*arguments, **options)
    place = next(place for place, rows in enumerate(batch.rows) if rows.completion_mask[0].any())
    rows = batch.rows[place]
    logprobs = np.array(rows.rollout_logprobs)
    logprobs[(0, *np.argwhere(rows.completion_mask[0])[0])] = np.nan
    changed = rows.with_columns(rollout_logprobs=logprobs)
    return batch._replace(rows=(*batch.rows[:place], changed, *batch.rows[place + 1 :])), report

batches.pack = broken
failures.run_main(train.main)
"""


def _skipped(tmp_path, step=0, updates=4):
    return SkippedUpdates(str(tmp_path), step, updates=updates), updates


def _write(tmp_path, counts):
    lines = [
        json.dumps({"step": i, "optimizer/skipped_updates": n}) + "\n"
        for i, n in enumerate(counts, start=1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))


def _metrics(skipped, in_row=0):
    return {"optimizer/skipped_updates": skipped, "optimizer/skipped_in_row": in_row}


def test_one_of_several_updates_in_each_step_ends_the_run_after_the_window(tmp_path, caplog):
    counted, updates = _skipped(tmp_path)
    assert updates == 4
    for step in range(1, 20):
        metrics = _metrics(1)
        metrics |= counted.record(step, metrics)
        assert metrics["optimizer/skipped_share"] == 1 / 4
        counted.check(metrics)  # the window is not full
    assert our_log(caplog)[-1] == (
        "step 19: 1 of 4 updates skipped, their gradient is not finite; 25% of the last 19 steps'"
    )
    metrics = _metrics(0)
    metrics |= counted.record(20, metrics)
    assert metrics["optimizer/skipped_share"] == 19 / 80 and len(our_log(caplog)) == 19
    with pytest.raises(
        TrainingStopped, match=r"24% of the updates of the last 20 steps .*at most 20% may\)"
    ):
        counted.check(metrics)


def test_few_skips_stop_nothing(tmp_path):
    counted, _ = _skipped(tmp_path)
    for step in range(1, 60):
        metrics = _metrics(int(step % 2 == 0))
        metrics |= counted.record(step, metrics)
        counted.check(metrics)
    assert metrics["optimizer/skipped_share"] == 10 / 80


def test_updates_skipped_in_a_row_end_the_run_at_once(tmp_path):
    counted, _ = _skipped(tmp_path)
    seven = _metrics(4, in_row=7)
    eight = _metrics(4, in_row=8)
    counted.check(seven | counted.record(1, seven))
    with pytest.raises(TrainingStopped, match="^8 updates in a row .* not finite; export"):
        counted.check(eight | counted.record(2, eight))


def test_a_resumed_run_remembers_the_steps_before_its_checkpoint(tmp_path, caplog):
    # Step 31 was recorded and lost: the checkpoint is of step 30. Of the last 20 steps 19 are known
    # before step 31.
    _write(tmp_path, [4] * 11 + [1] * 19 + [4])
    counted, _ = _skipped(tmp_path, step=30)
    with caplog.at_level(logging.WARNING):
        found = counted.record(31, _metrics(0))
    assert found == {"optimizer/skipped_share": 19 / 80}


@pytest.mark.long
def test_a_real_run_with_one_mini_batch_of_several_broken_stops(run_environment, tmp_path):
    start = ("-c", _PROGRAM)
    done = demo(
        tmp_path / "run", "--config.training.steps=30", program=start, code=2, env=run_environment
    )
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "of the updates of the last 20 steps had a gradient that is not finite" in error
    assert "updates skipped, their gradient is not finite" in done.stderr + done.stdout
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [record for record in records if "optimizer/skipped_share" in record]
    assert len(steps) == 20 and steps[-1]["optimizer/skipped_updates"] == 1


def test_a_lost_terminal_stops_the_run_but_not_one_that_ignores_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with StopSignal().listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received == signal.SIGHUP
        assert str(Interrupted(signal.SIGHUP, "after step 3")) == "stopped by SIGHUP after step 3"
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopSignal().listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# A lock that is taken twice never comes back to the interpreter, and lets other threads run, as
# compiled programs do.
_BLOCKED = """
import sys
sys.path.insert(0, sys.argv[1])
import ctypes
from dcmdp_jax.training.exit import StopSignal
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
libc.pthread_mutex_lock(mutex)
with StopSignal().listening() as stop:
    if len(sys.argv) > 2:
        stop.nothing_to_lose = lambda: sys.argv[2] == "saved"
    print("listening", flush=True)
    libc.pthread_mutex_lock(mutex)
"""


def test_a_signal_is_answered_at_once_and_a_second_leaves_at_once():
    """While the main thread is in one long call, as it is while a program compiles or runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", _BLOCKED, str(ROOT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "listening\n"
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline() == "\n"
    assert process.stderr.readline() == (
        "SIGTERM: ends what it is doing, saves and leaves; a second SIGTERM leaves at once\n"
    )
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # within a second: the same one, as `timeout` sends it
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == 128 + signal.SIGTERM and output == ""
    assert (
        errors
        == "\nSIGTERM again: leaves at once; the same command resumes from the newest checkpoint\n"
    )


@pytest.mark.parametrize("state", ["saved", "unsaved"])
def test_a_signal_while_it_compiles_leaves_if_nothing_is_lost(state):
    process = subprocess.Popen(
        [sys.executable, "-c", _BLOCKED, str(ROOT), state], stdout=-1, stderr=-1, text=True
    )
    assert process.stdout.readline() == "listening\n"
    process.send_signal(signal.SIGTERM)
    if state == "unsaved":
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(4)
        process.kill()
        process.communicate()
        return
    _, errors = process.communicate(timeout=HANGS_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[-1].startswith("it compiles, and nothing is lost: leaves at once")


def test_a_run_that_looks_for_the_signal_leaves_in_its_own_time(monkeypatch):
    monkeypatch.setattr(leaving, "_UNSEEN_S", 0.1)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"left with {code}"))
    with StopSignal().listening() as stop:
        stop.nothing_to_lose = lambda: True
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        time.sleep(0.5)
