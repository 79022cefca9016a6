"""An engine that gives up, or memory that runs out, leaves the finished steps saved.

The error says so.
"""

import json
from pathlib import Path

import pytest

from tests.support.processes import demo

ROOT = Path(__file__).resolve().parents[2]

# bin.train, where the step that the first argument names fails in its place: while it samples, is
# synced or is packed.
_PROGRAM = """
import sys
from dcmdp_jax.commands import failures, train
from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.training import batches

place, step = sys.argv.pop(1).split()
generate, push, pack, calls = LocalEngine.generate, LocalEngine.sync_weights, batches.pack, []

def broken_generate(self, *arguments, seed, step, **options):
    if place == "generate" and step == int(globals()["step"]):
        raise EngineError("planted: the sidecar died three times")
    return generate(self, *arguments, seed=seed, step=step, **options)

def broken_push(self, params, policy_version):
    if place == "push" and policy_version == int(step):
        raise EngineError("planted: no answer to the weight sync")
    return push(self, params, policy_version)

def broken_pack(*arguments, **options):
    calls.append(None)
    if place == "pack" and len(calls) == int(step) + 1:
        raise MemoryError("planted: no memory for the rows")
    return pack(*arguments, **options)

LocalEngine.generate, LocalEngine.sync_weights, batches.pack = broken_generate, broken_push, broken_pack
failures.run_main(train.main)
"""


def _run(environment, run_dir, program, code=0):
    return demo(
        run_dir,
        "--config.training.steps=4",
        "--config.checkpoint.every_steps=100",
        program=program,
        code=code,
        env=environment,
    )


@pytest.mark.parametrize(
    "place",
    ["generate", *(pytest.param(place, marks=pytest.mark.long) for place in ("push", "pack"))],
)
def test_finished_steps_are_saved_and_the_run_resumes_there(run_environment, tmp_path, place):
    run_dir = tmp_path / "run"
    failed = _run(run_environment, run_dir, ("-c", _PROGRAM, f"{place} 3"), code=2)
    [error] = [line for line in failed.stderr.splitlines() if line.startswith("error:")]
    assert (
        error.startswith("error: planted: ")
        and "; saved after step 3: the same command resumes there" in error
    )
    assert (run_dir / "checkpoints" / "3").is_dir()
    resumed = _run(run_environment, run_dir, ("-m", "bin.train"))
    assert f"resuming {run_dir} after step 3" in resumed.stdout
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "reward/mean" in record] == [1, 2, 3, 4]


# bin.train with an engine that does not start, as is known during the warm-up.
_STARTS_BESIDE = """
from dcmdp_jax.commands import failures, train
from dcmdp_jax.engines.local import LocalKind
from dcmdp_jax.engines.protocol import EngineError

def check_start(self, engine):
    raise EngineError("planted: does not start")

LocalKind.check_start = check_start
failures.run_main(train.main)
"""


def test_an_engine_that_does_not_start_ends_the_warm_up(run_environment, tmp_path):
    failed = _run(run_environment, tmp_path / "run", ("-c", _STARTS_BESIDE), code=2)
    [error] = [line for line in failed.stderr.splitlines() if line.startswith("error:")]
    assert error.startswith("error: planted: does not start (traceback: ")
    assert "SFT warm start: 20" in failed.stdout and "SFT warm start: step" not in failed.stdout
    assert not (tmp_path / "run" / "checkpoints" / "0").exists()


@pytest.mark.long
def test_before_the_first_step_the_initial_policy_is_kept(run_environment, tmp_path):
    failed = _run(run_environment, tmp_path / "run", ("-c", _PROGRAM, "generate 0"), code=2)
    assert "saved after step 0: the same command resumes there" in failed.stderr
