"""Problems: rows of a dataset, in any of the known schemas, as one frozen struct.

A location is a local .jsonl or .parquet file, a built-in task (`arithmetic:...`), or a dataset name on the Hugging Face
Hub. The schema is recognized row by row from the fields, so one file may mix several.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import describe_digit, foreign_digit, shorten, shorten_name
from dcmdp_jax.rewards.math.answers import answer_defect, last_boxed, split_elements
from dcmdp_jax.rewards.math.numbers import parse_number
from dcmdp_jax.rewards.protocol import Problem

_LOG = logging.getLogger(__name__)
_FILE_SUFFIXES = (".jsonl", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?(?:@[\w.-]+)?")
_PROMPT_FIELDS = ("prompt", "problem", "question")
# Arguments of reward functions, and as in TRL the fields that these come from.
_NO_COLUMNS = ("prompt", "completion", "prompts", "completions", "completion_ids")
_PANDAS_INDEX = "__index_level_0__"
_ANSWER_FIELDS = ("reward_model", "label", "final_answer", "expected_answer", "ground_truth", "answer", "solution")


def load_problems(
    location: str,
    *,
    split: str = "train",
    limit: int | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    keep_columns: bool = False,
) -> list[Problem]:
    r"""Read every problem of a dataset, in file order. Blank lines of a .jsonl file are skipped.

    Rows that are equal in prompt, answer and worked solution, and in their columns where these are kept, are one
    problem: the first. How many repeat an earlier one is logged. (DAPO-Math-17K has every row about 100 times.)

    Schemas: DAPO-Math-17K (`prompt` as messages or text, `reward_model.ground_truth`) and its `label` variant; the six
    benchmarks as published (AIME, AMC, MATH-500; Minerva, whose answer is the box in `solution`; OlympiadBench with
    `final_answer`, `is_multiple_answer` and `error`); GSM8K (`#### N`); `expected_answer`; `question` and `answer`. A
    whole float is its integer (27.0 is "27"); the prompt is never searched for an answer.

    Args:
        location: path of a .jsonl or .parquet file, `arithmetic:key=value,...` (see `arithmetic.ArithmeticSpec`), or a
            Hub name `owner/name`, with a configuration as `owner/name@config`.
        split: split of a Hub dataset; a local file is one split, and the built-in task names its own.
        limit: maximum number of problems to read; None for all.
        on_bad_row: handling of a malformed row, an empty prompt, or an answer that nothing could match: "error" stops,
            "skip" leaves it out, counted and logged.
        keep_columns: whether problems have `columns`, which take memory.

    Raises:
        UserError: if the location can't be read, holds no problem, or has a bad row; the message starts with
            `path:line:` (1-based) for .jsonl and `path: row n:` (0-based) for the rest.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit = {limit}: at least 1 problem must be read, or None for all")
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"on_bad_row = {on_bad_row!r}: must be 'error' or 'skip'")
    if location.partition(":")[0] == "arithmetic":
        from dcmdp_jax.data.arithmetic import arithmetic_problems, parse_spec

        return arithmetic_problems(parse_spec(location), keep_columns=keep_columns)[:limit]
    problems: dict[tuple[Any, ...], Problem] = {}
    skipped = repeated = 0
    source = source_name(location)
    for index, (place, row) in enumerate(_rows(location, split)):
        if limit is not None and len(problems) >= limit:
            break
        try:
            problem = problem_from_row(row, source=source, index=index, keep_columns=keep_columns)
            repeated += problems.setdefault(_content(problem), problem) is not problem
        except ValueError as error:
            if on_bad_row == "error":
                raise UserError(f"{place}: {error}") from None
            skipped += 1
            _LOG.debug("skipped %s: %s", place, error)
    if skipped:
        _LOG.warning("%s: %d of %d rows are unusable and left out", location, skipped, index + 1)
    if repeated:
        _LOG.warning("%s: %d rows repeat an earlier row: %d problems", location, repeated, len(problems))
    if not problems:
        raise UserError(f"{location}: no usable row" if skipped else f"{location}: the file is empty")
    return list(problems.values())


