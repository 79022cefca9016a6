"""The gated delta rule in chunks and token by token: time of both, and how far each is from
float64.

    python -m benchmarks.recurrence --tokens 2048 --repeats 5
    python -m benchmarks.recurrence --legs

A layer of Qwen3.5-0.8B: 16 heads, keys and values of 128; random inputs, decays as a fresh layer
has them. "bfloat16 state" rounds the state after each token, as an engine that keeps it so.
`--legs` samples 256 tokens each of 4 rows with the embedded engine and 8 layers of that model,
random weights and 512 tokens to choose from, and compares the log-probs it sampled with, token by
token, with its own of one pass, in chunks, and those with a float32 engine's of one pass.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import at_least_one
from benchmarks.timing import interleave, machine, median_and_spread, ratio
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.models import gated_delta
from dcmdp_jax.models.gated_delta import Heads, in_chunks, step
from dcmdp_jax.models.hf_config import from_hf
from dcmdp_jax.models.params import init_params
from dcmdp_jax.plan.published import PUBLISHED


def token_by_token(
    tokens: Heads, segment_ids: jax.Array, state_dtype: str = "float32"
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta.in_chunks` by `gated_delta.step`, the state rounded to `state_dtype` after each
    token, if narrower.

    Args:
        tokens, segment_ids: as of `in_chunks`.
        state_dtype: "bfloat16", or "float32" for no rounding.
    """
    first = segment_ids != jnp.roll(segment_ids, 1, axis=1)

    def advance(memory: jax.Array, part: tuple[Heads, jax.Array]) -> tuple[jax.Array, jax.Array]:
        memory, y = step(jnp.where(part[1][:, None, None, None], 0, memory), part[0])
        return (
            memory.astype(state_dtype).astype(memory.dtype) if state_dtype != "float32" else memory
        ), y

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
    wait = draw.normal(size=(1, length, heads)) + 1
    speed = draw.uniform(0.01, 16, heads)
    parts = (
        query / np.sqrt(size),
        key,
        value,
        -speed * np.log1p(np.exp(wait)),
        draw.uniform(size=wait.shape),
    )
    return Heads(*map(jnp.asarray, parts)), jnp.ones((1, length), jnp.int32)


def legs(precision: str, state_dtype: str) -> str:
    """A row of the table of legs, for an engine of this precision with states of this dtype."""
    fields = {"num_hidden_layers": 8, "vocab_size": 512, "initializer_range": 0.042}
    config = from_hf(PUBLISHED["Qwen3.5-0.8B"] | fields)
    params = init_params(config, jax.random.key(0))

    def engine(name: str) -> LocalEngine:
        made = LocalEngine(
            EngineArguments(name, name, model=config, max_total_tokens=288, min_rows=4)
        )
        made.sync_weights(params, 0)
        return made

    def rounded(memory: jax.Array, token: Heads) -> tuple[jax.Array, jax.Array]:
        memory, y = step(memory, token)
        # The compiler may drop a cast there and back.
        return jax.lax.reduce_precision(memory, 8, 7), y

    gated_delta.step = rounded if state_dtype == "bfloat16" else step
    jax.clear_caches()
    prompts = [np.random.default_rng(n).integers(0, 512, 32).astype(np.int32) for n in range(4)]
    own = engine(precision)
    sampled = [
        each
        for group in own.generate(prompts, SamplingParams(1, 256), seed=0, step=0)
        for each in group
    ]
    sampled = sorted(sampled, key=lambda each: each.group)
    asked = prompts, [each.token_ids[32:] for each in sampled]
    decoded = np.concatenate([each.rollout_logprobs[each.sampled_mask] for each in sampled])
    passed = np.concatenate(own.score(*asked, temperature=1.0))
    exact = np.concatenate(engine("float32").score(*asked, temperature=1.0))
    pairs = (decoded, passed), (passed, exact)
    sizes = [(np.abs(np.exp(a) - np.exp(b)).mean(), np.abs(a - b).max()) for a, b in pairs]
    return (
        f"| {precision}, {state_dtype} state | "
        + " | ".join(f"{each:.2g}" for size in sizes for each in size)
        + " |"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=at_least_one, default=2048)
    parser.add_argument("--repeats", type=at_least_one, default=5)
    parser.add_argument("--legs", action="store_true")
    arguments = parser.parse_args()
    print(machine() + "\n")
    if arguments.legs:
        print(
            "| engine | decoding - one pass: mean |dp| | largest, nats | one pass - float32: mean "
            "|dp| | largest |"
        )
        print("|---|---|---|---|---|")
        for precision in ("float32", "bfloat16"):
            for state_dtype in ("float32", "bfloat16"):
                print(legs(precision, state_dtype), flush=True)
        return
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
    print(
        "| form | s | token by token / this | largest difference from float64, of the largest "
        "value |"
    )
    print("|---|---|---|---|")
    for name, call in calls.items():
        wrong = np.abs(np.asarray(call()[0]) - exact).max() / np.abs(exact).max()
        faster = ratio(times["token by token"], times[name])
        print(f"| {name} | {median_and_spread(times[name])} | {faster} | {wrong:.1e} |", flush=True)


if __name__ == "__main__":
    main()
