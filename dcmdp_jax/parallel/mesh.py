"""The device mesh: the number of devices along each axis."""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from dcmdp_jax.errors import ArgumentError
from dcmdp_jax.parallel import backend

AXES = ("data", "fsdp", "tensor", "expert")
_MAX_REPLICATED_PARAMS = 1 << 25


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with the axes data, fsdp, tensor and expert, all of type Auto.

    "data" splits rows and replicates parameters, "fsdp" splits both, "tensor" splits heads, MLP and
    vocabulary, "expert" splits rows and the experts of each layer. JAX places the devices of the
    last axes nearest to each other.

    Args:
        data, fsdp, tensor, expert: devices along the axis; one of them may be -1: all that are
            left.
        devices: the devices to use; None for all of the backend, on every host.

    Raises:
        ValueError: naming the settings, when a size is neither positive nor -1, more than one is
            -1, or the sizes don't multiply to the number of devices.
    """
    if devices is None:
        devices = jax.devices()
    shape = tuple(axis_sizes(len(devices), (data, fsdp, tensor, expert)).values())
    # Auto: jax.make_mesh makes Explicit axes by default, under which every op wants a sharding
    # rule.
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def axis_sizes(devices: int, axes: Sequence[int]) -> dict[str, int]:
    """Devices along each axis, with the -1 filled in. Sizes and errors as for `make_mesh`.

    Args:
        devices: number of devices.
        axes: the sizes of `AXES`, in their order.
    """
    sizes = dict(zip(AXES, axes, strict=True))
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise ArgumentError(
                name, f"got {size}, must be at least 1, or -1 for the devices left over"
            )

    settings = f" ({', '.join(f'{name}={size}' for name, size in sizes.items())})"
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ArgumentError("mesh", "only one axis may be -1", settings)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        if devices % fixed:
            raise ArgumentError(
                "mesh",
                f"{fixed} does not divide the {devices} devices; that do {_divisors(devices)}",
                settings,
            )
        sizes[open_axes[0]] = devices // fixed
    elif fixed != devices:
        raise ArgumentError(
            "mesh",
            f"needs {fixed} devices, there are {devices}; set one axis to -1 to fit",
            settings,
        )
    return sizes


def _divisors(count: int) -> str:
    """The divisors of a number, for a message."""
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


def one_device_mesh() -> Mesh:
    """A mesh of the first local device, for small models."""
    return make_mesh(devices=jax.local_devices()[:1])


def training_mesh(axes: Sequence[int] = (1, -1, 1, 1), *, num_params: int) -> Mesh:
    """`make_mesh`, but data-parallel over the devices left over where `prepare_jax` split the CPU.

    Cores with rows of their own synchronize once per update, not after every operation: a step of a
    small model takes 0.8 of its time on one device with all cores. Every device holds the whole
    state. A large model gains nothing, as its operations are long, and uses one device; so does any
    model where there are fewer devices than cores.

    Args:
        axes: the sizes of `AXES`, in their order, see `make_mesh`; from the config.
        num_params: parameters of the model.
    """
    devices = jax.devices()
    if backend.cpu_is_split() and jax.process_count() == 1:
        fixed = math.prod(size for size in axes if size != -1)
        if -1 not in axes:
            devices = devices[:fixed]
        elif fixed == 1:
            is_large = num_params > _MAX_REPLICATED_PARAMS
            if is_large or len(devices) < backend.usable_cores():
                devices = devices[:1]
            return make_mesh(data=-1, devices=devices)
    return make_mesh(*axes, devices=devices)


def sampling_mesh(training: Mesh, *, num_params: int = 0, tensor: int = 1, expert: int = 1) -> Mesh:
    """The embedded engine's mesh: the training mesh's devices, or the parts of a split CPU.

    In a run of several processes, this process's devices alone.

    Decoding runs many small products, for which waking a second thread costs as much as it saves:
    two devices with half of the rows each take 0.68 to 0.75 of the time of one device with both
    cores. Of a large model each device would read all weights at every token, 1.33 to 1.50 times
    the processor time for 16 rows: it gets one device.

    Args:
        training: result of `training_mesh`.
        num_params: parameters of the model; 0: few.
        tensor, expert: devices that the engine's weights are split over; the rest of them split
            rows (axis data).

    Raises:
        UserError: naming the settings, if they do not divide the number of devices.
    """
    if backend.cpu_is_split():
        devices = np.asarray(jax.local_devices())
    else:
        devices = training.devices.reshape(-1)
    if jax.process_count() > 1:
        process = jax.process_index()
        devices = np.asarray([device for device in devices if device.process_index == process])
    if backend.cpu_is_split() and tensor * expert == 1 and num_params > _MAX_REPLICATED_PARAMS:
        devices = devices[:1]
    if devices.size % (tensor * expert):
        raise ArgumentError(
            "mesh",
            f"{tensor * expert} does not divide the {devices.size} devices",
            f" (tensor={tensor}, expert={expert})",
        )
    return Mesh(devices.reshape(-1, 1, tensor, expert), AXES)


def check_training_mesh(mesh: Mesh, *, num_heads: int, num_experts: int, completions: int) -> None:
    """Refuse a mesh that a model or its batch cannot be split over.

    Args:
        mesh: result of `make_mesh`.
        num_heads: query heads, split over tensor.
        num_experts: experts of a layer, split over expert; 0 in a dense model.
        completions: completions of a mini-batch; every device that rows are split over needs one.

    Raises:
        UserError: naming the setting, its value and what would do.
    """
    for axis, count, counted in (
        ("tensor", num_heads, "query heads"),
        ("expert", num_experts, "experts"),
    ):
        axis_size = mesh.shape[axis]
        if count and count % axis_size:
            raise ArgumentError(
                axis,
                f"got {axis_size}, must divide the model's {count} {counted}; that do "
                f"{_divisors(count)}",
            )
    if not num_experts and mesh.shape["expert"] > 1:
        raise ArgumentError(
            "expert", f"got {mesh.shape['expert']}, the model has no experts; must be 1"
        )
    if row_shards(mesh) > completions:
        raise ArgumentError(
            "mesh",
            f"data x fsdp x expert = {row_shards(mesh)} devices split the rows of a mini-batch, "
            f"which has {completions} completions; use at most that many and `tensor` for the "
            "rest, or raise `completions`",
        )


def row_shards(mesh: Mesh) -> int:
    """Number of devices that rows are split over."""
    return mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]


def connect_devices(mesh: Mesh) -> None:
    """Run an operation among the devices of each group that axes of the mesh span. Collective.

    gloo connects a group at its first operation, for which the slower processes have half a minute:
    too little within a step, whose first reduction may come minutes later on one host than on
    another. Here all come at once, see `SeveralHosts.starting_programs_together`. Later operations
    wait as long as it takes.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return
    axes = [name for name, size in mesh.shape.items() if size > 1]
    for count in range(1, len(axes) + 1):
        for group in itertools.combinations(axes, count):
            total = functools.partial(jax.lax.psum, axis_name=group)
            reduction = jax.shard_map(
                total,
                mesh=mesh,
                in_specs=PartitionSpec(),
                out_specs=PartitionSpec(),
            )
            jax.block_until_ready(jax.jit(reduction)(np.float32(0)))
