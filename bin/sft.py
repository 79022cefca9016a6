"""Learn from conversations: dcmdp_jax/commands/sft.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("sft")
