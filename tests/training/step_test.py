"""The compiled step against Algorithm 1 written out on padded arrays, and its invariances."""

import dataclasses
import functools
import math
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs.base import get_config
from dcmdp_jax.config.settings import from_config_dict
from dcmdp_jax.data.packing import pack
from dcmdp_jax.data.row_layout import make_row_shapes
from dcmdp_jax.models import decoder
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params
from dcmdp_jax.parallel.mesh import make_mesh, row_shards
from dcmdp_jax.training import step as step_module
from dcmdp_jax.training.row_logprobs import make_row_logprobs
from dcmdp_jax.training.state import (
    batch_shardings,
    initial_dual,
    make_optimizer,
    make_schedule,
    new_state,
    train_state_shardings,
)
from dcmdp_jax.training.step import make_rescore, make_train_step
from tests.engines.sampling import Rollout

MODEL = ModelConfig("qwen3", 31, 16, 32, 2, 2, 1, 8, tie_word_embeddings=True, initializer_range=0.3)
BASE = from_config_dict({**get_config().to_dict(), "task": {**get_config().task.to_dict(), "train": "x"}})
# A large epsilon makes the update proportional to the gradient: Adam's own division would hide a wrong scale.
OPTIMIZER = dataclasses.replace(BASE.optimizer, learning_rate=0.3, schedule="linear", epsilon=1.0, max_grad_norm=0.0)
ALGORITHM = dataclasses.replace(BASE.algorithm, tolerance=0.05, multiplier=0.4)
UPDATES = 100
TEMPERATURE = 0.8
GROUP, PROMPTS, LIMIT = 4, 4, 9
MAX_APART = 2.0  # nats
MEASURED = {"tolerance_steps": 2, "tolerance_quantile": 1.0, "tolerance_factor": 1.0, "tolerance": 0.05}


def _rollout(seed=0):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 31, rng.integers(2, 6)).astype(np.int32) for _ in range(PROMPTS)]
    n = PROMPTS * GROUP
    completions = [rng.integers(0, 31, rng.integers(1, LIMIT + 1)).astype(np.int32) for _ in range(n)]
    logprobs = [-rng.exponential(2.0, len(c)).astype(np.float32) for c in completions]
    finish = ["length" if i % 5 == 0 else "stop" for i in range(n)]
    groups = np.repeat(np.arange(PROMPTS), GROUP)
    rewards = rng.integers(0, 2, n).astype(np.float32)
    rewards[:GROUP] = 1.0  # one group without a signal
    return Rollout([prompts[g] for g in groups], completions, logprobs, finish, groups, 0), rewards


def _params(seed=1):
    return jax.jit(lambda key: init_params(MODEL, key))(jax.random.key(seed))


@pytest.fixture
def newer_code(monkeypatch):
    """Programs that XLA's newer code generator of fusions makes, as in all runs but the tests (see tests/conftest.py).
    With the older one a value can differ in the last bit between two programs that compute it."""
    if "xla_cpu_use_fusion_emitters" not in os.environ["XLA_FLAGS"]:
        return
    options = {**step_module.compiler_options("cpu"), "xla_cpu_use_fusion_emitters": True}
    monkeypatch.setattr(step_module, "compiler_options", lambda platform: options)
    monkeypatch.setitem(globals(), "_programs", functools.cache(_programs.__wrapped__))


@functools.cache
def _programs(settings, mini_batches, mesh, compute, exact):
    """The maker of a state from parameters, the step, and the rescoring of precision "exact"; compiled once."""
    del mini_batches  # a step serves one number, so that its cache is that of a run
    row_logprobs = make_row_logprobs(MODEL, compute, temperature=TEMPERATURE, mesh=mesh)
    schedule = make_schedule(OPTIMIZER, updates=UPDATES)
    transform = make_optimizer(OPTIMIZER, schedule)
    dual = initial_dual(settings)
    shardings = train_state_shardings(MODEL, transform, dual, "float32", mesh) if mesh else None
    step = make_train_step(
        row_logprobs=row_logprobs, compute_dtype=compute.dtype, settings=settings,
        max_completion_tokens=LIMIT, optimizer=transform, schedule=schedule, mesh=mesh,
        always_recompute=exact, shardings=shardings,
    )  # fmt: skip
    create = jax.jit(lambda p: new_state(p, transform, dual), out_shardings=shardings)
    return create, step, make_rescore(row_logprobs, mesh=mesh)


def _run(
    *, settings=ALGORITHM, mini_batches=2, row_lengths=(16,), tokens=64, segments=1, steps=1, mesh=None, compute=None,
    exact=False, rollout=None, dropped=None, ref_params=None, noise_floors=None,
):  # fmt: skip
    """`steps` steps on the same batch; the last state, every step's metrics, and the compiled step."""
    batch = _batch(
        rollout or _rollout(), mini_batches, mesh, tokens=tokens, row_lengths=row_lengths, segments=segments,
        mask_truncated=settings.mask_truncated, dropped=dropped,
    )  # fmt: skip
    compute = compute or Compute(one_segment=segments == 1, logprob_chunk=16)
    create, step, rescore = _programs(settings, mini_batches, mesh, compute, exact)
    state = create(jax.tree.map(jnp.copy, _params()))
    history = []
    for number in range(steps):
        used = rescore(state.params, batch)[0] if exact else batch
        if noise_floors:
            used = used._replace(noise_floor=np.float32(noise_floors[number]))
        # On a mesh all arguments are on the devices: a step moves nothing from or to the host by itself.
        with jax.transfer_guard("disallow" if mesh else "allow"):
            state, metrics = step(state, used, ref_params)
        history.append({k: np.asarray(v) for k, v in metrics.items()})
    return state, history, step


