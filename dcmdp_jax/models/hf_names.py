"""Names of Hugging Face's tensors and their places in the parameter tree: one table, read in both directions."""

from __future__ import annotations

from typing import NamedTuple

import jax

from dcmdp_jax.models import decoder
from dcmdp_jax.models.config import ModelConfig

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

# Parameter path -> (Hugging Face name, stored as [out, in]).
_TOP = {
    ("embedding",): (EMBEDDING, False),
    ("norm", "scale"): ("model.norm.weight", False),
    ("output",): (HEAD, True),
}
_LAYER = {
    ("attention_norm", "scale"): ("input_layernorm.weight", False),
    ("attention", "q", "kernel"): ("self_attn.q_proj.weight", True),
    ("attention", "q", "bias"): ("self_attn.q_proj.bias", False),
    ("attention", "k", "kernel"): ("self_attn.k_proj.weight", True),
    ("attention", "k", "bias"): ("self_attn.k_proj.bias", False),
    ("attention", "v", "kernel"): ("self_attn.v_proj.weight", True),
    ("attention", "v", "bias"): ("self_attn.v_proj.bias", False),
    ("attention", "q_norm", "scale"): ("self_attn.q_norm.weight", False),
    ("attention", "k_norm", "scale"): ("self_attn.k_norm.weight", False),
    ("attention", "o", "kernel"): ("self_attn.o_proj.weight", True),
    ("attention", "o", "bias"): ("self_attn.o_proj.bias", False),
    ("mlp_norm", "scale"): ("post_attention_layernorm.weight", False),
    ("mlp", "gate", "kernel"): ("mlp.gate_proj.weight", True),
    ("mlp", "up", "kernel"): ("mlp.up_proj.weight", True),
    ("mlp", "down", "kernel"): ("mlp.down_proj.weight", True),
}


class Place(NamedTuple):
    """Where a Hugging Face tensor lives in `Params`.

    Attributes:
        path: keys into the nested dict.
        layer: index on the leading axis of a stacked leaf, None outside `layers`.
        transposed: the tensor is [out, in], the leaf [in, out].
        shape: of the tensor.
    """

    path: tuple[str, ...]
    layer: int | None
    transposed: bool
    shape: tuple[int, ...]


def hf_names(config: ModelConfig) -> dict[str, Place]:
    """Every tensor of a checkpoint of `config`, in the order transformers writes them, and its place in `Params`.

    Tied models have no `lm_head.weight`.
    """
    leaves = {
        tuple(entry.key for entry in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(decoder.param_shapes(config))
    }

    def place(path: tuple[str, ...], layer: int | None, transposed: bool) -> Place:
        shape = leaves[path] if layer is None else leaves[path][1:]
        return Place(path, layer, transposed, shape[::-1] if transposed else shape)

    names: dict[str, Place] = {}
    for path, (name, transposed) in _TOP.items():
        if path in leaves:
            names[name] = place(path, None, transposed)
        if path == ("embedding",):
            for layer in range(config.num_layers):
                for inner, (suffix, flipped) in _LAYER.items():
                    if ("layers", *inner) in leaves:
                        names[f"model.layers.{layer}.{suffix}"] = place(("layers", *inner), layer, flipped)
    return names
