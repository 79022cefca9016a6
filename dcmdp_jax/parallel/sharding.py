"""Shardings from logical axis names, and arrays that have them, real or abstract.

Where the parts of an array lie on the devices of several processes, every process calls
`to_global`, `to_local` and `to_host`, in the same order.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.types import Batch, Params

logger = logging.getLogger(__name__)

DATA = "data"
"""The mesh axis that splits rows and replicates parameters."""

MODEL_AXES = ("fsdp", "tensor", "expert")
"""The other axes."""


MeshAxes = str | tuple[str, ...] | None
Axes = tuple[str | None, ...]

PARAM_AXES: Mapping[str, MeshAxes] = {
    "layers": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "expert_mlp": "tensor",
    "norm": None,
    "head_dim": None,
    "rank": None,
}
"""Parameters. "embed" is split over fsdp on either side of a matrix; "layers" is the scan's
axis.
"""

ACTIVATION_AXES: Mapping[str, Any] = {
    "rows": (DATA, "fsdp", "expert"),
    "length": None,
    "hidden": None,
    "vocab": P.UNCONSTRAINED,
}
"""Activations. Rows are split over data, fsdp and expert, the residual stream is replicated over
tensor. The compiler chooses how a table is split over its vocabulary.
"""


def partition_spec(axes: Axes, table: Mapping[str, MeshAxes]) -> P:
    """The `PartitionSpec` of an array with dimensions `axes`; None is never split.

    Raises:
        ValueError: if a name is not in the table, or two dimensions land on one mesh axis.
    """
    mesh_axes: list[MeshAxes] = []
    name_on_axis = {}
    for name in axes:
        if name is not None and name not in table:
            raise ValueError(f"logical axis {name!r} is unknown, the table has {', '.join(table)}")
        entry = None if name is None else table[name]
        mesh_axes.append(entry)
        for mesh_axis in _axis_names(entry):
            if mesh_axis in name_on_axis:
                raise ValueError(
                    f"logical axes {axes}: {name_on_axis[mesh_axis]!r} and {name!r} both land on "
                    f"{mesh_axis!r}"
                )
            name_on_axis[mesh_axis] = name
    return P(*mesh_axes)


def param_shardings(logical_axes: Params, shapes: Params, mesh: Mesh) -> Params:
    """The sharding of every parameter, by `PARAM_AXES`.

    A dimension that its mesh axes don't divide (a vocabulary of odd size, fewer key-value channels
    than tensor devices) is replicated, with a warning that names it. Results stay the same; memory
    and speed suffer.

    Args:
        logical_axes: tree of tuples of axis names, from `params.logical_axes`.
        shapes: the same tree with `.shape`, from `params.param_shapes`.
        mesh: result of `make_mesh`.

    Returns:
        The tree with a `NamedSharding` for each leaf.

    Raises:
        ValueError: see `partition_spec`; also if a leaf has not as many dimensions as names.
    """

    def sharding(path: tuple[Any, ...], leaf: Any, axes: Axes) -> NamedSharding:
        spec = list(partition_spec(axes, PARAM_AXES))
        for dimension, (entry, size) in enumerate(zip(spec, leaf.shape, strict=True)):
            num_devices = math.prod(mesh.shape[name] for name in _axis_names(entry))
            if size % num_devices:
                logger.warning(
                    "%s: dimension %d (%s) is %d, not a multiple of the %d devices along %s; each "
                    "holds all of it",
                    jax.tree_util.keystr(path, simple=True, separator="."),
                    dimension,
                    axes[dimension],
                    size,
                    num_devices,
                    entry,
                )
                spec[dimension] = None
        return NamedSharding(mesh, P(*spec))

    return jax.tree_util.tree_map_with_path(sharding, shapes, logical_axes)


def state_shardings(state: Any, shapes: Params, logical_axes: Params, mesh: Mesh) -> Any:
    """Shardings of any tree that holds parameter-shaped trees, such as an optimizer's moments.

    A leaf whose path ends with the path of a parameter and that has its shape gets the parameter's
    sharding (optax states keep the parameters' tree, also inside `chain`, `masked` and
    `multi_transform`). Every other leaf, such as a counter or a factored moment, is replicated.

    Args:
        state: tree of arrays or `jax.ShapeDtypeStruct`s.
        shapes, logical_axes, mesh: see `param_shardings`.

    Returns:
        The tree of `state` with a `NamedSharding` for each leaf.
    """
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    shardings = jax.tree.leaves(param_shardings(logical_axes, shapes, mesh))
    parameters = {}
    for (path, leaf), param_sharding in zip(leaves, shardings, strict=True):
        parameters[_keys(path)] = leaf.shape, param_sharding

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = _keys(path)
        for start in range(len(keys)):
            shape, param_sharding = parameters.get(keys[start:], (None, None))
            if shape == leaf.shape:
                return param_sharding
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding, state)


def constrain(mesh: Mesh) -> Callable[[jax.Array, Axes], jax.Array]:
    """A function that constrains an activation's sharding by its dimensions, under jit.

    Inside `shard_map_over_data` it uses the axes that are left to the compiler.

    A dimension that is not a multiple of its devices is padded by the compiler.

    Raises (the returned function, while tracing):
        ValueError: see `partition_spec`.
    """

    def pin(x: jax.Array, axes: Axes) -> jax.Array:
        enclosing_mesh = jax.sharding.get_abstract_mesh()
        manual = set(enclosing_mesh.manual_axes)
        split_axes = {axis for axis, size in mesh.shape.items() if size > 1}
        spec = _activation_spec(axes, split_axes - manual)
        sharding = NamedSharding(enclosing_mesh if manual else mesh, spec)
        return jax.lax.with_sharding_constraint(x, sharding)

    return pin


def _activation_spec(axes: Axes, mesh_axes: set[str]) -> P:
    """The `PartitionSpec` of an activation over these axes of the mesh."""
    spec = []
    for entry in partition_spec(axes, ACTIVATION_AXES):
        if entry is P.UNCONSTRAINED:
            spec.append(entry)
        else:
            split = [axis for axis in _axis_names(entry) if axis in mesh_axes]
            spec.append(tuple(split) or None)
    return P(*spec)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding that replicates an array."""
    return NamedSharding(mesh, P())


