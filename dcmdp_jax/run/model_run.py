"""A run without a trainer: a saved model is asked by an engine that has all devices."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from dcmdp_jax.config.arguments import as_settings
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.prompts import EncodedPrompts, end_token_ids, load_tokenizer
from dcmdp_jax.engines.engine_kind import EngineKind, Workload
from dcmdp_jax.engines.registry import find_engine
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.held_out import HeldOutTask
from dcmdp_jax.fields import INT32_MAX
from dcmdp_jax.machine import MemoryPart
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.hf_config import read_model_config
from dcmdp_jax.models.hf_hub import is_fetched, model_directory
from dcmdp_jax.models.hf_manifest import check_manifest
from dcmdp_jax.models.hf_weights import load_params
from dcmdp_jax.models.params import num_params
from dcmdp_jax.models.row_logprobs import make_probe
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.parallel.mesh import make_mesh, one_device_mesh, sampling_mesh
from dcmdp_jax.run import files
from dcmdp_jax.run.directory import read_config
from dcmdp_jax.run.memory_use import free_host_bytes, loaded_parameters
from dcmdp_jax.run.run import Run
from dcmdp_jax.types import Params

PAPERS_EVALUATION = {
    "rollout.max_completion_tokens": 32768,
    "rollout.max_rows": 256,
    "evaluation.temperature": 0.7,
    "evaluation.samples": (),
    "evaluation.max_problems": 0,
    "task.max_prompt_tokens": 2**20,
    "task.on_bad_row": "error",
    "task.verifier_workers": min(os.cpu_count() or 1, 8),
    # A score depends on the answers, not on how fast this machine is.
    "task.verifier_budget": 0.0,
    "rewards.on_error": "error",
    "training.seed": 0,
}
"""Settings of an evaluation, whatever the run had: the paper's, all problems, every answer judged."""
_MOST_COMPLETIONS = 10**7
"""Of one task. Each is a few Python objects, about a kilobyte: 10 GB."""
_TOKEN_BYTES = 8  # an int32 id and a float32 log-prob


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """A model in a directory, found and checked; its weights are not read yet.

    Attributes:
        name: name for people.
        shape: the model's shape.
        tokenizer: directory of the tokenizer; generation_config.json there names further end tokens.
        path: the model's directory, or the run's.
        step: the checkpoint's step; None for a Hugging Face directory.
        files: files of the weights.
        narrow: whether all tensors are stored as bfloat16.
    """

    name: str
    shape: ModelConfig
    tokenizer: Path
    path: Path
    step: int | None
    files: tuple[Path, ...]
    narrow: bool = False

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; None for a Hugging Face directory."""
        return None if self.step is None else self.tokenizer.parent

    @property
    def settings(self) -> Config:
        """The run's own settings, else the defaults."""
        return Config() if self.run_dir is None else read_config(self.run_dir)

    def load(self, dtype: str) -> Params:
        """Read the weights: a checkpoint's as they are, others in the given dtype."""
        if self.step is None:
            return load_params(self.path, self.shape, dtype=dtype)
        from dcmdp_jax.run.saved_params import load_params_only

        return load_params_only(self.path, self.step)[0]

    def load_as_rounded(self, precision: str) -> Params | None:
        """The weights with what an engine's rounding leaves of the adapters' change; None without adapters."""
        if self.step is None:
            return None
        from dcmdp_jax.run.saved_params import load_as_rounded

        return load_as_rounded(self.path, self.step, precision)


def find_model(path: Path, step: int | None = None) -> SavedModel:
    """Find a model: a Hugging Face directory, a name on the Hub, a run directory, or a checkpoint in it.

    Args:
        path: the directory, or the name.
        step: a run's checkpoint; None is the newest.

    Raises:
        UserError, CheckpointError: in one line, if there is none or it can't be read.
    """
    name = path.resolve().name
    if is_fetched(str(path)):
        path = model_directory(str(path))
    elif not path.is_dir():
        raise UserError(f"MODEL {path}: no such directory")
    resolved = path.resolve()
    if (resolved / "checkpoints").is_dir() or "checkpoints" in (resolved.name, resolved.parent.name):
        # Orbax takes seconds to import; only a checkpoint needs it.
        from dcmdp_jax.run.saved_params import load_model_config

        shape, step, tokenizer = load_model_config(resolved, step)
        run_dir = tokenizer.parent
        weights = tuple((run_dir / "checkpoints" / str(step)).iterdir())
        return SavedModel(f"{run_dir.name} step {step}", shape, tokenizer, resolved, step, weights)
    if step is not None:
        raise UserError(f"--step: got {step}, but {path} is no run directory; only a run's checkpoints have steps")
    shape = read_model_config(path)
    narrow = set(check_manifest(path, shape).dtypes) == {"BF16"}
    return SavedModel(name, shape, path, path, None, tuple(path.glob("*.safetensors")), narrow)


