"""Mixture of experts in place of an MLP: a router, the experts of each token, and what a router
reports.

No token is dropped: the rows of each expert are computed together, however many they are.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.declare import Fused, Stack, parameter
from dcmdp_jax.models.layers import MLP, Linear
from dcmdp_jax.models.ops import Ops
from dcmdp_jax.models.ops.reference import permute
from dcmdp_jax.models.quantize import QuantizedKernel, in_float32
from dcmdp_jax.parallel.sharding import free_axes, shard_map_over

EXPERT = "expert"
"""The mesh axis that splits experts; the tokens are split over it too."""

Aux = dict[str, jax.Array]
"""Statistics of a layer by name; a dense layer has none."""


class ExpertLinear(nnx.Module):
    """The matrices W_e [in, out] of all experts, [E, in, out]; in an engine a `QuantizedKernel`.

    Args:
        sizes, axes: in and out, and their logical names.
        std: standard deviation of a fresh W_e.
        options: of `declare.parameter`.
    """

    def __init__(
        self, sizes: tuple[int, int], axes: tuple[str, str], *, std: float, **options: Any
    ) -> None:
        normal = jax.nn.initializers.normal(std)
        self.kernel = parameter(
            sizes, axes, init=normal, transposed=True, quantized=True, **options
        )


class Experts(nnx.Module):
    """The MLPs that tokens are routed to; see `layers.MLP`."""

    def __init__(
        self, config: ModelConfig, *, hf_name: str, stacks: tuple[Stack, ...], fused: bool
    ) -> None:
        width = config.moe_intermediate_size
        embed = config.hidden_size
        name = f"{hf_name}.{{experts}}"
        inward = ("embed", "expert_mlp")
        options = {
            "std": config.initializer_range,
            "stacks": (*stacks, Stack("experts", config.num_experts)),
        }
        if fused:
            self.gate_up = ExpertLinear((embed, 2 * width), inward, hf_name=None, **options)
        else:
            for part, gated in enumerate(("gate", "up")):
                names = {
                    "hf_name": f"{name}.{gated}_proj.weight",
                    "fused": Fused(f"{hf_name}.gate_up_proj", part, 2),
                }
                setattr(self, gated, ExpertLinear((embed, width), inward, **names, **options))
        options["fused"] = Fused(f"{hf_name}.down_proj", 0, 1)
        self.down = ExpertLinear(
            (width, embed), inward[::-1], hf_name=f"{name}.down_proj.weight", **options
        )


class MoE(nnx.Module):
    """y = sum over the k likeliest experts e of p_e MLP_e(x), with p = softmax(W_router x).

    With `norm_topk_prob` the k probabilities are divided by their sum. As `Qwen3MoeSparseMoeBlock`
    of transformers; with the family's shared expert plus sigmoid(w_gate x) MLP(x), as
    `Qwen3_5MoeSparseMoeBlock`.

    Attributes:
        fused: W_gate and W_up of an expert are one matrix `gate_up`; see
            `decoder.fuse_projections`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        hf_name: str,
        stacks: tuple[Stack, ...] = (),
        fused: bool = False,
    ) -> None:
        self.config = config
        self.fused = fused
        # Engines keep the router in full precision: a token that goes to another expert is a large
        # error.
        exact = {"std": config.initializer_range, "stacks": stacks, "quantized": False}
        sizes = (config.hidden_size, config.num_experts)
        axes = ("embed", "experts")
        self.router = Linear(sizes, axes, hf_name=f"{hf_name}.gate", **exact)
        self.experts = Experts(config, hf_name=f"{hf_name}.experts", stacks=stacks, fused=fused)
        if config.family.shared_expert:
            self.shared_expert = MLP(
                config, hf_name=f"{hf_name}.shared_expert", stacks=stacks, fused=fused
            )
            sizes = (config.hidden_size, 1)
            axes = ("embed", "norm")
            self.shared_gate = Linear(sizes, axes, hf_name=f"{hf_name}.shared_expert_gate", **exact)

    def __call__(
        self, x: jax.Array, ops: Ops, mesh: Mesh | None = None, replayed: jax.Array | None = None
    ) -> tuple[jax.Array, Aux]:
        """Route [B, T, D] tokens and compute their experts.

        Args:
            x: [B, T, D].
            ops: the platform's operations.
            mesh: the devices that rows and weights are split over; None where the arguments are one
                device's own.
            replayed: [B, T, k] integers, the experts to use in place of the likeliest ones, -1 for
                a token that has none; their weights are still this router's, p of those experts.
                None: no token has any.

        Returns:
            [B, T, D], and "routed_experts" [B, T, k] int32 and "router_probabilities" [B, T, E]
            float32; with `replayed` also "own_experts" [B, T, k] int32, the likeliest.
        """
        config = self.config
        probabilities = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(probabilities, config.num_experts_per_tok)
        aux = {"router_probabilities": probabilities}
        if replayed is not None:
            aux["own_experts"] = chosen
            chosen = jnp.where(replayed >= 0, replayed.astype(chosen.dtype), chosen)
            weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
        if config.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        names = ("gate_up", "down") if self.fused else ("gate", "up", "down")
        kernels = tuple(getattr(self.experts, name).kernel.get_value() for name in names)
        kernels = tuple(
            kernel if isinstance(kernel, QuantizedKernel) else kernel.astype(x.dtype)
            for kernel in kernels
        )
        compute = (
            _compute
            if mesh is None or mesh.size == 1
            else functools.partial(_expert_parallel, mesh=mesh)
        )
        y = compute(
            x, chosen, weights.astype(x.dtype), kernels, num_experts=config.num_experts, ops=ops
        )
        if config.family.shared_expert:
            y = y + jax.nn.sigmoid(self.shared_gate(x)) * self.shared_expert(x, ops)
        return y.astype(x.dtype), aux | {"routed_experts": chosen}


