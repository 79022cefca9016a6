"""The hooks of SkyRL, slime, prime-rl and verl with stand-ins that have the frameworks' call sites and field names.

peers_test.py runs them with the real packages where these are installed.
"""

import dataclasses
import json
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dcmdp_jax.integrations import prime_rl_loss, skyrl_trainer, slime_hooks, verl_hooks  # noqa: E402
from dcmdp_jax.integrations.dc_grpo_torch import DcGrpo  # noqa: E402

# p = 0.5, 0.4, 0.3; q = 0.4, 0.6, 0.3: deltas 0.1, 0.2, 0. The third is not sampled in the second completion.
P = torch.tensor([[0.5, 0.4, 0.3]] * 2).log()
Q = torch.tensor([[0.4, 0.6, 0.3]] * 2).log()
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
A = torch.tensor([1.0, -1.0])
# lambda = 0.5: A - 0.05, A - 0.1, A.
CHARGED = torch.tensor([[0.95, 0.9, 1.0], [-1.05, -1.1, 0.0]])
# (0.1 + 0.2 + 0 + 0.1 + 0.2) / 5 = 0.12; lambda += 2 (0.12 - 0.02).
MOVED = 0.7


def _dc_grpo():
    return DcGrpo(tolerance=0.02, multiplier=0.5, learning_rate=2.0)


def test_skyrl_charges_the_batch_and_keeps_lambda_with_its_checkpoints(tmp_path):
    class Base:
        def __init__(self, cfg):
            self.cfg, self.all_metrics, self.folder = cfg, {}, str(tmp_path)

        def compute_advantages_and_returns(self, data):
            data["advantages"] = A[:, None] * MASK
            return data

        def save_checkpoints(self):
            return self.folder

        def load_checkpoints(self):
            return self.cfg, self.folder

    trainer = skyrl_trainer.make_trainer(Base)(1, dc_grpo=_dc_grpo())
    batch = {"action_log_probs": P, "rollout_logprobs": Q, "loss_mask": MASK}
    assert trainer.compute_advantages_and_returns(batch) is batch
    torch.testing.assert_close(batch["advantages"], CHARGED)
    assert trainer.dc_grpo.multiplier == pytest.approx(MOVED, abs=1e-6)
    assert trainer.all_metrics["dc_grpo/mean"] == pytest.approx(0.12, abs=1e-6)
    trainer.save_checkpoints()
    resumed, fresh = (skyrl_trainer.make_trainer(Base)(step, dc_grpo=_dc_grpo()) for step in (1, 0))
    assert resumed.load_checkpoints() == (1, str(tmp_path)) and fresh.load_checkpoints()[0] == 0
    assert resumed.dc_grpo.multiplier == trainer.dc_grpo.multiplier and fresh.dc_grpo.multiplier == 0.5
    with pytest.raises(ValueError, match="no rollout_logprobs: set generator.sampling_params.logprobs=0"):
        trainer.compute_advantages_and_returns(batch | {"rollout_logprobs": None})


def _slime_batch():
    lengths = [3, 2]
    split = {name: [values[i, :n] for i, n in enumerate(lengths)] for name, values in (
        ("log_probs", P), ("rollout_log_probs", Q), ("loss_masks", MASK.int())
    )}  # fmt: skip
    return split | {"rewards": A.tolist(), "kl": [torch.zeros(n) for n in lengths]}


def test_slime_gets_advantages_and_returns_of_each_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(slime_hooks, "_state", None)
    path = tmp_path / "state" / "dc_grpo.json"
    args = types.SimpleNamespace(
        dc_grpo_tolerance=0.02, dc_grpo_multiplier=0.5, dc_grpo_learning_rate=2.0, dc_grpo_state=str(path)
    )
    batch = _slime_batch()
    assert slime_hooks.dc_grpo_advantages(args, batch) is None
    for found, expected in zip(batch["advantages"], (CHARGED[0], CHARGED[1, :2]), strict=True):
        torch.testing.assert_close(found, expected)
    assert [values.tolist() for values in batch["returns"]] == [[1.0] * 3, [-1.0] * 2]
    assert json.loads(path.read_text())["multiplier"] == pytest.approx(MOVED, abs=1e-6)
    # A new process goes on from there.
    monkeypatch.setattr(slime_hooks, "_state", None)
    slime_hooks.dc_grpo_advantages(args, batch := _slime_batch())
    assert batch["advantages"][0][1].item() == pytest.approx(1 - MOVED * 0.2, abs=1e-6)