def _batch(sampled, mini_batches, mesh, *, tokens, row_lengths=(16,), segments=1, mask_truncated=False, dropped=None):
    """`sampled`, a rollout and its rewards, packed and on the devices."""
    n = PROMPTS * GROUP // mini_batches
    shards = row_shards(mesh) if mesh else 1
    plan = make_row_shapes(
        row_lengths=row_lengths, micro_batch_tokens=tokens, mini_batches=mini_batches, completions=n,
        segments_per_row=segments, row_shards=shards,
    )  # fmt: skip
    rollout, rewards = sampled
    batch, _ = pack(rollout.episodes, rewards, plan, mask_truncated=mask_truncated, dropped=dropped)
    return jax.device_put(batch, batch_shardings(mesh, buckets=len(batch.rows))) if mesh else batch


def _padded(rollout):
    """Prompt and completion of each row, right-padded, and where its completion starts and ends."""
    width = max(len(p) + len(c) for p, c in zip(rollout.prompt_ids, rollout.completion_ids, strict=True))
    ids = np.zeros((len(rollout.completion_ids), width), np.int32)
    spans = []
    for i, (prompt, completion) in enumerate(zip(rollout.prompt_ids, rollout.completion_ids, strict=True)):
        ids[i, : len(prompt) + len(completion)] = np.concatenate([prompt, completion])
        spans.append((len(prompt), len(prompt) + len(completion)))
    return ids, spans


@jax.jit
def _naive_logprobs(params, ids):
    """log pi of every token after the first, one completion a row, from all logits."""
    positions = jnp.tile(jnp.arange(ids.shape[1]), (len(ids), 1))
    hidden = decoder.hidden_states(params, MODEL, ids, positions, jnp.ones_like(ids), Compute())
    logprobs = jax.nn.log_softmax(hidden[:, :-1] @ decoder.output_kernel(params) / TEMPERATURE)
    return jnp.pad(jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0], ((0, 0), (1, 0)))


@jax.jit
def _pull_back(params, ids, slopes):
    """Gradient of the parameters from that of the log-probs [N, L]."""
    return jax.vjp(lambda p: _naive_logprobs(p, ids), params)[1](slopes)[0]


class Terms(NamedTuple):
    """Means over the mini-batches of the loss's terms, and the weights of the last two."""

    surrogate: float
    kl: float
    router: float
    kl_coefficient: float
    router_aux_loss: float


def _same_loss(metrics, terms):
    loss = terms.surrogate + terms.kl_coefficient * terms.kl + terms.router_aux_loss * terms.router
    # The loss holds lambda delta: a discrepancy of several nats has the rounding of its log-probs.
    size = max(1.0, float(metrics["discrepancy/mean"]))
    assert metrics["policy/loss"] == pytest.approx(loss, abs=3e-6 * size, rel=2e-6)
    apart = {"policy/kl": terms.kl} if terms.kl_coefficient else {}
    apart |= {"policy/router_loss": terms.router} if terms.router_aux_loss else {}
    apart |= {"policy/surrogate": terms.surrogate} if apart else {}
    assert {"policy/kl", "policy/router_loss", "policy/surrogate"} & set(metrics) == set(apart)
    for name, value in apart.items():
        assert metrics[name] == pytest.approx(value, abs=3e-6, rel=2e-5), name


