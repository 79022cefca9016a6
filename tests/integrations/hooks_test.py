"""The hooks of SkyRL, slime, prime-rl and verl with stand-ins that have the frameworks' call sites
and field names.

peers_test.py runs them with the real packages where these are installed.
"""

import dataclasses
import importlib
import json
import re
import sys
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dcmdp_jax.integrations import (  # noqa: E402
    dc_grpo_torch,
    prime_rl_loss,
    skyrl_trainer,
    slime_hooks,
    verl_hooks,
)  # noqa: E402
from dcmdp_jax.integrations.dc_grpo_torch import DcGrpo  # noqa: E402
from dcmdp_jax.record import Recorder  # noqa: E402
from tests.support.penalized_tokens import MASK, MOVED, PENALIZED, A, P, Q  # noqa: E402


def _dc_grpo():
    return DcGrpo(tolerance=0.02, multiplier=0.5, dual_learning_rate=2.0)


def test_skyrl_penalizes_the_batch_and_keeps_lambda_with_its_checkpoints(tmp_path):
    class Base:
        def __init__(self, cfg):
            self.cfg = cfg
            self.all_metrics = {}
            self.folder = str(tmp_path)

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
    torch.testing.assert_close(batch["advantages"], PENALIZED)
    assert trainer.dc_grpo.multiplier == pytest.approx(MOVED, abs=1e-6)
    assert trainer.all_metrics["dc_grpo/mean"] == pytest.approx(0.12, abs=1e-6)
    trainer.save_checkpoints()
    resumed, fresh = (skyrl_trainer.make_trainer(Base)(step, dc_grpo=_dc_grpo()) for step in (1, 0))
    assert resumed.load_checkpoints() == (1, str(tmp_path)) and fresh.load_checkpoints()[0] == 0
    assert (
        resumed.dc_grpo.multiplier == trainer.dc_grpo.multiplier and fresh.dc_grpo.multiplier == 0.5
    )
    with pytest.raises(
        ValueError, match="no rollout_logprobs: set generator.sampling_params.logprobs=0"
    ):
        trainer.compute_advantages_and_returns(batch | {"rollout_logprobs": None})


def _slime_batch():
    lengths = [3, 2]
    split = {
        name: [values[i, :n] for i, n in enumerate(lengths)]
        for name, values in (("log_probs", P), ("rollout_log_probs", Q), ("loss_masks", MASK.int()))
    }
    return split | {"rewards": A.tolist(), "kl": [torch.zeros(n) for n in lengths]}


def test_slime_gets_advantages_and_returns_of_each_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(slime_hooks, "_state", None)
    path = tmp_path / "state" / "dc_grpo.json"
    args = types.SimpleNamespace(
        dc_grpo_tolerance=0.02,
        dc_grpo_multiplier=0.5,
        dc_grpo_dual_learning_rate=2.0,
        dc_grpo_state=str(path),
    )
    batch = _slime_batch()
    assert slime_hooks.dc_grpo_advantages(args, batch) is None
    for found, expected in zip(batch["advantages"], (PENALIZED[0], PENALIZED[1, :2]), strict=True):
        torch.testing.assert_close(found, expected)
    assert [values.tolist() for values in batch["returns"]] == [[1.0] * 3, [-1.0] * 2]
    assert json.loads(path.read_text())["multiplier"] == pytest.approx(MOVED, abs=1e-6)
    # A new process goes on from there.
    monkeypatch.setattr(slime_hooks, "_state", None)
    slime_hooks.dc_grpo_advantages(args, batch := _slime_batch())
    assert batch["advantages"][0][1].item() == pytest.approx(1 - MOVED * 0.2, abs=1e-6)


