"""Measure the mismatch of two engines and name its cause: dcmdp_jax/commands/probe.py."""

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.probe import EXPECTED, main

if __name__ == "__main__":
    run_main(main, expected=EXPECTED)
