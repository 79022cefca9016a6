"""Run a command: a failure becomes one line and an exit code, and no traceback is lost."""

import contextlib
import errno
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from dcmdp_jax.activity import (
    command_started,
    compiling,
    give_back_terminal,
    terminal_size,
)
from dcmdp_jax.errors import EngineError, TrainingStopped, UserError, callback_error, one_line

_MESSAGE_IS_ENOUGH = UserError, EngineError, MemoryError, TrainingStopped
_EXPECTED = 2
_UNEXPECTED = 1
_INTERRUPTED = 130
DEBUG = "--debug"
"""Shows the traceback of a failure; removed from the arguments of every command."""
_DISK_FULL = "No space left on device"  # in an OSError, and at the end of Orbax's long message
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY"  # in XLA's errors
ERROR_LOG = "error.log"
_run_dir: Path | None = None


def run_main(
    main: Callable[[list[str]], int | None], argv: Sequence[str] | None = None
) -> NoReturn:
    """Run a command and leave the process with its exit code; a failure prints one line on stderr.

    | what `main` does | printed | exit code |
    |---|---|---|
    | returns None or a number | nothing | 0 or the number |
    | raises UserError, or an OSError with a file's name or a message of its own | `error: ...` | 2 |
    | raises EngineError, MemoryError or TrainingStopped | `error: ...` | 2 |
    | fills the disk | `error: ...`, and what to do | 2 |
    | fills the device's memory | `error: ...`, and what to make smaller | 1 |
    | raises anything else | `error: ...`, and where its traceback is | 1 |
    | is interrupted (Ctrl-C) | `interrupted` | 130 |

    The traceback of everything but a UserError is appended to error.log of the run directory that
    `keep_tracebacks_in` names. Without one, the traceback of an unexpected failure goes to stderr
    before the line. Exceptions of threads are handled the same way. SystemExit (argparse, absl)
    passes through. `--debug` before a bare `--` is removed from the arguments; every failure then
    prints its traceback on stderr as well.

    Args:
        main: takes the arguments as in `sys.argv`, the program's name first, without `--debug`.
        argv: the arguments, program name first; None reads `sys.argv`.
    """
    global _run_dir
    _run_dir = None
    command_started()
    program, *words = sys.argv if argv is None else argv
    end = words.index("--") if "--" in words else len(words)
    options = [word for word in words[:end] if word != DEBUG]
    debug = len(options) < end
    arguments = [program, *options, *words[end:]]

    if argv is None:
        sys.stdout = _Console(sys.stdout)
        sys.stderr = _Console(sys.stderr)
        if not terminal_size():  # a log, where `say` writes date and time too
            logging.lastResort.setFormatter(
                logging.Formatter("%(asctime)s  %(message)s", "%Y-%m-%d %H:%M:%S")
            )
        if not debug:
            _keep_failures_of_threads()
            # It prints the traceback of an error in a callback, which the error holds too.
            logging.getLogger("jax._src.callback").disabled = True

    try:
        code = main(arguments) or 0
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        print("interrupted", file=sys.stderr)
        code = _INTERRUPTED
    except Exception as error:
        code = _fail(error, debug)
    if code and argv is None and compiling():
        # Python would wait for threads whose programs nobody needs any more, for minutes.
        sys.stdout.flush()
        sys.stderr.flush()
        give_back_terminal()
        os._exit(code)
    sys.exit(code)


class _Console:
    """A stream that goes silent once nobody reads it: `| head` or a lost terminal ends no run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        # A file's name may hold bytes that are not UTF-8.
        self._try(self._stream.write, text.encode("utf-8", "backslashreplace").decode("utf-8"))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, function: Callable[..., Any], *arguments: str) -> None:
        try:
            function(*arguments)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())


def keep_tracebacks_in(run_dir: str | Path) -> None:
    """Append tracebacks to `run_dir`/error.log from now on, if that directory exists."""
    global _run_dir
    _run_dir = Path(run_dir)


def _fail(error: Exception, debug: bool) -> int:
    """Print the error, keep the traceback, return the exit code."""
    text = traceback.format_exc()
    line = _message(error)
    log = None if isinstance(error, UserError) else _append_to_log("failed", text)
    hints = [] if log is None else [f"traceback: {log}"]
    # This package raises OSError with a message alone, without errno.
    names_file = isinstance(error, OSError) and (error.filename is not None or error.errno is None)
    expected = names_file or isinstance(error, _MESSAGE_IS_ENOUGH) or _DISK_FULL in str(error)

    if not expected:
        line = f"{type(error).__name__}: {line}"
        if any(words in str(error) for words in _OUT_OF_MEMORY):
            hints = [
                "for sampling, make max_rows smaller; for training, training.micro_batch_tokens",
                "where another program holds a GPU's memory, XLA_CLIENT_MEM_FRACTION",
                *hints,
            ]
        elif log is None:
            hints = ["unexpected", "traceback above"]
            debug = True
        else:
            hints.insert(0, "unexpected")
    if hints:
        line += f" ({'; '.join(hints)})"
    if not debug:
        text = ""
    print(f"{text}error: {line}", file=sys.stderr)
    if expected:
        return _EXPECTED
    return _UNEXPECTED


def _append_to_log(event: str, text: str) -> Path | None:
    """Append to the run's error.log. Return its path; None if no run has one to write to."""
    if _run_dir is None:
        return None
    path = _run_dir / ERROR_LOG
    with contextlib.suppress(OSError):
        # A FIFO would wait for a reader.
        if _run_dir.is_dir() and (path.is_file() or not path.exists()):
            # An argument in another encoding than the locale's has surrogates.
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(
                    f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(sys.argv)}: "
                    f"{event}\n{text.rstrip()}\n\n"
                )
            return path
    return None


def _keep_failures_of_threads() -> None:
    """Send failures outside the main thread to the log, or to stderr without one.

    When a checkpoint can't be written, each of Orbax's threads prints a traceback, its abandoned
    coroutines print another at exit, and it logs more. The main thread raises the same error and
    reports it in one line.
    """
    printed = set()

    def keep(event: str, failure: Any) -> None:
        text = "".join(
            traceback.format_exception(failure.exc_type, failure.exc_value, failure.exc_traceback)
        )
        if issubclass(failure.exc_type, SystemExit) or _append_to_log(event, text) is not None:
            return
        short = f"\n{text.rstrip()}" if _run_dir is None else f" {one_line(text.splitlines()[-1])}"
        # A log that can't be written is said once, not by every thread that fails for the same
        # reason.
        if short not in printed:
            printed.add(short)
            sys.stderr.write(f"{event}:{short}\n")

    def log_only(record: logging.LogRecord) -> bool:
        _append_to_log(f"logged by {record.name}", logging.Formatter().format(record))
        return False

    threading.excepthook = lambda failure: keep(
        f"thread {getattr(failure.thread, 'name', '')} failed", failure
    )
    sys.unraisablehook = lambda failure: keep(f"ignored in {failure.object!r}", failure)
    orbax = logging.getLogger("absl")
    orbax.setLevel(logging.ERROR)
    orbax.addFilter(log_only)


def _message(error: Exception) -> str:
    if _DISK_FULL in str(error):
        return "no space left on the disk; make room and run the same command again"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.strerror}: {error.filename}"
    raised = callback_error(error)
    if raised:
        return f"a callback of a compiled function raised {raised}"
    return one_line(error) or type(error).__name__