def test_slimes_bad_input_is_refused(monkeypatch):
    monkeypatch.setattr(slime_hooks, "_state", None)
    with pytest.raises(
        ValueError, match="set dc_grpo_tolerance in the file of --custom-config-path"
    ):
        slime_hooks.dc_grpo_advantages(types.SimpleNamespace(), _slime_batch())
    args = types.SimpleNamespace(dc_grpo_tolerance=0.02)
    flags = (
        "--get-mismatch-metrics and --custom-tis-function-path "
        "dcmdp_jax.integrations.slime_hooks.no_weights"
    )
    with pytest.raises(ValueError, match=f"no log_probs: set {flags}"):
        slime_hooks.dc_grpo_advantages(args, _slime_batch() | {"log_probs": None})
    with pytest.raises(ValueError, match="set sample.rollout_log_probs in --custom-generate-funct"):
        slime_hooks.dc_grpo_advantages(args, _slime_batch() | {"rollout_log_probs": None})
    # Five tokens in all, cut elsewhere: token by token they would be of other samples.
    for name, other in (
        ("loss_masks", torch.ones(6, dtype=torch.int)),
        ("rollout_log_probs", torch.zeros(2)),
    ):
        batch = _slime_batch()
        batch[name] = [other, torch.zeros(3)]
        with pytest.raises(ValueError, match="context parallelism above 1"):
            slime_hooks.dc_grpo_advantages(args, batch)
    with pytest.raises(ValueError, match="1 rewards of 2 samples: must be one of each"):
        slime_hooks.dc_grpo_advantages(args, _slime_batch() | {"rewards": [1.0]})


@pytest.mark.parametrize("name", ["dc_grpo_learning_rate", "dc_grpo_tolerence", "dc_grpo_"])
def test_slimes_unknown_setting_with_our_prefix_is_refused_in_one_line(monkeypatch, name):
    """Ignored, dc_grpo_learning_rate: 5 would run with a dual learning rate of 1, the default."""
    monkeypatch.setattr(slime_hooks, "_state", None)
    args = types.SimpleNamespace(dc_grpo_tolerance=0.02, **{name: 5.0})
    with pytest.raises(ValueError) as caught:
        slime_hooks.dc_grpo_advantages(args, _slime_batch())
    assert str(caught.value) == (
        f"dc_grpo: unknown settings {name}: allowed are dc_grpo_tolerance, dc_grpo_multiplier, "
        "dc_grpo_dual_learning_rate, dc_grpo_multiplier_min, dc_grpo_multiplier_max, "
        "dc_grpo_measure, dc_grpo_sided, dc_grpo_state"
    )


def test_slimes_own_arguments_and_every_setting_of_ours_are_accepted(monkeypatch, tmp_path):
    monkeypatch.setattr(slime_hooks, "_state", None)
    args = types.SimpleNamespace(
        advantage_estimator="grpo",
        use_dc_grpo=True,
        dc_grpo="on",
        grpo_std_normalization=True,
        dc_grpo_tolerance=0.02,
        dc_grpo_multiplier=0.5,
        dc_grpo_dual_learning_rate=2.0,
        dc_grpo_multiplier_min=0.0,
        dc_grpo_multiplier_max=1.0,
        dc_grpo_measure="diff",
        dc_grpo_sided="two",
        dc_grpo_state=str(tmp_path),
    )
    slime_hooks.dc_grpo_advantages(args, _slime_batch())
    assert slime_hooks._state.multiplier == pytest.approx(MOVED, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "problem"), [({}, "'tolerance'"), ({"tolerence": 0.1}, "argument 'tolerence'")]
)
def test_prime_rls_settings_are_named_as_kwargs_of_its_loss(settings, problem):
    with pytest.raises(ValueError, match=f"kwargs of .trainer.loss.: .*{problem}"):
        prime_rl_loss.DcGrpoLoss(**settings)


