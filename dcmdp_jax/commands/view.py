"""Look at completions, their tokens colored by mismatch, on one self-contained page.

    dcmdp view RUNDIR [RUNDIR ...] [--out DIR]
    dcmdp view RECORDING [...] [--tokenizer DIR]  what any framework recorded, as for `dcmdp probe`
    dcmdp view evaluation-NAME.problems.jsonl     the completions of an evaluation, or of those in a
                                                  DIR

A run shows every recorded token (rollouts/) or, without a recording, its sample completions.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.commands.cli import Parser, output_directory, whole
from dcmdp_jax.data.tokenizer import load_tokenizer, token_text
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.mismatch import formats, over_training, recording, recording_files
from dcmdp_jax.observe import jsonl, report
from dcmdp_jax.observe.page_kit import MOST_LISTED, Completion, completions_data, render_page

_MOST = 2000
_PAGE_FILE = "view.html"
_EVALUATION = ".problems.jsonl"


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), write the page, print where it is."""
    parser = Parser("view", description="Completions on one page, without any request to anywhere.")
    add = parser.add_argument
    add(
        "paths",
        nargs="+",
        metavar="PATH",
        help="run directories, recordings, or an evaluation's lines",
    )
    add(
        "--out",
        type=output_directory,
        metavar="DIR",
        help="where to write (default: a run's own; else view/)",
    )
    add("--tokenizer", metavar="DIR", help="shows tokens as text (default: a run's own, else ids)")
    add(
        "--completions",
        type=whole(1),
        default=_MOST,
        metavar="N",
        help="at most, evenly (default: %(default)s)",
    )
    arguments = parser.parse_args(argv[1:])
    paths = [
        each for path in arguments.paths for each in _evaluations_in(Path(path)) or [Path(path)]
    ]
    runs = [path for path in paths if (path / jsonl.METRICS_FILE).is_file()]
    if runs and len(runs) < len(paths):
        raise UserError("PATH: run directories and recordings in one call; give one kind")
    out = arguments.out or (runs[0] if len(runs) == 1 else Path("view"))
    if out.suffix == ".html":
        raise UserError(
            f"--out: got {out}, a directory is written; name one, {_PAGE_FILE} goes into it"
        )
    if runs:
        labels = report.labels_of([path.resolve() for path in runs]) if len(runs) > 1 else [None]
        sources = [
            _of_run(run, label, arguments.tokenizer)
            for run, label in zip(runs, labels, strict=True)
        ]
    elif all(path.name.endswith(_EVALUATION) for path in paths):
        sources = [_evaluated(paths)]
    else:
        sources = [_recorded(arguments.paths, None, arguments.tokenizer)]
    found = [each for source in sources for each in _kept(source, arguments.completions)]
    if not found:
        raise UserError(f"{paths[0]}: holds no completions yet")
    data = completions_data(found)
    title = " / ".join(path.resolve().name for path in paths)
    page = render_page(_PAGE_FILE, scripts=["completions.js"], title=title[:200], completions=data)
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / _PAGE_FILE, page)
    print(f"wrote {out / _PAGE_FILE}: {len(data['rows']) + data['left_out']:,} completions")


def _evaluations_in(path: Path) -> list[Path]:
    """The lines of the evaluations in a directory that holds nothing else to look at."""
    is_run = any((path / name).exists() for name in (jsonl.METRICS_FILE, jsonl.ROLLOUTS_DIRECTORY))
    return [] if is_run else sorted(path.glob(f"*{_EVALUATION}"))


def _of_run(path: Path, label: str | None, tokenizer: str | None) -> Iterator[Completion]:
    if any((path / jsonl.ROLLOUTS_DIRECTORY).glob("*.parquet")):
        own = path / "tokenizer"
        return _recorded([str(path)], label, tokenizer or (str(own) if own.is_dir() else None))
    return _samples(path, label)


def _samples(path: Path, label: str | None) -> Iterator[Completion]:
    for record in jsonl.read(path / jsonl.SAMPLES_FILE):
        prompt, answer, text = (
            _text(record.get(name)) for name in ("prompt", "answer", "completion")
        )
        reward, discrepancy = (_number(record.get(name)) for name in ("reward", "discrepancy_mean"))
        yield Completion(
            run=label,
            step=record.get("step"),
            prompt=prompt,
            answer=answer,
            text=text,
            reward=reward,
            discrepancy=discrepancy,
        )


