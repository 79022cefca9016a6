"""The device mesh: how many devices along each axis, in one place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from dcmdp_jax.errors import UserError

AXES = ("data", "fsdp", "tensor", "expert")


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, expert: int = 1, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with the axes data, fsdp, tensor and expert, all of type Auto.

    "data" splits rows and repeats parameters, "fsdp" splits both, "tensor" splits heads, MLP and vocabulary, "expert"
    splits rows and the experts of each layer. The library lays the axes over the devices so that the last ones are
    nearest to each other.

    Args:
        data, fsdp, tensor, expert: devices along the axis; one of them may be -1, which means all that are left.
        devices: those to use; None uses all of the backend, of every host.

    Raises:
        ValueError: naming the settings, when a size is neither positive nor -1, more than one is -1, or the sizes
            don't multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor, "expert": expert}
    said = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if bad := [name for name, size in sizes.items() if size < 1 and size != -1]:
        raise UserError(
            f"config.mesh.{bad[0]}: got {sizes[bad[0]]}, must be at least 1, or -1 for the devices left over"
        )
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise UserError(f"config.mesh ({said}): only one axis may be -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if open_axes:
        if len(devices) % fixed:
            raise UserError(f"config.mesh ({said}): {fixed} does not divide the {len(devices)} devices")
        sizes[open_axes[0]] = len(devices) // fixed
    elif fixed != len(devices):
        raise UserError(
            f"config.mesh ({said}): needs {fixed} devices, there are {len(devices)}; set one axis to -1 to fit"
        )
    shape = tuple(sizes[name] for name in AXES)
    # Auto: jax.make_mesh makes Explicit axes by default, under which every op wants a sharding rule.
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def one_device_mesh() -> Mesh:
    """The first local device alone, for what is small enough for it."""
    return jax.make_mesh(
        (1,) * len(AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=jax.local_devices()[:1]
    )


def row_shards(mesh: Mesh) -> int:
    """Over how many devices rows are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