def test_slimes_recipe_sets_the_function_that_its_arguments_ask_for_and_it_changes_nothing():
    """slime's arguments.py asserts custom_tis_function_path with get_mismatch_metrics; loss.py
    calls it as here.
    """
    recipe = " ".join(slime_hooks.__doc__.split())
    path = re.search(r"--get-mismatch-metrics .*--custom-tis-function-path (\S+)", recipe)[1]
    module, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    masks = [MASK[0], MASK[1, :2]]
    columns = dict(
        train_log_probs=[P[0], P[1, :2]], rollout_log_probs=[Q[0], Q[1, :2]], loss_masks=masks
    )
    loss, kept, metrics = function(
        None, pg_loss=A, **columns, total_lengths=[5, 4], response_lengths=[3, 2]
    )
    assert loss is A and kept is masks and metrics == {}


@dataclasses.dataclass
class LossInputs:
    """The fields of prime_rl.trainer.rl.loss.LossInputs at 559b4477."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


def test_prime_rls_loss_has_the_penalized_gradient_and_lambda_moves_once_in_an_update(tmp_path):
    path = tmp_path / "dc_grpo.json"
    settings = {"tolerance": 0.02, "multiplier": 0.5, "dual_learning_rate": 2.0, "state_path": path}
    loss = prime_rl_loss.DcGrpoLoss(**settings)
    parameter = torch.nn.Parameter(P.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    total = 0.0
    for i in range(2):  # two samples, as prime-rl calls it
        value, metrics = loss(LossInputs(parameter[i], Q[i], None, A[i].expand(3), MASK[i].bool()))
        total = total + value
        assert metrics["dc_grpo/multiplier"].item() == 0.5
    assert total.item() == pytest.approx(-PENALIZED.sum().item(), abs=1e-6)
    total.backward()
    torch.testing.assert_close(parameter.grad, -PENALIZED)
    assert loss.dc_grpo.multiplier == 0.5
    optimizer.step()
    assert loss.dc_grpo.multiplier == pytest.approx(MOVED, abs=1e-6)
    # A second optimizer of the same step changes nothing, nor does a step without tokens.
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.0).step()
    optimizer.step()
    assert loss.dc_grpo.history == [loss.dc_grpo.multiplier]
    assert prime_rl_loss.DcGrpoLoss(**settings).dc_grpo.multiplier == loss.dc_grpo.multiplier


def test_prime_rls_tokens_without_a_log_prob_are_not_in_the_mean():
    """Deltas 0.1, NaN, 0: lambda moves by the mean over two tokens, 0.05, not over three,
    0.0333.
    """
    loss = prime_rl_loss.DcGrpoLoss(tolerance=0.02, multiplier=0.5, dual_learning_rate=2.0)
    engine = Q[0].clone()
    engine[1] = torch.nan
    parameter = torch.nn.Parameter(P[0].clone())
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    value, metrics = loss(LossInputs(parameter, engine, None, A[0].expand(3), torch.ones(3).bool()))
    assert metrics["dc_grpo/mean"].item() == pytest.approx(0.05, abs=1e-6)
    assert value.item() == pytest.approx(-(0.95 + 1 + 1), abs=1e-6)
    optimizer.step()
    assert loss.dc_grpo.multiplier == pytest.approx(0.5 + 2 * (0.05 - 0.02), abs=1e-6)
    # A NaN of the trainer is no token without a log-prob: lambda stays, and the loss shows it.
    value, _ = loss(LossInputs(P[0] * torch.nan, Q[0], None, A[0].expand(3), torch.ones(3).bool()))
    optimizer.step()
    assert torch.isnan(value) and loss.dc_grpo.history[0] == loss.dc_grpo.history[1]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("trainer_logprobs", torch.nan),
        ("trainer_logprobs", -torch.inf),
        ("inference_logprobs", torch.nan),
        ("advantages", torch.nan),
        ("loss_weights", torch.nan),
    ],
)
def test_prime_rl_ignores_what_is_outside_the_mask(column, value):
    """A = 1, lambda = 0.5, delta = |0.5 - 0.4|: -0.95 at weight 2. A mask on the product leaves NaN
    in the gradient of the first token.
    """
    columns = {
        "trainer_logprobs": P[0, [2, 0]],
        "inference_logprobs": Q[0, [2, 0]],
        "advantages": torch.ones(2),
        "loss_weights": torch.full((2,), 2.0),
    }
    columns[column] = torch.where(torch.tensor([False, True]), columns[column], value)
    train = columns["trainer_logprobs"].requires_grad_()
    loss = prime_rl_loss.DcGrpoLoss(tolerance=0.02, multiplier=0.5)
    inputs = LossInputs(**columns, ref_logprobs=None, loss_mask=torch.tensor([False, True]))
    total, metrics = loss(inputs)
    total.backward()
    assert total.item() == pytest.approx(-1.9, abs=1e-6)
    torch.testing.assert_close(train.grad, torch.tensor([0.0, -1.9]))
    assert metrics["dc_grpo/mean"].item() == pytest.approx(0.1, abs=1e-6)


_VERL_CONFIG = types.SimpleNamespace(
    clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.24, global_batch_info={}
)


def _token_mean(loss_mat, loss_mask, loss_agg_mode):
    """verl's `agg_loss` of mode token-mean."""
    return (loss_mat * loss_mask).sum() / loss_mask.sum()


