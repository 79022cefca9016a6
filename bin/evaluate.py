"""Evaluate a policy: dcmdp_jax/commands/evaluate.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("evaluate")
