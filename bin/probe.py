"""Measure the mismatch of two engines and name its cause: dcmdp_jax/commands/probe.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("probe")
