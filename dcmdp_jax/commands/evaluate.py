"""avg@K and pass@K of a model on any tasks, in the layout of the paper's tables.

    dcmdp evaluate MODEL --config.evaluation.task=aime24.jsonl,amc23.jsonl
    dcmdp evaluate MODEL --config.evaluation.task=aime24.jsonl --config.rollout.engine=vllm
    dcmdp evaluate MODEL --config.evaluation.task=aime24.jsonl --config.rollout.engine=http \
        --config.rollout.engine_args='{"server": "http://HOST:PORT"}'

MODEL is a Hugging Face directory, or a run directory of training, or a checkpoint in it. Settings
are a run's own, and each may be given: docs/settings.md. A run is asked as in training: with its
limit, temperature and nucleus, about its own tasks if no other is named. A directory is asked as in
the paper: temperature 0.7, 32768 tokens. Benchmarks have the paper's K, avg@32 on AIME24, AIME25
and AMC23, avg@4 on MATH-500, Minerva and OlympiadBench, known by their file names: aime24, aime25,
amc23, math500, minerva, olympiadbench.

The same command continues a killed evaluation; it ends with the same files as an uninterrupted one.

    dcmdp evaluate --table evaluation-*.json                     # one table over methods and runs
    dcmdp evaluate RUN --overlap=report [--config.task.train=dapo.jsonl]
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.commands import failures, flags, parsers
from dcmdp_jax.config import checks, load
from dcmdp_jax.config.settings import Config, to_dict
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.dotted_names import flatten
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import EvaluationResult, describe, evaluate, join
from dcmdp_jax.evaluation.held_out import (
    HeldOutTask,
    Overlap,
    describe_overlaps,
    leave_out,
    training_overlaps,
)
from dcmdp_jax.evaluation.log import (
    EvaluationLog,
    evaluation_header,
    evaluation_record,
    open_output,
    write_json,
)
from dcmdp_jax.evaluation.table import format_comparison, format_table, read_scores, shown_score
from dcmdp_jax.run import evaluation_setup, memory_use, saved_model
from dcmdp_jax.run.services import Services, start_services
from dcmdp_jax.run.task import Task, held_out, read_tools

# Completions of a part, in rows of the engine: more would lose more with a kill, fewer leave more
# rows idle at a part's end.
_ROUNDS = 4
# Settings that look as if they changed a score, and do not: they are of training.
_OF_TRAINING = (
    "evaluation.every_steps",
    "rollout.group_size",
    "rollout.temperature",
    "rollout.lag",
)
# Settings that change one, though a run may go on with another value.
_OF_SAMPLING = ("training.seed", "rollout.engine_args", "rollout.max_rows")


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), check all input, evaluate, print the table."""
    arguments, overrides = parse(argv[1:])
    if arguments.table is not None:
        print(format_comparison([read_scores(path) for path in arguments.table]))
        return

    saved = saved_model.find_model(arguments.model, arguments.step)
    is_run = saved.run_dir is not None
    if is_run:
        failures.keep_tracebacks_in(saved.run_dir)
    changes = evaluation_setup.asked_settings(overrides, of_a_run=is_run)
    config = load.for_sampling(saved.settings, changes)
    policy = saved_model.Policy.of(saved, config)
    task, overlaps = read_tasks(policy, arguments.overlap)
    top_p = config.rollout.top_p if arguments.top_p is None else arguments.top_p
    seed = config.training.seed

    # What a continued evaluation must have in common with its log.
    values = flatten(to_dict(config))
    settings = {name: value for name, value in values.items() if _changes_a_score(name, config)}
    settings["top_p"] = top_p
    settings["overlap"] = arguments.overlap
    header = evaluation_header(
        settings,
        task.held_out,
        model=saved.name,
        step=saved.step,
        files=saved.files,
    )
    stem = f"evaluation-{saved.name if saved.step is None else saved.step}"
    out, log = open_output(arguments.out, saved.run_dir or Path.cwd(), stem, header)
    method = arguments.method or saved.name
    with log:
        setup = evaluation_setup.place_evaluation(task, saved, out)
        results = _evaluate(task, saved, setup, top_p, log)
        record = evaluation_record(method, header, results, task.held_out, overlaps, seed=seed)
        write_json(out, record)
        # An evaluation that is left before this line can be continued from its log.
        log.close_finished()

    print(format_table(method, results, seed=seed))
    print(
        f"at most {config.rollout.max_completion_tokens} tokens, temperature "
        f"{config.evaluation.temperature:g}, top_p {top_p:g}, top_k {config.rollout.top_k}: the "
        f"{'run' if is_run else 'paper'}'s where they are not given"
    )
    dropped = [
        f"{prompts.dropped} of {held_out_task.name}"
        for held_out_task, prompts in task.held_out
        if prompts.dropped
    ]
    if dropped:
        print(f"left out, prompt over task.max_prompt_tokens: {', '.join(dropped)}")
    for line in describe_overlaps(
        results,
        overlaps,
        config.task.train,
        dropped=arguments.overlap == "drop",
    ):
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
    arguments, overrides = flags.parse_settings(parsers.evaluate(), words)
    if (arguments.model is None) == (arguments.table is None):
        raise UserError(
            "MODEL is missing; name a directory to evaluate, or --table FILE ... and no MODEL"
        )
    return arguments, overrides


