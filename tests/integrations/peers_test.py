"""The hooks with the real packages, each skipped with a reason where its package is not
installed.
"""

import importlib
import os
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dcmdp_jax.integrations.dc_grpo_torch import DcGrpo, dual_update  # noqa: E402
from tests.support.penalized_tokens import MASK, MOVED, PENALIZED, P, Q  # noqa: E402

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")


def _installed(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(
            f"{name} can't be imported ({error}); benchmarks/results/hooks.txt has the command that runs "
            "this"
        )


@pytest.fixture(scope="module")
def verl():
    """verl with the hooks registered, and their state."""
    _installed("verl.trainer.ppo.ray_trainer")
    from dcmdp_jax.integrations.verl_hooks import register

    dc_grpo = DcGrpo(tolerance=0.02, multiplier=0.5, dual_learning_rate=2.0)
    recorded = []
    register(dc_grpo, on_batch=recorded.append)
    return dc_grpo, recorded


def test_verls_compute_advantage_penalizes_its_own_group_advantages(verl):
    from verl import DataProto
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import ray_trainer

    dc_grpo, recorded = verl
    # One group of rewards 1 and 0: mean 1/2, unbiased deviation 0.7071; A = +-0.7071 / (1 +
    # 1.4e-6).
    scores = torch.zeros(2, 3)
    scores[0, 2] = 1.0
    batch = {
        "token_level_rewards": scores,
        "response_mask": MASK,
        "old_log_probs": P,
        "rollout_log_probs": Q,
    }
    data = DataProto.from_dict(tensors=batch, non_tensors={"uid": np.array(["a", "a"], object)})
    asked = dict(
        gamma=1.0, lam=1.0, num_repeat=2, norm_adv_by_std_in_grpo=True, config=AlgoConfig()
    )
    found = ray_trainer.compute_advantage(data, adv_estimator="dc_grpo", **asked)
    a = 0.5 / (0.5**0.5 + 1e-6)
    expected = torch.tensor([[a - 0.05, a - 0.1, a], [-a - 0.05, -a - 0.1, 0.0]])
    torch.testing.assert_close(found.batch["advantages"], expected, rtol=0, atol=1e-6)
    assert dc_grpo.multiplier == pytest.approx(MOVED, abs=1e-6) and recorded == [found]
    # Its own estimators are left alone.
    plain = ray_trainer.compute_advantage(data, adv_estimator="grpo", config=AlgoConfig())
    assert (
        plain.batch["advantages"][0].tolist() == pytest.approx([a] * 3)
        and len(dc_grpo.history) == 1
    )


def test_verls_newer_trainer_calls_the_same_function(verl):
    utils = _installed("verl.trainer.ppo.v1.utils")
    from verl.trainer.ppo import ray_trainer

    from dcmdp_jax.integrations import verl_hooks

    if utils.compute_advantage is not ray_trainer.compute_advantage:
        pytest.fail("verl.trainer.ppo.v1.utils holds the function as it was before it was wrapped")
    assert "verl.trainer.ppo.v1.utils" in verl_hooks._CALLERS
    trainer = _installed("verl.trainer.ppo.v1.trainer_base")
    name = "compute_advantage_for_multi_trajectories"
    assert (
        getattr(trainer, name) is getattr(utils, name)
        and getattr(utils, name).__wrapped__.__name__ == name
    )


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_verls_registered_loss_is_the_clipped_surrogate_and_has_its_gradient(verl, mode):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    from dcmdp_jax.integrations.dc_grpo_torch import clipped_surrogate

    config = types.SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=0.1, clip_ratio_high=None, global_batch_info={}
    )
    moved = P + torch.tensor([[0.3, -0.2, 0.05], [0.3, -0.2, 0.05]])
    arguments = {
        "old_log_prob": P,
        "advantages": PENALIZED,
        "response_mask": MASK,
        "loss_agg_mode": mode,
    }
    there, here = (moved.clone().requires_grad_() for _ in range(2))
    value, metrics = get_policy_loss_fn("dc_grpo")(log_prob=there, config=config, **arguments)
    losses = clipped_surrogate(here, P, PENALIZED, clip_low=0.1, clip_high=0.2) * MASK
    expected = losses.sum() / 5 if mode == "token-mean" else (losses.sum(1) / MASK.sum(1)).mean()
    assert value.item() == pytest.approx(expected.item(), abs=1e-6)
    value.backward()
    expected.backward()
    torch.testing.assert_close(there.grad, here.grad)
    # log(r) = 0.3, -0.2, 0.05, 0.3, -0.2: mean 0.05.
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.05, abs=1e-6)
    with pytest.raises(ValueError, match="rollout_correction"):
        get_policy_loss_fn("dc_grpo")(
            log_prob=there, config=config, rollout_is_weights=MASK, **arguments
        )


