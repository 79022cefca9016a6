"""Models of the Hugging Face Hub, fetched and pushed, and of Python packages.

Only safetensors, JSON, tokenizer and GGUF files; no code.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from dcmdp_jax.activity import activity
from dcmdp_jax.errors import UserError, one_line
from dcmdp_jax.inputs import TOKENIZER_FILES
from dcmdp_jax.models.gguf_convert import PACKAGE, package_model

_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    *TOKENIZER_FILES,
)
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_ENDS_BYTES = 1 << 16
_FOLDERS = ("models", "runs")
"""First parts of relative directories that configs name: never an owner on the Hub."""


def is_hub_name(path: str) -> bool:
    """Whether a path names no directory and is `OWNER/NAME` or `OWNER/NAME@REVISION`."""
    if _NAME.fullmatch(path) is None or path.partition("/")[0] in _FOLDERS:
        return False
    return not Path(path).exists()


def is_fetched(path: str) -> bool:
    """Whether `model_directory` fetches what a path names, from the Hub or as a Python package."""
    return is_hub_name(path) or path.startswith(PACKAGE)


@functools.cache
def model_directory(path: str) -> Path:
    """The directory of a model: `path` itself if it is one, else a package's or one of the Hub.

    `pip:NAME` is the model in a Python package's GGUF file; see `gguf_convert.package_model`.

    A model is fetched once, into the Hub's cache (`HF_HOME`). `OWNER/NAME@REVISION` pins a branch,
    a tag or a commit. What was fetched before needs no network, a pinned commit never again.

    Raises:
        UserError: in one line, if there is neither, or it can't be fetched.
    """
    if Path(path).is_dir():
        return Path(path)
    if path.startswith(PACKAGE):
        return package_model(path.removeprefix(PACKAGE))
    if not is_hub_name(path):
        raise UserError(
            f"no directory {path}; `hf download OWNER/MODEL --local-dir {path}` fetches one, and "
            "OWNER/MODEL or OWNER/MODEL@REVISION in its place names one on the Hub"
        )
    # Imported late: only this needs it.
    from huggingface_hub import snapshot_download

    name, _, revision = path.partition("@")
    try:
        with activity(f"fetching {path} from the Hub"):
            directory = Path(
                snapshot_download(name, revision=revision or None, allow_patterns=list(_FILES))
            )
    except Exception as error:  # of huggingface_hub, or of the HTTP client of its version
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        raise UserError(
            f"no directory {path}, and it can't be fetched from the Hub ({reason}); check name, "
            "network and `hf auth login`, or copy the model's directory here"
        ) from error
    if not any(directory.glob("*.safetensors")):
        raise UserError(f"{path} on the Hub has no .safetensors file; other formats are not read")
    return directory


def check_push(name: str) -> None:
    """Refuse a push that can't succeed before anything is written.

    Raises:
        UserError: in one line, for a name that is not USER/NAME, and without a token.
    """
    from huggingface_hub import get_token

    match = _NAME.fullmatch(name)
    if match is None or match[2]:
        raise UserError(
            f"--push: got {name!r}, must be USER/NAME: letters, digits, '.', '_' and '-'"
        )
    if not get_token():
        raise UserError(
            f"--push={name}: no token of the Hub; run `hf auth login` or set HF_TOKEN. Nothing "
            "was written"
        )


def push(directory: Path, name: str, *, message: str) -> str:
    """Upload a directory as the model `name`, made if it is not there.

    Returns:
        The address of the commit.

    Raises:
        UserError: in one line that says where the files are, if the Hub can't be reached or
            refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(name, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=directory, commit_message=message)
        return str(commit.commit_url)
    except Exception as error:  # as above
        reason = one_line(f"{type(error).__name__}: {error}", 200)
        raise UserError(
            f"--push={name}: not pushed ({reason}). The export is whole in {directory}; "
            f"`hf upload {name} {directory}` pushes it"
        ) from error


def ends_of_files(directory: Path) -> Iterator[bytes]:
    """Name, size and both ends of each file, which hold a large one's table and last values."""
    for path in sorted(directory.iterdir()):
        if path.suffix not in (".json", ".safetensors"):
            continue
        size = path.stat().st_size
        yield f"{path.name} {size}".encode()
        with path.open("rb") as file:
            yield file.read(_ENDS_BYTES)
            file.seek(max(0, size - _ENDS_BYTES))
            yield file.read()
