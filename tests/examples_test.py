"""examples/remedies.py: each remedy equals its formula in float64, value and gradient, and trains the demo by name."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm import losses, stats
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.user_code import load_function
from tests.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[1]
_HUBER, _PRIME_RL = (f"examples/remedies.py:{call}" for call in ("huber(knee=0.1)", "prime_rl(low=0.1,kl_tau=0.5)"))


def _remedies(**algorithm):
    return AlgorithmSettings(**algorithm).remedies()


def test_huber_by_hand():
    # A = 1, lambda = 0.5, knee 0.1. delta = 0.05: 0.05^2 / 0.2 = 0.0125. At the knee 0.05 from either side.
    # delta = 0.3: 0.3 - 0.05 = 0.25. A linear charge would give 0.975, 0.95, 0.85.
    tokens = Tokens(
        advantages=jnp.ones((1, 4)), discrepancy=jnp.float32([[0.05, 0.1, 0.3, 0.3]]), multiplier=0.5,
        completion_mask=np.array([[True, True, True, False]]),
    )  # fmt: skip
    charged, statistics = _remedies(method=_HUBER).penalty(tokens)
    np.testing.assert_allclose(charged[0, :3], [1 - 0.5 * x for x in (0.0125, 0.05, 0.25)], rtol=1e-6)
    assert float(statistics["remedy/huber/above_knee"].value()) == pytest.approx(1 / 3)
    # lambda is 0.5 on h, whose slope in delta is delta / knee below, 1 above.
    penalty = _remedies(method=_HUBER).penalty
    slope = jax.grad(lambda delta: jnp.sum(penalty(tokens._replace(discrepancy=delta))[0]))(tokens.discrepancy)
    np.testing.assert_allclose(slope, [[-0.25, -0.5, -0.5, -0.5]], rtol=1e-6)


def test_prime_rl_is_its_formula_in_value_and_gradient():
    rng = np.random.default_rng(0)
    rollout = np.log(rng.uniform(0.02, 0.98, (6, 50))).astype(np.float32)
    train = np.log(np.clip(np.exp(rollout) + rng.normal(0, 0.15, rollout.shape), 0.01, 0.99)).astype(np.float32)
    advantages = rng.normal(size=rollout.shape).astype(np.float32)
    mask, weights = rng.random(rollout.shape) < 0.8, rng.uniform(0.1, 1.0, rollout.shape).astype(np.float32)
    tokens = Tokens(
        train_logprobs=train, anchor_logprobs=rollout, rollout_logprobs=rollout, advantages=advantages,
        completion_mask=mask,
    )  # fmt: skip
    loss = _remedies(loss=_PRIME_RL).loss

    @jax.jit
    def total(train):
        summed, statistics = losses.policy_loss(tokens._replace(train_logprobs=train), weights, loss=loss)
        return summed.total, stats.values(statistics)

    (value, metrics), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(train))

    # prime-rl's default loss: -A r where DPPO keeps the token, and tau (log r)^2 on every token, kept or not.
    p, q, A, w = (x.astype(np.float64) for x in (train, rollout, advantages, np.where(mask, weights, 0)))
    invalid = np.where(A > 0, np.exp(p) - np.exp(q) > 0.2, np.exp(p) - np.exp(q) < -0.1)
    expected = w * (-A * np.exp(p - q) * ~invalid + 0.5 * (p - q) ** 2)
    slope = w * (-A * np.exp(p - q) * ~invalid + 2 * 0.5 * (p - q))
    assert float(value) == pytest.approx(expected.sum(), rel=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-5)
    assert 0.05 < invalid[mask].mean() < 0.5
    assert np.abs(np.asarray(gradient)[invalid & mask]).min() > 0  # the KL of masked tokens has a gradient
    assert metrics["remedy/prime_rl/masked"] == pytest.approx(invalid[mask].mean(), rel=1e-6)
    assert metrics["remedy/prime_rl/kl"] == pytest.approx(((p - q) ** 2)[mask].mean(), rel=1e-5)


def test_without_its_kl_prime_rl_is_the_built_in_dppo():
    rng = np.random.default_rng(1)
    rollout = np.log(rng.uniform(0.02, 0.98, (2, 50))).astype(np.float32)
    train = np.log(np.clip(np.exp(rollout) + rng.normal(0, 0.2, rollout.shape), 0.01, 0.99)).astype(np.float32)
    tokens = Tokens(
        train_logprobs=train, anchor_logprobs=rollout, rollout_logprobs=rollout, completion_mask=rollout < 1,
        advantages=rng.normal(size=rollout.shape).astype(np.float32),
    )  # fmt: skip
    ours = _remedies(trust_region="dppo_tv(low=0.2,high=0.2)").loss
    theirs = _remedies(loss="examples/remedies.py:prime_rl(kl_tau=0)").loss
    totals = [losses.policy_loss(tokens, np.ones((2, 50)), loss=loss)[0].total for loss in (ours, theirs)]
    assert float(totals[0]) == pytest.approx(float(totals[1]), rel=1e-5)


def test_they_train_the_demo_by_name_and_stand_in_metrics_and_report(run_environment, tmp_path):
    assert load_function("examples/remedies.py:huber")  # relative to the working directory
    command = [
        sys.executable, "-m", "bin.train", "--config=configs/demo.py:debug", f"--config.run_dir={tmp_path / 'run'}",
        "--config.algorithm.method=examples/remedies.py:huber(knee=0.001)",
        "--config.algorithm.loss=examples/remedies.py:prime_rl(kl_tau=1e-3)",
        "--config.algorithm.ratio_denominator=rollout",
    ]  # fmt: skip
    environment = {**run_environment, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if "policy/loss" in record]
    assert len(trained) == 2
    for record in trained:
        assert 0 < record["remedy/huber/above_knee"] < 1
        assert record["remedy/prime_rl/kl"] > 0 and 0 <= record["remedy/prime_rl/masked"] < 1
        assert "policy/clip_low_fraction" not in record and record["policy/ratio_mean"] > 0
    report = (tmp_path / "run" / "report.html").read_text()
    assert "remedy/huber/above_knee" in report and "remedy/prime_rl/kl" in report
