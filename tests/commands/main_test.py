"""`dcmdp`: the wheel's command, from an empty directory; presets by name; the public names of the
package.
"""

import contextlib
import importlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from unittest import mock

import pytest

import dcmdp_jax
from dcmdp_jax.commands import main as main_module
from dcmdp_jax.commands import parsers
from dcmdp_jax.commands.flags import load_config
from dcmdp_jax.errors import UserError
from dcmdp_jax.observe.metrics_io import MetricsWriter, read_metrics
from tests.support.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel's content, unpacked, with the script that an installer writes for its entry
    point.
    """
    pytest.importorskip("setuptools", minversion="77")
    base = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("dcmdp_jax", "configs"):
        shutil.copytree(_ROOT / name, base / "source" / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(_ROOT / name, base / "source")
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run(
        [sys.executable, "-c", build],
        cwd=base / "source",
        check=True,
        capture_output=True,
        timeout=HANGS_S,
    )
    [built] = (base / "source" / "dist").glob("*.whl")
    zipfile.ZipFile(built).extractall(base / "installed")
    declared = next((base / "installed").glob("*/entry_points.txt")).read_text()
    [entry] = re.findall(r"^dcmdp = (\S+):(\S+)$", declared, re.M)
    script = base / "dcmdp"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom {entry[0]} import {entry[1]}\n"
        f"if __name__ == '__main__':\n    sys.exit({entry[1]}())\n"
    )
    script.chmod(0o755)
    return base


@pytest.fixture
def dcmdp(wheel, tmp_path, run_environment):
    """Runs the command from an empty directory with an empty home; the checkout is not on its
    path.
    """
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "work").mkdir()
    environment = run_environment | {"HOME": str(home), "PYTHONPATH": str(wheel / "installed")}

    def run(*words, **more):
        return subprocess.run(
            [str(wheel / "dcmdp"), *words],
            cwd=tmp_path / "work",
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=HANGS_S,
        )

    return run


def test_the_wheel_holds_one_package_and_the_presets(wheel):
    assert {path.name for path in (wheel / "installed").iterdir()} == {
        "dcmdp_jax",
        f"dcmdp_jax-{dcmdp_jax.__version__}.dist-info",
    }
    presets = wheel / "installed" / "dcmdp_jax" / "presets"
    # Without configs/studies, which research/ runs.
    files = {path.name for path in (_ROOT / "configs").glob("*.py")}
    assert {str(path.relative_to(presets)) for path in presets.rglob("*.py")} == files
    for name in ("py.typed", "__init__.pyi"):
        assert (wheel / "installed" / "dcmdp_jax" / name).exists()


@pytest.mark.long
def test_a_preset_trains_and_a_copied_file_means_the_same(dcmdp, tmp_path):
    done = dcmdp("train", "--config=demo:debug")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "work" / "runs" / "demo_debug"
    assert done.stdout.splitlines()[-1] == "report: runs/demo_debug/report.html"
    assert read_metrics(run)["reward/mean"][0].tolist() == [1, 2]
    shutil.copy(_ROOT / "configs" / "demo.py", tmp_path / "work" / "mine.py")
    ours, theirs = (
        dcmdp("train", f"--config={name}:debug", "--print-config") for name in ("mine.py", "demo")
    )
    assert (
        ours.returncode == 0
        and ours.stdout == theirs.stdout
        and "run_dir = 'runs/demo_debug'" in ours.stdout
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            (),
            "a command is missing; there are train, sft, evaluate, report, view, probe, "
            "plan, convert,",
        ),
        (("sweep",), "sweep: no such command; it is `python -m research.studies` in a checkout"),
        (("trian", "--config=demo"), "trian: no such command; did you mean train?"),
        (("--config=demo",), "--config=demo: no such command; there are train, sft, evaluate, "),
        (("train", "--debug"), "--config is missing; for example --config=demo"),
    ],
)
def test_a_wrong_command_is_one_line(dcmdp, words, line):
    done = dcmdp(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"error: {line}")
    assert done.stderr.count("\n") == 1 or (
        "--debug" in words and done.stderr.startswith("Traceback")
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("dmo", "--config: no file dmo; did you mean demo?"),
        ("configs/demo.py", "--config: no file configs/demo.py; did you mean demo?"),
        ("zzz", "--config: no file zzz; there are demo, demo_moe, demo_vllm, qwen3_30b_a3b, "),
        ("base", "--config: no file base; there are demo, "),
        ("d" * 5000, "--config: no file ddd"),
        ("demo:gpro", "--config: demo: config argument 'gpro': allowed are grpo, debug"),
    ],
)
def test_a_wrong_preset_is_one_line(given, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        load_config(given)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_help_and_version(dcmdp):
    assert dcmdp("--version").stdout == f"dcmdp_jax {dcmdp_jax.__version__}\n"
    assert re.findall(r"^  (\w+) ", dcmdp("--help").stdout, re.M) == list(main_module.COMMANDS)


@pytest.mark.parametrize("name", main_module.COMMANDS)
@pytest.mark.parametrize("start", ["dcmdp", "python -m bin."])
def test_the_help_of_a_command_shows_how_it_was_started(start, name, monkeypatch, capsys):
    command = f"dcmdp {name}" if start == "dcmdp" else f"python -m bin.{name}"
    monkeypatch.setattr(sys, "argv", [command if start == "dcmdp" else f"bin/{name}.py", "--help"])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"dcmdp_jax.commands.{name}").main(sys.argv)
    assert left.value.code == 0 and capsys.readouterr().out.startswith(f"usage: {command} ")


def test_every_command_of_bin_is_one_of_dcmdp():
    assert {path.stem for path in (_ROOT / "bin").glob("[!_]*.py")} == set(main_module.COMMANDS)


def test_modules_of_the_working_directory_can_be_named(dcmdp, tmp_path):
    (tmp_path / "work" / "mine.py").write_text(
        "import beside\nfrom configs import demo\n\n\n"
        "def get_config(arg=''):\n    return beside.longer(demo.get_config(arg))\n"
    )
    (tmp_path / "work" / "beside.py").write_text(
        "def longer(config):\n    config.training.steps = 7\n    return config\n"
    )
    done = dcmdp("train", "--config=mine.py:debug", "--print-config")
    assert "* training.steps = 7 " in done.stdout, done.stderr


_LOOK = """
import os, pathlib, sys
from configs.demo import get_config
started_with = pathlib.Path("/proc/self/environ").read_text().split("\\0")
print(any(word.startswith("GLIBC_TUNABLES=glibc.malloc.hugetlb=") for word in started_with))
print("GLIBC_TUNABLES" in os.environ, sys.modules.get("torch", "absent"))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_the_command_prepares_its_process(dcmdp, tmp_path):
    """It started again with glibc's settings, which its children do not inherit, and PyTorch looks
    not installed.
    """
    (tmp_path / "work" / "look.py").write_text(_LOOK)
    assert dcmdp("train", "--config=look.py", "--print-config").stdout.splitlines()[:2] == [
        "True",
        "False None",
    ]


