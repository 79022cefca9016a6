"""Print a script that completes commands in a shell: dcmdp_jax/commands/completion.py."""

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.completion import main

if __name__ == "__main__":
    run_main(main)
