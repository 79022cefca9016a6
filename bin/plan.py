"""Plan a run for hardware that is not here: dcmdp_jax/commands/plan.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("plan")
