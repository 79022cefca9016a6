"""avg@K and pass@K of a model on any tasks, in the layout of the paper's tables.

    python -m bin.evaluate MODEL --tasks aime24.jsonl,amc23.jsonl [--precision fp8] [--max_completion_tokens N]
    python -m bin.evaluate MODEL --tasks aime24.jsonl --engine vllm                         stock vLLM, as a sidecar
    python -m bin.evaluate MODEL --tasks aime24.jsonl --engine remote --server URL          a vLLM server of your own

MODEL is a Hugging Face directory, or a run directory (or a checkpoint in it) written by bin.train. The defaults are the
paper's evaluation: temperature 0.7, top-p 1, 32768 tokens, avg@32 on AIME24, AIME25 and AMC23, avg@4 on MATH-500,
Minerva and OlympiadBench, known by their file names: aime24, aime25, amc23, math500, minerva, olympiadbench.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from bin.arguments import UNLIMITED, real, split_tasks, temperature, whole
from bin.cli import Parser, keep_tracebacks_in, run_main
from configs.base import get_config
from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.config import ENGINE_CHOICES, VllmSettings, to_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.average import EvaluationResult, evaluate
from dcmdp_jax.evaluation.size import check_size
from dcmdp_jax.evaluation.table import format_table, paper_samples, plain_average, to_record
from dcmdp_jax.inputs import shorten
from dcmdp_jax.models.config import ModelConfig, read_config
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.hf_manifest import check_manifest
from dcmdp_jax.models.hf_weights import load_params
from dcmdp_jax.parallel.compile_cache import enable_compile_cache
from dcmdp_jax.parallel.cpu import set_cpu_devices
from dcmdp_jax.parallel.mesh import make_mesh, one_device_mesh
from dcmdp_jax.process_memory import release_freed_memory
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rollout.engine import Engine, EngineError, SamplingParams
from dcmdp_jax.rollout.engines import ENGINES, EngineSpec
from dcmdp_jax.rollout.vllm.launch import check_installation, check_temperature
from dcmdp_jax.tasks.problems import load_problems
from dcmdp_jax.tasks.prompts import EncodedPrompts, encode_prompts, end_token_ids, load_tokenizer
from dcmdp_jax.training.build import make_probe
from dcmdp_jax.training.memory_parts import plan_engine_memory
from dcmdp_jax.training.memory_plan import free_host_bytes, this_machine
from dcmdp_jax.training.run_directory import read_config as read_run_config
from dcmdp_jax.types import Params

_MOST_VERIFIERS = 8
# More in flight than any engine decodes; vLLM allocates for each.
_MOST_ROWS = 65536


@dataclasses.dataclass(frozen=True)
class _Model:
    """A model to evaluate, found and checked; its weights are not read yet.

    Attributes:
        name: for people.
        config: its shape.
        tokenizer: its directory; generation_config.json there names further end tokens.
        step: of a checkpoint, None for a Hugging Face directory.
        run: a run's directory and settings, None for a Hugging Face directory.
        dtype: that the weights are loaded in for an engine of the given precision.
        load: reads the weights for an engine of the given precision.
    """

    name: str
    config: ModelConfig
    tokenizer: Path
    step: int | None
    run: tuple[Path, dict[str, Any]] | None
    dtype: Callable[[str], str]
    load: Callable[[str], Params]


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), check all input, evaluate task by task, print the table."""
    arguments = _parser().parse_args(argv[1:])
    enable_compile_cache()
    set_cpu_devices(0)
    model = _find_model(arguments.model, arguments.step)
    if model.run is not None:
        keep_tracebacks_in(model.run[0])
    settings = _settings(arguments, model)
    tokenizer = _tokenizer(model)
    tasks = {name: _prompts(location, tokenizer, settings) for name, location in settings["tasks"].items()}
    sampling = SamplingParams(
        group_size=1,
        max_completion_tokens=settings["max_completion_tokens"],
        temperature=settings["temperature"],
        top_p=settings["top_p"],
        stop_token_ids=end_token_ids(tokenizer, model.tokenizer),
    )
    for name, prompts in tasks.items():
        check_size(
            name,
            len(prompts.problems),
            _samples(name, settings),
            settings["max_completion_tokens"],
            free=free_host_bytes(),
        )
    out = _out_path(arguments.out, model)
    with contextlib.closing(_engine(model, tasks, settings, out)) as engine:
        if settings["engine"] != "remote":
            engine.push_weights(model.load(settings["precision"]), model.step or 0)
            release_freed_memory()
        results = _evaluate(engine, model, tokenizer, tasks, sampling, settings, arguments.method, out)
    print(format_table(arguments.method or model.name, results))
    if dropped := {name: prompts.dropped for name, prompts in tasks.items() if prompts.dropped}:
        said = ", ".join(f"{count} of {name}" for name, count in dropped.items())
        print(f"left out, prompt over --max_prompt_tokens={settings['max_prompt_tokens']}: {said}")
    print(f"wrote {out}")


