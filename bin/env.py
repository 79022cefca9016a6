"""Print versions and the machine for a bug report: dcmdp_jax/commands/env.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("env")
