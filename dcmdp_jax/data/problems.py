"""Problems: rows of a dataset, in any of the known schemas, as one frozen struct.

A location is a local .jsonl or .parquet file, the built-in task `arithmetic:...`, a user's
function, or a dataset name on the Hugging Face Hub. The schema is recognized row by row from the
fields, so one file may mix several.
"""

import dataclasses
import importlib.util
import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dcmdp_jax.data.arithmetic import ArithmeticSpec, arithmetic_problems
from dcmdp_jax.data.mixtures import is_arithmetic, is_function, source_name, task_arguments
from dcmdp_jax.data.rows import PANDAS_INDEX, Answers, problem_from_row
from dcmdp_jax.errors import (
    UserError,
    describe_error,
    install_extra,
    one_line,
    shorten,
    suggestion,
)
from dcmdp_jax.rewards.math.answers import is_sentence
from dcmdp_jax.rewards.protocol import Problem, shown
from dcmdp_jax.user_files import load_object

_NamedRows = Iterator[tuple[str, Mapping[str, Any]]]
"""Where a row is, for messages, and the row."""

_LOG = logging.getLogger(__name__)
_FILE_SUFFIXES = (".jsonl", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?(?:@[\w.-]+)?")


def load_problems(
    location: str,
    *,
    split: str = "train",
    limit: int | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    keep_columns: bool = False,
    answers: Answers = "required",
    name: str = "",
) -> list[Problem]:
    r"""Read every problem of a dataset, in file order. Blank lines of a .jsonl file are skipped.

    Rows that are equal in prompt, answer and worked solution, and in their columns where these are
    kept, are one problem: the first. How many repeat an earlier one is logged. (DAPO-Math-17K has
    every row about 100 times.)

    Schemas: DAPO-Math-17K (`prompt` as messages or text, `reward_model.ground_truth`) and its
    `label` variant; the six benchmarks as published (AIME, AMC, MATH-500; Minerva, whose answer is
    the box in `solution`; OlympiadBench with `final_answer`, `is_multiple_answer` and `error`);
    GSM8K (`#### N`); `expected_answer`; `question` and `answer`. A whole float is its integer (27.0
    is "27"); the prompt is never searched for an answer.

    Args:
        location: path of a .jsonl or .parquet file, `arithmetic:key=value,...` (see
            `arithmetic.ArithmeticSpec`), `path.py:function,key=value,...` (see `_function_rows`),
            or a Hub name `owner/name`, with a configuration as `owner/name@config`.
        split: split of a Hub dataset; a local file is one split, and the built-in task names its
            own.
        limit: maximum number of problems to read; None for all.
        on_bad_row: handling of a malformed row, an empty prompt, or an answer that nothing could
            match: "error" stops, "skip" leaves it out, counted and logged.
        keep_columns: whether problems have `columns`, which take memory.
        answers: handling of a row without an answer.
        name: source of rows without a `data_source`, and of a built-in task; empty for the
            location's own.

    Raises:
        UserError: if the location can't be read, holds no problem, or has a bad row; the message
            starts with `path:line:` (1-based) for .jsonl and `path: row n:` (0-based) for the rest.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit = {limit}: at least 1 problem must be read, or None for all")
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"on_bad_row = {on_bad_row!r}: must be 'error' or 'skip'")
    if is_arithmetic(location):
        problems = arithmetic_problems(ArithmeticSpec.parse(location), keep_columns=keep_columns)
        problems = problems[:limit]
        return [dataclasses.replace(problem, source=name or problem.source) for problem in problems]

    unique = {}
    bad_rows = []
    repeated = 0
    source = name or source_name(location)
    for index, (row_name, row) in enumerate(_rows(location, split)):
        if limit is not None and len(unique) >= limit:
            break
        try:
            problem = problem_from_row(
                row,
                source=source,
                index=index,
                keep_columns=keep_columns,
                answers=answers,
            )
            repeated += unique.setdefault(_content(problem), problem) is not problem
        except ValueError as error:
            if on_bad_row == "error":
                raise UserError(f"{row_name}: {error}") from None
            bad_rows.append(f"{row_name}: {error}")
            _LOG.debug("skipped %s: %s", row_name, error)

    if bad_rows:
        _LOG.warning(
            "%s: %d of %d rows are unusable and left out; the first is %s",
            location,
            len(bad_rows),
            index + 1,
            bad_rows[0],
        )
    problems = list(unique.values())
    sentences = []
    if answers != "unused":
        sentences = [problem for problem in problems if is_sentence(problem.answer or "")]
    if sentences:
        _LOG.warning(
            "%s: %d of %d answers are sentences, which only the same words match; write the value "
            "alone. The first is row %d: %s",
            location,
            len(sentences),
            len(problems),
            sentences[0].index,
            shorten(sentences[0].answer),
        )
    if repeated:
        _LOG.warning(
            "%s: %d rows repeat an earlier row: %d problems",
            location,
            repeated,
            len(problems),
        )
    if not problems:
        reason = "no usable row" if bad_rows else "the file is empty"
        raise UserError(f"{location}: {reason}")
    return problems


def _content(problem: Problem) -> tuple[Any, ...]:
    """All that makes a row another problem, not the column in which pandas numbers rows."""
    columns = {name: value for name, value in problem.columns.items() if name != PANDAS_INDEX}
    columns_text = json.dumps(columns, sort_keys=True, default=repr) if columns else ""
    chat = ""
    if problem.messages or problem.completion:
        messages = problem.messages, problem.completion, problem.tools
        chat = json.dumps(messages, sort_keys=True, default=repr)
    return chat, problem.prompt, problem.answer, problem.solution, columns_text


def check_location(location: str) -> None:
    """Raise a UserError for a location that can't be read; nothing is read or fetched."""
    if not is_arithmetic(location):
        _rows(location, split="")


def _rows(location: str, split: str) -> Iterator[tuple[str, Mapping[str, Any] | bytes]]:
    """The rows of a location. What is wrong with the location itself is raised at the call."""
    if is_function(location):
        return _function_rows(location)
    path = Path(location).expanduser()
    if path.suffix in _FILE_SUFFIXES or path.exists():
        if path.suffix not in _FILE_SUFFIXES or path.is_dir():
            raise UserError(f"data {location}: not a .jsonl or .parquet file")
        if not path.is_file():
            near = suggestion(path.name, [other.name for other in path.parent.glob("*")])
            raise UserError(f"data {location}: no such file{near}")
        return _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path)
    if _HUB_NAME.fullmatch(location) and not location.startswith("."):
        if importlib.util.find_spec("datasets") is None:
            raise UserError(
                f"data {shorten(location)}: no such file, and reading it from the Hub needs the "
                f"`datasets` library: {install_extra('hub')}"
            )
        return _hub_rows(location, split)
    raise UserError(
        f"data {shorten(location)}: not a .jsonl or .parquet file here, not arithmetic:..., not "
        "path.py:function, not a Hub name owner/name"
    )


