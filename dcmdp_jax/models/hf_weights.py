"""Parameters from Hugging Face directories and back: safetensors in, config.json, safetensors and tokenizer out."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dcmdp_jax.models import decoder
from dcmdp_jax.models.config import ModelConfig, to_hf
from dcmdp_jax.models.hf_names import EMBEDDING, HEAD, hf_names
from dcmdp_jax.types import Array, Params

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SOURCE_DTYPES = ("F32", "BF16", "F16")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_GENERATION = "generation_config.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Manifest(NamedTuple):
    """What the safetensors files of a directory hold, found to fit a config.

    Attributes:
        files: tensor name -> the file that holds it.
        redundant_head: the file in which a tied model stores its output layer all the same, or None.
        dtypes: how many tensors are stored as "F32", "BF16", "F16".
        num_bytes: of all tensors together.
    """

    files: dict[str, Path]
    redundant_head: Path | None
    dtypes: dict[str, int]
    num_bytes: int


def check_manifest(directory: str | Path, config: ModelConfig) -> Manifest:
    """Reads the headers of the safetensors files and holds them against the config; no tensor is read.

    Args:
        directory: holds model.safetensors, or model.safetensors.index.json and its shards.
        config: the model that the tensors must fit.

    Raises:
        FileNotFoundError: if the directory has neither file.
        ValueError: naming file and tensor, for a shard that the index names and is missing, a file that is truncated
            or no safetensors file, a tensor that is missing, unknown, or of the wrong shape or dtype.
    """
    directory = Path(directory)
    located = _locate(directory)
    listing = directory / (_SINGLE if (directory / _SINGLE).is_file() else _INDEX)
    expected = {name: place.shape for name, place in hf_names(config).items()}
    if missing := [name for name in expected if name not in located]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{listing}: tensor {missing[0]} is missing{more}, expected {_shape(expected[missing[0]])}")
    allowed = dict(expected)
    if config.tie_word_embeddings:
        allowed[HEAD] = expected[EMBEDDING]
    dtypes: Counter[str] = Counter()
    num_bytes = 0
    with _Files() as files:
        for name, path in located.items():
            if name not in allowed:
                raise ValueError(f"{path}: tensor {name} is unknown to {config.model_type} with this config.json")
            stored = files[path].get_slice(name)
            shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
            if shape != allowed[name]:
                raise ValueError(f"{path}: tensor {name} is {_shape(shape)}, expected {_shape(allowed[name])}")
            if dtype not in _SOURCE_DTYPES:
                raise ValueError(f"{path}: tensor {name} is {dtype}, readable are {', '.join(_SOURCE_DTYPES)}")
            dtypes[dtype] += 1
            num_bytes += math.prod(shape) * (4 if dtype == "F32" else 2)
        redundant = located.get(HEAD) if config.tie_word_embeddings else None
    return Manifest({name: located[name] for name in expected}, redundant, dict(dtypes), num_bytes)


def load_params(directory: str | Path, config: ModelConfig, *, dtype: str, shardings: Params | None = None) -> Params:
    """Parameters of a Hugging Face directory, layers stacked, each leaf straight onto its devices.

    The manifest is checked first. Files are memory-mapped; every device's shard of a leaf is read by itself, so the
    host holds one leaf at a time and, on several hosts, each reads only what its devices keep.

    Args:
        directory: as `check_manifest`; float32, bfloat16 or float16 tensors.
        config: of the model in `directory`.
        dtype: "float32" or "bfloat16", of the parameters; narrowing rounds to nearest even.
        shardings: a `jax.sharding.Sharding` for each leaf, as a tree; None puts all on the first device.

    Returns:
        The tree of `decoder.init_params`.

    Raises:
        FileNotFoundError, ValueError: as `check_manifest`; and ValueError for another dtype, or when a tied model
            stores an lm_head that differs from its embedding.
    """
    target = _target_dtype(dtype)
    manifest = check_manifest(directory, config)
    names: dict[tuple[str, ...], list[str]] = {}
    places = hf_names(config)
    for name, place in places.items():
        names.setdefault(place.path, []).append(name)

    with _Files() as files:
        if manifest.redundant_head is not None:
            _check_redundant_head(manifest, files)

        def load(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array:
            tensors = names[tuple(entry.key for entry in path)]

            def read(name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
                stored = files[manifest.files[name]].get_slice(name)
                if places[name].transposed:
                    out[...] = stored[index[::-1]].T
                else:
                    out[...] = stored[index]

            def shard(index: tuple[slice, ...]) -> np.ndarray:
                index = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, leaf.shape, strict=True))
                out = np.empty([part.stop - part.start for part in index], target)
                if places[tensors[0]].layer is None:
                    read(tensors[0], index, out)
                else:
                    for row, layer in enumerate(range(index[0].start, index[0].stop)):
                        read(tensors[layer], index[1:], out[row])
                return out

            return jax.make_array_from_callback(leaf.shape, sharding, _once_per_index(shard), dtype=target)

        shapes = decoder.param_shapes(config)
        if shardings is None:
            shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), shapes)
        return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def has_tokenizer(directory: str | Path) -> bool:
    """Whether `directory` holds a tokenizer: tokenizer.json or vocab.json."""
    return any((Path(directory) / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def iterate_hf_tensors(params: Params, config: ModelConfig, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face's tensors one after the other, in the order of `hf_names`, each made when it is asked for.

    Args:
        params: as `decoder.init_params`; jax (any sharding this process can address) or numpy arrays.
        config: the model.
        dtype: "float32" or "bfloat16" of the results.

    Yields:
        (name, contiguous array of that dtype).

    Raises:
        ValueError: for another dtype, or when a leaf has not the shape that the config gives it.
    """
    target = _target_dtype(dtype)
    shapes = decoder.param_shapes(config)
    if (have := jax.tree.structure(params)) != (want := jax.tree.structure(shapes)):
        raise ValueError(f"params: tree is {have}, the config's is {want}")
    for (path, want), have in zip(jax.tree_util.tree_leaves_with_path(shapes), jax.tree.leaves(params), strict=True):
        if have.shape != want.shape:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)}: got {_shape(have.shape)}, the config gives {_shape(want.shape)}"
            )
    for name, place in hf_names(config).items():
        leaf: Any = params
        for key in place.path:
            leaf = leaf[key]
        tensor: Array = leaf if place.layer is None else leaf[place.layer]
        # Cast where the array lives, so that half the bytes move; transpose on the host, where it is a view.
        host = np.asarray(tensor.astype(target))
        yield name, np.ascontiguousarray(host.T if place.transposed else host)


