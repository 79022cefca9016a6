"""avg@K and pass@K of a model on any tasks, in the layout of the paper's tables.

    dcmdp evaluate MODEL --tasks aime24.jsonl,amc23.jsonl [--precision fp8] [--max_completion_tokens N]
    dcmdp evaluate MODEL --tasks aime24.jsonl --engine vllm                         stock vLLM, as a sidecar
    dcmdp evaluate MODEL --tasks aime24.jsonl --engine http --server URL            a vLLM server of your own

MODEL is a Hugging Face directory, or a run directory of training, or a checkpoint in it. The defaults are the
paper's evaluation: temperature 0.7, top-p 1, 32768 tokens, avg@32 on AIME24, AIME25 and AMC23, avg@4 on MATH-500,
Minerva and OlympiadBench, known by their file names: aime24, aime25, amc23, math500, minerva, olympiadbench.

The same command continues a killed evaluation; it ends with the same files as an uninterrupted one.

    dcmdp evaluate --table evaluation-*.json                       one table over methods and runs
    dcmdp evaluate MODEL --tasks amc23.jsonl --train_data dapo.jsonl [--drop_overlap]
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dcmdp_jax.commands.cli import keep_tracebacks_in
from dcmdp_jax.commands.evaluate_flags import parse, settings_of
from dcmdp_jax.commands.evaluate_tasks import check_room, load_tasks, samples_of, turn_sampler
from dcmdp_jax.config.arguments import as_settings, of_engine
from dcmdp_jax.config.engine import settings_beside_a_run
from dcmdp_jax.config.settings import Config, RewardSettings, from_saved, to_dict
from dcmdp_jax.data.prompts import EncodedPrompts, end_token_ids, load_tokenizer
from dcmdp_jax.engines.kind import EngineArguments, Workload
from dcmdp_jax.engines.protocol import Engine, EngineError, SamplingParams
from dcmdp_jax.engines.registry import ENGINES, find_engine
from dcmdp_jax.environments.turns import TurnSampler
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import EvaluationResult, describe
from dcmdp_jax.evaluation.log import EvaluationLog, open_output, write_json
from dcmdp_jax.evaluation.overlap import Overlap
from dcmdp_jax.evaluation.resumable import default_part, evaluate_in_parts
from dcmdp_jax.evaluation.table import (
    format_comparison,
    format_table,
    plain_average,
    read_scores,
    to_record,
)
from dcmdp_jax.models.config import ModelConfig, read_model_config
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.hf_hub import is_fetched, model_directory
from dcmdp_jax.models.hf_manifest import check_manifest
from dcmdp_jax.models.hf_weights import load_params
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.parallel.mesh import make_mesh, one_device_mesh
from dcmdp_jax.process_memory import release_freed_memory
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rewards.protocol import Reward
from dcmdp_jax.rewards.scoring import RewardScorer, check_rewards, column_names
from dcmdp_jax.run.directory import read_config as read_run_config
from dcmdp_jax.run.memory_use import plan_evaluation, this_machine
from dcmdp_jax.run.row_logprobs import make_probe
from dcmdp_jax.types import Params

_MOST_VERIFIERS = 8


@dataclasses.dataclass(frozen=True)
class _Model:
    """A model to evaluate, found and checked; its weights are not read yet.

    Attributes:
        name: for people.
        config: its shape.
        tokenizer: its directory; generation_config.json there names further end tokens.
        step: of a checkpoint, None for a Hugging Face directory.
        run: a run's directory and settings, None for a Hugging Face directory.
        weights: name, size and time of its files: a directory may get others under the same name.
        dtype: that the weights are loaded in for an engine of the given precision.
        load: reads the weights for an engine of the given precision.
    """

    name: str
    config: ModelConfig
    tokenizer: Path
    step: int | None
    run: tuple[Path, dict[str, Any]] | None
    weights: list[list[Any]]
    dtype: Callable[[str], str]
    load: Callable[[str], Params]


EXPECTED = (EngineError, MemoryError)
"""Failures whose message is enough."""


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), check all input, evaluate task by task, print the table."""
    arguments = parse(argv[1:])
    if arguments.table is not None:
        print(format_comparison([read_scores(path) for path in arguments.table]))
        return
    prepare_jax()
    model = _find_model(arguments.model, arguments.step)
    if model.run is not None:
        keep_tracebacks_in(model.run[0])
    settings = settings_of(arguments, model.run[1] if model.run else None)
    tokenizer = load_tokenizer(str(model.tokenizer.resolve()), vocab_size=model.config.vocab_size)
    stop = end_token_ids(tokenizer, model.tokenizer, vocab_size=model.config.vocab_size)
    tasks, overlaps = load_tasks(tokenizer, settings)
    longest = check_room(model.config, tasks, settings)
    sampling = SamplingParams(
        group_size=1,
        max_completion_tokens=settings["max_completion_tokens"],
        temperature=settings["temperature"],
        top_p=settings["top_p"],
        stop_token_ids=stop,
    )
    out, log = open_output(arguments.out, *_default_output(model), _header(model, tasks, settings))
    with log, contextlib.closing(_engine(model, tasks, longest, settings, out)) as engine:
        if find_engine(settings["engine"]).pushes:
            engine.push_weights(model.load(settings["precision"]), model.step or 0)
            release_freed_memory()
        with turn_sampler(engine, tokenizer, tasks, settings, longest) as turns:
            results = _evaluate(engine, turns, tokenizer, tasks, sampling, settings, log)
        method = arguments.method or model.name
        write_json(out, _record(method, model, settings, results, tasks, overlaps))
        log.close_finished()
    print(format_table(method, results, seed=settings["seed"]))
    if dropped := {name: prompts.dropped for name, prompts in tasks.items() if prompts.dropped}:
        said = ", ".join(f"{count} of {name}" for name, count in dropped.items())
        print(f"left out, prompt over --max_prompt_tokens={settings['max_prompt_tokens']}: {said}")
    for line in _describe_overlaps(results, tasks, overlaps, settings):
        print(line)
    print(f"completions: dcmdp view {log.path}")
    print(f"wrote {out}")


