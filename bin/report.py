"""Draw runs: dcmdp_jax/commands/report.py."""

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.report import main

if __name__ == "__main__":
    run_main(main)
