"""A virtual environment for each peer, installed once with pinned versions."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_PYTORCH_CPU = ("--index-url", "https://download.pytorch.org/whl/cpu")

# What pip is asked for, one call after another; the alternatives of a call are tried in turn until
# one succeeds.
INSTALLS: dict[str, tuple[tuple[tuple[str, ...], ...], ...]] = {
    "trl": (
        # The CPU build: from the index pip knows if it has it, else from PyTorch's own.
        (("torch==2.13.0+cpu",), (*_PYTORCH_CPU, "torch==2.13.0")),
        (
            (
                "torch==2.13.0",
                "trl==1.16.0",
                "transformers==5.23.0",
                "datasets==5.2.0",
                "accelerate==1.15.0",
                "peft==0.21.2",
            ),
        ),
    ),
    "tunix": (
        (
            (
                "google-tunix==0.1.7",
                "jax==0.10.2",
                "jaxlib==0.10.2",
                "flax==0.12.8",
                "optax==0.2.8",
                "orbax-checkpoint==0.12.8",
                "qwix==0.1.8",
                "transformers==5.12.1",
                "numpy==2.4.6",
            ),
        ),
    ),
}
_MARK = "installed.json"


class InstallationFailed(RuntimeError):
    """A peer could not be installed; the message is one line."""


def ready(name: str, directory: Path, show: Callable[[str], None]) -> Path:
    """The interpreter of a peer's environment, made now unless it is there, whole, and of the
    versions wanted.

    What an interrupted installation left, or one of other versions, is deleted and made again.

    Args:
        name: of `INSTALLS`.
        directory: holds an environment for each peer.
        show: prints a line for people, before an installation, which takes minutes.

    Raises:
        InstallationFailed: with the end of what pip said.
        OSError: if the directory can't be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / name
    python = place / "bin" / "python"
    mark = place / _MARK
    wanted = json.dumps(INSTALLS[name])
    # A second comparison started meanwhile waits here.
    with open(directory / f"{name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
            return python
        show(f"installing {name} in {place}; this takes some minutes, once")
        if place.exists():
            shutil.rmtree(place)
        _run([sys.executable, "-m", "venv", str(place)], name)
        for alternatives in INSTALLS[name]:
            pip = [str(python), "-m", "pip", "install", "--quiet"]
            _first_that_works([[*pip, *words] for words in alternatives], name)
        mark.write_text(wanted, encoding="utf-8")
    return python


def _first_that_works(commands: list[list[str]], name: str) -> None:
    for command in commands[:-1]:
        try:
            return _run(command, name)
        except InstallationFailed:
            continue
    return _run(commands[-1], name)


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = (
            [line for line in said if line.startswith("ERROR")]
            or said
            or [f"exit code {done.returncode}"]
        )
        raise InstallationFailed(f"{name} could not be installed: {' '.join(errors[-1].split())}")
