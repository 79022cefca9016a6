"""A tokenizer of bytes: each character of ASCII is a token, and so is each control token."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(
    template, *, eos="<|im_end|>", special=("<|im_start|>", "<|im_end|>"), plain=(), merges=()
):
    """A tokenizer with a chat template.

    Args:
        template: the template.
        eos: the end token.
        special: control tokens.
        plain: added tokens that are not special, such as "<think>".
        merges: pairs of byte-level symbols that are one token, such as ("Ċ", "Ċ").
    """
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special]
    )
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer
