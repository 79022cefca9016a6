"""Accelerators that programs can be compiled for on a machine that has none of them."""

import contextlib
import ctypes
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from dcmdp_jax.errors import UserError, install_extra

# A GPU as XLA's compiler describes it; JAX asks a device that is present, here there is none. H100
# and H200 differ in their memory: bytes a second, bytes, and the name.
_HOPPER = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: %d l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: %d shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "%s"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A device to compile for.

    Attributes:
        name: in words.
        memory_gib: device memory, GiB.
        usable_gib: memory that the compiler or JAX's allocator can use, GiB.
        devices_near: devices that share the fast network; slices of a TPU are of any size.
        shapes: example topologies.
        target: a GPU as XLA's compiler describes it; "" for a TPU.
    """

    name: str
    memory_gib: float
    usable_gib: float
    devices_near: int
    shapes: tuple[str, ...]
    target: str = ""

    @property
    def platform(self) -> str:
        """ "tpu" or "gpu"."""
        return "gpu" if self.target else "tpu"


_V5E = Chip(
    name="TPU v5e",
    memory_gib=16,
    usable_gib=15.75,
    devices_near=1 << 20,
    shapes=("2x2", "2x4", "4x4", "4x8", "8x8", "16x16"),
)
_V5P = dataclasses.replace(
    _V5E,
    name="TPU v5p",
    memory_gib=95,
    usable_gib=95.74,
    shapes=("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x2", "4x4x4"),
)
_V6E = dataclasses.replace(_V5E, name="TPU v6e", memory_gib=32, usable_gib=31.25)
_H100 = Chip(
    name="H100 80GB SXM",
    memory_gib=80,
    usable_gib=79.1 * 0.9,
    devices_near=8,
    shapes=("1", "8", "16", "32", "64"),
    target=_HOPPER % (3352320000000, 84929347584, "NVIDIA H100 80GB HBM3"),
)
_H200 = dataclasses.replace(
    _H100,
    name="H200 141GB SXM",
    memory_gib=141,
    usable_gib=139.8 * 0.9,
    target=_HOPPER % (4800000000000, 150754820096, "NVIDIA H200"),
)
CHIPS = {"v5e": _V5E, "v5p": _V5P, "v6e": _V6E, "h100": _H100, "h200": _H200}

# The last two only keep libtpu from asking for a TPU's metadata, and from logging that there are
# none.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices to compile for.

    Attributes:
        name: the requested name, "v5p:4x4x4" or "h100:8".
        chip: data sheet of each device.
        devices: for `parallel.mesh.make_mesh`.
    """

    name: str
    chip: Chip
    devices: Sequence[Any]


def known_topologies() -> str:
    """The topologies of `load_topology`, for messages."""
    return "; ".join(f"{kind}:" + f", {kind}:".join(chip.shapes) for kind, chip in CHIPS.items())


def chip_and_count(name: str) -> tuple[Chip, int]:
    """The chip of a topology, and how many there are.

    Raises:
        UserError: for a name that is none, with those known.
    """
    kind, _, shape = name.partition(":")
    chip = CHIPS.get(kind)
    pattern = r"[1-9]\d?(x[1-9]\d?){1,2}"
    if chip is not None and chip.target:
        pattern = r"[1-9]\d{0,4}"
    if chip is None or not re.fullmatch(pattern, shape):
        raise UserError(f"--topology: got {name!r}, known are {known_topologies()}")
    count = math.prod(map(int, shape.split("x")))
    near = chip.devices_near
    if count > near and count % near:
        raise UserError(
            f"--topology: got {name!r}, more than {near} {kind} must be a multiple of {near}, a "
            "host each"
        )
    return chip, count


def set_environment() -> None:
    """Let libtpu start without a TPU, next to other instances. Call before the first use of JAX."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    # Autotuning runs kernels, and needs a device.
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_autotune_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_autotune_level=0".strip()


def _load_cudnn() -> None:
    """Load cuDNN, where it is installed: the compiler of attention looks for it in the process."""
    package = None
    if importlib.util.find_spec("nvidia"):
        package = importlib.util.find_spec("nvidia.cudnn")
    if package is not None:
        for directory in package.submodule_search_locations or ():
            for library in sorted((Path(directory) / "lib").glob("libcudnn*.so.*")):
                # Some parts of it run kernels, and need the driver; the compiler does without.
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    # JAX 0.10 asks a GPU that is present; without one heads of more than 128 are refused. The GPUs of
    # `CHIPS` are 9.0.
    from jax._src.cudnn import fused_attention_stablehlo

    fused_attention_stablehlo.check_compute_capability = lambda capability: capability == "9.0"


def load_topology(name: str) -> Topology:
    """The devices of a topology, from the vendor's compiler.

    Args:
        name: "v5e:4x4", "v5p:4x4x4", "v6e:8x8", "h100:8" or "h200:8".

    Raises:
        UserError: for an unknown topology, or if its compiler is not installed.
    """
    chip, count = chip_and_count(name)
    package = "jax-cuda12-plugin" if chip.target else "libtpu"
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise UserError(
            f"--topology: {name} needs the compiler in {package}, which is not installed: "
            f"{install_extra('plan')}"
        )

    try:
        if chip.target:
            _load_cudnn()
            near = min(count, chip.devices_near)
            hosts = -(-count // near)
            description = topologies.get_topology_desc(
                "gpu",
                platform="cuda",
                target_config=chip.target,
                topology=f"1x{hosts}x{near}",
            )
        else:
            description = topologies.get_topology_desc(name, platform="tpu")
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"--topology: {name}: the compiler refuses it ({reason}); known are "
            f"{known_topologies()}"
        ) from error
    return Topology(name=name, chip=chip, devices=description.devices)