def save_params(
    params: Params,
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: str,
    tokenizer_dir: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Writes a directory that transformers and vLLM load; it appears whole or not at all.

    Everything is written to a hidden sibling, synced to disk and renamed. Beside the weights: config.json (with the
    special token ids of `tokenizer_dir`/config.json when there is one) and, from `tokenizer_dir`, the tokenizer's
    files and generation_config.json.

    Args:
        params, config: the model.
        directory: created; parents too.
        dtype: "float32" or "bfloat16" of the tensors.
        tokenizer_dir: where the tokenizer comes from; None writes none.
        max_shard_bytes: a file holds at most so many bytes of tensors, or one tensor that is larger.
        overwrite: replace a directory that is not empty.

    Raises:
        FileExistsError: if `directory` is a file, or holds something and `overwrite` is false.
        FileNotFoundError: if `tokenizer_dir` holds no tokenizer.
        ValueError: for another dtype, a shard size below 1, or parameters that don't fit the config.
    """
    directory = Path(directory)
    _target_dtype(dtype)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: got {max_shard_bytes}, must be at least 1")
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory}: is a file, choose another directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise FileExistsError(f"{directory}: is not empty, choose another directory or ask to overwrite")
    copied = [] if tokenizer_dir is None else _tokenizer_files(Path(tokenizer_dir))
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.parent / f".{directory.name}.partial-{secrets.token_hex(4)}"
    partial.mkdir()
    try:
        _write_json(partial / "config.json", to_hf(config, dtype=dtype) | _token_ids(tokenizer_dir))
        for source in copied:
            shutil.copyfile(source, partial / source.name)
        _write_tensors(params, config, partial, dtype, max_shard_bytes)
        for path in (*partial.iterdir(), partial):
            _sync(path)
        _replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _target_dtype(dtype: str) -> np.dtype:
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype: got {dtype!r}, allowed are float32, bfloat16")
    return jnp.dtype(dtype)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


class _Files(contextlib.ExitStack):
    """Open safetensors files by path, memory-mapped; closed together."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, Any] = {}

    def __getitem__(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self.enter_context(safe_open(path, framework="numpy"))
            except SafetensorError as error:
                raise ValueError(f"{path}: truncated or not a safetensors file ({error})") from error
        return self._open[path]


def _locate(directory: Path) -> dict[str, Path]:
    """Tensor name -> file, for all tensors that the files hold; index and shards must agree."""
    single, index = directory / _SINGLE, directory / _INDEX
    with _Files() as files:
        if single.is_file():
            return dict.fromkeys(files[single].keys(), single)
        if not index.is_file():
            raise FileNotFoundError(f"{directory}: has neither {_SINGLE} nor {_INDEX}")
        located: dict[str, Path] = {}
        for name, shard in _weight_map(index).items():
            located[name] = directory / shard
            if not located[name].is_file():
                raise ValueError(f"{index}: tensor {name} is said to be in {shard}, which is missing")
        for path in dict.fromkeys(located.values()):
            held = set(files[path].keys())
            if absent := [name for name, place in located.items() if place == path and name not in held]:
                raise ValueError(f"{path}: tensor {absent[0]} is missing, {_INDEX} says it is here")
            if unlisted := sorted(name for name in held if name not in located):
                raise ValueError(f"{path}: tensor {unlisted[0]} is unknown to {_INDEX}")
    return located


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{index}: not valid JSON ({error})") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{index}: has no weight_map") from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to file names")
    return weight_map


def _check_redundant_head(manifest: Manifest, files: _Files) -> None:
    """A tied model may store its output layer again, but only the same one."""
    head = files[manifest.redundant_head].get_slice(HEAD)
    embedding = files[manifest.files[EMBEDDING]].get_slice(EMBEDDING)
    rows = head.get_shape()[0]
    for start in range(0, rows, 8192):
        part = slice(start, min(start + 8192, rows))
        if not np.array_equal(head[part], embedding[part]):
            raise ValueError(
                f"{manifest.redundant_head}: tensor {HEAD} differs from {EMBEDDING}, but config.json ties them; "
                "set tie_word_embeddings to false there to load it"
            )


def _once_per_index(
    read: Callable[[tuple[slice, ...]], np.ndarray],
) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """Devices that hold the same part of a leaf get one reading of it."""
    done: dict[str, np.ndarray] = {}

    def cached(index: tuple[slice, ...]) -> np.ndarray:
        key = str(index)
        if key not in done:
            done[key] = read(index)
        return done[key]

    return cached


def _write_tensors(params: Params, config: ModelConfig, directory: Path, dtype: str, max_shard_bytes: int) -> None:
    size = _target_dtype(dtype).itemsize
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, place in hf_names(config).items():
        num_bytes = math.prod(place.shape) * size
        if shards[-1] and filled + num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + num_bytes, total + num_bytes
    tensors = iterate_hf_tensors(params, config, dtype)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        held = dict(next(tensors) for _ in names)
        # transformers refuses a file whose metadata does not say the framework.
        save_file(held, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / _INDEX, index)


def _tokenizer_files(directory: Path) -> list[Path]:
    if not has_tokenizer(directory):
        raise FileNotFoundError(f"{directory}: has no tokenizer (tokenizer.json or vocab.json)")
    return [path for name in (*_TOKENIZER_FILES, _GENERATION) if (path := directory / name).is_file()]


def _token_ids(directory: str | Path | None) -> dict[str, Any]:
    if directory is None or not (path := Path(directory) / "config.json").is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    return {name: fields[name] for name in _TOKEN_IDS if fields.get(name) is not None}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(partial: Path, directory: Path) -> None:
    """`partial` becomes `directory`; what was there before is gone only after."""
    old = None
    if directory.is_dir() and any(directory.iterdir()):
        old = partial.with_name(f"{partial.name}-old")
        directory.rename(old)
    try:
        partial.rename(directory)
    except OSError:
        if old is not None:
            old.rename(directory)
        raise
    _sync(directory.parent)
    if old is not None:
        shutil.rmtree(old)
