"""Memory of a run: figures by hand for known models, and one measured run."""

import dataclasses
from pathlib import Path

import jax
import pytest

from configs import base, demo, qwen3_8b, qwen3_30b_a3b
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.engines.engine_kind import EngineArguments, Workload
from dcmdp_jax.engines.local import LocalSettings
from dcmdp_jax.engines.machine import Machine, MemoryPart
from dcmdp_jax.engines.registry import ENGINES
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_config import from_hf
from dcmdp_jax.models.params import num_params
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.plan.published import PUBLISHED
from dcmdp_jax.plan.run_plan import plan_step, planned_run
from dcmdp_jax.run import memory_use as memory_plan
from dcmdp_jax.run.memory_use import (
    MemoryUse,
    fit_engine,
    loaded_parameters,
)
from dcmdp_jax.run.run import Run
from dcmdp_jax.run.weights import Weights
from tests.support.memory_plans import QWEN3_8B, bytes_of, memory_plan_of, part_of
from tests.support.refusals import refused

_ROOT = Path(__file__).resolve().parents[2]
_GIB = 2**30
QWEN3_0_6B = ModelConfig(
    "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, rope_theta=1e6, tie_word_embeddings=True
)


def test_older_versions_and_batches_ahead_are_counted_where_they_are():
    """Lag 2 on eight GPUs: two sharded copies; a run that they do not fit says so."""
    config = qwen3_8b.get_config("local")
    machine = Machine(platform="gpu", devices=8, device_bytes=60 * _GIB, host_bytes=1000 * _GIB)
    without = memory_plan_of(config, QWEN3_8B, machine, (1, 8, 1))
    config.rollout.lag = 2
    kept = memory_plan_of(config, QWEN3_8B, machine, (1, 8, 1))
    item = {"float32": 4, "bfloat16": 2}[config.model.param_dtype]
    share = (8_190_735_360 - 308_224) // 8 + 308_224
    assert part_of(kept, "parameters of 2 older").per_device == 2 * share * item
    batch = part_of(kept, "batch")
    ahead = part_of(kept, "2 batch(es) sampled ahead")
    assert (
        ahead.per_device == 2 * batch.per_device
        and batch.per_device > part_of(without, "batch").per_device
    )
    config.rollout.lag = 60
    with pytest.raises(
        ValueError,
        match=r"of which parameters of 60 older version\(s\) .*; smaller with rollout.lag",
    ):
        memory_plan_of(config, QWEN3_8B, machine, (1, 8, 1)).check()


def test_qwen3_8b_on_eight_gpus_by_hand():
    machine = Machine(platform="gpu", devices=8, device_bytes=60 * _GIB, host_bytes=1000 * _GIB)
    plan = memory_plan_of(qwen3_8b.get_config("local"), QWEN3_8B, machine, (1, 8, 1))
    params = 8_190_735_360
    # Norms are replicated: 36 (2 * 4096 + 2 * 128) + 4096 = 308,224; the rest is split over eight.
    share = (params - 308_224) // 8 + 308_224
    assert share == 1_024_111_616
    assert part_of(plan, "parameters").per_device == 4 * share
    assert part_of(plan, "Adam's moments").per_device == 8 * share
    assert part_of(plan, "gradients").per_device == 4 * share
    # A weight sync holds no tree, but a layer or the output layer twice, in bfloat16: 151,936 * 4,096
    # twice, with both.
    assert part_of(plan, "layers on their way").per_device == 2 * 2 * (2 * 151_936 * 4096 + 4096)
    # bfloat16 weights, replicated: 15.3 GiB.
    assert (
        part_of(plan, "engine's weights").per_device == 2 * params
        and round(2 * params / _GIB, 1) == 15.3
    )
    # 2 * 36 layers * 8 heads * 128 * 2 bytes = 147,456 a slot; 1,024 + 8,192 slots: 1.27 GiB a row,
    # 3.8 with the caches of preempted rows. State 11.4 GiB and the engine's weights leave 33.3 of
    # 60, less what attention of eight prompts takes, 1.0: 8 rows a device, 30.4. (Nine are 34.2.)
    assert plan.rows == 8 * 8
    cache = bytes_of(plan, "key-value cache")
    assert cache == 8 * 9216 * 147_456
    assert part_of(plan, "preempted caches").per_device == 2 * cache
    # For sure rows begin with 128 slots each, after their prompt's bucket.
    first_slots = part_of(plan, "key-value cache, first")
    assert first_slots.certain and first_slots.per_device == 8 * (1024 + 128) * 147_456
    assert not part_of(plan, "key-value cache, all further").certain
    # Orbax copies the state to the host before the next step: no device holds a second one. Twice
    # while it is written.
    for name in ("checkpoint's copy", "checkpoint being written"):
        assert (part_of(plan, name).per_device, part_of(plan, name).host) == (0, 8 * 12 * share)
    # In a weight sync, for sure: 3 shares of 4 bytes, and the engine's copy.
    assert plan.total("weight_sync", "device", certain=True) == 12 * share + 2 * params


