"""dc_grpo_loss against the paper's equations and the compiled step on the same batch.

The equations are a loop over tokens; the step has the batch packed.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dcmdp_jax
from dcmdp_jax.algorithm.dual import dual_init
from dcmdp_jax.data.packing import pack
from dcmdp_jax.data.row_layout import make_row_shapes
from dcmdp_jax.models.row_logprobs import RowOutputs
from dcmdp_jax.training.state import new_state
from dcmdp_jax.training.step import StepSetup, jit_step, train_step
from tests.support import step_runs
from tests.support.sampling import Rollout

LENGTHS = (5, 3, 1, 4, 2, 5, 5, 1)
CONSTANTS = {"multiplier": 0.4, "tolerance": 0.05, "dual_learning_rate": 1.5, "clip_high": 0.24}
NAMES = (
    "train_logprobs",
    "old_logprobs",
    "rollout_logprobs",
    "completion_mask",
    "rewards",
    "group_ids",
)


def draw(seed=0, dtype=np.float64):
    """Eight interleaved completions of two prompts, with ratios on both sides of the clip.

    NaN outside the mask.
    """
    rng = np.random.default_rng(seed)
    mask = np.arange(5) < np.array(LENGTHS)[:, None]
    old = np.log(rng.uniform(0.05, 0.9, mask.shape))
    train = np.minimum(old + rng.normal(0, 0.3, mask.shape), -1e-3)
    rollout = np.log(np.exp(old) * rng.uniform(0.6, 1.1, mask.shape))
    rewards = np.array([1.0, 0.0, 0.0, 2.0, 1.0, 0.5, 0.0, 0.0])
    arrays = [np.where(mask, x, np.nan).astype(dtype) for x in (train, old, rollout)]
    return {
        **dict(
            zip(NAMES, (*arrays, mask, rewards.astype(dtype), np.array([0, 1] * 4)), strict=True)
        ),
        **CONSTANTS,
    }


def equations(data, aggregation="seq_mean_token_mean", limit=7):
    """The paper's formulas on whole arrays in float64 NumPy, with the gradient in log pi_theta."""
    train, old, rollout = (
        np.where(data["completion_mask"], data[name], 0).astype(np.float64) for name in NAMES[:3]
    )
    m = data["completion_mask"].astype(float)
    r = data["rewards"].astype(np.float64)
    g = data["group_ids"]
    delta = np.abs(np.exp(old) - np.exp(rollout)) * m
    A = np.array(
        [(r[i] - r[g == g[i]].mean()) / (r[g == g[i]].std(ddof=1) + 1e-6) for i in range(len(r))]
    )
    A_dc = A[:, None] - data["multiplier"] * delta
    gamma = np.exp(train - old)
    free = gamma * A_dc
    bound = np.clip(gamma, 0.8, 1 + data["clip_high"]) * A_dc
    weight = {
        "seq_mean_token_mean": m / m.sum(1, keepdims=True) / len(m),
        "token_mean": m / m.sum(),
        "fixed_length": m / limit / len(m),
    }[aggregation]
    mean = delta.sum() / m.sum()
    return {
        "loss": -(weight * np.minimum(free, bound)).sum(),
        "gradient": -weight * free * (free <= bound),
        "delta": delta,
        "mean_delta": mean,
        "advantages": A,
        "penalized_advantages": A_dc * m,
        "ratio": gamma,
        "next_multiplier": np.clip(
            data["multiplier"] + data["dual_learning_rate"] * (mean - data["tolerance"]), 0, 1
        ),
    }


