"""Parameters from Hugging Face directories and back."""

import contextlib
import ctypes
import fcntl
import glob
import importlib.metadata
import itertools
import json
import math
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import TOKENIZER_FILES, has_tokenizer, read_json_object
from dcmdp_jax.models import hf_config, hf_manifest
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import check_params, hf_tensors, param_shapes
from dcmdp_jax.parallel.sharding import to_host
from dcmdp_jax.types import Array, Params

_GENERATION = "generation_config.json"
# AT_FDCWD and RENAME_EXCHANGE of Linux
_HERE = -100
_EXCHANGE = 2
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_params(
    directory: str | Path,
    config: ModelConfig,
    *,
    dtype: str,
    shardings: Params | None = None,
) -> Params:
    """Parameters of a Hugging Face directory, layers stacked, each leaf straight onto its devices.

    The manifest is checked first. Files are memory-mapped; every device's shard of a leaf is read
    by itself, so the host holds one leaf at a time and, on several hosts, each reads only what its
    devices keep.

    Args:
        directory: see `check_manifest`; float32, bfloat16 or float16 tensors.
        config: the model in `directory`.
        dtype: "float32" or "bfloat16", of the parameters; narrowing rounds to nearest even.
        shardings: a `jax.sharding.Sharding` for each leaf, as a tree; None puts all on the first
            device.

    Returns:
        The tree of `params.init_params`.

    Raises:
        FileNotFoundError, ValueError: see `check_manifest`; and ValueError for another dtype, when
            a tied model stores an lm_head that differs from its embedding, or for a tensor with
            values that are not finite, naming it.
    """
    target = _target_dtype(dtype)
    manifest = hf_manifest.check_manifest(directory, config)
    names: dict[tuple[str, ...], dict[tuple[int, ...], str]] = {}
    hf = hf_tensors(config)
    for name, tensor in hf.items():
        names.setdefault(tensor.path, {})[tensor.index] = name

    with hf_manifest.Files() as files:
        hf_manifest.check_redundant_head(manifest, files)

        def load(
            path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Sharding
        ) -> jax.Array:
            tensor_names = names[tuple(entry.key for entry in path)]
            # Devices that hold the same part of a leaf get one reading of it.
            shards: dict[str, np.ndarray] = {}

            def read(name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
                stored = manifest.tensors[name]
                transposed = hf[name].transposed
                # A number that the dtype has no room for becomes infinite, and is named below.
                with np.errstate(over="ignore"):
                    if transposed:
                        out[...] = _read(files, stored, index[::-1]).T
                    else:
                        out[...] = _read(files, stored, index)
                if not hf_manifest.all_finite(out):
                    hf_manifest.check_tensor(files, stored.path, stored.name, target)

            def shard(index: tuple[slice, ...]) -> np.ndarray:
                key = str(index)
                if key not in shards:
                    ranges = []
                    for axis, size in zip(index, leaf.shape, strict=True):
                        ranges.append(range(size)[axis])
                    shards[key] = np.empty(list(map(len, ranges)), target)
                    # Each stacked layer and expert is a tensor of its own in the file. The key of a
                    # tensor's name is its index on the stacked axes.
                    num_stacked = len(next(iter(tensor_names)))
                    inner = tuple(slice(axis.start, axis.stop) for axis in ranges[num_stacked:])
                    offsets = np.ndindex(shards[key].shape[:num_stacked])
                    members = itertools.product(*ranges[:num_stacked])
                    for offset, member in zip(offsets, members, strict=True):
                        read(tensor_names[member], inner, shards[key][offset])
                return shards[key]

            return jax.make_array_from_callback(leaf.shape, sharding, shard, dtype=target)

        shapes = param_shapes(config)
        if shardings is None:
            shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), shapes)
        return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def directory_digest(directory: Path, config: ModelConfig) -> int:
    """CRC-32 of each vector and each matrix's first row in bfloat16: tells bases apart unread."""
    digest = 0
    tensors = hf_manifest.check_manifest(directory, config).tensors
    with hf_manifest.Files() as files:
        for name, tensor in hf_tensors(config).items():
            index = (slice(0, tensor.shape[0]),)
            if len(tensor.shape) > 1:
                index = (slice(0, 1), slice(0, tensor.shape[1]))
            values = _read(files, tensors[name], index)
            digest = zlib.crc32(values.astype(jnp.bfloat16).tobytes(), digest)
    return digest