@pytest.mark.parametrize(
    "outside",
    [
        {"log_prob": torch.nan},
        {"log_prob": -torch.inf},
        {"log_prob": -torch.inf, "old_log_prob": -torch.inf},
        {"old_log_prob": torch.nan},
        {"advantages": torch.nan},
    ],
)
def test_verls_loss_ignores_what_is_outside_the_mask(monkeypatch, outside):
    """log r = 0.1, A = 1: loss and gradient are -e^0.1 = -1.105171 of one token, the KL is -0.1."""
    _verl(monkeypatch)["core_algos"].agg_loss = _token_mean
    mask = torch.tensor([[0, 1]])
    columns = {
        "log_prob": torch.tensor([[-0.9, -0.8]]),
        "old_log_prob": torch.tensor([[-0.9, -0.9]]),
        "advantages": torch.ones(1, 2),
    }
    for name, value in outside.items():
        columns[name] = torch.where(mask.bool(), columns[name], value)
    log_prob = columns["log_prob"].requires_grad_()
    loss, metrics = verl_hooks.policy_loss(**columns, response_mask=mask, config=_VERL_CONFIG)
    loss.backward()
    assert loss.item() == pytest.approx(-1.105171, abs=1e-6)
    torch.testing.assert_close(log_prob.grad, torch.tensor([[0.0, -1.105171]]))
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.1, abs=1e-6)


@pytest.mark.parametrize("name", ["log_prob", "old_log_prob", "advantages", "response_mask"])
def test_verls_loss_refuses_shapes_that_would_broadcast(monkeypatch, name):
    _verl(monkeypatch)["core_algos"].agg_loss = _token_mean
    columns = {"log_prob": P, "old_log_prob": P, "advantages": PENALIZED, "response_mask": MASK}
    verl_hooks.policy_loss(**columns, config=_VERL_CONFIG)
    columns[name] = columns[name][:, :1]
    with pytest.raises(ValueError, match=rf"{name} is \[2, 1\].*: must be the same shape"):
        verl_hooks.policy_loss(**columns, config=_VERL_CONFIG)


@pytest.mark.parametrize(
    ("penalize", "train", "rollout", "mask"),
    [
        (skyrl_trainer.penalize, "action_log_probs", "rollout_logprobs", "loss_mask"),
        (verl_hooks.penalize, "old_log_probs", "rollout_log_probs", "response_mask"),
    ],
)
def test_an_advantage_outside_the_mask_becomes_0(penalize, train, rollout, mask):
    """The token outside the mask is the last of `PENALIZED`; NaN * 0 would be NaN."""
    advantages = A[:, None].expand(2, 3).clone()
    advantages[1, 2] = torch.nan
    batch = {"advantages": advantages, train: P, rollout: Q, mask: MASK.int()}
    dc_grpo = _dc_grpo()
    penalize(dc_grpo, batch)
    torch.testing.assert_close(batch["advantages"], PENALIZED)
    assert dc_grpo.multiplier == pytest.approx(MOVED, abs=1e-6)