def router_sums(aux: Aux, counted: jax.Array) -> Aux:
    """Sum what the router of one layer reports over the tokens that count.

    Args:
        aux: second result of `MoE`.
        counted: [B, T] bool.

    Returns:
        "router_load" [E] float32, tokens sent to each expert, k for each token;
        "router_probability" [E] float32, the sum of its probabilities, through which a gradient
        flows; "router_entropy" [] float32, the sum of the tokens' entropies in nats;
        "router_tokens" [] float32; where experts are replayed "router_agreement" [] float32, how
        many of the experts used are among the token's likeliest. All are sums over micro-batches
        and devices.
    """
    probabilities = aux["router_probabilities"]
    sent = _sent(aux["routed_experts"], probabilities.shape[-1])
    mask = counted[..., None].astype(jnp.float32)
    entropy = jax.lax.stop_gradient(
        jnp.sum(jax.scipy.special.entr(probabilities), axis=-1, keepdims=True)
    )
    sums = {
        "router_load": jnp.sum(sent * mask, axis=(0, 1)),
        "router_probability": jnp.sum(probabilities * mask, axis=(0, 1)),
        "router_entropy": jnp.sum(entropy * mask),
        "router_tokens": jnp.sum(mask),
    }
    if "own_experts" in aux:
        own = _sent(aux["own_experts"], probabilities.shape[-1])
        sums["router_agreement"] = jnp.sum(sent * own * mask)
    return sums


def _sent(experts: jax.Array, num_experts: int) -> jax.Array:
    """[..., E] float32, 1 where a token goes to an expert."""
    return jax.nn.one_hot(experts, num_experts, dtype=jnp.float32).sum(axis=-2)


def router_metrics(sums: Aux) -> dict[str, jax.Array]:
    """Measure how evenly a router uses the experts.

    `MoE` drops no token, so no share of dropped tokens is reported.

    Args:
        sums: `router_sums` of every layer, stacked on the first axis; empty of a dense model.

    Returns:
        Metrics [] float32 named as in observe/metric_names.py: none of a dense model.
    """
    if not sums:
        return {}
    load = sums["router_load"]
    tokens = jnp.maximum(sums["router_tokens"], 1.0)
    share = load / jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1.0)
    experts = load.shape[-1]
    metrics = {
        "moe/load_max_over_mean": experts * jnp.max(share),
        "moe/load_entropy": jnp.mean(jnp.sum(jax.scipy.special.entr(share), axis=-1))
        / math.log(max(experts, 2)),
        "moe/router_entropy": jnp.mean(sums["router_entropy"] / tokens),
        "moe/balance_loss": load_balancing_loss(sums),
    }
    if "router_agreement" in sums:
        metrics["moe/routing_agreement"] = jnp.sum(sums["router_agreement"]) / jnp.maximum(
            jnp.sum(load), 1.0
        )
    return metrics


def load_balancing_loss(sums: Aux) -> jax.Array:
    """E sum_e f_e P_e: f_e the share of tokens sent to expert e (k altogether), P_e its mean
    probability.

    Fedus et al. 2021 (arXiv:2101.03961), Eq. 4-6, with the tokens of all layers together as in
    transformers' `load_balancing_loss_func`. k if every expert gets as much as any other, at most
    E. The gradient reaches the router through P; f is a constant.

    Args:
        sums: `router_sums` of every layer, stacked on the first axis.

    Returns:
        [] float32; 0 without tokens.
    """
    tokens = jnp.maximum(jnp.sum(sums["router_tokens"]), 1.0)
    load, probability = (
        jnp.sum(sums[name], axis=0) / tokens for name in ("router_load", "router_probability")
    )
    return load.size * jnp.sum(jax.lax.stop_gradient(load) * probability)


