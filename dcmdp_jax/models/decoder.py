"""Qwen2 and Qwen3 dense decoders as Flax NNX modules, seen from outside as pure functions of parameters.

A module is built once as a skeleton (`nnx.split`), its parameters are a plain nested dict with the layers stacked on
the leading axis: what optax, Orbax and the sharding table want to see.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from dcmdp_jax.models.attention import choose_kernel, row_attention, shared_prompt_attention, visible_of_shared
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.layers import (
    MLP,
    Linear,
    RMSNorm,
    apply_rotary,
    norm_and_rotate,
    rms_norm,
    rotary_tables,
    split,
)
from dcmdp_jax.types import Params, SharedPrompts

Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(query [B, T, H, h], key [B, T, K, h], value) -> (attended [B, T, H, h], what the caller wants back)."""

_MATRICES = ("embedding", "output", "kernel")

Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]
"""Pins an activation's logical axes to the mesh; the identity on one device."""


@dataclasses.dataclass(frozen=True)
class Compute:
    """How the forward pass runs; none of it changes what is computed beyond rounding.

    Attributes:
        dtype: "float32" or "bfloat16", of activations and products.
        remat: "none" saves all, "dots" saves matrix products, "full" saves only each layer's input.
        attention: "auto", "xla", "cudnn" or "splash".
        scan_unroll: layers in one iteration of the scan over layers. 1 compiles fastest; all of them halves the time of
            a backward pass on CPU, where a loop carries saved activations by copying.
        logprob_chunk: tokens whose [chunk, V] logits exist at one time.
        one_segment: rows hold one completion each (see `row_attention`).
    """

    dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    scan_unroll: int = 1
    logprob_chunk: int = 1024
    one_segment: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype: got {self.dtype!r}, allowed are float32, bfloat16")
        if self.remat not in ("none", "dots", "full"):
            raise ValueError(f"remat: got {self.remat!r}, allowed are none, dots, full")
        for name in ("scan_unroll", "logprob_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, must be at least 1")


class Attention(nnx.Module):
    """Projections, head norms and rotary embedding around an attention function given by the caller.

    `merged` has W_q, W_k and W_v side by side in one matrix; see `merge_projections`.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, merged: bool = False) -> None:
        self.config = config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        if merged:
            self.qkv = Linear(config.hidden_size, width + 2 * kv_width, bias=config.attention_bias, dtype=dtype)
        else:
            self.q = Linear(config.hidden_size, width, bias=config.attention_bias, dtype=dtype)
            self.k = Linear(config.hidden_size, kv_width, bias=config.attention_bias, dtype=dtype)
            self.v = Linear(config.hidden_size, kv_width, bias=config.attention_bias, dtype=dtype)
        self.o = Linear(width, config.hidden_size, bias=config.output_bias, dtype=dtype)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], attend: Attend) -> tuple[jax.Array, Any]:
        config = self.config
        heads = (*x.shape[:2], -1, config.head_dim)
        scales = [None, None]
        if config.qk_norm:
            counts = config.num_heads, config.num_kv_heads
            scales = [
                jnp.broadcast_to(norm.scale.get_value(), (count, config.head_dim))
                for norm, count in zip((self.q_norm, self.k_norm), counts, strict=True)
            ]
        if hasattr(self, "qkv"):
            # Queries and keys are treated alike, so they go through norm and rotation as one array.
            width = (config.num_heads + config.num_kv_heads) * config.head_dim
            both, value = split(self.qkv(x), width, axis=2)
            both = self._rotated(both.reshape(heads), jnp.concatenate(scales) if config.qk_norm else None, rotary)
            query, key = split(both, config.num_heads, axis=2)
        else:
            query, key = (
                self._rotated(layer(x).reshape(heads), scale, rotary)
                for layer, scale in zip((self.q, self.k), scales, strict=True)
            )
            value = self.v(x)
        attended, extra = attend(query, key, value.reshape(heads))
        return self.o(attended.reshape(*x.shape[:2], -1)), extra

    def _rotated(self, x: jax.Array, scale: jax.Array | None, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
        return apply_rotary(x, rotary) if scale is None else norm_and_rotate(x, scale, rotary, self.config.rms_norm_eps)


class Block(nnx.Module):
    """One pre-norm decoder layer; the same for training rows and for decoding with a cache."""

    def __init__(
        self, config: ModelConfig, *, dtype: jnp.dtype, merged_attention: bool = False, merged_mlp: bool = False
    ) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, merged=merged_attention)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, merged=merged_mlp)

    def __call__(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], attend: Attend) -> tuple[jax.Array, Any]:
        attended, extra = self.attention(self.attention_norm(x), rotary, attend)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), extra


class Decoder(nnx.Module):
    """Embedding, stacked blocks, final norm and, when untied, the output matrix [D, V].

    Built as a skeleton only: `init_params` and `hf_weights` make the values.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype) -> None:
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(jnp.zeros(shape, dtype))
        self.layers = nnx.vmap(lambda: Block(config, dtype=dtype), axis_size=config.num_layers)()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.output = nnx.Param(jnp.zeros(shape[::-1], dtype))