def test_shapes_that_would_broadcast_are_refused():
    row = P[:1]
    with pytest.raises(
        ValueError,
        match=r"advantages is \[3\], discrepancy is \[1, 3\], .*: must be \[N\] or \[N, T\]",
    ):
        _dc_grpo().penalize(torch.ones(3), row, Q[:1], torch.ones(1, 3))
    batch = {"advantages": A, "train_logprobs": P, "rollout_logprobs": Q, "mask": MASK}
    surrogate = {"train_logprobs": P, "old_logprobs": P, "advantages": P}
    penalty = {"advantages": P, "discrepancy": P, "multiplier": torch.tensor(0.5)}
    statistics = {"train_logprobs": P, "rollout_logprobs": Q, "mask": MASK}
    for function, arguments in (
        (_dc_grpo().penalize, batch),
        (dc_grpo_torch.clipped_surrogate, surrogate),
        (dc_grpo_torch.penalized_advantages, penalty),
        (dc_grpo_torch.discrepancy_statistics, statistics),
        (dc_grpo_torch.token_discrepancy, {"train_logprobs": P, "rollout_logprobs": Q}),
        (dc_grpo_torch.clamped_log_ratio, {"numerator": P, "denominator": Q}),
    ):
        function(**arguments)
        for name, value in arguments.items():
            others = (
                [value[None], value[:1], value[..., :1]] if value.dim() else [torch.full((3,), 0.5)]
            )
            for other in others:
                with pytest.raises(ValueError, match="must be"):
                    function(**arguments | {name: other})
    loss = prime_rl_loss.DcGrpoLoss(tolerance=0.02)
    inputs = LossInputs(P[0], Q[0], None, A[0].expand(3), MASK[0].bool(), torch.ones(3))
    for name in (
        "trainer_logprobs",
        "inference_logprobs",
        "advantages",
        "loss_mask",
        "loss_weights",
    ):
        with pytest.raises(ValueError, match=f"{name} is .*: must be the same shape"):
            loss(dataclasses.replace(inputs, **{name: getattr(inputs, name)[:1]}))


def test_verls_batch_is_penalized_in_place():
    dc_grpo = _dc_grpo()
    advantages = A[:, None] * MASK
    batch = {
        "advantages": advantages,
        "old_log_probs": P,
        "rollout_log_probs": Q,
        "response_mask": MASK,
    }
    verl_hooks.penalize(dc_grpo, batch)
    torch.testing.assert_close(batch["advantages"], PENALIZED)
    assert dc_grpo.multiplier == pytest.approx(MOVED, abs=1e-6)
    with pytest.raises(
        ValueError, match="no rollout_log_probs: set actor_rollout_ref.rollout.calculate_log_probs"
    ):
        verl_hooks.penalize(
            dc_grpo, {name: batch[name] for name in batch if name != "rollout_log_probs"}
        )


class _Data:
    """What the hooks use of verl's DataProto."""

    def __init__(self, batch, uid):
        self.batch = batch
        self.non_tensor_batch = {"uid": uid}

    def select_idxs(self, rows):
        return _Data(
            {name: x[rows] for name, x in self.batch.items()}, self.non_tensor_batch["uid"][rows]
        )