def _algorithm_one(
    settings, mini_batches, params, rollout, rewards, multiplier, ref_params=None, corrected=False, router=None
):
    """Algorithm 1 in NumPy, a loop over completions; the loss's slopes in the log-probs and AdamW written out.

    With `corrected` tokens weigh as `CORRECTIONS` says (`corrected` may be another largest distance in nats), and the
    loss is divided by what is left. `router(params, members)` gives the load-balancing loss and its gradient."""
    n = len(rewards)
    ids, spans = _padded(rollout)
    table = np.asarray(_naive_logprobs(params, ids), np.float64)
    reference = None if ref_params is None else np.asarray(_naive_logprobs(ref_params, ids), np.float64)
    old = [table[i, a:b] for i, (a, b) in enumerate(spans)]
    [region] = settings.calls("trust_region")
    sizes = {"low": 0.2, "high": 0.24} | region.parameters
    delta = []
    for train, engine in zip(old, rollout.rollout_logprobs, strict=True):
        p, q = np.exp(train), np.exp(engine.astype(np.float64))
        d = {"diff": p - q, "ratio": p / q - 1, "log": np.log(p / q)}[settings.measure]
        d = np.abs(d) if settings.sided == "two" else np.maximum(d, 0)
        delta.append(np.minimum(d, settings.ratio_limit) if settings.measure == "ratio" else d)
    mean_delta = np.concatenate(delta).mean()
    used = [np.full_like(d, d.mean()) for d in delta] if settings.level == "sequence" else delta

    shaped = rewards.astype(np.float64)
    if settings.overlong_buffer:
        over = np.array([b - a for a, b in spans]) - (LIMIT - settings.overlong_buffer)
        shaped = shaped - settings.overlong_penalty * np.clip(over / settings.overlong_buffer, 0, 1)
    if settings.level == "reward":
        assert settings.method == "dc_grpo"
        shaped = shaped - multiplier * np.array([d.mean() for d in delta])
        used = [np.zeros_like(d) for d in delta]
    advantages = []
    for i in range(n):
        r = shaped[rollout.group_ids == rollout.group_ids[i]]
        std = r.std(ddof=settings.std_ddof)
        base = 0.0 if std == 0 else (shaped[i] - r.mean()) / (std + settings.std_epsilon)
        penalty = {
            "grpo": 0.0 * used[i],
            "dual_grpo": used[i],
            "threshold_grpo": np.where(used[i] > settings.tolerance, used[i], 0.0),
            "dc_grpo": multiplier * used[i],
        }[settings.method]
        advantages.append(base - penalty)

    def loss_and_slopes(now, members):
        """The mini-batch's surrogate, its divergence, and the loss's derivative in each log-prob."""
        total, weight, slopes = 0.0, 0.0, np.zeros(now.shape)
        kl_total, kl_weight, kl_slopes = 0.0, 0.0, np.zeros(now.shape)
        for i in members:
            if settings.mask_truncated and rollout.finish_reasons[i] == "length":
                continue
            if settings.drop_equal_groups and np.ptp(rewards[rollout.group_ids == rollout.group_ids[i]]) == 0:
                continue
            (a, b), advantage = spans[i], advantages[i]
            below = old[i] if settings.ratio_denominator == "train" else rollout.rollout_logprobs[i].astype(np.float64)
            ratio = np.exp(now[i, a:b] - below)
            if settings.ratio_level == "sequence":
                ratio = np.full(b - a, np.exp((now[i, a:b] - below).mean()))
            clipped = np.clip(ratio, 1 - sizes["low"], 1 + sizes["high"])
            token_losses = -np.minimum(ratio * advantage, clipped * advantage)
            slope = np.where(ratio * advantage <= clipped * advantage, -ratio * advantage, 0.0)
            if region.function == "dppo_tv":
                shift = np.exp(now[i, a:b]) - np.exp(below)
                stopped = np.where(advantage > 0, shift > sizes["high"], -shift > sizes["low"])
                token_losses = slope = np.where(stopped, 0.0, -ratio * advantage)
            if "dual" in sizes:
                capped = (advantage < 0) & (ratio > sizes["dual"])
                token_losses = np.where(capped, -sizes["dual"] * advantage, token_losses)
                slope = np.where(capped, 0.0, slope)
            keep, factor = np.ones(b - a, bool), 1.0
            if corrected:
                apart = old[i] - rollout.rollout_logprobs[i].astype(np.float64)
                limit = MAX_APART if corrected is True else corrected
                keep, factor = np.abs(apart) < limit, np.minimum(np.exp(apart), 2.0)
            planned, all_tokens, kept_tokens = {
                "seq_mean_token_mean": (1 / (b - a), 1, keep.mean()),
                "token_mean": (1, b - a, keep.sum()),
                "fixed_length": (1 / LIMIT, 1, 1),
            }[settings.aggregation]
            unit = kept_tokens if settings.correction_denominator == "kept" else all_tokens
            scale = planned * keep * factor
            total, weight = total + (scale * token_losses).sum(), weight + unit
            slopes[i, a:b] = scale * slope
            if settings.kl_coefficient:
                x = reference[i, a:b] - now[i, a:b]
                kl_total += (planned * (np.exp(x) - 1 - x)).sum()
                kl_slopes[i, a:b] = planned * (1 - np.exp(x))
                kl_weight += all_tokens
        slopes = slopes / (weight or 1) + settings.kl_coefficient * kl_slopes / (kl_weight or 1)
        return total / (weight or 1), kl_total / (kl_weight or 1), slopes

    leaves, tree = jax.tree.flatten(params)
    moments = [(np.zeros(x.shape), np.zeros(x.shape)) for x in leaves]
    b1, b2, losses, norms = OPTIMIZER.beta1, OPTIMIZER.beta2, [], []
    for m in range(mini_batches):
        members = tuple(range(m * n // mini_batches, (m + 1) * n // mini_batches))
        current = jax.tree.unflatten(tree, leaves)
        value, kl, slopes = loss_and_slopes(np.asarray(_naive_logprobs(current, ids), np.float64), members)
        grads = _pull_back(current, ids, jnp.asarray(slopes, jnp.float32))
        balance = 0.0
        if router:
            balance, balance_grads = router(current, members)
            grads = jax.tree.map(lambda g, b: g + settings.router_aux_loss * b, grads, balance_grads)
        losses.append((value, kl, balance))
        norms.append(np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(grads))))
        for k, g in enumerate(np.asarray(g, np.float64) for g in jax.tree.leaves(grads)):
            mu, nu = b1 * moments[k][0] + (1 - b1) * g, b2 * moments[k][1] + (1 - b2) * g * g
            moments[k] = mu, nu
            direction = mu / (1 - b1 ** (m + 1)) / (np.sqrt(nu / (1 - b2 ** (m + 1))) + OPTIMIZER.epsilon)
            rate = OPTIMIZER.learning_rate * (1 - m / UPDATES)
            leaves[k] = jnp.asarray(leaves[k] - rate * direction, jnp.float32)
    raised = multiplier + settings.dual_learning_rate * (mean_delta - settings.tolerance)
    bounded = np.clip(raised, settings.multiplier_min, settings.multiplier_max)
    terms = Terms(*np.mean(losses, axis=0), settings.kl_coefficient, settings.router_aux_loss)
    return jax.tree.unflatten(tree, leaves), terms, np.mean(norms), mean_delta, bounded


