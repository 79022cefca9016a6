"""Check and export Hugging Face model directories: dcmdp_jax/commands/convert.py."""

from dcmdp_jax.commands.main import console

if __name__ == "__main__":
    console("convert")