def _verl(monkeypatch):
    """Modules with the call sites of verl at 1dda039b: the V1 trainer picks sessions' last outputs
    for grpo alone.
    """
    registered = {}

    def grpo(token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=True, config=None):
        scores = token_level_rewards.sum(-1)
        means = torch.stack([scores[torch.from_numpy(index == one)].mean() for one in index])
        advantages = (scores - means)[:, None] * response_mask
        return advantages, advantages

    def compute_advantage(data, adv_estimator, config=None):
        function = grpo if adv_estimator == "grpo" else registered[adv_estimator]
        batch = data.batch
        batch["advantages"], batch["returns"] = function(
            token_level_rewards=batch["token_level_rewards"],
            response_mask=batch["response_mask"],
            index=data.non_tensor_batch["uid"],
            config=config,
        )
        return data

    def compute_advantage_for_multi_trajectories(data, batch_keys, adv_estimator, config=None):
        if adv_estimator != "grpo":
            return modules["v1.utils"].compute_advantage(
                data, adv_estimator=adv_estimator, config=config
            )
        sessions = [key.rpartition("_")[0] for key in batch_keys]
        last = {session: row for row, session in enumerate(sessions)}
        found = modules["v1.utils"].compute_advantage(
            data.select_idxs(list(last.values())), adv_estimator="grpo"
        )
        of = dict(zip(last, found.batch["advantages"][:, 0], strict=True))
        scores = (
            torch.stack([of[session] for session in sessions])[:, None]
            * data.batch["response_mask"]
        )
        data.batch["advantages"] = data.batch["returns"] = scores
        return data

    modules = {
        name: types.ModuleType(f"verl.trainer.ppo.{name}")
        for name in ("core_algos", "ray_trainer", "v1.utils", "v1.trainer_base")
    }
    core = modules["core_algos"]
    core.AdvantageEstimator = types.SimpleNamespace(GRPO="grpo")
    core.register_adv_est = core.register_policy_loss = lambda name: (
        lambda f: registered.setdefault(name, f)
    )
    core.compute_grpo_outcome_advantage = grpo
    for name in ("ray_trainer", "v1.utils"):
        modules[name].compute_advantage = compute_advantage
    for name in ("v1.utils", "v1.trainer_base"):
        modules[
            name
        ].compute_advantage_for_multi_trajectories = compute_advantage_for_multi_trajectories
    parents = {
        name: types.ModuleType(name)
        for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.trainer.ppo.v1")
    }
    for name, module in {**parents, **{each.__name__: each for each in modules.values()}}.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return modules


def test_a_session_of_several_outputs_counts_once_in_its_group_and_every_output_is_penalized(
    monkeypatch,
):
    """Sessions 0 and 1 of one prompt, rewards 1 and 0; session 0 has two more outputs, each with
    its reward.
    """
    modules = _verl(monkeypatch)
    dc_grpo = _dc_grpo()
    recorded = []
    verl_hooks.register(dc_grpo, on_batch=recorded.append)
    rewards = torch.zeros(4, 3)
    rewards[:3, 0] = 1.0
    batch = {
        "token_level_rewards": rewards,
        "response_mask": torch.ones(4, 3),
        "old_log_probs": P[0].expand(4, 3),
        "rollout_log_probs": Q[0].expand(4, 3),
    }
    data = _Data(batch, np.array(["a"] * 4))
    keys = ["a_0_0", "a_0_1", "a_0_2", "a_1_0"]
    trainer = modules["v1.trainer_base"]
    found = trainer.compute_advantage_for_multi_trajectories(
        data, batch_keys=keys, adv_estimator="dc_grpo"
    )
    # The mean of the two sessions is 1/2; of the four outputs it would be 3/4. lambda 0.5 of 0.1,
    # 0.2 and 0.
    expected = torch.tensor([[0.45, 0.4, 0.5]] * 3 + [[-0.55, -0.6, -0.5]])
    torch.testing.assert_close(found.batch["advantages"], expected)
    # Once: the mean of 0.1, 0.2 and 0 is 0.1, and 2 (0.1 - 0.02) is added.
    assert dc_grpo.history == [pytest.approx(0.66, abs=1e-6)] and recorded == [found]
    plain = trainer.compute_advantage_for_multi_trajectories(
        data, batch_keys=keys, adv_estimator="grpo"
    )
    torch.testing.assert_close(
        plain.batch["advantages"], torch.tensor([[0.5] * 3] * 3 + [[-0.5] * 3])
    )
    modules["ray_trainer"].compute_advantage(
        _Data(batch, np.array(["a"] * 4)), adv_estimator="dc_grpo"
    )
    assert len(dc_grpo.history) == 2


