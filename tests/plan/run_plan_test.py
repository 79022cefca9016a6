"""A whole plan on eight CPU devices, of a model small enough to count by hand."""

import dataclasses

import jax
import pytest

from dcmdp_jax.errors import UserError
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.models.lora import load_base
from dcmdp_jax.models.params import init_params, num_params, param_shapes
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import bytes_per_device
from dcmdp_jax.plan.plan_text import describe_plan, plan_record
from dcmdp_jax.plan.run_plan import GIB, compile_run, plan_step, planned_run, usable_memory
from dcmdp_jax.plan.topologies import CHIPS, Topology
from dcmdp_jax.run.weights import frozen_shapes, model_shardings
from tests.support.memory_plans import part_of
from tests.support.small_plan import EIGHT_CHIPS, small_config


@pytest.fixture(scope="module")
def plan():
    return compile_run(small_config(), EIGHT_CHIPS, only=("step", "decode"))


def test_memory_by_kind_is_that_of_the_shards(plan):
    # Every parameter but the norms is split over the 8 devices.
    shapes = param_shapes(plan.run.model)
    norms = sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if "norm" in str(path)
    )
    on_device = (num_params(plan.run.model) - norms) // 8 + norms
    assert plan.step.resident["parameters"] == 4 * on_device
    # Two moments, and Adam's two counters.
    assert 8 * on_device <= plan.step.resident["optimizer"] <= 8 * on_device + 16
    step = plan.programs["step"]
    assert step.peak >= plan.step.resident["parameters"] + plan.step.resident["optimizer"]
    (of_step,) = (phase for phase in plan.phases if phase.name == "step")
    assert of_step.total == step.peak  # the engine has no weights then
    (of_decode,) = (phase for phase in plan.phases if phase.name == "decode")
    assert of_decode.beside == plan.step.resident


def test_an_int8_base_is_planned_as_a_run_loads_it(tmp_path):
    """Equal to `load_base` in the shape, dtype and shard of each array: as bfloat16 a matrix would
    have two bytes for each value and no scales.
    """
    config = small_config(model__lora_rank=4, model__lora_base="int8")
    mesh = make_mesh(1, 4, 2, devices=jax.devices()[:8])
    run = planned_run(config, mesh)
    save_params(init_params(run.model, jax.random.key(0)), run.model, tmp_path, dtype="bfloat16")
    shardings = model_shardings(run.model, mesh)
    loaded = load_base(tmp_path, run.model, "int8", shardings)

    planned = frozen_shapes(run.model, "int8", mesh)
    assert jax.tree.structure(planned) == jax.tree.structure(loaded)
    for expected, leaf in zip(jax.tree.leaves(planned), jax.tree.leaves(loaded), strict=True):
        assert (expected.shape, expected.dtype) == (leaf.shape, leaf.dtype)
        shard_shape = expected.sharding.shard_shape(expected.shape)
        assert shard_shape == leaf.sharding.shard_shape(leaf.shape)
    on_device = bytes_per_device(loaded)
    assert plan_step(run).resident["frozen base"] == on_device
    assert part_of(run.placement.engine.memory, "frozen base").host == 8 * on_device


def test_memory_beside_the_engines_programs(plan):
    """32 completions in batches of 32: none waits, no cache lives beside a program. With smaller
    batches some do.
    """
    state = plan.step.resident
    (push,) = (phase for phase in plan.phases if phase.name == "weight_sync")
    assert push.peak == 0 and push.beside["engine's weights"] == plan.engine.weights_bytes
    assert push.total > sum(state.values()) + plan.engine.weights_bytes
    assert not plan.engine.refills
    waiting = compile_run(small_config(rollout__max_rows=16), EIGHT_CHIPS, only=("prefill",))
    assert waiting.engine.refills
    (prefill,) = (phase for phase in waiting.phases if phase.name == "prefill")
    # No row of 16 tokens is preempted: its cache has that length from the start.
    assert prefill.beside == state | {"engine's cache": waiting.engine.cache_bytes}


def test_caches_of_preempted_rows_are_beside_a_decoding_batch():
    # 272 tokens are more than two blocks of 128: a cache of 128 grows, and rows that fill it wait.
    config = small_config(
        rollout__max_rows=16, rollout__max_completion_tokens=272, training__row_lengths=(336,)
    )
    plan = compile_run(config, EIGHT_CHIPS, only=("decode",))
    (decode,) = (phase for phase in plan.phases if phase.name == "decode")
    # Two batches of two rows a device: 64 + 272 slots of two heads of 32, keys and values, four
    # layers, float32.
    assert decode.beside["preempted caches, at most"] == 2 * 2 * 336 * 2 * 2 * 32 * 4 * 4
    assert "engine's cache" not in decode.beside