CORRECTIONS = f"tis(high=2),token_k1(high={MAX_APART})"
"""Drop tokens that the engines see far apart, weigh the others by min(p / q, 2)."""


def _close(a, b, tolerance=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=2e-4), a, b)


@pytest.mark.parametrize(
    ("mini_batches", "changes"),
    [
        (1, {}),
        (2, {}),
        (1, {"method": "grpo"}),
        (2, {"method": "dual_grpo", "level": "sequence"}),
        (1, {"method": "threshold_grpo", "aggregation": "token_mean", "measure": "log"}),
        (2, {"measure": "ratio", "sided": "one", "aggregation": "fixed_length", "std_ddof": 0}),
        (1, {"mask_truncated": True, "kl_coefficient": 0.5, "level": "sequence"}),
        # With groups dropped the first mini-batch has nothing in the loss.
        (
            2,
            {
                "ratio_denominator": "rollout",
                "trust_region": "dppo_tv(low=0.2,high=0.24)",
                "overlong_buffer": 5,
                "drop_equal_groups": True,
            },
        ),
        (1, {"level": "reward", "multiplier": 0.9}),
        (2, {"level": "reward", "sided": "one", "overlong_buffer": 5}),
        pytest.param(2, {"method": "dual_grpo", "measure": "log"}, marks=pytest.mark.long),
        (2, {"ratio_level": "sequence", "trust_region": "clip(low=0.01,high=0,dual=1.01)"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) or "paper" if isinstance(value, dict) else str(value),
)
def test_step_is_algorithm_one(mini_batches, changes):
    settings = dataclasses.replace(ALGORITHM, **changes)
    rollout, rewards = _rollout()
    reference = _params(seed=5) if settings.kl_coefficient else None
    expected, terms, norm, mean_delta, multiplier = _algorithm_one(
        settings, mini_batches, _params(), rollout, rewards, settings.multiplier, reference
    )
    rows = (8, 16) if mini_batches == 2 else (16,)
    state, history, _ = _run(settings=settings, mini_batches=mini_batches, row_lengths=rows, ref_params=reference)
    _close(state.params, expected)
    _same_loss(history[0], terms)
    assert history[0]["optimizer/grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert history[0]["discrepancy/mean"] == pytest.approx(mean_delta, rel=1e-5)
    assert history[0]["optimizer/learning_rate"] == pytest.approx(0.3 * (1 - (mini_batches - 1) / UPDATES))
    if settings.method == "dc_grpo":
        # The step used the old multiplier, and reports it; the new one waits for the next step.
        assert history[0]["dual/multiplier"] == np.float32(settings.multiplier)
        assert state.dual.multiplier == pytest.approx(multiplier, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "reward"])
def test_charge_in_the_update_and_displacement_of_a_step_by_hand(level):
    settings = dataclasses.replace(ALGORITHM, level=level)
    rollout, rewards = _rollout()
    ids, spans = _padded(rollout)
    table = np.asarray(_naive_logprobs(_params(), ids), np.float64)
    train = [table[i, a:b] for i, (a, b) in enumerate(spans)]
    engine = [x.astype(np.float64) for x in rollout.rollout_logprobs]
    delta = [np.abs(np.exp(x) - np.exp(y)) for x, y in zip(train, engine, strict=True)]

    def relative(values):
        groups = [values[rollout.group_ids == g] for g in rollout.group_ids]
        pairs = zip(values, groups, strict=True)
        return [0.0 if np.ptp(g) == 0 else (r - g.mean()) / (g.std(ddof=1) + settings.std_epsilon) for r, g in pairs]

    lam, plain = settings.multiplier, relative(rewards.astype(np.float64))
    charged = relative(rewards - lam * np.array([each.mean() for each in delta]))
    charge = sum_of_plain = 0.0
    for i, x in enumerate(train):
        moved = lam * delta[i] if level == "token" else abs(charged[i] - plain[i])
        charge += np.mean(moved * (1 - np.exp(x)))
        sum_of_plain += np.mean(abs(plain[i]) * (1 - np.exp(x)))
    _, history, _ = _run(settings=settings, mini_batches=1, row_lengths=(8, 16))
    assert history[0]["dual/charge_share"] == pytest.approx(charge / (charge + sum_of_plain), rel=1e-4)
    x, y = np.concatenate(train), np.concatenate(engine)
    eps = x - np.log1p(-np.exp(x)) - (y - np.log1p(-np.exp(y)))
    expected = {"mean": eps.mean(), "abs_mean": np.abs(eps).mean()}
    expected |= {f"abs_p{q}": np.percentile(np.abs(eps), q) for q in (50, 95, 99)}
    found = {name: float(history[0][f"displacement/{name}"]) for name in expected}
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("mini_batches", "aggregation", "mesh"),
    [
        (1, "seq_mean_token_mean", None),
        (2, "token_mean", (2, 1, 1)),
        pytest.param(2, "token_mean", None, marks=pytest.mark.long),
        pytest.param(2, "fixed_length", (2, 1, 1), marks=pytest.mark.long),
    ],
)
def test_correction_drops_tokens_and_the_loss_is_divided_by_the_rest(mini_batches, aggregation, mesh):
    settings = dataclasses.replace(ALGORITHM, aggregation=aggregation, corrections=CORRECTIONS)
    rollout, rewards = _rollout()
    old = np.asarray(_naive_logprobs(_params(), _padded(rollout)[0]))
    apart = np.concatenate([
        old[i, a:b] - rollout.rollout_logprobs[i] for i, (a, b) in enumerate(_padded(rollout)[1])
    ])  # fmt: skip
    assert 0.2 < np.mean(np.abs(apart) >= MAX_APART) < 0.8
    assert np.abs(np.abs(apart) - MAX_APART).min() > 1e-4  # no token is dropped by rounding
    expected, terms, norm, mean_delta, _ = _algorithm_one(
        settings, mini_batches, _params(), rollout, rewards, settings.multiplier, corrected=True
    )
    mesh = make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)]) if mesh else None
    state, history, _ = _run(settings=settings, mini_batches=mini_batches, mesh=mesh)
    _close(state.params, expected)
    _same_loss(history[0], terms)
    assert history[0]["optimizer/grad_norm"] == pytest.approx(norm, rel=2e-5)
    # The constraint counts every token.
    assert history[0]["discrepancy/mean"] == pytest.approx(mean_delta, rel=1e-5)
    if mesh is None:
        weights = np.where(np.abs(apart) < MAX_APART, np.minimum(np.exp(apart), 2.0), 0.0)
        of_kept = weights[weights > 0]
        for name, value in {
            "dropped_fraction": np.mean(weights == 0),
            "truncated_fraction": np.sum(of_kept == 2.0) / len(apart),
            "weight_mean": weights.mean(),
            "effective_sample_size": weights.sum() ** 2 / (len(apart) * (weights**2).sum()),
        }.items():
            assert history[0][f"correction/{name}"] == pytest.approx(value, rel=1e-5), name
        assert "correction/weight_square_mean" not in history[0]


