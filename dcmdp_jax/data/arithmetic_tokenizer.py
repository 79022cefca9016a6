r"""Tokenizer of the built-in task, in Hugging Face format, with one token per character.

Printable ASCII characters and the line break are one token each, and so are `\boxed{` and the chat roles. Three special
tokens are named as in Qwen. Decoding an encoding returns the same text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN, TURN_START, TURN_END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
WHOLE_PIECES = (r"\boxed{", "system", "user", "assistant")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer; its ids are always the same.

    The end-of-sequence token is `<|im_end|>`, padding `<|endoftext|>`. A character outside printable ASCII and the line
    break becomes the unknown token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = (PAD_TOKEN, TURN_START, TURN_END, UNKNOWN)
    pieces = (*special, *WHOLE_PIECES, "\n", *map(chr, range(32, 127)))
    backend = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    whole = "|".join(piece.replace("\\", r"\\").replace("{", r"\{") for piece in WHOLE_PIECES)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{whole}|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=PAD_TOKEN,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
