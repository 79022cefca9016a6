"""avg@K and pass@K of a model on any tasks, in the layout of the paper's tables.

    dcmdp evaluate MODEL --config.evaluation.task=aime24.jsonl,amc23.jsonl [--config.rollout.precision=fp8]
    dcmdp evaluate MODEL --config.evaluation.task=aime24.jsonl --config.rollout.engine=vllm          stock vLLM
    dcmdp evaluate MODEL --config.evaluation.task=aime24.jsonl --config.rollout.engine=http
        --config.rollout.engine_args='{"server": "http://HOST:PORT"}'                                a server of yours

MODEL is a Hugging Face directory, or a run directory of training, or a checkpoint in it. Settings are a run's own, and
each may be given: docs/settings.md. But an evaluation is the paper's whatever the run had: temperature 0.7, 32768
tokens, avg@32 on AIME24, AIME25 and AMC23, avg@4 on MATH-500, Minerva and OlympiadBench, known by their file names:
aime24, aime25, amc23, math500, minerva, olympiadbench.

The same command continues a killed evaluation; it ends with the same files as an uninterrupted one.

    dcmdp evaluate --table evaluation-*.json                       one table over methods and runs
    dcmdp evaluate RUN --overlap=report [--config.task.train=dapo.jsonl]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.commands.arguments import real, whole
from dcmdp_jax.commands.cli import Parser, keep_tracebacks_in
from dcmdp_jax.commands.flags import parse_rest, split_overrides
from dcmdp_jax.config.checks import may_change
from dcmdp_jax.config.load import for_sampling
from dcmdp_jax.config.settings import Config, to_dict
from dcmdp_jax.data.mixtures import parse_mixture
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import EvaluationResult, describe, evaluate, join
from dcmdp_jax.evaluation.held_out import HeldOutTask
from dcmdp_jax.evaluation.log import EvaluationLog, open_output, write_json
from dcmdp_jax.evaluation.overlap import Overlap, find_overlap, leave_out
from dcmdp_jax.evaluation.table import (
    format_comparison,
    format_table,
    plain_average,
    read_scores,
    shown_score,
    to_record,
)
from dcmdp_jax.fields import flatten
from dcmdp_jax.process_memory import release_freed_memory
from dcmdp_jax.run.model_run import PAPERS_EVALUATION, ModelRun, find_model, fingerprint

_ROUNDS = 4
"""Completions of a part, in rows of the engine: more would lose more, fewer leave more rows idle at a part's end."""

EXPECTED = (EngineError, MemoryError)
"""Failures whose message is enough."""


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), check all input, evaluate task by task, print the table."""
    arguments, overrides = parse(argv[1:])
    if arguments.table is not None:
        print(format_comparison([read_scores(path) for path in arguments.table]))
        return
    saved = find_model(arguments.model, arguments.step)
    if saved.run_dir is not None:
        keep_tracebacks_in(saved.run_dir)
    config = for_sampling(saved.settings, PAPERS_EVALUATION | overrides)
    with contextlib.closing(ModelRun.of(saved, config)) as run:
        overlaps = read_tasks(run, arguments)
        stem = f"evaluation-{saved.name if saved.step is None else saved.step}"
        out, log = open_output(arguments.out, saved.run_dir or Path.cwd(), stem, _header(run, arguments))
        run.directory = out.with_suffix(f".{run.engine_kind.name or 'engine'}")
        with log:
            results = _evaluate(run, arguments, log)
            method = arguments.method or saved.name
            write_json(out, _record(method, run, arguments, results, overlaps))
            log.close_finished()
    print(format_table(method, results, seed=run.asked.training.seed))
    if dropped := [f"{prompts.dropped} of {task.name}" for task, prompts in run.held_out if prompts.dropped]:
        print(f"left out, prompt over task.max_prompt_tokens: {', '.join(dropped)}")
    for line in _describe_overlaps(run, arguments, results, overlaps):
        print(line)
    print(f"completions: dcmdp view {log.path}")
    print(f"wrote {out}")


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Read the arguments, without the program's name.

    Returns:
        Arguments of the command, and settings: dotted name -> value.

    Raises:
        UserError: in one line, for a misspelled or ill-typed one, or neither MODEL nor --table.
    """
    overrides, rest = split_overrides(words)
    arguments = parse_rest(_parser(), rest)
    if (arguments.model is None) == (arguments.table is None):
        raise UserError("MODEL is missing; name a directory to evaluate, or --table FILE ... and no MODEL")
    return arguments, overrides


