"""Commands as processes that end by themselves, what runs beside them, and ports."""

import socket
import subprocess
import sys
from pathlib import Path

from tests.support.runs import ROOT
from tests.support.waiting import HANGS_S

CAPTURED = {"capture_output": True, "text": True, "timeout": HANGS_S}


def finished(*arguments, code=0, cwd=ROOT, **options):
    """Run this Python with `arguments` to its end, which must have exit code `code`; keep what it
    printed and said.
    """
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, **{**CAPTURED, **options})
    assert done.returncode == code, done.stdout + done.stderr
    return done


def demo(run_dir, *settings, program=("-m", "bin.train"), **options):
    """`finished` of the demo's debug run in `run_dir` with further settings, without evaluation."""
    start = (
        "--config=configs/demo.py:debug",
        f"--config.run_dir={run_dir}",
        "--config.evaluation.every_steps=0",
    )
    return finished(*program, *start, *settings, **options)


def free_port():
    """A port of this machine on which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("localhost", 0))
        return bound.getsockname()[1]


def children(parent, word):
    """Living processes that `parent` started and whose command has `word`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, its_parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if (
                state != "Z"
                and int(its_parent) == parent
                and word in (entry / "cmdline").read_text()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
