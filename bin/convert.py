"""Check, copy and export Hugging Face model directories: dcmdp_jax/commands/convert.py."""

from dcmdp_jax.commands.cli import run_main
from dcmdp_jax.commands.convert import main

if __name__ == "__main__":
    run_main(main)
