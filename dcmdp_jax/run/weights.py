"""Parameters that a run starts from (policy, adapters' base, reference), or of a checkpoint."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcmdp_jax.config.settings import ModelSettings
from dcmdp_jax.models import config, hf_weights, rope
from dcmdp_jax.models.lora import (
    SavedAdapters,
    adapter_declarations,
    base_checksum,
    load_base,
    merged,
    trained,
)
from dcmdp_jax.models.params import (
    declared_shapes,
    draw_params,
    init_params,
    logical_axes,
    param_shapes,
    quantized_leaves,
)
from dcmdp_jax.models.quantize import Kernel, QuantizedKernel, quantize_kernel
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.parallel.sharding import param_shardings, sharded, to_global
from dcmdp_jax.run.checkpoint import (
    CheckpointError,
    check_digests,
    check_record,
    check_structure,
    digests,
    first_changed,
    first_line,
    saved_steps,
)
from dcmdp_jax.run.task import Task, other_base
from dcmdp_jax.types import Params


@dataclasses.dataclass(frozen=True)
class SavedParams:
    """Parameters of a checkpoint without the optimizer: found and described, no array is read yet.

    Attributes:
        path: the checkpoint's directory.
        model: the model's shape.
        adapters: shape and base of the adapters; None if all parameters were trained.
        digests: item -> path of an array in it -> digest.
        dtype: dtype of the parameters that were trained.
    """

    path: Path
    model: config.ModelConfig
    adapters: SavedAdapters | None
    digests: Mapping[str, Mapping[str, int]]
    dtype: str

    @property
    def step(self) -> int:
        """The finished training steps."""
        return int(self.path.name)

    @property
    def tokenizer(self) -> Path:
        """Directory of the run's tokenizer."""
        return self.path.parent.parent / "tokenizer"

    def trained(self) -> Params:
        """Read the parameters that were trained, all or the adapters, onto the default device.

        Raises:
            CheckpointError: if they are damaged.
        """
        with _naming_damage(self.path):
            device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            lora = self.adapters and self.adapters.lora
            shapes = declared_shapes(trained(self.model, lora), self.dtype)
            abstract = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes
            )
            check_structure(self.path, "params", self.digests["params"], abstract)
            params = ocp.StandardCheckpointer().restore(self.path / "params", abstract)
            check_digests(params, self.digests["params"])
        return params

    def load(self, rounded_to: str | None = None) -> Params:
        """Read all parameters, adapters merged by `lora.merged` into the base that they had."""
        params = self.trained()
        if self.adapters is None:
            return params
        merge = jax.jit(merged, static_argnums=(2, 3))
        return merge(self._base(self.adapters), params, self.adapters.lora, rounded_to)

    def base_directory(self, adapters: SavedAdapters) -> Path:
        """The directory of the adapters' base, which is moved with a run that made it itself.

        Raises:
            CheckpointError: if it is not there.
        """
        directory = Path(adapters.base_path)
        beside = self.path.parent.parent / directory.name
        if directory.name == "reference" and beside.is_dir():
            return beside
        if not directory.is_dir():
            raise CheckpointError(
                f"{self.path}: the base of its adapters, {directory}, is not there; put it back"
            )
        return directory

    def _base(self, adapters: SavedAdapters) -> Params:
        """The base of the adapters, which must be the one that they were trained on."""
        base = load_base(self.base_directory(adapters), self.model, adapters.base_dtype)
        changed = first_changed(digests(base), self.digests["reference"])
        if changed is not None:
            raise CheckpointError(
                f"{adapters.base_path}: {changed} is not what the adapters of {self.path} were "
                "trained on; put the base back"
            )
        return base


def find_params(run_dir: str | Path, step: int | None = None) -> SavedParams:
    """Find a checkpoint and read its record.

    Args:
        run_dir: a run directory, its `checkpoints`, or one step's directory inside it.
        step: step of the checkpoint; None is the newest, or the directory's own.

    Raises:
        CheckpointError: if it is missing or its record can't be read.
    """
    directory = Path(run_dir).resolve()
    if directory.name.isdigit() and (directory / "params").is_dir():
        if directory.name != str(int(directory.name)):
            raise CheckpointError(
                f"{directory}: no checkpoint, its name is not {int(directory.name)}; rename it"
            )
        step = int(directory.name) if step is None else step
        directory = directory.parent
    elif (directory / "checkpoints").is_dir():
        directory /= "checkpoints"
    steps = saved_steps(directory)
    if not steps:
        raise CheckpointError(
            f"{run_dir}: no checkpoint there; give a run directory or one of its checkpoints"
        )
    path = directory / str(steps[-1] if step is None else step)
    if not path.is_dir():
        raise CheckpointError(f"{directory}: no checkpoint of step {step}")
    with _naming_damage(path):
        if not (path / "params").is_dir():
            raise ValueError("params is missing")
        # Orbax would start JAX, which a reader may still have to prepare.
        meta = json.loads((path / "meta" / "metadata").read_text(encoding="utf-8"))
        check_record(meta, int(path.name))
        model = config.ModelConfig(
            **meta["model"] | {"rope_scaling": rope.RopeScaling(**meta["model"]["rope_scaling"])}
        )
        adapters = SavedAdapters(**meta["adapters"]) if "adapters" in meta else None
        return SavedParams(
            path=path,
            model=model,
            adapters=adapters,
            digests=meta["digests"],
            dtype=meta["param_dtype"],
        )


