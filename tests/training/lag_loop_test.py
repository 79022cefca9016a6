"""Whole runs that sample ahead: which weights sampled what, random kills, and refusals."""

import os
import random
import signal
import time

import numpy as np
import pyarrow.parquet
import pytest

from dcmdp_jax.commands.flags import parse
from dcmdp_jax.errors import UserError
from tests.support.processes import children
from tests.support.run_invariants import contradictions
from tests.support.runs import ROOT, finish, read_digests, read_records, start
from tests.support.waiting import wait_until

_ENGINE = "tests/training/overlapping_engine.py:ENGINE"
_STEPS = 7
_SETTINGS = (
    "--config.rollout.precision=float32",
    f"--config.rollout.engine={_ENGINE}",
    f"--config.training.steps={_STEPS}",
    "--config.checkpoint.every_steps=2",
    "--config.evaluation.every_steps=0",
    "--config.warmup.steps=0",
    "--config.checkpoint.keep_last=9",
    "--config.optimizer.learning_rate=1e-2",
    "--config.observe.rollouts_every_steps=3",
    # Rewards that differ, or the policy would stay where it is.
    f"--config.rewards.functions={ROOT}/tests/rewards/planted_rewards.py:begins_with_a_multiple_of_eight",
)


def _start(environment, run_dir, settings):
    return start(environment, run_dir, [*_SETTINGS, *settings])


@pytest.fixture(scope="module")
def whole(run_environment, tmp_path_factory):
    """An undisturbed run with lag 1."""
    run_dir = tmp_path_factory.mktemp("lagged") / "run"
    finish(_start(run_environment, run_dir, ["--config.rollout.lag=1"]))
    return run_dir


def test_each_step_trains_on_tokens_of_the_weights_before(whole):
    records = read_records(whole)
    assert [records[step]["rollout/staleness_max"] for step in range(1, _STEPS + 1)] == [
        0,
        *[1] * (_STEPS - 1),
    ]
    assert all(
        records[s]["rollout/staleness_mean"] == records[s]["rollout/staleness_max"]
        for s in records
        if s
    )
    for step in range(1, _STEPS + 1):
        parts = [
            records[step][f"{name}/log_ratio_mean"] for name in ("gap", "staleness", "mismatch")
        ]
        assert parts[0] == pytest.approx(parts[1] + parts[2], abs=1e-6)
        assert (records[step]["staleness/log_ratio_abs_mean"] > 1e-4) == (step > 1)
    assert contradictions(whole) == []


def test_the_gap_can_be_added_from_the_recorded_tokens(whole):
    """The gaps of step 4's sampled tokens have the means that the step recorded.

    log p_now - log p_v and log p_v - log q.
    """
    rows = pyarrow.parquet.read_table(whole / "rollouts" / "step_4.parquet").to_pylist()
    mask = np.concatenate([row["mask"] for row in rows])
    now, then, engine = (
        np.concatenate([row[f"{name}_logprobs"] for row in rows])[mask]
        for name in ("start", "train", "rollout")
    )
    recorded = read_records(whole)[4]
    assert np.abs(now - then).mean() > 1e-4
    for name, values in {
        "staleness": now - then,
        "mismatch": then - engine,
        "gap": now - engine,
    }.items():
        assert values.mean() == pytest.approx(recorded[f"{name}/log_ratio_mean"], abs=2e-6), name
        assert np.abs(values).max() == pytest.approx(recorded[f"{name}/log_ratio_max"], abs=2e-6), (
            name
        )
    # The prompt is the one that was asked: all completions of a group have the same.
    assert len({tuple(row["prompt_token_ids"]) for row in rows}) == len(
        {row["prompt_id"] for row in rows}
    )


def test_a_checkpoint_has_the_parameters_of_what_is_in_flight(whole):
    """The versions of before step 4, of whose weights the batch of step 5 is sampled.

    The digests are those of checkpoint 3.
    """
    assert set(read_digests(whole, 4)["behind"]) == {"3"} and "behind" not in read_digests(whole, 0)
    saved = {step: read_digests(whole, step) for step in (2, 4, 6)}
    assert saved[4]["behind"]["3"] not in (saved[2]["params"], saved[4]["params"])


def _kill_and_resume(environment, run_dir, kills, seed, settings):
    """Kill the trainer or its sampler at random moments, `kills` times; then let the run end."""
    chance = random.Random(seed)
    done = 0
    process = _start(environment, run_dir, settings)
    while done < kills:
        seen = max(read_records(run_dir), default=0)
        wait_until(
            lambda seen=seen, p=process: (
                max(read_records(run_dir), default=0) > seen or p.poll() is not None
            ),
            "step",
        )
        time.sleep(0.3 * chance.random())
        if process.poll() is not None:
            break
        if chance.random() < 0.3 and (samplers := children(process.pid, "overlapping_engine")):
            os.kill(samplers[0], signal.SIGKILL)
        else:
            process.kill()
            process.communicate()
            process = _start(environment, run_dir, settings)
        done += 1
    finish(process)
    return done


