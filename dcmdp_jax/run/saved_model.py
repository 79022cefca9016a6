"""Saved models: found in a directory or on the Hub, read, and asked by an engine."""

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.tokenizer import end_token_ids, fix_date, load_tokenizer
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.errors import UserError
from dcmdp_jax.models import hf_config, hf_hub, hf_manifest
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_weights import load_params
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.run import directory, task
from dcmdp_jax.types import Params

if TYPE_CHECKING:
    from dcmdp_jax.run.weights import SavedParams


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """A model in a directory, found and checked; its weights are not read yet.

    Attributes:
        name: name for people.
        shape: the model's shape.
        tokenizer: directory of the tokenizer; generation_config.json there names further end
            tokens.
        path: the model's directory, or the run's.
        checkpoint: the run's checkpoint; None for a Hugging Face directory.
        files: files of the weights.
        narrow: whether all tensors are stored as bfloat16.
    """

    name: str
    shape: ModelConfig
    tokenizer: Path
    path: Path
    checkpoint: "SavedParams | None"
    files: tuple[Path, ...]
    narrow: bool = False

    @property
    def step(self) -> int | None:
        """The checkpoint's step; None for a Hugging Face directory."""
        return None if self.checkpoint is None else self.checkpoint.step

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; None for a Hugging Face directory."""
        return None if self.checkpoint is None else self.tokenizer.parent

    @property
    def settings(self) -> Config:
        """The run's own settings, else the defaults."""
        return Config() if self.run_dir is None else directory.read_config(self.run_dir)

    def load(self, dtype: str) -> Params:
        """Read the weights: a checkpoint's as they are, others in the given dtype."""
        if self.checkpoint is None:
            return load_params(self.path, self.shape, dtype=dtype)
        return self.checkpoint.load()

    def load_as_rounded(self, precision: str) -> Params | None:
        """The weights with what rounding leaves of the adapters' change; None without adapters."""
        if self.checkpoint is None or self.checkpoint.adapters is None:
            return None
        return self.checkpoint.load(precision)


def find_model(path: Path, step: int | None = None) -> SavedModel:
    """Find a model: a Hugging Face directory, a name on the Hub, a run, or a checkpoint in it.

    Args:
        path: the directory, or the name.
        step: a run's checkpoint; None is the newest.

    Raises:
        UserError, CheckpointError: in one line, if there is none or it can't be read.
    """
    name = path.resolve().name
    if hf_hub.is_fetched(str(path)):
        path = hf_hub.model_directory(str(path))
    elif not path.is_dir():
        raise UserError(f"MODEL {path}: no such directory")

    # A run, its `checkpoints`, or one of these.
    resolved = path.resolve()
    in_checkpoints = "checkpoints" in (resolved.name, resolved.parent.name)
    if (resolved / "checkpoints").is_dir() or in_checkpoints:
        # Orbax takes seconds to import; only a checkpoint needs it.
        from dcmdp_jax.run.weights import find_params

        saved = find_params(resolved, step)
        return SavedModel(
            name=f"{saved.tokenizer.parent.name} step {saved.step}",
            shape=saved.model,
            tokenizer=saved.tokenizer,
            path=resolved,
            checkpoint=saved,
            files=tuple(saved.path.iterdir()),
        )

    if step is not None:
        raise UserError(
            f"--step: got {step}, but {path} is no run directory; only a run's checkpoints have "
            "steps"
        )
    shape = hf_config.read_model_config(path)
    stored_dtypes = set(hf_manifest.check_manifest(path, shape).dtypes)
    return SavedModel(
        name=name,
        shape=shape,
        tokenizer=path,
        path=path,
        checkpoint=None,
        files=tuple(path.glob("*.safetensors")),
        narrow=stored_dtypes == {"BF16"},
    )


@dataclasses.dataclass(frozen=True)
class Policy:
    """A saved model with its tokenizer, and the settings that it is asked with.

    Attributes:
        config: the settings, see `for_sampling`.
        saved: the model; None for one that is still to be trained.
        model: its shape.
        tokenizer: with a chat template and an end token.
        stop_token_ids: the ids that end a completion.
    """

    config: Config
    saved: SavedModel | None
    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, saved: SavedModel, config: Config) -> "Policy":
        """Read a saved model's tokenizer. A run's writes the date that the run's prompts have.

        Raises:
            UserError: in one line, for a tokenizer that can't be read.
        """
        prepare_jax(config.mesh.cpu_devices)
        tokenizer = load_tokenizer(
            str(saved.tokenizer.resolve()), vocab_size=saved.shape.vocab_size
        )
        if saved.run_dir is not None:
            fix_date(tokenizer, directory.first_start(saved.run_dir))
        stop = end_token_ids(tokenizer, saved.tokenizer, vocab_size=saved.shape.vocab_size)
        return cls(config, saved, saved.shape, tokenizer, stop)

    @functools.cached_property
    def params(self) -> Params:
        """The weights in float32, or as a checkpoint has them; read once."""
        return self.saved.load("float32")

    @property
    def sampling(self) -> SamplingParams:
        """The distribution that the settings sample from."""
        return task.sampling(self.config.rollout, self.stop_token_ids)