@contextlib.contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # Orbax raises any error of the storage layer
        raise CheckpointError(
            f"{path}: damaged ({first_line(error)}); choose another step"
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Parameters of a run on its mesh. A method reads or draws them; nothing is kept.

    Attributes:
        task: the model, and its adapters.
        shardings: the sharding of every parameter of the model.
        settings: path and dtypes of the model.
        seed: of drawn parameters.
        reference: directory for the initial policy of this run.
        has_kl: whether the loss has a KL term against the initial policy.
    """

    task: Task
    shardings: Params
    settings: ModelSettings
    seed: int
    reference: Path
    has_kl: bool

    def initial(self) -> Params:
        """The starting parameters, read from `model.path` or drawn from the seed."""
        task = self.task
        if task.directory is not None:
            return self._load(task.directory)
        key = jax.random.key(self.seed)
        return jax.jit(
            lambda: init_params(task.model, key, self.settings.param_dtype),
            out_shardings=self.shardings,
        )()

    def initial_adapters(self, shardings: Params) -> Params:
        """The starting adapters, read from `model.adapter` or drawn from the seed.

        Raises:
            UserError: if the adapters of `model.adapter` were trained on another base.
        """
        task = self.task
        adapter = self.task.adapter
        if adapter is None:
            declared = adapter_declarations(task.model, task.lora)
            key = jax.random.key(self.seed)
            return jax.jit(
                lambda: draw_params(declared, key, self.settings.param_dtype),
                out_shardings=shardings,
            )()
        if adapter.base_checksum is not None:
            base = load_base(self.frozen_path, task.model, "bfloat16", self.shardings)
            if adapter.base_checksum != base_checksum(base):
                raise other_base(self.settings.adapter, self.frozen_path)
        return to_global(adapter.params, shardings)

    @property
    def saves_initial(self) -> bool:
        """Whether the run writes its initial policy to its directory."""
        has_own_base = self.task.lora is not None and self.frozen_path == self.reference
        return self.has_kl or has_own_base

    @property
    def frozen_path(self) -> Path:
        """The initial policy's directory: `model.path` if adapters start there, else the run's."""
        # A warm-up makes another initial policy than that of `model.path`.
        warms_up = self.task.worked_solutions is not None
        if self.task.lora and self.task.directory is not None and not warms_up:
            return self.task.directory
        return self.reference

    def save_initial(self, params: Params, hosts: Hosts) -> None:
        """Collective: write the initial policy to the run's directory."""
        model = self.task.model
        dtype = self.settings.param_dtype
        if hosts.is_writer:
            hf_weights.save_params(params, model, self.reference, dtype=dtype, overwrite=True)
        else:
            # Process 0 writes the tensors; the others have parts of them.
            for _ in hf_weights.iterate_hf_tensors(params, model, dtype):
                pass
        hosts.wait_for_all()

    def frozen(self) -> Params:
        """The initial policy: base of the adapters in `model.lora_base`, or reference policy."""
        if self.task.lora is None:
            return self._load(self.frozen_path)
        return load_base(
            self.frozen_path,
            self.task.model,
            self.settings.lora_base,
            self.shardings,
        )

    @property
    def saved_adapters(self) -> SavedAdapters | None:
        """Record of the adapters for a checkpoint; None without."""
        if self.task.lora is None:
            return None
        return SavedAdapters(
            rank=self.task.lora.rank,
            alpha=self.task.lora.alpha,
            targets=self.task.lora.targets,
            base_dtype=self.settings.lora_base,
            base_path=str(self.frozen_path.resolve()),
        )

    def _load(self, directory: Path) -> Params:
        return hf_weights.load_params(
            directory,
            self.task.model,
            dtype=self.settings.param_dtype,
            shardings=self.shardings,
        )


def model_shardings(model: config.ModelConfig, mesh: Mesh) -> Params:
    """The sharding of every parameter of a model."""
    return param_shardings(logical_axes(model), param_shapes(model), mesh)


def frozen_shapes(model: config.ModelConfig, dtype: str, mesh: Mesh) -> Params:
    """Shapes and shardings of `Weights.frozen`: the base of adapters, or the reference policy.

    Args:
        model: the model's shape.
        dtype: "float32", "bfloat16" or "int8".
        mesh: the training devices.
    """
    stored_dtype = "float32" if dtype == "float32" else "bfloat16"
    shardings = model_shardings(model, mesh)
    shapes = sharded(param_shapes(model, stored_dtype), shardings)
    if dtype != "int8":
        return shapes

    def leaf(kernel: jax.ShapeDtypeStruct, marked: bool) -> Kernel:
        if not marked:
            return kernel
        quantized = jax.eval_shape(functools.partial(quantize_kernel, precision=dtype), kernel)
        *stack_axes, _, column_axis = kernel.sharding.spec
        scale_sharding = NamedSharding(mesh, PartitionSpec(*stack_axes, column_axis))
        return sharded(quantized, QuantizedKernel(kernel.sharding, scale_sharding))

    return jax.tree.map(leaf, shapes, quantized_leaves(model))
