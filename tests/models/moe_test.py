"""The mixture of experts against transformers, loops and itself on meshes."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from dcmdp_jax.models import decoder
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.declare import Scope
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.hf_config import from_hf, read_model_config, to_hf
from dcmdp_jax.models.hf_manifest import check_manifest
from dcmdp_jax.models.hf_weights import iterate_hf_tensors, load_params, save_params
from dcmdp_jax.models.moe import MoE, load_balancing_loss, router_metrics, router_sums
from dcmdp_jax.models.ops import CPU, REFERENCE, choose_ops, tpu
from dcmdp_jax.models.params import hf_tensors, init_params, logical_axes, num_params, param_shapes
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import (
    DATA,
    constrain,
    data_axis,
    param_shardings,
    shard_map_over_data,
)
from dcmdp_jax.plan.published import PUBLISHED

Directory = Callable[..., tuple[Any, Path]]
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
CONFIG = ModelConfig(
    "qwen3_moe", 31, 16, 20, 2, 4, 2, 8, rope_theta=1e4, initializer_range=0.3, **_MOE
)
TPU_INTERPRETED = dataclasses.replace(
    REFERENCE, grouped_matmul=lambda *args: tpu.grouped_matmul(*args, interpret=True)
)


def _forward(params, config, ids, segments, compute, **pin):
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    inputs = decoder.DecoderInputs(input_ids=ids, position_ids=positions, segment_ids=segments)
    hidden, aux = decoder.hidden_states_and_aux(params, config, inputs, compute, **pin)
    return hidden @ decoder.output_kernel(params).astype(hidden.dtype), aux


@pytest.mark.parametrize("ops", [CPU, REFERENCE, TPU_INTERPRETED], ids=["cpu", "reference", "tpu"])
@pytest.mark.parametrize("sizes", [(3, 0, 4, 2), (0, 0, 9, 0), (300, 0, 299, 1)], ids=str)
def test_grouped_matmul_is_a_product_for_each_group(ops, sizes):
    """Values and both gradients against a loop in float64.

    300 rows are several blocks, the last shared by groups.
    """
    rng = np.random.default_rng(0)
    total = sum(sizes)
    x, weights, bar = (rng.normal(size=shape) for shape in ((total, 5), (4, 5, 3), (total, 3)))
    owner = np.repeat(np.arange(4), sizes)
    want = np.stack([row @ weights[group] for row, group in zip(x, owner, strict=True)])
    want_x = np.stack([row @ weights[group].T for row, group in zip(bar, owner, strict=True)])
    want_weights = np.stack([x[owner == group].T @ bar[owner == group] for group in range(4)])

    def product(x, weights):
        return ops.grouped_matmul(x, weights, jnp.asarray(sizes, jnp.int32))

    arguments = (jnp.asarray(array, jnp.float32) for array in (x, weights))
    have, pull = jax.vjp(product, *arguments)
    have_x, have_weights = pull(jnp.asarray(bar, jnp.float32))
    np.testing.assert_allclose(have, want, atol=2e-5)
    np.testing.assert_allclose(have_x, want_x, atol=2e-5)
    np.testing.assert_allclose(have_weights, want_weights, atol=1e-4)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_no_platform_multiplies_every_row_by_every_expert(platform):
    """XLA compiles `ragged_dot` so, on CPU and GPU; on TPU its weight gradient."""

    def loss(x, kernels):
        return jnp.sum(
            choose_ops(platform).grouped_matmul(x, kernels, jnp.array([100, 156], jnp.int32)) ** 2
        )

    def primitives(jaxpr):
        inner = [
            sub for each in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(each.params)
        ]
        return {each.primitive.name for each in jaxpr.eqns}.union(*map(primitives, inner))

    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(
        jnp.ones((256, 128)), jnp.ones((2, 128, 128))
    )
    assert not {name for name in primitives(traced.jaxpr) if "ragged" in name}


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("normalized", [True, False])
def test_a_token_is_the_weighted_sum_of_its_top_k_experts(normalized, replayed):
    """The experts are the router's, or replayed ones with the router's weights.

    The first token has none to replay.
    """
    config = dataclasses.replace(CONFIG, norm_topk_prob=normalized)
    moe = MoE(Scope(config, "mlp"))
    rng = np.random.default_rng(1)
    kernels = {"router": moe.router.kernel} | {
        name: getattr(moe.experts, name).kernel for name in ("gate", "up", "down")
    }
    values = {name: rng.normal(size=kernel.get_value().shape) for name, kernel in kernels.items()}
    for name, kernel in kernels.items():
        kernel.set_value(jnp.asarray(values[name], jnp.float32))
    x = rng.normal(size=(2, 3, 16))
    logits = x @ values["router"]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = np.zeros_like(x)
    given = np.stack([rng.permutation(4)[:2] for _ in range(6)]).reshape(2, 3, 2)
    given[0, 0] = -1
    top_tokens = np.argsort(-probabilities)[..., :2]
    used = np.where(given >= 0, given, top_tokens) if replayed else top_tokens
    for place in np.ndindex(2, 3):
        chosen = used[place]
        share = probabilities[place][chosen]
        share = share / share.sum() if normalized else share
        for expert, weight in zip(chosen, share, strict=True):
            gate = x[place] @ values["gate"][expert]
            hidden = gate / (1 + np.exp(-gate)) * (x[place] @ values["up"][expert])
            want[place] += weight * (hidden @ values["down"][expert])
    have, aux = moe(
        jnp.asarray(x, jnp.float32), CPU, None, jnp.asarray(given, jnp.int16) if replayed else None
    )
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(aux["router_probabilities"], probabilities, rtol=1e-4)
    np.testing.assert_array_equal(np.sort(aux["routed_experts"]), np.sort(used))
    sums = router_sums(aux, jnp.ones((2, 3), bool))
    entropies = -(probabilities * np.log(probabilities)).sum(-1)
    assert float(sums["router_entropy"]) == pytest.approx(entropies.sum(), rel=1e-4)
    if replayed:
        common = sum(len(set(used[place]) & set(top_tokens[place])) for place in np.ndindex(2, 3))
        assert 2 <= common < 12 and float(sums["router_agreement"]) == common


@pytest.mark.parametrize(("normalized", "tied"), [(True, False), (False, True)])
def test_logits_and_gradients_equal_transformers(hf_directory, normalized, tied):
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    model, directory = hf_directory("qwen3_moe", tied=tied, norm_topk_prob=normalized)
    config = read_model_config(directory)
    params = load_params(directory, config, dtype="float32")
    ids = np.random.default_rng(0).integers(0, 97, (2, 40))
    weights = np.random.default_rng(1).normal(size=(2, 40, 97)).astype(np.float32)
    theirs = model(torch.tensor(ids)).logits
    (theirs * torch.tensor(weights)).sum().backward()

    @jax.jit
    def loss(params):
        logits, _ = _forward(params, config, jnp.asarray(ids), jnp.ones_like(ids), Compute())
        return jnp.sum(logits * weights), logits

    (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(params)
    np.testing.assert_allclose(logits, theirs.detach().numpy(), atol=1e-4)
    assert theirs.std() > 0.5  # far from the uniform distribution, where anything agrees
    want = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    for name, place in hf_tensors(config).items():
        mine: Any = grads
        for key in place.path:
            mine = mine[key]
        mine = mine[place.index].T if place.transposed else mine[place.index]
        # transformers holds the experts fused, whatever it writes.
        fused = place.fused
        theirs = want[name] if fused is None else want[fused.name][fused.index, fused.rows]
        np.testing.assert_allclose(
            mine, theirs, atol=1e-4 * np.abs(theirs).max() + 1e-6, err_msg=name
        )


def test_load_and_loss_are_those_of_transformers(hf_directory):
    """Over real tokens alone: the padding of the second row would be counted otherwise."""
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model, directory = hf_directory("qwen3_moe")
    config = read_model_config(directory)
    params = load_params(directory, config, dtype="float32")
    ids = np.random.default_rng(0).integers(0, 97, (2, 40))
    mask = np.ones((2, 40), np.int32)
    mask[1, 25:] = 0
    with torch.no_grad():
        theirs = model(
            torch.tensor(ids), attention_mask=torch.tensor(mask), output_router_logits=True
        ).router_logits
    want = load_balancing_loss_func(theirs, 5, 2, torch.tensor(mask))
    _, aux = jax.jit(_forward, static_argnames=("config", "compute"))(
        params, config, ids, jnp.asarray(mask), Compute()
    )
    assert float(load_balancing_loss(aux)) == pytest.approx(float(want), rel=1e-5)
    probabilities = (
        torch.softmax(torch.stack(theirs), -1).numpy().reshape(3, 80, 5)[:, mask.reshape(-1) > 0]
    )
    counts = np.stack(
        [np.bincount(np.argsort(-layer)[:, :2].reshape(-1), minlength=5) for layer in probabilities]
    )
    np.testing.assert_array_equal(aux["router_load"], counts)
    np.testing.assert_array_equal(aux["router_tokens"], [65, 65, 65])
    # Every expert alike: f = k / E, P = 1 / E, so E sum f P = E E (k / E) (1 / E) = k.
    even = {"router_load": jnp.full((3, 5), 4.0), "router_probability": jnp.full((3, 5), 2.0)}
    assert float(load_balancing_loss(even | {"router_tokens": jnp.full(3, 10.0)})) == pytest.approx(
        2.0
    )


def test_router_metrics_by_hand():
    """The load by hand: two layers of four experts, 8 tokens with k = 1.

    In the second layer one expert gets half of all.
    """
    sums = {
        "router_load": jnp.array([[2.0, 2, 2, 2], [4, 2, 2, 0]]),
        "router_probability": jnp.full((2, 4), 2.0),
        "router_entropy": jnp.array([4.0, 8.0]),
        "router_tokens": jnp.full(2, 8.0),
    }
    have = router_metrics(sums | {"router_agreement": jnp.array([6.0, 8.0])})
    want = {
        "moe/load_max_over_mean": 2.0,  # 4 over a mean of 2; over both layers together it is 6 / 4
        # Layer 1: log 4, layer 2: log 2 / 2 + 2 log 4 / 4 = 1.5 log 2; of log 4 = 2 log 2: (1 +
        # 0.75) / 2.
        "moe/load_entropy": 0.875,
        "moe/router_entropy": 0.75,  # (4 / 8 + 8 / 8) / 2
        "moe/balance_loss": 1.0,  # P = 1/4 each, so E sum f P = sum f = k
        "moe/routing_agreement": 14 / 16,
    }
    assert {name: float(value) for name, value in have.items()} == pytest.approx(want)
    assert router_metrics({}) == {}
    # No token counted, as in a step without completions: no NaN.
    assert all(
        np.isfinite(value) for value in router_metrics(jax.tree.map(jnp.zeros_like, sums)).values()
    )


def _write(directory, tensors, **fields):
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(to_hf(CONFIG, dtype="float32") | fields))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tensors():
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=place.shape).astype(np.float32)
        for name, place in hf_tensors(CONFIG).items()
    }


def _fuse(tensors):
    """As transformers keeps them in memory: gate above up, experts first."""
    fused = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [
            [tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(4)]
            for part in ("gate", "up", "down")
        ]
        fused[f"{prefix}.gate_up_proj"] = np.stack(
            [np.concatenate(pair) for pair in zip(*each[:2], strict=True)]
        )
        fused[f"{prefix}.down_proj"] = np.stack(each[2])
    return fused


def test_separate_and_fused_experts_load_alike(tmp_path):
    tensors = _tensors()
    separate = load_params(_write(tmp_path / "separate", tensors), CONFIG, dtype="float32")
    fused = load_params(_write(tmp_path / "fused", _fuse(tensors)), CONFIG, dtype="float32")
    up = "model.layers.1.mlp.experts.3.up_proj.weight"
    np.testing.assert_array_equal(
        separate["layers"]["mlp"]["experts"]["up"]["kernel"][1, 3], tensors[up].T
    )
    jax.tree.map(np.testing.assert_array_equal, separate, fused)
    for params in (separate, fused):
        have = dict(iterate_hf_tensors(params, CONFIG, "float32"))
        assert have.keys() == tensors.keys()
        for name, value in tensors.items():
            assert have[name].tobytes() == value.tobytes(), name
    save_params(separate, CONFIG, tmp_path / "out", dtype="float32")
    assert read_model_config(tmp_path / "out") == CONFIG
    have = load_file(tmp_path / "out" / "model.safetensors")
    assert all(have[name].tobytes() == value.tobytes() for name, value in tensors.items())


def test_a_sharded_leaf_reads_its_own_experts(tmp_path):
    source = _write(tmp_path / "m", _fuse(_tensors()))
    whole = load_params(source, CONFIG, dtype="float32")
    mesh = make_mesh(fsdp=2, tensor=2, expert=2)
    shardings = param_shardings(logical_axes(CONFIG), param_shapes(CONFIG), mesh)
    params = load_params(source, CONFIG, dtype="float32", shardings=shardings)
    # Of [layers 2, experts 4, embed 16, MLP 12] over expert, fsdp and tensor.
    kernel = params["layers"]["mlp"]["experts"]["gate"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 2, 8, 6)
    jax.tree.map(np.testing.assert_array_equal, params, whole)


@pytest.mark.parametrize("original", [True, False], ids=["separate", "fused"])
def test_transformers_reads_what_we_write_and_we_what_it_writes(hf_model, tmp_path, original):
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is in the development extra"
    )
    model = hf_model("qwen3_moe")
    model.save_pretrained(tmp_path / "theirs", save_original_format=original)
    names = load_file(tmp_path / "theirs" / "model.safetensors").keys()
    assert ("model.layers.0.mlp.experts.gate_up_proj" in names) is not original
    config = read_model_config(tmp_path / "theirs")
    save_params(
        load_params(tmp_path / "theirs", config, dtype="float32"),
        config,
        tmp_path / "ours",
        dtype="float32",
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32
    )
    assert type(again) is type(model)
    for (name, want), have in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(want, have), name


def _refused(directory):
    with pytest.raises(ValueError) as caught:
        check_manifest(directory, read_model_config(directory))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_expert_is_named(tmp_path):
    tensors = _tensors()
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    source = _write(tmp_path / "m", tensors)
    assert _refused(source) == (
        f"{source}/model.safetensors: tensor model.layers.1.mlp.experts.2.up_proj.weight is "
        "missing, expected [12, 16]"
    )
    gone = {name: value for name, value in _tensors().items() if ".1.mlp.experts.3." not in name}
    source = _write(tmp_path / "n", gone)
    assert "tensor model.layers.1.mlp.experts.3.gate_proj.weight is missing and 2 more" in _refused(
        source
    )
    fused = _fuse(_tensors())
    fused["model.layers.0.mlp.experts.down_proj"] = fused["model.layers.0.mlp.experts.down_proj"][
        :3
    ]
    source = _write(tmp_path / "o", fused)
    assert (
        "tensor model.layers.0.mlp.experts.down_proj is [3, 16, 12], expected [4, 16, 12]"
        in _refused(source)
    )
    del fused["model.layers.0.mlp.experts.down_proj"]
    source = _write(tmp_path / "p", fused)
    assert "tensor model.layers.0.mlp.experts.0.down_proj.weight is missing and 3 more" in _refused(
        source
    )


def test_another_number_of_experts_is_named(tmp_path):
    source = _write(tmp_path / "m", _tensors(), num_experts=5)
    assert _refused(source).startswith(
        f"{source}/config.json: num_experts is 5, the safetensors files hold 4 experts ("
    )
    source = _write(tmp_path / "n", _fuse(_tensors()), num_experts=5)
    # Of the router [experts, hidden], which is read first, or of the experts.
    assert "is [4, " in _refused(source) and "expected [5, " in _refused(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"decoder_sparse_step": 2},
            "decoder_sparse_step is 2, only 1 is supported (experts everywhere)",
        ),
        (
            {"mlp_only_layers": [0]},
            "mlp_only_layers is [0], only [] is supported (experts everywhere)",
        ),
        ({"num_experts": None}, "num_experts is missing, must be a number"),
        ({"num_experts": 0}, "num_experts is 0, must be a whole number in [1, 100000]"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, must be at most num_experts=4"),
        (
            {"moe_intermediate_size": 10**9, "num_experts": 10**5},
            "moe_intermediate_size 1000000000, num_experts 100000",
        ),
        (
            {"model_type": "llama", "mlp_bias": True},
            "mlp_bias is true, only MLPs without biases are supported",
        ),
    ],
    ids=str,
)
def test_a_config_that_is_not_supported(change, message):
    with pytest.raises(ValueError) as caught:
        from_hf(to_hf(CONFIG, dtype="float32") | change)
    assert str(caught.value).startswith("config.json: ") and message in str(caught.value)


def test_published_qwen3_30b_a3b_by_shape():
    """30.5 billion parameters, of which 3.3 billion compute a token."""
    config = from_hf(PUBLISHED["Qwen3-30B-A3B"])
    # Embedding and output: 2 x 151936 x 2048 = 622,329,856; last norm: 2048.
    # A layer: q and o 2 x 2048 x 4096 = 16,777,216; k and v 2 x 2048 x 512 = 2,097,152; head norms
    # 2 x 128 = 256;
    #   norms 2 x 2048 = 4,096; router 2048 x 128 = 262,144; experts 128 x 3 x 2048 x 768 =
    #   603,979,776; together 623,120,640, times 48 = 29,909,790,720.
    assert num_params(config) == 622_329_856 + 2_048 + 29_909_790_720 == 30_532_122_624
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), "bfloat16"))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 30_532_122_624
    assert shapes["layers"]["mlp"]["experts"]["down"]["kernel"].shape == (48, 128, 768, 2048)
    unused = 48 * 3 * 2048 * 768 * (128 - 8)
    assert num_params(config) - unused == 3_353_032_704


MESHES = [
    (2, 2, 1, 2),
    *(pytest.param(shape, marks=pytest.mark.long) for shape in ((1, 4, 2, 1), (1, 1, 2, 4))),
]


@pytest.mark.parametrize(
    "shape", MESHES, ids=lambda shape: "data{} fsdp{} tensor{} expert{}".format(*shape)
)
def test_a_mesh_gives_the_loss_and_gradients_of_one_device(shape):
    """Experts on 1, 2 and 4 devices beside other axes, mapped over data as a training step is."""
    params = init_params(CONFIG, jax.random.key(0))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 31, (8, 12))
    segments = np.ones((8, 12), np.int32)
    segments[5:, 7:] = 0
    weights = rng.normal(size=(8, 12, 31)).astype(np.float32)
    rows = tuple(map(jnp.asarray, (ids, segments, weights)))
    pull = rng.normal(size=(2, 4)).astype(np.float32)

    def sums(params, rows, **pin):
        """Loss, load and gradients, with the router's probabilities in the loss by themselves too."""

        def loss(params):
            logits, aux = _forward(params, CONFIG, *rows[:2], Compute(), **pin)
            return jnp.sum(logits * rows[2]) + jnp.sum(aux["router_probability"] * pull), aux[
                "router_load"
            ]

        return jax.value_and_grad(loss, has_aux=True)(params)

    (want, want_load), want_grads = jax.jit(sums)(params, rows)
    mesh = make_mesh(*shape)
    pin = {"constrain": constrain(mesh), "mesh": mesh}

    def on_device(params, rows):
        found = sums(params, rows, **pin)
        return found if data_axis(mesh) is None else jax.lax.psum(found, data_axis(mesh))

    on_mesh = jax.jit(shard_map_over_data(on_device, mesh, in_specs=(P(), P(DATA)), out_specs=P()))
    spread = jax.device_put(
        params, param_shardings(logical_axes(CONFIG), param_shapes(CONFIG), mesh)
    )
    (have, have_load), have_grads = on_mesh(spread, rows)
    assert float(have) == pytest.approx(float(want), rel=1e-5)
    np.testing.assert_array_equal(have_load, want_load)
    for (path, mine), theirs in zip(
        jax.tree_util.tree_leaves_with_path(have_grads), jax.tree.leaves(want_grads), strict=True
    ):
        error = float(jnp.abs(mine - theirs).max() / jnp.abs(theirs).max())
        assert error < 1e-5, (jax.tree_util.keystr(path), error)


def test_experts_that_the_axis_does_not_divide():
    mesh = make_mesh(expert=8)
    ids = jnp.zeros((8, 4), jnp.int32)
    with pytest.raises(ValueError, match="^mesh expert: got 8, must be a divisor of the 4 experts"):
        params = init_params(CONFIG, jax.random.key(0))
        _forward(params, CONFIG, ids, ids + 1, Compute(), constrain=constrain(mesh), mesh=mesh)