def test_skyrls_own_batch_estimator_and_loss_take_the_penalty():
    _installed("skyrl.backends.skyrl_train.utils.ppo_utils")
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.backends.skyrl_train.utils import ppo_utils
    from skyrl.train.config import AlgorithmConfig

    from dcmdp_jax.integrations.skyrl_trainer import penalize

    rewards = torch.zeros(2, 3)
    rewards[0, 2] = 1.0
    advantages, _ = ppo_utils.compute_advantages_and_returns(
        token_level_rewards=rewards,
        response_mask=MASK,
        index=np.array(["a", "a"]),
        adv_estimator="grpo",
        config=None,
        grpo_norm_by_std=True,
    )
    batch = TrainingInputBatch(
        {"advantages": advantages, "action_log_probs": P, "rollout_logprobs": Q, "loss_mask": MASK}
    )
    dc_grpo = DcGrpo(tolerance=0.02, multiplier=0.5, dual_learning_rate=2.0)
    metrics = penalize(dc_grpo, batch)
    a = 0.5 / (0.5**0.5 + 1e-6)
    expected = torch.tensor([[a - 0.05, a - 0.1, a], [-a - 0.05, -a - 0.1, 0.0]])
    torch.testing.assert_close(batch["advantages"], expected, rtol=0, atol=1e-6)
    assert dc_grpo.multiplier == pytest.approx(MOVED, abs=1e-6) and metrics[
        "mean"
    ] == pytest.approx(0.12, abs=1e-6)
    train = P.clone().requires_grad_()
    loss, _ = ppo_utils.PolicyLossRegistry.get("regular")(
        train, P, batch["advantages"], AlgorithmConfig(policy_loss_type="regular"), loss_mask=MASK
    )
    loss.backward()
    assert (
        torch.isfinite(train.grad).all()
        and (train.grad[0] < 0).all()
        and (train.grad[1, :2] > 0).all()
    )


def test_skyrls_trainer_has_the_methods_that_are_overridden():
    trainer = _installed("skyrl.train.trainer").RayPPOTrainer
    for name in ("compute_advantages_and_returns", "save_checkpoints", "load_checkpoints"):
        assert callable(getattr(trainer, name))


def test_prime_rls_own_compute_loss_calls_the_loss_for_each_sample():
    loss_module = _installed("prime_rl.trainer.rl.loss")
    from prime_rl.configs.trainer import CustomLossConfig

    from dcmdp_jax.integrations import prime_rl_loss

    prime_rl_loss._loss = None
    config = CustomLossConfig(
        import_path="dcmdp_jax.integrations.prime_rl_loss.dc_grpo_loss",
        kwargs={"tolerance": 0.02, "multiplier": 0.5, "dual_learning_rate": 2.0},
    )
    parameter = torch.nn.Parameter(P.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    advantages = [torch.full((3,), 1.0), torch.full((3,), -1.0)]
    unused = dict.fromkeys(("ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights"))
    columns = dict(
        trainer_logprobs=list(parameter), inference_logprobs=list(Q), loss_mask=list(MASK.bool())
    )
    scales = dict(
        rl_loss_fn=loss_module.setup_rl_loss_fn(config), rl_scale=5, ce_scale=1, ref_kl_scale=1
    )
    loss, metrics = loss_module.compute_loss(advantages=advantages, **columns, **unused, **scales)
    assert loss.item() == pytest.approx(-PENALIZED.sum().item() / 5, abs=1e-6)
    loss.backward()
    torch.testing.assert_close(parameter.grad, -PENALIZED / 5)
    optimizer.step()
    assert prime_rl_loss._loss.dc_grpo.multiplier == pytest.approx(MOVED, abs=1e-6)
    assert metrics["dc_grpo/mean"].tolist() == pytest.approx([0.1, 0.15], abs=1e-6)
    prime_rl_loss._loss = None


def test_slimes_own_loader_finds_the_function():
    misc = _installed("slime.utils.misc")
    from dcmdp_jax.integrations import slime_hooks

    name = "dcmdp_jax.integrations.slime_hooks.dc_grpo_advantages"
    assert misc.load_function(name) is slime_hooks.dc_grpo_advantages


def test_the_dual_step_by_hand():
    # 0.5 + 2 (0.12 - 0.02) = 0.7, what the tests above expect.
    assert dual_update(0.5, 0.12, tolerance=0.02, dual_learning_rate=2.0) == pytest.approx(
        MOVED, abs=1e-6
    )
