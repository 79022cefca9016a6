"""The programs that XLA made for the tests, kept from run to run in the user's cache directory.

`JAX_COMPILATION_CACHE_DIR` names another directory, `JAX_ENABLE_COMPILATION_CACHE=false` keeps
none.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax

from dcmdp_jax.parallel.backend import program_directory

LIMIT_BYTES = 2 << 30
"""All kinds of processors and versions of jaxlib together, and what runs outside the tests have
kept.
"""

_PAGE = 4096


def keep_programs() -> None:
    """Have JAX keep every program, in this process and in those that it starts."""
    settings = {
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        settings["jax_compilation_cache_dir"] = str(program_directory() / "tests")
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def drop_old_programs(directory: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Remove the programs that were used the longest ago, until the others have at most
    `limit_bytes`.

    An entry whose writer was killed ends at a page, and JAX warns of it in each run: those are
    removed too, and with them one of 4,096 that are whole. Not JAX's own limit
    (`jax_compilation_cache_max_size`): with it each write looks at every file, and all processes
    wait for one lock.
    """
    kept = 0
    for _, size, path in sorted(_programs(directory), reverse=True):
        kept += size
        if kept > limit_bytes or size % _PAGE == 0:
            path.unlink(missing_ok=True)


def _programs(directory: Path) -> Iterator[tuple[float, int, Path]]:
    """When each was used or written last, its bytes, its path."""
    for path in directory.rglob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another run removes some too
            status = path.stat()
            yield max(status.st_atime, status.st_mtime), status.st_size, path
