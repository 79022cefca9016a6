"""Parameters that a run starts from: initial policy, frozen base of adapters, reference policy."""

import collections
import dataclasses
from pathlib import Path

import jax
from jax.sharding import Mesh

from dcmdp_jax.models import hf_weights
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_hub import model_directory
from dcmdp_jax.models.lora import SavedAdapters, adapter_declarations, load_base
from dcmdp_jax.models.params import draw_params, init_params, logical_axes, param_shapes
from dcmdp_jax.models.peft_files import base_checksum
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.parallel.sharding import param_shardings, to_global
from dcmdp_jax.run.task import Task, other_base
from dcmdp_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters of a run on its mesh. A method reads or draws them; nothing is kept.

    Attributes:
        task: the model, and the files that the settings name.
        shardings: the sharding of every parameter of the model.
    """

    task: Task
    shardings: Params

    def initial(self) -> Params:
        """The starting parameters, read from `model.path` or drawn from the seed."""
        settings, model = self.task.config.model, self.task.model
        if settings.path:
            return self._load(model_directory(settings.path))
        key = jax.random.key(self.task.config.training.seed)
        return jax.jit(lambda: init_params(model, key, settings.param_dtype), out_shardings=self.shardings)()

    def initial_adapters(self, shardings: Params) -> Params:
        """The starting adapters, read from `model.adapter` or drawn from the seed.

        Raises:
            UserError: if the adapters of `model.adapter` were trained on another base.
        """
        task, adapter = self.task, self.task.adapter
        if adapter is None:
            declared, key = adapter_declarations(task.model, task.lora), jax.random.key(task.config.training.seed)
            return jax.jit(lambda: draw_params(declared, key, task.config.model.param_dtype), out_shardings=shardings)()
        if adapter.base_checksum is not None:
            base = load_base(self.frozen_path, task.model, "bfloat16", self.shardings)
            if adapter.base_checksum != base_checksum(base):
                raise other_base(task.config, self.frozen_path)
        return to_global(adapter.params, shardings)

    @property
    def has_frozen(self) -> bool:
        """Whether training needs the initial policy: as the adapters' base, or as the reference of a KL term."""
        return self.task.lora is not None or bool(self.task.config.algorithm.kl_coefficient)

    @property
    def saves_initial(self) -> bool:
        """Whether the run writes its initial policy to its directory."""
        kl = bool(self.task.config.algorithm.kl_coefficient)
        return kl or self.task.lora is not None and self.frozen_path == self._reference

    @property
    def frozen_path(self) -> Path:
        """The directory of the initial policy: of `model.path` where adapters start from it, else one in `run_dir`."""
        settings = self.task.config.model
        if self.task.lora and settings.path and not self.task.config.warmup.steps:
            return model_directory(settings.path)
        return self._reference

    @property
    def _reference(self) -> Path:
        return Path(self.task.config.run_dir) / "reference"

    def save_initial(self, params: Params, hosts: Hosts) -> None:
        """Collective: write the initial policy to the run's directory."""
        model, dtype = self.task.model, self.task.config.model.param_dtype
        if hosts.is_writer:
            hf_weights.save_params(params, model, self._reference, dtype=dtype, overwrite=True)
        else:
            # Process 0 writes the tensors; the others have parts of them.
            collections.deque(hf_weights.iterate_hf_tensors(params, model, dtype), maxlen=0)
        hosts.wait_for_all()

    def frozen(self) -> Params:
        """The initial policy: base of the adapters in `model.lora_base`, or reference policy."""
        if self.task.lora is None:
            return self._load(self.frozen_path)
        return load_base(self.frozen_path, self.task.model, self.task.config.model.lora_base, self.shardings)

    @property
    def saved_adapters(self) -> SavedAdapters | None:
        """Record of the adapters for a checkpoint; None without."""
        if self.task.lora is None:
            return None
        shape, base = dataclasses.astuple(self.task.lora), str(self.frozen_path.resolve())
        return SavedAdapters(*shape, self.task.config.model.lora_base, base)

    def _load(self, directory: Path) -> Params:
        dtype = self.task.config.model.param_dtype
        return hf_weights.load_params(directory, self.task.model, dtype=dtype, shardings=self.shardings)


def model_shardings(model: ModelConfig, param_dtype: str, mesh: Mesh) -> Params:
    """The sharding of every parameter of a model."""
    return param_shardings(logical_axes(model), param_shapes(model, param_dtype), mesh)
