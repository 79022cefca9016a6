"""Does the probe name the right cause? Recordings with known causes, and what it calls each.

    python -m research.causes          # two minutes; prints the tables and writes kept/causes.txt

Three kinds of model: a recurrent net of random weights (made here from seeds: 8 to 10,000
completions, with and without entropies), the policy that the demo trains, and SmolLM2-135M-Instruct
(both kept by `research.causes_record`). The kept ones are also cut to few completions. A verdict is
right if a planted cause is named and no cause that was not planted; "cannot tell" is
`undetermined`, `too_few`, `unchecked` or, beside a planted defect, a price such as rounding. A
false defect is a defect that was not planted.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dcmdp_jax.probe.columns.causes import CAUSES
from dcmdp_jax.probe.columns.diagnosis import diagnose
from dcmdp_jax.probe.columns.evidence import collect
from dcmdp_jax.probe.columns.pairs import TokenPairs, make_pairs
from research.causes_record import read_kept
from research.causes_recurrent import Fault, recording

HERE = Path(__file__).parent
OUT = HERE / "kept" / "causes.txt"
NO_VERDICT = frozenset({"undetermined", "too_few", "unchecked"})

FAULTS: dict[str, tuple[Fault, frozenset[str]]] = {
    "none": (Fault(), frozenset()),
    "rounding": (Fault(rounding=0.02), frozenset()),
    "int8": (Fault(bits=8), frozenset()),
    "int4": (Fault(bits=4), frozenset()),
    "int3": (Fault(bits=3), frozenset()),
    "weights 5% off": (Fault(weights=0.05), frozenset()),
    "weights 20% off": (Fault(weights=0.2), frozenset()),
    "noise 0.5": (Fault(noise=0.5), frozenset()),
    "noise 1": (Fault(noise=1.0), frozenset()),
    "heavy noise": (Fault(noise=0.8, heavy=True), frozenset()),
    "flat start, noise 0.8": (Fault(flat=True, noise=0.8), frozenset()),
    "lags that do not matter": (Fault(bits=8, lags=((0, 0.02), (3, 0.02))), frozenset()),
    "temperature 0.9": (Fault(temperature=0.9), frozenset({"temperature"})),
    "temperature 0.7": (Fault(temperature=0.7), frozenset({"temperature"})),
    "temperature 1.3": (Fault(temperature=1.3), frozenset({"temperature"})),
    "top-p 0.95": (Fault(top_p=0.95), frozenset({"support"})),
    "top-k 5": (Fault(top_k=5), frozenset({"support"})),
    "raw, engine, 0.7": (Fault(raw="engine", temperature=0.7), frozenset({"raw_logprobs"})),
    "raw, both, 0.7": (
        Fault(raw="both", temperature=0.7, rounding=0.02),
        frozenset({"raw_logprobs"}),
    ),
    "raw, both, top-p 0.9": (
        Fault(raw="both", top_p=0.9, rounding=0.02),
        frozenset({"raw_logprobs"}),
    ),
    "re-tokenized 10%": (Fault(retokenized=0.1), frozenset({"retokenization"})),
    "other prompts": (Fault(prompts=True), frozenset({"chat_template"})),
    "stale by 4": (Fault(lags=((0, 0.01), (4, 0.3))), frozenset({"stale_weights"})),
    "int8, temperature 0.9": (Fault(bits=8, temperature=0.9), frozenset({"temperature"})),
    "int4, temperature 0.9": (Fault(bits=4, temperature=0.9), frozenset({"temperature"})),
    "int4, top-p 0.95": (Fault(bits=4, top_p=0.95), frozenset({"support"})),
    "int8, re-tokenized 5%": (Fault(bits=8, retokenized=0.05), frozenset({"retokenization"})),
    "top-p 0.9, temperature 0.8": (
        Fault(top_p=0.9, temperature=0.8),
        frozenset({"support", "temperature"}),
    ),
    "other prompts, re-tokenized 20%": (
        Fault(prompts=True, retokenized=0.2),
        frozenset({"chat_template", "retokenization"}),
    ),
    "temperature 1.3, re-tokenized 20%": (
        Fault(temperature=1.3, retokenized=0.2),
        frozenset({"temperature", "retokenization"}),
    ),
    "repetition penalty 1.1": (Fault(penalty=1.1), frozenset({"penalty"})),
    "rounding, repetition penalty 1.05": (
        Fault(rounding=0.02, penalty=1.05),
        frozenset({"penalty"}),
    ),
    "one place late": (Fault(shifted=1), frozenset({"misaligned"})),
    "int8, two places late": (Fault(bits=8, shifted=2), frozenset({"misaligned"})),
    "rounding, the last two are 0": (Fault(rounding=0.02, padded=2), frozenset({"filled"})),
    "int4, the last four are 0": (Fault(bits=4, padded=4), frozenset({"filled"})),
    "rows exchanged": (Fault(exchanged=0.1), frozenset({"misaligned"})),
    "int8, every row exchanged": (Fault(bits=8, exchanged=1.0), frozenset({"misaligned"})),
}
SIZES = (3, 12, 60, 400)
LARGE = (
    "none",
    "int8",
    "int4",
    "weights 5% off",
    "noise 1",
    "temperature 0.9",
    "top-p 0.95",
    "re-tokenized 10%",
)

KEPT: dict[str, frozenset[str]] = {
    "exact": frozenset(),
    "bfloat16": frozenset(),
    "int8": frozenset(),
    "int4": frozenset(),
    "fp8 cache": frozenset(),
    "weights 5% off": frozenset(),
    "weights of step 8": frozenset({"stale_weights"}),
    "temperature 0.7": frozenset({"temperature"}),
    "temperature 0.8": frozenset({"temperature"}),
    "temperature 0.9": frozenset({"temperature"}),
    "temperature 1.2": frozenset({"temperature"}),
    "temperature 1.3": frozenset({"temperature"}),
    "int4, temperature 0.8": frozenset({"temperature"}),
    "int8, temperature 0.9": frozenset({"temperature"}),
    "top-p 0.9": frozenset({"support"}),
    "top-p 0.95": frozenset({"support"}),
    "int8, top-p 0.9": frozenset({"support"}),
    "int4, top-p 0.95": frozenset({"support"}),
    "top-p 0.9, temperature 0.8": frozenset({"support", "temperature"}),
    "raw, engine": frozenset({"raw_logprobs"}),
    "raw, both": frozenset({"raw_logprobs"}),
    "bfloat16, raw, both": frozenset({"raw_logprobs"}),
    "int8, re-tokenized": frozenset({"retokenization"}),
    "other prompts": frozenset({"chat_template"}),
}
"""Kept recording -> the defects planted in it."""


class Case(NamedTuple):
    """A recording: model, what was planted, the defects that may be named, and its tokens."""

    model: str
    name: str
    planted: frozenset[str]
    pairs: TokenPairs


class Verdict(NamedTuple):
    """What the probe said of a case."""

    case: Case
    named: tuple[str, ...]

    @property
    def defects(self) -> frozenset[str]:
        """The defects among the causes named."""
        return frozenset(cause for cause in self.named if CAUSES[cause].defect)

    @property
    def false(self) -> frozenset[str]:
        """Defects that were not planted; tokens from a cooler or cut distribution are also from a
        sharper one.
        """
        sharp = self.case.planted & {"temperature", "support", "raw_logprobs"}
        allowed = self.case.planted | ({"sharper"} if sharp else set())
        return self.defects - allowed

    @property
    def outcome(self) -> str:
        """One of `OUTCOMES`."""
        if self.false:
            return "false defect"
        if self.defects:
            some = "one of two" if self.defects & self.case.planted else "sharper"
            return "named" if self.defects >= self.case.planted else some
        if self.named[0] in NO_VERDICT:
            return "cannot tell"
        return "missed" if self.case.planted else "named"


OUTCOMES = ("named", "one of two", "sharper", "cannot tell", "missed", "false defect")


def recurrent(sizes: Sequence[int] = SIZES, *, seed: int = 0) -> Iterator[Case]:
    """Every fault at these numbers of completions, every second one without entropies."""
    for place, (name, (fault, planted)) in enumerate(FAULTS.items()):
        for number, size in enumerate(sizes):
            entropies = (place + number + seed) % 2 == 0
            # Two stacks that leave the temperature out agree: without entropies nothing can show
            # it.
            visible = planted if entropies or fault.raw != "both" else frozenset()
            pairs = recording(
                fault, size, seed=1000 * seed + 10 * place + number, entropies=entropies
            )
            yield Case(
                "recurrent", f"{name}{'' if entropies else ', no entropies'}", visible, pairs
            )


def large() -> Iterator[Case]:
    """Some of them with 10,000 completions."""
    for name in LARGE:
        fault, planted = FAULTS[name]
        yield Case("recurrent", name, planted, recording(fault, 10_000, seed=77))


def kept() -> Iterator[Case]:
    """The recordings of real models: whole, without entropies, and 10 completions of each."""
    for model in ("demo", "smollm2"):
        for name, pairs in read_kept(HERE / "kept" / f"causes_{model}.npz").items():
            planted = KEPT[name]
            yield Case(model, name, planted, pairs)
            blind = frozenset() if "raw, both" in name else planted
            yield Case(
                model,
                f"{name}, no entropies",
                blind,
                make_pairs(*_columns(pairs, len(pairs.lengths))[:3]),
            )
            columns = _columns(pairs, 10)
            yield Case(model, name, planted, make_pairs(*columns[:3], entropies=columns[3]))


def _columns(pairs: TokenPairs, count: int) -> list[list[np.ndarray]]:
    bounds = np.cumsum(pairs.lengths)[:-1]
    cells = (pairs.token_ids, pairs.train_logprobs, pairs.rollout_logprobs, pairs.entropies)
    return [np.split(values, bounds)[:count] for values in cells]


def judge(case: Case) -> Verdict:
    """What the probe names from the columns alone."""
    return Verdict(case, tuple(finding.cause for finding in diagnose(collect(case.pairs))))


def tables(verdicts: Sequence[Verdict]) -> str:
    """The confusion table and the outcomes by size, in Markdown."""
    said = sorted({cause for v in verdicts for cause in v.named}, key=list(CAUSES).index)
    rows: dict[str, Counter[str]] = {}
    totals: Counter[str] = Counter()
    for verdict in verdicts:
        label = " + ".join(sorted(verdict.case.planted)) or "no defect"
        rows.setdefault(label, Counter()).update(verdict.named)
        totals[label] += 1
    header = ["planted", "recordings", *(f"`{cause}`" for cause in said)]
    lines = [_row(header), _row(["---"] * len(header))]
    lines += [
        _row([label, str(totals[label]), *(str(rows[label][c] or "") for c in said)])
        for label in sorted(rows, key=lambda each: (each != "no defect", each.count("+"), each))
    ]
    lines += [
        "",
        _row(["completions", "recordings", *OUTCOMES]),
        _row(["---"] * (2 + len(OUTCOMES))),
    ]
    for low, high in ((0, 8), (8, 50), (50, 300), (300, 20_000)):
        some = Counter(v.outcome for v in verdicts if low <= len(v.case.pairs.lengths) < high)
        if some:
            bounds = (
                f"below {high}"
                if not low
                else f"{low} to {high - 1:,}"
                if high < 20_000
                else f"from {low} on"
            )
            lines.append(
                _row([bounds, str(some.total()), *(str(some[outcome]) for outcome in OUTCOMES)])
            )
    false = [v for v in verdicts if v.false]
    lines += [
        "",
        f"{len(verdicts)} recordings, false defects {len(false)} "
        f"({len(false) / len(verdicts):.1%}).",
    ]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Judge all recordings, print the tables, write them into a file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FILE", help="default: research/kept/causes.txt"
    )
    arguments = parser.parse_args()
    verdicts = []
    for cases in (kept(), recurrent(), recurrent((30, 150), seed=1), large()):
        for case in cases:
            verdicts.append(judge(case))
            if verdicts[-1].outcome not in ("named", "cannot tell"):
                where = f"{case.model}, {case.name}, {len(case.pairs.lengths)} completions"
                print(
                    f"{verdicts[-1].outcome}: {where}: {', '.join(verdicts[-1].named)}", flush=True
                )
    written = tables(verdicts)
    print(written)
    arguments.out.write_text(f"{written}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
