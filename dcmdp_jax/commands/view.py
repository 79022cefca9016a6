"""Look at completions, their tokens colored by mismatch, on one self-contained page.

    dcmdp view RUNDIR [RUNDIR ...] [--out DIR]
    # What any framework recorded, as for `dcmdp probe`:
    dcmdp view RECORDING [...] [--tokenizer DIR]
    # The completions of an evaluation, or of those in a DIR:
    dcmdp view evaluation-NAME.problems.jsonl

A run shows every recorded token (rollouts/) or, without a recording, its sample completions.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.commands import parsers
from dcmdp_jax.data.tokenizer import load_tokenizer, token_text
from dcmdp_jax.errors import UserError
from dcmdp_jax.observe import jsonl, report
from dcmdp_jax.observe.page_kit import MOST_LISTED, Completion, completions_data, render_page
from dcmdp_jax.probe.columns import formats, over_training, recording, recording_files

_PAGE_FILE = "view.html"
_EVALUATION = ".problems.jsonl"


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), write the page, print where it is."""
    arguments = parsers.view().parse_args(argv[1:])
    paths = []
    for path in map(Path, arguments.paths):
        paths += _evaluations_in(path) or [path]
    runs = [path for path in paths if (path / jsonl.METRICS_FILE).is_file()]
    if runs and len(runs) < len(paths):
        raise UserError("PATH: run directories and recordings in one call; give one kind")
    out = arguments.out
    if out is None:
        out = runs[0] if len(runs) == 1 else Path("view")
    if out.suffix == ".html":
        raise UserError(
            f"--out: got {out}, a directory is written; name one, {_PAGE_FILE} goes into it"
        )

    if runs:
        labels = [None]
        if len(runs) > 1:
            labels = report.labels_of([path.resolve() for path in runs])
        sources = [
            _of_run(run, label, arguments.tokenizer)
            for run, label in zip(runs, labels, strict=True)
        ]
    elif all(path.name.endswith(_EVALUATION) for path in paths):
        sources = [_evaluated(paths)]
    else:
        sources = [_recorded(arguments.paths, None, arguments.tokenizer)]
    completions = []
    for source in sources:
        completions += _even_share(source, arguments.completions)
    if not completions:
        raise UserError(f"{paths[0]}: holds no completions yet")

    data = completions_data(completions)
    title = " / ".join(path.resolve().name for path in paths)
    page = render_page(_PAGE_FILE, scripts=["completions.js"], title=title[:200], completions=data)
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / _PAGE_FILE, page)
    print(f"wrote {out / _PAGE_FILE}: {len(data['rows']) + data['left_out']:,} completions")


def _evaluations_in(path: Path) -> list[Path]:
    """The lines of the evaluations in a directory that holds nothing else to look at."""
    if (path / jsonl.METRICS_FILE).exists() or (path / jsonl.ROLLOUTS_DIRECTORY).exists():
        return []
    return sorted(path.glob(f"*{_EVALUATION}"))


def _of_run(path: Path, label: str | None, tokenizer: str | None) -> Iterator[Completion]:
    if not any((path / jsonl.ROLLOUTS_DIRECTORY).glob("*.parquet")):
        return _samples(path, label)
    saved = path / "tokenizer"
    if not tokenizer and saved.is_dir():
        tokenizer = str(saved)
    return _recorded([str(path)], label, tokenizer)


def _samples(path: Path, label: str | None) -> Iterator[Completion]:
    for record in jsonl.read(path / jsonl.SAMPLES_FILE):
        yield Completion(
            run=label,
            step=record.get("step"),
            prompt=_text(record.get("prompt")),
            answer=_text(record.get("answer")),
            text=_text(record.get("completion")),
            reward=_number(record.get("reward")),
            discrepancy=_number(record.get("discrepancy_mean")),
        )


