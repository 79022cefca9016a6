"""Draw runs: dcmdp_jax/commands/report.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("report")
