"""The paper's one-state toy: dcmdp_jax/commands/toy.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("toy")
