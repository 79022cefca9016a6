"""Commands called in this process, as `dcmdp NAME WORDS` calls them."""

import pytest

from dcmdp_jax.commands.failures import run_main


def run_command(main, name, capsys, *words):
    """Exit code, output and errors of a command's `main`."""
    with pytest.raises(SystemExit) as left:
        run_main(main, [name, *map(str, words)])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


def failed_command(main, name, capsys, *words):
    """The one line with which a command refuses what a user asked for."""
    code, _, errors = run_command(main, name, capsys, *words)
    lines = errors.splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), errors
    return lines[0].removeprefix("error: ")