def test_the_packed_layout_of_cudnn_by_hand():
    """A micro-batch of 9,216 tokens: 8 bytes of each of 32 x 128 elements, 16 times."""
    machine = Machine(platform="gpu", devices=8, device_bytes=60 * _GIB, host_bytes=1000 * _GIB)
    plans = []
    for segments in (1, 16, 33):
        config = qwen3_8b.get_config("local")
        config.training.row_lengths, config.training.micro_batch_tokens = (9216,), 9216
        config.training.segments_per_row = segments
        plans.append(memory_plan_of(config, QWEN3_8B, machine, (1, 8, 1)))
    one, packed, masked = plans
    assert part_of(packed, "cuDNN's workspace").per_device == 8 * 9216 * 32 * 128 * 16
    # More segments have a mask.
    assert not any(
        part.name == "cuDNN's workspace" for plan in (one, masked) for part in plan.parts
    )


def test_an_engine_over_tensor_has_room_for_more_rows():
    machine = Machine(platform="gpu", devices=8, device_bytes=60 * _GIB, host_bytes=1000 * _GIB)
    config = qwen3_8b.get_config("local")
    config.rollout.local.tensor = 8
    plan = memory_plan_of(config, QWEN3_8B, machine, (1, 8, 1))
    # Norms are replicated, as above.
    assert part_of(plan, "engine's weights").per_device == 2 * (
        (8_190_735_360 - 308_224) // 8 + 308_224
    )
    # All 64 rows' heads are split over eight devices, one each.
    assert bytes_of(plan, "key-value cache") == plan.rows * 9216 * 147_456 // 8
    assert 64 < plan.rows < 256 and not plan.shortages()
    # With more memory all of 512 completions fit into batches of 256.
    wide = memory_plan_of(
        config, QWEN3_8B, dataclasses.replace(machine, device_bytes=200 * _GIB), (1, 8, 1)
    )
    assert wide.rows == 256


def test_a_replicated_state_is_copied_to_the_host_once():
    machine = Machine(platform="gpu", devices=8, device_bytes=60 * _GIB, host_bytes=1000 * _GIB)
    plan = memory_plan_of(qwen3_8b.get_config("local"), QWEN3_8B, machine, (2, 4, 1))
    # Orbax has each replica copy a part. As above with four shards: norms on each.
    share = (8_190_735_360 - 308_224) // 4 + 308_224
    assert part_of(plan, "parameters").per_device == 4 * share
    assert part_of(plan, "checkpoint's copy").host == 4 * 12 * share


