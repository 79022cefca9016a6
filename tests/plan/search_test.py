"""The search over meshes, as far as it compiles nothing."""

import dataclasses

import jax
import pytest

from configs import qwen3_8b
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.plan.run_plan import candidate_meshes, search, search_record, table
from dcmdp_jax.plan.topologies import CHIPS, Topology


def test_meshes_to_search():
    shapes = [(mesh.fsdp, mesh.tensor, mesh.expert) for mesh in candidate_meshes(16, experts=False)]
    assert shapes == [(16, 1, 1), (8, 2, 1), (4, 4, 1), (2, 8, 1)]
    with_experts = candidate_meshes(16, experts=True)
    assert (2, 2, 4) in [(mesh.fsdp, mesh.tensor, mesh.expert) for mesh in with_experts]


def _small_chips(gib):
    chip = dataclasses.replace(CHIPS["v5e"], usable_gib=gib)
    return Topology(name="v5e:2x4", chip=chip, devices=jax.devices()[:8])


def test_an_engine_that_leaves_no_room_is_refused_before_anything_is_compiled():
    # 801,152 parameters: 3.1 MiB of the engine's weights in float32; parameters, moments and
    # gradients over eight devices are 1.5. Of 2 MiB.
    config = qwen3_8b.get_config("local,debug")
    config.rollout.precision = config.rollout.compute_dtype = "float32"
    config.training.prompts_per_step = config.training.prompts_per_mini_batch = 4
    told = []
    found = search(from_config_dict(config), _small_chips(2 / 1024), tell=told.append)
    assert len(found) == len(told) == 4 and all(one.plan is None for one in found)
    by_tensor = {one.mesh.tensor: one.refused for one in found}
    assert by_tensor[8].startswith(
        "config.mesh.tensor: got 8, must divide the model's 4 query heads"
    )
    for tensor in (1, 2, 4):
        assert by_tensor[tensor].startswith(
            "memory: each device has 0.0 GiB and the phase 'sample' takes at least"
        )
        assert "of which engine's weights" in by_tensor[tensor] and "\n" not in by_tensor[tensor]
    assert table(found).splitlines()[-1] == "nothing of these fits"
    assert {one["fits"] for one in search_record(found)["candidates"]} == {False}


def test_what_is_wrong_with_every_candidate_is_told_once():
    config = qwen3_8b.get_config("local,debug")
    config.rollout.router_replay = True
    with pytest.raises(UserError) as raised:
        search(from_config_dict(config), _small_chips(16), tell=lambda line: None)
    assert (
        str(raised.value)
        == "config.rollout.router_replay: got True, the model is a qwen3, which has no experts"
    )
