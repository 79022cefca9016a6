"""The worker's side of a comparison: a round of work for each line that comes in, a line of JSON
for each round.

The standard library alone: every contender's interpreter imports this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Job:
    """One worker's work.

    Attributes:
        part: "train1", "train4", "train_lora", "rl", "rl_lora" or "sampler".
        checkpoint: Hugging Face directory with weights and tokenizer.
        problems: a .jsonl file, the field "problem" a prompt of at most `prompt_tokens` tokens.
        scratch: an empty directory of the worker's own.
        parameters: of the model, to be checked.
        prompts, group: completions in a batch are their product.
        prompt_tokens, new_tokens: the most tokens of a prompt and of a completion.
        prompt_lengths: [prompts] tokens of each prompt of a train step.
        lengths: [prompts x group] tokens of each completion of a train step.
        ends: whether sampled completions may end before their limit.
        cores: threads to compute with.
        dtype: "float32" or "bfloat16": of matrix products and activations, and of a sampler's
            weights.
    """

    part: str
    checkpoint: str
    problems: str
    scratch: str
    parameters: int
    prompts: int
    group: int
    prompt_tokens: int
    new_tokens: int
    prompt_lengths: Sequence[int]
    lengths: Sequence[int]
    ends: bool
    cores: int
    dtype: str = "float32"

    @property
    def rows(self) -> int:
        """Completions in a batch."""
        return self.prompts * self.group

    @property
    def lora(self) -> bool:
        """Whether adapters of rank 16 and alpha 32 on every linear layer are trained, over a
        float32 base.
        """
        return self.part.endswith("_lora")

    @property
    def ragged(self) -> bool:
        """Whether rows have padding in a layout of one length."""
        return (
            len({*self.prompt_lengths, self.prompt_tokens}) > 1
            or len({*self.lengths, self.new_tokens}) > 1
        )

    def texts(self) -> list[str]:
        """The prompts of the problems file."""
        return [
            json.loads(line)["problem"]
            for line in Path(self.problems).read_text(encoding="utf-8").splitlines()
        ]

    def check_parameters(self, count: int) -> None:
        """Raise RuntimeError unless the contender's model has as many parameters as the others'."""
        if count != self.parameters:
            raise RuntimeError(
                f"the model has {count:,} parameters, the others' {self.parameters:,}"
            )

    def check_completions(self, completions: Iterable[Any]) -> None:
        """Raise RuntimeError unless there are as many completions as asked for, each of
        `new_tokens` tokens.

        Where they may end each has at most `new_tokens`, and some have fewer. Tunix does not count
        the end token.
        """
        lengths = [len(completion) for completion in completions]
        least, most = min(lengths, default=0), max(lengths, default=0)
        fits = least < self.new_tokens if self.ends else least == self.new_tokens
        if len(lengths) != self.rows or not fits or most > self.new_tokens:
            raise RuntimeError(
                f"{len(lengths)} completions of {least} to {most} tokens, asked for {self.rows} of "
                f"{'at most ' * self.ends}{self.new_tokens}"
            )


class Rounds:
    """Waits, blocked on a read, until a round is asked for; says afterwards how long it took.

    A contender whose loop is its own calls `boundary` between two steps; what is one call is given
    to `repeat`. Work must be finished, not only dispatched, when `boundary` is reached.
    """

    def __init__(self, answers: int) -> None:
        """Answers go to the pipe `answers`, a file descriptor; libraries print to standard
        output.
        """
        self._answers = os.fdopen(answers, "w", encoding="utf-8")
        self._began: tuple[float, float] | None = None

    def hello(self, packages: Iterable[str]) -> None:
        """The first line: the work is set up, with these versions."""
        versions = {name: importlib.metadata.version(name) for name in packages}
        self._answer({"versions": {"python": platform.python_version(), **versions}})

    def boundary(self) -> bool:
        """End the current round, if any, and wait for the next; False when there is none."""
        if self._began is not None:
            wall, cpu = self._began
            self._answer(
                {
                    "seconds": time.perf_counter() - wall,
                    "cpu_seconds": cpu_seconds() - cpu,
                    "peak_mib": peak_mib(),
                }
            )
        if not sys.stdin.readline():
            self._began = None
            return False
        self._began = time.perf_counter(), cpu_seconds()
        return True

    def repeat(self, call: Callable[[], object]) -> None:
        """A call for each round."""
        while self.boundary():
            call()

    def fail(self, error: Exception) -> None:
        """The last line: why there are no more."""
        self._answer({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})

    def _answer(self, answer: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


class Ended(Exception):
    """Leaves a trainer's own loop: no more rounds are wanted."""


def cpu_seconds() -> float:
    """Processor time of all threads of this program and, on Linux, of the processes that it started
    and that live.
    """
    ticks = 0
    for process in _children():
        # The name, in parentheses, may hold spaces; utime and stime are the 14th and 15th field.
        ticks += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _children() -> list[Path]:
    found = []
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found += [Path("/proc", child) for child in (thread / "children").read_text().split()]
    return found


def peak_mib() -> float:
    """Peak resident memory of this program, MiB; on Linux the peaks of the processes that it
    started are added.

    The kernel's VmHWM where there is one: Linux's ru_maxrss begins with the peak of the process
    that started this one.
    """
    if Path("/proc/self/status").exists():
        kib = 0
        for process in [Path("/proc/self"), *_children()]:
            lines = (process / "status").read_text().splitlines()
            kib += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
        return kib / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def work(parts: Mapping[str, Callable[[Job, Rounds], None]]) -> None:
    """The main function of a worker: its arguments are a job as JSON and the file descriptor of the
    answers.
    """
    # Should memory run out, the kernel ends this process and no other.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    job = Job(**json.loads(sys.argv[1]))
    rounds = Rounds(int(sys.argv[2]))
    try:
        parts[job.part](job, rounds)
    except Exception as error:
        rounds.fail(error)
        raise