def test_router_replay_is_counted_where_it_is_held():
    """128 experts of which 8 are named in each of 48 layers, int16: 768 bytes a token."""
    config = qwen3_30b_a3b.get_config()
    config.mesh.fsdp, config.mesh.expert = 8, 1
    config.rollout.engine = "local"
    model = from_hf(PUBLISHED["Qwen3-30B-A3B"])
    machine = Machine(platform="gpu", devices=8, device_bytes=200 * _GIB, host_bytes=1000 * _GIB)
    without = memory_plan_of(config, model, machine, (1, 8, 1))
    config.rollout.router_replay = True
    plan = memory_plan_of(config, model, machine, (1, 8, 1))
    completions = config.training.prompts_per_step * config.rollout.group_size
    assert (
        part_of(plan, "routed experts of the completions' tokens").host
        == completions * (1024 + 8192) * 768
    )
    assert part_of(plan, "engine's record").host == completions * 8192 * 768
    # Each device decodes an eighth of the rows.
    assert part_of(plan, "experts of decoded").per_device == plan.rows // 8 * 8192 * 768
    # Five int32, a float32 and a bool for each token of a row, and its experts.
    assert (
        part_of(without, "batch").per_device * (25 + 768) == part_of(plan, "batch").per_device * 25
    )
    assert part_of(plan, "batch, before").host == 8 * part_of(plan, "batch").per_device
    assert not any(
        part.name.startswith(("experts of", "engine's record")) for part in without.parts
    )


def test_recorded_lists_are_counted_as_the_step_returns_them():
    """The step gives every device the log-probs of all places, padding too; the host has 30 bytes
    of each beside.
    """
    config = demo.get_config("debug")
    config.rollout.top_logprobs, config.observe.rollouts_every_steps = 8, 3
    run = planned_run(from_config_dict(config), make_mesh(2, 1, 1, 1, devices=jax.devices()[:2]))
    returned = plan_step(run).trace().out_info[2].top_logprobs
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(returned))
    assert (
        size % 32 == 0
        and part_of(run.placement.engine.memory, "recorded top-k").host == 2 * size + 30 * size // 4
    )
    config.observe.rollouts_every_steps = 0
    silent = planned_run(from_config_dict(config), run.placement.mesh).placement.engine.memory
    assert not any(part.name.startswith("recorded top-k") for part in silent.parts)


def test_memory_is_one_line_where_half_of_it_stays_free():
    parts = (MemoryPart("weights", host=3 * _GIB),)
    free = MemoryUse(
        parts, Machine(platform="cpu", devices=1, device_bytes=None, host_bytes=8 * _GIB)
    )
    assert free.lines(full=False) == ["3.0 of 8.0 GiB of this machine (--dry-run lists the parts)"]
    assert free.lines(full=True) == free.table() and len(free.table()) == 3
    for limit in (5 * _GIB, None):  # above half, and unknown
        use = MemoryUse(
            parts, Machine(platform="cpu", devices=1, device_bytes=None, host_bytes=limit)
        )
        assert use.lines(full=False) == use.table()
    device = MemoryUse(
        (MemoryPart("weights", per_device=3 * _GIB),),
        Machine(platform="gpu", devices=1, device_bytes=5 * _GIB, host_bytes=8 * _GIB),
    )
    assert device.lines(full=False) == device.table()


def test_what_does_not_fit_is_said_with_the_largest_part_and_its_setting():
    machine = Machine(platform="gpu", devices=8, device_bytes=28 * _GIB, host_bytes=1000 * _GIB)
    plan = memory_plan_of(qwen3_8b.get_config("local"), QWEN3_8B, machine, (1, 8, 1))
    # One row for each device: 26.7 GiB of state and engine, and 3.8.
    assert plan.rows == 8 and 30 < plan.total("sample", "device") / _GIB < 31
    # A weight sync: state, the engine's weights and layers on their way, 11.4 + 15.3 + 4.6.
    [line] = [line for line in plan.table() if line.startswith("does not fit")]
    assert "each device has 28.0 GiB and the phase 'weight_sync' takes 31.3" in line
    assert (
        "engine's weights 15.3; smaller with a smaller model, more devices along "
        "rollout.local.tensor" in line
    )
    # State, engine and first slots of the cache are 11.4 + 15.3 + 0.2 GiB for sure: the run may
    # work.
    plan.check()
    assert round(plan.peak("device", certain=True)[1] / _GIB, 1) == 26.9
    assert refused(
        dataclasses.replace(
            plan, machine=dataclasses.replace(machine, device_bytes=20 * _GIB)
        ).check
    ) == (
        "memory: each device has 20.0 GiB and the phase 'sample' takes at least 26.9, of "
        "which engine's weights 15.3; smaller with a smaller model, more devices along "
        "rollout.local.tensor, or rollout.engine=vllm"
    )


