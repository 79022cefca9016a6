"""The compiled step against Algorithm 1 written out on padded arrays, and its invariances."""

import dataclasses
import functools
import math
import os

import jax
import numpy as np
import optax
import pytest

from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.training import rescore
from dcmdp_jax.training import step as step_module
from dcmdp_jax.training.state import measure_tolerance
from tests.support import step_runs
from tests.support.step_runs import (
    ALGORITHM,
    GROUP,
    MAX_APART,
    OPTIMIZER,
    UPDATES,
    algorithm_one,
    close,
    make_params,
    make_rollout,
    naive_logprobs,
    packed_batch,
    padded,
    run_steps,
    same_loss,
    same_metrics,
)


@pytest.fixture
def newer_code(monkeypatch):
    """Compile with XLA's newer code generator of fusions, as all runs but the tests do.

    See tests/conftest.py. With the older one a value can differ in the last bit between two
    programs that compute it.
    """
    if "xla_cpu_use_fusion_emitters" not in os.environ["XLA_FLAGS"]:
        return
    options = {**step_module.compiler_options("cpu"), "xla_cpu_use_fusion_emitters": True}
    for module in (step_module, rescore):
        monkeypatch.setattr(module, "compiler_options", lambda platform: options)
    monkeypatch.setattr(step_runs, "programs", functools.cache(step_runs.programs.__wrapped__))


CORRECTIONS = f"tis(high=2),kl_rejection(estimator=k1,over=token,high={MAX_APART})"
"""Drop tokens that the engines see far apart, weigh the others by min(p / q, 2)."""


