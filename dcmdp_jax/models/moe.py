"""Mixture of experts in place of an MLP: router, experts, and what a router reports.

No token is dropped: the rows of each expert are computed together, however many they are.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcmdp_jax.errors import UserError
from dcmdp_jax.models.declare import Fused, Scope, Stack
from dcmdp_jax.models.layers import MLP, Linear
from dcmdp_jax.models.ops import Ops
from dcmdp_jax.models.ops.reference import permute
from dcmdp_jax.models.quantize import Kernel, QuantizedKernel, in_float32
from dcmdp_jax.parallel.sharding import free_axes, shard_map_over
from dcmdp_jax.types import Array

EXPERT = "expert"
"""The mesh axis that splits experts; the tokens are split over it too."""

Aux = dict[str, Array]
"""Statistics of a layer by name; a dense layer has none."""


class Experts(nnx.Module):
    """The MLPs that tokens are routed to, see `layers.MLP`; a matrix of all is [E, in, out]."""

    def __init__(
        self,
        scope: Scope,
        *,
        fused: bool,
    ) -> None:
        config = scope.config
        width = config.moe_intermediate_size
        embed = config.hidden_size
        stack = Stack(axis="experts", numbers=range(config.num_experts))
        expert = Scope(
            config,
            f"{scope.hf_name}.{{experts}}",
            (*scope.stacks, stack),
        )
        inward = ("embed", "expert_mlp")

        if fused:
            self.gate_up = Linear(
                expert.inner("gate_up"),
                (embed, 2 * width),
                inward,
            )
        else:
            gate_up = f"{scope.hf_name}.gate_up_proj"
            self.gate = Linear(
                expert.inner("gate_proj"),
                (embed, width),
                inward,
                fused=Fused(
                    hf_name=gate_up,
                    block=0,
                    blocks=2,
                ),
            )
            self.up = Linear(
                expert.inner("up_proj"),
                (embed, width),
                inward,
                fused=Fused(
                    hf_name=gate_up,
                    block=1,
                    blocks=2,
                ),
            )
        self.down = Linear(
            expert.inner("down_proj"),
            (width, embed),
            ("expert_mlp", "embed"),
            fused=Fused(hf_name=f"{scope.hf_name}.down_proj", block=0, blocks=1),
        )


class MoE(nnx.Module):
    """y = sum over the top k experts e of p_e MLP_e(x), with p = softmax(W_router x).

    With `norm_topk_prob` the k probabilities are divided by their sum. As `Qwen3MoeSparseMoeBlock`
    of transformers; with the family's shared expert plus sigmoid(w_gate x) MLP(x), as
    `Qwen3_5MoeSparseMoeBlock`.

    Attributes:
        fused: W_gate and W_up of an expert are one matrix `gate_up`; see
            `layer_params.fuse_projections`.
    """

    def __init__(
        self,
        scope: Scope,
        *,
        fused: bool = False,
    ) -> None:
        config = scope.config
        self.config = config
        self.fused = fused
        # Engines keep the router in full precision: a token that goes to another expert is a large
        # error.
        self.router = Linear(
            scope.inner("gate"),
            (config.hidden_size, config.num_experts),
            ("embed", "experts"),
            quantized=False,
        )
        self.experts = Experts(scope.inner("experts"), fused=fused)
        if config.family.shared_expert:
            self.shared_expert = MLP(scope.inner("shared_expert"), fused=fused)
            self.shared_gate = Linear(
                scope.inner("shared_expert_gate"),
                (config.hidden_size, 1),
                ("embed", "norm"),
                quantized=False,
            )

    def __call__(
        self,
        x: Array,
        ops: Ops,
        mesh: Mesh | None = None,
        replayed: Array | None = None,
    ) -> tuple[Array, Aux]:
        """Route [B, T, D] tokens and compute their experts.

        Args:
            x: [B, T, D].
            ops: the platform's operations.
            mesh: the devices that rows and weights are split over; None where the arguments are one
                device's own.
            replayed: [B, T, k] integers, the experts to use in place of the top-k ones, -1 for
                a token that has none; their weights are still this router's, p of those experts.
                None: no token has any.

        Returns:
            [B, T, D], and "routed_experts" [B, T, k] int32 and "router_probabilities" [B, T, E]
            float32; with `replayed` also "own_experts" [B, T, k] int32, the top k.
        """
        config = self.config
        probabilities = jax.nn.softmax(self.router(x).astype(jnp.float32), axis=-1)
        weights, experts = lax.top_k(probabilities, config.num_experts_per_tok)
        aux = {"router_probabilities": probabilities}
        if replayed is not None:
            aux["own_experts"] = experts
            experts = jnp.where(replayed >= 0, replayed.astype(experts.dtype), experts)
            weights = jnp.take_along_axis(probabilities, experts, axis=-1)
        aux["routed_experts"] = experts
        if config.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)

        kernels = []
        names = ("gate", "up", "down")
        if self.fused:
            names = ("gate_up", "down")
        for name in names:
            kernel = getattr(self.experts, name).kernel.get_value()
            if not isinstance(kernel, QuantizedKernel):
                kernel = kernel.astype(x.dtype)
            kernels.append(kernel)
        compute = _compute
        if mesh is not None and mesh.size > 1:
            compute = functools.partial(_expert_parallel, mesh=mesh)
        y = compute(
            x,
            experts,
            weights.astype(x.dtype),
            tuple(kernels),
            num_experts=config.num_experts,
            ops=ops,
        )
        if config.family.shared_expert:
            y = y + jax.nn.sigmoid(self.shared_gate(x)) * self.shared_expert(x, ops)
        return y.astype(x.dtype), aux


def router_sums(aux: Aux, counted: Array) -> Aux:
    """Sum what the router of one layer reports over the tokens that count.

    Args:
        aux: second result of `MoE`.
        counted: [B, T] bool.

    Returns:
        "router_load" [E] float32, tokens sent to each expert, k for each token;
        "router_probability" [E] float32, the sum of its probabilities, through which a gradient
        flows; "router_entropy" [] float32, the sum of the tokens' entropies in nats;
        "router_tokens" [] float32; where experts are replayed "router_agreement" [] float32, how
        many of the experts used are among the token's top k. All are sums over micro-batches
        and devices.
    """
    probabilities = aux["router_probabilities"]
    sent = _sent(aux["routed_experts"], probabilities.shape[-1])
    mask = counted[..., None].astype(jnp.float32)
    entropy = jnp.sum(jax.scipy.special.entr(probabilities), axis=-1, keepdims=True)
    entropy = lax.stop_gradient(entropy)
    sums = {
        "router_load": jnp.sum(sent * mask, axis=(0, 1)),
        "router_probability": jnp.sum(probabilities * mask, axis=(0, 1)),
        "router_entropy": jnp.sum(entropy * mask),
        "router_tokens": jnp.sum(mask),
    }
    if "own_experts" in aux:
        top_tokens = _sent(aux["own_experts"], probabilities.shape[-1])
        sums["router_agreement"] = jnp.sum(sent * top_tokens * mask)
    return sums


def _sent(experts: Array, num_experts: int) -> Array:
    """[..., E] float32, 1 where a token goes to an expert."""
    return jax.nn.one_hot(experts, num_experts, dtype=jnp.float32).sum(axis=-2)


def router_metrics(sums: Aux) -> dict[str, Array]:
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
    load_entropy = jnp.mean(jnp.sum(jax.scipy.special.entr(share), axis=-1))
    metrics = {
        "moe/load_max_over_mean": experts * jnp.max(share),
        "moe/load_entropy": load_entropy / math.log(max(experts, 2)),
        "moe/router_entropy": jnp.mean(sums["router_entropy"] / tokens),
        "moe/balance_loss": load_balancing_loss(sums),
    }
    if "router_agreement" in sums:
        agreeing = jnp.sum(sums["router_agreement"])
        metrics["moe/routing_agreement"] = agreeing / jnp.maximum(jnp.sum(load), 1.0)
    return metrics


def load_balancing_loss(sums: Aux) -> Array:
    """E sum_e f_e P_e, the loss of an uneven use of the experts.

    f_e is the share of tokens sent to expert e (k altogether), P_e its mean probability.

    Fedus et al. 2021 (arXiv:2101.03961), Eq. 4-6, with the tokens of all layers together as in
    transformers' `load_balancing_loss_func`. k if every expert gets as much as any other, at most
    E. The gradient reaches the router through P; f is a constant.

    Args:
        sums: `router_sums` of every layer, stacked on the first axis.

    Returns:
        [] float32; 0 without tokens.
    """
    tokens = jnp.maximum(jnp.sum(sums["router_tokens"]), 1.0)
    load = jnp.sum(sums["router_load"], axis=0) / tokens
    probability = jnp.sum(sums["router_probability"], axis=0) / tokens
    return load.size * jnp.sum(lax.stop_gradient(load) * probability)


def _compute(
    x: Array,
    experts: Array,
    weights: Array,
    kernels: tuple[Kernel, ...],
    *,
    num_experts: int,
    ops: Ops,
    elsewhere: bool = False,
) -> Array:
    """The weighted sum of the experts whose kernels are given, [B, T, D] float32.

    With `elsewhere` a token's expert may be on another device: it is then `num_experts`, and adds
    0.
    """
    # Rows are ordered by expert; a token has one for each of its k experts.
    owner = experts.reshape(-1)
    order = jnp.argsort(owner, stable=True).astype(jnp.int32)
    index = jnp.arange(order.size, dtype=jnp.int32)
    inverse = jnp.zeros_like(order).at[order].set(index, unique_indices=True)
    row_owner = owner[order]
    group_sizes = jnp.sum(owner[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)

    def linear(inputs: Array, kernel: Kernel) -> Array:
        if isinstance(kernel, QuantizedKernel) and kernel.grouped:
            kernel = in_float32(kernel).astype(inputs.dtype)
        if not isinstance(kernel, QuantizedKernel):
            return ops.grouped_matmul(inputs, kernel, group_sizes)
        product = ops.grouped_matmul(inputs, kernel.values.astype(inputs.dtype), group_sizes)
        return (product * kernel.scale[row_owner]).astype(inputs.dtype)

    shape = x.shape
    count = experts.shape[-1]
    ours = (row_owner < num_experts)[:, None]
    rows = jnp.repeat(x.reshape(-1, shape[-1]), count, axis=0)
    rows = permute(rows, order, inverse)
    # Rows of no group have undefined products, forward and backward; neither leaves this function.
    if elsewhere:
        rows = jnp.where(ours, rows, 0)

    if len(kernels) == 2:
        gate, up = jnp.split(linear(rows, kernels[0]), 2, axis=-1)
    else:
        gate = linear(rows, kernels[0])
        up = linear(rows, kernels[1])
    y = linear(ops.swiglu(gate, up), kernels[-1])
    if elsewhere:
        y = jnp.where(ours, y, 0)

    y = permute(y, inverse, order).reshape(-1, count, shape[-1])
    weights = weights.reshape(-1, count)
    y = jnp.einsum("tkd,tk->td", y, weights, preferred_element_type=jnp.float32)
    return y.reshape(shape)


def _expert_parallel(
    x: Array,
    experts: Array,
    weights: Array,
    kernels: tuple[Array, ...],
    *,
    num_experts: int,
    ops: Ops,
    mesh: Mesh,
) -> Array:
    """`_compute` on a mesh: rows over data, fsdp, expert; experts over expert; width over tensor.

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
    count = num_experts // ways
    free = free_axes(mesh)
    # Where a caller has mapped over tensor, it adds the parts of the width.
    width = None
    if "tensor" in free and tensor > 1 and kernels[-1].shape[1] % tensor == 0:
        width = "tensor"

    def local(
        x: Array,
        experts: Array,
        weights: Array,
        kernels: tuple[Array, ...],
    ) -> Array:
        if ways > 1:
            gather = functools.partial(lax.all_gather, axis_name=EXPERT, axis=0, tiled=True)
            x = gather(x)
            experts = gather(experts) - count * lax.axis_index(EXPERT)
            weights = gather(weights)
            experts = jnp.where((experts >= 0) & (experts < count), experts, count)
        y = _compute(x, experts, weights, kernels, num_experts=count, ops=ops, elsewhere=ways > 1)
        if width is not None:
            y = lax.psum(y, width)
        if ways > 1:
            y = lax.psum_scatter(y, EXPERT, scatter_dimension=0, tiled=True)
        return y

    if not free:
        return local(x, experts, weights, kernels)
    row_axes = tuple(axis for axis in ("data", "fsdp", EXPERT) if axis in free)
    rows = P(row_axes)
    inward = [P(EXPERT, None, width)] * (len(kernels) - 1)
    compute = shard_map_over(
        free,
        local,
        mesh,
        in_specs=(rows, rows, rows, (*inward, P(EXPERT, width, None))),
        out_specs=rows,
    )
    return compute(x, experts, weights, kernels)
