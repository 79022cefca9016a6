"""Tokenizers: load, check and save one; the tokens that end a text."""

from __future__ import annotations

import functools
import json
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcmdp_jax.data.chat import QUESTION, render_chat, render_checked
from dcmdp_jax.errors import UserError, one_line, shorten, shorten_name
from dcmdp_jax.inputs import TOKENIZER_FILES, has_tokenizer, read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)
# A chat that no template contains: characters that every tokenizer should have, a line break and a
# run of spaces.
_MESSAGE = "Find 1+1.\n\n  Answer in one line: 12 + 30 = ?"
_CHAT = (
    *QUESTION,
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": _MESSAGE},
)
# What pre-tokenizers and normalizers treat differently.
_SAMPLE = (
    "Let f(x) = 12,345.67;\n\n\t    if a<=b: don't  \N{GREEK SMALL LETTER PI}, na\u00efve, "
    "\u6570\u5b66 \U0001f600\r\n "
)
# Two tokenizers are compared on one day.
_SAMPLE_DATE = datetime(2000, 1, 1)


def load_tokenizer(path: str, *, vocab_size: int | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer for chat prompts, without running code that comes with it.

    tokenizer.json is read as it is where the class that tokenizer_config.json names would give
    other ids: transformers 5 replaces the pre-tokenizer of a byte-level file under LlamaTokenizer,
    and spaces and line breaks are lost.

    Args:
        path: a directory in Hugging Face format, or a Hub name.
        vocab_size: the model's; None without a model.

    Raises:
        UserError: if there is no tokenizer there, it has more tokens than the model, no chat
            template, one that leaves out a message of a chat, or no end-of-sequence token, or its
            ids do not decode to the text.
    """
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    directory = Path(path).expanduser()
    is_directory = directory.is_dir()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not is_directory:
        raise UserError(f"tokenizer {path}: no such directory")
    if is_directory and not has_tokenizer(directory):
        # transformers makes an empty one where config.json names a model whose tokenizer it knows.
        raise UserError(
            f"tokenizer {path}: no tokenizer.json or vocab.json there; copy the model's tokenizer "
            "files in"
        )
    source = path
    if is_directory:
        source = str(directory)
        for name in ("config.json", "tokenizer_config.json"):
            if (directory / name).is_file():
                read_json_object(directory / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            trust_remote_code=False,
            local_files_only=is_directory,
        )
    # Missing files, broken JSON and unknown classes all raise differently.
    except Exception as error:
        reason = shorten_name(one_line(error) or type(error).__name__)
        name = f"tokenizer {path}"
        if type(error).__name__.startswith("StrictDataclass"):  # huggingface_hub's, of a field
            name = f"{path}/config.json"
        raise UserError(f"{name}: not loadable ({reason})") from error
    check_tokenizer(tokenizer)

    if not is_directory:
        # In the Hub's cache, where transformers just put it.
        for name in TOKENIZER_FILES:
            file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
            if file is not None:
                directory = Path(file).parent
                break
    tokenizer = _as_written(tokenizer, directory)
    # `save_tokenizer` copies the files from there.
    tokenizer.name_or_path = str(directory)
    fix_date(tokenizer, datetime.now())

    if vocab_size is not None and len(tokenizer) > vocab_size:
        advice = "use the model's own tokenizer"
        added = tokenizer.added_tokens_decoder
        beyond = [added[token_id].content for token_id in added if token_id >= vocab_size]
        if beyond:  # as in Yi-1.5's own tokenizer
            advice += (
                f"; if this is it, the model can't read {shorten(beyond)}: delete them from its "
                "files"
            )
        raise UserError(
            f"tokenizer {path}: {len(tokenizer)} tokens, but the model has {vocab_size}; {advice}"
        )
    if not _is_in_vocabulary(tokenizer.eos_token, directory):
        # transformers adds it as a new token, which no model writes.
        raise UserError(
            f"tokenizer {path}: its end token {shorten(tokenizer.eos_token)} is not in its "
            "vocabulary; set eos_token in tokenizer_config.json to the model's own"
        )
    _check_round_trip(tokenizer, path)
    return tokenizer


def fix_date(tokenizer: PreTrainedTokenizerBase, moment: datetime) -> None:
    """Let the chat template always write this date (`strftime_now`); ignores a time zone."""
    tokenizer.apply_chat_template = functools.partial(
        type(tokenizer).apply_chat_template,
        tokenizer,
        strftime_now=moment.replace(tzinfo=None).strftime,
    )


def _as_written(tokenizer: PreTrainedTokenizerBase, directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer, or that of tokenizer.json as it is where that gives other ids."""
    from transformers import PreTrainedTokenizerFast

    if not (directory / "tokenizer.json").is_file() or type(tokenizer) is PreTrainedTokenizerFast:
        return tokenizer
    plain = PreTrainedTokenizerFast.from_pretrained(
        str(directory), eos_token=tokenizer.eos_token, chat_template=tokenizer.chat_template
    )
    if _sample_ids(plain) == _sample_ids(tokenizer):
        return tokenizer
    _LOG.warning(
        "tokenizer %s: read as tokenizer.json has it, because transformers' %s changes its ids",
        directory,
        type(tokenizer).__name__,
    )
    return plain


def _sample_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of a chat's text with what tokenizers treat differently."""
    question = {"role": "user", "content": _SAMPLE}
    try:
        text = render_chat(tokenizer, [question], strftime_now=_SAMPLE_DATE.strftime)
    except Exception:  # What templates raise; `render_checked` words it.
        text = _SAMPLE
    return encode_texts(tokenizer, [text], "a chat of one question")[0]


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], noun: str
) -> list[list[int]]:
    """Ids of texts, in which special tokens are recognized and none is added.

    Raises:
        UserError: in one line with `noun`, a name of the texts, for whatever the tokenizers library
            raises.
    """
    if not texts:
        return []
    return _encoded(tokenizer, texts, noun)["input_ids"]


