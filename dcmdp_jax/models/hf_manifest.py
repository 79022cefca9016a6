"""Checks of a Hugging Face directory: tensors against config.json by their headers, and values that
must be finite.
"""

import contextlib
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from dcmdp_jax.errors import UserError, shorten, shorten_name
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.models import decoder, hf_config, params
from dcmdp_jax.models.config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SOURCE_DTYPES = ("F32", "BF16", "F16")
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.", re.ASCII)
_EXPERT = re.compile(r"model\.layers\.\d{1,9}\.mlp\.experts\.(\d{1,9})\.", re.ASCII)
_LFS_POINTER = b"version https://git-lfs"
# Values that are looked at together: what is made of them stays in the processor's cache.
_BLOCK = 1 << 18
# Elements of a tensor that are read together where nothing else is done with them.
_READ = 1 << 24
# What is all ones in a float that is not finite, by the bytes of a number.
_EXPONENTS = {2: np.uint16(0x7F80), 4: np.uint32(0x7F800000)}


class Stored(NamedTuple):
    """Where the safetensors files hold a tensor.

    Attributes:
        path: the file.
        name: the tensor in it; another name than the tensor's own if it is fused with others.
        fused: this tensor's part of the stored one, or None for all of it.
    """

    path: Path
    name: str
    fused: params.FusedPart | None


class Manifest(NamedTuple):
    """Tensors in the safetensors files of a directory, checked against a config.

    Attributes:
        tensors: name of each tensor of the model -> where it is.
        redundant_head: the file in which a tied model stores its output layer all the same, or
            None.
        dtypes: how many tensors are stored as "F32", "BF16", "F16".
        num_bytes: bytes of all tensors together.
        left_out: entry of `families.Family.left_out` -> how many tensors of it the files hold.
    """

    tensors: dict[str, Stored]
    redundant_head: Path | None
    dtypes: dict[str, int]
    num_bytes: int
    left_out: dict[str, int]


