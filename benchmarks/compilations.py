"""How long a run compiles before its first step: one program after another, and as `dcmdp train`
does, beside the rest.

    python -m benchmarks.compilations --cores 1 2 4 16  # the demo on one H200

Or of a record of this machine:

    JAX_LOG_COMPILES=1 JAX_ENABLE_COMPILATION_CACHE=false \\
        python -m benchmarks.compilations train --config=demo 2> LOG
    python -m benchmarks.compilations --log LOG

`train` trains without threads that compile, so that LOG has what each program takes by itself. The
schedule is then simulated, the programs in the log's order: the step is compiled in a thread from
the start on, and the pass of the training stack before it. So are the engine's, on more than two
cores, in one thread for each core but one; on fewer, those that sample side by side when a call
needs them. A program takes one core; more threads than cores share these. What lies between
compilations takes no time, nor does vLLM's start, which is not in the log. `score` is taken to be
compiled for the length that it gets: one guess, right in this record.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import at_least_one
from dcmdp_jax.commands import failures, train
from dcmdp_jax.engines.local import engine, programs
from dcmdp_jax.training import step_programs

RECORDED = Path(__file__).with_name("results") / "compilations_h200.txt"
_BESIDE = ("step", "rescore", "old_logprobs")
_SAMPLING = ("prefill", "first_tokens", "decode")
_LINE = re.compile(r"Finished XLA compilation of jit\((.+)\) in ([0-9.e-]+) sec")


def compilations(log: str) -> list[tuple[str, float]]:
    """Name and seconds of each program up to the first training step, in the order of a log of
    JAX.
    """
    found = [(name, float(seconds)) for name, seconds in _LINE.findall(log)]
    names = [name for name, _ in found]
    return found[: names.index("step") + 1] if "step" in names else found


def seconds_until_compiled(names: Sequence[str], seconds: Sequence[float], cores: int) -> float:
    """Time until all programs are compiled, where the main thread takes those that no thread does,
    in order.
    """
    left = dict(enumerate(seconds))
    now = 0.0
    threads = cores - 1 if cores > 2 else 0
    calls = [names[: at + 1].count("prefill") for at in left]
    while left:
        main = min(left)
        ahead = [at for at in left if names[at] in (*_SAMPLING, *["score"] * (threads > 0))]
        active = {at for at in left if names[at] in _BESIDE} | {*ahead[:threads]}
        if main not in ahead:
            active.add(main)
        elif not threads:
            active |= {at for at in ahead if calls[at] == calls[main]}
        done = min(left[at] for at in active)
        now += done / min(1.0, cores / len(active))
        left = {
            at: value - done * (at in active)
            for at, value in left.items()
            if value > done * (at in active)
        }
    return now


def train_one_after_another() -> None:
    """`dcmdp train`, whose main thread compiles each program when it needs it."""
    step_programs.compile_beside = engine.compile_beside = lambda program, name: lambda: None
    programs.Preparation.add = lambda self, program, name: lambda: None
    failures.run_main(train.main)


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]
        train_one_after_another()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log", type=Path, default=RECORDED)
    parser.add_argument("--cores", type=at_least_one, nargs="+", default=[1, 2, 4, 16])
    options = parser.parse_args()
    if not (found := compilations(options.log.read_text())):
        parser.error(
            f"--log: {options.log} has no line of a compilation; write it with JAX_LOG_COMPILES=1"
        )
    names, seconds = zip(*found, strict=True)
    print(f"{len(names)} programs, {sum(seconds):.1f} s, the longest {max(seconds):.1f} s")
    for cores in options.cores:
        print(
            f"{cores:2} cores: beside the rest "
            f"{seconds_until_compiled(names, seconds, cores):.1f} s"
        )


if __name__ == "__main__":
    main()
