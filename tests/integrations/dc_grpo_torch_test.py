"""The torch module against `dcmdp_jax.algorithm` on random batches: values to 1e-6, and the
surrogate's gradient.
"""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import dcmdp_jax  # noqa: E402
from dcmdp_jax.algorithm import discrepancy, dual, penalties  # noqa: E402
from dcmdp_jax.algorithm.remedies import Tokens  # noqa: E402
from dcmdp_jax.integrations import dc_grpo_torch as module  # noqa: E402
from dcmdp_jax.integrations.dc_grpo_torch import DcGrpo  # noqa: E402
from tests.support.surrogate import policy_surrogate  # noqa: E402
from tests.support.waiting import HANGS_S  # noqa: E402

_CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def _batch(seed, rows=6, length=9):
    rng = np.random.default_rng(seed)
    train = -rng.exponential(1.5, (rows, length)).astype(np.float32)
    rollout = np.minimum(train + rng.normal(0, 0.1, train.shape), 0).astype(np.float32)
    mask = np.arange(length) < rng.integers(1, length + 1, (rows, 1))
    return train, rollout, mask, rng.normal(0, 1, rows).astype(np.float32)


def _extreme():
    """Infinite, equal, far apart, above 0 by rounding."""
    values = np.array([-np.inf, -200.0, -30.0, -1e-7, 0.0, 1e-4], np.float32)
    return np.repeat(values, len(values)), np.tile(values, len(values))


@pytest.mark.parametrize("sided", ["two", "one"])
@pytest.mark.parametrize("measure", ["diff", "ratio", "log", "logit"])
def test_token_discrepancy_is_ours(measure, sided):
    batches = [_batch(seed)[:2] for seed in range(50)] + [_extreme()]
    for train, rollout in batches:
        ours = discrepancy.token_discrepancy(train, rollout, measure=measure, sided=sided)
        theirs = module.token_discrepancy(
            torch.tensor(train), torch.tensor(rollout), measure=measure, sided=sided
        )
        np.testing.assert_allclose(theirs.numpy(), ours, **_CLOSE)
    assert torch.isnan(
        module.token_discrepancy(torch.tensor([np.nan]), torch.zeros(1), measure=measure)
    ).all()


def test_fifty_steps_of_penalizing_and_dual_ascent_are_ours():
    settings = {
        "tolerance": 0.02,
        "dual_learning_rate": 0.5,
        "multiplier_min": 0.0,
        "multiplier_max": 1.0,
    }
    theirs = DcGrpo(multiplier=0.1, **settings)
    multiplier = 0.1
    seen = set()
    for seed in range(50):
        train, rollout, mask, advantages = _batch(seed)
        penalized, metrics = theirs.penalize(*map(torch.tensor, (advantages, train, rollout, mask)))
        delta = jnp.where(
            mask, discrepancy.token_discrepancy(train, rollout, measure="diff", sided="two"), 0.0
        )
        rows = np.broadcast_to(advantages[:, None], delta.shape)
        tokens = Tokens(advantages=rows, discrepancy=delta, multiplier=multiplier)
        ours = penalties.dc_grpo(tokens)
        np.testing.assert_allclose(penalized.numpy(), ours, **_CLOSE)
        assert metrics["multiplier"] == pytest.approx(multiplier, abs=1e-6)
        multiplier = float(dual.dual_update(multiplier, jnp.sum(delta) / mask.sum(), **settings))
        assert theirs.multiplier == pytest.approx(multiplier, abs=1e-6)
        seen.add(round(theirs.multiplier, 4))
    assert len(seen) > 20, "lambda stood still"


def test_statistics_are_ours():
    for seed in range(20):
        train, rollout, mask, _ = _batch(seed)
        ours = discrepancy.mismatch_statistics(train, rollout, mask)
        theirs = module.discrepancy_statistics(*map(torch.tensor, (train, rollout, mask)))
        for name, value in ours.items():
            key = name.removeprefix("mismatch/").replace("k1", "kl_k1").replace("k3", "kl_k3")
            assert theirs[key] == pytest.approx(float(value), rel=2e-6, abs=1e-6), name
    empty = module.discrepancy_statistics(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3))
    assert set(empty.values()) == {0.0}