def token_offsets(
    tokenizer: PreTrainedTokenizerBase, text: str, noun: str
) -> list[tuple[int, int]]:
    """Start and end, in characters, of each token that `encode_texts` makes of a text.

    Raises:
        UserError: in one line with `noun`, a name of the text.
    """
    return _encoded(tokenizer, [text], noun, return_offsets_mapping=True)["offset_mapping"][0]


def _encoded(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    noun: str,
    **options: Any,
) -> Any:
    try:
        return tokenizer(texts, add_special_tokens=False, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library does not derive from Exception
        raise UserError(
            f"tokenizer {tokenizer.name_or_path}: can't encode {noun} "
            f"({shorten_name(one_line(error))}); compare tokenizer.json with the model's own"
        ) from error


def _check_round_trip(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Refuse a template that leaves out a message, and a tokenizer that loses characters."""
    noun = "a chat of two questions"
    text = render_checked(tokenizer, _CHAT, noun, template=f"tokenizer {path}: its chat template")
    ids = encode_texts(tokenizer, [text], noun)[0]
    decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if _MESSAGE in decoded:
        return
    if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in ids:
        raise UserError(
            f"tokenizer {path}: {shorten(text)} becomes {shorten(decoded)} by its ids; its files "
            "do not fit each other: compare tokenizer.json with the model's own"
        )
    _LOG.warning("tokenizer %s: %s has unknown tokens: %s", path, shorten(text), shorten(decoded))


def _is_in_vocabulary(token: str, directory: Path) -> bool:
    """Whether one of a tokenizer's files lists a token."""
    config = directory / "tokenizer_config.json"
    contents = ""
    if config.is_file():
        contents = json.dumps(read_json_object(config).get("added_tokens_decoder"))
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        path = directory / name
        if path.is_file():
            contents += path.read_text(encoding="utf-8")
    # A file may hold characters beyond ASCII as they are, or escaped.
    return json.dumps(token, ensure_ascii=False) in contents or json.dumps(token) in contents


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that can't make chat prompts.

    Raises:
        UserError: if it has no chat template or no end-of-sequence token.
    """
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if not tokenizer.chat_template:
        raise UserError(
            f"tokenizer {name}: no chat template; put the model's chat_template.jinja beside "
            "tokenizer_config.json, or use the tokenizer of its instruction-tuned version"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {name}: no end-of-sequence token, so no completion would end; set "
            "eos_token in tokenizer_config.json"
        )


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_dir: str | Path | None = None, *, vocab_size: int
) -> tuple[int, ...]:
    """Every token that ends a completion: the tokenizer's own and the ones in a model's directory.

    Chat models end a turn and a text with different tokens; their generation_config.json lists
    both.

    Args:
        tokenizer: its `eos_token_id` counts where it has one.
        model_dir: directory whose generation_config.json and config.json are read for
            `eos_token_id`; missing files are skipped.
        vocab_size: the model's, whose completions never end with an id beyond.

    Returns:
        The ids, ascending, without repeats.

    Raises:
        UserError: if one of the files is malformed, an id is outside the model's vocabulary, or
            nothing names an end token.
    """
    ids = set()
    end_id = tokenizer.eos_token_id
    if end_id is not None:
        ids.add(end_id)
        if end_id >= vocab_size:
            raise UserError(
                f"tokenizer {tokenizer.name_or_path}: its end token is {end_id}, the model's "
                f"tokens are 0 to {vocab_size - 1}; use the model's own tokenizer"
            )

    paths = []
    if model_dir is not None:
        directory = Path(model_dir).expanduser()
        paths = [directory / "generation_config.json", directory / "config.json"]
    for path in filter(Path.is_file, paths):
        value = read_json_object(path).get("eos_token_id")
        items = [value]
        if isinstance(value, list):
            items = value
        for item in items:
            if item is None:
                continue
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < 2**31:
                raise UserError(
                    f"{path}: eos_token_id is {shorten(value)}, must be a token id or a list of "
                    "them"
                )
            if item >= vocab_size:
                raise UserError(
                    f"{path}: eos_token_id is {shorten(value)}, the model's tokens are 0 to "
                    f"{vocab_size - 1}; write the ids of those that end its completions"
                )
            ids.add(item)
    if not ids:
        raise UserError(
            "no end token: neither the tokenizer nor the model's configuration names an "
            "eos_token_id"
        )
    return tuple(sorted(ids))


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """What matches each control token in a text."""
    added = tokenizer.added_tokens_decoder.values()
    # Some models do not call theirs special (<think>); other added tokens are plain text, such as
    # runs of spaces.
    control = [token for token in added if token.special or re.fullmatch(r"<\S+>", token.content)]
    longest_first = sorted((token.content for token in control), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def token_text(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """The text of a token alone; `<id>` of an id that is not the tokenizer's."""

    @functools.cache
    def text(token: int) -> str:
        if 0 <= token < len(tokenizer):
            return tokenizer.decode([token])
        return f"<{token}>"

    return text


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, directory: str | Path, end_ids: Sequence[int]
) -> None:
    """Write a tokenizer, and a generation_config.json with its special tokens and every end token.

    Copies the files that the tokenizer was read from, because `save_pretrained` may write those of
    its class instead. A tokenizer without such files goes through `save_pretrained`.

    `end_token_ids` finds them there, and so does an exported model, which without them is sampled
    past the end of a chat turn. The file has nothing else, because engines take its temperature and
    top-k as their defaults.

    Raises:
        UserError: if what was written gives other ids.
    """
    directory = Path(directory)
    source = Path(tokenizer.name_or_path)
    if not tokenizer.name_or_path or not source.is_dir():
        tokenizer.save_pretrained(str(directory))
    elif source.resolve() != directory.resolve():
        directory.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            (directory / name).unlink(missing_ok=True)
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
    if _sample_ids(load_tokenizer(str(directory.resolve()))) != _sample_ids(tokenizer):
        raise UserError(
            f"{directory}: the tokenizer that was written gives other ids than that of {source}"
        )
    path = directory / "generation_config.json"
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": [*end_ids],
    }
    ids = {name: value for name, value in ids.items() if value is not None}
    path.write_text(json.dumps(ids) + "\n", encoding="utf-8")
