"""Parameters in shared memory: what lies where, whether the checksums would notice anything else,
and who frees it.
"""

import dataclasses
import math
import os
import resource
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

from dcmdp_jax.engines.sidecar import segments
from dcmdp_jax.engines.sidecar import weights as bridge_module
from dcmdp_jax.engines.sidecar.segments import (
    Segment,
    Tensor,
    attach,
    available_bytes,
    checksum,
    differing,
    parse,
    wire_manifest,
)
from dcmdp_jax.engines.sidecar.weights import WeightBridge
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_weights import iterate_hf_tensors
from dcmdp_jax.models.params import logical_axes, num_params, param_shapes
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import param_shardings

_BLOCK = 65536
# vocabulary 400, hidden 48, MLP 80, 3 layers, 6 and 2 heads of 16: q is [96, 48], k and v [32, 48],
# o [48, 96].
_SIZES = (400, 48, 80, 3, 6, 2, 16)
MODELS = {
    "qwen3_tied": ModelConfig("qwen3", *_SIZES, tie_word_embeddings=True),
    "qwen3_untied": ModelConfig("qwen3", *_SIZES),
    "qwen2": ModelConfig("qwen2", *_SIZES, attention_bias=True),
    "qwen3_moe": ModelConfig(
        "qwen3_moe", *_SIZES, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}
_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _params(config, seed=0):
    """Norms, biases and matrices all different, so that nothing can stand for anything else."""
    leaves, tree = jax.tree.flatten(param_shapes(config))
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        tree, [jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves]
    )


@pytest.fixture
def segment():
    made = []

    def make(bridge):
        made.append(Segment("test", bridge.num_bytes))
        made[-1].bytes[:] = 0xAB
        return made[-1]

    yield make
    for one in made:
        one.close()


def _read(bridge, held):
    """{name: array}, found as the other side finds them: by a manifest that came over the wire."""
    listed = msgpack.unpackb(msgpack.packb(wire_manifest(bridge.manifest)))
    return {
        tensor.name: held.bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        .view(jnp.dtype(tensor.dtype))
        .reshape(tensor.shape)
        for tensor in parse(listed, bridge.num_bytes)
    }


def _assert_same(have, want):
    assert list(have) == list(want)
    for name, array in want.items():
        assert have[name].dtype == array.dtype and have[name].shape == array.shape, name
        assert have[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_segment_holds_hugging_faces_tensors(name, dtype, segment):
    """Bit for bit, with names, shapes and order, a second time too: a stale leaf would be the first
    weight sync's.
    """
    config = MODELS[name]
    bridge = WeightBridge(config, dtype=dtype)
    held = segment(bridge)
    for seed in (0, 1):
        params = _params(config, seed)
        bridge.publish(params, held, seed)
        _assert_same(_read(bridge, held), dict(iterate_hf_tensors(params, config, dtype)))
    names = [tensor.name for tensor in bridge.manifest]
    assert ("lm_head.weight" in names) == (not config.tie_word_embeddings)
    # 11 tensors a layer with two head norms or 12 with three biases, embedding and last norm,
    # perhaps a head. With experts 8 + 1 + 3 * 3 = 18 a layer, and three.
    assert len(names) == {"qwen3_tied": 35, "qwen3_untied": 36, "qwen2": 39, "qwen3_moe": 57}[name]
    # Nothing but tensors, padded between leaves: 15 at most, to 64 bytes each. Experts need no
    # padding.
    taken = num_params(config) * jnp.dtype(dtype).itemsize
    assert taken <= bridge.num_bytes < taken + 15 * 64


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_transposed_on_the_device_or_on_the_host_the_bytes_are_the_same(
    dtype, segment, monkeypatch
):
    """Stacks, single matrices of several blocks (rows of 64, the last of 16), and shards of both
    axes.
    """
    config = dataclasses.replace(MODELS["qwen3_untied"], hidden_size=400)
    params = _params(config)
    monkeypatch.setattr(bridge_module, "_BLOCK_BYTES", 64 * 400 * jnp.dtype(dtype).itemsize)
    bridge = WeightBridge(config, dtype=dtype)
    host, device, sharded = segment(bridge), segment(bridge), segment(bridge)
    sent = bridge.publish(params, host, 0).tolist()
    mesh = make_mesh(data=1, fsdp=2, tensor=2, expert=1, devices=jax.devices()[:4])
    placed = jax.device_put(
        params, param_shardings(logical_axes(config), param_shapes(config), mesh)
    )
    monkeypatch.setattr(
        bridge_module, "_transposed_on_device", lambda leaf, hf_tensor: hf_tensor.transposed
    )
    assert (
        bridge.publish(params, device, 0).tolist()
        == sent
        == bridge.publish(placed, sharded, 0).tolist()
    )
    assert device.bytes.tobytes() == host.bytes.tobytes() == sharded.bytes.tobytes()


def test_places_by_hand(segment):
    """A table read wrongly in both directions would still agree with itself; these are Qwen2's,
    written out.
    """
    config = MODELS["qwen2"]
    bridge = WeightBridge(config, dtype="float32")
    held, params = segment(bridge), _params(config)
    bridge.publish(params, held, 0)
    have, layers = _read(bridge, held), params["layers"]
    expected = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["norm"]["scale"],
        "lm_head.weight": params["output"].T,
        "model.layers.0.input_layernorm.weight": layers["attention_norm"]["scale"][0],
        "model.layers.2.post_attention_layernorm.weight": layers["mlp_norm"]["scale"][2],
        "model.layers.1.self_attn.q_proj.weight": layers["attention"]["q"]["kernel"][1].T,
        "model.layers.1.self_attn.k_proj.weight": layers["attention"]["k"]["kernel"][1].T,
        "model.layers.1.self_attn.v_proj.weight": layers["attention"]["v"]["kernel"][1].T,
        "model.layers.1.self_attn.o_proj.weight": layers["attention"]["o"]["kernel"][1].T,
        "model.layers.2.self_attn.q_proj.bias": layers["attention"]["q"]["bias"][2],
        "model.layers.2.self_attn.k_proj.bias": layers["attention"]["k"]["bias"][2],
        "model.layers.2.self_attn.v_proj.bias": layers["attention"]["v"]["bias"][2],
        "model.layers.0.mlp.gate_proj.weight": layers["mlp"]["gate"]["kernel"][0].T,
        "model.layers.0.mlp.up_proj.weight": layers["mlp"]["up"]["kernel"][0].T,
        "model.layers.0.mlp.down_proj.weight": layers["mlp"]["down"]["kernel"][0].T,
    }
    for name, array in expected.items():
        np.testing.assert_array_equal(have[name], array, err_msg=name)


