"""Tokenizers of GGUF files as Hugging Face writes them: tokenizer.json, chat template, end tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dcmdp_jax.errors import UserError, one_line
from dcmdp_jax.inputs import shorten
from dcmdp_jax.models.gguf_weights import GGUFModel, header_tokens

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # of tiktoken's cl100k, whose groups of digits differ between families
_SPLITS = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}
_PRE_TOKENIZERS = {"qwen2": "qwen2", "deepseek-r1-qwen": "qwen2", "llama-bpe": "llama-bpe", "llama3": "llama-bpe",
                   "llama-v3": "llama-bpe", "smollm": "smollm", "gpt-2": "gpt-2"}  # fmt: skip
# llama.cpp ends a text at these where a header names one end token alone, as Hugging Face's generation configs do.
_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<｜end▁of▁sentence｜>")
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # gguf.TokenType


def write_tokenizer(model: GGUFModel, directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json of a GGUF file.

    And a config.json with the special tokens' ids alone, as `hf_weights.save_params` takes them.

    Args:
        model: the file.
        directory: an existing directory.

    Raises:
        UserError: in one line, for a tokenizer that is no byte-level BPE, a pre-tokenizer that is not known, and lists
            that do not fit each other.
    """
    fields, path = model.fields, model.path
    if (kind := model.field("tokenizer.ggml.model", str)) != "gpt2":
        raise UserError(f"{path}: tokenizer.ggml.model is {shorten(kind)}, supported is gpt2 (byte-level BPE)")
    tokens, numbers = model.field("tokenizer.ggml.tokens", list), header_tokens(fields)
    if wrong := [kind for kind, number in numbers.items() if not 0 <= number < len(tokens)]:
        raise UserError(f"{path}: tokenizer.ggml.{wrong[0]}_token_id is {numbers[wrong[0]]}, which is no token")
    tokenizer = _tokenizer(model)
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config = {f"{name}_token": tokens[numbers[kind]] for name, kind in special.items() if kind in numbers}
    # Not the family's own class: some replace the pre-tokenizer of tokenizer.json.
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"model_max_length": model.config.max_position_embeddings}
    _write(directory / "tokenizer_config.json", config)
    if template := fields.get("tokenizer.chat_template"):
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    ids = {f"{name}_token_id": numbers[kind] for name, kind in special.items() if kind in numbers and name != "unk"}
    _write(directory / "config.json", ids)
    ends = [numbers[kind] for kind in ("eos", "eot", "eom") if kind in numbers]
    types = fields["tokenizer.ggml.token_type"]
    ends += [tokenizer.token_to_id(name) for name in _ENDS if (number := tokenizer.token_to_id(name)) is not None
             and types[number] in (_CONTROL, _USER_DEFINED)]  # fmt: skip
    _write(directory / "generation_config.json", ids | {"eos_token_id": list(dict.fromkeys(ends))})


def _tokenizer(model: GGUFModel) -> Tokenizer:
    path = model.path
    tokens, merges = model.field("tokenizer.ggml.tokens", list), model.field("tokenizer.ggml.merges", list)
    types, pre = model.field("tokenizer.ggml.token_type", list), model.field("tokenizer.ggml.pre", str)
    if len(types) != len(tokens):
        raise UserError(f"{path}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise UserError(f"{path}: tokenizer.ggml.pre is {shorten(pre)}, known pre-tokenizers are {known}")
    kind = _PRE_TOKENIZERS[pre]
    vocabulary = {token: number for number, token in enumerate(tokens) if types[number] != _UNUSED}
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        # Llama 3: a word that is a token is taken whole, whatever the merges.
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=kind == "llama-bpe"))
    except Exception as error:  # the library's own type, for a merge of what is no token
        raise UserError(f"{path}: tokenizer.ggml.merges do not fit its tokens ({one_line(error, 160)})") from error
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if kind in _SPLITS:
        split = pre_tokenizers.Split(Regex(_WORDS % _SPLITS[kind]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if kind == "smollm" else []
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(False)])
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=types[number] == _CONTROL, normalized=False)
             for number, token in enumerate(tokens) if types[number] in (_CONTROL, _USER_DEFINED)]  # fmt: skip
    tokenizer.add_tokens(added)
    tokenizer.post_processor = _post_processor(model.fields, tokens, kind)
    return tokenizer


def _post_processor(fields: dict[str, Any], tokens: list[str], kind: str) -> Any:
    """What stands around a text: llama.cpp's default is a first token for Llama 3 alone."""
    around = {"bos": fields.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe"),
              "eos": fields.get("tokenizer.ggml.add_eos_token", False)}  # fmt: skip
    numbers = header_tokens(fields)
    ids = {name: numbers[name] for name, wanted in around.items()
           if wanted and name in numbers}  # fmt: skip
    if not ids:
        return processors.ByteLevel(trim_offsets=False)
    names = {name: tokens[number] for name, number in ids.items()}
    parts = [names[name] for name in ("bos",) if name in names], [names[name] for name in ("eos",) if name in names]
    single, second = ([*parts[0], f"${letter}", *parts[1]] for letter in ("A", "B:1"))
    special = [(names[name], number) for name, number in ids.items()]
    return processors.TemplateProcessing(single=single, pair=[*single, *second], special_tokens=special)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