class Files(contextlib.ExitStack):
    """Open safetensors files by path, memory-mapped; closed together."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, Any] = {}

    def __getitem__(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self.enter_context(safe_open(path, framework="numpy"))
            except SafetensorError as error:
                with path.open("rb") as file:
                    pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
                reason = "a Git LFS pointer, `git lfs pull` fetches the file" if pointer else error
                raise UserError(
                    f"{path}: truncated or not a safetensors file ({reason})"
                ) from error
        return self._open[path]


def check_manifest(directory: str | Path, config: ModelConfig) -> Manifest:
    """Compare the headers of the safetensors files with the config; no tensor is read.

    Args:
        directory: holds model.safetensors, or model.safetensors.index.json and its shards.
        config: the model that the tensors must fit.

    Raises:
        FileNotFoundError: if the directory has neither file.
        UserError: naming the file and the tensor or the field of config.json, for a shard that the
            index names and is missing, a file that is truncated or no safetensors file, another
            number of layers, a tensor that is missing, unknown, or of the wrong shape or dtype.
    """
    directory = Path(directory)
    found = _locate(directory)
    others = config.family.left_out
    left_out = Counter(prefix for name in found for prefix in others if name.startswith(prefix))
    wrapped = hf_config.WRAPPED_PREFIX if others else hf_config.TEXT_PREFIX
    inside = {
        name.replace(wrapped, hf_config.TEXT_PREFIX, 1): name
        for name in found
        if not name.startswith(others)
    }
    located = {own: found[name] for own, name in inside.items()}
    # Before names are made of a number of layers that may be anything.
    _check_counts(directory, config, located)
    listing = directory / (SINGLE if (directory / SINGLE).is_file() else INDEX)
    places = params.hf_tensors(config)
    tensors: dict[str, Stored] = {}
    allowed: dict[str, tuple[int, ...]] = {}
    missing = []
    for name, place in places.items():
        fused = place.fused if name not in located else None
        held = name if fused is None else fused.name
        if held not in located:
            missing.append(name)
            continue
        allowed[held] = place.shape if fused is None else fused.shape
        tensors[name] = Stored(located[held], inside[held], fused)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            (
                f"{listing}: tensor {missing[0]} is missing{more}, expected "
                f"{list(places[missing[0]].shape)}"
            )
            + "; or set tie_word_embeddings to true in config.json"
            * (missing[0] == decoder.HF_OUTPUT)
        )
    if config.tie_word_embeddings:
        allowed[decoder.HF_OUTPUT] = allowed[decoder.HF_EMBEDDING]
    dtypes: Counter[str] = Counter()
    num_bytes = 0
    with Files() as files:
        for name, path in located.items():
            if name not in allowed:
                raise UserError(
                    (
                        f"{path}: tensor {shorten_name(name)} is unknown to {config.model_type} "
                        "with this config.json"
                    )
                    + "; or set tie_word_embeddings to false there" * (name == decoder.HF_OUTPUT)
                )
            stored = files[path].get_slice(inside[name])
            shape = tuple(stored.get_shape())
            dtype = stored.get_dtype()
            if shape != allowed[name]:
                raise UserError(
                    f"{path}: tensor {name} is {list(shape)}, expected {list(allowed[name])} by "
                    "config.json"
                )
            if dtype not in _SOURCE_DTYPES:
                raise UserError(
                    f"{path}: tensor {name} is {dtype}, readable are {', '.join(_SOURCE_DTYPES)}"
                )
            dtypes[dtype] += 1
            num_bytes += math.prod(shape) * (4 if dtype == "F32" else 2)
        redundant = located.get(decoder.HF_OUTPUT) if config.tie_word_embeddings else None
    return Manifest(tensors, redundant, dict(dtypes), num_bytes, dict(left_out))


def check_redundant_head(manifest: Manifest, files: Files) -> None:
    """A tied model may store its output layer again, but only the same one.

    Raises:
        UserError: naming file and tensor.
    """
    if manifest.redundant_head is None:
        return
    head = files[manifest.redundant_head].get_slice(decoder.HF_OUTPUT)
    path, name, _ = manifest.tensors[decoder.HF_EMBEDDING]
    embedding = files[path].get_slice(name)
    rows = head.get_shape()[0]
    for start in range(0, rows, 8192):
        part = slice(start, min(start + 8192, rows))
        if not np.array_equal(head[part], embedding[part], equal_nan=True):
            raise UserError(
                f"{manifest.redundant_head}: tensor {decoder.HF_OUTPUT} differs from "
                f"{decoder.HF_EMBEDDING}, but config.json ties them; set tie_word_embeddings to "
                "false there to load it"
            )


def check_values(manifest: Manifest) -> None:
    """Read every tensor once, part by part, and refuse what `hf_weights.load_params` refuses.

    Raises:
        UserError: see `check_redundant_head`; naming file, tensor, the first value that is not
            finite and where it is.
    """
    with Files() as files:
        check_redundant_head(manifest, files)
        for path, name in dict.fromkeys(
            (stored.path, stored.name) for stored in manifest.tensors.values()
        ):
            check_tensor(files, path, name, jnp.dtype("float32"))


def all_finite(values: np.ndarray) -> bool:
    """Whether a contiguous float32 or bfloat16 array holds no NaN and no infinity; takes no memory
    of its size.
    """
    exponent = _EXPONENTS[values.dtype.itemsize]
    bits = values.reshape(-1).view(exponent.dtype)
    return all(
        (bits[i : i + _BLOCK] & exponent).max() != exponent for i in range(0, bits.size, _BLOCK)
    )


def check_tensor(files: Files, path: Path, name: str, dtype: np.dtype) -> None:
    """Read one tensor, part by part, and refuse values that are not finite in `dtype`.

    Raises:
        UserError: see `check_values`.
    """
    stored = files[path].get_slice(name)
    shape = stored.get_shape()
    rows = max(1, _READ // math.prod(shape[1:]))
    for start in range(0, shape[0], rows):
        part = np.ascontiguousarray(stored[start : min(start + rows, shape[0])])
        with np.errstate(over="ignore"):
            cast = part.astype(dtype)
        if not all_finite(cast):
            at = tuple(map(int, np.unravel_index(int(np.argmax(~np.isfinite(cast))), cast.shape)))
            reason = "not finite" if not np.isfinite(part[at]) else f"too large for {dtype.name}"
            raise UserError(
                f"{path}: tensor {name} has a value that is {reason}: {part[at]} at "
                f"{[at[0] + start, *at[1:]]}; the weights are damaged, fetch or export them again"
            )


def _check_counts(directory: Path, config: ModelConfig, located: dict[str, Path]) -> None:
    """Compare the layers and experts of config.json with the stored ones, where these are numbered
    without a gap.
    """
    for field, pattern, wanted, what in (
        ("num_hidden_layers", _LAYER, config.num_layers, "layers"),
        ("num_experts", _EXPERT, config.num_experts, "experts"),
    ):
        stored = {int(match[1]): name for name in located if (match := pattern.match(name))}
        found = len(stored)
        if not found and what == "layers":
            raise UserError(
                f"{next(iter(located.values()), directory)}: holds no tensor model.layers.0..., "
                f"names must be those of transformers' {config.family.architecture}"
            )
        if wanted and found and found != wanted and max(stored) == found - 1:
            raise UserError(
                f"{directory}/config.json: {field} is {wanted}, the safetensors files hold "
                f"{found} {what} ({stored[found - 1]} is of the last); correct config.json or "
                "fetch the weights it belongs to"
            )


def _locate(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, for all tensors that the files hold; index and shards must agree."""
    single = directory / SINGLE
    index = directory / INDEX
    with Files() as files:
        if single.is_file():
            return dict.fromkeys(files[single].keys(), single)
        if not index.is_file():
            raise FileNotFoundError(f"{directory}: has neither {SINGLE} nor {INDEX}")
        located: dict[str, Path] = {}
        for name, shard in _weight_map(index).items():
            located[name] = directory / shard
            if not located[name].is_file():
                raise UserError(
                    f"{index}: tensor {shorten_name(name)} is said to be in "
                    f"{shorten_name(shard)}, which is missing"
                )
        for path in dict.fromkeys(located.values()):
            held = set(files[path].keys())
            if absent := [
                name for name, place in located.items() if place == path and name not in held
            ]:
                raise UserError(
                    f"{path}: tensor {shorten_name(absent[0])} is missing, {INDEX} says it is here"
                )
            if unlisted := sorted(name for name in held if name not in located):
                raise UserError(f"{path}: tensor {shorten_name(unlisted[0])} is unknown to {INDEX}")
    return located


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if weight_map is None:
        raise UserError(f"{index}: has no weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise UserError(f"{index}: weight_map must map tensor names to file names")
    for name, shard in weight_map.items():
        # Links inside the directory may lead out of it, as in the Hub's cache.
        if Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise UserError(
                f"{index}: tensor {shorten_name(name)} is said to be in {shorten(shard)}, outside "
                "the directory; name files inside it"
            )
    return weight_map
