"""Facts that must be the same on all hosts of a run, and in a resumed run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable
from pathlib import Path

import jax

from dcmdp_jax.config.settings import Config, to_dict
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.fields import flatten
from dcmdp_jax.models.hf_hub import ends_of_files, model_directory
from dcmdp_jax.run.task import Task

_LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint", "transformers")
_DIGITS = 16


def settings_and_code(config: Config) -> dict[str, str]:
    """Every setting except `hosts.*`, a digest of this package's code, and the versions of its libraries."""
    settings = flatten(to_dict(config)).items()
    same = {f"config.{name}": repr(value) for name, value in settings if not name.startswith("hosts.")}
    versions = {f"version of {name}": importlib.metadata.version(name) for name in _LIBRARIES}
    package = Path(__file__).parents[1]
    files = sorted(package.rglob("*.py"))
    code = _digest(part for path in files for part in (str(path.relative_to(package)).encode(), path.read_bytes()))
    return same | versions | {"version of Python": platform.python_version(), "code of dcmdp_jax (digest)": code}


def data_facts(task: Task) -> dict[str, str]:
    """Devices, encoded problems, worked solutions and the files of the weights, as this host sees them."""
    devices = jax.local_devices()
    facts = {"devices": f"{len(devices)} x {devices[0].device_kind}"}
    facts["problems of task.train (digest)"] = digest_of(task.train)
    for held_out, prompts in task.held_out:
        facts[f"problems of {held_out.location} of evaluation.task (digest)"] = digest_of(prompts)
    if task.worked_solutions:
        facts["problems of warmup.task (digest)"] = _digest(
            ids.tobytes() for pair in zip(*task.worked_solutions, strict=True) for ids in pair
        )
    if task.config.model.path:
        facts["files of model.path (digest)"] = _digest(ends_of_files(model_directory(task.config.model.path)))
    return facts


def digest_of(problems: EncodedPrompts) -> str:
    """Number of problems, and a digest of prompts, answers and columns in their order."""

    def parts() -> Iterable[bytes]:
        for ids, problem in zip(problems.token_ids, problems.problems, strict=True):
            yield ids.tobytes()
            yield json.dumps([problem.answer, problem.columns], sort_keys=True, default=str).encode()

    return f"{len(problems.problems)}, {_digest(parts())}"


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:_DIGITS]
