"""A small model, a rollout by hand, the compiled step on them, and Algorithm 1 written out on
padded arrays.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.base import get_config
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.data.packing import pack
from dcmdp_jax.data.row_layout import make_row_shapes
from dcmdp_jax.models import decoder
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params, param_shapes
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.parallel.mesh import row_shards
from dcmdp_jax.parallel.sharding import batch_shardings
from dcmdp_jax.training.optimizer import make_optimizer, make_schedule
from dcmdp_jax.training.rescore import make_rescore
from dcmdp_jax.training.state import initial_dual, new_state, train_state_shardings
from dcmdp_jax.training.step import StepSetup, jit_step, train_step
from dcmdp_jax.types import Rows
from tests.support.sampling import Rollout

MODEL = ModelConfig(
    "qwen3", 31, 16, 32, 2, 2, 1, 8, tie_word_embeddings=True, initializer_range=0.3
)

BASE = from_config_dict(
    {**get_config().to_dict(), "task": {**get_config().task.to_dict(), "train": "x"}}
)

# A large epsilon makes the update proportional to the gradient: Adam's own division would hide a
# wrong scale.
OPTIMIZER = dataclasses.replace(
    BASE.optimizer, learning_rate=0.3, schedule="linear", epsilon=1.0, max_grad_norm=0.0
)

ALGORITHM = dataclasses.replace(BASE.algorithm, tolerance=0.05, multiplier=0.4, multiplier_max=1.0)

PROMPT = 5
LENGTH = 24
UPDATES = 100

TEMPERATURE = 0.8

GROUP = 4
PROMPTS = 4
LIMIT = 9

MAX_APART = 2.0  # nats


def make_rollout(seed=0):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 31, rng.integers(2, 6)).astype(np.int32) for _ in range(PROMPTS)]
    n = PROMPTS * GROUP
    completions = [
        rng.integers(0, 31, rng.integers(1, LIMIT + 1)).astype(np.int32) for _ in range(n)
    ]
    logprobs = [-rng.exponential(2.0, len(c)).astype(np.float32) for c in completions]
    finish = ["length" if i % 5 == 0 else "stop" for i in range(n)]
    groups = np.repeat(np.arange(PROMPTS), GROUP)
    rewards = rng.integers(0, 2, n).astype(np.float32)
    rewards[:GROUP] = 1.0  # one group without a signal
    return Rollout([prompts[g] for g in groups], completions, logprobs, finish, groups, 0), rewards


def make_params(seed=1):
    return _initializer(MODEL)(jax.random.key(seed))


@functools.cache
def _initializer(model):
    return jax.jit(functools.partial(init_params, model))


@functools.cache
def programs(settings, mini_batches, mesh, compute, exact, **options):
    """The maker of a state from parameters, the step, and the rescoring of precision "exact";
    compiled once.
    """
    del mini_batches  # a step serves one number, so that its cache is that of a run
    options = {
        "temperature": TEMPERATURE,
        "mesh": mesh,
        "top_gradient": settings.differentiates_head,
        **options,
    }
    row_logprobs = make_row_logprobs(MODEL, compute, **options)
    schedule = make_schedule(OPTIMIZER, updates=UPDATES)
    transform = make_optimizer(OPTIMIZER, schedule)
    dual = initial_dual(settings)

    def fresh(params):
        return new_state(params, transform, dual)

    shardings = (
        train_state_shardings(jax.eval_shape(fresh, param_shapes(MODEL)), MODEL, mesh)
        if mesh
        else None
    )
    model = dict(
        row_logprobs=row_logprobs,
        compute_dtype=compute.dtype,
        max_completion_tokens=LIMIT,
        mesh=mesh,
    )
    update = dict(settings=settings, optimizer=transform, schedule=schedule, always_recompute=exact)
    parts = StepSetup(**model, **update)
    step = jit_step(train_step, parts, shardings)
    return jax.jit(fresh, out_shardings=shardings), step, make_rescore(row_logprobs, mesh=mesh)


def run_steps(
    *,
    settings=ALGORITHM,
    steps=1,
    mesh=None,
    compute=None,
    exact=False,
    rollout=None,
    ref_params=None,
    options=(),
    **packing,
):
    """`steps` steps on the same batch; the last state, every step's metrics, and the compiled
    step.
    """
    packing = {
        "mini_batches": 2,
        "tokens": 64,
        "mask_truncated": settings.mask_truncated,
        **packing,
    }
    batch = packed_batch(rollout or make_rollout(), mesh=mesh, **packing)
    compute = compute or Compute(one_segment=packing.get("segments", 1) == 1, logprob_chunk=16)
    create, step, rescore = programs(
        settings, packing["mini_batches"], mesh, compute, exact, **dict(options)
    )
    state = create(jax.tree.map(jnp.copy, make_params()))
    history = []
    for _ in range(steps):
        used = rescore(state.params, batch)[0] if exact else batch
        # On a mesh all arguments are on the devices: a step moves nothing from or to the host by
        # itself.
        with jax.transfer_guard("disallow" if mesh else "allow"):
            state, metrics, recorded = step(state, used, ref_params)
        assert all(value.shape == () for value in metrics.values())
        assert recorded.train_logprobs is None  # nobody asked for the tokens
        metrics["completions/discrepancy"] = recorded.discrepancy
        history.append({k: np.asarray(v) for k, v in metrics.items()})
    return state, history, step


def packed_batch(
    sampled,
    mini_batches,
    mesh,
    *,
    tokens,
    row_lengths=(16,),
    segments=1,
    mask_truncated=False,
    dropped=None,
):
    """`sampled`, a rollout and its rewards, packed and on the devices."""
    n = PROMPTS * GROUP // mini_batches
    shards = row_shards(mesh) if mesh else 1
    plan = make_row_shapes(
        row_lengths=row_lengths,
        micro_batch_tokens=tokens,
        mini_batches=mini_batches,
        completions=n,
        segments_per_row=segments,
        row_shards=shards,
    )
    rollout, rewards = sampled
    batch, _ = pack(rollout.episodes, rewards, plan, mask_truncated=mask_truncated, dropped=dropped)
    return jax.device_put(batch, batch_shardings(mesh)) if mesh else batch


def padded(rollout):
    """Prompt and completion of each row, right-padded, and where its completion starts and ends."""
    width = max(
        len(p) + len(c) for p, c in zip(rollout.prompt_ids, rollout.completion_ids, strict=True)
    )
    ids = np.zeros((len(rollout.completion_ids), width), np.int32)
    spans = []
    for i, (prompt, completion) in enumerate(
        zip(rollout.prompt_ids, rollout.completion_ids, strict=True)
    ):
        ids[i, : len(prompt) + len(completion)] = np.concatenate([prompt, completion])
        spans.append((len(prompt), len(prompt) + len(completion)))
    return ids, spans


@jax.jit
def naive_logprobs(params, ids):
    """log pi of every token after the first, one completion a row, from all logits."""
    hidden = decoder.hidden_states(params, MODEL, decoder.unpacked_inputs(ids), Compute())
    logprobs = jax.nn.log_softmax(hidden[:, :-1] @ decoder.output_kernel(params) / TEMPERATURE)
    return jnp.pad(
        jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0], ((0, 0), (1, 0))
    )


@jax.jit
def _pull_back(params, ids, slopes):
    """Gradient of the parameters from that of the log-probs [N, L]."""
    return jax.vjp(lambda p: naive_logprobs(p, ids), params)[1](slopes)[0]


class Terms(NamedTuple):
    """Means over the mini-batches of the loss's terms, and the weights of the last two."""

    surrogate: float
    kl: float
    router: float
    kl_coefficient: float
    router_aux_loss: float


