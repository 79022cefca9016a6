"""A mixture of experts against a dense MLP with as many active parameters: time of one layer on
this machine.

    python -m benchmarks.moe --experts 8,32,128 --tokens 1024 --repeats 5

Float32, width 512, 8 experts of width 192 for each token, so that the dense MLP is 1,536 wide, as
in Qwen3-30B-A3B at a quarter of its size. Three contenders, in turns: the dense MLP, the mixture
with this platform's grouped product, and with `jax.lax.ragged_dot`. The router is random: its loads
are uneven. "Products" are the three products of the mixture alone, without the router and without
bringing rows into the order of the experts. `ragged_dot` takes memory for every row times every
expert: 24 GiB were too little for the gradient with 128 experts and 2,048 tokens.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.arguments import at_least_one
from benchmarks.timing import interleave, machine, median_and_spread, ratio
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.declare import Scope
from dcmdp_jax.models.layers import MLP
from dcmdp_jax.models.moe import MoE
from dcmdp_jax.models.ops import REFERENCE, Ops, choose_ops


class Sizes(NamedTuple):
    """A layer.

    Attributes:
        embed: width of the residual stream.
        width: of an expert.
        per_token: experts that compute each token.
        dtype: of parameters and products.
    """

    embed: int = 512
    width: int = 192
    per_token: int = 8
    dtype: str = "float32"


Layer = Callable[[nnx.State, jax.Array], jax.Array]
"""(parameters, tokens [T, D]) -> [T, D]."""

PASSES: dict[str, Callable[[Layer], Callable[..., object]]] = {
    "forward": lambda f: f,
    "forward and backward": lambda f: jax.grad(
        lambda params, x: jnp.sum(f(params, x).astype(jnp.float32) ** 2), argnums=(0, 1)
    ),
}


def layer(experts: int, ops: Ops, sizes: Sizes) -> tuple[Layer, nnx.State]:
    """A pure function of parameters and tokens, and random parameters; a dense MLP without
    experts.
    """
    shape = {
        "num_experts": experts,
        "num_experts_per_tok": sizes.per_token,
        "moe_intermediate_size": sizes.width,
    }
    family = "qwen3_moe" if experts else "qwen3"
    dense = sizes.per_token * sizes.width
    config = ModelConfig(family, 8, sizes.embed, dense, 1, 8, 8, 64, **(shape if experts else {}))
    graph, state = nnx.split((MoE if experts else MLP)(Scope(config, "mlp")))
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    random = [
        jax.random.normal(key, leaf.shape, sizes.dtype) / leaf.shape[-2] ** 0.5
        for key, leaf in zip(keys, leaves, strict=True)
    ]

    def apply(params: nnx.State, x: jax.Array) -> jax.Array:
        y = nnx.merge(graph, params)(x[None], ops)
        return (y[0] if experts else y)[0]

    return apply, jax.tree.unflatten(tree, random)


def products(experts: int, ops: Ops, sizes: Sizes) -> Layer:
    """The products of a mixture whose rows lie in the order of their experts, as many for each."""

    def apply(params: nnx.State, x: jax.Array) -> jax.Array:
        kernels = params["experts"]
        group_sizes = jnp.full(experts, x.shape[0] * sizes.per_token // experts, jnp.int32)
        rows = jnp.repeat(x, sizes.per_token, axis=0)
        gate, up = (
            ops.grouped_matmul(rows, kernels[name]["kernel"].get_value(), group_sizes)
            for name in ("gate", "up")
        )
        down = ops.grouped_matmul(
            ops.swiglu(gate, up), kernels["down"]["kernel"].get_value(), group_sizes
        )
        return down.reshape(x.shape[0], sizes.per_token, -1).sum(1)

    return apply


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--experts", default="8,32,128", help="whole numbers between commas, at least 8 each"
    )
    parser.add_argument("--tokens", type=at_least_one, default=1024)
    parser.add_argument("--repeats", type=at_least_one, default=5)
    arguments = parser.parse_args()
    sizes = Sizes()
    ops = choose_ops(jax.default_backend())
    x = jax.random.normal(jax.random.key(1), (arguments.tokens, sizes.embed))
    print(machine() + "\n")
    print(
        "| experts | pass | dense, s | experts, s | experts / dense | products / dense | "
        "ragged_dot / dense |"
    )
    print("|---|---|---|---|---|---|---|")
    for experts in [int(text) for text in arguments.experts.split(",")]:
        for name, wrap in PASSES.items():
            contenders = {
                "dense": layer(0, ops, sizes),
                "experts": layer(experts, ops, sizes),
                "ragged": layer(experts, REFERENCE, sizes),
            }
            contenders["products"] = products(experts, ops, sizes), contenders["experts"][1]
            times = interleave(
                {
                    key: functools.partial(jax.jit(wrap(f)), params, x)
                    for key, (f, params) in contenders.items()
                },
                arguments.repeats,
            )
            ratios = " | ".join(
                ratio(times[key], times["dense"]) for key in ("experts", "products", "ragged")
            )
            print(
                f"| {experts} | {name} | {median_and_spread(times['dense'])} | "
                f"{median_and_spread(times['experts'])} | {ratios} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