@functools.lru_cache(maxsize=32)
def _block_skeleton(config: ModelConfig, merged_attention: bool, merged_mlp: bool) -> nnx.GraphDef:
    merged = {"merged_attention": merged_attention, "merged_mlp": merged_mlp}
    return nnx.graphdef(nnx.eval_shape(lambda: Block(config, dtype=jnp.float32, **merged)))


def _merge(graphdef: nnx.GraphDef, params: Params) -> Any:
    return nnx.merge(graphdef, nnx.State(jax.tree.map(nnx.Param, params, is_leaf=lambda x: not isinstance(x, dict))))


def init_params(config: ModelConfig, key: jax.Array, dtype: str = "float32") -> Params:
    """Fresh parameters: matrices normal with `initializer_range`, norms 1, biases 0.

    Args:
        config: the model.
        key: a `jax.random.key`.
        dtype: "float32" or "bfloat16".

    Returns:
        Nested dict; `layers` leaves carry a leading axis of `num_layers`.
    """
    shapes = param_shapes(config, dtype)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    # One draw for all matrices: each shape of its own would compile a generator of its own.
    drawn = [leaf.size if path[-1].key in _MATRICES else 0 for path, leaf in leaves]
    normal = config.initializer_range * jax.random.normal(key, (sum(drawn),), jnp.float32)
    start, values = 0, []
    for (path, leaf), size in zip(leaves, drawn, strict=True):
        if size:
            values.append(normal[start : start + size].reshape(leaf.shape).astype(leaf.dtype))
        else:
            values.append(jnp.full(leaf.shape, path[-1].key == "scale", leaf.dtype))
        start += size
    return jax.tree.unflatten(jax.tree.structure(shapes), values)


def param_shapes(config: ModelConfig, dtype: str = "float32") -> Params:
    """`jax.ShapeDtypeStruct`s of `init_params`, without making an array."""
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.dtype(dtype)))
    return nnx.to_pure_dict(nnx.state(abstract, nnx.Param))