def test_layouts_and_micro_batches_agree():
    expected, history, _ = _run(row_lengths=(16,), tokens=10_000)
    several = Compute(logprob_chunk=5)
    for options in (
        {"row_lengths": (8, 16), "tokens": 24},
        {"row_lengths": (32,), "segments": 8, "tokens": 32, "compute": several},
        {"row_lengths": (16,), "compute": Compute(remat="full", scan_unroll=2)},
        {"row_lengths": (8, 16), "tokens": 64, "compute": Compute(remat="dots", one_segment=True)},
    ):
        state, other, _ = _run(**options)
        _close(state.params, expected.params, 5e-6)
        for name in ("discrepancy/mean", "discrepancy/p99", "mismatch/pearson", "policy/entropy", "policy/ratio_max"):
            assert other[0][name] == pytest.approx(history[0][name], rel=2e-5), name
        np.testing.assert_allclose(
            other[0]["completions/discrepancy"], history[0]["completions/discrepancy"], rtol=2e-4, atol=1e-6
        )


# Metrics made from rewards, counts and settings alone: the same numbers on every mesh.
_EXACT = ("reward/", "optimizer/learning_rate", "optimizer/skipped", "dual/tolerance", "policy/clip_")


def _same_metrics(metrics, expected):
    """Every metric of a step on a mesh against one device. All others than the exact ones come from log-probs, sums of
    a few dozen float32 products that a mesh adds in another order: 1e-4 of the value, or 2e-6 where terms cancel."""
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        rtol, atol = (1e-6, 0) if name.startswith(_EXACT) else (1e-4, 2e-6)
        np.testing.assert_allclose(metrics[name], value, rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "mini_batches"),
    [
        ((8, 1, 1), 1), ((2, 1, 1), 2), ((4, 1, 1), 1), ((2, 2, 2), 1), ((1, 4, 2), 1), ((1, 8, 1), 1), ((1, 1, 8), 1),
    ],
)  # fmt: skip
def test_several_devices_equal_one(shape, mini_batches):
    mesh = make_mesh(*shape, devices=jax.devices()[: math.prod(shape)])
    expected, one, _ = _run(mini_batches=mini_batches, steps=2)
    state, eight, step = _run(mini_batches=mini_batches, steps=2, mesh=mesh)
    _close(state.params, expected.params, 1e-5)
    # The second step's policy has moved within it and since: its ratios, clips and dual state are no longer 1 and 0.4.
    for metrics, wanted in zip(eight, one, strict=True):
        _same_metrics(metrics, wanted)
        assert metrics["policy/ratio_min"] <= metrics["policy/ratio_mean"] <= metrics["policy/ratio_max"]
    assert step._cache_size() == 1
    # What lambda moved by: the step's discrepancy, less the tolerance.
    assert one[1]["dual/violation"] == pytest.approx(one[1]["discrepancy/mean"] - 0.05, rel=1e-5)


