"""The terms of the loss: which there are, and how they add up."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm.stats import Sum
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.training import objective
from dcmdp_jax.training.objective import (
    KL,
    ROUTER,
    SURROGATE,
    LossInputs,
    Term,
    TermConstants,
    TokenReward,
    sum_of_terms,
    term_metrics,
    terms_of,
    token_reward_statistics,
)
from dcmdp_jax.types import Rows
from tests.support import step_runs

_SETTINGS = AlgorithmSettings()
_INPUTS = LossInputs(
    settings=_SETTINGS,
    remedies=_SETTINGS.remedies(),
    tokens=None,
    weights=None,
    signals=None,
    head=None,
    rows=None,
)


@pytest.mark.parametrize(
    ("changes", "metrics"),
    [
        ({}, [SURROGATE]),
        ({"method": "state_tv"}, [SURROGATE, SURROGATE]),
        ({"corrections": "score_centering"}, [SURROGATE, SURROGATE]),
        ({"kl_coefficient": 0.1}, [SURROGATE, KL]),
        ({"kl_coefficient": 0.1, "router_aux_loss": 0.2}, [SURROGATE, KL, ROUTER]),
    ],
)
def test_the_settings_choose_the_terms(changes, metrics):
    settings = dataclasses.replace(_SETTINGS, **changes)
    assert [term.metric for term in terms_of(settings)] == metrics


def test_a_term_is_a_function_and_an_entry():
    terms = (
        Term(
            metric=SURROGATE,
            total=lambda _: (jnp.float32(3.0), {"a": Sum(jnp.float32(7.0))}),
            coefficient=lambda _: 1,
        ),
        Term(metric=SURROGATE, total=lambda _: jnp.float32(-1.0), coefficient=lambda _: 1),
        Term(metric="policy/own", total=lambda _: jnp.float32(2.0), coefficient=lambda _: 0.5),
    )
    constants = TermConstants(
        divisor=jnp.float32(4.0), planned_weight=jnp.float32(8.0), mini_batch_sums={}
    )
    loss, totals, statistics = sum_of_terms(terms, _INPUTS, constants)
    # S = 3 - 1; the other term is 2 / 8, times its factor and W: 0.5 x 4 x 0.25.
    assert float(loss) == 2.0 + 0.5
    assert float(statistics["a"].value()) == 7.0
    metrics = term_metrics(terms, totals, constants)
    assert {name: float(value) for name, value in metrics.items()} == {
        SURROGATE: 0.5,
        "policy/own": 0.25,
    }


def _sum_of(column):
    return lambda inputs: jnp.sum(jnp.where(inputs.rows.completion_mask, column(inputs), 0.0))


@pytest.mark.parametrize("tokens", [32, 512], ids=["many micro-batches", "one"])
def test_a_product_of_two_sums_needs_no_edit_of_the_step(monkeypatch, tokens):
    product = Term(
        metric="policy/own",
        total=_sum_of(lambda inputs: inputs.tokens.train_logprobs),
        coefficient=lambda _: 1e-6,
        mean=lambda total, constants: total * constants.mini_batch_sums["policy/own"],
        mini_batch_sum=_sum_of(lambda inputs: inputs.rows.rollout_logprobs),
    )
    monkeypatch.setattr(objective, "TERMS", (*objective.TERMS, product))
    rollout, rewards = step_runs.make_rollout()
    # Settings of no other test: compiled steps are kept by them.
    settings = dataclasses.replace(_SETTINGS, std_epsilon=1.25e-6)
    _, [metrics], _ = step_runs.run_steps(
        settings=settings, rollout=(rollout, rewards), mini_batches=1, tokens=tokens
    )

    ids, spans = step_runs.padded(rollout)
    table = np.asarray(step_runs.naive_logprobs(step_runs.make_params(), ids), np.float64)
    train = sum(table[row, first:end].sum() for row, (first, end) in enumerate(spans))
    sampled = sum(logprobs.sum() for logprobs in rollout.rollout_logprobs)
    assert metrics["policy/own"] == pytest.approx(train * sampled, rel=1e-5)
    added = metrics["policy/loss"] - metrics["policy/surrogate"]
    assert added == pytest.approx(1e-6 * train * sampled, rel=1e-3)


def test_a_reward_of_tokens_is_measured_against_the_training_stack():
    index = np.zeros((1, 3), np.int32)
    column = np.float32([[-1.0, -2.0, -9.0]])
    rows = Rows(index, index, index, np.array([[True, True, False]]), index, {"other": column})
    signals = dataclasses.make_dataclass("Signals", ["tokens"])(
        dataclasses.make_dataclass("Tokens", ["old_logprobs"])(np.float32([[-0.5, -1.0, 0.0]]))
    )
    inputs = dataclasses.replace(_INPUTS, rows=rows, signals=signals)
    reward = TokenReward(column="other", weight=0.3, metric="policy/other_kl")
    measured = token_reward_statistics(inputs, (reward,))
    # (-0.5 + 1 - 1 + 2) / 2, without the token outside the mask.
    assert float(measured["policy/other_kl"].value()) == 0.75
