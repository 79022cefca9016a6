"""examples/: remedies equal their formulas in float64, train the demo by name; the method on one
page is our step.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcmdp_jax.algorithm import losses, stats
from dcmdp_jax.algorithm.dual import dual_init
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.data.packing import pack
from dcmdp_jax.data.row_layout import make_row_shapes
from dcmdp_jax.models.row_logprobs import RowOutputs
from dcmdp_jax.training.state import new_state
from dcmdp_jax.training.step import StepSetup, jit_step, train_step
from dcmdp_jax.user_files import load_object
from tests.support.sampling import Rollout
from tests.support.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[1]
_HUBER, _PRIME_RL = (
    f"examples/remedies.py:{call}" for call in ("huber(knee=0.1)", "prime_rl(low=0.1,kl_tau=0.5)")
)


def _remedies(**algorithm):
    return AlgorithmSettings(**algorithm).remedies()


def test_huber_by_hand():
    # A = 1, lambda = 0.5, knee 0.1. delta = 0.05: 0.05^2 / 0.2 = 0.0125. At the knee 0.05 from
    # either side. delta = 0.3: 0.3 - 0.05 = 0.25. A linear penalty would give 0.975, 0.95, 0.85.
    tokens = Tokens(
        advantages=jnp.ones((1, 4)),
        discrepancy=jnp.float32([[0.05, 0.1, 0.3, 0.3]]),
        multiplier=0.5,
        completion_mask=np.array([[True, True, True, False]]),
    )
    penalized, statistics = _remedies(method=_HUBER).penalty(tokens)
    np.testing.assert_allclose(
        penalized[0, :3], [1 - 0.5 * x for x in (0.0125, 0.05, 0.25)], rtol=1e-6
    )
    assert float(statistics["remedy/huber/above_knee"].value()) == pytest.approx(1 / 3)
    # lambda is 0.5 on h, whose slope in delta is delta / knee below, 1 above.
    penalty = _remedies(method=_HUBER).penalty
    slope = jax.grad(lambda delta: jnp.sum(penalty(tokens._replace(discrepancy=delta))[0]))(
        tokens.discrepancy
    )
    np.testing.assert_allclose(slope, [[-0.25, -0.5, -0.5, -0.5]], rtol=1e-6)


def test_prime_rl_is_its_formula_in_value_and_gradient():
    rng = np.random.default_rng(0)
    rollout = np.log(rng.uniform(0.02, 0.98, (6, 50))).astype(np.float32)
    train = np.log(
        np.clip(np.exp(rollout) + rng.normal(0, 0.15, rollout.shape), 0.01, 0.99)
    ).astype(np.float32)
    advantages = rng.normal(size=rollout.shape).astype(np.float32)
    mask = rng.random(rollout.shape) < 0.8
    weights = rng.uniform(0.1, 1.0, rollout.shape).astype(np.float32)
    tokens = Tokens(
        train_logprobs=train,
        anchor_logprobs=rollout,
        rollout_logprobs=rollout,
        advantages=advantages,
        completion_mask=mask,
    )
    loss = _remedies(loss=_PRIME_RL).loss

    @jax.jit
    def total(train):
        summed, statistics = losses.policy_loss(
            tokens._replace(train_logprobs=train), weights, loss=loss
        )
        return summed.total, stats.values(statistics)

    (value, metrics), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(train))

    # prime-rl's default loss: -A r where DPPO keeps the token, and tau (log r)^2 on every token,
    # kept or not.
    p, q, A, w = (
        x.astype(np.float64) for x in (train, rollout, advantages, np.where(mask, weights, 0))
    )
    invalid = np.where(A > 0, np.exp(p) - np.exp(q) > 0.2, np.exp(p) - np.exp(q) < -0.1)
    expected = w * (-A * np.exp(p - q) * ~invalid + 0.5 * (p - q) ** 2)
    slope = w * (-A * np.exp(p - q) * ~invalid + 2 * 0.5 * (p - q))
    assert float(value) == pytest.approx(expected.sum(), rel=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-5)
    assert 0.05 < invalid[mask].mean() < 0.5
    assert (
        np.abs(np.asarray(gradient)[invalid & mask]).min() > 0
    )  # the KL of masked tokens has a gradient
    assert metrics["remedy/prime_rl/masked"] == pytest.approx(invalid[mask].mean(), rel=1e-6)
    assert metrics["remedy/prime_rl/kl"] == pytest.approx(((p - q) ** 2)[mask].mean(), rel=1e-5)


def test_without_its_kl_prime_rl_is_the_built_in_dppo():
    rng = np.random.default_rng(1)
    rollout = np.log(rng.uniform(0.02, 0.98, (2, 50))).astype(np.float32)
    train = np.log(np.clip(np.exp(rollout) + rng.normal(0, 0.2, rollout.shape), 0.01, 0.99)).astype(
        np.float32
    )
    tokens = Tokens(
        train_logprobs=train,
        anchor_logprobs=rollout,
        rollout_logprobs=rollout,
        completion_mask=rollout < 1,
        advantages=rng.normal(size=rollout.shape).astype(np.float32),
    )
    ours = _remedies(trust_region="dppo_tv(low=0.2,high=0.2)").loss
    theirs = _remedies(loss="examples/remedies.py:prime_rl(kl_tau=0)").loss
    totals = [
        losses.policy_loss(tokens, np.ones((2, 50)), loss=loss)[0].total for loss in (ours, theirs)
    ]
    assert float(totals[0]) == pytest.approx(float(totals[1]), rel=1e-5)


@pytest.mark.long
def test_they_train_the_demo_by_name_and_stand_in_metrics_and_report(run_environment, tmp_path):
    assert load_object("examples/remedies.py:huber")  # relative to the working directory
    command = [
        sys.executable,
        "-m",
        "bin.train",
        "--config=configs/demo.py:debug",
        f"--config.run_dir={tmp_path / 'run'}",
        "--config.algorithm.method=examples/remedies.py:huber(knee=0.001)",
        "--config.algorithm.loss=examples/remedies.py:prime_rl(kl_tau=1e-3)",
        "--config.algorithm.ratio_denominator=rollout",
    ]
    environment = {**run_environment, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stderr
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [record for record in records if "policy/loss" in record]
    assert len(trained) == 2
    for record in trained:
        assert 0 < record["remedy/huber/above_knee"] < 1
        assert record["remedy/prime_rl/kl"] > 0 and 0 <= record["remedy/prime_rl/masked"] < 1
        assert "policy/clip_low_fraction" not in record and record["policy/ratio_mean"] > 0
    report = (tmp_path / "run" / "report.html").read_text()
    assert "remedy/huber/above_knee" in report and "remedy/prime_rl/kl" in report


def _minimal():
    spec = importlib.util.spec_from_file_location(
        "dc_grpo_minimal", _ROOT / "examples" / "dc_grpo_minimal.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def minimal():
    return _minimal()


def test_the_method_on_one_page_learns_and_its_multiplier_follows_eq_11(minimal, capsys):
    path = _ROOT / "examples" / "dc_grpo_minimal.py"
    assert len(path.read_text().splitlines()) <= 220 and "import dcmdp_jax" not in path.read_text()
    history = minimal.main(steps=40)
    rewards, deltas, multipliers = zip(*history, strict=True)
    # Four tokens of seven symbols each: an untrained policy has about 1/7, one that always copies
    # 1.
    assert np.mean(rewards[:3]) < 0.35 and np.mean(rewards[-3:]) > 0.6
    assert (
        multipliers[0] == minimal.MULTIPLIER and min(deltas) > 0
    )  # rounded weights never agree exactly
    moved = [
        min(max(a + d - minimal.TOLERANCE, 0.0), 1.0)
        for a, d in zip(multipliers, deltas, strict=True)
    ]
    np.testing.assert_allclose(multipliers[1:], moved[:-1], rtol=1e-12)
    printed = capsys.readouterr().out
    assert re.findall(r"step +(\d+)   reward", printed) == ["0", "10", "20", "30", "39"]
    assert f"lambda {multipliers[-1]:.4f}" in printed and printed.count(" -> ") == 5


@pytest.mark.parametrize("optimizer", ["its own", "plain gradient descent"])
def test_the_method_on_one_page_is_the_products_step(minimal, monkeypatch, optimizer):
    """The same parameters and batch through training/step.py: losses, updated parameters,
    multiplier.
    """
    schedule = optax.constant_schedule(minimal.LEARNING_RATE if optimizer == "its own" else 1.0)
    transform = optax.adam(schedule) if optimizer == "its own" else optax.sgd(schedule)
    monkeypatch.setattr(minimal, "optimizer", transform)
    monkeypatch.setattr(minimal, "update", jax.jit(minimal.update.__wrapped__))
    count = minimal.PROMPTS * minimal.GROUP
    limit = minimal.LIMIT
    start = minimal.PROMPT
    key = jax.random.key(5)
    params = minimal.policy.init(key, jnp.zeros((1, start + limit), jnp.int32))
    prompts = np.repeat(
        np.random.default_rng(5).integers(0, minimal.SYMBOLS, (minimal.PROMPTS, start)),
        minimal.GROUP,
        0,
    )
    tokens, mask, rollout = (
        np.asarray(x) for x in minimal.sample(minimal.rounded(params), prompts, key)
    )
    rewards = minimal.verify(tokens)
    lengths = mask.sum(1).astype(int)
    assert len(set(lengths)) > 2
    found, _, multiplier, mean, losses_found = minimal.train_step(
        params, transform.init(params), 0.3, tokens, mask, rollout, rewards
    )

    episodes = Rollout(
        list(prompts.astype(np.int32)),
        [tokens[i, start : start + n].astype(np.int32) for i, n in enumerate(lengths)],
        [rollout[i, :n] for i, n in enumerate(lengths)],
        ["stop"] * count,
        np.repeat(np.arange(minimal.PROMPTS), minimal.GROUP),
        0,
    ).episodes
    plan = make_row_shapes(
        row_lengths=(start + limit,),
        micro_batch_tokens=count * (start + limit),
        mini_batches=minimal.MINI_BATCHES,
        completions=count // minimal.MINI_BATCHES,
        segments_per_row=1,
        row_shards=1,
    )
    batch, _ = pack(episodes, rewards, plan, mask_truncated=False)

    def row_logprobs(params, rows):
        table = jax.nn.log_softmax(minimal.policy.apply(params, rows.input_ids)[:, :-1])
        logprobs = jnp.take_along_axis(table, rows.input_ids[:, 1:, None], -1)[..., 0]
        logprobs = jnp.where(rows.completion_mask, jnp.pad(logprobs, ((0, 0), (1, 0))), 0.0)
        return RowOutputs(logprobs, jnp.zeros_like(logprobs), {})

    settings = AlgorithmSettings(
        multiplier=0.3,
        multiplier_max=1.0,
        tolerance=minimal.TOLERANCE,
        dual_learning_rate=minimal.DUAL_RATE,
        trust_region=f"clip(low={minimal.CLIP_LOW},high={minimal.CLIP_HIGH})",
    )
    transform = optax.with_extra_args_support(transform)
    parts = StepSetup(
        row_logprobs=row_logprobs,
        compute_dtype="float32",
        settings=settings,
        max_completion_tokens=limit,
        optimizer=transform,
        schedule=schedule,
        mesh=None,
    )
    step = jit_step(train_step, parts)
    dual = dual_init(0.3, tolerance=minimal.TOLERANCE)
    state, metrics, _ = step(
        new_state(jax.tree.map(jnp.copy, params), transform, dual), batch, None
    )
    assert float(metrics["policy/loss"]) == pytest.approx(np.mean(losses_found), abs=1e-6)
    assert float(metrics["discrepancy/mean"]) == pytest.approx(mean, rel=1e-5) and mean > 0.01
    assert float(state.dual.multiplier) == pytest.approx(multiplier, rel=1e-6)
    moved = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(*map(jax.tree.leaves, (found, params)), strict=True)
    )
    # Adam divides a gradient by its own size: where it is rounding noise beside 1e-8, so is the
    # update.
    allowed = 1e-6 if optimizer == "plain gradient descent" else 0.01 * minimal.LEARNING_RATE
    assert moved > 100 * allowed
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=allowed)


def test_one_sentence_is_one_short_sentence_that_ends():
    score = load_object("examples/one_sentence.py:one_sentence")
    cases = dict.fromkeys(
        ("A volcano is a mountain that erupts.", " ".join(["word"] * 20) + "."), 1.0
    )
    wrong = (
        "A volcano is a mountain. It erupts.",
        "A volcano is a mountain that",
        "Yes.",
        "A volcano\nis a mountain.",
    )
    cases |= dict.fromkeys(
        (*wrong, " ".join(["word"] * 21) + ".", "Is it a mountain? It is.", ""), 0.0
    )
    assert dict(zip(cases, score(completions=list(cases)), strict=True)) == cases
