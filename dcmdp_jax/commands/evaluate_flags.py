"""Command line of dcmdp evaluate: arguments, and the settings they make with a run's own."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from dcmdp_jax.commands.arguments import real, split_tasks, temperature, whole
from dcmdp_jax.commands.cli import Parser
from dcmdp_jax.config.arguments import as_settings
from dcmdp_jax.config.checks import check_rewards
from dcmdp_jax.config.settings import Config, RewardSettings, to_dict
from dcmdp_jax.engines.registry import ENGINES, find_engine
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import declared
from dcmdp_jax.inputs import shorten

# More in flight than any engine decodes; vLLM allocates for each.
_MOST_ROWS = 65536
# Of the command, not of what is evaluated.
_NOT_SETTINGS = ("model", "method", "out", "step", "table")


def parse(words: list[str]) -> argparse.Namespace:
    """Read the arguments, without the program's name.

    Raises:
        UserError: in one line, for a misspelled or ill-typed one, or neither MODEL nor --table.
    """
    arguments = _parser().parse_args(words)
    if (arguments.model is None) == (arguments.table is None):
        raise UserError("MODEL is missing; name a directory to evaluate, or --table FILE ... and no MODEL")
    return arguments


def settings_of(arguments: argparse.Namespace, run: dict[str, Any] | None) -> dict[str, Any]:
    """The arguments, with a run's own values, or those of configs/base.py, where they say nothing.

    Args:
        arguments: as `parse` gives them.
        run: a run's config as a nested dict; None for a Hugging Face directory.

    Raises:
        UserError: in one line, for values that don't fit each other.
    """
    run = run or to_dict(Config())
    given = {name: value for name, value in vars(arguments).items() if name not in _NOT_SETTINGS}
    defaults = {
        "engine": run["rollout"]["engine"],
        "prompt_suffix": run["task"]["prompt_suffix"],
        "chat_template_kwargs": run["task"]["chat_template_kwargs"],
        "precision": run["rollout"]["precision"],
        "compute_dtype": run["rollout"]["compute_dtype"],
        "kv_cache_dtype": run["rollout"]["kv_cache_dtype"],
        "rewards": run["rewards"]["functions"],
    }
    own_weights = list(run["rewards"]["weights"]) if given["rewards"] is None else []
    for name, value in defaults.items():
        given[name] = value if given[name] is None else given[name]
    with as_settings({"engine": "--engine"}):
        kind = find_engine(given["engine"])
    for option, allowed in kind.choices.items():
        if given[option] not in allowed:
            raise UserError(
                f"--{option}: got {shorten(given[option])}, allowed with --engine {given['engine']} are "
                f"{', '.join(allowed)}"
            )
    given["reward_weights"] = given["reward_weights"] or own_weights
    try:
        check_rewards(RewardSettings(functions=given["rewards"], weights=tuple(given["reward_weights"])))
    except UserError as error:
        names = (("config.rewards.functions", "--rewards"), ("config.rewards.weights", "--reward_weights"))
        raise UserError(functools.reduce(lambda text, name: text.replace(*name), names, str(error))) from None
    _set_environment(given, run)
    if given["rewards"] == "math" and not given["reward_weights"]:
        # Not named where they say nothing: an evaluation that an earlier version began has no such setting.
        del given["rewards"], given["reward_weights"]
    given["answer_extraction"] = given["answer_extraction"] or run["rewards"].get("answer_extraction", "strict")
    if given["answer_extraction"] == "strict":
        # Not named where it says nothing, as above.
        del given["answer_extraction"]
    takes, needs = "server" in declared(kind.settings), not given["engine_args"] and kind in ENGINES.values()
    if (given["server"] is not None and not takes) or (given["server"] is None and takes and needs):
        raise UserError("--server: goes with --engine http, which needs it: http(s)://HOST:PORT or a socket's path")
    if not given["engine_args"]:
        # Not named where it says nothing: an evaluation that an earlier version began has no such setting.
        del given["engine_args"]
        if kind is find_engine(run["rollout"]["engine"]) and (own := run["rollout"].get("engine_args")):
            given["engine_args"] = own
    with as_settings({"temperature": "--temperature"}):
        kind.check_temperature(given["temperature"])
    if given["drop_overlap"] and given["train_data"] is None:
        raise UserError("--drop_overlap: goes with --train_data, the problems that the policy was trained on")
    if given["tasks"] is None:
        if not run["evaluation"]["task"]:
            raise UserError("--tasks is missing; for example --tasks=aime24.jsonl,math500.jsonl")
        given["tasks"] = split_tasks(run["evaluation"]["task"])
    return given


def _set_environment(given: dict[str, Any], run: dict[str, Any]) -> None:
    """Make the arguments of an environment one setting, which is not there without one."""
    task = run["task"]
    named = {name: given.pop(name) for name in ("environment", "max_turns", "max_turn_tokens")}
    name = task["environment"] if named["environment"] is None else named["environment"]
    if not name:
        if "environment" in given["rewards"].split(","):
            raise UserError("--rewards: got 'environment', which goes with --environment NAME; name other rewards")
        for option in ("max_turns", "max_turn_tokens"):
            if named[option] is not None:
                raise UserError(f"--{option}: got {named[option]}, goes with --environment NAME")
        return
    turns, limit = named["max_turns"] or task["max_turns"], given["max_completion_tokens"]
    tokens = named["max_turn_tokens"] or task["max_turn_tokens"] or max(1, limit // turns)
    given["environment"] = {"name": name, "max_turns": turns, "max_turn_tokens": min(tokens, limit)}


def _weights(text: str) -> list[float]:
    """Numbers, joined by commas."""
    return list(map(real(-1e6, 1e6), text.split(",")))


def _parser() -> Parser:
    parser = Parser(
        "evaluate",
        description="avg@K and pass@K of a Hugging Face directory or a checkpoint, in the paper's table layout.",
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        type=Path,
        help="Hugging Face directory, OWNER/NAME[@REVISION] on the Hub, run directory, or checkpoint directory",
    )
    add(
        "--tasks",
        type=split_tasks,
        metavar="A,B,...",
        help=".jsonl or .parquet files, arithmetic:... or Hub names (default: a run's evaluation.task)",
    )
    add("--step", type=whole(0), metavar="N", help="which checkpoint of a run (default: the newest)")
    add(
        "--engine",
        metavar="ENGINE",
        help=f"what samples: {', '.join(ENGINES)}, module:NAME or path.py:NAME (default: a run's own, else local)",
    )
    add("--engine_args", metavar="JSON", help="settings of an engine by path, as rollout.engine_args")
    add("--server", metavar="URL", help="with --engine http: http(s)://HOST:PORT or the path of a Unix socket")
    add("--precision", help="of the engine's weights, as rollout.precision (default: a run's own, else bfloat16)")
    add("--compute_dtype", help="of activations, as rollout.compute_dtype (default: a run's own, else bfloat16)")
    add("--kv_cache_dtype", help="of the key-value cache, as rollout.kv_cache_dtype (default: a run's own, else auto)")
    add("--samples", type=whole(1), metavar="K", help="completions a problem (default: the paper's K, others 8)")
    add("--temperature", type=temperature, default=0.7, help="default %(default)s, as the paper; 0 is greedy")
    add("--top_p", type=real(0, 1), default=1.0, help="nucleus mass, default %(default)s, as the paper")
    add(
        "--max_completion_tokens",
        type=whole(1),
        default=32768,
        metavar="N",
        help="end-of-sequence included (default: %(default)s, as the paper)",
    )
    add("--max_prompt_tokens", type=whole(1), metavar="N", help="leave longer prompts out (default: keep all)")
    add("--max_problems", type=whole(1), metavar="N", help="only the first N problems of each task (default: all)")
    add("--prompt_suffix", help="appended to each problem (default: a run's own, else that of task.prompt_suffix)")
    add("--chat_template_kwargs", metavar="JSON", help="as task.chat_template_kwargs (default: a run's own, else none)")
    add("--train_data", metavar="FILE", help="training problems, as task.train: report tasks' overlap with them")
    add("--drop_overlap", action="store_true", help="leave out the problems that --train_data has")
    add("--on_bad_row", choices=("error", "skip"), default="error", help="a malformed row (default: %(default)s)")
    add(
        "--max_rows",
        type=whole(1, _MOST_ROWS),
        default=256,
        metavar="N",
        help="completions decoded at a time (default: %(default)s)",
    )
    add(
        "--rewards",
        metavar="A,B,...",
        help="what a completion earns, as rewards.functions (default: a run's own, else math)",
    )
    add(
        "--reward_weights",
        type=_weights,
        metavar="W,W,...",
        help="as rewards.weights (default: those of a run's own rewards, else 1 for each)",
    )
    add(
        "--answer_extraction",
        choices=("strict", "flexible"),
        help="what is an answer, as rewards.answer_extraction (default: a run's own, else strict)",
    )
    add("--environment", metavar="NAME", help="plays completions in turns, as task.environment (default: a run's own)")
    add("--max_turns", type=whole(1, 1024), metavar="N", help="as task.max_turns (default: a run's own, else 4)")
    add("--max_turn_tokens", type=whole(1), metavar="N", help="as task.max_turn_tokens (default: a run's own)")
    add("--seed", type=whole(0, 2**32 - 1), default=0, help="of the samples (default: %(default)s)")
    add(
        "--problems_per_part",
        type=whole(1),
        metavar="N",
        help="problems sampled and saved together; part of what is evaluated (default: 4 x max_rows completions)",
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
