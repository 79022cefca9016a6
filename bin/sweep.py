"""Run a study: dcmdp_jax/commands/sweep.py."""

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.sweep import main

if __name__ == "__main__":
    run_main(main)