def _function_rows(location: str) -> _NamedRows:
    """Rows of a user's function, called with the location's settings, each JSON or else text."""
    name, _, settings = location.partition(",")
    function = load_object(name, "function")
    arguments: dict[str, Any] = {}
    for key, text in task_arguments(location, settings).items():
        try:
            arguments[key] = json.loads(text)
        except ValueError:
            arguments[key] = text
    try:
        for index, row in enumerate(function(**arguments)):
            if not isinstance(row, Mapping):
                raise UserError(f"gave {shown(row)} as row {index}, needs a dict")
            yield f"task {location}: row {index}", row
    except Exception as error:  # a user's function raises what it likes
        problem = str(error)
        if not isinstance(error, UserError):
            problem = describe_error(error, name.rpartition(":")[0])
        raise UserError(f"task {location}: {one_line(problem)}") from error


def _jsonl_rows(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                yield f"{path}:{number}", line


def _parquet_rows(path: Path) -> _NamedRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            repeated = [name for name in names if names.count(name) > 1]
            if repeated:
                count = names.count(repeated[0])
                raise UserError(
                    f"data {path}: {count} columns are named {shorten(repeated[0])}; rename all "
                    "but one"
                )
            index = 0
            # A million rows at once, as Python objects, take several times the file's size.
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield f"{path}: row {index}", row
                    index += 1
    except UnicodeDecodeError as error:
        raise UserError(
            f"data {path}: holds text that is not UTF-8 ({error}); write the file with UTF-8 text"
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            f"data {path}: not a readable parquet file ({str(error).splitlines()[0]})"
        ) from error


def _hub_rows(location: str, split: str) -> _NamedRows:
    import datasets

    name, _, config = location.partition("@")
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # the library raises many kinds, of network, of names and of formats
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(
            f"data {shorten(location)}, split {split!r}: not loaded from the Hub ({reason})"
        ) from error
    for index, row in enumerate(rows):
        yield f"{location}: row {index}", row
