"""Look at completions, their tokens colored by mismatch, and at the curves of runs, on one self-contained page.

    python -m bin.view RUNDIR [RUNDIR ...] [--out FILE]
    python -m bin.view RECORDING [...] [--tokenizer DIR]            what any framework recorded, as for bin.probe

A run shows every recorded token (rollouts/) or, without a recording, its sample completions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.commands.arguments import output_file, whole
from dcmdp_jax.commands.cli import Parser
from dcmdp_jax.data.prompts import load_tokenizer, token_text
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.mismatch.columns import LeftOut, checked_row
from dcmdp_jax.lab.mismatch.formats import rows_of
from dcmdp_jax.lab.mismatch.over_training import find_files
from dcmdp_jax.observe import jsonl
from dcmdp_jax.observe.completions import Completion, completions_data
from dcmdp_jax.observe.html_page import render_page
from dcmdp_jax.observe.report import labels_of, read_run, run_figures
from dcmdp_jax.observe.report_content import report_content
from dcmdp_jax.observe.run_files import METRICS_FILE, ROLLOUTS_DIRECTORY, SAMPLES_FILE

_MOST = 2000
_PROBE_PAGE = "probe.html"


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), write the page, print where it is."""
    parser = Parser("view", description="Completions and curves on one page, without any request to anywhere.")
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="run directories, or files or directories of recordings")
    add("--out", type=output_file, default=Path("view.html"), metavar="FILE", help="default: %(default)s")
    add("--tokenizer", metavar="DIR", help="shows tokens as text (default: a run's own, else ids)")
    add(
        "--completions", type=whole(1), default=_MOST, metavar="N", help="at most, an even share (default: %(default)s)"
    )
    arguments = parser.parse_args(argv[1:])
    runs = [path for path in map(Path, arguments.paths) if (path / METRICS_FILE).is_file()]
    if runs and len(runs) < len(arguments.paths):
        raise UserError("PATH: run directories and recordings in one call; give one kind")
    for path in map(Path, arguments.paths):
        if (path / _PROBE_PAGE).is_file():
            raise UserError(f"{path}: a probe, whose own page is {path / _PROBE_PAGE}")
    content: dict[str, Any] = {"verdicts": [], "provenance": [], "problems": [], "figures": []}
    if runs:
        labels = labels_of([path.resolve() for path in runs])
        read = [read_run(path, label) for path, label in zip(runs, labels, strict=True)]
        content |= {name: value for name, value in report_content(read).items() if name in content}
        content["figures"] = run_figures(read)
        found = [each for path, label in zip(runs, labels, strict=True)
                 for each in _of_run(path, label if len(runs) > 1 else None, arguments)]  # fmt: skip
    else:
        found = list(_kept(_recorded(arguments.paths, None, _words(arguments.tokenizer)), arguments.completions))
    title = " / ".join(Path(path).resolve().name for path in arguments.paths)
    page = render_page(
        "view.html", scripts=["completions.js"] if found else [], title=title[:200],
        completions=completions_data(found), **content,
    )  # fmt: skip
    atomic_write(arguments.out, page)
    print(f"wrote {arguments.out}: {len(found):,} completions")


def _of_run(path: Path, label: str | None, arguments: Any) -> list[Completion]:
    if any((path / ROLLOUTS_DIRECTORY).glob("*.parquet")):
        own = path / "tokenizer"
        words = _words(arguments.tokenizer or (str(own) if own.is_dir() else None))
        return list(_kept(_recorded([str(path)], label, words), arguments.completions))
    return list(_kept(_samples(path, label), arguments.completions))


def _samples(path: Path, label: str | None) -> Iterator[Completion]:
    for record in jsonl.read(path / SAMPLES_FILE):
        yield Completion(
            run=label, step=record.get("step"), prompt=_text(record.get("prompt")), answer=_text(record.get("answer")),
            text=_text(record.get("completion")), reward=_number(record.get("reward")),
            discrepancy=_number(record.get("discrepancy_mean")),
        )  # fmt: skip


def _recorded(paths: list[str], label: str | None, word: Callable[[int], str]) -> Iterator[Completion]:
    left_out = LeftOut()
    for file in find_files(paths, left_out):
        for number, (place, source, columns, cells) in enumerate(rows_of(file, left_out)):
            row = checked_row(f"{file.path}, row {number}", cells, columns, left_out)
            if not len(row["token"]):
                continue
            prompt = cells.get("prompt_id")
            yield Completion(
                run=label, step=place.step, source=source, prompt="" if prompt is None else f"problem {prompt}",
                tokens=[word(token) for token in row["token"].tolist()],
                train_probs=np.exp(row["train"].astype(np.float64)),
                rollout_probs=np.exp(row["rollout"].astype(np.float64)),
                reward=_number(cells.get(columns.reward or "reward")),
                advantage=_number(row["advantage"]) if "advantage" in row else None,
            )  # fmt: skip
    if said := left_out.after("left out: "):
        print(said)


def _kept(completions: Iterator[Completion], most: int) -> Iterator[Completion]:
    """An even share of at most `most`, in bounded memory."""
    kept: list[Completion] = []
    every = 1
    for number, each in enumerate(completions):
        if number % every == 0:
            kept.append(each)
        if len(kept) > most:
            kept, every = kept[::2], 2 * every
    yield from kept


def _words(tokenizer: str | None) -> Callable[[int], str]:
    if tokenizer is None:
        return lambda token: f" {token}"
    return token_text(load_tokenizer(tokenizer))


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)


def _number(value: Any) -> float | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    try:
        return None if value is None or isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return None
