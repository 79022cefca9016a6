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

    dcmdp evaluate --table evaluation-*.json                       one table over methods and runs
    dcmdp evaluate RUN --overlap=report [--config.task.train=dapo.jsonl]
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.commands import cli, flags
from dcmdp_jax.config import checks, load
from dcmdp_jax.config.settings import Config, to_dict
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.engines.protocol import SamplingParams
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
from dcmdp_jax.fields import flatten
from dcmdp_jax.run import evaluation_setup, memory_use, saved_model
from dcmdp_jax.run.services import Services, start_services
from dcmdp_jax.run.task import Task, held_out, read_tools

_ROUNDS = 4
"""Completions of a part, in rows of the engine: more would lose more, fewer leave more rows idle at
a part's end.
"""


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), check all input, evaluate task by task, print the
    table.
    """
    arguments, overrides = parse(argv[1:])
    if arguments.table is not None:
        print(format_comparison([read_scores(path) for path in arguments.table]))
        return
    saved = saved_model.find_model(arguments.model, arguments.step)
    if saved.run_dir is not None:
        cli.keep_tracebacks_in(saved.run_dir)
    of_a_run = saved.run_dir is not None
    config = load.for_sampling(
        saved.settings, evaluation_setup.asked_settings(overrides, of_a_run=of_a_run)
    )
    policy = saved_model.Policy.of(saved, config)
    task, overlaps = read_tasks(policy, arguments.overlap)
    values = flatten(to_dict(config))
    settings = {name: value for name, value in values.items() if _changes_a_score(name, config)}
    top_p = config.rollout.top_p if arguments.top_p is None else arguments.top_p
    settings |= {"top_p": top_p, "overlap": arguments.overlap}
    header = evaluation_header(
        settings, task.held_out, model=saved.name, step=saved.step, files=saved.files
    )
    stem = f"evaluation-{saved.name if saved.step is None else saved.step}"
    out, log = open_output(arguments.out, saved.run_dir or Path.cwd(), stem, header)
    method = arguments.method or saved.name
    seed = config.training.seed
    with log:
        setup = evaluation_setup.place_evaluation(task, saved, out)
        results = _evaluate(task, saved, setup, top_p, log)
        write_json(
            out, evaluation_record(method, header, results, task.held_out, overlaps, seed=seed)
        )
        log.close_finished()
    print(format_table(method, results, seed=seed))
    print(
        f"at most {config.rollout.max_completion_tokens} tokens, temperature "
        f"{config.evaluation.temperature:g}, top_p {top_p:g}, top_k {config.rollout.top_k}: the "
        f"{'run' if of_a_run else 'paper'}'s where they are not given"
    )
    if dropped := [
        f"{prompts.dropped} of {each.name}" for each, prompts in task.held_out if prompts.dropped
    ]:
        print(f"left out, prompt over task.max_prompt_tokens: {', '.join(dropped)}")
    for line in describe_overlaps(
        results, overlaps, config.task.train, dropped=arguments.overlap == "drop"
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
    arguments, overrides = flags.parse_settings(_parser(), words)
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
    asked = held_out(config, policy.tokenizer, read_tools(config, policy.tokenizer))
    overlaps = training_overlaps(asked, config.task.train) if overlap else {}
    if overlap == "drop":
        asked = leave_out(asked, overlaps)
    return evaluation_setup.evaluation_task(policy, asked), overlaps


def _evaluate(
    task: Task,
    saved: saved_model.SavedModel,
    setup: memory_use.EngineSetup,
    top_p: float,
    log: EvaluationLog,
) -> list[EvaluationResult]:
    if (rows := setup.memory.rows) < (most := task.config.rollout.max_rows):
        print(f"{rows} rows at a time (rollout.max_rows={most} does not fit)", file=sys.stderr)
    results: list[EvaluationResult] = []
    with start_services(task, setup) as services:
        if setup.kind.pushes:
            services.engine.push_weights(
                saved.load(evaluation_setup.pushed_dtype(saved, task.config)), saved.step or 0
            )
            release_freed_memory()
        for done, (one, prompts) in enumerate(task.held_out, start=1):
            began = time.monotonic()
            results.append(result := _evaluate_task(task, services, one, prompts, top_p, log))
            seconds = time.monotonic() - began
            print(
                f"[{done}/{len(task.held_out)}] {one.name}: avg@{one.samples} "
                f"{shown_score(result, result.average)}, {len(result.scores)} problems, "
                f"{result.scores.size} completions, {seconds:.1f} s, "
                f"{result.scores.size * result.length_mean / seconds:,.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
            asked = [task.tokenizer.decode(ids) for ids in prompts.token_ids]
            print(
                "\n".join(
                    describe(result, asked, [problem.answer for problem in prompts.problems])
                ),
                file=sys.stderr,
            )
    return results


def _evaluate_task(
    task: Task,
    services: Services,
    one: HeldOutTask,
    prompts: EncodedPrompts,
    top_p: float,
    log: EvaluationLog,
) -> EvaluationResult:
    """Evaluate a task part by part: a kill loses one part at most, and parts that the log has are
    not sampled again.

    Parts depend on nothing but the seed and their number, so a continued evaluation equals an
    uninterrupted one.
    """
    config = task.config
    sampling = SamplingParams(
        group_size=one.samples,
        max_completion_tokens=config.rollout.max_completion_tokens,
        temperature=config.evaluation.temperature,
        top_p=top_p,
        top_k=config.rollout.top_k,
        stop_token_ids=task.stop_token_ids,
    )
    size = max(1, _ROUNDS * config.rollout.max_rows // one.samples)
    results = []
    for part, start in enumerate(range(0, len(prompts.problems), size)):
        result = log.finished(one.name, part)
        if result is None:
            chosen = prompts.select(slice(start, start + size))
            seed = part_seed(config.training.seed, part)
            result = evaluate(services, chosen, sampling, task=one.name, seed=seed)
            asked = [
                {
                    "row": problem.index,
                    "prompt": task.tokenizer.decode(ids),
                    "answer": problem.answer,
                }
                for problem, ids in zip(chosen.problems, chosen.token_ids, strict=True)
            ]
            log.append(part, asked, result)
        results.append(result)
    return join(results)


def part_seed(seed: int, part: int) -> int:
    """Seed of a part's samples: rows of different parts have the same number, and must not have the
    same draws.
    """
    return seed if part == 0 else int(np.random.SeedSequence((seed, part)).generate_state(1)[0])


def _changes_a_score(name: str, config: Config) -> bool:
    """Whether a setting changes a score."""
    if name in (
        "evaluation.every_steps",
        "rollout.group_size",
        "rollout.temperature",
        "rollout.lag",
    ):
        return False  # of training
    if name in ("training.seed", "rollout.engine_args", "rollout.max_rows") or name.startswith(
        "evaluation."
    ):
        return True
    return name.startswith(("task.", "rewards.", "rollout.")) and not checks.may_change(
        name, config
    )


def _parser() -> cli.Parser:
    parser = cli.Parser(
        "evaluate",
        description="avg@K and pass@K of a model, in the paper's table layout. "
        "--config.section.name=value overrides a setting of the run, such as "
        "--config.evaluation.task=aime24.jsonl.",
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        type=Path,
        help="model directory, OWNER/NAME on the Hub, run or checkpoint",
    )
    add(
        "--step",
        type=cli.whole(0),
        metavar="N",
        help="which checkpoint of a run (default: the newest)",
    )
    add(
        "--top_p",
        type=cli.real(0, 1),
        help="nucleus mass (default: the run's, else the paper's, 1)",
    )
    add(
        "--overlap",
        choices=("report", "drop"),
        help="report problems that task.train has too, or leave them out",
    )
    add("--method", metavar="NAME", help="label of the table's row (default: MODEL's name)")
    about = (
        "JSON of the scores; FILE.problems.jsonl has all completions (default: in the run "
        "directory, or here)"
    )
    add("--out", type=Path, metavar="FILE", help=about)
    add(
        "--table",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="only print one table over finished evaluations",
    )
    return parser
