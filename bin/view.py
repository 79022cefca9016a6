"""Look at completions and curves: dcmdp_jax/commands/view.py."""

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.view import main

if __name__ == "__main__":
    run_main(main)
