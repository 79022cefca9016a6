"""Write a whole file or nothing."""

import os
from pathlib import Path


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write a file so that a kill, a power cut or a full disk leaves the old content or the new.

    The content goes to a hidden sibling, which is synced to disk and renamed.

    Args:
        path: the file, in an existing directory.
        content: text is written as UTF-8.

    Raises:
        OSError: naming the file, if it can't be written.
    """
    if isinstance(content, str):
        content = content.encode()
    path = Path(path)
    partial = path.with_name(f".{path.name}.new")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        # One of a write (a full disk, `ulimit -f`) does not say which file.
        if error.filename is None:
            error.filename = str(path)
        raise
