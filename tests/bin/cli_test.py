"""The guard every command runs under: one line, the right exit code, a traceback only on demand."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from bin.cli import Parser, run_main

_ROOT = Path(__file__).resolve().parents[2]


def _run(main, argv, capsys, **options):
    with pytest.raises(SystemExit) as left:
        run_main(main, argv, **options)
    return left.value.code, capsys.readouterr().err


def _raiser(error):
    def main(_):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("group size is 1;\n   allowed: 2 or more"), 2, "error: group size is 1; allowed: 2 or more\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/a/b"), 2, "error: No such file: /a/b\n"),
        (OSError("run directory can't be written"), 2, "error: run directory can't be written\n"),
        (ValueError(), 2, "error: ValueError\n"),
        (
            KeyError("x"),
            1,
            "error: KeyError: 'x' (unexpected; run again with --debug for the traceback)\n",
        ),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."),
            1,
            "error: RuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes. (for sampling, "
            "make max_rows smaller; for training, training.micro_batch_tokens)\n",
        ),
        (
            ValueError("RESOURCE_EXHAUSTED: Error writing ...\nFailed to write: No space left on device"),
            2,
            "error: no space left on the disk; make room and run the same command again\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_failure_is_one_line_and_its_code(error, code, line, capsys):
    assert _run(_raiser(error), ["p"], capsys) == (code, line)


@pytest.mark.parametrize(("error", "code"), [(ValueError("bad"), 2), (KeyError("bad"), 1)])
def test_debug_adds_the_traceback_before_the_line(error, code, capsys):
    got, text = _run(_raiser(error), ["p", "--debug"], capsys)
    assert got == code and text.startswith("Traceback (most recent call last)")
    assert text.splitlines()[-1].startswith("error: ") and "run again" not in text


def test_further_expected_errors_count_as_the_users(capsys):
    assert _run(_raiser(KeyError("flag")), ["p"], capsys, expected=(KeyError,)) == (2, "error: 'flag'\n")


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
def test_debug_is_taken_from_the_arguments_before_a_bare_dash_dash(argv, seen, capsys):
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
    assert _run(lambda arguments: _parser().parse_args(arguments[1:]), ["p", *argv], capsys) == (2, f"error: {line}\n")


@pytest.mark.parametrize(("arguments", "said"), [([], "error: bad\n"), (["--debug"], "OSError: the thread's")])
def test_a_thread_leaves_its_failure_to_the_main_thread(arguments, said):
    program = """
import sys, threading
from bin.cli import run_main

def main(_):
    def fail():
        raise OSError("the thread's")
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    raise ValueError("bad")

run_main(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == said if not arguments else said in done.stderr
