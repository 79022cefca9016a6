"""Parameters of a checkpoint alone, for evaluation and export."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.lora import SavedAdapters, load_base, merged, trained
from dcmdp_jax.models.params import declared_shapes
from dcmdp_jax.models.rope import RopeScaling
from dcmdp_jax.run.checkpoint import CheckpointError, check_digests, check_record, check_structure, digests, first_line
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
    model: ModelConfig
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
            shapes = declared_shapes(trained(self.model, self.adapters and self.adapters.lora), self.dtype)
            abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes)
            check_structure(self.path, "params", self.digests["params"], abstract)
            params = ocp.StandardCheckpointer().restore(self.path / "params", abstract)
            check_digests(params, self.digests["params"])
        return params

    def load(self, rounded_to: str | None = None) -> Params:
        """Read all parameters, adapters merged by `lora.merged`. Errors as of `trained`, or the base is not theirs."""
        params = self.trained()
        if self.adapters is None:
            return params
        merge = jax.jit(merged, static_argnums=(2, 3))
        return merge(self._base(self.adapters), params, self.adapters.lora, rounded_to)

    def _base(self, adapters: SavedAdapters) -> Params:
        """The base of the adapters, which must be the one that they were trained on."""
        base = load_base(Path(adapters.base_path), self.model, adapters.base_dtype)
        if changed := [name for name, value in digests(base).items() if self.digests["reference"].get(name) != value]:
            raise CheckpointError(
                f"{adapters.base_path}: {changed[0]} is not what the adapters of {self.path} were trained on; put the "
                "base back"
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
        step, directory = int(directory.name) if step is None else step, directory.parent
    elif (directory / "checkpoints").is_dir():
        directory /= "checkpoints"
    steps = [int(path.name) for path in directory.glob("*") if path.name.isdigit() and path.is_dir()]
    if not steps:
        raise CheckpointError(f"{run_dir}: no checkpoint there; give a run directory or one of its checkpoints")
    path = directory / str(max(steps) if step is None else step)
    if not path.is_dir():
        raise CheckpointError(f"{directory}: no checkpoint of step {step}")
    with _naming_damage(path):
        if not (path / "params").is_dir():
            raise ValueError("params is missing")
        # Orbax would start JAX, which a reader may still have to prepare.
        meta = json.loads((path / "meta" / "metadata").read_text(encoding="utf-8"))
        check_record(meta, int(path.name))
        model = ModelConfig(**meta["model"] | {"rope_scaling": RopeScaling(**meta["model"]["rope_scaling"])})
        adapters = SavedAdapters(**meta["adapters"]) if "adapters" in meta else None
        return SavedParams(path, model, adapters, meta["digests"], meta["param_dtype"])


@contextlib.contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # Orbax raises any error of the storage layer
        raise CheckpointError(f"{path}: damaged ({first_line(error)}); choose another step") from error
