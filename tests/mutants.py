"""Fifty planted faults of the algorithm and the training step: the narrow tests must fail with
each.

    python -m tests.mutants                # all, half an hour on two idle cores
    python -m tests.mutants clip dual      # those whose file or text has one of these words

Each fault of tests/mutants.txt is one edit of a copy of the checkout, in a temporary directory.
Exit code 1 if a fault survives, or if its text is no longer in the source.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[1]
_TABLE = Path(__file__).with_name("mutants.txt")
_STEP = ("step", "accumulate", "optimizer", "loss_scale", "lag_step", "moe_step", "setup")


class Mutant(NamedTuple):
    """An edit.

    Attributes:
        file: under dcmdp_jax.
        old: text that is there once.
        new: what takes its place.
    """

    file: str
    old: str
    new: str


def mutants() -> list[Mutant]:
    """Read tests/mutants.txt."""
    lines = _TABLE.read_text(encoding="utf-8").splitlines()[2:]
    return [
        Mutant(file, old.removeprefix("- "), new.removeprefix("+").strip())
        for file, old, new in zip(lines[::3], lines[1::3], lines[2::3], strict=True)
    ]


def main(words: list[str]) -> int:
    """Run the chosen mutants; print a line for each and the survivors."""
    chosen = [
        mutant
        for mutant in mutants()
        if not words or any(word in " ".join(mutant) for word in words)
    ]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=_ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in filter(None, names.split("\0")):
            if (_ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(_ROOT / name, copy / name)
        for number, mutant in enumerate(chosen, 1):
            began = time.monotonic()
            found = _result(copy, mutant)
            line = f"{number}/{len(chosen)} {found} {mutant.file}: {mutant.old} -> {mutant.new}"
            print(f"{line} ({time.monotonic() - began:.0f} s)", flush=True)
            wrong += [line] if found != "killed" else []
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} killed", *wrong, sep="\n")
    return int(bool(wrong))


def _result(copy: Path, mutant: Mutant) -> str:
    """ "killed", "survived" or "stale"."""
    file = copy / "dcmdp_jax" / mutant.file
    source = file.read_text(encoding="utf-8")
    if source.count(mutant.old) != 1:
        return "stale"
    file.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    code = 0
    for tests in _tests(copy, mutant):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-n0",
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        code = (
            code
            or subprocess.run(command, cwd=copy, env=environment, capture_output=True).returncode
        )
    file.write_text(source, encoding="utf-8")
    return {0: "survived", 1: "killed"}.get(code, "broken")  # the edit has no meaning: no test ran


def _tests(copy: Path, mutant: Mutant) -> list[list[str]]:
    """The tests of the file itself, then those that stand for the method."""
    room, name = mutant.file.removesuffix(".py").split("/")
    step = [f"tests/training/{name}_test.py" for name in _STEP]
    if room == "training":
        return [step[:1], [file for file in step[1:] if (copy / file).exists()]]
    own = f"tests/algorithm/{name if name != 'trust_regions' else 'losses'}_test.py"
    rest = sorted(
        path.relative_to(copy).as_posix()
        for path in (copy / "tests" / "algorithm").glob("*_test.py")
    )
    return [
        [own],
        [path for path in rest if path not in (own, "tests/algorithm/docs_test.py")],
        step[:1],
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