def same_loss(metrics, terms):
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


def algorithm_one(
    settings,
    mini_batches,
    params,
    rollout,
    rewards,
    multiplier,
    ref_params=None,
    corrected=False,
    router=None,
):
    """Algorithm 1 in NumPy, a loop over completions; the loss's slopes in the log-probs and AdamW
    written out.

    With `corrected` tokens weigh as `CORRECTIONS` says (`corrected` may be another largest distance
    in nats), and the loss is divided by what is left. `router(params, members)` gives the
    load-balancing loss and its gradient.
    """
    n = len(rewards)
    ids, spans = padded(rollout)
    table = np.asarray(naive_logprobs(params, ids), np.float64)
    reference = (
        None if ref_params is None else np.asarray(naive_logprobs(ref_params, ids), np.float64)
    )
    old = [table[i, a:b] for i, (a, b) in enumerate(spans)]
    [region] = settings.calls("trust_region")
    sizes = {"low": 0.2, "high": 0.24} | region.parameters
    delta = []
    for train, engine in zip(old, rollout.rollout_logprobs, strict=True):
        p = np.exp(train)
        q = np.exp(engine.astype(np.float64))
        d = {"diff": p - q, "ratio": p / q - 1, "log": np.log(p / q)}[settings.measure]
        d = np.abs(d) if settings.sided == "two" else np.maximum(d, 0)
        delta.append(np.minimum(d, 10.0) if settings.measure == "ratio" else d)
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
        std = r.std(ddof=1)
        scale = std + settings.std_epsilon if settings.normalize_std else 1.0
        base = 0.0 if std == 0 else (shaped[i] - r.mean()) / scale
        penalty = {
            "grpo": 0.0 * used[i],
            "dual_grpo": used[i],
            "threshold_grpo": np.where(used[i] > settings.tolerance, used[i], 0.0),
            "dc_grpo": multiplier * used[i],
        }[settings.method]
        advantages.append(base - penalty)

    def loss_and_slopes(now, members):
        """The mini-batch's surrogate, its divergence, and the loss's derivative in each
        log-prob.
        """
        total = 0.0
        weight = 0.0
        slopes = np.zeros(now.shape)
        kl_total = 0.0
        kl_weight = 0.0
        kl_slopes = np.zeros(now.shape)
        for i in members:
            if settings.mask_truncated and rollout.finish_reasons[i] == "length":
                continue
            if (
                settings.drop_equal_groups
                and np.ptp(rewards[rollout.group_ids == rollout.group_ids[i]]) == 0
            ):
                continue
            (a, b), advantage = spans[i], advantages[i]
            below = (
                old[i]
                if settings.ratio_denominator == "train"
                else rollout.rollout_logprobs[i].astype(np.float64)
            )
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
            keep = np.ones(b - a, bool)
            factor = 1.0
            if corrected:
                apart = old[i] - rollout.rollout_logprobs[i].astype(np.float64)
                limit = MAX_APART if corrected is True else corrected
                keep = np.abs(apart) < limit
                factor = np.minimum(np.exp(apart), 2.0)
            planned, all_tokens, kept_tokens = {
                "seq_mean_token_mean": (1 / (b - a), 1, keep.mean()),
                "token_mean": (1, b - a, keep.sum()),
                "fixed_length": (1 / LIMIT, 1, 1),
            }[settings.aggregation]
            unit = kept_tokens if settings.correction_denominator == "kept" else all_tokens
            scale = planned * keep * factor
            total = total + (scale * token_losses).sum()
            weight = weight + unit
            slopes[i, a:b] = scale * slope
            if settings.kl_coefficient:
                x = reference[i, a:b] - now[i, a:b]
                k2 = settings.kl_estimator == "k2"
                kl_total += (planned * (x**2 / 2 if k2 else np.exp(x) - 1 - x)).sum()
                kl_slopes[i, a:b] = planned * (-x if k2 else 1 - np.exp(x))
                kl_weight += all_tokens
        slopes = slopes / (weight or 1) + settings.kl_coefficient * kl_slopes / (kl_weight or 1)
        return total / (weight or 1), kl_total / (kl_weight or 1), slopes

    leaves, tree = jax.tree.flatten(params)
    moments = [(np.zeros(x.shape), np.zeros(x.shape)) for x in leaves]
    b1 = OPTIMIZER.beta1
    b2 = OPTIMIZER.beta2
    losses = []
    norms = []
    for m in range(mini_batches):
        members = tuple(range(m * n // mini_batches, (m + 1) * n // mini_batches))
        current = jax.tree.unflatten(tree, leaves)
        value, kl, slopes = loss_and_slopes(
            np.asarray(naive_logprobs(current, ids), np.float64), members
        )
        grads = _pull_back(current, ids, jnp.asarray(slopes, jnp.float32))
        balance = 0.0
        if router:
            balance, balance_grads = router(current, members)
            grads = jax.tree.map(
                lambda g, b: g + settings.router_aux_loss * b, grads, balance_grads
            )
        losses.append((value, kl, balance))
        norms.append(
            np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
        )
        for k, g in enumerate(np.asarray(g, np.float64) for g in jax.tree.leaves(grads)):
            mu = b1 * moments[k][0] + (1 - b1) * g
            nu = b2 * moments[k][1] + (1 - b2) * g * g
            moments[k] = mu, nu
            direction = (
                mu / (1 - b1 ** (m + 1)) / (np.sqrt(nu / (1 - b2 ** (m + 1))) + OPTIMIZER.epsilon)
            )
            rate = OPTIMIZER.learning_rate * (1 - m / UPDATES)
            leaves[k] = jnp.asarray(leaves[k] - rate * direction, jnp.float32)
    raised = multiplier + settings.dual_learning_rate * (mean_delta - settings.tolerance)
    bounded = np.clip(raised, 0, settings.multiplier_max)
    terms = Terms(*np.mean(losses, axis=0), settings.kl_coefficient, settings.router_aux_loss)
    return jax.tree.unflatten(tree, leaves), terms, np.mean(norms), mean_delta, bounded


def close(a, b, tolerance=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance, rtol=2e-4), a, b)


# Metrics made from rewards, counts and settings alone: the same numbers on every mesh.
_EXACT = (
    "reward/",
    "optimizer/learning_rate",
    "optimizer/skipped",
    "dual/tolerance",
    "policy/clip_",
)


def same_metrics(metrics, expected):
    """Every metric of a step on a mesh against one device. All others than the exact ones come from
    log-probs, sums of a few dozen float32 products that a mesh adds in another order: 1e-4 of the
    value, or 2e-6 where terms cancel.
    """
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        rtol, atol = (1e-6, 0) if name.startswith(_EXACT) else (1e-4, 2e-6)
        np.testing.assert_allclose(metrics[name], value, rtol=rtol, atol=atol, err_msg=name)


def make_model(tied):
    """`MODEL`, with an output matrix of its own or without."""
    return dataclasses.replace(MODEL, tie_word_embeddings=tied)


def unpacked_rows(ids):
    """Rows of one completion each, of `LENGTH` tokens after `PROMPT`."""
    shape = ids.shape
    positions = np.arange(ids.shape[1], dtype=np.int32)
    mask = np.broadcast_to(positions >= PROMPT, shape)
    index = np.broadcast_to(np.arange(shape[0], dtype=np.int32)[:, None], shape)
    rows = Rows(ids, np.broadcast_to(positions, shape), np.ones(shape, np.int32), mask, index, {})
    return jax.tree.map(jnp.asarray, rows)
