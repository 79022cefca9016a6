"""The compiled functions in every layout against the paper's Algorithm 1 in float64.

Algorithm 1 is written here as plain loops over ragged lists.

The loops below are written from the paper's equations and share no code with the package.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcmdp_jax.algorithm import advantages, discrepancy, dual, losses, masked, stats
from dcmdp_jax.algorithm.penalties import PENALTIES
from dcmdp_jax.algorithm.remedies import Tokens
from tests.support.surrogate import policy_surrogate

CLIP_LOW = 0.2
CLIP_HIGH = 0.24
TOLERANCE = 0.05
MULTIPLIER = 0.7
RATE = 1.5
MAX_TOKENS = 8
COMPLETIONS = 6


@dataclasses.dataclass
class Ragged:
    """Completions as lists: three kinds of log-probs, rewards, groups and flags.

    The log-probs are the policy's, the old policy's and the rollout engine's.
    """

    now: list[np.ndarray]
    old: list[np.ndarray]
    rollout: list[np.ndarray]
    rewards: np.ndarray
    groups: np.ndarray
    in_loss: np.ndarray
    valid: np.ndarray


def draw(seed: int, lengths: list[int], equal_group: bool) -> Ragged:
    rng = np.random.default_rng(seed)
    old = [np.log(rng.uniform(0.02, 1.0, n)).astype(np.float32) for n in lengths]
    rewards = rng.integers(0, 3, len(lengths)) * 0.3
    groups = rng.permutation(np.arange(len(lengths)) % 2) * 3
    if equal_group:
        rewards[groups == 3] = 0.3
    valid = rng.random(len(lengths)) < 0.85
    return Ragged(
        now=[(x + rng.normal(0, 0.3, len(x))).astype(np.float32) for x in old],
        old=old,
        rollout=[np.minimum(x + rng.normal(0, 0.1, len(x)), 0).astype(np.float32) for x in old],
        rewards=rewards,
        groups=groups,
        in_loss=valid & (rng.random(len(lengths)) < 0.9),
        valid=valid,
    )


def reference(data: Ragged, method: str, mode: str, measure: str, sided: str, level: str) -> dict:
    """One step in float64, token by token."""
    count = len(data.old)
    delta = []
    for i in range(count):
        row = []
        for log_p, log_q in zip(
            data.old[i].astype(float), data.rollout[i].astype(float), strict=True
        ):
            p = math.exp(log_p)
            q = math.exp(log_q)
            signed = {"diff": p - q, "ratio": p / q - 1, "log": log_p - log_q}[measure]
            row.append(max(signed, 0.0) if sided == "one" else abs(signed))
        if level == "sequence" and row:
            row = [sum(row) / len(row)] * len(row)
        delta.append(row)

    advantage = []
    for i in range(count):
        members = [
            data.rewards[j]
            for j in range(count)
            if data.groups[j] == data.groups[i] and data.valid[j]
        ]
        if not data.valid[i] or len(set(members)) == 1:
            advantage.append(0.0)
            continue
        average = sum(members) / len(members)
        variance = sum((r - average) ** 2 for r in members) / (len(members) - 1)
        advantage.append((data.rewards[i] - average) / (math.sqrt(variance) + 1e-6))

    taking_part = [i for i in range(count) if data.in_loss[i] and len(data.old[i])]
    tokens = sum(len(data.old[i]) for i in taking_part)
    loss = 0.0
    gradient = [np.zeros(len(x)) for x in data.old]
    for i in taking_part:
        length = len(data.old[i])
        weight = {
            "seq_mean_token_mean": 1 / (length * len(taking_part)),
            "token_mean": 1 / tokens,
            "fixed_length": 1 / (MAX_TOKENS * len(taking_part)),
        }[mode]
        for t in range(length):
            penalty = {
                "grpo": 0.0,
                "dual_grpo": delta[i][t],
                "threshold_grpo": delta[i][t] if delta[i][t] > TOLERANCE else 0.0,
                "dc_grpo": MULTIPLIER * delta[i][t],
            }[method]
            shaped = advantage[i] - penalty
            gamma = math.exp(float(data.now[i][t]) - float(data.old[i][t]))
            free = gamma * shaped
            clipped = min(max(gamma, 1 - CLIP_LOW), 1 + CLIP_HIGH) * shaped
            loss -= weight * min(free, clipped)
            if free <= clipped:
                gradient[i][t] = -weight * free

    flat = [x for row in delta for x in row]
    mean_delta = sum(flat) / len(flat) if flat else 0.0
    multiplier = min(max(MULTIPLIER + RATE * (mean_delta - TOLERANCE), 0.0), 1.0)
    return {"loss": loss, "gradient": gradient, "mean_delta": mean_delta, "multiplier": multiplier}


def place(data: Ragged, rows: list[list[int]], length: int) -> dict[str, np.ndarray]:
    """Lay completions out in rows, in the order given, after one garbage token (a prompt) each.

    The rest is NaN.
    """
    shape = (len(rows), length)
    laid = {name: np.full(shape, np.nan, np.float32) for name in ("now", "old", "rollout")}
    laid |= {"mask": np.zeros(shape, bool), "index": np.zeros(shape, np.int32)}
    for r, members in enumerate(rows):
        start = 0
        for i in members:
            start += 1
            span = slice(start, start + len(data.old[i]))
            for name in ("now", "old", "rollout"):
                laid[name][r, span] = getattr(data, name)[i]
            laid["mask"][r, span], laid["index"][r, span] = True, i
            start = span.stop
    return laid


def padded(data: Ragged) -> dict[str, np.ndarray]:
    laid = place(data, [[i] for i in range(len(data.old))], MAX_TOKENS + 1)
    return laid | {"index": np.indices(laid["mask"].shape)[0]}


def packed(data: Ragged, seed: int) -> dict[str, np.ndarray]:
    order = np.random.default_rng(seed).permutation(len(data.old)).tolist()
    return place(data, [order[:1], order[1:4], order[4:]], 3 * (MAX_TOKENS + 1))


@functools.partial(jax.jit, static_argnames=("method", "mode", "measure", "sided", "level"))
def compiled_step(laid, per_completion, *, method, mode, measure, sided, level):
    rewards, groups, in_loss, valid, lengths = per_completion
    mask = laid["mask"]
    index = laid["index"]
    delta = discrepancy.token_discrepancy(
        laid["old"], laid["rollout"], completion_mask=mask, measure=measure, sided=sided
    )
    if level == "sequence":
        delta = discrepancy.sequence_discrepancy(
            delta, masked.CompletionIndex(mask, index, COMPLETIONS)
        )
    base = masked.gather_to_tokens(advantages.group_advantages(rewards, groups, valid), index)
    shaped = PENALTIES[method](
        Tokens(advantages=base, discrepancy=delta, multiplier=MULTIPLIER, tolerance=TOLERANCE)
    )
    weights, total = losses.aggregation_weights(
        lengths, in_loss, mode=mode, max_completion_tokens=MAX_TOKENS
    )

    def loss(now):
        token_weights = masked.gather_to_tokens(weights, index)
        summed, _ = policy_surrogate(
            now, laid["old"], shaped, mask, token_weights, clip_low=CLIP_LOW, clip_high=CLIP_HIGH
        )
        return summed._replace(weight=total).value(), summed

    (value, summed), gradient = jax.value_and_grad(loss, has_aux=True)(laid["now"])
    delta_sum = masked.masked_sum(delta, mask)
    multiplier = dual.dual_update(
        MULTIPLIER,
        delta_sum.value(),
        tolerance=TOLERANCE,
        dual_learning_rate=RATE,
        multiplier_min=0.0,
        multiplier_max=1.0,
    )
    return {
        "loss": value,
        "sum": summed,
        "gradient": gradient,
        "delta_sum": delta_sum,
        "multiplier": multiplier,
        "completion_gradients": masked.completion_sums(
            gradient, masked.CompletionIndex(mask, index, COMPLETIONS)
        ),
    }


def step(data: Ragged, laid: dict[str, np.ndarray], **options) -> dict:
    lengths = np.array([len(x) for x in data.old])
    return compiled_step(
        laid, (data.rewards, data.groups, data.in_loss, data.valid, lengths), **options
    )


def unpack(gradient, laid: dict[str, np.ndarray], data: Ragged) -> list[np.ndarray]:
    gradient = np.asarray(gradient)
    return [gradient[laid["mask"] & (laid["index"] == i)] for i in range(len(data.old))]


LENGTHS = st.lists(st.integers(0, MAX_TOKENS), min_size=COMPLETIONS, max_size=COMPLETIONS)
OPTIONS = st.sampled_from(
    [
        {
            "method": "dc_grpo",
            "mode": "seq_mean_token_mean",
            "measure": "diff",
            "sided": "two",
            "level": "token",
        },
        {
            "method": "grpo",
            "mode": "token_mean",
            "measure": "diff",
            "sided": "two",
            "level": "token",
        },
        {
            "method": "dual_grpo",
            "mode": "fixed_length",
            "measure": "log",
            "sided": "one",
            "level": "sequence",
        },
        {
            "method": "threshold_grpo",
            "mode": "seq_mean_token_mean",
            "measure": "ratio",
            "sided": "two",
            "level": "token",
        },
        {
            "method": "dc_grpo",
            "mode": "token_mean",
            "measure": "ratio",
            "sided": "one",
            "level": "sequence",
        },
        {
            "method": "threshold_grpo",
            "mode": "fixed_length",
            "measure": "diff",
            "sided": "one",
            "level": "token",
        },
        {
            "method": "dc_grpo",
            "mode": "fixed_length",
            "measure": "log",
            "sided": "two",
            "level": "token",
        },
    ]
)


@given(st.integers(0, 2**31), LENGTHS, st.booleans(), OPTIONS)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_layout_equals_the_loops(seed, lengths, equal_group, options):
    data = draw(seed, lengths, equal_group)
    expected = reference(data, **options)
    for laid in (padded(data), packed(data, seed)):
        result = step(data, laid, **options)
        np.testing.assert_allclose(result["loss"], expected["loss"], rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(
            result["delta_sum"].value(), expected["mean_delta"], rtol=1e-5, atol=1e-7
        )
        np.testing.assert_allclose(result["multiplier"], expected["multiplier"], rtol=1e-5)
        for got, wanted in zip(
            unpack(result["gradient"], laid, data), expected["gradient"], strict=True
        ):
            np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)
        # Outside the mask the gradient is exactly 0, though every input there is NaN.
        np.testing.assert_array_equal(np.asarray(result["gradient"])[~laid["mask"]], 0.0)


PAPER = {
    "method": "dc_grpo",
    "mode": "seq_mean_token_mean",
    "measure": "diff",
    "sided": "two",
    "level": "token",
}


def test_row_order_does_not_matter():
    data = draw(3, [5, 8, 1, 0, 7, 3], equal_group=False)
    laid = packed(data, 4)
    flipped = {name: array[::-1] for name, array in laid.items()}
    one = step(data, laid, **PAPER)
    other = step(data, flipped, **PAPER)
    # Terms of size 0.1 and both signs: their order moves the last bits only.
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=0, atol=1e-7)
    np.testing.assert_array_equal(one["gradient"], np.asarray(other["gradient"])[::-1])


@pytest.mark.parametrize("mode", ["seq_mean_token_mean", "token_mean", "fixed_length"])
def test_micro_batches_add(mode):
    """With a micro-batch for each row, totals and gradients add up to the whole's."""
    data = draw(5, [5, 8, 1, 0, 7, 3], equal_group=True)
    laid = packed(data, 6)
    options = PAPER | {"mode": mode}
    whole = step(data, laid, **options)
    parts = [
        step(data, {name: x[r : r + 1] for name, x in laid.items()}, **options) for r in range(3)
    ]
    assert sum(float(p["sum"].total) for p in parts) == pytest.approx(
        float(whole["sum"].total), rel=1e-6
    )
    assert sum(float(p["loss"]) for p in parts) == pytest.approx(float(whole["loss"]), rel=1e-6)
    np.testing.assert_allclose(
        np.concatenate([p["gradient"] for p in parts]), whole["gradient"], rtol=1e-6
    )
    added = functools.reduce(stats.merge, (p["delta_sum"] for p in parts))
    assert float(added.value()) == pytest.approx(float(whole["delta_sum"].value()), rel=1e-6)
    # The mean of the parts' own means is another number: rows hold different numbers of tokens.
    mean_of_means = np.mean([float(p["delta_sum"].value()) for p in parts])
    assert abs(mean_of_means - float(whole["delta_sum"].value())) > 1e-4


