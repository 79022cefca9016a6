"""The messages of tests/recorded/messages.txt: what `dcmdp train` and `dcmdp plan` say of a mistake in their arguments.

python -m tests.support.messages    # write today's messages for the commands that the file has
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from dcmdp_jax.commands import plan
from dcmdp_jax.commands.flags import parse

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "recorded" / "messages.txt"


def recorded() -> dict[str, str]:
    """Command line -> message."""
    blocks = FILE.read_text(encoding="utf-8").split("\n\n")[1:]
    return dict(block.strip().split("\n    ") for block in blocks)


def said(command: str) -> str:
    """What a command says of its arguments, before it reads anything but its config file.

    Raises:
        AssertionError: if it says nothing, or more than a line.
    """
    name, *arguments = shlex.split(command)
    try:
        (parse if name == "train" else plan.main)([name, *arguments])
    except ValueError as error:
        line = str(error)
        assert "\n" not in line and "Traceback" not in line, line
        return line
    raise AssertionError(f"no error from {command}")


def text(messages: dict[str, str]) -> str:
    """The file with these messages."""
    heading = FILE.read_text(encoding="utf-8").split("\n\n")[0]
    return "\n\n".join([heading, *(f"{command}\n    {message}" for command, message in messages.items())]) + "\n"


if __name__ == "__main__":
    os.chdir(ROOT)
    plan.load_topology = lambda name: sys.exit("asked for a compiler")
    FILE.write_text(text({command: said(command) for command in recorded()}), encoding="utf-8")