def test_a_sidecar_that_sleeps_leaves_the_gpu_to_the_step(plan):
    gpus = Topology(name="h100:8", chip=CHIPS["h100"], devices=jax.devices()[:8])
    awake = _with_vllm()
    asleep = _with_vllm(sleep=1)
    assert usable_memory(awake, gpus) == (40 * GIB, "80 GiB less vLLM's share of 0.4 and a tenth")
    assert usable_memory(asleep, gpus) == (72 * GIB, "80 GiB less a tenth, while vLLM sleeps")
    assert usable_memory(_with_vllm(visible_devices="8,9"), gpus)[0] == int(79.1 * 0.9 * GIB)
    beside_vllm = dataclasses.replace(
        plan, topology=gpus, engine=None, programs={"step": plan.programs["step"]}
    )
    run_awake = dataclasses.replace(plan.run, config=awake)
    run_asleep = dataclasses.replace(plan.run, config=asleep)
    (step,) = dataclasses.replace(beside_vllm, run=run_awake).phases
    assert step.name == "step"
    (_, sample) = dataclasses.replace(beside_vllm, run=run_asleep).phases
    assert (
        sample.total
        == plan.step.resident["parameters"] + plan.step.resident["optimizer"] + 32 * GIB
    )


def test_a_plan_looks_at_no_run_directory(tmp_path):
    (tmp_path / "config.json").write_text("torn")
    config = dataclasses.replace(small_config(), run_dir=str(tmp_path))
    run = planned_run(config, make_mesh(1, 8, devices=jax.devices()[:8]))
    assert run.placement.engine.memory.rows == run.config.rollout.max_rows


def test_a_sidecar_that_leaves_nothing():
    gpus = Topology(name="h100:8", chip=CHIPS["h100"], devices=jax.devices()[:8])
    with pytest.raises(
        UserError,
        match="config.rollout.vllm.memory_share: got 0.95, and the trainer has -0.05 of the",
    ):
        compile_run(_with_vllm(memory_share=0.95), gpus)


def _with_vllm(**changes):
    rollout = small_config(rollout__engine="vllm").rollout
    vllm = dataclasses.replace(rollout.vllm, **changes)
    return dataclasses.replace(small_config(), rollout=dataclasses.replace(rollout, vllm=vllm))


def test_what_does_not_fit_is_refused(plan):
    assert plan.fits
    small = dataclasses.replace(plan, usable=1000)
    assert not small.fits and "does not fit: step needs" in describe_plan(small)


def test_the_report_and_the_record(plan):
    text = describe_plan(plan)
    record = plan_record(plan)
    assert f"{num_params(plan.run.model):,} parameters" in text
    for heading in (
        "by arithmetic, exact",
        "compiled: arguments",
        "benchmarks.compiled",
        "on each device",
    ):
        assert heading in text
    assert record["fits"] and record["programs"]["step"]["peak_bytes"] == plan.programs["step"].peak
    assert record["devices"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh__fsdp": 3}, "config.mesh (data=1, fsdp=3, tensor=1, expert=1): needs 8"),
        (
            {"mesh__tensor": 3},
            "config.mesh (data=1, fsdp=-1, tensor=3, expert=1): 3 does not divide the 8 devices; "
            "that do 1, 2, 4, 8",
        ),
        (
            {"mesh__tensor": 8},
            "config.mesh.tensor: got 8, must divide the model's 4 query heads; that do 1, 2, 4",
        ),
        ({"mesh__expert": 2}, "config.mesh.expert: got 2, the model has no experts; must be 1"),
        (
            {"training__prompts_per_mini_batch": 1},
            "config.mesh: data x fsdp x expert = 8 devices split the rows of a mini-batch, which "
            "has 4 completions",
        ),
    ],
)
def test_a_mesh_that_does_not_divide(changes, message):
    if "mesh__fsdp" in changes:
        message = "config.mesh (data=1, fsdp=3, tensor=1, expert=1): needs 3 devices, there are 8"
    with pytest.raises(UserError) as raised:
        compile_run(small_config(**changes), EIGHT_CHIPS)
    assert str(raised.value).startswith(message)
