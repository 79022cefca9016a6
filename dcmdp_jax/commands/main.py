"""The command `dcmdp NAME`, also `python -m dcmdp_jax NAME`."""

import importlib
import sys
from collections.abc import Callable
from typing import NoReturn

import dcmdp_jax
from dcmdp_jax.activity import command_starts
from dcmdp_jax.commands import parsers
from dcmdp_jax.commands.arguments import nearest
from dcmdp_jax.commands.failures import DEBUG, run_main
from dcmdp_jax.engines.process_memory import hide_torch, keep_freed_memory, share_heap
from dcmdp_jax.errors import UserError

COMMANDS = {
    "train": "train a policy; the same command resumes a run",
    "sft": "supervised fine-tuning on conversations",
    "evaluate": "avg@K and pass@K of a model, and tables over runs",
    "report": "plots and a page of one run, or of several",
    "view": "completions and curves on one page",
    "probe": "how far two engines disagree, and why",
    "plan": "memory of a run on hardware that is not here, by its compiler",
    "convert": "check and write Hugging Face directories",
    "settings": "every setting, or those whose name holds a word",
    "env": "versions and machine, for a bug report",
}
"""Module of this folder -> what it does."""
_DECIDE_ON_HEAPS = ("train", "sft")
"""Commands that call `share_heap` themselves, once they know the model."""
_MOVED = {"sweep": "python -m research.studies", "toy": "python -m research.theory"}
"""Command of before -> what runs it in a checkout."""


def console(name: str = "") -> NoReturn:
    """Run a command, and leave the process with its exit code.

    Args:
        name: the command; empty for the one that `sys.argv` names.
    """
    if not name:
        name, *words = sys.argv[1:] or [""]
        if name == "help" and words and words[0] in COMMANDS:
            name, words = words[0], ["--help"]
        if name not in COMMANDS:
            run_main(_without_command)
        sys.argv = [f"dcmdp {name}", *words]
    if {"-h", "--help"} & set(sys.argv):
        # Without the command's imports, which take seconds.
        run_main(lambda argv: getattr(parsers, name)().parse_args(argv[1:]))

    # Before what they import makes threads.
    keep_freed_memory()
    if name not in _DECIDE_ON_HEAPS:
        share_heap()
    hide_torch()
    command_starts()
    # A reward, remedy or engine may be named `module:name`. `python -m` has this directory first.
    sys.path.append("")
    run_main(_command(name))


def _command(name: str) -> Callable:
    """Import a command's `main`.

    Where its arguments are wrong or its imports are missing, return a function that raises a
    `UserError` of one line in its place, for `run_main` to print.
    """
    try:
        _check_arguments(name)
        return importlib.import_module(f"dcmdp_jax.commands.{name}").main
    except UserError as error:
        message = str(error)
    except ModuleNotFoundError as error:
        message = (
            f"dcmdp {name}: the module {error.name} is not installed. Run it in an environment of "
            "its own, made by pip install PATH_OF_A_CHECKOUT without --no-deps; a trainer's "
            "environment needs only the recorder and the hooks"
        )

    def refuse(_: list[str]) -> None:
        raise UserError(message)

    return refuse


def _check_arguments(name: str) -> None:
    """Refuse wrong arguments before the command's imports, which take seconds."""
    # The probe imports JAX to read the name of an engine.
    if name == "probe":
        return
    parser = getattr(parsers, name)()
    words = [word for word in sys.argv[1:] if word != DEBUG]
    _, unknown = parser.parse_known_args(words)
    # Settings are known to the command alone.
    if not any(word.startswith("-") for word in unknown):
        parser.parse_args(words)


def _without_command(argv: list[str]) -> None:
    word = argv[1] if len(argv) > 1 else ""
    if word in ("-h", "--help", "help"):
        print("usage: dcmdp COMMAND ...\n")
        for name, about in COMMANDS.items():
            print(f"  {name:10} {about}")
        print("\ndcmdp COMMAND --help lists its arguments, dcmdp --version prints the version.")
    elif word == "--version":
        print(f"dcmdp_jax {dcmdp_jax.__version__}")
    else:
        hint = nearest(word, COMMANDS, f"there are {', '.join(COMMANDS)}")
        if word in _MOVED:
            hint = f"it is `{_MOVED[word]}` in a checkout"
        problem = f"{word}: no such command" if word else "a command is missing"
        raise UserError(f"{problem}; {hint}")