def _evaluate(
    engine: Engine,
    model: _Model,
    tokenizer: PreTrainedTokenizerBase,
    tasks: dict[str, EncodedPrompts],
    sampling: SamplingParams,
    settings: dict[str, Any],
    method: str | None,
    out: Path,
) -> list[EvaluationResult]:
    results: list[EvaluationResult] = []
    # No budget: a score depends on the answers, not on how fast this machine is.
    with Verifier(num_workers=min(os.cpu_count() or 1, _MOST_VERIFIERS), budget_s=0) as verifier:
        for name, prompts in tasks.items():
            samples = _samples(name, settings)
            began = time.monotonic()
            result = evaluate(
                engine,
                verifier,
                tokenizer,
                prompts.token_ids,
                [problem.answer for problem in prompts.problems],
                dataclasses.replace(sampling, group_size=samples),
                task=name,
                seed=settings["seed"],
            )
            results.append(result)
            _report_progress(result, len(tasks), len(results), time.monotonic() - began)
            # After every task: a long evaluation that dies keeps what it has.
            record = _record(method or model.name, model, settings, results, tasks)
            atomic_write(out, json.dumps(record, indent=2, allow_nan=False) + "\n")
    return results


def _samples(task: str, settings: dict[str, Any]) -> int:
    return settings["samples"] or paper_samples(task)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m bin.evaluate",
        description="avg@K and pass@K of a Hugging Face directory or a checkpoint, in the paper's table layout.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="Hugging Face directory, run directory, or checkpoint directory")
    add(
        "--tasks",
        type=split_tasks,
        metavar="A,B,...",
        help=".jsonl or .parquet files, arithmetic:... or Hub names (default: a run's evaluation.task)",
    )
    add("--step", type=whole(0), metavar="N", help="which checkpoint of a run (default: the newest)")
    add("--engine", choices=tuple(ENGINES), help="what samples (default: a run's own, else local)")
    add("--server", metavar="URL", help="with --engine remote: http(s)://HOST:PORT or the path of a Unix socket")
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
    add("--max_problems", type=whole(1), metavar="N", help="only the first N rows of each task (default: all)")
    add("--prompt_suffix", help="appended to each problem (default: a run's own, else the default)")
    add("--on_bad_row", choices=("error", "skip"), default="error", help="a malformed row (default: %(default)s)")
    add(
        "--max_rows",
        type=whole(1, _MOST_ROWS),
        default=256,
        metavar="N",
        help="completions decoded at a time (default: %(default)s)",
    )
    add("--seed", type=whole(0, 2**32 - 1), default=0, help="of the samples (default: %(default)s)")
    add("--method", metavar="NAME", help="label of the table's row (default: MODEL's name)")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON with every problem's mean, replaced if it is there (default: a new evaluation-*.json in the run "
        "directory, or here for a Hugging Face directory)",
    )
    return parser


def _find_model(path: Path, step: int | None) -> _Model:
    if not path.is_dir():
        raise UserError(f"MODEL {path}: no such directory")
    resolved = path.resolve()
    if (resolved / "checkpoints").is_dir() or "checkpoints" in (resolved.name, resolved.parent.name):
        return _checkpoint_model(resolved, step)
    if step is not None:
        raise UserError(f"--step: got {step}, but {path} is no run directory; only a run's checkpoints have steps")
    config = read_config(path)
    manifest = check_manifest(path, config)

    def dtype(precision: str) -> str:
        # What is stored as bfloat16, or will be bfloat16 in the engine, loses nothing when it is loaded so.
        narrow = set(manifest.dtypes) == {"BF16"} or precision == "bfloat16"
        return "bfloat16" if narrow else "float32"

    def load(precision: str) -> Params:
        return load_params(path, config, dtype=dtype(precision))

    return _Model(resolved.name, config, path, None, None, dtype, load)


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

    return _Model(f"{run_dir.name} step {found}", config, tokenizer, found, (run_dir, run), dtype, load)


def _settings(arguments: argparse.Namespace, model: _Model) -> dict[str, Any]:
    """The arguments, with the run's own values, or those of configs/base.py, where they say nothing."""
    base = get_config()
    run = model.run[1] if model.run else base.to_dict()
    given = {name: value for name, value in vars(arguments).items() if name not in ("model", "method", "out", "step")}
    defaults = {
        "engine": run["rollout"]["engine"],
        "prompt_suffix": run["task"]["prompt_suffix"],
        "precision": run["rollout"]["precision"],
        "compute_dtype": run["rollout"]["compute_dtype"],
        "kv_cache_dtype": run["rollout"]["kv_cache_dtype"],
    }
    for name, value in defaults.items():
        given[name] = value if given[name] is None else given[name]
    for name, allowed in ENGINE_CHOICES.get(given["engine"], {}).items():
        option = name.removeprefix("rollout.")
        if given[option] not in allowed:
            raise UserError(
                f"--{option}: got {shorten(given[option])}, allowed with --engine {given['engine']} are "
                f"{', '.join(allowed)}"
            )
    if (given["engine"] == "remote") != (given["server"] is not None):
        raise UserError("--server: goes with --engine remote, which needs it: http(s)://HOST:PORT or a socket's path")
    if given["engine"] != "local":
        check_temperature(given["temperature"], "--temperature")
    if given["tasks"] is None:
        if not run["evaluation"]["task"]:
            raise UserError("--tasks is missing; for example --tasks=aime24.jsonl,math500.jsonl")
        given["tasks"] = split_tasks(run["evaluation"]["task"])
    return given


