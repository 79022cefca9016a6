"""Low-rank adapters of a model's linear layers (LoRA), and PEFT's directories.

Hu et al. 2021, arXiv:2106.09685.

    y = x W + (alpha / r) (x A) B,      A [in, r],   B [r, out],   W frozen

Adapters are declared, drawn, sharded and saved like any parameters. The base holds W, in float32,
bfloat16 or int8.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from dcmdp_jax.errors import ArgumentError, UserError, suggestion
from dcmdp_jax.inputs import read_json_object
from dcmdp_jax.models import hf_config, hf_weights, products
from dcmdp_jax.models.array_checksum import array_checksum
from dcmdp_jax.models.config import ALL_LINEAR, Lora, ModelConfig
from dcmdp_jax.models.declare import Declaration
from dcmdp_jax.models.hf_weights import whole_directory
from dcmdp_jax.models.layers import LoraKernel
from dcmdp_jax.models.params import (
    declared_tensors,
    declared_tree,
    model_declarations,
    quantized_leaves,
)
from dcmdp_jax.models.quantize import (
    Kernel,
    in_float32,
    is_quantized,
    quantize_tree,
    relative_error,
    stored,
)
from dcmdp_jax.parallel.sharding import to_host
from dcmdp_jax.types import Array, Params


def adapted_layers(model: ModelConfig, lora: Lora) -> tuple[Declaration, ...]:
    """Declarations of the matrices that get an adapter.

    Raises:
        ArgumentError: for a target that matches no linear layer, or that is of an expert, and for a
            rank above that of a matrix.
    """
    linear = [
        declared for declared in model_declarations(model) if declared.quantized and declared.stacks
    ]
    dense = [declared for declared in linear if len(declared.stacks) == 1]
    allowed = tuple(dict.fromkeys(map(_module, dense)))
    names = lora.targets
    if names == (ALL_LINEAR,):
        names = allowed
    for name in names:
        if name not in allowed:
            reason = "no linear layer has that name"
            if name in map(_module, linear):
                reason = "adapters of experts are not supported"
            raise ArgumentError(
                "lora_targets",
                f"got {name!r}, {reason}; allowed are {', '.join(allowed)}, or {ALL_LINEAR}"
                + suggestion(name, (*allowed, ALL_LINEAR)),
            )

    layers = tuple(declared for declared in dense if _module(declared) in names)
    for declared in layers:
        rows, columns = declared.shape[-2:]
        if lora.rank > min(rows, columns):
            raise ArgumentError(
                "lora_rank",
                f"got {lora.rank}, {_module(declared)} is {rows} x {columns}: at most "
                f"{min(rows, columns)}",
            )
    return layers


def adapter_declarations(
    model: ModelConfig, lora: Lora, prefix: str = hf_config.TEXT_PREFIX
) -> tuple[Declaration, ...]:
    """Declarations of A and B of every adapted matrix, named as PEFT names them.

    `prefix` is how the names of the decoder begin in the class of the base. A is drawn uniformly
    within +-1/sqrt(in), PEFT's default (Kaiming with a = sqrt 5); B is zero, so the policy begins
    as the base.
    """
    adapters = []
    for declared in adapted_layers(model, lora):
        *path, _ = declared.path
        *stacked, rows, columns = declared.shape
        *leading, inward, outward = declared.axes
        layer = declared.hf_name.removeprefix(hf_config.TEXT_PREFIX).removesuffix(".weight")
        name = f"{_PREFIX}{prefix}{layer}"

        a = dataclasses.replace(
            declared,
            path=(*path, "a"),
            shape=(*stacked, rows, lora.rank),
            axes=(*leading, inward, "rank"),
            init=_uniform,
            hf_name=f"{name}.lora_A.weight",
            quantized=False,
        )
        b = dataclasses.replace(
            a,
            path=(*path, "b"),
            shape=(*stacked, lora.rank, columns),
            axes=(*leading, "rank", outward),
            init=jax.nn.initializers.zeros,
            hf_name=f"{name}.lora_B.weight",
        )
        adapters += [a, b]
    return tuple(adapters)


def target_modules(model: ModelConfig, lora: Lora) -> list[str]:
    """Names of the adapted layers, as PEFT's `target_modules`."""
    return sorted({_module(declared) for declared in adapted_layers(model, lora)})