@pytest.mark.long
def test_killed_three_times_it_has_the_bits_of_the_undisturbed_run(
    run_environment, tmp_path, whole
):
    lag = ["--config.rollout.lag=1"]
    assert _kill_and_resume(run_environment, tmp_path / "run", 3, 0, lag) == 3
    assert read_records(tmp_path / "run") == read_records(whole)
    assert read_digests(tmp_path / "run", _STEPS) == read_digests(whole, _STEPS)


@pytest.mark.long
@pytest.mark.parametrize("lag", [1, 2])
def test_killed_twenty_times_it_has_the_bits_of_the_undisturbed_run(run_environment, tmp_path, lag):
    settings = [f"--config.rollout.lag={lag}", "--config.training.steps=40"]
    finish(_start(run_environment, tmp_path / "whole", settings))
    assert _kill_and_resume(run_environment, tmp_path / "run", 20, lag, settings) == 20
    assert read_records(tmp_path / "run") == read_records(tmp_path / "whole")
    assert read_digests(tmp_path / "run", 40) == read_digests(tmp_path / "whole", 40)


@pytest.mark.long
def test_sigterm_saves_what_a_resumed_run_needs(run_environment, tmp_path, whole):
    process = _start(run_environment, tmp_path / "run", ["--config.rollout.lag=1"])
    wait_until(
        lambda: len(read_records(tmp_path / "run")) >= 3 or process.poll() is not None,
        "three steps",
    )
    process.send_signal(signal.SIGTERM)
    output = finish(process, code=143)
    assert "stopped by SIGTERM" in output and "Traceback" not in output
    finish(_start(run_environment, tmp_path / "run", ["--config.rollout.lag=1"]))
    assert read_records(tmp_path / "run") == read_records(whole)
    assert read_digests(tmp_path / "run", _STEPS) == read_digests(whole, _STEPS)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("rollout.lag=-1",), "config.rollout.lag: got -1, must be at least 0"),
        (("rollout.lag=65",), "config.rollout.lag: got 65, must be at most 64"),
        (
            (
                "rollout.lag=1",
                "rollout.engine=vllm",
                "rollout.precision=float32",
                "rollout.vllm.sleep=1",
            ),
            "config.rollout.vllm.sleep: got 1 with rollout.lag; an engine that sleeps while the "
            "trainer trains",
        ),
    ],
)
def test_a_lag_that_can_not_be_is_one_line(overrides, said):
    with pytest.raises(UserError) as raised:
        parse(["train", "--config=configs/demo.py", *(f"--config.{each}" for each in overrides)])
    assert str(raised.value).startswith(said) and "\n" not in str(raised.value)


_TIS = "--config.algorithm.corrections=tis(high=2)"
_PROXIMAL = "--config.algorithm.ratio_denominator=proximal"


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        ("--config.algorithm.kl_coefficient=0.1", _PROXIMAL),
        ("--config.algorithm.kl_coefficient=0.1", _TIS),
        ("--config.algorithm.tolerance_steps=3",),
        ("--config.algorithm.level=reward",),
        ("--config.algorithm.refill_rounds=2", "--config.algorithm.drop_equal_groups=true"),
        ("--config.rollout.precision=exact", "--config.rollout.engine=local"),
    ],
    ids=["kl_proximal", "kl_tis", "measured_tolerance", "reward_level", "refill", "exact"],
)
def test_what_goes_with_a_lag(run_environment, tmp_path, settings):
    """Each run ends with a record that contradicts nothing.

    Its tokens are one step old, and their gap is the sum of its parts.
    """
    finish(_start(run_environment, tmp_path / "run", ["--config.rollout.lag=1", *settings]))
    records = read_records(tmp_path / "run")
    assert contradictions(tmp_path / "run") == []
    for step in range(1, _STEPS + 1):
        assert records[step]["rollout/staleness_max"] == min(1, step - 1)
        parts = [
            records[step][f"{name}/log_ratio_mean"] for name in ("gap", "staleness", "mismatch")
        ]
        assert parts[0] == pytest.approx(parts[1] + parts[2], abs=1e-6)
        if "--config.rollout.precision=exact" in settings:
            assert (
                records[step]["mismatch/log_ratio_max"] == 0
                and records[step]["discrepancy/max"] == 0
            )