def loop(data):
    """The same token by token, in Python's numbers, from Algorithm 1."""
    groups = {}
    for group, reward in zip(data["group_ids"], data["rewards"], strict=True):
        groups.setdefault(int(group), []).append(float(reward))
    loss = 0.0
    total = 0.0
    tokens = 0
    for i, length in enumerate(LENGTHS):
        members = groups[int(data["group_ids"][i])]
        average = sum(members) / len(members)
        deviation = math.sqrt(sum((x - average) ** 2 for x in members) / (len(members) - 1))
        advantage = (float(data["rewards"][i]) - average) / (deviation + 1e-6)
        of_tokens = 0.0
        for t in range(length):
            now, old, rollout = (float(data[name][i, t]) for name in NAMES[:3])
            delta = abs(math.exp(old) - math.exp(rollout))
            penalized = advantage - data["multiplier"] * delta
            gamma = math.exp(now - old)
            of_tokens += min(gamma * penalized, min(max(gamma, 0.8), 1.24) * penalized)
            total = total + delta
            tokens = tokens + 1
        loss -= of_tokens / length / len(LENGTHS)
    moved = data["multiplier"] + data["dual_learning_rate"] * (total / tokens - data["tolerance"])
    return loss, min(max(moved, 0.0), 1.0)


def call(data, *, jit=False, **options):
    """Loss, gradient in every log-prob, and aux."""
    arrays = [data[name] for name in NAMES]
    constants = {name: value for name, value in data.items() if name not in NAMES}
    function = functools.partial(dcmdp_jax.dc_grpo_loss, **constants, **options)
    gradients = jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True)
    if jit:
        gradients = jax.jit(gradients)
    return gradients(*arrays)


def check(found, expected, rtol):
    (loss, aux), (gradient, *others) = found
    for name, value in {"loss": loss, "gradient": gradient, **aux._asdict()}.items():
        np.testing.assert_allclose(value, expected[name], rtol=rtol, atol=rtol * 0.1, err_msg=name)
    assert not any(np.any(np.asarray(x) != 0) for x in others), (
        "the gradient flows into train_logprobs alone"
    )


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean", "fixed_length"])
def test_it_is_the_papers_equations_in_float64_and_float32(aggregation):
    data = draw()
    expected = equations(data, aggregation)
    assert (expected["gradient"][data["completion_mask"]] == 0).sum() > 3  # the clip bites
    with jax.enable_x64(True):
        found = call(data, aggregation=aggregation, max_completion_tokens=7)
        assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float64")}
        check(found, expected, 1e-12)
        as_integers = {
            **data,
            "rewards": (2 * data["rewards"]).astype(int),
            "multiplier": 0.2,
            "tolerance": 0.025,
        }
        found = call(as_integers, aggregation=aggregation, max_completion_tokens=7)
        check(found, equations(as_integers, aggregation), 1e-12)
    for jit in (False, True):
        data = draw(dtype=np.float32)
        found = call(data, jit=jit, aggregation=aggregation, max_completion_tokens=7)
        assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype("float32")}
        check(found, expected, 2e-6)


def test_it_is_the_loop_over_tokens_on_arrays_of_any_kind():
    data = draw()
    loss, multiplier = loop(data)
    given = {
        **data,
        **{name: np.where(data["completion_mask"], data[name], 0.0).tolist() for name in NAMES[:3]},
    }
    given |= {
        "completion_mask": data["completion_mask"].astype(int).tolist(),
        "group_ids": jnp.asarray(data["group_ids"]),
    }
    for arrays in (data, given):
        value, aux = dcmdp_jax.dc_grpo_loss(**arrays)
        assert float(value) == pytest.approx(loss, rel=1e-6)
        assert float(aux.next_multiplier) == pytest.approx(multiplier, rel=1e-6)


def test_it_is_the_composition_of_the_public_parts():
    data = draw(dtype=np.float32)
    mask = data["completion_mask"]
    train, old, rollout = (np.where(mask, data[name], 0) for name in NAMES[:3])
    delta = dcmdp_jax.token_discrepancy(old, rollout, completion_mask=mask)
    advantages = dcmdp_jax.group_advantages(data["rewards"], data["group_ids"])
    penalized = dcmdp_jax.penalized_advantages(advantages, delta, 0.4)
    region = dcmdp_jax.clipped_surrogate(
        dcmdp_jax.importance_ratio(train, old), penalized, clip_high=0.24
    )
    mean = delta.sum() / mask.sum()
    value, aux = dcmdp_jax.dc_grpo_loss(**data)
    per_completion = np.where(mask, region.objective, 0).sum(1) / mask.sum(1)
    assert float(value) == pytest.approx(-per_completion.mean(), rel=1e-6)
    np.testing.assert_array_equal(aux.penalized_advantages, np.where(mask, penalized, 0))
    assert float(aux.next_multiplier) == dcmdp_jax.dual_update(
        0.4, mean, tolerance=0.05, dual_learning_rate=1.5
    )


