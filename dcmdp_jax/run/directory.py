"""Run directory: locking, and the config it belongs to."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.config import checks, load
from dcmdp_jax.config.settings import Config, setting_names, to_dict
from dcmdp_jax.dotted_names import flatten
from dcmdp_jax.errors import UserError, shorten
from dcmdp_jax.observe.jsonl import CONFIG_FILE, STARTS_FILE, readable
from dcmdp_jax.parallel.hosts import ONE_PROCESS, Hosts

RUN_ID_FILE = "run_id"
_LOCK_FILE = ".lock"
_DIRECTORIES = ("checkpoints", "tensorboard", "tokenizer")

# Text that a directory's name can contain unchanged: without capitals, which some file systems do
# not distinguish, and without the separators of settings.
_NOT_PLAIN = re.compile(r"[^\w.=-]+", re.ASCII)
_PLAIN = re.compile(r"[a-z0-9_.]*|-?[0-9.]+(e[+-]?[0-9]+)?")
_LONGEST_SUFFIX = 100
_DIGEST = 12
# Linux takes 4,096 bytes with what a run puts below, and 255 for a name.
_LONGEST_PATH = 3500
_LONGEST_NAME = 255


def name_suffix(overrides: Mapping[str, Any], config: Config) -> str:
    """Suffix of a run directory's name for overrides, such as `-precision=exact`.

    Any two different sets of values have different names. A setting is called by its last word if
    no other setting ends with it. A name gets a digest of all overrides at its end if it would be
    too long, or if a value has characters that a name can't contain. Settings that a resumed run
    may change are left out.

    Args:
        overrides: dotted name -> value.
        config: the config with these values.
    """
    fixed_settings = {}
    text = ""
    # Whether the text tells the values exactly; else the digest has to.
    plain = True
    for name, value in sorted(overrides.items()):
        if checks.may_change(name, config):
            continue
        fixed_settings[name] = value
        value_text = _name_value(value)
        last_part = value_text.rpartition("/")[2]
        text += f"-{_short_name(name)}={_NOT_PLAIN.sub('_', last_part)}"
        # True and False have capitals, but differ without them too.
        if not (isinstance(value, bool) or _PLAIN.fullmatch(value_text)):
            plain = False
    if plain and len(text) <= _LONGEST_SUFFIX:
        return text
    digest = hashlib.sha256(json.dumps(fixed_settings).encode()).hexdigest()[:_DIGEST]
    return f"{text[: _LONGEST_SUFFIX - _DIGEST - 1]}-{digest}"


def _name_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "_".join(map(str, value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _short_name(name: str) -> str:
    """The shortest tail of a dotted name that no other setting ends with."""
    words = name.split(".")
    tail = words.pop()
    while sum(f".{other}".endswith(f".{tail}") for other in setting_names()) > 1:
        tail = f"{words.pop()}.{tail}"
    return tail


def check_run_directory(config: Config) -> None:
    """Refuse a directory that can't be written, or of a run of another config. Creates nothing.

    Raises:
        OSError: if it can't be made or written.
        UserError: naming the first setting that differs from the run already there, a path that is
            too long, or a FIFO, socket or device among its files.
    """
    run_dir = Path(config.run_dir)
    _check_name(run_dir)
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OSError(
            f"config.run_dir: {run_dir} can't be written ({existing}); choose another directory"
        )
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        # Opening a FIFO waits for its other end.
        is_directory = path.name in _DIRECTORIES
        if path.exists() and not (path.is_dir() or path.is_file() and not is_directory):
            kind = "directory" if is_directory else "file (a FIFO, socket or device)"
            raise UserError(
                f"config.run_dir: {path} is no {kind}; move it away, or choose another run_dir"
            )
    if not (run_dir / CONFIG_FILE).exists():
        return
    try:
        saved = read_config(run_dir)
    except UserError as error:
        raise UserError(f"{error}; choose another config.run_dir") from error
    before = flatten(to_dict(saved))
    now = flatten(to_dict(config))
    for name in sorted(now):
        if not checks.may_change(name, config) and before[name] != now[name]:
            raise UserError(
                f"config.run_dir: {run_dir} holds a run with {name}={before[name]!r}, this config "
                f"has {now[name]!r}; choose another run_dir, or delete that one"
            )


def fitted_rows(config: Config) -> int:
    """The rows that the first start with this `rollout.max_rows` fitted into memory; 0 for all.

    A resumed run decodes the same batches. Call it after `check_run_directory`.
    """
    path = Path(config.run_dir) / CONFIG_FILE
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if saved.get("rollout", {}).get("max_rows") != config.rollout.max_rows:
        return 0
    return saved.get("fitted_rows", 0)


def _check_name(run_dir: Path) -> None:
    try:
        name = os.fsencode(run_dir.absolute())
        name.decode()
    except UnicodeError as error:
        raise UserError(
            f"config.run_dir: {str(run_dir)!r} is no UTF-8; set LC_ALL=C.UTF-8, or choose another"
        ) from error
    if len(name) > _LONGEST_PATH or max(map(len, name.split(b"/"))) > _LONGEST_NAME:
        raise UserError(
            f"config.run_dir: {shorten(str(run_dir))} is too long; choose one of at most "
            f"{_LONGEST_PATH:,} bytes, {_LONGEST_NAME} between two slashes"
        )


def read_config(run_dir: Path) -> Config:
    """Read the config of a run, which an earlier version may have written.

    Raises:
        UserError: in one line, if there is none or it can't be read.
    """
    path = run_dir / CONFIG_FILE
    try:
        if path.is_fifo():
            raise UserError("a FIFO")
        saved = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            raise UserError("not an object")
        return load.from_saved(saved)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: can't be read ({error})") from error


@contextlib.contextmanager
def claimed(config: Config, hosts: Hosts = ONE_PROCESS) -> Iterator[Path]:
    """Collective: make the directory, and hold the run's lock on it until the block ends.

    Process 0 holds the lock for all; the others check that they see the file that it locked.

    Raises:
        UserError: if another run is running in it, or a host sees another directory.
        OSError: if it can't be written.
    """
    run_dir = Path(config.run_dir)
    with contextlib.ExitStack() as stack:
        token = ""
        if hosts.is_writer:
            token = secrets.token_hex(8)
            stack.enter_context(_locked(run_dir, token.encode()))
        token = hosts.gather(token)[0]
        lock = run_dir / _LOCK_FILE
        same = lock.exists() and lock.read_bytes() == token.encode()
        [other_host] = hosts.largest(0 if same else hosts.index)
        if other_host:
            raise UserError(
                f"config.run_dir: {run_dir} on {hosts.names[int(other_host)]} is not the directory "
                f"of {hosts.names[0]}; choose one that all hosts share"
            )
        yield run_dir


@contextlib.contextmanager
def _locked(run_dir: Path, token: bytes) -> Iterator[None]:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = open(run_dir / _LOCK_FILE, "ab")  # noqa: SIM115 - held as long as the block
    except OSError as error:
        raise OSError(
            f"config.run_dir: {run_dir} can't be written ({error.strerror}); choose another"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"config.run_dir: another process is running in {run_dir}; choose another"
            ) from None
        lock.truncate(0)
        lock.write(token)
        lock.flush()
        os.fsync(lock.fileno())
        yield


def run_id(run_dir: Path) -> str:
    """The name of this directory's run: from `run_id`, else its newest checkpoint, else a new one.

    Makes the file. Of several processes the first calls this before the others.
    """
    path = run_dir / RUN_ID_FILE
    if path.exists():
        name = path.read_text(encoding="utf-8", errors="replace").strip()
        if name:
            return name
    name = None
    records = run_dir.glob("checkpoints/[0-9]*/meta/metadata")
    for record in sorted(records, key=lambda record: record.stat().st_mtime):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            name = json.loads(record.read_text(encoding="utf-8")).get("run") or name
    run_dir.mkdir(parents=True, exist_ok=True)
    atomic_write(path, f"{name or secrets.token_hex(6)}\n")
    return run_id(run_dir)


def first_start(run_dir: Path) -> datetime:
    """When the run was first started, by the clock of its first process; now for a new run."""
    for start in readable(run_dir / STARTS_FILE)[:1]:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return datetime.fromisoformat(start["time"])
    return datetime.now().astimezone()


def record_config(config: Config, rows: int = 0) -> None:
    """Write config.json, atomically, once the run has a state: a failed one claims no directory.

    Args:
        config: the run's.
        rows: completions that the engine decodes at a time, kept where they are fewer than
            `rollout.max_rows`.
    """
    path = Path(config.run_dir) / CONFIG_FILE
    saved = load.to_saved(config)
    if 0 < rows < config.rollout.max_rows:
        saved["fitted_rows"] = rows
    atomic_write(path, json.dumps(saved, indent=2) + "\n")
