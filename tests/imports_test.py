"""Who may import whom: the design's table, held against the source itself."""

import ast
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("dcmdp_jax", "bin", "configs")

# Part of the program -> the parts it may import besides itself. The longest prefix of a module's name decides.
_MAY_IMPORT = {
    "dcmdp_jax.errors": set(),
    "dcmdp_jax.memory": set(),
    "dcmdp_jax.inputs": set(),
    "dcmdp_jax.types": set(),
    "dcmdp_jax.config_fields": {"dcmdp_jax.inputs"},
    "dcmdp_jax.config_saved": {"dcmdp_jax.inputs"},
    "dcmdp_jax.config_rewards": {"dcmdp_jax.config_fields", "dcmdp_jax.inputs"},
    "dcmdp_jax.config_rollout": {"dcmdp_jax.config_fields"},
    "dcmdp_jax.config_checks": {"dcmdp_jax.config_fields", "dcmdp_jax.config_rollout", "dcmdp_jax.inputs"},
    "dcmdp_jax.config": {
        "dcmdp_jax.config_checks", "dcmdp_jax.config_fields", "dcmdp_jax.config_rewards", "dcmdp_jax.config_rollout",
        "dcmdp_jax.config_saved", "dcmdp_jax.inputs",
    },
    "dcmdp_jax.config_text": {"dcmdp_jax.config", "dcmdp_jax.config_fields"},
    "dcmdp_jax.algorithm": {"dcmdp_jax.types"},
    "dcmdp_jax.models": {"dcmdp_jax.types", "dcmdp_jax.inputs"},
    "dcmdp_jax.parallel": {"dcmdp_jax.types", "dcmdp_jax.models"},
    "dcmdp_jax.tasks": {"dcmdp_jax.inputs"},
    "dcmdp_jax.rewards": {"dcmdp_jax.tasks"},
    "dcmdp_jax.rollout": {"dcmdp_jax.types"},
    "dcmdp_jax.rollout.local": {"dcmdp_jax.types", "dcmdp_jax.rollout", "dcmdp_jax.models", "dcmdp_jax.parallel"},
    "dcmdp_jax.rollout.vllm": {"dcmdp_jax.types", "dcmdp_jax.config", "dcmdp_jax.rollout", "dcmdp_jax.models"},
    "dcmdp_jax.mismatch": {"dcmdp_jax.inputs", "dcmdp_jax.algorithm"},
    "dcmdp_jax.observe": {"dcmdp_jax.mismatch"},
    "dcmdp_jax.probe": {
        "dcmdp_jax.inputs", "dcmdp_jax.types", "dcmdp_jax.config", "dcmdp_jax.models", "dcmdp_jax.parallel",
        "dcmdp_jax.tasks", "dcmdp_jax.rollout", "dcmdp_jax.rollout.local", "dcmdp_jax.rollout.vllm",
        "dcmdp_jax.training", "dcmdp_jax.mismatch",
    },
    "dcmdp_jax.evaluation": {"dcmdp_jax.types", "dcmdp_jax.rollout", "dcmdp_jax.tasks"},
    "dcmdp_jax.training": {
        "dcmdp_jax.memory", "dcmdp_jax.inputs", "dcmdp_jax.types", "dcmdp_jax.config", "dcmdp_jax.config_checks",
        "dcmdp_jax.config_fields", "dcmdp_jax.algorithm", "dcmdp_jax.models",
        "dcmdp_jax.parallel", "dcmdp_jax.tasks", "dcmdp_jax.rewards", "dcmdp_jax.rollout",
        "dcmdp_jax.rollout.local", "dcmdp_jax.rollout.vllm", "dcmdp_jax.observe", "dcmdp_jax.evaluation",
    },
    "configs": {"dcmdp_jax.config"},
    "bin": {
        "dcmdp_jax.memory", "dcmdp_jax.inputs", "dcmdp_jax.config", "dcmdp_jax.config_checks",
        "dcmdp_jax.config_fields", "dcmdp_jax.config_rollout", "dcmdp_jax.config_text", "dcmdp_jax.models",
        "dcmdp_jax.parallel", "dcmdp_jax.types", "dcmdp_jax.tasks",
        "dcmdp_jax.rollout", "dcmdp_jax.rollout.local", "dcmdp_jax.rollout.vllm", "dcmdp_jax.observe",
        "dcmdp_jax.evaluation", "dcmdp_jax.training", "dcmdp_jax.mismatch", "dcmdp_jax.probe",
        "configs",
    },
}  # fmt: skip

# Library -> the parts that may see it.
_LIBRARIES = {
    "ml_collections": ("dcmdp_jax.config", "configs", "bin"),
    "absl": (),
    "optax": ("dcmdp_jax.training",),
    "orbax": ("dcmdp_jax.training.checkpoint",),
    "flax": ("dcmdp_jax.models",),
    "safetensors": ("dcmdp_jax.models.hf_manifest", "dcmdp_jax.models.hf_weights"),
    "math_verify": ("dcmdp_jax.tasks", "dcmdp_jax.rewards.plain_math_verify"),
    "matplotlib": ("dcmdp_jax.observe", "dcmdp_jax.mismatch.figures"),
    "tensorboardX": ("dcmdp_jax.observe",),
    "wandb": ("dcmdp_jax.observe",),
    "rich": ("dcmdp_jax.observe",),
    "datasets": ("dcmdp_jax.tasks",),
    "torch": ("dcmdp_jax.rollout.vllm.sidecar", "dcmdp_jax.rollout.vllm.worker", "dcmdp_jax.probe.hugging_face"),
    "vllm": ("dcmdp_jax.rollout.vllm.sidecar", "dcmdp_jax.rollout.vllm.worker"),
    "msgpack": ("dcmdp_jax.rollout.vllm.wire",),
    "httpx": ("dcmdp_jax.rollout.vllm",),
    "tensorflow": (),
}