@pytest.mark.long
def test_remedies_over_whole_completions_are_the_same_on_a_mesh():
    mesh = make_mesh(2, 2, 2, devices=jax.devices()[:8])
    settings = dataclasses.replace(
        ALGORITHM, corrections="sequence_tis(high=3),mean_k3(high=2),off_policy_mask(high=1.5)", ratio_level="sequence",
        correction_denominator="all",
    )  # fmt: skip
    expected, one, _ = _run(settings=settings, steps=2)
    state, eight, _ = _run(settings=settings, steps=2, mesh=mesh)
    _close(state.params, expected.params, 1e-5)
    for metrics, wanted in zip(eight, one, strict=True):
        _same_metrics(metrics, wanted)
    assert 0.05 < one[0]["correction/dropped_fraction"] < 0.95 and one[0]["correction/truncated_fraction"] > 0


def test_a_users_remedies_and_their_statistics_are_the_same_on_a_mesh_and_in_one_micro_batch():
    mesh = make_mesh(2, 1, 1, devices=jax.devices()[:2])
    settings = dataclasses.replace(
        ALGORITHM, method="examples/remedies.py:huber(knee=0.2)", loss="examples/remedies.py:prime_rl(kl_tau=0.1)",
        ratio_denominator="rollout",
    )  # fmt: skip
    expected, one, _ = _run(settings=settings)
    assert 0.05 < one[0]["remedy/huber/above_knee"] < 0.95 and 0.05 < one[0]["remedy/prime_rl/masked"] < 0.95
    for options in ({"mesh": mesh}, {"tokens": 10_000}):
        state, other, _ = _run(settings=settings, **options)
        _close(state.params, expected.params, 1e-5)
        _same_metrics(other[0], one[0])


@pytest.mark.long
def test_a_charge_inside_the_reward_is_the_same_on_a_mesh():
    mesh = make_mesh(2, 2, 2, devices=jax.devices()[:8])
    settings = dataclasses.replace(ALGORITHM, level="reward")
    expected, one, _ = _run(settings=settings, steps=2)
    state, eight, _ = _run(settings=settings, steps=2, mesh=mesh)
    _close(state.params, expected.params, 1e-5)
    for metrics, wanted in zip(eight, one, strict=True):
        _same_metrics(metrics, wanted)


def test_bypass_is_the_rollout_denominator_without_the_pass_for_the_old_weights():
    # GRPO does not look at p^Train: the same policy, another measured discrepancy once the weights have moved.
    settings = dataclasses.replace(ALGORITHM, method="grpo", ratio_denominator="rollout")
    expected, recomputed, _ = _run(settings=settings, mini_batches=4)
    state, bypassed, _ = _run(settings=dataclasses.replace(settings, ratio_denominator="bypass"), mini_batches=4)
    _close(state.params, expected.params, 1e-6)
    assert bypassed[0]["discrepancy/mean"] != recomputed[0]["discrepancy/mean"]
    assert bypassed[0]["policy/ratio_max"] == pytest.approx(recomputed[0]["policy/ratio_max"], rel=1e-5)


def test_devices_with_rows_of_their_own_stay_alike_to_the_last_bit():
    # Every device makes the update by itself: what they sum has to be the same number on each.
    mesh = make_mesh(4, devices=jax.devices()[:4])
    state, _, _ = _run(mini_batches=2, steps=3, mesh=mesh)
    for leaf in jax.tree.leaves(state):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert len(others) == 3
        for other in others:
            np.testing.assert_array_equal(first, other)


def _exchanges(program, loops=0):
    """Number of loops around each exchange between devices."""
    for equation in program.eqns:
        if equation.primitive.name in ("psum", "pmax", "pmin", "all_gather"):
            yield loops
        inside = loops + (equation.primitive.name in ("while", "scan"))
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from _exchanges(getattr(inner, "jaxpr", inner), inside)


def test_devices_exchange_once_in_an_update():
    # 16 rows of 16 tokens are two updates of two micro-batches each of 4 rows, two a device. The one loop is that of
    # updates: within that of micro-batches, gradients would travel for each.
    mesh = make_mesh(2, devices=jax.devices()[:2])
    batch = _batch(_rollout(), 2, mesh, tokens=32)
    assert batch.rows[0].input_ids.shape == (2, 2, 4, 16)
    create, step, _ = _programs(ALGORITHM, 2, mesh, Compute(one_segment=True, logprob_chunk=16), False)
    program = step.trace(create(_params()), batch, None).jaxpr
    assert set(_exchanges(program.jaxpr)) == {1}


