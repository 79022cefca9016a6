"""Print every setting: dcmdp_jax/commands/settings.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("settings")