def shard_rows(mesh: Mesh) -> NamedSharding:
    """The sharding of packed rows [M, A, R, ...]: R split over data, fsdp and expert."""
    return NamedSharding(mesh, P(None, None, *partition_spec(("rows",), ACTIVATION_AXES)))


def batch_shardings(mesh: Mesh) -> Batch:
    """Shardings of a `Batch`, as a prefix: rows over data, fsdp and expert, else replicated."""
    everywhere = replicated(mesh)
    return Batch(
        rows=shard_rows(mesh),
        micro_batches=everywhere,
        rewards=everywhere,
        group_ids=everywhere,
        completion_lengths=everywhere,
        loss_mask=everywhere,
        valid=everywhere,
    )


def data_axis(mesh: Mesh | None) -> str | None:
    """The mesh axis that `shard_map_over_data` maps over; None if it has one device."""
    if mesh is None or mesh.shape[DATA] == 1:
        return None
    return DATA


def data_parallel_only(mesh: Mesh | None) -> bool:
    """Whether the mesh is data-parallel only: nothing is split over another axis."""
    return mesh is None or mesh.size == mesh.shape[DATA]


def shard_map_over_data(
    function: Callable[..., Any],
    mesh: Mesh | None,
    *,
    in_specs: tuple[P, ...],
    out_specs: P | tuple[P, ...],
) -> Callable[..., Any]:
    """Run `function` once along each index of the data axis, on the rows there.

    Inside it the data axis is manual: only the collectives of `function` communicate along it, so
    gradients are summed once after all micro-batches instead of in each. The compiler handles the
    other axes.

    A data axis of one device is left to the compiler as well: there is nothing to map, and XLA (jax
    0.10.2) refuses a reduction over it and other axes ("Cross-partition allreduce must be in
    (partial) manual partitioning mode").

    Args:
        function: function that closes over no array.
        mesh: the run's; None for one device.
        in_specs, out_specs: specs for `jax.shard_map`: `P()` for what is replicated along the data
            axis, `DATA` for rows.
    """
    axis = data_axis(mesh)
    if axis is None:
        return function
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={axis},
        check_vma=False,
    )