def test_gradients_are_summed_in_float32_and_in_parts(newer_code):
    """Parameters over eight devices: the loop over micro-batches carries each device's eighth of a gradient."""
    mesh = make_mesh(1, 8, 1, devices=jax.devices()[:8])
    create, step, _ = _programs(ALGORITHM, 1, mesh, Compute(one_segment=True, logprob_chunk=16), False)
    batch = _batch(_rollout(), 1, mesh, tokens=16)
    assert batch.rows[0].input_ids.shape[1] == 2  # micro-batches, of a row on each device
    text = step.lower(create(_params()), batch, None).compile().as_text()
    # Embedding and W_gate of two layers: [31, 16] and [2, 16, 32] over the hidden size.
    [loop] = [line for line in text.splitlines() if " while(" in line and "f32[31,2]" in line]
    carried = loop.split(" while(")[0]
    assert "f32[2,2,32]" in carried and "f32[2,16,32]" not in carried


@pytest.mark.parametrize(
    ("mini_batches", "devices"),
    [*(pytest.param(*both, marks=pytest.mark.long) for both in ((1, 1), (2, 1), (1, 2))), (2, 2)],
)
def test_exact_has_no_discrepancy_to_the_last_bit(newer_code, mini_batches, devices):
    mesh = make_mesh(devices, devices=jax.devices()[:devices]) if devices > 1 else None
    state, history, step = _run(exact=True, mini_batches=mini_batches, row_lengths=(8, 16), steps=3, mesh=mesh)
    for metrics in history:
        assert metrics["discrepancy/max"] == 0.0
        assert metrics["discrepancy/mean"] == 0.0
        assert metrics["mismatch/k3"] == 0.0
    # No violation ever: lambda falls by eta c = 0.05 a step from 0.4.
    assert state.dual.multiplier == pytest.approx(0.4 - 3 * 0.05, abs=1e-6)
    assert step._cache_size() == 1


@pytest.mark.parametrize("level", ["token", pytest.param("reward", marks=pytest.mark.long)])
def test_multiplier_zero_is_grpo_bit_for_bit(newer_code, level):
    frozen = dataclasses.replace(ALGORITHM, multiplier=0.0, multiplier_max=0.0, level=level)
    ours, _, _ = _run(settings=frozen, steps=2)
    grpo, _, _ = _run(settings=dataclasses.replace(ALGORITHM, method="grpo"), steps=2)
    jax.tree.map(np.testing.assert_array_equal, ours.params, grpo.params)


def test_measured_tolerance_serves_the_steps_after_it():
    settings = dataclasses.replace(ALGORITHM, **MEASURED)
    state, history, _ = _run(settings=settings, steps=4, mini_batches=1)
    first, second, third, _ = (metrics["discrepancy/mean"] for metrics in history)
    measured = max(first, second)
    assert [float(m["dual/tolerance"]) for m in history] == [np.float32(0.05)] * 2 + [measured] * 2
    assert [float(m["dual/multiplier"]) for m in history[:3]] == [np.float32(0.4)] * 3
    assert history[3]["dual/multiplier"] == pytest.approx(max(0.4 + third - measured, 0), rel=1e-5)
    assert history[2]["dual/violation"] == pytest.approx(third - measured, abs=1e-7)
    assert state.dual.window.shape == (3,)


def test_measured_tolerance_is_not_below_the_noise_floor():
    """A floor above the mean counts in its place, one below does not, and one after the first steps has no effect."""
    settings = dataclasses.replace(ALGORITHM, **MEASURED)
    _, history, _ = _run(settings=settings, steps=3, mini_batches=1, noise_floors=(0.0, 1e-6, 9.0))
    measured = max(float(metrics["discrepancy/mean"]) for metrics in history[:2])
    assert history[2]["dual/tolerance"] == np.float32(measured)
    _, history, _ = _run(settings=settings, steps=4, mini_batches=1, noise_floors=(measured + 0.1, 0.0, 9.0, 9.0))
    assert history[2]["dual/tolerance"] == history[3]["dual/tolerance"] == np.float32(measured + 0.1)


_LOSSES = (("kept", "seq_mean_token_mean", MAX_APART), ("all", "token_mean", MAX_APART), ("kept", "token_mean", 1e-6))


@pytest.mark.parametrize(
    ("denominator", "aggregation", "limit"),
    [pytest.param(*loss, marks=pytest.mark.long if place else ()) for place, loss in enumerate(_LOSSES)],
)
def test_corrections_leave_the_divergence_as_it_is(denominator, aggregation, limit):
    """Some tokens dropped, or all: the divergence keeps its tokens, its weights and its denominator."""
    settings = dataclasses.replace(
        ALGORITHM, corrections=f"tis(high=2),token_k1(high={limit})", correction_denominator=denominator,
        kl_coefficient=0.3, aggregation=aggregation,
    )  # fmt: skip
    rollout, rewards = _rollout()
    reference = _params(seed=5)
    expected, terms, norm, _, _ = _algorithm_one(
        settings, 2, _params(), rollout, rewards, settings.multiplier, reference, corrected=limit
    )
    state, history, _ = _run(settings=settings, ref_params=reference)
    _close(state.params, expected)
    _same_loss(history[0], terms)
    assert history[0]["optimizer/grad_norm"] == pytest.approx(norm, rel=2e-5, abs=1e-7)
    assert terms.kl > 0