def _packed_step(data, clip_high):
    """One step of the product on the batch, two completions a row.

    Its policy's log-prob of token k is parameter k.
    """
    order = np.argsort(
        data["group_ids"], kind="stable"
    )  # members of a group follow each other, as sampled
    tables = {
        name: np.concatenate([[0], *(data[name][i, : LENGTHS[i]] for i in order)]).astype(
            np.float32
        )
        for name in NAMES[:3]
    }
    lengths = [LENGTHS[i] for i in order]
    ids = np.split(np.arange(1, sum(lengths) + 1, dtype=np.int32), np.cumsum(lengths)[:-1])
    rollout = Rollout(
        [np.zeros(2, np.int32)] * len(ids),
        ids,
        [tables["rollout_logprobs"][each] for each in ids],
        ["stop"] * len(ids),
        data["group_ids"][order],
        0,
    )
    plan = make_row_shapes(
        row_lengths=(16,),
        micro_batch_tokens=32,
        mini_batches=1,
        completions=len(ids),
        segments_per_row=2,
        row_shards=1,
    )
    batch, _ = pack(
        rollout.episodes, data["rewards"][order].astype(np.float32), plan, mask_truncated=False
    )
    assert max(np.max(bucket.segment_ids) for bucket in batch.rows) == 2
    rows = (
        bucket.with_columns(old_logprobs=tables["old_logprobs"][bucket.input_ids])
        for bucket in batch.rows
    )
    batch = batch._replace(rows=tuple(rows))

    def row_logprobs(params, rows):
        logprobs = jnp.where(rows.completion_mask, params["table"][rows.input_ids], 0.0)
        return RowOutputs(logprobs, jnp.zeros_like(logprobs), {})

    settings = dataclasses.replace(
        step_runs.ALGORITHM,
        multiplier=0.4,
        tolerance=0.05,
        dual_learning_rate=1.5,
        trust_region=f"clip(high={clip_high})",
    )
    schedule = optax.constant_schedule(1.0)
    optimizer = optax.with_extra_args_support(optax.sgd(schedule))
    parts = StepSetup(
        row_logprobs=row_logprobs,
        compute_dtype="float32",
        settings=settings,
        max_completion_tokens=7,
        optimizer=optimizer,
        schedule=schedule,
        mesh=None,
    )
    step = jit_step(train_step, parts)
    params = {"table": jnp.asarray(tables["train_logprobs"])}
    state = new_state(params, optimizer, dual_init(0.4, tolerance=0.05))
    state, metrics, _ = step(state, batch, None)
    gradient = np.zeros(data["completion_mask"].shape, np.float32)
    moved = tables["train_logprobs"] - np.asarray(state.params["table"])
    for i, tokens in zip(order, ids, strict=True):
        gradient[i, : len(tokens)] = moved[tokens]
    return metrics, gradient, state.dual.multiplier


def test_it_is_the_compiled_step_on_the_same_batch_packed():
    data = draw(3, np.float32)
    metrics, gradient, multiplier = _packed_step(data, 0.24)
    (loss, aux), (ours, *_) = call(data, jit=True)
    assert float(metrics["policy/loss"]) == pytest.approx(float(loss), rel=2e-6)
    assert float(metrics["discrepancy/mean"]) == pytest.approx(float(aux.mean_delta), rel=2e-6)
    assert float(multiplier) == pytest.approx(float(aux.next_multiplier), rel=2e-6)
    np.testing.assert_allclose(gradient, ours, atol=5e-7)  # a difference of parameters near 3
    assert np.abs(gradient).max() > 0.05


