"""Arguments of each command, by a function of its name.

Nothing here imports JAX, nor a module that does: `dcmdp COMMAND --help` answers at once, and in an
environment without the libraries that the command itself needs.
"""

import argparse
from pathlib import Path
from typing import Any

import dcmdp_jax
from dcmdp_jax.commands.arguments import Parser, output_directory, output_file, real, whole
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.families import FAMILIES
from dcmdp_jax.probe.columns.formats import FORMATS

PRESETS = Path(dcmdp_jax.__file__).parent / "presets"
"""`configs/` of the repository, as the package has it."""
MOST_COMPLETIONS = 2000
"""Completions on a page of `dcmdp view`, which a browser still scrolls through. Ours."""
TOKEN_COLUMN = "token_ids"
_OTHER_COLUMNS = {
    "--train-column": "lists of the training stack's log-probs, nats",
    "--rollout-column": "lists of the engine's log-probs, nats",
    "--mask-column": "1 on sampled tokens (default: all are)",
    "--entropy-column": "the training stack's entropies (default: none)",
    "--lag-column": "age in training steps of the weights that sampled",
    "--top-column": "the engine's top-k tokens, as Recorder packs them",
}
"""Option of a field of `Columns` -> what it names."""
_RECORDED_BY = "trl", "verl", "skyrl"
_MAX_TOKENS = 5_000_000
"""Tokens of a recording that are kept at most: they fit the memory of a laptop. Ours."""
_DTYPES = ("bfloat16", "float32")


def preset_names(folder: str = "") -> list[str]:
    """Names of the presets, or of the studies."""
    return [path.stem for path in config_files(PRESETS / folder)]


def config_files(folder: Path) -> list[Path]:
    """The config or study files of a folder."""
    return [path for path in sorted(folder.glob("*.py")) if path.stem not in ("__init__", "base")]


def add_config(parser: Parser) -> None:
    """Add the argument that names a config, for `flags.parse_with`."""
    parser.add_argument(
        "--config",
        metavar="FILE[:ARGUMENT]",
        help=f"a preset ({', '.join(preset_names())}), a config file and its argument, or a .yaml "
        "or .toml file",
    )


def train() -> Parser:
    """Arguments of `dcmdp train`."""
    return _run_parser("train", "Train a policy", example="dcmdp train --config=demo")


def sft() -> Parser:
    """Arguments of `dcmdp sft`."""
    return _run_parser(
        "sft",
        "Learn from the conversations of task.train",
        example="dcmdp sft --config=demo:debug --config.run_dir=runs/sft",
    )


def _run_parser(command: str, about: str, *, example: str) -> Parser:
    parser = Parser(
        command,
        description=f"{about}; the same command resumes a run. dcmdp settings lists settings, "
        "--config.section.name=value.",
        example=example,
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the plan, and stop"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every setting, mark those that differ from the default, and stop",
    )
    add_config(parser)
    return parser


def evaluate() -> Parser:
    """Arguments of `dcmdp evaluate`."""
    parser = Parser(
        "evaluate",
        description="avg@K and pass@K of a model, in the paper's table layout. "
        "--config.section.name=value overrides a setting of the run, such as "
        "--config.evaluation.task=aime24.jsonl.",
        example="dcmdp evaluate runs/demo",
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
        type=whole(0),
        metavar="N",
        help="which checkpoint of a run (default: the newest)",
    )
    add(
        "--top-p",
        type=real(1),
        help="top-p of sampling (default: the run's; without a run 1, as in the paper)",
    )
    add(
        "--overlap",
        choices=("report", "drop"),
        help="report problems that are in task.train too, or leave them out",
    )
    add("--method", metavar="NAME", help="label of the table's row (default: MODEL's name)")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON of the scores; FILE.problems.jsonl has all completions (default: in the run "
        "directory, or here)",
    )
    add(
        "--table",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="only print one table over finished evaluations",
    )
    return parser


def report() -> Parser:
    """Arguments of `dcmdp report`."""
    parser = Parser(
        "report",
        description="Plots and a self-contained HTML page of one run, or of several, overlaid.",
        example="dcmdp report runs/demo",
    )
    parser.add_argument(
        "run_dirs",
        nargs="+",
        metavar="RUNDIR",
        help="a run directory, written by train",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write (default: the run directory; report/ for several runs)",
    )
    return parser


