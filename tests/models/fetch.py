"""Fetch models of the Hub by name, in a process of its own: its settings are read at import."""

import sys

from dcmdp_jax.errors import UserError
from dcmdp_jax.models.hf_hub import model_directory

if __name__ == "__main__":
    for name in sys.argv[1:]:
        try:
            print(model_directory(name))
        except UserError as error:
            print(error)