def split_locations(text: str) -> list[str]:
    """Locations joined by commas. A comma before `key=value` belongs to the arithmetic task it continues."""
    locations: list[str] = []
    for part in text.split(","):
        continues = "=" in part and not part.strip().startswith("arithmetic")
        if continues and locations and locations[-1].startswith("arithmetic"):
            locations[-1] += f",{part}"
        else:
            locations.append(part.strip())
    return locations


def source_name(location: str) -> str:
    """Default `source` of a location's problems: the file's name without suffix, or "arithmetic"."""
    return Path(location.partition(":")[0]).stem


def problem_from_row(
    row: Mapping[str, Any] | str | bytes, *, source: str, index: int, keep_columns: bool = False
) -> Problem:
    """Make a problem from one row.

    Args:
        row: the row's fields, or its JSON text.
        source: name to use where the row has no `data_source`.
        index: 0-based row number.
        keep_columns: whether the problem has `columns`.

    Raises:
        UserError: if the row is no JSON object, its schema is unknown, its prompt is empty, or nothing could match its
            answer.
    """
    if not isinstance(row, Mapping):
        row = _parse_json(row)
    context, prompt = _prompt(row)
    answer, solution = _answer(row)
    defect = answer_defect(answer)
    if defect is not None:
        raise UserError(f"the answer {defect}: {shorten(answer)}" if answer else f"the answer {defect}")
    if (digit := foreign_digit(answer)) is not None:
        raise UserError(f"the answer {shorten(answer)} has the digit {describe_digit(digit)}")
    if any("\ud800" <= character <= "\udfff" for character in prompt + answer):
        raise UserError("holds half of a surrogate pair, which is no character")
    if row.get("context"):
        prompt = f"{row['context']}\n\n{prompt}"
    data_source = row.get("data_source")
    return Problem(
        prompt=prompt,
        answer=answer,
        source=data_source if isinstance(data_source, str) and data_source else source,
        index=index,
        context=context,
        solution=solution,
        columns={name: row[name] for name in row if name not in _NO_COLUMNS} if keep_columns else {},
    )


def _content(problem: Problem) -> tuple[Any, ...]:
    """All that makes a row another problem. pandas numbers rows in a column of its own, which does not."""
    columns = {name: value for name, value in problem.columns.items() if name != _PANDAS_INDEX}
    described = json.dumps(columns, sort_keys=True, default=repr) if columns else ""
    return problem.context, problem.prompt, problem.answer, problem.solution, described


def _rows(location: str, split: str) -> Iterator[tuple[str, Mapping[str, Any] | bytes]]:
    path = Path(location).expanduser()
    if path.suffix in _FILE_SUFFIXES or path.exists():
        if path.suffix not in _FILE_SUFFIXES or path.is_dir():
            raise UserError(f"data {location}: not a .jsonl or .parquet file")
        if not path.is_file():
            raise UserError(f"data {location}: no such file")
        return _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path)
    if _HUB_NAME.fullmatch(location) and not location.startswith("."):
        return _hub_rows(location, split)
    raise UserError(
        f"data {shorten(location)}: not a .jsonl or .parquet file here, not arithmetic:..., not a Hub name owner/name"
    )


def _jsonl_rows(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                yield f"{path}:{number}", line


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    index = 0
    try:
        with pq.ParquetFile(path) as file:
            # In parts: a million rows as Python objects take several times the file's size.
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield f"{path}: row {index}", row
                    index += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"data {path}: not a readable parquet file ({str(error).splitlines()[0]})") from error


def _hub_rows(location: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"data {shorten(location)}: no such file, and reading it from the Hub needs the `datasets` library: "
            "pip install -e '.[hub]'"
        ) from None
    name, _, config = location.partition("@")
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # the library raises many kinds, of network, of names and of formats
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"data {shorten(location)}, split {split!r}: not loaded from the Hub ({reason})") from error
    for index, row in enumerate(rows):
        yield f"{location}: row {index}", row