def test_configs_of_a_project_come_before_the_presets(tmp_path, monkeypatch):
    project = tmp_path / "configs"
    project.mkdir()
    (project / "base.py").write_text("from dcmdp_jax.presets.base import *\nSTEPS = 9\n")
    (project / "mine.py").write_text(
        "from configs import base, demo\n\n\ndef get_config(arg=''):\n    config = "
        "demo.get_config(arg)\n    config.training.steps = base.STEPS\n    return config\n"
    )
    assert load_config(str(project / "mine.py")).training.steps == 9
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/mine.py").training.steps == 9
    # A preset takes nothing of the project's.
    (project / "base.py").write_text("raise RuntimeError('not mine')\n")
    assert load_config("demo").training.steps == 40


def test_a_config_file_leaves_the_modules_as_they_were(tmp_path):
    from configs import base

    path = tmp_path / "mine.py"
    path.write_text(
        "from configs import base, demo\n\n\ndef get_config(arg=''):\n    base.marked = True\n"
        "    return demo.get_config(arg)\n"
    )
    load_config(str(path))
    assert sys.modules["configs.base"] is base and not hasattr(base, "marked")


def test_overrides_from_python_are_those_of_the_command_line():
    config = load_config("demo:debug", {"training.seed": 3, "rollout.precision": "exact"})
    assert (config.training.seed, config.run_dir) == (3, "runs/demo_debug-precision=exact-seed=3")
    with pytest.raises(
        UserError, match="config.training.stpes: no such setting; did you mean 'training.steps'?"
    ):
        load_config("demo", {"training.stpes": 3})


def test_the_package_is_imported_without_jax_and_has_its_public_names():
    program = (
        "import sys, dcmdp_jax; print(dcmdp_jax.__version__, 'jax' in sys.modules, 'numpy' in "
        "sys.modules)\nprint(*(name for name in dcmdp_jax.__all__ if getattr(dcmdp_jax, name) is "
        "None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
    )
    assert (done.stdout, done.stderr) == (f"{dcmdp_jax.__version__} False False\n\n", "")
    with pytest.raises(AttributeError, match="module 'dcmdp_jax' has no attribute 'trian'"):
        _ = dcmdp_jax.trian


def test_type_checkers_see_the_names_of_the_table():
    source = (_ROOT / "dcmdp_jax" / "__init__.pyi").read_text()
    typed = re.findall(r"(\w+) as (\w+)", source)
    assert {name for name, _ in typed} == set(dcmdp_jax.__all__) and all(
        name == again for name, again in typed
    )
    for module, names in re.findall(r"^from dcmdp_jax\.([\w.]+) import (.*)$", source, re.M):
        for name in names.replace(" as ", ",").split(","):
            assert dcmdp_jax._MODULES.get(name.strip(), "version") == module


def test_the_version_is_declared_once():
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "dcmdp_jax.version.__version__"
    }


