"""What every command does with a failure: one clear line, an exit code, and a traceback only when asked for."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

_EXPECTED = 2
_UNEXPECTED = 1
_INTERRUPTED = 130
_DEBUG = "--debug"


def run_main(
    main: Callable[[list[str]], int | None],
    argv: Sequence[str] | None = None,
    *,
    expected: tuple[type[Exception], ...] = (),
) -> NoReturn:
    """Run a command and leave the process with its exit code; a failure prints one line on stderr.

    | what `main` does | printed | exit code |
    |---|---|---|
    | returns None or a number | nothing | 0 or the number |
    | raises ValueError, OSError or one of `expected` | `error: ...` | 2 |
    | raises anything else | `error: ...`, and how to see the traceback | 1 |
    | is interrupted (Ctrl-C) | `interrupted` | 130 |

    SystemExit (argparse, absl) passes through. `--debug` before a bare `--` is taken from the arguments, and makes
    every failure print its traceback as well.

    Args:
        main: takes the arguments as in `sys.argv`, the program's name first, without `--debug`.
        argv: the arguments, program name first; None reads `sys.argv`.
        expected: further exceptions that are the user's to mend, such as `absl.flags.Error`.
    """
    arguments = list(sys.argv if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = _DEBUG in arguments[1:end]
    arguments = [word for place, word in enumerate(arguments) if not (0 < place < end and word == _DEBUG)]
    try:
        code = main(arguments) or 0
    except KeyboardInterrupt:
        code = _INTERRUPTED
        _complain("interrupted", debug)
    except (ValueError, OSError, *expected) as error:
        code = _EXPECTED
        _complain(f"error: {_one_line(error)}", debug)
    except Exception as error:
        code = _UNEXPECTED
        hint = "" if debug else " (unexpected; run again with --debug for the traceback)"
        _complain(f"error: {type(error).__name__}: {_one_line(error)}{hint}", debug)
    sys.exit(code)


def _complain(line: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(line, file=sys.stderr)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split()) or type(error).__name__
