"""Whole runs of a mixture of experts through bin.train: with the embedded engine and with vLLM."""

import json
from pathlib import Path

import pytest

from tests.support.processes import finished
from tests.support.run_invariants import contradictions

ROOT = Path(__file__).resolve().parents[2]
# One update a step: after another one the trainer would route some tokens elsewhere.
SHORT = (
    "training.steps=2",
    "training.prompts_per_mini_batch=4",
    "warmup.steps=5",
    "evaluation.every_steps=0",
)
FLOAT32 = ("rollout.precision=float32", "rollout.compute_dtype=float32")


def _train(environment, run_dir, options, *overrides):
    """Train with configs/demo_moe.py; return the records of the steps."""
    done = finished(
        "-m",
        "bin.train",
        f"--config=configs/demo_moe.py:{options}",
        f"--config.run_dir={run_dir}",
        *(f"--config.{override}" for override in overrides),
        env=environment,
    )
    assert "qwen3_moe" in done.stdout
    assert not list(contradictions(run_dir))
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _assert_two_steps(records, discrepancy):
    """In float32 trainer and engine differ by rounding.

    A token sent to another expert would be off by more.
    """
    assert len(records) == 2
    for record in records:
        assert record["optimizer/skipped_updates"] == 0 and record["optimizer/grad_norm"] > 0
        assert record["discrepancy/mean"] < discrepancy
        assert record["moe/routing_agreement"] > 0.999
        assert 1 <= record["moe/load_max_over_mean"] < 8 and 0 < record["moe/load_entropy"] <= 1
        assert 2 <= record["moe/balance_loss"] <= 8


@pytest.mark.long
def test_with_the_embedded_engine(run_environment, tmp_path):
    balancing = "algorithm.router_aux_loss=0.01"
    records = _train(
        run_environment,
        tmp_path / "run",
        "debug,replay",
        *SHORT,
        balancing,
        "rollout.precision=float32",
    )
    _assert_two_steps(records, 1e-5)


@pytest.mark.long
@pytest.mark.usefixtures("vllm_is_installed")
def test_with_vllm(run_environment, tmp_path):
    records = _train(run_environment, tmp_path / "run", "debug,replay,vllm", *SHORT, *FLOAT32)
    _assert_two_steps(records, 1e-4)


@pytest.mark.long
@pytest.mark.usefixtures("vllm_is_installed")
def test_the_demo_learns_with_vllm(run_environment, tmp_path, record_property):
    _assert_it_learns(run_environment, tmp_path / "run", record_property, "vllm,replay")


@pytest.mark.long
def test_the_demo_learns(run_environment, tmp_path, record_property):
    _assert_it_learns(run_environment, tmp_path / "run", record_property, "replay")


def _assert_it_learns(run_environment, run_dir, record_property, options):
    """As configs/demo_moe.py says; a standard error of the score is 4 points."""
    records = _train(run_environment | {"XLA_FLAGS": ""}, run_dir, options)  # optimized: 40 steps
    scores = [
        record["eval/arithmetic/avg@8"] for record in records if "eval/arithmetic/avg@8" in record
    ]
    record_property("avg@8", f"{scores[0]:.3f} to {scores[-1]:.3f}")
    assert len(scores) == 6 and scores[-1] > scores[0] + 0.15
