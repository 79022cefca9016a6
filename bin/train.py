"""Train a policy: dcmdp_jax/commands/train.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("train")
