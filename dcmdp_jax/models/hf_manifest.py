"""Checks of a Hugging Face directory: headers against config.json, and finite values."""

import contextlib
import dataclasses
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from dcmdp_jax.errors import UserError, shorten, shorten_name
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.models import hf_config, params
from dcmdp_jax.models.config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OUTPUT = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """Where the safetensors files hold a tensor.

    Attributes:
        path: the file.
        name: the tensor in it; another name than the tensor's own if it is fused with others.
        fused: this tensor's part of the stored one, or None for all of it.
    """

    path: Path
    name: str
    fused: params.FusedPart | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
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
                reason = str(error)
                if pointer:
                    reason = "a Git LFS pointer, `git lfs pull` fetches the file"
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
    left_out: Counter[str] = Counter()
    located: dict[str, Stored] = {}
    others = config.family.left_out
    prefix = hf_config.TEXT_PREFIX
    if others:
        prefix = hf_config.WRAPPED_PREFIX
    for stored_name, path in _locate(directory).items():
        if stored_name.startswith(others):
            left_out.update(filter(stored_name.startswith, others))
        else:
            name = stored_name.replace(prefix, hf_config.TEXT_PREFIX, 1)
            located[name] = Stored(path=path, name=stored_name)
    # Before names are made of a number of layers that may be anything.
    _check_counts(directory, config, located)

    tensors: dict[str, Stored] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    missing = []
    for name, tensor in params.hf_tensors(config).items():
        if name in located:
            tensors[name] = located[name]
            shapes[name] = tensor.shape
        elif tensor.fused is not None and tensor.fused.name in located:
            tensors[name] = dataclasses.replace(located[tensor.fused.name], fused=tensor.fused)
            shapes[tensor.fused.name] = tensor.fused.shape
        else:
            missing.append((name, tensor))
    if missing:
        listing = directory / SINGLE
        if not listing.is_file():
            listing = directory / INDEX
        name, tensor = missing[0]
        further = ""
        if len(missing) > 1:
            further = f" and {len(missing) - 1} more"
        remedy = ""
        if name == _OUTPUT:
            remedy = "; or set tie_word_embeddings to true in config.json"
        raise UserError(
            f"{listing}: tensor {name} is missing{further}, expected {list(tensor.shape)}{remedy}"
        )

    redundant_head = None
    if config.tie_word_embeddings:
        shapes[_OUTPUT] = shapes[_EMBEDDING]
        if _OUTPUT in located:
            redundant_head = located[_OUTPUT].path
    dtypes: Counter[str] = Counter()
    num_bytes = 0
    with Files() as files:
        for name, stored in located.items():
            if name not in shapes:
                remedy = ""
                if name == _OUTPUT:
                    remedy = "; or set tie_word_embeddings to false there"
                raise UserError(
                    f"{stored.path}: tensor {shorten_name(name)} is unknown to "
                    f"{config.model_type} with this config.json{remedy}"
                )
            dtype = _checked_dtype(files, name, stored, shapes[name])
            dtypes[dtype] += 1
            itemsize = 2
            if dtype == "F32":
                itemsize = 4
            num_bytes += math.prod(shapes[name]) * itemsize
    return Manifest(
        tensors=tensors,
        redundant_head=redundant_head,
        dtypes=dtypes,
        num_bytes=num_bytes,
        left_out=left_out,
    )


def _checked_dtype(files: Files, name: str, stored: Stored, expected: tuple[int, ...]) -> str:
    array = files[stored.path].get_slice(stored.name)
    shape = tuple(array.get_shape())
    if shape != expected:
        raise UserError(
            f"{stored.path}: tensor {name} is {list(shape)}, expected {list(expected)} by "
            "config.json"
        )
    dtype = array.get_dtype()
    if dtype not in _SOURCE_DTYPES:
        raise UserError(
            f"{stored.path}: tensor {name} is {dtype}, readable are {', '.join(_SOURCE_DTYPES)}"
        )
    return dtype