def logical_axes(config: ModelConfig) -> Params:
    """Names of the axes of every parameter, in the tree of `init_params`; a name is mapped to the mesh elsewhere."""
    names = {
        "q": ("embed", "heads"),
        "k": ("embed", "kv_heads"),
        "v": ("embed", "kv_heads"),
        "o": ("heads", "embed"),
        "gate": ("embed", "mlp"),
        "up": ("embed", "mlp"),
        "down": ("mlp", "embed"),
    }

    def axes(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> tuple[str | None, ...]:
        keys = [entry.key for entry in path]
        if keys[0] == "embedding":
            return ("vocab", "embed")
        if keys[0] == "output":
            return ("embed", "vocab")
        if keys[-1] == "scale":
            return ("layers", None)[-leaf.ndim :] if keys[0] == "layers" else (None,)
        matrix = names[keys[-2]]
        return ("layers", *matrix) if keys[-1] == "kernel" else ("layers", matrix[1])

    return jax.tree_util.tree_map_with_path(axes, param_shapes(config))


def _identity(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    del axes
    return x


def hidden_states(
    params: Params,
    config: ModelConfig,
    input_ids: jax.Array,
    position_ids: jax.Array,
    segment_ids: jax.Array,
    compute: Compute,
    *,
    constrain: Constrain = _identity,
    mesh: Mesh | None = None,
    prompts: SharedPrompts | None = None,
) -> jax.Array:
    """Final normed hidden states of packed rows; `hidden[t]` predicts token t + 1.

    Args:
        params: as `init_params` makes.
        config: the model.
        input_ids, position_ids, segment_ids: [R, L] int32; positions restart with each segment, segment 0 is padding.
        compute: dtype, rematerialisation and kernel.
        constrain: pins activations to a mesh by logical names ("rows", "length", "hidden").
        mesh: the mesh, for kernels that need `shard_map`.
        prompts: the rows' shared prompts [P, S], if they have any. Computed on one device with the "xla" kernel.

    Returns:
        [R, L, D] in the compute dtype; [R, L - 1, D] with shared prompts, as no one reads a row's last token.
    """
    dtype = jnp.dtype(compute.dtype)
    kernel = choose_kernel(compute.attention, dtype, jax.default_backend() if mesh is None else _platform(mesh))
    shape = ()
    if prompts is not None:
        # Prompts and rows side by side as one long row: all but attention treats tokens alike.
        shape = (*prompts.input_ids.shape, input_ids.shape[0], input_ids.shape[1] - 1)
        prompt_positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape[:2])
        input_ids, position_ids = (
            jnp.concatenate([shared.reshape(-1), own[:, :-1].reshape(-1)])[None]
            for shared, own in ((prompts.input_ids, input_ids), (prompt_positions, position_ids))
        )
        visible = visible_of_shared(prompts.lengths, shape)
    # The barrier keeps XLA from recomputing cosines in every layer's fusion.
    rotary = jax.lax.optimization_barrier(rotary_tables(config, position_ids))
    merge = mesh is None or mesh.shape["tensor"] == 1
    axes = ("rows", "length", "hidden")

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
        if shape:
            return shared_prompt_attention(query, key, value, visible, shape), None
        options = {"kernel": kernel, "one_segment": compute.one_segment, "mesh": mesh}
        return row_attention(query, key, value, segment_ids, **options), None

    def layer(x: jax.Array, layer_params: Params) -> tuple[jax.Array, None]:
        # Heads that are split over devices stay apart: side by side they would have to be dealt out again.
        merged = merge_projections(layer_params, mlp=False) if merge else layer_params
        return constrain(apply_block(merged, config, x, rotary, attend)[0], axes), None

    if compute.remat == "full":
        layer = jax.checkpoint(layer)
    elif compute.remat == "dots":
        layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    x = constrain(params["embedding"].astype(dtype)[input_ids], axes)
    x, _ = jax.lax.scan(layer, x, params["layers"], unroll=compute.scan_unroll)
    if shape:
        x = x[0, shape[0] * shape[1] :].reshape(*shape[2:], -1)
    return final_norm(params, config, x)


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


def output_kernel(params: Params) -> jax.Array:
    """The output matrix [D, V]: the transposed embedding when tied."""
    return params["output"] if "output" in params else params["embedding"].T


def unstack_layers(params: Params, config: ModelConfig) -> list[Params]:
    """One parameter dict per layer, for decoding with the layers unrolled (twice the speed of a scan there)."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(config.num_layers)]


def merge_projections(layer_params: Params, *, mlp: bool) -> Params:
    """The layer with W_q, W_k, W_v side by side in one matrix "qkv", and with `mlp` W_gate and W_up in "gate_up".

    One larger product runs faster than three small ones. The backward pass of a merged MLP would have to put both
    gradients side by side, which costs more than it saves: it is for decoding.

    Args:
        layer_params: one entry of `unstack_layers`; kernels may be `QuantizedKernel`s.
        mlp: merges the MLP too.
    """

    def side_by_side(*linears: Params) -> Params:
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-1), *linears)

    attention, feed_forward = dict(layer_params["attention"]), dict(layer_params["mlp"])
    attention["qkv"] = side_by_side(*(attention.pop(name) for name in "qkv"))
    if mlp:
        feed_forward["gate_up"] = side_by_side(*(feed_forward.pop(name) for name in ("gate", "up")))
    return {**layer_params, "attention": attention, "mlp": feed_forward}


def apply_block(
    layer_params: Params, config: ModelConfig, x: jax.Array, rotary: tuple[jax.Array, jax.Array], attend: Attend
) -> tuple[jax.Array, Any]:
    """One layer with the caller's attention, for engines that keep a key-value cache.

    Args:
        layer_params: one entry of `unstack_layers`, also after `merge_projections`; kernels may be `QuantizedKernel`s.
        config: the model.
        x: [B, T, D] residual stream.
        rotary: `rotary_tables(config, positions)`.
        attend: gets rotated queries and keys and the values, returns the attended heads and anything else (a cache).

    Returns:
        The residual stream after the layer, and what `attend` returned beside.
    """
    skeleton = _block_skeleton(config, "qkv" in layer_params["attention"], "gate_up" in layer_params["mlp"])
    return _merge(skeleton, layer_params)(x, rotary, attend)


def final_norm(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """The norm before the output layer, for callers of `apply_block`."""
    return rms_norm(x, params["norm"]["scale"], config.rms_norm_eps)


def check_params(params: Params, config: ModelConfig) -> None:
    """Refuses parameters that are not those of the model.

    Raises:
        ValueError: naming the first parameter that is missing, superfluous or of another shape.
    """

    def shapes(tree: Params) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path, simple=True, separator="."): jnp.shape(leaf) for path, leaf in leaves}

    expected, given = shapes(param_shapes(config)), shapes(params)
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise ValueError(
                f"params: {name} has shape {given.get(name, 'missing')}, the model has {expected.get(name, 'no such')}"
            )