def test_the_readme_s_python_trains(tmp_path, monkeypatch):
    [code] = re.findall(
        r"```python\n(.*?)```", (_ROOT / "docs" / "start.md").read_text(), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "readme.py").write_text(code)
    found = runpy.run_path(str(tmp_path / "readme.py"))
    assert found["run_dir"] == Path("runs/demo_debug-tolerance=0.001")
    assert (found["run_dir"] / "report.html").exists()
    steps, multipliers = found["metrics"]["dual/multiplier"]
    assert steps.tolist() == [1, 2] and multipliers[0] == pytest.approx(0.1)


def test_the_documented_table_of_metrics_is_one_of_pandas(tmp_path):
    """An evaluation at step 0, two steps: rows 0, 1, 2, and nothing where a metric was not
    recorded.
    """
    pandas = pytest.importorskip("pandas", reason="pandas is installed with datasets, extra hub")
    [expression] = re.findall(r"^# (pandas\..*)$", (_ROOT / "docs" / "start.md").read_text(), re.M)
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        writer.write(0, {"eval/t/avg@1": 0.25})
        for step in (1, 2):
            writer.write(step, {"reward/mean": step / 4})
    table = eval(expression, {"pandas": pandas, "metrics": dcmdp_jax.read_metrics(tmp_path)})
    assert table.index.tolist() == [0, 1, 2]
    assert table["reward/mean"].tolist()[1:] == [0.25, 0.5] and table["eval/t/avg@1"].count() == 1


def test_train_takes_a_config_dict_and_refuses_what_is_none(tmp_path):
    with pytest.raises(
        UserError, match="config: got 3, must be a Config, a ConfigDict or a preset's name"
    ):
        dcmdp_jax.train(3)
    with pytest.raises(UserError, match="config.rollout.group_size: got 1, must be at least 2"):
        dcmdp_jax.train({"rollout": {"group_size": 1}, "run_dir": str(tmp_path / "run")})


def _example(name):
    """The words of the example in a command's help."""
    return getattr(parsers, name)().format_help().splitlines()[-1].split()


@pytest.mark.parametrize("name", main_module.COMMANDS)
def test_a_command_without_its_dependencies_says_so_in_one_line(name):
    """As in a trainer's environment, where the package was installed without dependencies."""
    program = (
        "import sys; sys.modules['ml_collections'] = sys.modules['jax'] = None; "
        f"sys.argv = {_example(name)}; "
        "from dcmdp_jax.commands.main import console; console()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=_ROOT, timeout=HANGS_S
    )
    assert done.returncode == 2
    assert re.fullmatch(
        f"error: dcmdp {name}: the module (jax|ml_collections) is not installed. Run it in an "
        "environment of its own, made by pip install PATH_OF_A_CHECKOUT without --no-deps; a "
        "trainer's environment needs only the recorder and the hooks",
        done.stderr.splitlines()[-1],
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train", "demo"), "demo: no such argument; did you mean --config=demo?"),
        (("convert",), "the following arguments are required: {hf-check,from-gguf,export}"),
        (("report", "--debug"), "the following arguments are required: RUNDIR"),
        (("evaluate", "--top-p", "2"), "argument --top-p: got 2, must be in (0, 1]"),
    ],
)
def test_wrong_arguments_are_refused_before_the_command_is_imported(words, line, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"dcmdp {words[0]}", *words[1:]])
    monkeypatch.setattr(main_module.importlib, "import_module", None)
    with pytest.raises(UserError) as refused:
        main_module._command(words[0])([])
    assert str(refused.value) == line


def test_settings_are_left_to_the_command(monkeypatch):
    imported = []
    monkeypatch.setattr(main_module.importlib, "import_module", lambda name: mock.Mock(main=name))
    for words in (["--config=demo", "--config.training.steps", "3"], ["--lr=1"]):
        monkeypatch.setattr(sys, "argv", ["dcmdp train", *words])
        imported.append(main_module._command("train"))
    assert imported == ["dcmdp_jax.commands.train"] * 2


@pytest.mark.parametrize("name", main_module.COMMANDS)
def test_the_help_of_a_command_needs_neither_jax_nor_a_missing_library(name):
    program = (
        "import sys; sys.modules['ml_collections'] = sys.modules['jax'] = None; "
        f"sys.argv = ['dcmdp', '{name}', '--help']; "
        "from dcmdp_jax.commands.main import console; console()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=_ROOT, timeout=HANGS_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: dcmdp {name} ")


@pytest.mark.parametrize("name", main_module.COMMANDS)
def test_the_help_ends_with_an_example_that_the_command_takes(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = getattr(parsers, name)().format_help()
    *_, title, example = shown.splitlines()
    program, command, *words = example.split()
    assert (title, program, command) == ("example:", "dcmdp", name)
    settings = [word for word in words if word.startswith("--config.")]
    assert getattr(parsers, name)().parse_args([word for word in words if word not in settings])
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_help_is_a_command_too(word, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dcmdp", "help", "plan"])
    with pytest.raises(SystemExit) as left:
        main_module.console()
    assert left.value.code == 0 and capsys.readouterr().out.startswith("usage: dcmdp plan ")
    main_module._without_command(["dcmdp", word])
    shown = capsys.readouterr().out
    assert [name for name in main_module.COMMANDS if f"\n  {name} " not in shown] == []
