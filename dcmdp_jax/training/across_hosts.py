"""What several hosts exchange about a step, and what must be the same on all of them and in a resumed run."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dcmdp_jax.config.settings import Config, to_dict
from dcmdp_jax.data.episode import COLUMNS, Episode, Shape, common_columns
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import VERIFIER_COUNTS, EvaluationResult
from dcmdp_jax.fields import flatten
from dcmdp_jax.models.hf_hub import model_directory
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.rewards.protocol import Problem
from dcmdp_jax.rewards.scoring import BatchScores, add_logged
from dcmdp_jax.run.run import Run

_COUNTS = ("errors", "timeouts", "over_budget", "unparsed")
_TOKENS = {"token_ids": np.int32, "sampled_mask": np.bool_}
_MAX_AXES = 7


def gather_rollout(
    hosts: Hosts,
    episodes: list[Episode],
    texts: list[str],
    scores: BatchScores,
    *,
    first_prompt: int,
    problems: Sequence[Problem],
) -> tuple[list[Episode], list[str], BatchScores]:
    """Collective: the episodes, texts and scores of all processes, in prompt order.

    Args:
        hosts: the processes.
        episodes, texts, scores: of this process's prompts.
        first_prompt: number of its first prompt in the step.
        problems: of every completion of the step.

    Raises:
        UserError: if the processes' episodes do not have the same columns, naming the first that differs.
    """
    if hosts.count == 1:
        return episodes, texts, scores
    arrays = hosts.gather(
        {
            "episodes": _episode_arrays(episodes, first_prompt, _columns(hosts, episodes)),
            "texts": _text_arrays(texts),
            "scores": _score_arrays(scores),
        }
    )
    sources = None if scores.sources is None else tuple(problem.source for problem in problems)
    return _episodes(arrays["episodes"]), _texts(**arrays["texts"]), _scores(arrays["scores"], sources)


def gather_evaluation(hosts: Hosts, result: EvaluationResult) -> EvaluationResult:
    """Collective: one result of all problems, in order, from those of each process's share."""
    if hosts.count == 1:
        return result
    fields = dataclasses.asdict(result)
    counts = {name: np.array([fields[name]]) for name in VERIFIER_COUNTS}
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)} | {
        "values": result.values
    }
    # Texts travel as JSON, a line for each problem.
    written = {name: arrays.pop(name).tolist() for name in ("texts", "found")}
    written = {name: _text_arrays([json.dumps(row) for row in rows]) for name, rows in written.items()}
    logged = _text_arrays([json.dumps(result.logged)])
    found = hosts.gather({"arrays": arrays, "counts": counts, "logged": logged, "written": written})
    summed = {name: int(value.sum()) for name, value in found["counts"].items()}
    every = add_logged([json.loads(text) for text in _texts(**found["logged"])])
    texts = {name: [json.loads(row) for row in _texts(**rows)] for name, rows in found["written"].items()}
    objects = {name: np.array(rows, object).reshape(-1, result.samples) for name, rows in texts.items()}
    return dataclasses.replace(result, **found["arrays"], **objects, **summed, logged=every)


def _columns(hosts: Hosts, episodes: list[Episode]) -> dict[str, Shape]:
    """Collective: the columns of all processes' episodes; a process may have no episode."""
    own = common_columns([e.columns for e in episodes], [len(e.token_ids) for e in episodes])
    # A row for each column: the number of axes of an entry and their lengths; -1 where it is not there, and -2 in all
    # rows of a process without episodes.
    told = np.full((1, len(COLUMNS), 1 + _MAX_AXES), -1 if episodes else -2, np.int64)
    for row, name in zip(told[0], COLUMNS, strict=True):
        if name in own:
            row[: 1 + len(own[name])] = len(own[name]), *own[name]
    found: dict[str, Shape] = {}
    everywhere = hosts.gather({"columns": told})["columns"]
    for number, name in enumerate(COLUMNS):
        entries = [tuple(row[1 : 1 + max(row[0], 0)].tolist()) if row[0] >= 0 else None
                   for row in everywhere[:, number] if row[0] != -2]  # fmt: skip
        if len(set(entries)) > 1:
            raise UserError(f"rollout: entries of column {name} have shapes {entries} by process (None: no column)")
        if entries and entries[0] is not None:
            found[name] = entries[0]
    return found


def _episode_arrays(episodes: list[Episode], first_prompt: int, columns: Mapping[str, Shape]) -> dict[str, Any]:
    def joined(shape: Shape, dtype: type[np.generic], parts: Iterable[np.ndarray]) -> np.ndarray:
        # With an empty array first: there may be no episode.
        return np.concatenate([np.zeros(shape, dtype), *parts])

    return {
        "lengths": np.array([len(episode.token_ids) for episode in episodes], np.int64),
        "groups": np.array([first_prompt + episode.group for episode in episodes], np.int64),
        "members": np.array([episode.member for episode in episodes], np.int64),
        "truncated": np.array([episode.finish_reason == "length" for episode in episodes], bool),
        "tokens": {
            name: joined((0,), dtype, (getattr(episode, name) for episode in episodes))
            for name, dtype in _TOKENS.items()
        },
        "columns": {
            name: joined((0, *entry), COLUMNS[name].dtype, (episode.columns[name] for episode in episodes))
            for name, entry in columns.items()
        },
    }