def test_qwen3_0_6b_on_a_cpu_takes_twice_what_parameters_and_moments_say():
    config = base.get_config("debug")
    config.model.param_dtype = "bfloat16"
    config.rollout.group_size, config.rollout.max_completion_tokens = 4, 48
    config.training.prompts_per_step = config.training.prompts_per_mini_batch = 1
    config.training.row_lengths = (112,)
    plan = memory_plan_of(
        config,
        QWEN3_0_6B,
        Machine(platform="cpu", devices=1, device_bytes=None, host_bytes=23 * _GIB),
        (1, 1, 1),
        prompts=(40,),
    )
    params = 596_049_920
    assert num_params(QWEN3_0_6B) == params
    assert (
        part_of(plan, "parameters").host == 2 * params
        and part_of(plan, "Adam's moments").host == 4 * params
    )
    assert part_of(plan, "checkpoint's copy").host == 6 * params
    assert part_of(plan, "engine's weights").host == 2 * params
    # In a step parameters 2, moments 4, a checkpoint's copy 6, gradients 4 + 4 bytes a parameter:
    # 20 * 596,049,920 / 2^30 = 11.10 GiB. It was announced with 6.7 and took over 12.6. While it
    # samples the checkpoint is on its way to the disk, 6, and the engine has 2.
    least = 20 * params
    assert round(least / _GIB, 2) == 11.10
    assert least < plan.total("step", "host") < 1.01 * least
    assert 20 * params < plan.total("sample", "host") < 1.1 * 20 * params


def test_a_cpus_devices_share_the_hosts_memory():
    config = demo.get_config()
    machine = Machine(platform="cpu", devices=4, device_bytes=None, host_bytes=23 * _GIB)
    model = ModelConfig("qwen3", 104, 96, 256, 3, 3, 1, 32, tie_word_embeddings=True)
    one = memory_plan_of(config, model, machine, (1, 1, 1), prompts=(20,))
    four = memory_plan_of(config, model, machine, (4, 1, 1), prompts=(20,))
    for name, times in (
        ("parameters", 4),
        ("Adam's moments", 4),
        ("gradients of", 4),
        ("engine's weights", 1),
    ):
        assert part_of(four, name).host == times * part_of(one, name).host
    # Rows are divided: the caches of all devices together are as large as one's.
    assert bytes_of(four, "key-value cache") == bytes_of(one, "key-value cache")


@pytest.mark.parametrize(
    ("precision", "compute", "kept"),
    [
        # 96 hidden, 256 MLP, 3 layers: matrices 96*96 (q) + 2*96*32 (k, v) + 96*96 (o) + 3*96*256 =
        # 98,304 a layer; norms 2*96 + 2*32 = 256 a layer and 96; embedding 104 * 96 = 9,984.
        # 305,760 in all.
        ("exact", "float32", 4 * 305_760),
        ("bfloat16", "bfloat16", 2 * 305_760),
        # One byte for each entry of a matrix, a float32 scale for each of its 96 + 64 + 96 + 512 +
        # 96 = 864 columns; the output layer quantized (9,984 and 104 scales) beside the embedding;
        # norms as they were.
        (
            "int8",
            "float32",
            3 * (98_304 + 4 * 864 + 4 * 256) + 4 * 96 + 4 * 9_984 + 9_984 + 4 * 104,
        ),
    ],
)
def test_the_engines_weights_by_precision(precision, compute, kept):
    model = ModelConfig("qwen3", 104, 96, 256, 3, 3, 1, 32, tie_word_embeddings=True)
    assert num_params(model) == 305_760
    for device in ("gpu", "cpu"):
        asked = dict(
            precision=precision,
            compute_dtype=compute,
            kv_cache_dtype="auto",
            max_rows=8,
            min_rows=8,
        )
        arguments = EngineArguments(
            **asked,
            max_total_tokens=9,
            settings=LocalSettings(),
            model=model,
            mesh=lambda tensor, expert: make_mesh(data=2, devices=jax.devices()[:2]),
        )
        load = Workload(
            completions=8,
            group_size=1,
            prompt_lengths=[5],
            max_completion_tokens=4,
            training=False,
        )
        machine = Machine(platform=device, devices=2, device_bytes=None, host_bytes=None)
        own = loaded_parameters(model, arguments.param_dtype, machine)
        plan = fit_engine(ENGINES["local"], arguments, load, machine, own).memory
        location = "device" if device == "gpu" else "host"
        assert part_of(plan, "engine's weights").on(location) == kept


