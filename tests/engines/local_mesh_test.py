"""The embedded engine on meshes gives the tokens of one device.

Weights in parts, and weight syncs from any training mesh.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local import ENGINE
from dcmdp_jax.engines.local import engine as engine_module
from dcmdp_jax.engines.local.decode import Limits, RowState, SlotLayout, decode
from dcmdp_jax.engines.local.forward import embed, score
from dcmdp_jax.engines.local.layout import Program, engine_mesh
from dcmdp_jax.engines.local.weights import conversion, engine_shapes
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params, logical_axes, param_shapes
from dcmdp_jax.models.sampler import Draw
from dcmdp_jax.parallel.mesh import AXES, make_mesh, sampling_mesh
from dcmdp_jax.parallel.sharding import param_shardings
from tests.support.sampling import assert_same_samples, local_engine, sample

pytestmark = pytest.mark.skipif(
    jax.device_count() < 8, reason="needs eight devices, see XLA_FLAGS in BUILD.md"
)

DENSE = ModelConfig(
    "qwen3", 48, 32, 64, 2, 8, 4, 8, tie_word_embeddings=True, initializer_range=0.3
)
# Biases on q, k, v and o; a vocabulary that no mesh divides, and an output matrix of its own.
LLAMA = dataclasses.replace(
    DENSE, model_type="llama", vocab_size=41, attention_bias=True, tie_word_embeddings=False
)
_MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
EXPERTS = ModelConfig("qwen3_moe", 48, 32, 48, 2, 4, 2, 8, initializer_range=0.3, **_MOE)
SAMPLING = SamplingParams(
    group_size=3, max_completion_tokens=20, temperature=0.8, stop_token_ids=tuple(range(5))
)
PROMPTS = tuple(
    np.random.default_rng(0).integers(0, 40, length).astype(np.int32)
    for length in (1, 5, 16, 12, 7)
)


def _long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@functools.cache
def _params(config, seed=0):
    fresh = init_params(config, jax.random.key(seed))

    def perturb(path, x):
        # Norms of 1 and biases of 0 would hide one that is left out, or added twice.
        if path[-1].key not in ("scale", "bias"):
            return x
        return x + 0.2 * jax.random.normal(
            jax.random.key(sum(map(ord, jax.tree_util.keystr(path))) + seed), x.shape
        )

    return jax.tree_util.tree_map_with_path(perturb, fresh)


def _mesh(data=1, fsdp=1, tensor=1, expert=1):
    count = data * fsdp * tensor * expert
    return Mesh(np.asarray(jax.devices()[:count]).reshape(data, fsdp, tensor, expert), AXES)


def _engine(config, mesh, precision="float32", **settings):
    local = local_engine(config, precision=precision, max_total_tokens=64, mesh=mesh, **settings)
    local.sync_weights(_params(config), 0)
    return local


@functools.cache
def _one_device(config, precision):
    local = _engine(config, None, precision)
    return local, sample(local, PROMPTS, SAMPLING, seed=1, step=2)


@pytest.mark.parametrize(
    ("config", "sizes", "precision", "settings"),
    [
        _long(DENSE, {"data": 8}, "float32", {}),
        (DENSE, {"tensor": 4}, "float32", {}),
        (EXPERTS, {"data": 2, "tensor": 2, "expert": 2}, "float32", {}),
        # Small batches and caches: rows are preempted, moved and refilled.
        _long(
            DENSE,
            {"data": 2, "fsdp": 2, "tensor": 2},
            "float32",
            {"max_rows": 6, "min_rows": 2, "cache_block": 4},
        ),
        _long(DENSE, {"data": 2, "tensor": 4}, "int8", {}),
        _long(LLAMA, {"tensor": 4}, "float32", {}),
        _long(EXPERTS, {"expert": 8}, "float32", {"max_rows": 6, "min_rows": 2, "cache_block": 4}),
        _long(EXPERTS, {"tensor": 2, "expert": 4}, "fp8", {}),
    ],
    ids=lambda value: value.model_type if isinstance(value, ModelConfig) else None,
)
def test_a_mesh_gives_the_tokens_of_one_device(config, sizes, precision, settings):
    single, expected = _one_device(config, precision)
    several = _engine(config, _mesh(**sizes), precision, **settings)
    assert_same_samples(expected, sample(several, PROMPTS, SAMPLING, seed=1, step=2), atol=3e-5)
    lengths = {ids.size for ids in expected.completion_ids}
    assert len(lengths) > 4 and 20 in lengths
    assert several.weights_fingerprint == single.weights_fingerprint
    scored = several.score(expected.prompt_ids, expected.completion_ids, temperature=0.8)
    np.testing.assert_allclose(
        np.concatenate(scored), np.concatenate(expected.rollout_logprobs), rtol=0, atol=3e-5
    )


@pytest.mark.parametrize(
    ("sizes", "rows"), [({"tensor": 4}, 1), ({"data": 2, "tensor": 2}, 2), ({"data": 4}, 4)]
)
def test_a_row_is_scored_beside_no_more_padding_than_there_are_row_shards(sizes, rows, monkeypatch):
    """Devices that split a row's heads share its tokens.

    A row for each of them would be computed for nothing.
    """
    shapes = []

    def seen(weights, tokens, *arguments, **static):
        shapes.append(tokens.shape)
        return score(weights, tokens, *arguments, **static)

    monkeypatch.setattr(engine_module, "score_program", seen)
    several = _engine(DENSE, _mesh(**sizes))
    prompt = PROMPTS[1]
    completion = PROMPTS[4]
    [found] = several.score([prompt], [completion], temperature=0.8)
    [expected] = _one_device(DENSE, "float32")[0].score([prompt], [completion], temperature=0.8)
    np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5)
    assert shapes == [(rows, 16), (1, 16)]


def test_scores_reshape_no_rows_of_odd_length():
    """Scores are reshaped with the last position, and cut afterwards.

    The compiler for TPUs takes five minutes over 16,383 of 16,384 tokens, and seconds over all.
    """
    config = DENSE
    mesh = _mesh(tensor=4)
    program = Program(config, "float32", "float32", engine_mesh(mesh))
    text = score.lower(
        _engine(config, mesh).weights,
        jnp.zeros((2, 64), jnp.int32),
        jnp.ones(2, jnp.int32),
        1.0,
        program=program,
    ).as_text()
    assert "tensor<2x64x32xf32>" in text and "tensor<128x32xf32>" in text
    assert "63x32xf32" not in text and "126x32xf32" not in text


def test_each_device_has_its_part_of_the_weights():
    local = _engine(EXPERTS, _mesh(data=2, tensor=2, expert=2))
    layer = local.weights["layers"][1]
    shares = jax.tree.map(lambda leaf: leaf.sharding.shard_shape(leaf.shape), layer)
    # Heads 4 + 2 * 2 of width 8, halved; 8 experts of width 24, halved both ways; norms and the
    # router as they are.
    assert shares["attention"]["qkv"]["kernel"] == (32, 64 // 2) and shares["attention"]["o"][
        "kernel"
    ] == (32 // 2, 32)
    assert shares["mlp"]["experts"]["gate_up"]["kernel"] == (4, 32, 48 // 2)
    assert shares["mlp"]["experts"]["down"]["kernel"] == (4, 24 // 2, 32)
    assert shares["mlp"]["router"]["kernel"] == (32, 8) and shares["mlp_norm"]["scale"] == (32,)
    assert local.weights["output"].sharding.shard_shape((32, 48)) == (32, 24)
    # Devices of a CPU with the same part share one copy in memory: four parts of eight devices.
    shards = layer["mlp"]["experts"]["down"]["kernel"].addressable_shards
    assert len({shard.data.unsafe_buffer_pointer() for shard in shards}) == 4


@pytest.mark.parametrize(
    ("shape", "precision", "tensor"),
    [
        ((2, 2, 2, 1), "int8", 4),
        _long((1, 8, 1, 1), "bfloat16", 4),
        _long((1, 8, 1, 1), "fp8", 1),
        _long((8, 1, 1, 1), "exact", 2),
    ],
)
def test_weights_are_the_same_bits_from_every_training_mesh(shape, precision, tensor):
    single, _ = _one_device(DENSE, precision)
    training = make_mesh(*shape, devices=jax.devices()[:8])
    shardings = param_shardings(logical_axes(DENSE), param_shapes(DENSE), training)
    params = jax.device_put(_params(DENSE), shardings)
    local = local_engine(
        DENSE, precision=precision, max_total_tokens=64, mesh=sampling_mesh(training, tensor=tensor)
    )
    local.sync_weights(params, 3)
    assert local.weights_fingerprint == single.weights_fingerprint
    output = jax.tree.map(np.asarray, local.weights["layers"][1]["attention"]["o"])
    jax.tree.map(
        np.testing.assert_array_equal,
        output,
        jax.device_get(single.weights["layers"][1]["attention"]["o"]),
    )


def test_a_trainer_on_other_devices_syncs_leaf_by_leaf():
    single, _ = _one_device(DENSE, "bfloat16")
    local = _engine(
        DENSE, Mesh(np.asarray(jax.devices()[2:6]).reshape(2, 1, 2, 1), AXES), "bfloat16"
    )
    assert local.weights_fingerprint == single.weights_fingerprint


def test_a_sync_gathers_no_leaf_in_the_trainers_precision():
    """What travels is bfloat16, and no device gets more than its part.

    The trainer is split over fsdp, the engine over tensor.
    """
    config = dataclasses.replace(DENSE, num_kv_heads=8)
    training = make_mesh(1, 8, 1, 1, devices=jax.devices()[:8])
    shardings = param_shardings(logical_axes(config), param_shapes(config), training)
    shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        param_shapes(config),
        shardings,
    )
    programs = conversion(config, "bfloat16", sampling_mesh(training, tensor=8))
    compiled = programs.layer[""].lower(shapes["layers"], np.int32(0)).compile()
    layer = 2 * 32 * (3 * 64 + 64 + 3 * 64)
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes < layer / 8 + 2000
    assert memory.temp_size_in_bytes < layer
    sums = programs.source_checksums.lower(shapes, False).compile()
    assert not [line for line in sums.as_text().splitlines() if "all-gather(" in line]


def _conversions(program, in_loop=False):
    """For each conversion of an 8-bit matrix, whether it is inside a loop."""
    for equation in program.eqns:
        if (
            equation.primitive.name == "convert_element_type"
            and equation.invars[0].aval.dtype == jnp.int8
        ):
            yield in_loop
        inside = in_loop or equation.primitive.name == "while"
        for inner in jax.tree.leaves(
            tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from _conversions(getattr(inner, "jaxpr", inner), inside)


@pytest.mark.parametrize("keeps_quantized", [False, True])
def test_an_accelerators_programs_convert_each_quantized_matrix_where_it_is_used(
    monkeypatch, keeps_quantized
):
    """Quantized matrices are converted before the loop on a CPU, else in each step.

    qkv, o, gate and up, down of two layers, and the output layer.

    Compiled for a TPU v5e (8 layers of width 1,024, 256 MiB of matrices in bfloat16) `decode` has
    208 MiB of temporary memory with the first and 11 with the second. XLA's CPU backend removes the
    barriers before it schedules.
    """
    monkeypatch.setattr(Program, "keeps_quantized", property(lambda self: keeps_quantized))
    shapes = engine_shapes(DENSE, "int8")
    rows = RowState(
        *(
            jax.ShapeDtypeStruct((2, 2)[:n], d)
            for n, d in ((2, "uint32"), *3 * ((1, "int32"),), (1, "bool"))
        )
    )
    cache = tuple(
        tuple(jax.ShapeDtypeStruct((2, 4, *size), "float32") for size in ((8, 32), (32, 8)))
        for _ in range(2)
    )
    limits = Limits(np.int32(0), np.int32(8), np.int32(0))
    draw = Draw(np.float32(1), np.float32(1), np.zeros(1, np.int32))
    # A length that no other test has: traced programs are cached by their arguments.
    program = Program(DENSE, "float32", "float32", engine_mesh(None))
    traced = decode.trace(
        shapes,
        cache,
        rows,
        limits,
        draw,
        program=program,
        slot_layout=SlotLayout(prompt_slots=16 + keeps_quantized, prefix_slots=18),
        mode="sample",
    )
    before = [False] * 9
    assert list(_conversions(traced.jaxpr.jaxpr)) == ([True] * 9 if keeps_quantized else before)
    # Another in the sampler's branch for GPUs.
    assert str(traced.jaxpr).count("optimization_barrier") == 2 + (3 if keeps_quantized else 0)


@pytest.mark.parametrize(
    ("config", "sizes", "message"),
    [
        (DENSE, {"tensor": 8}, "tensor: got 8, must divide the model's num_kv_heads=4"),
        (
            EXPERTS,
            {"tensor": 2, "expert": 3},
            "expert: got 3, must divide the model's num_experts=8, or be 1",
        ),
        (DENSE, {"expert": 2}, "expert: got 2, must divide the model's num_experts=0, or be 1"),
        (
            dataclasses.replace(DENSE, intermediate_size=6),
            {"tensor": 4},
            "tensor: got 4, must divide the model's intermediate_size=6",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(config, sizes, message):
    with pytest.raises(UserError) as caught:
        ENGINE.check(
            EngineArguments(model=config, max_total_tokens=64, settings=ENGINE.settings(**sizes))
        )
    assert str(caught.value) == message


def test_a_mesh_that_does_not_divide_the_devices_is_refused():
    training = make_mesh(1, 8, 1, 1, devices=jax.devices()[:8])
    assert dict(sampling_mesh(training, tensor=2, expert=2).shape) == {
        "data": 2,
        "fsdp": 1,
        "tensor": 2,
        "expert": 2,
    }
    with pytest.raises(
        UserError, match=r"mesh \(tensor=3, expert=1\): 3 does not divide the 8 devices"
    ):
        sampling_mesh(training, tensor=3)
    assert math.prod(sampling_mesh(training).shape.values()) == 8


def test_an_embedding_is_converted_by_looked_up_rows_not_whole():
    """The whole embedding is not converted in each call.

    That would read and write 1,866 of the 4,157 MB that two layers of Qwen3-1.7B moved (H100).
    """
    program = Program(LLAMA, "float32", "float32", _mesh())
    weights = program.own_weights(
        {name: jnp.full((41, 32), 1.5, jnp.bfloat16) for name in ("embedding", "output")}
    )
    assert weights["embedding"].dtype == jnp.bfloat16 and weights["output"].dtype == jnp.float32
    rows = embed(weights, jnp.array([[3, 40]]), program)
    assert rows.dtype == jnp.float32 and rows.shape == (1, 2, 32) and (rows == 1.5).all()
