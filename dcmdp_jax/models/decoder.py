"""The decoder of all families of `families.py`.

Flax NNX modules declare their parameters and are used as pure functions of them.
Parameters are a plain nested dict with the layers stacked on the leading axis, which optax, Orbax
and the sharding table understand; `params.py` derives everything about them from the modules'
declarations.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Integer

from dcmdp_jax.models.attention import RowKernel, choose_kernel, row_attention
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.declare import Scope, Stack, parameter
from dcmdp_jax.models.gated_delta import GatedDeltaNet, Recur, rows
from dcmdp_jax.models.layer_params import fuse_projections, is_recurrent, layer_of
from dcmdp_jax.models.layers import (
    MLP,
    Linear,
    LoraKernel,
    RMSNorm,
    all_rotary_tables,
    embedding_scale,
)
from dcmdp_jax.models.logprobs import KernelAxes
from dcmdp_jax.models.moe import Aux, MoE, router_sums
from dcmdp_jax.models.ops import Ops, choose_ops
from dcmdp_jax.models.ops.reference import Rotary, rms_norm
from dcmdp_jax.models.scheme import FULL, Scheme
from dcmdp_jax.models.scheme_products import round_cache, with_scheme
from dcmdp_jax.types import Array, Params

Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
"""(query [B, T, H, h], key [B, T, K, h], value) -> (attended [B, T, H, h], the caller's cache)."""

Reduce = Callable[[Array], Array]
"""Adds the partial results of the devices that share the heads and the MLP of a layer."""

Observe = Callable[[str, Callable[[Array], Any], Array], Any]
"""(name of an operator of a layer, operator, its input) -> its output; "attention" and "mlp" give a
cache or a report with it. To record what the operators of a layer read and give, or to run them on
other inputs.
"""

Constrain = Callable[[Array, tuple[str | None, ...]], Array]
"""Pins an activation's logical axes to the mesh; the identity on one device."""
LookUp = Callable[[Array, Array], Array]
"""(table [V, D], input_ids [R, L]) -> [R, L, D] in the compute dtype."""


@dataclasses.dataclass(frozen=True)
class Compute:
    """Execution of the forward pass; nothing here changes its result beyond rounding.

    Attributes:
        dtype: "float32", "bfloat16" or "float16", of activations and products.
        remat: "none" saves all, on a GPU what is more than elementwise; "dots" saves matrix
            products, "full" saves only each layer's input.
        attention: "auto" or one of `attention.KERNELS`.
        scan_unroll: layers in one iteration of the scan over layers. 1 compiles fastest. All of
            them halves the time of a backward pass on CPU and saves a quarter of a GPU's memory
            traffic: a loop copies saved activations.
        logprob_chunk: tokens whose [chunk, V] logits exist at one time.
        one_segment: rows hold one completion each (see `row_attention`).
        segments: completions of a row at most; 0 for any number.
    """

    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    scan_unroll: int = 1
    logprob_chunk: int = 1024
    one_segment: bool = False
    segments: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype: got {self.dtype!r}, allowed are float32, bfloat16, float16")
        if self.remat not in ("none", "dots", "full"):
            raise ValueError(f"remat: got {self.remat!r}, allowed are none, dots, full")
        for name in ("scan_unroll", "logprob_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, must be at least 1")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderInputs:
    """Packed rows as the decoder reads them.

    Attributes:
        input_ids, position_ids, segment_ids: positions restart with each segment, segment 0 is
            padding.
        counted: the tokens that the layers report on; None: all but padding.
        replayed: the experts of each token, see `moe.MoE`; None: the router's choice.
    """

    input_ids: Int[Array, "R L"]
    position_ids: Int[Array, "R L"]
    segment_ids: Int[Array, "R L"]
    counted: Bool[Array, "R L"] | None = None
    replayed: Integer[Array, "R L layers k"] | None = None


def unpacked_inputs(input_ids: Int[Array, "R L"]) -> DecoderInputs:
    """Inputs of rows that are one segment each, without padding."""
    positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
    return DecoderInputs(
        input_ids=input_ids,
        position_ids=positions,
        segment_ids=jnp.ones_like(positions),
    )


class Attention(nnx.Module):
    """Projections, head norms and rotary embedding around the caller's attention.

    Attributes:
        fused: W_q, W_k and W_v are one matrix `qkv`; see `fuse_projections`.
    """

    def __init__(self, scope: Scope, *, fused: bool) -> None:
        config = scope.config
        self.config = config
        self.fused = fused
        self.gated = config.family.output_gate
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        query_width = width
        if self.gated:
            query_width *= 2
        self.query_width = query_width
        embed = config.hidden_size

        def linear(name: str, sizes: tuple[int, int], axes: tuple[str, str]) -> Linear:
            bias = config.attention_bias and not (name == "o_proj" and config.family.qkv_bias)
            return Linear(
                scope.inner(name),
                sizes,
                axes,
                bias=bias,
            )

        def norm(name: str, size: int, axis: str) -> RMSNorm:
            if config.family.qk_norm == "head":
                size = config.head_dim
                axis = "head_dim"
            return RMSNorm(
                scope.inner(name),
                size,
                axis,
            )

        if fused:
            self.qkv = linear(
                "qkv",
                (embed, query_width + 2 * kv_width),
                ("embed", "heads"),
            )
        else:
            self.q = linear(
                "q_proj",
                (embed, query_width),
                ("embed", "heads"),
            )
            self.k = linear(
                "k_proj",
                (embed, kv_width),
                ("embed", "kv_heads"),
            )
            self.v = linear(
                "v_proj",
                (embed, kv_width),
                ("embed", "kv_heads"),
            )
        if config.family.qk_norm:
            self.q_norm = norm(
                "q_norm",
                width,
                "heads",
            )
            self.k_norm = norm(
                "k_norm",
                kv_width,
                "kv_heads",
            )
        self.o = linear(
            "o_proj",
            (width, embed),
            ("heads", "embed"),
        )

    def __call__(
        self,
        x: Array,
        rotary: Rotary,
        attend: Attend,
        ops: Ops,
    ) -> tuple[Array, Any]:
        """Output [B, T, D] of the normalized inputs x [B, T, D], and the cache of `attend`."""
        config = self.config
        head_shape = (*x.shape[:2], -1, config.head_dim)
        q_scale = None
        k_scale = None
        if config.family.qk_norm == "head":
            q_scale = jnp.broadcast_to(self.q_norm.factors, (config.num_heads, config.head_dim))
            k_scale = jnp.broadcast_to(self.k_norm.factors, (config.num_kv_heads, config.head_dim))

        if self.fused:
            kv_width = config.num_kv_heads * config.head_dim
            # Columns of queries come first in `qkv`, then those of keys and of values.
            query_and_key, value = ops.split(self.qkv(x), self.query_width + kv_width)
        if self.fused and config.family.qk_norm != "width" and not self.gated:
            # Norm and rotation are the same for queries and keys, so they take them as one array.
            scale = None
            if q_scale is not None:
                scale = jnp.concatenate([q_scale, k_scale])
            rotated = self._rotated(query_and_key.reshape(head_shape), scale, rotary, ops)
            query, key = ops.split(rotated, config.num_heads)
        else:
            if self.fused:
                query, key = ops.split(query_and_key, self.query_width)
            else:
                query = self.q(x)
                key = self.k(x)
                value = self.v(x)
            if self.gated:
                # Each head has its query, then its gate.
                query = query.reshape(*x.shape[:2], config.num_heads, 2, config.head_dim)
                query, gate = jnp.moveaxis(query, 3, 0)
            if config.family.qk_norm == "width":
                query = self.q_norm(query)
                key = self.k_norm(key)
            query = self._rotated(query.reshape(head_shape), q_scale, rotary, ops)
            key = self._rotated(key.reshape(head_shape), k_scale, rotary, ops)

        scalar = config.query_pre_attn_scalar
        if scalar not in (0, config.head_dim):
            # Kernels divide by sqrt(h).
            query = query * jnp.asarray(math.sqrt(config.head_dim / scalar), query.dtype)
        attended, cache = attend(query, key, value.reshape(head_shape))
        if self.gated:
            attended = attended * jax.nn.sigmoid(gate)
        return self.o(attended.reshape(*x.shape[:2], -1)), cache

    def _rotated(
        self,
        x: Array,
        scale: Array | None,
        rotary: Rotary,
        ops: Ops,
    ) -> Array:
        if scale is None:
            return ops.rotate(x, rotary)
        eps = self.config.rms_norm_eps
        rotary_dim = self.config.rotary_dim
        if rotary_dim >= self.config.head_dim:
            return ops.norm_and_rotate(self.q_norm.read(x), scale, rotary, eps).astype(x.dtype)
        normed = rms_norm(self.q_norm.read(x), scale, eps).astype(x.dtype)
        rotated = ops.rotate(normed[..., :rotary_dim], rotary)
        return jnp.concatenate([rotated, normed[..., rotary_dim:]], axis=-1)


class Block(nnx.Module):
    """One decoder layer; the same for training rows and for decoding with a cache.

    Attributes:
        attention_norm, attention_out_norm, mlp_norm, mlp_out_norm: norms before and after the
            sub-layers, or None; see `families.Family`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        stacks: tuple[Stack, ...] = (),
        kind: str = "",
        fused_attention: bool = False,
        fused_mlp: bool = False,
    ) -> None:
        scope = Scope(
            config,
            "model.layers.{layers}",
            stacks,
        )

        def norm(attribute: str) -> RMSNorm | None:
            name = config.family.norms.get(attribute)
            if name is None:
                return None
            return RMSNorm(
                scope.inner(name),
                config.hidden_size,
                "norm",
            )

        self.attention_norm = norm("attention_norm")
        if kind == "recurrent":
            self.attention = GatedDeltaNet(scope.inner("linear_attn"))
        else:
            self.attention = Attention(scope.inner("self_attn"), fused=fused_attention)
        self.attention_out_norm = norm("attention_out_norm")
        self.mlp_norm = norm("mlp_norm")
        feed_forward = MLP
        if config.num_experts:
            feed_forward = MoE
        self.mlp = feed_forward(scope.inner("mlp"), fused=fused_mlp)
        self.mlp_out_norm = norm("mlp_out_norm")

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rotary: Rotary,
        attend: Attend | Recur,
        ops: Ops,
        *,
        mesh: Mesh | None = None,
        reduce: Reduce | None = None,
        replayed: Integer[Array, "B T k"] | None = None,
        observe: Observe = lambda name, operator, x: operator(x),
    ) -> tuple[Float[Array, "B T D"], Any, Aux]:
        """Run the layer with the caller's attention.

        Args:
            x: residual stream.
            rotary: `rotary_tables` of the layer.
            attend: gets rotated queries and keys and the values, returns the attended heads and a
                cache, or None; of a recurrent layer a `Recur`.
            ops: the platform's operations.
            mesh, replayed: see `moe.MoE`.
            reduce: adds up the outputs of attention and MLP, for a caller whose `shard_map` gives
                each device its own heads and its own part of the MLP; the layer's config is then
                that of the part. None: each device has all of them.
            observe: runs each operator: "attention", "mlp", and the norms that the layer has.

        Returns:
            The residual stream after the layer, the cache that `attend` returned, and what the
            layer reports.
        """
        reduce = reduce or (lambda partial: partial)

        def normed(name: str, x: Array) -> Array:
            norm = getattr(self, name)
            if norm is None:
                return x
            return observe(name, norm, x)

        def attention(x: Array) -> tuple[Array, Any]:
            return self.attention(x, rotary, attend, ops)

        def feed_forward(x: Array) -> tuple[Array, Aux]:
            if isinstance(self.mlp, MLP):
                return self.mlp(x, ops), {}
            return self.mlp(x, ops, mesh, replayed)

        attended, cache = observe("attention", attention, normed("attention_norm", x))
        x = x + normed("attention_out_norm", reduce(attended))
        y, aux = observe("mlp", feed_forward, normed("mlp_norm", x))
        return x + normed("mlp_out_norm", reduce(y)), cache, aux


class Layers(nnx.Module):
    """The blocks of a decoder with more than one kind of layers, stacked kind by kind."""

    def __init__(self, config: ModelConfig) -> None:
        for kind, numbers in config.kinds.items():
            stack = Stack(axis="layers", numbers=numbers)
            setattr(self, kind, Block(config, stacks=(stack,), kind=kind))


class Decoder(nnx.Module):
    """Embedding, stacked blocks, final norm and, when untied, the output matrix [D, V].

    Declarations alone; holds no arrays. `hidden_states` computes.
    """

    def __init__(self, config: ModelConfig) -> None:
        normal = jax.nn.initializers.normal(config.initializer_range)
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = parameter(
            Scope(config, "model"), "embed_tokens.weight", shape, ("vocab", "embed"), init=normal
        )
        if config.recurrent_layers:
            self.layers = Layers(config)
        else:
            stack = Stack(axis="layers", numbers=range(config.num_layers))
            self.layers = Block(config, stacks=(stack,))
        self.norm = _last_norm(config)
        if not config.tie_word_embeddings:
            self.output = parameter(
                Scope(config, "lm_head"),
                "weight",
                shape[::-1],
                ("embed", "vocab"),
                init=normal,
                transposed=True,
            )


def _last_norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(
        Scope(config, "model.norm"),
        config.hidden_size,
        "norm",
    )


@functools.lru_cache(maxsize=32)
def _block_graph(
    config: ModelConfig,
    kind: str,
    fused_attention: bool,
    fused_mlp: bool,
) -> nnx.GraphDef:
    return nnx.graphdef(
        Block(config, kind=kind, fused_attention=fused_attention, fused_mlp=fused_mlp)
    )


_LayerInputs = tuple[Params, Array | None, dict[str, Array]]
"""A layer's parameters, its replayed experts, and what else differs by layer."""
_LayerOutputs = tuple[Array, Aux]
"""The residual stream after a layer, and what the layer reports."""
_Layer = Callable[[Array, _LayerInputs], _LayerOutputs]


def platform_of(mesh: Mesh | None) -> str:
    """Platform of the mesh's devices, or of JAX's default device."""
    if mesh is None:
        return jax.default_backend()
    return mesh.devices.flat[0].platform


def hidden_states_and_aux(
    params: Params,
    config: ModelConfig,
    inputs: DecoderInputs,
    compute: Compute,
    *,
    constrain: Constrain = lambda x, axes: x,
    look_up: LookUp | None = None,
    mesh: Mesh | None = None,
    scheme: Scheme = FULL,
) -> tuple[Float[Array, "R L D"], Aux]:
    """Final normed hidden states of packed rows, and what the layers report.

    `hidden[t]` predicts token t + 1.

    Args:
        params: tree of `params.init_params`.
        config: the model.
        inputs: the rows.
        compute: dtype, rematerialization and kernel.
        constrain: pins activations to a mesh by logical names ("rows", "length", "hidden").
        look_up: the lookup in an embedding whose width is split over devices, see `look_up_split`;
            None: the compiler's own.
        mesh: the mesh, for kernels that need `shard_map`.
        scheme: roundings of an engine: its `products`, of a dense model alone, and its `cache`.

    Returns:
        Hidden states in the compute dtype; and `moe.router_sums` of each layer, stacked on the
        first axis, empty for a dense model.
    """
    dtype = jnp.dtype(compute.dtype)
    platform = platform_of(mesh)
    length = inputs.input_ids.shape[1]
    ops = choose_ops(platform)
    kernel = RowKernel(
        name=choose_kernel(compute.attention, dtype, platform, length),
        ops=ops,
        one_segment=compute.one_segment,
        segments=compute.segments,
        mesh=mesh,
    )
    counted = inputs.counted
    if counted is None:
        counted = inputs.segment_ids > 0
    tables = all_rotary_tables(config, inputs.position_ids)
    ropes = config.layer_ropes
    windows = config.layer_windows(length)
    # What differs by layer travels with the layers of the scan.
    by_layer: dict[str, Array] = {}
    if len(tables) > 1:
        stacked = jax.tree.map(lambda *kinds: jnp.stack(kinds), *tables.values())
        table_index = list(tables).index
        by_layer["rope"] = jnp.asarray(list(map(table_index, ropes)))
    if min(windows) < max(windows):
        by_layer["slides"] = jnp.asarray(windows) > 0
    # Heads that are split over devices stay in matrices of their own: a fused one would have to be
    # dealt out again. Adapters are matrices of their own.
    fuse = ops.fuse_qkv and (mesh is None or mesh.shape["tensor"] == 1) and not has_adapters(params)
    axes = ("rows", "length", "hidden")

    def layer(x: Array, xs: _LayerInputs) -> _LayerOutputs:
        layer_params, replayed, by_layer = xs
        rotary = tables[ropes[0]]
        if "rope" in by_layer:
            rotary = jax.tree.map(lambda x: x[by_layer["rope"]], stacked)

        def attend(query: Array, key: Array, value: Array) -> tuple[Array, None]:
            attended = row_attention(
                query,
                round_cache(key, scheme.cache),
                round_cache(value, scheme.cache),
                inputs.segment_ids,
                kernel,
                window=max(windows),
                slides=by_layer.get("slides"),
            )
            return attended, None

        if fuse:
            layer_params = fuse_projections(layer_params, mlp=False)
        layer_params = with_scheme(layer_params, scheme)
        mix = attend
        if is_recurrent(layer_params):
            mix = functools.partial(rows, config, inputs.segment_ids)
        block = block_of(layer_params, config)
        x, _, aux = block(x, rotary, mix, ops, mesh=mesh, replayed=replayed)
        x = constrain(x, axes)
        if not config.num_experts:
            return x, {}
        return x, router_sums(aux, counted)

    table = params["embedding"]
    if look_up is None:
        x = constrain(table.astype(dtype), ("vocab", "hidden"))[inputs.input_ids]
    else:
        x = look_up(table, inputs.input_ids)
    x = constrain(embedding_scale(config, x), axes)

    replayed = inputs.replayed
    if replayed is not None:
        replayed = jnp.moveaxis(replayed, 2, 0)
    layer = _rematerialized(layer, compute.remat, platform)
    scan = lax.scan
    if config.recurrent_layers:
        scan = functools.partial(_scan_periods, config)
    x, aux = scan(layer, x, (params["layers"], replayed, by_layer), unroll=compute.scan_unroll)
    return final_norm(params, config, x), aux


def _rematerialized(layer: _Layer, remat: str, platform: str) -> _Layer:
    if remat == "full":
        return jax.checkpoint(layer)
    if remat == "dots":
        policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        return jax.checkpoint(layer, policy=policy)
    if platform == "gpu":
        # Each value that the loop over layers keeps is copied to a stack of all layers, and from
        # it.
        return jax.checkpoint(layer, policy=_is_kernel, prevent_cse=False)
    return layer


def _scan_periods(
    config: ModelConfig,
    layer: _Layer,
    x: Array,
    xs: _LayerInputs,
    *,
    unroll: int,
) -> _LayerOutputs:
    """`jax.lax.scan` whose iteration is a period of the layers' kinds."""
    layers, replayed, by_layer = xs
    count = config.num_layers // config.period

    def period(x: Array, xs: tuple[Params, Array | None]) -> _LayerOutputs:
        layers, replayed = xs
        reports = []
        for index in range(config.period):
            layer_params = layer_of(layers, config, index)
            experts = None
            if replayed is not None:
                experts = replayed[index]
            x, aux = layer(x, (layer_params, experts, by_layer))
            reports.append(aux)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *reports)

    periods = jax.tree.map(
        lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), (layers, replayed)
    )
    x, aux = lax.scan(period, x, periods, unroll=max(1, unroll // config.period))
    return x, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), aux)


