"""The messages of tests/recorded/messages.txt: what is said of a mistake in the arguments of `dcmdp
train` and `dcmdp plan`, and in a config.json, that of Qwen3-8B with fields changed.

python -m tests.support.messages    # write today's messages for the commands that the file has
"""

import json
import os
import shlex
import sys
from pathlib import Path

from dcmdp_jax.commands import plan
from dcmdp_jax.commands.flags import parse
from dcmdp_jax.models.hf_config import from_hf

QWEN3_8B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""The public config.json of Qwen3-8B."""
ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "recorded" / "messages.txt"


def recorded() -> dict[str, str]:
    """Command line -> message."""
    blocks = FILE.read_text(encoding="utf-8").split("\n\n")[1:]
    return dict(block.strip().split("\n    ") for block in blocks)


def said(command: str) -> str:
    """What a command says of its arguments, before it reads anything but its config file.

    Raises:
        AssertionError: if it says nothing, or more than a line.
    """
    name, *arguments = words = shlex.split(command)
    try:
        if name == "config.json":
            from_hf(QWEN3_8B | json.loads(arguments[0]))
        else:
            (parse if name == "train" else plan.main)(words)
    except ValueError as error:
        line = str(error)
        assert "\n" not in line and "Traceback" not in line, line
        return line
    raise AssertionError(f"no error from {command}")


def text(messages: dict[str, str]) -> str:
    """The file with these messages."""
    heading = FILE.read_text(encoding="utf-8").split("\n\n")[0]
    return (
        "\n\n".join(
            [heading, *(f"{command}\n    {message}" for command, message in messages.items())]
        )
        + "\n"
    )


if __name__ == "__main__":
    os.chdir(ROOT)
    plan.load_topology = lambda name: sys.exit("asked for a compiler")
    FILE.write_text(text({command: said(command) for command in recorded()}), encoding="utf-8")
