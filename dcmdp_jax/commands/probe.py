"""Disagreement of two engines on the same tokens: how much, where, and why.

    dcmdp probe PATH...                                       what a framework, or a run of ours, recorded
    dcmdp probe PATH... --train-column NAME --rollout-column NAME              two columns of any other file
    dcmdp probe --model DIR --task FILE --a vllm:bfloat16 --b trainer          sample with a, score with b
    dcmdp probe --config FILE                                 a run's engine against its training stack
    dcmdp probe --config FILE --remedies                      which remedy brings its gradient nearest

Writes probe.json, probe.html and plots/*.png into --out and prints the table and the likely cause. docs/probe.md has
the engines' names and what the causes rest on. With --remedies it writes remedies.json and remedies.png in their place.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from dcmdp_jax.commands import probe_recordings
from dcmdp_jax.commands.arguments import output_directory, real, temperature, whole
from dcmdp_jax.commands.cli import Parser
from dcmdp_jax.commands.flags import parse as parse_config
from dcmdp_jax.commands.sweep import load_study
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.config.arguments import as_settings
from dcmdp_jax.config.engine import settings_beside_a_run
from dcmdp_jax.config.rollout import TRAINABLE
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.engines.kind import EngineKind
from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.mismatch import page
from dcmdp_jax.lab.mismatch.analysis import Measured, analyze
from dcmdp_jax.lab.oracle.oracle import ask
from dcmdp_jax.lab.probe.models import load_model, run_directory
from dcmdp_jax.lab.probe.session import Session, check_specs, probe_pairs
from dcmdp_jax.lab.probe.specs import ProbeSpec, parse_spec
from dcmdp_jax.models.hf_hub import is_fetched, model_directory
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.run.directory import read_config

_MAX_ROWS = 256
_MAX_COMPLETION_TOKENS = 256


EXPECTED = (EngineError, MemoryError)
"""Failures whose message is enough."""


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), measure, conclude, write and print."""
    arguments = _parser().parse_args(argv[1:])
    recorded = probe_recordings.given(arguments)
    if sum(map(bool, (recorded, arguments.model, arguments.config))) != 1:
        raise UserError("give one of PATH (a recording), --model DIR and --config FILE; see --help")
    if arguments.remedies:
        if recorded:
            raise UserError(
                "--remedies needs --model or --config: a recording has no weights to take a gradient at, and no exact "
                "engine's samples"
            )
        _compare_remedies(arguments)
        return
    if recorded:
        title, measured = probe_recordings.measure(arguments)
    else:
        title, measured = _probed(arguments)
    analyses = [analyze(one, arguments.tolerance) for one in measured]
    print(page.table(analyses))
    print(f"wrote {page.write(title, measured, analyses, arguments.out)}")


def _parser() -> Parser:
    parser = Parser("probe", description="How far two engines disagree on the same tokens, and why.")
    probe_recordings.add_arguments(parser)
    live = parser.add_argument_group("engines").add_argument
    live(
        "--model",
        type=Path,
        metavar="DIR",
        help="Hugging Face directory, OWNER/NAME[@REVISION] on the Hub, run directory, or checkpoint",
    )
    live(
        "--config", metavar="FILE[:ARGUMENT]", help="a config file: its model.path or last checkpoint, task and engine"
    )
    live("--a", action="append", type=_engine, metavar="ENGINE", help="samples; may be given several times")
    live("--b", type=_engine, default=parse_spec("trainer"), metavar="ENGINE", help="scores (default: trainer)")
    live("--task", metavar="TASK", help="file, arithmetic:... or Hub name (default: a run's own)")
    live("--prompts", type=whole(1), default=32, metavar="N", help="problems to ask (default: %(default)s)")
    live("--completions", type=whole(1), default=8, metavar="K", help="of each problem (default: %(default)s)")
    live("--max-completion-tokens", type=whole(1), metavar="N", help="default: a run's own, else 256")
    live("--temperature", type=temperature, metavar="T", help="of sampling (default: a run's own, else 1)")
    live("--score-temperature", type=temperature, metavar="T", help="that b scores at (default: as sampled)")
    live("--top-p", type=real(0, 1), default=1.0, metavar="P", help="nucleus mass of sampling (default: %(default)s)")
    live("--engine-args", default="", metavar="JSON", help="settings of an engine by path (default: a run's own)")
    live("--earlier", action="append", type=Path, metavar="DIR", help="weights that a may still hold, all or in part")
    live("--remedies", action="store_true", help="compare the gradients that remedies give with an exact engine's")
    live(
        "--study", metavar="FILE[:ARGUMENT]",
        help="for --remedies: compare the arms of a study in place of every remedy",
    )  # fmt: skip
    live(
        "--batches", type=whole(4), default=16, metavar="N", help="of each engine for --remedies (default: %(default)s)"
    )
    live("--no-rescoring", action="store_true", help="name the cause from the two columns alone")
    live("--seed", type=whole(0, 2**32 - 1), default=0, help="of the samples (default: %(default)s)")
    add = parser.add_argument
    add("--tolerance", type=real(0, 1), metavar="C", help="budget to count completions over (default: the recommended)")
    out = Path("runs/probe")
    add("--out", type=output_directory, default=out, metavar="DIR", help="where to write (default: %(default)s)")
    return parser