def check_redundant_head(manifest: Manifest, files: Files) -> None:
    """A tied model may store its output layer again, but only the same one.

    Raises:
        UserError: naming file and tensor.
    """
    if manifest.redundant_head is None:
        return
    head = files[manifest.redundant_head].get_slice(_OUTPUT)
    stored = manifest.tensors[_EMBEDDING]
    embedding = files[stored.path].get_slice(stored.name)
    rows = head.get_shape()[0]
    for start in range(0, rows, 8192):
        rows_read = slice(start, min(start + 8192, rows))
        if not np.array_equal(head[rows_read], embedding[rows_read], equal_nan=True):
            raise UserError(
                f"{manifest.redundant_head}: tensor {_OUTPUT} differs from "
                f"{_EMBEDDING}, but config.json ties them; set tie_word_embeddings to "
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
        # Tensors that are fused in the file come several times.
        names = dict.fromkeys((stored.path, stored.name) for stored in manifest.tensors.values())
        for path, name in names:
            check_tensor(files, path, name, jnp.dtype("float32"))


def all_finite(values: np.ndarray) -> bool:
    """Whether a contiguous float32 or bfloat16 array is finite; takes no memory of its size."""
    exponent = _EXPONENTS[values.dtype.itemsize]
    bits = values.reshape(-1).view(exponent.dtype)
    for start in range(0, bits.size, _BLOCK):
        exponents = bits[start : start + _BLOCK] & exponent
        if exponents.max() == exponent:
            return False
    return True


def check_tensor(files: Files, path: Path, name: str, dtype: np.dtype) -> None:
    """Read one tensor, part by part, and refuse values that are not finite in `dtype`.

    Raises:
        UserError: see `check_values`.
    """
    stored = files[path].get_slice(name)
    shape = stored.get_shape()
    rows = max(1, _READ // math.prod(shape[1:]))
    for start in range(0, shape[0], rows):
        values = np.ascontiguousarray(stored[start : min(start + rows, shape[0])])
        with np.errstate(over="ignore"):
            cast = values.astype(dtype)
        if not all_finite(cast):
            at = tuple(map(int, np.unravel_index(np.argmax(~np.isfinite(cast)), cast.shape)))
            reason = "not finite"
            if np.isfinite(values[at]):
                reason = f"too large for {dtype.name}"
            raise UserError(
                f"{path}: tensor {name} has a value that is {reason}: {values[at]} at "
                f"{[at[0] + start, *at[1:]]}; the weights are damaged, fetch or export them again"
            )


def _check_counts(directory: Path, config: ModelConfig, located: dict[str, Stored]) -> None:
    """Compare the layers and experts of config.json with stored ones without a gap."""
    for field, pattern, expected, noun in (
        ("num_hidden_layers", _LAYER, config.num_layers, "layers"),
        ("num_experts", _EXPERT, config.num_experts, "experts"),
    ):
        examples = {}
        for name in located:
            match = pattern.match(name)
            if match is not None:
                examples[int(match[1])] = name
        count = len(examples)
        if not count and noun == "layers":
            path = directory
            if located:
                path = next(iter(located.values())).path
            raise UserError(
                f"{path}: holds no tensor model.layers.0..., names must be those of transformers' "
                f"{config.family.architecture}"
            )
        if expected and count and count != expected and max(examples) == count - 1:
            raise UserError(
                f"{directory}/config.json: {field} is {expected}, the safetensors files hold "
                f"{count} {noun} ({examples[count - 1]} is of the last); correct config.json or "
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
            stored_names = set(files[path].keys())
            for name, file in located.items():
                if file == path and name not in stored_names:
                    raise UserError(
                        f"{path}: tensor {shorten_name(name)} is missing, {INDEX} says it is here"
                    )
            unlisted = stored_names - located.keys()
            if unlisted:
                raise UserError(
                    f"{path}: tensor {shorten_name(min(unlisted))} is unknown to {INDEX}"
                )
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