def trained(model: ModelConfig, lora: Lora | None) -> tuple[Declaration, ...]:
    """Declarations of what is trained: the adapters, or every parameter of the model."""
    if lora is None:
        return model_declarations(model)
    return adapter_declarations(model, lora)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedAdapters:
    """Record of a checkpoint's adapters and their base.

    Attributes:
        rank, alpha, targets: see `Lora`.
        base_dtype: "float32", "bfloat16" or "int8".
        base_path: the base's Hugging Face directory.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_dtype: str
    base_path: str

    @property
    def lora(self) -> Lora:
        """Shape of the adapters."""
        return Lora(self.rank, self.alpha, tuple(self.targets))


def load_base(
    directory: Path,
    model: ModelConfig,
    dtype: str,
    shardings: Params | None = None,
) -> Params:
    """The frozen parameters of a Hugging Face directory.

    Args:
        directory, model, shardings: see `hf_weights.load_params`.
        dtype: "float32", "bfloat16", or "int8": the linear layers' matrices are quantized, the rest
            is bfloat16.
    """
    stored_dtype = "bfloat16"
    if dtype == "float32":
        stored_dtype = dtype
    base = hf_weights.load_params(directory, model, dtype=stored_dtype, shardings=shardings)
    if dtype != "int8":
        return base
    quantized = quantized_leaves(model)
    return jax.jit(lambda params: quantize_tree(params, quantized, dtype), donate_argnums=0)(base)


class Adapted(NamedTuple):
    """A model as a base and adapters, in the order of the arguments of `adapted` and `merged`.

    Attributes:
        base: the frozen parameters.
        adapters: A and B.
        lora: their shape.
    """

    base: Params
    adapters: Params
    lora: Lora


def adapted(base: Params, adapters: Params, lora: Lora) -> Params:
    """The base with a `LoraKernel` for every matrix that has an adapter, as training reads it."""
    return _joined(base, adapters, functools.partial(LoraKernel, scale=lora.scale))


Policy = Callable[[Params, Params | None], Params]
"""(trained, frozen parameters) -> the parameters of the training stack's forward pass."""


def make_policy(lora: Lora | None) -> Policy:
    """The trained parameters; with adapters of this shape, the frozen ones joined with them."""
    if lora is None:
        return lambda trained, _: trained
    return lambda adapters, base: adapted(base, adapters, lora)


def merged(base: Params, adapters: Params, lora: Lora, rounded_to: str | None = None) -> Params:
    """W + D, D = (alpha / r) A B, in float32, for engines and exports; the rest as in the base.

    An engine then rounds the sum once, to its own precision. With `rounded_to`, an engine's
    precision (see `quantize.stored`), W + Q(W + D) - Q(W): the change as that rounding lets it
    arrive.
    """

    def merge(kernel: Kernel, a: Array, b: Array) -> Array:
        change = _product(a, b) * lora.scale
        if rounded_to is not None:
            change = _arriving(kernel, change, rounded_to)
        return in_float32(kernel) + change

    return jax.tree.map(in_float32, _joined(base, adapters, merge), is_leaf=is_quantized)


def merge_rounding(base: Params, adapters: Params, lora: Lora, precision: str) -> Array:
    """Relative error of the adapters' change after an engine's rounding Q of the merged matrices.

        ||Q(W + D) - Q(W) - D|| / ||D||,     D = (alpha / r) A B,

    over all adapted matrices: 0 if the engine gets D as it is, about 1 if the change is lost
    between two numbers that the engine can hold; 0 where D is 0.

    Args:
        base, adapters, lora: see `merged`.
        precision: see `quantize.stored`.

    Returns:
        [] float32.
    """
    errors = []
    changes = []

    def measure(kernel: Kernel, a: Array, b: Array) -> None:
        change = _product(a, b) * lora.scale
        errors.append(jnp.sum((_arriving(kernel, change, precision) - change) ** 2))
        changes.append(jnp.sum(change**2))

    _joined(base, adapters, measure)
    return relative_error(sum(errors), sum(changes))


def merged_and_measured(
    base: Params,
    adapters: Params,
    lora: Lora,
    precision: str,
) -> tuple[Params, dict[str, Array]]:
    """`merged`, and `merge_rounding` as a metric. Arguments as of `merge_rounding`."""
    return merged(base, adapters, lora), {
        "mismatch/merge_rounding": merge_rounding(base, adapters, lora, precision)
    }


def make_merge(
    lora: Lora, precision: str, *, apart: bool
) -> Callable[[Params, Params], tuple[Params | Adapted, dict[str, Array]]]:
    """(adapters, base) -> parameters for an engine, and the metrics of the merge.

    Args:
        lora: shape of the adapters.
        precision: the engine's.
        apart: the engine takes the adapters as they are.
    """
    if not apart:
        return jax.jit(lambda params, base: merged_and_measured(base, params, lora, precision))
    measure = jax.jit(lambda params, base: merged_and_measured(base, params, lora, precision)[1])
    return lambda params, base: (Adapted(base, params, lora), measure(params, base))


