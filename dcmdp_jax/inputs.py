"""Input from users: JSON files and tokenizers."""

import json
import re
from pathlib import Path
from typing import Any

from dcmdp_jax.errors import ArgumentError, UserError, shorten

TOKENIZER_FILES = """
    tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json
    added_tokens.json vocab.json merges.txt chat_template.jinja chat_template.json
""".split()
"""Files of a tokenizer in a Hugging Face directory."""


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        FileNotFoundError: if it does not exist.
        UserError: naming the file, if it is a FIFO, which would be waited for, not UTF-8, not JSON,
            nested too deeply, or no object, or begins with a byte order mark, which transformers
            does not read.
    """
    if Path(path).is_fifo():
        raise UserError(f"{path}: is a FIFO, must be a file")
    try:
        text = Path(path).read_text(encoding="utf-8")
        if text.startswith("\ufeff"):
            raise UserError(f"{path}: begins with a byte order mark; save it as UTF-8 without BOM")
        value = json.loads(text)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}.get(
            type(value), "a number"
        )
        raise UserError(f"{path}: holds {kind}, must hold a JSON object {{...}}")
    return value


def json_object(text: str, name: str) -> dict[str, Any]:
    """Parse a setting that is a JSON object; empty text is an empty one.

    Raises:
        UserError: naming the setting, for anything else.
    """
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ArgumentError(name, f"got {shorten(text)}, must be a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise ArgumentError(name, f'got {shorten(text)}, must be a JSON object, {{"name": value}}')
    return value


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of a user's data, for `object_pairs_hook`.

    Raises:
        UserError: if a field is there twice; a dict would keep the last one without a word.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise UserError(
            f"field {shorten(repeated)} is there {names.count(repeated)} times; keep one"
        )
    return fields


def has_tokenizer(directory: str | Path) -> bool:
    """Whether a Hugging Face directory holds a tokenizer: tokenizer.json or vocab.json."""
    return any((Path(directory) / name).is_file() for name in ("tokenizer.json", "vocab.json"))


_HOST_AND_PORT = re.compile(r"(\[[^\[\]\s/]+\]|[^\[\]\s/:]+)(?::([0-9]{1,5}))?")


def is_address(text: str, *, port_needed: bool = True) -> bool:
    """Whether a text is HOST:PORT: a port of 1 to 65535; an IPv6 host has brackets."""
    match = _HOST_AND_PORT.fullmatch(text)
    if match is None:
        return False
    if match[2] is None:
        return not port_needed
    return 0 < int(match[2]) < 2**16


def is_url(text: str) -> bool:
    """Whether a text is http(s)://HOST or http(s)://HOST:PORT/anything, see `is_address`."""
    scheme, _, location = text.partition("://")
    host = location.partition("/")[0].partition("?")[0].rpartition("@")[2]
    return scheme in ("http", "https") and is_address(host, port_needed=False)