def free_axes(mesh: Mesh) -> tuple[str, ...]:
    """Axes of the mesh that no enclosing `shard_map` maps, while tracing."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in mesh.axis_names if axis not in manual)


def shard_map_over(
    axes: Iterable[str],
    function: Callable[..., Any],
    mesh: Mesh,
    **specs: Any,
) -> Callable[..., Any]:
    """Run `function` on each device's part along some mesh axes; nests in another `shard_map`.

    For code that knows better than the compiler when to communicate. Without vma: the cotangent of
    a result that is replicated along an axis is divided by the axis's size, and the gradients of a
    replicated argument are summed.

    Args:
        axes: names of the axes.
        function: function of its arguments alone; it closes over no array.
        mesh: the run's.
        specs: `in_specs` and `out_specs` for `jax.shard_map`, over these axes.
    """

    def mapped(*arguments: Any) -> Any:
        enclosing_mesh = jax.sharding.get_abstract_mesh()
        inner = jax.shard_map(
            function,
            mesh=enclosing_mesh if enclosing_mesh.manual_axes else mesh,
            axis_names=set(axes),
            check_vma=False,
            **specs,
        )
        return inner(*arguments)

    return mapped


def to_global(tree: Any, shardings: Any) -> Any:
    """Place NumPy arrays that every process holds whole; each device gets its part.

    Args:
        tree: tree of arrays.
        shardings: a prefix of the tree, with a sharding for each subtree.
    """

    def place(sharding: NamedSharding, subtree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, x, x.shape), subtree
        )

    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    return jax.tree.map(place, shardings, tree)


def to_local(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Bring an array to devices of this process; each device receives its part alone.

    Args:
        x: with a `NamedSharding`.
        sharding: over devices of this process. Other processes give one like it, over devices of
            theirs.

    Returns:
        `x` itself if its parts all lie on devices of this process. Else the array with `sharding`,
        or replicated over all devices of this process if `sharding` names some of them only: JAX
        has no such transfer.
    """
    if x.is_fully_addressable:
        return x

    devices = {}
    for device in x.sharding.mesh.devices.flat:
        devices.setdefault(device.process_index, []).append(device)
    local = devices[jax.process_index()]
    mesh = sharding.mesh
    spec = sharding.spec
    if mesh.size != len(local):
        mesh = Mesh(np.asarray(local), ("local",))
        spec = P()

    # A mesh of all hosts' devices, each host's in the order of `mesh`: one transfer serves all.
    order = [local.index(device) for device in mesh.devices.flat]
    grid = np.asarray(list(devices.values()))[:, order]
    all_hosts = Mesh(grid.reshape(len(devices), *mesh.devices.shape), ("hosts", *mesh.axis_names))
    on_all_hosts = jax.device_put(x, NamedSharding(all_hosts, spec))
    shards = [shard.data for shard in on_all_hosts.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, spec), shards)


def to_host(x: jax.Array | np.ndarray) -> np.ndarray:
    """Bring an array to this process's memory, all of it."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        x = jax.device_put(x, NamedSharding(x.sharding.mesh, P()))
    return np.asarray(x)


def sharded(tree: Any, shardings: Any) -> Any:
    """Shapes with shardings, of which `shardings` has one for each leaf or for a whole subtree."""

    def attach(sharding: Any, subtree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), subtree
        )

    return jax.tree.map(attach, shardings, tree)


def bytes_per_device(tree: Any) -> int:
    """Bytes that each device holds of arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def total_bytes(tree: Any) -> int:
    """Bytes of arrays or shapes, each counted once, whatever devices hold it."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _axis_names(entry: MeshAxes) -> tuple[str, ...]:
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    if isinstance(entry, str):
        return (entry,)
    return entry


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
