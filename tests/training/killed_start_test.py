"""Runs killed before a record is complete go on by the same command, and write nothing twice."""

import json
import re
import signal

import pytest

from tests.support.runs import DEBUG, finish, read_records, start

# bin.train; dies at the first call of a method of the metrics' writer.
_KILLED = """
import os, signal, sys
from dcmdp_jax.commands import failures, train
from dcmdp_jax.observe.metrics_io import MetricsWriter

setattr(MetricsWriter, sys.argv.pop(1), lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
failures.run_main(train.main)
"""
_SHORT = (
    "--config.warmup.steps=0",
    "--config.training.steps=2",
    "--config.training.prompts_per_step=4",
    "--config.training.prompts_per_mini_batch=4",
    "--config.rollout.group_size=4",
    "--config.rollout.max_completion_tokens=12",
)
_NOT_EVALUATED = "--config.evaluation.every_steps=0"


def _kill_and_resume(environment, run_dir, method, settings, *, config=DEBUG):
    """What the second start prints."""
    settings = [*_SHORT, *settings]
    killed = start(environment, run_dir, settings, config=config, program=("-c", _KILLED, method))
    finish(killed, code=-signal.SIGKILL)
    return finish(start(environment, run_dir, settings, config=config))


@pytest.mark.parametrize(
    "settings", [("rollout.lag=1",), ("model.lora_rank=2",)], ids=["lag", "lora"]
)
def test_a_run_that_is_killed_before_its_first_row_of_metrics_starts_again(
    run_environment, tmp_path, settings
):
    settings = [_NOT_EVALUATED, *(f"--config.{setting}" for setting in settings)]
    output = _kill_and_resume(run_environment, tmp_path / "run", "write", settings)
    assert f"resuming {tmp_path / 'run'} after step 0" in output
    assert sorted(read_records(tmp_path / "run")) == [1, 2]


def test_a_vllm_run_that_is_killed_before_its_first_row_of_metrics_starts_again(
    run_environment, tmp_path, vllm_is_installed
):
    config = "configs/demo_vllm.py:debug"
    output = _kill_and_resume(
        run_environment, tmp_path / "run", "write", [_NOT_EVALUATED], config=config
    )
    assert f"resuming {tmp_path / 'run'} after step 0" in output
    assert sorted(read_records(tmp_path / "run")) == [1, 2]


def test_an_evaluation_that_is_killed_before_its_row_leaves_its_samples_once(
    run_environment, tmp_path
):
    """At steps 0 and 2. Its first task of eight problems had been written when the row was not."""
    _kill_and_resume(
        run_environment, tmp_path / "run", "write", ["--config.evaluation.every_steps=2"]
    )
    lines = (tmp_path / "run" / "held_out_samples.jsonl").read_text().splitlines()
    written = [
        (record["step"], record["task"], record["place"]) for record in map(json.loads, lines)
    ]
    assert len(written) == len(set(written)) and {step for step, *_ in written} == {0, 2}


def test_a_run_whose_file_of_problems_has_grown_stops_or_goes_on_by_a_setting(
    run_environment, tmp_path
):
    """Ten problems, then fourteen: the order of prompts is another one."""
    data = tmp_path / "problems.jsonl"
    run_dir = tmp_path / "run"
    settings = [*_SHORT, _NOT_EVALUATED, f"--config.task.train={data}"]
    rows = [
        json.dumps({"problem": f"{n}+{n + 1}=", "answer": str(2 * n + 1)}) + "\n" for n in range(14)
    ]
    data.write_text("".join(rows[:10]))
    finish(start(run_environment, run_dir, settings))
    data.write_text("".join(rows))
    longer = [*settings, "--config.training.steps=3"]
    output = finish(start(run_environment, run_dir, longer), code=2)
    assert re.search(
        r"error: config.task.train: has 14, \w+ .*, the run began with 10, \w+ \(checkpoint 2\)",
        output,
    )
    assert sorted(read_records(run_dir)) == [1, 2]
    output = finish(
        start(run_environment, run_dir, [*longer, "--config.task.on_changed_data=continue"])
    )
    assert "the run began with 10" in output and sorted(read_records(run_dir)) == [1, 2, 3]
    # The checkpoint of step 3 has the new number.
    finish(start(run_environment, run_dir, longer))


def test_a_checkpoint_without_a_field_that_the_state_has_now_goes_on_with_a_new_one(
    run_environment, tmp_path
):
    """A run goes on with a feature that its checkpoint has no state for.

    A loss scale, which float16 adds: an earlier version's checkpoint lacks in the same way what a
    later one has.
    """
    settings = [*_SHORT, _NOT_EVALUATED, "--config.training.steps=1"]
    finish(start(run_environment, tmp_path / "run", settings))
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    assert config["model"]["compute_dtype"] == "float32"
    config["model"]["compute_dtype"] = "float16"
    path.write_text(json.dumps(config))
    settings += ["--config.model.compute_dtype=float16", "--config.training.steps=2"]
    output = finish(start(run_environment, tmp_path / "run", settings))
    assert (
        "checkpoint 1 has no loss_scale (model.compute_dtype=float16): it begins as in a new run"
        in output
    )
    assert sorted(read_records(tmp_path / "run")) == [1, 2]
