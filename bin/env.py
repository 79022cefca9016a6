"""Print versions and the machine for a bug report: dcmdp_jax/commands/env.py."""

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.env import main

if __name__ == "__main__":
    run_main(main)
