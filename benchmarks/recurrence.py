"""The gated delta rule in chunks and token by token: time of both, and how far each is from float64.

    python -m benchmarks.recurrence --tokens 2048 --repeats 5

A layer of Qwen3.5-0.8B: 16 heads, keys and values of 128; random inputs, decays as a fresh layer has them. "bfloat16
state" rounds the state after each token, as an engine that keeps it so.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import at_least_one
from benchmarks.timing import interleave, machine, median_and_spread, ratio
from dcmdp_jax.models.gated_delta import Heads, in_chunks, step


def token_by_token(tokens: Heads, segment_ids: jax.Array, state_dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """`gated_delta.in_chunks` by `gated_delta.step`, the state rounded to `state_dtype` after each token, if narrower.

    Args:
        tokens, segment_ids: as of `in_chunks`.
        state_dtype: "bfloat16", or "float32" for no rounding.
    """
    first = segment_ids != jnp.roll(segment_ids, 1, axis=1)

    def advance(memory: jax.Array, part: tuple[Heads, jax.Array]) -> tuple[jax.Array, jax.Array]:
        memory, y = step(jnp.where(part[1][:, None, None, None], 0, memory), part[0])
        return (memory.astype(state_dtype).astype(memory.dtype) if state_dtype != "float32" else memory), y

    along = jax.tree.map(lambda x: x.swapaxes(0, 1), (tokens, first))
    batch, _, count, size = tokens.key.shape
    memory = jnp.zeros((batch, count, size, tokens.value.shape[-1]), tokens.key.dtype)
    memory, y = jax.lax.scan(advance, memory, along)
    return y.swapaxes(0, 1), memory


def inputs(length: int, heads: int = 16, size: int = 128) -> tuple[Heads, jax.Array]:
    """Arguments of a row, as float64 where it is enabled, and its segment ids."""
    draw = np.random.default_rng(0)
    query, key, value = draw.normal(size=(3, 1, length, heads, size))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    wait, speed = draw.normal(size=(1, length, heads)) + 1, draw.uniform(0.01, 16, heads)
    parts = query / np.sqrt(size), key, value, -speed * np.log1p(np.exp(wait)), draw.uniform(size=wait.shape)
    return Heads(*map(jnp.asarray, parts)), jnp.ones((1, length), jnp.int32)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=at_least_one, default=2048)
    parser.add_argument("--repeats", type=at_least_one, default=5)
    arguments = parser.parse_args()
    print(machine() + "\n")
    forms = {
        "in chunks": in_chunks,
        "token by token": token_by_token,
        "token by token, bfloat16 state": functools.partial(token_by_token, state_dtype="bfloat16"),
    }
    compiled = {name: jax.jit(form) for name, form in forms.items()}
    with jax.enable_x64(True):
        tokens, segments = inputs(arguments.tokens)
        exact = np.asarray(jax.jit(token_by_token)(tokens, segments)[0])
        tokens = jax.tree.map(lambda x: x.astype(jnp.float32), tokens)
    calls = {name: functools.partial(form, tokens, segments) for name, form in compiled.items()}
    times = interleave(calls, arguments.repeats)
    print("| form | s | token by token / this | largest difference from float64, of the largest value |")
    print("|---|---|---|---|")
    for name, call in calls.items():
        wrong = np.abs(np.asarray(call()[0]) - exact).max() / np.abs(exact).max()
        faster = ratio(times["token by token"], times[name])
        print(f"| {name} | {median_and_spread(times[name])} | {faster} | {wrong:.1e} |", flush=True)


if __name__ == "__main__":
    main()
