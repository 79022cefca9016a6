"""`python -m dcmdp_jax NAME` is `dcmdp NAME`."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console()
