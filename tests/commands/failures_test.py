"""The guard every command runs under: one line, the right exit code, and no traceback lost."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dcmdp_jax.commands.arguments import Parser
from dcmdp_jax.commands.failures import keep_tracebacks_in, run_main
from dcmdp_jax.errors import EngineError, TrainingStopped, UserError
from tests.support.terminal import run_in_terminal
from tests.support.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[2]


def _run(main, argv, capsys):
    with pytest.raises(SystemExit) as left:
        run_main(main, argv)
    return left.value.code, capsys.readouterr().err


def _raiser(error, run_dir=None):
    def main(_):
        if run_dir is not None:
            keep_tracebacks_in(run_dir)
        raise error

    return main


def _of_jax(_):
    import jax
    import jax.numpy as jnp

    jax.vmap(jnp.add)(jnp.zeros(2), jnp.zeros(3))


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            UserError("group size is 1;\n   allowed: 2 or more"),
            2,
            "error: group size is 1; allowed: 2 or more\n",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "/a/b"), 2, "error: No such file: /a/b\n"),
        (UserError(), 2, "error: UserError\n"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."),
            1,
            "error: RuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 "
            "bytes. (for sampling, make max_rows smaller; for training, "
            "training.micro_batch_tokens; where another program holds a GPU's memory, "
            "XLA_CLIENT_MEM_FRACTION)\n",
        ),
        (
            RuntimeError("INTERNAL: cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"),
            1,
            "error: RuntimeError: INTERNAL: cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY "
            "(for sampling, make max_rows smaller; for training, training.micro_batch_tokens; "
            "where another program holds a GPU's memory, XLA_CLIENT_MEM_FRACTION)\n",
        ),
        (
            ValueError(
                "RESOURCE_EXHAUSTED: Error writing ...\nFailed to write: No space left on device"
            ),
            2,
            "error: no space left on the disk; make room and run the same command again\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_failure_is_one_line_and_its_code(error, code, line, capsys):
    assert _run(_raiser(error), ["p"], capsys) == (code, line)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("x"), "error: KeyError: 'x' (unexpected; traceback above)"),
        (
            ValueError("shapes differ"),
            "error: ValueError: shapes differ (unexpected; traceback above)",
        ),
        (
            ConnectionResetError(errno.ECONNRESET, "Reset"),
            "error: ConnectionResetError: [Errno 104] Reset (unexpected; traceback above)",
        ),
    ],
)
def test_a_defect_without_a_run_prints_its_traceback(error, line, capsys):
    code, text = _run(_raiser(error), ["p"], capsys)
    assert code == 1 and text.startswith("Traceback (most recent call last)")
    assert text.splitlines()[-1] == line


def test_a_jax_error_is_unexpected(capsys):
    code, text = _run(_of_jax, ["p"], capsys)
    assert code == 1 and text.startswith("Traceback")
    assert text.splitlines()[-1].startswith("error: ValueError: vmap got inconsistent sizes")


@pytest.mark.parametrize("error", [ValueError("shapes differ"), KeyError("x")])
def test_a_run_logs_unexpected_tracebacks(error, tmp_path, capsys):
    log = tmp_path / "error.log"
    code, text = _run(_raiser(error, tmp_path), ["p"], capsys)
    kind = type(error).__name__
    assert (code, text) == (1, f"error: {kind}: {error} (unexpected; traceback: {log})\n")
    assert log.read_text().count("Traceback (most recent call last)") == 1
    assert f"{kind}: {error}" in log.read_text() and ": failed\n" in log.read_text()
    # The next failure is added, not written over it.
    _run(_raiser(error, tmp_path), ["p"], capsys)
    assert log.read_text().count("Traceback (most recent call last)") == 2


def test_an_error_in_a_callback_is_its_last_line_and_the_place(tmp_path, capsys):
    def lookup(x):
        return {}["seven"]

    def main(arguments):
        keep_tracebacks_in(tmp_path)
        jax.jit(lambda x: jax.pure_callback(lookup, x, x))(jnp.zeros(2)).block_until_ready()

    code, text = _run(main, ["p"], capsys)
    place = f"failures_test.py, line {lookup.__code__.co_firstlineno + 1}"
    line = (
        "error: JaxRuntimeError: a callback of a compiled function raised KeyError: 'seven' "
        f"({place})"
    )
    assert code == 1 and text.splitlines()[-1].startswith(line)


def test_a_run_logs_expected_errors_but_no_user_errors(tmp_path, capsys):
    log = tmp_path / "error.log"
    assert _run(_raiser(UserError("bad"), tmp_path), ["p"], capsys) == (2, "error: bad\n")
    assert not log.exists()
    line = f"error: broke (traceback: {log})\n"
    assert _run(_raiser(EngineError("broke"), tmp_path), ["p"], capsys) == (2, line)
    line = f"error: Gone: /a/b (traceback: {log})\n"
    assert _run(
        _raiser(FileNotFoundError(errno.ENOENT, "Gone", "/a/b"), tmp_path), ["p"], capsys
    ) == (2, line)
    assert log.read_text().count("Traceback (most recent call last)") == 2


def test_logging_does_not_create_the_run_directory(tmp_path, capsys):
    code, text = _run(_raiser(KeyError("x"), tmp_path / "run"), ["p"], capsys)
    assert code == 1 and text.startswith("Traceback") and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("error", "code"), [(UserError("bad"), 2), (KeyError("bad"), 1)])
def test_debug_adds_the_traceback_before_the_line(error, code, capsys):
    got, text = _run(_raiser(error), ["p", "--debug"], capsys)
    assert got == code and text.count("Traceback (most recent call last)") == 1
    assert text.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    "error", [EngineError("gone"), MemoryError("gone"), TrainingStopped("gone")]
)
def test_further_expected_errors_are_one_line(error, capsys):
    assert _run(_raiser(error), ["p"], capsys) == (2, "error: gone\n")


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (3, 3)])
def test_a_result_is_the_exit_code(result, code, capsys):
    assert _run(lambda _: result, ["p"], capsys) == (code, "")


def test_system_exit_passes(capsys):
    assert _run(_raiser(SystemExit(7)), ["p"], capsys) == (7, "")


@pytest.mark.parametrize(
    ("argv", "seen"),
    [
        (["p", "a", "--debug", "b"], ["p", "a", "b"]),
        (["p", "--", "--debug"], ["p", "--", "--debug"]),
        (["--debug", "a"], ["--debug", "a"]),
        (["p", "--debugger"], ["p", "--debugger"]),
    ],
)
def test_debug_is_removed_from_the_arguments_before_a_bare_dash_dash(argv, seen, capsys):
    got = []
    assert _run(got.extend, argv, capsys) == (0, "")
    assert got == seen


def test_the_arguments_are_the_processes_by_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["p", "x", "--debug"])
    got = []
    assert _run(got.extend, None, capsys) == (0, "")
    assert got == ["p", "x"]


def _parser():
    parser = Parser(prog="p")
    parser.add_argument("--samples", type=int)
    inner = parser.add_subparsers(dest="command", metavar="COMMAND")
    inner.add_parser("copy").add_argument("--overwrite", action="store_true")
    return parser


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--sampels=4"], "--sampels=4: no such argument; did you mean --samples?"),
        (["copy", "--overwrit"], "--overwrit: no such argument; did you mean --overwrite?"),
        (["--zzz"], "--zzz: no such argument; see --help"),
        (["--samples", "x"], "argument --samples: invalid int value: 'x'"),
        (["cpy"], "argument COMMAND: invalid choice: 'cpy' (choose from 'copy')"),
    ],
)
def test_bad_arguments_are_one_line_with_the_nearest_flag(argv, line, capsys):
    assert _run(lambda arguments: _parser().parse_args(arguments[1:]), ["p", *argv], capsys) == (
        2,
        f"error: {line}\n",
    )


_THREAD_FAILS = """
import logging, sys, threading
from dcmdp_jax.commands.failures import keep_tracebacks_in, run_main
from dcmdp_jax.errors import EngineError, TrainingStopped, UserError

