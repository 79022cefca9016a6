"""Plan a run for hardware that is not here: dcmdp_jax/commands/plan.py."""

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.plan import main

if __name__ == "__main__":
    run_main(main)
