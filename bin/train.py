"""Train a policy: dcmdp_jax/commands/train.py."""

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.train import EXPECTED, main

if __name__ == "__main__":
    run_main(main, expected=EXPECTED)
