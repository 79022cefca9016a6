"""A whole plan on eight CPU devices, of a model small enough to count by hand."""

from __future__ import annotations

import collections
import dataclasses

import jax
import pytest

from configs import qwen3_8b
from dcmdp_jax.config.settings import from_config_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.params import num_params, param_shapes
from dcmdp_jax.plan.goals import all_logits, check_goals, model_shapes
from dcmdp_jax.plan.hlo import Array
from dcmdp_jax.plan.plan_text import describe_plan, plan_record
from dcmdp_jax.plan.run_plan import GIB, compile_run, usable_memory
from dcmdp_jax.plan.topologies import CHIPS, Topology

_DEVICES = Topology("v5e:2x4", CHIPS["v5e"], jax.devices()[:8])


def _config(**changes):
    config = qwen3_8b.get_config("local,debug")
    # XLA's CPU backend aborts on a reduction of bfloat16 between devices.
    config.model.compute_dtype = config.rollout.compute_dtype = config.rollout.precision = "float32"
    # Two mini-batches of 16 completions; one row of 80 tokens a device, so two micro-batches.
    config.training.prompts_per_step, config.training.prompts_per_mini_batch = 8, 4
    config.training.row_lengths = (80,)
    config.training.micro_batch_tokens, config.model.logprob_chunk = 80, 20
    # A loop over layers, as on the hardware that a plan is for.
    config.model.scan_unroll = 1
    for key, value in changes.items():
        section, field = key.split("__")
        setattr(config[section], field, value)
    return from_config_dict(config)


@pytest.fixture(scope="module")
def plan():
    return compile_run(_config(), _DEVICES, only=("step", "decode"))


def test_memory_by_kind_is_that_of_the_shards(plan):
    # Every parameter but the norms is split over the 8 devices.
    shapes = param_shapes(plan.model)
    norms = sum(leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(shapes) if "norm" in str(path))
    on_device = (num_params(plan.model) - norms) // 8 + norms
    assert plan.step.params_bytes == 4 * on_device
    # Two moments, and Adam's two counters.
    assert 8 * on_device <= plan.step.optimizer_bytes <= 8 * on_device + 16
    step = plan.programs["step"]
    assert step.peak >= plan.step.params_bytes + plan.step.optimizer_bytes
    (of_step,) = (phase for phase in plan.phases if phase.name == "step")
    assert of_step.total == step.peak  # the engine has no weights then
    (of_decode,) = (phase for phase in plan.phases if phase.name == "decode")
    assert of_decode.beside == {"parameters": plan.step.params_bytes, "optimizer": plan.step.optimizer_bytes}


def test_products_of_the_step(plan):
    """By hand. A device has one row of 80 tokens of a micro-batch; two micro-batches, two mini-batches."""
    model, tokens = plan.model, 80
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    down = 2 * tokens * model.hidden_size * model.intermediate_size
    # The xla kernel computes the half of attention that causality hides.
    layer = 2 * tokens * model.hidden_size * (2 * queries + 2 * keys) + 3 * down + 4 * queries * tokens**2
    # 79 tokens are predicted, all in one block: a piece of the vocabulary is an eighth of it.
    head = 2 * 79 * model.hidden_size * model.vocab_size
    # remat=full: forward, again for the backward pass but for the last product, backward. So does the head.
    gradient = model.num_layers * (4 * layer - down) + 4 * head
    # Four micro-batches, and p^Train of the two of the second mini-batch.
    by_hand = 4 * gradient + 2 * (model.num_layers * layer + head)
    assert plan.programs["step"].unknown_loops == ()
    assert plan.programs["step"].flops.products == by_hand
    # The model needs three forward passes for a gradient, and half of attention.
    needed = (3 * 4 + 2) * (model.num_layers * (layer - 2 * queries * tokens**2) + head * 80 / 79)
    assert plan.flops_ratio == pytest.approx(by_hand / needed)


def _moved(program, *kinds):
    """Executions of the float32 collectives of matrices, by their dimensions, sorted."""
    found = collections.Counter()
    for one in program.collectives:
        if one.kind in kinds and one.array.dtype == "f32" and len(one.array.dims) == 2 and one.array.size >= 1024:
            found[tuple(sorted(one.array.dims))] += one.count
    return found