def read_tasks(run: ModelRun, arguments: argparse.Namespace) -> dict[str, list[Overlap]]:
    """Read the tasks of a run and check their lengths.

    Returns:
        Task -> problems that training had, which `--overlap=drop` leaves out; empty without `--overlap`.

    Raises:
        UserError: in one line, for a task that can't be read or asked.
    """
    if not run.asked.evaluation.task:
        raise UserError("config.evaluation.task: empty; for example --config.evaluation.task=aime24.jsonl,amc23.jsonl")
    overlaps = _overlaps(run) if arguments.overlap else {}
    if arguments.overlap == "drop":
        run.held_out = tuple(
            (task, leave_out(prompts, overlaps[task.name], task=task.name)) for task, prompts in run.held_out
        )
    run.check()
    return overlaps


def _overlaps(run: ModelRun) -> dict[str, list[Overlap]]:
    if not run.asked.task.train:
        raise UserError("--overlap: goes with config.task.train, the problems that the policy was trained on")
    try:
        parts = parse_mixture(run.asked.task.train)
        train = [each for part in parts for each in load_problems(part.location, on_bad_row="skip", answers="unused")]
    except UserError as error:
        raise UserError(f"config.task.train: {error}") from error
    texts = [problem.prompt for problem in train]
    return {
        task.name: [
            overlap._replace(train_problem=train[overlap.train_problem].index)
            for overlap in find_overlap([problem.prompt for problem in prompts.problems], texts)
        ]
        for task, prompts in run.held_out
    }


def _evaluate(run: ModelRun, arguments: argparse.Namespace, log: EvaluationLog) -> list[EvaluationResult]:
    if (rows := run.memory.rows) < (most := run.asked.rollout.max_rows):
        print(f"{rows} rows at a time (rollout.max_rows={most} does not fit)", file=sys.stderr)
    run.start()
    if run.engine_kind.pushes:
        run.engine.push_weights(run.saved.load(run.param_dtype), run.saved.step or 0)
        release_freed_memory()
    results: list[EvaluationResult] = []
    for task, prompts in run.held_out:
        began = time.monotonic()
        result = _evaluate_task(run, task, prompts, arguments.top_p, log)
        results.append(result)
        _report_progress(result, len(run.held_out), len(results), time.monotonic() - began)
        asked = [run.tokenizer.decode(ids) for ids in prompts.token_ids]
        print("\n".join(describe(result, asked, [problem.answer for problem in prompts.problems])), file=sys.stderr)
    return results


