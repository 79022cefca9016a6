"""Parameters of a checkpoint alone, for evaluation and export."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.lora import SavedAdapters, load_base, merged, merged_as_rounded, trained
from dcmdp_jax.models.params import declared_shapes
from dcmdp_jax.models.rope import RopeScaling
from dcmdp_jax.run.checkpoint import (
    CheckpointError,
    check_digests,
    check_record,
    check_structure,
    digests,
    first_line,
)
from dcmdp_jax.types import Params


def latest_checkpoint(run_dir: str | Path) -> tuple[Path, int]:
    """Directory that holds the step directories, and the newest finished step.

    Args:
        run_dir: a run directory, its `checkpoints`, or one step's directory inside it.

    Raises:
        CheckpointError: if there is none.
    """
    path = Path(run_dir).resolve()
    if path.name.isdigit() and (path / "params").is_dir():
        return path.parent, int(path.name)
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = [int(path.name) for path in directory.glob("*") if path.name.isdigit() and path.is_dir()]
    if not steps:
        raise CheckpointError(f"{run_dir}: no checkpoint there; give a run directory or one of its checkpoints")
    return directory, max(steps)


def load_model_config(run_dir: str | Path, step: int | None = None) -> tuple[ModelConfig, int, Path]:
    """A checkpoint's description of its model; reads no array.

    Args:
        run_dir: a run directory, its `checkpoints`, or one step's directory inside it.
        step: step of the checkpoint; None is the newest.

    Returns:
        (model, step, tokenizer directory).

    Raises:
        CheckpointError: if it is missing or its record can't be read.
    """
    path, step = _find(run_dir, step)
    with _naming_damage(path):
        model, _ = _read_meta(path)
    return model, step, path.parent.parent / "tokenizer"


def load_params_only(run_dir: str | Path, step: int | None = None) -> tuple[Params, ModelConfig, int, Path]:
    """Parameters of a checkpoint without the optimizer, for evaluation and export.

    Args:
        run_dir: a run directory, its `checkpoints`, or one step's directory inside it.
        step: step of the checkpoint; None is the newest.

    Returns:
        (parameters on the default device, model, step, tokenizer directory).

    Raises:
        CheckpointError: if it is missing or damaged.
    """
    path, step = _find(run_dir, step)
    params, adapters, model, meta = _trained(path)
    if adapters is not None:
        params = jax.jit(merged, static_argnums=2)(_base_of(path, adapters, model, meta), params, adapters.lora)
    return params, model, step, path.parent.parent / "tokenizer"


def load_as_rounded(run_dir: str | Path, step: int | None, precision: str) -> Params | None:
    """Parameters of a checkpoint with its adapters' change as an engine rounds it, see `lora.merged_as_rounded`.

    None if all parameters were trained. Arguments and errors as of `load_params_only`.
    """
    path, _ = _find(run_dir, step)
    params, adapters, model, meta = _trained(path)
    if adapters is None:
        return None
    merge = jax.jit(merged_as_rounded, static_argnums=(2, 3))
    return merge(_base_of(path, adapters, model, meta), params, adapters.lora, precision)


def load_adapters(run_dir: str | Path, step: int | None = None) -> tuple[Params, SavedAdapters, ModelConfig]:
    """The adapters of a checkpoint, their shape and base, and the base's model. Arguments as of `load_params_only`.

    Raises:
        CheckpointError: if it is missing or damaged, or all parameters were trained.
    """
    path, _ = _find(run_dir, step)
    params, adapters, model, _ = _trained(path)
    if adapters is None:
        raise CheckpointError(f"{path}: has no adapters, all parameters were trained (model.lora_rank=0)")
    return params, adapters, model


def _trained(path: Path) -> tuple[Params, SavedAdapters | None, ModelConfig, dict[str, Any]]:
    """Parameters that a checkpoint trained, on the default device, with its record."""
    with _naming_damage(path):
        model, meta = _read_meta(path)
        adapters = SavedAdapters(**meta["adapters"]) if "adapters" in meta else None
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = declared_shapes(trained(model, adapters and adapters.lora), meta["param_dtype"])
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), shapes)
        check_structure(path, "params", meta["digests"]["params"], abstract)
        params = ocp.StandardCheckpointer().restore(path / "params", abstract)
        check_digests(params, meta["digests"]["params"])
    return params, adapters, model, meta


def _base_of(path: Path, adapters: SavedAdapters, model: ModelConfig, meta: Mapping[str, Any]) -> Params:
    """The base of a checkpoint's adapters, which must be the one that they were trained on."""
    base = load_base(Path(adapters.base_path), model, adapters.base_dtype)
    changed = [name for name, value in digests(base).items() if meta["digests"]["reference"].get(name) != value]
    if changed:
        raise CheckpointError(
            f"{adapters.base_path}: {changed[0]} is not what the adapters of {path} were trained on; put the base back"
        )
    return base


def _find(run_dir: str | Path, step: int | None) -> tuple[Path, int]:
    """One checkpoint's directory and its step."""
    directory, newest = latest_checkpoint(run_dir)
    step = newest if step is None else step
    if not (directory / str(step)).is_dir():
        raise CheckpointError(f"{directory}: no checkpoint of step {step}")
    if not (directory / str(step) / "params").is_dir():
        raise CheckpointError(f"{directory / str(step)}: damaged (params is missing); choose another step")
    return directory / str(step), step


def _read_meta(path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The model, and the whole record that contains it."""
    # Orbax would start JAX, which a reader may still have to prepare.
    meta = json.loads((path / "meta" / "metadata").read_text(encoding="utf-8"))
    check_record(meta, int(path.name))
    fields = dict(meta["model"])
    return ModelConfig(**{**fields, "rope_scaling": RopeScaling(**fields["rope_scaling"])}), meta


@contextlib.contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # Orbax raises any error of the storage layer
        raise CheckpointError(f"{path}: damaged ({first_line(error)}); choose another step") from error