def _engine(text: str) -> ProbeSpec:
    try:
        return parse_spec(text)
    except UserError as error:  # a ValueError, whose message argparse would drop
        raise argparse.ArgumentTypeError(str(error)) from error


def _probed(arguments: argparse.Namespace) -> tuple[str, list[Measured]]:
    session, first, _ = _session(arguments)
    return f"Mismatch of engines on {session.model.name}", probe_pairs(session, first, arguments.b)


def _compare_remedies(arguments: argparse.Namespace) -> None:
    # Only this draws its figure.
    from dcmdp_jax.lab.oracle import page as oracle_page

    if arguments.b != parse_spec("trainer"):
        raise UserError(f"--b: got {arguments.b}; --remedies compares with the training stack itself, leave it out")
    if arguments.top_p < 1:
        raise UserError(f"--top-p: got {arguments.top_p}; --remedies compares whole distributions, leave it out")
    arms = _arms(arguments.study) if arguments.study else None
    session, first, algorithm = _session(arguments)
    results = []
    with Verifier(budget_s=0) as verifier:
        grade = lambda texts, answers: verifier.grade(texts, answers).rewards  # noqa: E731
        for verdicts in ask(session, first, algorithm, batches=arguments.batches, grade=grade, arms=arms):
            results.append(verdicts)
            print(oracle_page.table(verdicts), flush=True)
            # Each engine takes minutes: what is known stays if the next one fails.
            paths = oracle_page.write(results, arguments.out)
    print(f"wrote {', '.join(map(str, paths))}")


def _arms(given: str) -> dict[str, AlgorithmSettings]:
    """Each different algorithm of a study's arms, by the first arm that has it; without those no longer run."""
    found: dict[str, AlgorithmSettings] = {}
    for arm, one in load_study(given).arms.items():
        algorithm = None if one.past else parse_config(["train", *one.arguments()]).config.algorithm
        if algorithm is not None and algorithm not in found.values():
            found[arm] = algorithm
    return found


def _session(arguments: argparse.Namespace) -> tuple[Session, list[ProbeSpec], AlgorithmSettings]:
    """What is probed, the engines that sample, and the settings of the algorithm."""
    config = parse_config(["", f"--config={arguments.config}"]).config if arguments.config else None
    first = arguments.a or ([_spec_of(config)] if config else [])
    if not first:
        raise UserError("--a is missing: name the engine that samples, for example --a=local:fp8 or --a=vllm:bfloat16")
    check_specs(first, arguments.b)
    path = _model_of(config) if config else arguments.model
    if is_fetched(str(path)):
        path = model_directory(str(path))
    run = run_directory(path)
    settings = config or (read_config(run) if run else None)
    task = arguments.task or (settings.task.train if settings else None)
    if task is None:
        raise UserError("--task is missing: a file, arithmetic:... or a Hub name")
    known = settings or Config()
    engine_args = arguments.engine_args or (settings.rollout.engine_args if settings else "")

    @functools.cache
    def own_settings(kind: EngineKind) -> Any:
        with as_settings({"engine_args": "--engine-args"}):
            return settings_beside_a_run(known.rollout, kind, "" if kind in TRAINABLE.values() else engine_args)

    for kind in {spec.record for spec in (*first, arguments.b)} - {None}:
        count = max(spec.record is kind for spec in first) + (arguments.b.record is kind)
        kind.share_devices(own_settings(kind), count)
    prepare_jax()
    model = load_model(path)
    rollout = known.rollout
    sampled_at = arguments.temperature if arguments.temperature is not None else rollout.temperature
    if sampled_at == 0 and arguments.score_temperature is None:
        raise UserError("--temperature: got 0 (greedy), whose log-probs are those at 1; give --score-temperature=1")
    limit = arguments.max_completion_tokens or (rollout.max_completion_tokens if settings else _MAX_COMPLETION_TOKENS)
    session = Session(
        model=model,
        problems=load_problems(task, limit=arguments.prompts, answers="unused"),
        prompt_suffix=known.task.prompt_suffix,
        chat_template_kwargs=known.task.chat_template_kwargs,
        sampling=SamplingParams(arguments.completions, limit, sampled_at, arguments.top_p),
        score_temperature=sampled_at if arguments.score_temperature is None else arguments.score_temperature,
        seed=arguments.seed,
        earlier=[load_model(path) for path in arguments.earlier or ()],
        load=functools.cache(load_model),
        settings=own_settings,
        max_rows=_MAX_ROWS,
        rescore=not arguments.no_rescoring,
        show=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return session, first, known.algorithm if settings else AlgorithmSettings()


def _spec_of(config: Config) -> ProbeSpec:
    """The engine that a config samples with."""
    rollout = config.rollout
    return ProbeSpec(rollout.engine, rollout.precision, rollout.compute_dtype, rollout.kv_cache_dtype)


def _model_of(config: Config) -> Path:
    """The run's newest checkpoint if there is one, else the model it starts from."""
    if (Path(config.run_dir) / "checkpoints").is_dir():
        return Path(config.run_dir)
    if config.model.path:
        return model_directory(config.model.path)
    raise UserError(f"--config: {config.run_dir} has no checkpoint and the config no model.path; train first")
