"""Models in GGUF files, llama.cpp's format: shape, and tensors under Hugging Face's names."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from dcmdp_jax.errors import UserError, one_line, shorten, shorten_name
from dcmdp_jax.models import families, hf_config, hf_manifest, params, rope
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.layers import rotary_frequencies

_FAMILIES = {
    family.gguf: model_type for model_type, family in families.FAMILIES.items() if family.gguf
}
# Field of config.json -> key of the header after the family's name; optional ones in the second
# table.
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = {
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_INSTALL = "GGUF files are read by the library `gguf`, which is not installed: pip install gguf"


class GGUFModel:
    """A GGUF file whose tensors fit its header; a tensor is read when it is asked for.

    Attributes:
        path: the file.
        fields: key of the header -> value; a float is the shortest that is the same float32.
        config: the model.
    """

    def __init__(self, path: str | Path) -> None:
        """Read and check the header.

        Args:
            path: a file of a Llama, Qwen2, Qwen3, Qwen3-MoE or Gemma 3 model.

        Raises:
            FileNotFoundError: if it does not exist.
            UserError: in one line, without the library `gguf`; for a file that is cut or no GGUF,
                one part of several, another family, a tensor that is missing, unknown, of a type
                that the library can't dequantize or of a shape that the header does not give.
        """
        self.path = Path(path)
        reader, self.fields = _open(self.path)
        count = self.fields.get("split.count", 0)
        if count not in (0, 1):
            raise UserError(
                f"{path}: is one of {count} parts; join them with `llama-gguf-split --merge`"
            )
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._read_config()
        self._check_tensors()

    def tensors(self, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors by their Hugging Face names, in the order of `hf_tensors`.

        Values equal `gguf.quants.dequantize`, to the bit in float32. The rows of q and k, which
        llama.cpp orders by pairs for its rotary embedding in the family llama, are put back into
        Hugging Face's halves; the 1 that it adds to Gemma's norms is taken off.

        Args:
            dtype: "float32" or "bfloat16", rounded to nearest even.

        Raises:
            UserError: naming a tensor with values that are not finite.
        """
        from gguf.quants import dequantize

        config = self.config
        for name, hf_tensor in params.hf_tensors(config).items():
            gguf_name, expert = gguf_tensor(name, config)
            tensor = self._tensors[gguf_name]
            data = tensor.data
            if expert is not None:
                data = data[expert]
            values = dequantize(data, tensor.tensor_type)
            if config.model_type == "llama" and ".self_attn.q_proj." in name:
                values = _halves(values, config.num_heads)
            if config.model_type == "llama" and ".self_attn.k_proj." in name:
                values = _halves(values, config.num_kv_heads)
            if config.family.unit_offset and name.endswith("norm.weight"):
                values = values - 1
            with np.errstate(over="ignore"):
                values = values.reshape(hf_tensor.shape).astype(jnp.dtype(dtype))
            if not hf_manifest.all_finite(values):
                raise UserError(
                    f"{self.path}: tensor {gguf_name} has values that are not finite; fetch the "
                    "file again"
                )
            yield name, values

    def _read_config(self) -> ModelConfig:
        family = self.field("general.architecture", str)
        supported = ", ".join(_FAMILIES)
        if family not in _FAMILIES:
            raise UserError(
                f"{self.path}: general.architecture is {shorten(family)}, supported are {supported}"
            )
        experts = self.fields.get("llama.expert_count")
        if family == "llama" and experts:
            raise UserError(
                f"{self.path}: llama.expert_count is {experts}, a Mixtral; supported are "
                f"{supported}"
            )
        fields = {}
        for field, key in (_SIZES | _OPTIONAL).items():
            value = self.fields.get(f"{family}.{key}")
            if value is not None:
                fields[field] = value
            elif field in _SIZES and (field != "intermediate_size" or family != "qwen3moe"):
                raise UserError(
                    f"{self.path}: {family}.{key} is missing in its header; fetch the file again"
                )
        expert_width = fields.get("moe_intermediate_size")
        fields |= {
            "model_type": _FAMILIES[family],
            "vocab_size": len(self.field("tokenizer.ggml.tokens", list)),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "norm_topk_prob": True,
            "intermediate_size": fields.get("intermediate_size", expert_width),
        }
        if family == "gemma3" and fields.get("head_dim"):
            # The header has no scale: llama.cpp takes these.
            scale = fields["head_dim"]
            if fields["num_hidden_layers"] == 62:
                scale = fields["hidden_size"] // fields["num_attention_heads"]
            fields["query_pre_attn_scalar"] = scale
        if family == "llama":
            fields.setdefault("head_dim", self.fields.get("llama.rope.dimension_count"))
        try:
            fields["rope_scaling"] = self._rope_scaling(family)
            config = hf_config.from_hf(fields)
            if _ROPE_FACTORS in self._tensors:
                self._check_rope_factors(config)
        except UserError as error:
            raise UserError(
                f"{self.path}: in its header {str(error).removeprefix('config.json: ')}"
            ) from None
        rotary_size = self.fields.get(f"{family}.rope.dimension_count", config.head_dim)
        if rotary_size != config.head_dim:
            raise UserError(
                f"{self.path}: {family}.rope.dimension_count is {shorten(rotary_size)} for heads "
                f"of {config.head_dim} dimensions; a rotary embedding of a part is not supported"
            )
        return config

    def _rope_scaling(self, family: str) -> dict[str, Any] | None:
        if _ROPE_FACTORS in self._tensors:
            # Llama 3.1: the file has the factors, and not what made them.
            factors = np.asarray(self._tensors[_ROPE_FACTORS].data, np.float32)
            return {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
        kind = self.fields.get(f"{family}.rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self.fields.get(f"{family}.rope.scaling.factor")}
        original_length = self.fields.get(f"{family}.rope.scaling.original_context_length")
        if original_length:
            scaling["original_max_position_embeddings"] = original_length
        return scaling

    def _check_rope_factors(self, config: ModelConfig) -> None:
        plain, _ = rotary_frequencies(dataclasses.replace(config, rope_scaling=rope.RopeScaling()))
        scaled, _ = rotary_frequencies(config)
        factors = np.asarray(self._tensors[_ROPE_FACTORS].data, np.float32)
        if factors.shape != plain.shape or not np.allclose(plain / scaled, factors, rtol=1e-4):
            raise UserError(
                f"the factors of the rotary embedding ({_ROPE_FACTORS}) are not Llama 3's; not "
                "supported"
            )

    def _check_tensors(self) -> None:
        """Compare names, shapes and types with the model, before anything is dequantized."""
        import gguf

        shapes: dict[str, tuple[int, ...]] = {}
        for name, hf_tensor in params.hf_tensors(self.config).items():
            gguf_name, expert = gguf_tensor(name, self.config)
            shapes[gguf_name] = hf_tensor.shape
            if expert is not None:
                shapes[gguf_name] = (self.config.num_experts, *hf_tensor.shape)
        missing = [name for name in shapes if name not in self._tensors]
        if missing:
            raise UserError(
                f"{self.path}: tensor {missing[0]} is missing, and {len(missing) - 1} more of its "
                "header's model; fetch the file again"
            )

        for name, tensor in self._tensors.items():
            if name == _ROPE_FACTORS:
                continue
            if name not in shapes:
                raise UserError(
                    f"{self.path}: tensor {shorten_name(name)} is unknown to "
                    f"{self.config.model_type}"
                )
            shape = tuple(map(int, reversed(tensor.shape)))
            if shape != shapes[name]:
                raise UserError(
                    f"{self.path}: tensor {name} is {list(shape)}, its header gives "
                    f"{list(shapes[name])}; fetch the file again"
                )

        examples: dict[Any, Any] = {}
        for tensor in self._tensors.values():
            examples.setdefault(tensor.tensor_type, tensor)
        for kind, tensor in examples.items():
            data = tensor.data
            try:
                gguf.quants.dequantize(data.reshape(-1, data.shape[-1])[:1], kind)
            except NotImplementedError:
                raise UserError(
                    f"{self.path}: tensor {tensor.name} is {kind.name}, which the library "
                    "gguf can't dequantize; use a file of another quantization, such as Q8_0 or F16"
                ) from None

    def field(self, name: str, kind: type) -> Any:
        """A field of the header that must be there.

        Raises:
            UserError: naming it, if it is missing or of another type.
        """
        value = self.fields.get(name)
        if not isinstance(value, kind):
            description = "missing"
            if value is not None:
                description = shorten(value)
            raise UserError(
                f"{self.path}: {name} is {description} in its header, must be a {kind.__name__}"
            )
        return value


@functools.cache
def _tensor_names(architecture: str, layers: int) -> Any:
    """The library's map from Hugging Face's names of modules to llama.cpp's."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(numbers[architecture], layers)


def gguf_tensor(name: str, config: ModelConfig) -> tuple[str, int | None]:
    """Name of a Hugging Face tensor in a GGUF file, and its index where experts are stacked."""
    module, _, end = name.rpartition(".")
    match = _EXPERT.fullmatch(module)
    expert = None
    if match:
        module = f"{match[1]}.{match[3]}"
        expert = int(match[2])
    names = _tensor_names(config.family.gguf, config.num_layers)
    return f"{names.get_name(module)}.{end}", expert


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (pair, 2) to (2, pair), the inverse of llama.cpp's `permute`."""
    pairs = values.shape[0] // heads // 2
    return values.reshape(heads, pairs, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def gguf_library() -> ModuleType:
    """The library `gguf`.

    Raises:
        UserError: if it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise UserError(f"{_INSTALL} ({one_line(error)})") from error
    return gguf


def _open(path: Path) -> tuple[Any, dict[str, Any]]:
    """The library's reader, and the header's fields; a file that is cut is refused."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    gguf = gguf_library()

    class Reader(gguf.GGUFReader):
        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise EOFError("the file ends before its header says; it is cut")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = Reader(path)
        fields = {name: _value(field) for name, field in reader.fields.items()}
        return reader, fields
    except Exception as error:  # a damaged header makes the library raise almost anything
        reason = one_line(error, 160) or type(error).__name__
        raise UserError(f"{path}: not readable as GGUF: {reason}; fetch the file again") from error


def _value(field: Any) -> Any:
    value = field.contents()
    if isinstance(value, float):
        # The shortest decimal of a float32, as config.json has it.
        return float(str(np.float32(value)))
    return value


def header_tokens(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Ids that a header gives, unchecked, by `bos`, `eos`, `eot`, `eom`, `unknown`, `padding`."""
    numbers = {}
    for kind in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        number = fields.get(f"tokenizer.ggml.{kind}_token_id")
        if number is not None:
            numbers[kind] = number
    return numbers