def test_slimes_bad_input_is_refused(monkeypatch):
    monkeypatch.setattr(slime_hooks, "_state", None)
    with pytest.raises(ValueError, match="set dc_grpo_tolerance in the file of --custom-config-path"):
        slime_hooks.dc_grpo_advantages(types.SimpleNamespace(), _slime_batch())
    args = types.SimpleNamespace(dc_grpo_tolerance=0.02)
    with pytest.raises(ValueError, match="no log_probs: set --get-mismatch-metrics"):
        slime_hooks.dc_grpo_advantages(args, _slime_batch() | {"log_probs": None})
    batch = _slime_batch()
    batch["loss_masks"] = [torch.ones(6, dtype=torch.int)] * 2
    with pytest.raises(ValueError, match="context parallelism above 1"):
        slime_hooks.dc_grpo_advantages(args, batch)


@dataclasses.dataclass
class LossInputs:
    """The fields of prime_rl.trainer.rl.loss.LossInputs at 559b4477."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


def test_prime_rls_loss_has_the_charged_gradient_and_lambda_moves_once_in_an_update(tmp_path):
    path = tmp_path / "dc_grpo.json"
    settings = {"tolerance": 0.02, "multiplier": 0.5, "learning_rate": 2.0, "state_path": path}
    loss = prime_rl_loss.DcGrpoLoss(**settings)
    parameter = torch.nn.Parameter(P.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    total = 0.0
    for i in range(2):  # two samples, as prime-rl calls it
        value, metrics = loss(LossInputs(parameter[i], Q[i], None, A[i].expand(3), MASK[i].bool()))
        total = total + value
        assert metrics["dc_grpo/multiplier"].item() == 0.5
    assert total.item() == pytest.approx(-CHARGED.sum().item(), abs=1e-6)
    total.backward()
    torch.testing.assert_close(parameter.grad, -CHARGED)
    assert loss.dc_grpo.multiplier == 0.5
    optimizer.step()
    assert loss.dc_grpo.multiplier == pytest.approx(MOVED, abs=1e-6)
    # A second optimizer of the same step changes nothing, nor does a step without tokens.
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.0).step()
    optimizer.step()
    assert loss.dc_grpo.history == [loss.dc_grpo.multiplier]
    assert prime_rl_loss.DcGrpoLoss(**settings).dc_grpo.multiplier == loss.dc_grpo.multiplier


def test_verls_batch_is_charged_in_place():
    dc_grpo, advantages = _dc_grpo(), A[:, None] * MASK
    batch = {"advantages": advantages, "old_log_probs": P, "rollout_log_probs": Q, "response_mask": MASK}
    verl_hooks.charge(dc_grpo, batch)
    torch.testing.assert_close(batch["advantages"], CHARGED)
    assert dc_grpo.multiplier == pytest.approx(MOVED, abs=1e-6)
    with pytest.raises(ValueError, match="no rollout_log_probs: set actor_rollout_ref.rollout.calculate_log_probs"):
        verl_hooks.charge(dc_grpo, {name: batch[name] for name in batch if name != "rollout_log_probs"})


def test_our_own_gradient_is_the_one_that_prime_rl_gets():
    """One update on a batch: the clipped surrogate at ratio 1, of the torch module that equals ours."""
    from dcmdp_jax.integrations.dc_grpo_torch import clipped_surrogate

    train = torch.nn.Parameter(P.clone())
    (clipped_surrogate(train, P, CHARGED) * MASK).sum().backward()
    np.testing.assert_allclose(train.grad.numpy(), (-CHARGED * MASK).numpy(), rtol=1e-6)
