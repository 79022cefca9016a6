"""Which remedy brings its gradient nearest to an exact engine's? Samples of a model and its engine,
no training.

    python -m research.oracle --config=configs/demo.py
        # a run's last checkpoint and engine
    python -m research.oracle --model=DIR --config.task.train=FILE --a=vllm:bfloat16,cache=fp8 \
        --batches=32
    python -m research.oracle --model=DIR --study=configs/studies/dose_response.py
        # a study's arms

Takes the engines and settings of `dcmdp probe`; writes remedies.json and a figure of each engine
into --out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dcmdp_jax.commands.arguments import Parser, output_directory, whole
from dcmdp_jax.commands.failures import run_main
from dcmdp_jax.commands.flags import parse, split_overrides
from dcmdp_jax.commands.parsers import add_engines
from dcmdp_jax.commands.probe import open_session
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.errors import UserError
from dcmdp_jax.probe.live.engines import parse_spec
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rewards.protocol import Problem
from dcmdp_jax.rewards.scoring import BatchScoring, RewardScorer
from dcmdp_jax.run.task import checked_rewards, needs_columns
from research.oracle import page
from research.oracle.oracle import ask
from research.studies.sweep import load_study


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), sample, judge, write and print."""
    overrides, rest = split_overrides(argv[1:])
    arguments = _parser().parse_args(rest, argparse.Namespace(no_rescoring=True))
    if bool(arguments.model) == bool(arguments.config):
        raise UserError("give one of --model DIR and --config FILE; see --help")
    if arguments.b != parse_spec("trainer"):
        raise UserError(
            f"--b: got {arguments.b}; remedies are compared with the training stack itself, leave "
            "it out"
        )
    if arguments.top_p < 1:
        raise UserError(
            f"--top-p: got {arguments.top_p}; whole distributions are compared, leave it out"
        )
    arms = arms_of(arguments.study) if arguments.study else None
    session, first = open_session(arguments, overrides)
    results = []
    algorithm = session.run.config.algorithm
    task = session.run.config.task
    if needs_columns(session.run.config):
        problems = load_problems(
            task.train, limit=arguments.prompts, answers="unused", keep_columns=True
        )
        session = dataclasses.replace(session, problems=problems)
    if task.environment:
        raise UserError(
            f"config.task.environment: got {task.environment}; one turn is sampled, set it empty"
        )
    policy = session.run
    rewards, columns = checked_rewards(policy.config, session.problems, policy.tokenizer)
    limits = policy.config.rewards
    stop = policy.config.rewards.on_error == "error"
    judges = (
        task.verifier_workers,
        task.verifier_timeout,
        task.verifier_budget,
        limits.answer_extraction,
    )
    known = {"timeout_s": limits.timeout, "memory_gib": limits.memory_limit, "output": None}
    with (
        Verifier(*judges) as verifier,
        contextlib.closing(
            RewardScorer(rewards, verifier, columns, by_source=False, stop_on_error=stop, **known)
        ) as scorer,
    ):

        def grade(problems: Sequence[Problem], completion_ids: Sequence[np.ndarray]) -> np.ndarray:
            scoring = BatchScoring(scorer, policy.tokenizer, problems)
            scoring.begin(range(len(problems)), completion_ids)
            return scoring.finish()[1].totals

        for verdicts in ask(
            session, first, algorithm, batches=arguments.batches, grade=grade, arms=arms
        ):
            results.append(verdicts)
            print(page.table(verdicts), flush=True)
            # Each engine takes minutes: what is known stays if the next one fails.
            paths = page.write(results, arguments.out)
    print(f"wrote {', '.join(map(str, paths))}")


def _parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = add_engines(parser).add_argument
    add(
        "--study",
        metavar="FILE[:ARGUMENT]",
        help="compare the arms of a study in place of every remedy",
    )
    add(
        "--batches",
        type=whole(4),
        default=16,
        metavar="N",
        help="of each engine (default: %(default)s)",
    )
    add(
        "--out",
        type=output_directory,
        default=Path("runs/oracle"),
        metavar="DIR",
        help="default: %(default)s",
    )
    return parser


def arms_of(given: str) -> dict[str, AlgorithmSettings]:
    """Each different algorithm of a study's arms, by the first arm that has it; without those no
    longer run.
    """
    found: dict[str, AlgorithmSettings] = {}
    for arm, one in load_study(given).arms.items():
        algorithm = None if one.past else parse(["train", *one.arguments()]).config.algorithm
        if algorithm is not None and algorithm not in found.values():
            found[arm] = algorithm
    return found


if __name__ == "__main__":
    run_main(main, [sys.argv[0], *sys.argv[1:]])