def test_the_parts_refuse_what_does_not_fit():
    one = np.ones((2, 3))
    row = np.ones(2)
    for message, part in {
        r"mean_discrepancy has shape \(2, 3\)": lambda: dcmdp_jax.dual_update(
            0.1, one, tolerance=0.1
        ),
        r"multiplier=-1.0": lambda: dcmdp_jax.dual_update(jnp.float32(-1), 0.1, tolerance=0.1),
        r"multiplier=nan": lambda: dcmdp_jax.penalized_advantages(row, one, math.nan),
        r"shapes differ: advantages \(3, 3\)": lambda: dcmdp_jax.penalized_advantages(
            np.ones(3), one, 0.1
        ),
        r"shapes differ: train_logprobs": lambda: dcmdp_jax.importance_ratio(one, row),
        r"shapes differ: ratio": lambda: dcmdp_jax.clipped_surrogate(one, row),
        r"clip_low=1.0; .*\[0, 1\)": lambda: dcmdp_jax.clipped_surrogate(one, one, clip_low=1.0),
        r"shapes differ: train_logprobs .*, completion_mask": lambda: dcmdp_jax.token_discrepancy(
            one, one, completion_mask=row
        ),
        r"group_ids has dtype float": lambda: dcmdp_jax.group_advantages(row, row),
        r"group_ids has -1; must be in 0 .. 1": lambda: dcmdp_jax.group_advantages(row, [0, -1]),
        r"epsilon=-1": lambda: dcmdp_jax.group_advantages(row, [0, 0], epsilon=-1),
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            part()


def _with(name, index, value):
    def change(data):
        data[name] = np.array(data[name])
        data[name][index] = value

    return change


BAD = {
    r"shapes differ: .*rollout_logprobs \(8, 4\)": lambda data: data.update(
        rollout_logprobs=np.zeros((8, 4))
    ),
    r"train_logprobs has shape \(40,\)": lambda data: data.update(train_logprobs=np.zeros(40)),
    r"rewards has shape \(3,\); must be \(8,\)": lambda data: data.update(rewards=np.zeros(3)),
    r"rewards has shape \(8, 5\)": lambda data: data.update(rewards=np.zeros((8, 5))),
    r"group_ids has shape \(7,\)": lambda data: data.update(group_ids=np.zeros(7, int)),
    r"group_ids has dtype float": lambda data: data.update(group_ids=data["group_ids"] * 1.0),
    r"old_logprobs has dtype int": lambda data: data.update(old_logprobs=np.ones((8, 5), int)),
    r"multiplier has shape \(1,\)": lambda data: data.update(multiplier=np.array([0.1])),
    r"clip_low=1.5": lambda data: data.update(clip_low=1.5),
    r"clip_high=-0.1": lambda data: data.update(clip_high=-0.1),
    r"tolerance=nan": lambda data: data.update(tolerance=math.nan),
    r"multiplier_max=0.1; .*\[0.2,": lambda data: data.update(
        multiplier_min=0.2, multiplier_max=0.1
    ),
    r"aggregation='mean'": lambda data: data.update(aggregation="mean"),
    r"max_completion_tokens=None": lambda data: data.update(aggregation="fixed_length"),
    r"measure='kl'": lambda data: data.update(measure="kl"),
    r"ddof=2": lambda data: data.update(ddof=2),
}
BAD_LISTS = {
    r"old_logprobs is a list of lists that differ in length": lambda data: data.update(
        old_logprobs=[[-1.0]] + [[]] * 7
    ),
    r"rollout_logprobs has dtype <U1": lambda data: data.update(rollout_logprobs=[["a"] * 5] * 8),
    r"train_logprobs has dtype object": lambda data: data.update(
        train_logprobs=data["train_logprobs"].astype(object)
    ),
    r"rewards has dtype object": lambda data: data.update(rewards=[1.0, None] * 4),
    r"rewards has dtype complex": lambda data: data.update(rewards=data["rewards"] * 1j),
    r"group_ids has dtype <U1; must be integers: numpy.unique": lambda data: data.update(
        group_ids=list("aabbccdd")
    ),
    r"rollout_logprobs is None": lambda data: data.update(rollout_logprobs=None),
}
BAD_VALUES = {
    r"multiplier=-0.5; must be a finite number in \[0, inf\)": lambda data: data.update(
        multiplier=jnp.float32(-0.5)
    ),
    r"multiplier='0.1'; must be a number": lambda data: data.update(multiplier="0.1"),
    r"tolerance=-1.0; must be": lambda data: data.update(tolerance=np.array(-1.0)),
    r"train_logprobs is nan at \[3, 1\]": _with("train_logprobs", (3, 1), np.nan),
    r"rollout_logprobs is inf at \[0, 0\]": _with("rollout_logprobs", (0, 0), np.inf),
    r"old_logprobs is nowhere below 0 .* not probabilities": lambda data: data.update(
        old_logprobs=np.nan_to_num(np.exp(data["old_logprobs"])) * (np.arange(5) > 0)
    ),
    r"train_logprobs is 0.25 at \[3, 1\]; must be a log-prob in nats, at most 0": _with(
        "train_logprobs", (3, 1), 0.25
    ),
    r"rollout_logprobs is nowhere below 0 .* or negated log-probs": lambda data: data.update(
        rollout_logprobs=np.abs(np.nan_to_num(data["rollout_logprobs"]))
    ),
    r"max_completion_tokens=1; a completion has \d tokens": lambda data: data.update(
        aggregation="fixed_length", max_completion_tokens=1
    ),
    r"rewards is 1e\+20 at \[2\]; must be finite, below 1e\+18": _with("rewards", 2, 1e20),
    r"rewards is nan at \[2\]": _with("rewards", 2, np.nan),
    r"completion_mask is 0 in row 0": lambda data: data.update(
        completion_mask=np.zeros((8, 5), bool)
    ),
    r"completion_mask is 0 in row 4": _with("completion_mask", 4, False),
    r"completion_mask is 0.5 at \[0, 2\]": lambda data: data.update(
        completion_mask=np.where(np.arange(40).reshape(8, 5) == 2, 0.5, 1.0)
    ),
    r"group_ids has a group of one, id 2": _with("group_ids", 5, 2),
    r"group_ids has 70; must be in 0 .. 7": lambda data: data.update(
        group_ids=data["group_ids"] * 70
    ),
}


@pytest.mark.parametrize("message", [*BAD, *BAD_VALUES])
def test_bad_input_is_one_line_that_names_the_argument(message):
    data = draw()
    {**BAD, **BAD_VALUES}[message](data)
    with pytest.raises(ValueError, match=f"^{message}") as error:
        dcmdp_jax.dc_grpo_loss(**data)
    assert "\n" not in str(error.value)
    train = data.pop("train_logprobs")
    with pytest.raises(ValueError, match=f"^{message}"):
        jax.grad(lambda train: dcmdp_jax.dc_grpo_loss(train, **data)[0])(train)
    others = {name: data.pop(name) for name in NAMES[1:]}
    traced = jax.jit(lambda train, others: dcmdp_jax.dc_grpo_loss(train, **others, **data))
    if message in BAD:  # seen under jit too
        with pytest.raises(ValueError, match=message.partition("\\[")[0]):
            traced(train, others)


@pytest.mark.parametrize("message", BAD_LISTS)
def test_lists_that_are_no_arrays_of_numbers_are_one_line_too(message):
    data = draw()
    BAD_LISTS[message](data)
    with pytest.raises(ValueError, match=f"^{message}") as error:
        dcmdp_jax.dc_grpo_loss(**data)
    assert "\n" not in str(error.value)


def test_under_jit_a_group_id_outside_is_seen_in_the_loss_and_not_another_groups_statistics():
    data = {name: value for name, value in draw().items() if name in NAMES}
    for outside in (8, -1):
        _with("group_ids", 5, outside)(data)
        loss, aux = jax.jit(lambda data: dcmdp_jax.dc_grpo_loss(**data, **CONSTANTS))(data)
        assert np.isnan(loss) and np.flatnonzero(np.isnan(aux.advantages)).tolist() == [5]


def test_under_jit_the_range_of_lambda_may_be_traced():
    data = {name: value for name, value in draw().items() if name in NAMES}
    _, aux = jax.jit(dcmdp_jax.dc_grpo_loss)(**data, **CONSTANTS, multiplier_min=0.9)
    assert float(aux.next_multiplier) == np.float32(0.9)


def test_under_jit_a_nan_is_seen_in_the_loss_and_an_empty_completion_is_left_out():
    data = {name: value for name, value in draw().items() if name in NAMES}
    loss = jax.jit(lambda data: dcmdp_jax.dc_grpo_loss(**data, **CONSTANTS)[0])
    _with("train_logprobs", (3, 1), np.nan)(data)
    assert np.isnan(loss(data))
    data = draw()
    expected = equations(
        data
    )  # the reward of the third stays in its group: only the mean over completions changes
    data["completion_mask"][2] = False
    kept = [i for i in range(8) if i != 2]
    free = expected["ratio"] * expected["penalized_advantages"]
    bound = np.clip(expected["ratio"], 0.8, 1.24) * expected["penalized_advantages"]
    means = np.minimum(free, bound).sum(1) / np.array(LENGTHS)
    assert float(loss({name: data[name] for name in NAMES})) == pytest.approx(
        -means[kept].mean(), rel=1e-5
    )


def test_the_first_update_is_reinforce_with_the_penalty_and_without_it_grpo():
    # gamma = 1: the gradient is -A^DC / (|o_i| N). With multiplier 0 it is -A / (|o_i| N) whatever
    # the engine says.
    data = draw(dtype=np.float32)
    data["train_logprobs"] = data["old_logprobs"]
    for multiplier in (0.4, 0.0):
        (_, aux), (gradient, *_) = call({**data, "multiplier": multiplier})
        weight = data["completion_mask"] / np.array(LENGTHS)[:, None] / 8
        np.testing.assert_allclose(gradient, -weight * aux.penalized_advantages, rtol=1e-6)
    mask = data["completion_mask"]
    np.testing.assert_array_equal(
        aux.penalized_advantages, np.where(mask, aux.advantages[:, None], 0)
    )


def test_log_probs_in_float16_whose_gradient_overflows_are_refused_and_in_bfloat16_are_not():
    # One token, 12 nats likelier than it was, A = -1: the gradient is e^12 = 162,755, above
    # float16's 65,504.
    now = [[-0.5]] * 2

    def loss(train, dtype, compiled=lambda function: function):
        old = jnp.asarray([[-12.5]] * 2, dtype)

        def of_train(train):
            loss, _ = dcmdp_jax.dc_grpo_loss(
                train,
                old_logprobs=old,
                rollout_logprobs=old,
                completion_mask=[[1]] * 2,
                rewards=[0.0, 1.0],
                group_ids=[0, 0],
                multiplier=0,
                tolerance=0,
            )
            return loss

        return compiled(of_train)(train)

    # The mean over two completions, each A is +-1 / sqrt(2) by the unbiased deviation.
    expected = np.exp(12) / np.sqrt(2) / 2
    for dtype in (jnp.bfloat16, jnp.float32):
        gradient = jax.grad(loss)(jnp.asarray(now, dtype), dtype)
        assert (
            float(gradient[0, 0]) == pytest.approx(expected, rel=1e-2)
            and float(gradient[1, 0]) == 0
        )
    narrow = jnp.asarray(now, jnp.float16)
    for compiled in (jax.jit, jax.grad, lambda function: function):
        with pytest.raises(
            ValueError, match="^train_logprobs has dtype float16, .* convert the logits to float32"
        ):
            loss(narrow, jnp.float16, compiled)
    # What no gradient reaches may be float16.
    train = jnp.asarray(now, jnp.float32)
    assert float(jax.grad(loss)(train, jnp.float16)[0, 0]) == pytest.approx(expected, rel=1e-5)