@pytest.mark.parametrize(
    ("mini_batches", "changes"),
    [
        (1, {}),
        (2, {}),
        (1, {"method": "grpo"}),
        (2, {"method": "dual_grpo", "level": "sequence"}),
        (1, {"method": "threshold_grpo", "aggregation": "token_mean", "measure": "log"}),
        (2, {"measure": "ratio", "sided": "one", "aggregation": "fixed_length"}),
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
        # Every one of these has another value than its default, and changes the update.
        (1, {"normalize_std": False, "overlong_buffer": 5, "overlong_penalty": 3.0}),
        (1, {"std_epsilon": 0.7, "kl_coefficient": 0.5, "kl_estimator": "k2"}),
        pytest.param(2, {"method": "dual_grpo", "measure": "log"}, marks=pytest.mark.long),
        (2, {"ratio_level": "sequence", "trust_region": "clip(low=0.01,high=0,dual=1.01)"}),
    ],
    ids=lambda value: (
        "-".join(map(str, value.values())) or "paper" if isinstance(value, dict) else str(value)
    ),
)
def test_step_is_algorithm_one(mini_batches, changes):
    settings = dataclasses.replace(ALGORITHM, **changes)
    rollout, rewards = make_rollout()
    reference = make_params(seed=5) if settings.kl_coefficient else None
    expected, terms, norm, mean_delta, multiplier = algorithm_one(
        settings, mini_batches, make_params(), rollout, rewards, settings.multiplier, reference
    )
    # One length of rows is the smaller program: two are for the paper's settings and for weights of
    # whole completions.
    rows = (8, 16) if mini_batches == 2 and (not changes or settings.level == "sequence") else (16,)
    state, history, _ = run_steps(
        settings=settings, mini_batches=mini_batches, row_lengths=rows, ref_params=reference
    )
    close(state.params, expected)
    same_loss(history[0], terms)
    assert history[0]["optimizer/grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert history[0]["discrepancy/mean"] == pytest.approx(mean_delta, rel=1e-5)
    assert history[0]["optimizer/learning_rate"] == pytest.approx(
        0.3 * (1 - (mini_batches - 1) / UPDATES)
    )
    if settings.method == "dc_grpo":
        # The step used the old multiplier, and reports it; the new one waits for the next step.
        assert history[0]["dual/multiplier"] == np.float32(settings.multiplier)
        assert state.dual.multiplier == pytest.approx(multiplier, rel=1e-5)


def test_a_budget_on_the_tail_of_the_displacement_moves_lambda():
    settings = dataclasses.replace(
        ALGORITHM, measure="logit", budget="p95", multiplier_max=9.0, tolerance=0.01
    )
    rollout, _ = make_rollout()
    ids, spans = padded(rollout)
    table = np.asarray(naive_logprobs(make_params(), ids), np.float64)
    x = np.concatenate([table[i, a:b] for i, (a, b) in enumerate(spans)])
    y = np.concatenate(rollout.rollout_logprobs).astype(np.float64)
    eps = np.abs(x - np.log1p(-np.exp(x)) - (y - np.log1p(-np.exp(y))))
    state, (metrics,), _ = run_steps(settings=settings, mini_batches=1)
    spent = np.percentile(eps, 95)
    assert metrics["discrepancy/mean"] == pytest.approx(eps.mean(), rel=1e-3)
    assert metrics["discrepancy/spent"] == pytest.approx(spent, rel=1e-3)
    moved = settings.multiplier + settings.dual_learning_rate * (spent - 0.01)
    assert state.dual.multiplier == pytest.approx(moved, rel=1e-3) and moved < 9


@pytest.mark.parametrize("level", ["token", "reward"])
def test_penalty_in_the_update_and_displacement_of_a_step_by_hand(level):
    settings = dataclasses.replace(ALGORITHM, level=level)
    rollout, rewards = make_rollout()
    ids, spans = padded(rollout)
    table = np.asarray(naive_logprobs(make_params(), ids), np.float64)
    train = [table[i, a:b] for i, (a, b) in enumerate(spans)]
    engine = [x.astype(np.float64) for x in rollout.rollout_logprobs]
    delta = [np.abs(np.exp(x) - np.exp(y)) for x, y in zip(train, engine, strict=True)]

    def relative(values):
        groups = [values[rollout.group_ids == g] for g in rollout.group_ids]
        pairs = zip(values, groups, strict=True)
        return [
            0.0 if np.ptp(g) == 0 else (r - g.mean()) / (g.std(ddof=1) + settings.std_epsilon)
            for r, g in pairs
        ]

    lam = settings.multiplier
    plain = relative(rewards.astype(np.float64))
    penalized = relative(rewards - lam * np.array([each.mean() for each in delta]))
    penalty = sum_of_plain = 0.0
    for i, x in enumerate(train):
        moved = lam * delta[i] if level == "token" else abs(penalized[i] - plain[i])
        penalty += np.mean(moved * (1 - np.exp(x)))
        sum_of_plain += np.mean(abs(plain[i]) * (1 - np.exp(x)))
    _, history, _ = run_steps(settings=settings, mini_batches=1)
    assert history[0]["dual/penalty_share"] == pytest.approx(
        penalty / (penalty + sum_of_plain), rel=1e-4
    )
    x = np.concatenate(train)
    y = np.concatenate(engine)
    eps = x - np.log1p(-np.exp(x)) - (y - np.log1p(-np.exp(y)))
    expected = {"mean": eps.mean(), "abs_mean": np.abs(eps).mean()}
    expected |= {f"abs_p{q}": np.percentile(np.abs(eps), q) for q in (50, 95, 99)}
    found = {name: float(history[0][f"displacement/{name}"]) for name in expected}
    assert found == pytest.approx(expected, rel=1e-3)
    gap = np.exp(y) - np.exp(x)
    assert history[0]["discrepancy/engine_share"] == pytest.approx(
        gap[gap > 0].sum() / np.abs(gap).sum(), rel=1e-3
    )


@pytest.mark.parametrize(
    ("mini_batches", "aggregation", "mesh"),
    [
        (1, "seq_mean_token_mean", None),
        (2, "token_mean", (2, 1, 1)),
        pytest.param(2, "token_mean", None, marks=pytest.mark.long),
        pytest.param(2, "fixed_length", (2, 1, 1), marks=pytest.mark.long),
    ],
)
def test_correction_drops_tokens_and_the_loss_is_divided_by_the_rest(
    mini_batches, aggregation, mesh
):
    settings = dataclasses.replace(ALGORITHM, aggregation=aggregation, corrections=CORRECTIONS)
    rollout, rewards = make_rollout()
    old = np.asarray(naive_logprobs(make_params(), padded(rollout)[0]))
    apart = np.concatenate(
        [old[i, a:b] - rollout.rollout_logprobs[i] for i, (a, b) in enumerate(padded(rollout)[1])]
    )
    assert 0.2 < np.mean(np.abs(apart) >= MAX_APART) < 0.8
    assert np.abs(np.abs(apart) - MAX_APART).min() > 1e-4  # no token is dropped by rounding
    expected, terms, norm, mean_delta, _ = algorithm_one(
        settings, mini_batches, make_params(), rollout, rewards, settings.multiplier, corrected=True
    )
    mesh = make_mesh(*mesh, devices=jax.devices()[: math.prod(mesh)]) if mesh else None
    state, history, _ = run_steps(settings=settings, mini_batches=mini_batches, mesh=mesh)
    close(state.params, expected)
    same_loss(history[0], terms)
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
    expected, history, _ = run_steps(row_lengths=(16,), tokens=10_000)
    several = Compute(logprob_chunk=5)
    for options in (
        {"row_lengths": (8, 16), "tokens": 24},
        {"row_lengths": (32,), "segments": 8, "tokens": 32, "compute": several},
        {"row_lengths": (16,), "compute": Compute(remat="full", scan_unroll=2)},
        {"row_lengths": (8, 16), "tokens": 64, "compute": Compute(remat="dots", one_segment=True)},
    ):
        state, other, _ = run_steps(**options)
        close(state.params, expected.params, 5e-6)
        for name in (
            "discrepancy/mean",
            "discrepancy/p99",
            "mismatch/pearson",
            "policy/entropy",
            "policy/ratio_max",
        ):
            assert other[0][name] == pytest.approx(history[0][name], rel=2e-5), name
        np.testing.assert_allclose(
            other[0]["completions/discrepancy"],
            history[0]["completions/discrepancy"],
            rtol=2e-4,
            atol=1e-6,
        )


@pytest.mark.parametrize(
    ("shape", "mini_batches"),
    [
        ((8, 1, 1), 1),
        ((2, 1, 1), 2),
        ((2, 2, 2), 1),
        ((1, 8, 1), 1),
        ((1, 1, 8), 1),
        *(pytest.param(shape, 1, marks=pytest.mark.long) for shape in ((4, 1, 1), (1, 4, 2))),
    ],
)
def test_several_devices_equal_one(shape, mini_batches):
    mesh = make_mesh(*shape, devices=jax.devices()[: math.prod(shape)])
    expected, one, _ = run_steps(mini_batches=mini_batches, steps=2)
    state, eight, step = run_steps(mini_batches=mini_batches, steps=2, mesh=mesh, tokens=16)
    close(state.params, expected.params, 1e-5)
    # The second step's policy has moved within it and since: its ratios, clips and dual state are
    # no longer 1 and 0.4.
    for metrics, wanted in zip(eight, one, strict=True):
        same_metrics(metrics, wanted)
        assert (
            metrics["policy/ratio_min"]
            <= metrics["policy/ratio_mean"]
            <= metrics["policy/ratio_max"]
        )
    assert step._cache_size() == 1
    # What lambda moved by: the step's discrepancy, less the tolerance.
    assert one[1]["dual/violation"] == pytest.approx(one[1]["discrepancy/mean"] - 0.05, rel=1e-5)


@pytest.mark.long
def test_remedies_over_whole_completions_are_the_same_on_a_mesh():
    mesh = make_mesh(2, 2, 2, devices=jax.devices()[:8])
    settings = dataclasses.replace(
        ALGORITHM,
        corrections="sequence_tis(high=3),kl_rejection(estimator=k3,over=mean,high=2),off_policy_mask(high=1.5)",
        ratio_level="sequence",
        correction_denominator="all",
    )
    expected, one, _ = run_steps(settings=settings, steps=2)
    state, eight, _ = run_steps(settings=settings, steps=2, mesh=mesh)
    close(state.params, expected.params, 1e-5)
    for metrics, wanted in zip(eight, one, strict=True):
        same_metrics(metrics, wanted)
    assert (
        0.05 < one[0]["correction/dropped_fraction"] < 0.95
        and one[0]["correction/truncated_fraction"] > 0
    )


def test_a_users_remedies_and_their_statistics_are_the_same_on_a_mesh_and_in_one_micro_batch():
    mesh = make_mesh(2, 1, 1, devices=jax.devices()[:2])
    settings = dataclasses.replace(
        ALGORITHM,
        method="examples/remedies.py:huber(knee=0.2)",
        loss="examples/remedies.py:prime_rl(kl_tau=0.1)",
        ratio_denominator="rollout",
    )
    expected, one, _ = run_steps(settings=settings)
    assert (
        0.05 < one[0]["remedy/huber/above_knee"] < 0.95
        and 0.05 < one[0]["remedy/prime_rl/masked"] < 0.95
    )
    for options in ({"mesh": mesh}, {"tokens": 10_000}):
        state, other, _ = run_steps(settings=settings, **options)
        close(state.params, expected.params, 1e-5)
        same_metrics(other[0], one[0])


@pytest.mark.long
def test_a_penalty_inside_the_reward_is_the_same_on_a_mesh():
    mesh = make_mesh(2, 2, 2, devices=jax.devices()[:8])
    settings = dataclasses.replace(ALGORITHM, level="reward")
    expected, one, _ = run_steps(settings=settings, steps=2)
    state, eight, _ = run_steps(settings=settings, steps=2, mesh=mesh)
    close(state.params, expected.params, 1e-5)
    for metrics, wanted in zip(eight, one, strict=True):
        same_metrics(metrics, wanted)


def test_bypass_is_the_rollout_denominator_without_the_pass_for_the_old_weights():
    # GRPO does not look at p^Train: the same policy, another measured discrepancy once the weights
    # have moved.
    settings = dataclasses.replace(ALGORITHM, method="grpo", ratio_denominator="rollout")
    expected, recomputed, _ = run_steps(settings=settings, mini_batches=4)
    state, bypassed, _ = run_steps(
        settings=dataclasses.replace(settings, ratio_denominator="bypass"), mini_batches=4
    )
    close(state.params, expected.params, 1e-6)
    assert bypassed[0]["discrepancy/mean"] != recomputed[0]["discrepancy/mean"]
    assert bypassed[0]["policy/ratio_max"] == pytest.approx(
        recomputed[0]["policy/ratio_max"], rel=1e-5
    )


def test_devices_with_rows_of_their_own_stay_alike_to_the_last_bit():
    # Every device makes the update by itself: what they sum has to be the same number on each.
    mesh = make_mesh(4, devices=jax.devices()[:4])
    state, _, _ = run_steps(mini_batches=2, steps=3, mesh=mesh)
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
        for inner in jax.tree.leaves(
            tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from _exchanges(getattr(inner, "jaxpr", inner), inside)


def test_devices_exchange_once_in_an_update():
    # 16 rows of 16 tokens are two updates of two micro-batches each of 4 rows, two a device. The
    # one loop is that of
    # updates: within that of micro-batches, gradients would travel for each.
    mesh = make_mesh(2, devices=jax.devices()[:2])
    batch = packed_batch(make_rollout(), 2, mesh, tokens=32)
    assert batch.rows[0].input_ids.shape == (2, 2, 4, 16)
    create, step, _ = step_runs.programs(
        ALGORITHM, 2, mesh, Compute(one_segment=True, logprob_chunk=16), False
    )
    program = step.trace(create(make_params()), batch, None).jaxpr
    assert set(_exchanges(program.jaxpr)) == {1}


def test_gradients_are_summed_in_float32_and_in_parts(newer_code):
    """With parameters over eight devices the loop carries an eighth of the gradient on each."""
    mesh = make_mesh(1, 8, 1, devices=jax.devices()[:8])
    create, step, _ = step_runs.programs(
        ALGORITHM, 1, mesh, Compute(one_segment=True, logprob_chunk=16), False
    )
    batch = packed_batch(make_rollout(), 1, mesh, tokens=16)
    assert batch.rows[0].input_ids.shape[1] == 2  # micro-batches, of a row on each device
    text = step.lower(create(make_params()), batch, None).compile().as_text()
    # Embedding and W_gate of two layers: [31, 16] and [2, 16, 32] over the hidden size.
    [loop] = [line for line in text.splitlines() if " while(" in line and "f32[31,2]" in line]
    carried = loop.split(" while(")[0]
    assert "f32[2,2,32]" in carried and "f32[2,16,32]" not in carried


@pytest.mark.parametrize(
    ("mini_batches", "devices", "rows"),
    [
        *(
            pytest.param(*one, (8, 16), marks=pytest.mark.long)
            for one in ((1, 1), (2, 1), (1, 2), (2, 2))
        ),
        (2, 2, (16,)),
    ],
)
def test_exact_has_no_discrepancy_to_the_last_bit(newer_code, mini_batches, devices, rows):
    mesh = make_mesh(devices, devices=jax.devices()[:devices]) if devices > 1 else None
    state, history, step = run_steps(
        exact=True, mini_batches=mini_batches, row_lengths=rows, steps=3, mesh=mesh
    )
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
    ours, _, _ = run_steps(settings=frozen, steps=2)
    grpo, _, _ = run_steps(settings=dataclasses.replace(ALGORITHM, method="grpo"), steps=2)
    jax.tree.map(np.testing.assert_array_equal, ours.params, grpo.params)


def test_lambda_rests_in_the_steps_that_c_is_measured_on():
    settings = dataclasses.replace(ALGORITHM, tolerance_steps=2)
    state, history, _ = run_steps(settings=settings, steps=4, mini_batches=1)
    third = history[2]["discrepancy/mean"]
    assert [float(metrics["dual/tolerance"]) for metrics in history] == [
        np.float32(ALGORITHM.tolerance)
    ] * 4
    assert [float(metrics["dual/multiplier"]) for metrics in history[:3]] == [np.float32(0.4)] * 3
    assert history[3]["dual/multiplier"] == pytest.approx(
        max(0.4 + third - ALGORITHM.tolerance, 0), rel=1e-5
    )
    assert history[2]["dual/violation"] == pytest.approx(third - ALGORITHM.tolerance, abs=1e-7)
    assert state.dual.tolerance == np.float32(ALGORITHM.tolerance)


def test_c_of_each_first_step_takes_the_latest_noise_floor():
    """The measured tolerance is 1.25 times a median over the floors.

    Of 1, 2, 3, 8 with a floor of 4 from step 2 to 3 and of 6 from step 4: the median of 1, 4, 4, 8.
    """
    settings = dataclasses.replace(ALGORITHM, tolerance_steps=4, tolerance_factor=1.25)
    series = {"discrepancy/mean": (np.arange(1, 5), np.array([1.0, 2.0, 3.0, 8.0]))}
    floors = np.array([2, 4]), np.array([4.0, 6.0])
    assert measure_tolerance(settings, series | {"mismatch/noise_floor": floors}) == 5.0
    assert measure_tolerance(settings, series) == 3.125


def test_the_step_takes_c_from_the_state():
    create, step, _ = step_runs.programs(
        ALGORITHM, 1, None, Compute(one_segment=True, logprob_chunk=16), False
    )
    state = create(make_params())
    state = state._replace(dual=state.dual._replace(tolerance=jax.numpy.float32(0.25)))
    state, metrics, _ = step(state, packed_batch(make_rollout(), 1, None, tokens=64), None)
    moved = 0.4 + metrics["discrepancy/mean"] - 0.25
    assert metrics["dual/tolerance"] == state.dual.tolerance == 0.25
    assert state.dual.multiplier == pytest.approx(max(float(moved), 0), rel=1e-5)


_LOSSES = (
    ("kept", "seq_mean_token_mean", MAX_APART),
    ("all", "token_mean", MAX_APART),
    ("kept", "token_mean", 1e-6),
)


@pytest.mark.parametrize(
    ("denominator", "aggregation", "limit"),
    [
        pytest.param(*loss, marks=pytest.mark.long if place else ())
        for place, loss in enumerate(_LOSSES)
    ],
)
def test_corrections_leave_the_divergence_as_it_is(denominator, aggregation, limit):
    """The divergence keeps its tokens, weights and denominator where tokens are dropped.

    Some tokens, or all.
    """
    settings = dataclasses.replace(
        ALGORITHM,
        corrections=f"tis(high=2),kl_rejection(estimator=k1,over=token,high={limit})",
        correction_denominator=denominator,
        kl_coefficient=0.3,
        aggregation=aggregation,
    )
    rollout, rewards = make_rollout()
    reference = make_params(seed=5)
    expected, terms, norm, _, _ = algorithm_one(
        settings,
        2,
        make_params(),
        rollout,
        rewards,
        settings.multiplier,
        reference,
        corrected=limit,
    )
    state, history, _ = run_steps(settings=settings, ref_params=reference)
    close(state.params, expected)
    same_loss(history[0], terms)
    assert history[0]["optimizer/grad_norm"] == pytest.approx(norm, rel=2e-5, abs=1e-7)
    assert terms.kl > 0


def test_update_that_is_not_finite_is_skipped_and_counted():
    rollout, rewards = make_rollout()
    _, sound, _ = run_steps(rollout=(rollout, rewards))
    # Completion 0 is in the first of two mini-batches: its NaN makes that gradient NaN, the second
    # is sound.
    rollout.rollout_logprobs[0][0] = np.nan
    state, history, _ = run_steps(rollout=(rollout, rewards))
    assert history[0]["optimizer/skipped_updates"] == 1
    assert state.skipped_in_row == 0
    # The loss is that of the update which was made, the second mini-batch under the first
    # parameters.
    half = len(rewards) // 2
    parts = {
        name: value[half:]
        for name, value in vars(rollout).items()
        if isinstance(value, list | np.ndarray)
    }
    second = dataclasses.replace(rollout, **parts)
    _, terms, norm, _, _ = algorithm_one(
        ALGORITHM, 1, make_params(), second, rewards[half:], ALGORITHM.multiplier
    )
    same_loss(history[0], terms)
    assert history[0]["optimizer/grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert history[0]["policy/loss"] != pytest.approx(sound[0]["policy/loss"], rel=1e-3)
    # The one update that was made is the optimizer's first, at the schedule's first rate.
    assert history[0]["optimizer/learning_rate"] == pytest.approx(0.3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    adam = state.opt_state[0]
    assert isinstance(adam, optax.ScaleByAdamState) and adam.count == 1
    # The mean discrepancy is NaN too: the multiplier keeps its value.
    assert state.dual.multiplier == np.float32(0.4)

    rollout.rollout_logprobs[-1][0] = np.nan
    state, history, _ = run_steps(rollout=(rollout, rewards), steps=2)
    assert state.skipped_in_row == 4
    jax.tree.map(np.testing.assert_array_equal, state.params, make_params())


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean"])
def test_nan_advantage_beyond_the_clamp_skips_the_update(aggregation):
    # Its tokens are further than 20 nats from the engine: the ratio is held, their gradient 0, and
    # the norm finite.
    rollout, rewards = make_rollout()
    for logprobs in rollout.rollout_logprobs[GROUP : 2 * GROUP]:
        logprobs[:] = -60.0
    rewards[GROUP] = np.nan
    settings = dataclasses.replace(ALGORITHM, ratio_denominator="rollout", aggregation=aggregation)
    state, history, _ = run_steps(settings=settings, rollout=(rollout, rewards), mini_batches=1)
    assert history[0]["optimizer/skipped_updates"] == 1 and state.skipped_in_row == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, make_params())
    # Of two mini-batches the sound one is made, and its loss alone is recorded.
    state, history, _ = run_steps(settings=settings, rollout=(rollout, rewards), mini_batches=2)
    assert history[0]["optimizer/skipped_updates"] == 1 and state.skipped_in_row == 0
    assert np.isfinite(history[0]["policy/loss"]) and history[0]["policy/loss"] != 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_mini_batch_without_completions_still_moves_parameters_by_momentum():
    # The second of two mini-batches is all truncated and left out of the loss: gradient 0. Adam
    # then has mu = 0.9 m1, nu = 0.95 n1 and count 2, so the update is -lr (0.9 m1 / (1 - 0.9^2)) /
    # (sqrt(...) + 1), not 0.
    rollout, rewards = make_rollout()
    finish = ["stop"] * len(rewards)
    finish[len(rewards) // 2 :] = ["length"] * (len(rewards) // 2)
    settings = dataclasses.replace(ALGORITHM, mask_truncated=True)
    batch = (dataclasses.replace(rollout, finish_reasons=finish), rewards)
    state, history, _ = run_steps(settings=settings, rollout=batch)
    assert history[0]["optimizer/skipped_updates"] == 0 and state.opt_state[0].count == 2

    b1 = OPTIMIZER.beta1
    b2 = OPTIMIZER.beta2
    eps = OPTIMIZER.epsilon
    adam = state.opt_state[0]
    # Undo the second update's decay of the moments: m1 = mu / b1 = (1 - b1) g, n1 = nu / b2 = (1 -
    # b2) g^2.
    expected = jax.tree.map(
        lambda p, mu, nu: (
            p
            - 0.3 * (mu / b1 / (1 - b1)) / (np.sqrt(nu / b2 / (1 - b2)) + eps)
            - 0.3 * (1 - 1 / UPDATES) * (mu / (1 - b1**2)) / (np.sqrt(nu / (1 - b2**2)) + eps)
        ),
        make_params(),
        adam.mu,
        adam.nu,
    )
    close(state.params, expected)
    # The truncated half still enters the mean discrepancy: the value is that of the whole batch.
    _, whole, _ = run_steps(rollout=(rollout, rewards))
    assert history[0]["discrepancy/mean"] == pytest.approx(whole[0]["discrepancy/mean"], rel=1e-6)


def test_dropped_completion_leaves_no_trace():
    rollout, rewards = make_rollout()
    dropped = np.zeros(len(rewards), bool)
    dropped[6] = True
    # A whole group too.
    dropped[8:12] = True
    expected, _, _ = run_steps(rollout=(rollout, rewards), dropped=dropped, row_lengths=(16,))
    rewards = rewards.copy()
    for i in np.flatnonzero(dropped):
        rollout.rollout_logprobs[i][:] = np.nan
        rewards[i] = 1e9
    state, history, _ = run_steps(rollout=(rollout, rewards), dropped=dropped)
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    assert history[0]["reward/mean"] < 1
