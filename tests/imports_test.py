"""The table of allowed imports, compared with the source. An unused edge fails too."""

import ast
import sys
from collections import Counter
from pathlib import Path

from tests.support.each import check_each

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("dcmdp_jax", "bin", "configs")

# Room, a folder of the package -> the rooms that it may import. All may import the modules beside
# the folders, which import no room.
_MAY_IMPORT = {
    "algorithm": "",
    "parallel": "",
    "models": "parallel",
    "config": "algorithm engines models",
    "rewards": "",
    "data": "rewards",
    "engines": "data models parallel",
    "environments": "data engines rewards",
    "evaluation": "data engines environments rewards",
    "observe": "",
    "run": "config data engines environments evaluation models observe parallel rewards",
    "training": "algorithm config data engines environments evaluation models observe parallel "
    "rewards run",
    "integrations": "",
    "plan": "config data engines models parallel run training",
    "probe": "algorithm config data engines models observe parallel rewards run",
    "commands": "config data engines evaluation models observe parallel plan probe run training",
}
_BESIDE = "modules beside the rooms"

# Library -> the parts that import it.
_LIBRARIES = {
    "ml_collections": ("dcmdp_jax.config.load", "configs", "dcmdp_jax.commands"),
    "absl": (),
    "jaxtyping": ("dcmdp_jax.types", "dcmdp_jax.algorithm", "dcmdp_jax.data", "dcmdp_jax.models"),
    "beartype": (),
    "optax": ("dcmdp_jax.training",),
    "orbax": ("dcmdp_jax.run.checkpoint", "dcmdp_jax.run.weights"),
    "flax": ("dcmdp_jax.models",),
    "safetensors": (
        "dcmdp_jax.models.hf_manifest",
        "dcmdp_jax.models.hf_weights",
        "dcmdp_jax.models.lora",
    ),
    "qwix": ("dcmdp_jax.models.quantize",),
    "gguf": ("dcmdp_jax.models.gguf_weights",),
    "math_verify": ("dcmdp_jax.rewards.math",),
    "yaml": ("dcmdp_jax.commands.flags",),
    "jinja2": ("dcmdp_jax.observe.page_kit",),
    "matplotlib": ("dcmdp_jax.observe", "dcmdp_jax.probe"),
    "scipy": ("dcmdp_jax.evaluation.estimators",),
    "tensorboardX": ("dcmdp_jax.observe",),
    "datasets": ("dcmdp_jax.data",),
    "reasoning_gym": (),
    "verifiers": (),
    "torch": (
        "dcmdp_jax.integrations",
        "dcmdp_jax.probe.columns.formats",
        "dcmdp_jax.probe.live.engines",
        "dcmdp_jax.engines.vllm.start_checks",
        "dcmdp_jax.engines.vllm.worker",
    ),
    "vllm": ("dcmdp_jax.engines.vllm.sidecar", "dcmdp_jax.engines.vllm.worker"),
    "ray": (
        "dcmdp_jax.engines.ray_cluster",
        "dcmdp_jax.engines.sidecar.ray_actors",
        "dcmdp_jax.engines.vllm.actor",
    ),
    "msgpack": ("dcmdp_jax.engines.sidecar.wire", "dcmdp_jax.parallel.hosts"),
    "httpx": ("dcmdp_jax.engines.http.client",),
    "huggingface_hub": ("dcmdp_jax.models.hf_hub",),
    "tensorflow": (),
}