def _parse_json(text: str | bytes) -> Mapping[str, Any]:
    if not text.strip():
        raise UserError("the row is empty")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError:
        raise UserError("not valid UTF-8") from None
    except RecursionError:
        raise UserError("nested too deeply") from None
    if not isinstance(row, dict):
        raise UserError(f"the row is a JSON {type(row).__name__}, not an object")
    return row


def _prompt(row: Mapping[str, Any]) -> tuple[tuple[tuple[str, str], ...], str]:
    field = next((name for name in _PROMPT_FIELDS if row.get(name) is not None), None)
    if field is None:
        raise UserError(f"no prompt in any of the fields {', '.join(_PROMPT_FIELDS)}; {_describe_fields(row)}")
    value = row[field]
    context: tuple[tuple[str, str], ...] = ()
    if isinstance(value, list):
        messages = []
        for message in value:
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(k), str) for k in ("role", "content")
            ):
                raise UserError(f"field {field!r}: every message needs a role and a content that are text")
            messages.append((message["role"], message["content"]))
        if not messages or messages[-1][0] != "user":
            raise UserError(f"field {field!r}: the last message must be the user's")
        context, value = tuple(messages[:-1]), messages[-1][1]
    if not isinstance(value, str):
        raise UserError(f"field {field!r} is {type(value).__name__}, not text or a list of messages")
    if not value.strip():
        raise UserError("the prompt is empty")
    return context, value


def _answer(row: Mapping[str, Any]) -> tuple[str, str]:
    """The reference answer and, where the row has one, a worked solution."""
    field = next((name for name in _ANSWER_FIELDS if row.get(name) is not None), None)
    if field is None:
        raise UserError(f"no answer in any of the fields {', '.join(_ANSWER_FIELDS)}; {_describe_fields(row)}")
    value, solution = row[field], _solution(row)
    if field == "reward_model":
        if not isinstance(value, Mapping) or value.get("ground_truth") is None:
            raise UserError("field 'reward_model' has no ground_truth")
        value = value["ground_truth"]
    elif field == "final_answer":
        value = _olympiad_answer(row)
    elif field == "solution":
        value = last_boxed(solution)
        if value is None:
            raise UserError(r"no answer field, and no \boxed{} in the solution")
    elif field == "answer" and isinstance(value, str) and "####" in value:
        solution, _, value = value.rpartition("####")
    return _answer_text(value, field), solution.strip()


def _describe_fields(row: Mapping[str, Any]) -> str:
    """The fields that a row has, null ones aside, for an error about those it lacks."""
    found = [name for name in row if row[name] is not None]
    return f"the row has {shorten_name(', '.join(map(str, found)))}" if found else "the row has none"


def _solution(row: Mapping[str, Any]) -> str:
    value = row.get("solution") or row.get("reference_solution") or ""
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, str) else ""


def _answer_text(value: Any, field: str) -> str:
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"field {field!r}: an answer must be text or a finite number, not {shorten(value)}")


def _olympiad_answer(row: Mapping[str, Any]) -> Any:
    answers = row["final_answer"]
    if not isinstance(answers, list) or len(answers) != 1 or not isinstance(answers[0], str):
        raise UserError(f"field 'final_answer' must be a list of one text, not {shorten(answers)}")
    answer = answers[0].strip()
    if row.get("is_multiple_answer"):
        # ", " keeps 2500,750 from reading as a number of digit groups
        answer = ", ".join(split_elements(answer.replace("$", ""), ",", digit_groups=False))
    if row.get("error"):
        if foreign_digit(str(row["error"])) or parse_number(str(row["error"])) is None:
            raise UserError(f"field 'error' is {shorten(row['error'])}, not a number")
        answer += rf"\tolerance{{{row['error']}}}"
    return answer
