"""Arrays whose parts lie on the devices of several processes.

Where that is so, every process calls these functions, in the same order. Where it is not, they do nothing special.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def to_global(tree: Any, shardings: Any) -> Any:
    """Place NumPy arrays that every process holds whole; each device gets its part.

    Args:
        tree: of arrays.
        shardings: a prefix of the tree, with a sharding for each subtree.
    """

    def place(sharding: NamedSharding, part: Any) -> Any:
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x, x.shape), part)

    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    return jax.tree.map(place, shardings, tree)


def to_local(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Bring an array to devices of this process; each device receives its part alone.

    Args:
        x: with a `NamedSharding`.
        sharding: over devices of this process. Other processes give one like it, over devices of theirs.

    Returns:
        `x` itself if its parts all lie on devices of this process. Else the array with `sharding`, or replicated over
        all devices of this process if `sharding` names some of them only: JAX has no such transfer.
    """
    if x.is_fully_addressable:
        return x
    devices: dict[int, list[jax.Device]] = {}
    for device in x.sharding.mesh.devices.flat:
        devices.setdefault(device.process_index, []).append(device)
    local, mesh, spec = devices[jax.process_index()], sharding.mesh, sharding.spec
    if mesh.size != len(local):
        mesh, spec = Mesh(np.asarray(local), ("local",)), P()
    places = [local.index(device) for device in mesh.devices.flat]
    grid = np.asarray([[row[place] for place in places] for row in devices.values()])
    every = Mesh(grid.reshape(len(devices), *mesh.devices.shape), ("hosts", *mesh.axis_names))
    spread = jax.device_put(x, NamedSharding(every, spec))
    parts = [shard.data for shard in spread.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, spec), parts)


def to_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """Bring an array to this process's memory, all of it."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        x = jax.device_put(x, NamedSharding(x.sharding.mesh, P()))
    return np.asarray(x)
