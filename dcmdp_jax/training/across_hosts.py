"""Facts that must be the same on all hosts of a run, and in a resumed run."""

import importlib.metadata
import platform
from pathlib import Path

import jax

from dcmdp_jax.config.settings import Config, to_dict
from dcmdp_jax.fields import flatten
from dcmdp_jax.models.hf_hub import ends_of_files, model_directory
from dcmdp_jax.run.task import Task, digest, digest_of

_LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "transformers")


def settings_and_code(config: Config) -> dict[str, str]:
    """Every setting except `hosts.*`, a digest of this package's code, and the versions of its libraries."""
    settings = flatten(to_dict(config)).items()
    same = {f"config.{name}": repr(value) for name, value in settings if not name.startswith("hosts.")}
    versions = {f"version of {name}": importlib.metadata.version(name) for name in _LIBRARIES}
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"))
    code = digest(part for path in files for part in (str(path.relative_to(package)).encode(), path.read_bytes()))
    return same | versions | {"version of Python": platform.python_version(), "code of dcmdp_jax (digest)": code}


def data_facts(task: Task) -> dict[str, str]:
    """Devices, encoded problems, worked solutions and the files of the weights, as this host sees them."""
    devices = jax.local_devices()
    facts = {"devices": f"{len(devices)} x {devices[0].device_kind}"}
    facts["problems of task.train (digest)"] = digest_of(task.train)
    for held_out, prompts in task.held_out:
        facts[f"problems of {held_out.location} of evaluation.task (digest)"] = digest_of(prompts)
    if task.worked_solutions:
        facts["problems of warmup.task (digest)"] = digest_of(task.worked_solutions)
    if task.config.model.path:
        facts["files of model.path (digest)"] = digest(ends_of_files(model_directory(task.config.model.path)))
    return facts
