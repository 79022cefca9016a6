"""Print every setting: dcmdp_jax/commands/settings.py."""

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.settings import main

if __name__ == "__main__":
    run_main(main)
