"""Disagreement of two engines on the same tokens: how much, where, and why.

    python -m bin.probe --recording FILE --train-column NAME --rollout-column NAME     two recorded columns, no model
    python -m bin.probe --model DIR --task FILE --a vllm:bfloat16 --b trainer          sample with a, score with b
    python -m bin.probe --config FILE                                 a run's engine against its training stack

Writes probe.json, probe.html and plots/*.png into --out and prints the table and the likely cause. docs/probe.md has
the engines' names and what the causes rest on.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from bin.arguments import output_directory, real, temperature, whole
from bin.cli import Parser, run_main
from bin.flags import parse as parse_config
from configs.base import get_config
from dcmdp_jax.config.settings import Config, VllmSettings
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.prompts import load_tokenizer
from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from dcmdp_jax.engines.vllm.launch import share_memory
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.mismatch import page
from dcmdp_jax.lab.mismatch.analysis import Measured, analyze
from dcmdp_jax.lab.mismatch.recording import Columns, read_recording
from dcmdp_jax.lab.probe.models import load_model, run_directory
from dcmdp_jax.lab.probe.session import Session, check_specs, probe_pairs
from dcmdp_jax.lab.probe.specs import ProbeSpec, parse_spec
from dcmdp_jax.parallel.compile_cache import enable_compile_cache
from dcmdp_jax.parallel.cpu import set_cpu_devices
from dcmdp_jax.training.run_directory import read_config

_MAX_TOKENS = 5_000_000
_MAX_ROWS = 256
_MAX_COMPLETION_TOKENS = 256


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), measure, conclude, write and print."""
    arguments = _parser().parse_args(argv[1:])
    given = [name for name in ("recording", "model", "config") if getattr(arguments, name)]
    if len(given) != 1:
        raise UserError("give one of --recording FILE, --model DIR and --config FILE; see --help")
    if arguments.recording:
        title, measured = f"Mismatch of {arguments.recording.name}", [_recorded(arguments)]
    else:
        title, measured = _probed(arguments)
    analyses = [analyze(one, arguments.tolerance) for one in measured]
    print(page.table(analyses))
    print(f"wrote {page.write(title, measured, analyses, arguments.out)}")


def _parser() -> Parser:
    parser = Parser(prog="python -m bin.probe", description="How far two engines disagree on the same tokens, and why.")
    recording = parser.add_argument_group("a recording").add_argument
    recording("--recording", type=Path, metavar="FILE", help=".parquet or .jsonl with one completion a row")
    recording("--token-column", default="token_ids", metavar="NAME", help="lists of token ids (default: %(default)s)")
    recording("--train-column", metavar="NAME", help="lists of the training stack's log-probs, nats")
    recording("--rollout-column", metavar="NAME", help="lists of the engine's log-probs, nats")
    recording("--mask-column", default="", metavar="NAME", help="1 on sampled tokens (default: all are)")
    recording("--entropy-column", default="", metavar="NAME", help="the training stack's entropies (default: none)")
    recording("--lag-column", default="", metavar="NAME", help="age in steps of the weights that sampled")
    recording("--advantage-column", default="", metavar="NAME", help="a number for each completion")
    recording("--reward-column", default="", metavar="NAME", help="in its place: a number for each completion")
    recording("--group-column", default="", metavar="NAME", help="with --reward-column: which prompt it answers")
    recording(
        "--max-tokens", type=whole(1), default=_MAX_TOKENS, metavar="N", help="above it, an even share of the rows"
    )
    recording("--tokenizer", metavar="DIR", help="shows tokens as text (default: ids)")
    live = parser.add_argument_group("engines").add_argument
    live("--model", type=Path, metavar="DIR", help="Hugging Face directory, run directory, or checkpoint")
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
    live("--earlier", action="append", type=Path, metavar="DIR", help="weights that a may still hold, all or in part")
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


