"""Shapes that a config is computed in."""

import math
from unittest import mock

import jax
import pytest

from configs import demo, demo_moe
from dcmdp_jax.config.settings import from_config_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.training import setup


def _plan(tmp_path, shape=(1, 1, 1), source=demo, **changes):
    mesh = make_mesh(*shape, devices=jax.devices()[: math.prod(shape)])
    config = source.get_config()
    config.run_dir, config.warmup.steps, config.evaluation.every_steps = str(tmp_path / "run"), 0, 0
    for name, value in changes.items():
        section, field = name.split("__")
        setattr(config[section], field, value)
    with mock.patch.object(setup, "training_mesh", lambda *sizes, num_params: mesh):
        return setup.make_plan_of_run(from_config_dict(config))


def _packing(tmp_path, shape=(1, 1, 1), **changes):
    """The shapes on a mesh of that shape; and what people are told."""
    plan = _plan(tmp_path, shape, **changes)
    return plan.packing, setup.describe(plan)


def test_rows_of_one_length_share_their_prompts(tmp_path):
    # 24 prompts x 8 in a mini-batch, prompts of 20 tokens and completions of 36: rows of 36 + 1 of which 36 are
    # computed; prompts of 19, padded by 9 so that a row sees 64 tokens. All of it fits into 16,384 tokens.
    packing, told = _packing(tmp_path, training__micro_batch_tokens=16384)
    assert (packing.row_lengths, packing.rows_per_micro_batch, packing.micro_batches) == ((37,), (192,), (1,))
    assert (packing.group_size, packing.prompt_length) == (8, 28)
    assert "192 x 37 tokens, prompts of 28 computed once for 8 rows" in told


# A group computes 8 x 36 + 28 = 316 tokens.
@pytest.mark.parametrize(
    "changes",
    [
        {"training__row_lengths": (40, 56)},
        {"training__segments_per_row": 2},
        {"training__micro_batch_tokens": 315},
    ],
)
def test_others_have_their_prompts_to_themselves(tmp_path, changes):
    packing, told = _packing(tmp_path, **changes)
    assert packing.group_size == 0 and packing.row_lengths[-1] == 56
    assert "computed once" not in told


def test_devices_with_whole_rows_share_prompts_too(tmp_path):
    # 16,384 tokens of a device hold 51 groups, a mini-batch has 24: three each on eight devices.
    packing, told = _packing(tmp_path, (8, 1, 1), training__micro_batch_tokens=16384)
    assert (packing.rows_per_micro_batch, packing.micro_batches, packing.group_size) == ((192,), (1,), 8)
    # One token less than a group, and a device has none.
    assert _packing(tmp_path, (8, 1, 1), training__micro_batch_tokens=316)[0].rows_per_micro_batch == (64,)
    assert _packing(tmp_path, (8, 1, 1), training__micro_batch_tokens=315)[0].group_size == 0


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2), (4, 2, 1)])
def test_devices_that_split_parameters_have_prompts_in_their_rows(tmp_path, shape):
    # The demo has three query heads, which tensor must divide.
    heads = {"num_heads": 4, "num_kv_heads": 2}
    architecture = {**demo.get_config().model.architecture.to_dict(), **heads}
    assert _packing(tmp_path, shape, model__architecture=architecture)[0].group_size == 0


def test_the_plan_advises_float32_on_a_cpu(tmp_path):
    assert "advice" not in _packing(tmp_path)[1]
    _, told = _packing(tmp_path, model__compute_dtype="bfloat16", rollout__compute_dtype="bfloat16")
    said = "float32, and for sampling rollout.engine=vllm too, takes less time and memory than bfloat16 on this CPU"
    assert told.splitlines()[-1] == f"advice       model.compute_dtype and rollout.compute_dtype: {said}"


def test_the_engines_mesh_is_in_the_plan_and_must_divide_the_model(tmp_path):
    wide = {
        "model__architecture": {**demo.get_config().model.architecture.to_dict(), "num_heads": 4, "num_kv_heads": 4}
    }
    _, told = _packing(tmp_path, (1, 4, 2), rollout__local={"tensor": 4, "expert": 1}, **wide)
    assert ", tensor 4, at most 512 rows at a time" in told
    with pytest.raises(ValueError, match=r"config.rollout.local.tensor: got 3, must divide the model's num_kv_heads=4"):
        _packing(tmp_path, (1, 4, 2), rollout__local={"tensor": 3, "expert": 1}, **wide)
    with pytest.raises(ValueError, match=r"config.rollout.local \(tensor=4, expert=1\): 4 does not divide the 2 dev"):
        _packing(tmp_path, (1, 2, 1), rollout__local={"tensor": 4, "expert": 1}, **wide)


@pytest.mark.parametrize(
    ("source", "shape", "changes", "message"),
    [
        (demo_moe, (1, 1, 1, 3), {}, "config.mesh.expert: got 3, must divide the model's 8 experts; that do 1, 2, .*"),
        (
            demo, (1, 1, 1), {"rollout__router_replay": True},
            "config.rollout.router_replay: got True, the model is a qwen3, which has no experts",
        ),
        (
            demo, (1, 1, 1), {"algorithm__router_aux_loss": 0.01},
            "config.algorithm.router_aux_loss: got 0.01, the model is a qwen3, which has no experts",
        ),
        (
            demo, (1, 2, 1), {"model__compute_dtype": "bfloat16"},
            "config.model.compute_dtype: got 'bfloat16' with mesh.fsdp=2 on CPU devices, where XLA can't add up .*",
        ),
    ],
    ids=["mesh", "replay", "balancing", "bfloat16"],
)  # fmt: skip
def test_settings_of_experts_must_fit_the_model(tmp_path, source, shape, changes, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        _plan(tmp_path, shape, source, **changes)
    assert _plan(tmp_path, (1, 1, 1, 2), demo_moe, rollout__router_replay=True).model.num_experts == 8


def test_more_experts_for_a_token_than_there_are(tmp_path):
    config = demo_moe.get_config()
    config.run_dir, config.model.architecture.num_experts_per_tok = str(tmp_path / "run"), 9
    with pytest.raises(UserError, match="^config.model.architecture.num_experts_per_tok: got 9, must be at most num_e"):
        setup.make_plan_of_run(from_config_dict(config))
