"""What every command does with bad arguments and failures: one clear line, an exit code, a traceback when asked."""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

_EXPECTED = 2
_UNEXPECTED = 1
_INTERRUPTED = 130
_DEBUG = "--debug"
_DISK_FULL = "No space left on device"  # an OSError's own words, and the end of Orbax's page about it
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how XLA's errors begin


class Parser(argparse.ArgumentParser):
    """Errors as one line for `run_main`, with the nearest flag for one that is not there."""

    def __init__(self, **options: Any) -> None:
        # An abbreviated flag would change its meaning when a new one is added.
        super().__init__(epilog="--debug shows the traceback of a failure.", allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raises ValueError instead of printing the usage and leaving."""
        raise ValueError(message)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        """As argparse's; ValueError in one line for what it doesn't know."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            near = difflib.get_close_matches(rest[0].partition("=")[0], self._flags(), n=1)
            self.error(f"{rest[0]}: no such argument; " + (f"did you mean {near[0]}?" if near else "see --help"))
        return parsed

    def _flags(self) -> list[str]:
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    flags += parser._flags()
        return flags


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
    | finds the device's memory full | `error: ...`, and what to make smaller | 1 |
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
    if argv is None and not debug:
        _quieten_threads()
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
        if _OUT_OF_MEMORY in str(error) and _DISK_FULL not in str(error):
            hint = " (for sampling, make max_rows smaller; for training, training.micro_batch_tokens)"
        _complain(f"error: {type(error).__name__}: {_one_line(error)}{hint}", debug)
    sys.exit(code)


def _quieten_threads() -> None:
    """Leaves a failed checkpoint to the main thread, which raises the same error.

    Orbax's threads would each print a traceback of it first, and its abandoned coroutines another at the exit.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    threading.excepthook = lambda _: None
    sys.unraisablehook = lambda _: None


def _complain(line: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(line, file=sys.stderr)


def _one_line(error: Exception) -> str:
    if _DISK_FULL in str(error):
        return "no space left on the disk; make room and run the same command again"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split()) or type(error).__name__
