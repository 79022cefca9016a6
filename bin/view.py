"""Look at completions and curves: dcmdp_jax/commands/view.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("view")
