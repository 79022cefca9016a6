"""Run a study: dcmdp_jax/commands/sweep.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("sweep")