def _evaluate(
    engine: Engine,
    turns: TurnSampler | None,
    tokenizer: PreTrainedTokenizerBase,
    tasks: dict[str, EncodedPrompts],
    sampling: SamplingParams,
    settings: dict[str, Any],
    log: EvaluationLog,
) -> list[EvaluationResult]:
    results: list[EvaluationResult] = []
    # No budget: a score depends on the answers, not on how fast this machine is.
    with (
        Verifier(
            num_workers=min(os.cpu_count() or 1, _MOST_VERIFIERS),
            budget_s=0,
            extraction=settings.get("answer_extraction", "strict"),
        ) as verifier,
        contextlib.closing(_scorer(tasks, verifier, settings)) as scorer,
    ):
        for name, prompts in tasks.items():
            samples = samples_of(name, settings)
            began = time.monotonic()
            result = evaluate_in_parts(
                engine,
                scorer,
                tokenizer,
                prompts.token_ids,
                prompts.problems,
                dataclasses.replace(sampling, group_size=samples),
                task=name,
                seed=settings["seed"],
                problems_per_part=settings["problems_per_part"] or default_part(samples, settings["max_rows"]),
                log=log,
                turns=turns,
            )
            results.append(result)
            _report_progress(result, len(tasks), len(results), time.monotonic() - began)
            asked = [tokenizer.decode(ids) for ids in prompts.token_ids]
            print("\n".join(describe(result, asked, [problem.answer for problem in prompts.problems])), file=sys.stderr)
    return results


def _scorer(tasks: dict[str, EncodedPrompts], verifier: Verifier, settings: dict[str, Any]) -> RewardScorer:
    """The rewards of --rewards, loaded.

    Raises:
        RewardError: in one line, for a function that can't be called.
    """
    rewards = RewardSettings(settings.get("rewards", "math"), tuple(settings.get("reward_weights", ())))
    chosen = [Reward(*each) for each in rewards.weighted]
    columns = column_names([problem for prompts in tasks.values() for problem in prompts.problems])
    check_rewards(chosen, columns)
    return RewardScorer(chosen, verifier, columns, by_source=False, timeout_s=rewards.timeout, stop_on_error=True)


def _find_model(path: Path, step: int | None) -> _Model:
    name = path.resolve().name
    if is_fetched(str(path)):
        path = model_directory(str(path))
    elif not path.is_dir():
        raise UserError(f"MODEL {path}: no such directory")
    resolved = path.resolve()
    if (resolved / "checkpoints").is_dir() or "checkpoints" in (resolved.name, resolved.parent.name):
        return _checkpoint_model(resolved, step)
    if step is not None:
        raise UserError(f"--step: got {step}, but {path} is no run directory; only a run's checkpoints have steps")
    config = read_model_config(path)
    manifest = check_manifest(path, config)

    def dtype(precision: str) -> str:
        # What is stored as bfloat16, or will be bfloat16 in the engine, loses nothing when it is loaded so.
        narrow = set(manifest.dtypes) == {"BF16"} or precision == "bfloat16"
        return "bfloat16" if narrow else "float32"

    def load(precision: str) -> Params:
        return load_params(path, config, dtype=dtype(precision))

    return _Model(name, config, path, None, None, _fingerprint(path.glob("*.safetensors")), dtype, load)


def _checkpoint_model(path: Path, step: int | None) -> _Model:
    # Orbax takes seconds to import; only a checkpoint needs it.
    from dcmdp_jax.training.checkpoint import load_model_config, load_params_only

    config, found, tokenizer = load_model_config(path, step)
    run_dir = tokenizer.parent
    run = to_dict(read_run_config(run_dir))

    def load(precision: str) -> Params:
        del precision  # the engine converts from the master parameters, as it does while training
        return load_params_only(path, found)[0]

    def dtype(precision: str) -> str:
        del precision
        return run["model"]["param_dtype"]

    files = _fingerprint((run_dir / "checkpoints" / str(found)).iterdir())
    return _Model(f"{run_dir.name} step {found}", config, tokenizer, found, (run_dir, run), files, dtype, load)


def _fingerprint(files: Iterable[Path]) -> list[list[Any]]:
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]