def view() -> Parser:
    """Arguments of `dcmdp view`."""
    parser = Parser(
        "view",
        description="Completions on one page, without any request to anywhere.",
        example="dcmdp view runs/demo",
    )

    add = parser.add_argument
    add(
        "paths",
        nargs="+",
        metavar="PATH",
        help="run directories, recordings, or an evaluation's lines",
    )
    add(
        "--out",
        type=output_directory,
        metavar="DIR",
        help="where to write (default: the run directory; else view/)",
    )
    add(
        "--tokenizer",
        metavar="DIR",
        help="show tokens as text (default: with the run's own tokenizer, else as ids)",
    )
    add(
        "--completions",
        type=whole(1),
        default=MOST_COMPLETIONS,
        metavar="N",
        help="number of completions on the page; more are subsampled evenly (default: %(default)s)",
    )
    return parser


def probe() -> Parser:
    """Arguments of `dcmdp probe`."""
    parser = Parser(
        "probe",
        description="How far two engines disagree on the same tokens, and why. "
        "--config.section.name=value overrides a setting of the run, such as "
        "--config.task.train=FILE.",
        example="dcmdp probe --config=demo",
    )
    _add_recording(parser)
    add_engines(parser).add_argument(
        "--no-rescoring", action="store_true", help="diagnose from the recorded log-probs only"
    )

    share = real(1)
    add = parser.add_argument
    add(
        "--tolerance",
        type=share,
        metavar="C",
        help="tolerance c; completions above it are counted (default: the recommended c)",
    )
    add(
        "--fail-above",
        type=share,
        default=1.0,
        metavar="X",
        help="exit with code 1 if a mean |p - q| is above X",
    )
    add(
        "--out",
        type=output_directory,
        default=Path("runs/probe"),
        metavar="DIR",
        help="where to write (default: %(default)s)",
    )
    return parser


