"""One run, one directory: claimed by one process, tied to one config."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dcmdp_jax.config import Config, to_dict

CONFIG_FILE = "config.json"
_LOCK_FILE = ".lock"

# What may change between the parts of one run: it alters what is recorded, where it runs and in what portions, and what
# happens to what is broken; not what is learnt.
FREE_SETTINGS = (
    "run_dir",
    "evaluation.",
    "checkpoint.",
    "observe.",
    "mesh.",
    "model.remat",
    "model.scan_unroll",
    "model.logprob_chunk",
    "rollout.max_rows",
    "rollout.min_rows",
    "rollout.on_non_finite",
    "rollout.vllm.python",
    "rollout.vllm.visible_devices",
    "rollout.vllm.memory_share",
    "rollout.vllm.kv_cache_gib",
    "rollout.vllm.cpu_threads",
    "rollout.vllm.start_timeout_s",
    "rollout.vllm.stall_timeout_s",
    "rollout.vllm.max_restarts",
    "rollout.vllm.probe_tolerance",
    "task.verifier_workers",
    "training.max_skipped_in_row",
    "training.micro_batch_tokens",
    "training.steps",
)


def check_run_directory(config: Config) -> None:
    """Refuses a directory that can't be written, or that holds a run of another config. Makes nothing.

    Raises:
        OSError: if it can't be made or written.
        ValueError: naming the first setting that differs from the run already there.
    """
    run_dir = Path(config.run_dir)
    existing = run_dir
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OSError(f"config.run_dir: {run_dir} can't be written ({existing}); choose another directory")
    for name in ("checkpoints", "tensorboard", "tokenizer"):
        if (run_dir / name).exists() and not (run_dir / name).is_dir():
            raise OSError(f"config.run_dir: {run_dir / name} is no directory; move it away, or choose another run_dir")
    path = run_dir / CONFIG_FILE
    if not path.exists():
        return
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: can't be read ({error}); choose another config.run_dir") from error
    decays = config.optimizer.schedule != "constant"
    before, now = _flatten(saved), _flatten(to_dict(config))
    for name in sorted(before.keys() | now.keys()):
        fixed = not name.startswith(FREE_SETTINGS) or (name == "training.steps" and decays)
        if fixed and before.get(name) != now.get(name):
            raise ValueError(
                f"config.run_dir: {run_dir} holds a run with {name}={before.get(name)!r}, this config has "
                f"{now.get(name)!r}; choose another run_dir, or delete that one"
            )


@contextmanager
def claimed(config: Config) -> Iterator[Path]:
    """Makes the directory and holds a lock on it until the block ends.

    Raises:
        ValueError: if another process is running in it.
        OSError: if it can't be written.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = open(run_dir / _LOCK_FILE, "w", encoding="utf-8")  # noqa: SIM115 - held as long as the block
    except OSError as error:
        raise OSError(f"config.run_dir: {run_dir} can't be written ({error.strerror}); choose another") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"config.run_dir: another process is running in {run_dir}; choose another") from None
        yield run_dir


def record_config(config: Config) -> None:
    """Writes config.json, atomically. Only once the run has a state: a config that failed must bind no directory."""
    path = Path(config.run_dir) / CONFIG_FILE
    temporary = path.with_name(CONFIG_FILE + ".new")
    temporary.write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