def test_update_that_is_not_finite_is_skipped_and_counted():
    rollout, rewards = _rollout()
    _, sound, _ = _run(rollout=(rollout, rewards))
    # Completion 0 is in the first of two mini-batches: its NaN makes that gradient NaN, the second is sound.
    rollout.rollout_logprobs[0][0] = np.nan
    state, history, _ = _run(rollout=(rollout, rewards))
    assert history[0]["optimizer/skipped_updates"] == 1
    assert state.skipped_in_row == 0
    # The loss is that of the update which was made, the second mini-batch under the first parameters.
    half = len(rewards) // 2
    parts = {name: value[half:] for name, value in vars(rollout).items() if isinstance(value, list | np.ndarray)}
    second = dataclasses.replace(rollout, **parts)
    _, terms, norm, _, _ = _algorithm_one(ALGORITHM, 1, _params(), second, rewards[half:], ALGORITHM.multiplier)
    _same_loss(history[0], terms)
    assert history[0]["optimizer/grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert history[0]["policy/loss"] != pytest.approx(sound[0]["policy/loss"], rel=1e-3)
    # The one update that was made is the optimizer's first, at the schedule's first rate.
    assert history[0]["optimizer/learning_rate"] == pytest.approx(0.3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    adam = state.opt_state[0]
    assert isinstance(adam, optax.ScaleByAdamState) and adam.count == 1
    # The mean discrepancy is NaN too: the multiplier keeps its value and history.
    assert state.dual.multiplier == np.float32(0.4) and state.dual.filled == 0

    rollout.rollout_logprobs[-1][0] = np.nan
    state, history, _ = _run(rollout=(rollout, rewards), steps=2)
    assert state.skipped_in_row == 4
    jax.tree.map(np.testing.assert_array_equal, state.params, _params())


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean"])
def test_nan_advantage_beyond_the_clamp_skips_the_update(aggregation):
    # Its tokens are further than 20 nats from the engine: the ratio is held, their gradient 0, and the norm finite.
    rollout, rewards = _rollout()
    for logprobs in rollout.rollout_logprobs[GROUP : 2 * GROUP]:
        logprobs[:] = -60.0
    rewards[GROUP] = np.nan
    settings = dataclasses.replace(ALGORITHM, ratio_denominator="rollout", aggregation=aggregation)
    state, history, _ = _run(settings=settings, rollout=(rollout, rewards), mini_batches=1)
    assert history[0]["optimizer/skipped_updates"] == 1 and state.skipped_in_row == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, _params())
    # Of two mini-batches the sound one is made, and its loss alone is recorded.
    state, history, _ = _run(settings=settings, rollout=(rollout, rewards), mini_batches=2)
    assert history[0]["optimizer/skipped_updates"] == 1 and state.skipped_in_row == 0
    assert np.isfinite(history[0]["policy/loss"]) and history[0]["policy/loss"] != 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_mini_batch_without_completions_still_moves_parameters_by_momentum():
    # The second of two mini-batches is all truncated and left out of the loss: gradient 0. Adam then has
    # mu = 0.9 m1, nu = 0.95 n1 and count 2, so the update is -lr (0.9 m1 / (1 - 0.9^2)) / (sqrt(...) + 1), not 0.
    rollout, rewards = _rollout()
    finish = ["stop"] * len(rewards)
    finish[len(rewards) // 2 :] = ["length"] * (len(rewards) // 2)
    settings = dataclasses.replace(ALGORITHM, mask_truncated=True)
    batch = (dataclasses.replace(rollout, finish_reasons=finish), rewards)
    state, history, _ = _run(settings=settings, rollout=batch)
    assert history[0]["optimizer/skipped_updates"] == 0 and state.opt_state[0].count == 2

    b1, b2, eps = OPTIMIZER.beta1, OPTIMIZER.beta2, OPTIMIZER.epsilon
    adam = state.opt_state[0]
    # Undo the second update's decay of the moments: m1 = mu / b1 = (1 - b1) g, n1 = nu / b2 = (1 - b2) g^2.
    expected = jax.tree.map(
        lambda p, mu, nu: p
        - 0.3 * (mu / b1 / (1 - b1)) / (np.sqrt(nu / b2 / (1 - b2)) + eps)
        - 0.3 * (1 - 1 / UPDATES) * (mu / (1 - b1**2)) / (np.sqrt(nu / (1 - b2**2)) + eps),
        _params(), adam.mu, adam.nu,
    )  # fmt: skip
    _close(state.params, expected)
    # The truncated half still enters the mean discrepancy: the value is that of the whole batch.
    _, whole, _ = _run(rollout=(rollout, rewards))
    assert history[0]["discrepancy/mean"] == pytest.approx(whole[0]["discrepancy/mean"], rel=1e-6)


def test_dropped_completion_leaves_no_trace():
    rollout, rewards = _rollout()
    dropped = np.zeros(len(rewards), bool)
    dropped[6] = True
    # A whole group too.
    dropped[8:12] = True
    expected, _, _ = _run(rollout=(rollout, rewards), dropped=dropped, row_lengths=(16,))
    rewards = rewards.copy()
    for i in np.flatnonzero(dropped):
        rollout.rollout_logprobs[i][:] = np.nan
        rewards[i] = 1e9
    state, history, _ = _run(rollout=(rollout, rewards), dropped=dropped)
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    assert history[0]["reward/mean"] < 1
