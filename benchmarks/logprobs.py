"""The log-prob layer against the naive one, which holds [T, V] logits: temporary memory and time at Qwen3's vocabulary.

    python -m benchmarks.logprobs --tokens 1024 --width 512 --chunk 128 --repeats 5

V = 151,936, float32. Memory is the compiler's own figure for temporary buffers.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp

from benchmarks.timing import interleave, machine, median_and_spread, ratio
from dcmdp_jax.models.logprobs import token_logprobs
from dcmdp_jax.models.ops import choose_ops

_VOCABULARY = 151_936


def naive_logprobs(hidden: jax.Array, kernel: jax.Array, input_ids: jax.Array, mask: jax.Array) -> jax.Array:
    """All logits at one time, then log_softmax."""
    logprobs = jax.nn.log_softmax(hidden[:, :-1] @ kernel)
    chosen = jnp.take_along_axis(logprobs, input_ids[:, 1:, None], axis=-1)[..., 0]
    return jnp.where(mask, jnp.pad(chosen, ((0, 0), (1, 0))), 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, arguments.tokens, arguments.width))
    kernel = jax.random.normal(keys[1], (arguments.width, _VOCABULARY)) / arguments.width**0.5
    input_ids = jax.random.randint(keys[2], (1, arguments.tokens), 0, _VOCABULARY)
    mask = jnp.ones(input_ids.shape, bool).at[:, 0].set(False)

    def ours(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
        options = {"temperature": 1.0, "chunk": arguments.chunk, "ops": choose_ops(jax.default_backend())}
        return token_logprobs(hidden, kernel, input_ids, mask, **options)[0]

    naive = functools.partial(naive_logprobs, input_ids=input_ids, mask=mask)
    print(machine() + "\n")
    print("| pass | naive, MiB | ours, MiB | naive, s | ours, s | ours / naive |\n|---|---|---|---|---|---|")
    for name, wrap in {
        "forward": lambda f: f,
        "forward and backward": lambda f: jax.grad(lambda h, w: f(h, w).sum(), argnums=(0, 1)),
    }.items():
        compiled = {
            "naive": jax.jit(wrap(lambda h, w: naive(h, w))).lower(hidden, kernel).compile(),
            "ours": jax.jit(wrap(ours)).lower(hidden, kernel).compile(),
        }
        memory = {key: value.memory_analysis().temp_size_in_bytes / 2**20 for key, value in compiled.items()}
        calls = {key: functools.partial(value, hidden, kernel) for key, value in compiled.items()}
        times = interleave(calls, arguments.repeats)
        print(
            f"| {name} | {memory['naive']:,.0f} | {memory['ours']:,.0f} | {median_and_spread(times['naive'])} | "
            f"{median_and_spread(times['ours'])} | {ratio(times['ours'], times['naive'])} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