def _evaluate_task(
    run: ModelRun, task: HeldOutTask, prompts: EncodedPrompts, top_p: float, log: EvaluationLog
) -> EvaluationResult:
    """Evaluate a task part by part: a kill loses one part at most, and parts that the log has are not sampled again.

    Parts depend on nothing but the seed and their number, so a continued evaluation equals an uninterrupted one.
    """
    config = run.asked
    sampling = SamplingParams(
        group_size=task.samples,
        max_completion_tokens=config.rollout.max_completion_tokens,
        temperature=config.evaluation.temperature,
        top_p=top_p,
        stop_token_ids=run.stop_token_ids,
    )
    size, results = max(1, _ROUNDS * config.rollout.max_rows // task.samples), []
    for part, start in enumerate(range(0, len(prompts.problems), size)):
        result = log.finished(task.name, part)
        if result is None:
            chosen, seed = prompts.select(slice(start, start + size)), part_seed(config.training.seed, part)
            result = evaluate(run, chosen, sampling, task=task.name, seed=seed)
            asked = [
                {"row": problem.index, "prompt": run.tokenizer.decode(ids), "answer": problem.answer}
                for problem, ids in zip(chosen.problems, chosen.token_ids, strict=True)
            ]
            log.append(part, asked, result)
        results.append(result)
    return join(results)


def part_seed(seed: int, part: int) -> int:
    """Seed of a part's samples: rows of different parts have the same number, and must not have the same draws."""
    return seed if part == 0 else int(np.random.SeedSequence((seed, part)).generate_state(1)[0])


def _describe_overlaps(
    run: ModelRun,
    arguments: argparse.Namespace,
    results: Sequence[EvaluationResult],
    overlaps: dict[str, list[Overlap]],
) -> Iterator[str]:
    for result, (_, prompts) in zip(results, run.held_out, strict=True):
        shared = {overlap.problem for overlap in overlaps.get(result.task, ())}
        if not shared:
            continue
        said = f"overlap of {result.task} with {run.asked.task.train}: {len(shared)} problems"
        if arguments.overlap == "drop":
            yield f"{said}, left out"
        else:
            rest = [place for place in range(len(prompts.problems)) if place not in shared]
            alone = shown_score(result, result.select(rest).average) if rest else "no problem"
            yield f"{said}; avg@{result.samples} is {shown_score(result, result.average)}, without them {alone}"


def _settings(config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings that change a score, and the arguments that do."""
    values = {name: value for name, value in flatten(to_dict(config)).items() if _changes_a_score(name, config)}
    return values | {"top_p": arguments.top_p, "overlap": arguments.overlap}


def _changes_a_score(name: str, config: Config) -> bool:
    if name in ("evaluation.every_steps", "rollout.group_size", "rollout.temperature", "rollout.lag"):
        return False  # of training
    if name in ("training.seed", "rollout.engine_args", "rollout.max_rows") or name.startswith("evaluation."):
        return True
    return name.startswith(("task.", "rewards.", "rollout.")) and not may_change(name, config)


def _header(run: ModelRun, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that changes a score: a continued evaluation must have the same."""

    def digest(prompts: Any) -> str:
        asked = [
            (ids.tolist(), problem.answer) for ids, problem in zip(prompts.token_ids, prompts.problems, strict=True)
        ]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    return {
        "model": run.saved.name,
        "step": run.saved.step,
        "weights": fingerprint(run.saved.files),
        "settings": _settings(run.asked, arguments),
        "problems": {task.name: digest(prompts) for task, prompts in run.held_out},
    }


def _record(
    method: str,
    run: ModelRun,
    arguments: argparse.Namespace,
    results: Sequence[EvaluationResult],
    overlaps: dict[str, list[Overlap]],
) -> dict[str, Any]:
    tasks = {}
    for result, (_, prompts) in zip(results, run.held_out, strict=True):
        rows = [problem.index for problem in prompts.problems]
        made = to_record(result, seed=run.asked.training.seed)
        made |= {"dropped_prompts": prompts.dropped, "problem_rows": rows}
        if overlaps:
            made["overlap"] = [overlap._asdict() for overlap in overlaps[result.task]]
        tasks[result.task] = made
    return {
        "method": method,
        "model": run.saved.name,
        "step": run.saved.step,
        "settings": _settings(run.asked, arguments),
        "average": plain_average(results),
        "tasks": tasks,
    }


def _report_progress(result: EvaluationResult, tasks: int, done: int, seconds: float) -> None:
    completions = result.scores.size
    rate = completions * result.length_mean / seconds
    print(
        f"[{done}/{tasks}] {result.task}: avg@{result.samples} {shown_score(result, result.average)}, "
        f"{len(result.scores)} problems, {completions} completions, {seconds:.1f} s, {rate:,.0f} tokens/s",
        file=sys.stderr,
        flush=True,
    )


def _parser() -> Parser:
    parser = Parser(
        "evaluate",
        description="avg@K and pass@K of a Hugging Face directory or a checkpoint, in the paper's table layout. "
        "--config.section.name=value overrides a setting of the run, such as --config.evaluation.task=aime24.jsonl.",
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        type=Path,
        help="Hugging Face directory, OWNER/NAME[@REVISION] on the Hub, run directory, or checkpoint directory",
    )
    add("--step", type=whole(0), metavar="N", help="which checkpoint of a run (default: the newest)")
    add("--top_p", type=real(0, 1), default=1.0, help="nucleus mass, default %(default)s, as the paper")
    add(
        "--overlap",
        choices=("report", "drop"),
        help="report the problems of the tasks that task.train has too, or leave them out",
    )
    add("--method", metavar="NAME", help="label of the table's row (default: MODEL's name)")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON with every problem's mean, replaced if it is there; NAME.problems.jsonl beside NAME.json has "
        "every problem's scores and lets a killed evaluation continue (default: a new evaluation-*.json in the run "
        "directory, or here for a Hugging Face directory)",
    )
    add(
        "--table",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="instead of evaluating: one table over finished evaluations; files of one --method are its runs",
    )
    return parser