def _recorded(directory):
    """Rows of each recorded step, by step."""
    files = sorted(directory.glob("step_*/rank_0.jsonl"))
    return {
        int(file.parent.name.removeprefix("step_")): [
            json.loads(line) for line in file.read_text().splitlines()
        ]
        for file in files
    }


def test_verls_recorder_writes_each_batch_once_and_changes_no_advantage(monkeypatch, tmp_path):
    def data():
        batch = {
            "token_level_rewards": torch.tensor([[1.0, 0, 0]] * 3 + [[0.0, 0, 0]]),
            "response_mask": torch.ones(4, 3),
            "responses": torch.arange(12).reshape(4, 3),
            "old_log_probs": P[0].expand(4, 3),
            "rollout_log_probs": Q[0].expand(4, 3),
        }
        return _Data(batch, np.array(["a"] * 4))

    keys = ["a_0_0", "a_0_1", "a_0_2", "a_1_0"]
    modules = _verl(monkeypatch)

    def advantages():
        simple = modules["ray_trainer"].compute_advantage(data(), adv_estimator="grpo")
        sessions = modules["v1.trainer_base"].compute_advantage_for_multi_trajectories(
            data(), batch_keys=keys, adv_estimator="grpo"
        )
        return [each.batch["advantages"] for each in (simple, sessions)]

    before = advantages()
    verl_hooks.register_recorder(Recorder(tmp_path, "verl"), first_step=7)
    for plain, recorded in zip(before, advantages(), strict=True):
        torch.testing.assert_close(recorded, plain, rtol=0, atol=0)
    rows = _recorded(tmp_path)
    # All four outputs of each batch; the call within the function of sessions writes nothing.
    assert {step: len(each) for step, each in rows.items()} == {7: 4, 8: 4}
    assert rows[8][2]["token_ids"] == [6, 7, 8] and rows[8][2]["group"] == "a"
    np.testing.assert_allclose(rows[7][0]["train_logprobs"], P[0], rtol=1e-6)
    np.testing.assert_allclose(rows[7][0]["rollout_logprobs"], Q[0], rtol=1e-6)


def test_skyrls_recording_trainer_writes_the_batch_and_changes_nothing(tmp_path):
    class Base:
        global_step = 5

        def compute_advantages_and_returns(self, data):
            data["advantages"] = A[:, None] * MASK
            return data

    trainer = skyrl_trainer.make_recording_trainer(Base)(recorder=Recorder(tmp_path, "skyrl"))
    ids = torch.arange(8).reshape(2, 4)  # a prompt of one token
    batch = {"sequences": ids, "action_log_probs": P, "rollout_logprobs": Q, "loss_mask": MASK}
    assert trainer.compute_advantages_and_returns(batch) is batch
    torch.testing.assert_close(batch["advantages"], A[:, None] * MASK, rtol=0, atol=0)
    rows = _recorded(tmp_path)
    assert list(rows) == [5]
    assert [row["token_ids"] for row in rows[5]] == [
        ids[row, 1:][MASK[row].bool()].tolist() for row in range(len(ids))
    ]


def test_our_own_gradient_is_the_one_that_prime_rl_gets():
    """One update on a batch: the clipped surrogate at ratio 1, of the torch module that equals
    ours.
    """
    from dcmdp_jax.integrations.dc_grpo_torch import clipped_surrogate

    train = torch.nn.Parameter(P.clone())
    (clipped_surrogate(train, P, PENALIZED) * MASK).sum().backward()
    np.testing.assert_allclose(train.grad.numpy(), (-PENALIZED * MASK).numpy(), rtol=1e-6)
