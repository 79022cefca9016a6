"""A step on a batch that lags behind the policy: staleness and mismatch in float64 NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.training.rescore import make_old_logprobs
from tests.support import step_runs

MODELS = {
    "dense": step_runs.MODEL,
    "moe": dataclasses.replace(
        step_runs.MODEL,
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    ),
}
# seeds of two versions' parameters
OLDER = 1
NOW = 2
MEASURE = "diff"
SIDED = "two"


def _normed(x, scale, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale


def _rotated(x, base):
    """[T, heads, D], each pair (i, i + D / 2) turned by position / base^(2 i / D)."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] / base ** (np.arange(half) * 2 / x.shape[-1])
    sin = np.sin(angle)[:, None]
    cos = np.cos(angle)[:, None]
    first = x[..., :half]
    second = x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _mlp(x, gate, up, down):
    opened = x @ gate
    return (opened / (1 + np.exp(-opened)) * (x @ up)) @ down


def _experts(x, layer, model):
    probabilities = _softmax(x @ layer["router"]["kernel"])
    out = np.zeros_like(x)
    for t, row in enumerate(probabilities):
        chosen = np.argsort(-row)[: model.num_experts_per_tok]
        for expert in chosen:
            kernels = [layer["experts"][name]["kernel"][expert] for name in ("gate", "up", "down")]
            out[t] += row[expert] / row[chosen].sum() * _mlp(x[t], *kernels)
    return out


def _logprobs(params, model, ids):
    """log pi of each token after the first, in float64."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = params["embedding"][ids]
    epsilon = model.rms_norm_eps
    causal = np.tril(np.ones((len(ids), len(ids)), bool))
    for number in range(model.num_layers):
        layer = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
        attention = layer["attention"]
        h = _normed(x, layer["attention_norm"]["scale"], epsilon)
        q, k, v = (
            (h @ attention[name]["kernel"]).reshape(len(ids), -1, model.head_dim)
            for name in ("q", "k", "v")
        )
        q = _rotated(_normed(q, attention["q_norm"]["scale"], epsilon), model.rope_theta)
        k = _rotated(_normed(k, attention["k_norm"]["scale"], epsilon), model.rope_theta)
        k, v = (np.repeat(y, model.num_heads // model.num_kv_heads, axis=1) for y in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(model.head_dim)
        mixed = np.einsum("hts,shd->thd", _softmax(np.where(causal, scores, -np.inf)), v)
        x = x + mixed.reshape(len(ids), -1) @ attention["o"]["kernel"]
        h = _normed(x, layer["mlp_norm"]["scale"], epsilon)
        mlp = layer["mlp"]
        kernels = (
            [mlp[name]["kernel"] for name in ("gate", "up", "down")] if "gate" in mlp else None
        )
        x = x + (_mlp(h, *kernels) if kernels else _experts(h, mlp, model))
    logits = (
        _normed(x, params["norm"]["scale"], epsilon) @ params["embedding"].T / step_runs.TEMPERATURE
    )
    logits = logits - logits.max(-1, keepdims=True)
    table = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return table[np.arange(len(ids) - 1), ids[1:]]


def _by_hand(params, model, rollout):
    """log p of all sampled tokens, completion after completion."""
    pairs = zip(rollout.prompt_ids, rollout.completion_ids, strict=True)
    return np.concatenate(
        [_logprobs(params, model, np.concatenate(pair))[-len(pair[1]) :] for pair in pairs]
    )


def _sampled(values):
    """The tests' rollout whose engine says `values`, one after the other."""
    rollout, rewards = step_runs.make_rollout()
    ends = np.cumsum([len(ids) for ids in rollout.completion_ids])[:-1]
    return dataclasses.replace(
        rollout, rollout_logprobs=np.split(values.astype(np.float32), ends)
    ), rewards


@functools.cache
def _old_program(model, compute, mesh):
    row_logprobs = make_row_logprobs(model, compute, temperature=step_runs.TEMPERATURE, mesh=mesh)
    return make_old_logprobs(row_logprobs, mesh=mesh)


def _lagged_step(
    model,
    sampled,
    *,
    mini_batches=2,
    mesh=None,
    settings=step_runs.ALGORITHM,
    older=OLDER,
):
    """One step of the policy `NOW` on a batch of the policy `older`."""
    # A chunk of its own for each model: programs are cached by their settings, which the model is
    # not among.
    compute = Compute(one_segment=True, logprob_chunk=12 if model.num_experts else 11)
    batch = step_runs.packed_batch(sampled, mini_batches, mesh, tokens=64)
    batch = _old_program(model, compute, mesh)(step_runs.make_params(older), batch)
    create, step, _ = step_runs.programs(settings, mini_batches, mesh, compute, False)
    state, metrics, _ = step(
        create(jax.tree.map(jnp.copy, step_runs.make_params(NOW))), batch, None
    )
    return state, {name: np.asarray(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("dense", None),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("dense", (1, 2, 1, 1)), ("moe", None))
        ),
        ("moe", (2, 1, 1, 1)),
    ],
    ids=str,
)
def test_both_parts_are_those_computed_by_hand(kind, shape, monkeypatch):
    """Token by token, log p_now - log p^Inf is staleness plus mismatch.

    The discrepancy is that of the older weights.
    """
    model = MODELS[kind]
    monkeypatch.setattr(step_runs, "MODEL", model)
    mesh = None if shape is None else make_mesh(*shape, devices=jax.devices()[:2])
    rollout, _ = step_runs.make_rollout()
    then, now = (_by_hand(step_runs.make_params(seed), model, rollout) for seed in (OLDER, NOW))
    engine = then + np.random.default_rng(3).normal(0, 0.05, len(then))
    state, metrics = _lagged_step(model, _sampled(engine), mesh=mesh)
    engine = engine.astype(np.float32).astype(np.float64)
    for name, values in {
        "staleness": now - then,
        "mismatch": then - engine,
        "gap": now - engine,
    }.items():
        found = [float(metrics[f"{name}/log_ratio_{each}"]) for each in ("mean", "abs_mean", "max")]
        expected = [values.mean(), np.abs(values).mean(), np.abs(values).max()]
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-6), name
    # The policies are far apart and the engine is near the older one.
    assert metrics["staleness/log_ratio_abs_mean"] > 20 * metrics["mismatch/log_ratio_abs_mean"]
    assert (step_runs.ALGORITHM.measure, step_runs.ALGORITHM.sided) == (MEASURE, SIDED)
    delta = np.abs(np.exp(then) - np.exp(engine))
    assert float(metrics["discrepancy/mean"]) == pytest.approx(delta.mean(), rel=1e-4)
    moved = 0.4 + step_runs.ALGORITHM.dual_learning_rate * (
        delta.mean() - step_runs.ALGORITHM.tolerance
    )
    assert float(state.dual.multiplier) == pytest.approx(moved, rel=1e-4)
    # The ratio starts where the sampling policy was, not where the step did.
    assert float(metrics["policy/ratio_max"]) > 1.5