def _engine(
    model: _Model, tasks: dict[str, EncodedPrompts], longest: int, settings: dict[str, Any], out: Path
) -> Engine:
    """The engine for prompts up to `longest` tokens. A sidecar's log goes beside `out`."""
    kind = find_engine(settings["engine"])
    rollout = (from_saved(model.run[1]) if model.run else Config()).rollout
    own = {} if settings["server"] is None else {"server": settings["server"]}
    names = of_engine(kind) | {name: f"--{name}" for name in (*kind.choices, "max_rows", "engine", "engine_args", *own)}
    names["max_completion_tokens"] = "--max_completion_tokens"
    with as_settings(names):
        arguments = EngineArguments(
            **{name: settings[name] for name in ("precision", "compute_dtype", "kv_cache_dtype", "max_rows")},
            max_total_tokens=longest + settings["max_completion_tokens"],
            min_rows=rollout.min_rows,
            settings=settings_beside_a_run(rollout, kind, settings.get("engine_args") or json.dumps(own) * bool(own)),
            directory=out.with_suffix(f".{kind.name}" if kind in ENGINES.values() else ".engine"),
            model=model.config,
            mesh=lambda tensor=1, expert=1: make_mesh(data=-1, tensor=tensor, expert=expert),
            probe=lambda: make_probe(model.config, Compute(), one_device_mesh()),
        )
        kind.check(arguments)
        arguments = dataclasses.replace(arguments, platform=kind.check_machine(arguments))
        kind.check(arguments)
    load = Workload(
        completions=max(len(prompts.token_ids) * samples_of(name, settings) for name, prompts in tasks.items()),
        group_size=1,
        prompt_lengths=[len(ids) for prompts in tasks.values() for ids in prompts.token_ids],
        max_completion_tokens=settings["max_completion_tokens"],
        param_dtype=model.dtype(settings["precision"]),
        training=False,
    )
    memory = plan_evaluation(kind, arguments, load, this_machine(make_mesh(data=-1).devices.flat[0].platform), names)
    memory.check()
    if memory.rows < settings["max_rows"]:
        print(f"{memory.rows} rows at a time (--max_rows={settings['max_rows']} does not fit)", file=sys.stderr)
    with as_settings(names):
        return kind.start(dataclasses.replace(arguments, max_rows=memory.rows))


def _describe_overlaps(
    results: list[EvaluationResult],
    tasks: dict[str, EncodedPrompts],
    overlaps: dict[str, list[Overlap]],
    settings: dict[str, Any],
) -> Iterator[str]:
    for result in results:
        shared = {overlap.problem for overlap in overlaps.get(result.task, ())}
        if not shared:
            continue
        said = f"overlap of {result.task} with {settings['train_data']}: {len(shared)} problems"
        if settings["drop_overlap"]:
            yield f"{said}, left out"
        else:
            rest = [place for place in range(len(tasks[result.task].problems)) if place not in shared]
            alone = f"{100 * result.select(rest).average:.1f}" if rest else "no problem"
            yield f"{said}; avg@{result.samples} is {100 * result.average:.1f}, without them {alone}"


def _default_output(model: _Model) -> tuple[Path, str]:
    """Directory and stem of the output's name."""
    stem = f"evaluation-{model.name if model.step is None else model.step}"
    return (model.run[0] if model.run else Path.cwd()), stem


def _header(model: _Model, tasks: dict[str, EncodedPrompts], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that changes a score: a continued evaluation must have the same."""

    def digest(prompts: EncodedPrompts) -> str:
        asked = [
            (ids.tolist(), problem.answer) for ids, problem in zip(prompts.token_ids, prompts.problems, strict=True)
        ]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    return {
        "model": model.name,
        "step": model.step,
        "weights": model.weights,
        "settings": settings,
        "problems": {name: digest(prompts) for name, prompts in tasks.items()},
    }


def _record(
    method: str,
    model: _Model,
    settings: dict[str, Any],
    results: list[EvaluationResult],
    tasks: dict[str, EncodedPrompts],
    overlaps: dict[str, list[Overlap]],
) -> dict[str, Any]:
    def record(result: EvaluationResult) -> dict[str, Any]:
        prompts = tasks[result.task]
        rows = [problem.index for problem in prompts.problems]
        made = {**to_record(result, seed=settings["seed"]), "dropped_prompts": prompts.dropped, "problem_rows": rows}
        if overlaps:
            made["overlap"] = [overlap._asdict() for overlap in overlaps[result.task]]
        return made

    return {
        "method": method,
        "model": model.name,
        "step": model.step,
        "settings": settings,
        "average": plain_average(results),
        "tasks": {result.task: record(result) for result in results},
    }


def _report_progress(result: EvaluationResult, tasks: int, done: int, seconds: float) -> None:
    completions = result.scores.size
    rate = completions * result.length_mean / seconds
    print(
        f"[{done}/{tasks}] {result.task}: avg@{result.samples} {100 * result.average:.1f}, "
        f"{len(result.scores)} problems, {completions} completions, {seconds:.1f} s, {rate:,.0f} tokens/s",
        file=sys.stderr,
        flush=True,
    )