class ModelRun(Run):
    """The parts of a run without training: the engine has all devices, and the problems are those of evaluation.

    Attributes:
        saved: the model; None for one that is still to be trained.
        directory: files of an engine in its own process.
        fitted_rows: none; the rows that fit are found at each start.
    """

    saved: SavedModel | None = None
    directory = Path()
    fitted_rows = 0
    train = EncodedPrompts([], [], 0, 0)

    @classmethod
    def of(cls, saved: SavedModel, config: Config) -> ModelRun:
        """The run of a saved model.

        Args:
            saved: the model.
            config: see `for_sampling`.

        Raises:
            UserError: in one line, for a tokenizer that can't be read.
        """
        prepare_jax(config.mesh.cpu_devices)
        tokenizer = load_tokenizer(str(saved.tokenizer.resolve()), vocab_size=saved.shape.vocab_size)
        stop = end_token_ids(tokenizer, saved.tokenizer, vocab_size=saved.shape.vocab_size)
        return cls(config, saved=saved, model=saved.shape, tokenizer=tokenizer, stop_token_ids=stop)

    def check(self) -> ModelRun:
        """Read the tasks; nothing is started.

        Raises:
            UserError: in one line, for a task that can't be read, or completions that the model or the host's memory
                has no room for.
        """
        limit = self.asked.rollout.max_completion_tokens
        for task, prompts in self.held_out:
            check_size(task.name, len(prompts.problems), task.samples, limit, free=free_host_bytes())
        longest = self.longest_prompt
        name = next(task.name for task, prompts in self.held_out if longest == max(map(len, prompts.token_ids)))
        most = self.model.max_position_embeddings
        if (room := most - longest) < 1:
            raise UserError(
                f"config.evaluation.task: the longest prompt of {name} has {longest} tokens and leaves no room in the "
                f"model's max_position_embeddings={most}; task.max_prompt_tokens leaves it out"
            )
        if limit > room:
            raise UserError(
                f"config.rollout.max_completion_tokens: got {limit}, with the longest prompt ({longest} tokens, "
                f"{name}) more than the model's max_position_embeddings={most}; "
                f"--config.rollout.max_completion_tokens={room} fits"
            )
        if (rows := self.asked.rollout.max_rows) * (tokens := longest + limit) > INT32_MAX:
            raise UserError(
                f"config.rollout.max_rows: got {rows}, with {tokens} tokens of prompt and completion {rows * tokens:,} "
                f"tokens, must be at most {INT32_MAX:,} (tokens are counted in int32)"
            )
        self.columns  # noqa: B018 - the reward functions and the environment are checked
        return self

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that is asked."""
        return max(self.prompt_lengths)

    @cached_property
    def params(self) -> Params:
        """The weights in float32, or as a checkpoint has them."""
        return self.saved.load("float32")

    @property
    def param_dtype(self) -> str:
        """The dtype that the engine gets the weights in: narrow where that loses nothing."""
        if self.saved.step is not None:
            return self.asked.model.param_dtype
        narrow = self.saved.narrow or self.asked.rollout.precision == "bfloat16"
        return "bfloat16" if narrow else "float32"

    @cached_property
    def held_out(self) -> tuple[tuple[HeldOutTask, EncodedPrompts], ...]:
        """The tasks of `evaluation.task`, each with its encoded problems."""
        return files.held_out(self.asked, self.tokenizer)

    @cached_property
    def engine_kind(self) -> EngineKind:
        """The engine's record."""
        with as_settings({"engine": "rollout.engine"}):
            return find_engine(self.asked.rollout.engine)

    def engine_place(self) -> dict[str, Any]:
        """Arguments of an engine that has all devices."""
        return {
            "directory": self.directory,
            "max_total_tokens": self.longest_prompt + self.asked.rollout.max_completion_tokens,
            "mesh": lambda **split: sampling_mesh(
                make_mesh(data=-1, **split), num_params=num_params(self.model), **split
            ),
            "probe": lambda: make_probe(self.model, Compute(), one_device_mesh()),
        }

    def checked_mesh(self) -> Mesh:
        """All devices."""
        return make_mesh(data=-1)

    @cached_property
    def workload(self) -> Workload:
        """Requests to the engine, the largest task's."""
        return Workload(
            completions=max(len(prompts.token_ids) * task.samples for task, prompts in self.held_out),
            group_size=1,
            prompt_lengths=self.prompt_lengths,
            max_completion_tokens=self.asked.rollout.max_completion_tokens,
            param_dtype=self.param_dtype,
            training=False,
        )

    def own_memory(self) -> list[MemoryPart]:
        """The parameters, where the engine gets them from here."""
        return loaded_parameters(self.model, self.param_dtype, self.machine) if self.engine_kind.pushes else []

    @property
    def rewards_output(self) -> None:
        """No file; output of reward functions and environments is discarded."""


def check_size(task: str, problems: int, samples: int, max_completion_tokens: int, *, free: int | None) -> None:
    """Refuse a task whose completions, all as long as they may be, are more than this machine's memory holds.

    Args:
        task: the task's name.
        problems: number of problems that are asked.
        samples: K, completions of each.
        max_completion_tokens: limit of each.
        free: bytes of memory that can still be allocated; None where that is unknown.

    Raises:
        UserError: with the product, what it takes and which settings to lower.
    """
    completions = problems * samples
    product = (
        f"config.evaluation.samples: got {samples}; {task} has {problems:,} problems x {samples:,} samples = "
        f"{completions:,} completions"
    )
    lower = "lower evaluation.samples, evaluation.max_problems"
    if completions > _MOST_COMPLETIONS:
        raise UserError(f"{product}, the most are {_MOST_COMPLETIONS:,}; {lower}")
    needed = completions * max_completion_tokens * _TOKEN_BYTES
    if free is not None and needed > free:
        raise UserError(
            f"{product} of up to {max_completion_tokens:,} tokens take {needed / 2**30:,.1f} GiB, "
            f"{free / 2**30:,.1f} GiB are free; {lower} or rollout.max_completion_tokens"
        )


def fingerprint(paths: Iterable[Path]) -> list[list[Any]]:
    """Name, size and time of files: a directory may get others under the same name."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(paths)]
