"""The paper's one-state toy: dcmdp_jax/commands/toy.py."""

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.toy import EXPECTED, main

if __name__ == "__main__":
    run_main(main, expected=EXPECTED)