def test_narrowing_rounds_to_nearest_even(segment):
    """Half-way values by hand: cut off, 1 + 3/256 would be smaller; rounded up, 1 + 1/256 would be
    larger.
    """
    config = MODELS["qwen3_tied"]
    params = _params(config)
    # bfloat16 has 7 bits behind the point: 1 + 1/256 is half-way from 1 to 1 + 1/128, 1 + 3/256
    # from that to 1 + 2/128.
    params["norm"]["scale"] = jnp.asarray(
        [1 + 1 / 256, 1 + 3 / 256, -(1 + 1 / 256), -0.0] * 12, jnp.float32
    )
    bridge = WeightBridge(config, dtype="bfloat16")
    held = segment(bridge)
    bridge.publish(params, held, 0)
    norm = _read(bridge, held)["model.norm.weight"].astype(np.float32)
    assert norm[:4].tolist() == [1.0, 1 + 2 / 128, -1.0, 0.0] and np.signbit(norm[3])
    # float16 has 10: 1 + 1/2048 goes to 1, 1 + 3/2048 to 1 + 2/1024.
    params["norm"]["scale"] = jnp.asarray(
        [1 + 1 / 2048, 1 + 3 / 2048, 65504.0, -0.0] * 12, jnp.float32
    )
    bridge = WeightBridge(config, dtype="float16")
    bridge.publish(params, held, 0)
    have = _read(bridge, held)
    assert have["model.norm.weight"][:4].tolist() == [1.0, 1 + 2 / 1024, 65504.0, 0.0]
    _assert_same(
        have,
        {
            name: array.astype(np.float16)
            for name, array in iterate_hf_tensors(params, config, "float32")
        },
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_torch_finds_the_same_tensors(precision, segment):
    """By offset and dtype alone, as the worker hands them to vLLM: a misaligned view would be
    refused.
    """
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    config = MODELS["qwen2"]
    dtype = "float32" if precision == "float32" else "bfloat16"
    bridge = WeightBridge(config, dtype=dtype, int8=precision == "int8")
    held = segment(bridge)
    bridge.publish(_params(config), held, 0)
    have = _read(bridge, held)
    for tensor in bridge.manifest:
        name, kind, shape, offset = tensor.name, tensor.dtype, tensor.shape, tensor.offset
        size = np.prod(shape) * {"float32": 4, "bfloat16": 2, "int8": 1}[kind]
        tensor = (
            torch.from_numpy(held.bytes[offset : offset + size])
            .view(getattr(torch, kind))
            .view(shape)
        )
        np.testing.assert_array_equal(
            tensor.to(torch.float32).numpy(), have[name].astype(np.float32), err_msg=name
        )


@pytest.mark.parametrize(
    ("name", "precision", "sizes"),
    [
        ("qwen2", "float32", {"fsdp": 8}),
        ("qwen2", "bfloat16", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("qwen3_untied", "int8", {"fsdp": 2, "tensor": 4}),
        ("qwen3_moe", "bfloat16", {"fsdp": 2, "expert": 3}),
    ],
)
def test_sharded_parameters_give_the_same_bytes(name, precision, sizes, segment, monkeypatch):
    """A shard in the place of a leaf, or a scale of the rows of one shard, would differ.

    No program runs on several devices. One that took a block of rows would gather those of all
    layers first, and two threads could start two of them in another order on each GPU, where each
    waits for the other.
    """
    config = MODELS[name]
    params = _params(config)
    bridge = WeightBridge(
        config, dtype="bfloat16" if precision == "int8" else precision, int8=precision == "int8"
    )
    whole, sharded = segment(bridge), segment(bridge)
    count = math.prod(sizes.values())
    mesh = make_mesh(**sizes, devices=jax.devices()[:count])
    placed = jax.device_put(
        params, param_shardings(logical_axes(config), param_shapes(config), mesh)
    )
    assert len(placed["embedding"].addressable_shards) == count
    first = bridge.publish(params, whole, 3)
    devices = set()

    def seen(program):
        def run(leaf, *arguments, **static):
            if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
                devices.add(len(leaf.devices()))
            return program(leaf, *arguments, **static)

        return run

    for program in ("_cast", "_at", "_quantize_at"):
        monkeypatch.setattr(bridge_module, program, seen(getattr(bridge_module, program)))
    second = bridge.publish(placed, sharded, 3)
    assert sharded.bytes.tobytes() == whole.bytes.tobytes()
    assert second.tolist() == first.tolist()
    assert devices <= {1} and (devices or precision == "float32")


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen2"])
def test_int8_by_numpy(name, segment):
    """Linear layers alone, each row of [out, in] by its own scale; the rest as without."""
    config = MODELS[name]
    params = _params(config)
    kernel = np.array(params["layers"]["attention"]["q"]["kernel"])
    kernel[1, :, 5] *= 1000  # one output channel: scales across rows would lose all others
    kernel[2, :, 7] = 0
    params["layers"]["attention"]["q"]["kernel"] = jnp.asarray(kernel)
    bridge = WeightBridge(config, dtype="bfloat16", int8=True)
    held = segment(bridge)
    bridge.publish(params, held, 0)
    have = _read(bridge, held)
    plain = dict(iterate_hf_tensors(params, config, "bfloat16"))
    order = []
    # From the float32 weights: rounded to bfloat16 first, a scale would be up to 2^-9 of it away.
    for tensor, weight in iterate_hf_tensors(params, config, "float32"):
        order.append(tensor)
        if tensor.split(".")[-2] not in _LINEAR or not tensor.endswith(".weight"):
            assert have[tensor].tobytes() == plain[tensor].tobytes(), tensor
            continue
        order.append(f"{tensor}_scale")
        values, scale = have[tensor], have[f"{tensor}_scale"]
        assert values.dtype == np.int8 and values.shape == weight.shape
        assert scale.dtype == np.float32 and scale.shape == (weight.shape[0], 1)
        largest = np.abs(weight).max(axis=1, keepdims=True)
        rows = largest[:, 0] > 0
        np.testing.assert_allclose(scale[rows], largest[rows] / 127, rtol=2**-22)
        assert (np.abs(values.astype(int)).max(axis=1)[rows] == 127).all() and values.min() >= -127
        error = np.abs(values.astype(np.float64) * scale - weight)
        assert (error <= scale / 2 * (1 + 1e-5)).all(), tensor
    assert list(have) == order
    assert not have["model.layers.2.self_attn.q_proj.weight"][7].any()
    assert have["model.layers.2.self_attn.q_proj.weight_scale"][7] == 1
    scales = have["model.layers.1.self_attn.q_proj.weight_scale"][:, 0]
    assert scales[5] > 100 * np.delete(scales, 5).max()


def _checksum(data, version):
    """The documented rule, written down once more."""
    data = bytes(data)
    if len(data) <= _BLOCK:
        return zlib.crc32(data)
    blocks = [data[start : start + _BLOCK] for start in range(0, len(data), _BLOCK)]
    looked_at = [block for number, block in enumerate(blocks) if number % 16 == version % 16]
    return zlib.crc32(b"".join([blocks[0], *looked_at, data[-_BLOCK:]]))


@pytest.mark.parametrize("version", [0, 1, 17])
def test_checksums_of_a_sync(version, segment):
    """In the manifest's order, of what lies there: both sides compare nothing else."""
    config = MODELS["qwen3_untied"]
    params = _params(config)
    for bridge in (
        WeightBridge(config, dtype="float32"),
        WeightBridge(config, dtype="bfloat16", int8=True),
    ):
        held = segment(bridge)
        sums = bridge.publish(params, held, version)
        have = _read(bridge, held)
        assert sums.dtype == np.uint64
        assert sums.tolist() == [
            _checksum(have[tensor.name].tobytes(), version) for tensor in bridge.manifest
        ]
    assert have["model.layers.0.mlp.up_proj.weight"].nbytes < _BLOCK
    # The embedding of 400 x 48 float32, 76,800 bytes, is above the 64 KiB up to which the rule is
    # plain CRC-32.
    large = WeightBridge(config, dtype="float32").manifest[0]
    assert large.name == "model.embed_tokens.weight" and large.num_bytes == 76_800


def test_whatever_arrived_changed_is_named(segment):
    """A byte flipped, a leaf of another version, two tensors in each other's place."""
    config = MODELS["qwen3_untied"]
    bridge = WeightBridge(config, dtype="float32")
    held, params = segment(bridge), _params(config)

    def consumed(version):
        return np.array(
            [checksum(a.reshape(-1).view(np.uint8), version) for a in _read(bridge, held).values()]
        )

    sent = bridge.publish(params, held, 4)
    assert differing(bridge.manifest, sent, consumed(4)) == []
    offsets = {tensor.name: tensor.offset for tensor in bridge.manifest}
    at = offsets["model.layers.1.mlp.up_proj.weight"] + 1000
    held.bytes[at] ^= 1
    assert differing(bridge.manifest, sent, consumed(4)) == ["model.layers.1.mlp.up_proj.weight"]
    held.bytes[at] ^= 1

    # k and v of a layer have one shape; exchanged, the engine computes nonsense without an error.
    key, value = (f"model.layers.2.self_attn.{name}_proj.weight" for name in "kv")
    views = _read(bridge, held)
    views[key][...], views[value][...] = views[value].copy(), views[key].copy()
    assert differing(bridge.manifest, sent, consumed(4)) == [key, value]

    # The last weight sync's down projections were left where they were.
    newer = _params(config, 1)
    newer["layers"]["mlp"]["down"] = params["layers"]["mlp"]["down"]
    bridge.publish(newer, held, 4)
    sent = bridge.publish(_params(config, 1), segment(bridge), 4)
    assert differing(bridge.manifest, sent, consumed(4)) == [
        f"model.layers.{i}.mlp.down_proj.weight" for i in range(3)
    ]
    with pytest.raises(ValueError):
        differing(bridge.manifest, sent, consumed(4)[:-1])


@pytest.mark.parametrize("size", [1, 100, 65535, 65536])
def test_a_small_tensor_has_its_crc(size):
    """All of it, at any version."""
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    assert {checksum(data, version) for version in (0, 1, 15, 16, 1000)} == {
        zlib.crc32(data.tobytes())
    }


def test_published_value_of_crc_32():
    """The check value of CRC-32/ISO-HDLC, of the digits 1 to 9."""
    assert checksum(np.frombuffer(b"123456789", np.uint8), 0) == 0xCBF43926


@pytest.mark.parametrize("size", [65537, 16 * _BLOCK, 35 * _BLOCK + 123])
def test_a_large_tensor_is_looked_at_in_blocks(size):
    """The first 64 KiB, the last, and of 16 blocks the one whose turn it is: any bit shows in one
    of 16 versions.
    """
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    plain = [checksum(data, version) for version in range(16)]
    assert plain == [_checksum(data, version) for version in range(16)]
    assert [checksum(data, version + 160) for version in range(16)] == plain
    for block in range(-(-size // _BLOCK)):
        # Its first byte and, where the last block is cut short, bytes of the 64 KiB that end the
        # tensor.
        for at in {block * _BLOCK, min(block * _BLOCK + 65_000, size - 1)}:
            data[at] ^= 0x10
            noticed = {
                version for version in range(16) if checksum(data, version) != plain[version]
            }
            data[at] ^= 0x10
            always = at < _BLOCK or at >= size - _BLOCK
            assert noticed == (set(range(16)) if always else {block % 16}), at


@pytest.mark.parametrize("side", [8, 128, 640])
def test_a_square_matrix_transposed_has_another_checksum(side):
    """At every version, above 64 KiB too: [out, in] and [in, out] have one shape here."""
    matrix = np.random.default_rng(0).normal(size=(side, side)).astype(np.float32)
    turned = np.ascontiguousarray(matrix.T)
    for version in range(16):
        assert checksum(matrix.reshape(-1).view(np.uint8), version) != checksum(
            turned.reshape(-1).view(np.uint8), version
        )


def test_parse_gives_what_was_listed():
    """In its order, with room left out between tensors and behind the last."""
    listed = [
        ["b", "float32", [2, 3], 64],
        ["a", "bfloat16", [5], 0],
        ["c", "int8", [7], 88],
        ["d", "int8", [], 95],
    ]
    assert parse(listed, 100) == [
        Tensor(name="b", dtype="float32", shape=(2, 3), offset=64),
        Tensor(name="a", dtype="bfloat16", shape=(5,), offset=0),
        Tensor(name="c", dtype="int8", shape=(7,), offset=88),  # 64 + 24
        Tensor(name="d", dtype="int8", shape=(), offset=95),
    ]
    assert [tensor.num_bytes for tensor in parse(listed, 96)] == [24, 10, 7, 1]
    assert parse([], 0) == []


_MISPLACED = {
    "overlap": ([["a", "int8", [9], 0], ["b", "int8", [4], 8]], "manifest: b at byte 8 overlaps a"),
    "overlap, listed backwards": (
        [["b", "int8", [4], 8], ["a", "int8", [9], 0]],
        "manifest: b at byte 8 overlaps a",
    ),
    "in one place": (
        [["a", "int8", [4], 8], ["b", "int8", [4], 8]],
        "manifest: b at byte 8 overlaps a",
    ),
    "one within another": (
        [["a", "int8", [64], 0], ["b", "int8", [4], 16]],
        "manifest: b at byte 16 overlaps a",
    ),
    "float32 at 2": (
        [["a", "float32", [1], 2]],
        "manifest: a at byte 2 overlaps the segment's start or is not al",
    ),
    "bfloat16 at 1": ([["a", "bfloat16", [1], 1]], "is not aligned"),
    "one byte too long": (
        [["a", "int8", [65], 0]],
        "manifest: a ends at byte 65, the segment has 64",
    ),
    "begins behind the end": (
        [["a", "int8", [1], 64]],
        "manifest: a ends at byte 65, the segment has 64",
    ),
    "far too long": (
        [["a", "float32", [2**62, 2**62], 0]],
        f"a ends at byte {2**126}, the segment has 64",
    ),
    "a name twice": (
        [["a", "int8", [4], 0], ["a", "int8", [4], 8]],
        "manifest: a name is listed twice",
    ),
}


@pytest.mark.parametrize("case", _MISPLACED)
def test_tensors_that_can_not_lie_so_are_refused(case):
    listed, line = _MISPLACED[case]
    with pytest.raises(ValueError) as raised:
        parse(listed, 64)
    assert line in str(raised.value) and "\n" not in str(raised.value)


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_segment_is_gone_once_it_is_closed():
    """Weights are gigabytes: a descriptor or a name that stays would keep them."""
    before, named = _descriptors(), sorted(os.listdir("/dev/shm"))
    held = Segment("test", 1 << 20)
    assert held.bytes.shape == (1 << 20,) and held.bytes.dtype == np.uint8 and not held.bytes.any()
    assert os.fstat(held.descriptor).st_blocks * 512 == 1 << 20  # every page is there already
    assert not os.get_inheritable(held.descriptor)
    assert sorted(os.listdir("/dev/shm")) == named
    descriptor = held.descriptor
    held.close()
    assert _descriptors() == before
    with pytest.raises(OSError):
        os.fstat(descriptor)
    # A second time closes nothing, in particular not what got the same number since.
    other = os.open("/dev/null", os.O_RDONLY)
    os.dup2(other, descriptor)
    held.close()
    os.fstat(descriptor)
    for number in {other, descriptor}:
        os.close(number)


def test_an_array_into_a_segment_outlives_it():
    """A rollout's step may still read weights when the engine is closed: no crash."""
    before = _descriptors()
    held = Segment("test", 8192)
    part = held.bytes[4096:4100]
    part[:] = [1, 2, 3, 4]
    held.close()
    assert part.tolist() == [1, 2, 3, 4]
    del part
    assert _descriptors() == before


def test_another_process_reads_and_writes_the_same_memory():
    """Through the inherited descriptor, and through /proc as vLLM's workers do."""
    program = (
        "import os, sys, numpy as np\n"
        "fd, size = int(sys.argv[1]), int(sys.argv[2])\n"
        "data = np.memmap(f'/proc/self/fd/{fd}', np.uint8, mode='r+', shape=(size,))\n"
        "print(int(data[:10].sum()))\n"
        "data[100] = 77\n"
    )
    held = Segment("test", 10_000)
    try:
        held.bytes[:10] = range(10)
        done = subprocess.run(
            [sys.executable, "-c", program, str(held.descriptor), "10000"],
            pass_fds=[held.descriptor],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["45"]
        assert held.bytes[100] == 77
        other = attach(f"/proc/{os.getpid()}/fd/{held.descriptor}", 10_000)
        assert other[100] == 77 and other[:10].tolist() == list(range(10))
        other[101] = 78
        assert held.bytes[101] == 78
    finally:
        held.close()


@pytest.fixture
def no_large_files():
    """The system refuses files of more than 64 MiB: without this a broken check would take all
    memory there is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_memory_that_is_not_there_is_refused_unasked(no_large_files):
    """Asked, Linux hands out page after page until it kills some process."""
    before = _descriptors()
    for size in (1 << 60, available_bytes() + (8 << 30)):
        with pytest.raises(MemoryError) as raised:
            Segment("weights", size)
        line = str(raised.value)
        assert line.startswith(
            f"shared memory weights: {size / 2**30:.2f} GiB cannot be allocated ("
        )
        assert line.endswith(" GiB free)") and "\n" not in line
    assert _descriptors() == before


def test_memory_that_the_system_refuses_is_one_line(no_large_files):
    """Memory that looks free may be refused; the descriptor is closed then."""
    before = _descriptors()
    with pytest.raises(
        MemoryError,
        match=r"^shared memory weights: 0\.12 GiB cannot be allocated \(.*File too large",
    ):
        Segment("weights", 128 << 20)  # 2^27 / 2^30 = 0.125, to even
    assert _descriptors() == before


def _machine(field):
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:"))


def test_available_memory_is_some_of_the_machine():
    """In bytes: kibibytes or pages would be a thousandth of what can be read here another way."""
    available = available_bytes()
    assert 0 < available <= _machine("MemTotal")
    assert available <= 2 * _machine("MemAvailable")


def test_pages_that_were_only_read_are_free(monkeypatch, tmp_path):
    """A container that has just read a checkpoint: 3,000,000 - (2,900,000 - 2,500,000), not
    100,000.
    """
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2900000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\nactive_file 0\ninactive_file 2500000\n")
    monkeypatch.setattr(segments, "_CGROUP", tmp_path)
    assert available_bytes() == 2_600_000


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("3000000\n", "1000000\n", 2_000_000),
        ("3000000\n", "3000000\n", 0),
        ("3000000\n", "3000001\n", 0),  # over its limit for a moment; not -1
        ("max\n", "1000000\n", None),
        (f"{1 << 62}\n", "1000000\n", None),  # more than the machine has
        ("3000000\n", None, None),
        (None, "1000000\n", None),
        ("no number\n", "1000000\n", None),
    ],
)
def test_a_control_group_lowers_it(limit, used, expected, monkeypatch, tmp_path):
    """In a container the machine's memory is not ours; without a readable limit the machine's
    counts.
    """
    for name, text in (
        ("memory.max", limit),
        ("memory.current", used),
        ("memory.stat", "anon 5\ninactive_file 0\n"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
    monkeypatch.setattr(segments, "_CGROUP", tmp_path)
    if expected is not None:
        assert available_bytes() == expected
    else:
        # Half and twice: other processes come and go.
        assert _machine("MemAvailable") / 2 < available_bytes() < 2 * _machine("MemAvailable")
