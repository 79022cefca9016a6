"""The embedded engine's mesh: each device's share of weights, cache and rows.

Rows are split over data, fsdp and expert, weights over tensor (heads, MLP, vocabulary) and expert.
All programs are `shard_map`s over the whole mesh: each device computes its own rows with its own
part of the weights, and exchanges what the code says: the outputs of attention and MLP are summed
over tensor, tokens go to their experts and back, and each device samples an equal share of the rows
of its tensor group from whole rows of logits.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.cache import FLOAT8
from dcmdp_jax.errors import ArgumentError
from dcmdp_jax.models import declare, decoder, params
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.ops import Ops, choose_ops
from dcmdp_jax.models.quantize import QuantizedKernel, dequantize, is_quantized, with_rounded_inputs
from dcmdp_jax.parallel.mesh import AXES
from dcmdp_jax.parallel.sharding import ACTIVATION_AXES, PARAM_AXES, Axes, partition_spec
from dcmdp_jax.types import Params

TENSOR = "tensor"
EXPERT = "expert"
ROW_AXES: tuple[str, ...] = ACTIVATION_AXES["rows"]
ROWS = P(ROW_AXES)
# Keys and values [R, K, ...].
CACHE = P(ROW_AXES, TENSOR)
# Weights are whole along fsdp: a step of decoding would gather them for one token a row.
_WEIGHT_AXES = {**PARAM_AXES, "embed": None}


@dataclasses.dataclass(frozen=True)
class Program:
    """Static arguments of the compiled programs.

    Attributes:
        config: the model.
        compute_dtype: "float32", "bfloat16" or "float16", of activations and products.
        cache_dtype: dtype of stored keys and values; attention reads the stored ones, also within a
            prompt.
        mesh: engine mesh, see `engine_mesh`.
        routed_experts: also return the experts that each token was sent to.
        top_logprobs: also return the top-k tokens and their log-probs, this many; see `listed`.
        precision: of the weights; some round inputs too, see `scheme.Grouped`.
        param_dtype: dtype of the synced parameters.
    """

    config: ModelConfig
    compute_dtype: str
    cache_dtype: str
    mesh: Mesh
    routed_experts: bool = False
    top_logprobs: int = 0
    precision: str = ""
    param_dtype: str = "float32"

    def listed(self, mode: str) -> int:
        """Number of top-k tokens to return.

        None for a greedy draw, whose log-probs are of another distribution.
        """
        return 0 if mode == "greedy" else self.top_logprobs

    @classmethod
    def of(cls, arguments: EngineArguments, mesh: Mesh) -> "Program":
        """The static arguments of an engine."""
        cache_dtype = arguments.compute_dtype
        if arguments.kv_cache_dtype == "fp8":
            cache_dtype = FLOAT8
        return cls(
            config=arguments.model,
            compute_dtype=arguments.compute_dtype,
            cache_dtype=cache_dtype,
            mesh=mesh,
            routed_experts=arguments.routed_experts,
            top_logprobs=arguments.top_logprobs,
            precision=arguments.precision,
            param_dtype=arguments.param_dtype,
        )

    @property
    def rows(self) -> NamedSharding:
        """Sharding of arrays whose leading axis is the row."""
        return NamedSharding(self.mesh, ROWS)

    @property
    def cache(self) -> NamedSharding:
        """Sharding of keys and values."""
        return NamedSharding(self.mesh, CACHE)

    @property
    def row_shards(self) -> int:
        """Devices, or groups of them along tensor, that have rows of their own."""
        return self.mesh.size // self.tensor

    @property
    def tensor(self) -> int:
        """Devices that heads, MLP and vocabulary are split over."""
        return self.mesh.shape[TENSOR]

    @property
    def splits_vocab(self) -> bool:
        """Whether each device has its own part of the vocabulary; else it is replicated."""
        return self.tensor > 1 and self.config.vocab_size % self.tensor == 0

    @property
    def expert_mesh(self) -> Mesh | None:
        """The mesh for `moe.MoE`; None where each device has all experts."""
        return self.mesh if self.mesh.shape[EXPERT] > 1 else None

    @property
    def platform(self) -> str:
        """The devices' platform: "cpu", "gpu" or "tpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def ops(self) -> Ops:
        """The model's operations on this platform."""
        return choose_ops(self.platform)

    @property
    def keeps_quantized(self) -> bool:
        """Whether matrices in 8 bits stay so inside the programs.

        XLA's CPU backend would convert them in memory at each product.
        """
        return self.platform != "cpu"

    @property
    def device_model(self) -> ModelConfig:
        """The model as one device of a tensor group computes it."""
        config = self.config
        ways = self.tensor
        return dataclasses.replace(
            config,
            num_heads=config.num_heads // ways,
            num_kv_heads=config.num_kv_heads // ways,
            intermediate_size=max(1, config.intermediate_size // ways),
            moe_intermediate_size=config.moe_intermediate_size // ways,
        )

    @property
    def reduce(self) -> decoder.Reduce | None:
        """Sum over the tensor group, for `decoder.Block`; None where there is nothing to add."""
        if self.tensor == 1:
            return None
        return functools.partial(jax.lax.psum, axis_name=TENSOR)

    def own_weights(self, weights: Params) -> Params:
        """Weights of the device, inside a `shard_map`, as a loop uses them again and again.

        Rows of the embedding are converted once they are looked up, not all of it before the loop.
        A bias of the attention's output is added on one device of a tensor group only.
        """
        dtype = jnp.dtype(self.compute_dtype)
        converted = dequantize(weights, dtype, keep_quantized=self.keeps_quantized)
        if "embedding" in weights:
            converted["embedding"] = weights["embedding"]
        axis = TENSOR if self.tensor > 1 else ""
        weights = with_rounded_inputs(converted, self.precision, axis)
        if self.tensor > 1 and "bias" in weights["layers"][0]["attention"]["o"]:
            adds_bias = jax.lax.axis_index(TENSOR) == 0
            # The trees are new, made by `dequantize`.
            for layer in weights["layers"]:
                output = layer["attention"]["o"]
                output["bias"] = jnp.where(adds_bias, output["bias"], 0)
        return weights


def planned_mesh(arguments: EngineArguments) -> Mesh:
    """The mesh of an engine's settings."""
    settings = arguments.settings
    return arguments.mesh(tensor=settings.tensor, expert=settings.expert)


def engine_mesh(mesh: Mesh | None) -> Mesh:
    """The engine's mesh, with the trainer's axes.

    Args:
        mesh: used as it is if it has these axes; else its devices are along data. None: the first
            local device.
    """
    if mesh is None:
        devices = np.asarray(jax.local_devices()[:1])
    elif mesh.axis_names == AXES:
        return mesh
    else:
        devices = mesh.devices
    return Mesh(devices.reshape(-1, *[1] * (len(AXES) - 1)), AXES)


def check_mesh(config: ModelConfig, tensor: int, expert: int) -> None:
    """Refuse a mesh that does not divide the model.

    Raises:
        UserError: naming the axis, the size and what it has to divide.
    """
    for name in ("num_kv_heads", *config.mlp_fields):
        size = getattr(config, name)
        if size % tensor:
            raise ArgumentError("tensor", f"got {tensor}, must divide the model's {name}={size}")
    reason = ""
    if config.recurrent_layers:
        reason = "has recurrent layers"
    elif config.family.qk_norm == "width":
        reason = "norms all heads of q and k together"
    if tensor > 1 and reason:
        raise ArgumentError("tensor", f"got {tensor}, must be 1: {config.model_type} {reason}")
    if expert > 1 and (not config.num_experts or config.num_experts % expert):
        raise ArgumentError(
            "expert",
            f"got {expert}, must divide the model's num_experts={config.num_experts}, or be 1",
        )


@functools.lru_cache(maxsize=32)
def _axes(config: ModelConfig) -> dict[tuple[str, ...], Axes]:
    """Logical axes of every leaf of the engine's tree, and of a layer of the trainer's.

    Keys are paths without indices and kinds of layers.
    """
    axes = {}
    for leaf in params.model_declarations(config):
        axes[leaf.path] = leaf.axes
    for kind, fused in itertools.product(config.kinds, (False, True)):
        block = decoder.Block(config, kind=kind, fused_attention=fused, fused_mlp=fused)
        for leaf in declare.declarations(block):
            axes["layers", *leaf.path] = leaf.axes
    axes["output",] = ("embed", "vocab")
    return axes


def weight_specs(weights: Params, config: ModelConfig, mesh: Mesh) -> Params:
    """`PartitionSpec` of each leaf of an engine's tree, or of a part of it.

    Args:
        weights: arrays or shapes, `QuantizedKernel`s among them; "layers" may be a list of layers
            or one of each kind.
        config: the model.
        mesh: the engine's.
    """

    def spec(path: tuple[Any, ...], leaf: Any) -> Any:
        names = [entry.key for entry in path if hasattr(entry, "key")]
        keys = tuple(name for name in names if name not in config.kinds)
        axes = _axes(config)[keys]
        if "router" in keys:
            # Every device routes its own tokens.
            axes = (None,) * len(axes)
        if config.vocab_size % mesh.shape[TENSOR]:
            axes = tuple(None if axis == "vocab" else axis for axis in axes)
        values = partition_spec(axes, _WEIGHT_AXES)
        if not isinstance(leaf, QuantizedKernel):
            return values
        if leaf.grouped:
            return QuantizedKernel(values, values)
        return QuantizedKernel(values, partition_spec((*axes[:-2], axes[-1]), _WEIGHT_AXES))

    return jax.tree_util.tree_map_with_path(spec, weights, is_leaf=is_quantized)


def convert_late(weights: Params, x: jax.Array, program: Program) -> tuple[Params, jax.Array]:
    """Keep XLA from converting quantized matrices before `x` is computed; returns both unchanged.

    Else it would convert the matrices of all layers first, even before a loop: a second copy of the
    weights.

    Args:
        weights: leaves of a layer, or of what is outside layers.
        x: [R, T, D], what the matrices are multiplied with.
        program: static arguments.
    """
    leaves = jax.tree.leaves(weights, is_leaf=is_quantized)
    if program.keeps_quantized and any(map(is_quantized, leaves)):
        return jax.lax.optimization_barrier((weights, x))
    return weights, x
