"""DC-GRPO's penalty that writes what it penalized to a file, from within the compiled step.

`PENALIZED_TO` names the file.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.algorithm import penalties


def dc_grpo(tokens):
    penalized = penalties.dc_grpo(tokens)
    columns = jnp.broadcast_arrays(
        tokens.multiplier,
        tokens.old_logprobs,
        tokens.rollout_logprobs,
        tokens.advantages,
        penalized,
    )
    jax.debug.callback(_append, tokens.completion_mask, jnp.stack(columns, axis=-1))
    return penalized


def _append(mask, columns):
    with open(os.environ["PENALIZED_TO"], "ab") as file:
        file.write(np.asarray(columns, np.float32)[np.asarray(mask)].tobytes())


def read(path):
    """[tokens, 5] float32: lambda, log p, log q, advantage, penalized advantage."""
    return np.fromfile(path, np.float32).reshape(-1, 5)
