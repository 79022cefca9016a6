"""The paper's one-state toy: `python -m research.theory`; `research.theory.command` has it."""

from dcmdp_jax.commands.failures import run_main
from research.theory.command import main

if __name__ == "__main__":
    run_main(main)