def _evaluated(paths: list[Path]) -> Iterator[Completion]:
    for path in paths:
        path.stat()  # what does not exist is an error here, and no file without records
        for record in jsonl.read(path):
            columns = [record.get(name) for name in ("completions", "scores", "found")]
            texts = columns[0]
            if texts is None:  # no problem's line
                continue
            if not all(isinstance(cell, list) and len(cell) == len(texts) for cell in columns):
                raise UserError(
                    f"{path}: a problem's completions, scores and found are not lists of one length"
                )
            for text, score, extracted in zip(*columns, strict=True):
                yield Completion(
                    source=_text(record.get("task")),
                    prompt=_text(record.get("prompt")),
                    answer=_text(record.get("answer")),
                    extracted_answer=_text(extracted),
                    text=_text(text),
                    reward=_number(score),
                )


def _recorded(paths: list[str], label: str | None, tokenizer: str | None) -> Iterator[Completion]:
    """Completions whose tokens were recorded, as text by a tokenizer, or as ids without one."""
    if tokenizer is None:
        word = " {}".format

        def decode(ids: tuple[int, ...]) -> str:
            return "".join(map(word, ids))

    else:
        loaded = load_tokenizer(tokenizer)
        word = token_text(loaded)
        # The rows of a group have one prompt.
        decode = functools.cache(loaded.decode)

    left_out = recording_files.LeftOut()
    files = over_training.find_files(paths, left_out)
    for read in formats.rows_of(files, left_out):
        row = recording.checked_row(
            read.where,
            read.cells,
            read.columns,
            left_out,
            keep_lists=True,
        )
        if not len(row["token"]):
            continue

        top = None
        if recording.LISTS[0] in row:
            states = zip(*(row[name] for name in recording.LISTS), strict=True)
            top = [_top_tokens(word, *state) for state in states]
        yield Completion(
            run=label,
            step=read.step_rank.step,
            source=read.source,
            prompt=_prompt(read.cells, decode),
            tokens=list(map(word, row["token"].tolist())),
            train_probs=np.exp(row["train"].astype(np.float64)),
            rollout_probs=np.exp(row["rollout"].astype(np.float64)),
            top=top,
            reward=_number(read.cells.get("reward")),
            advantage=_advantage(read.cells),
        )
    skipped = left_out.after("left out: ")
    if skipped:
        print(skipped)


def _prompt(cells: dict[str, Any], decode: Callable[[tuple[int, ...]], str]) -> str:
    """The prompt of a recorded row: its tokens if recorded, else the number of its problem."""
    ids = cells.get("prompt_token_ids")
    number = cells.get("prompt_id")
    if ids is not None:
        return decode(tuple(np.asarray(ids).tolist()))
    if number is None:
        return ""
    return f"problem {number}"


def _top_tokens(
    word: Callable[[int], str],
    ids: np.ndarray,
    train_logprobs: np.ndarray,
    rollout_logprobs: np.ndarray,
) -> list[tuple[str, float, float]]:
    """Text, p and q of the first of the engine's top-k tokens in a state."""
    count = min(MOST_LISTED, (ids >= 0).sum())
    texts = map(word, ids[:count].tolist())
    p = np.exp(train_logprobs[:count]).tolist()
    q = np.exp(rollout_logprobs[:count]).tolist()
    return list(zip(texts, p, q, strict=True))


def _even_share(completions: Iterator[Completion], limit: int) -> list[Completion]:
    """An even share of at most `limit`, in bounded memory."""
    share = []
    stride = 1
    for number, completion in enumerate(completions):
        if number % stride == 0:
            share.append(completion)
        if len(share) > limit:
            share = share[::2]
            stride *= 2
    return share


def _advantage(cells: dict[str, Any]) -> float | None:
    """A completion's advantage: where each token has one, their mean.

    Zeros are left out, as prompt and padding have them, unless all are 0.
    """
    cell = cells.get("advantage", cells.get("advantages"))
    if not isinstance(cell, list | np.ndarray):
        return _number(cell)
    values = [number for number in map(_number, cell) if number is not None]
    if not values:
        return None
    nonzero = [value for value in values if value]
    return float(np.mean(nonzero or values))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(value)


def _number(value: Any) -> float | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, int | float | np.number):
        return None
    return float(value)