def test_the_surrogate_and_its_gradient_are_ours():
    for seed in range(20):
        train, old, mask, _ = _batch(seed)
        advantages = np.random.default_rng(seed).normal(0, 1, train.shape).astype(np.float32)
        # At a bound itself, and where the batch was used once: the gradient is that of the
        # unclipped side.
        train[0], advantages[0, :2] = old[0], (1.0, 0.0)
        sides = {"clip_low": 0.1, "clip_high": 0.05}

        def ours(train, old=old, advantages=advantages, mask=mask, sides=sides):
            weights = jnp.ones(train.shape, jnp.float32)
            return policy_surrogate(train, old, advantages, mask, weights, **sides)[0].total

        value, gradient = jax.value_and_grad(ours)(jnp.asarray(train))
        there = torch.tensor(train, requires_grad=True)
        tokens = module.clipped_surrogate(
            there, torch.tensor(old), torch.tensor(advantages), **sides
        )
        total = torch.where(torch.tensor(mask), tokens, torch.zeros_like(tokens)).sum()
        total.backward()
        assert total.item() == pytest.approx(float(value), rel=1e-6, abs=1e-6)
        np.testing.assert_allclose(there.grad.numpy(), gradient, **_CLOSE)


def test_the_log_ratio_has_the_gradient_that_its_docstring_says():
    """-1 + 3 = 2 is inside, 0 + 20 = 20 at the limit, 0 + 21 = 21 outside: clamped to 20."""
    numerator = torch.tensor([-1.0, 0.0, 0.0], requires_grad=True)
    denominator = torch.tensor([-3.0, -20.0, -21.0], requires_grad=True)
    log_ratio = module.clamped_log_ratio(numerator, denominator)
    log_ratio.sum().backward()
    assert log_ratio.tolist() == [2.0, 20.0, 20.0]
    assert numerator.grad.tolist() == [1.0, 1.0, 0.0]
    assert denominator.grad.tolist() == [-1.0, -1.0, 0.0]


def test_a_penalty_by_hand():
    """p = 0.5, 0.4; q = 0.4, 0.6: deltas 0.1 and 0.2, mean 0.15. A = 1, lambda = 2: 0.8 and 0.6. lambda += 10 (0.15 - 0.05)."""  # noqa: E501
    dc_grpo = DcGrpo(tolerance=0.05, multiplier=2.0, dual_learning_rate=10.0, multiplier_max=5.0)
    p = torch.tensor([[0.5, 0.4, 0.9]]).log()
    q = torch.tensor([[0.4, 0.6, 0.1]]).log()
    penalized, metrics = dc_grpo.penalize(torch.ones(1), p, q, torch.tensor([[1, 1, 0]]))
    # Were the unsampled token penalized, its advantage would be 1 - 2 * 0.8 = -0.6.
    torch.testing.assert_close(penalized, torch.tensor([[0.8, 0.6, 1.0]]))
    assert dc_grpo.multiplier == pytest.approx(3.0, abs=1e-6) and metrics[
        "violation"
    ] == pytest.approx(0.1, abs=1e-6)
    assert not penalized.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_penalized_advantages_are_a_constant_in_float32(dtype):
    """A = 1, lambda = 0.5, delta = 0.25 and 0.5, exact in each dtype: 0.875 and 0.75."""
    advantages = torch.ones(1, dtype=dtype, requires_grad=True)
    delta = torch.tensor([[0.25, 0.5]], dtype=dtype, requires_grad=True)
    multiplier = torch.tensor(0.5, dtype=dtype, requires_grad=True)
    penalized = module.penalized_advantages(advantages, delta, multiplier)
    assert not penalized.requires_grad
    assert penalized.dtype == torch.float32
    assert penalized.tolist() == [[0.875, 0.75]]


def test_processes_share_one_mean_and_an_evaluation_leaves_lambda():
    train, rollout, mask, advantages = _batch(3)
    whole = DcGrpo(tolerance=0.01)
    halves = [DcGrpo(tolerance=0.01) for _ in range(2)]
    whole.penalize(*map(torch.tensor, (advantages, train, rollout, mask)))
    sums = []
    for part, half in ((slice(0, 2), halves[0]), (slice(2, 6), halves[1])):
        arguments = [torch.tensor(x[part]) for x in (advantages, train, rollout, mask)]
        half.penalize(*arguments, reduce=lambda own: sums.append(own) or own, update=False)
    assert [half.multiplier for half in halves] == [0.1, 0.1]
    arguments = [torch.tensor(x[:2]) for x in (advantages, train, rollout, mask)]
    halves[0].penalize(*arguments, reduce=lambda _: sums[0] + sums[1])
    assert (
        halves[0].multiplier == pytest.approx(whole.multiplier, abs=1e-7)
        and whole.multiplier != 0.1
    )


