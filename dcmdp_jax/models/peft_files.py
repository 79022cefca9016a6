"""Adapters as PEFT's directories: adapter_config.json and adapter_model.safetensors."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from dcmdp_jax.errors import ArgumentError, UserError
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.models.array_checksum import array_checksum
from dcmdp_jax.models.config import ALL_LINEAR, Lora, ModelConfig
from dcmdp_jax.models.hf_weights import whole_directory
from dcmdp_jax.models.lora import adapted_layers, adapter_declarations
from dcmdp_jax.models.params import declared_tensors, declared_tree
from dcmdp_jax.parallel.sharding import to_host
from dcmdp_jax.types import Params

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _ALL = "base_model.model.", Lora(1, 1.0, (ALL_LINEAR,))
_BASE, _DIGEST = "base_checksum", "base_digest"

# Fields that a plain LoRA adapter may have with any value: they name it, or act in training alone.
_FREE = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_alpha", "lora_dropout"),
    *("megatron_core", "peft_version", "qalora_group_size", "r", "revision", "target_modules", "task_type"),
}
# Values of fields of a plain one. An initialization by PiSSA, OLoRA, CorDA or LoftQ takes its share from the base.
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
_PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": _INITIAL}


class Adapter(NamedTuple):
    """A LoRA adapter that was read.

    Attributes:
        lora: its shape.
        params: float32 NumPy arrays in the tree of `lora.adapter_declarations`.
        base_checksum, base_digest: sums of its base (see `save_adapter`); None where the file has none.
    """

    lora: Lora
    params: Params
    base_checksum: int | None
    base_digest: int | None


def base_checksum(base: Params) -> int:
    """One checksum of the base in bfloat16: the sum of `array_checksum` over its arrays, mod 2^32."""
    return sum(int(array_checksum(leaf)) for leaf in jax.tree.leaves(base)) % 2**32


def save_adapter(
    adapters: Params, model: ModelConfig, lora: Lora, directory: Path, *, base_model: str, checksum: int,
    digest: int, overwrite: bool = False,
) -> None:  # fmt: skip
    """Write adapters as PEFT reads them; the directory appears whole or not at all.

    Args:
        adapters: tree of `lora.adapter_declarations`.
        model, lora: the base's shape and the adapters'.
        directory: created.
        base_model: directory or Hub name of the base, for people and for PEFT's `AutoPeftModel`.
        checksum, digest: `base_checksum`, and `hf_weights.directory_digest` of the base, kept in the file's metadata.
        overwrite: replace a directory that is not empty.

    Raises:
        FileExistsError, OSError: naming the directory, if it can't be written.
    """
    targets = sorted({one.hf_name.split(".")[-2] for one in adapted_layers(model, lora)})
    fields = {
        "base_model_name_or_path": base_model, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "lora_alpha": lora.alpha, "lora_dropout": 0.0, "peft_type": "LORA", "r": lora.rank, "target_modules": targets,
        "task_type": "CAUSAL_LM",
    }  # fmt: skip
    tensors = {}
    for name, place in declared_tensors(adapter_declarations(model, lora)).items():
        tensors[name] = np.ascontiguousarray(to_host(place.leaf(adapters)[place.index]).T)
    with whole_directory(directory, overwrite=overwrite) as partial:
        (partial / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, partial / TENSORS, metadata={"format": "pt", _BASE: str(checksum), _DIGEST: str(digest)})


def read_adapter(directory: Path, model: ModelConfig) -> Adapter:
    """Read a LoRA adapter of PEFT.

    Args:
        directory: with `adapter_config.json` and `adapter_model.safetensors`.
        model: the base's shape.

    Raises:
        UserError: in one line, for another kind of adapter, one of another base, or a damaged file.
        FileNotFoundError: if a file is missing.
    """
    fields = read_json_object(directory / CONFIG)
    for name, value in {"peft_type": "LORA", **fields}.items():
        if name in _PLAIN and value not in _PLAIN[name] or name not in _FREE | _PLAIN.keys() and value:
            raise UserError(
                f"{directory / CONFIG}: {name} is {value!r}; plain LoRA alone is supported (no DoRA, rslora, biases, "
                "modules_to_save or ranks by layer, no initialization that changes the base)"
            )
    for name, kinds, what in (("r", int, "a whole number"), ("lora_alpha", int | float, "a number")):
        value = fields.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
            raise UserError(f"{directory / CONFIG}: {name} is {value!r}, must be {what} above 0")
    try:
        with safe_open(directory / TENSORS, framework="flax") as file:
            found = {name: np.asarray(file.get_tensor(name), np.float32) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{directory / TENSORS}: can't be read ({error})") from error
    lora = _shape(directory, fields, sorted(found), model)
    places = declared_tensors(adapter_declarations(model, lora))
    for name in sorted(places.keys() | found.keys()):
        have, want = (None if name not in each else each[name].shape for each in (found, places))
        if have != want:
            raise UserError(
                f"{directory / TENSORS}: {name} has shape {have or 'missing'}, this base and adapter_config.json ask "
                f"for {want or 'no such tensor'}; is the adapter of another model?"
            )
        if not np.isfinite(found[name]).all():
            raise UserError(f"{directory / TENSORS}: {name} has values that are not finite; is the file damaged?")
    tree = declared_tree(adapter_declarations(model, lora), lambda one: np.empty(one.shape, np.float32))
    for name, place in places.items():
        place.leaf(tree)[place.index] = found[name].T
    return Adapter(lora, tree, *(int(metadata[key]) if key in metadata else None for key in (_BASE, _DIGEST)))


def _shape(directory: Path, fields: Mapping[str, Any], found: list[str], model: ModelConfig) -> Lora:
    """The adapter's shape; its tensors must belong to the layers that adapter_config.json names."""
    linear = {one.rpartition(".lora_")[0] for one in declared_tensors(adapter_declarations(model, _ALL))}
    for name in found:
        if re.fullmatch(r".*\.lora_[AB]\.weight", name) is None or name.rpartition(".lora_")[0] not in linear:
            raise UserError(
                f"{directory / TENSORS}: {name} is no LoRA matrix of a linear layer of this base; embeddings, head, "
                "experts and whole layers are not supported: save the adapter without them"
            )
    layers = {name.rpartition(".lora_")[0] for name in found}
    targets, rank = fields.get("target_modules"), int(fields["r"])
    try:
        wanted = {layer for layer in linear if _targeted(layer.removeprefix(_PREFIX), targets)}
    except (re.error, TypeError):
        raise UserError(
            f"{directory / CONFIG}: target_modules is {targets!r:.80}, must be a list of names or a regular expression"
        ) from None
    for names, what in ((wanted - layers, "lacks"), (layers - wanted, "has")):
        if names:
            raise UserError(
                f"{directory / CONFIG}: target_modules is {targets!r:.80}, and {TENSORS} {what} {min(names)}; PEFT "
                "would load another model: compare the two files"
            )
    try:
        lora = Lora(rank, float(fields["lora_alpha"]), tuple(sorted({name.rpartition(".")[2] for name in layers})))
        adapter_declarations(model, lora)
    except ArgumentError as error:
        raise UserError(f"{directory / CONFIG}: r is {rank}: {error.said}") from error
    return lora


def _targeted(layer: str, targets: Any) -> bool:
    """Whether PEFT adapts a layer: a text is a regular expression for its whole name, a list holds ends of names."""
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, layer) is not None
    return any(f".{layer}".endswith(f".{one}") for one in targets)
