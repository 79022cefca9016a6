"""README.md, BUILD.md, docs/ and benchmarks/README.md name existing settings, files, modules,
metrics and links.
"""

import json
import re
from pathlib import Path

import pytest

from configs import base
from dcmdp_jax.commands import parsers
from dcmdp_jax.commands.flags import parse
from dcmdp_jax.commands.main import COMMANDS
from dcmdp_jax.config.checks import BUILT_IN_REWARDS
from dcmdp_jax.observe.alarms import ALARMS
from dcmdp_jax.observe.metric_names import METRICS
from dcmdp_jax.probe.columns.formats import FORMATS
from docs.stored_outputs import shown_text

_ROOT = Path(__file__).resolve().parents[1]
_NAMES = ("README.md", "BUILD.md", "CONTRIBUTING.md", "benchmarks/README.md")
_PAGES = [*(_ROOT / name for name in _NAMES), *(_ROOT / "docs").glob("*.md")]
_TEXTS = {page: page.read_text(encoding="utf-8") for page in _PAGES}


def _settings(values, prefix=""):
    for name, value in values.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _settings(value, f"{prefix}{name}.")


_SETTINGS = set(_settings(base.get_config().to_dict()))
_SECTIONS = "|".join(sorted(name for name in _SETTINGS if "." not in name))


def test_named_settings_exist():
    for page, text in _TEXTS.items():
        named = re.findall(r"--config\.([\w.]+\w)", text)
        # Not the modules of the same names: `task.py`.
        named += re.findall(rf"`((?:{_SECTIONS})\.(?!py`)[\w.]*\w)(?:=[^`]*)?`", text)
        assert set(named) - _SETTINGS - {"section.name"} == set(), page


def test_the_pages_name_every_reward():
    text = " ".join(text for page, text in _TEXTS.items() if page.name != "settings.md")
    assert [name for name in BUILT_IN_REWARDS if not re.search(rf"(?<![\w.])`{name}`", text)] == []
    assert all(
        re.search(rf"\b{name}\b", _TEXTS[_ROOT / "docs" / "settings.md"])
        for name in BUILT_IN_REWARDS
    )


def test_the_page_has_the_template_as_yaml(tmp_path):
    text = _TEXTS[_ROOT / "docs" / "start.md"]
    [block] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block)
    given = parse(["train", f"--config={tmp_path / 'mine.yaml'}"]).config
    expected = parse(["train", "--config=template", "--config.run_dir=runs/mine"]).config
    assert given == expected


def test_named_files_modules_and_links_exist():
    for page, text in _TEXTS.items():
        for path in re.findall(r"\bconfigs/\w+\.py\b", text):
            assert (_ROOT / path).is_file(), (page, path)
        for module in re.findall(r"python -m ((?:bin|benchmarks|research)\.[a-z]\w*)", text):
            place = _ROOT / module.replace(".", "/")
            assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), (
                page,
                module,
            )
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / link).exists(), (page, link)


def test_named_commands_and_their_options_exist():
    rooms = "".join(
        path.read_text(encoding="utf-8") for path in (_ROOT / "dcmdp_jax/commands").glob("*.py")
    )
    known = set(re.findall(r"\"(--[a-z][\w-]*)\"", rooms)) | {"--help"}
    seen = 0
    for page, text in _TEXTS.items():
        for name, words in re.findall(
            r"(?:`|^    )(?:dcmdp |python -m bin\.)([a-z_]+)\b([^\n`|]*)", text, re.M
        ):
            assert name in COMMANDS, (page, name)
            options = {
                word for word in re.findall(r"(?<= )--[a-z][\w-]*", words) if word != "--config"
            }
            assert options - known == set(), (page, name)
            seen += 1
    assert seen > 50


def test_named_metrics_exist():
    prefixes = "|".join(sorted({name.partition("/")[0] for name in METRICS if "{" not in name}))
    for page, text in _TEXTS.items():
        assert set(re.findall(rf"`((?:{prefixes})/\w+)`", text)) - set(METRICS) == set(), page