def test_every_parameter_is_gathered_once_a_pass_and_reduced_once(plan):
    """Two mini-batches of two micro-batches: four gradients, and p^Train of the second mini-batch, two passes more."""
    step, model = plan.programs["step"], plan.model
    hidden, wide, layers = model.hidden_size, model.intermediate_size, model.num_layers
    queries = model.num_heads * model.head_dim
    # On a CPU the matrices of q, k and v are one.
    fused = queries + 2 * model.num_kv_heads * model.head_dim
    # Forward and backward of each gradient, and the two passes.
    passes = 2 * 4 + 2
    gathered = _moved(step, "all-gather")
    # The embedding is the output matrix too, which comes in eight pieces. For lookups it stays where it is.
    pieces = (model.vocab_size // 8, hidden)
    assert gathered == {
        (hidden, hidden): passes * layers, (hidden, fused): passes * layers, (hidden, wide): 3 * passes * layers,
        pieces: 8 * passes,
    }  # fmt: skip
    assert _moved(step, "all-reduce", "reduce-scatter") == {
        (hidden, hidden): 4 * layers, (hidden, fused): 4 * layers, (hidden, wide): 3 * 4 * layers, pieces: 8 * 4,
    }  # fmt: skip


def test_what_the_checks_find(plan):
    """The plain attention of a CPU has a matrix of scores; nothing else that a large model must not have."""
    step = plan.programs["step"]._replace(seconds=180.0)
    plan = dataclasses.replace(plan, programs={"step": step})
    no_logits, no_scores, no_tree, operations, _, seconds = check_goals(plan)
    assert no_logits.holds and no_tree.holds and operations.holds and seconds.holds
    # Two key-value heads, and the two query heads of each along the queries.
    assert not no_scores.holds and no_scores.found == "f32[1,2,160,80] in step"
    assert operations.found == f"{plan.flops_ratio:.2f}"
    slow = step._replace(seconds=181.0)
    assert not check_goals(dataclasses.replace(plan, programs={"step": slow}))[-1].holds


def test_no_array_of_all_tokens_and_the_vocabulary(plan):
    arrays, vocab = plan.programs["step"].arrays, plan.model.vocab_size
    # Logits exist for an eighth of the 104 tokens of the vocabulary at a time.
    assert any(array.dims == (79, vocab // 8) for array in arrays)
    assert all_logits(arrays, 79, model_shapes(plan.model, plan.mesh)) == []


def test_memory_beside_the_engines_programs(plan):
    """32 completions in batches of 32: none waits, no cache lives beside a program. With smaller batches some do."""
    state = {"parameters": plan.step.params_bytes, "optimizer": plan.step.optimizer_bytes}
    (push,) = (phase for phase in plan.phases if phase.name == "push")
    assert push.peak == 0 and push.beside["engine's weights"] == plan.engine.weights_bytes
    assert push.total > sum(state.values()) + plan.engine.weights_bytes
    assert not plan.engine.refills
    waiting = compile_run(_config(rollout__max_rows=16), _DEVICES, only=("prefill",))
    assert waiting.engine.refills
    (prefill,) = (phase for phase in waiting.phases if phase.name == "prefill")
    # No row of 16 tokens is preempted: its cache has that length from the start.
    assert prefill.beside == state | {"engine's cache": waiting.engine.cache_bytes}


def test_caches_of_preempted_rows_are_beside_a_decoding_batch():
    # 272 tokens are more than two blocks of 128: a cache of 128 grows, and rows that fill it wait.
    config = _config(rollout__max_rows=16, rollout__max_completion_tokens=272, training__row_lengths=(336,))
    plan = compile_run(config, _DEVICES, only=("decode",))
    (decode,) = (phase for phase in plan.phases if phase.name == "decode")
    # Two batches of two rows a device: 64 + 272 slots of two heads of 32, keys and values, four layers, float32.
    assert decode.beside["preempted caches, at most"] == 2 * 2 * 336 * 2 * 2 * 32 * 4 * 4
    assert "engine's cache" not in decode.beside


def test_a_sidecar_that_sleeps_leaves_the_gpu_to_the_step(plan):
    gpus = Topology("h100:8", CHIPS["h100"], jax.devices()[:8])
    awake, asleep = _with_vllm(), _with_vllm(sleep=1)
    assert usable_memory(awake, gpus) == (40 * GIB, "80 GiB less vLLM's share of 0.4 and a tenth")
    assert usable_memory(asleep, gpus) == (72 * GIB, "80 GiB less a tenth, while vLLM sleeps")
    assert usable_memory(_with_vllm(visible_devices="8,9"), gpus)[0] == int(79.1 * 0.9 * GIB)
    beside_vllm = dataclasses.replace(plan, topology=gpus, engine=None, programs={"step": plan.programs["step"]})
    assert [phase.name for phase in dataclasses.replace(beside_vllm, config=awake).phases] == ["step"]
    (_, sample) = dataclasses.replace(beside_vllm, config=asleep).phases
    assert sample.total == plan.step.params_bytes + plan.step.optimizer_bytes + 32 * GIB


def test_a_sidecar_that_leaves_nothing():
    gpus = Topology("h100:8", CHIPS["h100"], jax.devices()[:8])
    with pytest.raises(UserError, match="config.rollout.vllm.memory_share: got 0.95, and the trainer has -0.05 of the"):
        compile_run(_with_vllm(memory_share=0.95), gpus)


def _with_vllm(**changes):
    rollout = _config(rollout__engine="vllm").rollout
    vllm = dataclasses.replace(rollout.vllm, **changes)
    return dataclasses.replace(_config(), rollout=dataclasses.replace(rollout, vllm=vllm))


def test_replayed_experts_are_in_the_programs():
    """Eight experts, two of them for a token, four layers, int16."""
    changes = {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    }  # fmt: skip
    config = _config(rollout__router_replay=True)
    architecture = dataclasses.replace(config.model.architecture, **changes)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, architecture=architecture))
    plan = compile_run(config, _DEVICES, only=("prefill",))
    # [M, A, R, L, layers, k] of two mini-batches of two micro-batches of eight rows.
    shapes = [leaf.shape for leaf in jax.tree.leaves(plan.step.program.trace().in_avals)]
    assert (2, 2, 8, 80, 4, 2) in shapes
    # A prompt on each device.
    assert Array("s16", (1, 64, 4, 2)) in plan.programs["prefill"].arrays


def test_what_does_not_fit_is_refused(plan):
    assert plan.fits
    small = dataclasses.replace(plan, usable=1000)
    assert not small.fits and "does not fit: step needs" in describe_plan(small)


def test_the_report_and_the_record(plan):
    text, record = describe_plan(plan), plan_record(plan)
    assert f"{num_params(plan.model):,} parameters" in text
    for heading in ("by arithmetic, exact", "compiled; GiB", "estimate from the data sheet", "on each device"):
        assert heading in text
    assert record["fits"] and record["programs"]["step"]["product_flops"] == plan.programs["step"].flops.products
    assert record["devices"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh__fsdp": 3}, "config.mesh (data=1, fsdp=3, tensor=1, expert=1): needs 8"),
        ({"mesh__tensor": 3}, "config.mesh (data=1, fsdp=-1, tensor=3, expert=1): 3 does not divide the 8 devices; "
         "that do 1, 2, 4, 8"),
        ({"mesh__tensor": 8}, "config.mesh.tensor: got 8, must divide the model's 4 query heads; that do 1, 2, 4"),
        ({"mesh__expert": 2}, "config.mesh.expert: got 2, the model has no experts; must be 1"),
        ({"training__prompts_per_mini_batch": 1}, "config.mesh: data x fsdp x expert = 8 devices split the rows of a "
         "mini-batch, which has 4 completions"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_divide(changes, message):
    if "mesh__fsdp" in changes:
        message = "config.mesh (data=1, fsdp=3, tensor=1, expert=1): needs 3 devices, there are 8"
    with pytest.raises(UserError) as raised:
        compile_run(_config(**changes), _DEVICES)
    assert str(raised.value).startswith(message)
