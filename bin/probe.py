"""How far two engines disagree on the same tokens, where, and why.

    python -m bin.probe --recording FILE --train-column NAME --rollout-column NAME     two recorded columns, no model
    python -m bin.probe --model DIR --task FILE --a vllm:bfloat16 --b trainer          sample with one, score with both

Writes probe.json, probe.html and plots/*.png into --out and prints the table and the likely cause. docs/probe.md has
the engines' names and what the causes rest on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from bin.arguments import real, whole
from bin.cli import Parser, run_main
from dcmdp_jax.errors import UserError
from dcmdp_jax.mismatch import page
from dcmdp_jax.mismatch.analysis import Measured, analyse
from dcmdp_jax.mismatch.recording import Columns, read_recording
from dcmdp_jax.tasks.prompts import load_tokenizer

_MAX_TOKENS = 5_000_000


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), measure, conclude, write and print."""
    arguments = _parser().parse_args(argv[1:])
    measured = [_recorded(arguments)]
    analyses = [analyse(one, arguments.tolerance) for one in measured]
    print(page.table(analyses))
    print(f"wrote {page.write(_title(arguments), measured, analyses, arguments.out)}")


def _parser() -> Parser:
    parser = Parser(prog="python -m bin.probe", description="How far two engines disagree on the same tokens, and why.")
    add = parser.add_argument
    add("--recording", type=Path, metavar="FILE", help=".parquet or .jsonl with one completion a row")
    add("--token-column", default="token_ids", metavar="NAME", help="lists of token ids (default: %(default)s)")
    add("--train-column", metavar="NAME", help="lists of the training stack's log-probs, nats")
    add("--rollout-column", metavar="NAME", help="lists of the engine's log-probs, nats")
    add("--mask-column", default="", metavar="NAME", help="1 on sampled tokens (default: all are)")
    add("--entropy-column", default="", metavar="NAME", help="the training stack's entropies, nats (default: none)")
    add("--lag-column", default="", metavar="NAME", help="age in steps of the weights that sampled (default: none)")
    add("--max-tokens", type=whole(1), default=_MAX_TOKENS, metavar="N", help="keep an even share of the rows above it")
    add("--tokenizer", metavar="DIR", help="shows tokens as text (default: ids)")
    add("--tolerance", type=real(0, 1), metavar="C", help="budget to count completions over (default: the recommended)")
    add("--out", type=Path, default=Path("runs/probe"), metavar="DIR", help="where to write (default: %(default)s)")
    return parser


def _title(arguments: argparse.Namespace) -> str:
    return f"Mismatch of {arguments.recording.name}"


def _recorded(arguments: argparse.Namespace) -> Measured:
    if arguments.recording is None:
        raise UserError("--recording is missing; see --help")
    for option in ("train", "rollout"):
        if not getattr(arguments, f"{option}_column"):
            raise UserError(f"--{option}-column is missing: name the column of the {option} log-probs")
    columns = Columns(
        arguments.token_column, arguments.train_column, arguments.rollout_column, arguments.mask_column,
        arguments.entropy_column, arguments.lag_column,
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
    return lambda token: loaded.decode([token])


if __name__ == "__main__":
    run_main(main)
