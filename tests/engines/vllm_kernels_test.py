"""The trainer's rounded products and caches against vLLM's own CPU kernels, called one at a
time.
"""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.models.quantize import quantize_kernel
from dcmdp_jax.models.scheme import Scheme
from dcmdp_jax.models.scheme_products import round_cache, scheme_matmul, with_scheme
from tests.support.processors import skip_unless_computed
from tests.support.waiting import HANGS_S

# Reads x and W as float32 that bfloat16 holds exactly; W [out, in], as Hugging Face has it.
_PROGRAM = """
import sys
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[name] = None
import numpy as np, torch
torch.cpu._init_amx()
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import per_block_cast_to_fp8
current_platform.import_kernels()
given, found = np.load(sys.argv[1]), {}
x, w = (torch.tensor(given[name]).bfloat16() for name in ("x", "w"))
values, scale = (torch.tensor(given[name]) for name in ("values", "scale"))
packed = torch.ops._C.convert_weight_packed(values.contiguous())
found["int8"] = torch.ops._C.int8_scaled_mm_with_quant(x, packed, scale, None, torch.bfloat16, True)
values, scale = per_block_cast_to_fp8(w, block_size=[128, 128])
packed = torch.ops._C.convert_weight_packed(values.contiguous())
found["fp8_weights_per_block"] = torch.ops._C.fp8_scaled_mm_cpu(
    x, packed, scale, [128, 128], None, torch.bfloat16, True)
for dtype, kind in (("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
    keys = torch.tensor(given["keys"]).bfloat16()
    caches = [torch.zeros(1, 1, 32, 64, dtype=torch.uint8) for _ in "kv"]
    ops.cpu_attn_reshape_and_cache(keys, keys, *caches, torch.arange(32), "amx", 1.0, 1.0, dtype)
    found[dtype + "_truncated"] = caches[1].view(kind).float().flatten().sort().values
np.savez(sys.argv[2], **{name: each.float().numpy() for name, each in found.items()})
"""


def _bfloat16(x):
    return np.array(jnp.asarray(x, jnp.bfloat16), np.float32)


@pytest.fixture(scope="module")
def kernels(vllm_is_installed, tmp_path_factory):
    """Inputs and what vLLM's kernels made of them."""
    skip_unless_computed("int8")
    random = np.random.default_rng(0)
    directory = tmp_path_factory.mktemp("kernels")
    x = _bfloat16(random.normal(size=(40, 256)) * np.exp(random.normal(size=(40, 1))))
    # Many weights are small beside the largest of their block: those that the kernel misreads.
    w = _bfloat16(random.normal(size=(160, 256)) * np.exp(3 * random.normal(size=(160, 256))))
    kernel = quantize_kernel(jnp.asarray(w.T), "int8")
    keys = _bfloat16(random.normal(size=(32, 1, 64)) * np.exp(3 * random.normal(size=(32, 1, 64))))
    given = {
        "x": x,
        "w": w,
        "keys": keys,
        "values": np.asarray(kernel.values).T,
        "scale": np.asarray(kernel.scale)[:, None],
    }
    np.savez(directory / "given.npz", **given)
    subprocess.run(
        [sys.executable, "-c", _PROGRAM, directory / "given.npz", directory / "found.npz"],
        check=True,
        timeout=HANGS_S,
    )
    return given, dict(np.load(directory / "found.npz"))


def _product(given, products):
    kernel = {"kernel": jnp.asarray(given["w"].T)}
    layer = {
        "attention": dict.fromkeys("qkvo", kernel),
        "mlp": dict.fromkeys(("gate", "up", "down"), kernel),
    }
    used = with_scheme(layer, Scheme(products=products))["mlp"]["down"]["kernel"]
    return np.array(scheme_matmul(jnp.asarray(given["x"], jnp.bfloat16), used), np.float32)


def test_int8_is_the_kernels_to_the_bit(kernels):
    given, found = kernels
    np.testing.assert_array_equal(_product(given, "int8"), found["int8"])
    assert (np.abs(found["int8"] - _bfloat16(given["x"] @ given["w"].T)) > 0).mean() > 0.5


def test_fp8_in_blocks_is_the_kernels_but_for_the_order_of_sums(kernels):
    given, found = kernels
    expected = found["fp8_weights_per_block"]
    ours = _product(given, "fp8_weights_per_block")
    # The last digit of bfloat16, 2^-8, and of small results what sums of large terms leave.
    np.testing.assert_allclose(ours, expected, rtol=2**-7, atol=1e-5 * np.abs(expected).max())
    assert (ours == expected).mean() > 0.97
    assert (
        np.abs(_product(given, "fp8_per_block") - expected) > 1e-5 * np.abs(expected).max()
    ).mean() > 0.5


@pytest.mark.parametrize("cache", ["fp8_truncated", "fp8_e5m2_truncated"])
def test_a_cache_is_the_kernels_to_the_bit(kernels, cache):
    given, found = kernels
    ours = np.array(round_cache(jnp.asarray(given["keys"], jnp.bfloat16), cache), np.float32)
    np.testing.assert_array_equal(np.sort(ours.ravel()), found[cache])
    nearest = np.array(
        round_cache(jnp.asarray(given["keys"], jnp.bfloat16), cache.removesuffix("_truncated")),
        np.float32,
    )
    assert (np.sort(nearest.ravel()) != found[cache]).mean() > 0.2