def read_tasks(
    policy: saved_model.Policy, overlap: str | None
) -> tuple[Task, dict[str, list[Overlap]]]:
    """Read the tasks of an evaluation and check their lengths.

    Args:
        policy: with the settings that it is asked with; it may still be untrained.
        overlap: argument of the command.

    Returns:
        What is evaluated; task -> problems that training had, which `--overlap=drop` leaves out,
        empty without it.

    Raises:
        UserError: in one line, for a task that can't be read or asked.
    """
    config = policy.config
    if not config.evaluation.task:
        raise UserError(
            "config.evaluation.task: empty; for example "
            "--config.evaluation.task=aime24.jsonl,amc23.jsonl"
        )
    if overlap and not config.task.train:
        raise UserError(
            "--overlap: goes with config.task.train, the problems that the policy was trained on"
        )

    tasks = held_out(config, policy.tokenizer, read_tools(config, policy.tokenizer))
    overlaps = training_overlaps(tasks, config.task.train) if overlap else {}
    if overlap == "drop":
        tasks = leave_out(tasks, overlaps)
    return evaluation_setup.evaluation_task(policy, tasks), overlaps


def _evaluate(
    task: Task,
    saved: saved_model.SavedModel,
    setup: memory_use.EngineSetup,
    top_p: float,
    log: EvaluationLog,
) -> list[EvaluationResult]:
    """Load the model into an engine and evaluate each task, with lines on stderr."""
    tell = functools.partial(print, file=sys.stderr, flush=True)
    rows = setup.memory.rows
    max_rows = task.config.rollout.max_rows
    if rows < max_rows:
        tell(f"{rows} rows at a time (rollout.max_rows={max_rows} does not fit)")

    results = []
    with start_services(task, setup) as services:
        if setup.kind.takes_weights:
            params = saved.load(evaluation_setup.synced_dtype(saved, task.config))
            services.engine.sync_weights(params, saved.step or 0)
            del params
            release_freed_memory()
        for held_out_task, prompts in task.held_out:
            began = time.monotonic()
            result = _evaluate_task(task, services, held_out_task, prompts, top_p, log)
            seconds = time.monotonic() - began
            results.append(result)
            tell(
                f"[{len(results)}/{len(task.held_out)}] {result.task}: "
                f"avg@{held_out_task.samples} {shown_score(result, result.average)}, "
                f"{len(result.scores)} problems, {result.scores.size} completions, {seconds:.1f} "
                f"s, {result.scores.size * result.length_mean / seconds:,.0f} tokens/s"
            )
            texts = [task.tokenizer.decode(ids) for ids in prompts.token_ids]
            answers = [problem.answer for problem in prompts.problems]
            tell("\n".join(describe(result, texts, answers)))
    return results


def _evaluate_task(
    task: Task,
    services: Services,
    held_out_task: HeldOutTask,
    prompts: EncodedPrompts,
    top_p: float,
    log: EvaluationLog,
) -> EvaluationResult:
    """Evaluate a task part by part; parts that the log has are not sampled again.

    A kill loses one part at most. Parts depend on nothing but the seed and their number, so a
    continued evaluation equals an uninterrupted one.
    """
    config = task.config
    sampling = dataclasses.replace(task.evaluation_sampling(held_out_task), top_p=top_p)

    name = held_out_task.name
    size = max(1, _ROUNDS * config.rollout.max_rows // held_out_task.samples)
    results = []
    for start in range(0, len(prompts.problems), size):
        number = len(results)
        result = log.finished(name, number)
        if result is None:
            batch = prompts.select(slice(start, start + size))
            seed = part_seed(config.training.seed, number)
            result = evaluate(services, batch, sampling, task=name, seed=seed)
            records = []
            for problem, ids in zip(batch.problems, batch.token_ids, strict=True):
                prompt = task.tokenizer.decode(ids)
                records.append({"row": problem.index, "prompt": prompt, "answer": problem.answer})
            log.append(number, records, result)
        results.append(result)
    return join(results)


def part_seed(seed: int, number: int) -> int:
    """Seed of a part's samples, whose rows have the same numbers in each part."""
    if number == 0:
        return seed
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


def _changes_a_score(name: str, config: Config) -> bool:
    """Whether a setting changes a score."""
    if name in _OF_TRAINING:
        return False
    if name in _OF_SAMPLING or name.startswith("evaluation."):
        return True
    return name.startswith(("task.", "rewards.", "rollout.")) and not checks.may_change(
        name, config
    )
