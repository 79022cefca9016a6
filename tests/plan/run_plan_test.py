"""A whole plan on eight CPU devices, of a model small enough to count by hand."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from configs import qwen3_8b
from dcmdp_jax.config import from_config_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.params import num_params, param_shapes
from dcmdp_jax.plan.report import describe_plan, plan_record
from dcmdp_jax.plan.run_plan import plan_run
from dcmdp_jax.plan.search import candidates
from dcmdp_jax.plan.topologies import CHIPS, Topology

_DEVICES = Topology("v5e:2x4", CHIPS["v5e"], jax.devices()[:8])


def _config(**changes):
    config = qwen3_8b.get_config("debug")
    # XLA's CPU backend aborts on a reduction of bfloat16 between devices.
    config.model.compute_dtype = config.rollout.compute_dtype = config.rollout.precision = "float32"
    # Two mini-batches of 16 completions; one row of 80 tokens a device, so two micro-batches.
    config.training.prompts_per_step, config.training.prompts_per_mini_batch = 8, 4
    config.training.micro_batch_tokens, config.model.logprob_chunk = 80, 20
    for key, value in changes.items():
        section, field = key.split("__")
        setattr(config[section], field, value)
    return from_config_dict(config)


@pytest.fixture(scope="module")
def plan():
    return plan_run(_config(), _DEVICES, only=("step", "decode"))


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
    assert of_step.total == step.peak + plan.engine.weights_bytes
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


def test_every_parameter_is_gathered_once_a_pass_and_reduced_once(plan):
    """Two mini-batches of two micro-batches: four gradients, and p^Train of the second mini-batch, two passes more."""
    step, model = plan.programs["step"], plan.model
    large = [one for one in step.collectives if one.array.size >= 1024 and one.array.dtype == "f32"]
    # The embedding is the output matrix too: it is gathered, and its gradient reduced, for each.
    count = num_params(model) + model.vocab_size * model.hidden_size
    gathered = sum(one.count * one.array.size for one in large if one.kind == "all-gather")
    assert 0.9 * 8 * count < gathered <= (2 * 4 + 2) * count
    reductions = ("all-reduce", "reduce-scatter")
    reduced = sum(one.count * one.array.size for one in large if one.kind in reductions)
    assert 0.99 * 4 * count < reduced <= 4 * count
    # Of the whole tree at once nothing is gathered: the largest is a matrix of one layer.
    assert max(one.array.size for one in large) == model.hidden_size * model.intermediate_size


def test_no_array_of_all_tokens_and_the_vocabulary(plan):
    arrays, vocab = plan.programs["step"].arrays, plan.model.vocab_size
    # Logits exist for an eighth of the 104 tokens of the vocabulary at a time.
    assert any(array.dims == (79, vocab // 8) for array in arrays)
    assert [array for array in arrays if vocab in array.dims and {79, 80} & set(array.dims)] == []


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
        plan_run(_config(**changes), _DEVICES)
    assert str(raised.value).startswith(message)


def test_meshes_to_search():
    shapes = [(one.fsdp, one.tensor, one.expert) for one in candidates(16, experts=False)]
    assert shapes == [(16, 1, 1), (8, 2, 1), (4, 4, 1), (2, 8, 1)]
    assert (2, 2, 4) in [(one.fsdp, one.tensor, one.expert) for one in candidates(16, experts=True)]
