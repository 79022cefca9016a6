"""Whole runs against real vLLM, whose sidecar is killed, leave an undisturbed run's record."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.processes import children
from tests.support.runs import read_digests, read_records, start
from tests.support.waiting import HANGS_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (
    "--config.evaluation.every_steps=5",
    "--config.warmup.steps=10",
    "--config.rollout.max_completion_tokens=36",
    "--config.training.row_lengths=(100,)",
)


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("vllm_is_installed")]


def _start(run_environment, run_dir, steps, options="debug", settings=()):
    settings = [f"--config.training.steps={steps}", *SETTINGS, *settings]
    return start(run_environment, run_dir, settings, config=f"configs/demo_vllm.py:{options}")


def _sidecar_of(trainer):
    """The process that runs our sidecar as a child of the trainer, or None."""
    return next(iter(_sidecars_of(trainer)), None)


def _sidecars_of(trainer):
    return children(trainer, "engines/vllm/sidecar.py")


def _steps(run_dir):
    path = Path(run_dir) / "metrics.jsonl"
    return (
        sum(b"reward/mean" in line for line in path.read_bytes().splitlines())
        if path.exists()
        else 0
    )


def _samples(run_dir):
    return (Path(run_dir) / "samples.jsonl").read_text()


def test_killing_the_sidecar_changes_nothing(run_environment, tmp_path, record_property):
    """SIGKILL to the sidecar changes no token, reward or multiplier.

    At random points: starting, loading, sampling or idle.
    """
    steps = 40
    kills = 20
    whole = _start(run_environment, tmp_path / "whole", steps)
    output, _ = whole.communicate(timeout=HANGS_S)
    assert whole.returncode == 0, output
    killed = _start(run_environment, tmp_path / "killed", steps)
    chance = random.Random(0)
    for number in range(kills):
        if number % 3 == 0:
            # Sampling, loading or idle, some time after another step was recorded.
            seen = _steps(tmp_path / "killed")
            wait_until(
                lambda seen=seen: _steps(tmp_path / "killed") > seen or killed.poll() is not None,
                "another step",
            )
            time.sleep(0.5 * chance.random())
        else:
            # Starting, or loading, or sampling again.
            time.sleep(6.0 * chance.random())
        wait_until(
            lambda: _sidecar_of(killed.pid) is not None or killed.poll() is not None, "a sidecar"
        )
        sidecar = _sidecar_of(killed.pid)
        assert sidecar is not None, f"the run ended after {number} kills"
        os.kill(sidecar, signal.SIGKILL)
        wait_until(
            lambda sidecar=sidecar: _sidecar_of(killed.pid) != sidecar,
            "the end of the killed sidecar",
        )
    output, _ = killed.communicate(timeout=HANGS_S)
    assert killed.returncode == 0, output
    record_property("kills", kills)
    expected = read_records(tmp_path / "whole")
    assert set(expected) == set(range(steps + 1))
    assert read_records(tmp_path / "killed") == expected
    assert _samples(tmp_path / "killed") == _samples(tmp_path / "whole")
    assert {"eval/arithmetic/avg@2", "mismatch/probe", "dual/multiplier"} <= set(expected[steps])
    assert expected[steps]["discrepancy/mean"] > 0
    # Nothing of the sidecars stays but what was said and how it was started.
    assert sorted(p.name for p in (tmp_path / "killed" / "vllm").iterdir()) == [
        "config.json",
        "sidecar.log",
    ]
    assert _sidecar_of(killed.pid) is None


def test_with_a_lag_killing_trainer_or_sidecar_changes_nothing(
    run_environment, tmp_path, record_property
):
    """Lag 1 with SIGKILL to the trainer or to the sidecar at random moments.

    The trainer is resumed each time.
    """
    steps = 40
    kills = 20
    lag = ["--config.rollout.lag=1"]
    output, _ = (
        whole := _start(run_environment, tmp_path / "whole", steps, "debug", lag)
    ).communicate(timeout=HANGS_S)
    assert whole.returncode == 0, output
    killed = _start(run_environment, tmp_path / "killed", steps, "debug", lag)
    chance = random.Random(1)
    done = 0
    while done < kills:
        seen = _steps(tmp_path / "killed")
        wait_until(
            lambda p=killed, s=seen: _steps(tmp_path / "killed") > s or p.poll() is not None,
            "another step",
        )
        time.sleep(0.5 * chance.random())
        assert killed.poll() is None, f"the run ended after {done} kills"
        if chance.random() < 0.5:
            if (sidecar := _sidecar_of(killed.pid)) is None:
                continue
            os.kill(sidecar, signal.SIGKILL)
        else:
            killed.kill()
            killed.communicate()
            killed = _start(run_environment, tmp_path / "killed", steps, "debug", lag)
        done += 1
    output, _ = killed.communicate(timeout=HANGS_S)
    assert killed.returncode == 0, output
    record_property("kills", kills)
    expected = read_records(tmp_path / "whole")
    assert read_records(tmp_path / "killed") == expected
    assert [expected[step]["rollout/staleness_max"] for step in range(1, steps + 1)] == [
        0,
        *[1] * (steps - 1),
    ]
    assert (
        expected[steps]["staleness/log_ratio_abs_mean"] > 0
        and expected[steps]["mismatch/log_ratio_abs_mean"] > 0
    )


_ROUNDING = {"rel": 1e-3, "abs": 1e-4}


def test_two_replicas_give_the_metrics_of_one_and_kills_change_nothing(
    run_environment, tmp_path, record_property
):
    """Whole runs in float32 with one sidecar, with two, and with one of two killed.

    At ten random points.
    """
    steps = 40
    kills = 10
    for name, replicas in (("one", 1), ("two", 2)):
        run = _start(
            run_environment,
            tmp_path / name,
            steps,
            "debug,float32",
            [f"--config.rollout.vllm.replicas={replicas}"],
        )
        output, _ = run.communicate(timeout=HANGS_S)
        assert run.returncode == 0, output
    killed = _start(
        run_environment,
        tmp_path / "killed",
        steps,
        "debug,float32",
        ["--config.rollout.vllm.replicas=2"],
    )
    chance = random.Random(0)
    for number in range(kills):
        # A sidecar that dies before the run has begun ends it.
        seen = _steps(tmp_path / "killed")
        wait_until(
            lambda seen=seen: _steps(tmp_path / "killed") > seen or killed.poll() is not None,
            "another step",
        )
        time.sleep(chance.random())
        sidecars = sorted(_sidecars_of(killed.pid))
        assert sidecars, f"the run ended after {number} kills"
        victim = chance.choice(sidecars)
        os.kill(victim, signal.SIGKILL)
        wait_until(
            lambda victim=victim: victim not in _sidecars_of(killed.pid),
            "the end of the killed sidecar",
        )
    output, _ = killed.communicate(timeout=HANGS_S)
    assert killed.returncode == 0, output
    record_property("kills", kills)
    one = read_records(tmp_path / "one")
    two = read_records(tmp_path / "two")
    assert read_records(tmp_path / "killed") == two
    assert _samples(tmp_path / "killed") == _samples(tmp_path / "two")
    assert set(one) == set(two) == set(range(steps + 1))
    for step, record in one.items():
        assert two[step] == pytest.approx(record, **_ROUNDING), step
    assert sorted(p.name for p in (tmp_path / "killed" / "vllm").rglob("*")) == [
        "0",
        "1",
        "config.json",
        "sidecar.log",
        "sidecar.log",
    ]


def test_adapters_beside_their_base_keep_the_version_of_each_rollout_and_resume(
    run_environment, tmp_path
):
    """Lag 1, float32: a rollout sampled by other adapters than it says would show as mismatch."""
    adapters = [
        "--config.model.lora_rank=4",
        "--config.model.lora_base=float32",
        "--config.rollout.vllm.adapters=True",
        "--config.rollout.lag=1",
        "--config.optimizer.learning_rate=0.01",
        "--config.evaluation.every_steps=0",
    ]
    for name, goes in (("whole", (4,)), ("resumed", (2, 4))):
        for steps in goes:
            run = _start(run_environment, tmp_path / name, steps, "debug,float32", adapters)
            output, _ = run.communicate(timeout=HANGS_S)
            assert run.returncode == 0, output
    whole = read_records(tmp_path / "whole")
    assert read_records(tmp_path / "resumed")[4] == whole[4]
    assert read_digests(tmp_path / "resumed", 4) == read_digests(tmp_path / "whole", 4)
    rounding = [whole[step]["mismatch/merge_rounding"] for step in range(1, 5)]
    assert rounding[0] == 0 < min(rounding[1:]) and max(rounding) < 0.01, rounding
    for step in range(1, 5):
        assert whole[step]["rollout/staleness_max"] == (step > 1)
        assert whole[step]["mismatch/log_ratio_abs_mean"] < 1e-4, whole[step]
    assert whole[4]["staleness/log_ratio_abs_mean"] > 1e-3
    assert (tmp_path / "whole/vllm/sidecar.log").read_text().count(
        "Reloading and processing weights took"
    ) == 1
