"""How many files and functions a batch, a weight and a setting pass: `python -m benchmarks.walks
[--json FILE]`.

Runs configs/demo.py:debug for two steps in this process and looks at every call of a function of
the package. A batch passes it if an argument is a `Batch` or its rows, a weight if one is the
training state or a dict of parameters, and the setting `algorithm.tolerance` if one is its value,
or the settings or the config that hold it. The phases count all functions that are entered. Those
of `commands` are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

from dcmdp_jax.commands.train import main as train

_PACKAGE = str(Path(__file__).resolve().parents[1] / "dcmdp_jax")
_TOLERANCE = 0.00123456789
# Name of the function that begins it -> phase.
_PHASES = {
    "Run.check": "setup",
    "sync_weights": "weight sync",
    "_generate": "generate",
    "finish": "verify",
    "_pack": "pack",
    "train_step": "step (tracing)",
}
_KINDS = {
    "Batch": "batch",
    "Rows": "batch",
    "TrainState": "weight",
    "AlgorithmSettings": "setting",
    "Config": "setting",
}


def _walker(value: Any) -> str | None:
    """Which of the three a value is."""
    if isinstance(value, float) and value == _TOLERANCE:
        return "setting"
    if isinstance(value, tuple) and value and type(value[0]).__name__ == "Rows":
        return "batch"
    if isinstance(value, dict) and "layers" in value:
        return "weight"
    return _KINDS.get(type(value).__name__)


class Walks:
    """Collects (file, function) of each walk and phase, as `sys.setprofile`'s function."""

    def __init__(self) -> None:
        self.passed: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self._open = threading.local()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(_PACKAGE):
            return
        if code.co_filename.startswith(f"{_PACKAGE}/commands/"):
            return
        phases = self._open.__dict__.setdefault("phases", [])
        if event == "return":
            if phases and phases[-1][1] is frame:
                phases.pop()
            return
        begun = _PHASES.get(code.co_qualname) or _PHASES.get(code.co_name)
        if begun and all(name != begun for name, _ in phases):
            phases.append((begun, frame))
        place = code.co_filename.removeprefix(_PACKAGE + "/"), code.co_qualname
        for name, _ in phases:
            self.passed[name].add(place)
        for argument in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            if walker := _walker(frame.f_locals.get(argument)):
                self.passed[walker].add(place)


def main() -> None:
    """Run, count, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every file and function")
    arguments = parser.parse_args()
    walks = Walks()
    with tempfile.TemporaryDirectory() as directory:
        words = [
            "--config=configs/demo.py:debug",
            f"--config.run_dir={directory}/run",
            "--config.mesh.cpu_devices=1",
        ]
        threading.setprofile(walks)
        sys.setprofile(walks)
        try:
            train(["train", *words, f"--config.algorithm.tolerance={_TOLERANCE}"])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    print("| | files | functions |\n|---|---|---|")
    for name in ("setting", "weight", "batch", *_PHASES.values()):
        places = walks.passed[name]
        print(f"| {name} | {len({file for file, _ in places})} | {len(places)} |")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({name: sorted(places) for name, places in walks.passed.items()}, indent=1)
        )


if __name__ == "__main__":
    main()