@pytest.mark.parametrize("denominator", ["bypass", "rollout"])
def test_staleness_of_later_mini_batches_is_that_at_the_start_of_the_step(denominator):
    """The policy "now" is the one before the first of four updates, for the tokens of all four.

    The updates move the policy far.
    """
    rollout, _ = step_runs.make_rollout()
    then, now = (
        _by_hand(step_runs.make_params(seed), step_runs.MODEL, rollout) for seed in (OLDER, NOW)
    )
    engine = (then + np.random.default_rng(3).normal(0, 0.05, len(then))).astype(np.float32)
    settings = dataclasses.replace(step_runs.ALGORITHM, ratio_denominator=denominator)
    state, metrics = _lagged_step(
        step_runs.MODEL, _sampled(engine), mini_batches=4, settings=settings
    )
    after = _by_hand(jax.tree.map(np.asarray, state.params), step_runs.MODEL, rollout)
    assert np.abs(after - now).mean() > 0.05
    for name, values in {"staleness": now - then, "gap": now - engine}.items():
        found = [float(metrics[f"{name}/log_ratio_{each}"]) for each in ("mean", "abs_mean", "max")]
        expected = [values.mean(), np.abs(values).mean(), np.abs(values).max()]
        assert found == pytest.approx(expected, rel=2e-5, abs=2e-6), name


def test_lambda_stays_where_only_the_policy_moved():
    """An engine that equals the older weights has no discrepancy, to the last bit.

    lambda falls by eta c alone.
    """
    rollout, rewards = step_runs.make_rollout()
    compute = Compute(one_segment=True, logprob_chunk=11)
    batch = step_runs.packed_batch((rollout, rewards), 2, None, tokens=64)
    old = _old_program(step_runs.MODEL, compute, None)(step_runs.make_params(OLDER), batch)
    same = old._replace(
        rows=tuple(
            rows.with_columns(rollout_logprobs=rows.columns["old_logprobs"]) for rows in old.rows
        )
    )
    create, step, _ = step_runs.programs(step_runs.ALGORITHM, 2, None, compute, False)
    state, metrics, _ = step(create(jax.tree.map(jnp.copy, step_runs.make_params(NOW))), same, None)
    assert float(metrics["discrepancy/max"]) == 0 and float(metrics["mismatch/log_ratio_max"]) == 0
    assert float(metrics["staleness/log_ratio_abs_mean"]) > 1
    rate = step_runs.ALGORITHM.dual_learning_rate
    assert float(state.dual.multiplier) == pytest.approx(
        0.4 - rate * step_runs.ALGORITHM.tolerance, rel=1e-6
    )


def test_the_decoupled_objective_weighs_by_what_the_policy_moved():
    """AReaL's form in one update.

    -(pi_prox / pi_old) A on every token, whose clipped ratio is 1 and has its slope.
    """
    rollout, _ = step_runs.make_rollout()
    then, now = (
        _by_hand(step_runs.make_params(seed), step_runs.MODEL, rollout) for seed in (OLDER, NOW)
    )
    settings = dataclasses.replace(step_runs.ALGORITHM, method="grpo", ratio_denominator="proximal")
    sampled = _sampled(then)
    _, metrics = _lagged_step(step_runs.MODEL, sampled, mini_batches=1, settings=settings)
    rewards = sampled[1].astype(np.float64)
    lengths = [len(ids) for ids in rollout.completion_ids]
    groups = [rewards[rollout.group_ids == g] for g in rollout.group_ids]
    advantages = [
        0.0
        if np.ptp(group) == 0
        else (r - group.mean()) / (group.std(ddof=1) + settings.std_epsilon)
        for r, group in zip(rewards, groups, strict=True)
    ]
    moved = np.split(np.exp(now - then), np.cumsum(lengths)[:-1])
    loss = -np.mean(
        [advantage * weight.mean() for advantage, weight in zip(advantages, moved, strict=True)]
    )
    assert float(metrics["policy/loss"]) == pytest.approx(loss, rel=1e-4)
    assert float(metrics["policy/ratio_max"]) == float(metrics["policy/ratio_min"]) == 1.0
    assert float(metrics["policy/clip_high_fraction"]) == 0.0