def test_micro_batches_of_a_split_completion_set_share_the_total():
    """Scanned as a compiled step would: float32 sums carried, one division at the end."""
    data = draw(7, [5, 8, 2, 4, 7, 3], equal_group=False)
    laid = packed(data, 8)
    weights, total = losses.aggregation_weights(
        np.array([len(x) for x in data.old]), data.in_loss, mode="seq_mean_token_mean"
    )
    shaped = masked.gather_to_tokens(
        advantages.group_advantages(data.rewards, data.groups, data.valid), laid["index"]
    )

    def one(row):
        token_weights = masked.gather_to_tokens(weights, row["index"])
        return policy_surrogate(
            row["now"],
            row["old"],
            row["advantages"],
            row["mask"],
            token_weights,
            clip_low=CLIP_LOW,
            clip_high=CLIP_HIGH,
        )

    rows = jax.tree.map(lambda x: jnp.asarray(x)[:, None], laid | {"advantages": shaped})
    start = stats.empty(jax.eval_shape(one, jax.tree.map(lambda x: x[0], rows)))
    (summed, statistics), _ = jax.lax.scan(
        lambda carry, row: (stats.merge(carry, one(row)), None), start, rows
    )
    expected = reference(data, **PAPER | {"method": "grpo"})
    assert float(summed.total / total) == pytest.approx(expected["loss"], rel=1e-5, abs=1e-6)
    kept = sum(len(x) for x, keep in zip(data.old, data.in_loss, strict=True) if keep)
    assert float(statistics["ratio_mean"].weight) == kept