def _arriving(kernel: Kernel, change: Array, precision: str) -> Array:
    """Q(W + D) - Q(W)."""
    w = in_float32(kernel)
    return in_float32(stored(w + change, precision)) - in_float32(stored(w, precision))


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=products.PRECISE)


def _joined(base: Params, adapters: Params, join: Any) -> Params:
    """The base with `join(kernel, a, b)` in place of each adapted kernel."""
    if "a" in adapters:
        return {**base, "kernel": join(base["kernel"], adapters["a"], adapters["b"])}
    return base | {name: _joined(base[name], node, join) for name, node in adapters.items()}


def _uniform(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    bound = 1 / math.sqrt(shape[-2])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _module(declared: Declaration) -> str:
    """The last part of a linear layer's Hugging Face name, such as "q_proj"."""
    return declared.hf_name.removesuffix(".weight").rpartition(".")[2]


CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ALL = Lora(1, 1.0, (ALL_LINEAR,))
# What the classes of transformers, also older ones, write before a decoder's layers: with a head,
# with an image tower.
_LAYERS = re.compile(r"base_model\.model\.((?:model\.|language_model\.){0,2})layers\.")
_BASE = "base_checksum"
_DIGEST = "base_digest"

# Fields that a plain LoRA adapter may have with any value: they name it, or act in training alone.
_FREE = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "task_type",
}
# Values of fields of a plain one. An initialization by PiSSA, OLoRA, CorDA or LoftQ takes its share
# from the base.
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
_PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": _INITIAL}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter, as a file holds it.

    Attributes:
        lora: its shape.
        params: tree of `lora.adapter_declarations`; float32 NumPy arrays if it was read.
        base_checksum, base_digest: `base_checksum`, and `hf_weights.directory_digest` of its base,
            kept in the file's metadata; None where a file has none.
    """

    lora: Lora
    params: Params
    base_checksum: int | None
    base_digest: int | None


def base_checksum(base: Params) -> int:
    """One checksum of the base in bfloat16: the sum of its `array_checksum`s, mod 2^32."""
    return sum(int(array_checksum(leaf)) for leaf in jax.tree.leaves(base)) % 2**32


def save_adapter(
    adapter: Adapter,
    model: ModelConfig,
    directory: Path,
    *,
    base_model: str,
    overwrite: bool = False,
    base_class: str = "",
) -> None:
    """Write adapters as PEFT reads them; the directory appears whole or not at all.

    PEFT matches modules by name, so the adapters load into only one of the classes that read the
    base.

    Args:
        adapter: the adapter and the sums of its base.
        model: the base's shape.
        directory: created.
        base_model: directory or Hub name of the base, for people and for PEFT's `AutoPeftModel`.
        overwrite: replace a directory that is not empty.
        base_class: class of transformers of a base that holds a decoder beside others; "" is the
            decoder's own.

    Raises:
        FileExistsError, OSError: naming the directory, if it can't be written.
    """
    lora = adapter.lora
    fields = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": target_modules(model, lora),
        "task_type": "CAUSAL_LM",
    }
    prefix = hf_config.TEXT_PREFIX
    if base_class:
        # By a task's type PEFT would load the decoder's own class, which has other names.
        prefix = hf_config.WRAPPED_PREFIX
        mapping = {"base_model_class": base_class, "parent_library": "transformers"}
        fields |= {"task_type": None, "auto_mapping": mapping}
    tensors = {}
    for name, tensor in declared_tensors(adapter_declarations(model, lora, prefix)).items():
        tensors[name] = np.ascontiguousarray(to_host(tensor.leaf(adapter.params)[tensor.index]).T)

    with whole_directory(directory, overwrite=overwrite) as partial:
        (partial / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        save_file(
            tensors,
            partial / TENSORS,
            metadata={
                "format": "pt",
                _BASE: str(adapter.base_checksum),
                _DIGEST: str(adapter.base_digest),
            },
        )


def read_adapter(directory: Path, model: ModelConfig) -> Adapter:
    """Read a LoRA adapter of PEFT.

    Args:
        directory: with `adapter_config.json` and `adapter_model.safetensors`.
        model: the base's shape.

    Raises:
        UserError: in one line, for another kind of adapter, one of another base, or a damaged file.
        FileNotFoundError: if a file is missing.
    """
    # A file without peft_type is taken for LoRA.
    fields = {"peft_type": "LORA", **read_json_object(directory / CONFIG)}
    for name, value in fields.items():
        if name in _PLAIN:
            plain = value in _PLAIN[name]
        else:
            plain = name in _FREE or not value
        if not plain:
            raise UserError(
                f"{directory / CONFIG}: {name} is {value!r}; plain LoRA alone is supported (no "
                "DoRA, rslora, biases, modules_to_save or ranks by layer, no initialization that "
                "changes the base)"
            )
    for name, kinds, kind_name in (
        ("r", int, "a whole number"),
        ("lora_alpha", int | float, "a number"),
    ):
        value = fields.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
            raise UserError(
                f"{directory / CONFIG}: {name} is {value!r}, must be {kind_name} above 0"
            )

    file = directory / TENSORS
    try:
        with safe_open(file, framework="flax") as opened:
            arrays = {}
            for name in opened.keys():  # noqa: SIM118
                arrays[name] = np.asarray(opened.get_tensor(name), np.float32)
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{file}: can't be read ({error})") from error
    names = sorted(arrays)
    prefix = hf_config.TEXT_PREFIX
    for name in names:
        match = _LAYERS.match(name)
        if match is not None:
            prefix = match[1]
            break
    lora = _lora_of_file(directory, fields, names, model, prefix)

    try:
        declared = adapter_declarations(model, lora, prefix)
    except ArgumentError as error:  # a rank above that of a layer's matrix
        raise UserError(f"{directory / CONFIG}: r is {lora.rank}: {error.message}") from error
    expected = declared_tensors(declared)
    for name in sorted(expected.keys() | arrays.keys()):
        file_shape: Any = "missing"
        if name in arrays:
            file_shape = arrays[name].shape
        base_shape: Any = "no such tensor"
        if name in expected:
            base_shape = expected[name].shape
        if file_shape != base_shape:
            raise UserError(
                f"{file}: {name} has shape {file_shape}, this base and adapter_config.json "
                f"ask for {base_shape}; is the adapter of another model?"
            )
        if not np.isfinite(arrays[name]).all():
            raise UserError(f"{file}: {name} has values that are not finite; is the file damaged?")

    tree = declared_tree(declared, lambda leaf: np.empty(leaf.shape, np.float32))
    for name, tensor in expected.items():
        tensor.leaf(tree)[tensor.index] = arrays[name].T
    checksum = None
    if _BASE in metadata:
        checksum = int(metadata[_BASE])
    digest = None
    if _DIGEST in metadata:
        digest = int(metadata[_DIGEST])
    return Adapter(lora=lora, params=tree, base_checksum=checksum, base_digest=digest)


def _lora_of_file(
    directory: Path,
    fields: Mapping[str, Any],
    names: list[str],
    model: ModelConfig,
    prefix: str,
) -> Lora:
    """The adapter's shape; its tensors must belong to the layers that adapter_config.json names."""
    linear_layers = set()
    for name in declared_tensors(adapter_declarations(model, _ALL, prefix)):
        linear_layers.add(name.rpartition(".lora_")[0])
    file_layers = set()
    for name in names:
        layer = name.rpartition(".lora_")[0]
        if re.fullmatch(r".*\.lora_[AB]\.weight", name) is None or layer not in linear_layers:
            raise UserError(
                f"{directory / TENSORS}: {name} is no LoRA matrix of a linear layer of this base; "
                "embeddings, head, experts and whole layers are not supported: save the adapter "
                "without them"
            )
        file_layers.add(layer)

    targets = fields.get("target_modules")
    target_layers = set()
    try:
        for layer in linear_layers:
            if _targeted(layer.removeprefix(_PREFIX), targets):
                target_layers.add(layer)
    except (re.error, TypeError):
        raise UserError(
            f"{directory / CONFIG}: target_modules is {targets!r:.80}, must be a list of names or "
            "a regular expression"
        ) from None
    if target_layers != file_layers:
        verb = "lacks"
        differing_layers = target_layers - file_layers
        if not differing_layers:
            verb = "has"
            differing_layers = file_layers - target_layers
        raise UserError(
            f"{directory / CONFIG}: target_modules is {targets!r:.80}, and {TENSORS} {verb} "
            f"{min(differing_layers)}; PEFT would load another model: compare the two files"
        )

    module_names = {layer.rpartition(".")[2] for layer in file_layers}
    return Lora(
        rank=fields["r"],
        alpha=float(fields["lora_alpha"]),
        targets=tuple(sorted(module_names)),
    )


def _targeted(layer: str, targets: Any) -> bool:
    """Whether PEFT adapts a layer.

    A text is a regular expression for its whole name, a list holds ends of names.
    """
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, layer) is not None
    return any(f".{layer}".endswith(f".{target}") for target in targets)