def _modules():
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), ast.parse(path.read_text(encoding="utf-8"), str(path))


_SOURCES = dict(_modules())


def _typing_only(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _imports(tree, *, top_level=False):
    """Names of imported modules. With `top_level` only what importing the module itself imports."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            # `from package import module` imports the module.
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in _SOURCES else node.module for name in inner)
        elif top_level and (_typing_only(node) or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            continue
        else:
            waiting += ast.iter_child_nodes(node)


def _part(module):
    parts = [part for part in _MAY_IMPORT if module == part or module.startswith(f"{part}.")]
    return max(parts, key=len, default=None)


def _reached(module):
    """Every module that importing `module` imports, of ours and of others."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in _SOURCES:
            waiting += _imports(_SOURCES[name], top_level=True)
            waiting += [name.rpartition(".")[0]] if "." in name else []
    return seen


def test_the_walk_sees_what_there_is():
    """The test's own eyes: were it blind, everything below would pass."""
    assert "dcmdp_jax.algorithm.masked" in set(_imports(_SOURCES["dcmdp_jax.algorithm.losses"]))
    assert "dcmdp_jax.models.decoder" in set(_imports(_SOURCES["dcmdp_jax.training.step"]))  # from ... import decoder
    tree = ast.parse(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\ndef f():\n    import b\nimport c"
    )
    assert set(_imports(tree)) == {"typing", "a", "b", "c"}
    assert set(_imports(tree, top_level=True)) == {"typing", "c"}


@pytest.mark.parametrize("module", [name for name in _SOURCES if name != "dcmdp_jax"])
def test_imports_point_one_way(module):
    part = _part(module)
    assert part is not None, f"{module} is in no part of the table"
    for name in _imports(_SOURCES[module]):
        if name.split(".")[0] in _PACKAGES:
            other = _part(name)
            assert other in (part, "dcmdp_jax.errors") or other in _MAY_IMPORT[part], f"{module} may not import {name}"


def test_the_table_has_no_circle():
    def reachable(part, seen=()):
        assert part not in seen, " -> ".join((*seen, part))
        for other in _MAY_IMPORT[part]:
            reachable(other, (*seen, part))

    for part in _MAY_IMPORT:
        reachable(part)


@pytest.mark.parametrize("library", sorted(_LIBRARIES))
def test_a_library_is_seen_only_where_it_belongs(library):
    allowed = _LIBRARIES[library]
    for module, tree in _SOURCES.items():
        if library in {name.split(".")[0] for name in _imports(tree)}:
            assert any(module == part or module.startswith(f"{part}.") for part in allowed), f"{module}: {library}"


def test_the_verifiers_workers_start_without_jax_and_transformers():
    worker = "dcmdp_jax.tasks.verifier_worker"
    reached = set().union(*map(_reached, (worker, *_imports(_SOURCES[worker]))))
    roots = {name.split(".")[0] for name in reached}
    assert not roots & {"jax", "flax", "optax", "transformers"}


@pytest.mark.parametrize("module", [name for name in _SOURCES if name.startswith("dcmdp_jax.tasks")])
def test_tasks_need_no_accelerator(module):
    assert "jax" not in {name.split(".")[0] for name in _reached(module)}


@pytest.mark.parametrize("module", ["sidecar", "worker", "wire", "segments", "manifest"])
def test_the_sidecar_runs_where_there_is_no_jax(module):
    roots = {name.split(".")[0] for name in _reached(f"dcmdp_jax.rollout.vllm.{module}")}
    assert not roots & {"jax", "flax", "optax", "orbax", "ml_collections"}


@pytest.mark.parametrize(
    "module", ["dcmdp_jax.rollout.engine", "dcmdp_jax.rollout.packing", "dcmdp_jax.rollout.checks"]
)
def test_what_moves_numpy_arrays_knows_no_model(module):
    ours = {name for name in _reached(module) if name.startswith("dcmdp_jax.")}
    assert ours <= {"dcmdp_jax.errors", "dcmdp_jax.types", "dcmdp_jax.rollout", "dcmdp_jax.rollout.engine", module}


def test_the_loss_functions_can_be_imported_alone():
    ours = {name for name in _reached("dcmdp_jax.algorithm.losses") if name.startswith("dcmdp_jax.")}
    assert all(_part(name) in ("dcmdp_jax.algorithm", "dcmdp_jax.types") for name in ours)
    roots = {name.split(".")[0] for name in _reached("dcmdp_jax.algorithm.losses")}
    assert not roots & {"flax", "optax", "orbax", "transformers", "ml_collections"}


@pytest.mark.parametrize("module", [name for name in _SOURCES if name.startswith("dcmdp_jax")])
def test_library_code_prints_nothing_and_unpickles_nothing(module):
    names = {node.func.id for node in ast.walk(_SOURCES[module])
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    assert "print" not in names
    assert not {"pickle", "dill", "cloudpickle"} & {name.split(".")[0] for name in _imports(_SOURCES[module])}