@pytest.mark.parametrize(
    ("method", "falls"), [("dc_grpo", True), ("dual_grpo", True), ("grpo", False)]
)
def test_a_planted_mismatch_is_unlearned_under_the_penalty_only(method, falls):
    """A softmax policy over 4 tokens; the engine thinks token 2 half as likely.

    All rewards are equal.

    Under grpo every advantage is 0 and nothing moves. Under the penalty token 2 alone has A =
    -lambda delta < 0.
    """
    logits = jnp.array([0.5, 0.0, 0.8, -0.3])
    sampled = np.array([[0, 1, 2, 3]])
    old = jax.nn.log_softmax(logits)[sampled]
    rollout = old + jnp.log(jnp.array([[1.0, 1.0, 0.5, 1.0]]))
    mask = np.ones((1, 4), bool)
    index = np.zeros((1, 4), np.int32)
    delta = discrepancy.token_discrepancy(old, rollout)
    base = advantages.group_advantages(np.array([1.0]), np.array([0]), np.array([True]))
    shaped = PENALTIES[method](
        Tokens(
            advantages=masked.gather_to_tokens(base, index),
            discrepancy=delta,
            multiplier=0.1,
            tolerance=0.0,
        )
    )

    def loss(logits):
        now = jax.nn.log_softmax(logits)[sampled]
        summed, _ = policy_surrogate(
            now, old, shaped, mask, np.full((1, 4), 0.25), clip_low=0.2, clip_high=0.24
        )
        return summed.total

    after = jax.nn.log_softmax(logits - 0.5 * jax.grad(loss)(logits))
    change = np.asarray(after - jax.nn.log_softmax(logits))
    if falls:
        # d loss / d logit_2 = 0.25 lambda delta (1 - p_2) > 0 with delta = p_2 / 2
        assert change[2] < -1e-4
        assert np.all(change[[0, 1, 3]] > 0)
    else:
        np.testing.assert_array_equal(change, np.zeros(4))