def _episodes(arrays: dict[str, Any]) -> list[Episode]:
    facts = zip(*(arrays[name] for name in ("lengths", "groups", "members", "truncated")), strict=True)
    episodes, end = [], 0
    for length, group, member, truncated in facts:
        begin, end = end, end + int(length)
        tokens = {name: values[begin:end] for name, values in arrays["tokens"].items()}
        columns = {name: values[begin:end] for name, values in arrays["columns"].items()}
        reason = "length" if truncated else "stop"
        episodes.append(Episode(**tokens, group=int(group), member=int(member), finish_reason=reason, columns=columns))
    return episodes


def _text_arrays(texts: list[str]) -> dict[str, np.ndarray]:
    # A text that was decoded from part of a character may hold a lone surrogate.
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return {
        "lengths": np.array([len(text) for text in encoded], np.int64),
        "characters": np.frombuffer(b"".join(encoded), np.uint8),
    }


def _texts(lengths: np.ndarray, characters: np.ndarray) -> list[str]:
    return [
        characters[end - length : end].tobytes().decode("utf-8", "surrogatepass")
        for end, length in zip(np.cumsum(lengths), lengths, strict=True)
    ]


def _score_arrays(scores: BatchScores) -> dict[str, Any]:
    grades = None
    if scores.grades is not None:
        counts = [getattr(scores.grades, name) for name in _COUNTS]
        grades = {"rewards": scores.grades.rewards, "counts": np.array([counts])}
    return {
        "totals": scores.totals,
        "values": scores.values,
        "failed": {name: np.array([count]) for name, count in scores.failed.items()},
        "grades": grades,
        # Names may differ between processes.
        "logged": _text_arrays([json.dumps(scores.logged)]),
        "extra": _text_arrays([json.dumps(scores.extra_of(row)) for row in range(len(scores.totals))]),
    }


def _scores(arrays: dict[str, Any], sources: tuple[str, ...] | None) -> BatchScores:
    grades = arrays["grades"]
    if grades is not None:
        counts = dict(zip(_COUNTS, grades["counts"].sum(axis=0).tolist(), strict=True))
        grades = Grades(rewards=grades["rewards"], **counts)
    extra = [json.loads(text) for text in _texts(**arrays["extra"])]
    return BatchScores(
        totals=arrays["totals"],
        values=arrays["values"],
        failed={name: int(counts.sum()) for name, counts in arrays["failed"].items()},
        grades=grades,
        sources=sources,
        logged=add_logged([json.loads(text) for text in _texts(**arrays["logged"])]),
        extra={name: [row.get(name) for row in extra] for name in dict.fromkeys(name for row in extra for name in row)},
    )


_LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "transformers")
_DIGITS = 16
_ENDS_BYTES = 1 << 16


def settings_and_code(config: Config) -> dict[str, str]:
    """Every setting but those of the hosts, the code of this package, and the versions of what it builds on."""
    settings = {f"config.{name}": repr(value) for name, value in flatten(to_dict(config)).items()}
    versions = {f"version of {name}": importlib.metadata.version(name) for name in _LIBRARIES}
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"))
    code = _digest(part for path in files for part in (str(path.relative_to(package)).encode(), path.read_bytes()))
    return {
        **{name: value for name, value in settings.items() if not name.startswith("config.hosts.")},
        **versions,
        "version of Python": platform.python_version(),
        "code of dcmdp_jax (digest)": code,
    }


def data_facts(plan: Run) -> dict[str, str]:
    """Devices, encoded problems, worked solutions and the files of the weights, as this host sees them."""
    devices = jax.local_devices()
    facts = {
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "problems of task.train (digest)": _of(plan.train),
    }
    for task, prompts in plan.held_out:
        facts[f"problems of {task.location} of evaluation.task (digest)"] = _of(prompts)
    if plan.worked_solutions:
        facts["problems of warmup.task (digest)"] = _digest(
            ids.tobytes() for pair in zip(*plan.worked_solutions, strict=True) for ids in pair
        )
    if plan.config.model.path:
        facts["files of model.path (digest)"] = _digest(_ends_of_files(model_directory(plan.config.model.path)))
    return facts


def _of(problems: EncodedPrompts) -> str:
    def parts() -> Iterable[bytes]:
        for ids, problem in zip(problems.token_ids, problems.problems, strict=True):
            yield ids.tobytes()
            yield json.dumps([problem.answer, problem.columns], sort_keys=True, default=str).encode()

    return f"{len(problems.problems)}, {_digest(parts())}"


def _ends_of_files(directory: Path) -> Iterable[bytes]:
    """Name, size and both ends of each file: all of a small one, the table and the last values of a large one."""
    for path in sorted(directory.iterdir()):
        if path.suffix not in (".json", ".safetensors"):
            continue
        size = path.stat().st_size
        yield f"{path.name} {size}".encode()
        with path.open("rb") as file:
            yield file.read(_ENDS_BYTES)
            file.seek(max(0, size - _ENDS_BYTES))
            yield file.read()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:_DIGITS]