def iterate_hf_tensors(
    params: Params, config: ModelConfig, dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Hugging Face's tensors one by one, in the order of `hf_tensors`, each made when asked for.

    Args:
        params: tree of `params.init_params`, of jax (any sharding; over several processes, all must
            iterate) or numpy arrays.
        config: the model.
        dtype: "float32" or "bfloat16" of the results.

    Yields:
        (name, contiguous array of that dtype).

    Raises:
        UserError: for another dtype, or a tensor with values that are not finite.
        ValueError: see `check_params`.
    """
    target = _target_dtype(dtype)
    check_params(params, config)
    for name, tensor in hf_tensors(config).items():
        array: Array = tensor.leaf(params)
        if tensor.index:
            array = array[tensor.index]
        # Cast where the array lives, so that half the bytes move; transpose on the host, where it
        # is a view.
        host = to_host(array.astype(target))
        if tensor.transposed:
            host = host.T
        host = np.ascontiguousarray(host)
        if not hf_manifest.all_finite(host):
            raise UserError(
                f"params: tensor {name} has {int((~np.isfinite(host)).sum()):,} value(s) of "
                f"{host.size:,} that are not finite in {dtype}; an earlier checkpoint may be whole"
            )
        yield name, host


def save_params(
    params: Params,
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: str,
    **options: Any,
) -> None:
    """Write parameters as a directory that transformers and vLLM load.

    Args:
        params: see `iterate_hf_tensors`, also for what is refused.
        config, directory, dtype, options: see `save_tensors`.
    """
    save_tensors(
        iterate_hf_tensors(params, config, dtype),
        config,
        directory,
        dtype=dtype,
        **options,
    )


def save_tensors(
    tensors: Iterator[tuple[str, np.ndarray]],
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: str,
    tokenizer_dir: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write a directory that transformers and vLLM load; it appears whole or not at all.

    Everything is written to a hidden sibling, synced to disk and renamed. With the weights come
    config.json (with the special token ids of `tokenizer_dir`/config.json, or of
    generation_config.json where that is missing) and, from `tokenizer_dir`, the tokenizer's files
    and generation_config.json.

    Args:
        tensors: names and values of all that `hf_tensors` lists, in its order, in `dtype`.
        config: the model.
        directory: created; parents too.
        dtype: "float32" or "bfloat16" of the tensors.
        tokenizer_dir: where the tokenizer comes from; None writes none.
        max_shard_bytes: maximum bytes of tensors per file; a single larger tensor has its own file.
        overwrite: replace a directory that is not empty.

    Raises:
        FileExistsError: if `directory` is a file, or holds something and `overwrite` is false.
        FileNotFoundError: if `tokenizer_dir` holds no tokenizer.
        OSError: naming a file, if it can't be written.
        UserError: for another dtype, a shard size below 1, and what `tensors` raises.
    """
    directory = Path(directory)
    size = _target_dtype(dtype).itemsize
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes: got {max_shard_bytes}, must be at least 1")
    with whole_directory(directory, overwrite=overwrite) as partial:
        tokenizer_files = []
        if tokenizer_dir is not None:
            tokenizer_files = _tokenizer_files(Path(tokenizer_dir))
        # Where a config names no version, transformers takes a tokenizer of many tokens for a
        # broken one of Mistral's.
        version = {"transformers_version": importlib.metadata.version("transformers")}
        fields = hf_config.to_hf(config, dtype=dtype) | version | _token_ids(tokenizer_dir)
        atomic_write(partial / "config.json", json.dumps(fields, indent=2) + "\n")
        for source in tokenizer_files:
            shutil.copyfile(source, partial / source.name)

        shards: list[list[str]] = [[]]
        filled = 0
        total = 0
        for name, tensor in hf_tensors(config).items():
            num_bytes = math.prod(tensor.shape) * size
            if shards[-1] and filled + num_bytes > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += num_bytes
            total += num_bytes
        weight_map = {}
        for number, names in enumerate(shards, 1):
            file = hf_manifest.SINGLE
            if len(shards) > 1:
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            shard = dict(next(tensors) for _ in names)
            try:
                # transformers refuses a file whose metadata does not say the framework.
                save_file(shard, partial / file, metadata={"format": "pt"})
            except SafetensorError as error:  # the system's error is in its text alone
                raise OSError(f"{partial / file}: can't be written ({error})") from error
            weight_map |= dict.fromkeys(names, file)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            atomic_write(partial / hf_manifest.INDEX, json.dumps(index, indent=2) + "\n")


@contextlib.contextmanager
def whole_directory(directory: Path, *, overwrite: bool) -> Iterator[Path]:
    """A hidden sibling to write into, which then becomes `directory`, whole or not at all.

    What a killed process left of an earlier one is removed: a sibling that no process holds a lock
    on.

    Raises:
        FileExistsError: if `directory` is a file, or holds something and `overwrite` is false.
    """
    name = glob.escape(directory.name)
    if not directory.exists():
        for old in directory.parent.glob(f".{name}.before-*"):
            old.rename(directory)
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory}: is a file, choose another directory")
    if directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise FileExistsError(
            f"{directory}: is not empty, choose another directory, or --overwrite"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    for stale in directory.parent.glob(f".{name}.partial-*"):
        with contextlib.suppress(OSError), _locked(stale):
            shutil.rmtree(stale, ignore_errors=True)
    partial = directory.parent / f".{directory.name}.partial-{secrets.token_hex(4)}"
    partial.mkdir()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks
            stack.enter_context(_locked(partial))
        try:
            yield partial
            for path in (*partial.iterdir(), partial):
                # safetensors writes for the owner alone
                path.chmod(path.stat().st_mode | partial.stat().st_mode & 0o666)
                _sync(path)
            _replace(partial, directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _target_dtype(dtype: str) -> np.dtype:
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype: got {dtype!r}, allowed are float32, bfloat16")
    return jnp.dtype(dtype)


def _read(
    files: hf_manifest.Files, stored: hf_manifest.Stored, index: tuple[slice, ...]
) -> np.ndarray:
    """Part of a tensor as it is stored, [out, in] for a matrix."""
    tensor = files[stored.path].get_slice(stored.name)
    if stored.fused is None:
        return tensor[index]
    rows, *columns = index
    first = stored.fused.rows.start
    member = slice(stored.fused.index, stored.fused.index + 1)
    return tensor[(member, slice(first + rows.start, first + rows.stop), *columns)][0]


def _tokenizer_files(directory: Path) -> list[Path]:
    if not has_tokenizer(directory):
        raise FileNotFoundError(f"{directory}: has no tokenizer (tokenizer.json or vocab.json)")
    paths = [directory / name for name in (*TOKENIZER_FILES, _GENERATION)]
    return [path for path in paths if path.is_file()]


def _token_ids(directory: str | Path | None) -> dict[str, Any]:
    if directory is None:
        return {}
    for name in ("config.json", _GENERATION):
        path = Path(directory) / name
        if path.is_file():
            fields = read_json_object(path)
            return {name: fields[name] for name in _TOKEN_IDS if fields.get(name) is not None}
    return {}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock; raise OSError if it can't be locked, or another process holds it."""
    with _opened(directory) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _replace(partial: Path, directory: Path) -> None:
    """`partial` becomes `directory`, in one step; what was there before is where `partial` was."""
    if directory.is_dir() and any(directory.iterdir()):
        exchange = getattr(ctypes.CDLL(None), "renameat2", lambda *_: -1)
        if exchange(_HERE, os.fsencode(partial), _HERE, os.fsencode(directory), _EXCHANGE):
            # Not every file system can. If this process is killed in between, `whole_directory`
            # puts the old one back.
            old = partial.with_name(f".{directory.name}.before-{secrets.token_hex(4)}")
            directory.rename(old)
            try:
                partial.rename(directory)
            except OSError:
                old.rename(directory)
                raise
            shutil.rmtree(old)
    else:
        partial.rename(directory)
    _sync(directory.parent)
