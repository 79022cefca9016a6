"""Shapes of published models, as their publishers' config.json has them.

A plan needs no weights: where `model.path` is not a directory, its last part names one of these.
"""

import json
from pathlib import Path
from typing import Any

from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.errors import UserError, suggestion
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.gguf_convert import MODELS, PACKAGE
from dcmdp_jax.models.hf_config import from_hf, read_model_config
from dcmdp_jax.run.task import fresh_model

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
"""Name of the model's directory -> fields of its config.json."""


def model_of(config: Config) -> ModelConfig:
    """The model of a config: its directory's, a published one of that name, or a fresh one.

    Raises:
        UserError: if neither a directory nor a published model has this name.
    """
    path = config.model.path
    if not path:
        return fresh_model(
            config.model.architecture, build_tokenizer(), longest=config.max_total_tokens
        )
    directory = Path(path)
    if path.startswith(PACKAGE):
        directory = MODELS / path.removeprefix(PACKAGE)
        if not directory.is_dir():
            raise UserError(
                f"config.model.path: got {path}, and no directory {directory}; plan needs its "
                "directory; `dcmdp train --dry-run` converts it"
            )
    if directory.is_dir():
        return read_model_config(directory)
    name = Path(path.partition("@")[0]).name
    # An instruction-tuned model has the shape of its base, where it is not listed.
    fields = PUBLISHED.get(name, PUBLISHED.get(name.removesuffix("-Instruct")))
    if fields is None:
        raise UserError(
            f"config.model.path: no directory {path}, and no published shape of that name; known "
            f"are {', '.join(PUBLISHED)}{suggestion(name, PUBLISHED)}"
        )
    return from_hf(fields)