def _tokenizer(model: _Model) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(str(model.tokenizer.resolve()))
    if len(tokenizer) > model.config.vocab_size:
        raise UserError(
            f"tokenizer {model.tokenizer}: {len(tokenizer)} tokens, but the model has {model.config.vocab_size}; "
            "use the model's own tokenizer"
        )
    return tokenizer


def _prompts(location: str, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> EncodedPrompts:
    problems = load_problems(location, split="test", limit=settings["max_problems"], on_bad_row=settings["on_bad_row"])
    limit = settings["max_prompt_tokens"] or UNLIMITED
    return encode_prompts(problems, tokenizer, prompt_suffix=settings["prompt_suffix"], max_prompt_tokens=limit)


def _engine(model: _Model, tasks: dict[str, EncodedPrompts], settings: dict[str, Any], out: Path) -> Engine:
    """The engine, if the longest prompt and completion fit the model. A sidecar's log goes beside `out`."""
    longest, name = max((max(map(len, prompts.token_ids)), name) for name, prompts in tasks.items())
    room = model.config.max_position_embeddings - longest
    if room < 1:
        raise UserError(
            f"--tasks: the longest prompt of {name} has {longest} tokens and leaves no room in the model's "
            f"max_position_embeddings={model.config.max_position_embeddings}; --max_prompt_tokens leaves it out"
        )
    if settings["max_completion_tokens"] > room:
        raise UserError(
            f"--max_completion_tokens: got {settings['max_completion_tokens']}, with the longest prompt ({longest} "
            f"tokens, {name}) more than the model's max_position_embeddings={model.config.max_position_embeddings}; "
            f"--max_completion_tokens={room} fits"
        )
    precision = {name: settings[name] for name in ("precision", "compute_dtype", "kv_cache_dtype")}
    rollout = model.run[1]["rollout"] if model.run else get_config().rollout.to_dict()
    sidecar = VllmSettings(**rollout["vllm"])
    if settings["engine"] == "vllm":
        # Before the mesh: on a shared GPU this says how much memory JAX may take when it starts.
        check_installation(sidecar, settings["precision"])
    elif settings["engine"] == "local":
        plan_engine_memory(
            model.config, this_machine(make_mesh(data=-1).devices.flat[0].platform), **precision,
            param_dtype=model.dtype(settings["precision"]), max_rows=settings["max_rows"],
            prompt_lengths=[len(ids) for prompts in tasks.values() for ids in prompts.token_ids],
            completions=max(len(prompts.token_ids) * _samples(name, settings) for name, prompts in tasks.items()),
            max_completion_tokens=settings["max_completion_tokens"],
        ).check()  # fmt: skip
    spec = EngineSpec(
        model=model.config,
        **precision,
        max_total_tokens=longest + settings["max_completion_tokens"],
        max_rows=settings["max_rows"],
        min_rows=get_config().rollout.min_rows,
        mesh=lambda: make_mesh(data=-1),
        probe=lambda: make_probe(model.config, Compute(), one_device_mesh()),
        vllm=sidecar,
        directory=out.with_suffix(".vllm"),
        server=settings["server"] or "",
    )
    return ENGINES[settings["engine"]](spec)


def _out_path(out: Path | None, model: _Model) -> Path:
    """Where the JSON goes, found writable; without --out a name that is free."""
    if out is None:
        directory = model.run[0] if model.run else Path.cwd()
        stem = f"evaluation-{model.name if model.step is None else model.step}"
        out, number = directory / f"{stem}.json", 1
        while out.exists():
            number += 1
            out = directory / f"{stem}-{number}.json"
    if out.is_dir():
        raise UserError(f"--out: {out} is a directory, name a file")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK | os.X_OK):
        raise UserError(f"--out: {out} can't be written, {out.parent} is no directory one can write to")
    return out


def _record(
    method: str,
    model: _Model,
    settings: dict[str, Any],
    results: list[EvaluationResult],
    tasks: dict[str, EncodedPrompts],
) -> dict[str, Any]:
    def record(result: EvaluationResult) -> dict[str, Any]:
        prompts = tasks[result.task]
        rows = [problem.index for problem in prompts.problems]
        return {**to_record(result), "dropped_prompts": prompts.dropped, "problem_rows": rows}

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


if __name__ == "__main__":
    run_main(main, expected=(EngineError, MemoryError))