def test_the_files_of_jobs_exist_and_the_slow_ones_slowest_first():
    lines = [
        line.split() for line in (_ROOT / "tests" / "slow_files.txt").read_text().splitlines()[1:]
    ]
    assert all((_ROOT / name).is_file() for _, name in lines)
    jobs = [line.split() for line in (_ROOT / "tests" / "jobs.txt").read_text().splitlines()[1:]]
    for job, name in jobs:
        path, _, test = name.partition("::")
        assert job in ("engines", "pages", "first") and (_ROOT / path).is_file(), name
        # `make test` names single tests of long files.
        assert f"def {test}" in (_ROOT / path).read_text() and (job == "first" or not test), name
    assert [int(seconds) for seconds, _ in lines] == sorted(
        (int(seconds) for seconds, _ in lines), reverse=True
    )


@pytest.mark.parametrize(
    "notebook", sorted((_ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem
)
def test_a_notebook_installs_the_checkout_around_it_and_says_what_to_do_without_one(
    notebook, tmp_path, monkeypatch, capsys
):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    [code] = [
        "".join(cell["source"])
        for cell in cells
        if "skip-execution" in cell["metadata"].get("tags", [])
    ]
    [installed] = re.findall(r"^%pip install --quiet (.*)$", code, re.M)
    code = re.sub(
        r"%pip .*$", f"print({installed!r})", code, count=1, flags=re.M
    )  # a command of IPython
    monkeypatch.chdir(notebook.parent)
    exec(code, {})
    assert capsys.readouterr().out == f"{installed}\n" and Path(installed).resolve() == _ROOT
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    # It raises, so that the cells below do not run.
    with pytest.raises(SystemExit) as stopped:
        exec(code, {})
    assert str(stopped.value) == (
        "In Colab: make dcmdp_jax.zip in a checkout by `git archive --prefix=dcmdp_jax/ "
        "-o dcmdp_jax.zip HEAD`, upload it, run `!unzip -q dcmdp_jax.zip` and "
        "`%cd dcmdp_jax/docs/notebooks` in a new cell, and then this one again"
    )


def test_the_probe_s_tables_have_every_format_and_every_alert():
    page = _TEXTS[_ROOT / "docs" / "probe.md"]
    rows = {}
    for heading in ("| `--format` ", "| alert |"):
        table = page[page.index(heading) :].partition("\n\n")[0].splitlines()
        first_cells = [row.split("|")[1] for row in table[2:]]
        rows[heading] = re.findall(r"`([\w-]+)`", " ".join(first_cells))
    formats, alerts = rows.values()
    assert sorted(formats) == sorted(FORMATS.keys() - {"recorder"} | set(parsers._RECORDED_BY))
    assert sorted(alerts) == sorted(ALARMS)


def test_notebooks_keep_their_outputs_without_paths_of_a_machine():
    for path in (_ROOT / "docs" / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
        assert sum(map(bool, outputs)) >= 2, f"python -m docs.stored_outputs {path.stem}"
        shown = json.dumps(outputs)
        assert re.findall(r"/(?:tmp|home|root|work|usr)/", shown) == [], path.name
        assert '"error"' not in shown, path.name
    said = f"2026-11-29 12:13:48  starting: 4 s\r\nwrote /tmp/tmpab_1/x {_ROOT}/docs\r\n"
    assert shown_text(said) == "wrote OUT/x docs\n"


_PROGRAMS = "dcmdp|python|make|pip|hf"


def _uncommented(text):
    """Command lines whose remark is not behind a #, so that pasting it hands the shell its words."""
    pattern = rf"^    (?:{_PROGRAMS}) (?:(?!  )[^\n#])*   *(?![#\s\\])[^\n]+"
    return re.findall(pattern, text, re.MULTILINE)


def test_a_remark_behind_a_command_is_a_comment():
    said = "    dcmdp train --config=configs/demo.py:grpo      the baseline\n"
    assert _uncommented(said) == [said.rstrip()]
    assert _uncommented(said.replace("the", "# the")) == []
    programs = [*_ROOT.glob("configs/**/*.py"), *_ROOT.glob("examples/**/*.py")]
    programs += [*_ROOT.glob("dcmdp_jax/commands/*.py"), *_ROOT.glob("research/**/*.py")]
    texts = {**_TEXTS, **{path: path.read_text(encoding="utf-8") for path in programs}}
    assert {path: _uncommented(text) for path, text in texts.items() if _uncommented(text)} == {}
