"""The site of docs/*.md and README.md: `make docs` builds it, notebooks too."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

from dcmdp_jax.version import REPOSITORY

_ROOT = Path(__file__).resolve().parents[1]
_PAGES = {"README.md": "index.md", "BUILD.md": "build.md"}
"""Files above docs/ that are pages of the site."""

project = "dcmdp_jax"
author = copyright = "The dcmdp_jax maintainers"
html_title = "dcmdp_jax"
extensions = ["myst_nb"]
exclude_patterns = ["test_long.md"]
html_theme = "sphinx_book_theme"
html_theme_options = {
    "repository_url": REPOSITORY,
    "path_to_docs": "docs",
    "use_repository_button": bool(REPOSITORY),
    "show_navbar_depth": 1,
    "navbar_persistent": [],
}
html_static_path = ["static"]
html_css_files = ["site.css"]

nitpicky = False
myst_heading_anchors = 4
default_role = "code"
pygments_style = "friendly"

# Notebooks run at each build, without network and without the cell that installs the package
# (tagged skip-execution).
nb_execution_mode = os.environ.get("DCMDP_NOTEBOOKS", "force")
nb_execution_timeout = 1800
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PIP_NO_INDEX", "1")
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")])
)


def _on_the_site(text: str, folder: Path) -> str:
    """Links to files that are no pages lead to the repository, or name the file."""

    def replaced(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        path = (folder / target).resolve()
        if not target or not path.exists() or not path.is_relative_to(_ROOT):
            return match[0]
        name = path.relative_to(_ROOT).as_posix()
        anchor = f"#{anchor}" if anchor else ""
        inside = name.removeprefix("docs/")
        if name in _PAGES:
            return f"[{match[1]}](/{_PAGES[name]}{anchor})"
        if name.startswith("docs/") and path.is_file() and inside not in exclude_patterns:
            return f"[{match[1]}](/{inside}{anchor})"
        if REPOSITORY:
            return f"[{match[1]}]({REPOSITORY}/blob/main/{name}{anchor})"
        return f"`{name}`" if match[1].strip("`") in name else f"{match[1]} (`{name}`)"

    return re.sub(r"(?<!!)\[([^\[\]]*)\]\(([^()\s:]+)\)", replaced, text)


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(page))
    if path.suffix != ".md":
        return
    if found := re.fullmatch(r"```\{include\} (\S+)\n```\n", source[0]):
        path = (path.parent / found[1]).resolve()
        source[0] = path.read_text(encoding="utf-8")
    source[0] = _on_the_site(source[0], path.parent)


def setup(app: Sphinx) -> None:
    """Connect the change of text above."""
    app.connect("source-read", _read)
