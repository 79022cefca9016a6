"""A model whose every answer is known: its output layer is a table of next tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.commands.evaluate import main
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.models.params import param_shapes
from tests.support.commands import failed_command

TOKENIZER = build_tokenizer()
VOCABULARY = len(TOKENIZER)
TASK, SAMPLES, TEMPERATURE = (
    f"--config.evaluation.{name}" for name in ("task", "samples", "temperature")
)
TOKENS = "--config.rollout.max_completion_tokens"
ROWS = "--config.rollout.max_rows"
SEED = "--config.training.seed"


def coin_model(context=256):
    """One layer, and a vocabulary as wide as the model."""
    return ModelConfig(
        "qwen3", VOCABULARY, VOCABULARY, 8, 1, 1, 1, 16, max_position_embeddings=context
    )


def coin_params(model, *digits):
    r"""Says `\boxed{d}` and ends, d drawn evenly from `digits`.

    Attention and MLP write nothing, embeddings are unit vectors: the normed hidden state of token i
    is sqrt(V) e_i and its logits are sqrt(V) times row i of the output layer. sqrt(104) * 8 = 82
    leaves e^-82 for any other token.
    """
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), param_shapes(model))
    params["norm"]["scale"][:] = 1
    params["embedding"][:] = np.eye(VOCABULARY)
    ids = {text: TOKENIZER.convert_tokens_to_ids(text) for text in ["\n", r"\boxed{", "}", *digits]}
    pairs = [
        ("\n", r"\boxed{"),
        *((r"\boxed{", digit) for digit in digits),
        *((digit, "}") for digit in digits),
    ]
    for before, after in pairs:
        params["output"][ids[before], ids[after]] = 8
    params["output"][ids["}"], TOKENIZER.eos_token_id] = 8
    return jax.tree.map(jnp.asarray, params)


evaluation_fails = functools.partial(failed_command, main, "evaluate")
"""The one line that `dcmdp evaluate` fails with."""


def save_coin(base):
    """A Hugging Face directory in `base` whose model answers 4 or 7, each with probability 1/2."""
    TOKENIZER.save_pretrained(base / "tokenizer")
    save_params(
        coin_params(coin_model(), "4", "7"),
        coin_model(),
        base / "coin",
        dtype="float32",
        tokenizer_dir=base / "tokenizer",
    )
    return base / "coin"