def _is_kernel(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a checkpoint keeps a value: products, attention, loops over blocks of either."""
    name = primitive.name
    return name in ("dot_general", "scan", "while") or name.startswith("dot_product_attention")


def look_up_split(
    table: Float[Array, "V part"],
    input_ids: Int[Array, "R L"],
    *,
    dtype: jnp.dtype,
    axes: KernelAxes,
) -> Float[Array, "R L D"]:
    """Look rows up in a table that is split over devices, without holding the whole table on one.

    x[r, t] = table[input_ids[r, t]], for code inside a `shard_map` that splits rows over
    `axes.embed`.

    The token ids of all rows go to each device, which looks up its own columns of them; then each
    device gets all columns of its own rows. So R L D numbers travel instead of V D, once forward
    and once backward, and the table's gradient is summed in float32 on the device that holds the
    columns. Left to the compiler, the whole table in `dtype` was on each device, and so was its
    gradient: 1.2 GiB each for a vocabulary of 151,936 and a width of 4,096.

    Args:
        table: [V, D] master parameters; the device's part, [V / vocab, D / embed].
        input_ids: the device's rows.
        dtype: dtype of the result.
        axes: `embed`, the manual mesh axis that splits D and the rows; `vocab`, the one that splits
            V, or None.

    Returns:
        In `dtype`; the same numbers as a lookup in the whole table, on every device of
        `axes.vocab`.
    """
    ids = lax.all_gather(input_ids, axes.embed, axis=0, tiled=True)
    if axes.vocab is None:
        x = table[ids].astype(dtype)
    else:
        own_ids = ids - table.shape[0] * lax.axis_index(axes.vocab)
        inside = (own_ids >= 0) & (own_ids < table.shape[0])
        own_rows = table[jnp.where(inside, own_ids, 0)].astype(dtype)
        # One device has the row, the others add 0: exact in any dtype.
        x = lax.psum(jnp.where(inside[..., None], own_rows, 0), axes.vocab)
    return lax.all_to_all(x, axes.embed, split_axis=0, concat_axis=2, tiled=True)


def hidden_states(
    params: Params,
    config: ModelConfig,
    inputs: DecoderInputs,
    compute: Compute,
    *,
    scheme: Scheme = FULL,
) -> Float[Array, "R L D"]:
    """`hidden_states_and_aux` on one device, without what the layers report."""
    return hidden_states_and_aux(params, config, inputs, compute, scheme=scheme)[0]


def output_kernel(params: Params) -> Array:
    """The output matrix [D, V]: the transposed embedding when tied."""
    if "output" in params:
        return params["output"]
    return params["embedding"].T


def has_adapters(params: Params) -> bool:
    """Whether any matrix has an adapter, see `lora.adapted`."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, LoraKernel))
    return any(isinstance(leaf, LoraKernel) for leaf in leaves)


def block_of(layer_params: Params, config: ModelConfig) -> Block:
    """One layer with its parameters, for training and for engines that keep a key-value cache.

    Args:
        layer_params: parameters of one layer, also after `fuse_projections`; kernels may be
            `QuantizedKernel`s.
        config: the model.
    """
    mlp = layer_params["mlp"]
    kind = ""
    if is_recurrent(layer_params):
        kind = "recurrent"
    graph = _block_graph(
        config,
        kind,
        "qkv" in layer_params["attention"],
        "gate_up" in mlp.get("experts", mlp),
    )
    leaves = jax.tree.map(nnx.Param, layer_params, is_leaf=lambda x: not isinstance(x, dict))
    return nnx.merge(graph, nnx.State(leaves))


def final_norm(params: Params, config: ModelConfig, x: Array) -> Array:
    """The norm before the output layer, for callers of `block_of`."""
    norm = _last_norm(config)
    norm.scale.set_value(params["norm"]["scale"])
    return norm(x)