class Broken:
    def __del__(self):
        raise RuntimeError("at its end")

def main(arguments):
    if len(arguments) > 1:
        keep_tracebacks_in(arguments[1])
    def fail():
        raise OSError("the thread's")
    thread = threading.Thread(target=fail, name="save")
    thread.start()
    thread.join()
    Broken()
    logging.getLogger("absl").error("could not write")
    raise UserError("bad")

run_main(main)
"""


def _thread_fails(*arguments):
    command = [sys.executable, "-c", _THREAD_FAILS, *map(str, arguments)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 2
    return done.stderr


def test_a_run_logs_failures_of_threads_and_prints_none(tmp_path):
    assert _thread_fails(tmp_path) == "error: bad\n"
    text = (tmp_path / "error.log").read_text()
    assert (
        "thread save failed\nTraceback (most recent call last)" in text
        and "OSError: the thread's" in text
    )
    assert "RuntimeError: at its end" in text
    assert "logged by absl\ncould not write" in text


def test_a_log_that_cannot_be_written_leaves_a_line_of_each_failure_on_the_console(tmp_path):
    """A directory in its place. Twenty of Orbax's threads fail for one reason, which is said
    once.
    """
    (tmp_path / "error.log").mkdir()
    program = _THREAD_FAILS.replace(
        "    thread.start()",
        "    for _ in range(20): threading.Thread(target=fail).start()\n    thread.start()",
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    said = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=HANGS_S
    ).stderr.splitlines()
    assert len(said) == 3 and said[-1] == "error: bad"
    assert said[0].startswith("thread ") and said[0].endswith("failed: OSError: the thread's")
    assert said[1].endswith("RuntimeError: at its end")


@pytest.mark.parametrize("arguments", [[], ["--debug"]])
def test_without_a_run_failures_of_threads_are_printed(arguments):
    said = _thread_fails(*arguments)
    assert "OSError: the thread's" in said and "RuntimeError: at its end" in said
    assert said.splitlines()[-1] == "error: bad"


_TALKS = """
import logging, sys
from dcmdp_jax.commands.failures import run_main