def test_a_token_without_a_logprob_is_neither_penalized_nor_counted():
    p = torch.tensor([[0.5, 0.5]]).log()
    q = torch.tensor([[0.4, float("nan")]]).log()
    penalized, metrics = DcGrpo(tolerance=0.0, multiplier=1.0).penalize(
        torch.zeros(1), p, q, torch.ones(1, 2)
    )
    torch.testing.assert_close(penalized, torch.tensor([[-0.1, 0.0]]))
    assert metrics["mean"] == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("side", [0, 1])
def test_probabilities_in_place_of_log_probs_are_refused(side):
    """Clamped at 0 they would be a discrepancy of 0, and lambda would never rise."""
    log_probs = [torch.log(torch.tensor([[0.5, 0.25]])), torch.log(torch.tensor([[0.5, 0.5]]))]
    mask = torch.tensor([[1, 0]])
    dc_grpo = DcGrpo(tolerance=0.1)
    given = list(log_probs)
    given[side] = given[side].exp()
    name = ("train", "rollout")[side]
    with pytest.raises(ValueError, match=f"{name}_logprobs is 0.5 .* not probabilities"):
        dc_grpo.penalize(torch.ones(1), *given, mask)
    assert dc_grpo.history == []
    # Outside of the mask, or above 0 by rounding alone, nothing is refused.
    given[side] = log_probs[side] + torch.tensor([[0.6936, 5.0]])
    dc_grpo.penalize(torch.ones(1), *given, mask)


def test_the_state_is_json_and_comes_back(tmp_path):
    dc_grpo = DcGrpo(tolerance=0.01, multiplier=0.25, history=[0.5, 0.25])
    dc_grpo.save(tmp_path)
    assert json.loads((tmp_path / "dc_grpo.json").read_text())["multiplier"] == 0.25
    other = DcGrpo(tolerance=0.02)
    other.load(tmp_path)
    assert (other.multiplier, other.history, other.tolerance) == (0.25, [0.5, 0.25], 0.02)
    other.load(tmp_path, steps=1)
    assert (other.multiplier, other.history) == (0.5, [0.5])
    with pytest.raises(ValueError, match="steps is 3, it holds the state after 1 to 2 updates"):
        other.load(tmp_path, steps=3)
    for text, message in (
        ("[]", "not the state"),
        ('{"multiplier": 9, "history": []}', "multiplier is 9.0"),
    ):
        (tmp_path / "dc_grpo.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            other.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("new/dir", "new/dir/dc_grpo.json"),
        ("step_0.5", "step_0.5/dc_grpo.json"),
        ("new/lambda.json", "new/lambda.json"),
        ("old", "old"),
        ("old.txt", "old.txt"),
        ("there", "there/dc_grpo.json"),
        ("there.json", "there.json/dc_grpo.json"),
    ],
)
def test_save_load_and_resume_read_a_path_alike(tmp_path, name, file):
    """A file that exists, or a name in .json, is a file; any other path is a directory."""
    state = json.dumps({"multiplier": 0.5, "history": [0.5]})
    for older in ("old", "old.txt"):
        (tmp_path / older).write_text(state)
    for directory in ("there", "there.json"):
        (tmp_path / directory).mkdir()
    saved = DcGrpo(tolerance=0.01, multiplier=0.7, history=[0.6, 0.7])
    saved.save(tmp_path / name)
    assert json.loads((tmp_path / file).read_text())["multiplier"] == 0.7

    loaded = DcGrpo(tolerance=0.01)
    loaded.load(str(tmp_path / name))
    # 0.1, the default, if the state is ignored.
    resumed = DcGrpo(tolerance=0.01)
    resumed.resume(str(tmp_path / name))
    assert (loaded.multiplier, resumed.multiplier) == (0.7, 0.7)
    resumed.resume(tmp_path / name, steps=1)
    assert (resumed.multiplier, resumed.history) == (0.6, [0.6])


def test_a_state_of_an_older_version_is_read_under_any_name(tmp_path):
    """Older versions wrote a file under the very name that was given."""
    (tmp_path / "checkpoints").write_text(json.dumps({"multiplier": 0.7, "history": [0.7]}))
    resumed = DcGrpo(tolerance=0.01)
    resumed.resume(tmp_path / "checkpoints")
    assert (resumed.multiplier, resumed.history) == (0.7, [0.7])


