"""Commands as processes that end by themselves."""

import subprocess
import sys

from tests.support.runs import ROOT
from tests.support.waiting import HANGS_S

CAPTURED = {"capture_output": True, "text": True, "timeout": HANGS_S}


def finished(*arguments, code=0, cwd=ROOT, **options):
    """Run this Python with `arguments` to its end, which must have exit code `code`; keep what it printed and said."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, **{**CAPTURED, **options})
    assert done.returncode == code, done.stdout + done.stderr
    return done


def demo(run_dir, *settings, program=("-m", "bin.train"), **options):
    """`finished` of the demo's debug run in `run_dir` with further settings, without evaluation."""
    start = ("--config=configs/demo.py:debug", f"--config.run_dir={run_dir}", "--config.evaluation.every_steps=0")
    return finished(*program, *start, *settings, **options)