def _evaluated(paths: list[Path]) -> Iterator[Completion]:
    for path in paths:
        path.stat()  # what does not exist is an error here, and no file without records
        for record in jsonl.read(path):
            columns = [record.get(name) for name in ("completions", "scores", "found")]
            if columns[0] is None:  # no problem's line
                continue
            if not all(isinstance(each, list) and len(each) == len(columns[0]) for each in columns):
                raise UserError(
                    f"{path}: a problem's completions, scores and found are not lists of one length"
                )
            for text, score, found in zip(*columns, strict=True):
                task, prompt, answer = (
                    _text(record.get(name)) for name in ("task", "prompt", "answer")
                )
                yield Completion(
                    source=task,
                    prompt=prompt,
                    answer=answer,
                    extracted_answer=_text(found),
                    text=_text(text),
                    reward=_number(score),
                )


def _recorded(paths: list[str], label: str | None, tokenizer: str | None) -> Iterator[Completion]:
    """Completions whose tokens were recorded, as text by a tokenizer, or as ids without one."""
    left_out = recording_files.LeftOut()
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    word = (lambda token: f" {token}") if loaded is None else token_text(loaded)
    decode = functools.cache(
        (lambda ids: "".join(map(word, ids))) if loaded is None else loaded.decode
    )
    for file in over_training.find_files(paths, left_out):
        for number, (place, source, columns, cells) in enumerate(formats.rows_of(file, left_out)):
            row = recording.checked_row(
                f"{file.path}, row {number}", cells, columns, left_out, keep_lists=True
            )
            if not len(row["token"]):
                continue
            yield Completion(
                run=label,
                step=place.step,
                source=source,
                prompt=_prompt(cells, decode),
                tokens=list(map(word, row["token"].tolist())),
                train_probs=np.exp(row["train"].astype(np.float64)),
                rollout_probs=np.exp(row["rollout"].astype(np.float64)),
                top=[
                    _likeliest(word, *state)
                    for state in zip(*(row[name] for name in recording.LISTS), strict=True)
                ]
                if recording.LISTS[0] in row
                else None,
                reward=_number(cells.get("reward")),
                advantage=_advantage(cells),
            )
    if said := left_out.after("left out: "):
        print(said)


def _prompt(cells: dict[str, Any], decode: Callable[[tuple[int, ...]], str]) -> str:
    """The prompt of a recorded row: its tokens where they were recorded, else the number of its
    problem.
    """
    ids = cells.get("prompt_token_ids")
    number = cells.get("prompt_id")
    if ids is not None:
        return decode(tuple(np.asarray(ids).tolist()))
    return "" if number is None else f"problem {number}"


def _likeliest(
    word: Callable[[int], str], ids: np.ndarray, *logprobs: np.ndarray
) -> list[tuple[str, float, float]]:
    """Text, p and q of the first of the engine's likeliest tokens in a state."""
    shown = slice(0, min(MOST_LISTED, int((ids >= 0).sum())))
    return list(
        zip(
            map(word, ids[shown].tolist()),
            *(np.exp(x[shown]).tolist() for x in logprobs),
            strict=True,
        )
    )


def _kept(completions: Iterator[Completion], most: int) -> Iterator[Completion]:
    """An even share of at most `most`, in bounded memory."""
    kept: list[Completion] = []
    every = 1
    for number, each in enumerate(completions):
        if number % every == 0:
            kept.append(each)
        if len(kept) > most:
            kept = kept[::2]
            every = 2 * every
    yield from kept


def _advantage(cells: dict[str, Any]) -> float | None:
    """A completion's advantage; the mean over tokens where each has one, without the 0 of prompt
    and padding.
    """
    cell = cells.get("advantage", cells.get("advantages"))
    values = [_number(each) for each in (cell if isinstance(cell, list | np.ndarray) else [cell])]
    known = [value for value in values if value is not None]
    return float(np.mean([value for value in known if value] or known)) if known else None


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _number(value: Any) -> float | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, int | float | np.number) else None
