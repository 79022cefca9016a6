"""A reward of your own, on natural language: an answer in one short sentence.

    dcmdp train --config=configs/smollm2.py:sentence

SmolLM2-135M-Instruct is asked what things are (examples/questions.jsonl). It likes to go on; where
it says one sentence of at most twenty words, and ends it, the reward is 1.
"""

import re

_MOST_WORDS = 20


def one_sentence(completions: list[str], **columns: object) -> list[float]:
    """1 for one sentence of 3 to 20 words that ends with a period, else 0.

    Args:
        completions: the texts that the model wrote.
        columns: `prompts`, `completion_ids` and the data's columns, which this reward does not
            need.
    """
    return [float(_is_one_sentence(text.strip())) for text in completions]


def _is_one_sentence(text: str) -> bool:
    return (
        text.endswith(".")
        and not re.search(r"[.!?\n]", text[:-1])
        and 3 <= len(text.split()) <= _MOST_WORDS
    )
