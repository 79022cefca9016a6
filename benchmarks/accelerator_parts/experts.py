"""A layer of a mixture of experts beside a dense one with as many active parameters, as
`benchmarks.moe` on a CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from benchmarks import moe
from benchmarks.accelerator_parts import limits
from benchmarks.accelerator_parts.sizes import Size, Tell
from benchmarks.timing import interleave
from dcmdp_jax.models.ops import REFERENCE, choose_ops


def measure(size: Size, tell: Tell) -> None:
    """Times of both layers and of the grouped products alone, forward and with the gradient.

    Where the platform's grouped product is another one, also by `jax.lax.ragged_dot` as JAX
    compiles it, on an eighth of the tokens: on a GPU it multiplies every row by every matrix, and
    takes 128 times the rows' memory.
    """
    sizes = size.expert_layer
    ops = choose_ops(jax.default_backend())
    chip, source = limits.chip_here(size)
    x = jax.random.normal(jax.random.key(1), (size.expert_tokens, sizes.embed), sizes.dtype)
    dense, dense_params = moe.layer(0, ops, sizes)
    mixture, params = moe.layer(size.experts, ops, sizes)
    few = x[: size.expert_tokens // 8]
    grouped = moe.products(size.experts, ops, sizes)
    contenders = {
        "dense": (dense, dense_params, x),
        "experts": (mixture, params, x),
        "products": (grouped, params, x),
        "products, an eighth": (grouped, params, few),
        "ragged_dot, an eighth": (moe.products(size.experts, REFERENCE, sizes), params, few),
    }
    found: dict[str, Any] = {
        "kind": "experts",
        "experts": size.experts,
        "tokens": size.expert_tokens,
        "chip_figures": source,
        **sizes._asdict(),
        "passes": {},
    }
    # Three products of [T, D] with k experts' matrices [D, F]; three times that with the gradients.
    forward = 3 * 2.0 * size.expert_tokens * sizes.embed * sizes.per_token * sizes.width
    for (name, wrap), passes in zip(moe.PASSES.items(), (1, 3), strict=True):
        calls = {}
        compiled = {}
        for key, (function, arguments, tokens) in contenders.items():
            executable, compiled[key] = limits.compile_and_read(
                key, jax.jit(wrap(function)), arguments, tokens
            )
            calls[key] = functools.partial(executable, arguments, tokens)
        times = interleave(calls, size.repeats)
        found["passes"][name] = {
            key: {"seconds": seconds, "temporary_bytes": compiled[key].temporary}
            | limits.limits(
                compiled[key],
                chip,
                float(np.median(seconds)),
                passes * forward * len(contenders[key][2]) / len(x),
            )
            for key, seconds in times.items()
        }
        tell(found)