def test_without_a_state_load_raises_and_resume_leaves_lambda(tmp_path):
    dc_grpo = DcGrpo(tolerance=0.01, multiplier=0.7)
    (tmp_path / "empty").mkdir()
    for name in ("none", "none.json", "empty"):
        dc_grpo.resume(tmp_path / name)
        with pytest.raises(FileNotFoundError):
            dc_grpo.load(tmp_path / name)
    dc_grpo.resume(None)
    assert (dc_grpo.multiplier, dc_grpo.history) == (0.7, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": -1}, "tolerance is -1"),
        ({"tolerance": "1e-3"}, "tolerance is '1e-3': must be a number .YAML: 0.001"),
        ({"tolerance": None}, "^tolerance is None: must be a number$"),
        ({"tolerance": 0.1, "multiplier": 2}, "multiplier is 2"),
        ({"tolerance": 0.1, "multiplier": "1e-1"}, "^multiplier is '1e-1': must be a number .YAML"),
        ({"tolerance": 0.1, "multiplier": [0.1]}, r"^multiplier is \[0.1\]: must be a number$"),
        ({"tolerance": 0.1, "multiplier_min": None}, "^multiplier_min is None: must be a number$"),
        ({"tolerance": 0.1, "multiplier_max": "1"}, "^multiplier_max is '1': must be a number"),
        ({"tolerance": 0.1, "multiplier_max": None}, "^multiplier_max is None: must be a number$"),
        (
            {"tolerance": 0.1, "dual_learning_rate": "1e-1"},
            "^dual_learning_rate is '1e-1': must be",
        ),
        ({"tolerance": 0.1, "multiplier_max": float("inf")}, "finite multiplier_max=inf"),
        ({"tolerance": 0.1, "measure": "kl"}, "measure='kl'"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DcGrpo(**options)


def test_a_number_of_numpy_or_torch_is_a_float_that_json_takes(tmp_path):
    """0.25 and 0.5 are exact in float32; as a numpy scalar or a tensor JSON refuses them."""
    dc_grpo = DcGrpo(tolerance=np.float32(0.25), multiplier=torch.tensor(0.5))
    dc_grpo.save(tmp_path)
    state = json.loads((tmp_path / "dc_grpo.json").read_text())
    assert (state["tolerance"], state["multiplier"]) == (0.25, 0.5)


def test_it_imports_neither_jax_nor_the_rest_of_the_package():
    code = (
        "import sys, dcmdp_jax.integrations.dc_grpo_torch, dcmdp_jax.record;"
        "print([name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib', 'flax')]);"
        "print(sorted(name for name in sys.modules if name.startswith('dcmdp_jax')))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANGS_S
    ).stdout
    own = ["dcmdp_jax"] + [
        f"dcmdp_jax.{name}" for name in ("integrations", "integrations.dc_grpo_torch", "record")
    ]
    assert said.splitlines() == ["[]", str([*own, "dcmdp_jax.version"])]


def test_a_torch_tensor_with_a_gradient_is_sent_to_this_module_by_the_loss_in_jax():
    train = torch.full((2, 1), -0.5, requires_grad=True)
    others = [torch.full((2, 1), -0.5)] * 2 + [
        torch.ones(2, 1),
        torch.ones(2),
        torch.zeros(2).int(),
    ]
    message = "train_logprobs is a torch tensor with a gradient.*integrations.dc_grpo_torch"
    with pytest.raises(ValueError, match=message):
        dcmdp_jax.dc_grpo_loss(train, *others, multiplier=0.1, tolerance=0.1)


def test_log_probs_in_float16_are_refused_and_in_bfloat16_have_a_finite_gradient():
    old = torch.full((1, 1), -12.5)
    advantages = torch.full((1, 1), -1.0)
    with pytest.raises(
        ValueError, match="^train_logprobs has dtype float16, .* convert the logits to float32"
    ):
        module.clipped_surrogate(torch.full((1, 1), -0.5, dtype=torch.float16), old, advantages)
    train = torch.full((1, 1), -0.5, dtype=torch.bfloat16, requires_grad=True)
    module.clipped_surrogate(train, old, advantages).sum().backward()
    assert float(train.grad) == pytest.approx(
        np.exp(12), rel=1e-2
    )  # 162,755; float16 ends at 65,504
