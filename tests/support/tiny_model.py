"""A random Qwen3 of two layers with the built-in task's tokenizer, sharp enough that engines
disagree.
"""

import functools

import jax

from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params

TOKENIZER = build_tokenizer()
_OTHERS = dict(tie_word_embeddings=True, initializer_range=0.3, max_position_embeddings=256)
CONFIG = ModelConfig("qwen3", len(TOKENIZER), 32, 48, 2, 4, 2, 8, **_OTHERS)


@functools.cache
def params(earlier=False):
    """The weights, and those before an update that moved each by about a tenth of its size."""
    now = init_params(CONFIG, jax.random.key(0))
    if not earlier:
        return now
    moved = init_params(CONFIG, jax.random.key(1))
    return jax.tree.map(lambda a, b: a + 0.1 * b, now, moved)
