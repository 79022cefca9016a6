"""Runs that are killed before a record is complete: the same command goes on, and nothing is written twice."""

import json
import signal

import pytest

from tests.support.runs import DEBUG, finish, read_records, start

# bin.train; dies at the first call of a method of the metrics' writer.
_KILLED = """
import os, signal, sys
from dcmdp_jax.commands import cli, train
from dcmdp_jax.observe.metrics_io import MetricsWriter

setattr(MetricsWriter, sys.argv.pop(1), lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
cli.run_main(train.main)
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


def _kill_and_resume(environment, run_dir, method, *settings, config=DEBUG):
    """What the second start prints."""
    finish(
        start(environment, run_dir, *_SHORT, *settings, config=config, program=("-c", _KILLED, method)),
        code=-signal.SIGKILL,
    )
    return finish(start(environment, run_dir, *_SHORT, *settings, config=config))


@pytest.mark.parametrize("settings", [("rollout.lag=1",), ("model.lora_rank=2",)], ids=["lag", "lora"])
def test_a_run_that_is_killed_before_its_first_row_of_metrics_starts_again(run_environment, tmp_path, settings):
    given = [f"--config.{each}" for each in settings]
    said = _kill_and_resume(run_environment, tmp_path / "run", "write", _NOT_EVALUATED, *given)
    assert f"resuming {tmp_path / 'run'} after step 0" in said
    assert sorted(read_records(tmp_path / "run")) == [1, 2]


def test_a_vllm_run_that_is_killed_before_its_first_row_of_metrics_starts_again(
    run_environment, tmp_path, vllm_is_installed
):
    config = "configs/demo_vllm.py:debug"
    said = _kill_and_resume(run_environment, tmp_path / "run", "write", _NOT_EVALUATED, config=config)
    assert f"resuming {tmp_path / 'run'} after step 0" in said
    assert sorted(read_records(tmp_path / "run")) == [1, 2]


def test_an_evaluation_that_is_killed_before_its_row_leaves_its_samples_once(run_environment, tmp_path):
    """At steps 0 and 2. Its first task of eight problems had been written when the row was not."""
    _kill_and_resume(run_environment, tmp_path / "run", "write", "--config.evaluation.every_steps=2")
    lines = (tmp_path / "run" / "held_out_samples.jsonl").read_text().splitlines()
    written = [(record["step"], record["task"], record["place"]) for record in map(json.loads, lines)]
    assert len(written) == len(set(written)) and {step for step, *_ in written} == {0, 2}