def _recorded(arguments: argparse.Namespace) -> Measured:
    for option, content in (("token", "token ids"), ("train", "train log-probs"), ("rollout", "rollout log-probs")):
        if not getattr(arguments, f"{option}_column"):
            raise UserError(f"--{option}-column is missing: name the column of the {content}")
    if bool(arguments.reward_column) != bool(arguments.group_column):
        raise UserError("--reward-column and --group-column belong together: rewards are compared within a group")
    if arguments.reward_column and arguments.advantage_column:
        raise UserError("give --advantage-column or --reward-column, not both")
    columns = Columns(
        arguments.token_column, arguments.train_column, arguments.rollout_column, arguments.mask_column,
        arguments.entropy_column, arguments.lag_column, arguments.advantage_column, arguments.reward_column,
        arguments.group_column,
    )  # fmt: skip
    recording = read_recording(arguments.recording, columns, max_tokens=arguments.max_tokens)
    kept = "all" if recording.kept_every == 1 else f"every {recording.kept_every}th"
    source = {
        "recording": str(arguments.recording), "training stack": columns.train, "engine": columns.rollout,
        "rows": f"{recording.rows:,}, {kept} used",
    }  # fmt: skip
    return Measured(arguments.recording.stem, source, recording.pairs, _text(arguments.tokenizer))


def _text(tokenizer: str | None) -> Callable[[int], str] | None:
    if tokenizer is None:
        return None
    loaded = load_tokenizer(tokenizer)
    return functools.cache(lambda token: loaded.decode([token]))


def _probed(arguments: argparse.Namespace) -> tuple[str, list[Measured]]:
    config = parse_config(["", f"--config={arguments.config}"]).config if arguments.config else None
    first = arguments.a or ([_spec_of(config)] if config else [])
    if not first:
        raise UserError("--a is missing: name the engine that samples, for example --a=local:fp8 or --a=vllm:bfloat16")
    check_specs(first, arguments.b)
    path = _model_of(config) if config else arguments.model
    run = run_directory(path)
    settings = config or (read_config(run) if run else None)
    task = arguments.task or (settings.task.train if settings else None)
    if task is None:
        raise UserError("--task is missing: a file, arithmetic:... or a Hub name")
    base = get_config()
    vllm = settings.rollout.vllm if settings else VllmSettings(**base.rollout.vllm.to_dict())
    share_memory(vllm, max(spec.kind == "vllm" for spec in first) + (arguments.b.kind == "vllm"))
    enable_compile_cache()
    set_cpu_devices(0)
    model = load_model(path)
    known = settings or base
    rollout = known.rollout
    sampled_at = arguments.temperature if arguments.temperature is not None else rollout.temperature
    if sampled_at == 0 and arguments.score_temperature is None:
        raise UserError("--temperature: got 0 (greedy), whose log-probs are those at 1; give --score-temperature=1")
    limit = arguments.max_completion_tokens or (rollout.max_completion_tokens if settings else _MAX_COMPLETION_TOKENS)
    session = Session(
        model=model,
        problems=load_problems(task, limit=arguments.prompts),
        prompt_suffix=known.task.prompt_suffix,
        chat_template_kwargs=known.task.chat_template_kwargs,
        sampling=SamplingParams(arguments.completions, limit, sampled_at, arguments.top_p),
        score_temperature=sampled_at if arguments.score_temperature is None else arguments.score_temperature,
        seed=arguments.seed,
        earlier=[load_model(path) for path in arguments.earlier or ()],
        load=functools.cache(load_model),
        vllm=vllm,
        max_rows=_MAX_ROWS,
        rescore=not arguments.no_rescoring,
        show=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return f"Mismatch of engines on {model.name}", probe_pairs(session, first, arguments.b)


def _spec_of(config: Config) -> ProbeSpec:
    """The engine that a config samples with."""
    rollout = config.rollout
    return ProbeSpec(rollout.engine, rollout.precision, rollout.compute_dtype, rollout.kv_cache_dtype)


def _model_of(config: Config) -> Path:
    """The run's newest checkpoint if there is one, else the model it starts from."""
    if (Path(config.run_dir) / "checkpoints").is_dir():
        return Path(config.run_dir)
    if config.model.path:
        return Path(config.model.path)
    raise UserError(f"--config: {config.run_dir} has no checkpoint and the config no model.path; train first")


if __name__ == "__main__":
    run_main(main, expected=(EngineError, MemoryError))