class _Routes(NamedTuple):
    """Tokens ordered by expert; a token counts once for each of its k experts.

    Attributes:
        order, place: [T k] int32, a permutation and its inverse.
        owner: [T k] int32, the expert of each ordered row; the number of experts for one that is
            not ours.
        group_sizes: [experts] int32.
    """

    order: jax.Array
    place: jax.Array
    owner: jax.Array
    group_sizes: jax.Array


def _routes(chosen: jax.Array, num_experts: int) -> _Routes:
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    place = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
    )
    group_sizes = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return _Routes(order, place, flat[order], group_sizes)


def _linear(
    x: jax.Array, kernel: jax.Array | QuantizedKernel, routes: _Routes, ops: Ops
) -> jax.Array:
    if isinstance(kernel, QuantizedKernel) and kernel.grouped:
        kernel = in_float32(kernel).astype(x.dtype)
    if not isinstance(kernel, QuantizedKernel):
        return ops.grouped_matmul(x, kernel, routes.group_sizes)
    product = ops.grouped_matmul(x, kernel.values.astype(x.dtype), routes.group_sizes)
    return (product * kernel.scale[routes.owner]).astype(x.dtype)


def _compute(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    kernels: tuple[jax.Array | QuantizedKernel, ...],
    *,
    num_experts: int,
    ops: Ops,
    elsewhere: bool = False,
) -> jax.Array:
    """The weighted sum of the experts whose kernels are given, [B, T, D] float32.

    With `elsewhere` a token's expert may be on another device: `chosen` is then `num_experts`, and
    it adds 0.
    """
    shape = x.shape
    count = chosen.shape[-1]
    routes = _routes(chosen, num_experts)
    ours = (routes.owner < num_experts)[:, None]
    rows = permute(jnp.repeat(x.reshape(-1, shape[-1]), count, axis=0), routes.order, routes.place)
    # Rows of no group have undefined products, forward and backward; neither leaves this function.
    rows = jnp.where(ours, rows, 0) if elsewhere else rows
    if len(kernels) == 2:
        gate, up = jnp.split(_linear(rows, kernels[0], routes, ops), 2, axis=-1)
    else:
        gate, up = (_linear(rows, kernel, routes, ops) for kernel in kernels[:2])
    y = _linear(ops.swiglu(gate, up), kernels[-1], routes, ops)
    y = jnp.where(ours, y, 0) if elsewhere else y
    y = permute(y, routes.place, routes.order).reshape(-1, count, shape[-1])
    return jnp.einsum(
        "tkd,tk->td", y, weights.reshape(-1, count), preferred_element_type=jnp.float32
    ).reshape(shape)


def _expert_parallel(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    kernels: tuple[jax.Array, ...],
    *,
    num_experts: int,
    ops: Ops,
    mesh: Mesh,
) -> jax.Array:
    """`_compute` on a mesh: rows split over data, fsdp and expert, experts over expert, their width
    over tensor.

    Devices along the expert axis gather each other's tokens, compute the tokens of their own
    experts, and return the sums. Nothing depends on where tokens go, so shapes are static and no
    token is dropped.

    Within a `shard_map` over all axes the arguments are the device's own rows and experts; so is
    the result, of the device's own part of the experts' width.
    """
    ways = mesh.shape[EXPERT]
    tensor = mesh.shape["tensor"]
    if num_experts % ways:
        raise UserError(
            f"mesh {EXPERT}: got {ways}, must be a divisor of the {num_experts} experts"
        )
    own = num_experts // ways
    free = free_axes(mesh)
    # Where a caller has mapped over tensor, it adds the parts of the width.
    width = (
        "tensor" if "tensor" in free and tensor > 1 and kernels[-1].shape[1] % tensor == 0 else None
    )

    def local(
        x: jax.Array, chosen: jax.Array, weights: jax.Array, kernels: tuple[jax.Array, ...]
    ) -> jax.Array:
        if ways > 1:
            gather = functools.partial(jax.lax.all_gather, axis_name=EXPERT, axis=0, tiled=True)
            x = gather(x)
            chosen = gather(chosen) - own * jax.lax.axis_index(EXPERT)
            weights = gather(weights)
            chosen = jnp.where((chosen >= 0) & (chosen < own), chosen, own)
        y = _compute(x, chosen, weights, kernels, num_experts=own, ops=ops, elsewhere=ways > 1)
        y = y if width is None else jax.lax.psum(y, width)
        return jax.lax.psum_scatter(y, EXPERT, scatter_dimension=0, tiled=True) if ways > 1 else y

    if not free:
        return local(x, chosen, weights, kernels)
    rows = P(tuple(axis for axis in ("data", "fsdp", EXPERT) if axis in free))
    inward = P(EXPERT, None, width)
    outward = P(EXPERT, width, None)
    specs = {
        "in_specs": (rows, rows, rows, (*(inward for _ in kernels[:-1]), outward)),
        "out_specs": rows,
    }
    return shard_map_over(free, local, mesh, **specs)(x, chosen, weights, kernels)
