"""What must be the same on all hosts of a run: settings, code, libraries, data."""

import importlib.metadata
import platform
from pathlib import Path

import jax

from dcmdp_jax.config.settings import Config, to_dict
from dcmdp_jax.data.prompts import digest, digest_of
from dcmdp_jax.dotted_names import flatten
from dcmdp_jax.models.hf_hub import ends_of_files
from dcmdp_jax.run.task import Task

_LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "transformers")


def settings_and_code(config: Config) -> dict[str, str]:
    """Every setting except `hosts.*`, a digest of our code, and the libraries' versions."""
    facts = {}
    for name, value in flatten(to_dict(config)).items():
        if not name.startswith("hosts."):
            facts[f"config.{name}"] = repr(value)
    for name in _LIBRARIES:
        facts[f"version of {name}"] = importlib.metadata.version(name)
    facts["version of Python"] = platform.python_version()
    package = Path(__file__).parents[1]
    contents = []
    for path in sorted(package.rglob("*.py")):
        contents += str(path.relative_to(package)).encode(), path.read_bytes()
    facts["code of dcmdp_jax (digest)"] = digest(contents)
    return facts


def data_facts(task: Task) -> dict[str, str]:
    """Devices, encoded problems and the files of the weights, as this host sees them."""
    devices = jax.local_devices()
    facts = {"devices": f"{len(devices)} x {devices[0].device_kind}"}
    facts["problems of task.train (digest)"] = digest_of(task.train)
    for held_out, prompts in task.held_out:
        facts[f"problems of {held_out.location} of evaluation.task (digest)"] = digest_of(prompts)
    if task.worked_solutions:
        facts["problems of warmup.task (digest)"] = digest_of(task.worked_solutions)
    if task.directory is not None:
        facts["files of model.path (digest)"] = digest(ends_of_files(task.directory))
    return facts
