"""The table of allowed imports, compared with the source. An unused edge fails too."""

import ast
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("dcmdp_jax", "bin", "configs")

# Part of the program -> the parts it may import besides itself. The longest prefix of a module's name decides.
_MAY_IMPORT = {
    "dcmdp_jax.errors": set(),
    "dcmdp_jax.array_checksum": set(),
    "dcmdp_jax.atomic_write": set(),
    "dcmdp_jax.number_format": set(),
    "dcmdp_jax.process_memory": set(),
    "dcmdp_jax.inputs": set(),
    "dcmdp_jax.types": set(),
    "dcmdp_jax.config_fields": {"dcmdp_jax.inputs"},
    "dcmdp_jax.config_saved": {"dcmdp_jax.inputs"},
    "dcmdp_jax.config_algorithm": {"dcmdp_jax.algorithm", "dcmdp_jax.config_fields", "dcmdp_jax.inputs"},
    "dcmdp_jax.config_rewards": {"dcmdp_jax.config_fields", "dcmdp_jax.inputs"},
    "dcmdp_jax.config_hosts": {"dcmdp_jax.config_fields", "dcmdp_jax.inputs"},
    "dcmdp_jax.config_rollout": {"dcmdp_jax.config_fields"},
    "dcmdp_jax.global_arrays": set(),
    "dcmdp_jax.config_checks": {"dcmdp_jax.config_fields", "dcmdp_jax.config_rollout", "dcmdp_jax.inputs"},
    "dcmdp_jax.config": {
        "dcmdp_jax.config_algorithm", "dcmdp_jax.config_checks", "dcmdp_jax.config_fields", "dcmdp_jax.config_hosts",
        "dcmdp_jax.config_rewards", "dcmdp_jax.config_rollout", "dcmdp_jax.config_saved", "dcmdp_jax.inputs",
    },
    "dcmdp_jax.config_text": {"dcmdp_jax.config", "dcmdp_jax.config_fields"},
    "dcmdp_jax.algorithm": {"dcmdp_jax.types"},
    "dcmdp_jax.models": {
        "dcmdp_jax.atomic_write", "dcmdp_jax.global_arrays", "dcmdp_jax.inputs", "dcmdp_jax.types",
    },
    "dcmdp_jax.parallel": {"dcmdp_jax.types"},
    "dcmdp_jax.rewards.messages": set(),
    "dcmdp_jax.rewards.process_tree": set(),
    "dcmdp_jax.rewards.worker_process": {"dcmdp_jax.rewards.messages", "dcmdp_jax.rewards.process_tree"},
    "dcmdp_jax.rewards.worker_pool": {
        "dcmdp_jax.rewards.messages", "dcmdp_jax.rewards.process_tree", "dcmdp_jax.rewards.worker_process",
    },
    "dcmdp_jax.rewards.math": {"dcmdp_jax.rewards.worker_pool", "dcmdp_jax.rewards.worker_process"},
    "dcmdp_jax.tasks": {"dcmdp_jax.inputs", "dcmdp_jax.rewards.math"},
    "dcmdp_jax.rewards": {
        "dcmdp_jax.rewards.math", "dcmdp_jax.rewards.worker_pool", "dcmdp_jax.rewards.worker_process",
        "dcmdp_jax.tasks",
    },
    "dcmdp_jax.theory": set(),
    "dcmdp_jax.rollout": {"dcmdp_jax.types"},
    "dcmdp_jax.rollout.local": {
        "dcmdp_jax.array_checksum", "dcmdp_jax.global_arrays", "dcmdp_jax.models", "dcmdp_jax.parallel",
        "dcmdp_jax.rollout", "dcmdp_jax.types",
    },
    "dcmdp_jax.rollout.vllm": {
        "dcmdp_jax.atomic_write", "dcmdp_jax.config", "dcmdp_jax.models", "dcmdp_jax.rollout",
        "dcmdp_jax.rollout.sidecar", "dcmdp_jax.types",
    },
    "dcmdp_jax.observe.html_page": {"dcmdp_jax.number_format"},
    "dcmdp_jax.observe": {
        "dcmdp_jax.atomic_write", "dcmdp_jax.config_fields", "dcmdp_jax.inputs", "dcmdp_jax.mismatch",
        "dcmdp_jax.number_format", "dcmdp_jax.observe.html_page",
    },
    "dcmdp_jax.evaluation": {
        "dcmdp_jax.atomic_write", "dcmdp_jax.inputs", "dcmdp_jax.rewards.math", "dcmdp_jax.rollout", "dcmdp_jax.tasks",
    },
    "dcmdp_jax.training": {
        "dcmdp_jax.algorithm", "dcmdp_jax.array_checksum", "dcmdp_jax.atomic_write", "dcmdp_jax.config",
        "dcmdp_jax.config_algorithm", "dcmdp_jax.config_checks", "dcmdp_jax.config_fields", "dcmdp_jax.evaluation",
        "dcmdp_jax.global_arrays", "dcmdp_jax.inputs", "dcmdp_jax.models", "dcmdp_jax.observe", "dcmdp_jax.parallel",
        "dcmdp_jax.process_memory", "dcmdp_jax.rewards", "dcmdp_jax.rewards.math", "dcmdp_jax.rollout",
        "dcmdp_jax.rollout.engines", "dcmdp_jax.rollout.local", "dcmdp_jax.rollout.sidecar", "dcmdp_jax.rollout.vllm",
        "dcmdp_jax.tasks", "dcmdp_jax.types",
    },
    "dcmdp_jax.mismatch": {
        "dcmdp_jax.algorithm", "dcmdp_jax.atomic_write", "dcmdp_jax.inputs", "dcmdp_jax.number_format",
        "dcmdp_jax.observe.html_page",
    },
    "dcmdp_jax.rollout.sidecar": {"dcmdp_jax.models", "dcmdp_jax.rollout", "dcmdp_jax.types"},
    "dcmdp_jax.studies": {
        "dcmdp_jax.atomic_write", "dcmdp_jax.evaluation", "dcmdp_jax.inputs", "dcmdp_jax.observe",
    },
    "dcmdp_jax.rollout.engines": {
        "dcmdp_jax.config", "dcmdp_jax.models", "dcmdp_jax.rollout", "dcmdp_jax.rollout.local",
        "dcmdp_jax.rollout.sidecar", "dcmdp_jax.rollout.vllm",
    },
    "configs": {"dcmdp_jax.config", "dcmdp_jax.studies"},
    "bin": {
        "configs", "dcmdp_jax.atomic_write", "dcmdp_jax.config", "dcmdp_jax.config_fields", "dcmdp_jax.config_text",
        "dcmdp_jax.evaluation",
        "dcmdp_jax.inputs", "dcmdp_jax.mismatch", "dcmdp_jax.models", "dcmdp_jax.observe", "dcmdp_jax.parallel",
        "dcmdp_jax.plan", "dcmdp_jax.probe", "dcmdp_jax.process_memory", "dcmdp_jax.rewards.math", "dcmdp_jax.rollout",
        "dcmdp_jax.rollout.engines", "dcmdp_jax.rollout.vllm", "dcmdp_jax.studies", "dcmdp_jax.tasks",
        "dcmdp_jax.theory", "dcmdp_jax.training", "dcmdp_jax.types",
    },
    "dcmdp_jax.plan": {
        "dcmdp_jax.config", "dcmdp_jax.models", "dcmdp_jax.parallel", "dcmdp_jax.rollout", "dcmdp_jax.rollout.local",
        "dcmdp_jax.rollout.vllm", "dcmdp_jax.tasks", "dcmdp_jax.training", "dcmdp_jax.types",
    },
    "dcmdp_jax.probe": {
        "dcmdp_jax.config", "dcmdp_jax.config_rollout", "dcmdp_jax.inputs", "dcmdp_jax.mismatch", "dcmdp_jax.models",
        "dcmdp_jax.parallel", "dcmdp_jax.rollout", "dcmdp_jax.rollout.engines", "dcmdp_jax.rollout.local",
        "dcmdp_jax.tasks", "dcmdp_jax.training", "dcmdp_jax.types",
    },
}  # fmt: skip