def test_vllms_two_copies_are_counted_in_the_host():
    config = qwen3_8b.get_config("local")
    config.rollout.engine = "vllm"
    config.rollout.vllm.kv_cache_gib = 2.0
    machine = Machine(platform="gpu", devices=8, device_bytes=60 * _GIB, host_bytes=1000 * _GIB)
    plan = memory_plan_of(config, QWEN3_8B, machine, (1, 8, 1))
    # Two copies of 8,190,735,360 bfloat16; every tensor of this model is a multiple of 64 bytes.
    assert part_of(plan, "two copies").host == 2 * 2 * 8_190_735_360
    assert plan.note == "besides: vLLM takes 0.4 of each of its GPUs (rollout.vllm.memory_share)"
    assert not any(
        part.name.startswith(("engine's", "key-value", "layers on their way"))
        for part in plan.parts
    )
    on_cpu = memory_plan_of(
        config, QWEN3_8B, dataclasses.replace(machine, platform="cpu"), (1, 1, 1), vllm_on_cpu=True
    )
    assert part_of(on_cpu, "vLLM's weights").host == 2 * 8_190_735_360
    assert part_of(on_cpu, "vLLM's key-value cache").host == 2 * _GIB
    config.rollout.vllm.replicas = 3
    three = memory_plan_of(
        config, QWEN3_8B, dataclasses.replace(machine, platform="cpu"), (1, 1, 1), vllm_on_cpu=True
    )
    assert part_of(three, "two copies").host == part_of(on_cpu, "two copies").host
    assert part_of(three, "vLLM's weights").host == 3 * 2 * 8_190_735_360
    assert part_of(three, "vLLM's key-value cache").host == 3 * 2 * _GIB
    assert part_of(three, "vLLM's weights").lower.startswith("rollout.vllm.replicas, ")


def test_a_reference_policy_is_counted():
    config = demo.get_config()
    config.algorithm.kl_coefficient = 0.1
    model = ModelConfig("qwen3", 104, 96, 256, 3, 3, 1, 32, tie_word_embeddings=True)
    plan = memory_plan_of(
        config,
        model,
        Machine(platform="cpu", devices=1, device_bytes=None, host_bytes=None),
        (1, 1, 1),
        prompts=(20,),
    )
    assert part_of(plan, "reference policy").host == 4 * num_params(model)
    assert plan.shortages() == []  # nobody knows what there is


def test_a_run_that_cannot_fit_is_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    config = demo.get_config()
    config.run_dir, config.warmup.steps, config.evaluation.every_steps = str(tmp_path / "run"), 0, 0
    # 8 devices: a run takes a mesh from the settings; the machine says what it has.
    config.mesh.data, config.mesh.fsdp = -1, 1
    monkeypatch.setattr(memory_plan, "free_host_bytes", lambda: 1000)
    monkeypatch.setattr(Weights, "initial", lambda *_: pytest.fail("parameters were made"))
    with pytest.raises(
        ValueError,
        match=r"^memory: this machine has \d+\.\d GiB and the phase '.*' takes at least \d+\.\d, of which",
    ) as caught:
        Run.check(from_config_dict(config))
    assert "\n" not in str(caught.value) and "smaller with" in str(caught.value)
