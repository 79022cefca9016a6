"""Checks of programs, on shapes by hand and on the training step as it is lowered for a TPU."""

import functools
import re

import jax
import pytest

from benchmarks.compiled_parts.collectives import Collective
from benchmarks.compiled_parts.goals import (
    all_logits,
    attention_matrices,
    model_shapes,
    tree_gathers,
)
from benchmarks.compiled_parts.hlo import Array
from configs import qwen3_8b
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.plan.published import model_of
from dcmdp_jax.plan.run_plan import plan_step, planned_run

# Width 16, MLP 48, three layers, four query and two key-value heads of 8, vocabulary 88.
_MODEL = ModelConfig("qwen3", 88, 16, 48, 3, 4, 2, 8)


def _mesh(*sizes):
    return make_mesh(*sizes, devices=jax.devices()[:8])


def _arrays(*shapes):
    return [Array("f32", dims) for dims in shapes]


def test_attention_matrices_have_two_axes_along_the_row():
    shapes = model_shapes(_MODEL, _mesh(1, 8))
    scores = _arrays(
        (2, 4, 40, 40), (2, 2, 80, 40), (40, 40)
    )  # whole, of the two heads of a group, and a mask
    rest = _arrays((2, 40, 4, 8), (2, 40, 16), (3, 16, 48))
    assert attention_matrices([*scores, *rest], 40, shapes) == scores
    # Keys are 16 wide, as are hidden states: for rows of 16 tokens [2, 16, 16] may be either.
    assert attention_matrices(_arrays((2, 16, 16), (2, 32, 16)), 16, shapes) == []
    # Rows of 8 tokens: the queries of a group of two heads are 16.
    assert attention_matrices(_arrays((2, 16, 8), (2, 8, 16)), 8, shapes) == []


def test_logits_of_all_tokens_however_they_are_shaped():
    shapes = model_shapes(_MODEL, _mesh(1, 4, 2))
    wanted = _arrays((39, 88), (3, 13, 88), (39, 44), (88, 50))
    # A chunk of them, a piece of the vocabulary, the embedding and its shard, a row of something
    # else.
    rest = _arrays((13, 88), (39, 11), (88, 16), (88, 4), (39, 48))
    assert all_logits([*wanted, *rest], 39, shapes) == wanted
    # The embedding has fewer rows than the tokens here and more there.
    assert all_logits(_arrays((88, 16)), 10, shapes) == []


def test_gathers_of_more_than_a_layer():
    shapes = model_shapes(_MODEL, _mesh(1, 8))

    def gathered(*dims):
        return Collective("all-gather", Array("f32", dims), 8, 1, True, "")

    # A layer: q 512, k and v 256, o 512, MLP 3 x 768, norms 2 x 16 + 2 x 8: 3,888. Embedding and
    # output 88 x 16 each.
    assert shapes.parameters == 3 * 3888 + 2 * 1408 + 16
    assert tree_gathers(
        [gathered(3, 16, 48), gathered(48, 3, 16), gathered(14496 // 2)], shapes
    ) == _arrays((3, 16, 48), (48, 3, 16), (7248,))
    layer = (
        gathered(16, 48),
        gathered(1, 16, 48),
        gathered(48, 16),
        gathered(88, 16),
        gathered(16, 64),
    )
    assert tree_gathers(layer, shapes) == []
    reduced = Collective("all-reduce", Array("f32", (3, 16, 48)), 8, 1, True, "")
    assert tree_gathers([reduced], shapes) == []


_LENGTH = 640


@functools.cache
def _lowered(attention, data=1, fsdp=8):
    """Model, mesh and arrays of a step on rows of 640 tokens, lowered for TPUs. That needs no
    compiler for them.
    """
    config = qwen3_8b.get_config("local,debug")
    config.model.attention, config.model.logprob_chunk = attention, 128
    architecture = config.model.architecture
    architecture.num_layers = 2
    architecture.hidden_size = 192
    architecture.head_dim = 128
    architecture.num_heads = architecture.num_kv_heads = 2
    config.task.max_prompt_tokens, config.rollout.max_completion_tokens = 128, 512
    config.training.row_lengths, config.training.micro_batch_tokens = (_LENGTH,), _LENGTH
    config.training.prompts_per_mini_batch = 4
    config = from_config_dict(config)
    model = model_of(config)
    mesh = _mesh(data, fsdp)
    program = plan_step(planned_run(config, mesh, model=model))
    text = program.trace().lower(lowering_platforms=("tpu",)).as_text()
    found = {
        tuple(map(int, dims.rstrip("x").split("x")))
        for dims in re.findall(r"tensor<((?:\d+x)+)[a-z]\w*>", text)
    }
    assert program.row_lengths == (_LENGTH,) and program.tokens == _LENGTH - 1
    return model_shapes(model, mesh), _arrays(*found)


def test_a_step_with_splash_attention_has_no_attention_matrix():
    """The compiler gets none, and a kernel has no memory but its own."""
    shapes, arrays = _lowered("splash")
    assert Array("f32", (8, _LENGTH, 192)) in arrays
    assert attention_matrices(arrays, _LENGTH, shapes) == []


def test_splash_attention_is_lowered_for_data_parallel_devices():
    """Mosaic's kernels have no partitioner: jax refuses one with an axis of the mesh left to the
    compiler.
    """
    shapes, arrays = _lowered("splash", data=8, fsdp=1)
    assert Array("f32", (1, _LENGTH, 192)) in arrays
    assert attention_matrices(arrays, _LENGTH, shapes) == []


def test_a_step_with_plain_attention_has_attention_matrices():
    shapes, arrays = _lowered("xla")
    assert Array("f32", (8, 2, _LENGTH, _LENGTH)) in attention_matrices(arrays, _LENGTH, shapes)


@pytest.mark.parametrize("attention", ["splash", "xla"])
def test_a_step_has_no_logits_of_all_tokens(attention):
    shapes, arrays = _lowered(attention)
    # An eighth of the 104 tokens of the vocabulary at a time.
    assert any(array.dims == (_LENGTH - 1, 13) for array in arrays)
    assert all_logits(arrays, _LENGTH - 1, shapes) == []