# Library -> the parts that import it.
_LIBRARIES = {
    "ml_collections": ("dcmdp_jax.config", "configs", "bin"),
    "absl": (),
    "optax": ("dcmdp_jax.training",),
    "orbax": ("dcmdp_jax.training.checkpoint",),
    "flax": ("dcmdp_jax.models", "dcmdp_jax.rollout.vllm.tpu_worker"),
    "safetensors": ("dcmdp_jax.models.hf_manifest", "dcmdp_jax.models.hf_weights"),
    "math_verify": ("dcmdp_jax.rewards.math", "dcmdp_jax.rewards.plain_math_verify"),
    "jinja2": ("dcmdp_jax.observe.html_page",),
    "matplotlib": ("dcmdp_jax.observe", "dcmdp_jax.mismatch.figures"),
    "scipy": ("dcmdp_jax.theory", "dcmdp_jax.evaluation.estimators"),
    "tensorboardX": ("dcmdp_jax.observe",),
    "wandb": ("dcmdp_jax.observe",),
    "rich": ("dcmdp_jax.observe",),
    "datasets": ("dcmdp_jax.tasks",),
    "torch": (
        "dcmdp_jax.probe.hugging_face",
        "dcmdp_jax.rollout.vllm.model_check",
        "dcmdp_jax.rollout.vllm.received",
        "dcmdp_jax.rollout.vllm.routing",
        "dcmdp_jax.rollout.vllm.worker",
    ),
    "vllm": ("dcmdp_jax.rollout.vllm.routing", "dcmdp_jax.rollout.vllm.sidecar", "dcmdp_jax.rollout.vllm.worker"),
    "msgpack": ("dcmdp_jax.rollout.sidecar.wire",),
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


def test_the_walk_finds_every_kind_of_import():
    """The test's own eyes: were it blind, everything below would pass."""
    assert "dcmdp_jax.algorithm.masked" in set(_imports(_SOURCES["dcmdp_jax.algorithm.losses"]))
    assert "dcmdp_jax.models.decoder" in set(_imports(_SOURCES["dcmdp_jax.training.row_logprobs"]))
    tree = ast.parse(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\ndef f():\n    import b\nimport c"
    )
    assert set(_imports(tree)) == {"typing", "a", "b", "c"}
    assert set(_imports(tree, top_level=True)) == {"typing", "c"}


def _edges(part):
    """(importing module, imported module, its part) of every import from `part` into another part."""
    for module, tree in _SOURCES.items():
        if _part(module) == part:
            for name in _imports(tree):
                if name.split(".")[0] in _PACKAGES and _part(name) not in (part, "dcmdp_jax.errors"):
                    yield module, name, _part(name)


def test_every_module_is_in_the_table():
    assert [module for module in _SOURCES if _part(module) is None] == ["dcmdp_jax"]


@pytest.mark.parametrize("part", _MAY_IMPORT)
def test_a_part_imports_exactly_the_parts_of_its_row(part):
    forbidden = [f"{module} imports {name}" for module, name, other in _edges(part) if other not in _MAY_IMPORT[part]]
    assert not forbidden
    unused = _MAY_IMPORT[part] - {other for _, _, other in _edges(part)}
    assert not unused, "no module uses these edges: remove them from the table"


def test_the_table_has_no_circle():
    def reachable(part, seen=()):
        assert part not in seen, " -> ".join((*seen, part))
        for other in _MAY_IMPORT[part]:
            reachable(other, (*seen, part))

    for part in _MAY_IMPORT:
        reachable(part)


@pytest.mark.parametrize("library", sorted(_LIBRARIES))
def test_a_library_is_imported_exactly_where_the_table_says(library):
    def holds(part, module):
        return module == part or module.startswith(f"{part}.")

    users = [name for name, tree in _SOURCES.items() if library in {other.split(".")[0] for other in _imports(tree)}]
    allowed = _LIBRARIES[library]
    assert [user for user in users if not any(holds(part, user) for part in allowed)] == []
    assert [part for part in allowed if not any(holds(part, user) for user in users)] == [], "nothing uses it there"


def test_the_verifiers_workers_start_without_jax_and_transformers():
    worker = "dcmdp_jax.rewards.math.verifier_worker"
    reached = set().union(*map(_reached, (worker, *_imports(_SOURCES[worker]))))
    roots = {name.split(".")[0] for name in reached}
    assert not roots & {"jax", "flax", "optax", "transformers"}


@pytest.mark.parametrize("module", [name for name in _SOURCES if name.startswith("dcmdp_jax.tasks")])
def test_tasks_need_no_accelerator(module):
    assert "jax" not in {name.split(".")[0] for name in _reached(module)}


@pytest.mark.parametrize(
    "module", ["vllm.sidecar", "vllm.worker", "sidecar.wire", "sidecar.shared_memory", "sidecar.manifest"]
)
def test_the_sidecar_runs_where_there_is_no_jax(module):
    roots = {name.split(".")[0] for name in _reached(f"dcmdp_jax.rollout.{module}")}
    assert not roots & {"jax", "flax", "optax", "orbax", "ml_collections"}


@pytest.mark.parametrize("module", ["episode", "engine", "packing", "validation"])
def test_what_moves_numpy_arrays_knows_no_model(module):
    ours = {name for name in _reached(f"dcmdp_jax.rollout.{module}") if name.startswith("dcmdp_jax.")}
    allowed = {"errors", "types", "rollout", "rollout.engine", "rollout.episode", f"rollout.{module}"}
    assert ours <= {f"dcmdp_jax.{name}" for name in allowed}


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
