"""False rewards and misses of the reward `math`, beside math-verify, by kind of answer.

    python -m benchmarks.grader                   # the table
    python -m benchmarks.grader --misjudged       # and each answer that was judged wrongly
    python -m benchmarks.grader --pairs FILE      # pairs of yours, in the form of grader_pairs.txt

A false reward is a wrong answer that is rewarded: what a policy learns. A miss is a right answer
that is not.
"""

import argparse
import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dcmdp_jax.rewards.math.answers import math_verify
from dcmdp_jax.rewards.math.verifier import Verifier

PAIRS = Path(__file__).with_name("grader_pairs.txt")

Grader = Callable[[Sequence[str], Sequence[str]], Sequence[float | None]]
"""Completions and their reference answers to rewards."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A reference answer with an answer that equals it and one that does not.

    Attributes:
        kind: the heading that the pair stands under.
        reference: the reference answer, in LaTeX.
        right: another spelling of it.
        wrong: an answer of another value.
    """

    kind: str
    reference: str
    right: str
    wrong: str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a grader made of the pairs of a kind.

    Attributes:
        false_rewards: wrong answers that it rewarded.
        misses: right answers that it did not reward.
        seconds: wall-clock seconds for all answers of the kind.
    """

    false_rewards: list[Pair]
    misses: list[Pair]
    seconds: float


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file: headings in brackets, and lines of three columns.

    Raises:
        ValueError: if a line has no three columns, or stands above the first heading.
    """
    kind = ""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        heading = re.fullmatch(r"\[([a-zA-Z ]+)\]", line)
        if heading:
            kind = heading[1]
            continue
        columns = re.split(r" {2,}", line)
        if len(columns) != 3 or not kind:
            raise ValueError(
                f"{path.name}, line {number}: got {line!r}, must be a reference, a right and a "
                "wrong answer with two spaces between them, below a [kind]"
            )
        reference, right, wrong = columns
        pairs.append(Pair(kind=kind, reference=reference, right=right, wrong=wrong))
    return pairs


def judge(grader: Grader, pairs: Sequence[Pair]) -> Verdict:
    """Let a grader reward the right and the wrong answer of each pair, in a box each."""
    answers = [pair.right for pair in pairs] + [pair.wrong for pair in pairs]
    completions = [rf"so the answer is $\boxed{{{answer}}}$." for answer in answers]
    references = [pair.reference for pair in pairs]

    began = time.perf_counter()
    rewards = grader(completions, references + references)
    seconds = time.perf_counter() - began

    right_rewards = rewards[: len(pairs)]
    wrong_rewards = rewards[len(pairs) :]
    return Verdict(
        false_rewards=[pair for pair, value in zip(pairs, wrong_rewards, strict=True) if value],
        misses=[pair for pair, value in zip(pairs, right_rewards, strict=True) if not value],
        seconds=seconds,
    )


def table(verdicts: dict[str, dict[str, Verdict]], counts: dict[str, int]) -> str:
    """False rewards, misses and seconds of each grader, a line for each kind and one for all.

    Args:
        verdicts: kind -> grader -> what it made of the kind's pairs.
        counts: kind -> its number of pairs.
    """
    graders = list(next(iter(verdicts.values())))
    head = "".join(f"  {name + ': false':>18} {'missed':>7} {'s':>6}" for name in graders)
    lines = [f"{'kind':<34} {'pairs':>5}{head}"]
    totals = {name: Verdict(false_rewards=[], misses=[], seconds=0.0) for name in graders}
    for kind, by_grader in verdicts.items():
        lines.append(_row(kind, counts[kind], by_grader))
        for name, verdict in by_grader.items():
            totals[name] = Verdict(
                false_rewards=totals[name].false_rewards + verdict.false_rewards,
                misses=totals[name].misses + verdict.misses,
                seconds=totals[name].seconds + verdict.seconds,
            )
    lines.append(_row("all", sum(counts.values()), totals))
    return "\n".join(lines)


def _row(kind: str, count: int, by_grader: dict[str, Verdict]) -> str:
    cells = "".join(
        f"  {len(verdict.false_rewards):>18} {len(verdict.misses):>7} {verdict.seconds:>6.1f}"
        for verdict in by_grader.values()
    )
    return f"{kind:<34} {count:>5}{cells}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="file of pairs")
    parser.add_argument(
        "--misjudged", action="store_true", help="print the answers that were judged wrongly"
    )
    arguments = parser.parse_args()
    pairs = read_pairs(arguments.pairs)
    kinds = list(dict.fromkeys(pair.kind for pair in pairs))

    with Verifier() as verifier:
        graders: dict[str, Grader] = {
            "math": lambda completions, references: verifier.grade(completions, references).rewards,
            "math-verify": math_verify,
        }
        for grader in graders.values():  # imports and workers are started before the clock
            grader([r"\boxed{x+1}"], ["1+x"])
        verdicts = {}
        counts = {}
        for kind in kinds:
            pairs_of_kind = [pair for pair in pairs if pair.kind == kind]
            counts[kind] = len(pairs_of_kind)
            verdicts[kind] = {
                name: judge(grader, pairs_of_kind) for name, grader in graders.items()
            }

    print(table(verdicts, counts))
    if arguments.misjudged:
        for kind, by_grader in verdicts.items():
            for name, verdict in by_grader.items():
                for pair in verdict.false_rewards:
                    print(f"{name}, {kind}: rewards {pair.wrong!r} for {pair.reference!r}")
                for pair in verdict.misses:
                    print(f"{name}, {kind}: misses {pair.right!r} for {pair.reference!r}")


if __name__ == "__main__":
    main()