def _modules():
    for package in _PACKAGES:
        for path in sorted((_ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(_ROOT).with_suffix("").parts)
            yield (
                name.removesuffix(".__init__"),
                ast.parse(path.read_text(encoding="utf-8"), str(path)),
            )


_SOURCES = dict(_modules())


def _typing_only(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


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
        elif top_level and (
            _typing_only(node) or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ):
            continue
        else:
            waiting += ast.iter_child_nodes(node)


def _room(module):
    """The folder that a module of the package is in; None for what is not of the package."""
    root, *rest = ["dcmdp_jax", "commands"] if module == "dcmdp_jax.__main__" else module.split(".")
    if root != "dcmdp_jax":
        return None
    return rest[0] if rest and (_ROOT / root / rest[0]).is_dir() else _BESIDE


def _reached(module):
    """Every module that importing `module` imports, of ours and of others."""
    seen = set()
    waiting = [module]
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
    assert "dcmdp_jax.models.decoder" in set(_imports(_SOURCES["dcmdp_jax.models.row_logprobs"]))
    tree = ast.parse(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\ndef f():\n    import "
        "b\nimport c"
    )
    assert set(_imports(tree)) == {"typing", "a", "b", "c"}
    assert set(_imports(tree, top_level=True)) == {"typing", "c"}


def _edges(room):
    """(importing module, imported module) of every import from a room into another."""
    for module, tree in _SOURCES.items():
        if _room(module) == room:
            # The package's public names are imported at their first use; type checkers see them.
            names = _imports(tree, top_level=module == "dcmdp_jax")
            yield from (
                (module, name) for name in names if _room(name) not in (None, room, _BESIDE)
            )


def test_the_table_has_the_rooms_on_disk():
    folders = {
        path.name for path in (_ROOT / "dcmdp_jax").iterdir() if (path / "__init__.py").exists()
    }
    assert folders == {*_MAY_IMPORT, "presets"}  # configs/, which is not of the package


def test_a_room_imports_exactly_the_rooms_of_its_row():
    def check(room):
        allowed = set(_MAY_IMPORT.get(room, "").split())
        forbidden = [
            f"{module} imports {name}"
            for module, name in _edges(room)
            if _room(name) not in allowed
        ]
        assert not forbidden
        unused = allowed - {_room(name) for _, name in _edges(room)}
        assert not unused, "no module uses these arrows: remove them from the table"

    check_each([*_MAY_IMPORT, _BESIDE], check)


def test_no_two_rooms_import_each_other_in_a_circle():
    def reachable(room, seen=()):
        assert room not in seen, " -> ".join((*seen, room))
        for other in _MAY_IMPORT[room].split():
            reachable(other, (*seen, room))

    for room in _MAY_IMPORT:
        reachable(room)


def test_no_files_import_each_other_in_a_circle():
    """Inside rooms too, imports in functions included; the package's public names are imported at
    their first use.
    """
    waiting = {
        name: {
            other for other in _imports(tree, top_level=name == "dcmdp_jax") if other in _SOURCES
        }
        - {name}
        for name, tree in _SOURCES.items()
    }
    while leaves := [name for name, imported in waiting.items() if not imported & waiting.keys()]:
        for name in leaves:
            del waiting[name]
    assert {name: sorted(imported & waiting.keys()) for name, imported in waiting.items()} == {}


def test_the_package_does_not_import_its_commands():
    outside = {"bin", "configs", "benchmarks", "tests", "examples"}
    found = [
        module
        for module, tree in _SOURCES.items()
        if module.startswith("dcmdp_jax") and _room(module) != "commands"
        if outside & {name.split(".")[0] for name in _imports(tree)}
    ]
    assert found == []


def test_an_engine_knows_no_other_engine():
    kinds = ("local", "vllm", "http", "sidecar")
    found = []
    for module, tree in _SOURCES.items():
        kind = module.removeprefix("dcmdp_jax.engines.").partition(".")[0]
        others = tuple(
            f"dcmdp_jax.engines.{other}."
            for other in ("local", "vllm", "http", "registry")
            if other != kind
        )
        others += ("dcmdp_jax.engines.vllm_common.",) * (kind == "sidecar")
        if kind in kinds:
            found += [
                f"{module} imports {name}"
                for name in _imports(tree)
                if f"{name}.".startswith(others)
            ]
    assert found == []


def test_a_library_is_imported_exactly_where_the_table_says():
    def holds(part, module):
        return module == part or module.startswith(f"{part}.")

    imported = {
        name: {other.split(".")[0] for other in _imports(tree)} for name, tree in _SOURCES.items()
    }
    for library, allowed in _LIBRARIES.items():
        users = [name for name, libraries in imported.items() if library in libraries]
        assert [user for user in users if not any(holds(part, user) for part in allowed)] == [], (
            library
        )
        unused = [part for part in allowed if not any(holds(part, user) for user in users)]
        assert unused == [], f"nothing uses {library} there"


def test_the_verifiers_workers_start_without_jax_and_transformers():
    modules = ("dcmdp_jax.rewards.isolated_worker", "dcmdp_jax.rewards.math.equivalence")
    reached = set().union(*map(_reached, modules))
    assert not {name.split(".")[0] for name in reached} & {"jax", "flax", "optax", "transformers"}


def _roots(module):
    return {name.split(".")[0] for name in _reached(f"dcmdp_jax.{module}")}


_JAX = {"jax", "flax", "optax", "orbax", "ml_collections"}


def test_problems_and_prompts_need_no_accelerator():
    for module in ("problems", "prompts", "arithmetic"):
        assert "jax" not in _roots(f"data.{module}"), module


def test_the_sidecar_runs_where_there_is_no_jax():
    for module in ("vllm.sidecar", "vllm.worker", "sidecar.wire", "sidecar.segments"):
        assert not _roots(f"engines.{module}") & _JAX, module


def test_what_runs_in_other_peoples_trainers_needs_no_jax_and_no_room():
    frameworks = (
        "dc_grpo_torch",
        "trl_trainer",
        "verl_hooks",
        "skyrl_trainer",
        "slime_hooks",
        "prime_rl_loss",
    )
    for module in ("record", *(f"integrations.{name}" for name in frameworks)):
        assert not _roots(module) & _JAX, module
        assert all(
            _room(name) in (None, "integrations", _BESIDE)
            for name in _reached(f"dcmdp_jax.{module}")
        ), module
    assert _roots("record") - set(sys.stdlib_module_names) == {"dcmdp_jax", "numpy"}


def test_a_recording_is_read_and_explained_without_an_accelerator():
    for module in ("analysis", "formats", "over_training", "page", "recording"):
        assert not _roots(f"probe.columns.{module}") & {*_JAX, "torch", "matplotlib"}, module


def test_what_moves_numpy_arrays_knows_no_model():
    data = ("columns", "episode", "top_logprobs", "packing", "row_layout")
    allowed = {
        "errors",
        "types",
        "version",
        "data",
        "engines",
        "engines.protocol",
        *(f"data.{name}" for name in data),
    }
    for module in ("data.episode", "data.packing", "engines.protocol", "engines.validation"):
        ours = {name for name in _reached(f"dcmdp_jax.{module}") if name.startswith("dcmdp_jax.")}
        assert ours <= {f"dcmdp_jax.{name}" for name in (*allowed, module)}, module


def test_the_loss_functions_can_be_imported_alone():
    assert "jax" not in {name.split(".")[0] for name in _reached("dcmdp_jax")}
    reached = _reached("dcmdp_jax.algorithm.dc_grpo")
    assert "dcmdp_jax.algorithm.losses" in reached
    beside = ("dcmdp_jax.types", "dcmdp_jax.version")
    assert all(
        _room(name) == "algorithm" or name in beside for name in reached if "dcmdp_jax." in name
    )
    libraries = {name.split(".")[0] for name in reached} - set(sys.stdlib_module_names)
    assert libraries == {"dcmdp_jax", "jax", "jaxtyping", "numpy"}


def test_library_code_prints_nothing_and_unpickles_nothing():
    for module in [name for name in _SOURCES if name.startswith("dcmdp_jax")]:
        names = {
            node.func.id
            for node in ast.walk(_SOURCES[module])
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert _room(module) == "commands" or "print" not in names, module
        assert not {"pickle", "dill", "cloudpickle"} & {
            name.split(".")[0] for name in _imports(_SOURCES[module])
        }, module


def test_no_function_takes_any_config():
    """A type that hides the import would hide an arrow, or a circle, from the tests above."""
    found = []
    for module, tree in _SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and node.arg == "config" and node.annotation is not None:
                found += (
                    [f"{module}:{node.lineno}"] if ast.unparse(node.annotation) == "Any" else []
                )
    # verl's config, in verl.
    assert [place for place in found if not place.startswith("dcmdp_jax.integrations.")] == []


# Names that several classes or files still have. A command's module is named as its command, and is
# not counted.
_SHARED_CLASSES = {"Sampled"}
_SHARED_FILES = {"engine", "memory", "page", "protocol", "weights", "worker"}


def test_no_two_classes_and_no_two_files_share_a_name():
    ours = {name: tree for name, tree in _SOURCES.items() if name.startswith("dcmdp_jax.")}
    classes = Counter(
        node.name for tree in ours.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    commands = {name.rpartition(".")[2] for name in ours if _room(name) == "commands"}
    places = [name for name in ours if _room(name) not in ("commands", "presets") and "." in name]
    files = Counter(
        name.rpartition(".")[2]
        for name in places
        if (_ROOT / f"{name.replace('.', '/')}.py").exists()
    )
    assert {name for name, count in classes.items() if count > 1} <= _SHARED_CLASSES
    assert {name for name, count in files.items() if count > 1} - commands <= _SHARED_FILES


def test_no_test_file_needs_torch_to_be_collected():
    # The extra `test` has none: a file that imports it first asks pytest for it, or does so in a
    # function.
    def check(path):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if 'importorskip("torch"' in ast.unparse(node).replace("'", '"'):
                return
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] == "torch" for name in names), path

    check_each(sorted((Path(__file__).parent).rglob("*_test.py")), check)
