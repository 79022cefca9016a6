"""A step on a batch with the engine's top-k tokens: measures and centered gradient in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.models import decoder
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.training.rescore import make_old_logprobs
from tests.support import step_runs
from tests.support.sampling import Rollout

V = step_runs.MODEL.vocab_size
SETTINGS = dataclasses.replace(
    step_runs.ALGORITHM, method="grpo", aggregation="seq_mean_token_mean"
)


@dataclasses.dataclass
class Listed(Rollout):
    """A rollout whose engine lists its top-k tokens.

    `tables` [T, V] are log q of each completion.
    """

    tables: list = ()
    k: int = V

    @property
    def episodes(self):
        found = []
        for episode, table in zip(super().episodes, self.tables, strict=True):
            ids = np.argsort(-table, axis=1)[:, : self.k]
            values = np.take_along_axis(table, ids, axis=1)
            ids = np.where(np.isfinite(values), ids, -1)
            top_ids = np.zeros((len(episode.token_ids), self.k), np.int32)
            top_logprobs = np.zeros(top_ids.shape, np.float32)
            top_ids[episode.sampled_mask] = ids
            top_logprobs[episode.sampled_mask] = values
            found.append(episode.with_columns(top_ids=top_ids, top_logprobs=top_logprobs))
        return found


@jax.jit
def _tables(params, ids):
    """log pi of the whole vocabulary for every token after the first, one completion a row."""
    inputs = decoder.unpacked_inputs(ids)
    hidden = decoder.hidden_states(params, step_runs.MODEL, inputs, Compute())
    return jax.nn.log_softmax(
        hidden[:, :-1] @ decoder.output_kernel(params) / step_runs.TEMPERATURE
    )


@jax.jit
def _pull_back(params, ids, slopes):
    """Gradient of the parameters from that of the tables."""
    return jax.vjp(lambda p: _tables(p, ids), params)[1](slopes)[0]


@functools.cache
def _rollout(k=V):
    """The tests' rollout with an engine whose logits are the trainer's plus noise.

    With log p [T, V] of each completion.
    """
    rollout, rewards = step_runs.make_rollout()
    ids, spans = step_runs.padded(rollout)
    log_p = [
        np.asarray(row[a - 1 : b - 1], np.float64)
        for row, (a, b) in zip(_tables(step_runs.make_params(), ids), spans, strict=True)
    ]  # noqa: E501
    rng = np.random.default_rng(2)
    noisy = [x + rng.normal(0, 0.3, x.shape) for x in log_p]
    log_q = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in noisy]
    chosen = [
        x[np.arange(len(c)), c].astype(np.float32)
        for x, c in zip(log_q, rollout.completion_ids, strict=True)
    ]
    listed = dataclasses.replace(rollout, rollout_logprobs=chosen)
    return (
        Listed(
            **{f.name: getattr(listed, f.name) for f in dataclasses.fields(Rollout)},
            tables=log_q,
            k=k,
        ),
        rewards,
        log_p,
    )


@pytest.mark.parametrize("shape", [None, (2, 2, 2, 1)], ids=str)
def test_measures_of_the_whole_vocabulary_are_float64_sums(shape):
    """Two mini-batches: of the second the distributions are those at the start of the step too."""
    rollout, rewards, log_p = _rollout()
    mesh = None if shape is None else make_mesh(*shape, devices=jax.devices()[:8])
    _, (metrics,), _ = step_runs.run_steps(settings=SETTINGS, rollout=(rollout, rewards), mesh=mesh)
    p = np.exp(np.concatenate(log_p))
    q = np.exp(np.concatenate(rollout.tables))
    delta = np.abs(p - q)
    log_ratio = np.log(p / q)
    expected = (q * delta).sum(-1)
    wanted = {
        "total_variation": delta.sum(-1).mean() / 2,
        "kl_engine": -(q * log_ratio).sum(-1).mean(),
        "kl_trainer": (p * log_ratio).sum(-1).mean(),
        "expected_discrepancy": expected.mean(),
        "head_mass": 1.0,
        "sampling_noise": np.sqrt(((q * delta**2).sum(-1) - expected**2).sum()) / len(p),
    }
    for name, value in wanted.items():
        assert metrics[f"distribution/{name}"] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("shape", [None, (2, 2, 2, 1)], ids=str)
def test_the_centred_gradient_is_autodiffs_of_all_logits(shape):
    """The centered loss -A (log p_y - sum_v sg(q_v) log p_v).

    With f = tis: sg(f) in both. One mini-batch: its norm before the update.
    """
    settings = dataclasses.replace(SETTINGS, corrections="tis(high=1.1),score_centering")
    rollout, rewards, log_p = _rollout()
    mesh = None if shape is None else make_mesh(*shape, devices=jax.devices()[:8])
    run_steps = functools.partial(
        step_runs.run_steps, rollout=(rollout, rewards), mini_batches=1, mesh=mesh
    )
    _, (metrics,), _ = run_steps(settings=settings)
    groups = rewards.reshape(step_runs.PROMPTS, step_runs.GROUP)
    deviation = groups.std(axis=1, ddof=1, keepdims=True) + settings.std_epsilon
    advantages = ((groups - groups.mean(axis=1, keepdims=True)) / deviation).reshape(-1)
    ids, spans = step_runs.padded(rollout)
    slopes = np.zeros((*ids[:, 1:].shape, V))
    for i, ((a, b), x, y, tokens) in enumerate(
        zip(spans, log_p, rollout.tables, rollout.completion_ids, strict=True)
    ):
        weight = np.minimum(np.exp(x - y), 1.1)
        one = np.eye(V)[tokens] * weight - np.exp(y) * weight
        slopes[i, a - 1 : b - 1] = -advantages[i] * one / len(tokens) / len(rewards)
    gradient = _pull_back(step_runs.make_params(), ids, jnp.asarray(slopes, jnp.float32))
    norm = np.sqrt(
        sum(
            float(np.sum(np.square(np.asarray(leaf, np.float64))))
            for leaf in jax.tree.leaves(gradient)
        )
    )
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-4)
    without_centering = dataclasses.replace(settings, corrections="tis(high=1.1)")
    _, (plain,), _ = run_steps(settings=without_centering)
    assert plain["optimizer/grad_norm"] != pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("penalty", ["state_tv", "state_kl", "state_delta"])
def test_a_penalty_in_the_loss_has_the_gradient_of_the_states_discrepancy(penalty):
    """The loss -A log p_y + lambda D for three measures D.

    Its gradient in log p_v is p sign(p - q) / 2, -q, or q p sign(p - q) times lambda, which moves
    by delta.
    """
    settings = dataclasses.replace(SETTINGS, method=penalty, multiplier=0.8, multiplier_max=9.0)
    rollout, rewards, log_p = _rollout()
    state, (metrics,), _ = step_runs.run_steps(
        settings=settings, rollout=(rollout, rewards), mini_batches=1
    )
    groups = rewards.reshape(step_runs.PROMPTS, step_runs.GROUP)
    deviation = groups.std(axis=1, ddof=1, keepdims=True) + settings.std_epsilon
    advantages = ((groups - groups.mean(axis=1, keepdims=True)) / deviation).reshape(-1)
    ids, spans = step_runs.padded(rollout)
    slopes = np.zeros((*ids[:, 1:].shape, V))
    for i, ((a, b), x, y, tokens) in enumerate(
        zip(spans, log_p, rollout.tables, rollout.completion_ids, strict=True)
    ):
        p = np.exp(x)
        q = np.exp(y)
        own = {
            "state_tv": p * np.sign(p - q) / 2,
            "state_kl": -q,
            "state_delta": q * p * np.sign(p - q),
        }[penalty]
        slopes[i, a - 1 : b - 1] = (
            (0.8 * own - advantages[i] * np.eye(V)[tokens]) / len(tokens) / len(rewards)
        )
    gradient = _pull_back(step_runs.make_params(), ids, jnp.asarray(slopes, jnp.float32))
    norm = np.sqrt(
        sum(
            float(np.sum(np.square(np.asarray(leaf, np.float64))))
            for leaf in jax.tree.leaves(gradient)
        )
    )
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-4)
    penalized = 0.0
    plain = 0.0
    for advantage, x, y, tokens in zip(
        advantages, log_p, rollout.tables, rollout.completion_ids, strict=True
    ):
        p = np.exp(x)
        q = np.exp(y)
        own = {
            "state_tv": p * np.sign(p - q) / 2,
            "state_kl": -q,
            "state_delta": q * p * np.sign(p - q),
        }[penalty]
        of_token = np.abs(own - p * own.sum(-1, keepdims=True)).sum(-1) / 2  # in the logits
        penalized += 0.8 * of_token.sum() / len(tokens)
        plain += abs(advantage) * (1 - p[np.arange(len(tokens)), tokens]).sum() / len(tokens)
    assert metrics["dual/penalty_share"] == pytest.approx(penalized / (penalized + plain), rel=1e-4)
    moved = 0.8 + settings.dual_learning_rate * (metrics["discrepancy/mean"] - settings.tolerance)
    assert state.dual.multiplier == pytest.approx(moved, rel=1e-5)


def test_without_centring_the_column_changes_no_update():
    """k = 4: what is trained is what a step without the column trains, to rounding."""
    rollout, rewards, _ = _rollout(4)
    plain = Rollout(**{f.name: getattr(rollout, f.name) for f in dataclasses.fields(Rollout)})
    with_column, without = (
        step_runs.run_steps(settings=SETTINGS, rollout=(x, rewards)) for x in (rollout, plain)
    )
    for a, b in zip(
        *(jax.tree.leaves(run[0].params) for run in (with_column, without)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert not any(name.startswith("distribution/") for name in without[1][0])


def cut_rollout():
    """A rollout of an engine that keeps its 6 top-k tokens, and the rewards."""
    rollout, rewards, _ = _rollout(6)
    kept = [np.argsort(-table, axis=1)[:, :6] for table in rollout.tables]
    chosen = [
        np.where((c[:, None] == ids).any(1), c, ids[:, 0])
        for c, ids in zip(rollout.completion_ids, kept, strict=True)
    ]
    cut = [np.take_along_axis(x, ids, 1) for x, ids in zip(rollout.tables, kept, strict=True)]
    mass = [np.log(np.exp(x).sum(1, keepdims=True)) for x in cut]
    tables = [np.full(x.shape, -np.inf) for x in rollout.tables]
    for table, ids, x, m in zip(tables, kept, cut, mass, strict=True):
        np.put_along_axis(table, ids, x - m, 1)
    sampled = [
        table[np.arange(len(c)), c].astype(np.float32)
        for table, c in zip(tables, chosen, strict=True)
    ]
    return dataclasses.replace(
        rollout, completion_ids=chosen, rollout_logprobs=sampled, tables=tables
    ), rewards


@pytest.mark.parametrize("shape", [None, (2, 2, 2, 1)], ids=str)
def test_a_cut_distribution_is_the_engines_kept_set_of_the_trainers(shape):
    """An engine that keeps its 6 top-k tokens: log p_y - log S, its gradient, and S.

    The discrepancy too.
    """
    ours, rewards = cut_rollout()
    tables = ours.tables
    chosen = ours.completion_ids
    sampled = ours.rollout_logprobs
    base, spans = step_runs.padded(ours)
    mesh = None if shape is None else make_mesh(*shape, devices=jax.devices()[:8])
    _, (metrics,), _ = step_runs.run_steps(
        settings=SETTINGS,
        rollout=(ours, rewards),
        mini_batches=1,
        mesh=mesh,
        options={"cut": True},
    )
    ids = base.copy()
    for row, (a, b), c in zip(ids, spans, chosen, strict=True):
        row[a:b] = c
    masks = np.full((*ids[:, 1:].shape, V), True)
    for row, (a, b), table in zip(masks, spans, tables, strict=True):
        row[a - 1 : b - 1] = np.isfinite(table)
    groups = rewards.reshape(step_runs.PROMPTS, step_runs.GROUP)
    deviation = groups.std(axis=1, ddof=1, keepdims=True) + SETTINGS.std_epsilon
    advantages = ((groups - groups.mean(axis=1, keepdims=True)) / deviation).reshape(-1)
    weights = np.zeros(ids[:, 1:].shape)
    for i, (row, (a, b)) in enumerate(zip(weights, spans, strict=True)):
        row[a - 1 : b - 1] = -advantages[i] / (b - a) / len(rewards)

    @jax.jit
    def objective(params):
        full = _tables(params, ids)
        log_p = jax.nn.log_softmax(jnp.where(masks, full, -jnp.inf))
        tokens = jnp.take_along_axis(log_p, ids[:, 1:, None], -1)[..., 0]
        return jnp.sum(jnp.where(weights != 0, weights * tokens, 0.0)), (
            tokens,
            jnp.sum(jnp.where(masks, jnp.exp(full), 0), -1),
        )

    gradient, (tokens, masses) = jax.grad(objective, has_aux=True)(step_runs.make_params())
    norm = np.sqrt(
        sum(
            float(np.sum(np.square(np.asarray(leaf, np.float64))))
            for leaf in jax.tree.leaves(gradient)
        )
    )
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-4)
    there = [
        (np.asarray(tokens)[i, a - 1 : b - 1], np.asarray(masses)[i, a - 1 : b - 1])
        for i, (a, b) in enumerate(spans)
    ]
    p = np.exp(np.concatenate([x for x, _ in there]))
    q = np.exp(np.concatenate(sampled))
    assert metrics["discrepancy/mean"] == pytest.approx(np.abs(p - q).mean(), abs=1e-6)
    assert metrics["distribution/kept_mass"] == pytest.approx(
        np.concatenate([x for _, x in there]).mean(), abs=1e-6
    )
    assert metrics["distribution/kept_mass"] < 0.95


def test_a_cut_batch_that_lags_is_compared_under_the_weights_that_sampled_it():
    """At the same weights the batch is as one without a lag.

    Sampled by other weights, its measures are a step's at those.
    """
    compute = Compute(one_segment=True, logprob_chunk=16)
    create, step, _ = step_runs.programs(SETTINGS, 1, None, compute, False, cut=True)
    row_logprobs = make_row_logprobs(
        step_runs.MODEL, compute, temperature=step_runs.TEMPERATURE, mesh=None, cut=True
    )
    batch = step_runs.packed_batch(cut_rollout(), 1, None, tokens=64)
    old = make_old_logprobs(row_logprobs, mesh=None)
    now = step_runs.make_params()
    older = step_runs.make_params(7)
    ran = {
        name: step(create(jax.tree.map(jnp.copy, params)), used, None)
        for name, params, used in (
            ("now", now, batch),
            ("lag 0", now, old(now, batch)),
            ("older", older, batch),
            ("lag", now, old(older, batch)),
        )
    }
    for a, b in zip(
        *(jax.tree.leaves(ran[name][0].params) for name in ("now", "lag 0")), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=2e-6)
    measured = [
        name
        for name in ran["now"][1]
        if name.startswith(("distribution/", "discrepancy/mean", "mismatch/k"))
    ]
    assert len(measured) > 10
    for lagging, plain in (("lag 0", "now"), ("lag", "older")):
        for name in measured:
            if (
                name != "distribution/kept_mass" or plain == "now"
            ):  # S is that of the policy that is trained
                assert ran[lagging][1][name] == pytest.approx(
                    float(ran[plain][1][name]), rel=1e-4, abs=1e-6
                ), name
    assert ran["older"][1]["discrepancy/mean"] != pytest.approx(
        float(ran["now"][1]["discrepancy/mean"]), rel=0.05
    )
