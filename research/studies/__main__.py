"""Run a study: `python -m research.studies --study=methods`; `research.studies.sweep` has it."""

from dcmdp_jax.commands.failures import run_main
from research.studies.sweep import main

if __name__ == "__main__":
    run_main(main)
