"""Library code names its own arguments in messages; `config/checks.py` alone says which settings
those are.
"""

import ast
import re
from pathlib import Path

import pytest

from dcmdp_jax.config import checks
from dcmdp_jax.config.settings import setting_names
from dcmdp_jax.engines.registry import ENGINES
from dcmdp_jax.errors import ArgumentError, UserError

_ROOT = Path(__file__).resolve().parents[1] / "dcmdp_jax"
_FILES = [
    path
    for room in ("engines", "parallel", "models", "rewards", "data")
    for path in (_ROOT / room).rglob("*.py")
]
_SECTIONS = sorted({name.partition(".")[0] for name in setting_names()})
_SETTING = re.compile(
    rf"\bconfig\.({'|'.join(_SECTIONS)})\b|\b({'|'.join(map(re.escape, (n for n in setting_names() if '.' in n)))})\b"
)


def _texts(path):
    """Every text of a module that is no docstring and no name of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bodies = (node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list))
    documented = {
        id(statement.value)
        for body in bodies
        for statement in body
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documented
        ):
            yield node.lineno, node.value


def test_the_walk_sees_what_it_forbids():
    assert _SETTING.search("config.rollout: got 3") and _SETTING.search("or raise hosts.timeout_s")
    assert not _SETTING.search("config.json: not valid JSON") and not _SETTING.search(
        "model.layers.0"
    )
    assert any("must divide the model's" in text for path in _FILES for _, text in _texts(path))


def test_library_code_names_no_setting():
    found = [
        f"{path}:{line}: {text}"
        for path in _FILES
        for line, text in _texts(path)
        if _SETTING.search(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("engine", "message", "said"),
    [
        (
            "vllm",
            "replicas: got 3 of `tensor_parallel_size`=2 devices each, name more in "
            "`visible_devices`",
            "config.rollout.vllm.replicas: got 3 of rollout.vllm.tensor_parallel_size=2 devices "
            "each, name more in rollout.vllm.visible_devices",
        ),
        (
            "vllm",
            "precision: got 'fp8'; choose `compute_dtype`",
            "config.rollout.precision: got 'fp8'; choose rollout.compute_dtype",
        ),
        ("local", "tensor: got 3", "config.rollout.local.tensor: got 3"),
        # Not an argument of this engine, or no argument at all.
        ("local", "replicas: got 3", "replicas: got 3"),
        ("local", "weights: `layers` is missing", "weights: `layers` is missing"),
    ],
)
def test_arguments_become_settings_in_one_place(engine, message, said):
    with pytest.raises(UserError) as raised, checks.as_settings(checks.of_engine(ENGINES[engine])):
        raise ArgumentError(*message.split(": ", 1))
    assert str(raised.value) == said


def test_what_an_argument_holds_stays_behind_its_setting():
    local = checks.of_engine(ENGINES["local"])
    error = ArgumentError("mesh", "4 does not", " (tensor=4, expert=1)")
    assert str(error) == "mesh (tensor=4, expert=1): 4 does not"
    with pytest.raises(UserError) as raised, checks.as_settings(local):
        raise error
    assert str(raised.value) == "config.rollout.local (tensor=4, expert=1): 4 does not"


def test_every_setting_that_an_argument_becomes_is_one():
    known = (
        set(setting_names())
        | set(_SECTIONS)
        | {"rollout.local", "rollout.vllm", "rollout.engine_args"}
    )
    for names in (
        checks.HOSTS,
        checks.MESH,
        checks.EPISODES,
        checks.PACKING,
        checks.REWARDS,
        *map(checks.of_engine, ENGINES.values()),
    ):
        for setting in names.values():
            for part in re.split(" and | or ", setting):
                assert part.partition("=")[0] in known or part.startswith("rollout.engine_args."), (
                    part
                )
