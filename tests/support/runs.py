"""Whole runs in processes of their own, and what they left: metrics by step, digests of
checkpoints.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
DEBUG = "configs/demo.py:debug"


def start(environment, run_dir, settings=(), *, config=DEBUG, program=("-m", "bin.train")):
    """A run with `config` and `settings`, words of its command; what it prints and says of errors
    is one stream.
    """
    command = [
        sys.executable,
        *program,
        f"--config={config}",
        f"--config.run_dir={run_dir}",
        *settings,
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, code=0):
    """Wait for a process that ends with `code`; return what it printed."""
    output, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode == code, output
    return output


def read_records(run_dir):
    """Metrics by step without what depends on the clock."""
    merged = {}
    path = Path(run_dir) / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn by a kill
        kept = {k: v for k, v in record.items() if not k.startswith(("time/", "throughput/"))}
        merged.setdefault(record["step"], {}).update(kept)
    return merged


def read_metadata(run_dir, step):
    """What a checkpoint says of itself."""
    return json.loads((Path(run_dir) / "checkpoints" / str(step) / "meta" / "metadata").read_text())


def read_digests(run_dir, step):
    """Digests of the arrays of a checkpoint."""
    return read_metadata(run_dir, step)["digests"]