def add_engines(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments of `commands.probe.open_session`."""
    group = parser.add_argument_group("engines")
    add = group.add_argument

    # What is probed.
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="model directory, OWNER/NAME on the Hub, run or checkpoint",
    )
    add(
        "--config",
        metavar="FILE[:ARGUMENT]",
        help="probe the engine, task and last checkpoint (else model.path) of this config",
    )

    # The two engines.
    add(
        "--a",
        action="append",
        type=_engine_spec,
        metavar="ENGINE",
        help="engine A, which samples; repeat it for several engines",
    )
    add(
        "--b",
        type=_engine_spec,
        default="trainer",
        metavar="ENGINE",
        help="engine B, which scores the same tokens (default: trainer)",
    )

    # What is sampled.
    add(
        "--prompts",
        type=whole(1),
        default=32,
        metavar="N",
        help="number of prompts (default: %(default)s)",
    )
    add(
        "--top-p",
        type=real(1),
        default=1.0,
        metavar="P",
        help="top-p of sampling (default: %(default)s)",
    )
    add(
        "--earlier",
        action="append",
        type=Path,
        default=[],
        metavar="DIR",
        help="checkpoint that engine A may still serve, in whole or in part",
    )
    return group


def _engine_spec(text: str) -> Any:
    """Read the name of an engine, a `ProbeSpec`."""
    # Imported late: the engines import JAX.
    from dcmdp_jax.probe.live.engines import parse_spec

    try:
        return parse_spec(text)
    except UserError as error:  # a ValueError, whose message argparse would drop
        raise argparse.ArgumentTypeError(str(error)) from error


def _add_recording(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what was recorded, and where."""
    add = parser.add_argument_group("a recording").add_argument
    formats = ("auto", *(name for name in FORMATS if name != "recorder"), *_RECORDED_BY)

    # Files.
    add(
        "recording",
        nargs="*",
        metavar="PATH",
        help="files, directories, globs, or a run directory",
    )
    about = f"accept only this format: {', '.join(formats[1:])} (default: any)"
    add("--format", default="auto", choices=formats, metavar="NAME", help=about)
    add(
        "--allow-gaps",
        action="store_true",
        help="accept a recording in which steps or ranks are missing",
    )
    add(
        "--max-tokens",
        type=whole(1),
        default=_MAX_TOKENS,
        metavar="N",
        help="subsample evenly above N tokens (default: %(default)s)",
    )
    add("--tokenizer", metavar="DIR", help="show tokens as text (default: as ids)")

    # Columns of a file that no known framework wrote.
    about = "lists of token ids (default: %(default)s)"
    add("--token-column", default=TOKEN_COLUMN, metavar="NAME", help=about)
    for option, about in _OTHER_COLUMNS.items():
        add(option, default="", metavar="NAME", help=about)


def plan() -> Parser:
    """Arguments of `dcmdp plan`."""
    parser = Parser(
        "plan",
        description="Memory of a run at full size, by the compiler.",
        example="dcmdp plan --config=qwen3_8b --topology=v5p:4x4x4",
    )
    add_config(parser)

    add = parser.add_argument
    add(
        "--topology",
        metavar="KIND:SHAPE",
        help="devices to compile for, such as h100:8; without it all are listed",
    )
    add(
        "--programs",
        metavar="NAME,NAME",
        default="",
        help="programs to compile, such as step,decode (default: all)",
    )
    add("--json", type=output_file, metavar="FILE", help="write the figures to FILE")
    return parser


def convert() -> Parser:
    """Arguments of `dcmdp convert`."""
    parser = Parser(
        "convert",
        description="Check and write Hugging Face model directories.",
        example="dcmdp convert export runs/demo exported",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    check = commands.add_parser(
        "hf-check",
        help="check a directory's config.json, tokenizer, tensors and values",
        example="dcmdp convert hf-check exported",
    )
    check.add_argument(
        "hf_dir",
        type=Path,
        metavar="HF_DIR",
        help="config.json, safetensors, tokenizer",
    )

    gguf = commands.add_parser(
        "from-gguf",
        help="dequantize a GGUF file (llama.cpp's format) into a directory",
        example="dcmdp convert from-gguf model-q4_k_m.gguf model",
    )
    families = ", ".join(family.gguf for family in FAMILIES.values() if family.gguf)
    gguf.add_argument("file", type=Path, metavar="FILE", help=f"a whole .gguf of {families}")
    _add_output(gguf, dtype="float32")

    export = commands.add_parser(
        "export",
        help="write a training checkpoint as a directory transformers and vLLM load",
        example="dcmdp convert export runs/demo exported",
    )
    add = export.add_argument
    add("run_dir", type=Path, metavar="RUNDIR", help="a run directory, or a checkpoint in it")
    add("--step", type=int, metavar="N", help="which checkpoint (default: the newest)")
    about = "then upload OUT_DIR to the Hugging Face Hub"
    add("--push", default="", metavar="USER/NAME", help=about)
    add("--adapter", action="store_true", help="write the adapters alone, as PEFT reads them")
    _add_output(export, dtype="bfloat16")
    commands.metavar = f"{{{','.join(commands.choices)}}}"
    return parser


def _add_output(command: argparse.ArgumentParser, *, dtype: str) -> None:
    """Add the arguments of what is written, by default in `dtype`."""
    add = command.add_argument
    add("out_dir", type=Path, metavar="OUT_DIR", help="created; refused when not empty")
    about = "dtype of the tensors (default: %(default)s)"
    add("--dtype", choices=_DTYPES, default=dtype, help=about)
    add("--overwrite", action="store_true", help="replace OUT_DIR when it is not empty")


def settings() -> Parser:
    """Arguments of `dcmdp settings`."""
    parser = Parser(
        "settings",
        description="Every setting: in Markdown for a file, as text for a terminal.",
        example="dcmdp settings lr",
    )
    parser.add_argument(
        "word",
        nargs="?",
        default="",
        metavar="WORD",
        help="list only settings whose name contains it, such as rollout or lr",
    )
    parser.add_argument(
        "--completion",
        action="store_true",
        help="print a script that completes commands, presets and settings in bash and zsh: source "
        "<(...)",
    )
    return parser


def env() -> Parser:
    """Arguments of `dcmdp env`: none."""
    return Parser(
        "env",
        description="Versions, machine and devices, for a bug report.",
        example="dcmdp env",
    )