def main(argv):
    for line in range(3):
        print("to stdout", line, flush=True)
        print("to stderr", line, file=sys.stderr, flush=True)
        logging.getLogger("dcmdp_jax").warning("logged")
    open(argv[1], "w").write("went on")
    return 7

run_main(main)
"""


_COMPILES = """
import sys, threading, time
from dcmdp_jax.activity import COMPILING
from dcmdp_jax.commands.failures import run_main
from dcmdp_jax.errors import UserError

def main(argv):
    threading.Thread(target=time.sleep, args=(10_000,), name=COMPILING + "the step").start()
    if argv[1] == "fails":
        raise UserError("training.steps is too low")
    return int(argv[1])

run_main(main)
"""


@pytest.mark.parametrize(
    ("argument", "code", "line"),
    [("fails", 2, "error: training.steps is too low\n"), ("143", 143, "")],
)
def test_what_compiles_keeps_no_failed_command(argument, code, line):
    done = subprocess.run(
        [sys.executable, "-c", _COMPILES, argument],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert (done.returncode, done.stderr) == (code, line)


def test_a_pipe_that_nobody_reads_any_more_ends_nothing(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", _TALKS, str(tmp_path / "end")],
        stdout=writer,
        stderr=writer,
        cwd=_ROOT,
        timeout=HANGS_S,
    )
    os.close(writer)
    assert done.returncode == 7 and (tmp_path / "end").read_text() == "went on"


def test_a_warning_has_date_and_time_in_a_log_and_none_on_a_terminal(tmp_path):
    command = [sys.executable, "-c", _TALKS, str(tmp_path / "end")]
    said = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=HANGS_S
    ).stderr.splitlines()
    dated = [
        line for line in said if re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d  logged", line)
    ]
    assert len(dated) == 3 and sum("logged" in line for line in said) == 3
    screen, _ = run_in_terminal(f"import sys; sys.argv[1:] = [{str(tmp_path / 'end')!r}]\n{_TALKS}")
    assert [line for line in screen.text() if "logged" in line] == ["logged"] * 3


def test_an_argument_of_another_encoding_is_in_the_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "--x=\udcc3"])
    assert _run(_raiser(RuntimeError("x"), tmp_path), ["train"], capsys)[0] == 1
    assert "--x=\\udcc3: failed" in (tmp_path / "error.log").read_text()
